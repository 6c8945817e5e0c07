//! What is measured: load shapes, and the figures of one run.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;

use super::{
    client::{Client, Seen, quantile},
    routers::Running,
};

/// What stands behind the router.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shape {
    Single { workers: u32 },
    Disaggregated(Pair),
}

/// Whose handshake ties the legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pair {
    Vllm,
    Sglang,
}

/// How requests come.
#[derive(Clone, Copy, Debug)]
enum Load {
    /// So many clients, each with its next request as soon as the last one ended.
    Closed(u32),
    /// So many requests a second, whatever becomes of them.
    Open(u32),
}

/// One scenario.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) says: &'static str,
    pub(super) shape: Shape,
    pub(super) pace: Duration,
    /// Events of a stream; 0: not streamed.
    pub(super) events: u32,
    load: Load,
    requests: u64,
    prompt_bytes: usize,
    /// Whether the gateway counts in tokens, which takes `--tokenizer`.
    pub(super) tokens: bool,
    /// Every prompt is of random words, and another one than all before it.
    unique: bool,
}

const BASE: Scenario = Scenario {
    name: "",
    says: "",
    shape: Shape::Single { workers: 4 },
    pace: Duration::ZERO,
    events: 0,
    load: Load::Closed(16),
    requests: 0,
    prompt_bytes: 60,
    tokens: false,
    unique: false,
};

/// All of them.
pub(super) const ALL: [Scenario; 10] = [
    Scenario { name: "a", says: "tiny, not streamed, closed loop 16", requests: 20_000, ..BASE },
    Scenario {
        name: "b",
        says: "128 events at full speed, closed loop 8",
        events: 128,
        load: Load::Closed(8),
        requests: 1_000,
        ..BASE
    },
    Scenario {
        name: "c",
        says: "64 events at 10 ms, open loop 30/s",
        events: 64,
        pace: Duration::from_millis(10),
        load: Load::Open(30),
        requests: 240,
        ..BASE
    },
    Scenario {
        name: "d",
        says: "220 KB prompts, closed loop 16",
        requests: 3_000,
        prompt_bytes: 220_000,
        ..BASE
    },
    Scenario {
        name: "dt",
        says: "220 KB prompts in tokens, 16 prompts again and again, closed loop 16",
        requests: 1_000,
        prompt_bytes: 220_000,
        tokens: true,
        ..BASE
    },
    Scenario {
        name: "dc",
        says: "220 KB prompts in tokens, each of new random words, closed loop 4",
        load: Load::Closed(4),
        requests: 100,
        prompt_bytes: 220_000,
        tokens: true,
        unique: true,
        ..BASE
    },
    Scenario {
        name: "e",
        says: "P/D vLLM style, 32 events, closed loop 8 (nginx relays both legs' calls)",
        shape: Shape::Disaggregated(Pair::Vllm),
        events: 32,
        load: Load::Closed(8),
        requests: 2_000,
        ..BASE
    },
    Scenario {
        name: "e2",
        says: "P/D SGLang style, 32 events, closed loop 8 (nginx relays both legs' calls)",
        shape: Shape::Disaggregated(Pair::Sglang),
        events: 32,
        load: Load::Closed(8),
        requests: 2_000,
        ..BASE
    },
    Scenario {
        name: "f",
        says: "500 streams of 25 events at 200 ms",
        events: 25,
        pace: Duration::from_millis(200),
        load: Load::Closed(500),
        requests: 500,
        ..BASE
    },
    Scenario {
        name: "g",
        says: "1,000 workers, tiny, not streamed, closed loop 16",
        shape: Shape::Single { workers: 1_000 },
        requests: 10_000,
        ..BASE
    },
];

/// The scenarios' names.
pub(super) fn names() -> String {
    ALL.map(|scenario| scenario.name).join(", ")
}

/// Figures of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub(super) cpu_per_1000_s: f64,
    pub(super) cpu_per_event_us: f64,
    pub(super) ttft_p50_ms: f64,
    pub(super) ttft_p99_ms: f64,
    pub(super) hop_p50_us: f64,
    pub(super) hop_p99_us: f64,
    pub(super) events_per_chunk: f64,
    pub(super) per_second: f64,
    /// At the run's middle.
    pub(super) rss_mb: f64,
    pub(super) idle_mb: f64,
}

impl Figures {
    pub(super) fn short(&self) -> String {
        format!(
            "CPU {:.3} s/1000, TTFT p50 {:.3} ms, hop p50 {:.0} us, {:.0}/s, RSS {:.1} MB (idle {:.1})",
            self.cpu_per_1000_s,
            self.ttft_p50_ms,
            self.hop_p50_us,
            self.per_second,
            self.rss_mb,
            self.idle_mb
        )
    }
}

