//! The driver of requests: of those that clients send, those that Envoy carries, and realtime sessions.
//!
//! `plan` decides on one worker or two. Then `Legs` decides what happens next, and a `Drive` performs its
//! actions and reports events to it. The way of a request, from top to bottom:
//!
//! | step | where |
//! | --- | --- |
//! | perform actions and wait for events until the answer begins | `Drive::run` |
//! | choose a leg's worker and book it | `route` |
//! | send the leg: call its engine, upgrade a connection, or hand it to the proxy | `send` |
//! | abort the leg and close its connection | `abort` |
//! | wait for the first of what may come next | `next_event` |
//! | read the beginning of an answer, or a whole one | `answer` |
//! | tell a leg's outcome to its worker and record, and make an event of it | `outcome`, `failure` |
//! | pass the answer on | `respond`, `relay`; `proxied` for Envoy, `realtime` |
//!
//! `waits` is about requests and streams that wait for a worker, `affinity` about what one worker keeps for
//! later requests, `client` about a client that does not read or leaves.

use std::{collections::VecDeque, sync::Arc};

use bytes::Bytes;
use http::Response;
use pointsman_orchestration::{Action, Attempts, Event, Legs, PausableStream, SessionHolds};
use pointsman_routing::{CandidateId, ReservedPlace, RoutingRequest};
use pointsman_workers::{Candidate, Leg, OpenHandoff, PerLeg, Snapshot, Worker, WorkerId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    connectors::{RequestToken, Target},
    openai::{chunk::Reason, continuation, error::ApiError, generate, request::Request, trace_context::Span},
    state::State,
    telemetry::account::Account,
    upstream::Upstream,
};

mod abort;
pub(crate) mod affinity;
mod answer;
pub(crate) mod availability;
pub(crate) mod client;
mod executor;
mod failure;
mod leg_run;
mod local_plan;
mod next_event;
mod outcome;
mod plan;
mod prefill_call;
pub(crate) mod preview;
#[cfg(feature = "ext-proc")]
pub(crate) mod proxied;
pub(crate) mod realtime;
pub(crate) mod relay;
mod reported_usage;
mod respond;
mod route;
mod send;
pub(crate) mod waits;

use answer::whole_estimate::WholeEstimate;
use executor::{Ending, Executor, Reached};
use failure::{broken_handoff::BrokenHandoff, second_opinion::SecondOpinion};
use leg_run::LegRun;
use next_event::Reported;
pub(crate) use plan::{PlannedRequest, RequestPlan, Unplanned, no_worker_registered, plan};
use relay::Answer;
pub(crate) use respond::{DECISION, tell_decisions};
use waits::{asleep::OtherWorkers, planned_move::PlannedMove};

