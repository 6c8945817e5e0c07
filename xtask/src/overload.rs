//! `overload`: ten times as many requests as the engines can serve. Goodput and memory hold, refusals are
//! quick, and the gateway serves as before when the load ends.

use std::{sync::Arc, time::Duration};

use anyhow::ensure;
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    client::{CHAT, Client},
    fleet::{self, EngineSpec, Fleet},
    proc::Memory,
    setup, sh,
    stats::{quantile, sorted},
    table::Checks,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Seconds of overload.
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// Load, as a multiple of the capacity.
    #[arg(long, default_value_t = 10)]
    times: u32,
}

const PLACES: u32 = 5;
const ENGINES: u32 = 2;
/// 20 tokens of 10 ms. A prompt takes no time: while one is computed, the engine's other requests stand
/// still, and its capacity would depend on whether requests begin together.
const FLAGS: &str =
    "--overhead-ms 0 --itl-ms 10 --prefill-ms-per-token 0 --jitter 0 --load-factor 1 --natural-len 20";
/// The refused requests are answered at once: the queue is full.
const CONFIG: &str = "[queue]\nlimit = 20\ntimeout = '5s'\n[decisions]\nkeep = 1000\nbytes = 1048576\n";
const BODY: &str =
    r#"{"model":"tiny","max_tokens":20,"messages":[{"role":"user","content":"a small question"}]}"#;

/// Smallest goodput, as a share of the peak.
const GOODPUT: f64 = 0.9;
/// Largest growth of memory between the first fifth of the overload and its end, as a share.
const GROWTH: f64 = 0.1;
/// Largest p99 of a refusal, milliseconds.
const REFUSAL_MS: f64 = 5.0;
/// Longest time from the end of the overload until a request is served as quickly as before.
const RECOVERY: Duration = Duration::from_secs(5);
/// Requests that the load generator has open at most.
const MAX_OPEN: usize = 2_000;

/// How requests ended.
#[derive(Debug, Default)]
struct Seen {
    served: u64,
    /// Milliseconds.
    refusals: Vec<f64>,
    other: u64,
    problem: Option<String>,
}

/// Runs the overload; returns an error when a limit is missed.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.seconds >= 5, "--seconds {}: expected 5 or more", args.seconds);
    setup::run()?;
    let bin = fleet::build("release")?;
    let dir = tempfile::Builder::new().prefix("pointsman-overload-").tempdir()?;
    let engine = EngineSpec::new("vllm", "aggregated", FLAGS).worker(&format!("max_concurrency={PLACES}"));
    let fleet = fleet::start(&bin, dir.path(), &vec![engine; ENGINES as usize], CONFIG).await?;
    let mut checks = Checks::default();
    let idle = one(&fleet.client).await;
    let peak = peak(&fleet, Duration::from_secs(10.min(args.seconds))).await;
    checks.show("peak goodput, requests per second", format!("{peak:.1}"));
    let time = Duration::from_secs(args.seconds);
    let (seen, memory) = overload(&fleet, peak * f64::from(args.times), time).await?;
    judge(&mut checks, seen, peak, time);
    let [first, .., last] = memory[..] else { anyhow::bail!("no memory was read") };
    let shown = format!("{:.1} / {:.1} MB", first.anonymous, last.anonymous);
    let grew = last.anonymous / first.anonymous - 1.0;
    checks.check("memory after a fifth / at the end (limit +10 %)", shown, grew <= GROWTH);
    let took = recovery(&fleet, idle * 2 + Duration::from_millis(50)).await;
    let shown = took.map_or("never".to_owned(), |took| format!("{:.1} s", took.as_secs_f64()));
    checks.check("recovery (limit 5 s)", shown, took.is_some_and(|took| took <= RECOVERY));
    checks.none("bookings left", fleet.booked(Duration::from_secs(5)).await?);
    checks.finish()
}

