//! The generations of a slot at one moment: the active one, a canary for a share of requests, and a shadow.

use std::sync::Arc;

use super::generation::GenerationHandle;
use crate::{policy::OnFailure, query::RoutingRequest};

/// The generations of a slot at one moment. A leg pins one snapshot and keeps it.
#[derive(Clone, Debug)]
pub struct SlotSnapshot {
    /// Serves the requests that the canary does not serve.
    pub active: Arc<GenerationHandle>,
    /// Serves its share of requests.
    pub canary: Option<Trial>,
    /// Runs beside the generation that serves; its answer is never used.
    pub shadow: Option<Trial>,
    /// The slot's own reaction to failures; `None`: the router's.
    pub on_failure: Option<OnFailure>,
    /// Number of candidates that its policies see at most; `None`: all that are eligible.
    pub max_rows: Option<u32>,
}

/// A generation on trial.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The generation on trial.
    pub handle: Arc<GenerationHandle>,
    /// Share of requests, 0 to 1.
    pub share: f64,
}

/// Mixed into the shadow's draw, so that a shadow and a canary with equal shares see different requests.
const SHADOW: u64 = 0x5368_6164_6f77_2e31;

impl SlotSnapshot {
    /// Returns the generation that serves this request. A session gets the same one as long as the snapshot
    /// is in force. Without a session each request is drawn, with the same result for all its legs. The
    /// active generation replaces a canary whose breaker is open.
    #[must_use]
    pub fn serving(&self, request: &RoutingRequest) -> &Arc<GenerationHandle> {
        let key = request.session_hash.unwrap_or(request.draw);
        match &self.canary {
            Some(canary) if is_in_share(key, canary.share) && !canary.handle.breaker.is_paused() => {
                &canary.handle
            }
            _ => &self.active,
        }
    }

    /// Returns whether a policy observes the outcome of a decision of this generation: one of its own, or one
    /// of the shadow.
    pub(crate) fn learns(&self, generation: &GenerationHandle) -> bool {
        generation.learns || self.shadow.as_ref().is_some_and(|shadow| shadow.handle.learns)
    }

    /// Returns the shadow, when this request is in its share.
    #[must_use]
    pub(crate) fn shadowing(&self, request: &RoutingRequest) -> Option<&Arc<GenerationHandle>> {
        let shadow = self.shadow.as_ref()?;
        is_in_share(request.draw ^ SHADOW, shadow.share).then_some(&shadow.handle)
    }
}

/// Returns whether the hash of `key` lies in the first `share` of all hashes.
fn is_in_share(key: u64, share: f64) -> bool {
    #[expect(clippy::cast_precision_loss, reason = "a share needs no 64 bits")]
    let place = (mix(key) >> 11) as f64 / (1_u64 << 53) as f64;
    place < share
}

/// The finalizer of splitmix64: every bit of the key moves half of the bits of the answer.
fn mix(key: u64) -> u64 {
    let mut z = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_that_share_of_keys_even_of_neighbours() {
        for share in [0.0, 0.05, 0.5, 1.0] {
            let hits = (0..40_000_u64).filter(|key| is_in_share(*key, share)).count() as f64 / 40_000.0;
            assert!((hits - share).abs() < 0.01, "{share}: {hits}");
        }
        assert!(!is_in_share(u64::MAX, 0.0) && is_in_share(u64::MAX, 1.0));
    }

    #[test]
    fn a_larger_share_keeps_the_keys_of_a_smaller_one() {
        assert!((0..10_000).filter(|key| is_in_share(*key, 0.1)).all(|key| is_in_share(key, 0.3)));
    }
}
