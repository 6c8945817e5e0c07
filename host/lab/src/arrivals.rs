//! Random times between arrivals.

use rand::rngs::SmallRng;
use rand_distr::{Distribution as _, Gamma};

/// The time to the next arrival, seconds: Gamma-distributed with this mean rate.
pub(crate) fn interval(rng: &mut SmallRng, rate: f64, burstiness: f64) -> f64 {
    let (burstiness, mean) = (burstiness.max(1e-3), 1.0 / rate.max(1e-9));
    // Shape and scale are above 0, so that the distribution exists.
    Gamma::new(1.0 / burstiness, mean * burstiness).map_or(mean, |gamma| gamma.sample(rng))
}

/// Returns the mean rate of `requests` that arrive within `seconds`.
#[expect(clippy::cast_precision_loss, reason = "numbers of requests stay far below 2^53")]
pub(crate) fn rate(requests: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { requests as f64 / seconds } else { 0.0 }
}
