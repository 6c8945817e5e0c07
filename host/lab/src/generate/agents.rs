//! Sessions of coding agents. All sessions begin with one system prompt, and the sessions of a group continue
//! with the group's tools and repository. Each turn adds the previous answer and the result of a tool.
//! Sub-agents fork a session.
//!
//! Sources: `docs/compare.md`, "Coding agents".

use rand::{RngExt as _, rngs::SmallRng};
use rand_distr::{Distribution as _, LogNormal};
use tokio::time::Duration;

use super::{Fresh, Workload, zipf};
use crate::{
    arrivals::interval,
    trace::{TraceRequest, nominal_time},
};

/// Number of tokens in a block of a trace of agents, as in Mooncake's and AIPerf's traces.
pub const BLOCK: u32 = 512;
/// Number of tokens of the system prompt, which all sessions share.
pub(crate) const SYSTEM_TOKENS: u32 = 63 * BLOCK;
/// Number of tokens of a group's tools and repository, which the group's sessions share.
pub(crate) const GROUP_TOKENS: u32 = 20 * BLOCK;
/// Maximum number of tokens of a prompt. A session ends before its prompt would be longer.
pub(crate) const MAX_PROMPT_TOKENS: u32 = 200_000;
/// Number of a session's own tokens at its first turn: the files that it opens, and the task.
pub(crate) const FIRST_TOKENS: Spread =
    Spread { mean: 15_000.0, median: 5_000.0, low: 200.0, high: 50_000.0 };
/// Number of tokens of a tool's result, or of a person's message.
pub(crate) const RESULT_TOKENS: Spread =
    Spread { mean: 6_000.0, median: 4_000.0, low: 200.0, high: 19_000.0 };
/// Number of tokens of an answer.
pub(crate) const ANSWER_TOKENS: Spread = Spread { mean: 1_000.0, median: 800.0, low: 60.0, high: 5_500.0 };
/// Time that a tool takes, milliseconds.
pub(crate) const TOOL_PAUSE_MS: Spread =
    Spread { mean: 5_000.0, median: 2_000.0, low: 100.0, high: 65_000.0 };
/// Time that a person takes, milliseconds.
pub(crate) const HUMAN_PAUSE_MS: Spread =
    Spread { mean: 30_000.0, median: 15_000.0, low: 100.0, high: 65_000.0 };
/// Share of the pauses in which a tool runs.
pub(crate) const TOOL_SHARE: f64 = 0.7;
/// Smallest and largest number of turns of a sub-agent.
pub(crate) const CHILD_TURNS: (u32, u32) = (2, 6);
/// Maximum number of sub-agents that one turn starts.
pub(crate) const MAX_CHILDREN: u32 = 3;

/// Exponent of the Zipf distribution of the sizes of groups.
const GROUP_EXPONENT: f64 = 0.6;
/// Probability that a session ends after a turn with an empty context. With a full context it is 1.5 times as
/// high.
const END: f64 = 0.05;
/// Probability that a turn starts sub-agents.
const FORK: f64 = 0.05;
/// Maximum number of draws of a value, if earlier draws are out of its range.
const MAX_DRAWS: u32 = 100;

/// A log-normal distribution within a range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Mean before the range is applied.
    pub mean: f64,
    /// Median before the range is applied.
    pub median: f64,
    /// Least value.
    pub low: f64,
    /// Largest value.
    pub high: f64,
}

impl Spread {
    fn draw(&self, rng: &mut SmallRng) -> u32 {
        let sigma = (2.0 * (self.mean / self.median).ln()).max(0.0).sqrt();
        // `LogNormal::new` fails only for a standard deviation that is not finite.
        let value = LogNormal::new(self.median.ln(), sigma).map_or(self.median, |distribution| {
            let mut draws = (0..MAX_DRAWS).map(|_| distribution.sample(rng));
            draws.find(|value| (self.low..=self.high).contains(value)).unwrap_or(self.median)
        });
        value as u32
    }
}

/// The text with which a session's next prompt begins.
struct Context {
    tokens: u32,
    /// Ids of its blocks, including a partial last block. A block keeps its id while it fills.
    blocks: Vec<u64>,
}

impl Context {
    /// Returns the system prompt with the prefix of a group.
    fn of_group(group: usize) -> Self {
        let (system, own) = (u64::from(SYSTEM_TOKENS / BLOCK), u64::from(GROUP_TOKENS / BLOCK));
        let first = system + group as u64 * own;
        Self { tokens: SYSTEM_TOKENS + GROUP_TOKENS, blocks: (0..system).chain(first..first + own).collect() }
    }

    fn grow(&mut self, tokens: u32, fresh: &mut Fresh) {
        self.tokens += tokens;
        let more = self.tokens.div_ceil(BLOCK).saturating_sub(self.blocks.len() as u32);
        self.blocks.extend(fresh.blocks(more * BLOCK, BLOCK));
    }

    /// Returns a context that shares the full blocks with this one and continues differently.
    fn fork(&self, fresh: &mut Fresh) -> Self {
        let full = (self.tokens / BLOCK) as usize;
        let blocks = self.blocks.iter().take(full).copied().collect();
        let mut fork = Self { tokens: self.tokens, blocks };
        fork.grow(0, fresh);
        fork
    }
}

/// Beginning of a turn.
#[derive(Default)]
struct Turn {
    at_ms: u64,
    delay_ms: Option<u64>,
    parent: Option<String>,
    join: bool,
    /// Tokens that no earlier prompt of the session had.
    new_tokens: u32,
}

