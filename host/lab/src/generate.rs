//! Generated traces, seeded: multi-turn chat, shared system prompts, retrieved documents, and bursts of
//! arrivals.

use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};
use rand_distr::{Distribution as _, Gamma, Zipf};
use tokio::time::Duration;

use crate::trace::{Trace, TraceRequest};

/// Shape of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Conversations: each turn's prompt is the conversation so far and a new question.
    Chat {
        /// Turns of a conversation.
        turns: u32,
    },
    /// One of a few long system prompts, then a short question.
    SystemPrompts {
        /// Number of system prompts.
        prompts: u32,
    },
    /// Some of many documents, popular ones more often (Zipf), then a question.
    Documents {
        /// Number of documents.
        documents: u32,
    },
}

/// A trace to generate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Shape of the requests.
    pub shape: Shape,
    /// Number of requests.
    pub requests: usize,
    /// Mean arrivals a second.
    pub rate: f64,
    /// Squared coefficient of variation of the intervals between arrivals: 1 is a Poisson process, more is
    /// burstier (intervals are Gamma-distributed).
    pub burstiness: f64,
    /// Seed.
    pub seed: u64,
}

/// Tokens of a block in a generated trace.
const BLOCK: u32 = 64;

/// Identities for new blocks.
struct Fresh(u64);

impl Fresh {
    fn blocks(&mut self, tokens: u32) -> Vec<u64> {
        let count = u64::from(tokens.div_ceil(BLOCK));
        let first = self.0;
        self.0 += count;
        (first..first + count).collect()
    }
}

/// Generates a trace. Equal workloads give equal traces.
#[must_use]
pub fn generate(workload: &Workload) -> Trace {
    let mut rng = SmallRng::seed_from_u64(workload.seed);
    let mut fresh = Fresh(1);
    let mut at = 0.0;
    let mut arrivals = Vec::with_capacity(workload.requests);
    for _ in 0..workload.requests {
        arrivals.push(Duration::from_secs_f64(at));
        at += interval(&mut rng, workload.rate, workload.burstiness);
    }
    let requests = match workload.shape {
        Shape::Chat { turns } => chat(&mut rng, &mut fresh, &arrivals, turns.max(1)),
        Shape::SystemPrompts { prompts } => {
            let prompts: Vec<Vec<u64>> = (0..prompts.max(1)).map(|_| fresh.blocks(BLOCK * 32)).collect();
            let one = |at: &Duration| {
                let prompt = prompts.get(rng.random_range(0..prompts.len())).cloned().unwrap_or_default();
                let question = between(&mut rng, 20, 400);
                request(&mut rng, &mut fresh, *at, prompt, question)
            };
            arrivals.iter().map(one).collect()
        }
        Shape::Documents { documents } => {
            let documents: Vec<Vec<u64>> =
                (0..documents.max(1)).map(|_| fresh.blocks(BLOCK * between(&mut rng, 16, 128))).collect();
            let one = |at: &Duration| {
                let mut blocks = Vec::new();
                for _ in 0..3 {
                    let place = zipf(&mut rng, documents.len());
                    blocks.extend(documents.get(place).into_iter().flatten());
                }
                let question = between(&mut rng, 20, 200);
                request(&mut rng, &mut fresh, *at, blocks, question)
            };
            arrivals.iter().map(one).collect()
        }
    };
    let name = match workload.shape {
        Shape::Chat { .. } => "chat",
        Shape::SystemPrompts { .. } => "system-prompts",
        Shape::Documents { .. } => "documents",
    };
    let mut trace = Trace { name: name.to_owned(), block_tokens: BLOCK, requests, skipped: 0 };
    trace.sort();
    trace
}

/// Conversations whose turns follow each other after the pause of a reader.
fn chat(rng: &mut SmallRng, fresh: &mut Fresh, arrivals: &[Duration], turns: u32) -> Vec<TraceRequest> {
    let mut requests = Vec::with_capacity(arrivals.len());
    let mut number = 0;
    // A conversation takes as many arrivals as it has turns; its later turns come when the earlier ones are
    // over.
    for starts in arrivals.chunks(turns as usize) {
        number += 1;
        let mut tokens = between(rng, 100, 2_000) / BLOCK * BLOCK + BLOCK;
        let mut blocks = fresh.blocks(tokens);
        let Some(start) = starts.first() else { continue };
        for turn in 0..starts.len() {
            let output = between(rng, 50, 600);
            let pause = Duration::from_millis(u64::from(between(rng, 1_000, 20_000)));
            requests.push(TraceRequest {
                at: *start,
                input_tokens: tokens,
                output_tokens: output,
                blocks: blocks.clone(),
                session: Some(format!("conversation-{number}")),
                delay: (turn > 0).then_some(pause),
                ..TraceRequest::default()
            });
            // The answer and the next question, in whole blocks.
            let more = (output + between(rng, 20, 300)) / BLOCK * BLOCK + BLOCK;
            blocks.extend(fresh.blocks(more));
            tokens += more;
        }
    }
    requests
}