impl Scenario {
    /// Runs `scale` of the scenario's requests through a router.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "figures to show"
    )]
    pub(super) fn run(&self, router: &Running, scale: f64) -> anyhow::Result<Figures> {
        let clients = match self.load {
            Load::Closed(clients) => clients,
            Load::Open(rate) => rate * 3,
        };
        let requests = ((self.requests as f64 * scale) as u64).max(1);
        // nginx knows no legs: its clients make both calls themselves, so that it relays the same bytes.
        let pair = match self.shape {
            Shape::Disaggregated(pair) if !router.kind.knows_legs() => Some(pair),
            _ => None,
        };
        let work = Arc::new(Work {
            address: router.address,
            load: self.load,
            requests,
            bodies: self.bodies(),
            unique: self.unique,
            prefill: pair.map(|pair| prefill_body(pair, self.prompt_bytes)),
            next: AtomicU64::new(0),
            all: Mutex::new(Seen::default()),
            started: Instant::now(),
        });
        let cpu = router.cpu();
        let threads = (0..clients).map(|_| {
            let work = work.clone();
            thread::Builder::new().stack_size(256 * 1024).spawn(move || work.client())
        });
        let threads = threads.collect::<Result<Vec<_>, _>>()?;
        let mut rss_mb = 0.0_f64;
        while threads.iter().any(|thread| !thread.is_finished()) {
            thread::sleep(Duration::from_millis(20));
            if work.next.load(Ordering::Relaxed) >= requests / 2 {
                rss_mb = rss_mb.max(router.rss_mb());
            }
        }
        let took = work.started.elapsed();
        let cpu = (router.cpu() - cpu) as f64;
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        let mut seen = work.all.lock().map_err(|_| anyhow::anyhow!("a client panicked"))?.clone();
        let events = seen.events.max(1) as f64;
        Ok(Figures {
            cpu_per_1000_s: cpu / 1e9 / requests as f64 * 1_000.0,
            cpu_per_event_us: if self.events == 0 { f64::NAN } else { cpu / 1e3 / events },
            ttft_p50_ms: quantile(&mut seen.ttft, 0.5) / 1e6,
            ttft_p99_ms: quantile(&mut seen.ttft, 0.99) / 1e6,
            hop_p50_us: quantile(&mut seen.hops, 0.5) / 1e3,
            hop_p99_us: quantile(&mut seen.hops, 0.99) / 1e3,
            events_per_chunk: if seen.chunks == 0 { f64::NAN } else { events / seen.chunks as f64 },
            per_second: requests as f64 / took.as_secs_f64(),
            rss_mb,
            idle_mb: router.idle_mb,
        })
    }

    /// Several prompts, so that an index has something to tell apart.
    fn bodies(&self) -> Vec<Vec<u8>> {
        let stream = self.events > 0;
        let body = |turn: usize| {
            let prompt = prompt(turn, self.prompt_bytes);
            format!(
                r#"{{"model":"tiny","stream":{stream},"max_tokens":{},"messages":[{{"role":"user","content":"{prompt}"}}]}}"#,
                self.events.max(1)
            )
            .into_bytes()
        };
        (0..16).map(body).collect()
    }
}

/// What the clients of one run share.
struct Work {
    address: std::net::SocketAddr,
    load: Load,
    requests: u64,
    bodies: Vec<Vec<u8>>,
    unique: bool,
    prefill: Option<Vec<u8>>,
    next: AtomicU64,
    all: Mutex<Seen>,
    started: Instant,
}

impl Work {
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a turn is small")]
    fn client(&self) -> anyhow::Result<()> {
        let mut client = Client::connect(self.address)?;
        let (mut seen, mut unseen) = (Seen::default(), Seen::default());
        loop {
            let turn = self.next.fetch_add(1, Ordering::Relaxed);
            if turn >= self.requests {
                break;
            }
            if let Load::Open(rate) = self.load {
                let due = Duration::from_secs_f64(turn as f64 / f64::from(rate));
                thread::sleep(due.saturating_sub(self.started.elapsed()));
            }
            if let Some(prefill) = &self.prefill {
                client.post(prefill, &mut unseen)?;
            }
            let body = self.bodies.get(turn as usize % self.bodies.len()).context("no body")?;
            if self.unique {
                client.post(&rewritten(body, self.address.port(), turn), &mut seen)?;
            } else {
                client.post(body, &mut seen)?;
            }
        }
        self.all.lock().map_err(|_| anyhow::anyhow!("a client panicked"))?.add(seen);
        Ok(())
    }
}

fn prefill_body(pair: Pair, bytes: usize) -> Vec<u8> {
    let (mark, stream) = match pair {
        Pair::Vllm => (r#""kv_transfer_params":{"do_remote_decode":true}"#, false),
        Pair::Sglang => (r#""prefill_leg":true"#, true),
    };
    let prompt = prompt(0, bytes);
    format!(
        r#"{{{mark},"model":"tiny","stream":{stream},"max_tokens":1,"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
    )
    .into_bytes()
}

/// Where a prompt begins, for [`rewritten`].
const START: &str = "prompt ";

/// A body with random words for its prompt, other ones for each request to each router.
fn rewritten(body: &[u8], port: u16, turn: u64) -> Vec<u8> {
    let mut body = body.to_vec();
    let start = body.windows(START.len()).position(|window| window == START.as_bytes()).unwrap_or(0);
    let end = body.len().saturating_sub(br#""}]}"#.len());
    let mut state = u64::from(port) << 32 | turn | 1;
    for (place, letter) in body.get_mut(start..end).unwrap_or_default().iter_mut().enumerate() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *letter = if place % 6 == 5 { b' ' } else { b'a' + u8::try_from((state >> 40) % 26).unwrap_or(0) };
    }
    body
}

fn prompt(turn: usize, bytes: usize) -> String {
    let mut text = format!("{START}{turn} ");
    while text.len() < bytes {
        text.push_str("the quick brown fox jumps over the lazy dog ");
    }
    text.truncate(bytes);
    text
}
