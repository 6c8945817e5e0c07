//! How often a client may ask: so many requests a second for each key, or for everybody together where there are no keys.

use std::{fmt, num::NonZeroU32};

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};

use crate::openai::error::ApiError;

/// One limiter a key.
pub struct Limiter {
    per_second: NonZeroU32,
    keys: DefaultKeyedRateLimiter<String>,
}

impl Limiter {
    /// A limiter that lets `per_second` requests of each key pass, with bursts of as many.
    #[must_use]
    pub fn new(per_second: NonZeroU32) -> Self {
        Self { per_second, keys: RateLimiter::keyed(Quota::per_second(per_second)) }
    }

    /// Takes a request of `key`, which has been checked to be one of ours.
    ///
    /// # Errors
    /// [`ApiError::RateLimited`].
    pub fn check(&self, key: &str) -> Result<(), ApiError> {
        let taken = self.keys.check_key(&key.to_owned());
        taken.map_err(|_| ApiError::RateLimited(self.per_second.get()))
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter").field("per_second", &self.per_second).finish_non_exhaustive()
    }
}
