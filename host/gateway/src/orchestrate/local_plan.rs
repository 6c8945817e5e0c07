//! Requests whose decode worker is planned to prefill the prompt itself (D4.9): what follows when this worker
//! does not take one.

use http::StatusCode;
use pointsman_orchestration::{Event, Queued};
use pointsman_routing::{CandidateId, Plan, Purpose};
use pointsman_workers::{Candidate, Leg, PerLeg};
use tokio::time::Instant;

use super::{
    Drive,
    failure::{broken_handoff::ranks_of, second_opinion::names_context},
    plan,
};
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

    /// Returns whether the plan of a request that waited in the queue still holds. Workers have other work
    /// since it was made, which the override sees.
    pub(super) fn plan_holds(&mut self) -> bool {
        let (state, request) = (&self.state, &self.routing_request);
        let question = plan::question(state, &self.request, request, &self.snapshot, Leg::Decode);
        let decided = state.router.plan(&question, Purpose::Preview);
        self.planned = decided.decode.filter(|_| matches!(decided.plan, Plan::Local));
        self.planned.is_some()
    }

    /// Has the policies of the slot `prefill` count a request that its planned worker takes (D4.14). Returns
    /// whether they refuse it.
    pub(super) fn prefill_refuses(&self) -> bool {
        let (state, request) = (&self.state, &self.routing_request);
        let question = plan::question(state, &self.request, request, &self.snapshot, Leg::Decode);
        state.router.prefill_refuses(&question, Purpose::Route)
    }

    /// Continues without the planned worker, which cannot take the request now.
    pub(super) fn plan_refused(&mut self, place: Option<Queued>, begun: Option<Instant>) {
        self.state.metrics.handoff("local_refused");
        self.account.not_routed(Leg::Aggregated, begun, "plan_refused");
        self.attempts.leave_plan(place);
        self.legs.note_pair(self.pair_takes_over(&[]));
        self.report(Event::PlanRefused);
    }

    /// Returns whether a pair may take the request over and prefill would begin at once. Otherwise another
    /// worker that prefills its own prompts is quicker.
    fn pair_is_free(&self, tried: &[CandidateId]) -> bool {
        self.pair_takes_over(tried) && self.is_free(Leg::Prefill, &[])
    }

    /// Returns whether the pair is asked after the planned worker refused the request. It may take what is
    /// too long for the worker's own prefill, and may be waited for as without a plan.
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
        is_about_prompt && is_planned && self.account.tokens() == 0 && self.pair_takes_over(&[])
    }

    /// Returns whether another worker is asked about a request that this one refused, and whether the pair
    /// is. A worker with room for more context is the better one.
    pub(super) fn second_try(
        &mut self,
        leg: Leg,
        candidate: Option<&Candidate>,
        error: &CallError,
    ) -> (bool, bool) {
        let may_ask_pair = !self.lacks_model(error) && self.asks_pair(leg, error);
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
