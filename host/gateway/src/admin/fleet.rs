//! The fleet in short, for events: a few figures of each worker, where `GET /workers` describes it whole.
//! Rows without names, because a page reads a thousand of them every second.

use std::{collections::HashMap, sync::Arc};

use pointsman_workers::{Ineligible, Snapshot, Worker, WorkerId};
use serde_json::{Value, json};

use super::workers::{reason_of_out, reported_ineligible};
use crate::{state::State, telemetry::hour::RecentLegs};

/// Names of the columns. `id` is a text: it may exceed what a double holds. `out` says why a worker gets no
/// request; null: it is eligible. `legs` counts the legs of the last four to five minutes, and `failed` those
/// that failed, as in [`RecentLegs`]. Workers with equal `models` serve the same models, adapters apart.
const COLUMNS: [&str; 13] = [
    "id",
    "url",
    "role",
    "zone",
    "out",
    "reason",
    "legs",
    "failed",
    "in_flight",
    "limit",
    "kv",
    "ranks",
    "models",
];

/// Describes every worker in short. Its ranks are summed up.
pub(super) fn describe(state: &State) -> Value {
    let (snapshot, legs) = (state.registry.snapshot(), state.hour.recent_legs());
    let models = model_sets(&snapshot);
    let models = |id: WorkerId| models.get(&id).copied().unwrap_or_default();
    let row = |worker: &Arc<Worker>| row(worker, legs(worker), models(worker.id()));
    let rows: Vec<Value> = snapshot.workers().iter().map(row).collect();
    json!({ "columns": COLUMNS, "workers": rows })
}

/// Returns for each worker a number that stands for the set of models that it serves. Adapters, which come
/// and go, do not count. 0 is the empty set.
fn model_sets(snapshot: &Snapshot) -> HashMap<WorkerId, usize> {
    let mut served: HashMap<WorkerId, Vec<usize>> = HashMap::new();
    let models = snapshot.models().into_iter().filter(|model| !snapshot.is_adapter(model));
    for (number, model) in models.enumerate() {
        let pools = snapshot.pools(model);
        for candidate in pools.into_iter().flat_map(|pool| pool.iter()) {
            let own = served.entry(candidate.worker.id()).or_default();
            // A worker may have several ranks, and be in the pools of two legs.
            if own.last() != Some(&number) {
                own.push(number);
            }
        }
    }
    let mut sets: HashMap<Vec<usize>, usize> = HashMap::new();
    let ids = snapshot.workers().iter().map(|worker| worker.id());
    let set_of = |id: WorkerId| {
        let next = sets.len() + 1;
        Some((id, *sets.entry(served.remove(&id)?).or_insert(next)))
    };
    ids.filter_map(set_of).collect()
}

fn row(worker: &Arc<Worker>, recent: RecentLegs, models: usize) -> Value {
    let spec = worker.spec();
    let zone = spec.topology.get("zone").or_else(|| spec.labels.get("zone"));
    let out = reported_ineligible(worker);
    let reason = out.and_then(|out| reason_of_out(worker, out));
    let kv = worker.engine_load().and_then(|load| load.kv_usage);
    let kv = kv.map(|usage| (f64::from(usage) * 1e3).round() / 1e3);
    json!([
        worker.id().to_string(),
        spec.url,
        spec.role.as_str(),
        zone,
        out.map(Ineligible::as_str),
        reason,
        recent.legs,
        recent.failed,
        worker.active_requests(),
        spec.max_concurrency,
        kv,
        worker.candidates().len(),
        models,
    ])
}
