//! The commands `pointsman compare` and `pointsman trace`.

use std::{
    io,
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use clap::{Args, Subcommand, ValueEnum};
use pointsman_cli::print;
use tokio::time::Duration;

use crate::{
    decision_log::ExportArgs,
    generate::{Shape, Workload, generate},
    output_file::{check_outputs, output_file, write_file},
    trace::Trace,
};

mod compare;
mod progress;
mod trace_args;
mod trace_run;

pub use compare::CompareArgs;
use progress::Progress;
use trace_args::TraceArgs;
pub use trace_run::RunArgs;

/// Traces: convert, generate and run.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Write a trace as Mooncake JSONL.
    Import(ImportArgs),
    /// Turn the decision log of a gateway into a trace, as Mooncake JSONL.
    Export(ExportArgs),
    /// Generate a trace, as Mooncake JSONL with blocks of 64 tokens (agents: 512).
    Generate(GenerateArgs),
    /// Run a trace through one arm, and write each request's outcome as JSON lines.
    Run(RunArgs),
}

/// Arguments of `trace import`.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// The trace.
    file: PathBuf,
    #[command(flatten)]
    reading: TraceArgs,
    /// Start this many sessions a second, at random times (Poisson), instead of at the times in the file.
    #[arg(long, value_parser = positive)]
    rate: Option<f64>,
    /// Seed of these random start times.
    #[arg(long, default_value = "1")]
    seed: u64,
    /// File to write the trace to.
    #[arg(short, long, value_parser = output_file)]
    output: PathBuf,
}

/// Arguments of `trace generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Shape of the requests.
    #[arg(value_enum)]
    shape: ShapeName,
    /// Number of requests.
    #[arg(long, default_value = "1000", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    requests: u32,
    /// Mean arrivals of requests a second [default: 10]; for agents, mean starts of sessions a second
    /// [default: 0.1].
    #[arg(long, value_parser = positive)]
    rate: Option<f64>,
    /// Burstiness: the squared coefficient of variation of the intervals between arrivals. 1: Poisson.
    #[arg(long, default_value = "1", value_parser = positive)]
    burstiness: f64,
    /// Number of turns of a conversation, groups of agents, system prompts or documents, by shape [default:
    /// 5, 100, 20, 1000].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: Option<u32>,
    /// Targets of the clients for the time to first token, milliseconds. Each request has one of them, at
    /// random [default: none].
    #[arg(long, value_delimiter = ',', value_name = "MS", value_parser = positive)]
    ttft_targets_ms: Vec<f64>,
    /// Seed of the random numbers.
    #[arg(long, default_value = "1")]
    seed: u64,
    /// File to write the trace to.
    #[arg(short, long, value_parser = output_file)]
    output: PathBuf,
}

/// Shape of generated requests.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ShapeName {
    /// Conversations of several turns.
    Chat,
    /// Sessions of coding agents with tools, pauses and sub-agents.
    Agents,
    /// A few long system prompts, each before many short questions.
    SystemPrompts,
    /// Questions about some of many documents.
    Documents,
}

fn positive(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| format!("\"{text}\" is not a number"))?;
    let named = || format!("{text} is not within 1e-6 to 1e9");
    (1e-6..=1e9).contains(&value).then_some(value).ok_or_else(named)
}

impl TraceCommand {
    /// Runs the command.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let (trace, output) = match self {
            Self::Import(args) => {
                check_outputs(&[("the trace", &args.file)], [&args.output])?;
                let trace = args.reading.read(&args.file, None)?;
                let trace =
                    args.rate.into_iter().fold(trace, |trace, rate| trace.with_starts(rate, args.seed));
                (trace, &args.output)
            }
            Self::Export(args) => {
                print(&args.run()?)?;
                return Ok(ExitCode::SUCCESS);
            }
            Self::Generate(args) => {
                check_outputs(&[], [&args.output])?;
                let targets: Vec<Duration> =
                    args.ttft_targets_ms.iter().map(|target| Duration::from_secs_f64(target / 1e3)).collect();
                (generate(&args.workload()).with_ttft_targets(&targets, args.seed), &args.output)
            }
            Self::Run(args) => return args.run(),
        };
        let lines: Arc<AtomicU64> = Arc::default();
        let (written, total) = (Arc::clone(&lines), trace.requests.len() as u64);
        let name = format!("writing {}", output.display());
        let shown = Progress::start(move || written.load(Relaxed), total, name, "requests");
        write_file(output, |out| trace.write_mooncake(CountedLines { out, lines: &lines }))?;
        drop(shown);
        print_notes(&trace)?;
        let read = trace.format.map_or_else(String::new, |format| format!(", read as {}", format.name()));
        let span = trace.requests.last().map_or(Duration::ZERO, |request| request.at);
        print(&format!(
            "{}: {} requests in {:.0} s{read}, blocks of {} tokens, {} malformed lines left out; an unlimited cache of such \
             blocks would hold {:.1} % of the prompt tokens\n",
            output.display(),
            trace.requests.len(),
            span.as_secs_f64(),
            trace.block_tokens,
            trace.skipped,
            trace.endless_cache_hit_rate() * 100.0,
        ))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Counts the lines of a trace, of which each end is a write of its own.
struct CountedLines<'a, W> {
    out: W,
    lines: &'a AtomicU64,
}

impl<W: io::Write> io::Write for CountedLines<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lines.fetch_add(u64::from(bytes == b"\n"), Relaxed);
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Prints what a reader of a trace's results has to know.
fn print_notes(trace: &Trace) -> anyhow::Result<()> {
    trace.notes.iter().try_for_each(|note| print(&format!("warning: {note}\n")))
}

impl GenerateArgs {
    fn workload(&self) -> Workload {
        let shape = match self.shape {
            ShapeName::Chat => Shape::Chat { turns: self.count.unwrap_or(5) },
            ShapeName::Agents => Shape::Agents { groups: self.count.unwrap_or(100) },
            ShapeName::SystemPrompts => Shape::SystemPrompts { prompts: self.count.unwrap_or(20) },
            ShapeName::Documents => Shape::Documents { documents: self.count.unwrap_or(1_000) },
        };
        let rate = self.rate.unwrap_or(if matches!(shape, Shape::Agents { .. }) { 0.1 } else { 10.0 });
        let Self { burstiness, seed, .. } = *self;
        Workload { shape, requests: self.requests as usize, rate, burstiness, seed }
    }
}
