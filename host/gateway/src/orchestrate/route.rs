//! Chooses a leg's worker, at once, after a pause or from the queue; books it and releases it.

use pointsman_orchestration::{AfterRefusal, Entrant, Entry, Event, Parking, Queued, Waiting};
use pointsman_routing::{Purpose, Query, RouteError, Routed, RouterConfigOverride, RoutingRequest, SlotKind};
use pointsman_workers::Leg;
use tokio::time::Instant;

use super::{Drive, id_of, plan, traits};
use crate::{
    connectors::{RequestToken, rooms},
    openai::error::ApiError,
    openai::request::Request,
    state::State,
    telemetry::account::Account,
};

impl Drive {
    pub(super) fn route_or_pause(&mut self, leg: Leg) {
        if !self.attempts.pause(leg) {
            self.route(leg, None);
            return;
        }
        let labels = crate::telemetry::metrics::ReasonLabels { reason: leg.as_str() };
        self.state.metrics.retries.get_or_create(&labels).inc();
        self.account.waits("pause", leg);
    }

    /// Routes the leg whose wait is over.
    pub(super) fn route_again(&mut self) {
        if let Some((leg, place)) = self.attempts.resume() {
            self.route(leg, place);
        }
    }

    /// Chooses and books the leg's worker, once: from a hint, the session or the policy (C3). The outcome of
    /// prefill is a worker, no worker, or back-pressure, which fails at once unless there is a queue (C5).
    fn route(&mut self, leg: Leg, place: Option<Queued>) {
        if self.attempts.begin(self.legs.attempt()) {
            self.token = RequestToken::fresh();
            self.handoff = None;
            self.prefill_span = None;
            if let Some(cause) = self.quarantined() {
                let failure =
                    if leg == Leg::Prefill { &mut self.prefill.failure } else { &mut self.decode.failure };
                *failure = Some(cause);
                self.report(Event::Unroutable);
                return;
            }
        }
        let Some(place) = self.enter(leg, place) else { return };
        let state = self.state.clone();
        let query = self.query(leg);
        let over = if leg == Leg::Decode {
            let (over, fallback) = state.router.decode_config(&query, Purpose::Route);
            fallback.into_iter().for_each(|reason| state.metrics.fell_back(SlotKind::DecodeOverride, reason));
            over
        } else {
            RouterConfigOverride::default()
        };
        let (mut refused, begun) = (None, Instant::now());
        let routed = state.router.route_noting(&query, &over, &mut refused);
        self.account.refused(refused);
        match routed {
            Ok(routed) => {
                if let Some(admission) = self.attempts.found(place.as_ref()) {
                    self.account.admitted(admission);
                }
                let event = self.routed(leg, routed);
                self.report(event);
            }
            Err(error) => self.not_routed(leg, error, place, begun),
        }
    }

    fn not_routed(&mut self, leg: Leg, error: RouteError, place: Option<Queued>, begun: Instant) {
        let state = &self.state;
        let (request, account) = (&self.routing_request, &self.account);
        let parking = parking(state, &self.request, request, account, leg);
        match self.attempts.after_refusal(leg, &error, place, self.handoff.is_some(), &parking) {
            AfterRefusal::Wait => {
                let queued = matches!(self.attempts.waiting(), Some(Waiting::Queue(..)));
                self.account.waits(if queued { "queue" } else { "pause" }, leg);
            }
            AfterRefusal::RouteAgain => self.route(leg, None),
            AfterRefusal::GiveUp => {
                let failure =
                    if leg == Leg::Prefill { &mut self.prefill.failure } else { &mut self.decode.failure };
                // On a retry, the first failure explains more than "no worker is left".
                let cause = ApiError::of_route(error, state.settings.busy_status);
                let cause = cause.retried_after(state.queue.retry_after());
                self.account.not_routed(leg, begun, cause.code());
                failure.get_or_insert(cause);
                self.report(Event::Unroutable);
            }
        }
    }

