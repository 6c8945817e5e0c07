//! Responses that engines store [I12]: which worker has one, and calls about one.
//!
//! Engines keep the answers of `/v1/responses` for later requests, each its own. The gateway notes the worker
//! that sent an id, and its tenant. An id that it does not know, such as one from before its restart, is
//! looked for at the workers. Where tenants are configured it is not: engines know no owners.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{HeaderValue, Method, Response, StatusCode};
use pointsman_routing::CandidateId;
use pointsman_workers::{DpRank, Engine, Health, Leg, Role, Worker, WorkerSpec, name_hash};
use tokio::time::{Duration, timeout};

use crate::{
    connectors::{LegContext, RequestToken, Target, connector_for, leg_headers},
    openai::{
        endpoint::Format,
        error::ApiError,
        request::{Endpoint, Request},
        seen,
        short_text::shortened,
    },
    orchestrate::{Drive, failure::worker_outcome::refused_key, id_of},
    state::State,
    upstream::{self, Body, CallError, Destination, Silence, Upstream},
};

pub(crate) mod events;

/// Longest id of a stored response, bytes.
const MAX_ID: usize = 256;
/// Workers that are asked for a response that no gateway knows.
const MAX_ASKED: usize = 64;
/// Workers that are asked at the same time, and how long one may take to answer.
const ASKED_AT_ONCE: usize = 8;
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);

/// A call about a stored response.
#[derive(Debug)]
pub(crate) struct StoredCall<'a> {
    pub(crate) method: Method,
    pub(crate) id: &'a str,
    /// Path and query at the engine.
    pub(crate) path: String,
    /// Salted hash of the caller's tenant.
    pub(crate) tenant: Option<u64>,
    /// The caller's `authorization`, where engines get it.
    pub(crate) authorization: Option<&'a HeaderValue>,
}

/// Remembers the worker that sent an event or a whole answer, if that names a stored response. Returns
/// whether it does.
fn note(state: &State, json: &[u8], tenant: Option<u64>, worker: CandidateId) -> bool {
    let Some(id) = seen::response_id(json).filter(|id| is_id(id)) else { return false };
    state.sessions.stored(key(state, id, tenant), tenant.unwrap_or(0), worker);
    true
}

impl Drive {
    /// Remembers which worker stored the response that an answer, or an event, names.
    pub(crate) fn note_stored(&mut self, answer: &[u8]) {
        let prefill = self.runs.prefill.candidate.as_ref();
        let is_lost = prefill.is_some_and(|one| !connector_for(one.worker.spec()).decode_stores_responses());
        if self.stored || is_lost || self.request.endpoint.format() != Format::Responses {
            return;
        }
        if let Some(candidate) = &self.runs.answering.candidate {
            let tenant = self.routing_request.tenant_hash;
            self.stored = note(&self.state, sse::object(answer), tenant, id_of(candidate));
        }
    }
}

/// Pins a request that continues a stored response to the worker that has it, unless a hint names another. A
/// response that no worker has is the engine's to refuse.
///
/// # Errors
/// The worker that stored the response has left or does not serve the request's model. Where tenants are
/// configured: the response is another tenant's, or its owner is not known, whatever a hint names.
pub(crate) async fn pin(
    state: &State,
    upstream: &Upstream,
    request: &mut Arc<Request>,
    tenant: Option<u64>,
) -> Result<(), ApiError> {
    let (is_hinted, has_owner) = (request.hints.backend.is_some(), state.settings.has_tenants);
    if request.endpoint != Endpoint::Responses || (is_hinted && !has_owner) {
        return Ok(());
    }
    let Some(id) = request.body.get("previous_response_id").filter(|id| *id != "null") else { return Ok(()) };
    let Some(id) = serde_json::from_str(id).ok().filter(|id: &String| is_id(id)) else {
        // An engine may take it for an id that it knows.
        return if has_owner { Err(ApiError::ResponseNotFound(shortened(id))) } else { Ok(()) };
    };
    let authorization = request.authorization.clone();
    let found = find(state, upstream, &id, tenant, authorization.as_ref()).await?;
    let Some(worker) = found.filter(|_| !is_hinted) else { return Ok(()) };
    let (model, workers) = (&request.model, state.registry.snapshot());
    let is_its = |leg| workers.pool(model, leg).iter().any(|one| one.worker_id() == worker.id());
    if workers.serves(model) && ![Leg::Aggregated, Leg::Prefill, Leg::Decode].into_iter().any(is_its) {
        return Err(ApiError::WorkerNotEligible(format!(
            "no worker of the model `{model}` has the response `{id}`; name the model of that response, or send the \
             whole conversation in `input`"
        )));
    }
    if let Some(request) = Arc::get_mut(request) {
        (request.hints.backend, request.hints.continues) = (Some(worker.id()), true);
    }
    Ok(())
}

