//! Which workers and models can serve now.

use std::{collections::HashSet, sync::atomic::Ordering};

use pointsman_orchestration::{has_pair_without, is_up, pair_that_is_up};
use pointsman_workers::{Candidate, Engine, Leg, ModelName, Snapshot, WorkerId};

use crate::{
    openai::request::{Endpoint, Request},
    state::{Settings, State},
};

/// Maximum number of models in an error message.
const MAX_LISTED_MODELS: usize = 20;

/// Returns the models that can be served now (B3), and those whose requests wait for a worker (F7.9), sorted.
/// Adapters are last, because clients that are to use any model take the first one.
pub(crate) fn servable_models(snapshot: &Snapshot, settings: &Settings) -> Vec<String> {
    let mut models: Vec<&ModelName> = servable(snapshot, settings).collect();
    let waiting: Vec<_> = settings.worker_waits.keys().filter(|model| !models.contains(model)).collect();
    models.extend(waiting);
    models.sort_by_key(|model| (snapshot.is_adapter(model), *model));
    models.into_iter().map(ToString::to_string).collect()
}

/// Returns whether clients should send requests here: their port is served (N10.3), and workers can serve a
/// model, or requests for one wait for workers (B3). Before each source of workers was read, requests for
/// other models would fail.
pub(crate) fn is_ready(state: &State, snapshot: &Snapshot) -> bool {
    let settings = &state.settings;
    let waits = || !settings.worker_waits.is_empty() && state.fleet.has_read_all();
    let accepts = state.serving.load(Ordering::Acquire) && !state.stopping.is_cancelled();
    accepts && (servable(snapshot, settings).next().is_some() || waits())
}

/// Returns the models that workers can serve now, without those whose requests wait.
pub(crate) fn models_with_workers(snapshot: &Snapshot, settings: &Settings) -> HashSet<ModelName> {
    servable(snapshot, settings).cloned().collect()
}

/// Returns whether a worker, or a pair, can run the request now, or when it is less busy.
pub(crate) fn has_workers(request: &Request, snapshot: &Snapshot, settings: &Settings) -> bool {
    has_workers_without(request, snapshot, settings, &[])
}

/// Like [`has_workers`], without the workers `without`.
pub(super) fn has_workers_without(
    request: &Request,
    snapshot: &Snapshot,
    settings: &Settings,
    without: &[WorkerId],
) -> bool {
    let holder = request.hints.holder().and_then(|holder| snapshot.get(holder));
    if let Some(reason) = holder.and_then(|holder| holder.ineligible_although_draining())
        && reason.is_down()
    {
        return false;
    }
    let needs_pair = settings.split(&request.model, snapshot).enforce_disagg;
    model_has_workers(&request.model, request.endpoint, needs_pair, snapshot, without)
}

fn model_has_workers(
    model: &ModelName,
    endpoint: Endpoint,
    needs_pair: bool,
    snapshot: &Snapshot,
    without: &[WorkerId],
) -> bool {
    let counts = |candidate: &Candidate| is_up(candidate) && !without.contains(&candidate.worker_id());
    let up = |leg| snapshot.pool(model, leg).iter().any(counts);
    if endpoint.needs_no_model_run() {
        return [Leg::Aggregated, Leg::Decode, Leg::Prefill].into_iter().any(up);
    }
    let is_split = endpoint.generates_text();
    (!(is_split && needs_pair) && up(Leg::Aggregated))
        || (is_split && has_pair_without(snapshot, model, without))
}

/// What a model lacks that engines may have loaded a moment ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lack {
    /// Workers that can run a request for it.
    Workers,
    /// A pair, although one worker can run the request.
    Pair,
}