fn request(
    rng: &mut SmallRng,
    fresh: &mut Fresh,
    at: Duration,
    mut blocks: Vec<u64>,
    question: u32,
) -> TraceRequest {
    let input_tokens = u32::try_from(blocks.len()).unwrap_or(u32::MAX).saturating_mul(BLOCK) + question;
    blocks.extend(fresh.blocks(question));
    TraceRequest { at, input_tokens, output_tokens: between(rng, 20, 500), blocks, ..TraceRequest::default() }
}

/// A whole number from `low` to `high`, small ones more often (log-uniform).
fn between(rng: &mut SmallRng, low: u32, high: u32) -> u32 {
    let (low, high) = (f64::from(low).ln(), f64::from(high).ln());
    (low + (high - low) * rng.random::<f64>()).exp() as u32
}

/// A place among `count`, the first most often, with Zipf's exponent 1.
#[expect(clippy::cast_precision_loss, reason = "a number of documents")]
fn zipf(rng: &mut SmallRng, count: usize) -> usize {
    // Fails for less than one document only.
    let place = Zipf::new(count as f64, 1.0).map_or(1.0, |zipf| zipf.sample(rng));
    (place as usize).clamp(1, count.max(1)) - 1
}

/// The time to the next arrival, seconds: Gamma-distributed with this mean rate.
fn interval(rng: &mut SmallRng, rate: f64, burstiness: f64) -> f64 {
    let (burstiness, mean) = (burstiness.max(1e-3), 1.0 / rate.max(1e-9));
    // Shape and scale are above 0, so that the distribution exists.
    Gamma::new(1.0 / burstiness, mean * burstiness).map_or(mean, |gamma| gamma.sample(rng))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: Workload =
        Workload { shape: Shape::Chat { turns: 4 }, requests: 400, rate: 5.0, burstiness: 1.0, seed: 3 };

    #[test]
    fn a_workload_is_generated_equally_each_time_and_differently_by_seed() {
        assert_eq!(generate(&CHAT), generate(&CHAT));
        assert_ne!(generate(&CHAT), generate(&Workload { seed: 4, ..CHAT }));
    }

    #[test]
    fn a_turn_s_prompt_continues_that_of_the_turn_before() {
        let trace = generate(&CHAT);
        let session = trace.requests.first().and_then(|request| request.session.clone());
        let turns: Vec<_> = trace.requests.iter().filter(|request| request.session == session).collect();
        assert_eq!(turns.len(), 4);
        for pair in turns.windows(2) {
            assert!(pair[1].blocks.starts_with(&pair[0].blocks));
            assert!(pair[0].delay.is_none_or(|_| pair[1].delay.is_some()));
        }
        assert!(trace.endless_cache_hit_rate() > 0.5, "{}", trace.endless_cache_hit_rate());
    }

    #[test]
    fn intervals_have_the_asked_mean_and_variation() {
        let mut rng = SmallRng::seed_from_u64(1);
        for burstiness in [0.25, 1.0, 4.0] {
            let values: Vec<f64> = (0..50_000).map(|_| interval(&mut rng, 10.0, burstiness)).collect();
            let mean = values.iter().sum::<f64>() / 50_000.0;
            let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / 50_000.0;
            let squared = variance / (mean * mean);
            assert!((mean - 0.1).abs() < 0.005, "mean {mean} at {burstiness}");
            assert!((squared / burstiness - 1.0).abs() < 0.1, "variation {squared} at {burstiness}");
        }
    }

    #[test]
    fn shared_prompts_and_popular_documents_are_reused() {
        let shapes = [Shape::SystemPrompts { prompts: 4 }, Shape::Documents { documents: 50 }];
        for shape in shapes {
            let trace = generate(&Workload { shape, ..CHAT });
            assert_eq!(trace.requests.len(), 400);
            assert!(trace.endless_cache_hit_rate() > 0.3, "{shape:?} {}", trace.endless_cache_hit_rate());
            let fits =
                |request: &TraceRequest| request.blocks.len() as u32 >= request.input_tokens.div_ceil(BLOCK);
            assert!(trace.requests.iter().all(fits));
        }
    }
}
