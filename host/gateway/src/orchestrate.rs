//! The driver: performs the actions of the leg state machine and reports events to it.
//!
//! One future drives a request up to the head of its answer; [`crate::orchestrate::relay`] takes over from
//! there. Both hold the same [`Drive`] and report events to the same state machine. Bookings, calls in flight
//! and the handoff are owned here.

use std::{collections::VecDeque, sync::Arc};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::Response;
use pointsman_orchestration::{Action, Attempts, Event, Legs, PrefillTraits};
use pointsman_routing::{CandidateId, ReservedPlace, RoutingRequest};
use pointsman_workers::{Booking, Candidate, DpRank, Leg, Snapshot, WorkerId};
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    connectors::{RequestToken, Target, connector_for},
    openai::error::ApiError,
    openai::request::Request,
    openai::sse::Usage,
    openai::trace_context::Span,
    state::State,
    telemetry::account::Account,
    upstream::{Body, CallError, Upstream},
};

pub(crate) mod after_disconnect;
pub(crate) mod availability;
pub(crate) mod client_connection;
mod drain_prefill;
mod lateness;
mod next_event;
mod outcome;
#[cfg(feature = "ext-proc")]
pub(crate) mod passing_answer;
mod pending_head;
#[cfg(feature = "ext-proc")]
pub(crate) mod pick;
mod plan;
mod prefill_call;
pub(crate) mod preview;
pub(crate) mod realtime;
mod refusals;
pub(crate) mod relay;
mod respond;
mod route;
mod send;
pub(crate) mod stored;
mod whole_estimate;

use next_event::Next;
pub(crate) use plan::{RequestPlan, Unplanned, no_worker_registered, plan};
use prefill_call::{PrefillBooking, PrefillDone};
use refusals::Refusals;
use relay::Answer;
use whole_estimate::WholeEstimate;

/// A request on its way.
pub(crate) struct Drive {
    pub(crate) state: Arc<State>,
    upstream: Upstream,
    pub(crate) request: Arc<Request>,
    pub(crate) legs: Legs,
    pub(crate) account: Box<Account>,
    pub(crate) decode: Upstreaming<DecodeHead>,
    pub(crate) deadline: Instant,
    /// When the request was ready to be routed: a booking cannot be older.
    begun: Instant,
    pub(crate) gone: CancellationToken,
    /// Cached prompt tokens that the prefill leg reported. The decode leg's own number is wrong then.
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) explain: bool,
    routing_request: RoutingRequest,
    snapshot: Arc<Snapshot>,
    queue: VecDeque<Action>,
    prefill: Upstreaming<PrefillDone>,
    prefill_booking: PrefillBooking,
    /// The place that is kept for decode while prefill runs.
    place: Option<ReservedPlace>,
    /// The head of a decode answer that waits for prefill.
    pending_head: Option<Response<Body>>,
    /// The span of the leg that failed last.
    failed_span: Option<Span>,
    /// The prefill worker that failed last, and how; `None` if it was logged, or another one succeeded.
    failed_prefill: Option<(WorkerId, &'static str)>,
    token: RequestToken,
    rooms: Vec<u64>,
    engine_id: Option<String>,
    handoff: Option<String>,
    attempts: Attempts,
    /// The whole answer of a request that is not streamed.
    whole: Option<Response<Bytes>>,
    saw_gone: bool,
    /// Whether the worker of a stored response was noted.
    stored: bool,
    planned: Option<CandidateId>,
    /// Cancelled when no leg runs; the first abort makes it.
    over: Option<CancellationToken>,
    /// Cancelled when the prefill call ended; the call makes it.
    prefill_over: Option<CancellationToken>,
    /// Progress of an answer that is not streamed.
    estimate: Option<WholeEstimate>,
}

/// One leg: its worker, booking, call in flight, and failure.
pub(crate) struct Upstreaming<T> {
    pub(crate) candidate: Option<Candidate>,
    pub(crate) booking: Option<Booking>,
    call: Option<BoxFuture<'static, Result<T, CallError>>>,
    /// When the call was sent.
    pub(crate) sent: Option<Instant>,
    pub(crate) failure: Option<ApiError>,
    refusals: Refusals,
    /// The span of the call that was sent last.
    span: Option<Span>,
}

/// The answer of a decode or single leg: its head with a stream to come, or the whole of it.
pub(crate) enum DecodeHead {
    Stream(Response<Body>),
    Whole(Response<Bytes>),
}

