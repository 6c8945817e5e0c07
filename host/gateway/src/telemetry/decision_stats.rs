//! Decisions and their outcomes of the last hour, by slot and lane, to compare active, canary and shadow.
//! A new generation of a lane starts over: figures of two policies together would be of neither. Data threads
//! update the statistics without locks.

use std::{
    collections::HashMap,
    sync::{
        OnceLock,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use pointsman_routing::{Generation, Lane, ShadowResult, SlotKind, Slots};
use pointsman_workers::ModelName;
use tokio::time::{Duration, Instant};

use super::histogram::{BUCKETS, bucket};

mod sum;

pub(crate) use sum::LaneSum;

/// Longest window in minutes, the current one included.
pub(crate) const MAX_MINUTES: u64 = 60;

/// Statistics of each slot. The set of slots is fixed at start. A lane takes 120 KB after its first decision.
#[derive(Debug)]
pub(crate) struct DecisionStats {
    begun: Instant,
    shared: [SlotStats; SlotKind::ALL.len()],
    by_model: HashMap<ModelName, HashMap<SlotKind, SlotStats>>,
}

/// The lanes of a slot.
type SlotStats = [OnceLock<LaneStats>; Lane::ALL.len()];

/// Statistics of the newest generation of a lane.
#[derive(Debug)]
struct LaneStats {
    generation: AtomicU64,
    minutes: Box<[Minute]>,
}

/// One minute of a lane.
#[derive(Debug)]
struct Minute {
    number: AtomicU64,
    counts: [AtomicU64; COUNTS],
    times: [[AtomicU32; BUCKETS]; TIMES],
}

/// Positions in [`Minute::counts`] and [`LaneSum::counts`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Count {
    Decisions,
    Fallbacks,
    Sheds,
    /// Decisions for which a shadow was asked, too, and those in which the shadow made the same choice.
    Compared,
    Agreed,
    /// Prompt blocks of the decisions for which the index was searched, and the blocks expected to be cached.
    PromptBlocks,
    CachedBlocks,
    /// Decisions whose requests ended with status 500 or above.
    Failed,
}

/// Number of [`Count`]s.
const COUNTS: usize = 8;
/// TTFT, ITL and E2E.
const TIMES: usize = 3;

/// One decision.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Decided {
    pub(crate) by_fallback: bool,
    pub(crate) is_shed: bool,
    /// Whether its request ended with status 500 or above.
    pub(crate) is_failed: bool,
    /// Whether a shadow agrees; `None` if there was no shadow.
    pub(crate) agrees: Option<bool>,
    /// Number of blocks of the prompt, and number of those expected to be cached, at the time of the choice.
    pub(crate) blocks: Option<(u32, u32)>,
    /// TTFT, ITL and E2E of a request that was served.
    pub(crate) times: [Option<Duration>; TIMES],
}

impl Decided {
    /// Returns the decision that a shadow made beside another one.
    pub(crate) fn by_shadow(shadow: &ShadowResult) -> Self {
        Self {
            by_fallback: shadow.answer.is_fallback(),
            is_shed: shadow.answer.is_refusal(),
            agrees: Some(shadow.agrees),
            ..Self::default()
        }
    }
}

/// Returns the generation by which a shadow's decisions are counted. They are compared with those of one
/// active generation.
#[must_use]
pub(crate) fn compared_generation(shadow: Generation, active: Generation) -> Generation {
    shadow.max(active)
}

impl DecisionStats {
    /// Returns empty statistics of these slots.
    #[must_use]
    pub(crate) fn new(slots: &Slots) -> Self {
        let mut by_model: HashMap<ModelName, HashMap<SlotKind, SlotStats>> = HashMap::new();
        for slot in slots.iter() {
            if let Some(model) = slot.model() {
                by_model.entry(model.clone()).or_default().insert(slot.kind(), SlotStats::default());
            }
        }
        Self { begun: Instant::now(), shared: Default::default(), by_model }
    }

