//! Clients that send malformed requests, are slow, do not read, or disconnect. Each group runs while a
//! well-behaved client sends requests. The results are the answers to the group, the gateway's peak memory,
//! the other client's p99, and the time until the gateway has released everything.

use std::{
    future::Future,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use tokio::time::{Instant, sleep};

use crate::{
    beside::Beside,
    certificates::Certificates,
    fleet::{self, EngineSpec, Fleet},
    load::{Load, Target as Address},
    metrics_text, sh,
    table::{self, Checks},
};

mod attacks;
mod fountain;
mod http2;
mod sockets;

use fountain::Fountain;
use sockets::raise_file_limit;

/// Maximum p99 of the well-behaved client, milliseconds.
const P99_MS: f64 = 250.0;
/// Maximum time until everything that a group held is released.
const RECOVERY: Duration = Duration::from_secs(15);

/// Short timeouts, so that every deadline is reached within seconds.
const CONFIG: &str = r#"
[timeouts]
request = "60s"
body_idle = "2s"
client_idle = "6s"
client_write = "2s"

[limits]
connections = 2500

[models.tiny]
tokenizer = "TOKENIZER"
tokenizer_timeout = "500ms"
"#;

/// Addresses and processes that a group of clients uses.
struct Target {
    fleet: Fleet,
    address: Address,
    scale: f64,
}

/// Results of a group.
struct Seen {
    /// What the group sent.
    sent: String,
    /// Expected result.
    expected: &'static str,
    /// Observed result.
    seen: String,
    passed: bool,
    /// Whether the gateway refuses other clients meanwhile, because the limit of connections is reached.
    refuses_others: bool,
    /// Maximum growth of the gateway's memory, megabytes.
    memory_mb: f64,
}

/// Runs the groups whose names contain a text. The groups for HTTP/2 use TLS.
pub(super) async fn run(only: &str, scale: f64, bin: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    raise_file_limit()?;
    let head = ["group", "sent", "expected", "seen", "memory", "p99 of others", "recovery", "verdict"];
    let mut rows = vec![(head.map(str::to_owned).to_vec(), true)];
    for tls in [false, true] {
        let dir = tempfile::Builder::new().prefix("pointsman-drill-").tempdir()?;
        let (target, _fountain) = start(bin, dir.path(), tls, scale).await?;
        let mut groups = Groups { target: &target, only, rows: &mut rows };
        if tls { groups.of_http2().await? } else { groups.of_http1().await? }
    }
    let failed = rows.iter().filter(|(_, passed)| !passed).count();
    let count = rows.len() - 1;
    let rows: Vec<_> = rows.into_iter().map(|(row, _)| row).collect();
    table::columns(&rows).iter().for_each(|line| sh::print(line));
    checks.check("groups", count, count > 0);
    checks.none("groups that failed", failed as u64);
    Ok(())
}

/// Starts an engine, an engine whose answers do not end, and the gateway.
async fn start(bin: &Path, dir: &Path, tls: bool, scale: f64) -> anyhow::Result<(Target, Fountain)> {
    let spec = EngineSpec::new(
        "vllm",
        "aggregated",
        "--overhead-ms 2 --prefill-ms-per-token 0 --itl-ms 1 --jitter 0 --load-factor 1 --record 10000 \
         --max-model-len 100000000 --blocks 10000000",
    );
    let engine = spec.start(bin, dir, 1)?;
    let fountain = Fountain::start().await?;
    let workers = [spec.worker_flag(1, &engine.announced), fountain.worker_flag(2)];
    let tokenizer = sh::root().join("host/tokens/fixtures/model");
    let mut config = CONFIG.replace("TOKENIZER", &tokenizer.to_string_lossy());
    let mut authority: Option<PathBuf> = None;
    if tls {
        let certificates = Certificates::write(dir)?;
        config.push_str(&format!("[server.tls]\n{}", certificates.table()));
        authority = Some(certificates.authority);
    }
    let mut fleet = fleet::gateway(bin, dir, &config, &workers).await?;
    fleet.engines = vec![engine];
    let address = Address { address: fleet.gateway.listening(), authority, instance: 1 };
    fleet.client = address.client()?;
    Ok((Target { fleet, address, scale }, fountain))
}

struct Groups<'a> {
    target: &'a Target,
    only: &'a str,
    rows: &'a mut Vec<(Vec<String>, bool)>,
}

