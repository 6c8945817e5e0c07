//! What became of decisions, for the policies that learn from it: a bounded queue, and one thread that empties it in batches.
//!
//! Whoever ends a request leaves an outcome here and goes on: what the queue cannot take is dropped and counted. What a policy
//! makes of it is its own affair; a failure moves a breaker of its own and neither the decisions' nor a rollback.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use pointsman_workers::{DpRank, Leg, ModelName, WorkerId};
use tokio::time::{Duration, Instant};

use crate::{
    decisions::DecisionId,
    policy::Failure,
    scope::Scope,
    slot::{GenerationHandle, Lane, Slot, SlotKind},
    slots::Slots,
};

/// Outcomes that may wait.
const QUEUE: usize = 4_096;
/// Outcomes that a policy is given at once.
const BATCH: usize = 256;
/// How long the first outcome waits for more.
const GATHER: Duration = Duration::from_millis(50);

/// What became of one decision: the request that it was made for is over. Mirrors `record outcome` of `wit/policy.wit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ObservedOutcome {
    /// The decision as receipts name it; `None` when it was not recorded.
    pub decision: Option<DecisionId>,
    /// The seed of the decision.
    pub seed: u64,
    /// The leg; of a decode override, the leg that answered.
    pub leg: Leg,
    /// 0 for its first try.
    pub attempt: u32,
    /// The worker that was chosen.
    pub worker: WorkerId,
    /// Its rank.
    pub rank: DpRank,
    /// The policy chose; else a hint, a session or the fallback did.
    pub by_policy: bool,
    /// The same leg was decided again later: this worker did not serve the request.
    pub retried: bool,
    /// HTTP status of the request, 499 when the client left.
    pub status: u16,
    /// Time to first token, from the request's arrival.
    pub ttft: Option<Duration>,
    /// Mean time between tokens.
    pub itl: Option<Duration>,
    /// The whole request.
    pub duration: Duration,
    /// Prompt tokens, as routing counted them.
    pub prompt_tokens: u32,
    /// Output tokens.
    pub output_tokens: u32,
    /// Cached prompt tokens as predicted when the prompt's worker was chosen.
    pub cached_predicted: Option<u32>,
    /// Cached prompt tokens as the engine reported.
    pub cached_reported: Option<u32>,
}

/// When a batch is given, and the only randomness there is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Microseconds since the Unix epoch.
    pub now_us: u64,
    /// For random choices.
    pub seed: u64,
}

/// Whose decision an outcome belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionSource {
    /// The slot.
    pub slot: SlotKind,
    /// The model that was asked for.
    pub model: ModelName,
    /// The lane that decided.
    pub lane: Lane,
}

/// The queue. Dropping it ends its thread.
#[derive(Debug)]
pub struct Learning {
    queue: SyncSender<(DecisionSource, ObservedOutcome)>,
    counts: Arc<Counts>,
}

/// Outcomes by what became of them; one that two policies learn from counts twice but where it is dropped.
#[derive(Debug, Default)]
struct Counts {
    given: AtomicU64,
    failed: AtomicU64,
    withheld: AtomicU64,
    dropped: AtomicU64,
}

impl Learning {
    /// Starts the thread that gives outcomes to the policies of `slots`.
    ///
    /// # Errors
    /// The operating system gives no thread.
    pub fn start(slots: Slots) -> std::io::Result<Self> {
        let (queue, outcomes) = sync_channel(QUEUE);
        let counts = Arc::new(Counts::default());
        let counted = counts.clone();
        thread::Builder::new()
            .name("pointsman-learning".to_owned())
            .spawn(move || give(&outcomes, &slots, &counted))?;
        Ok(Self { queue, counts })
    }

    /// Leaves an outcome to be given later. Never waits.
    pub fn submit(&self, asked: DecisionSource, outcome: ObservedOutcome) {
        if self.queue.try_send((asked, outcome)).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Outcomes that were given, that met a failure, that were withheld from a policy that fails, and that the queue could not take.
    #[must_use]
    pub fn counts(&self) -> [(&'static str, u64); 4] {
        let Counts { given, failed, withheld, dropped } = &*self.counts;
        [("given", given), ("failed", failed), ("withheld", withheld), ("dropped", dropped)]
            .map(|(label, count)| (label, count.load(Ordering::Relaxed)))
    }
}

fn give(outcomes: &Receiver<(DecisionSource, ObservedOutcome)>, slots: &Slots, counts: &Counts) {
    while let Ok((asked, first)) = outcomes.recv() {
        // One wake-up for many requests.
        thread::sleep(GATHER);
        let mut batches = vec![(asked, vec![first])];
        for (asked, outcome) in outcomes.try_iter().take(QUEUE) {
            match batches.iter_mut().find(|(other, _)| *other == asked) {
                Some((_, batch)) => batch.push(outcome),
                None => batches.push((asked, vec![outcome])),
            }
        }
        for (asked, batch) in batches {
            teach(slots.get(&asked.model, asked.slot), asked.lane, &batch, counts);
        }
    }
}

/// Gives a lane's outcomes to the generation that is in force there now, or to the active one when the lane has none any more: what
/// was learnt is about workers, and is the slot's.
fn teach(slot: &Slot, lane: Lane, outcomes: &[ObservedOutcome], counts: &Counts) {
    let snapshot = slot.snapshot();
    let canary = snapshot.canary.as_ref().filter(|_| lane == Lane::Canary);
    let active: &GenerationHandle = canary.map_or(&snapshot.active, |canary| &canary.handle);
    let _scope = Scope::generation(active.generation);
    for policy in active.program.policies().filter(|policy| policy.info().learns) {
        for batch in outcomes.chunks(BATCH) {
            let count = if active.observing.try_call() {
                let started = Instant::now();
                let outcome = policy.observe(moment(), batch);
                active.note_observed(&outcome, started.elapsed());
                outcome.as_ref().err().inspect(|failure| tell(active, &policy.info().name, failure));
                if outcome.is_ok() { &counts.given } else { &counts.failed }
            } else {
                &counts.withheld
            };
            count.fetch_add(batch.len() as u64, Ordering::Relaxed);
        }
    }
}

fn tell(active: &GenerationHandle, policy: &str, failure: &Failure) {
    let generation = active.generation.0;
    tracing::warn!(policy, generation, kind = failure.kind(), %failure, "a policy failed to observe");
}

fn moment() -> Moment {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Moment { now_us: u64::try_from(now.as_micros()).unwrap_or(u64::MAX), seed: rand::random() }
}

#[cfg(test)]
mod tests;
