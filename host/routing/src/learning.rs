//! Delivery of outcomes to the policies that learn from them: a bounded queue, and one thread that empties it
//! in batches.
//!
//! A request that ends submits its outcomes and never waits; outcomes beyond the queue's bound are dropped
//! and counted. A failed observation opens a breaker of its own: decisions go on, and no policy is rolled
//! back.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use pointsman_workers::ModelName;
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
    /// The lane that decided.
    pub lane: Lane,
}

/// The queue of outcomes. Dropping it ends its thread.
#[derive(Debug)]
pub struct Learning {
    queue: SyncSender<(DecisionSource, ObservedOutcome)>,
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

fn deliver_all(outcomes: &Receiver<(DecisionSource, ObservedOutcome)>, slots: &Slots, counts: &Counts) {
    while let Ok((source, first)) = outcomes.recv() {
        // One wake-up serves many requests.
        thread::sleep(BATCH_DELAY);
        let mut batches = vec![(source, vec![first])];
        for (source, outcome) in outcomes.try_iter().take(QUEUE_CAPACITY) {
            match batches.iter_mut().find(|(other, _)| *other == source) {
                Some((_, batch)) => batch.push(outcome),
                None => batches.push((source, vec![outcome])),
            }
        }
        for (source, batch) in batches {
            deliver(slots.get(&source.model, source.slot), source.lane, &batch, counts);
        }
    }
}

/// Delivers a lane's outcomes to its present generation, or to the active one when the lane is empty: what a
/// policy learns is about workers and belongs to the slot.
fn deliver(slot: &Slot, lane: Lane, outcomes: &[ObservedOutcome], counts: &Counts) {
    let snapshot = slot.snapshot();
    let canary = snapshot.canary.as_ref().filter(|_| lane == Lane::Canary);
    let generation: &GenerationHandle = canary.map_or(&snapshot.active, |canary| &canary.handle);
    let mut context = DecisionContext::new(Purpose::Route).with_generation(generation.generation);
    for policy in generation.program.policies().filter(|policy| policy.info().learns) {
        for batch in outcomes.chunks(MAX_BATCH) {
            let count = if generation.observing.try_call() {
                let started = Instant::now();
                let outcome = policy.observe(&mut context, moment(), batch);
                generation.note_observed(&outcome, started.elapsed());
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
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Moment { now_us: u64::try_from(now.as_micros()).unwrap_or(u64::MAX), seed: rand::random() }
}

#[cfg(test)]
mod tests;
