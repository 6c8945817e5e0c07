//! Random draws of a gateway's decisions, for a run that repeats the decisions.

use std::{collections::HashMap, path::Path};

use pointsman_routing::NativeMode;
use pointsman_workers::Leg;
use serde::Deserialize;

use super::{Lab, RunError, RunOptions, RunResult};
use crate::{
    arm::Arm,
    fleet::Fleet,
    monitor::Monitor,
    outcome::Place,
    prepared::{Prepared, prepare},
    trace::Trace,
};

/// Seeds of recorded decisions, by the request's position in the trace and the leg.
pub type Draws = HashMap<(usize, Leg), u64>;

/// Reason for which draws cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DrawsError {
    /// The file cannot be read.
    #[error("{file}: {error}")]
    Io {
        /// The file.
        file: String,
        /// The cause.
        error: std::io::Error,
    },
    /// A line is malformed.
    #[error(
        "{file}, line {line}: {error}; expected {{\"request\": 0, \"leg\": \"aggregated\", \"seed\": 7}}"
    )]
    Line {
        /// The file.
        file: String,
        /// Number of the line, from 1.
        line: usize,
        /// The cause.
        error: serde_json::Error,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    request: usize,
    leg: Leg,
    seed: u64,
}

/// Reads draws from a file of JSON lines.
pub(crate) fn read(path: &Path) -> Result<Draws, DrawsError> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| DrawsError::Io { file: file.clone(), error })?;
    let lines = (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty());
    lines
        .map(|(line, text)| match serde_json::from_str(text) {
            Ok(Line { request, leg, seed }) => Ok(((request, leg), seed)),
            Err(error) => Err(DrawsError::Line { file: file.clone(), line, error }),
        })
        .collect()
}

/// Like [`super::run`], with the seeds of decisions that a gateway made. With the same input, both make the
/// same choice, also between equal workers.
///
/// # Errors
/// [`RunError`] when the arm or the fleet is not valid.
pub fn run_with_draws(
    arm: &Arm,
    trace: &Trace,
    fleet: &Fleet,
    options: RunOptions,
    draws: Draws,
) -> Result<RunResult, RunError> {
    let prepared = prepare(trace, fleet.block_tokens);
    run_one(arm, trace, &prepared, fleet, options, draws, &Monitor::default())
}

pub(super) fn run_one(
    arm: &Arm,
    trace: &Trace,
    prepared: &[Prepared],
    fleet: &Fleet,
    options: RunOptions,
    draws: Draws,
    monitor: &Monitor,
) -> Result<RunResult, RunError> {
    run_lab(arm, trace, prepared, fleet, options, monitor, |lab| lab.draws = draws)
}

/// Runs a trace with given engines for each request; no policy decides.
///
/// # Errors
/// [`RunError`] when the fleet is not valid.
pub(crate) fn run_assigned(
    places: &[Place],
    trace: &Trace,
    prepared: &[Prepared],
    fleet: &Fleet,
    options: RunOptions,
    monitor: &Monitor,
) -> Result<RunResult, RunError> {
    let arm = Arm::native(NativeMode::Kv);
    run_lab(&arm, trace, prepared, fleet, options, monitor, |lab| lab.assigned = places)
}

fn run_lab<'a>(
    arm: &Arm,
    trace: &'a Trace,
    prepared: &'a [Prepared],
    fleet: &'a Fleet,
    options: RunOptions,
    monitor: &'a Monitor,
    set_up: impl FnOnce(&mut Lab<'a>),
) -> Result<RunResult, RunError> {
    fleet.check()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    runtime.block_on(async {
        let mut lab = Lab::new(arm, trace, prepared, fleet, options, monitor)?;
        set_up(&mut lab);
        lab.run_events().await?;
        Ok(lab.finish())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_line_is_named_with_its_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let good = "{\"request\": 3, \"leg\": \"decode\", \"seed\": 18446744073709551615}\n\n";
        std::fs::write(file.path(), good).unwrap();
        assert_eq!(read(file.path()).unwrap(), Draws::from([((3, Leg::Decode), u64::MAX)]));
        std::fs::write(file.path(), format!("{good}{{\"request\": -1}}")).unwrap();
        let error = read(file.path()).unwrap_err().to_string();
        assert!(error.contains(", line 3: ") && error.contains("expected {\"request\""), "{error}");
    }
}
