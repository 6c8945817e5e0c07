//! Clients that disconnect at random times: upstream work stops where it may, and committed handoffs are
//! consumed.

use std::{
    collections::HashMap,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use rand::RngExt as _;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::LEAKS;
use crate::{
    client::{CHAT, Client},
    fleet::{self, EngineSpec, Fleet},
    load::closed_loop,
    metrics_text,
    proc::monotonic_nanos,
    sh,
    stats::{quantile, sorted},
    table::Checks,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Clients of each part.
    #[arg(long, default_value_t = 2_000)]
    clients: u64,
    /// Clients at once.
    #[arg(long, default_value_t = 40)]
    at_once: usize,
}

/// Longest time from a client's disconnect to the engine's notice, p99, milliseconds.
const NOTICE_MS: f64 = 100.0;

/// What a client saw before it disconnected.
#[derive(Debug, Default)]
struct Visit {
    /// The answer's `id`, from the first event.
    id: Option<String>,
    /// A token arrived.
    token: bool,
    /// The client disconnected before the answer's end.
    left: bool,
}

pub(super) async fn run(args: &Args, bin: &Path) -> anyhow::Result<()> {
    let mut checks = Checks::default();
    stops_at_once(args, bin, &mut checks).await?;
    for dialect in ["vllm", "sglang"] {
        consumes(args, bin, dialect, &mut checks).await?;
    }
    checks.finish()
}

/// Measures how soon the decode engine notices that the client of a stream left.
async fn stops_at_once(args: &Args, bin: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("pointsman-storm-").tempdir()?;
    let flags =
        "--overhead-ms 20 --prefill-ms-per-token 0 --itl-ms 2 --jitter 0 --load-factor 1 --record 10000";
    let engines = ["prefill", "decode"].map(|role| EngineSpec::new("vllm", role, flags));
    let fleet = fleet::start(bin, dir.path(), &engines, "").await?;
    let left: Mutex<Vec<(String, u64)>> = Mutex::default();
    let progress = sh::progress(args.clients, "clients");
    closed_loop(args.clients, args.at_once, |_| {
        let (fleet, left, progress) = (&fleet, &left, &progress);
        async move {
            let visit = visit(&fleet.client, stay(), true).await;
            if let Some(id) = visit.id.filter(|_| visit.token && visit.left) {
                left.lock().push((id, monotonic_nanos()));
            }
            progress.inc(1);
        }
    })
    .await;
    progress.finish_and_clear();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let noticed = disconnects(&fleet).await?;
    let left = left.into_inner();
    let took = left.iter().filter_map(|(id, at)| Some(noticed.get(id)?.saturating_sub(*at)));
    #[expect(clippy::cast_precision_loss, reason = "a time to show")]
    let took = sorted(took.map(|nanos| nanos as f64 / 1e6).collect());
    checks.check("clients that disconnected after the first token", left.len(), !left.is_empty());
    checks.none("of these, decode legs that were not stopped", (left.len() - took.len()) as u64);
    let [p50, p99] = [quantile(&took, 0.5), quantile(&took, 0.99)];
    let shown = format!("{p50:.1} / {p99:.1} ms");
    checks.check("disconnect to notice at the engine, p50 / p99 (limit 100 ms)", shown, p99 < NOTICE_MS);
    checks.none("bookings left", fleet.booked(Duration::from_secs(5)).await?);
    Ok(())
}

/// When each answer's connection was closed by its reader, by the answer's id, as the engines recorded it.
async fn disconnects(fleet: &Fleet) -> anyhow::Result<HashMap<String, u64>> {
    let mut all = HashMap::new();
    for engine in &fleet.engines {
        let list = engine.client().json("/sim/disconnects").await?;
        for entry in list.as_array().into_iter().flatten() {
            if let (Some(id), Some(at)) = (entry["id"].as_str(), entry["at_ns"].as_u64()) {
                all.insert(id.to_owned(), at);
            }
        }
    }
    Ok(all)
}

/// Checks that committed handoffs are consumed, on engines that count them strictly.
async fn consumes(args: &Args, bin: &Path, dialect: &str, checks: &mut Checks) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("pointsman-storm-").tempdir()?;
    let flags = "--lease-s 5 --overhead-ms 20 --prefill-ms-per-token 0.05 --itl-ms 5";
    let engines = ["prefill", "decode"].map(|role| vec![EngineSpec::new(dialect, role, flags); 2]).concat();
    let fleet = fleet::start(bin, dir.path(), &engines, "").await?;
    let (tokens, left) = (AtomicU64::new(0), AtomicU64::new(0));
    let progress = sh::progress(args.clients, dialect);
    closed_loop(args.clients, args.at_once, |_| {
        let (fleet, tokens, left, progress) = (&fleet, &tokens, &left, &progress);
        async move {
            let stream = rand::rng().random_bool(0.7);
            let visit = visit(&fleet.client, stay(), stream).await;
            tokens.fetch_add(u64::from(visit.token), Ordering::Relaxed);
            left.fetch_add(u64::from(visit.left), Ordering::Relaxed);
            progress.inc(1);
        }
    })
    .await;
    progress.finish_and_clear();
    let booked = fleet.booked(Duration::from_secs(10)).await?;
    // Leases end after 5 s.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let left = left.into_inner();
    checks.check(&format!("{dialect}: clients that disconnected"), left, left > 0);
    checks.show(&format!("{dialect}: clients that saw a token"), tokens.into_inner());
    if dialect == "vllm" {
        let metrics = fleet.metrics().await?;
        let complete =
            metrics_text::sum_with(&metrics, "pointsman_handoffs_total", &[("reason", "complete")]);
        // Both engines of a pull count it.
        let pulled = fleet.engines_sum("/handoffs/pulled").await / 2;
        #[expect(clippy::cast_precision_loss, reason = "a count of thousands")]
        let equal = complete == pulled as f64;
        checks.check("vllm: handoffs committed, pulled", format!("{complete}, {pulled}"), equal);
    }
    checks.show(&format!("{dialect}: sequences aborted"), fleet.engines_sum("/aborted").await);
    let leaks = [("handoffs stranded", "/stranded"), ("blocks pinned", "/pinned_blocks")];
    for (what, pointer) in leaks.into_iter().chain(LEAKS) {
        checks.none(&format!("{dialect}: {what}"), fleet.engines_sum(pointer).await);
    }
    checks.none(&format!("{dialect}: bookings left"), booked);
    Ok(())
}

