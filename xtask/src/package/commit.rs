//! The commit to package.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};

use crate::sh;

/// The checked-out commit, with the versions and times that are derived from it.
#[derive(Debug)]
pub(crate) struct Commit {
    pub(super) hash: String,
    /// Time of the commit and of every file, seconds since 1970.
    pub(super) time: u64,
    /// Version of the binary: `0.1.0+6032306ab12c`.
    pub(super) version: String,
    /// Version of the Debian package: the time makes later commits of a release newer.
    pub(super) deb_version: String,
    /// The time as Debian changelogs write it.
    pub(super) date: String,
    /// The time as RFC 3339 writes it.
    pub(super) created: String,
}

impl Commit {
    pub(super) fn of_head() -> anyhow::Result<Self> {
        let hash = git(&["rev-parse", "HEAD"])?;
        let show = |format: &str, date: &str| git(&["log", "-1", &format!("--format={format}"), date]);
        let (release, short) = (env!("CARGO_PKG_VERSION"), hash.get(..12).unwrap_or(&hash));
        let digits = show("%cd", "--date=format-local:%Y%m%d%H%M%S")?;
        Ok(Self {
            time: show("%ct", "--date=unix")?.parse().context("git gave no time of the commit")?,
            version: format!("{release}+{short}"),
            deb_version: format!("{release}+{digits}.{short}-1"),
            date: show("%cd", "--date=format-local:%a, %d %b %Y %H:%M:%S +0000")?,
            created: show("%cd", "--date=format-local:%Y-%m-%dT%H:%M:%SZ")?,
            hash,
        })
    }
}

/// Files of an image or of a wheel that differ between builds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contents<'a> {
    /// Stripped programs.
    pub(super) programs: &'a [PathBuf],
    /// Lists of the crates in each program.
    pub(super) documents: &'a [PathBuf],
    /// Root directory of the sources.
    pub(super) source: &'a Path,
    pub(super) commit: &'a Commit,
}

/// Runs git in the workspace, with times in UTC.
fn git(arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("git").args(arguments).env("TZ", "UTC").current_dir(sh::root()).output();
    let output = output.context("could not start git, which names the commit to package")?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`git {}` failed: {}", arguments.join(" "), problem.trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