/// Makes a call about a stored response to the worker that has it, and returns the head of the answer.
///
/// # Errors
/// [`ApiError`]: no worker has the response, or the engine refuses.
pub(crate) async fn call(
    state: &State,
    upstream: &Upstream,
    call: &StoredCall<'_>,
) -> Result<(Response<Body>, Arc<Worker>), ApiError> {
    let missing = || ApiError::ResponseNotFound(shortened(call.id));
    if !is_id(call.id) {
        return Err(missing());
    }
    let key = key(state, call.id, call.tenant);
    let was_known = state.sessions.storing(key).is_some();
    let found = find(state, upstream, call.id, call.tenant, call.authorization).await?;
    let mut worker = found.ok_or_else(missing)?;
    let limit = state.settings.leg_timeouts.head;
    let silence = Silence { what: "answer about a stored response", key: "head", limit };
    let mut answered = upstream::with_time_limit(silence, send(upstream, &worker, call)).await;
    if was_known && is_missing(&answered) {
        // It may be at another worker now.
        state.sessions.deleted(key);
        let found = search(state, upstream, call.id, key, call.authorization).await;
        if let Some(other) = found.filter(|other| other.id() != worker.id()) {
            worker = other;
            answered = upstream::with_time_limit(silence, send(upstream, &worker, call)).await;
        }
    }
    if is_missing(&answered) || (answered.is_ok() && call.method == Method::DELETE) {
        state.sessions.deleted(key);
    }
    if let Err(CallError::Connect(_)) = &answered {
        worker.note_connect_failed();
    }
    let answered = answered.map_err(|error| match refused_key(state, &worker, &error) {
        Some(refused) => refused,
        None => error.into(),
    })?;
    Ok((answered, worker))
}

fn is_missing(answered: &Result<Response<Body>, CallError>) -> bool {
    matches!(answered, Err(CallError::Status { status, .. }) if *status == StatusCode::NOT_FOUND)
}

/// Returns the worker that has a response; `None` if it is not known, and none says that it has it.
///
/// Where tenants are configured, a response that is not known does not exist. Engines do not say who owns a
/// response, so any tenant could read it.
async fn find(
    state: &State,
    upstream: &Upstream,
    id: &str,
    tenant: Option<u64>,
    authorization: Option<&HeaderValue>,
) -> Result<Option<Arc<Worker>>, ApiError> {
    let key = key(state, id, tenant);
    let stored = state.sessions.storing(key);
    let worker = stored.and_then(|(worker, _)| state.registry.snapshot().get(worker).cloned());
    if worker.is_some() {
        return Ok(worker);
    }
    if stored.is_none() {
        if state.settings.has_tenants {
            return Err(ApiError::ResponseNotFound(shortened(id)));
        }
        let mut workers = searched(state);
        if workers.len() < 2 {
            return Ok(workers.pop());
        }
    }
    // The worker that stored it has left. Its engine may have come back as another one.
    let found = search(state, upstream, id, key, authorization).await;
    if found.is_none() && stored.is_some() {
        Err(ApiError::ResponseNotFound(shortened(id)))
    } else {
        Ok(found)
    }
}

/// Returns the workers that may have a response that the gateway does not know.
fn searched(state: &State) -> Vec<Arc<Worker>> {
    // SGLang stores nothing in a worker of a pair.
    let may_store = |spec: &WorkerSpec| match spec.role {
        Role::Prefill => false,
        Role::Decode => spec.engine != Engine::Sglang,
        Role::Aggregated => true,
    };
    let may_have_it = |worker: &&Arc<Worker>| {
        worker.health() == Health::Healthy && may_store(worker.spec()) && !worker.is_down()
    };
    state.registry.snapshot().workers().iter().filter(may_have_it).take(MAX_ASKED).cloned().collect()
}

/// Asks the workers for a response, and notes the one that has it under `key`.
async fn search(
    state: &State,
    upstream: &Upstream,
    id: &str,
    key: u64,
    authorization: Option<&HeaderValue>,
) -> Option<Arc<Worker>> {
    // A stranger may send any number of ids that do not exist.
    let _place = state.response_searches.reserve(1)?;
    let path = format!("/v1/responses/{id}");
    let ask = |worker: Arc<Worker>| {
        let path = path.clone();
        async move {
            let call = StoredCall { method: Method::GET, id, path, tenant: None, authorization };
            let answered = timeout(SEARCH_TIMEOUT, send(upstream, &worker, &call)).await;
            answered.is_ok_and(|answered| answered.is_ok()).then_some(worker)
        }
    };
    let mut asked = stream::iter(searched(state)).map(ask).buffer_unordered(ASKED_AT_ONCE);
    while let Some(has_it) = asked.next().await {
        if let Some(worker) = has_it {
            state.sessions.stored(key, 0, (worker.id(), DpRank(0)));
            return Some(worker);
        }
    }
    None
}

async fn send(
    upstream: &Upstream,
    worker: &Worker,
    call: &StoredCall<'_>,
) -> Result<Response<Body>, CallError> {
    let target = Target { spec: worker.spec(), rank: DpRank(0) };
    let context = LegContext::alone(RequestToken::fresh(), Some(target));
    let headers = leg_headers(&context, target, call.authorization);
    let to = Destination::new(target.spec, &call.path);
    upstream.send(&call.method, &to, &headers, Bytes::new()).await
}

/// Returns the key of a tenant's response.
fn key(state: &State, id: &str, tenant: Option<u64>) -> u64 {
    let salt = name_hash(b"stored response", state.settings.measure.salt.expose());
    name_hash(id.as_bytes(), salt ^ tenant.unwrap_or(0))
}

/// Returns whether a text may be the id of a response and a part of an engine's path.
fn is_id(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':');
    text.len() <= MAX_ID
        && text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.bytes().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_a_part_of_a_path_and_nothing_else() {
        for good in ["resp_0a1b", "resp-1.2:3", "7"] {
            assert!(is_id(good), "{good}");
        }
        let long = "x".repeat(MAX_ID + 1);
        for bad in ["", "..", ".a", "a/b", "a?b", "a%2fb", "a b", "a\r\nb", "é", &long] {
            assert!(!is_id(bad), "{bad}");
        }
    }
}