impl<'a> Groups<'a> {
    async fn of_http1(&mut self) -> anyhow::Result<()> {
        self.group("clients that do not read", attacks::silent_readers).await?;
        self.group("pipelined GET /health, unread", attacks::pipelined).await?;
        self.group("readers of /events that do not read", attacks::silent_event_readers).await?;
        self.group("slow uploads of 31 MB", attacks::slow_uploads).await?;
        self.group("bodies at 1 byte per second", attacks::trickled_bodies).await?;
        self.group("one-byte segments", attacks::one_byte_segments).await?;
        self.group("abandoned prompts of 16 MB", attacks::abandoned_prompts).await?;
        self.group("malformed requests", attacks::malformed).await?;
        self.group("clients that leave", attacks::departing).await?;
        self.group("connections without a request", attacks::idle_connections).await
    }

    async fn of_http2(&mut self) -> anyhow::Result<()> {
        self.group("http2: requests that are reset", http2::rapid_reset).await?;
        self.group("http2: heads without an end", http2::continuation).await?;
        self.group("http2: closed windows", http2::closed_windows).await?;
        self.group("http2: settings, unread", http2::settings).await?;
        self.group("http2: pings, unread", http2::pings).await
    }

    /// Runs one group, together with the well-behaved client.
    async fn group<F: Future<Output = anyhow::Result<Seen>>>(
        &mut self,
        name: &str,
        attack: impl FnOnce(&'a Target) -> F,
    ) -> anyhow::Result<()> {
        if !name.contains(self.only) {
            return Ok(());
        }
        sh::status(name);
        let beside = Beside::start(&self.target.fleet, &self.target.address, Load::default())?;
        sleep(Duration::from_millis(500)).await;
        let before = beside.begin()?;
        let seen = attack(self.target).await.with_context(|| format!("the group: {name}"))?;
        let recovered = recovered(&self.target.fleet).await;
        let cost = beside.end(before)?;
        let (_, failed, problems) = beside.stop().await;
        let judged = [
            (seen.passed, "outcome"),
            (cost.peak_mb - before <= seen.memory_mb, "memory"),
            (cost.p99_ms <= P99_MS, "p99"),
            (failed == 0 || seen.refuses_others, "well-behaved requests failed"),
            (recovered.is_some(), "recovery"),
        ];
        let wrong: Vec<&str> = judged.iter().filter(|(right, _)| !right).map(|(_, what)| *what).collect();
        problems.iter().for_each(|problem| sh::status(&format!("well-behaved client: {problem}")));
        let row = vec![
            name.to_owned(),
            seen.sent,
            seen.expected.to_owned(),
            seen.seen,
            format!("{before:.0} -> {:.0} MB", cost.peak_mb),
            format!("{:.1} ms", cost.p99_ms),
            recovered.map_or("never".to_owned(), |took| format!("{:.1} s", took.as_secs_f64())),
            if wrong.is_empty() { "ok".to_owned() } else { format!("FAILED: {}", wrong.join(", ")) },
        ];
        self.rows.push((row, wrong.is_empty()));
        Ok(())
    }
}

impl Target {
    /// Returns the number of clients of a group whose full size is `full`.
    fn count(&self, full: u32) -> usize {
        let count = (f64::from(full) * self.scale).ceil() as usize;
        count.max(1)
    }

    /// Returns the address of the listener for clients.
    fn clients(&self) -> String {
        self.fleet.gateway.listening()
    }

    /// Returns the sum of a metric over the samples with these labels.
    async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> anyhow::Result<f64> {
        Ok(metrics_text::sum_with(&self.fleet.metrics().await?, name, labels))
    }

    /// Waits until a counter has grown by `wanted` since it was `before`. Returns by how much it has grown.
    async fn growth(
        &self,
        name: &str,
        label: (&str, &str),
        (before, wanted): (f64, f64),
        limit: Duration,
    ) -> anyhow::Result<f64> {
        let started = Instant::now();
        loop {
            let grown = self.metric(name, &[label]).await? - before;
            if grown >= wanted || started.elapsed() >= limit {
                return Ok(grown);
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Seen {
    fn new(sent: String, expected: &'static str, (seen, passed): (String, bool), memory_mb: f64) -> Self {
        Self { sent, expected, seen, passed, refuses_others: false, memory_mb }
    }
}

/// Waits until only requests of the well-behaved client are in flight. Returns `None` if this takes too long.
async fn recovered(fleet: &Fleet) -> Option<Duration> {
    let started = Instant::now();
    while started.elapsed() < RECOVERY {
        if let Ok(text) = fleet.metrics().await {
            let few = |name| metrics_text::sum(&text, name) <= 15.0;
            if few("pointsman_inflight_requests") && few("pointsman_client_connections") {
                return Some(started.elapsed());
            }
        }
        sleep(Duration::from_millis(50)).await;
    }
    None
}

fn number(count: usize) -> f64 {
    count as f64
}
