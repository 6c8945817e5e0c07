//! A leg's worker: asked for at once, after a pause, or from the queue; booked, and given back.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};
use pointsman_routing::{Query, RouteError, Routed, RouterConfigOverride, SlotKind};
use pointsman_workers::Leg;
use tokio::time::Instant;

use super::{Drive, id_of, plan, traits};
use crate::{
    connectors::{RequestToken, rooms},
    openai::error::ApiError,
    orchestrate::legs::Event,
    state::admission_queue::Place,
};

/// Times at most that all decode workers are asked again to take a handoff.
const ROUNDS: u32 = 4;

/// Why a leg is not routed at once.
pub(super) enum Waiting {
    /// Something failed a moment ago.
    Pause(Instant, Leg),
    /// Every eligible worker is busy (spec F7).
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
            Self::Queue(place, ..) => place.turn().await,
        }
    }
}

/// Pauses between tries: 10 ms, doubled each time, with jitter.
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

    /// What a leg waited for is there.
    pub(super) fn route_again(&mut self) {
        let Some(waiting) = self.waiting.take() else { return };
        let leg = waiting.leg();
        match waiting {
            Waiting::Pause(..) => self.route(leg, None),
            Waiting::Queue(place, _, since) => self.route(leg, Some((place, since))),
        }
    }

    /// Chooses and books the leg's worker: a hint's, the session's or the policy's, once (spec C3). What comes of prefill is
    /// one of C5's outcomes: a worker with either kind of handoff, nobody, or backpressure, which fails at once unless there
    /// is a queue; that remote prefill is not active was told before any leg (spec B1).
    fn route(&mut self, leg: Leg, place: Option<(Place, Instant)>) {
        if self.attempts != self.legs.attempt() {
            // A new attempt: nothing of the one before may be met again.
            self.attempts = self.legs.attempt();
            self.token = RequestToken::fresh();
            self.handoff = None;
        }
        let state = self.state.clone();
        let query = self.query(leg);
        let over = if leg == Leg::Decode {
            let (over, fallback) = state.router.decode_config(&query);
            fallback.into_iter().for_each(|reason| state.metrics.fell_back(SlotKind::DecodeOverride, reason));
            over
        } else {
            RouterConfigOverride::default()
        };
        match state.router.route(&query, &over) {
            Ok(routed) => {
                let event = self.routed(leg, routed);
                self.tell(event);
            }
            Err(RouteError::AllBusy(_)) if self.wait_in_queue(leg, place) => {}
            Err(RouteError::NoWorker { .. }) if leg == Leg::Decode && self.ask_them_again() => {}
            Err(error) => {
                let failure =
                    if leg == Leg::Prefill { &mut self.prefill.failure } else { &mut self.decode.failure };
                // On a retry, what failed says more than that nobody is left.
                if failure.is_none() {
                    *failure = Some(ApiError::of_route(error, state.settings.busy_status));
                }
                self.tell(Event::Unroutable);
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

    /// A handoff is in hand and every decode worker refused a connection: they are asked again, a moment later.
    fn ask_them_again(&mut self) -> bool {
        let again = self.handoff.is_some() && !self.tried.is_empty() && self.rounds < ROUNDS;
        if again {
            self.rounds += 1;
            self.tried.clear();
            let pause = self.pauses.get_or_insert_with(backoff).next().unwrap_or_default();
            self.waiting = Some(Waiting::Pause(Instant::now() + pause, Leg::Decode));
        }
        again
    }

    /// Keeps or takes a place in the queue; `false` when there is none, or the request waited long enough.
    fn wait_in_queue(&mut self, leg: Leg, place: Option<(Place, Instant)>) -> bool {
        let settings = &self.state.settings;
        let (place, since) = match place {
            Some((_, since)) if since.elapsed() >= settings.queue_timeout => return false,
            Some((place, since)) => {
                place.pass_on();
                (place, since)
            }
            None => {
                let subject = &self.subject;
                let (priority, jump) = (subject.priority, subject.priority_jump_s);
                let Some(place) = self.state.queue.park(priority, jump, self.account.started()) else {
                    return false;
                };
                (place, Instant::now())
            }
        };
        self.waiting = Some(Waiting::Queue(place, leg, since));
        true
    }

    fn query(&self, leg: Leg) -> Query<'_> {
        let other = match leg {
            // The routing record says who prefilled (spec C10).
            Leg::Decode => self.prefill.candidate.as_ref(),
            // D5: decode was chosen first, and stays booked.
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

    /// A leg reached its worker: its session is bound there (spec F8).
    pub(crate) fn bind(&self, leg: Leg) {
        let Some(ttl) = self.state.settings.affinity(&self.request.hints) else { return };
        let candidate = if leg == Leg::Prefill { &self.prefill.candidate } else { &self.decode.candidate };
        if let (Some(session), Some(candidate)) = (self.subject.session_hash, candidate) {
            self.state.sessions.bind(session, leg, id_of(candidate), ttl);
        }
    }

    /// When the bookings expire unless there is life before (spec F4).
    pub(crate) fn stale_at(&self) -> Option<Instant> {
        let booked = self.prefill.booking.is_some() || self.decode.booking.is_some();
        booked.then(|| self.account.last_life().max(self.begun) + self.state.settings.booking_ttl)
    }

    /// The bookings had no life for too long: they are load no more, whatever becomes of the request.
    pub(crate) fn expire(&mut self) {
        self.state.metrics.expired_bookings.inc();
        self.free(Leg::Prefill);
        self.free(Leg::Decode);
    }

    /// Gives a leg's booking back; somebody may be waiting for it.
    pub(super) fn free(&mut self, leg: Leg) {
        let booking = if leg == Leg::Prefill { &mut self.prefill.booking } else { &mut self.decode.booking };
        if booking.take().is_some() {
            self.state.queue.wake();
        }
    }
}
