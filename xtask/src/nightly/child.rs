//! Runs a command with a time limit.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::Context as _;

use crate::{proc, sh};

/// How a command ended.
#[derive(Debug)]
pub(super) enum Ended {
    Success,
    /// With its exit status.
    Failure(String),
    TimedOut,
}

/// Runs a command in the workspace's root. A command that exceeds the limit is ended with its descendants, by
/// pid.
pub(super) fn run(mut command: Command, limit: Duration) -> anyhow::Result<Ended> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child =
        command.current_dir(sh::root()).spawn().with_context(|| format!("could not start {name}"))?;
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            let failure = || Ended::Failure(status.to_string());
            return Ok(if status.success() { Ended::Success } else { failure() });
        }
        if started.elapsed() > limit {
            for pid in proc::descendants(child.id()) {
                let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
            }
            child.wait()?;
            return Ok(Ended::TimedOut);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
