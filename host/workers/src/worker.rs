//! A worker at run time: its description, the facts read from its engine, its health and its load. Shared
//! between snapshots.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
};

use arc_swap::ArcSwapOption;
use tokio::{sync::Notify, time::Instant};

use crate::{
    booking::{Booking, BookingRequest, RankLoad},
    breaker::{Breaker, BreakerRules},
    id::{DpRank, WorkerId},
    spec::WorkerSpec,
};

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

/// Why a worker must not be chosen now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ineligible {
    /// The worker's facts were not read yet.
    NotReady,
    /// The worker does not answer its health checks.
    Unhealthy,
    /// The worker is draining.
    Draining,
    /// Its last requests failed and its breaker is open. It may still be chosen if no other worker is left.
    Failing,
    /// It has reached its limit of concurrent requests.
    AtCapacity,
}

/// Load figures that the engine reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineLoad {
    /// Number of running requests.
    pub running: u32,
    /// Number of waiting requests.
    pub waiting: u32,
    /// Fraction of the KV cache in use, 0 to 1.
    pub kv_usage: f32,
    /// When the figures were read.
    pub read_at: Instant,
}

/// A worker.
#[derive(Debug)]
pub struct Worker {
    spec: Arc<WorkerSpec>,
    ranks: Box<[Arc<RankLoad>]>,
    health: AtomicU8,
    draining: AtomicBool,
    /// Number of KV blocks that the engine reports; 0 if unknown.
    learnt_blocks: AtomicU32,
    engine_load: ArcSwapOption<EngineLoad>,
    /// Engine ids by rank. Only vLLM with Mooncake has them.
    engine_ids: ArcSwapOption<Vec<String>>,
    breaker: Breaker,
    /// Makes the prober check the worker at once.
    check_now: Notify,
}

/// A worker and one of its ranks: the unit that a decision chooses.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The chosen worker.
    pub worker: Arc<Worker>,
    /// The rank of the worker.
    pub rank: DpRank,
    load: Arc<RankLoad>,
}

impl Worker {
    /// Creates a worker whose health and facts are unknown.
    #[must_use]
    pub fn new(spec: WorkerSpec) -> Self {
        let ranks = (0..spec.dp_size.max(1)).map(|_| Arc::new(RankLoad::default())).collect();
        Self {
            spec: Arc::new(spec),
            ranks,
            health: AtomicU8::new(0),
            draining: AtomicBool::new(false),
            learnt_blocks: AtomicU32::new(0),
            engine_load: ArcSwapOption::empty(),
            engine_ids: ArcSwapOption::empty(),
            breaker: Breaker::new(BreakerRules::WORKER),
            check_now: Notify::new(),
        }
    }

    /// Returns the worker's id.
    #[must_use]
    pub fn id(&self) -> WorkerId {
        self.spec.id
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
        ranks
            .map(|(rank, load)| Candidate { worker: self.clone(), rank: DpRank(rank), load: load.clone() })
            .collect()
    }

    /// Returns the result of the last health checks.
    #[must_use]
    pub fn health(&self) -> Health {
        match self.health.load(Ordering::Acquire) {
            0 => Health::Unknown,
            1 => Health::Healthy,
            _ => Health::Unhealthy,
        }
    }

    /// Sets the health. Returns true if it changed.
    pub fn set_health(&self, health: Health) -> bool {
        let code = match health {
            Health::Unknown => 0,
            Health::Healthy => 1,
            Health::Unhealthy => 2,
        };
        self.health.swap(code, Ordering::AcqRel) != code
    }

    /// Returns whether the worker is draining.
    #[must_use]
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Starts or ends draining.
    pub fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Ordering::Release);
    }

    /// Returns the KV blocks of a rank: the configured number, otherwise the engine's.
    #[must_use]
    pub fn total_blocks(&self) -> Option<u32> {
        let learnt = self.learnt_blocks.load(Ordering::Relaxed);
        self.spec.total_blocks.or((learnt > 0).then_some(learnt))
    }

    /// Stores the number of KV blocks that the engine reports.
    pub(crate) fn learn_total_blocks(&self, blocks: u32) {
        self.learnt_blocks.store(blocks, Ordering::Relaxed);
    }

    /// Returns the engine's load figures, if they were read.
    #[must_use]
    pub fn engine_load(&self) -> Option<EngineLoad> {
        self.engine_load.load().as_deref().copied()
    }

    /// Stores the engine's load figures.
    pub(crate) fn set_engine_load(&self, load: EngineLoad) {
        self.engine_load.store(Some(Arc::new(load)));
    }

    /// Returns the number of requests booked on all ranks.
    #[must_use]
    pub fn active_requests(&self) -> u32 {
        self.ranks.iter().map(|rank| rank.active_requests()).sum()
    }

    /// Reports a failed connect. The worker is not chosen again until a health check succeeds, and one starts
    /// at once.
    pub fn note_connect_failed(&self) {
        self.set_health(Health::Unhealthy);
        self.check_now.notify_one();
    }

    /// Reports the outcome of a leg. Several consecutive failures open the worker's breaker.
    pub fn note_outcome(&self, ok: bool) {
        if ok {
            self.breaker.record_success();
        } else {
            // The rules have no failure rate, so the number of calls does not matter.
            self.breaker.record_failure(0);
        }
    }

    /// Returns the engine id of a rank, if it was read.
    #[must_use]
    pub fn engine_id(&self, rank: DpRank) -> Option<String> {
        self.engine_ids.load().as_deref()?.get(rank.0 as usize).cloned()
    }

    /// Stores the engine ids by rank.
    pub(crate) fn set_engine_ids(&self, ids: Vec<String>) {
        self.engine_ids.store(Some(Arc::new(ids)));
    }

    /// Resolves when the worker has to be checked at once.
    pub(crate) async fn check_requested(&self) {
        self.check_now.notified().await;
    }

    /// Returns why the candidate must not be chosen now; `None` if it may.
    #[must_use]
    pub fn ineligible(&self) -> Option<Ineligible> {
        match self.health() {
            Health::Unknown => return Some(Ineligible::NotReady),
            Health::Unhealthy => return Some(Ineligible::Unhealthy),
            Health::Healthy => {}
        }
        if self.draining() {
            return Some(Ineligible::Draining);
        }
        if self.breaker.is_paused() {
            return Some(Ineligible::Failing);
        }
        let limit = self.spec.max_concurrency?;
        (self.active_requests() >= limit).then_some(Ineligible::AtCapacity)
    }
}

impl Candidate {
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

    /// Returns why the candidate must not be chosen now; `None` if it may.
    #[must_use]
    pub fn ineligible(&self) -> Option<Ineligible> {
        self.worker.ineligible()
    }
}

impl Ineligible {
    /// Returns whether the worker cannot serve at all, as opposed to being avoided.
    #[must_use]
    pub fn is_down(self) -> bool {
        matches!(self, Self::NotReady | Self::Unhealthy | Self::Draining)
    }

    /// Returns the stable label in metrics and records.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotReady => "not_ready",
            Self::Unhealthy => "unhealthy",
            Self::Draining => "draining",
            Self::Failing => "failing",
            Self::AtCapacity => "at_capacity",
        }
    }
}
