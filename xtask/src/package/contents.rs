//! Contents of an image and of a wheel.

use std::path::{Path, PathBuf};

/// Data about the commit in labels and metadata.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    pub(crate) version: String,
    /// Hash of the commit.
    pub(crate) revision: String,
    /// Time of every file, seconds since 1970.
    pub(crate) time: u64,
    /// The same time, as RFC 3339 writes it.
    pub(crate) created: String,
}

/// Files that differ between builds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contents<'a> {
    /// Stripped programs.
    pub(crate) programs: &'a [PathBuf],
    /// Lists of the crates in each program.
    pub(crate) documents: &'a [PathBuf],
    /// Root directory of the sources.
    pub(crate) source: &'a Path,
    pub(crate) release: &'a Release,
}