/// A request on its way. When it is dropped, everything that it holds is released.
pub(crate) struct Drive {
    pub(crate) state: Arc<State>,
    upstream: Upstream,
    executor: Executor,
    pub(crate) request: Arc<Request>,
    pub(crate) legs: Legs,
    pub(crate) account: Box<Account>,
    pub(crate) runs: PerLeg<LegRun>,
    pub(crate) deadline: Instant,
    /// When a leg was booked last, or the request was ready to be routed.
    booked_at: Instant,
    pub(crate) gone: CancellationToken,
    /// Cached prompt tokens that the prefill leg reported. The decode leg's own number is wrong then.
    pub(crate) cached_tokens: Option<u32>,
    /// Prompt tokens that the prefill engine wrote into its cache, if it reports them.
    pub(crate) created_tokens: Option<u32>,
    /// From what the stream may be continued, or why it never is (I14).
    form: Result<continuation::Form, Reason>,
    /// The request for the rest of an answer whose engine failed.
    rest: Option<Box<continuation::Rest>>,
    /// Whether the answering leg was sent and no token of it has arrived.
    awaits_token: bool,
    explain: bool,
    routing_request: RoutingRequest,
    snapshot: Arc<Snapshot>,
    queue: VecDeque<Action>,
    /// The head of a stream came with a part of the answer: whether that comes with the first output.
    began_with_head: Option<bool>,
    /// The place that is kept for decode while prefill runs.
    place: Option<ReservedPlace>,
    /// The span of the leg that failed last.
    failed_span: Option<Span>,
    /// The prefill worker that failed last, and how; `None` if it was logged, or another one succeeded.
    failed_prefill: Option<(WorkerId, &'static str)>,
    broken_handoff: Option<BrokenHandoff>,
    /// Workers that broke the connection of a leg, and when.
    broke: Vec<(Arc<Worker>, Instant)>,
    token: RequestToken,
    rooms: Vec<u64>,
    engine_id: Option<String>,
    handoff: Option<String>,
    /// Tells the prefill worker that its handoff is not consumed yet.
    open_handoff: Option<OpenHandoff>,
    attempts: Attempts,
    second_opinion: SecondOpinion,
    /// The leg that failed last, if its engine lacks the model.
    missing_at: Option<Leg>,
    /// The failure of a leg that is reported after other engines with the model were looked for.
    held_event: Option<(Leg, Event)>,
    /// The whole answer of a request that is not streamed.
    whole: Option<Response<Bytes>>,
    reported: Reported,
    /// Whether the worker of a stored response was noted.
    stored: bool,
    /// Worker of a local plan.
    planned: Option<CandidateId>,
    session_holds: SessionHolds,
    /// Where each leg may go if its engine falls asleep.
    others: PerLeg<Option<Arc<OtherWorkers>>>,
    /// Workers for the rest of a stream that is about to leave its own.
    planned_move: Option<Box<PlannedMove>>,
    /// Its part in making room for others, from its first token on.
    pausing: Option<PausableStream>,
    /// Cancelled when no leg runs; the first abort makes it.
    over: Option<CancellationToken>,
    /// Progress of an answer that is not streamed.
    estimate: Option<WholeEstimate>,
    /// Usage of a batch of `/generate` so far.
    totals: generate::Totals,
    /// End of a message without a stop reason, if a later event has none.
    given_up: Option<&'static str>,
    released: bool,
}

/// Serves a planned request. The future outlives its client (see [`client::after_disconnect`]).
pub(crate) async fn drive(
    state: Arc<State>,
    upstream: Upstream,
    planned: Box<PlannedRequest>,
    account: Box<Account>,
    gone: CancellationToken,
) -> Response<Answer> {
    let mut drive = Drive::new(state, upstream, Executor::Calls, planned, account, gone);
    match drive.run().await {
        Reached::Ending(ending) => drive.respond(ending),
        Reached::Stream(head) if drive.next_is(Action::Relay) => relay::stream(drive, head),
        Reached::Stream(head) => {
            // The client left, but the first token must arrive before decode may be cancelled.
            Box::pin(relay::drain(drive, head)).await;
            ApiError::ClientClosed.response("").map(Answer::whole)
        }
        // Only another executor reaches anything else.
        other => drive.respond(Ending::Failed(other.error())),
    }
}

impl Drive {
    fn new(
        state: Arc<State>,
        upstream: Upstream,
        executor: Executor,
        planned: Box<PlannedRequest>,
        account: Box<Account>,
        gone: CancellationToken,
    ) -> Box<Self> {
        let PlannedRequest { request, routing_request, snapshot, plan, worker_wait, explain } = *planned;
        let mut policy = plan::retry_policy(&state, &request, &snapshot);
        if executor.is_proxy() {
            (policy.retries, policy.continuations) = (0, 0);
        }
        let form = relay::form_of(&state, &request, &routing_request, &mut policy, &snapshot);
        let (legs, actions) = plan.legs(policy);
        let deadline = account.started() + state.settings.request_timeout;
        Box::new(Self {
            state,
            upstream,
            executor,
            booked_at: account.started(),
            request,
            legs,
            account,
            runs: PerLeg::default(),
            deadline,
            gone,
            cached_tokens: None,
            created_tokens: None,
            form,
            rest: None,
            awaits_token: false,
            explain,
            routing_request,
            snapshot,
            queue: actions.into_iter().collect(),
            began_with_head: None,
            place: None,
            failed_span: None,
            failed_prefill: None,
            broken_handoff: None,
            broke: Vec::new(),
            token: RequestToken::fresh(),
            rooms: Vec::new(),
            engine_id: None,
            handoff: None,
            open_handoff: None,
            attempts: Attempts::after_wait(worker_wait),
            second_opinion: SecondOpinion::default(),
            missing_at: None,
            held_event: None,
            whole: None,
            totals: generate::Totals::default(),
            given_up: None,
            reported: Reported::default(),
            stored: false,
            planned: plan.planned,
            session_holds: SessionHolds::default(),
            planned_move: None,
            others: PerLeg::default(),
            pausing: None,
            over: None,
            estimate: None,
            released: false,
        })
    }

