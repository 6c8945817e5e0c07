//! Delivery of outcomes to the policies that learn from them: a bounded queue, and one thread that empties it
//! in batches.
//!
//! A request that ends submits its outcomes and never waits; outcomes beyond the queue's bound are dropped
//! and counted. A failed observation opens a breaker of its own: decisions continue, and no policy is rolled
//! back.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

use pointsman_workers::{ModelName, unix_us};
use tokio::time::{Duration, Instant};

use crate::{
    context::{DecisionContext, Purpose},
    outcome::{Moment, ObservedOutcome},
    policy::Failure,
    slot::{GenerationHandle, Lane, Slot, SlotKind},
    slots::Slots,
};

/// Outcomes that may be queued.
const QUEUE_CAPACITY: usize = 4_096;
/// Outcomes of one call of a policy, at most.
const MAX_BATCH: usize = 256;
/// How long the first outcome of a batch waits for more.
const BATCH_DELAY: Duration = Duration::from_millis(50);

/// The slot, model and lane that made a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionSource {
    /// The slot.
    pub slot: SlotKind,
    /// The requested model.
    pub model: ModelName,
    /// The model that the requested one is an adapter of.
    pub parent: Option<ModelName>,
    /// The lane that decided.
    pub lane: Lane,
}

/// An outcome, and who made the decision that it belongs to.
type SourcedOutcome = (DecisionSource, ObservedOutcome);

/// The queue of outcomes. Dropping it ends its thread.
#[derive(Debug)]
pub struct Learning {
    queue: SyncSender<SourcedOutcome>,
    counts: Arc<Counts>,
}

/// Numbers of outcomes. An outcome for two policies counts twice, except when it is dropped.
#[derive(Debug, Default)]
struct Counts {
    given: AtomicU64,
    failed: AtomicU64,
    withheld: AtomicU64,
    dropped: AtomicU64,
}

impl Learning {
    /// Starts the thread that delivers outcomes to the policies of `slots`.
    ///
    /// # Errors
    /// The operating system refuses to start a thread.
    pub fn start(slots: Slots) -> std::io::Result<Self> {
        let (queue, outcomes) = sync_channel(QUEUE_CAPACITY);
        let counts = Arc::new(Counts::default());
        let counted = counts.clone();
        thread::Builder::new()
            .name("pointsman-learning".to_owned())
            .spawn(move || deliver_all(&outcomes, &slots, &counted))?;
        Ok(Self { queue, counts })
    }