impl<T> Default for Upstreaming<T> {
    fn default() -> Self {
        let refusals = Refusals::default();
        Self { candidate: None, booking: None, call: None, sent: None, failure: None, refusals, span: None }
    }
}

/// A request that is parsed, measured and planned.
pub(crate) struct PlannedRequest {
    pub(crate) request: Arc<Request>,
    pub(crate) routing_request: RoutingRequest,
    pub(crate) snapshot: Arc<Snapshot>,
    pub(crate) plan: RequestPlan,
    /// Whether the client asked for the decisions.
    pub(crate) explain: bool,
}

/// Serves a planned request. The future outlives its client (see [`crate::orchestrate::after_disconnect`]).
pub(crate) async fn drive(
    state: Arc<State>,
    upstream: Upstream,
    planned: Box<PlannedRequest>,
    account: Box<Account>,
    gone: CancellationToken,
) -> Response<Answer> {
    let mut drive = Drive::new(state, upstream, planned, account, gone);
    loop {
        while let Some(action) = drive.queue.pop_front() {
            if let Some(answer) = drive.answer(action) {
                return drive.respond(answer);
            }
        }
        if drive.legs.is_finished() {
            // Only a client that left gets no answer.
            return ApiError::ClientClosed.response(&drive.account.request_id).map(Answer::whole);
        }
        if let Some(head) = drive.step().await {
            if drive.queue.front() == Some(&Action::Relay) {
                drive.queue.pop_front();
                return relay::stream(drive, head);
            }
            // The client left, but the first token must arrive before decode may be cancelled.
            Box::pin(relay::drain(drive, head)).await;
            return ApiError::ClientClosed.response("").map(Answer::whole);
        }
    }
}

impl Drive {
    fn new(
        state: Arc<State>,
        upstream: Upstream,
        planned: Box<PlannedRequest>,
        account: Box<Account>,
        gone: CancellationToken,
    ) -> Box<Self> {
        let PlannedRequest { request, routing_request, snapshot, plan, explain } = *planned;
        let (legs, actions) = Legs::new(plan.shape, plan::retry_policy(&state, &request, &snapshot));
        let deadline = account.started() + state.settings.request_timeout;
        Box::new(Self {
            state,
            upstream,
            begun: Instant::now(),
            request,
            legs,
            account,
            decode: Upstreaming::default(),
            deadline,
            gone,
            cached_tokens: None,
            explain,
            routing_request,
            snapshot,
            queue: actions.into_iter().collect(),
            prefill: Upstreaming::default(),
            prefill_booking: PrefillBooking::default(),
            place: None,
            pending_head: None,
            failed_span: None,
            failed_prefill: None,
            token: RequestToken::fresh(),
            rooms: Vec::new(),
            engine_id: None,
            handoff: None,
            attempts: Attempts::default(),
            whole: None,
            saw_gone: false,
            stored: false,
            planned: plan.planned,
            over: None,
            prefill_over: None,
            estimate: None,
        })
    }

    /// Reports an event to the state machine and queues the actions that follow.
    pub(crate) fn report(&mut self, event: Event) {
        self.queue.extend(self.legs.on(event));
        if event == Event::Deadline && !self.legs.is_finished() {
            self.extend_deadline();
        }
    }

    /// Gives engines time for what they still need, after the client has its answer: a prefill in flight may
    /// end, and its handoff is consumed.
    fn extend_deadline(&mut self) {
        let prefill =
            if self.prefill_runs() { self.state.settings.leg_timeouts.prefill_head } else { Duration::ZERO };
        let lease = self.prefill.candidate.as_ref().map(|candidate| candidate.worker.spec().handoff_lease());
        self.deadline = Instant::now() + prefill + lease.unwrap_or_default();
        self.release_place();
    }

    /// Waits for the next event and reports it. Returns the head of an answer that is a stream.
    async fn step(&mut self) -> Option<Response<Body>> {
        match self.next().await {
            Next::Event(event) => self.report(event),
            Next::Again => self.route_again(),
            Next::Stale => self.expire(),
            Next::Nothing => {}
            Next::Stream(head) => match self.take_head(head).await {
                Ok(head) => {
                    self.report(Event::Head);
                    return Some(head);
                }
                Err(event) => self.report(event),
            },
        }
        None
    }

    /// Does what engines still need, after the client has its answer.
    async fn go_on(mut self: Box<Self>) {
        loop {
            while let Some(action) = self.queue.pop_front() {
                self.perform(action);
            }
            if self.legs.is_finished() {
                return;
            }
            if let Some(head) = self.step().await {
                Box::pin(relay::drain(self, head)).await;
                return;
            }
        }
    }

