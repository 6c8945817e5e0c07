//! `[queue]`: requests that wait for a worker, and how many may be in flight.

use std::{collections::BTreeMap, time::Duration};

use pointsman_config_file::{duration::secs, section};

/// Requests that wait while every eligible worker is busy, or while `max_inflight` requests are in flight.
#[section]
pub struct Queue {
    /// Requests that may wait; 0: no queue.
    pub limit: usize,
    /// Size in bytes of the bodies of all requests that wait.
    #[key(default = 256 * 1024 * 1024)]
    pub bytes: usize,
    /// How long a request may wait.
    #[key(default = secs(30))]
    pub timeout: Duration,
    /// Maximum number of requests in flight; further ones wait; 0: no limit.
    pub max_inflight: usize,
    /// Whether running streams pause while requests of a higher priority wait.
    pub preempt: bool,
    /// Weight of an input token when tenants share workers.
    #[key(default = 1.0, range = 0.0..=1e6, reason = "is not a weight")]
    pub input_weight: f64,
    /// Weight of an output token.
    #[key(default = 2.0, range = 0.0..=1e6, reason = "is not a weight")]
    pub output_weight: f64,
    /// Bounds of one model, besides those of all.
    #[key(example = "\"NAME\"", nested, by_key)]
    pub models: BTreeMap<String, QueueOfModel>,
}

/// Bounds of one model.
#[section]
#[derive(Copy, Eq)]
pub struct QueueOfModel {
    /// Requests that may wait; 0: as many as of all models.
    pub limit: usize,
    /// Maximum number of requests in flight; further ones wait; 0: no limit.
    pub max_inflight: usize,
}
