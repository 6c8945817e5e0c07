//! Verifies keys with argon2id digests, which are slow by design, away from the threads that serve clients.
//!
//! ```text
//! key --> verdict known? --> few of this address? --> place in the queue? --> thread --> verdict
//!              yes: answer        no: busy                 no: busy
//! ```
//! Verdicts are kept by a hash of key and digest that only this process can compute.

use std::{net::IpAddr, sync::Arc, time::Duration};

use quick_cache::sync::Cache;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use crate::{config::is_key_of, count_by_key::CountByKey};

/// Verifications at the same time.
const MAX_RUNNING: usize = 2;
/// Verifications that run or wait.
const MAX_WAITING: usize = 64;
/// Largest number of them that one address started.
const MAX_OF_ADDRESS: usize = 8;
/// Time limit of a verification, with its wait.
const DEADLINE: Duration = Duration::from_secs(5);
/// Verdicts that are kept.
const MAX_VERDICTS: usize = 8_192;

/// Verifies slow keys.
pub(crate) struct SlowKeys {
    secret: [u8; 32],
    verdicts: Cache<[u8; 32], bool>,
    running: Arc<Semaphore>,
    waiting: Semaphore,
    addresses: Arc<CountByKey<IpAddr>>,
}

/// A key was not verified: too many wait, or it took too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Busy;

impl Default for SlowKeys {
    fn default() -> Self {
        Self {
            secret: rand::random(),
            verdicts: Cache::new(MAX_VERDICTS),
            running: Arc::new(Semaphore::new(MAX_RUNNING)),
            waiting: Semaphore::new(MAX_WAITING),
            addresses: Arc::default(),
        }
    }
}

impl SlowKeys {
    /// Returns whether `key` is the key of the digest `phc`. Equal keys are verified once. `delay`: how long
    /// a verification waits first, because its address sent wrong keys.
    ///
    /// # Errors
    /// [`Busy`].
    pub(crate) async fn verify(
        &self,
        key: &str,
        phc: &str,
        address: IpAddr,
        delay: Option<Duration>,
    ) -> Result<bool, Busy> {
        let name = self.name(key, phc);
        if let Some(verdict) = self.verdicts.get(&name) {
            return Ok(verdict);
        }
        let verified = self.verdicts.get_or_insert_async(&name, async {
            let _of_address = self.addresses.enter_below(address, MAX_OF_ADDRESS).ok_or(Busy)?;
            if let Some(delay) = delay {
                tokio::time::sleep(delay).await;
            }
            let _place = self.waiting.try_acquire().map_err(|_| Busy)?;
            let turn = self.running.clone().acquire_owned().await.map_err(|_| Busy)?;
            let (key, phc) = (key.to_owned(), phc.to_owned());
            let work = tokio::task::spawn_blocking(move || {
                // A client that leaves does not make room for a further thread.
                let _turn = turn;
                is_key_of(&key, &phc)
            });
            work.await.map_err(|_| Busy)
        });
        tokio::time::timeout(DEADLINE, verified).await.unwrap_or(Err(Busy))
    }

    fn name(&self, key: &str, phc: &str) -> [u8; 32] {
        let mut hash = Sha256::new_with_prefix(self.secret);
        hash.update((phc.len() as u64).to_be_bytes());
        hash.update(phc.as_bytes());
        hash.update(key.as_bytes());
        hash.finalize().into()
    }
}

impl std::fmt::Debug for SlowKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlowKeys").field("verdicts", &self.verdicts.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::KeyDigest;

    #[tokio::test]
    async fn a_key_is_verified_once_and_a_flood_of_wrong_ones_meets_its_bounds() {
        let keys = SlowKeys::default();
        let phc = KeyDigest::argon2id("a.right").unwrap().to_string();
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        assert_eq!(keys.verify("a.right", &phc, address(1), None).await, Ok(true));
        let wrong: Vec<String> = (0..100).map(|number| format!("a.{number}")).collect();
        let flood = wrong.iter().map(|key| keys.verify(key, &phc, address(2), None));
        let flood = futures_util::future::join_all(flood).await;
        assert_eq!(flood.iter().filter(|verdict| **verdict == Err(Busy)).count(), 92, "8 of an address");
        assert!(!flood.contains(&Ok(true)));
        // The verdict is known: the right key waits for nothing.
        let again = keys.verify("a.right", &phc, address(2), Some(Duration::from_secs(60)));
        assert_eq!(futures_util::FutureExt::now_or_never(again), Some(Ok(true)));
        // A changed digest has no verdict.
        let other = KeyDigest::argon2id("a.other").unwrap().to_string();
        assert_eq!(keys.verify("a.right", &other, address(1), None).await, Ok(false));
        assert_eq!([1, 2].map(|last| keys.addresses.count(address(last))), [0, 0]);
    }
}
