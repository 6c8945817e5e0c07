//! `lab-scale`: checks that a large simulation stays within a memory limit, that equal seeds give equal
//! bytes, and that a compiled policy is fast enough.

use std::{
    path::{Path, PathBuf},
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
    /// Number of requests in the large run.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    requests: u32,
    /// Number of engines in the large run.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    engines: u32,
    /// Arrivals a second for each engine in the large run.
    #[arg(long, default_value_t = 4.0)]
    rate: f64,
    /// Number of requests in the two runs whose bytes must be equal.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    again: u32,
    /// Maximum resident memory, gigabytes.
    #[arg(long, default_value_t = 8.0)]
    max_gigabytes: f64,
    /// Mooncake's conversation trace, to run completely on 8 engines with a compiled policy.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Maximum wall time of the run of `trace`, seconds. Dynamo's offline replay takes this time on two
    /// cores.
    #[arg(long, default_value_t = 5.5)]
    max_seconds: f64,
}

/// Resources that a process used.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    wall: Duration,
    cpu: Duration,
    peak_mb: f64,
}

/// Prints the resources of the runs; returns an error when one exceeds its limit.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let lab = fleet::build_programs("release", &[fleet::LAB])?.join(fleet::LAB.name);
    let dir = tempfile::Builder::new().prefix("pointsman-lab-scale-").tempdir()?;
    let load = || std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let before = load();
    let mut checks = Checks::default();
    large(args, &lab, dir.path(), &mut checks).await?;
    again(args, &lab, dir.path(), &mut checks)?;
    if let Some(trace) = &args.trace {
        policy(args, &lab, trace, &mut checks).await?;
    }
    sh::status(&format!("load average before and after: {} / {}", before.trim(), load().trim()));
    checks.finish()
}

async fn large(args: &Args, lab: &Path, dir: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let trace = dir.join("large.jsonl");
    generate(args, lab, args.requests, &trace)?;
    let mut compare = Command::new(lab);
    compare.args(["compare", "--trace-block", TRACE_BLOCK, "--arm", "kv", "--seeds", "1", "--threads", "1"]);
    compare.arg("--engines").arg(args.engines.to_string()).arg("--trace").arg(&trace);
    let used = measure(&mut compare).await?;
    let what = format!("{} requests on {} engines, wall and CPU", args.requests, args.engines);
    checks.show(&what, format!("{:.1} s, {:.1} s", used.wall.as_secs_f64(), used.cpu.as_secs_f64()));
    let gigabytes = used.peak_mb / 1e3;
    checks.check("peak of resident memory", format!("{gigabytes:.2} GB"), gigabytes <= args.max_gigabytes);
    Ok(())
}

/// Runs the same trace with the same seed twice.
fn again(args: &Args, lab: &Path, dir: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let (trace, fleet) = (dir.join("again.jsonl"), dir.join("fleet.toml"));
    generate(args, lab, args.again, &trace)?;
    let count = args.engines;
    std::fs::write(&fleet, format!("block_tokens = {TRACE_BLOCK}\n[[engines]]\ncount = {count}\n"))?;
    let run = |name: &str| -> anyhow::Result<Vec<u8>> {
        let output = dir.join(name);
        let mut command = Command::new(lab);
        command.args(["trace", "run"]).arg(&trace).args([
            "--trace-block",
            TRACE_BLOCK,
            "--arm",
            "power-of-two",
        ]);
        command.args(["--seed", "7"]).arg("--fleet").arg(&fleet).arg("-o").arg(&output);
        ensure!(command.stdout(Stdio::null()).status()?.success(), "pointsman-lab trace run failed");
        Ok(std::fs::read(&output)?)
    };
    let (one, other) = (run("one.jsonl")?, run("other.jsonl")?);
    let what = format!("two runs of {} requests with one seed", args.again);
    checks.check(&what, format!("{} bytes", one.len()), !one.is_empty() && one == other);
    Ok(())
}

async fn policy(args: &Args, lab: &Path, trace: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let run = async |arm: &str| {
        let mut compare = Command::new(lab);
        compare.args(["compare", "--engines", "8", "--seeds", "1", "--threads", "1", "--arm", arm]);
        measure(compare.arg("--trace").arg(trace)).await
    };
    let (compiled, native) = (run("kv-aware").await?, run("kv").await?);
    let show = |used: Used| format!("{:.2} s, {:.2} s", used.wall.as_secs_f64(), used.cpu.as_secs_f64());
    let in_time = compiled.wall.as_secs_f64() <= args.max_seconds;
    checks.check("whole trace on 8 engines, kv-aware, wall and CPU", show(compiled), in_time);
    checks.show("the same with the native mode kv", show(native));
    Ok(())
}

fn generate(args: &Args, lab: &Path, requests: u32, to: &Path) -> anyhow::Result<()> {
    let rate = args.rate * f64::from(args.engines);
    let mut command = Command::new(lab);
    command.args(["trace", "generate", "system-prompts", "--requests", &requests.to_string()]);
    command.args(["--rate", &rate.to_string(), "-o"]).arg(to);
    ensure!(command.stdout(Stdio::null()).status()?.success(), "pointsman-lab trace generate failed");
    Ok(())
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
