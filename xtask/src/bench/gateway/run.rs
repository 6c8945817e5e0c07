//! One run: clients send a scenario's requests through a router while its CPU time and memory are read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    task::JoinSet,
    time::{Instant, interval, sleep_until},
};

use super::{
    clients::{Seen, post},
    figures::Figures,
    routers::Running,
    scenario::{Load, Scenario, Shape},
};
use crate::{
    client::Client,
    stats::{quantile, sorted},
};

/// What the clients of a run share.
struct Work {
    client: Client,
    load: Load,
    requests: u64,
    bodies: Vec<Bytes>,
    /// Seeds the random prompts of scenarios that ask for them.
    unique: Option<u64>,
    /// Sent before each request to a router that does not know legs.
    prefill: Option<Bytes>,
    next: AtomicU64,
    started: Instant,
}

/// Sends `scale` of the scenario's requests.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "figures to show"
)]
pub(super) async fn run(scenario: &Scenario, router: &Running, scale: f64) -> anyhow::Result<Figures> {
    let requests = ((scenario.requests as f64 * scale) as u64).max(1);
    let work = Arc::new(Work::new(scenario, router, requests));
    let clients = match scenario.load {
        Load::Closed(clients) => clients,
        Load::Open(rate) => rate * 3,
    };
    let cpu = router.cpu_nanos();
    let mut tasks = JoinSet::new();
    for _ in 0..clients {
        tasks.spawn(work.clone().send());
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
    let cpu = (router.cpu_nanos() - cpu) as f64;
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
        let stream = scenario.events > 0;
        // Several prompts, so that the gateway's index has something to distinguish.
        let bodies = (0..16).map(|turn| body(&prompt(turn, scenario.prompt_bytes), stream, scenario.events));
        let relayed = matches!(scenario.shape, Shape::Disaggregated(_)) && !router.kind.knows_legs();
        Self {
            client: router.client.clone(),
            load: scenario.load,
            requests,
            bodies: bodies.collect(),
            unique: scenario.unique.then(rand::random),
            prefill: relayed.then(|| body(&prompt(0, scenario.prompt_bytes), false, 1)),
            next: AtomicU64::new(0),
            started: Instant::now(),
        }
    }

    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a turn is small")]
    async fn send(self: Arc<Self>) -> anyhow::Result<Seen> {
        let (mut seen, mut uncounted) = (Seen::default(), Seen::default());
        loop {
            let turn = self.next.fetch_add(1, Ordering::Relaxed);
            if turn >= self.requests {
                return Ok(seen);
            }
            if let Load::Open(rate) = self.load {
                sleep_until(self.started + Duration::from_secs_f64(turn as f64 / f64::from(rate))).await;
            }
            if let Some(prefill) = &self.prefill {
                post(&self.client, prefill.clone(), &mut uncounted).await?;
            }
            let body = self.bodies.get(turn as usize % self.bodies.len()).cloned().unwrap_or_default();
            let body = self.unique.map_or(body.clone(), |seed| with_random_words(&body, seed ^ turn));
            post(&self.client, body, &mut seen).await?;
        }
    }
}

fn body(prompt: &str, stream: bool, events: u32) -> Bytes {
    let tokens = events.max(1);
    let message = format!(r#"[{{"role":"user","content":"{prompt}"}}]"#);
    format!(r#"{{"model":"tiny","stream":{stream},"max_tokens":{tokens},"messages":{message}}}"#).into()
}

/// Where the prompt of a body begins, for [`with_random_words`].
const START: &str = "prompt ";

/// Replaces the prompt of a body by random words of the same length.
fn with_random_words(body: &[u8], seed: u64) -> Bytes {
    let mut body = body.to_vec();
    let start = body.windows(START.len()).position(|window| window == START.as_bytes()).unwrap_or(0);
    let end = body.len().saturating_sub(br#""}]}"#.len());
    // A linear congruential generator (Knuth, MMIX): quick without optimisation, and good enough for letters.
    let mut state = seed | 1;
    for (place, letter) in body.get_mut(start..end).unwrap_or_default().iter_mut().enumerate() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *letter = if place % 6 == 5 { b' ' } else { b'a' + u8::try_from((state >> 40) % 26).unwrap_or(0) };
    }
    body.into()
}

fn prompt(turn: usize, bytes: usize) -> String {
    let mut text = format!("{START}{turn} ");
    while text.len() < bytes {
        text.push_str("the quick brown fox jumps over the lazy dog ");
    }
    text.truncate(bytes);
    text
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{body, prompt, with_random_words};

    #[test]
    fn bodies_with_random_words_stay_json_and_differ() {
        let original = body(&prompt(3, 500), true, 8);
        let [one, other] = [1_u64 << 8, 2 << 8].map(|seed| with_random_words(&original, seed));
        assert_ne!(one, other);
        for body in [&original, &one, &other] {
            let json: Value = serde_json::from_slice(body).unwrap();
            assert_eq!(json["max_tokens"], 8);
            assert_eq!(json["messages"][0]["content"].as_str().map(str::len), Some(500));
        }
    }
}
