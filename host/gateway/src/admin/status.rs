//! `GET /readyz` and `GET /status`: whether the gateway can serve, why not, and its load.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use axum::{Json, extract::State as Extract, http::StatusCode, response::IntoResponse};
use pointsman_orchestration::{is_up, pair_that_is_up};
use pointsman_routing::{Origin, Slot, SlotKind};
use pointsman_workers::{Ineligible, Leg, ModelName, Snapshot, Worker, unix_ms};
use serde::Serialize;
use serde_json::{Value, json};

use super::workers::{beyond, reason_of_out, reported_ineligible};
use crate::{
    big_numbers::with_texts,
    openai::short_text::shortened,
    orchestrate::availability::{is_ready, models_with_workers, servable_models, why_no_pair},
    state::State,
    telemetry::hour::TokenRates,
    telemetry::live_stats::LiveSummary,
    version::VERSION,
};

/// Maximum number of reasons in an answer.
const MAX_REASONS: usize = 32;

/// Whether some model can be served now.
#[derive(Debug, Serialize)]
struct Readiness {
    ready: bool,
    models: Vec<String>,
    remote_prefill: BTreeMap<String, &'static str>,
    draining: bool,
    /// Whether the port of clients is not served yet.
    starting: bool,
    /// Whether the load of other gateways is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    replicas: Option<Value>,
}

/// Load of the whole gateway now, with the rates and latencies of the last minute.
#[derive(Debug, Serialize)]
pub(super) struct Load {
    #[serde(flatten)]
    last_minute: LiveSummary,
    #[serde(flatten)]
    tokens: TokenRates,
    inflight: i64,
    connections: i64,
    /// Legs of sessions that are bound to a worker. Expired ones count until they are evicted.
    session_bindings: usize,
    queue: QueueLoad,
}

/// Load of the gateway, and why it cannot serve as it should, for events.
#[derive(Debug, Serialize)]
pub(super) struct Stats {
    #[serde(flatten)]
    load: Load,
    ready: bool,
    reasons: Vec<String>,
}

/// The admission queue.
#[derive(Debug, Serialize)]
struct QueueLoad {
    waiting: usize,
    waiting_bytes: usize,
}

/// `GET /readyz`.
pub(super) async fn ready(Extract(state): Extract<Arc<State>>) -> impl IntoResponse {
    let readiness = Readiness::of(&state, &state.registry.snapshot());
    let status = if readiness.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(readiness))
}

/// `GET /status`.
pub(super) async fn get(Extract(state): Extract<Arc<State>>) -> Json<Value> {
    let snapshot = state.registry.snapshot();
    let readiness = Readiness::of(&state, &snapshot);
    let policies = state.policies.status();
    let status = json!({
        "version": VERSION,
        "uptime_s": state.metrics.live_stats.age().as_secs(),
        "ready": readiness.ready,
        "reasons": limited(reasons(&state, &snapshot)),
        "models": readiness.models,
        "remote_prefill": readiness.remote_prefill,
        "draining": readiness.draining,
        "replicas": readiness.replicas,
        "live": load(&state),
        "workers": worker_counts(&snapshot),
        "slots": policies.slots,
        "compiling": policies.compiling,
    });
    Json(with_texts(status))
}

/// Returns the load of the gateway.
pub(super) fn load(state: &State) -> Load {
    Load {
        last_minute: state.metrics.live_stats.summary(),
        tokens: state.hour.token_rates(&state.metrics, unix_ms()),
        inflight: state.metrics.inflight.get(),
        connections: state.metrics.connections.get(),
        session_bindings: state.sessions.bindings(),
        queue: QueueLoad { waiting: state.queue.waiting(), waiting_bytes: state.queue.waiting_bytes() },
    }
}

/// Returns the load of the gateway with the reasons of `GET /status`, without those that the event `fleet`
/// has for each worker: that it gets no request, or has too much to do.
pub(super) fn stats(state: &State) -> Stats {
    let snapshot = state.registry.snapshot();
    let mut reasons = reasons_of_gateway(state, &snapshot);
    let serving = || snapshot.workers().iter().filter(|worker| worker.ineligible().is_none());
    reasons.extend(serving().filter_map(|worker| missing_events(worker, state)));
    reasons.extend(serving().filter_map(|worker| refused_key(worker)));
    reasons.extend(state.router.slots().iter().filter_map(|slot| idle_policy(slot, &snapshot)));
    Stats { load: load(state), ready: is_ready(state, &snapshot), reasons: limited(reasons) }
}

