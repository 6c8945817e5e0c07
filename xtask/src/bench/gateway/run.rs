//! One run: clients send a scenario's requests through a router while its CPU time and memory are read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::ensure;
use bytes::Bytes;
use tokio::{
    task::JoinSet,
    time::{Instant, interval, sleep, sleep_until},
};

use super::{
    clients::{Seen, post},
    figures::Figures,
    jwt::{Issuer, authorization},
    prompts::{Bodies, body, prompt},
    routers::Running,
    scenario::{Load, Scenario, Shape},
};
use crate::{
    client::Client,
    metrics_text,
    stats::{quantile, sorted},
};

/// Most prompts of 220 KB that are sent to fill an index; it is full after about 1,000.
const FILL_REQUESTS: u64 = 20_000;

/// What the clients of a run share.
struct Work {
    client: Client,
    issuer: Option<Arc<Issuer>>,
    load: Load,
    requests: u64,
    bodies: Bodies,
    /// Sent before each request to a router that does not know legs.
    prefill: Option<Bytes>,
    next: AtomicU64,
    started: Instant,
}

/// Sends `scale` of the scenario's requests.
pub(super) async fn run(scenario: &Scenario, router: &Running, scale: f64) -> anyhow::Result<Figures> {
    let requests = ((scenario.requests as f64 * scale) as u64).max(1);
    let work = Arc::new(Work::new(scenario, router, requests));
    let clients = match scenario.load {
        Load::Closed(clients) | Load::Ramped(clients, _) => clients,
        Load::Open(rate) => rate * 3,
    };
    let cpu = router.cpu_time();
    let mut tasks = JoinSet::new();
    for client in 0..clients {
        let delay = match scenario.load {
            Load::Ramped(_, over) => over * client / clients,
            _ => Duration::ZERO,
        };
        tasks.spawn(work.clone().send(client, delay));
    }
    let (mut seen, mut rss_mb) = (Seen::default(), 0.0_f64);
    let mut sample = interval(Duration::from_millis(20));
    loop {
        tokio::select! {
            ended = tasks.join_next() => match ended {
                Some(ended) => seen.add(ended??),
                None => break,
            },
            _ = sample.tick() => if work.next.load(Ordering::Relaxed) >= requests / 2 {
                rss_mb = rss_mb.max(router.resident_mb());
            },
        }
    }
    let took = work.started.elapsed();
    let cpu = router.cpu_time().since(&cpu) as f64;
    if scenario.tokens {
        all_in_tokens(router).await?;
    }
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
    fn new(scenario: &Scenario, router: &Running, requests: u64) -> Self {
        let relayed = matches!(scenario.shape, Shape::Disaggregated(_)) && !router.kind.knows_legs();
        Self {
            client: router.client.clone(),
            issuer: router.issuer.clone(),
            load: scenario.load,
            requests,
            bodies: Bodies::new(scenario),
            prefill: relayed.then(|| body(&prompt(0, scenario.prompt_bytes), false, 1)),
            next: AtomicU64::new(0),
            started: Instant::now(),
        }
    }

    fn authorization(&self, client: u32, turn: u64) -> anyhow::Result<String> {
        authorization(self.issuer.as_deref(), client.into(), turn)
    }

    async fn send(self: Arc<Self>, client: u32, delay: Duration) -> anyhow::Result<Seen> {
        let (mut seen, mut uncounted) = (Seen::default(), Seen::default());
        if !delay.is_zero() {
            sleep(delay).await;
        }
        for own in 0.. {
            let turn = self.next.fetch_add(1, Ordering::Relaxed);
            if turn >= self.requests {
                break;
            }
            if let Load::Open(rate) = self.load {
                sleep_until(self.started + Duration::from_secs_f64(turn as f64 / f64::from(rate))).await;
            }
            if let Some(prefill) = &self.prefill {
                let authorization = self.authorization(client, turn)?;
                post(&self.client, &authorization, prefill.clone(), &mut uncounted).await?;
            }
            let body = self.bodies.of(turn, client.into(), own);
            post(&self.client, &self.authorization(client, turn)?, body, &mut seen).await?;
        }
        Ok(seen)
    }
}

/// Fails if the gateway routed a request by bytes: a tokenizer without a chat template counts nothing.
async fn all_in_tokens(router: &Running) -> anyhow::Result<()> {
    let Some(admin) = &router.admin else { return Ok(()) };
    let metrics = admin.get("/metrics").await?;
    let by_bytes: Vec<_> = metrics_text::samples(&metrics, "pointsman_not_tokenized_total");
    let count: f64 = by_bytes.iter().map(|sample| sample.value).sum();
    ensure!(count == 0.0, "{count} requests were routed by bytes: pass a --tokenizer with a chat template");
    Ok(())
}

/// Sends long new prompts until the gateway's prefix index evicts. Other routers have none.
pub(super) async fn fill(router: &Running) -> anyhow::Result<()> {
    let Some(admin) = &router.admin else { return Ok(()) };
    let (bodies, mut unused) = (Bodies::to_fill(), Seen::default());
    for turn in 0..FILL_REQUESTS {
        let header = authorization(router.issuer.as_deref(), 0, turn)?;
        post(&router.client, &header, bodies.of(turn, 0, turn), &mut unused).await?;
        if turn % 50 == 49 {
            let metrics = admin.get("/metrics").await?;
            let evicted = metrics_text::samples(&metrics, "pointsman_index_evicted_total");
            if evicted.iter().any(|sample| sample.value > 0.0) {
                return Ok(());
            }
        }
    }
    ensure!(false, "the prefix index was not full after {FILL_REQUESTS} prompts of 220 KB");
    Ok(())
}