    /// Queues an outcome for delivery. Never waits.
    pub fn submit(&self, source: DecisionSource, outcome: ObservedOutcome) {
        if self.queue.try_send((source, outcome)).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Numbers of outcomes that were delivered, whose delivery failed, that were withheld from a failing
    /// policy, and that exceeded the queue.
    #[must_use]
    pub fn counts(&self) -> [(&'static str, u64); 4] {
        let Counts { given, failed, withheld, dropped } = &*self.counts;
        [("given", given), ("failed", failed), ("withheld", withheld), ("dropped", dropped)]
            .map(|(label, count)| (label, count.load(Ordering::Relaxed)))
    }
}

/// Like [`Learning`], but without a thread: its owner delivers a batch when its delay is over. For a
/// simulation, whose time and randomness are its own.
#[derive(Debug)]
pub struct BatchedLearning {
    slots: Slots,
    outcomes: Vec<SourcedOutcome>,
    counts: Counts,
}

impl BatchedLearning {
    /// Time from the first outcome of a batch to its delivery.
    pub const DELAY: Duration = BATCH_DELAY;

    /// Returns an empty queue for the policies of `slots`.
    #[must_use]
    pub fn new(slots: Slots) -> Self {
        Self { slots, outcomes: Vec::new(), counts: Counts::default() }
    }

    /// Queues an outcome. Returns whether it is the first of a batch, which is due after [`Self::DELAY`].
    pub fn submit(&mut self, source: DecisionSource, outcome: ObservedOutcome) -> bool {
        if self.outcomes.len() > QUEUE_CAPACITY {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        self.outcomes.push((source, outcome));
        self.outcomes.len() == 1
    }

    /// Delivers the queued outcomes.
    pub fn deliver(&mut self, mut moment: impl FnMut() -> Moment) {
        let outcomes = std::mem::take(&mut self.outcomes);
        deliver_batches(outcomes.into_iter(), &self.slots, &self.counts, &mut moment);
    }
}

fn deliver_all(outcomes: &Receiver<SourcedOutcome>, slots: &Slots, counts: &Counts) {
    while let Ok(first) = outcomes.recv() {
        // One wake-up serves many requests.
        thread::sleep(BATCH_DELAY);
        let all = std::iter::once(first).chain(outcomes.try_iter().take(QUEUE_CAPACITY));
        deliver_batches(all, slots, counts, &mut moment);
    }
}

/// Delivers outcomes in one batch for each slot, model and lane.
fn deliver_batches(
    outcomes: impl Iterator<Item = SourcedOutcome>,
    slots: &Slots,
    counts: &Counts,
    moment: &mut dyn FnMut() -> Moment,
) {
    let mut batches: Vec<(DecisionSource, Vec<ObservedOutcome>)> = Vec::new();
    for (source, outcome) in outcomes {
        match batches.iter_mut().find(|(other, _)| *other == source) {
            Some((_, batch)) => batch.push(outcome),
            None => batches.push((source, vec![outcome])),
        }
    }
    for (source, batch) in batches {
        let slot = slots.get_or_parent(&source.model, source.parent.as_ref(), source.slot);
        deliver(slot, source.lane, &batch, counts, moment);
    }
}

/// Delivers a lane's outcomes to its present generation, or to the active one when the lane is empty: what a
/// policy learns is about workers and belongs to the slot. The slot's shadow gets them as well, as outcomes
/// of decisions that it did not make.
fn deliver(
    slot: &Slot,
    lane: Lane,
    outcomes: &[ObservedOutcome],
    counts: &Counts,
    moment: &mut dyn FnMut() -> Moment,
) {
    let snapshot = slot.snapshot();
    let canary = snapshot.canary.as_ref().filter(|_| lane == Lane::Canary);
    let generation = canary.map_or(&snapshot.active, |canary| &canary.handle);
    observe(generation, Purpose::Route, outcomes, counts, moment);
    if let Some(shadow) = snapshot.shadow.as_ref().filter(|shadow| shadow.handle.learns) {
        let of_others = |outcome: &ObservedOutcome| ObservedOutcome { by_policy: false, ..*outcome };
        let outcomes: Vec<ObservedOutcome> = outcomes.iter().map(of_others).collect();
        observe(&shadow.handle, Purpose::Shadow, &outcomes, counts, moment);
    }
}

/// Lets each policy of a generation that learns observe outcomes.
fn observe(
    generation: &GenerationHandle,
    purpose: Purpose,
    outcomes: &[ObservedOutcome],
    counts: &Counts,
    moment: &mut dyn FnMut() -> Moment,
) {
    let mut context = DecisionContext::new(purpose).with_generation(generation.generation);
    for policy in generation.program.policies().filter(|policy| policy.info().learns) {
        for batch in outcomes.chunks(MAX_BATCH) {
            let count = if generation.observing.try_call() {
                let started = Instant::now();
                let outcome = policy.observe(&mut context, moment(), batch);
                generation.note_observed(&policy.info().name, &outcome, started.elapsed());
                outcome.as_ref().err().inspect(|failure| warn(generation, &policy.info().name, failure));
                if outcome.is_ok() { &counts.given } else { &counts.failed }
            } else {
                &counts.withheld
            };
            count.fetch_add(batch.len() as u64, Ordering::Relaxed);
        }
    }
}

fn warn(generation: &GenerationHandle, policy: &str, failure: &Failure) {
    let generation = generation.generation.0;
    tracing::warn!(policy, generation, kind = failure.kind(), %failure, "policy failed to observe outcomes");
}

fn moment() -> Moment {
    Moment { now_us: unix_us(), seed: rand::random() }
}

#[cfg(test)]
mod tests;