impl Readiness {
    fn of(state: &State, snapshot: &Snapshot) -> Self {
        let models = servable_models(snapshot, &state.settings);
        let draining = state.stopping.is_cancelled();
        let activation_of = |model: &ModelName| {
            let activation = snapshot.activation(model)?;
            activation.observe(pair_that_is_up(snapshot, model, None).is_some());
            Some((model.to_string(), activation.state().as_str()))
        };
        let remote_prefill = snapshot.models().into_iter().filter_map(activation_of).collect();
        let replicas = state.replicas.readiness();
        let starting = is_starting(state);
        Self { ready: is_ready(state, snapshot), models, remote_prefill, draining, starting, replicas }
    }
}

/// Returns why requests are refused, for the gateway, models and workers, and why KV events do not arrive.
fn reasons(state: &State, snapshot: &Snapshot) -> Vec<String> {
    let mut reasons = reasons_of_gateway(state, snapshot);
    let workers = || snapshot.workers().iter();
    reasons.extend(workers().filter_map(|worker| {
        let out = reported_ineligible(worker)?;
        let why = reason_of_out(worker, out).map(|why| format!(": {why}")).unwrap_or_default();
        Some(format!("worker {} gets no request: {}{why}", worker.id(), out.as_str()))
    }));
    let busy = state.router.busy().busy_candidates(snapshot);
    reasons.extend(workers().filter_map(|worker| {
        let of_worker: Vec<_> = busy.iter().filter(|busy| busy.worker == worker.id()).collect();
        Some(format!("worker {} is {}", worker.id(), beyond(&of_worker)?))
    }));
    reasons.extend(workers().filter_map(|worker| missing_events(worker, state)));
    reasons.extend(workers().filter_map(|worker| refused_key(worker)));
    reasons.extend(state.router.slots().iter().filter_map(|slot| idle_policy(slot, snapshot)));
    reasons
}

/// Returns why requests are refused, for the whole gateway and for models; and why the configuration file or
/// a certificate is not in force, or the decision log is not written.
fn reasons_of_gateway(state: &State, snapshot: &Snapshot) -> Vec<String> {
    let mut reasons = Vec::new();
    if state.draining.is_cancelled() {
        reasons.push("the gateway is draining: it stops when the requests in flight ended".to_owned());
    } else if state.stopping.is_cancelled() {
        let text = "the gateway is about to drain: it serves new requests until timeouts.drain_delay is over";
        reasons.push(text.to_owned());
    } else if is_starting(state) {
        let text =
            "the gateway starts: it accepts no client before it has asked each worker of the configuration";
        reasons.push(text.to_owned());
    }
    reasons.extend(config_reasons(state));
    reasons.extend(state.tls.problems());
    reasons.extend(state.settings.missing_keys.iter().cloned());
    let log_problem = state.decision_log.as_ref().and_then(|log| log.problem());
    reasons.extend(log_problem.map(|problem| problem.to_string()));
    if snapshot.workers().is_empty() {
        let waiting = match state.fleet.never_ready() {
            0 => String::new(),
            listed => format!("; discovery lists {listed} that were not ready since this gateway started"),
        };
        reasons.push(format!("no worker is registered{waiting}"));
    }
    reasons.extend(state.fleet.problems());
    reasons.extend(state.replicas.problems());
    reasons.extend(snapshot.name_conflicts().iter().map(ToString::to_string));
    reasons.extend(snapshot.models().into_iter().filter_map(|model| why_no_pair(snapshot, model)));
    let served = models_with_workers(snapshot, &state.settings);
    let missing = snapshot.models().into_iter().filter(|model| !served.contains(*model));
    reasons.extend(missing.map(|model| not_served(model, snapshot)));
    reasons.extend(state.queue.worker_waits().into_iter().map(|(model, requests)| {
        format!("{requests} requests wait until a worker can serve the model {model}")
    }));
    reasons
}

