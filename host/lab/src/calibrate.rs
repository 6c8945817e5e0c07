//! Calibration: fits the step time of an engine model to what clients measured, and checks the model on
//! requests that were not fitted.
//!
//! Each observation covers a sequence of steps. The fit runs the measured requests through the engine model
//! ([`pointsman_sim::core::BatchEngine`]), which yields the steps from a request's arrival to its first
//! token, and from there to its last. The duration of those steps is linear in the coefficients, so the
//! coefficients are the solution of a least-squares problem. A solution changes the schedule a little, so the
//! fit repeats until schedule and coefficients agree. The check runs the requests that were not fitted
//! through the lab as `pointsman compare` does.

pub use design::{Burst, Design, DesignLimits, MixRequest, design};
pub use errors::{Errors, HeldOut};
pub use fit::{Coefficients, Fit, Term, TermFit, fit_engine, fit_links};
pub use fleet_file::fleet_text;
pub use from_log::{LogArgs, calibrate_log};
pub use predict::{check, predict};
pub use report::{
    CalibrateError, Calibration, Capacity, EngineMeasurements, KnownCapacity, Measurements, calibrate,
};

mod design;
mod errors;
mod fit;
mod fleet_file;
mod from_log;
pub(crate) mod least_squares;
mod predict;
mod replay;
mod report;

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One request as its client measured it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// Time at which the client sent it, milliseconds from the start of its experiment.
    pub at_ms: f64,
    /// Prompt tokens.
    pub isl: u32,
    /// Prompt tokens that the engine had cached.
    pub cached: u32,
    /// Output tokens, at least 1.
    pub osl: u32,
    /// Time to the first token, milliseconds.
    pub ttft_ms: f64,
    /// Time to the last token, milliseconds.
    pub e2e_ms: f64,
}

/// Requests that an engine served without other load. The engine was idle when they began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Experiment {
    /// Requests, ordered by the time at which the client sent them.
    pub samples: Vec<Sample>,
}

/// Times of a request as the model predicts them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predicted {
    /// Time to the first token, milliseconds.
    pub ttft_ms: f64,
    /// Mean inter-token latency, milliseconds; `None` for one token.
    pub itl_ms: Option<f64>,
    /// Time to the last token, milliseconds.
    pub e2e_ms: f64,
}

impl Sample {
    /// Returns the mean inter-token latency, milliseconds; `None` for one token.
    #[must_use]
    pub fn itl_ms(&self) -> Option<f64> {
        (self.osl > 1).then(|| (self.e2e_ms - self.ttft_ms) / f64::from(self.osl - 1))
    }

    fn at(&self) -> Duration {
        Duration::from_secs_f64((self.at_ms / 1e3).clamp(0.0, 1e9))
    }
}

#[cfg(test)]
mod tests;
