//! Pauses between the attempts of a request.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};

/// Pauses between attempts: from 10 ms, doubled each time up to 1 s, with jitter.
pub(crate) type Backoff = backon::ExponentialBackoff;

/// Returns the pauses of one request.
pub(crate) fn backoff() -> Backoff {
    pauses().build()
}

/// Like [`backoff`]; `seed` determines the jitter.
pub(crate) fn seeded_backoff(seed: u64) -> Backoff {
    pauses().with_jitter_seed(seed).build()
}

fn pauses() -> ExponentialBuilder {
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(10))
        .with_max_delay(Duration::from_secs(1))
        .without_max_times()
        .with_jitter()
}
