//! The entries of wasmtime's cache, and the directories that compiler processes write theirs into.

use std::{
    collections::VecDeque,
    fs::{self, DirBuilder, DirEntry},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// Name of the directory of a process, before its number.
const PREFIX: &str = "work-";
/// Age of a directory of a process that no daemon removed.
const ABANDONED: Duration = Duration::from_secs(3_600);
/// Bytes of all entries above which the oldest are removed: those of twenty interpreters.
const MAX_BYTES: u64 = 1 << 30;
/// Name of the compiler in a cache, before its version.
const COMPILER: &str = "wasmtime-";

/// Machine code by the name that the daemon computes for it.
pub(super) struct CodeStore(PathBuf);

impl CodeStore {
    pub(super) fn new(cache: PathBuf) -> Self {
        Self(cache.join("modules"))
    }

    /// Returns whether there is an entry of this name.
    pub(super) fn has(&self, key: &str) -> bool {
        let renew = |path: &Path| -> io::Result<()> {
            // So that it is not the oldest one while it is loaded.
            fs::File::options().append(true).open(path)?.set_modified(SystemTime::now())
        };
        compilers(&self.0).any(|dir| {
            let path = dir.path().join(key);
            let is_there = path.is_file();
            if is_there {
                let _ = renew(&path);
            }
            is_there
        })
    }

    /// Moves the entry of this name here from the cache at `from`. Whatever else is there stays there.
    /// Returns whether there was such an entry.
    pub(super) fn take(&self, from: &Path, key: &str) -> bool {
        let taken = compilers(&from.join("modules")).any(|dir| {
            let found = dir.path().join(key);
            // Not a link to something else.
            if !fs::symlink_metadata(&found).is_ok_and(|found| found.is_file()) {
                return false;
            }
            let place = self.0.join(dir.file_name());
            fs::create_dir_all(&place).and_then(|()| fs::rename(&found, place.join(key))).is_ok()
        });
        if taken {
            self.remove_oldest();
        }
        taken
    }

    /// Removes all entries but these.
    pub(super) fn keep_only(&self, names: &VecDeque<String>) {
        for entry in self.entries() {
            let kept = entry.file_name().to_str().is_some_and(|name| names.iter().any(|kept| kept == name));
            if !kept {
                // A file that cannot be removed now is removed with the directory.
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn entries(&self) -> impl Iterator<Item = DirEntry> {
        compilers(&self.0).flat_map(|dir| fs::read_dir(dir.path()).into_iter().flatten().flatten())
    }

    /// Removes the oldest entries while all together are too large.
    fn remove_oldest(&self) {
        let known = |entry: DirEntry| {
            let found = entry.metadata().ok()?;
            Some((found.modified().ok()?, found.len(), entry.path()))
        };
        let mut entries: Vec<_> = self.entries().filter_map(known).collect();
        let mut bytes: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        entries.sort_unstable();
        for (_, size, path) in entries {
            if bytes <= MAX_BYTES {
                return;
            }
            if fs::remove_file(path).is_ok() {
                bytes = bytes.saturating_sub(size);
            }
        }
    }
}

/// Directories of the compiler's versions.
fn compilers(modules: &Path) -> impl Iterator<Item = DirEntry> {
    let dirs = fs::read_dir(modules).into_iter().flatten().flatten();
    dirs.filter(|dir| dir.file_name().to_str().is_some_and(|name| name.starts_with(COMPILER)))
}

/// A directory for one compiler process, beside the cache. Removed when it is dropped.
pub(super) struct WorkDir(PathBuf);

impl WorkDir {
    pub(super) fn create(beside: &Path) -> io::Result<Self> {
        let path = beside.join(format!("{PREFIX}{:016x}", rand::random::<u64>()));
        // The cache itself may not exist yet. This user alone has access to what is in it.
        DirBuilder::new().recursive(true).mode(0o700).create(beside)?;
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::debug!(dir = %self.0.display(), %error, "directory of a compiler process not removed");
        }
    }
}

/// Removes directories of processes whose daemon was killed.
pub(super) fn remove_abandoned(beside: &Path) {
    for entry in fs::read_dir(beside).into_iter().flatten().flatten() {
        let is_work = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        let modified = entry.metadata().and_then(|found| found.modified());
        let is_old =
            modified.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age > ABANDONED));
        if is_work && is_old {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_entry_of_the_computed_name_is_taken() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = CodeStore::new(dir.path().join("code"));
        let work = WorkDir::create(dir.path()).expect("a directory");
        let version = work.path().join("modules/wasmtime-1");
        fs::create_dir_all(&version).expect("a directory");
        for name in ["mine", "interpreter"] {
            fs::write(version.join(name), "hostile").expect("written");
        }
        std::os::unix::fs::symlink("/etc/passwd", version.join("link")).expect("a link");
        assert!(store.take(work.path(), "mine") && store.has("mine"));
        assert!(!store.has("interpreter"));
        assert!(!store.take(work.path(), "link") && !store.has("link"));
        assert!(!store.take(work.path(), "other"));
        let path = work.path().to_owned();
        drop(work);
        assert!(!path.exists());
        store.keep_only(&VecDeque::from(["other".to_owned()]));
        assert!(!store.has("mine"));
    }
}
