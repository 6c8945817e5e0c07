//! A worker at run time: its description, the facts read from its engine, its health and its load. Shared
//! between snapshots.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{sync::futures::Notified, time::Instant};

use crate::{
    booking::{Booking, BookingRequest, HeldTokens, Journal, RankLoad},
    columns::Columns,
    facts::EngineFacts,
    id::{DpRank, WorkerId},
    spec::WorkerSpec,
};

mod answered_paths;
mod back_pressure;
mod breaks;
mod broken_handoffs;
mod draining;
mod eligibility;
mod failing;
mod learned_limit;
mod loading;
mod lost_ranks;
mod open_handoffs;
mod outcomes;
mod progress;
mod refusing;
mod reported;
mod reservation;
mod shared_load;
mod state;
mod take_over;
mod warm_up;

use answered_paths::AnsweredPaths;
use back_pressure::BackPressure;
pub use back_pressure::{Pause, Refusal};
use breaks::Breaks;
use broken_handoffs::BrokenHandoffs;
use draining::Moves;
pub use draining::{Drainer, MoveCounts, StreamMove};
pub use eligibility::Ineligible;
use failing::LastFailure;
use learned_limit::LearnedLimit;
use loading::Loading;
use lost_ranks::LostRanks;
pub use open_handoffs::OpenHandoff;
pub use refusing::Doubt;
pub use reservation::Reservation;
use state::{Ranks, State, Told, ranks};
use warm_up::WarmUp;
pub(crate) use warm_up::WarmUps;

/// Shortest time between health checks after answers that ended early.
const CUT_CHECK_GAP: Duration = Duration::from_secs(5);

/// Result of a worker's health checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// The worker's facts were not read yet (B5).
    Unknown,
    /// The worker answers.
    Healthy,
    /// The worker does not answer.
    Unhealthy,
}

/// A worker.
#[derive(Debug)]
pub struct Worker {
    spec: Arc<WorkerSpec>,
    /// Hash of the part of the description that decisions use.
    traits_hash: u64,
    ranks: Ranks,
    /// What a worker with another description of the same engine takes over.
    state: Arc<State>,
}

/// A worker and one of its ranks: the unit that a decision chooses.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The chosen worker.
    pub worker: Arc<Worker>,
    /// The rank of the worker.
    pub rank: DpRank,
    id: WorkerId,
    load: Arc<RankLoad>,
}

impl Worker {
    /// Creates a worker whose health and facts are unknown.
    #[must_use]
    pub fn new(spec: WorkerSpec) -> Self {
        Self::noted(spec, &Columns::default(), None, WarmUps::never())
    }

    /// Like [`Worker::new`]. Keeps its load in `columns`, and notes its bookings in `journal`.
    #[must_use]
    pub(crate) fn noted(
        spec: WorkerSpec,
        columns: &Columns,
        journal: Option<&Arc<Journal>>,
        warm_ups: WarmUps,
    ) -> Self {
        let ranks = ranks(&spec, &[], columns, journal);
        let state = State::new(warm_ups, Told::of(&spec, &ranks));
        let worker = Self::with(spec, ranks, Arc::new(state));
        worker.set_facts(EngineFacts::default());
        worker
    }

    fn with(spec: WorkerSpec, ranks: Ranks, state: Arc<State>) -> Self {
        Self { traits_hash: spec.traits_hash(), spec: Arc::new(spec), ranks, state }
    }

    /// Returns the worker's id.
    #[must_use]
    pub fn id(&self) -> WorkerId {
        self.spec.id
    }

    pub(crate) fn traits_hash(&self) -> u64 {
        self.traits_hash
    }

    /// Returns the operator's description.
    #[must_use]
    pub fn spec(&self) -> &WorkerSpec {
        &self.spec
    }

    /// Returns one candidate for each rank.
    #[must_use]
    pub fn candidates(self: &Arc<Self>) -> Vec<Candidate> {
        let ranks = (0..).zip(self.ranks.iter());
        let candidate = |(rank, load): (u32, &Arc<RankLoad>)| Candidate {
            worker: self.clone(),
            rank: DpRank(rank),
            id: self.id(),
            load: load.clone(),
        };
        ranks.map(candidate).collect()
    }

    /// Returns the result of the last health checks.
    #[must_use]
    pub fn health(&self) -> Health {
        match self.state.health.load(Ordering::Acquire) {
            0 => Health::Unknown,
            1 => Health::Healthy,
            _ => Health::Unhealthy,
        }
    }

    /// Sets the health. Returns true if it changed.
    pub fn set_health(&self, health: Health) -> bool {
        if health == Health::Healthy && !self.is_current() {
            // Its last check was of the description before.
            return false;
        }
        let code = match health {
            Health::Unknown => 0,
            Health::Healthy => 1,
            Health::Unhealthy => 2,
        };
        if health == Health::Healthy {
            self.begin_warm_up();
        }
        let changed = self.state.health.swap(code, Ordering::AcqRel) != code;
        if changed {
            self.tell_ranks();
        }
        changed
    }

    /// Returns the number of requests booked on all ranks, here and by other gateways.
    #[must_use]
    pub fn active_requests(&self) -> u32 {
        self.ranks.iter().map(|rank| rank.active_requests()).sum()
    }

    /// Reports a failed connect. The worker is not chosen again until a health check succeeds that began
    /// later, and one starts at once.
    pub fn note_connect_failed(&self) {
        *self.state.unreachable.lock() = Some(Instant::now());
        self.set_health(Health::Unhealthy);
        self.note_restart();
    }

