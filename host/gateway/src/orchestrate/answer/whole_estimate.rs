//! Raises the booking of an answer that is not streamed with its estimated progress (F4.10).

use pointsman_orchestration::{Event, MAX_OUTPUT_ESTIMATE};
use pointsman_routing::RoutingRequest;
use pointsman_workers::{Booking, EngineLoad, Estimate, Leg};
use tokio::time::{Duration, Instant};

use crate::{openai::request::Request, orchestrate::Drive, telemetry::metrics::Metrics};

/// Shortest time after which the engine of a pair must have the first token of an answer.
const MIN_CONSUMED: Duration = Duration::from_secs(1);
/// So many times the estimated time may pass before that.
const CONSUMED_AFTER: u32 = 4;

/// The estimate of the answer that is awaited.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WholeEstimate {
    estimate: Estimate,
    computes_prompt: bool,
    /// Time at which the worker began; `None` while it waits for the prefill worker.
    from: Option<Instant>,
    /// When the estimate changes next.
    due: Option<Instant>,
    /// When the engine was last seen to have requests that wait, of which this may be one.
    queued: Option<Instant>,
}

impl WholeEstimate {
    /// Estimates the answer to `request`, which a worker begins at `from`, with at most `most` output tokens
    /// of each sequence.
    pub(crate) fn new(
        booking: &Booking,
        request: &Request,
        leg: Leg,
        from: Option<Instant>,
        most: u32,
    ) -> Self {
        let computes_prompt = leg.computes_prompt();
        let sequences = if request.endpoint.generates() { request.items() } else { 0 };
        let estimate = booking.estimate(computes_prompt, sequences, Some(most));
        let mut whole = Self { estimate, computes_prompt, from: None, due: None, queued: None };
        if let Some(from) = from {
            whole.begins(from);
        }
        whole
    }

    /// The worker begins at `from`.
    pub(crate) fn begins(&mut self, from: Instant) {
        if self.from.is_none() {
            self.from = Some(from);
            self.due = self.estimate.next(Duration::ZERO).map(|next| from + next);
        }
    }

    /// Returns when the booking has to be brought up to date.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Brings the booking up to date.
    pub(crate) fn advance(&mut self, booking: &mut Booking) {
        let Some(from) = self.from else { return };
        let elapsed = from.elapsed();
        booking.advance(&self.estimate, elapsed);
        self.due = self.estimate.next(elapsed).map(|next| from + next);
    }

    /// Returns the number of output tokens that the worker has generated until now.
    fn tokens(&self) -> u32 {
        self.from.and_then(|from| self.estimate.tokens(from.elapsed())).unwrap_or(0)
    }

    /// Returns when the worker of a pair must have its first token, if it began: at the end of the handoff's
    /// lease at the latest.
    fn consumed_at(&self, lease: Duration) -> Option<Instant> {
        let longest = lease.max(MIN_CONSUMED);
        let first_token = self.estimate.duration(0);
        let after = (first_token * CONSUMED_AFTER).clamp(MIN_CONSUMED, longest);
        self.from.map(|from| (self.queued.unwrap_or(from) + after).min(from + longest))
    }

    /// Notes whether the request may still wait in its engine, of which `load` is known: then it has not its
    /// first token.
    fn may_wait(&mut self, load: Option<EngineLoad>) -> bool {
        let (Some(from), Some(load)) = (self.from, load) else { return false };
        let may_wait = load.read_at < from || load.waiting.is_some_and(|waiting| waiting > 0);
        if may_wait {
            self.queued = Some(Instant::now());
        }
        may_wait
    }

    /// The answer arrived, with this many tokens if its engine reported them.
    pub(crate) fn ended(&self, booking: &Booking, tokens: Option<u32>, metrics: &Metrics) {
        if let (Some(from), Some(tokens)) = (self.from, tokens) {
            let error = booking.answered(&self.estimate, from.elapsed(), self.computes_prompt, tokens);
            metrics.whole_estimate_errors.observe(error);
        }
    }
}

/// Returns the most output tokens that a sequence may have: up to the end of the model's `context`, if it is
/// known.
pub(crate) fn most_output(request: &Request, routing: &RoutingRequest, context: Option<u32>) -> u32 {
    // Of a batch, each prompt has a context of its own.
    let is_known = !routing.prompt_tokens_estimated && request.prompts <= 1;
    let prompt = if is_known { routing.prompt_tokens } else { 0 };
    let room = context.map_or(MAX_OUTPUT_ESTIMATE, |context| context.saturating_sub(prompt).max(1));
    request.max_tokens.unwrap_or(room).min(room)
}

impl Drive {
    /// Returns when the booking of an answer that is not streamed has to be brought up to date.
    pub(crate) fn estimate_due(&self) -> Option<Instant> {
        self.estimate.as_ref().filter(|_| self.runs.answering.booking.is_booked())?.due()
    }

    /// Brings the booking up to the estimated progress.
    pub(crate) fn advance_estimate(&mut self) {
        if let (Some(estimate), Some(booking)) = (&mut self.estimate, self.runs.answering.booking.own()) {
            estimate.advance(booking);
        }
    }

    /// Returns when the handoff of a whole answer that no client waits for counts as consumed: no event tells
    /// (E1.6).
    pub(crate) fn consumed_at(&self) -> Option<Instant> {
        let prefill = self.candidate(Leg::Prefill).filter(|_| self.legs.generates_for_handoff())?;
        self.estimate.as_ref()?.consumed_at(prefill.worker.spec().handoff_lease())
    }

    /// Returns whether the handoff of a whole answer that no client waits for is consumed now: decode does
    /// not wait in its engine, or the lease of the handoff is over.
    pub(crate) fn is_consumed(&mut self) -> bool {
        let load = self.candidate(self.answering()).and_then(|decode| decode.load().view().engine_load());
        let may_wait = self.estimate.as_mut().is_some_and(|estimate| estimate.may_wait(load));
        !may_wait || self.consumed_at().is_some_and(|due| due <= Instant::now())
    }

    /// The prefill worker is done, so that the other one begins.
    pub(crate) fn estimate_begins(&mut self) {
        if let Some(estimate) = &mut self.estimate {
            estimate.begins(Instant::now());
        }
    }

    /// Charges the tenant for legs that still run, if the event gives their request up (L1.5).
    pub(crate) fn charge_if_given_up(&mut self, event: Event) {
        if matches!(event, Event::ClientGone | Event::Deadline) {
            self.charge_given_up();
        }
    }

    /// Charges the tenant for legs that still run when their request is given up (L1.5).
    pub(crate) fn charge_given_up(&mut self) {
        let output = self.estimate.as_ref().map_or(0, WholeEstimate::tokens);
        self.account.given_up(output);
    }

    /// Corrects the booking by the answer.
    pub(crate) fn estimate_ends(&mut self, tokens: Option<u32>) {
        if let (Some(estimate), Some(booking)) = (self.estimate.take(), self.runs.answering.booking.own()) {
            estimate.ended(booking, tokens, &self.state.metrics);
            tokens.map(|tokens| booking.output_tokens(tokens));
        }
    }
}
