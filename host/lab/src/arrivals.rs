//! Rates of arrivals, and random times between arrivals.

use rand::rngs::SmallRng;
use rand_distr::{Distribution as _, Gamma};
use serde::Serialize;

/// What a rate of arrivals counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ArrivalUnit {
    /// Requests, in a trace in which no request waits for an answer.
    Requests,
    /// Requests that do not wait for an answer, in a trace in which others do.
    SessionStarts,
    /// Requests by their times in the trace, although some may have to wait longer for an answer.
    ScheduledRequests,
}

impl ArrivalUnit {
    /// Returns the name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::SessionStarts => "session starts",
            Self::ScheduledRequests => "scheduled requests",
        }
    }
}

/// The arrivals of a trace whose times no arm changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Arrivals {
    pub(crate) unit: ArrivalUnit,
    pub(crate) count: usize,
    /// Time of the last one, seconds from the start of the trace at its own speed.
    pub(crate) seconds: f64,
}

impl Arrivals {
    /// Returns the mean rate at a speed.
    pub(crate) fn per_s(&self, speed: f64) -> f64 {
        rate(self.count, self.seconds) * speed
    }
}

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
