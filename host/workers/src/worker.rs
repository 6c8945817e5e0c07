//! A worker at run time: its spec, what was learnt from it, and how it is. Shared between snapshots.

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

/// How a worker answers its health checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Its facts were not read yet (spec B5).
    Unknown,
    /// Answers.
    Healthy,
    /// Does not.
    Unhealthy,
}

/// Why a worker may not be chosen now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ineligible {
    /// Its facts were not read yet.
    NotReady,
    /// It does not answer.
    Unhealthy,
    /// It leaves.
    Draining,
    /// Its last requests failed; asked again in a while, or when there is nobody else.
    Failing,
    /// It has as many requests as it may have.
    AtCapacity,
}

/// What the engine itself says of its load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineLoad {
    /// Requests running.
    pub running: u32,
    /// Requests waiting.
    pub waiting: u32,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_usage: f32,
    /// When it was read.
    pub read_at: Instant,
}

/// One worker.
#[derive(Debug)]
pub struct Worker {
    spec: Arc<WorkerSpec>,
    ranks: Box<[Arc<RankLoad>]>,
    health: AtomicU8,
    draining: AtomicBool,
    /// KV blocks as the engine says; 0 is unknown.
    learnt_blocks: AtomicU32,
    engine_load: ArcSwapOption<EngineLoad>,
    /// Engine ids by rank (vLLM Mooncake).
    engine_ids: ArcSwapOption<Vec<String>>,
    breaker: Breaker,
    /// Wakes the prober at once.
    nudge: Notify,
}

/// A worker and one of its ranks.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The rank.
    pub rank: DpRank,
    load: Arc<RankLoad>,
}

impl Worker {
    /// A worker of which nothing is known yet but its spec.
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
            nudge: Notify::new(),
        }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> WorkerId {
        self.spec.id
    }

    /// What the operator said of it.
    #[must_use]
    pub fn spec(&self) -> &WorkerSpec {
        &self.spec
    }

    /// Its ranks as candidates.
    #[must_use]
    pub fn candidates(self: &Arc<Self>) -> Vec<Candidate> {
        let ranks = (0..).zip(self.ranks.iter());
        ranks
            .map(|(rank, load)| Candidate { worker: self.clone(), rank: DpRank(rank), load: load.clone() })
            .collect()
    }

    /// How it answers.
    #[must_use]
    pub fn health(&self) -> Health {
        match self.health.load(Ordering::Acquire) {
            0 => Health::Unknown,
            1 => Health::Healthy,
            _ => Health::Unhealthy,
        }
    }

    /// Sets how it answers; `true` when that is new.
    pub fn set_health(&self, health: Health) -> bool {
        let code = match health {
            Health::Unknown => 0,
            Health::Healthy => 1,
            Health::Unhealthy => 2,
        };
        self.health.swap(code, Ordering::AcqRel) != code
    }

    /// Whether it leaves.
    #[must_use]
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Lets it leave, or stay.
    pub fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Ordering::Release);
    }

    /// KV blocks of a rank: configured, else as the engine says.
    #[must_use]
    pub fn total_blocks(&self) -> Option<u32> {
        let learnt = self.learnt_blocks.load(Ordering::Relaxed);
        self.spec.total_blocks.or((learnt > 0).then_some(learnt))
    }

    /// Keeps the number of KV blocks the engine says it has.
    pub fn learn_total_blocks(&self, blocks: u32) {
        self.learnt_blocks.store(blocks, Ordering::Relaxed);
    }

    /// The engine's own load figures, when there are any.
    #[must_use]
    pub fn engine_load(&self) -> Option<EngineLoad> {
        self.engine_load.load().as_deref().copied()
    }

    /// Keeps the engine's own load figures.
    pub fn set_engine_load(&self, load: EngineLoad) {
        self.engine_load.store(Some(Arc::new(load)));
    }

    /// Requests booked on all its ranks.
    #[must_use]
    pub fn active_requests(&self) -> u32 {
        self.ranks.iter().map(|rank| rank.active_requests()).sum()
    }

    /// A connect to it failed: it is not asked again until a health check succeeds, which is made at once.
    pub fn note_connect_failed(&self) {
        self.set_health(Health::Unhealthy);
        self.nudge.notify_one();
    }

    /// Takes how a leg on this worker ended: passive health. Several failures in a row put it aside for a while.
    pub fn note_outcome(&self, ok: bool) {
        if ok {
            self.breaker.record_success();
        } else {
            // Without a failure rate the number of calls does not matter.
            self.breaker.record_failure(0);
        }
    }

    /// The engine's own id of a rank, once it was read.
    #[must_use]
    pub fn engine_id(&self, rank: DpRank) -> Option<String> {
        self.engine_ids.load().as_deref()?.get(rank.0 as usize).cloned()
    }

    /// Keeps the engine's own ids, by rank.
    pub fn set_engine_ids(&self, ids: Vec<String>) {
        self.engine_ids.store(Some(Arc::new(ids)));
    }

    /// Resolves when somebody wants a health check at once.
    pub async fn nudged(&self) {
        self.nudge.notified().await;
    }

    /// Why it may not be chosen now, if so.
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
    /// What is booked here.
    #[must_use]
    pub fn load(&self) -> &RankLoad {
        &self.load
    }

    /// Books a request here until the booking is dropped.
    #[must_use]
    pub fn book(&self, request: &BookingRequest) -> Booking {
        Booking::new(self.load.clone(), request)
    }

    /// Why it may not be chosen now, if so.
    #[must_use]
    pub fn ineligible(&self) -> Option<Ineligible> {
        self.worker.ineligible()
    }
}

impl Ineligible {
    /// Whether the worker cannot serve at all now, rather than not this request.
    #[must_use]
    pub fn is_down(self) -> bool {
        matches!(self, Self::NotReady | Self::Unhealthy | Self::Draining)
    }

    /// Stable label.
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
