//! `lab-scale`: checks that a large simulation stays within a memory limit.

use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use tokio::time::Instant;

use crate::{fleet, proc, sh, table::Checks};

/// Time between two readings of the memory and CPU time of a run. CPU time after the last reading is not
/// counted.
const LOOK: Duration = Duration::from_millis(50);
/// Number of tokens in a block of generated traces.
const TRACE_BLOCK: &str = "64";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of requests.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    requests: u32,
    /// Number of engines.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    engines: u32,
    /// Arrivals a second for each engine.
    #[arg(long, default_value_t = 4.0)]
    rate: f64,
    /// Maximum resident memory, gigabytes.
    #[arg(long, default_value_t = 8.0)]
    max_gigabytes: f64,
}

/// Resources that a process used.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    wall: Duration,
    cpu: Duration,
    peak_mb: f64,
}

/// Prints the resources of the run; returns an error when it needs too much memory.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let lab = fleet::build_programs("release", &[fleet::LAB])?.join(fleet::LAB.name);
    let dir = tempfile::Builder::new().prefix("pointsman-lab-scale-").tempdir()?;
    let load = || std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let (before, trace) = (load(), dir.path().join("trace.jsonl"));
    let rate = args.rate * f64::from(args.engines);
    let mut generate = Command::new(&lab);
    generate.args(["trace", "generate", "system-prompts", "--requests", &args.requests.to_string()]);
    sh::run(generate.args(["--rate", &rate.to_string(), "-o"]).arg(&trace).stdout(Stdio::null()))?;
    let mut compare = Command::new(&lab);
    compare.args(["compare", "--trace-block", TRACE_BLOCK, "--arm", "kv", "--seeds", "1", "--threads", "1"]);
    compare.arg("--engines").arg(args.engines.to_string()).arg("--trace").arg(&trace);
    let used = measure(&mut compare).await?;
    let mut checks = Checks::default();
    let what = format!("{} requests on {} engines, wall and CPU", args.requests, args.engines);
    checks.show(&what, format!("{:.1} s, {:.1} s", used.wall.as_secs_f64(), used.cpu.as_secs_f64()));
    let gigabytes = used.peak_mb / 1e3;
    checks.check("peak of resident memory", format!("{gigabytes:.2} GB"), gigabytes <= args.max_gigabytes);
    sh::status(&format!("load average before and after: {} / {}", before.trim(), load().trim()));
    checks.finish()
}

/// Runs a command until it ends.
async fn measure(command: &mut Command) -> anyhow::Result<Used> {
    let begun = Instant::now();
    let mut child: Child = command.stdout(Stdio::null()).spawn().context("could not start pointsman-lab")?;
    let mut used = Used::default();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        used.cpu = used.cpu.max(Duration::from_nanos(proc::cpu_nanos(child.id())));
        used.peak_mb = used.peak_mb.max(proc::peak_mb(child.id()).unwrap_or_default());
        tokio::time::sleep(LOOK).await;
    };
    used.wall = begun.elapsed();
    ensure!(status.success(), "pointsman-lab ended with {status}");
    Ok(used)
}