    /// Asks the queue whether the leg may be routed. Returns the place in the queue that the request has;
    /// `None`: it waits, or it was refused.
    #[expect(clippy::option_option, reason = "an admitted request may have had no place")]
    fn enter(&mut self, leg: Leg, place: Option<Queued>) -> Option<Option<Queued>> {
        let (state, request) = (&self.state, &self.routing_request);
        let parking = parking(state, &self.request, request, &self.account, leg);
        match self.attempts.enter(leg, place, &parking) {
            Entry::Route(place) => return Some(place),
            Entry::Wait => self.account.waits("queue", leg),
            Entry::Refused => {
                let failure =
                    if leg == Leg::Prefill { &mut self.prefill.failure } else { &mut self.decode.failure };
                let retry_after = state.queue.retry_after();
                *failure = Some(ApiError::queue_full(state.settings.busy_status, retry_after));
                self.report(Event::Unroutable);
            }
        }
        None
    }

    fn routed(&mut self, leg: Leg, routed: Routed) -> Event {
        let candidate = routed.candidate;
        self.account.decided(routed.receipt, &self.routing_request);
        if leg != Leg::Prefill {
            (self.decode.candidate, self.decode.booking) = (Some(candidate), Some(routed.booking));
            return Event::Routed;
        }
        self.engine_id = candidate.worker.engine_id(candidate.rank);
        self.rooms = rooms(self.request.items(), candidate.worker.spec().dp_size, candidate.rank);
        let traits = traits(&candidate);
        (self.prefill.candidate, self.prefill.booking) = (Some(candidate), Some(routed.booking));
        traits.map_or(Event::Unroutable, Event::PrefillRouted)
    }

    fn query(&self, leg: Leg) -> Query<'_> {
        let other = match leg {
            // The routing record names the prefill worker [C10].
            Leg::Decode => self.prefill.candidate.as_ref(),
            // Decode was chosen first and stays booked [D5].
            Leg::Prefill => self.decode.candidate.as_ref().filter(|_| self.decode.booking.is_some()),
            Leg::Aggregated => None,
        };
        let question = plan::question(&self.state, &self.request, &self.routing_request, &self.snapshot, leg);
        Query {
            attempt: self.attempts.earlier(),
            explain: self.explain || self.account.is_traced(),
            other_leg: other.map(id_of),
            queue_us: u32::try_from(self.attempts.queued().as_micros()).unwrap_or(u32::MAX),
            planned: self.planned.filter(|_| leg == Leg::Aggregated),
            tried: self.attempts.tried(),
            request_id: Some(&self.account.request_id),
            ..question
        }
    }

    /// Binds the session to the worker that a leg reached (F8).
    pub(crate) fn bind(&self, leg: Leg) {
        let Some(ttl) = self.state.settings.affinity(&self.request.hints) else { return };
        let candidate = if leg == Leg::Prefill { &self.prefill.candidate } else { &self.decode.candidate };
        if let (Some(session), Some(candidate)) = (self.routing_request.session_hash, candidate) {
            self.state.sessions.bind(session, leg, id_of(candidate), ttl);
        }
    }

    /// When the bookings expire unless a token arrives before (F4).
    pub(crate) fn stale_at(&self) -> Option<Instant> {
        let booked = self.prefill.booking.is_some() || self.decode.booking.is_some();
        booked.then(|| self.account.last_life().max(self.begun) + self.state.settings.booking_ttl)
    }

    /// Releases bookings that had no token for too long. The request goes on, and no longer counts as load.
    pub(crate) fn expire(&mut self) {
        self.state.metrics.expired_bookings.inc();
        self.free(Leg::Prefill);
        self.free(Leg::Decode);
    }

    /// Releases a leg's booking and wakes the queue.
    pub(super) fn free(&mut self, leg: Leg) {
        let booking = if leg == Leg::Prefill { &mut self.prefill.booking } else { &mut self.decode.booking };
        if booking.take().is_some() {
            self.state.queue.wake();
        }
    }
}

/// How the request would enter the queue.
pub(super) fn parking<'a>(
    state: &'a State,
    request: &'a Request,
    routing_request: &'a RoutingRequest,
    account: &Account,
    leg: Leg,
) -> Parking<'a> {
    let entrant = Entrant {
        model: &request.model,
        request: routing_request,
        pin: request.hints.pinned(leg).map(|(worker, _)| worker),
        arrived: account.started(),
        bytes: account.body_bytes(),
    };
    Parking { queue: &state.queue, entrant, timeout: state.settings.queue_timeout }
}
