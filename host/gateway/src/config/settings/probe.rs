//! `[probe]`, validated.

use std::time::Duration;

settings! {
    /// How workers are probed.
    ProbeSettings {
        /// Interval of health checks.
        "probe.interval" interval: Duration,
        /// Limit of one request.
        "probe.timeout" timeout: Duration,
        /// Limit of the health check of an engine that is slow to answer them, or may be.
        "probe.health_timeout" health_timeout: Duration,
        /// Interval of reading a worker's own load figures; 0: never.
        "probe.load_interval" load_interval: Duration,
        /// Most requests of probes to all workers together each second.
        "probe.max_per_second" max_per_second: u32,
        /// How long requests may wait for a worker that makes no progress; 0: for ever.
        "probe.wedge_after" wedge_after: Duration,
    }
}
