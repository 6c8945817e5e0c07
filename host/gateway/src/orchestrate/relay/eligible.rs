//! Decides, before a request is sent, whether its stream may be continued (I14). Later, nothing of the
//! request is looked at until an engine fails.

use pointsman_orchestration::RetryPolicy;
use pointsman_routing::RoutingRequest;
use pointsman_workers::Snapshot;

use crate::{
    openai::{
        chunk::Reason,
        continuation::{self, Form},
        request::Request,
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
}
