//! One generation in force: what it runs, its breaker, and its counters.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use pointsman_workers::{Breaker, BreakerRules, ModelName};
use tokio::{sync::mpsc, time::Duration};

use super::{
    Lane, SlotKind,
    content::Program,
    stats::{AgreementStats, CallStats},
    summary::ProgramSummary,
};
use crate::{ids::Generation, policy::Failure};

/// One generation in force.
#[derive(Debug)]
pub struct GenerationHandle {
    /// Its number.
    pub generation: Generation,
    /// What it runs.
    pub program: Program,
    /// Whether it is called at all.
    pub breaker: Breaker,
    /// Whether it is told what became of decisions. That it cannot learn keeps it from nothing else.
    pub observing: Breaker,
    /// Some policy of it learns.
    pub learns: bool,
    /// Whether it serves, tries, or only looks on.
    pub lane: Lane,
    /// What it runs, as records tell it.
    pub(crate) summary: Arc<ProgramSummary>,
    /// As a shadow: how often it would have chosen the same.
    pub agreement: AgreementStats,
    place: Place,
    stats: LaneStats,
    observed: AtomicU64,
    calls: AtomicU64,
    failures: AtomicU64,
}

/// Counters of a lane, all its generations together.
#[derive(Clone, Debug, Default)]
pub(super) struct LaneStats {
    pub(super) calls: Arc<CallStats>,
    pub(super) observed: Arc<CallStats>,
}

/// Whose generation it is, and who is told of its failures.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) kind: SlotKind,
    pub(super) model: Option<ModelName>,
    pub(super) events: mpsc::UnboundedSender<SlotEvent>,
}

/// A failure of a generation in service, told to the policy manager.
#[derive(Clone, Debug)]
pub struct SlotEvent {
    /// The slot's kind.
    pub slot: SlotKind,
    /// The slot's model; `None` is every model without a slot of its own.
    pub model: Option<ModelName>,
    /// The lane of the generation that failed.
    pub lane: Lane,
    /// The generation that failed.
    pub generation: Generation,
    /// Calls it had served when it failed, this one included.
    pub calls: u64,
    /// How many of them failed.
    pub failures: u64,
    /// How.
    pub failure: Failure,
}

impl GenerationHandle {
    pub(super) fn new(
        place: Place,
        generation: Generation,
        lane: Lane,
        program: Program,
        stats: LaneStats,
    ) -> Self {
        let learns = program.policies().any(|policy| policy.info().learns);
        Self {
            generation,
            summary: Arc::new(ProgramSummary::of(place.kind, generation, lane, &program)),
            learns,
            program,
            breaker: Breaker::new(BreakerRules::POLICY),
            observing: Breaker::new(BreakerRules::POLICY),
            lane,
            agreement: AgreementStats::default(),
            place,
            stats,
            observed: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }

    /// Counts one call, how it ended and what it took; a failure moves the breaker and is told to the policy manager.
    pub fn note<T>(&self, outcome: &Result<T, Failure>, took: Duration) {
        self.stats.calls.note(outcome.as_ref().err(), took);
        if matches!(outcome, Err(Failure::NotReady)) {
            return;
        }
        let calls = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        match outcome {
            Ok(_) => self.breaker.record_success(),
            Err(failure) => {
                let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
                record_failure(&self.breaker, failure, calls);
                let _ = self.place.events.send(SlotEvent {
                    slot: self.place.kind,
                    model: self.place.model.clone(),
                    lane: self.lane,
                    generation: self.generation,
                    calls,
                    failures,
                    failure: failure.clone(),
                });
            }
        }
    }

    /// Counts one batch of outcomes, how it ended and what it took.
    pub(crate) fn note_observed(&self, outcome: &Result<(), Failure>, took: Duration) {
        self.stats.observed.note(outcome.as_ref().err(), took);
        let calls = self.observed.fetch_add(1, Ordering::Relaxed) + 1;
        match outcome {
            Ok(()) => self.observing.record_success(),
            Err(Failure::NotReady) => {}
            Err(failure) => record_failure(&self.observing, failure, calls),
        }
    }

    /// Calls so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Failed calls so far.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

/// Reports a failed call to a breaker. A timeout opens it at once, because every further one would cost a full budget.
fn record_failure(breaker: &Breaker, failure: &Failure, calls: u64) {
    if *failure == Failure::Timeout {
        breaker.trip();
    } else {
        breaker.record_failure(calls);
    }
}
