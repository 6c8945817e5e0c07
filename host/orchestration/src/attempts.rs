//! The attempts of one request: which workers it tried, what its next routing waits for, and what follows
//! when no worker takes a leg.

use std::sync::Arc;

use pointsman_routing::{CandidateId, RouteError};
use pointsman_workers::{Leg, PerLeg, WorkerId};
use tokio::time::{Duration, Instant};

use crate::{
    admission_queue::{Admission, AdmissionQueue, AdmissionRequest, Admit, Place, WorkerWait},
    backoff::{Backoff, backoff, seeded_backoff},
    legs::Event,
};

mod handoff;
mod waiting;

use handoff::CommittedHandoff;
pub use waiting::Waiting;

/// A place in the queue that a request has, and its queue timeout.
pub type Queued = (Place, Instant);

/// Values with which a request enters the queue.
#[derive(Debug)]
pub struct Parking<'a> {
    /// The queue.
    pub queue: &'a Arc<AdmissionQueue>,
    /// The request.
    pub admission_request: AdmissionRequest<'a>,
    /// How long it may wait.
    pub timeout: Duration,
}

/// Whether a leg may be routed now.
#[derive(Debug)]
pub enum Entry {
    /// The leg may be routed. Has the request's place in the queue.
    Route(Option<Queued>),
    /// The request waits in the queue until [`Attempts::waiting`] is over.
    Wait,
    /// The queue is full, or the queue timeout expired.
    Refused,
    /// The queue is full, and another request took the place of this one.
    LostPlace,
}

/// Action when no worker takes a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterRefusal {
    /// The leg is routed when [`Attempts::waiting`] is over.
    Wait,
    /// The leg is routed again at once.
    RouteAgain,
    /// No worker can take the leg.
    GiveUp,
}

/// The attempts of one request.
#[derive(Debug, Default)]
pub struct Attempts {
    number: u32,
    tried: Vec<CandidateId>,
    /// Those of them that refuse the handoff for good.
    declined: Vec<CandidateId>,
    /// A leg, and the worker that failed it and may not have read it.
    spared: Option<(Leg, WorkerId)>,
    /// Workers of a pair one of which failed the request.
    suspects: PerLeg<Option<WorkerId>>,
    waiting: Option<Waiting>,
    /// The place of a request that waited for a worker of its model, until it has another one or a worker.
    worker_wait: Option<Box<WorkerWait>>,
    /// When the request entered the queue.
    parked: Option<Instant>,
    /// When the place ends that it takes next, if it had one for a plan that it left.
    place_until: Option<Instant>,
    queued: Duration,
    /// When the current wait in the queue began.
    waits_since: Option<Instant>,
    /// Whether a leg failed since the last routing: the next routing waits for a pause.
    failed: bool,
    pauses: Option<Backoff>,
    rounds: u32,
    /// When the first of the decode workers that refused the handoff may be asked again.
    asked_again: Option<Instant>,
    /// The handoff that has to be consumed.
    committed: Option<CommittedHandoff>,
    /// The admission until a worker was found.
    unconfirmed: Option<Admission>,
    /// Whether a worker was found, or the queue is off: further legs do not ask again.
    is_admitted: bool,
    /// Whether a stream paused, and its rest waits for workers.
    is_paused: bool,
}

