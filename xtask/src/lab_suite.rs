//! `lab-suite`: compares the default policy with every shipped rival, on a fixed matrix of traffic and
//! fleets.
//!
//! Each seed gives its own trace, on which every arm runs once, so the values of a seed form a pair.

use std::{path::PathBuf, process::Command};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{fleet, sh};

mod judge;
mod lookalike;
mod matrix;
mod table;

use judge::{Arms, Judgement};
use matrix::Cell;

/// The matrix.
const MATRIX: &str = "tests/lab-suite/matrix.toml";
/// Additional rival for fleets with separate prefill and decode engines.
const RIVALS: [&str; 7] = [
    "kv-aware",
    "cache-aware",
    "queue-kv-prefix",
    "longest-prefix",
    "least-loaded",
    "power-of-two",
    "round-robin",
];
/// A further rival where prefill and decode run on different engines.
const DISAGGREGATED_RIVAL: &str = "conditional=kv-aware+conditional-disagg@{\"enabled\": true}";
/// Maximum factor on `--seeds` for a cell with wide intervals.
const MORE_SEEDS: u64 = 3;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run the whole matrix instead of its twelve quick cells.
    #[arg(long)]
    all: bool,
    /// Run only these cells.
    #[arg(long, value_delimiter = ',', conflicts_with = "all")]
    cells: Vec<String>,
    /// Number of seeds.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(2..=1_000))]
    seeds: u64,
    /// Use odd seeds, which are for tuning, instead of even ones.
    #[arg(long)]
    tune: bool,
    /// The arm to judge: `[LABEL=]PARTS` of `pointsman compare`.
    #[arg(long, default_value = "default")]
    arm: String,
    /// Rivals. Cells with prefill and decode engines also have kv-aware with conditional-disagg.
    #[arg(long, value_delimiter = ',', default_values = RIVALS)]
    rivals: Vec<String>,
    /// Maximum number of concurrent runs.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Write the value of each seed and the judgements as JSON, after each cell.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Directory to keep the trace of every seed and the fleet of every cell in, for `pointsman compare`.
    #[arg(long)]
    keep: Option<PathBuf>,
}

/// Directory of the files of the runs.
struct Files {
    lab: PathBuf,
    /// Removed at the end.
    dir: TempDir,
    keep: Option<PathBuf>,
}

/// A cell with its measurements.
struct Measured {
    cell: Cell,
    /// Requests a second; for agents, sessions a second.
    rate: f64,
    arms: Arms,
    judgement: Judgement,
}

