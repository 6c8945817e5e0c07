//! Load figures that an engine reports, by rank.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::time::{Duration, Instant};

use super::RankView;

/// Load figures that the engine reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineLoad {
    /// Number of running requests, if the engine reports it.
    pub running: Option<u32>,
    /// Number of waiting requests, if the engine reports it.
    pub waiting: Option<u32>,
    /// Fraction of the KV cache in use, 0 to 1, if the engine reports it.
    pub kv_usage: Option<f32>,
    /// When the figures were read, in whole milliseconds after the columns were created.
    pub read_at: Instant,
}

impl EngineLoad {
    /// Returns how old the figures are, milliseconds.
    #[must_use]
    pub fn age_ms(&self, now: Instant) -> u32 {
        u32::try_from(now.saturating_duration_since(self.read_at).as_millis()).unwrap_or(u32::MAX)
    }

    /// Returns the load of two ranks together: the sum of requests, and the higher use of a cache.
    #[must_use]
    pub(crate) fn and(self, other: Self) -> Self {
        let sum = |one: Option<u32>, other: Option<u32>| match (one, other) {
            (Some(one), Some(other)) => Some(one.saturating_add(other)),
            (one, other) => one.or(other),
        };
        Self {
            running: sum(self.running, other.running),
            waiting: sum(self.waiting, other.waiting),
            kv_usage: self.kv_usage.into_iter().chain(other.kv_usage).reduce(f32::max),
            read_at: self.read_at.min(other.read_at),
        }
    }
}

/// The figures in a column. A decision that runs while they change may see some of both readings.
#[derive(Debug, Default)]
pub(super) struct EngineCell {
    /// Milliseconds from the creation of the chunk to the reading, plus 1; 0: there are no figures.
    read_at: AtomicU64,
    /// [`UNKNOWN`] if the engine does not report it, and so are the next two.
    running: AtomicU32,
    waiting: AtomicU32,
    /// Bits of a single.
    kv_usage: AtomicU32,
}

/// A figure that the engine does not report. Read as an `f32`, it is not a number.
const UNKNOWN: u32 = u32::MAX;

fn known(cell: &AtomicU32) -> Option<u32> {
    Some(cell.load(Ordering::Relaxed)).filter(|value| *value != UNKNOWN)
}

fn store(cell: &AtomicU32, value: Option<u32>) {
    cell.store(value.unwrap_or(UNKNOWN), Ordering::Relaxed);
}

impl EngineCell {
    pub(super) fn clear(&self) {
        self.read_at.store(0, Ordering::Release);
    }
}

impl RankView<'_> {
    /// Returns the load figures of the rank, if they are known; those of the whole engine if it reports none
    /// of its ranks.
    #[must_use]
    pub fn engine_load(&self) -> Option<EngineLoad> {
        let millis = self.engine.read_at.load(Ordering::Acquire).checked_sub(1)?;
        Some(EngineLoad {
            running: known(&self.engine.running),
            waiting: known(&self.engine.waiting),
            kv_usage: known(&self.engine.kv_usage).map(f32::from_bits),
            read_at: self.created + Duration::from_millis(millis),
        })
    }

    /// Stores the load figures of the engine; `None` when they are not known any more.
    pub(crate) fn set_engine_load(&self, load: Option<EngineLoad>) {
        let Some(load) = load else { return self.engine.clear() };
        let count = |count: Option<u32>| count.map(|count| count.min(UNKNOWN - 1));
        store(&self.engine.running, count(load.running));
        store(&self.engine.waiting, count(load.waiting));
        store(&self.engine.kv_usage, load.kv_usage.map(f32::to_bits));
        let millis = load.read_at.saturating_duration_since(self.created).as_millis();
        let millis = u64::try_from(millis).unwrap_or(u64::MAX - 1);
        self.engine.read_at.store(millis + 1, Ordering::Release);
    }
}
