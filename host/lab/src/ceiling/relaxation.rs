//! A mean time to first token that no policy can beat. docs/compare.md contains the proof.

use std::{collections::HashMap, time::Duration};

use pointsman_sim::core::LeastTimes;
use pointsman_workers::Role;

use super::{
    Waits,
    pooled::{Job, busy_periods},
};
use crate::{
    fleet::{EngineGroup, Fleet},
    outcome::Outcome,
    prepared::Prepared,
    trace::Trace,
};

/// Share by which the bound is lowered, because a simulation rounds times to nanoseconds.
const ROUNDING: f64 = 1e-6;

/// Lower bounds of all requests of a run, milliseconds.
#[derive(Clone, Debug)]
pub(crate) struct Relaxation {
    /// Least time to first token of each request, whatever other requests do.
    alone: Vec<f64>,
    /// Requests whose arrival does not depend on the arm, as jobs of one machine.
    jobs: Vec<Job>,
    machine: Machine,
    /// Least time of each request before its prompt is computed, and after it until its first token.
    around: Vec<f64>,
}

/// All engines that compute prompts, modelled as one machine.
#[derive(Clone, Debug)]
struct Machine {
    /// Rate at which it computes, tokens a millisecond.
    rate: f64,
    engines: Vec<LeastTimes>,
}

/// The first request of a tree of [`Waits`] that contains a block.
#[derive(Clone, Copy, Debug, PartialEq)]
struct First {
    tree: usize,
    /// Time before which no request of the tree arrives, milliseconds.
    earliest: f64,
    number: usize,
    /// Whether all other requests of the tree that contain the block wait for this one.
    others_wait: bool,
}

/// For each block, the two trees in which it can appear first.
type Holders = HashMap<u64, [Option<First>; 2]>;

impl Relaxation {
    /// Returns the bounds of a trace on a fleet. `outcomes` are those of any arm with the same seed, and give
    /// the arrivals.
    pub(crate) fn of(
        trace: &Trace,
        prepared: &[Prepared],
        fleet: &Fleet,
        outcomes: &[Outcome],
        waits: &Waits,
    ) -> Self {
        let arrivals: Vec<f64> = outcomes.iter().map(|outcome| milliseconds(outcome.at)).collect();
        let holders = holders(prepared, waits, &arrivals);
        let ways = Ways::of(fleet);
        let mut relaxation = Self {
            alone: Vec::with_capacity(arrivals.len()),
            jobs: Vec::new(),
            machine: Machine::of(fleet),
            around: Vec::with_capacity(arrivals.len()),
        };
        let requests = trace.requests.iter().zip(prepared).zip(outcomes).enumerate();
        for (number, ((request, prepared), outcome)) in requests {
            let isl = request.input_tokens.max(1);
            let at = milliseconds(outcome.at);
            // An engine always computes the last token of a prompt.
            let usable = ((isl - 1) / fleet.block_tokens.max(1)) as usize;
            let blocks = || prepared.chain.iter().take(usable);
            let since: Vec<f64> =
                blocks().map(|hash| earliest_computed(&holders, *hash, number, waits)).collect();
            let tokens_of = |blocks: usize| tokens_of(blocks, fleet.block_tokens).min(isl - 1);
            relaxation.alone.push(alone(&since, at, |cached| ways.least_ms(tokens_of(cached), isl)));
            relaxation.around.push(ways.overhead_ms + ways.behind_prompt_ms(isl));
            if !waits.waits(number) {
                let others = blocks().take_while(|hash| !is_first(&holders, **hash, number)).count();
                let tokens = isl - tokens_of(others);
                relaxation.jobs.push(Job { number, release: outcome.at, tokens });
            }
        }
        relaxation
    }