struct Generator<'a> {
    rng: &'a mut SmallRng,
    fresh: Fresh,
    groups: u32,
    requests: Vec<TraceRequest>,
    limit: usize,
}

/// Generates sessions until there are as many requests as the workload asks for. The last session may be
/// incomplete.
pub(super) fn sessions(rng: &mut SmallRng, workload: &Workload, groups: u32) -> Vec<TraceRequest> {
    // The smaller ids are those of the system prompt and of the groups.
    let fresh = Fresh(u64::from(SYSTEM_TOKENS / BLOCK) + u64::from(groups) * u64::from(GROUP_TOKENS / BLOCK));
    let mut generator = Generator { rng, fresh, groups, requests: Vec::new(), limit: workload.requests };
    let mut at = 0.0_f64;
    for number in 1_u64.. {
        if generator.is_full() {
            break;
        }
        generator.session(number, (at * 1e3).round() as u64);
        at += interval(generator.rng, workload.rate, workload.burstiness);
    }
    generator.requests
}

impl Generator<'_> {
    fn is_full(&self) -> bool {
        self.requests.len() >= self.limit
    }

    /// Generates a session with its sub-agents.
    fn session(&mut self, number: u64, start_ms: u64) {
        let name = format!("agent-{number}");
        let mut context = Context::of_group(zipf(self.rng, self.groups as usize, GROUP_EXPONENT));
        let (mut children, new_tokens) = (0, FIRST_TOKENS.draw(self.rng));
        let mut turn = Turn { at_ms: start_ms, new_tokens, ..Turn::default() };
        while !self.is_full() {
            let (mut end_ms, _) = self.turn(&name, &mut context, turn);
            let mut new_tokens = RESULT_TOKENS.draw(self.rng);
            let full = f64::from(context.tokens) / f64::from(MAX_PROMPT_TOKENS);
            if context.tokens + new_tokens > MAX_PROMPT_TOKENS
                || self.rng.random_bool(END * (1.0 + full / 2.0))
            {
                return;
            }
            let has_room = context.tokens + RESULT_TOKENS.high as u32 <= MAX_PROMPT_TOKENS;
            let join = has_room && self.rng.random_bool(FORK);
            if join {
                let (mut reports, mut last_ms) = (0, end_ms);
                for _ in 0..self.rng.random_range(1..=MAX_CHILDREN) {
                    children += 1;
                    let (ended_ms, report) = self.child(&name, children, &context, end_ms);
                    (reports, last_ms) = (reports + report, last_ms.max(ended_ms));
                }
                new_tokens = reports.max(RESULT_TOKENS.low as u32);
                end_ms = last_ms;
            }
            let delay_ms = self.pause_ms();
            turn =
                Turn { at_ms: end_ms + delay_ms, delay_ms: Some(delay_ms), parent: None, join, new_tokens };
        }
    }

    /// Generates a sub-agent. Returns the time at which it ends, and the tokens of its last answer.
    fn child(&mut self, parent: &str, number: u32, context: &Context, start_ms: u64) -> (u64, u32) {
        let name = format!("{parent}-sub-{number}");
        let mut context = context.fork(&mut self.fresh);
        let (turns, new_tokens) =
            (self.rng.random_range(CHILD_TURNS.0..=CHILD_TURNS.1), RESULT_TOKENS.draw(self.rng));
        let parent = Some(parent.to_owned());
        let mut turn = Turn { at_ms: start_ms, parent, new_tokens, ..Turn::default() };
        let mut last = (start_ms, 0);
        for _ in 0..turns {
            if self.is_full() || context.tokens + turn.new_tokens > MAX_PROMPT_TOKENS {
                break;
            }
            last = self.turn(&name, &mut context, turn);
            let delay_ms = u64::from(TOOL_PAUSE_MS.draw(self.rng));
            turn = Turn {
                at_ms: last.0 + delay_ms,
                delay_ms: Some(delay_ms),
                new_tokens: RESULT_TOKENS.draw(self.rng),
                ..Turn::default()
            };
        }
        last
    }

    /// Generates a request, and adds its answer to the context. Returns the time at which it ends, and the
    /// tokens of its answer.
    fn turn(&mut self, session: &str, context: &mut Context, turn: Turn) -> (u64, u32) {
        context.grow(turn.new_tokens, &mut self.fresh);
        let answer = ANSWER_TOKENS.draw(self.rng);
        self.requests.push(TraceRequest {
            at: Duration::from_millis(turn.at_ms),
            input_tokens: context.tokens,
            output_tokens: answer,
            blocks: context.blocks.clone().into(),
            session: Some(session.to_owned()),
            delay: turn.delay_ms.map(Duration::from_millis),
            parent: turn.parent,
            join: turn.join,
            ..TraceRequest::default()
        });
        context.grow(answer, &mut self.fresh);
        // Only a fixed schedule uses the times of the trace.
        let took = nominal_time(turn.new_tokens, answer);
        (turn.at_ms + took.as_millis() as u64, answer)
    }

    fn pause_ms(&mut self) -> u64 {
        let pause = if self.rng.random_bool(TOOL_SHARE) { TOOL_PAUSE_MS } else { HUMAN_PAUSE_MS };
        pause.draw(self.rng).into()
    }
}

#[cfg(test)]
mod tests;
