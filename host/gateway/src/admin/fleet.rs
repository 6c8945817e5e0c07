//! The fleet in short, for events: a few figures of each worker, where `GET /workers` describes it whole.

use std::{sync::Arc, time::Duration};

use pointsman_workers::{Ineligible, Worker};
use serde::Serialize;
use serde_json::{Value, json};

use crate::state::State;

/// A worker as one row. Its ranks are summed up.
#[derive(Debug, Serialize)]
struct Row {
    /// Text: an id may exceed what a double holds.
    id: String,
    url: String,
    role: &'static str,
    zone: Option<String>,
    /// Why it gets no request; `None`: it is eligible.
    #[serde(rename = "out")]
    ineligible: Option<&'static str>,
    reason: Option<String>,
    /// Legs in the last four to five minutes.
    legs: u32,
    in_flight: u32,
    limit: Option<u32>,
    kv: Option<f32>,
    error_ppm: u32,
}

/// Describes every worker in short.
pub(super) fn describe(state: &State) -> Value {
    let (snapshot, legs) = (state.registry.snapshot(), state.hour.recent_legs());
    let rows: Vec<Row> = snapshot.workers().iter().map(|worker| row(worker, legs(worker))).collect();
    json!({ "legs_s": legs_window(state).as_secs(), "workers": rows })
}

/// Returns the time in which legs are counted, to the minute.
fn legs_window(state: &State) -> Duration {
    let age = state.metrics.live_stats.age();
    Duration::from_secs((age.as_secs() / 60).clamp(1, 5) * 60)
}

fn row(worker: &Arc<Worker>, legs: u32) -> Row {
    let spec = worker.spec();
    let zone = spec.topology.get("zone").or_else(|| spec.labels.get("zone"));
    let out = worker.ineligible().map(Ineligible::as_str);
    let ranks = worker.candidates();
    let errors = ranks.iter().map(|candidate| candidate.load().view().error_ppm());
    Row {
        id: worker.id().to_string(),
        url: spec.url.to_string(),
        role: spec.role.as_str(),
        zone: zone.cloned(),
        ineligible: out,
        reason: worker.problem().filter(|_| out.is_some()).map(|problem| problem.to_string()),
        legs,
        in_flight: worker.active_requests(),
        limit: spec.max_concurrency,
        kv: worker.engine_load().and_then(|load| load.kv_usage).map(|usage| (usage * 1e3).round() / 1e3),
        error_ppm: errors.max().unwrap_or_default(),
    }
}
