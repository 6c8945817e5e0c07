//! Tells workers how the legs that they ran ended.

use pointsman_workers::{Candidate, Leg};
use tokio::time::Instant;

use crate::{state::State, upstream::CallError};

/// Counts a leg that succeeded, and reports it to its worker.
pub(super) fn note_success(state: &State, leg: Leg, candidate: &Candidate) {
    state.metrics.leg(leg.as_str(), candidate.worker.spec().engine.as_str(), "ok");
    candidate.load().observe_outcome(true);
    candidate.worker.note_outcome(true);
}

/// Counts a failed leg, and reports it to its worker unless the request is to blame. `candidate` comes with
/// the time at which the leg was sent.
pub(super) fn note_failure(
    state: &State,
    leg: Leg,
    (candidate, sent): (&Candidate, Instant),
    error: &CallError,
    is_poison: bool,
) {
    let (spec, worker) = (candidate.worker.spec(), &candidate.worker);
    state.metrics.leg(leg.as_str(), spec.engine.as_str(), error.kind());
    if let Some(refusal) = error.refusal() {
        // The task of a prefill call has released its booking.
        let others = worker.own_requests().saturating_sub(u32::from(leg != Leg::Prefill));
        if worker.note_refusal(refusal, sent, others) {
            candidate.load().observe_outcome(false);
        }
        tracing::debug!(worker = %spec.id, pause = ?worker.pause(), "worker paused: its engine has too much to do");
    } else if error.is_fault() && !is_poison {
        candidate.load().observe_outcome(false);
        worker.note_outcome(false);
    }
    if error.breaks_engine() {
        worker.note_broke();
    }
    match error {
        CallError::Connect(problem) => {
            tracing::warn!(worker = %spec.id, url = %spec.url, problem, "worker unreachable");
            worker.note_connect_failed();
        }
        CallError::Timeout(_) => worker.note_timeout(),
        CallError::Broken(_) => worker.note_restart(),
        CallError::Status { status, .. } if *status == http::StatusCode::NOT_FOUND => worker.note_restart(),
        _ => {}
    }
}
