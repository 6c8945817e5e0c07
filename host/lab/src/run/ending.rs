//! The end of a request: its outcome, what policies learn from it, and the requests that waited for it.

use pointsman_routing::{
    BatchedLearning, DecisionSource, Failure, Moment, ObservedOutcome, Receipt, SlotKind,
};
use pointsman_workers::Leg;
use rand::RngExt as _;
use tokio::time::Duration;

use super::{Event, Lab, flight::Flight, gateway::Gateway};
use crate::outcome::{Ended, Outcome};

/// Number of calls over the limit of CPU time after which a run continues without the policies. Each such
/// call takes the whole limit. In production such a policy is rolled back.
const MAX_TIMEOUTS: u32 = 16;

impl Lab<'_> {
    /// Ends a request that no leg was planned for.
    pub(super) fn refuse(&mut self, number: usize, ended: Ended) {
        let Some(request) = self.trace.requests.get(number) else { return };
        let outcome = Outcome {
            at: self.now,
            ended,
            ttft: Duration::ZERO,
            e2e: Duration::ZERO,
            queued: Duration::ZERO,
            attempts: 0,
            targets: request.targets,
            isl: request.input_tokens,
            osl: request.output_tokens,
            cached: 0,
            prefill_engine: 0,
            decode_engine: 0,
            fell_back: false,
        };
        self.close(number, outcome);
    }

    /// Ends a request whose legs have ended.
    pub(super) fn end(&mut self, number: usize) {
        self.free(number, Leg::Prefill);
        self.free(number, Leg::Decode);
        let Some(mut flight) = self.flights.remove(&number) else { return };
        if let Some(held) = flight.held.take() {
            self.strand(held);
        }
        flight.leave_session(&self.gateways.of(number).sessions, self.fleet.routing.session_affinity);
        let Some(request) = self.trace.requests.get(number) else { return };
        let ended = if flight.failed { flight.cause.unwrap_or(Ended::Failed) } else { Ended::Complete };
        let since = |then: Duration| then - flight.at;
        let engine = |place: usize| u32::try_from(place).unwrap_or(u32::MAX);
        let (prefill_engine, decode_engine) = flight.engines();
        let outcome = Outcome {
            at: flight.at,
            ended,
            ttft: since(flight.first_token.unwrap_or(self.now)),
            e2e: since(self.now),
            queued: flight.attempts.queued(),
            attempts: flight.legs.attempt(),
            targets: request.targets,
            isl: request.input_tokens,
            osl: request.output_tokens,
            cached: flight.cached.min(request.input_tokens),
            prefill_engine: engine(prefill_engine),
            decode_engine: engine(decode_engine),
            fell_back: flight.fell_back,
        };
        if let Some(admission) = flight.admission.as_mut() {
            admission.used(u64::from(request.input_tokens), u64::from(flight.last_token.1));
            let first = flight.first_token.map(|first| flight.arrived + since(first));
            first.into_iter().for_each(|first| admission.first_token(first));
        }
        self.queue_outcome(number, &flight, ended);
        self.close(number, outcome);
    }

    /// Records an outcome and plans the requests that waited for it.
    fn close(&mut self, number: usize, outcome: Outcome) {
        if let Some(place) = self.outcomes.get_mut(number) {
            *place = Some(outcome);
        }
        self.open -= 1;
        self.monitor.add(1);
        let Some(request) = self.trace.requests.get(number) else { return };
        if let Some(active) = request.tenant_hash.and_then(|tenant| self.tenants.get_mut(&tenant)) {
            *active = active.saturating_sub(1);
        }
        for next in self.order.end(number) {
            self.plan_next(next);
        }
    }

    /// Plans a request that waited for answers. A session continues after a refusal or a failure, because its
    /// client then has an answer, too.
    fn plan_next(&mut self, number: usize) {
        let Some(request) = self.trace.requests.get(number) else { return };
        let mut at = self.now + request.delay.unwrap_or_default();
        if self.options.fixed_schedule {
            at = at.max(request.at.div_f64(self.options.speed));
        }
        self.plan(at, Event::Arrival(number));
    }

    /// Queues the outcome for the policies that learn, as the gateway does.
    fn queue_outcome(&mut self, number: usize, flight: &Flight, ended: Ended) {
        let mut first = false;
        let source = |slot, lane| DecisionSource { slot, model: self.model.clone(), parent: None, lane };
        for (receipt, retried) in
            Receipt::with_retried(&flight.receipts).filter(|(receipt, _)| receipt.learns)
        {
            let observed = self.observed(flight, ended, receipt, retried);
            first |=
                self.gateways.of_mut(number).learning.submit(source(receipt.slot, receipt.lane), observed);
        }
        // A decode override is judged by the leg that answered, or that would have answered.
        let answering = flight.receipts.iter().rev().find(|receipt| receipt.leg != Leg::Prefill);
        if let (Some(decided), Some(receipt)) = (flight.decode_override, answering) {
            let observed = ObservedOutcome {
                decision: None,
                seed: decided.seed,
                by_policy: decided.by_policy,
                ..self.observed(flight, ended, receipt, false)
            };
            let learning = &mut self.gateways.of_mut(number).learning;
            first |= learning.submit(source(SlotKind::DecodeOverride, decided.lane), observed);
        }
        if first {
            let gateway = self.gateways.place_of(number);
            self.plan(self.now + BatchedLearning::DELAY, Event::Learn(gateway));
        }
    }

    fn observed(&self, flight: &Flight, ended: Ended, receipt: &Receipt, retried: bool) -> ObservedOutcome {
        let (last, tokens) = flight.last_token;
        let first = flight.first_token;
        let itl = first.filter(|_| tokens > 1).map(|first| (last - first) / (tokens - 1));
        let computes = flight.receipts.iter().rev().find(|receipt| receipt.leg.computes_prompt());
        let cached = computes.filter(|receipt| receipt.cached_known).map(|receipt| {
            receipt.cached_blocks.iter().sum::<u32>().saturating_mul(flight.request.block_size)
        });
        ObservedOutcome {
            status: match ended {
                Ended::Complete => 200,
                Ended::TooLarge => 400,
                Ended::Shed => 529,
                Ended::NoWorker => 503,
                Ended::Failed => 502,
            },
            ttft: first.map(|first| first - flight.at),
            itl,
            duration: self.now - flight.at,
            prompt_tokens: flight.request.prompt_tokens,
            output_tokens: tokens,
            cached_predicted: cached,
            cached_reported: (ended == Ended::Complete).then_some(flight.cached),
            ..receipt.outcome(retried)
        }
    }

    /// Delivers outcomes to the learning policies of a gateway.
    pub(super) fn learn(&mut self, gateway: usize) {
        let (now_us, rng) = (self.now_us(), &mut self.rng);
        self.gateways.at_mut(gateway).learning.deliver(|| Moment { now_us, seed: rng.random() });
    }

    /// Continues without policies if one exceeds its limit of CPU time too often. A simulation has no policy
    /// manager that would roll it back.
    pub(super) fn withdraw_loops(&mut self) {
        let failures =
            self.gateways.iter_mut().flat_map(|gateway| std::iter::from_fn(|| gateway.next_failure()));
        let timeouts = failures.filter(|event| matches!(event.failure, Failure::Timeout { .. })).count();
        if timeouts == 0 {
            return;
        }
        let before = self.timeouts;
        self.timeouts = before.saturating_add(u32::try_from(timeouts).unwrap_or(u32::MAX));
        if before < MAX_TIMEOUTS && self.timeouts >= MAX_TIMEOUTS {
            self.gateways.iter().for_each(Gateway::withdraw);
            self.withdrawn = true;
        }
    }
}
