//! A directory that only this process uses, for code on its way from the compiler process.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

const PREFIX: &str = "pointsman-compile-";
/// File in the directory that its process keeps locked. Processes that share a directory for temporary files
/// may have their ids from different namespaces.
const LOCK_FILE: &str = "lock";
/// Entries of a temporary directory that are looked at for what a killed daemon left behind.
const MAX_ENTRIES: usize = 10_000;

/// Removes its content when it is dropped.
#[derive(Debug)]
pub(super) struct PrivateDir {
    path: PathBuf,
    _lock: File,
}

impl PrivateDir {
    /// Creates a directory with access for this user only: where temporary files go, or in memory when that
    /// is read-only.
    pub(super) fn create() -> io::Result<Self> {
        let mut outcome = Err(io::ErrorKind::NotFound.into());
        for parent in [std::env::temp_dir(), PathBuf::from("/dev/shm")] {
            remove_abandoned(&parent);
            outcome = Self::create_in(&parent);
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }

    fn create_in(parent: &Path) -> io::Result<Self> {
        let name = format!("{PREFIX}{}-{:016x}", std::process::id(), rand::random::<u64>());
        // No other process looks at this name before the lock is held.
        let (unlocked, path) = (parent.join(format!(".{name}")), parent.join(name));
        // This fails when the path exists, whatever it is.
        DirBuilder::new().mode(0o700).create(&unlocked)?;
        let locked = File::create_new(unlocked.join(LOCK_FILE)).and_then(|lock| {
            lock.lock()?;
            fs::rename(&unlocked, &path)?;
            Ok(lock)
        });
        let lock = locked.inspect_err(|_| drop(fs::remove_dir_all(&unlocked)))?;
        Ok(Self { path, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::debug!(dir = %self.path.display(), %error, "temporary directory not removed");
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
        if process.is_some_and(|id| is_abandoned(&entry.path(), id)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns whether the process with this id, which made the directory, has ended.
fn is_abandoned(dir: &Path, id: &str) -> bool {
    // The directory may be another user's, and the file a pipe: opening one would wait for a process that
    // writes to it.
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(dir.join(LOCK_FILE));
    match opened {
        Ok(lock) => lock.metadata().is_ok_and(|file| file.is_file()) && lock.try_lock().is_ok(),
        // A directory without a lock: only the id of its process tells.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            id.parse::<u32>().is_ok() && !Path::new("/proc").join(id).exists()
        }
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn n7_a_directory_is_removed_when_no_process_holds_its_lock() {
        let parent = tempfile::tempdir().expect("a directory");
        let made = PrivateDir::create_in(parent.path()).expect("created");
        // The directory of a process in another namespace, whose id no process has here.
        let other = parent.path().join(format!("{PREFIX}4294967295-1"));
        fs::create_dir(&other).expect("a directory");
        let lock = File::create(other.join(LOCK_FILE)).expect("a file");
        lock.lock().expect("the lock");
        let earlier = parent.path().join(format!("{PREFIX}4294967295-2"));
        fs::create_dir(&earlier).expect("a directory");
        let hostile = parent.path().join(format!("{PREFIX}4294967295-3"));
        fs::create_dir(&hostile).expect("a directory");
        let made_pipe = Command::new("mkfifo").arg(hostile.join(LOCK_FILE)).status();
        assert!(made_pipe.expect("mkfifo runs").success());
        remove_abandoned(parent.path());
        // N7.12
        assert!(made.path().exists() && other.exists() && hostile.exists() && !earlier.exists());
        fs::remove_dir_all(&hostile).expect("removed");
        drop(lock);
        remove_abandoned(parent.path());
        // N7.12
        assert!(made.path().exists() && !other.exists());
        drop(made);
        assert_eq!(fs::read_dir(parent.path()).expect("a directory").count(), 0);
    }
}