    /// Returns the bound of the mean over the requests for which `counts` is true; 0 without such a request.
    #[expect(clippy::cast_precision_loss, reason = "numbers of requests stay far below 2^53")]
    pub(crate) fn mean_ms(&self, counts: impl Fn(usize) -> bool) -> f64 {
        let alone = |number: usize| self.alone.get(number).copied().unwrap_or_default();
        let count = (0..self.alone.len()).filter(|number| counts(*number)).count();
        let in_all: f64 = (0..self.alone.len()).filter(|number| counts(*number)).map(alone).sum();
        let jobs: Vec<Job> = self.jobs.iter().filter(|job| counts(job.number)).copied().collect();
        let more =
            if self.machine.rate.is_finite() && self.machine.rate > 0.0 { self.queueing(jobs) } else { 0.0 };
        if count == 0 { 0.0 } else { (in_all + more) / count as f64 * (1.0 - ROUNDING) }
    }

    /// Returns by how much the sum grows because jobs wait for each other. Two bounds hold for any set of
    /// requests; the larger one is used for each busy period.
    fn queueing(&self, jobs: Vec<Job>) -> f64 {
        let periods = busy_periods(jobs, self.machine.rate);
        let more = periods.iter().map(|period| {
            let (mut alone, mut pooled, mut spread, mut early) = (0.0, 0.0, 0.0, 0.0);
            for (job, mean) in period {
                let of = |values: &[f64]| values.get(job.number).copied().unwrap_or_default();
                alone += of(&self.alone);
                pooled += mean + of(&self.around);
                spread += self.machine.least(|engine| engine.half_prompt_ms(job.tokens));
                early += self.machine.least(|engine| engine.behind_mean_ms(job.tokens));
            }
            (pooled + f64::max(spread, early) - alone).max(0.0)
        });
        more.sum()
    }
}

impl Machine {
    fn of(fleet: &Fleet) -> Self {
        let computing = || fleet.engines.iter().filter(|group| Ways::computes_prompts(fleet, group.role));
        let least =
            |group: &EngineGroup| LeastTimes::new(group.step_time(), group.limits(fleet.block_tokens));
        let rate = computing().map(|group| f64::from(group.count) / least(group).token_ms()).sum();
        Self { rate, engines: computing().map(least).collect() }
    }

    fn least(&self, of: impl Fn(&LeastTimes) -> f64) -> f64 {
        least(self.engines.iter().map(of))
    }
}

/// The ways in which a fleet can serve a request.
pub(crate) struct Ways<'a> {
    fleet: &'a Fleet,
    groups: Vec<(Role, f64, LeastTimes)>,
    /// Least time from an arrival to the queue of an engine that computes prompts.
    overhead_ms: f64,
}

impl<'a> Ways<'a> {
    pub(crate) fn of(fleet: &'a Fleet) -> Self {
        let group = |group: &EngineGroup| {
            let least = LeastTimes::new(group.step_time(), group.limits(fleet.block_tokens));
            (group.role, milliseconds(group.request_overhead()), least)
        };
        let groups: Vec<_> = fleet.engines.iter().map(group).collect();
        let computing = groups.iter().filter(|(role, ..)| Self::computes_prompts(fleet, *role));
        let overhead_ms = least(computing.map(|(_, overhead, _)| *overhead));
        Self { fleet, groups, overhead_ms }
    }

    /// Whether an engine of this role may compute a prompt that no other engine computed before. A decode
    /// engine may, unless the configuration enforces both legs.
    fn computes_prompts(fleet: &Fleet, role: Role) -> bool {
        role == Role::Prefill || !fleet.routing.enforce_disagg
    }

    fn least_over_groups(&self, is: impl Fn(Role) -> bool, of: impl Fn(f64, &LeastTimes) -> f64) -> f64 {
        least(self.groups.iter().filter(|(role, ..)| is(*role)).map(|(_, ms, times)| of(*ms, times)))
    }

    fn is_local(&self, role: Role) -> bool {
        role != Role::Prefill && Self::computes_prompts(self.fleet, role)
    }

    /// Returns the least time from the end of a remote prefill to the first token with `cached` tokens in the
    /// decode engine's cache.
    fn transfer_ms(&self, cached: u32, isl: u32) -> f64 {
        let decode =
            self.least_over_groups(|role| role == Role::Decode, |ms, times| ms + times.decode_ms(isl));
        milliseconds(self.fleet.transfer(isl, cached)) + decode
    }

