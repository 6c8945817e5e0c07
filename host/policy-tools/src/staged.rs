//! Files that are replaced in one step.

use std::{
    fs, io,
    io::Write as _,
    path::{Path, PathBuf},
};

/// Content of a file, complete on disk under a hidden name beside it. It is removed unless it is put in the
/// file's place.
#[derive(Debug)]
pub(crate) struct Staged {
    staged: PathBuf,
    path: PathBuf,
}

impl Staged {
    /// Writes the content. Creates the directory if needed.
    pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<Self> {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        fs::create_dir_all(directory.unwrap_or(Path::new(".")))?;
        let staged = Self::of(path);
        let mut file = fs::File::create(&staged.staged)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        Ok(staged)
    }

    /// Takes a file away from its place, if it exists. [`Self::put_in_place`] restores it; dropping removes
    /// it.
    pub(crate) fn take_away(path: &Path) -> io::Result<Option<Self>> {
        let found = match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            found => found?,
        };
        // What was taken away has to be removed later, which fails for a directory.
        if found.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let staged = Self::of(path);
        fs::rename(path, &staged.staged)?;
        Ok(Some(staged))
    }

    fn of(path: &Path) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let staged = path.with_file_name(format!(".{name}.{}", std::process::id()));
        Self { staged, path: path.to_owned() }
    }

    /// Puts the content in the file's place, so that a reader sees the old or the new content.
    pub(crate) fn put_in_place(self) -> io::Result<()> {
        fs::rename(&self.staged, &self.path)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // It is not there any more when it was put in place.
        let _ = fs::remove_file(&self.staged);
    }
}

/// Writes a file in one step. Creates the directory if needed.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    Staged::write(path, bytes)?.put_in_place()
}
