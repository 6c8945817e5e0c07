//! Usage of all policies' instances together: their number, and the largest memory of any.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// The engine's usage counters.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    instances: AtomicU64,
    memory_peak: AtomicU64,
}

/// Counts one instance while it lives.
#[derive(Debug)]
pub(crate) struct Counted(Arc<Meter>);

/// Present usage of all policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Instances that live, warm and in use.
    pub instances: u64,
    /// The most linear memory that one instance ever had, bytes.
    pub memory_peak_bytes: u64,
    /// Policies that a start or reload found compiled in the disk cache.
    pub cache_hits: u64,
    /// Policies that were compiled because the disk cache did not contain them.
    pub cache_misses: u64,
}

impl Counted {
    pub(crate) fn new(meter: &Arc<Meter>) -> Self {
        meter.instances.fetch_add(1, Ordering::Relaxed);
        Self(meter.clone())
    }

    /// Notes that the instance's memory grew to `bytes`.
    pub(crate) fn grew(&self, bytes: usize) {
        self.0.memory_peak.fetch_max(u64::try_from(bytes).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.instances.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Meter {
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            instances: self.instances.load(Ordering::Relaxed),
            memory_peak_bytes: self.memory_peak.load(Ordering::Relaxed),
            ..Usage::default()
        }
    }
}
