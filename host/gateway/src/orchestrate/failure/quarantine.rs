//! Requests that break their engines (I4): how one is recognised, and how an equal one is refused.

use pointsman_workers::{Candidate, Leg};

use super::worker_outcome::Blame;
use crate::{
    openai::{
        error::ApiError,
        request::{Endpoint, Request},
    },
    orchestrate::Drive,
    state::{State, quarantine::Broke},
    upstream::CallError,
};

impl Drive {
    /// Whether this failure shows that the request breaks its engines. `otherwise` is charged if it does not:
    /// the worker, its handoff, or `at_fault`, the prefill worker. A worker that fails with other requests,
    /// too, proves nothing, and neither does a failure of a leg that the gateway did not send, or aborted.
    pub(super) fn blames_request(
        &self,
        leg: Leg,
        (candidate, at_fault): (&Candidate, Option<&Candidate>),
        error: &CallError,
        otherwise: Blame,
    ) -> bool {
        let hash = body_hash(&self.state, &self.request)
            .filter(|_| self.executor.calls() && !self.runs[leg].aborted);
        let fails = [Some(candidate), at_fault].into_iter().flatten().any(|one| one.worker.is_failing());
        let Some(hash) = hash.filter(|_| error.is_suspicious() && !fails) else {
            return false;
        };
        // A decode worker may also break on the request after a prefill of its own.
        let same = if leg == Leg::Aggregated { Leg::Decode } else { leg };
        let is_charged = otherwise == Blame::Worker && error.is_fault();
        let broke = Broke {
            worker: candidate.worker.id(),
            leg: same,
            way: way_of(error),
            blames_prefill: at_fault.map(Candidate::worker_id),
            is_first: self.broken_handoff.is_none(),
            row: is_charged.then(|| candidate.worker.row_of_failures()),
        };
        let is_poison = self.state.quarantine.note(hash, broke, self.state.settings.quarantine);
        if is_poison {
            self.state.metrics.poison("quarantined");
            let request = &self.account.request_id;
            tracing::warn!(request, %leg, kind = error.kind(), "request quarantined: two workers broke on it");
            self.acquit_first_worker(hash);
        }
        is_poison
    }

    /// Takes back what another worker was charged with for the body before.
    fn acquit_first_worker(&self, hash: u64) {
        let wrong = self.state.quarantine.take_wrong_charges(hash);
        let worker = wrong.and_then(|wrong| self.snapshot.get(wrong.worker).zip(Some(wrong)));
        if let Some((worker, wrong)) = worker {
            worker.take_back_failures(wrong.number, wrong.row);
        }
    }

    /// Returns why the request is refused before it is sent, if an equal one broke two workers.
    pub(crate) fn quarantined(&self) -> Option<ApiError> {
        let refused = would_be_quarantined(&self.state, &self.request)?;
        self.state.metrics.poison("refused");
        Some(refused)
    }
}

/// Returns how a worker broke. The end of a kept connection is the end of a connection, whether or not it was
/// idle.
pub(super) fn way_of(error: &CallError) -> &'static str {
    if matches!(error, CallError::Closed(_)) { "broken" } else { error.kind() }
}

/// Like [`Drive::quarantined`], but does not count the refusal.
pub(crate) fn would_be_quarantined(state: &State, request: &Request) -> Option<ApiError> {
    if state.quarantine.is_empty() {
        return None;
    }
    let left = state.quarantine.refuses(body_hash(state, request)?)?;
    Some(ApiError::Poison { cause: "an equal request was sent a moment ago".to_owned(), left })
}

/// Records that the request was served: it does not break engines.
pub(crate) fn record_served(state: &State, request: &Request) {
    if let Some(hash) = body_hash(state, request) {
        state.quarantine.served(hash);
    }
}

/// Returns the hash by which equal requests are known; `None`: none is quarantined, or it has no body.
fn body_hash(state: &State, request: &Request) -> Option<u64> {
    let has_one = !state.settings.quarantine.is_zero() && request.endpoint != Endpoint::Realtime;
    has_one.then(|| state.quarantine.hash(request.bytes()))
}
