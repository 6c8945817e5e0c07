//! The operators' listener: health, readiness, metrics, workers, policies, decisions.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::{StatusCode, header},
    middleware,
    response::IntoResponse,
    routing::{delete, get, post},
};
use bytes::Bytes;
use pointsman_workers::{Candidate, Health, Ineligible, Leg, ModelName, WorkerId, WorkerSpec};
use serde_json::{Value, json};

use crate::app::App;

mod config;
mod decisions;
mod guard;
mod policies;
mod scrape;

/// The operators' endpoints.
pub(crate) fn routes(app: Arc<App>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/policies", get(policies::status))
        .route("/config/reload", post(config::reload))
        .route("/policies/reload", post(policies::reload))
        .route("/policies/{slot}/rollback", post(policies::roll_back))
        .route("/policies/{slot}/promote", post(policies::promote))
        .route("/decisions", get(decisions::list))
        .route("/decisions/export", get(decisions::export))
        .route("/decisions/{id}", get(decisions::one))
        .route("/workers", get(workers).post(join))
        .route("/workers/{id}", delete(leave))
        .route("/workers/{id}/drain", post(drain).delete(undrain))
        .layer(middleware::from_fn_with_state(app.clone(), guard::guard))
        .with_state(app)
}

/// Models that can be served now (spec B3), sorted.
pub(crate) fn servable(app: &App) -> Vec<String> {
    let snapshot = app.registry.snapshot();
    let up = |model: &ModelName, leg: Leg| snapshot.pool(model, leg).iter().any(is_up);
    let serves = |model: &&ModelName| {
        let remote = up(model, Leg::Prefill) && up(model, Leg::Decode);
        remote || (!app.settings.enforce_disagg && up(model, Leg::Aggregated))
    };
    snapshot.models().into_iter().filter(serves).map(ToString::to_string).collect()
}

fn is_up(candidate: &Candidate) -> bool {
    candidate.ineligible().is_none_or(|reason| !reason.is_down())
}

async fn readyz(State(app): State<Arc<App>>) -> impl IntoResponse {
    let models = servable(&app);
    let draining = app.draining.is_cancelled();
    let snapshot = app.registry.snapshot();
    let state = |model: &ModelName| {
        let both = [Leg::Prefill, Leg::Decode].iter().all(|leg| snapshot.pool(model, *leg).iter().any(is_up));
        let activation = snapshot.activation(model)?;
        activation.observe(both);
        Some((model.to_string(), activation.state().as_str()))
    };
    let remote_prefill: BTreeMap<_, _> = snapshot.models().into_iter().filter_map(state).collect();
    let ready = !models.is_empty() && !draining;
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (
        status,
        Json(
            json!({ "ready": ready, "models": models, "remote_prefill": remote_prefill, "draining": draining }),
        ),
    )
}

async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let mut text = String::new();
    let encoded = prometheus_client::encoding::text::encode(&mut text, &app.exposition.lock());
    if encoded.is_err() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let text = text.trim_end_matches("# EOF\n").to_owned() + &scrape::families(&app) + "# EOF\n";
    ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
        .into_response()
}

async fn workers(State(app): State<Arc<App>>) -> Json<Value> {
    let snapshot = app.registry.snapshot();
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
            json!({ "running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage, "age_ms": load.read_at.elapsed().as_millis() as u64 })
        });
        json!({
            "id": worker.id(), "spec": worker.spec(), "models": models(worker.id()),
            "health": match worker.health() { Health::Unknown => "unknown", Health::Healthy => "healthy", Health::Unhealthy => "unhealthy" },
            "draining": worker.draining(), "ineligible": worker.ineligible().map(Ineligible::as_str),
            "total_blocks": worker.total_blocks(), "engine_load": engine, "ranks": ranks,
        })
    };
    Json(
        json!({ "version": snapshot.version(), "workers": snapshot.workers().iter().map(one).collect::<Vec<_>>() }),
    )
}

/// A worker joins, described as in the configuration; one of the same id is replaced.
async fn join(State(app): State<Arc<App>>, body: Bytes) -> (StatusCode, Json<Value>) {
    match serde_json::from_slice::<WorkerSpec>(&body) {
        Ok(spec) => {
            let worker = app.registry.upsert(spec);
            (StatusCode::OK, Json(json!({ "id": worker.id() })))
        }
        Err(error) => (StatusCode::BAD_REQUEST, Json(json!({ "error": error.to_string() }))),
    }
}

/// A worker leaves: no new request goes there, those under way end as they will.
async fn leave(State(app): State<Arc<App>>, Path(id): Path<u64>) -> (StatusCode, Json<Value>) {
    match app.registry.remove(WorkerId(id)) {
        Some(_) => (StatusCode::OK, Json(json!({ "id": id, "left": true }))),
        None => (StatusCode::NOT_FOUND, Json(json!({ "error": format!("worker {id} is not known") }))),
    }
}

async fn drain(state: State<Arc<App>>, id: Path<u64>) -> impl IntoResponse {
    set_draining(&state, &id, true)
}

async fn undrain(state: State<Arc<App>>, id: Path<u64>) -> impl IntoResponse {
    set_draining(&state, &id, false)
}

fn set_draining(app: &App, id: &u64, draining: bool) -> (StatusCode, Json<Value>) {
    match app.registry.snapshot().get(WorkerId(*id)) {
        Some(worker) => {
            worker.set_draining(draining);
            (StatusCode::OK, Json(json!({ "id": id, "draining": draining })))
        }
        None => (StatusCode::NOT_FOUND, Json(json!({ "error": format!("worker {id} is not known") }))),
    }
}
