//! Handle of one generation: its program, breakers and counters.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use parking_lot::Mutex;
use pointsman_workers::{Breaker, BreakerRules, ModelName, unix_ms};
use serde::Serialize;
use tokio::{sync::mpsc, time::Duration};

use super::{
    Lane, SlotKind,
    content::Program,
    one_worker::OneWorker,
    stats::{AgreementStats, CallStats},
    summary::ProgramSummary,
};
use crate::{ids::Generation, policy::Failure};

/// Handle of one generation of a slot.
#[derive(Debug)]
pub struct GenerationHandle {
    /// The generation's number.
    pub generation: Generation,
    /// The program.
    pub program: Program,
    /// Breaker of decisions.
    pub breaker: Breaker,
    /// Breaker of observations. It does not affect decisions.
    pub observing: Breaker,
    /// Whether a policy of the program observes outcomes.
    pub learns: bool,
    /// The lane.
    pub lane: Lane,
    /// Summary of the program for records.
    pub(crate) summary: Arc<ProgramSummary>,
    /// In the shadow lane: how often its choice was the one made.
    pub agreement: AgreementStats,
    /// Whether all decisions choose one candidate.
    pub choices: OneWorker,
    place: Place,
    stats: LaneStats,
    observed: AtomicU64,
    calls: AtomicU64,
    failures: AtomicU64,
    last_failure: Mutex<Option<LastFailure>>,
}

/// The last failed call of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LastFailure {
    /// Name of the policy that failed.
    pub policy: Arc<str>,
    /// Kind of the failure.
    pub kind: &'static str,
    /// The failure, with the guest's own message.
    pub message: String,
    /// Time, milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Id of the request that the call was about; `None` for outcomes.
    pub request_id: Option<Arc<str>>,
}

impl LastFailure {
    fn now(policy: Arc<str>, failure: &Failure, request_id: Option<&str>) -> Self {
        let (kind, message) = (failure.kind(), failure.to_string());
        Self { policy, kind, message, at_ms: unix_ms(), request_id: request_id.map(Arc::from) }
    }
}

/// Counters of a lane, all its generations together.
#[derive(Clone, Debug, Default)]
pub(super) struct LaneStats {
    pub(super) calls: Arc<CallStats>,
    pub(super) observed: Arc<CallStats>,
}

/// The slot of a generation, and the receiver of its failures.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) kind: SlotKind,
    pub(super) model: Option<ModelName>,
    pub(super) events: mpsc::UnboundedSender<SlotEvent>,
}

/// A failed call of a generation, reported to the policy manager.
#[derive(Clone, Debug)]
pub struct SlotEvent {
    /// The slot's kind.
    pub slot: SlotKind,
    /// The slot's model; `None`: all models without a slot of their own.
    pub model: Option<ModelName>,
    /// The lane of the generation that failed.
    pub lane: Lane,
    /// The generation that failed.
    pub generation: Generation,
    /// Calls of the generation so far, this one included.
    pub calls: u64,
    /// Failed calls among them.
    pub failures: u64,
    /// The failure.
    pub failure: Failure,
    /// Step of the program that failed: filters come first.
    pub step: u32,
    /// Id of the request that the call was about.
    pub request_id: Option<Arc<str>>,
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
            summary: Arc::new(ProgramSummary::of((place.kind, &place.model), generation, lane, &program)),
            learns,
            program,
            breaker: Breaker::new(BreakerRules::POLICY),
            observing: Breaker::new(BreakerRules::POLICY),
            lane,
            agreement: AgreementStats::default(),
            choices: OneWorker::default(),
            place,
            stats,
            observed: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            last_failure: Mutex::new(None),
        }
    }

    /// Returns the last failed call or observed batch.
    #[must_use]
    pub fn last_failure(&self) -> Option<LastFailure> {
        self.last_failure.lock().clone()
    }

    /// Counts one call of the policy that ranks, with its result and duration.
    pub fn note<T>(&self, outcome: &Result<T, Failure>, took: Duration, request_id: Option<&str>) {
        let step = u32::try_from(self.program.filters().len()).unwrap_or(u32::MAX);
        self.note_call(outcome.as_ref().err().map(|failure| (failure, step)), took, request_id);
    }

    /// Counts one call of the program with its duration, and with the failure and its step. A failure counts
    /// in the breaker and is reported to the policy manager. `request_id`: the request of the call.
    pub fn note_call(&self, failed: Option<(&Failure, u32)>, took: Duration, request_id: Option<&str>) {
        self.stats.calls.note(failed.map(|(failure, _)| failure), took);
        if matches!(failed, Some((Failure::NotReady, _))) {
            return;
        }
        let calls = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let Some((failure, step)) = failed else {
            if self.breaker.record_success(calls) {
                self.log_closed();
            }
            return;
        };
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        let opened = record_failure(&self.breaker, failure, calls);
        let policy = self.name_of(step);
        if failures == 1 {
            let event = "policy call failed; later failures are counted";
            self.log_failure(&policy, failure, request_id, event);
        }
        if opened {
            self.log_failure(&policy, failure, request_id, "policy breaker opened");
        }
        *self.last_failure.lock() = Some(LastFailure::now(policy, failure, request_id));
        let _ = self.place.events.send(SlotEvent {
            slot: self.place.kind,
            model: self.place.model.clone(),
            lane: self.lane,
            generation: self.generation,
            calls,
            failures,
            failure: failure.clone(),
            step,
            request_id: request_id.map(Arc::from),
        });
    }

    /// Returns the name of the policy that runs in this step.
    fn name_of(&self, step: u32) -> Arc<str> {
        let policy = self.program.policies().nth(step as usize);
        policy.map_or_else(|| self.summary.name.clone(), |policy| policy.info().name.clone())
    }

    fn log_failure(&self, policy: &str, failure: &Failure, request_id: Option<&str>, event: &'static str) {
        let Place { kind, model, .. } = &self.place;
        tracing::warn!(
            slot = %kind,
            model = model.as_ref().map(ModelName::as_str),
            lane = %self.lane,
            generation = self.generation.0,
            policy,
            kind = failure.kind(),
            error = %failure,
            request_id,
            "{event}"
        );
    }

    fn log_closed(&self) {
        let Place { kind, model, .. } = &self.place;
        let (model, policy) = (model.as_ref().map(ModelName::as_str), &*self.summary.name);
        let generation = self.generation.0;
        tracing::info!(slot = %kind, model, lane = %self.lane, generation, policy, "policy breaker closed");
    }

    /// Counts one observed batch with its result and duration.
    pub(crate) fn note_observed(&self, policy: &Arc<str>, outcome: &Result<(), Failure>, took: Duration) {
        self.stats.observed.note(outcome.as_ref().err(), took);
        let calls = self.observed.fetch_add(1, Ordering::Relaxed) + 1;
        match outcome {
            Ok(()) => {
                self.observing.record_success(calls);
            }
            Err(Failure::NotReady) => {}
            Err(failure) => {
                *self.last_failure.lock() = Some(LastFailure::now(policy.clone(), failure, None));
                record_failure(&self.observing, failure, calls);
            }
        }
    }

    /// Number of calls so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Number of failed calls so far.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

/// Reports a failed call to a breaker, and returns whether that opened it. A timeout opens it at once,
/// because every further one would cost a full budget.
fn record_failure(breaker: &Breaker, failure: &Failure, calls: u64) -> bool {
    if matches!(failure, Failure::Timeout { .. }) { breaker.trip() } else { breaker.record_failure(calls) }
}
