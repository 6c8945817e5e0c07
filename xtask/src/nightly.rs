//! `nightly`: runs the checks that take too long for CI. Each row runs a command with a time limit. At the
//! end it prints one table.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::ensure;
use serde::Deserialize;

use crate::{drill, sh, table::columns};

/// Rows besides the scenarios of `drill`.
const ROWS: &str = include_str!("../nightly.toml");

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only these rows.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// List the rows without running them.
    #[arg(long)]
    list: bool,
    /// Time limit of every row, minutes [default: each row's own].
    #[arg(long)]
    minutes: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    row: Vec<Row>,
}

/// One row; `nightly.toml` explains the keys.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    /// Time limit, minutes.
    minutes: u64,
    purpose: String,
    #[serde(default)]
    needs: Vec<String>,
    run: String,
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
    let rows = choose(&args.only)?;
    if args.list {
        let cells = |row: &Row| vec![row.name.clone(), format!("{} min", row.minutes), row.purpose.clone()];
        columns(&rows.iter().map(cells).collect::<Vec<_>>()).iter().for_each(|line| sh::print(line));
        return Ok(());
    }
    let mut results = Vec::new();
    for row in rows {
        let started = Instant::now();
        let limit = Duration::from_secs(60 * args.minutes.unwrap_or(row.minutes));
        sh::status(&format!("== {} (limit {} min)", row.name, limit.as_secs() / 60));
        let outcome = row.execute(limit);
        sh::status(&format!("== {}: {}", row.name, outcome.shown()));
        results.push((row.name, outcome, started.elapsed()));
    }
    table(&results).iter().for_each(|line| sh::print(line));
    let failed: Vec<&str> = results
        .iter()
        .filter(|(_, outcome, _)| outcome.is_failure())
        .map(|(name, ..)| name.as_str())
        .collect();
    ensure!(failed.is_empty(), "rows that failed: {}", failed.join(", "));
    let passed = results.iter().any(|(_, outcome, _)| *outcome == Outcome::Passed);
    ensure!(passed, "every row was skipped, so nothing was tested");
    Ok(())
}

/// Returns all rows: first the scenarios, except the longest, which comes last, because a hosted runner may
/// stop before its end.
fn rows() -> anyhow::Result<Vec<Row>> {
    let scenario = |one: drill::Scenario| {
        let minutes = one.nightly.map(|minutes| format!(" --minutes {minutes}")).unwrap_or_default();
        let run = format!("cargo xtask drill {}{minutes}", one.name);
        Row { name: one.name, minutes: one.minutes, purpose: one.purpose, needs: one.needs, run }
    };
    let plan: Plan = toml::from_str(ROWS)?;
    let mut rows: Vec<Row> = drill::scenarios()?.into_iter().map(scenario).chain(plan.row).collect();
    rows.sort_by_key(|row| row.name == "soak");
    Ok(rows)
}

/// Returns rows by name, or all rows when no name is given.
fn choose(names: &[String]) -> anyhow::Result<Vec<Row>> {
    let mut rows = rows()?;
    for name in names {
        let all: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        ensure!(all.contains(&name.as_str()), "no row is called `{name}`: expected {}", all.join(", "));
    }
    rows.retain(|row| names.is_empty() || names.contains(&row.name));
    Ok(rows)
}

impl Row {
    fn execute(&self, limit: Duration) -> Outcome {
        let missing = self.needs.iter().find(|need| !need.split('|').any(is_there));
        if let Some(missing) = missing {
            return Outcome::Skipped(format!("{} is missing", missing.replace('|', " or ")));
        }
        // `timeout` ends the process group, with all descendants. A limit of 0 would mean no limit.
        let limit = format!("{:.3}", limit.as_secs_f64().max(0.001));
        let mut timeout = sh::without_cargo_variables(Command::new("timeout"));
        timeout.args(["--kill-after=10", &limit, "bash", "-euc", &self.run]);
        match timeout.status().map(|status| (status.code(), status)) {
            Ok((Some(0), _)) => Outcome::Passed,
            Ok((Some(77), _)) => Outcome::Skipped("not possible on this machine".to_owned()),
            // Exit code of `timeout` for a command that ran too long.
            Ok((Some(124), _)) => Outcome::TimedOut,
            Ok((_, status)) => Outcome::Failed(status.to_string()),
            Err(error) => Outcome::Failed(format!("could not start `timeout`: {error}")),
        }
    }
}

