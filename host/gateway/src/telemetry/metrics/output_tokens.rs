//! The counter of output tokens, which running requests add to.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter},
};

/// Number of output tokens. A request adds its tokens at each new block of its output, and takes some back if
/// its engine reports fewer than were counted. A value that was read never decreases.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutputTokens(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    tokens: AtomicU64,
    /// Largest value that was read.
    shown: AtomicU64,
}

impl OutputTokens {
    /// Replaces the number of tokens that a request added before with its number now.
    pub(crate) fn replace(&self, before: u32, now: u32) {
        let tokens = &self.0.tokens;
        if now > before {
            tokens.fetch_add(u64::from(now - before), Ordering::Relaxed);
        } else if now < before {
            tokens.fetch_sub(u64::from(before - now), Ordering::Relaxed);
        }
    }

    /// Returns the number of tokens, or a larger one that was returned before.
    pub(crate) fn get(&self) -> u64 {
        let now = self.0.tokens.load(Ordering::Relaxed);
        self.0.shown.fetch_max(now, Ordering::Relaxed).max(now)
    }
}

impl EncodeMetric for OutputTokens {
    fn encode(&self, encoder: MetricEncoder<'_>) -> fmt::Result {
        ConstCounter::new(self.get()).encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_correction_lowers_no_value_that_was_read() {
        let output = OutputTokens::default();
        output.replace(0, 40);
        output.replace(40, 8);
        assert_eq!(output.get(), 8);
        output.replace(0, 40);
        assert_eq!(output.get(), 48);
        output.replace(40, 8);
        assert_eq!(output.get(), 48);
        output.replace(0, 33);
        assert_eq!(output.get(), 49);
    }
}