    /// Counts a decision about a request for a model, which may be an adapter of a parent. `lane` is that of
    /// the generation that decided.
    pub(crate) fn note(
        &self,
        (model, parent): (&ModelName, Option<&ModelName>),
        kind: SlotKind,
        (lane, generation): (Lane, Generation),
        decided: &Decided,
    ) {
        let own = |model: &ModelName| self.by_model.get(model)?.get(&kind);
        let Some(lanes) = own(model).or_else(|| own(parent?)).or_else(|| self.shared(kind)) else { return };
        let Some(cell) = lanes.get(lane_index(lane)) else { return };
        let number = self.minute();
        let stats = cell.get_or_init(LaneStats::default);
        let place = usize::try_from(number % MAX_MINUTES).unwrap_or_default();
        let Some(minute) = stats.minutes.get(place).filter(|_| stats.counts(generation)) else { return };
        // The first thread in a new minute empties the cell. An addition by another thread at that time may
        // be lost.
        if minute.number.swap(number, Ordering::Relaxed) != number {
            minute.clear();
        }
        minute.add(decided);
    }

    /// Sums the last minutes of a lane, the current one included. `model` is the model of the slot, or `None`
    /// for a shared slot. `runs` is the generation that the lane runs: before its first decision the sum is
    /// empty. Returns the generation that the sum belongs to.
    #[must_use]
    pub(crate) fn sum(
        &self,
        model: Option<&ModelName>,
        kind: SlotKind,
        (lane, runs): (Lane, Option<Generation>),
        minutes: u64,
    ) -> (LaneSum, Option<Generation>) {
        let lanes = match model {
            Some(model) => self.by_model.get(model).and_then(|own| own.get(&kind)),
            None => self.shared(kind),
        };
        let cells = lanes.and_then(|lanes| lanes.get(lane_index(lane))?.get());
        let of = |stats: &LaneStats| Generation(stats.generation.load(Ordering::Relaxed));
        let cells = cells.filter(|stats| runs.is_none_or(|runs| runs == of(stats)));
        let generation = runs.or_else(|| cells.map(of));
        let now = self.minute();
        let cells = cells.map(|stats| &*stats.minutes).unwrap_or_default();
        (LaneSum::of(cells, now, minutes.clamp(1, MAX_MINUTES)), generation)
    }

    fn shared(&self, kind: SlotKind) -> Option<&SlotStats> {
        let position = SlotKind::ALL.into_iter().position(|other| other == kind)?;
        self.shared.get(position)
    }

    fn minute(&self) -> u64 {
        self.begun.elapsed().as_secs() / 60
    }
}

fn lane_index(lane: Lane) -> usize {
    Lane::ALL.into_iter().position(|other| other == lane).unwrap_or_default()
}

impl Default for LaneStats {
    fn default() -> Self {
        let minutes = (0..MAX_MINUTES).map(|_| Minute::default()).collect();
        Self { generation: AtomicU64::new(0), minutes }
    }
}

impl LaneStats {
    /// Returns whether a decision of this generation counts. The first one of a newer generation forgets what
    /// was counted; requests of older ones may end later.
    fn counts(&self, Generation(generation): Generation) -> bool {
        let before = self.generation.fetch_max(generation, Ordering::Relaxed);
        if before < generation {
            self.minutes.iter().for_each(|minute| minute.number.store(u64::MAX, Ordering::Relaxed));
        }
        before <= generation
    }
}

impl Default for Minute {
    fn default() -> Self {
        Self {
            number: AtomicU64::new(u64::MAX),
            counts: Default::default(),
            times: [const { [const { AtomicU32::new(0) }; BUCKETS] }; TIMES],
        }
    }
}

impl Minute {
    fn clear(&self) {
        self.counts.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        self.times.iter().flatten().for_each(|count| count.store(0, Ordering::Relaxed));
    }

    fn add(&self, decided: &Decided) {
        let Decided { by_fallback, is_shed, is_failed, agrees, blocks, times } = *decided;
        let count = |which: Count, more: u64| {
            if let Some(count) = self.counts.get(which as usize).filter(|_| more > 0) {
                count.fetch_add(more, Ordering::Relaxed);
            }
        };
        count(Count::Decisions, 1);
        count(Count::Fallbacks, by_fallback.into());
        count(Count::Sheds, is_shed.into());
        count(Count::Failed, is_failed.into());
        count(Count::Compared, agrees.is_some().into());
        count(Count::Agreed, (agrees == Some(true)).into());
        let (prompt, cached) = blocks.unwrap_or_default();
        count(Count::PromptBlocks, prompt.into());
        count(Count::CachedBlocks, cached.into());
        for (time, buckets) in times.iter().zip(&self.times) {
            if let Some(bucket) = time.and_then(|time| buckets.get(bucket(time))) {
                bucket.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests;