/// Requests per second of twice as many clients as the engines have places.
async fn peak(fleet: &Fleet, time: Duration) -> f64 {
    let until = Instant::now() + time;
    let mut clients = JoinSet::new();
    for _ in 0..2 * PLACES * ENGINES {
        let client = fleet.client.clone();
        clients.spawn(async move {
            let mut served = 0_u32;
            while Instant::now() < until {
                served += u32::from(send(&client).await.0.is_ok_and(|status| status == StatusCode::OK));
            }
            served
        });
    }
    let served: u32 = clients.join_all().await.iter().sum();
    f64::from(served) / time.as_secs_f64()
}

/// Sends `rate` requests per second, whatever becomes of them. Reads the memory five times.
async fn overload(fleet: &Fleet, rate: f64, time: Duration) -> anyhow::Result<(Seen, Vec<Memory>)> {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let (start, mut open, mut memory) = (Instant::now(), JoinSet::new(), Vec::new());
    let mut sent = 0_u32;
    while start.elapsed() < time {
        sleep_until(start + Duration::from_secs_f64(f64::from(sent) / rate)).await;
        sent += 1;
        while open.try_join_next().is_some() {}
        if open.len() < MAX_OPEN {
            open.spawn(note(fleet.client.clone(), seen.clone(), start + time));
        }
        if start.elapsed() >= time / 5 * (u32::try_from(memory.len())? + 1) {
            memory.push(Memory::of(fleet.gateway.pid())?);
        }
    }
    memory.push(Memory::of(fleet.gateway.pid())?);
    open.join_all().await;
    let seen = std::mem::take(&mut *seen.lock());
    Ok((seen, memory))
}

async fn note(client: Client, seen: Arc<Mutex<Seen>>, until: Instant) {
    let (status, took) = send(&client).await;
    let in_time = Instant::now() < until;
    let mut seen = seen.lock();
    match status {
        Ok(StatusCode::OK) => seen.served += u64::from(in_time),
        Ok(status) if status.as_u16() == 529 => seen.refusals.push(took.as_secs_f64() * 1e3),
        Ok(status) => {
            seen.other += 1;
            seen.problem.get_or_insert_with(|| status.to_string());
        }
        Err(error) => {
            seen.other += 1;
            seen.problem.get_or_insert_with(|| format!("{error:#}"));
        }
    }
}

fn judge(checks: &mut Checks, seen: Seen, peak: f64, time: Duration) {
    #[expect(clippy::cast_precision_loss, reason = "a count")]
    let goodput = seen.served as f64 / time.as_secs_f64();
    let shown = format!("{goodput:.1}/s = {:.0} %", goodput / peak * 100.0);
    checks.check("goodput under overload (limit 90 % of peak)", shown, goodput >= peak * GOODPUT);
    let refusals = sorted(seen.refusals);
    checks.check("requests refused with 529", refusals.len(), !refusals.is_empty());
    let [p50, p99] = [0.5, 0.99].map(|share| quantile(&refusals, share));
    let shown = format!("{p50:.2} / {p99:.2} ms");
    checks.check("refusals, p50 / p99 (limit 5 ms)", shown, p99 < REFUSAL_MS);
    checks.none("requests with another end", seen.other);
    if let Some(problem) = seen.problem {
        sh::status(&format!("the first of these: {problem}"));
    }
}

/// Returns how long it takes until a request is served within `limit`; `None`: longer than twice the limit of
/// the recovery.
async fn recovery(fleet: &Fleet, limit: Duration) -> Option<Duration> {
    let start = Instant::now();
    while start.elapsed() < RECOVERY * 2 {
        if one(&fleet.client).await <= limit {
            return Some(start.elapsed());
        }
        sleep(Duration::from_millis(50)).await;
    }
    None
}

/// Time of one served request; a long one when it is not served.
async fn one(client: &Client) -> Duration {
    match send(client).await {
        (Ok(StatusCode::OK), took) => took,
        _ => Duration::from_secs(60),
    }
}

async fn send(client: &Client) -> (anyhow::Result<StatusCode>, Duration) {
    let started = Instant::now();
    let exchange = async {
        let answer = client.send(Method::POST, CHAT, &[], BODY.into()).await?;
        let status = answer.status();
        answer.into_body().collect().await?;
        Ok(status)
    };
    let status = exchange.await;
    (status, started.elapsed())
}
