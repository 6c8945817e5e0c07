//! Sessions that SGLang engines keep (`session_params`) [I12.10]: each engine has those that were opened on
//! it. The gateway learns from an answer which worker has a session, and its tenant. Engines know no tenants:
//! the first one whose request of a session is answered has it [I12.14].

use std::{slice, sync::Arc};

use http::StatusCode;
use pointsman_routing::CandidateId;
use pointsman_workers::{Candidate, Engine, Leg, name_hash};
use serde_json::Value;

use crate::{
    openai::{
        error::{ApiError, engine_text},
        hints::EngineSession,
        request::{Endpoint, Request},
        request_error::{RequestError, read},
        short_text::shortened,
    },
    orchestrate::{Drive, id_of},
    state::State,
    upstream::CallError,
};

/// Pins a request of a session to the worker that has it, if that is known and no hint names another one.
///
/// # Errors
/// The session is known as another tenant's. A hint changes nothing about that.
pub(crate) fn pin(state: &State, request: &mut Arc<Request>, tenant: Option<u64>) -> Result<(), ApiError> {
    let takes_sessions =
        matches!(request.endpoint, Endpoint::Generate | Endpoint::ChatCompletions | Endpoint::Completions);
    if !takes_sessions || request.body.get("session_params").is_none() {
        return Ok(());
    }
    // Of equal keys, SGLang's parser takes the last one, as this one does.
    let params: Value = read(&request.body, "session_params")?.unwrap_or_default();
    let has_tenants = state.settings.has_tenants;
    let salt = |name: &[u8]| name_hash(name, state.settings.measure.salt.expose());
    let (of_tenant, of_all) =
        (salt(b"engine session") ^ tenant.unwrap_or(0), salt(b"engine session of any tenant"));
    let key = |id: &str, salt| name_hash(id.as_bytes(), salt);
    let holder = |session| state.sessions.storing(session).map(|(worker, _)| worker);
    // A batch has a list of them.
    let ids = params
        .as_array()
        .map_or(slice::from_ref(&params), Vec::as_slice)
        .iter()
        .filter_map(|one| one.get("id").and_then(Value::as_str));
    let is_of_another = |id: &&str| holder(key(id, of_tenant)).is_none() && holder(key(id, of_all)).is_some();
    if let Some(id) = ids.filter(|_| has_tenants).find(is_of_another) {
        let problem =
            format!("session id {} does not exist; open one of your own at an engine", shortened(id));
        return Err(RequestError::new("session_params", &problem).into());
    }
    let Some(id) = params.get("id").and_then(Value::as_str) else { return Ok(()) };
    let own = key(id, of_tenant);
    let (known, of_any) = (holder(own), has_tenants.then(|| key(id, of_all)));
    let snapshot = state.registry.snapshot();
    let pool = snapshot.pool(&request.model, Leg::Aggregated);
    let worker = known.filter(|worker| pool.iter().any(|one| one.worker_id() == *worker));
    if let Some(request) = Arc::get_mut(request) {
        let hints = &mut request.hints;
        hints.engine_session = Some(EngineSession { own, of_any });
        if hints.backend.is_none() && worker.is_some() {
            (hints.backend, hints.continues) = (worker, true);
        }
    }
    Ok(())
}

impl Drive {
    /// Remembers that the engine which answers has the request's session, if it names one.
    pub(crate) fn note_engine_session(&self) {
        let Some(session) = self.request.hints.engine_session else { return };
        let aggregated = self.candidate(Leg::Aggregated).filter(|_| self.answering() == Leg::Aggregated);
        if let Some(candidate) = aggregated.filter(|one| one.worker.spec().engine == Engine::Sglang) {
            self.set_engine_session(session, Some(id_of(candidate)));
        }
    }

    /// Notes which engine has a session of the request's tenant. The tenant's own key comes first: another
    /// gateway that is told one of both must not keep the tenant out.
    fn set_engine_session(&self, session: EngineSession, candidate: Option<CandidateId>) {
        let (sessions, owner) = (&self.state.sessions, self.routing_request.tenant_hash.unwrap_or(0));
        match candidate {
            Some(candidate) => {
                let keys = [Some(session.own), session.of_any];
                keys.into_iter().flatten().for_each(|key| sessions.stored(key, owner, candidate));
            }
            None => {
                let keys = [session.of_any, Some(session.own)];
                keys.into_iter().flatten().for_each(|key| sessions.deleted(key));
            }
        }
    }

    /// Returns whether the engine of a leg says that it does not have the request's session. The gateway
    /// forgets then that this engine had it. Another one may have it.
    pub(crate) fn lacks_session(&self, leg: Leg, error: &CallError) -> bool {
        let Some(session) = self.request.hints.engine_session else { return false };
        let CallError::Status { status: StatusCode::BAD_REQUEST, body, .. } = error else { return false };
        let text = engine_text(body);
        let lacks = text.contains("session id") && text.contains("does not exist");
        let holder = self.state.sessions.storing(session.own).map(|(worker, _)| worker);
        if lacks && holder.is_some() && holder == self.candidate(leg).map(Candidate::worker_id) {
            self.set_engine_session(session, None);
        }
        lacks
    }
}
