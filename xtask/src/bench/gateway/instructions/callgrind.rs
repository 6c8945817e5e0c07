//! Runs the gateway under valgrind's callgrind and reads its counts while it runs.

use std::{
    cell::Cell,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use crate::sh;

/// Script that hides the vDSO from the gateway.
const HIDE_VDSO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bench/gateway/instructions/callgrind.pl");
/// Name of the files with counts. Callgrind appends a dot and a number.
const COUNTS: &str = "counts";

/// Writes a program `pointsman` that runs the one in `bin` under callgrind, and returns its directory.
pub(super) fn wrapper(bin: &Path, dir: &Path) -> anyhow::Result<PathBuf> {
    let wrapped = dir.join("callgrind");
    fs::create_dir_all(&wrapped)?;
    let (counts, real) = (dir.join(COUNTS), bin.join("pointsman"));
    let script = format!(
        "#!/bin/sh\nexec perl {HIDE_VDSO:?} valgrind --quiet --tool=callgrind --callgrind-out-file={counts:?} {real:?} \"$@\"\n"
    );
    let program = wrapped.join("pointsman");
    fs::write(&program, script)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    Ok(wrapped)
}

/// The counters of a running gateway.
#[derive(Debug)]
pub(super) struct Callgrind {
    pid: u32,
    counts: PathBuf,
    /// Number of files that callgrind has written.
    written: Cell<u32>,
}

impl Callgrind {
    /// Returns the counters of a process that a [`wrapper`] in `dir` started.
    pub(super) fn new(pid: u32, dir: &Path) -> Self {
        Self { pid, counts: dir.join(COUNTS), written: Cell::new(0) }
    }

    /// Begins to count.
    pub(super) fn count_from_now(&self) -> anyhow::Result<()> {
        self.command("zero")
    }

    /// Returns the number of instructions that all threads executed since the last call.
    pub(super) fn counted(&self) -> anyhow::Result<f64> {
        self.command("dump")?;
        self.written.set(self.written.get() + 1);
        let file = self.last_file();
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        total(&text).with_context(|| format!("{} has no line `totals:`", file.display()))
    }

    /// Copies the profile of the last count.
    pub(super) fn keep(&self, to: &Path) -> anyhow::Result<()> {
        fs::copy(self.last_file(), to).with_context(|| to.display().to_string())?;
        Ok(())
    }

    fn last_file(&self) -> PathBuf {
        self.counts.with_added_extension(self.written.get().to_string())
    }

    fn command(&self, command: &str) -> anyhow::Result<()> {
        let mut vgdb = Command::new("vgdb");
        vgdb.args(["--wait=10", "--cmd-time-out=60", &format!("--pid={}", self.pid), command]);
        sh::output(&mut vgdb).context("vgdb is a part of valgrind").map(drop)
    }
}

/// Returns the total of a file of callgrind.
fn total(text: &str) -> Option<f64> {
    let total = text.lines().find_map(|line| line.strip_prefix("totals: "))?;
    total.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::total;

    #[test]
    fn a_total_is_read_from_a_profile() {
        assert_eq!(total("events: Ir\nfn=(1) main\n5 7\n\ntotals: 1234\n"), Some(1_234.0));
        assert_eq!(total("events: Ir\n"), None);
    }
}
