//! `fairness`: two tenants, one of which sends twenty times as much, against real processes. Both get tokens
//! by their weights while both wait. The light one hardly waits when it asks for less than its share.

use std::{path::Path, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rand::RngExt as _;
use serde_json::json;
use tokio::{task::JoinSet, time::Instant};

use crate::{
    client::Client,
    fleet::{self, EngineSpec, Fleet},
    setup, sh,
    stats::{quantile, sorted},
    table::Checks,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Seconds of each of the four measurements.
    #[arg(long, default_value_t = 30)]
    seconds: u64,
}

/// Largest deviation of a tenant's share of the served tokens from its weight, as a share of all.
const SHARE_ERROR: f64 = 0.05;
/// Largest ratio of the light tenant's p99 TTFT beside the heavy one to that alone.
const TTFT_RATIO: f64 = 1.2;
/// Requests of the heavy tenant for each of the light one.
const RATIO: usize = 20;
/// Time until the queue is full and every client had a turn.
const WARM_UP: Duration = Duration::from_secs(3);

/// Closed-loop clients of one tenant.
#[derive(Clone, Copy)]
struct Load {
    tenant: &'static str,
    clients: usize,
    /// Most output tokens of a request; the least is a third of it.
    tokens: u32,
}

/// What a tenant got in the measured time.
#[derive(Debug, Default)]
struct Served {
    /// Weighted tokens of complete requests.
    cost: f64,
    /// Times to the first token, milliseconds.
    ttft: Vec<f64>,
    failed: u64,
    problem: Option<String>,
}

/// Runs the measurements; returns an error when a limit is missed.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let bin = fleet::build("release")?;
    let time = Duration::from_secs(args.seconds);
    let mut checks = Checks::default();
    for weights in [(1.0, 1.0), (3.0, 1.0)] {
        shares(&bin, weights, time, &mut checks).await?;
    }
    first_tokens(&bin, time, &mut checks).await?;
    checks.finish()
}

/// Both tenants have more clients than the engines have places, so both always wait.
async fn shares(bin: &Path, weights: (f64, f64), time: Duration, checks: &mut Checks) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("pointsman-fairness-").tempdir()?;
    let fleet = start(bin, dir.path(), "--overhead-ms 20 --itl-ms 5", (2, 8), weights).await?;
    let light = Load { tenant: "light", clients: 24, tokens: 20 };
    let heavy = Load { tenant: "heavy", clients: 24 * RATIO, tokens: 60 };
    let [light, heavy] = measure(&fleet, &[light, heavy], time).await.try_into().unwrap_or_default();
    let share = light.cost / (light.cost + heavy.cost);
    let expected = weights.0 / (weights.0 + weights.1);
    let name = format!("weights {}:{}, light tenant's share of tokens", weights.0, weights.1);
    let shown = format!("{:.1} % (of {:.1} %)", share * 100.0, expected * 100.0);
    checks.check(&name, shown, (share - expected).abs() <= SHARE_ERROR);
    report_failures(checks, &[light, heavy]);
    Ok(())
}

/// The light tenant asks for less than its share; the heavy one always waits. Each engine runs one request at
/// a time: only the wait for a place differs, not the pace of an engine that shares its steps.
async fn first_tokens(bin: &Path, time: Duration, checks: &mut Checks) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("pointsman-fairness-").tempdir()?;
    let fleet = start(bin, dir.path(), "--overhead-ms 500 --itl-ms 5", (48, 1), (1.0, 1.0)).await?;
    let light = Load { tenant: "light", clients: 10, tokens: 60 };
    let heavy = Load { tenant: "heavy", clients: 10 * RATIO, tokens: 60 };
    let alone = measure(&fleet, &[light], time).await.pop().unwrap_or_default();
    let [beside, heavy] = measure(&fleet, &[light, heavy], time).await.try_into().unwrap_or_default();
    let p99 = |served: &Served| quantile(&sorted(served.ttft.clone()), 0.99);
    let (before, after) = (p99(&alone), p99(&beside));
    checks.show(
        "light tenant's requests, alone / beside",
        format!("{} / {}", alone.ttft.len(), beside.ttft.len()),
    );
    checks.show("heavy tenant's p99 TTFT", format!("{:.0} ms", p99(&heavy)));
    let shown = format!("{before:.0} / {after:.0} ms = {:.2}", after / before);
    checks.check("light tenant's p99 TTFT, alone / beside (limit 1.2)", shown, after <= before * TTFT_RATIO);
    report_failures(checks, &[alone, beside, heavy]);
    Ok(())
}

fn report_failures(checks: &mut Checks, all: &[Served]) {
    checks.none("requests that failed", all.iter().map(|served| served.failed).sum());
    if let Some(problem) = all.iter().find_map(|served| served.problem.as_ref()) {
        sh::status(&format!("the first failure: {problem}"));
    }
}

async fn start(
    bin: &Path,
    dir: &Path,
    flags: &str,
    (engines, places): (usize, u32),
    weights: (f64, f64),
) -> anyhow::Result<Fleet> {
    let flags = format!("{flags} --prefill-ms-per-token 0 --jitter 0 --load-factor 1 --natural-len 1000");
    let engine = EngineSpec::new("vllm", "aggregated", &flags).worker(&format!("max_concurrency={places}"));
    let config = format!(
        "[server]\ntenant_header = 'x-tenant'\n[auth]\ntrusted_proxies = ['127.0.0.0/8']\n[queue]\nlimit = 2000\ntimeout = '50s'\n\
         [tenants.light]\nweight = {:.1}\n[tenants.heavy]\nweight = {:.1}\n",
        weights.0, weights.1
    );
    fleet::start(bin, dir, &vec![engine; engines], &config).await
}

/// Runs all loads together for `time` after the warm-up. Returns what each tenant got.
async fn measure(fleet: &Fleet, loads: &[Load], time: Duration) -> Vec<Served> {
    let from = Instant::now() + WARM_UP;
    let results: Vec<Arc<Mutex<Served>>> = loads.iter().map(|_| Arc::default()).collect();
    let mut clients = JoinSet::new();
    for (load, served) in loads.iter().zip(&results) {
        for _ in 0..load.clients {
            clients.spawn(client(fleet.client.clone(), *load, (from, from + time), served.clone()));
        }
    }
    clients.join_all().await;
    results.iter().map(|served| std::mem::take(&mut *served.lock())).collect()
}

async fn client(client: Client, load: Load, (from, until): (Instant, Instant), served: Arc<Mutex<Served>>) {
    while Instant::now() < until {
        let tokens = rand::rng().random_range(load.tokens / 3..=load.tokens);
        let body = json!({
            "model": "tiny", "stream": true, "max_tokens": tokens,
            "messages": [{"role": "user", "content": "a question of eight or so tokens"}],
        });
        let seen = client.stream_chat(&[("x-tenant", load.tenant)], body.to_string()).await;
        let now = Instant::now();
        let mut served = served.lock();
        if !seen.complete {
            served.failed += 1;
            served.problem = served.problem.take().or(seen.problem);
        } else if (from..until).contains(&now) {
            // The weight of an output token is two, that of the short prompts hardly counts.
            served.cost += 2.0 * f64::from(tokens) + 8.0;
            served.ttft.extend(seen.ttft.map(|ttft| ttft.as_secs_f64() * 1e3));
        }
    }
}
