//! Exponentially weighted moving averages, each in one atomic integer. Legs update them at their end;
//! decisions read them.

use std::sync::atomic::{AtomicU32, Ordering};

/// Moving average that gives the newest value a weight of 1/8. 0 means that no value was observed.
#[derive(Debug, Default)]
pub(crate) struct Average(AtomicU32);

impl Average {
    /// Adds a value. The first one becomes the average. A value of 0 counts as 1, because 0 means "none
    /// observed".
    pub(crate) fn observe(&self, value: u32) {
        let value = value.max(1);
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
            let next = if old == 0 { u64::from(value) } else { (u64::from(old) * 7 + u64::from(value)) / 8 };
            Some(u32::try_from(next).unwrap_or(u32::MAX).max(1))
        });
    }

    /// Adds a fraction in parts per million. Here 0 is an ordinary value, and the average starts at 0.
    pub(crate) fn observe_share(&self, ppm: u32) {
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
            u32::try_from((u64::from(old) * 7 + u64::from(ppm)) / 8).ok()
        });
    }

    /// Forgets all values.
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_counts_whole_and_later_ones_an_eighth() {
        let average = Average::default();
        average.observe(800);
        assert_eq!(average.get(), 800);
        average.observe(1_600);
        assert_eq!(average.get(), 900);
    }

    #[test]
    fn a_share_rises_with_failures_and_falls_with_successes() {
        let share = Average::default();
        share.observe_share(1_000_000);
        assert_eq!(share.get(), 125_000);
        share.observe_share(0);
        assert_eq!(share.get(), 109_375);
    }
}
