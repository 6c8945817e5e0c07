//! The latest decisions, kept in memory to be explained: bounded in number and bytes, written by the data
//! threads.
//!
//! A writer does not wait for a reader: when a shard is locked, it takes the next ticket and with it the next
//! shard. A reader locks a shard only while it copies one decision. In steady state recording allocates
//! nothing: a shard's memory is one ring of words.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use parking_lot::MutexGuard;
use pointsman_workers::unix_time;
use tokio::time::Duration;

use crate::{
    facts::{UnknownFact, Wants},
    ids::DecisionId,
};

mod fact_json;
mod header;
mod packed;
mod record;
mod recorder;
mod shard;
mod shared_ids;
mod state_reads;
mod summary;

pub use header::{DecidedBy, DecisionHeader, DecisionResult, LegTimes, Outcome, StreamFailed};
pub use record::Record;
pub(crate) use recorder::{ALWAYS, Recorded, Recorder, SHADOW};
use shard::{Ring, Shard};
pub use summary::DecisionSummary;

/// Number of shards, at most.
const MAX_SHARDS: usize = 16;
/// Entries of a shard, at least.
const MIN_SHARD_ENTRIES: usize = 4;
/// Bytes of a shard, at least: the texts of one decision always fit.
const MIN_SHARD_BYTES: usize = 4_096;
/// How long a writer waits when every shard is locked. After that the decision is not recorded.
const MAX_LOCK_WAIT: Duration = Duration::from_micros(20);

/// The ring of recorded decisions.
#[derive(Debug)]
pub struct Decisions {
    shards: Box<[Shard]>,
    ticket: AtomicU64,
    base: u64,
    always: Arc<Wants>,
    lost: AtomicU64,
}

impl Decisions {
    /// A ring of at most `keep` decisions and `bytes` of their inputs; 0 of either: nothing is recorded.
    /// `always` are facts to record for every leg's decision, also when its policy does not request them.
    #[must_use]
    pub fn new(keep: usize, bytes: usize, always: Wants) -> Self {
        let count = (keep.div_ceil(MIN_SHARD_ENTRIES)).min(MAX_SHARDS).min(bytes.div_ceil(MIN_SHARD_BYTES));
        let entries = |index| keep / count + usize::from(index < keep % count);
        let words = bytes.checked_div(count).unwrap_or(0).max(MIN_SHARD_BYTES) / size_of::<u32>();
        Self {
            shards: (0..count).map(|index| Shard::new(entries(index), words)).collect(),
            ticket: AtomicU64::new(0),
            base: unix_time().as_secs() << 32,
            always: Arc::new(always),
            lost: AtomicU64::new(0),
        }
    }

    /// Returns an empty ring of another size, whose ids are above all ids of `self`.
    #[must_use]
    pub fn successor(&self, keep: usize, bytes: usize, always: Wants) -> Self {
        let ring = Self::new(keep, bytes, always);
        Self { base: ring.base.max(self.base + (1 << 32)), ..ring }
    }

    /// A ring that records nothing.
    #[must_use]
    pub fn off() -> Self {
        Self::new(0, 0, Wants::default())
    }

    /// Resolves fact names against both tables.
    ///
    /// # Errors
    /// [`UnknownFact`] names the first that neither table has.
    pub fn facts<T: AsRef<str>>(names: &[T]) -> Result<Wants, UnknownFact> {
        let mut all = Wants::default();
        for name in names {
            match Wants::resolve(&[name.as_ref()], &[] as &[&str]) {
                Ok(wants) => all.request.extend(wants.request),
                Err(_) => {
                    let unknown = |error| UnknownFact { scope: "request or worker", ..error };
                    let wants = Wants::resolve(&[] as &[&str], &[name.as_ref()]).map_err(unknown)?;
                    all.worker.extend(wants.worker);
                }
            }
        }
        Ok(all)
    }

    /// Returns whether decisions are recorded.
    #[must_use]
    pub fn is_on(&self) -> bool {
        !self.shards.is_empty()
    }

