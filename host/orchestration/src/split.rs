//! Whether a request runs on one worker or on two [B, D4].

use std::collections::HashMap;

use pointsman_routing::CandidateId;
use pointsman_workers::{Candidate, Engine, ModelName, Snapshot, WorkerId};

use crate::legs::{RetryPolicy, Shape};

/// How requests of a model are split over two workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SplitRules {
    /// Refuse a request without a prefill worker instead of prefilling locally.
    pub enforce_disagg: bool,
    /// Order of the legs, retries and fallback.
    pub retry_policy: RetryPolicy,
}

impl SplitRules {
    /// Returns the rules. Enforced disaggregation excludes the fallback to local prefill.
    #[must_use]
    pub fn new(enforce_disagg: bool, retry_policy: RetryPolicy) -> Self {
        let local_fallback = retry_policy.local_fallback && !enforce_disagg;
        Self { enforce_disagg, retry_policy: RetryPolicy { local_fallback, ..retry_policy } }
    }
}

/// Conditions for the split of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Splittable {
    /// Whether local prefill is refused.
    pub enforce_disagg: bool,
    /// Whether a hint names the prefill worker. Local prefill would ignore it (D4).
    pub pins_prefill: bool,
    /// Whether the model has workers for the aggregated leg.
    pub local: bool,
}

/// Why a request is refused when its model has no pair of workers that are up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPair {
    /// Local prefill is refused.
    Enforced,
    /// No worker prefills locally.
    NoWorker,
}

impl Splittable {
    /// Returns the shape of a request whose model has no prefill or no decode worker that is up (B1).
    ///
    /// # Errors
    /// [`NoPair`] when the request is refused.
    pub fn without_pair(self) -> Result<Shape, NoPair> {
        match (self.enforce_disagg, self.local) {
            // Routing the leg says why the pinned worker is not honoured [D4].
            _ if self.pins_prefill => Ok(Shape::Remote),
            (true, _) => Err(NoPair::Enforced),
            (false, true) => Ok(Shape::Aggregated),
            (false, false) => Err(NoPair::NoWorker),
        }
    }

    /// Returns whether one worker may run the whole request instead of two.
    #[must_use]
    pub fn may_run_locally(self) -> bool {
        self.local && !self.enforce_disagg && !self.pins_prefill
    }
}

/// Returns whether a worker is up. A worker that drains or is busy is up, too.
#[must_use]
pub fn is_up(candidate: &Candidate) -> bool {
    candidate.ineligible().is_none_or(|reason| !reason.is_down())
}

/// Returns the first prefill and the first decode worker of a model that are up and speak the same handoff
/// protocol. A required domain of transfers fails the request instead (D3). `engine`: the only engine that
/// they may have.
#[must_use]
pub fn pair_that_is_up<'a>(
    snapshot: &'a Snapshot,
    model: &ModelName,
    engine: Option<Engine>,
) -> Option<(&'a Candidate, &'a Candidate)> {
    let [prefill, decode, _] = snapshot.pools(model);
    first_pair(prefill, decode, |candidate| is_of(engine, candidate) && is_up(candidate))
}

/// Returns whether a model has such a pair without the workers `without`.
#[must_use]
pub fn has_pair_without(snapshot: &Snapshot, model: &ModelName, without: &[WorkerId]) -> bool {
    let [prefill, decode, _] = snapshot.pools(model);
    let counts = |candidate: &Candidate| is_up(candidate) && !without.contains(&candidate.worker_id());
    first_pair(prefill, decode, counts).is_some()
}

/// Returns whether a pair may run a request that its planned worker does not run. `tried` are workers that
/// failed it: one of them is in the pair only if no other worker is left.
#[must_use]
pub fn pair_may_take_over(
    snapshot: &Snapshot,
    model: &ModelName,
    engine: Option<Engine>,
    tried: &[CandidateId],
) -> bool {
    let is_other = |candidate: &Candidate| {
        let id = (candidate.worker_id(), candidate.rank);
        is_of(engine, candidate) && is_up(candidate) && !tried.contains(&id)
    };
    let [prefill, decode, aggregated] = snapshot.pools(model);
    first_pair(prefill, decode, is_other).is_some()
        || (!aggregated.iter().any(is_other) && pair_that_is_up(snapshot, model, engine).is_some())
}

/// Returns whether a worker has this engine, if only one will do.
#[must_use]
pub fn is_of(engine: Option<Engine>, candidate: &Candidate) -> bool {
    engine.is_none_or(|engine| candidate.worker.spec().engine == engine)
}

/// Looks at each candidate at most three times, however few of them pair.
fn first_pair<'a>(
    prefill: &'a [Candidate],
    decode: &'a [Candidate],
    is_up: impl Fn(&Candidate) -> bool,
) -> Option<(&'a Candidate, &'a Candidate)> {
    let first = prefill.iter().find(|from| is_up(from))?;
    let pairs = |to: &&Candidate| is_up(to) && first.worker.spec().pairs_with(to.worker.spec());
    if let Some(to) = decode.iter().find(pairs) {
        return Some((first, to));
    }
    let mut partners = HashMap::new();
    for (row, to) in decode.iter().enumerate().filter(|(_, to)| is_up(to)) {
        let spec = to.worker.spec();
        partners.entry(spec.handoff_protocol()).or_insert_with(Partners::default).add(row, to);
    }
    let mut from = prefill.iter().filter(|from| is_up(from));
    from.find_map(|from| {
        let spec = from.worker.spec();
        let to = partners.get(&spec.handoff_protocol())?.first(spec.kv_compatibility.as_deref())?;
        Some((from, to))
    })
}

/// Candidates of one handoff protocol. Workers whose compatibility is not known pair with all others.
#[derive(Default)]
struct Partners<'a> {
    first: Option<(usize, &'a Candidate)>,
    first_unknown: Option<(usize, &'a Candidate)>,
    first_known: HashMap<&'a str, (usize, &'a Candidate)>,
}

impl<'a> Partners<'a> {
    /// Adds a candidate. Rows come in their order.
    fn add(&mut self, row: usize, candidate: &'a Candidate) {
        self.first.get_or_insert((row, candidate));
        match candidate.worker.spec().kv_compatibility.as_deref() {
            Some(known) => _ = self.first_known.entry(known).or_insert((row, candidate)),
            None => _ = self.first_unknown.get_or_insert((row, candidate)),
        }
    }

    /// Returns the first candidate that pairs with a worker of this compatibility.
    fn first(&self, compatibility: Option<&str>) -> Option<&'a Candidate> {
        let Some(own) = compatibility else { return self.first.map(|(_, candidate)| candidate) };
        let both = self.first_known.get(own).into_iter().chain(&self.first_unknown);
        both.min_by_key(|(row, _)| *row).map(|(_, candidate)| *candidate)
    }
}

#[cfg(test)]
mod tests;
