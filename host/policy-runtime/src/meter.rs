//! What instances take, all policies together: how many live, and the most memory one of them ever had.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// The engine's meter.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    instances: AtomicU64,
    memory_peak: AtomicU64,
}

/// One instance on the meter, as long as it lives.
#[derive(Debug)]
pub(crate) struct Counted(Arc<Meter>);

/// What policies take now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Instances that live, warm and in use.
    pub instances: u64,
    /// The most linear memory that one instance ever had, bytes.
    pub memory_peak_bytes: u64,
    /// Policies that a start or reload found compiled in the disk cache.
    pub cache_hits: u64,
    /// Policies that had to be compiled although there is a cache.
    pub cache_misses: u64,
}

impl Counted {
    pub(crate) fn new(meter: &Arc<Meter>) -> Self {
        meter.instances.fetch_add(1, Ordering::Relaxed);
        Self(meter.clone())
    }

    /// The instance's memory grew to so many bytes.
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