    /// Reports that the engine may have restarted or loaded a model: it closed a connection, or does not know
    /// a model that it listed. Its facts are read again.
    pub fn note_restart(&self) {
        self.state.stale_facts.store(true, Ordering::Release);
        self.state.check_now.notify_one();
    }

    /// Reports an answer that ended early, because its client left or the engine died: which of them is not
    /// known. A health check starts at once, unless one did a moment ago: clients may leave all the time.
    pub fn note_cut(&self) {
        let mut checked = self.state.cut_checked.lock();
        if checked.is_none_or(|at| at.elapsed() >= CUT_CHECK_GAP) {
            *checked = Some(Instant::now());
            self.state.check_now.notify_one();
        }
    }

    /// Returns whether an answer that ended early asked for a check a moment ago.
    pub(crate) fn was_cut(&self) -> bool {
        self.state.cut_checked.lock().is_some_and(|at| at.elapsed() < CUT_CHECK_GAP)
    }

    /// Reports that a request waited for an answer that did not come. The worker is not chosen for a pause.
    /// Afterwards one request at a time tries it until one is answered: each of them waits as long as this
    /// one did.
    pub fn note_timeout(&self) {
        self.state.suspect.store(true, Ordering::Release);
        if !self.state.breaker.is_paused() {
            self.state.breaker.trip();
        }
        self.tell_ranks();
    }

    /// Reports that the engine answered a request with a token or a whole body.
    pub fn note_answered(&self) {
        // Read first: the flags are shared between threads and almost never change.
        if self.state.suspect.load(Ordering::Relaxed) {
            self.state.suspect.store(false, Ordering::Release);
            self.tell_ranks();
        }
        if self.state.back_pressure.succeeded() {
            self.tell_ranks();
        }
        self.takes_requests();
        if !self.state.answered.load(Ordering::Relaxed) {
            self.state.answered.store(true, Ordering::Release);
        }
    }

    /// Requests a health check at once.
    pub(crate) fn check_health(&self) {
        self.state.check_now.notify_one();
    }

    /// Resolves when the worker has to be checked at once.
    pub(crate) async fn check_requested(&self) {
        self.state.check_now.notified().await;
    }

    /// Returns whether the facts have to be read again, and forgets it.
    pub(crate) fn take_stale_facts(&self) -> bool {
        self.state.stale_facts.swap(false, Ordering::AcqRel)
    }

    /// Returns whether a connect has failed since then.
    pub(crate) fn was_unreachable_since(&self, since: Instant) -> bool {
        self.state.unreachable.lock().is_some_and(|at| at >= since)
    }

    /// Returns whether the engine, which broke a connection then, may have died: no health check that began
    /// later has told yet.
    #[must_use]
    pub fn may_have_died(&self, broke: Instant) -> bool {
        self.health() == Health::Healthy && !self.activity().passed_check_since(broke)
    }

    /// Starts to observe whether a request is answered while health checks fail.
    pub(crate) fn watch_answers(&self) {
        self.state.answered.store(false, Ordering::Release);
    }

    /// Ends the waiting of all requests for an answer, unless one was answered since the checks began to
    /// fail: an engine under load may be slow to answer a health check.
    pub(crate) fn release_waiting(&self) {
        if !self.state.answered.load(Ordering::Acquire) {
            self.state.stops_serving.notify_waiters();
        }
    }

    /// Returns whether health checks fail and no request was answered since they began to.
    #[must_use]
    pub fn is_down(&self) -> bool {
        self.health() == Health::Unhealthy && !self.state.answered.load(Ordering::Acquire)
    }

    /// Returns a future that resolves when health checks find that the engine does not answer at all, or
    /// when it falls asleep: requests may end their waiting for it. What happens before its first poll
    /// counts, too.
    pub fn stops_serving(&self) -> Notified<'_> {
        self.state.stops_serving.notified()
    }
}

impl Candidate {
    /// Returns the worker's id, without a look at the worker.
    #[must_use]
    pub fn worker_id(&self) -> WorkerId {
        self.id
    }

    /// Returns the load booked on this candidate.
    #[must_use]
    pub fn load(&self) -> &RankLoad {
        &self.load
    }

    /// Books a request until the booking is dropped.
    #[must_use]
    pub fn book(&self, request: &BookingRequest) -> Booking {
        Booking::new(self.load.clone(), request)
    }

    /// Counts tokens of an agent program on this candidate until they are dropped.
    #[must_use]
    pub fn hold(&self, tokens: u32) -> HeldTokens {
        HeldTokens::new(self.load.clone(), tokens)
    }

    /// Returns why the candidate must not be chosen now; `None` if it may.
    #[must_use]
    pub fn ineligible(&self) -> Option<Ineligible> {
        if self.load.surely_eligible() {
            return None;
        }
        let lost = || self.worker.state.lost_ranks.has(self.rank).then_some(Ineligible::Failing);
        self.worker.ineligible().or_else(lost)
    }
}

/// Returns a healthy worker, for tests.
#[cfg(test)]
pub(crate) fn healthy() -> Arc<Worker> {
    let spec = WorkerSpec::parse_flag("id=1,role=aggregated,engine=vllm,url=http://a:1").unwrap();
    let worker = Arc::new(Worker::new(spec));
    worker.set_health(Health::Healthy);
    worker
}
