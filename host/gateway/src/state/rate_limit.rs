//! Rate limit of clients, in requests per second: for each API key, each name of a certificate and each
//! subject of a token, and for all other clients together.

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher as _, RandomState},
    num::NonZeroU32,
};

use governor::{DefaultDirectRateLimiter, Quota, RateLimiter as Bucket};

/// Buckets of the subjects of tokens.
const SUBJECT_BUCKETS: usize = 1_024;

/// Rate limit of clients. It has one bucket for each configured key, a fixed number for the subjects of
/// tokens and one for all other requests, so what clients send cannot make it grow.
pub(crate) struct RateLimiter {
    per_second: NonZeroU32,
    by_key: HashMap<String, DefaultDirectRateLimiter>,
    /// Buckets by the hash of the subject. The hash has a random key, so that no caller can choose to share
    /// another's bucket.
    by_subject: Box<[DefaultDirectRateLimiter]>,
    hasher: RandomState,
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
        Self { per_second, by_key, by_subject, hasher: RandomState::new(), others: bucket() }
    }

    /// Admits one request of the caller with this id; `None`: the caller has no name.
    ///
    /// # Errors
    /// [`RateExceeded`].
    pub(crate) fn check(&self, caller: Option<&str>) -> Result<(), RateExceeded> {
        let bucket = caller.map_or(&self.others, |name| self.bucket_of(name));
        bucket.check().map_err(|_| RateExceeded { per_second: self.per_second.get() })
    }

    fn bucket_of(&self, name: &str) -> &DefaultDirectRateLimiter {
        let of_subject = || {
            let hash = self.hasher.hash_one(name) % SUBJECT_BUCKETS as u64;
            usize::try_from(hash).ok().and_then(|place| self.by_subject.get(place))
        };
        self.by_key.get(name).or_else(of_subject).unwrap_or(&self.others)
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
    fn each_name_has_its_own_bucket_and_callers_without_one_share_one() {
        let keys = ["a", "b"];
        let limiter = RateLimiter::new(NonZeroU32::new(2).unwrap(), keys);
        let exceeded = Err(RateExceeded { per_second: 2 });
        for name in [Some("a"), Some("b"), Some("subject of a token"), None] {
            assert_eq!([0; 3].map(|_| limiter.check(name)), [Ok(()), Ok(()), exceeded], "{name:?}");
        }
        for number in 0..100_000 {
            _ = limiter.check(Some(&format!("subject-{number}")));
        }
        let kept = (limiter.by_key.len(), limiter.by_subject.len());
        assert_eq!(kept, (2, SUBJECT_BUCKETS), "names of tokens are not stored");
    }
}