    /// Performs actions and waits for events until the answer begins, or the request failed.
    async fn run(&mut self) -> Reached {
        loop {
            while let Some(action) = self.next_action() {
                if let Some(ending) = self.answer(action) {
                    return Reached::Ending(ending);
                }
            }
            #[cfg(feature = "ext-proc")]
            if let Executor::Proxy(handover) = &mut self.executor
                && let Some(handover) = handover.take()
            {
                return Reached::HandedOver(handover);
            }
            if self.legs.is_finished() {
                // Only a client that left gets no answer.
                return Reached::Ending(Ending::Failed(ApiError::ClientClosed));
            }
            if let Some(reached) = self.step().await {
                return reached;
            }
        }
    }

    /// Reports an event to the state machine and queues the actions that follow.
    pub(crate) fn report(&mut self, event: Event) {
        self.charge_if_given_up(event);
        if event == Event::Deadline && self.runs.prefill.answers() {
            self.legs.note_prefill_answers();
        }
        self.queue.extend(self.legs.on(event));
        self.open_handoff = self.open_handoff.take().filter(|_| self.legs.has_open_handoff());
        if event == Event::Deadline && !self.legs.is_finished() {
            self.extend_deadline();
        }
    }

    /// Returns the next action to perform.
    pub(crate) fn next_action(&mut self) -> Option<Action> {
        self.queue.pop_front()
    }

    /// Takes the next action if it is this one.
    fn next_is(&mut self, action: Action) -> bool {
        self.queue.pop_front_if(|next| *next == action).is_some()
    }

    /// Returns the leg that answers the client.
    pub(crate) fn answering(&self) -> Leg {
        self.legs.answering()
    }

    /// Returns the worker that was chosen for a leg.
    pub(crate) fn candidate(&self, leg: Leg) -> Option<&Candidate> {
        self.runs[leg].candidate.as_ref()
    }

    /// The other leg's worker that a leg is routed for. The routing record of decode names the prefill worker
    /// [C10]. If decode was chosen first, it stays booked [D5].
    fn other_leg(&self, leg: Leg) -> Option<CandidateId> {
        let other = leg.partner().map(|partner| &self.runs[partner]);
        let other = other.filter(|run| leg == Leg::Decode || run.booking.is_booked());
        other.and_then(|run| run.candidate.as_ref()).map(id_of)
    }

    /// Whether a prefill call is in flight.
    pub(crate) fn prefill_runs(&self) -> bool {
        self.runs.prefill.call.is_some()
    }

    /// Performs an action that needs no answer to the client.
    pub(crate) fn perform(&mut self, action: Action) {
        match action {
            Action::Reserve => self.route(Leg::Decode, None),
            Action::Route(leg) => self.route_or_pause(leg),
            Action::FallBackToLocal => {
                self.state.metrics.handoff("local_fallback");
                self.log_failed_prefill(true);
                // It explains more than "no worker", if none prefills locally now. A broken handoff is the
                // failure of its decode leg.
                let PerLeg { prefill, answering } = &mut self.runs;
                answering.failure = answering.failure.take().or(prefill.failure.take());
                answering.refusals = std::mem::take(&mut prefill.refusals);
            }
            Action::Send(leg) => self.send(leg, false),
            Action::SendToConsume => self.send(Leg::Decode, true),
            Action::Cancel(leg) => {
                self.account.leg_cancelled(leg);
                self.stop(leg);
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
            Action::Finish => self.release(),
            // The code that passes the answer on performs these actions.
            Action::Relay
            | Action::Continue
            | Action::Hold
            | Action::Release
            | Action::AnswerPrefill
            | Action::Fail(_)
            | Action::FailDeadline => {}
        }
    }

    /// Releases everything that is left, once.
    fn release(&mut self) {
        if std::mem::replace(&mut self.released, true) {
            return;
        }
        self.leave_queue();
        self.account.queued(self.attempts.queued());
        if let Some(over) = &self.over {
            over.cancel();
        }
        self.attempts.stop();
        (self.pausing, self.open_handoff) = (None, None);
        for leg in [Leg::Prefill, Leg::Decode] {
            drop(self.runs[leg].stop());
            self.free(leg);
        }
        self.release_place();
        self.leave_session();
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        self.charge_given_up();
        self.release();
    }
}

pub(crate) fn id_of(candidate: &Candidate) -> CandidateId {
    (candidate.worker.id(), candidate.rank)
}

fn target(candidate: &Candidate) -> Target<'_> {
    Target { spec: candidate.worker.spec(), rank: candidate.rank }
}