fn stay() -> Duration {
    Duration::from_millis(rand::rng().random_range(0..250))
}

/// Sends a request, reads for `stay`, and disconnects.
async fn visit(client: &Client, stay: Duration, stream: bool) -> Visit {
    let body = json!({
        "model": "tiny", "stream": stream, "max_tokens": 400, "ignore_eos": true,
        "messages": [{ "role": "user", "content": format!("{} leaves ", rand::random::<u32>()).repeat(12) }],
    });
    let mut visit = Visit::default();
    let read = async {
        let mut answer = client.stream(CHAT, &[], body.to_string()).await?;
        while let Some(event) = answer.next().await? {
            visit.note(&event);
        }
        Ok::<_, anyhow::Error>(())
    };
    // The timeout drops the answer, which closes the connection.
    let ended = timeout_at(Instant::now() + stay, read).await;
    visit.left = ended.is_err();
    visit
}

impl Visit {
    fn note(&mut self, event: &str) {
        let json: Value = serde_json::from_str(event.trim_start_matches("data: ")).unwrap_or_default();
        let text = json.pointer("/choices/0/delta/content").and_then(Value::as_str);
        self.token |= text.is_some_and(|text| !text.is_empty());
        if self.id.is_none() {
            self.id = json["id"].as_str().map(str::to_owned);
        }
    }
}
