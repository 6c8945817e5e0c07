//! Which workers and models can serve now.

use pointsman_workers::{Candidate, Leg, ModelName, Snapshot};

/// Whether a worker is up. One that drains or is busy is up, too.
pub(crate) fn is_up(candidate: &Candidate) -> bool {
    candidate.ineligible().is_none_or(|reason| !reason.is_down())
}

/// Returns the models that can be served now, sorted (B3).
pub(crate) fn servable_models(snapshot: &Snapshot, enforce_disagg: bool) -> Vec<String> {
    let up = |model: &ModelName, leg: Leg| snapshot.pool(model, leg).iter().any(is_up);
    let serves = |model: &&ModelName| {
        let remote = up(model, Leg::Prefill) && up(model, Leg::Decode);
        remote || (!enforce_disagg && up(model, Leg::Aggregated))
    };
    snapshot.models().into_iter().filter(serves).map(ToString::to_string).collect()
}