    /// Returns the next action to perform.
    pub(crate) fn next_action(&mut self) -> Option<Action> {
        self.queue.pop_front()
    }

    /// Returns the leg that answers the client.
    pub(crate) fn answering(&self) -> Leg {
        self.legs.answering()
    }

    /// Whether the prefill leg is in flight.
    pub(crate) fn prefill_runs(&self) -> bool {
        self.prefill.call.is_some()
    }

    /// Performs an action that needs no answer to the client.
    pub(crate) fn perform(&mut self, action: Action) {
        match action {
            Action::Reserve => self.route(Leg::Decode, None),
            Action::Route(leg) => self.route_or_pause(leg),
            Action::FallBackToLocal => {
                self.state.metrics.handoff("local_fallback");
                self.log_failed_prefill(true);
                // It explains more than "no worker", if none prefills locally now.
                self.decode.failure = self.prefill.failure.take();
                self.decode.refusals = std::mem::take(&mut self.prefill.refusals);
            }
            Action::Send(Leg::Prefill) => self.send_prefill(),
            Action::Send(_) => self.send_decode(false),
            Action::SendToConsume => self.send_decode(true),
            Action::Cancel(Leg::Prefill) => {
                self.account.leg_cancelled(Leg::Prefill);
                self.prefill.call = None;
                self.free(Leg::Prefill);
            }
            Action::Cancel(leg) => {
                self.account.leg_cancelled(leg);
                self.decode.call = None;
                self.pending_head = None;
                self.free(leg);
            }
            Action::Abort(leg) => self.abort(leg),
            Action::Lose(lost) => {
                self.state.metrics.handoff(lost.as_str());
                let request = &self.account.request_id;
                tracing::warn!(
                    request,
                    reason = lost.as_str(),
                    "handoff lost: no decode worker used the result of its prefill"
                );
            }
            Action::Finish => self.finish(),
            // Actions on the answer: the driver or the relay performs them.
            Action::Relay
            | Action::Hold
            | Action::Release
            | Action::AnswerPrefill
            | Action::Fail(_)
            | Action::FailDeadline => {}
        }
    }

    /// Records usage, with the prefill leg's cached tokens where the decode leg's number is wrong.
    pub(crate) fn usage(&mut self, usage: Usage) {
        let own = usage.cached_tokens.filter(|_| self.decode_knows_cached_tokens());
        self.account.usage(Usage { cached_tokens: self.cached_tokens.or(own), ..usage });
    }

    /// Returns whether the engine that answers knows how much of the prompt was cached.
    pub(crate) fn decode_knows_cached_tokens(&self) -> bool {
        let candidate = self.decode.candidate.as_ref().filter(|_| self.legs.answering() == Leg::Decode);
        candidate.is_none_or(|candidate| connector_for(candidate.worker.spec()).decode_knows_cached_tokens())
    }

    fn finish(&mut self) {
        if !self.attempts.queued().is_zero() {
            self.account.queued(self.attempts.queued());
        }
        if let Some(over) = &self.over {
            over.cancel();
        }
        self.attempts.stop();
        self.prefill.call = None;
        self.decode.call = None;
        self.pending_head = None;
        self.free(Leg::Prefill);
        self.free(Leg::Decode);
        self.release_place();
        if self.request.hints.session_control.is_some_and(|control| control.close)
            && let Some(session) = self.routing_request.session_hash
        {
            self.state.sessions.close(session);
        }
    }

    /// Removes from an answer what its id contains besides the attempt's id; `None` when there is nothing.
    pub(crate) fn hide_ids(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let candidate = self.decode.candidate.as_ref()?;
        let detail = connector_for(candidate.worker.spec()).id_detail(&self.request)?;
        relay::hide_ids(bytes, self.token, detail)
    }
}

pub(crate) fn id_of(candidate: &Candidate) -> CandidateId {
    (candidate.worker.id(), candidate.rank)
}

fn target(candidate: &Candidate) -> Target<'_> {
    let rank: DpRank = candidate.rank;
    Target { spec: candidate.worker.spec(), rank }
}

fn traits(candidate: &Candidate) -> Option<PrefillTraits> {
    let spec = candidate.worker.spec();
    let connector = connector_for(spec);
    Some(PrefillTraits {
        handoff: connector.handoff()?,
        cancellable: spec.prefill_cancellable,
        abortable: connector.abortable(),
    })
}
