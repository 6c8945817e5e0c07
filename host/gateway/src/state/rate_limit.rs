//! Rate limit of clients: so many requests per second for each API key and each name of a certificate, and
//! for all other clients together.

use std::{collections::HashMap, fmt, num::NonZeroU32};

use governor::{DefaultDirectRateLimiter, Quota, RateLimiter as Bucket};

/// Rate limit of clients. It has one bucket for each configured key and one for all other requests, so what
/// clients send cannot make it grow.
pub(crate) struct RateLimiter {
    per_second: NonZeroU32,
    by_key: HashMap<String, DefaultDirectRateLimiter>,
    others: DefaultDirectRateLimiter,
}

/// A client made more requests than it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RateExceeded {
    /// Requests per second that it may make.
    pub per_second: u32,
}

impl RateLimiter {
    /// Returns a limiter that admits `per_second` requests of each key, in bursts of at most as many. `keys`
    /// are the ids of the keys.
    #[must_use]
    pub(crate) fn new<'a>(per_second: NonZeroU32, keys: impl IntoIterator<Item = &'a str>) -> Self {
        let bucket = || Bucket::direct(Quota::per_second(per_second));
        let by_key = keys.into_iter().map(|key| (key.to_owned(), bucket())).collect();
        Self { per_second, by_key, others: bucket() }
    }

    /// Admits one request of the key with this id.
    ///
    /// # Errors
    /// [`RateExceeded`].
    pub(crate) fn check(&self, key: &str) -> Result<(), RateExceeded> {
        let bucket = self.by_key.get(key).unwrap_or(&self.others);
        bucket.check().map_err(|_| RateExceeded { per_second: self.per_second.get() })
    }
}

impl fmt::Debug for RateLimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The keys stay out of logs.
        f.debug_struct("RateLimiter").field("per_second", &self.per_second).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_its_own_bucket_and_unknown_keys_share_one() {
        let keys = ["a", "b"];
        let limiter = RateLimiter::new(NonZeroU32::new(2).unwrap(), keys);
        let exceeded = Err(RateExceeded { per_second: 2 });
        for key in ["a", "b"] {
            assert_eq!([0; 3].map(|_| limiter.check(key)), [Ok(()), Ok(()), exceeded], "{key}");
        }
        let unknown: Vec<_> = (0..1_000).map(|number| limiter.check(&format!("key-{number}"))).collect();
        assert_eq!(unknown.iter().filter(|outcome| outcome.is_ok()).count(), 2, "one bucket for all");
        assert_eq!(limiter.by_key.len(), 2, "unknown keys are not stored");
    }
}