    /// Number of decisions that were not recorded because every shard stayed locked.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// The ids of all recorded decisions, newest first.
    #[must_use]
    pub fn ids(&self) -> Vec<DecisionId> {
        let mut ids = Vec::new();
        for (index, shard) in self.shards.iter().enumerate() {
            ids.extend(shard.numbers().into_iter().map(|number| self.id(number, index)));
        }
        ids.sort_unstable_by(|a, b| b.cmp(a));
        ids
    }

    /// The ids of at most `count` decisions, newest first. Holds locks for less time than [`Decisions::ids`].
    #[must_use]
    pub fn newest(&self, count: usize) -> Vec<DecisionId> {
        let mut ids = Vec::new();
        for (index, shard) in self.shards.iter().enumerate() {
            ids.extend(shard.last(count).into_iter().map(|number| self.id(number, index)));
        }
        ids.sort_unstable_by(|a, b| b.cmp(a));
        ids.truncate(count);
        ids
    }

    /// Copies one decision, when it is still recorded and `wanted`. `wanted` also gets the request's id. It
    /// must be quick: its shard is locked while it runs.
    #[must_use]
    pub fn get(&self, id: DecisionId, wanted: impl FnOnce(&DecisionHeader, &str) -> bool) -> Option<Record> {
        let (number, shard) = self.find(id)?;
        let (head, words, ids) = shard.copy(number, wanted)?;
        Some(Record::new(id, head, words, ids, self.always.clone()))
    }

    /// Adds the outcome of a decision's request; does nothing when the decision was overwritten.
    pub fn outcome(&self, id: DecisionId, outcome: Outcome) {
        if let Some((number, shard)) = self.find(id) {
            shard.outcome(number, outcome);
        }
    }

    /// The facts recorded for every leg's decision.
    pub(crate) fn always(&self) -> &Wants {
        &self.always
    }

    /// Records a decision. Its texts are always kept, its packed words when they fit into a shard.
    pub(crate) fn record(&self, head: DecisionHeader, recorded: Recorded<'_>) -> Option<DecisionId> {
        let (mut ticket, mut shard) = self.next_shard()?;
        for _ in 1..self.shards.len() {
            if let Some(ring) = shard.ring.try_lock() {
                return Some(self.write(ring, ticket, head, recorded));
            }
            (ticket, shard) = self.next_shard()?;
        }
        match shard.ring.try_lock_for(MAX_LOCK_WAIT) {
            Some(ring) => Some(self.write(ring, ticket, head, recorded)),
            None => {
                self.lost.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// Takes the next ticket. The decision's id is `base` and its ticket.
    fn next_shard(&self) -> Option<(u64, &Shard)> {
        let ticket = self.ticket.fetch_add(1, Ordering::Relaxed);
        let index = ticket.checked_rem(self.shards.len() as u64)?;
        Some((ticket, self.shards.get(usize::try_from(index).ok()?)?))
    }

    fn write(
        &self,
        mut ring: MutexGuard<'_, Ring>,
        ticket: u64,
        head: DecisionHeader,
        recorded: Recorded<'_>,
    ) -> DecisionId {
        let count = self.shards.len() as u64;
        let number = ring.push(ticket / count, head, recorded);
        let taken = number * count + ticket % count;
        if taken > ticket {
            // A writer with a later ticket was faster. The other shards catch up: ids rise with time.
            self.ticket.fetch_max(taken + 1, Ordering::Relaxed);
        }
        DecisionId(self.base + taken)
    }

    fn id(&self, number: u64, index: usize) -> DecisionId {
        DecisionId(self.base + number * self.shards.len() as u64 + index as u64)
    }

    fn find(&self, id: DecisionId) -> Option<(u64, &Shard)> {
        let number = id.0.checked_sub(self.base)?;
        let count = self.shards.len() as u64;
        let index = usize::try_from(number.checked_rem(count)?).ok()?;
        Some((number / count, self.shards.get(index)?))
    }
}

#[cfg(test)]
mod tests;
