//! The command `pointsman compare`.

use std::{
    io::Write as _,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context as _, ensure};
use clap::Args;
use pointsman_workers::Role;
use tokio::time::Duration;

use super::{positive, print, progress, trace_args::TraceArgs};
use crate::output_file::{check_outputs, output_file, write_file};
use crate::{
    arm::Arm,
    fleet::{EngineGroup, Fleet, StepTimeSpec},
    html,
    max_load::{MAX_RUNS, max_load},
    monitor::Monitor,
    report::{Comparison, Plan, RankBy, Slo, compare},
    run::{RunError, RunOptions},
    study::Study,
    text,
    trace::Trace,
};

/// Arguments of `compare`.
#[derive(Debug, Args)]
#[command(after_help = "\
Routing is not modelled: router, policies, prefix index and bookings are the gateway's own, in virtual time. \
Engines and links are models; `--fleet` says which.

An arm is [LABEL=]PART[+PART…], or default: what a gateway without configuration runs. A part is a native \
mode (round-robin, random, power-of-two, least-loaded, kv), a built-in policy (kv-aware, predicted-latency, \
queue-kv-prefix, cache-aware, longest-prefix, formula, conditional-disagg, predicted-disagg), a policy file \
or a formula file (NAME.formula.toml), with @SETTINGS, a JSON object, behind it. With +edf or +fifo at its end, \
requests wait in the gateway by deadline or by arrival, and not in the gateway's own order.

Examples:
  pointsman compare --trace conversation.jsonl --engines 8 --arm kv-aware --arm round-robin
  pointsman compare --trace conversation.jsonl --engines 8 --arm kv-aware --arm round-robin \\
                    --seeds 5 --step-time distserve-opt-13b-a100 --speed 1,2,4 --max-load \\
                    --html report.html
  pointsman compare --trace my.jsonl --fleet fleet.toml --arm now=kv-aware --arm new=./new.wasm \\
                    --seeds 5 --html report.html --json report.json

Presets of --step-time: dynamo (the default), distserve-opt-13b-a100, blis-llama-8b-h100.

Ctrl-C ends the runs; the report then has the seeds that are over.

Exit code: 0 when every run came to its end; 2 when an argument, a file or a policy is not usable, or when no \
arm answered a request; 130 after Ctrl-C.")]
pub struct CompareArgs {
    /// Trace: Mooncake JSONL (also AIPerf's form for sessions), Qwen usage JSONL, Azure LLM inference CSV or
    /// BurstGPT CSV.
    #[arg(long)]
    trace: PathBuf,
    #[command(flatten)]
    reading: TraceArgs,
    /// Use only this many requests from the start of the trace.
    #[arg(long)]
    limit: Option<usize>,
    /// Fleet file (TOML). With more than one, the comparison is repeated for each.
    #[arg(long, conflicts_with = "engines")]
    fleet: Vec<PathBuf>,
    /// Number of aggregated engines with default values, in place of a fleet file.
    #[arg(long, default_value = "8", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    engines: u32,
    /// Formula of the step time. May be repeated; the comparison is repeated with each formula.
    #[arg(long, value_name = "NAME", value_parser = step_time)]
    step_time: Vec<StepTimeSpec>,
    /// A way to route. May be repeated.
    #[arg(long = "arm", required = true)]
    arms: Vec<String>,
    /// Number of seeds. Each arm runs once with each seed.
    #[arg(long, default_value = "3", value_parser = clap::value_parser!(u64).range(1..=1_000))]
    seeds: u64,
    /// First seed.
    #[arg(long, default_value = "1")]
    seed: u64,
    /// Let each request arrive at its time in the trace (open loop), but a turn not before its client has the
    /// previous answer. Without this flag, a turn with a `delay` arrives that delay after the previous answer
    /// (closed loop).
    #[arg(long)]
    fixed_schedule: bool,
    /// Factor by which arrivals are faster than in the trace; pauses within a session do not change. With
    /// more than one, the report shows goodput over load.
    #[arg(long, default_value = "1", value_delimiter = ',', value_parser = positive)]
    speed: Vec<f64>,
    /// Move each arrival by a random time up to this many milliseconds, for traces with rounded times.
    #[arg(long, default_value = "0")]
    jitter_ms: u64,
    /// Limit of the time to first token for goodput, milliseconds.
    #[arg(long, default_value = "2000", value_parser = positive)]
    slo_ttft_ms: f64,
    /// Limit of the mean inter-token latency for goodput, milliseconds.
    #[arg(long, default_value = "50", value_parser = positive)]
    slo_itl_ms: f64,
    /// Find the highest rate of arrivals at which --slo-share of the requests keep both limits, for each arm
    /// and seed, and say which arm has the highest. The search doubles or halves the first --speed, 64-fold
    /// at most, and bisects to 2.2 %.
    #[arg(long)]
    max_load: bool,
    /// Share of the requests that must keep both limits, for --max-load.
    #[arg(long, default_value = "0.95", value_parser = share)]
    slo_share: f64,
    /// Search for an assignment of requests to engines that beats every arm, with knowledge of the future:
    /// simulate at most as many engine steps as this number of runs has. The report gives its mean TTFT as a
    /// percentage of each arm's.
    #[arg(long, value_name = "RUNS|off", default_value = "off", value_parser = clairvoyant)]
    clairvoyant: u32,
    /// Figure that ranks the arms.
    #[arg(long, value_enum, default_value = "ttft-p90")]
    rank_by: RankBy,
    /// Write the report as one HTML page.
    #[arg(long, value_parser = output_file)]
    html: Option<PathBuf>,
    /// Write the plot of goodput over load as an SVG file.
    #[arg(long, value_parser = output_file)]
    svg: Option<PathBuf>,
    /// Write the report as JSON.
    #[arg(long, value_parser = output_file)]
    json: Option<PathBuf>,
    /// Maximum number of concurrent runs [default: one for each core].
    #[arg(long)]
    threads: Option<NonZeroUsize>,
}