    /// Returns the least time from arrival to the first token with `cached` tokens in every cache.
    pub(crate) fn least_ms(&self, cached: u32, isl: u32) -> f64 {
        let prompt = |ms: f64, times: &LeastTimes| ms + times.prompt_ms(cached, isl);
        let local = self.least_over_groups(|role| self.is_local(role), prompt);
        let remote = self.least_over_groups(|role| role == Role::Prefill, prompt);
        local.min(remote + self.transfer_ms(cached, isl))
    }

    /// Returns the least time between the end of the prompt and the first token.
    fn behind_prompt_ms(&self, isl: u32) -> f64 {
        let local = self.least_over_groups(|role| self.is_local(role), |_, times| times.emission_ms(isl));
        let has_prefill = self.groups.iter().any(|(role, ..)| *role == Role::Prefill);
        // The decode engine may have every block but the last one.
        let block = self.fleet.block_tokens.max(1);
        let cached = isl.saturating_sub(1) / block * block;
        if has_prefill { local.min(self.transfer_ms(cached, isl)) } else { local }
    }
}

fn holders(prepared: &[Prepared], waits: &Waits, arrivals: &[f64]) -> Holders {
    let mut holders = Holders::new();
    for (number, prepared) in prepared.iter().enumerate().take(arrivals.len()) {
        let tree = waits.root(number);
        let earliest = arrivals.get(tree).copied().unwrap_or_default();
        for hash in prepared.chain.iter() {
            let new = First { tree, earliest, number, others_wait: true };
            add(holders.entry(*hash).or_default(), new, waits);
        }
    }
    holders
}

/// Keeps the two trees whose requests may arrive first.
fn add(holders: &mut [Option<First>; 2], new: First, waits: &Waits) {
    if let Some(known) = holders.iter_mut().flatten().find(|known| known.tree == new.tree) {
        known.others_wait &= waits.is_after(new.number, known.number);
        return;
    }
    let mut new = Some(new);
    for place in holders {
        let is_earlier = match (&new, &place) {
            (Some(new), Some(known)) => (new.earliest, new.number) < (known.earliest, known.number),
            (new, known) => new.is_some() && known.is_none(),
        };
        if is_earlier {
            std::mem::swap(place, &mut new);
        }
    }
}

/// Whether no other request can have this block computed before `number` arrives. Of requests that arrive at
/// the same time, the first in the trace counts, so each block is computed for one request only.
fn is_first(holders: &Holders, hash: u64, number: usize) -> bool {
    holders.get(&hash).and_then(|both| both[0]).is_none_or(|first| first.number == number)
}

/// Returns the earliest time at which a request other than `number` may have had the block computed.
fn earliest_computed(holders: &Holders, hash: u64, number: usize, waits: &Waits) -> f64 {
    let of = |first: &First| {
        if first.tree == waits.root(number) {
            let is_new = first.number == number && first.others_wait;
            if is_new { f64::INFINITY } else { f64::NEG_INFINITY }
        } else if waits.waits(number) {
            // The arrival depends on the policy: requests of every other tree may have been served before.
            f64::NEG_INFINITY
        } else {
            first.earliest
        }
    };
    holders.get(&hash).map_or(f64::INFINITY, |both| least(both.iter().flatten().map(of)))
}

/// Returns the least time to first token: for each number of cached blocks, the larger of the time until a
/// cache can contain them and the time to compute the other blocks.
fn alone(since: &[f64], at: f64, least_ms: impl Fn(usize) -> f64) -> f64 {
    let mut cached = since.iter().take_while(|since| **since <= at).count();
    let mut bound = least_ms(cached);
    let mut waited = 0.0_f64;
    while let Some(next) = since.get(cached) {
        waited = waited.max(next - at);
        if waited >= bound {
            break;
        }
        cached += 1;
        bound = bound.min(least_ms(cached).max(waited));
    }
    if bound.is_finite() { bound } else { 0.0 }
}

fn tokens_of(blocks: usize, block_tokens: u32) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(block_tokens)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn least(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(f64::INFINITY, f64::min)
}
