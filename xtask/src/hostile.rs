//! `hostile`: bad policies installed one after another in a real gateway under a steady load. No request may
//! fail, each policy has to end as specified, and repeating the whole list may not cost memory.

use std::{
    cell::{Cell, RefCell},
    path::Path,
    time::Duration,
};

use anyhow::ensure;

use crate::{
    fleet::{self, EngineSpec, Fleet},
    load::{FixedRate, Summary},
    proc::Memory,
    setup, sh,
};

mod bombs;
mod cases;
mod run;
mod verdict;

use cases::Guests;
use run::{Bounds, Run};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Requests a second.
    #[arg(long, default_value_t = 500)]
    rate: u32,
    /// Run only cases whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Passes over the list. Memory is printed after each pass and judged from the end of the second on.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Number of generated files, in the first round.
    #[arg(long, default_value_t = 500)]
    generated: u32,
    /// Seed of the generated files; 0: another one each time.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Largest growth of the gateway's peak memory in a row, megabytes.
    #[arg(long, default_value_t = 150.0)]
    peak_mb: f64,
    /// Largest 99th percentile of the latency of requests in a row, milliseconds.
    #[arg(long, default_value_t = 250)]
    p99_ms: u64,
    /// Longest time until the next good file serves, seconds.
    #[arg(long, default_value_t = 5)]
    good_after_s: u64,
}

const CLIENTS: u32 = 16;
/// Round after which memory may not grow. The first rounds meet every kind of failure and compile the largest
/// guests for the first time, so allocator caches and pages of the binary grow once. A leak grows in every
/// round.
const SETTLED: usize = 2;
/// Largest allowed growth of resident memory from then on, as a share.
const GROWTH: f64 = 0.05;

const CONFIG: &str = r#"
[policies]
rescan = "1s"
compile_cpu = "5s"
[policies.slots.decode]
grants = ["log", "wasi", "state"]
[decisions]
keep = 1000
bytes = 1048576
"#;

/// Runs the cases; returns an error when one ended differently, a request failed or memory grew.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let guests = Guests::build()?;
    let bin = fleet::build("release")?;
    let dir = tempfile::Builder::new().prefix("pointsman-hostile-").tempdir()?;
    let fleet = start(&bin, dir.path()).await?;
    let load = FixedRate::start(&fleet.client, args.rate, CLIENTS);
    let bounds = Bounds {
        peak_mb: args.peak_mb,
        p99: Duration::from_millis(args.p99_ms),
        good_after: Duration::from_secs(args.good_after_s),
    };
    let run = Run { fleet, guests, bounds, next: Cell::new(0), seen: RefCell::default() };
    let seed = if args.seed == 0 { rand::random() } else { args.seed };
    sh::print(&format!("seed of the generated files: {seed}"));
    let mut memory = vec![run.warm_up().await?];
    let (mut rows, mut wrong) = (Vec::new(), 0);
    for round in 0..args.rounds {
        let mut cases = cases::all(&run.guests, round)?;
        cases.extend(bombs::cases(&run.guests));
        if round == 0 {
            cases.extend(bombs::generated(&run.guests, seed, args.generated));
        }
        cases.retain(|case| args.only.as_ref().is_none_or(|only| case.name.contains(only)));
        let progress = sh::progress(cases.len() as u64, "cases");
        for case in &cases {
            let (row, passed) = run.row(case, &load).await;
            wrong += u32::from(!passed);
            progress.inc(1);
            let now = Memory::of(run.fleet.gateway.pid())?;
            progress.suspend(|| sh::status(&format!("{row} {now}")));
            rows.push(row);
        }
        progress.finish_and_clear();
        memory.push(run.settled().await?);
    }
    let summary = load.stop().await;
    sh::print("| case | file | expected | /policies | /metrics | peak MB | p99 ms | next good after s | |");
    sh::print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    rows.iter().for_each(|row| sh::print(row));
    judge(&summary, rows.len(), wrong, &memory)
}

/// Two prefill and two decode engines, and the gateway.
async fn start(bin: &Path, dir: &Path) -> anyhow::Result<Fleet> {
    let flags = "--overhead-ms 1 --prefill-ms-per-token 0 --itl-ms 1";
    let engines = ["prefill", "decode"].map(|role| vec![EngineSpec::new("vllm", role, flags); 2]).concat();
    fleet::start(bin, dir, &engines, CONFIG).await
}

fn judge(summary: &Summary, cases: usize, wrong: u32, memory: &[Memory]) -> anyhow::Result<()> {
    sh::print(&format!(
        "\n{cases} cases, {wrong} wrong; {} requests sent, {} failed",
        summary.sent, summary.failed
    ));
    for (round, memory) in memory.iter().enumerate() {
        sh::print(&format!("after round {round}: {memory}"));
    }
    ensure!(cases > 0, "no case has a name that contains the text of --only");
    summary.all_served()?;
    ensure!(wrong == 0, "{wrong} cases ended differently from what is specified");
    let Some([before, .., after]) = memory.get(SETTLED..) else {
        sh::print("memory is not judged: pass --rounds 3 or more");
        return Ok(());
    };
    let growth = after.resident / before.resident - 1.0;
    sh::print(&format!("growth of resident memory since round {SETTLED}: {:+.1} %", growth * 100.0));
    ensure!(growth <= GROWTH, "memory grew from {before} to {after}; the limit is 5 %");
    Ok(())
}
