//! The operators' listener: its page, health, readiness, metrics, workers, policies, decisions.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Extension, Router,
    extract::State as Extract,
    http::{HeaderMap, StatusCode},
    middleware,
    response::IntoResponse,
    routing::{get, post},
};

use pointsman_workers::ModelName;

use crate::{
    http::body,
    openapi,
    orchestrate::availability::servable_models,
    state::{SharedState, State},
    telemetry::exposition::{self, Sources, TextFormat},
};

mod audit;
mod config;
mod decisions;
mod events;
mod fleet;
mod guard;
mod leases;
mod origin;
mod page;
mod policies;
mod refuse;
mod replicas;
mod status;
mod summary;
mod workers;

/// The operators' endpoints with their state, behind the checks of access.
pub(crate) fn routes(state: SharedState) -> Router {
    endpoints()
        .layer(middleware::from_fn_with_state(state.clone(), body::read_whole))
        .layer(middleware::from_fn_with_state(state.clone(), guard::guard))
        .with_state(state)
}

/// The operators' endpoints. `openapi/admin.json` describes them.
pub(crate) fn endpoints() -> Router<SharedState> {
    let events = get(events::stream).layer(Extension(Arc::<events::Feed>::default()));
    Router::new()
        .merge(page::routes())
        .route("/events", events)
        .route("/openapi.json", get(|| openapi::document(openapi::ADMIN)))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(status::ready))
        .route("/metrics", get(metrics))
        .route("/status", get(status::get))
        .route("/policies", get(policies::status))
        .route("/config/reload", post(config::reload))
        .route("/policies/reload", post(policies::reload))
        .route("/policies/{slot}/log", get(policies::log))
        .route("/policies/{slot}/rollback", post(policies::roll_back).delete(policies::undo_roll_back))
        .route("/policies/{slot}/promote", post(policies::promote))
        .route("/decisions", get(decisions::list))
        .route("/decisions/export", get(decisions::export))
        .route("/decisions/summary", get(summary::get))
        .route("/decisions/{id}", get(decisions::one))
        .route("/workers", get(workers::list).post(workers::join))
        .route("/workers/{id}", get(workers::one).delete(workers::leave).put(leases::put))
        .route("/discovery", get(leases::sources))
        .route("/replicas", get(replicas::get))
        .route("/workers/{id}/drain", post(workers::drain).delete(workers::undrain))
        .fallback(refuse::unknown_url)
        .method_not_allowed_fallback(refuse::other_method)
}

/// Returns the number of requests that wait for a worker, for each model whose requests do.
fn worker_waits(state: &State) -> BTreeMap<ModelName, usize> {
    let none = state.settings.worker_waits.keys().map(|model| (model.clone(), 0));
    none.chain(state.queue.worker_waits()).collect()
}

async fn metrics(Extract(state): Extract<Arc<State>>, headers: HeaderMap) -> impl IntoResponse {
    let format = TextFormat::accepted(&headers);
    let sources = Sources {
        workers: state.registry.clone(),
        router: state.router.clone(),
        feeds: state.feeds.clone(),
        policies: state.policies.clone(),
        learning: state.learning.clone(),
        fleet: state.fleet.clone(),
        models: state.settings.models.clone(),
        servable_models: servable_models(&state.registry.snapshot(), &state.settings),
        config_applied: state.config.not_applied().is_none(),
        config_needs_restart: state.config.needs_restart().len(),
        queued: state.queue.waiting(),
        worker_waits: worker_waits(&state),
        replicas: state.replicas.figures(),
    };
    match exposition::encode(&state.metrics, sources, format) {
        Ok(text) => exposition::respond(text, format, &headers),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
