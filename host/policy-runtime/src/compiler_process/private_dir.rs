//! A directory that only this process uses, for code on its way from the compiler process.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

const PREFIX: &str = "pointsman-compile-";
/// Entries of a temporary directory that are looked at for what a killed daemon left behind.
const MAX_ENTRIES: usize = 10_000;

/// Removes its content when it is dropped.
#[derive(Debug)]
pub(super) struct PrivateDir(PathBuf);

impl PrivateDir {
    /// Creates a directory with access for this user only: where temporary files go, or in memory when that
    /// is read-only.
    pub(super) fn create() -> io::Result<Self> {
        let mut outcome = Err(io::ErrorKind::NotFound.into());
        for parent in [std::env::temp_dir(), PathBuf::from("/dev/shm")] {
            remove_abandoned(&parent);
            let path = parent.join(format!("{PREFIX}{}-{:016x}", std::process::id(), rand::random::<u64>()));
            // This fails when the path exists, whatever it is.
            outcome = DirBuilder::new().mode(0o700).create(&path).map(|()| Self(path));
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::debug!(dir = %self.0.display(), %error, "temporary directory not removed");
        }
    }
}

/// Removes directories of processes that have ended. Directories of other users stay, because removing them
/// fails.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.take(MAX_ENTRIES).flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next());
        if process.is_some_and(|id| id.parse::<u32>().is_ok() && !Path::new("/proc").join(id).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
