//! Finds the decisions that differ between two arms, and their cost.

use std::cmp::Reverse;

use serde::Serialize;
use tokio::time::Duration;

use super::figures::Figure;
use crate::{
    outcome::{Ended, Outcome},
    run::RunResult,
};

/// Number of decisions that are listed for each direction: those with the highest cost and those with the
/// largest saving.
const LISTED: usize = 5;

/// How the decisions of two arms differ, over all seeds. Differences are the second arm's value minus the
/// first's: negative is faster.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairDifference {
    /// First arm.
    pub first: String,
    /// Second arm.
    pub second: String,
    /// Requests that went to other engines, or ended in another way.
    pub requests: Figure,
    /// These requests as a share of all requests, 0 to 1.
    pub share: f64,
    /// Mean difference of the time to first token over those of these requests that both arms completed,
    /// milliseconds. Without a value if a run has no such request.
    pub ttft_ms: Figure,
    /// Mean difference of the time to last token over the same requests, milliseconds.
    pub e2e_ms: Figure,
    /// Decisions of the first seed that cost or saved the most time to first token.
    pub examples: Vec<DecisionCost>,
}

/// One request that two arms routed differently.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DecisionCost {
    /// Number of the request in the trace, from 0.
    pub request: usize,
    /// Arrival of the request, seconds.
    pub at_s: f64,
    /// Number of prompt tokens of the request.
    pub prompt_tokens: u32,
    /// Engine that computed the prompt, by its position in the fleet, for both arms.
    pub engines: [u32; 2],
    /// Number of prompt tokens that this engine had cached, for both arms.
    pub cached_tokens: [u32; 2],
    /// Time to first token, milliseconds, for both arms.
    pub ttft_ms: [f64; 2],
}

/// Differences between the decisions of two arms, for one seed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PairSeed {
    all: usize,
    differ: usize,
    ttft_ms: f64,
    e2e_ms: f64,
    examples: Vec<DecisionCost>,
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn choice(outcome: &Outcome) -> (u32, u32, Ended) {
    (outcome.prefill_engine, outcome.decode_engine, outcome.ended)
}

impl PairSeed {
    #[expect(clippy::cast_precision_loss, reason = "numbers of requests stay far below 2^53")]
    pub(super) fn of(first: &RunResult, second: &RunResult, with_examples: bool) -> Self {
        let pairs = || first.outcomes.iter().zip(&second.outcomes).enumerate();
        let differ = || pairs().filter(|(_, (a, b))| choice(a) != choice(b));
        let complete = |(_, (a, b)): &(usize, (&Outcome, &Outcome))| {
            a.ended == Ended::Complete && b.ended == Ended::Complete
        };
        let (mut count, mut ttft, mut e2e) = (0_u64, 0.0, 0.0);
        let mut costs = Vec::new();
        for (request, (a, b)) in differ().filter(complete) {
            count += 1;
            let ttft_ms = [milliseconds(a.ttft), milliseconds(b.ttft)];
            ttft += ttft_ms[1] - ttft_ms[0];
            e2e += milliseconds(b.e2e) - milliseconds(a.e2e);
            if with_examples {
                costs.push(DecisionCost {
                    request,
                    at_s: a.at.as_secs_f64(),
                    prompt_tokens: a.isl,
                    engines: [a.prefill_engine, b.prefill_engine],
                    cached_tokens: [a.cached, b.cached],
                    ttft_ms,
                });
            }
        }
        let none = if differ().next().is_none() { 0.0 } else { f64::INFINITY };
        let of = |sum: f64| if count == 0 { none } else { sum / count as f64 };
        Self {
            all: first.outcomes.len(),
            differ: differ().count(),
            ttft_ms: of(ttft),
            e2e_ms: of(e2e),
            examples: extreme_costs(costs),
        }
    }
}

/// Returns the decisions with the highest cost, then those with the largest saving.
fn extreme_costs(mut costs: Vec<DecisionCost>) -> Vec<DecisionCost> {
    let cost = |one: &DecisionCost| ((one.ttft_ms[1] - one.ttft_ms[0]) * 1e3) as i64;
    costs.sort_by_key(|one| Reverse(cost(one)));
    let listed = costs.iter().filter(|one| cost(one) > 0).take(LISTED);
    let saved = costs.iter().rev().filter(|one| cost(one) < 0).take(LISTED);
    listed.chain(saved).copied().collect()
}

impl PairDifference {
    #[expect(clippy::cast_precision_loss, reason = "numbers of requests stay far below 2^53")]
    pub(super) fn over(first: &str, second: &str, seeds: &[PairSeed]) -> Self {
        let of = |pick: fn(&PairSeed) -> f64| Figure::of(seeds.iter().map(pick).collect());
        let sum = |pick: fn(&PairSeed) -> usize| seeds.iter().map(pick).sum::<usize>() as f64;
        Self {
            first: first.to_owned(),
            second: second.to_owned(),
            requests: of(|seed| seed.differ as f64),
            share: sum(|seed| seed.differ) / sum(|seed| seed.all).max(1.0),
            ttft_ms: of(|seed| seed.ttft_ms),
            e2e_ms: of(|seed| seed.e2e_ms),
            examples: seeds
                .iter()
                .find(|seed| !seed.examples.is_empty())
                .map(|seed| seed.examples.clone())
                .unwrap_or_default(),
        }
    }
}
