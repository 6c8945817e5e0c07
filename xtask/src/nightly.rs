//! `nightly`: runs the checks that take too long for CI. Each row runs another command with a time limit. At
//! the end it prints one table.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::ensure;

use crate::{sh, table::columns};

mod plan;

use plan::Row;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only these rows.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// List the rows and their commands without running them.
    #[arg(long)]
    list: bool,
    /// Time limit of every row, minutes [default: each row's own].
    #[arg(long)]
    minutes: Option<u64>,
}

/// How a row ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed(String),
    TimedOut,
    /// The row cannot run on this machine, for this reason.
    Skipped(String),
}

/// Runs the rows and prints the table; returns an error unless every row passed or was skipped.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let rows = plan::choose(&args.only)?;
    if args.list {
        let list: Vec<Vec<String>> = rows.iter().map(Row::describe).collect();
        columns(&list).iter().for_each(|line| sh::print(line));
        return Ok(());
    }
    let mut results = Vec::new();
    for row in rows {
        let started = Instant::now();
        let limit = Duration::from_secs(60 * args.minutes.unwrap_or(row.minutes));
        sh::status(&format!("== {} (limit {} min)", row.name, limit.as_secs() / 60));
        let outcome = execute(&row, limit);
        sh::status(&format!("== {}: {}", row.name, outcome.shown()));
        results.push((row.name, outcome, started.elapsed()));
    }
    table(&results).iter().for_each(|line| sh::print(line));
    let failed: Vec<&str> =
        results.iter().filter(|(_, outcome, _)| outcome.is_failure()).map(|(name, ..)| *name).collect();
    ensure!(failed.is_empty(), "rows that failed: {}", failed.join(", "));
    let passed = results.iter().any(|(_, outcome, _)| *outcome == Outcome::Passed);
    ensure!(passed, "every row was skipped, so nothing was tested");
    Ok(())
}

fn execute(row: &Row, limit: Duration) -> Outcome {
    if let Some(reason) = row.missing() {
        return Outcome::Skipped(reason);
    }
    let started = Instant::now();
    for command in row.commands() {
        match limited(&command, limit.saturating_sub(started.elapsed())).status() {
            Ok(status) if status.success() => {}
            // Exit code of `timeout` for a command that ran too long.
            Ok(status) if status.code() == Some(124) => return Outcome::TimedOut,
            Ok(status) => return Outcome::Failed(status.to_string()),
            Err(error) => return Outcome::Failed(format!("could not start `timeout`: {error}")),
        }
    }
    Outcome::Passed
}

/// Returns a command that runs in the workspace's root. After a time limit its process group is ended, with
/// all descendants.
fn limited(command: &Command, limit: Duration) -> Command {
    let mut timeout = Command::new("timeout");
    // A limit of 0 would mean no limit.
    let seconds = limit.as_secs_f64().max(0.001);
    timeout.args(["--kill-after=10", &format!("{seconds:.3}")]);
    timeout.arg(command.get_program()).args(command.get_args()).current_dir(sh::root());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => timeout.env(name, value),
            None => timeout.env_remove(name),
        };
    }
    timeout
}

impl Outcome {
    fn is_failure(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::TimedOut)
    }

    fn shown(&self) -> String {
        match self {
            Self::Passed => "passed".to_owned(),
            Self::Failed(reason) => format!("FAILED: {reason}"),
            Self::TimedOut => "FAILED: time limit".to_owned(),
            Self::Skipped(reason) => format!("skipped: {reason}"),
        }
    }
}

fn table(results: &[(&str, Outcome, Duration)]) -> Vec<String> {
    let mut lines = vec!["| row | minutes | result |".to_owned(), "| --- | ---: | --- |".to_owned()];
    lines.extend(results.iter().map(|(name, outcome, took)| {
        format!("| {name} | {:.1} | {} |", took.as_secs_f64() / 60.0, outcome.shown())
    }));
    lines
}

#[cfg(test)]
mod tests {
    use std::{process::Command, time::Duration};

    use super::{
        Outcome, execute,
        plan::{Needs, Row, Run},
        table,
    };

    fn row(script: &'static str, missing: fn() -> Option<String>) -> Outcome {
        let make: fn() -> Vec<Command> = match script {
            "true" => || vec![Command::new("true")],
            "false" => || vec![Command::new("true"), Command::new("false")],
            _ => || {
                let mut sleep = Command::new("sleep");
                sleep.arg("60");
                vec![sleep]
            },
        };
        let (needs, run) = (Needs::Ask(missing), Run::Make(make));
        execute(&Row { name: "x", minutes: 1, purpose: "", needs, run }, Duration::from_millis(300))
    }

    #[test]
    fn outcomes() {
        assert_eq!(row("true", || None), Outcome::Passed);
        assert!(matches!(row("false", || None), Outcome::Failed(_)));
        assert_eq!(row("sleep", || None), Outcome::TimedOut);
        assert_eq!(row("true", || Some("no tool".into())), Outcome::Skipped("no tool".into()));
    }

    #[test]
    fn only_failures_and_time_limits_fail() {
        let failures = [Outcome::Passed, Outcome::Skipped("x".into()), Outcome::TimedOut];
        assert_eq!(failures.map(|outcome| outcome.is_failure()), [false, false, true]);
        let lines = table(&[("fuzz", Outcome::Skipped("no cargo-fuzz".into()), Duration::from_secs(6))]);
        assert_eq!(lines[2], "| fuzz | 0.1 | skipped: no cargo-fuzz |");
    }
}
