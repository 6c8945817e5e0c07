//! Decides, before a request is sent, whether its stream may be continued (I14), and what its engine is asked
//! for besides. Later, nothing of the request is looked at until an engine fails.

use pointsman_orchestration::RetryPolicy;
use pointsman_routing::RoutingRequest;
use pointsman_workers::{Candidate, Engine, Snapshot};

use crate::{
    openai::{
        chunk::{Chunk, Reason},
        continuation::{self, Form},
        request::Request,
        sse::{self, Seen},
    },
    orchestrate::Drive,
    state::State,
};

/// The reason of streams that the configuration excludes. They are not counted.
pub(super) const OFF: Reason = "off";

/// Returns from what the stream of a request may be continued. Reduces its continuations to what its tenant
/// may.
///
/// # Errors
/// The reason for which the stream is never continued.
pub(crate) fn form_of(
    state: &State,
    request: &Request,
    routing_request: &RoutingRequest,
    policy: &mut RetryPolicy,
    workers: &Snapshot,
) -> Result<Form, Reason> {
    if policy.continuations == 0 || !request.stream {
        return Err(OFF);
    }
    let rules = &state.settings.continuations;
    if let Some(limit) = rules.limit(routing_request.tenant_hash) {
        policy.continuations = policy.continuations.min(limit);
    }
    if policy.continuations == 0 {
        return Err(OFF);
    }
    continuation::form_of(request, rules.is_exact(&request.model, workers))
}

impl Drive {
    /// Returns whether engines are asked for token ids, which the client must not get.
    pub(crate) fn wants_ids(&self) -> bool {
        matches!(self.form, Ok(Form::Exact(_)))
    }

    /// Returns whether the engine that answers is asked for its usage, which the client did not ask for: an
    /// event may have several tokens, and they count for a limit of its tenant (L1.10).
    pub(crate) fn wants_usage(&self) -> bool {
        let request = &self.request;
        let may_ask = request.stream && request.is_chat() && !request.include_usage && self.executor.calls();
        let takes =
            |candidate: &Candidate| matches!(candidate.worker.spec().engine, Engine::Vllm | Engine::Sglang);
        may_ask && self.account.has_token_limit() && self.candidate(self.answering()).is_some_and(takes)
    }

    /// Returns whether an event exists only because the engine was asked for usage.
    pub(super) fn is_unasked_usage(&self, event: &[u8], seen: &Seen) -> bool {
        let has_choices = || Chunk::read(sse::object(event)).is_none_or(|chunk| chunk.has_choices());
        seen.usage.is_some() && self.wants_usage() && !has_choices()
    }
}
