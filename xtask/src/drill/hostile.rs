//! `hostile`: installs bad policies one after another in a real gateway under a steady load. No request may
//! fail, each policy must end as specified, and repeating the whole list must not use more memory.

use std::{
    cell::{Cell, RefCell},
    path::Path,
};

use anyhow::bail;

use crate::{
    beside::Beside,
    fleet::{self, EngineSpec, Fleet},
    load::{Arrivals, Load, Target},
    sh,
    table::{Checks, columns},
};

mod bombs;
mod cases;
mod run;

use cases::Guests;
use run::Run;

/// Number of passes over the list.
const ROUNDS: u32 = 3;
/// Number of generated files, in the first round.
const GENERATED: u32 = 500;
/// Round after which memory must not grow. The first rounds meet every kind of failure and compile the
/// largest guests for the first time, so allocator caches and pages of the binary grow once. A leak grows in
/// every round.
const SETTLED: usize = 2;
/// Largest allowed growth of resident memory after that round, as a share.
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

/// Runs the cases whose names contain a text.
pub(super) async fn run(only: &str, seed: u64, bin: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let guests = Guests::build()?;
    let dir = tempfile::Builder::new().prefix("pointsman-drill-").tempdir()?;
    let fleet = start(bin, dir.path()).await?;
    let target = Target { address: fleet.gateway.listening(), authority: None, instance: 1 };
    let load = Load { arrivals: Arrivals::Paced(500.0, 16), ..Load::default() };
    let beside = Beside::start(&fleet, &target, load)?;
    let run = Run { fleet, guests, next: Cell::new(0), seen: RefCell::default() };
    let mut memory = vec![run.warm_up().await?];
    let head = ["case", "file", "expected", "peak MB", "p99 ms", "good after s", ""];
    let (mut rows, mut wrong) = (vec![head.map(str::to_owned).to_vec()], 0);
    for round in 0..ROUNDS {
        let mut cases = cases::all(&run.guests, round)?;
        cases.extend(bombs::cases(&run.guests));
        if round == 0 {
            cases.extend(bombs::generated(&run.guests, seed, GENERATED));
        }
        cases.retain(|case| case.name.contains(only));
        let progress = sh::progress(cases.len() as u64, "cases");
        for case in &cases {
            let (row, passed) = run.row(case, &beside).await;
            wrong += u64::from(!passed);
            progress.inc(1);
            if !passed {
                progress.suspend(|| sh::status(&row.join(" | ")));
            }
            rows.push(row);
        }
        progress.finish_and_clear();
        memory.push(run.settled().await?);
    }
    let (sent, failed, problems) = beside.stop().await;
    columns(&rows).iter().for_each(|line| sh::print(line));
    problems.iter().for_each(|problem| sh::status(&format!("well-behaved client: {problem}")));
    checks.check("requests sent", sent, sent > 0);
    checks.none("requests that failed", failed as u64);
    checks.check("cases", rows.len() - 1, rows.len() > 1);
    checks.none("cases that ended in another way", wrong);
    for (round, memory) in memory.iter().enumerate() {
        checks.show(&format!("memory after round {round}"), memory);
    }
    let Some([before, .., after]) = memory.get(SETTLED..) else { bail!("memory was not read") };
    let growth = after.resident / before.resident - 1.0;
    let what = format!("growth of resident memory since round {SETTLED} (limit 5 %)");
    checks.check(&what, format!("{:+.1} %", growth * 100.0), growth <= GROWTH);
    Ok(())
}

/// Starts two prefill and two decode engines, and the gateway.
async fn start(bin: &Path, dir: &Path) -> anyhow::Result<Fleet> {
    let flags = "--overhead-ms 1 --prefill-ms-per-token 0 --itl-ms 1";
    let engines = ["prefill", "decode"].map(|role| vec![EngineSpec::new("vllm", role, flags); 2]).concat();
    fleet::start(bin, dir, &engines, CONFIG).await
}
