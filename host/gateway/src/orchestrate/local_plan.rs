//! Requests whose decode worker is planned to prefill the prompt itself (D4.9): what follows when this worker
//! does not take one.

use http::StatusCode;
use pointsman_orchestration::{Event, Queued};
use pointsman_routing::CandidateId;
use pointsman_workers::{Leg, PerLeg};
use tokio::time::Instant;

use super::{Drive, id_of, plan};
use crate::upstream::CallError;

impl Drive {
    /// Returns the worker that a leg is planned for, while the plan holds.
    pub(super) fn planned_for(&self, leg: Leg) -> Option<CandidateId> {
        self.planned.filter(|_| leg == Leg::Aggregated && self.legs.follows_plan())
    }

    /// Returns whether a pair may take the request over from its planned worker. `tried`: workers that do not
    /// take it.
    pub(super) fn pair_takes_over(&self, tried: &[CandidateId]) -> bool {
        if self.account.tokens() == 0 {
            return plan::pair_takes_over(&self.request, &self.snapshot, tried);
        }
        // Workers joined and left while the answer was generated.
        plan::pair_takes_over(&self.request, &self.state.registry.snapshot(), tried)
    }

    /// Continues without the planned worker, which cannot take the request now.
    pub(super) fn plan_refused(&mut self, place: Option<Queued>, begun: Instant) {
        self.state.metrics.handoff("local_refused");
        self.account.not_routed(Leg::Aggregated, begun, "plan_refused");
        self.attempts.leave_plan(place);
        self.legs.note_pair(self.pair_takes_over(&[]));
        self.report(Event::PlanRefused);
    }

    /// Returns whether the pair is asked after the planned worker refused the request. It may take what is
    /// too long for the worker's own prefill.
    pub(super) fn asks_pair(&self, leg: Leg, error: &CallError) -> bool {
        let is_about_prompt = matches!(
            error,
            CallError::Status {
                status: StatusCode::BAD_REQUEST
                    | StatusCode::PAYLOAD_TOO_LARGE
                    | StatusCode::UNPROCESSABLE_ENTITY,
                ..
            }
        );
        let is_planned = self.planned_for(leg).is_some() && self.executor.calls();
        is_about_prompt && is_planned && self.account.tokens() == 0 && self.pair_takes_over(&[])
    }

    /// Notes that the planned worker failed the request, or refused it so that the pair is asked.
    pub(super) fn note_failed_plan(&mut self, leg: Leg, asks_pair: bool, retryable: bool) {
        if self.planned_for(leg).is_none() {
            return;
        }
        let takes_over = retryable && self.pair_takes_over(self.attempts.tried());
        self.legs.note_pair(asks_pair || takes_over);
        if asks_pair {
            self.state.metrics.handoff("local_refused_by_engine");
        } else if retryable {
            self.state.metrics.handoff("local_failed");
        }
        let failed = self.candidate(leg).map(id_of).filter(|_| takes_over);
        if let Some((worker, _)) = failed {
            // It decodes for a pair if no other worker can: only its own prefill may have failed.
            self.attempts.suspect(PerLeg { prefill: None, answering: Some(worker) }, []);
        }
    }
}
