//! Whether a request runs on one worker or on two [B, D4].

use pointsman_workers::{Candidate, Leg, ModelName, Snapshot};

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

/// What the split of one request depends on.
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

    /// Whether one worker may run the whole request instead of two.
    #[must_use]
    pub fn may_run_locally(self) -> bool {
        self.local && !self.enforce_disagg && !self.pins_prefill
    }
}

/// Whether a worker is up. One that drains or is busy is up, too.
#[must_use]
pub fn is_up(candidate: &Candidate) -> bool {
    candidate.ineligible().is_none_or(|reason| !reason.is_down())
}

/// Returns the first prefill and the first decode worker of a model that are up and speak the same handoff
/// protocol. A required domain of transfers fails the request instead (D3).
#[must_use]
pub fn pair_that_is_up<'a>(
    snapshot: &'a Snapshot,
    model: &ModelName,
) -> Option<(&'a Candidate, &'a Candidate)> {
    let (prefill, decode) = (snapshot.pool(model, Leg::Prefill), snapshot.pool(model, Leg::Decode));
    let mut in_vain = None;
    prefill.iter().zip(prefill.group_of_rows()).filter(|(from, _)| is_up(from)).find_map(|(from, group)| {
        // What one worker of a group cannot pair with, the next cannot either.
        if in_vain.replace(group) == Some(group) {
            return None;
        }
        let pairs = |to: &&Candidate| is_up(to) && from.worker.spec().pairs_with(to.worker.spec());
        decode.iter().find(pairs).map(|to| (from, to))
    })
}
