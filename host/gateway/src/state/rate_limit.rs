//! Rate limit of clients, in requests per second: for each API key, each name of a certificate and each
//! subject of a token, and for all other clients together.

use std::{collections::HashMap, fmt, num::NonZeroU32};

use governor::{DefaultDirectRateLimiter, Quota, RateLimiter as Bucket};

use super::caller::CallerId;

/// Buckets of the subjects of tokens.
const SUBJECT_BUCKETS: u64 = 1_024;

/// Rate limit of clients. It has one bucket for each configured key, a fixed number for the subjects of
/// tokens and one for all other requests, so what clients send cannot make it grow.
pub(crate) struct RateLimiter {
    per_second: NonZeroU32,
    by_key: HashMap<String, DefaultDirectRateLimiter>,
    /// Buckets by the hash of the subject.
    by_subject: Box<[DefaultDirectRateLimiter]>,
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
        let by_subject = (0..SUBJECT_BUCKETS).map(|_| bucket()).collect();
        Self { per_second, by_key, by_subject, others: bucket() }
    }

    /// Admits one request of this caller.
    ///
    /// # Errors
    /// [`RateExceeded`].
    pub(crate) fn check(&self, caller: &CallerId) -> Result<(), RateExceeded> {
        let bucket = match caller {
            CallerId::Configured(name) => self.by_key.get(&**name),
            CallerId::Subject(hash) => hash.and_then(|hash| {
                let place = usize::try_from(hash.get() % SUBJECT_BUCKETS).ok()?;
                self.by_subject.get(place)
            }),
        };
        let bucket = bucket.unwrap_or(&self.others);
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
    use std::num::NonZeroU64;

    use super::*;

    #[test]
    fn each_name_has_its_own_bucket_and_callers_without_one_share_one() {
        let keys = ["a", "b"];
        let limiter = RateLimiter::new(NonZeroU32::new(2).unwrap(), keys);
        let exceeded = Err(RateExceeded { per_second: 2 });
        let named = |name: &str| CallerId::Configured(name.into());
        let subject = |hash| CallerId::Subject(NonZeroU64::new(hash));
        // K2.10: a subject shares no bucket with a key.
        for caller in [named("a"), named("b"), subject(7), subject(8), CallerId::ANONYMOUS] {
            assert_eq!([0; 3].map(|_| limiter.check(&caller)), [Ok(()), Ok(()), exceeded], "{caller:?}");
        }
        assert_eq!(limiter.check(&subject(7 + SUBJECT_BUCKETS)), exceeded, "the buckets are bounded");
    }
}
