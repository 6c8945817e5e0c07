//! Requests whose decode worker is planned to prefill the prompt itself (D4.9): what follows when this worker
//! does not take one.

use http::StatusCode;
use pointsman_orchestration::{Event, Queued};
use pointsman_routing::CandidateId;
use pointsman_workers::{Candidate, Leg, PerLeg};
use tokio::time::Instant;

use super::{Drive, broken_handoff::ranks_of, plan, second_opinion::names_context};
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

    /// Returns whether a pair may take the request over and prefill would begin at once. Otherwise another
    /// worker that prefills its own prompts is quicker, and an engine's refusal is the answer.
    fn pair_is_free(&self, tried: &[CandidateId]) -> bool {
        self.pair_takes_over(tried) && self.is_free(Leg::Prefill, &[])
    }

    /// Returns whether the pair is asked after the planned worker refused the request. It may take what is
    /// too long for the worker's own prefill.
    fn asks_pair(&self, leg: Leg, error: &CallError) -> bool {
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
        is_about_prompt && is_planned && self.account.tokens() == 0 && self.pair_is_free(&[])
    }

    /// Returns whether another worker is asked about a request that this one refused, and whether the pair
    /// is. A worker with room for more context is the better one.
    pub(super) fn second_try(
        &mut self,
        leg: Leg,
        candidate: Option<&Candidate>,
        error: &CallError,
    ) -> (bool, bool) {
        let may_ask_pair = self.asks_pair(leg, error);
        let candidate = candidate.filter(|_| !may_ask_pair || names_context(error));
        let asks = candidate.is_some_and(|candidate| self.asks_another(leg, candidate, error));
        (asks, may_ask_pair && !asks)
    }

    /// Notes that the planned worker failed the request, or refused it so that the pair is asked.
    pub(super) fn note_failed_plan(&mut self, leg: Leg, asks_pair: bool, retryable: bool) {
        if self.planned_for(leg).is_none() {
            return;
        }
        let takes_over = retryable && self.pair_is_free(self.attempts.tried());
        self.legs.note_pair(asks_pair || takes_over);
        if asks_pair {
            self.state.metrics.handoff("local_refused_by_engine");
        } else if retryable {
            self.state.metrics.handoff("local_failed");
        }
        let failed = self.candidate(leg).filter(|_| takes_over).map(|failed| failed.worker.clone());
        if let Some(worker) = failed {
            // It decodes for a pair if no other worker can: only its own prefill may have failed.
            let answering = Some(worker.id());
            self.attempts.suspect(PerLeg { prefill: None, answering }, ranks_of([Some(&worker), None]));
        }
    }
}
