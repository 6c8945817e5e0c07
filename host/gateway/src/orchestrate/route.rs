//! Chooses a leg's worker, at once, after a pause or from the queue; books it and releases it.

use pointsman_orchestration::{
    AdmissionRequest, AfterRefusal, Attempts, Entry, Event, Lost, Parking, Queued, Waiting,
};
use pointsman_routing::{
    Pairing, Purpose, Query, RefusedDecision, ReservedPlace, RouteError, Routed, RouterConfigOverride,
    RoutingRequest, SlotKind,
};
use pointsman_workers::{Leg, PerLeg};
use tokio::time::Instant;

use super::{Drive, leg_run::LegBooking, plan};
use crate::{
    connectors::{RequestToken, connector_for, rooms},
    openai::{error::ApiError, generate, request::Request},
    state::State,
    telemetry::account::Account,
};

/// The result of routing a leg.
#[expect(clippy::large_enum_variant, reason = "it is taken apart where it is made")]
pub(crate) enum Found {
    /// A place for decode is reserved. Decode is routed when prefill has ended.
    Place(Option<ReservedPlace>),
    Worker(Routed),
}

impl Drive {
    pub(super) fn route_or_pause(&mut self, leg: Leg) {
        if self.attempts.is_paused() {
            self.rest_waits(None);
            return;
        }
        if !self.attempts.pause(leg) {
            self.route(leg, None);
            return;
        }
        let labels = crate::telemetry::metrics::RetryLabels { leg: leg.as_str() };
        self.state.metrics.retries.get_or_create(&labels).inc();
        self.account.waits("pause", leg);
    }

    /// Routes the leg whose wait is over.
    pub(super) fn route_again(&mut self) {
        if self.waits_for_worker() {
            return;
        }
        match self.attempts.resume() {
            Some((leg, place)) if self.attempts.is_paused() => self.try_to_end_pause(leg, place),
            Some((leg, place)) => self.route(leg, place),
            None => {}
        }
    }

    /// Chooses and books the leg's worker, once: from a hint, the session or the policy (C3). The outcome of
    /// prefill is a worker, no worker, or back-pressure, which fails at once unless there is a queue (C5).
    /// Until prefill is sent, only a place is reserved for decode (E6).
    pub(super) fn route(&mut self, leg: Leg, place: Option<Queued>) {
        if self.attempts.begin(self.legs.attempt()) {
            self.token = RequestToken::fresh();
            self.handoff = None;
            self.forget_prompt();
            (self.totals, self.given_up) = (generate::Totals::default(), None);
            self.runs.prefill.span = None;
            self.release_place();
            if let Some(cause) = self.quarantined() {
                self.runs[leg].failure = Some(cause);
                self.report(Event::Unroutable);
                return;
            }
        }
        if leg == Leg::Decode && self.gives_up_handoff() {
            return;
        }
        let Some(place) = self.enter(leg, place) else { return };
        self.look_for_missing_endpoints(leg);
        let (mut refused, begun) = (None, self.account.stage_begins());
        let is_planned = self.planned_for(leg).is_some();
        if is_planned && place.is_some() && !self.plan_holds() {
            return self.plan_refused(place, begun);
        }
        self.hold_session(leg);
        let found = self.find(leg, &mut refused);
        // What was found takes the place that was kept for the leg.
        self.others[leg] = None;
        self.account.refused(refused);
        match found {
            Ok(found) if is_planned && self.prefill_refuses() => {
                drop(found);
                self.state.queue.wake();
                self.plan_refused(place, begun);
            }
            Ok(found) => {
                self.leave_queue();
                if let Some(admission) = self.attempts.found(place.as_ref()) {
                    self.account.admitted(admission);
                }
                let event = match found {
                    Found::Place(place) => {
                        self.place = place;
                        Event::Reserved
                    }
                    Found::Worker(routed) => self.record_routed(leg, routed),
                };
                self.report(event);
            }
            Err(error) => self.not_routed(leg, error, place, begun),
        }
    }

    /// Uses the worker that was found for a stream that moves. Otherwise asks the router for the leg's
    /// worker, or for a place on one.
    fn find(&mut self, leg: Leg, refused: &mut Option<RefusedDecision>) -> Result<Found, RouteError> {
        match self.take_planned(leg) {
            Some(found) => Ok(found),
            None if self.legs.reserves() => {
                self.state.router.reserve(&self.query(leg), refused).map(Found::Place)
            }
            None => self.book_worker(leg, &self.query(leg), refused).map(Found::Worker),
        }
    }

    /// Asks the router for a leg's worker, and books it.
    pub(super) fn book_worker(
        &self,
        leg: Leg,
        query: &Query<'_>,
        refused: &mut Option<RefusedDecision>,
    ) -> Result<Routed, RouteError> {
        let (over, fallback) = match leg {
            Leg::Decode => self.state.router.decode_config(query, Purpose::Route),
            Leg::Prefill | Leg::Aggregated => (RouterConfigOverride::default(), None),
        };
        let metrics = &self.state.metrics;
        fallback.into_iter().for_each(|reason| metrics.fell_back(SlotKind::DecodeOverride, reason));
        self.state.router.route_noting(query, &over, refused)
    }

