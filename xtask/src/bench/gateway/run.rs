//! One run: clients send a scenario's requests through a router while its CPU time and memory are read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::ensure;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::{Instant, interval};

use super::{
    clients::{Seen, post},
    figures::Figures,
    prompts::{Bodies, body, prompt},
    routers::Running,
    scenario::{Scenario, Shape},
};
use crate::{
    client::Client,
    load::{self, Turn},
    metrics_text,
    stats::{quantile, sorted},
};

/// Maximum number of prompts of 220 KB that are sent to fill an index. The index is full after about 1,000.
const FILL_REQUESTS: u64 = 20_000;

/// Data that the clients of a run share.
struct Work {
    client: Client,
    bodies: Bodies,
    /// Body that is sent before each request to a router that does not know legs.
    prefill: Option<Bytes>,
    /// Number of requests that have begun.
    begun: AtomicU64,
    seen: Mutex<Seen>,
    failed: Mutex<Option<anyhow::Error>>,
}

/// Sends the share `scale` of the scenario's requests.
pub(super) async fn run(scenario: &Scenario, router: &Running, scale: f64) -> anyhow::Result<Figures> {
    let requests = ((scenario.requests as f64 * scale) as u64).max(1);
    let work = Arc::new(Work::new(scenario, router));
    let (cpu, started, sender) = (router.cpu_time(), Instant::now(), work.clone());
    let mut running = load::start(scenario.load, requests, move |turn| sender.clone().send(turn));
    let mut rss_mb = 0.0_f64;
    let sampling = async {
        let mut sample = interval(Duration::from_millis(20));
        loop {
            sample.tick().await;
            if work.begun.load(Relaxed) >= requests / 2 {
                rss_mb = rss_mb.max(router.resident_mb());
            }
        }
    };
    tokio::select! {
        ended = running.end() => ended?,
        () = sampling => {}
    }
    let took = started.elapsed();
    let cpu = router.cpu_time().since(&cpu) as f64;
    if let Some(error) = work.failed.lock().take() {
        return Err(error);
    }
    if scenario.tokens {
        all_in_tokens(router).await?;
    }
    let seen = std::mem::take(&mut *work.seen.lock());
    let (ttft, hops) = (sorted(seen.ttft_ns), sorted(seen.hops_ns));
    let events = seen.events.max(1) as f64;
    Ok(Figures {
        cpu_per_1000_s: cpu / 1e9 / requests as f64 * 1_000.0,
        cpu_per_event_us: if scenario.events == 0 { f64::NAN } else { cpu / 1e3 / events },
        ttft_p50_ms: quantile(&ttft, 0.5) / 1e6,
        ttft_p99_ms: quantile(&ttft, 0.99) / 1e6,
        hop_p50_us: quantile(&hops, 0.5) / 1e3,
        hop_p99_us: quantile(&hops, 0.99) / 1e3,
        events_per_chunk: if scenario.events == 0 { f64::NAN } else { events / seen.chunks.max(1) as f64 },
        per_second: requests as f64 / took.as_secs_f64(),
        rss_mb,
        idle_mb: router.idle_mb,
    })
}

impl Work {
    fn new(scenario: &Scenario, router: &Running) -> Self {
        let relayed = matches!(scenario.shape, Shape::Disaggregated(_)) && !router.kind.knows_legs();
        Self {
            client: router.client.clone(),
            bodies: Bodies::new(scenario),
            prefill: relayed.then(|| body(&prompt(0, scenario.prompt_bytes), false, 1)),
            begun: AtomicU64::new(0),
            seen: Mutex::default(),
            failed: Mutex::default(),
        }
    }

    async fn send(self: Arc<Self>, turn: Turn) {
        self.begun.fetch_add(1, Relaxed);
        if self.failed.lock().is_some() {
            return;
        }
        match self.exchange(turn).await {
            Ok(seen) => self.seen.lock().add(seen),
            Err(error) => drop(self.failed.lock().get_or_insert(error)),
        }
    }

    async fn exchange(&self, turn: Turn) -> anyhow::Result<Seen> {
        let Turn { number, client, own, is_too_many, .. } = turn;
        ensure!(!is_too_many, "{} requests are open", load::MAX_OPEN);
        let (mut seen, mut uncounted) = (Seen::default(), Seen::default());
        if let Some(prefill) = &self.prefill {
            post(&self.client, prefill.clone(), &mut uncounted).await?;
        }
        let body = self.bodies.of(number, client, own);
        post(&self.client, body, &mut seen).await?;
        Ok(seen)
    }
}

/// Returns an error if the gateway routed a request by bytes, as it does when the tokenizer has no chat
/// template.
async fn all_in_tokens(router: &Running) -> anyhow::Result<()> {
    let Some(admin) = &router.admin else { return Ok(()) };
    let count = metrics_text::sum(&admin.get("/metrics").await?, "pointsman_not_tokenized_total");
    ensure!(count == 0.0, "{count} requests were routed by bytes: pass a --tokenizer with a chat template");
    Ok(())
}

/// Sends long new prompts until the gateway's prefix index evicts blocks. Does nothing for other routers.
pub(super) async fn fill(router: &Running) -> anyhow::Result<()> {
    let Some(admin) = &router.admin else { return Ok(()) };
    let (bodies, mut unused) = (Bodies::to_fill(), Seen::default());
    for turn in 0..FILL_REQUESTS {
        post(&router.client, bodies.of(turn, 0, turn), &mut unused).await?;
        if turn % 50 == 49 {
            let metrics = admin.get("/metrics").await?;
            if metrics_text::sum(&metrics, "pointsman_index_evicted_total") > 0.0 {
                return Ok(());
            }
        }
    }
    ensure!(false, "the prefix index was not full after {FILL_REQUESTS} prompts of 220 KB");
    Ok(())
}