impl Attempts {
    /// Returns a request without an attempt, whose pauses are determined by `seed`.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self { pauses: Some(seeded_backoff(seed)), ..Self::default() }
    }

    /// Returns a request without an attempt. `wait`: it waited for a worker of its model.
    #[must_use]
    pub fn after_wait(wait: Option<Box<WorkerWait>>) -> Self {
        let (parked, queued) = wait.as_ref().map(|wait| (wait.since(), wait.elapsed())).unzip();
        let queued = queued.unwrap_or_default();
        Self { worker_wait: wait, parked, waits_since: parked, queued, ..Self::default() }
    }

    /// Takes the number of the current attempt. Returns whether a new one began, which uses nothing of the
    /// one before.
    pub fn begin(&mut self, attempt: u32) -> bool {
        let begins = std::mem::replace(&mut self.number, attempt) != attempt;
        if begins {
            self.committed = None;
        }
        begins
    }

    /// Number of attempts before the current one.
    #[must_use]
    pub fn earlier(&self) -> u32 {
        self.number.saturating_sub(1)
    }

    /// The workers that are not tried again.
    #[must_use]
    pub fn tried(&self) -> &[CandidateId] {
        &self.tried
    }

    /// The worker that is tried again only if no other one can take the leg.
    #[must_use]
    pub fn spared(&self, leg: Leg) -> Option<WorkerId> {
        self.spared.filter(|(failed, _)| *failed == leg).map(|(_, worker)| worker)
    }

    /// Condition for the next routing.
    #[must_use]
    pub fn waiting(&self) -> Option<&Waiting> {
        self.waiting.as_ref()
    }

    /// Time that the request spent in the queue.
    #[must_use]
    pub fn queued(&self) -> Duration {
        self.queued
    }

    /// Ends the current wait in the queue, because the request has a worker or waits no longer. Returns its
    /// duration, or `None` if the request did not wait. The rest of a stream that paused does not count.
    pub fn leave_queue(&mut self) -> Option<Duration> {
        self.waits_since.take().map(|since| since.elapsed())
    }

    /// Records that a leg failed on a worker; `None`: before it had one.
    pub fn note_failure(&mut self, candidate: Option<CandidateId>) {
        self.tried.extend(candidate);
        self.failed = true;
    }

    /// Records that a leg failed on a worker that may not have read it.
    pub fn note_unread(&mut self, failed: (Leg, WorkerId)) {
        (self.spared, self.failed) = (Some(failed), true);
    }

    /// Suspects both workers of a pair, one of which failed the request. No rank of them is tried again while
    /// the leg has another worker; without one, a worker of the pair may be tried with another partner.
    pub fn suspect(&mut self, pair: PerLeg<Option<WorkerId>>, ranks: impl IntoIterator<Item = CandidateId>) {
        self.suspects = pair;
        for id in ranks {
            if !self.tried.contains(&id) {
                self.tried.push(id);
            }
        }
    }

    /// Starts a pause when a leg failed since the last routing. Returns whether one began.
    pub fn pause(&mut self, leg: Leg) -> bool {
        let failed = std::mem::take(&mut self.failed);
        if failed {
            self.wait_for_pause(leg);
        }
        failed
    }

    /// Ends the wait. Returns the leg to route, and the place in the queue that the request has.
    pub fn resume(&mut self) -> Option<(Leg, Option<Queued>)> {
        match self.waiting.take()? {
            Waiting::Pause(_, leg) => Some((leg, None)),
            Waiting::Queue(place, leg, until) => {
                if !self.is_paused {
                    self.queued = self.parked.map_or(Duration::ZERO, |since| since.elapsed());
                }
                Some((leg, Some((place, until))))
            }
            Waiting::Worker(wait, leg, _) => {
                self.queued = self.parked.map_or(Duration::ZERO, |since| since.elapsed());
                self.worker_wait = Some(wait);
                Some((leg, None))
            }
        }
    }

    /// Has the request wait for a worker of its model for up to `limit`: none is left. It gives back its
    /// admission. Returns whether there was room.
    pub fn wait_for_worker(&mut self, leg: Leg, parking: &Parking<'_>, limit: Duration) -> bool {
        self.unconfirmed.take().into_iter().for_each(Admission::withdraw);
        // The place that a wait before gave it.
        self.worker_wait = None;
        let Some(wait) = parking.queue.wait_for_worker(&parking.admission_request) else { return false };
        let now = wait.since();
        self.parked.get_or_insert(now);
        self.waits_since.get_or_insert(now);
        // The workers that failed the request are down. They may serve it when they are up again.
        self.tried.clear();
        self.declined.clear();
        (self.spared, self.suspects) = (None, PerLeg::default());
        self.waiting = Some(Waiting::Worker(wait, leg, now + limit));
        true
    }

    /// Has a leg be routed again at this time.
    pub fn wait_until(&mut self, leg: Leg, at: Instant) {
        self.waiting = Some(Waiting::Pause(at, leg));
    }

    /// The stream pauses: nothing of its old legs counts, and its rest asks to be admitted.
    pub fn begin_pause(&mut self) {
        (self.is_paused, self.is_admitted, self.committed) = (true, false, None);
    }

    /// Returns whether a stream paused, and its rest waits for workers.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Has the rest of a stream that paused wait in the queue until `until`. It takes a place, or keeps the
    /// one that it has and gives back its admission.
    pub fn wait_as_rest(&mut self, leg: Leg, place: Option<Queued>, parking: &Parking<'_>, until: Instant) {
        self.unconfirmed.take().into_iter().for_each(Admission::withdraw);
        let place = match place {
            Some((place, _)) => {
                place.try_later();
                place
            }
            None => parking.queue.park_rest(&parking.admission_request, leg, &self.tried),
        };
        self.waiting = Some(Waiting::Queue(place, leg, until));
    }

    /// Stops waiting.
    pub fn stop(&mut self) {
        (self.waiting, self.worker_wait) = (None, None);
    }

    /// Asks the queue whether a leg may be routed. `place` is the place in the queue that the request has.
    pub fn enter(&mut self, leg: Leg, place: Option<Queued>, parking: &Parking<'_>) -> Entry {
        if place.as_ref().is_some_and(|(place, _)| place.is_lost()) {
            return Entry::LostPlace;
        }
        if self.is_admitted {
            let waits =
                place.as_ref().is_some_and(|(place, until)| !place.is_its_turn() && Instant::now() < *until);
            if !waits {
                return Entry::Route(place);
            }
            return if self.wait_in_queue(leg, place, parking) { Entry::Wait } else { Entry::Refused };
        }
        match parking.queue.admit(&parking.admission_request, leg, place.as_ref().map(|(place, _)| place)) {
            Admit::Uncounted => self.is_admitted = true,
            Admit::Now(admission) => self.unconfirmed = Some(admission),
            Admit::Wait if self.wait_in_queue(leg, place, parking) => return Entry::Wait,
            Admit::Wait => return Entry::Refused,
        }
        Entry::Route(place)
    }

    /// Notes that a worker was found. Returns the request's admission, to be kept until the request ends.
    pub fn found(&mut self, place: Option<&Queued>) -> Option<Admission> {
        (self.is_admitted, self.is_paused, self.place_until) = (true, false, None);
        self.worker_wait = None;
        let mut admission = self.unconfirmed.take()?;
        admission.confirm(place.map(|(place, _)| place));
        Some(admission)
    }

    /// Decides what follows when no worker takes a leg. `place` is the place in the queue that the request
    /// has.
    pub fn after_refusal(
        &mut self,
        leg: Leg,
        error: &RouteError,
        place: Option<Queued>,
        parking: &Parking<'_>,
    ) -> AfterRefusal {
        if leg == Leg::Decode && self.committed.is_some() {
            return self.after_refused_handoff(error);
        }
        if let Some(admission) = self.unconfirmed.take()
            && error.is_back_pressure()
        {
            admission.withdraw();
        }
        match error {
            error if error.is_back_pressure() && self.wait_in_queue(leg, place, parking) => {
                AfterRefusal::Wait
            }
            RouteError::NoWorker { .. } | RouteError::AllBusy(_) | RouteError::AllPaused { .. }
                if self.forgive_suspect(leg) =>
            {
                AfterRefusal::RouteAgain
            }
            _ => AfterRefusal::GiveUp,
        }
    }

    /// Gives back the admission and the place of a leg whose planned worker does not take it: the request
    /// asks for both again, for the legs of a pair, and waits no longer for them than for the plan.
    pub fn leave_plan(&mut self, place: Option<Queued>) {
        self.unconfirmed.take().into_iter().for_each(Admission::withdraw);
        self.place_until = place.map(|(_, until)| until);
    }

    /// Returns the event of a leg that is given up.
    #[must_use]
    pub fn unroutable(leg: Leg, error: &RouteError) -> Event {
        // A prefill pool at its own limits works, and the request is refused (C5). A worker whose engines
        // refuse more work failed a moment ago.
        let fails = matches!(
            error,
            RouteError::NoWorker { leg: Leg::Prefill, .. } | RouteError::AllPaused { leg: Leg::Prefill, .. }
        );
        if leg == Leg::Prefill && fails { Event::NoPrefill } else { Event::Unroutable }
    }

    fn wait_for_pause(&mut self, leg: Leg) {
        let pause = self.pauses.get_or_insert_with(backoff).next().unwrap_or_default();
        self.waiting = Some(Waiting::Pause(Instant::now() + pause, leg));
    }

    /// When no other worker is left, allows a suspected worker of a pair again: its partner, which is not
    /// tried any more, may be the one that failed.
    fn forgive_suspect(&mut self, leg: Leg) -> bool {
        let Some(forgiven) = self.suspects[leg] else { return false };
        self.suspects = PerLeg::default();
        self.tried.retain(|(worker, _)| *worker != forgiven);
        true
    }

    /// Keeps or takes a place in the queue; `false` when the queue is full or the queue timeout expired.
    fn wait_in_queue(&mut self, leg: Leg, place: Option<Queued>, parking: &Parking<'_>) -> bool {
        let (mut place, until) = match place {
            Some((_, until)) if Instant::now() >= until => return false,
            Some((place, until)) => {
                place.try_later();
                (place, until)
            }
            None => {
                let Parking { queue, admission_request, timeout } = parking;
                let waited = self.worker_wait.take();
                let (waited, keeps_place) = (waited.as_deref(), self.is_admitted);
                let place = queue.park(admission_request, leg, &self.tried, waited, keeps_place);
                let Some(place) = place else { return false };
                let now = Instant::now();
                self.parked.get_or_insert(now);
                if !self.is_paused {
                    self.waits_since.get_or_insert(now);
                }
                (place, self.place_until.take().unwrap_or(now + *timeout))
            }
        };
        place.ask_for_room();
        self.waiting = Some(Waiting::Queue(place, leg, until));
        true
    }
}

#[cfg(test)]
mod tests;
