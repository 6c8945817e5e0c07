//! The last decisions, kept in memory for whoever asks why: bounded in number and in bytes, written by the data threads.
//!
//! A writer never waits for a reader: it takes the next shard when one is held, and a reader holds one no longer than it
//! takes to copy one decision. In steady state a decision allocates nothing: a shard's memory is one circle of words.

use std::{
    fmt,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use pointsman_workers::{DpRank, Leg, ModelName, WorkerId};
use serde::Serialize;
use tokio::time::Duration;

use crate::{
    facts::{UnknownFact, Wants},
    receipt::ShadowResult,
    slot::NativeMode,
    summary::ProgramSummary,
};

mod encoding;
mod record;
pub(crate) mod recorder;
mod shard;
pub(crate) mod state_reads;
mod summary;

pub use record::Record;
use shard::Shard;
pub use summary::DecisionSummary;

/// Shards at most.
const SHARDS: usize = 16;
/// A shard is not made for fewer entries than this.
const FEWEST: usize = 4;
/// Nor for fewer bytes: the texts of one decision always fit.
const LEAST_BYTES: usize = 4_096;
/// How long a decision waits to be recorded when every shard is held.
const PATIENCE: Duration = Duration::from_micros(20);

/// Names one decision. Rises with time, also across restarts; of two made in the same moment either may be the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DecisionId(u64);

/// The ring.
#[derive(Debug)]
pub struct Decisions {
    shards: Box<[Shard]>,
    ticket: AtomicUsize,
    base: u64,
    always: Arc<Wants>,
    lost: AtomicU64,
}

/// What is known of a decision besides its inputs.
#[derive(Clone, Debug)]
pub struct DecisionHeader {
    /// The model asked for.
    pub model: ModelName,
    /// What the slot ran.
    pub program: Arc<ProgramSummary>,
    /// The leg routed; for a plan, the decode leg that it is about.
    pub leg: Leg,
    /// 0 for its first try.
    pub attempt: u32,
    /// Who decided.
    pub by: DecidedBy,
    /// What was decided.
    pub result: DecisionResult,
    /// The seed of the decision.
    pub seed: u64,
    /// Microseconds since the Unix epoch.
    pub now_us: u64,
    /// The temperature in force.
    pub temperature: f32,
    /// Cached prefix blocks at the choice: device, host, disk; `None` when nobody asked for them.
    pub cached_blocks: Option<[u32; 3]>,
    /// What the shadow would have done, when it was asked.
    pub shadow: Option<ShadowResult>,
    /// Time the whole decision took.
    pub took: Duration,
    /// What became of the request; `None` while it runs.
    pub outcome: Option<Outcome>,
    /// Inputs were left out, for they alone were more than a shard holds.
    pub cut: bool,
    pub(crate) stages: u32,
    /// Stages whose policies read the slot's state.
    pub(crate) reads: u32,
}

/// Who decided; the texts that belong to it are kept with the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// The policy in the slot.
    Policy,
    /// The native selector in the slot.
    Native(NativeMode),
    /// The fallback, and why.
    Fallback(&'static str),
    /// A hint of the request.
    Pin,
    /// The binding of the request's session.
    Session,
    /// The decode override's preview.
    Plan,
}

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionResult {
    /// This candidate.
    Chosen(WorkerId, DpRank),
    /// `remote`, `local` or `shed`, with the decode candidate that was asked about.
    Planned(&'static str, Option<(WorkerId, DpRank)>),
    /// Nobody: `shed`, `policy_failed` or `nobody_left`.
    Refused(&'static str),
}

/// What became of a request that a decision was made for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// HTTP status, 499 when the client left.
    pub status: u16,
    /// `ok`, or a cause's code.
    pub code: &'static str,
    /// The same leg was decided again later: this decision's worker did not serve the request.
    pub retried: bool,
    /// Time to first token, from the request's arrival.
    pub ttft: Option<Duration>,
    /// Mean time between tokens.
    pub itl: Option<Duration>,
    /// Output tokens.
    pub output_tokens: u32,
    /// Cached prompt tokens as predicted when the prompt's worker was chosen.
    pub cached_predicted: Option<u32>,
    /// Cached prompt tokens as the engine reported.
    pub cached_reported: Option<u32>,
}

impl Decisions {
    /// A ring of at most `keep` decisions and `bytes` of their inputs; 0 of either: nothing is kept. `always` are facts
    /// recorded for every leg's decision, whatever its policy wants.
    #[must_use]
    pub fn new(keep: usize, bytes: usize, always: Wants) -> Self {
        let count = (keep.div_ceil(FEWEST)).min(SHARDS).min(bytes.div_ceil(LEAST_BYTES));
        let entries = |place| keep / count + usize::from(place < keep % count);
        let words = bytes.checked_div(count).unwrap_or(0).max(LEAST_BYTES) / size_of::<u32>();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            shards: (0..count).map(|place| Shard::new(entries(place), words)).collect(),
            ticket: AtomicUsize::new(0),
            base: now.as_secs() << 32,
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

    /// Keeps nothing.
    #[must_use]
    pub fn off() -> Self {
        Self::new(0, 0, Wants::default())
    }

    /// The facts of these names, whichever of the two tables they are in.
    ///
    /// # Errors
    /// [`UnknownFact`] names the first that neither has.
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

    /// Whether anything is kept.
    #[must_use]
    pub fn is_on(&self) -> bool {
        !self.shards.is_empty()
    }

    /// Decisions that were not recorded because every shard was held for too long.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// The ids of all that are kept, newest first.
    #[must_use]
    pub fn ids(&self) -> Vec<DecisionId> {
        let mut ids = Vec::new();
        for (place, shard) in self.shards.iter().enumerate() {
            ids.extend(shard.numbers().into_iter().map(|number| self.id(number, place)));
        }
        ids.sort_unstable_by(|a, b| b.cmp(a));
        ids
    }

    /// The ids of the newest, at most `count`, newest first. Takes less from writers than [`Decisions::ids`].
    #[must_use]
    pub fn newest(&self, count: usize) -> Vec<DecisionId> {
        let mut ids = Vec::new();
        for (place, shard) in self.shards.iter().enumerate() {
            ids.extend(shard.last(count).into_iter().map(|number| self.id(number, place)));
        }
        ids.sort_unstable_by(|a, b| b.cmp(a));
        ids.truncate(count);
        ids
    }

    /// A copy of one decision, when it is still kept and `wanted`. `wanted` gets the request's id too, and has to be quick:
    /// the decision is held meanwhile.
    #[must_use]
    pub fn get(&self, id: DecisionId, wanted: impl FnOnce(&DecisionHeader, &str) -> bool) -> Option<Record> {
        let (number, shard) = self.find(id)?;
        let (head, words) = shard.copy(number, wanted)?;
        Some(Record::new(id, head, words, self.always.clone()))
    }

    /// Writes down what became of a decision's request; nothing happens when the decision is gone.
    pub fn outcome(&self, id: DecisionId, outcome: Outcome) {
        if let Some((number, shard)) = self.find(id) {
            shard.outcome(number, outcome);
        }
    }

    /// The facts recorded for every leg's decision.
    pub(crate) fn always(&self) -> &Wants {
        &self.always
    }

    /// Records a decision: `texts` are kept in any case, `words` when they fit.
    pub(crate) fn record(&self, head: DecisionHeader, texts: &[u32], words: &[u32]) -> Option<DecisionId> {
        let count = self.shards.len();
        let ticket = self.ticket.fetch_add(1, Ordering::Relaxed);
        let home = ticket.checked_rem(count)?;
        let least = (ticket / count) as u64;
        let mut head = Some(head);
        let mut write = |ring: &mut shard::Ring, place| {
            let number = ring.push(least, head.take()?, texts, words);
            Some(self.id(number, place))
        };
        for step in 0..count {
            let place = (home + step) % count;
            if let Some(mut ring) = self.shards.get(place).and_then(|shard| shard.ring.try_lock()) {
                return write(&mut ring, place);
            }
        }
        match self.shards.get(home).and_then(|shard| shard.ring.try_lock_for(PATIENCE)) {
            Some(mut ring) => write(&mut ring, home),
            None => {
                self.lost.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    fn id(&self, number: u64, place: usize) -> DecisionId {
        DecisionId(self.base + number * self.shards.len() as u64 + place as u64)
    }

    fn find(&self, id: DecisionId) -> Option<(u64, &Shard)> {
        let number = id.0.checked_sub(self.base)?;
        let count = self.shards.len() as u64;
        let place = usize::try_from(number.checked_rem(count)?).ok()?;
        Some((number / count, self.shards.get(place)?))
    }
}

impl DecidedBy {
    /// Stable label, as [`crate::Decider::label`].
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Native(_) => "native",
            Self::Fallback(_) => "fallback",
            Self::Pin => "pin",
            Self::Session => "session",
            Self::Plan => "plan",
        }
    }
}

impl DecisionId {
    /// The number behind the name, never 0.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for DecisionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for DecisionId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u64::from_str_radix(text, 16).map(Self)
    }
}

impl Serialize for DecisionId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests;
