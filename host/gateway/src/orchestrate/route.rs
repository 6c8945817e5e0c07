//! Chooses a leg's worker, at once, after a pause or from the queue; books it and releases it.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};
use pointsman_routing::{Purpose, Query, RouteError, Routed, RouterConfigOverride, SlotKind};
use pointsman_workers::Leg;
use tokio::time::Instant;

use super::{Drive, id_of, plan, traits};
use crate::{
    connectors::{RequestToken, rooms},
    openai::error::ApiError,
    orchestrate::legs::Event,
    state::admission_queue::Place,
};

/// Limit of further rounds over all decode workers to place a handoff.
const MAX_HANDOFF_ROUNDS: u32 = 4;

/// Why a leg is not routed at once.
pub(super) enum Waiting {
    /// A leg failed a moment ago.
    Pause(Instant, Leg),
    /// Every eligible worker is busy (F7), until the queue timeout.
    Queue(Place, Leg, Instant),
}

impl Waiting {
    fn leg(&self) -> Leg {
        match self {
            Self::Pause(_, leg) | Self::Queue(_, leg, _) => *leg,
        }
    }

    pub(super) async fn over(&self) {
        match self {
            Self::Pause(until, _) => tokio::time::sleep_until(*until).await,
            Self::Queue(place, _, until) => place.turn(*until).await,
        }
    }
}

/// Pauses between attempts: from 10 ms, doubled each time up to 1 s, with jitter.
pub(super) type Backoff = backon::ExponentialBackoff;

fn backoff() -> Backoff {
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(10))
        .with_max_delay(Duration::from_secs(1))
        .without_max_times()
        .with_jitter()
        .build()
}

impl Drive {
    pub(super) fn route_or_pause(&mut self, leg: Leg) {
        if !std::mem::take(&mut self.failed) {
            self.route(leg, None);
            return;
        }
        let labels = crate::telemetry::metrics::ReasonLabels { reason: leg.as_str() };
        self.state.metrics.retries.get_or_create(&labels).inc();
        let pause = self.pauses.get_or_insert_with(backoff).next().unwrap_or_default();
        self.waiting = Some(Waiting::Pause(Instant::now() + pause, leg));
    }

    /// Routes the leg whose wait is over.
    pub(super) fn route_again(&mut self) {
        let Some(waiting) = self.waiting.take() else { return };
        let leg = waiting.leg();
        match waiting {
            Waiting::Pause(..) => self.route(leg, None),
            Waiting::Queue(place, _, since) => self.route(leg, Some((place, since))),
        }
    }

    /// Chooses and books the leg's worker, once: from a hint, the session or the policy (C3). The outcome of
    /// prefill is a worker, no worker, or back-pressure, which fails at once unless there is a queue (C5).
    fn route(&mut self, leg: Leg, place: Option<(Place, Instant)>) {
        if self.attempts != self.legs.attempt() {
            // A new attempt uses nothing of the one before.
            self.attempts = self.legs.attempt();
            self.token = RequestToken::fresh();
            self.handoff = None;
        }
        let state = self.state.clone();
        let query = self.query(leg);
        let over = if leg == Leg::Decode {
            let (over, fallback) = state.router.decode_config(&query, Purpose::Route);
            fallback.into_iter().for_each(|reason| state.metrics.fell_back(SlotKind::DecodeOverride, reason));
            over
        } else {
            RouterConfigOverride::default()
        };
        match state.router.route(&query, &over) {
            Ok(routed) => {
                let event = self.routed(leg, routed);
                self.report(event);
            }
            Err(RouteError::AllBusy(_)) if self.wait_in_queue(leg, place) => {}
            Err(RouteError::NoWorker { .. }) if leg == Leg::Decode && self.start_handoff_round() => {}
            Err(error) => {
                let failure =
                    if leg == Leg::Prefill { &mut self.prefill.failure } else { &mut self.decode.failure };
                // On a retry, the first failure explains more than "no worker is left".
                if failure.is_none() {
                    *failure = Some(ApiError::of_route(error, state.settings.busy_status));
                }
                self.report(Event::Unroutable);
            }
        }
    }

    fn routed(&mut self, leg: Leg, routed: Routed) -> Event {
        let candidate = routed.candidate;
        self.account.decided(routed.receipt, &self.subject);
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

    /// Starts another round when every decode worker refused the connection and a handoff has to be consumed.
    fn start_handoff_round(&mut self) -> bool {
        let again = self.handoff.is_some() && !self.tried.is_empty() && self.rounds < MAX_HANDOFF_ROUNDS;
        if again {
            self.rounds += 1;
            self.tried.clear();
            let pause = self.pauses.get_or_insert_with(backoff).next().unwrap_or_default();
            self.waiting = Some(Waiting::Pause(Instant::now() + pause, Leg::Decode));
        }
        again
    }

    /// Keeps or takes a place in the queue; `false` when the queue is full or the queue timeout expired.
    fn wait_in_queue(&mut self, leg: Leg, place: Option<(Place, Instant)>) -> bool {
        let settings = &self.state.settings;
        let (place, until) = match place {
            Some((_, until)) if Instant::now() >= until => return false,
            Some((place, until)) => {
                place.pass_on();
                (place, until)
            }
            None => {
                let subject = &self.subject;
                let (priority, jump) = (subject.priority, subject.priority_jump_s);
                let Some(place) = self.state.queue.park(priority, jump, self.account.started()) else {
                    return false;
                };
                (place, Instant::now() + settings.queue_timeout)
            }
        };
        self.waiting = Some(Waiting::Queue(place, leg, until));
        true
    }

    fn query(&self, leg: Leg) -> Query<'_> {
        let other = match leg {
            // The routing record names the prefill worker [C10].
            Leg::Decode => self.prefill.candidate.as_ref(),
            // Decode was chosen first and stays booked [D5].
            Leg::Prefill => self.decode.candidate.as_ref().filter(|_| self.decode.booking.is_some()),
            Leg::Aggregated => None,
        };
        let question = plan::question(&self.state, &self.request, &self.subject, &self.snapshot, leg);
        Query {
            attempt: self.attempts.saturating_sub(1),
            explain: self.explain,
            other_leg: other.map(id_of),
            planned: self.planned.filter(|_| leg == Leg::Aggregated),
            tried: &self.tried,
            request_id: Some(&self.account.request_id),
            ..question
        }
    }

    /// Binds the session to the worker that a leg reached (F8).
    pub(crate) fn bind(&self, leg: Leg) {
        let Some(ttl) = self.state.settings.affinity(&self.request.hints) else { return };
        let candidate = if leg == Leg::Prefill { &self.prefill.candidate } else { &self.decode.candidate };
        if let (Some(session), Some(candidate)) = (self.subject.session_hash, candidate) {
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
