//! `/workers`: lists workers, and lets them join, leave and drain.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use axum::{
    Extension, Json,
    extract::{Query, State as Extract, rejection::QueryRejection},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use pointsman_routing::BusyCandidate;
use pointsman_workers::{
    Drainer, EngineLoad, FeedStatus, Feeds, Health, Ineligible, ModelName, MoveCounts, Snapshot, Worker,
    WorkerId, WorkerSpec,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    audit::Detail,
    refuse::{PathId, invalid, no_worker, refuse},
};
use crate::{big_numbers::with_texts, openai::short_text::shortened, state::State};

/// `GET /workers`.
pub(super) async fn list(Extract(state): Extract<Arc<State>>) -> Json<Value> {
    Json(with_texts(describe(&state, true, None)))
}

/// `GET /workers/{id}`: a worker, and its last hour.
pub(super) async fn one(
    Extract(state): Extract<Arc<State>>,
    PathId(id): PathId,
    headers: HeaderMap,
) -> Response {
    let mut found = describe(&state, true, Some(id));
    let worker = found.get_mut("workers").and_then(|workers| workers.get_mut(0)).map(Value::take);
    let Some(worker) = worker else { return no_worker(&headers, id) };
    let hour = state.hour.of_worker(id);
    Json(with_texts(json!({ "worker": worker, "hour": hour }))).into_response()
}

/// Describes every worker, or `only` one. Without `age` the description changes only when a worker does.
pub(super) fn describe(state: &State, age: bool, only: Option<WorkerId>) -> Value {
    let snapshot = state.registry.snapshot();
    let models = models_of_workers(&snapshot);
    let busy = state.router.busy().busy_candidates(&snapshot);
    let sources = state.fleet.sources_of_workers();
    let one = |worker: &Arc<Worker>| {
        let busy: Vec<_> = busy.iter().filter(|busy| busy.worker == worker.id()).collect();
        let ranks = worker.candidates();
        let ranks: Vec<Value> = ranks
            .iter()
            .map(|candidate| {
                let (load, view) = (candidate.load(), candidate.load().view());
                json!({
                    "dp_rank": candidate.rank, "active_requests": load.active_requests(),
                    "active_prefill_tokens": load.active_prefill_tokens(), "decode_blocks": load.decode_blocks(),
                    "ttft_ewma_us": view.ttft_ewma_us(), "itl_ewma_us": view.itl_ewma_us(),
                    "prefill_us_per_ktoken": view.prefill_us_per_ktoken(), "error_ppm": view.error_ppm(),
                    "engine_load": view.engine_load().map(|load| load_of_engine(load, age)),
                    "remote": load.remote(), "kv_feed": state.feeds.get(worker.id(), candidate.rank).map(feed),
                })
            })
            .collect();
        let engine = worker.engine_load().map(|load| load_of_engine(load, age));
        // An engine with too much to do works: `paused` reports it.
        let ineligible = reported_ineligible(worker).filter(|reason| *reason != Ineligible::Paused);
        json!({
            "id": worker.id(), "source": sources.get(&worker.id()), "spec": worker.spec(),
            "models": models.get(&worker.id()).map(Vec::as_slice).unwrap_or_default(),
            "health": match worker.health() {
                Health::Unknown => "unknown",
                Health::Healthy => "healthy",
                Health::Unhealthy => "unhealthy",
            },
            "draining": worker.draining(), "leaving": worker.leaving(), "open_handoffs": worker.open_handoffs(),
            "moves": worker.move_counts().filter(|_| age).map(moves), "ineligible": ineligible.map(Ineligible::as_str),
            "paused": worker.pause().is_some(),
            "paused_ms": worker.pause().filter(|_| age).map(|pause| pause.left.as_millis() as u64),
            "stuck": worker.stuck().map(|stuck| {
                let since_s = age.then(|| stuck.since.elapsed().as_secs());
                json!({ "by": stuck.by.as_str(), "since_s": since_s, "ejected": worker.is_ejected() })
            }),
            "warm_up_share": worker.warm_up_share().filter(|_| age),
            "reason": reason_of(worker, beyond(&busy), &state.feeds), "busy": busy,
            "contradiction": worker.contradiction(),
            "facts": *worker.facts(), "unknown_facts": worker.spec().unknown_facts(&worker.facts()),
            "block_size": worker.block_size(), "total_blocks": worker.total_blocks(), "engine_load": engine,
            "ranks": ranks,
        })
    };
    let wanted = |worker: &&Arc<Worker>| only.is_none_or(|id| worker.id() == id);
    let workers: Vec<Value> = snapshot.workers().iter().filter(wanted).map(one).collect();
    json!({ "version": snapshot.version(), "busy_thresholds": state.router.busy(), "workers": workers })
}