/// Runs the cells and prints a table. Returns an error when too few cells hold, or when a figure is lost.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let cells = chosen(matrix::read(&sh::root().join(MATRIX))?, args)?;
    let files = Files {
        lab: fleet::build_programs("release", &[fleet::LAB])?.join(fleet::LAB.name),
        dir: tempfile::Builder::new().prefix("pointsman-lab-suite-").tempdir()?,
        keep: args.keep.clone(),
    };
    let bar = sh::progress(cells.len() as u64, "cells");
    let (mut measured, mut failed) = (Vec::new(), Vec::new());
    for cell in cells {
        let name = cell.name.clone();
        match measure(cell, args, &files) {
            Ok(one) => measured.push(one),
            Err(error) => failed.push(format!("{name}: {error:#}")),
        }
        if let Some(path) = &args.json {
            std::fs::write(path, serde_json::to_vec_pretty(&report(&measured, &failed))?)?;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    table::lines(&measured, label(&args.arm)).iter().for_each(|line| sh::print(line));
    ensure!(failed.is_empty(), "cells that could not be measured: {}", failed.join("; "));
    table::check(&measured)
}

fn chosen(cells: Vec<Cell>, args: &Args) -> anyhow::Result<Vec<Cell>> {
    for name in &args.cells {
        ensure!(cells.iter().any(|cell| cell.name == *name), "the matrix has no cell `{name}`");
    }
    let wanted = |cell: &Cell| match args.cells.as_slice() {
        [] => args.all || cell.quick,
        names => names.contains(&cell.name),
    };
    Ok(cells.into_iter().filter(wanted).collect())
}

/// Returns the label of an arm, as `pointsman compare` derives it.
fn label(arm: &str) -> &str {
    arm.split_once('=').map_or(arm, |(label, _)| label)
}

/// Runs every arm with as many seeds as the judgement needs.
fn measure(cell: Cell, args: &Args, files: &Files) -> anyhow::Result<Measured> {
    let rate = cell.load * capacity(&cell, files)?;
    let mut arms = Arms::new();
    for number in 0..args.seeds * MORE_SEEDS {
        let enough = number >= args.seeds;
        if enough && Judgement::of(&arms, label(&args.arm)).is_some_and(|judgement| !judgement.is_unsure()) {
            break;
        }
        let seed = 2 * number + if args.tune { 1 } else { 2 };
        for (arm, figures) in compare(&cell, args, files, (seed, rate))? {
            let of = arms.entry(arm).or_default();
            of.ttft_mean.extend(figures.ttft_mean);
            of.ttft_p90.extend(figures.ttft_p90);
            of.e2e_mean.extend(figures.e2e_mean);
            of.goodput.extend(figures.goodput);
            of.itl_p50.extend(figures.itl_p50);
            of.itl_p99.extend(figures.itl_p99);
        }
    }
    let judgement = Judgement::of(&arms, label(&args.arm)).context("no such arm was run")?;
    Ok(Measured { cell, rate, arms, judgement })
}

/// Runs every arm with one seed.
fn compare(cell: &Cell, args: &Args, files: &Files, (seed, rate): (u64, f64)) -> anyhow::Result<Arms> {
    let mut command = files.compare(cell, seed, rate)?;
    command.arg("--threads").arg(args.threads.to_string()).args(["--arm", &args.arm]);
    let further = cell.is_disaggregated().then_some(DISAGGREGATED_RIVAL);
    for rival in args.rivals.iter().map(String::as_str).chain(further) {
        command.args(["--arm", rival]);
    }
    let report = files.report(&mut command)?;
    let arms = report["comparisons"][0]["arms"].as_array().context("the report has no arms")?;
    let figures = |arm: &Value| {
        let mean = |key: &str| arm["figures"][key]["mean"].as_f64();
        // A request without an answer counts as infinite. A figure without a value is null.
        let is_whole = ["shed", "no_worker", "failed"].iter().all(|key| mean(key) == Some(0.0));
        let of = |key: &str| vec![mean(key).unwrap_or(f64::INFINITY)];
        let of_all = |key: &str| if is_whole { of(key) } else { vec![f64::INFINITY] };
        let name = arm["label"].as_str().unwrap_or_default().to_owned();
        let figures = judge::Figures {
            ttft_mean: of_all("ttft_mean"),
            ttft_p90: of("ttft_p90"),
            e2e_mean: of_all("e2e_mean"),
            goodput: of("goodput"),
            itl_p50: of("itl_p50"),
            itl_p99: of("itl_p99"),
        };
        (name, figures)
    };
    Ok(arms.iter().map(figures).collect())
}

/// Returns the rate for `trace generate` at the highest load with which `kv-aware` stays within the SLO. The
/// search uses the trace of a seed that no comparison uses.
fn capacity(cell: &Cell, files: &Files) -> anyhow::Result<f64> {
    let start = cell.start_rate()?;
    let mut command = files.compare(cell, 0, start)?;
    command.args(["--max-load", "--threads", "1", "--arm", "kv"]);
    let report = files.report(&mut command)?;
    let (found, offered) = (&report["max_load"][0]["arms"][0], &report["comparisons"][0]["offered_per_s"]);
    ensure!(
        found["at_least"] == 0 && found["below"] == 0,
        "the capacity is unknown: all loads or none meet the SLO; change the requests of the cell"
    );
    // Both count the same arrivals, for agents the starts of sessions.
    let (found, offered) = (found["per_s"]["mean"].as_f64(), offered.as_f64());
    Ok(start * found.context("the report has no load")? / offered.context("the report has no rate")?)
}

impl Files {
    /// Returns the command `compare` with the trace of a seed and the fleet of a cell.
    fn compare(&self, cell: &Cell, seed: u64, rate: f64) -> anyhow::Result<Command> {
        let (trace, fleet) = match &self.keep {
            Some(dir) => {
                (dir.join(format!("{}.{seed}.jsonl", cell.name)), dir.join(format!("{}.toml", cell.name)))
            }
            None => (self.dir.path().join("trace.jsonl"), self.dir.path().join("fleet.toml")),
        };
        cell.trace(&self.lab, seed, rate, &trace)?;
        std::fs::write(&fleet, cell.fleet()?)?;
        let mut command = Command::new(&self.lab);
        command.args(["compare", "--seeds", "1", "--seed", &seed.to_string()]);
        command.args(["--trace-block", &cell.block_tokens().to_string()]);
        command.arg("--trace").arg(trace).arg("--fleet").arg(fleet);
        Ok(command)
    }

    /// Runs `compare` and reads its report.
    fn report(&self, command: &mut Command) -> anyhow::Result<Value> {
        let report = self.dir.path().join("report.json");
        sh::output(command.arg("--json").arg(&report))?;
        Ok(serde_json::from_slice(&std::fs::read(report)?)?)
    }
}

fn report(measured: &[Measured], failed: &[String]) -> Value {
    let cells = measured
        .iter()
        .map(|one| json!({ "cell": one.cell.name, "rate": one.rate, "arms": one.arms, "judgement": one.judgement }));
    json!({ "cells": cells.collect::<Vec<_>>(), "failed": failed })
}