/// Returns what a model lacks. No worker has an unknown one, and only some workers of its model may have an
/// adapter. Where the workers of that model are down, engines have loaded nothing.
pub(crate) fn lack(
    model: &ModelName,
    endpoint: Endpoint,
    snapshot: &Snapshot,
    settings: &Settings,
) -> Option<Lack> {
    if !snapshot.serves(model) {
        return Some(Lack::Workers);
    }
    let parent = snapshot.parent_of(model)?;
    let needs_pair = settings.split(model, snapshot).enforce_disagg;
    if !model_has_workers(model, endpoint, needs_pair, snapshot, &[]) {
        return model_has_workers(parent, endpoint, needs_pair, snapshot, &[]).then_some(Lack::Workers);
    }
    let has_pair = |model| pair_that_is_up(snapshot, model, None).is_some();
    (endpoint.generates_text() && !has_pair(model) && has_pair(parent)).then_some(Lack::Pair)
}

/// Returns as many of them as an error message lists, and one more.
pub(super) fn some_servable_models(snapshot: &Snapshot, settings: &Settings) -> Vec<String> {
    servable(snapshot, settings).take(MAX_LISTED_MODELS + 1).map(ToString::to_string).collect()
}

fn servable<'a>(snapshot: &'a Snapshot, settings: &'a Settings) -> impl Iterator<Item = &'a ModelName> {
    let up = |model: &ModelName, leg: Leg| snapshot.pool(model, leg).iter().any(is_up);
    let serves = move |model: &&ModelName| {
        pair_that_is_up(snapshot, model, None).is_some()
            || (!settings.split(model, snapshot).enforce_disagg && up(model, Leg::Aggregated))
    };
    let (adapters, models): (Vec<_>, Vec<_>) =
        snapshot.models().into_iter().partition(|model| snapshot.is_adapter(model));
    models.into_iter().chain(adapters).filter(serves)
}

/// Lists up to 20 models for an error message.
pub(crate) fn listed<'a>(models: impl IntoIterator<Item = &'a str>) -> String {
    let mut models = models.into_iter();
    let shown: Vec<&str> = models.by_ref().take(MAX_LISTED_MODELS).collect();
    let more = if models.next().is_some() { ", …" } else { "" };
    format!("{}{more}", shown.join(", "))
}

/// Says to the client of a model that is not served which ones are.
pub(crate) fn use_another(served: &[String]) -> String {
    match served {
        [] => "no model is served now".to_owned(),
        served => format!("use one that is served: {}", listed(served.iter().map(String::as_str))),
    }
}

/// Says why the workers of a model that are up form no pair, although there are some for both legs.
pub(crate) fn why_no_pair(snapshot: &Snapshot, model: &ModelName) -> Option<String> {
    if pair_that_is_up(snapshot, model, None).is_some() {
        return None;
    }
    let first = |leg| snapshot.pool(model, leg).iter().find(|candidate| is_up(candidate));
    let (prefill, decode) = first(Leg::Prefill).zip(first(Leg::Decode))?;
    let own = |worker: &Candidate| {
        let spec = worker.worker.spec();
        let transport = (spec.engine == Engine::Vllm).then(|| format!(" over {}", spec.transport));
        let version = spec.kv_compatibility.as_ref().map(|version| format!(" ({version})"));
        let (transport, version) = (transport.unwrap_or_default(), version.unwrap_or_default());
        format!("worker {} hands over by {}{transport}{version}", spec.id, spec.engine.as_str())
    };
    Some(format!(
        "no prefill worker of '{model}' can pair with a decode worker: for example, {} and {}",
        own(prefill),
        own(decode)
    ))
}

/// Returns the longest context, in tokens, that each worker takes that may serve the model, as far as their
/// engines report it.
pub(crate) fn context_length(snapshot: &Snapshot, model: &ModelName) -> Option<u32> {
    let pools = snapshot.pools(model);
    let up = pools.into_iter().flat_map(|pool| pool.iter()).filter(|candidate| is_up(candidate));
    up.filter_map(|candidate| candidate.worker.context_length(model)).min()
}
