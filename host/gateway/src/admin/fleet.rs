//! The fleet in short, for events: a few figures of each worker, where `GET /workers` describes it whole.
//! Rows without names, because a page reads a thousand of them every second.

use std::sync::Arc;

use pointsman_workers::{Ineligible, Worker};
use serde_json::{Value, json};

use crate::state::State;

/// Names of the columns. `id` is a text: it may exceed what a double holds. `out` says why a worker gets no
/// request; null: it is eligible. `legs` counts the legs of the last four to five minutes.
const COLUMNS: [&str; 12] =
    ["id", "url", "role", "zone", "out", "reason", "legs", "in_flight", "limit", "kv", "error_ppm", "ranks"];

/// Describes every worker in short. Its ranks are summed up.
pub(super) fn describe(state: &State) -> Value {
    let (snapshot, legs) = (state.registry.snapshot(), state.hour.recent_legs());
    let rows: Vec<Value> = snapshot.workers().iter().map(|worker| row(worker, legs(worker))).collect();
    json!({ "columns": COLUMNS, "workers": rows })
}

fn row(worker: &Arc<Worker>, legs: u32) -> Value {
    let spec = worker.spec();
    let zone = spec.topology.get("zone").or_else(|| spec.labels.get("zone"));
    let out = worker.ineligible().map(Ineligible::as_str);
    let reason = worker.problem().filter(|_| out.is_some());
    let ranks = worker.candidates();
    let errors = ranks.iter().map(|candidate| candidate.load().view().error_ppm()).max();
    let kv = worker.engine_load().and_then(|load| load.kv_usage);
    let kv = kv.map(|usage| (f64::from(usage) * 1e3).round() / 1e3);
    json!([
        worker.id().to_string(),
        spec.url,
        spec.role.as_str(),
        zone,
        out,
        reason,
        legs,
        worker.active_requests(),
        spec.max_concurrency,
        kv,
        errors.unwrap_or_default(),
        ranks.len(),
    ])
}
