//! Clients that are malformed, slow, do not read, or leave, each group beside a well-behaved client. For
//! each group: what it saw, the gateway's peak memory, the well-behaved client's p99, and the time until
//! everything is free again.

use std::{future::Future, path::Path, time::Duration};

use anyhow::Context as _;
use tokio::time::{Instant, sleep};

use crate::{
    certificates::Certificates,
    client::Client,
    fleet::{self, EngineSpec, Fleet},
    load::FixedRate,
    metrics_text, proc, sh,
    stats::{quantile, sorted},
    table,
};

mod attacks;
mod fountain;
mod http2;
mod sockets;

use fountain::Fountain;
use sockets::raise_file_limit;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Size of every group, as a share of its full size.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Limit of the well-behaved client's p99, milliseconds.
    #[arg(long, default_value_t = 250.0)]
    p99_ms: f64,
    /// Run only the groups whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
}

/// Requests per second of the well-behaved client.
const RATE: u32 = 50;
/// Longest time until everything that a group held is free again.
const RECOVERY: Duration = Duration::from_secs(15);

/// Short times, so that every deadline is met within seconds.
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

/// What a group of clients works with.
struct Target<'a> {
    fleet: &'a Fleet,
    /// Authority of the listener's certificate; `None`: it has no TLS.
    authority: Option<&'a Path>,
    scale: f64,
}

/// What a group saw.
struct Seen {
    /// What was sent.
    sent: String,
    /// What should come of it.
    expected: &'static str,
    /// What came of it.
    seen: String,
    passed: bool,
    /// Whether others are refused meanwhile: the limit of connections is reached.
    refuses_others: bool,
    /// Limit of the growth of the gateway's memory, megabytes.
    memory_mb: f64,
}

pub(super) async fn run(args: &Args, bin: &Path) -> anyhow::Result<()> {
    raise_file_limit()?;
    let dir = tempfile::Builder::new().prefix("pointsman-storm-").tempdir()?;
    let (fleet, _fountain) = start(bin, dir.path(), "").await?;
    let target = Target { fleet: &fleet, authority: None, scale: args.scale };
    let mut storm = Storm { target, args, rows: Vec::new() };
    storm.groups().await?;
    let rows = storm.rows;
    drop(fleet);
    let dir = tempfile::Builder::new().prefix("pointsman-storm-").tempdir()?;
    let certificates = Certificates::write(dir.path())?;
    let (mut fleet, _fountain) =
        start(bin, dir.path(), &format!("[server.tls]\n{}", certificates.table())).await?;
    fleet.client = Client::secure(&fleet.gateway.listening(), &certificates.authority)?;
    let target = Target { fleet: &fleet, authority: Some(&certificates.authority), scale: args.scale };
    let mut storm = Storm { target, args, rows };
    storm.groups_of_http2().await?;
    storm.finish()
}

/// Starts an engine, one whose answers do not end, and the gateway with further configuration.
async fn start(bin: &Path, dir: &Path, more: &str) -> anyhow::Result<(Fleet, Fountain)> {
    let flags =
        "--overhead-ms 2 --prefill-ms-per-token 0 --itl-ms 1 --jitter 0 --load-factor 1 --record 10000";
    let spec = EngineSpec::new(
        "vllm",
        "aggregated",
        &format!("{flags} --max-model-len 100000000 --blocks 10000000"),
    );
    let engine = spec.start(bin, dir, 1)?;
    let fountain = Fountain::start().await?;
    let workers = [spec.worker_flag(1, &engine.announced), fountain.worker_flag(2)];
    let tokenizer = sh::root().join("host/tokens/fixtures/model");
    let config = CONFIG.replace("TOKENIZER", &tokenizer.to_string_lossy()) + more;
    let mut fleet = fleet::gateway(bin, dir, &config, &workers).await?;
    fleet.engines = vec![engine];
    Ok((fleet, fountain))
}

