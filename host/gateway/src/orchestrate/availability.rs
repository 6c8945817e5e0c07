//! Which workers and models can serve now.

use pointsman_orchestration::{is_up, pair_that_is_up};
use pointsman_workers::{Leg, ModelName, Snapshot};

use crate::state::Settings;

/// Returns the models that can be served now, sorted (B3).
pub(crate) fn servable_models(snapshot: &Snapshot, settings: &Settings) -> Vec<String> {
    let up = |model: &ModelName, leg: Leg| snapshot.pool(model, leg).iter().any(is_up);
    let serves = |model: &&ModelName| {
        pair_that_is_up(snapshot, model).is_some()
            || (!settings.split(model, snapshot).enforce_disagg && up(model, Leg::Aggregated))
    };
    snapshot.models().into_iter().filter(serves).map(ToString::to_string).collect()
}

/// Returns the longest context, in tokens, that each worker takes that may serve the model, as far as their
/// engines report it.
pub(crate) fn context_length(snapshot: &Snapshot, model: &ModelName) -> Option<u32> {
    let pools = [Leg::Prefill, Leg::Decode, Leg::Aggregated].map(|leg| snapshot.pool(model, leg));
    let up = pools.into_iter().flat_map(|pool| pool.iter()).filter(|candidate| is_up(candidate));
    up.filter_map(|candidate| candidate.worker.context_length(model)).min()
}
