//! The operators' listener: its page, health, readiness, metrics, workers, policies, decisions.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json, Router,
    extract::State as Extract,
    http::{HeaderMap, StatusCode, header},
    middleware,
    response::IntoResponse,
    routing::{delete, get, post},
};
use pointsman_orchestration::is_up;
use pointsman_workers::{Leg, ModelName};
use serde_json::json;

use crate::{
    http::body,
    orchestrate::availability::servable_models,
    state::{SharedState, State},
    telemetry::exposition::{self, Sources, TextFormat},
};

mod audit;
mod big_numbers;
mod config;
mod decisions;
mod events;
mod guard;
mod origin;
mod page;
mod policies;
mod refuse;
mod summary;
mod workers;

/// The operators' endpoints.
pub(crate) fn routes(state: SharedState) -> Router {
    let events = Router::new().route("/events", get(events::stream));
    let events = events.with_state((state.clone(), Arc::default()));
    Router::new()
        .merge(page::routes())
        .merge(events)
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
        .route("/decisions/summary", get(summary::get))
        .route("/decisions/{id}", get(decisions::one))
        .route("/workers", get(workers::list).post(workers::join))
        .route("/workers/{id}", delete(workers::leave))
        .route("/workers/{id}/drain", post(workers::drain).delete(workers::undrain))
        .fallback(refuse::unknown_url)
        .method_not_allowed_fallback(refuse::other_method)
        .layer(middleware::from_fn_with_state(state.clone(), body::whole))
        .layer(middleware::from_fn_with_state(state.clone(), guard::guard))
        .with_state(state)
}

async fn readyz(Extract(state): Extract<Arc<State>>) -> impl IntoResponse {
    let snapshot = state.registry.snapshot();
    let models = servable_models(&snapshot, &state.settings);
    let draining = state.draining.is_cancelled();
    let activation_of = |model: &ModelName| {
        let both = [Leg::Prefill, Leg::Decode].iter().all(|leg| snapshot.pool(model, *leg).iter().any(is_up));
        let activation = snapshot.activation(model)?;
        activation.observe(both);
        Some((model.to_string(), activation.state().as_str()))
    };
    let remote_prefill: BTreeMap<_, _> = snapshot.models().into_iter().filter_map(activation_of).collect();
    let ready = !models.is_empty() && !draining;
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (
        status,
        Json(
            json!({ "ready": ready, "models": models, "remote_prefill": remote_prefill, "draining": draining }),
        ),
    )
}

async fn metrics(Extract(state): Extract<Arc<State>>, headers: HeaderMap) -> impl IntoResponse {
    let format = TextFormat::accepted(&headers);
    let sources = Sources {
        workers: state.registry.clone(),
        router: state.router.clone(),
        feeds: state.feeds.clone(),
        policies: state.policies.clone(),
        learning: state.learning.clone(),
    };
    match exposition::encode(&state.metrics, sources, format) {
        Ok(text) => ([(header::CONTENT_TYPE, format.content_type())], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
