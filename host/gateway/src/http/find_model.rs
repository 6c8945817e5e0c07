//! Finds the model or adapter that a request names, and what its engines decide about the request.

use std::sync::Arc;

use pointsman_workers::{Engine, ModelName, Snapshot};

use crate::{
    openai::{
        generate,
        request::{Endpoint, Request},
        request_error::RequestError,
        sampling,
    },
    orchestrate::availability::{Lack, lack},
    state::State,
};

/// Refuses an output limit of -1, unless all engines of the model take it for "no limit" (A5.19). A model
/// without workers has an error of its own.
pub(super) fn check_limits(request: &Request, workers: &Snapshot) -> Result<(), RequestError> {
    let (model, engine) = (&request.model, Engine::Openai);
    match sampling::check_limits(request.endpoint, &request.body) {
        Err(_) if !workers.serves(model) || workers.is_only_on(engine, model) => Ok(()),
        checked => checked,
    }
}

/// Finds the request's model. If no worker can serve it, reads again which models engines serve.
pub(super) async fn find_model(state: &State, request: &mut Arc<Request>) {
    let snapshot = state.registry.snapshot();
    if finds_model(request, &snapshot) && !snapshot.is_adapter(&request.model) {
        // Engines load only adapters while they serve.
        return;
    }
    drop(snapshot);
    if look_again(state, &request.model, request.endpoint).await {
        finds_model(request, &state.registry.snapshot());
    }
}

/// Has the engines' models read again, if they may have loaded what `model` lacks. Waits for it if no worker
/// can serve the model, and returns then whether it was so.
pub(super) async fn look_again(state: &State, model: &ModelName, endpoint: Endpoint) -> bool {
    let lacks = |snapshot: &Snapshot| {
        let adapter = if snapshot.serves(model) { None } else { snapshot.adapter_named(model) };
        lack(adapter.unwrap_or(model), endpoint, snapshot, &state.settings)
    };
    match lacks(&state.registry.snapshot()) {
        None => return false,
        Some(Lack::Pair) => {
            state.registry.reread_models_later();
            return false;
        }
        Some(Lack::Workers) => {}
    }
    // Boxed, because few requests wait here.
    Box::pin(state.registry.reread_models(model, |snapshot| lacks(snapshot) != Some(Lack::Workers))).await;
    true
}

/// Returns whether a worker serves the request's model. `MODEL:ADAPTER` becomes the adapter (B3.9), and so
/// does a model with an adapter of it in `lora_path` (A1.12, A1.16). The engines of a model decide what the
/// prompt is (L1.11).
pub(super) fn finds_model(request: &mut Arc<Request>, workers: &Snapshot) -> bool {
    if workers.serves(&request.model) {
        find_adapter(request, workers);
    } else {
        let Some(adapter) = workers.adapter_named(&request.model) else { return false };
        if let Some(request) = Arc::get_mut(request) {
            request.model = adapter.clone();
        }
    }
    if let Some(request) = Arc::get_mut(request).filter(|it| it.body.get("input_ids").is_some())
        && reads_ids(workers, &request.model)
    {
        request.take_input_ids();
    }
    true
}

/// Returns whether SGLang serves the model: it reads `input_ids` of a chat.
fn reads_ids(workers: &Snapshot, model: &ModelName) -> bool {
    let mut all = workers.pools(model).into_iter().flat_map(|pool| pool.iter());
    all.any(|candidate| candidate.worker.spec().engine == Engine::Sglang)
}

/// Finds the adapter in `lora_path`, which only SGLang reads, and only beside a model that is no adapter.
fn find_adapter(request: &mut Arc<Request>, workers: &Snapshot) {
    let Ok(Some(named)) = generate::adapter(&request.body) else { return };
    let (adapter, model) = (ModelName::new(&named), &request.model);
    let is_of_model = workers.parent_of(&adapter) == Some(model);
    let is_read = request.endpoint == Endpoint::Generate
        || is_of_model && workers.is_only_on(Engine::Sglang, &adapter)
        || !workers.is_adapter(model) && workers.is_only_on(Engine::Sglang, model);
    if let Some(request) = Arc::get_mut(request).filter(|_| is_read) {
        if is_of_model {
            request.model = adapter;
        } else {
            request.hints.lora.get_or_insert(named);
        }
    }
}