    /// Gives up a handoff whose prefill engine died or freed its blocks. Returns whether there was one.
    fn gives_up_handoff(&mut self) -> bool {
        if !self.legs.owes() {
            return false;
        }
        let died = self.candidate(Leg::Prefill).is_some_and(|candidate| candidate.worker.is_down());
        let lost = if died { Lost::PrefillDied } else { Lost::NoDecodeWorker };
        let gives_up = died || self.attempts.lease_is_over();
        if gives_up {
            let why = if died {
                "its engine died"
            } else {
                "no decode worker took it before its blocks were freed"
            };
            self.runs.answering.failure = Some(ApiError::HandoffLost(why.to_owned()));
            self.report(Event::HandoffLost(lost));
        } else if self.attempts.committed(false).is_some_and(|committed| committed.beyond_limits) {
            // A worker that joined since may take it.
            let now = self.state.registry.snapshot();
            let prefill = self.candidate(Leg::Prefill).map(pointsman_workers::Candidate::worker_id);
            if prefill.is_some_and(|prefill| now.get(prefill).is_some()) {
                self.snapshot = now;
            }
        }
        gives_up
    }

    fn not_routed(&mut self, leg: Leg, error: RouteError, mut place: Option<Queued>, begun: Option<Instant>) {
        if self.planned_for(leg).is_some() {
            return self.plan_refused(place, begun);
        }
        if self.wait_for_worker(leg, &error, &mut place) {
            return;
        }
        self.attempts.note_client(!self.legs.only_consumes());
        let state = &self.state;
        let (request, account) = (&self.routing_request, &self.account);
        let parking = parking(state, &self.request, request, account, leg);
        match self.attempts.after_refusal(leg, &error, place, &parking) {
            AfterRefusal::Wait => {
                let queued = matches!(self.attempts.waiting(), Some(Waiting::Queue(..)));
                self.account.waits(if queued { "queue" } else { "pause" }, leg);
            }
            AfterRefusal::RouteAgain => self.route(leg, None),
            AfterRefusal::GiveUp if leg == Leg::Decode && self.legs.owes() => self.not_consumed(error, begun),
            AfterRefusal::GiveUp => {
                self.leave_queue();
                let state = &self.state;
                let (event, paused) = (Attempts::unroutable(leg, &error), error.pause());
                let is_pressure = error.is_back_pressure();
                let pressure = || state.queue.pressure(&self.request.model);
                let cause = ApiError::of_refusal(error, state.settings.busy_status, pressure);
                let cause = if is_pressure { cause.of_pinned(&self.request.hints, leg) } else { cause };
                self.account.not_routed(leg, begun, cause.code());
                let run = &mut self.runs[leg];
                run.refusals.note_pause(paused, &cause);
                // On a retry, the first failure explains more than "no worker is left".
                run.failure.get_or_insert(cause);
                self.report(event);
            }
        }
    }

    /// No decode worker takes a committed handoff: on the client's terms, or at all.
    fn not_consumed(&mut self, error: RouteError, begun: Option<Instant>) {
        if self.legs.only_consumes() {
            self.report(Event::HandoffLost(Lost::NoDecodeWorker));
            return;
        }
        let cause = match error {
            RouteError::NoWorker { text, .. } => ApiError::HandoffLost(text),
            other => ApiError::of_route(other, self.state.settings.busy_status),
        };
        self.account.not_routed(Leg::Decode, begun, cause.code());
        // That engines refused the request explains more.
        let failure = &mut self.runs.answering.failure;
        let is_refused = matches!(failure, Some(ApiError::Engine { .. })) || self.attempts.has_declined();
        *failure = failure.take().filter(|_| is_refused).or(Some(cause));
        self.report(Event::Unroutable);
    }

    /// Asks the queue whether the leg may be routed. Returns the place in the queue that the request has;
    /// `None` if it waits, or it was refused.
    #[expect(clippy::option_option, reason = "an admitted request may have had no place")]
    pub(super) fn enter(&mut self, leg: Leg, place: Option<Queued>) -> Option<Option<Queued>> {
        let (state, request) = (&self.state, &self.routing_request);
        let parking = parking(state, &self.request, request, &self.account, leg);
        match self.attempts.enter(leg, place, &parking) {
            Entry::Route(place) => {
                if place.is_some() {
                    self.see_new_workers();
                }
                return Some(place);
            }
            Entry::Wait => self.account.waits("queue", leg),
            refusal @ (Entry::Refused | Entry::LostPlace) => {
                let lost_place = matches!(refusal, Entry::LostPlace);
                state.metrics.displaced.inc_by(lost_place.into());
                let pressure = state.queue.pressure(&self.request.model);
                let cause = ApiError::queue_full(state.settings.busy_status, &pressure, lost_place);
                self.leave_queue();
                self.runs[leg].failure = Some(cause);
                self.report(Event::Unroutable);
            }
        }
        None
    }