/// Says that a slot has a policy of a file and decides nothing, because no worker of its model has its role.
fn idle_policy(slot: &Slot, snapshot: &Snapshot) -> Option<String> {
    let role = match slot.kind() {
        SlotKind::DecodeOverride => SlotKind::Prefill.as_str(),
        kind => kind.as_str(),
    };
    let lanes = slot.snapshot();
    let has_role = |worker: &Arc<Worker>| worker.spec().role.as_str() == role;
    let is_used = match slot.model() {
        None => snapshot.workers().iter().any(has_role),
        Some(model) => {
            let mut pools = snapshot.pools(model).into_iter().flat_map(|pool| pool.iter());
            pools.any(|candidate| has_role(&candidate.worker))
        }
    };
    if snapshot.workers().is_empty() || is_used {
        return None;
    }
    let trials = [&lanes.canary, &lanes.shadow].into_iter().flatten().map(|trial| &trial.handle);
    let rankers = [&lanes.active].into_iter().chain(trials).filter_map(|handle| handle.program.ranker());
    let policy = rankers.into_iter().find(|policy| matches!(policy.origin, Origin::File(_)))?;
    let of_model = slot.model().map(|model| format!(" of {model}")).unwrap_or_default();
    let (name, slot) = (&policy.name, slot.kind().as_str());
    Some(format!(
        "policy {name} is in slot {slot}{of_model}, which decides nothing: no worker{of_model} has the role {role}"
    ))
}

fn is_starting(state: &State) -> bool {
    !state.serving.load(Ordering::Acquire)
}

/// Says for a worker why its KV events do not arrive.
fn missing_events(worker: &Worker, state: &State) -> Option<String> {
    let problem = state.feeds.problem(worker.id()).filter(|_| !worker.drains())?;
    Some(format!("worker {}: {problem}", worker.id()))
}

/// Says that the engine of a worker refuses the gateway's key.
fn refused_key(worker: &Worker) -> Option<String> {
    worker.refuses_key_of_requests().then(|| {
        let worker = worker.id();
        format!("the engine of worker {worker} refuses the gateway's key: check `api_key` of the worker")
    })
}

/// Keeps the first reasons and says how many others there are.
fn limited(mut reasons: Vec<String>) -> Vec<String> {
    let more = reasons.len().saturating_sub(MAX_REASONS);
    if more > 0 {
        reasons.truncate(MAX_REASONS);
        reasons.push(format!("and {more} more; see GET /workers"));
    }
    reasons
}

/// Says what of the configuration file is not in force.
fn config_reasons(state: &State) -> impl Iterator<Item = String> {
    let refused = state
        .config
        .not_applied()
        .map(|why| format!("the configuration, or a file that it names, changed and is not applied: {why}"));
    let changed = state.config.needs_restart();
    let restart = (!changed.is_empty()).then(|| {
        let keys = shortened(&changed.join(", "));
        format!("the configuration changed, and a restart is needed to apply it: {keys}")
    });
    refused.into_iter().chain(restart)
}

/// Says for a model which legs have no worker that is up.
fn not_served(model: &ModelName, snapshot: &Snapshot) -> String {
    let leg = |leg: Leg| {
        let pool = snapshot.pool(model, leg);
        format!(
            "{} {} of {}",
            leg.as_str(),
            pool.iter().filter(|candidate| is_up(candidate)).count(),
            pool.len()
        )
    };
    let legs = [Leg::Prefill, Leg::Decode, Leg::Aggregated].map(leg).join(", ");
    format!("model {model} cannot be served; ranks in service: {legs}")
}

fn worker_counts(snapshot: &Snapshot) -> Value {
    let mut ineligible: BTreeMap<&str, usize> = BTreeMap::new();
    for reason in
        snapshot.workers().iter().filter_map(|worker| reported_ineligible(worker)).map(Ineligible::as_str)
    {
        *ineligible.entry(reason).or_default() += 1;
    }
    let total = snapshot.workers().len();
    json!({
        "total": total, "eligible": total - ineligible.values().sum::<usize>(), "ineligible": ineligible,
    })
}