fn step_time(name: &str) -> Result<StepTimeSpec, String> {
    StepTimeSpec::by_name(name).ok_or_else(|| format!("expected one of {}", StepTimeSpec::NAMES.join(", ")))
}

fn clairvoyant(text: &str) -> Result<u32, String> {
    let runs = if text == "off" { Some(0) } else { text.parse().ok() };
    runs.filter(|runs| *runs <= 100_000)
        .ok_or_else(|| "expected off, or a number of runs up to 100000".to_owned())
}

fn share(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| format!("\"{text}\" is not a number"))?;
    (value > 0.0 && value <= 1.0).then_some(value).ok_or_else(|| format!("{text} is not within 0 to 1"))
}

impl CompareArgs {
    /// Runs the comparison and prints its tables.
    ///
    /// # Errors
    /// An argument, a file or a policy is not usable.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        self.check_outputs()?;
        ensure!(
            self.svg.is_none() || self.speed.len() > 1,
            "--svg draws goodput over load: give --speed more than one value"
        );
        let trace = self.reading.read(&self.trace, self.limit)?;
        ensure!(!trace.requests.is_empty(), "--limit leaves no request of the trace");
        let arrivals = trace.arrivals(self.fixed_schedule);
        ensure!(
            !self.max_load || arrivals.seconds > 0.0,
            "--max-load changes the rate of arrivals, but all {} of this trace are at once; `pointsman trace import \
             --rate` gives them random times",
            arrivals.unit.name()
        );
        let fleets = self.fleets()?;
        let arms = Arm::parse_all(self.arms.iter().map(String::as_str))?;
        let monitor = Arc::new(Monitor::default());
        progress::stop_on_interrupt(Arc::clone(&monitor));
        let requests = self.requests(&trace, fleets.len());
        let shown = progress::Progress::of_runs(Arc::clone(&monitor), requests, trace.name.clone());
        let study = self.study(&arms, &trace, &fleets, &monitor);
        drop(shown);
        let study = study?;
        print(&text::study(&study))?;
        ensure!(
            study.comparisons.iter().any(Comparison::has_answers),
            "no arm answered a request, so there is nothing to compare: see the warnings above"
        );
        if let Some(path) = &self.html {
            write(path, html::page(&study).as_bytes())?;
        }
        if let Some((path, svg)) = self.svg.as_ref().zip(html::goodput_svg(&study)) {
            write(path, svg.as_bytes())?;
        }
        if let Some(path) = &self.json {
            write(path, &serde_json::to_vec_pretty(&study)?)?;
        }
        Ok(if monitor.is_stopped() { ExitCode::from(progress::INTERRUPTED) } else { ExitCode::SUCCESS })
    }

    /// Reports a file that cannot be written before the runs, not after them.
    fn check_outputs(&self) -> anyhow::Result<()> {
        let files: Vec<PathBuf> = self.arms.iter().flat_map(|arm| Arm::files(arm)).collect();
        let fleets = self.fleet.iter().map(|file| ("the fleet file", file.as_path()));
        let files = files.iter().map(|file| ("a file of an arm", file.as_path()));
        let read: Vec<_> = std::iter::once(("the trace", &*self.trace)).chain(fleets).chain(files).collect();
        check_outputs(&read, self.html.iter().chain(&self.svg).chain(&self.json))
    }

    /// Returns the number of requests of all runs. For a search for the highest load, the maximum number of
    /// its runs counts.
    fn requests(&self, trace: &Trace, fleets: usize) -> u64 {
        let searches = if self.max_load { MAX_RUNS as usize } else { 0 };
        let arms = self.arms.len() + usize::from(self.clairvoyant > 0);
        let runs = fleets * (arms * self.speed.len() + self.arms.len() * searches);
        trace.requests.len() as u64 * runs as u64 * self.seeds
    }

    fn study(
        &self,
        arms: &[Arm],
        trace: &Trace,
        fleets: &[(String, Fleet)],
        monitor: &Monitor,
    ) -> Result<Study, RunError> {
        let (mut comparisons, mut loads) = (Vec::new(), Vec::new());
        let mut all = || -> Result<(), RunError> {
            for (name, fleet) in fleets {
                for speed in &self.speed {
                    let plan = self.plan(arms, trace, (name, fleet), *speed);
                    comparisons.push(compare(&plan, monitor)?);
                }
                if self.max_load {
                    let start = self.speed.first().copied().unwrap_or(1.0);
                    loads.push(max_load(
                        &self.plan(arms, trace, (name, fleet), start),
                        self.slo_share,
                        monitor,
                    )?);
                }
            }
            Ok(())
        };
        match all() {
            Err(RunError::Interrupted) if !comparisons.is_empty() => {}
            result => result?,
        }
        Ok(Study::new(comparisons, loads, self.rank_by))
    }

    /// Returns the fleets by name, each with its own step times and then with those of `--step-time`.
    fn fleets(&self) -> anyhow::Result<Vec<(String, Fleet)>> {
        let mut fleets = Vec::new();
        for path in &self.fleet {
            let name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
            fleets.push((name, Fleet::read(path)?));
        }
        if fleets.is_empty() {
            let engines = vec![EngineGroup::new(Role::Aggregated, self.engines)];
            fleets.push((format!("{} engines", self.engines), Fleet { engines, ..Fleet::default() }));
        }
        let mut all: Vec<(String, Fleet)> = Vec::new();
        for (name, fleet) in fleets {
            let variants = self.step_time.iter().map(|step_time| fleet.clone().with_step_time(*step_time));
            for variant in std::iter::once(fleet.clone()).chain(variants) {
                if !all.iter().any(|(known, other)| *known == name && *other == variant) {
                    all.push((name.clone(), variant));
                }
            }
        }
        Ok(all)
    }

    fn plan<'a>(
        &self,
        arms: &'a [Arm],
        trace: &'a Trace,
        (fleet_name, fleet): (&'a str, &'a Fleet),
        speed: f64,
    ) -> Plan<'a> {
        let cores = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        Plan {
            arms,
            trace,
            fleet,
            fleet_name,
            seeds: self.seeds,
            options: RunOptions {
                seed: self.seed,
                speed,
                jitter: Duration::from_millis(self.jitter_ms),
                fixed_schedule: self.fixed_schedule,
            },
            slo: Slo { ttft_ms: self.slo_ttft_ms, itl_ms: self.slo_itl_ms },
            rank_by: self.rank_by,
            clairvoyant: self.clairvoyant,
            threads: self.threads.unwrap_or_else(cores).get(),
        }
    }
}

/// Writes a file completely, or leaves it as it was. A device or a pipe is written to, and not replaced.
fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if path.metadata().is_ok_and(|file| !file.is_file()) {
        return write_file(path, |out| out.write_all(bytes));
    }
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let written = std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path));
    written.with_context(|| format!("cannot write {}", path.display()))
}
