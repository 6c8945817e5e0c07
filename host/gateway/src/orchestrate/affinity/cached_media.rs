//! Media that engines keep under ids of clients [I12]: which worker has them. vLLM takes an id without the
//! data, and each engine knows its own.

use http::StatusCode;
use pointsman_routing::CandidateId;
use pointsman_workers::{Engine, Leg, name_hash};

use crate::{
    openai::{hints::Hints, media_ids::MediaIds, request::Request},
    orchestrate::{Drive, id_of},
    state::State,
    upstream::CallError,
};

/// Notes which media a request names by the ids of a tenant.
pub(crate) fn find(state: &State, request: &mut Request, tenant: Option<u64>) {
    let salt = || name_hash(b"media of a client", state.settings.measure.salt.expose());
    request.hints.media = MediaIds::of(request.endpoint, &request.body, |id| {
        name_hash(id.as_bytes(), salt() ^ tenant.unwrap_or(0))
    });
}

/// Returns the worker that has the media that a request names without their data.
pub(crate) fn holder(state: &State, hints: &Hints, leg: Leg) -> Option<CandidateId> {
    let medium = hints.media.missing?;
    let had = |leg| state.sessions.holding(medium, leg);
    // The decode worker of a pair got the data, too, and may run the whole request.
    had(leg).or_else(|| had(Leg::Decode).filter(|_| leg == Leg::Aggregated))
}

impl Drive {
    /// Notes that the worker of a leg has the media of the request. Other engines keep none under ids.
    pub(super) fn note_media(&self, leg: Leg) {
        let media = &self.request.hints.media.all;
        if media.is_empty() {
            return;
        }
        let candidate = self.candidate(leg).filter(|one| one.worker.spec().engine == Engine::Vllm);
        if let Some(candidate) = candidate {
            let tenant = self.routing_request.tenant_hash.unwrap_or(0);
            self.state.sessions.holds(media, tenant, leg, id_of(candidate));
        }
    }

    /// Returns whether an engine may have refused the request because it lacks media. Where there are
    /// tenants, no other engine is asked then: engines do not say whose the media are.
    pub(crate) fn may_lack_media(&self, error: &CallError) -> bool {
        let is_refused = matches!(error, CallError::Status { status: StatusCode::BAD_REQUEST, .. });
        is_refused && self.request.hints.media.missing.is_some() && !self.state.settings.has_tenants
    }
}
