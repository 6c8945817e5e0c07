//! The files of the log: names, rotation, and their total size.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, ErrorKind, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use pointsman_decision_log::{FILE_PREFIX, FILE_SUFFIX};
use pointsman_workers::unix_ms;

/// Maximum number of names that are tried for a new file, because another gateway may write to the same
/// directory.
const MAX_NAMES: u32 = 100;

/// Writes frames to files of bounded size.
#[derive(Debug)]
pub(super) struct Files {
    dir: PathBuf,
    file_bytes: u64,
    total_bytes: u64,
    current: Option<Current>,
}

#[derive(Debug)]
struct Current {
    file: File,
    path: PathBuf,
    length: u64,
}

impl Files {
    pub(super) fn new(dir: PathBuf, file_bytes: u64, total_bytes: u64) -> Self {
        Self { dir, file_bytes, total_bytes, current: None }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether a frame of this length needs a new file, because no file is open, or the open one is full or
    /// was removed.
    pub(super) fn needs_new(&self, bytes: usize) -> bool {
        self.current.as_ref().is_none_or(|current| {
            let is_full = current.length + bytes as u64 > self.file_bytes;
            is_full || current.file.metadata().is_ok_and(|metadata| metadata.nlink() == 0)
        })
    }

    /// Creates the directory.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub(super) fn make_dir(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)
    }

    /// Begins a new file, whose first frame is `header`. Removes the oldest files, so that the new file can
    /// grow to its full size.
    ///
    /// # Errors
    /// A file cannot be listed, removed or written.
    pub(super) fn begin(&mut self, header: &[u8]) -> io::Result<()> {
        self.current = None;
        self.prune()?;
        let now = unix_ms();
        for number in 0..MAX_NAMES {
            let path = self.dir.join(format!("{FILE_PREFIX}{now:013}-{number:02}{FILE_SUFFIX}"));
            match OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => {
                    self.current = Some(Current { file, path, length: 0 });
                    return self.append(header);
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::new(ErrorKind::AlreadyExists, "every name for a new file is taken"))
    }

    /// Appends a frame.
    ///
    /// # Errors
    /// The frame cannot be written. The file then ends before this frame and is not continued.
    pub(super) fn append(&mut self, frame: &[u8]) -> io::Result<()> {
        let Some(current) = &mut self.current else { return Err(ErrorKind::NotFound.into()) };
        if let Err(error) = current.file.write_all(frame) {
            // After an incomplete frame in the middle of a file, the rest of the file could not be read.
            let cut = current.file.set_len(current.length);
            if current.length == 0 && cut.is_ok() {
                let _ = fs::remove_file(&current.path);
            }
            self.current = None;
            return Err(error);
        }
        current.length += frame.len() as u64;
        Ok(())
    }

    /// Removes the oldest files until the total has space for another file.
    fn prune(&self) -> io::Result<()> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let is_log = name
                .to_str()
                .is_some_and(|name| name.starts_with(FILE_PREFIX) && name.ends_with(FILE_SUFFIX));
            if is_log {
                found.push((entry.path(), entry.metadata()?.len()));
            }
        }
        // A file's name begins with the time.
        found.sort();
        let mut total: u64 = found.iter().map(|(_, length)| length).sum();
        for (path, length) in found {
            if total + self.file_bytes <= self.total_bytes {
                break;
            }
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => total -= length,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_leaves_no_half_a_frame_behind() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = Files::new(dir.path().to_owned(), 1 << 20, 4 << 20);
        files.begin(b"header").unwrap();
        files.append(b"frame").unwrap();
        let current = files.current.as_mut().unwrap();
        let path = current.path.clone();
        current.file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        files.append(b"more").unwrap_err();
        assert!(files.needs_new(1), "the file is not continued");
        assert_eq!(fs::read(path).unwrap(), b"headerframe");
    }
}