fn is_there(name: &str) -> bool {
    match name.strip_prefix('$') {
        Some(variable) => std::env::var_os(variable).is_some(),
        None if name.contains('/') => sh::root().join(name).exists(),
        None => sh::is_installed(name),
    }
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

fn table(results: &[(String, Outcome, Duration)]) -> Vec<String> {
    let mut lines = vec!["| row | minutes | result |".to_owned(), "| --- | ---: | --- |".to_owned()];
    lines.extend(results.iter().map(|(name, outcome, took)| {
        format!("| {name} | {:.1} | {} |", took.as_secs_f64() / 60.0, outcome.shown())
    }));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Commands that CI runs, and `nightly` itself.
    const IN_CI: [&str; 5] = ["ci", "test", "book", "spec", "nightly"];

    #[test]
    fn outcomes() {
        let row = |run: &str, needs: &str| {
            let (name, purpose) = ("x".to_owned(), String::new());
            let row = Row { name, minutes: 1, purpose, needs: vec![needs.to_owned()], run: run.to_owned() };
            row.execute(Duration::from_millis(300))
        };
        assert_eq!(row("true", "no-such-program|sh"), Outcome::Passed);
        assert!(matches!(row("true; false; true", "$PATH"), Outcome::Failed(_)));
        assert_eq!(row("sleep 60", "xtask/nightly.toml"), Outcome::TimedOut);
        assert!(matches!(row("exit 77", "sh"), Outcome::Skipped(_)));
        for missing in ["no-such-program", "no/such/path", "$NO_SUCH_VARIABLE"] {
            assert_eq!(row("true", missing), Outcome::Skipped(format!("{missing} is missing")));
        }
    }

    #[test]
    fn only_failures_and_time_limits_fail() {
        let failures = [Outcome::Passed, Outcome::Skipped("x".into()), Outcome::TimedOut];
        assert_eq!(failures.map(|outcome| outcome.is_failure()), [false, false, true]);
        let skipped = Outcome::Skipped("no cargo-fuzz".into());
        let lines = table(&[("fuzz".to_owned(), skipped, Duration::from_secs(6))]);
        assert_eq!(lines[2], "| fuzz | 0.1 | skipped: no cargo-fuzz |");
    }

    #[test]
    fn every_command_is_one_of_ci_or_a_row_and_scripts_exist() {
        let rows = rows().unwrap();
        for command in crate::commands() {
            let called = format!("cargo xtask {command}");
            let is_row = rows.iter().any(|row| row.run.lines().any(|line| line.contains(&called)));
            let known = IN_CI.contains(&command.as_str()) || is_row;
            assert!(known, "`{called}` is in neither CI nor `nightly`: add a row, or remove it");
        }
        for row in rows {
            let script = row.run.split(' ').find(|word| word.starts_with(".ci/") || word.ends_with(".sh"));
            assert!(script.is_none_or(|script| sh::root().join(script).is_file()), "{script:?}");
        }
    }

    #[test]
    fn rows_are_chosen_by_name_and_have_names_of_their_own() {
        let all = choose(&[]).unwrap();
        let names: std::collections::BTreeSet<_> = all.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        assert_eq!(all.last().unwrap().name, "soak");
        assert_eq!(choose(&["fuzz".to_owned()]).unwrap().len(), 1);
        let error = choose(&["fuz".to_owned()]).unwrap_err().to_string();
        assert!(error.starts_with("no row is called `fuz`: expected faults"), "{error}");
    }
}
