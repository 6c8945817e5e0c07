//! Sessions that SGLang engines keep (`session_params`) [I12.10]: each engine has those that were opened on
//! it. The gateway learns from an answer which worker has a session, and its tenant.

use std::sync::Arc;

use http::StatusCode;
use pointsman_workers::{Candidate, Engine, Leg, name_hash};
use serde::Deserialize;

use super::{Drive, id_of};
use crate::{
    openai::{
        error::engine_text,
        request::{Endpoint, Request},
        request_error::read,
    },
    state::State,
    upstream::CallError,
};

#[derive(Deserialize)]
struct SessionParams {
    id: Option<String>,
}

/// Pins a request of a session to the worker that has it, if that is known and no hint names another one.
pub(crate) fn pin(state: &State, request: &mut Arc<Request>, tenant: Option<u64>) {
    let takes_sessions =
        matches!(request.endpoint, Endpoint::Generate | Endpoint::ChatCompletions | Endpoint::Completions);
    if !takes_sessions || request.body.get("session_params").is_none() {
        return;
    }
    // A batch has a list of them.
    let params: Option<SessionParams> = read(&request.body, "session_params").ok().flatten();
    let Some(id) = params.and_then(|params| params.id) else { return };
    let salt = name_hash(b"engine session", state.settings.measure.salt.expose());
    let session = name_hash(id.as_bytes(), salt ^ tenant.unwrap_or(0));
    let known = state.sessions.storing(session).map(|(worker, _)| worker);
    let snapshot = state.registry.snapshot();
    let pool = snapshot.pool(&request.model, Leg::Aggregated);
    let worker = known.filter(|worker| pool.iter().any(|one| one.worker_id() == *worker));
    if let Some(request) = Arc::get_mut(request) {
        let hints = &mut request.hints;
        hints.engine_session = Some(session);
        if hints.backend.is_none() && worker.is_some() {
            (hints.backend, hints.continues) = (worker, true);
        }
    }
}

impl Drive {
    /// Remembers that the engine which answers has the request's session, if it names one.
    pub(super) fn note_engine_session(&self) {
        let Some(session) = self.request.hints.engine_session else { return };
        let aggregated = self.candidate(Leg::Aggregated).filter(|_| self.answering() == Leg::Aggregated);
        if let Some(candidate) = aggregated.filter(|one| one.worker.spec().engine == Engine::Sglang) {
            let tenant = self.routing_request.tenant_hash.unwrap_or(0);
            self.state.sessions.stored(session, tenant, id_of(candidate));
        }
    }

    /// Returns whether the engine of a leg says that it does not have the request's session. The gateway
    /// forgets then that this engine had it. Another one may have it.
    pub(super) fn lacks_session(&self, leg: Leg, error: &CallError) -> bool {
        let Some(session) = self.request.hints.engine_session else { return false };
        let CallError::Status { status: StatusCode::BAD_REQUEST, body, .. } = error else { return false };
        let text = engine_text(body);
        let lacks = text.contains("session id") && text.contains("does not exist");
        let holder = self.state.sessions.storing(session).map(|(worker, _)| worker);
        if lacks && holder.is_some() && holder == self.candidate(leg).map(Candidate::worker_id) {
            self.state.sessions.deleted(session);
        }
        lacks
    }
}
