//! `[limits]`.

use super::Problems;
use crate::config::{Limits, settings::LimitSettings};

/// Largest limit of the sequences of one request.
const MAX_SEQUENCES: u32 = 1_048_576;

impl Problems {
    pub(super) fn limits(&mut self, limits: &Limits, max_body_bytes: usize) -> LimitSettings {
        let Limits {
            choices,
            prompts,
            sequences,
            connections,
            connections_per_address,
            http2_requests,
            realtime_connections,
            body_bytes_in_flight,
            min_body_rate,
        } = *limits;
        if connections == 0 {
            self.add("limits.connections", "`0` would refuse every client: expected 1 or more");
        }
        if http2_requests == 0 {
            let message = "`0` would refuse every request over HTTP/2: expected 1 or more, or \
                           server.http2.enabled = false";
            self.add("limits.http2_requests", message);
        }
        // Large bodies use at most seven eighths.
        if body_bytes_in_flight / 8 * 7 < max_body_bytes {
            let message = format!(
                "`{body_bytes_in_flight}` is too small for one body of server.max_body_bytes \
                 ({max_body_bytes}): expected 8/7 of that or more"
            );
            self.add("limits.body_bytes_in_flight", message);
        }
        LimitSettings {
            choices: self.bound("limits.choices", choices),
            prompts: self.bound("limits.prompts", prompts),
            sequences: self.bound("limits.sequences", sequences),
            connections,
            connections_per_address,
            http2_requests,
            realtime_connections,
            body_bytes_in_flight,
            min_body_rate,
        }
    }

    /// Returns a limit of a request, which has a limit itself: each sequence takes memory.
    fn bound(&mut self, path: &str, limit: u32) -> u32 {
        if limit > MAX_SEQUENCES {
            self.add(path, format!("`{limit}` is too large: expected at most {MAX_SEQUENCES}"));
        }
        self.size(path, limit)
    }
}
