//! Directories below the user's cache directory.

use std::{
    fs::{DirBuilder, metadata},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::PathBuf,
};

/// Returns the directory `name` for this user, with access for this user only: anybody who can write there
/// can run code as this user. `None`: no directory is available for it.
pub(crate) fn dir(name: &str) -> Option<PathBuf> {
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|dir| dir.is_absolute());
    let dir = base.or_else(home)?.join("pointsman").join(name);
    DirBuilder::new().recursive(true).mode(0o700).create(&dir).ok()?;
    let found = metadata(&dir).ok()?;
    // Another user's directory, or one that others can write to, is not trusted.
    let own = found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o022 == 0;
    own.then_some(dir)
}
