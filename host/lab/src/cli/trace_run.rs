//! `pointsman trace run`: one run, request by request.

use std::{io::Write as _, path::PathBuf, process::ExitCode};

use clap::Args;
use serde_json::json;

use super::{print_notes, trace_args::TraceArgs};
use crate::{
    arm::Arm,
    fleet::Fleet,
    outcome::Outcome,
    output_file::{check_outputs, output_file, write_file},
    run::{ExchangedMessages, RunOptions, read_draws, run_with_draws},
};

/// Arguments of `trace run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Trace file.
    file: PathBuf,
    #[command(flatten)]
    reading: TraceArgs,
    /// Fleet file (TOML).
    #[arg(long)]
    fleet: PathBuf,
    /// Way to route, as for `compare`.
    #[arg(long)]
    arm: String,
    /// Seed of the random numbers.
    #[arg(long, default_value = "1")]
    seed: u64,
    /// Let each request arrive at its time in the trace, as for `compare`.
    #[arg(long)]
    fixed_schedule: bool,
    /// Seeds of decisions that a gateway made, with which ties are broken as the gateway broke them. JSON
    /// lines: {"request": 0, "leg": "aggregated", "seed": 7}. `request` counts the trace's requests from 0.
    #[arg(long)]
    draws: Option<PathBuf>,
    /// File to write the requests' outcomes to, as JSON lines.
    #[arg(short, long, value_parser = output_file)]
    output: PathBuf,
}

impl RunArgs {
    pub(super) fn run(&self) -> anyhow::Result<ExitCode> {
        let files = Arm::files(&self.arm);
        let mut read = vec![("the trace", &*self.file), ("the fleet file", &*self.fleet)];
        read.extend(self.draws.iter().map(|draws| ("the file of draws", draws.as_path())));
        read.extend(files.iter().map(|file| ("a file of the arm", file.as_path())));
        check_outputs(&read, [&self.output])?;
        let trace = self.reading.read(&self.file, None)?;
        let fleet = Fleet::read(&self.fleet)?;
        let arm = Arm::parse(&self.arm)?;
        let draws = self.draws.as_deref().map(read_draws).transpose()?.unwrap_or_default();
        let fixed_schedule = self.fixed_schedule;
        let options = RunOptions { seed: self.seed, fixed_schedule, ..RunOptions::default() };
        let result = run_with_draws(&arm, &trace, &fleet, options, draws)?;
        let output = &self.output;
        write_file(output, |out| {
            let mut outcomes = result.outcomes.iter().enumerate();
            outcomes.try_for_each(|(number, outcome)| writeln!(out, "{}", line(number, outcome)))
        })?;
        print_notes(&trace)?;
        fleet.assumption().iter().try_for_each(|note| super::print(&format!("warning: {note}\n")))?;
        let told = match result.exchanged {
            ExchangedMessages { messages: 0, .. } => String::new(),
            ExchangedMessages { messages, bytes } => {
                format!(", {messages} messages with {bytes} bytes between gateways")
            }
        };
        super::print(&format!("{}: {} requests{told}\n", output.display(), result.outcomes.len()))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Workers are numbered by their position in the fleet file, from 0, as in the report of `compare`.
fn line(number: usize, outcome: &Outcome) -> serde_json::Value {
    let milliseconds = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    json!({
        "request": number,
        "ended": outcome.ended.as_str(),
        "at_ms": milliseconds(outcome.at),
        "ttft_ms": milliseconds(outcome.ttft),
        "e2e_ms": milliseconds(outcome.e2e),
        "input_tokens": outcome.isl,
        "output_tokens": outcome.osl,
        "cached_tokens": outcome.cached,
        "prefill_worker": outcome.prefill_engine,
        "decode_worker": outcome.decode_engine,
    })
}