struct Storm<'a> {
    target: Target<'a>,
    args: &'a Args,
    rows: Vec<(Vec<String>, bool)>,
}

impl Storm<'_> {
    async fn groups(&mut self) -> anyhow::Result<()> {
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

    /// Groups that speak HTTP/2 over TLS.
    async fn groups_of_http2(&mut self) -> anyhow::Result<()> {
        self.group("http2: requests that are reset", http2::rapid_reset).await?;
        self.group("http2: heads without an end", http2::continuation).await?;
        self.group("http2: closed windows", http2::closed_windows).await?;
        self.group("http2: settings, unread", http2::settings).await?;
        self.group("http2: pings, unread", http2::pings).await
    }

    /// Runs one group beside the well-behaved client.
    async fn group<'a, F>(
        &'a mut self,
        name: &str,
        attack: impl FnOnce(&'a Target<'a>) -> F,
    ) -> anyhow::Result<()>
    where
        F: Future<Output = anyhow::Result<Seen>>,
    {
        if !name.contains(&self.args.only) {
            return Ok(());
        }
        sh::status(name);
        let Self { target, args, rows } = self;
        let pid = target.fleet.gateway.pid();
        let load = FixedRate::start(&target.fleet.client, RATE, 10);
        sleep(Duration::from_millis(500)).await;
        proc::reset_peak(pid)?;
        let before = proc::resident_mb(pid);
        let seen = attack(&*target).await.with_context(|| format!("the group: {name}"))?;
        let recovered = recovered(target.fleet).await;
        let peak = proc::peak_mb(pid)?;
        let load = load.stop().await;
        let p99 =
            quantile(&sorted(load.latencies.iter().map(|time| time.as_secs_f64() * 1e3).collect()), 0.99);
        let judged = [
            (seen.passed, "outcome"),
            (peak - before <= seen.memory_mb, "memory"),
            (p99 <= args.p99_ms, "p99"),
            (load.failed == 0 || seen.refuses_others, "well-behaved requests failed"),
            (recovered.is_some(), "recovery"),
        ];
        let wrong: Vec<&str> = judged.iter().filter(|(right, _)| !right).map(|(_, what)| *what).collect();
        if let Some(problem) = &load.problem {
            sh::status(&format!("well-behaved client: {} failed, the first: {problem}", load.failed));
        }
        let row = vec![
            name.to_owned(),
            seen.sent,
            seen.expected.to_owned(),
            seen.seen,
            format!("{before:.0} -> {peak:.0} MB"),
            format!("{p99:.1} ms"),
            recovered.map_or("never".to_owned(), |took| format!("{:.1} s", took.as_secs_f64())),
            if wrong.is_empty() { "ok".to_owned() } else { format!("FAILED: {}", wrong.join(", ")) },
        ];
        rows.push((row, wrong.is_empty()));
        Ok(())
    }

    fn finish(self) -> anyhow::Result<()> {
        let head = ["group", "sent", "expected", "seen", "memory", "p99 of others", "recovery", "verdict"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        let failed = self.rows.iter().filter(|(_, passed)| !passed).count();
        rows.extend(self.rows.into_iter().map(|(row, _)| row));
        table::columns(&rows).iter().for_each(|line| sh::print(line));
        anyhow::ensure!(failed == 0, "{failed} groups failed; see the rows marked FAILED");
        Ok(())
    }
}

impl Target<'_> {
    /// Number of clients of a group whose full size is `full`.
    fn count(&self, full: u32) -> usize {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a small positive number"
        )]
        let count = (f64::from(full) * self.scale).ceil() as usize;
        count.max(1)
    }

    /// Address of the clients' listener.
    fn clients(&self) -> String {
        self.fleet.gateway.listening()
    }

    /// Sum of a metric over the samples with these labels.
    async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> anyhow::Result<f64> {
        Ok(metrics_text::sum_with(&self.fleet.metrics().await?, name, labels))
    }
}

/// Waits until no more is in flight than the well-behaved client has; `None`: not in time.
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