    /// Has a request that waited in the queue see workers that joined, unless a leg has its worker already.
    fn see_new_workers(&mut self) {
        let PerLeg { prefill, answering } = &self.runs;
        if prefill.candidate.is_none() && answering.candidate.is_none() && self.place.is_none() {
            self.snapshot = self.state.registry.snapshot();
        }
    }

    /// Observes how long the request waited in the queue, when it leaves the queue.
    pub(super) fn leave_queue(&mut self) {
        if let Some(waited) = self.attempts.leave_queue() {
            self.account.left_queue(waited);
        }
    }

    fn record_routed(&mut self, leg: Leg, routed: Routed) -> Event {
        let (candidate, cached) = (routed.candidate, routed.receipt.cached_blocks);
        self.account.decided(routed.receipt, &self.routing_request);
        let event = match leg {
            Leg::Prefill => {
                self.engine_id = candidate.worker.engine_id(candidate.rank);
                self.rooms = rooms(self.request.items(), candidate.worker.spec().dp_size, candidate.rank);
                self.executor.traits(&candidate).map_or(Event::Unroutable, Event::PrefillRouted)
            }
            Leg::Decode => Event::Routed,
            Leg::Aggregated => {
                self.legs.note_abortable(connector_for(candidate.worker.spec()).abortable());
                Event::Routed
            }
        };
        self.state.programs.routed(&mut self.routing_request, &candidate, cached);
        let run = &mut self.runs[leg];
        (run.candidate, run.booking) = (Some(candidate), LegBooking::Own(routed.booking));
        run.record = Some(routed.record);
        self.booked_at = Instant::now();
        if event == Event::Routed {
            // The booking takes its place.
            self.release_place();
        }
        event
    }

    fn query(&self, leg: Leg) -> Query<'_> {
        let other = self.other_leg(leg);
        let question = plan::question(&self.state, &self.request, &self.routing_request, &self.snapshot, leg);
        let only_consumes = self.legs.only_consumes();
        let pairing = match leg {
            Leg::Decode => Pairing {
                is_first: other.is_none(),
                reserved: self.reserved(leg),
                committed: self.attempts.committed(only_consumes),
                ..question.pairing
            },
            _ => Pairing { reserved: self.reserved(leg), ..question.pairing },
        };
        Query {
            pin: question.pin.filter(|_| pairing.committed.is_none() || !only_consumes),
            pairing,
            attempt: self.attempts.earlier(),
            explain: self.explain || self.account.is_traced(),
            other_leg: other,
            queue_us: u32::try_from(self.attempts.queued().as_micros()).unwrap_or(u32::MAX),
            planned: self.planned_for(leg),
            tried: self.attempts.tried(),
            spared: self.attempts.spared(leg),
            lacking: self.second_opinion.lacking(),
            request_id: Some(&self.account.request_id),
            ..question
        }
    }

    /// When the bookings expire unless a token arrives before (F4). A call in flight has limits of its own,
    /// and the worker works on it until then.
    pub(crate) fn stale_at(&self) -> Option<Instant> {
        let PerLeg { prefill, answering } = &self.runs;
        let is_booked = answering.booking.is_booked() || prefill.booking.is_booked();
        let is_called = answering.call.is_some() || prefill.call.is_some();
        let since = || self.account.last_life().max(self.booked_at);
        (is_booked && !is_called).then(|| since() + self.state.settings.booking_ttl)
    }

    /// Releases bookings that had no token for too long. The request continues, and no longer counts as load.
    pub(crate) fn expire(&mut self) {
        self.state.metrics.expired_bookings.inc();
        self.free(Leg::Prefill);
        self.free(Leg::Decode);
    }

    /// Releases a leg's booking and wakes the queue.
    pub(super) fn free(&mut self, leg: Leg) {
        if self.runs[leg].booking.release() {
            self.state.queue.wake();
        }
    }

    /// Releases the place that is reserved for decode, and wakes the queue.
    pub(super) fn release_place(&mut self) {
        if self.place.take().is_some() {
            self.state.queue.wake();
        }
    }
}

/// The request as the queue sees it.
pub(super) fn parking<'a>(
    state: &'a State,
    request: &'a Request,
    routing_request: &'a RoutingRequest,
    account: &Account,
    leg: Leg,
) -> Parking<'a> {
    let pinned = |leg| request.hints.pinned(leg);
    // A prefill waits for the decode worker that is named (E6.3), and others do not wait behind it.
    let pinned_decode = (leg == Leg::Prefill).then(|| pinned(Leg::Decode)).flatten();
    let admission_request = AdmissionRequest {
        model: &request.model,
        request: routing_request,
        pin: pinned(leg).or(pinned_decode).map(|(worker, _)| worker),
        arrived: account.received(),
        bytes: account.body_bytes(),
    };
    Parking { queue: &state.queue, admission_request, timeout: state.settings.queue_timeout }
}