/// The load that an engine or one of its ranks reports.
fn load_of_engine(load: EngineLoad, age: bool) -> Value {
    let age_ms = age.then(|| load.read_at.elapsed().as_millis() as u64);
    json!({ "running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage, "age_ms": age_ms })
}

/// Names the thresholds that the candidates of a worker are beyond; `None`: they are not busy.
pub(super) fn beyond(busy: &[&BusyCandidate]) -> Option<String> {
    let names: BTreeSet<String> =
        busy.iter().map(|busy| format!("{}.{}", busy.leg.as_str(), busy.reason)).collect();
    let names = names.into_iter().collect::<Vec<_>>().join(", ");
    (!names.is_empty()).then(|| format!("beyond busy thresholds: {names}"))
}

/// The feed of a rank's KV events.
fn feed(status: FeedStatus) -> Value {
    json!({ "endpoint": *status.endpoint, "live": status.live(), "reason": status.problem().as_deref() })
}

/// Returns the models that each worker serves, sorted.
fn models_of_workers(snapshot: &Snapshot) -> HashMap<WorkerId, Vec<&ModelName>> {
    let mut models: HashMap<WorkerId, Vec<&ModelName>> = HashMap::new();
    for model in snapshot.models() {
        let pools = snapshot.pools(model);
        for candidate in pools.into_iter().flat_map(|pool| pool.iter()) {
            let own = models.entry(candidate.worker.id()).or_default();
            // A worker may have several ranks, and be in the pools of two legs.
            if own.last() != Some(&model) {
                own.push(model);
            }
        }
    }
    models
}

/// Returns why a worker is unhealthy, ejected, failing or `busy`, or why its KV events do not arrive, if
/// that is known.
fn reason_of(worker: &Worker, busy: Option<String>, feeds: &Feeds) -> Option<Arc<String>> {
    let known = worker.problem().or_else(|| reason_of_failing(worker));
    known.or(busy.map(Arc::new)).or_else(|| feeds.problem(worker.id()).map(Arc::new))
}

/// Returns why a worker gets no request. Operators may stop the engine of a worker that drains, which is no
/// failure then.
pub(super) fn reported_ineligible(worker: &Worker) -> Option<Ineligible> {
    if worker.drains() { Some(Ineligible::Draining) } else { worker.ineligible() }
}

/// Returns why a worker that gets no request does not, if more than `out` is known of that.
pub(super) fn reason_of_out(worker: &Worker, out: Ineligible) -> Option<Arc<String>> {
    let reason = match out {
        Ineligible::Failing => reason_of_failing(worker),
        Ineligible::Paused => {
            worker.pause().map(|pause| reason_of_pause(pause.is_too_many).to_owned().into())
        }
        _ => None,
    };
    worker.problem().or(reason)
}

/// Returns why a worker is paused. `is_too_many`: its engine answered with 429.
fn reason_of_pause(is_too_many: bool) -> &'static str {
    if is_too_many {
        "its engine refused a request: too many requests (429)"
    } else {
        "its engine refused a request: it has too much to do (503 or 529)"
    }
}

/// Returns why a worker is ejected or failing.
fn reason_of_failing(worker: &Worker) -> Option<Arc<String>> {
    let breaks = || worker.breaks_decode().then(|| "decode workers break on its handoffs".to_owned().into());
    worker.refusal_reason().or_else(breaks).or_else(|| worker.failure_reason())
}

/// Numbers of streams that left a worker that drains, or stayed.
fn moves(counts: MoveCounts) -> Value {
    let MoveCounts { moved, moving, failed, stayed } = counts;
    json!({ "moved": moved, "moving": moving, "failed": failed, "stayed": stayed })
}

/// Adds a worker, described as in the configuration. It replaces a worker with the same id that was added
/// here.
pub(super) async fn join(Extract(state): Extract<Arc<State>>, headers: HeaderMap, body: Bytes) -> Response {
    match serde_json::from_slice::<WorkerSpec>(&body) {
        Ok(spec) => {
            let detail = Detail(format!("worker={} role={} url={}", spec.id, spec.role, spec.url));
            match state.fleet.join(spec) {
                Ok(id) => (Extension(detail), Json(with_texts(json!({ "id": id })))).into_response(),
                Err(refused) => {
                    let message = refused.to_string();
                    refuse(&headers, StatusCode::CONFLICT, "worker_conflict", &message)
                }
            }
        }
        Err(error) => invalid(&headers, &shortened(&error.to_string().replace('\n', "; "))),
    }
}

/// Removes a worker. It gets no new request; those in flight finish.
pub(super) async fn leave(
    Extract(state): Extract<Arc<State>>,
    PathId(id): PathId,
    headers: HeaderMap,
) -> Response {
    // A worker that registered itself drains; others are gone at once.
    if state.leases.release(id) || state.fleet.leave(id) {
        return Json(with_texts(json!({ "id": id, "left": true }))).into_response();
    }
    no_worker(&headers, id)
}

/// Query of a drain.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct DrainQuery {
    /// Whether running streams move to other workers.
    #[serde(rename = "move")]
    moves: bool,
}

pub(super) async fn drain(
    state: Extract<Arc<State>>,
    PathId(id): PathId,
    headers: HeaderMap,
    query: Result<Query<DrainQuery>, QueryRejection>,
) -> Response {
    match query {
        Ok(Query(DrainQuery { moves })) => set_draining(&state, &headers, id, true, moves),
        Err(error) => invalid(&headers, &error.body_text()),
    }
}

pub(super) async fn undrain(state: Extract<Arc<State>>, PathId(id): PathId, headers: HeaderMap) -> Response {
    set_draining(&state, &headers, id, false, false)
}

fn set_draining(state: &State, headers: &HeaderMap, id: WorkerId, draining: bool, moves: bool) -> Response {
    match state.registry.snapshot().get(id) {
        Some(worker) => {
            worker.set_draining(draining);
            state.registry.follow_drains();
            // Streams move only when the worker gets no new request, and until the drain ends.
            if moves {
                worker.move_streams(Drainer::Operator, true);
            }
            let moves = worker.asks_to_move() != 0;
            Json(with_texts(json!({ "id": id, "draining": draining, "move": moves }))).into_response()
        }
        None => no_worker(headers, id),
    }
}
