//! `/workers`: lists workers, and lets them join, leave and drain.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State as Extract},
    http::StatusCode,
    response::IntoResponse,
};
use bytes::Bytes;
use pointsman_workers::{Health, Ineligible, Leg, ModelName, WorkerId, WorkerSpec};
use serde_json::{Value, json};

use crate::state::State;

/// `GET /workers`.
pub(super) async fn list(Extract(state): Extract<Arc<State>>) -> Json<Value> {
    Json(describe(&state, true))
}

/// Describes every worker. Without `age` the description changes only when a worker does.
pub(super) fn describe(state: &State, age: bool) -> Value {
    let snapshot = state.registry.snapshot();
    let models = |id: WorkerId| -> Vec<String> {
        let serves = |model: &&ModelName| {
            let legs = [Leg::Prefill, Leg::Decode, Leg::Aggregated];
            legs.iter()
                .any(|leg| snapshot.pool(model, *leg).iter().any(|candidate| candidate.worker.id() == id))
        };
        snapshot.models().into_iter().filter(serves).map(ToString::to_string).collect()
    };
    let one = |worker: &Arc<pointsman_workers::Worker>| {
        let ranks = worker.candidates();
        let ranks: Vec<Value> = ranks
            .iter()
            .map(|candidate| {
                let load = candidate.load();
                json!({
                    "dp_rank": candidate.rank, "active_requests": load.active_requests(),
                    "active_prefill_tokens": load.active_prefill_tokens(), "decode_blocks": load.decode_blocks(),
                    "ttft_ewma_us": load.ttft_ewma_us(), "itl_ewma_us": load.itl_ewma_us(), "error_ppm": load.error_ppm(),
                })
            })
            .collect();
        let engine = worker.engine_load().map(|load| {
            let age_ms = age.then(|| load.read_at.elapsed().as_millis() as u64);
            json!({ "running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage, "age_ms": age_ms })
        });
        json!({
            "id": worker.id(), "spec": worker.spec(), "models": models(worker.id()),
            "health": match worker.health() { Health::Unknown => "unknown", Health::Healthy => "healthy", Health::Unhealthy => "unhealthy" },
            "draining": worker.draining(), "ineligible": worker.ineligible().map(Ineligible::as_str),
            "total_blocks": worker.total_blocks(), "engine_load": engine, "ranks": ranks,
        })
    };
    json!({ "version": snapshot.version(), "workers": snapshot.workers().iter().map(one).collect::<Vec<_>>() })
}

/// Adds a worker, described as in the configuration. It replaces one with the same id.
pub(super) async fn join(Extract(state): Extract<Arc<State>>, body: Bytes) -> (StatusCode, Json<Value>) {
    match serde_json::from_slice::<WorkerSpec>(&body) {
        Ok(spec) => {
            let worker = state.registry.upsert(spec);
            (StatusCode::OK, Json(json!({ "id": worker.id() })))
        }
        Err(error) => (StatusCode::BAD_REQUEST, Json(json!({ "error": error.to_string() }))),
    }
}

/// Removes a worker. It gets no new request; those in flight finish.
pub(super) async fn leave(
    Extract(state): Extract<Arc<State>>,
    Path(id): Path<u64>,
) -> (StatusCode, Json<Value>) {
    match state.registry.remove(WorkerId(id)) {
        Some(_) => (StatusCode::OK, Json(json!({ "id": id, "left": true }))),
        None => (
            StatusCode::NOT_FOUND,
            Json(json!({ "error": format!("worker {id} is not registered; GET /workers lists the ids") })),
        ),
    }
}

pub(super) async fn drain(state: Extract<Arc<State>>, id: Path<u64>) -> impl IntoResponse {
    set_draining(&state, &id, true)
}

pub(super) async fn undrain(state: Extract<Arc<State>>, id: Path<u64>) -> impl IntoResponse {
    set_draining(&state, &id, false)
}

fn set_draining(state: &State, id: &u64, draining: bool) -> (StatusCode, Json<Value>) {
    match state.registry.snapshot().get(WorkerId(*id)) {
        Some(worker) => {
            worker.set_draining(draining);
            (StatusCode::OK, Json(json!({ "id": id, "draining": draining })))
        }
        None => (
            StatusCode::NOT_FOUND,
            Json(json!({ "error": format!("worker {id} is not registered; GET /workers lists the ids") })),
        ),
    }
}
