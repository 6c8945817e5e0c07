//! Generates traces from a seed: multi-turn chat, coding agents, shared system prompts, retrieved documents,
//! and bursts of arrivals.

use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};
use rand_distr::{Distribution as _, Zipf};
use tokio::time::Duration;

use crate::{
    arrivals::interval,
    trace::{Trace, TraceRequest},
};

pub mod agents;

/// Shape of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Conversations: each turn's prompt is the conversation so far and a new question.
    Chat {
        /// Turns of a conversation.
        turns: u32,
    },
    /// Sessions of coding agents: see [`agents`].
    Agents {
        /// Groups of sessions that share their tools and their repository.
        groups: u32,
    },
    /// Prompts that consist of one of a few long system prompts and a short question.
    SystemPrompts {
        /// Number of system prompts.
        prompts: u32,
    },
    /// Prompts that consist of some of many documents and a question. Popular documents come more often
    /// (Zipf).
    Documents {
        /// Number of documents.
        documents: u32,
    },
}

/// Description of a trace to generate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Shape of the requests.
    pub shape: Shape,
    /// Number of requests.
    pub requests: usize,
    /// Mean arrivals of requests a second; for [`Shape::Agents`], mean starts of sessions a second.
    pub rate: f64,
    /// Squared coefficient of variation of the intervals between arrivals: 1 is a Poisson process, a larger
    /// value is burstier. Intervals are Gamma-distributed.
    pub burstiness: f64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Tokens of a block in a generated trace.
const BLOCK: u32 = 64;

/// Source of ids for new blocks.
struct Fresh(u64);

impl Fresh {
    fn blocks(&mut self, tokens: u32, block: u32) -> Vec<u64> {
        let count = u64::from(tokens.div_ceil(block));
        let first = self.0;
        self.0 += count;
        (first..first + count).collect()
    }
}

impl Shape {
    fn name(self) -> &'static str {
        match self {
            Self::Chat { .. } => "chat",
            Self::Agents { .. } => "agents",
            Self::SystemPrompts { .. } => "system-prompts",
            Self::Documents { .. } => "documents",
        }
    }

    fn block_tokens(self) -> u32 {
        match self {
            Self::Agents { .. } => agents::BLOCK,
            Self::Chat { .. } | Self::SystemPrompts { .. } | Self::Documents { .. } => BLOCK,
        }
    }
}

/// Generates a trace. Equal workloads give equal traces.
#[must_use]
pub fn generate(workload: &Workload) -> Trace {
    let rng = &mut SmallRng::seed_from_u64(workload.seed);
    let fresh = &mut Fresh(1);
    let requests = match workload.shape {
        Shape::Chat { turns } => chat(rng, fresh, workload, turns.max(1)),
        Shape::Agents { groups } => agents::sessions(rng, workload, groups.max(1)),
        Shape::SystemPrompts { prompts } => system_prompts(rng, fresh, workload, prompts.max(1)),
        Shape::Documents { documents } => documents_with_questions(rng, fresh, workload, documents.max(1)),
    };
    let (name, block_tokens) = (workload.shape.name().to_owned(), workload.shape.block_tokens());
    let mut trace = Trace { name, block_tokens, requests, ..Trace::default() };
    trace.sort();
    trace
}

/// Returns the times at which requests arrive.
fn arrivals(rng: &mut SmallRng, workload: &Workload) -> Vec<Duration> {
    let mut at = 0.0;
    let mut arrivals = Vec::with_capacity(workload.requests);
    for _ in 0..workload.requests {
        arrivals.push(Duration::from_secs_f64(at));
        at += interval(rng, workload.rate, workload.burstiness);
    }
    arrivals
}

/// Makes requests with one of a few system prompts and a short question.
fn system_prompts(
    rng: &mut SmallRng,
    fresh: &mut Fresh,
    workload: &Workload,
    count: u32,
) -> Vec<TraceRequest> {
    let arrivals = arrivals(rng, workload);
    let prompts: Vec<Vec<u64>> = (0..count).map(|_| fresh.blocks(BLOCK * 32, BLOCK)).collect();
    let one = |at: &Duration| {
        let prompt = prompts.get(rng.random_range(0..prompts.len())).cloned().unwrap_or_default();
        let question = between(rng, 20, 400);
        request(rng, fresh, *at, prompt, question)
    };
    arrivals.iter().map(one).collect()
}

/// Makes requests with three documents and a question. Popular documents come more often.
fn documents_with_questions(
    rng: &mut SmallRng,
    fresh: &mut Fresh,
    workload: &Workload,
    count: u32,
) -> Vec<TraceRequest> {
    let arrivals = arrivals(rng, workload);
    let documents: Vec<Vec<u64>> =
        (0..count).map(|_| fresh.blocks(BLOCK * between(rng, 16, 128), BLOCK)).collect();
    let one = |at: &Duration| {
        let mut blocks = Vec::new();
        for _ in 0..3 {
            let place = zipf(rng, documents.len(), 1.0);
            blocks.extend(documents.get(place).into_iter().flatten());
        }
        let question = between(rng, 20, 200);
        request(rng, fresh, *at, blocks, question)
    };
    arrivals.iter().map(one).collect()
}

/// Makes conversations. A turn follows the answer before it after the pause of a reader.
fn chat(rng: &mut SmallRng, fresh: &mut Fresh, workload: &Workload, turns: u32) -> Vec<TraceRequest> {
    let arrivals = arrivals(rng, workload);
    let mut requests = Vec::with_capacity(arrivals.len());
    let mut number = 0;
    // A conversation uses as many arrivals as it has turns, but each later turn arrives after the answer
    // before it.
    for starts in arrivals.chunks(turns as usize) {
        number += 1;
        let mut tokens = between(rng, 100, 2_000) / BLOCK * BLOCK + BLOCK;
        let mut blocks = fresh.blocks(tokens, BLOCK);
        let Some(start) = starts.first() else { continue };
        for turn in 0..starts.len() {
            let output = between(rng, 50, 600);
            let pause = Duration::from_millis(u64::from(between(rng, 1_000, 20_000)));
            requests.push(TraceRequest {
                at: *start,
                input_tokens: tokens,
                output_tokens: output,
                blocks: blocks.clone().into(),
                session: Some(format!("conversation-{number}")),
                delay: (turn > 0).then_some(pause),
                ..TraceRequest::default()
            });
            // The answer and the next question, in whole blocks.
            let more = (output + between(rng, 20, 300)) / BLOCK * BLOCK + BLOCK;
            blocks.extend(fresh.blocks(more, BLOCK));
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
    blocks.extend(fresh.blocks(question, BLOCK));
    let (output_tokens, blocks) = (between(rng, 20, 500), blocks.into());
    TraceRequest { at, input_tokens, output_tokens, blocks, ..TraceRequest::default() }
}

/// Returns a whole number from `low` to `high`; small numbers come more often (log-uniform).
fn between(rng: &mut SmallRng, low: u32, high: u32) -> u32 {
    let (low, high) = (f64::from(low).ln(), f64::from(high).ln());
    (low + (high - low) * rng.random::<f64>()).exp() as u32
}

/// Returns a position below `count`; the first positions come most often (Zipf).
#[expect(clippy::cast_precision_loss, reason = "a number of documents or groups")]
fn zipf(rng: &mut SmallRng, count: usize, exponent: f64) -> usize {
    // `Zipf::new` fails only for a count below one.
    let place = Zipf::new(count as f64, exponent).map_or(1.0, |zipf| zipf.sample(rng));
    (place as usize).clamp(1, count.max(1)) - 1
}

#[cfg(test)]
mod tests;
