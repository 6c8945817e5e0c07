//! State of one slot's policies between calls: bounded in keys and bytes, with a time to live.
//!
//! All instances and threads share it, and it survives reloads. A lock covers one shard for one map
//! operation. Only when the quota is reached are expired entries swept, shard by shard, at most every 100 ms.
//! Time comes from the calls, the only clock a policy has.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;

pub(crate) mod scratch;
pub(crate) mod shadow;
mod shared;

use shared::{Origin, Sharing};

const SHARDS: usize = 16;
/// Minimum time between two sweeps, milliseconds.
const SWEEP_INTERVAL_MS: u64 = 100;
/// Bytes counted for an entry besides its key and value, so that many tiny entries do not escape the quota.
const ENTRY_OVERHEAD: usize = 64;

/// Limits of a slot's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateQuota {
    /// Keys.
    pub keys: usize,
    /// Bytes of a key.
    pub key_bytes: usize,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Bytes of all keys and values together, with 64 for each entry.
    pub total_bytes: usize,
}

impl Default for StateQuota {
    fn default() -> Self {
        Self { keys: 65_536, key_bytes: 128, value_bytes: 4_096, total_bytes: 16 * 1024 * 1024 }
    }
}

/// Why a write was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// The key is too long.
    #[error("the key is too long")]
    KeyTooLong,
    /// The value is too long.
    #[error("the value is too large")]
    ValueTooLarge,
    /// The quota of keys or bytes is used up.
    #[error("the state's quota is used up")]
    NoRoom,
    /// The value is not a number.
    #[error("the value is not a number (8 bytes)")]
    NotANumber,
}

/// A value and its expiry.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    value: Box<[u8]>,
    /// Milliseconds since the Unix epoch; `u64::MAX`: never.
    expires_ms: u64,
    /// How gateways agree on it; `None` if it was written while the state was not shared.
    origin: Option<Box<Origin>>,
}

type Shard = HashMap<Box<str>, Entry>;

/// The state of one slot.
#[derive(Debug)]
pub struct State {
    shards: [Mutex<Shard>; SHARDS],
    hasher: RandomState,
    quota: StateQuota,
    keys: AtomicUsize,
    bytes: AtomicUsize,
    swept_ms: AtomicU64,
    /// Whether the operator wants it shared with other gateways.
    wanted: AtomicBool,
    /// Empty in a gateway that shares no state.
    sharing: OnceLock<Sharing>,
}

impl Default for State {
    fn default() -> Self {
        Self::new(StateQuota::default())
    }
}

impl State {
    /// An empty state.
    #[must_use]
    pub fn new(quota: StateQuota) -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            hasher: RandomState::new(),
            quota,
            keys: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            swept_ms: AtomicU64::new(0),
            wanted: AtomicBool::new(false),
            sharing: OnceLock::new(),
        }
    }

    /// Numbers of keys and bytes as the quota counts them. Expired entries count until they are overwritten
    /// or swept.
    #[must_use]
    pub fn usage(&self) -> (usize, usize) {
        (self.keys.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// The limits.
    #[must_use]
    pub fn quota(&self) -> StateQuota {
        self.quota
    }

    /// The value at `now_ms`.
    #[must_use]
    pub fn get(&self, key: &str, now_ms: u64) -> Option<Vec<u8>> {
        self.entry(key, now_ms).map(|entry| entry.value.into_vec())
    }

    /// Writes a value; `ttl_ms` 0: it never expires.
    ///
    /// # Errors
    /// [`StateError`], and nothing is changed.
    pub fn set(&self, key: &str, value: &[u8], ttl_ms: u32, now_ms: u64) -> Result<(), StateError> {
        self.check(key, value)?;
        let entry = Entry::new(value, ttl_ms, now_ms);
        match self.sharing() {
            Some(sharing) => self.with_sweep(now_ms, || self.set_here(sharing, key, &entry)),
            None => self.with_sweep(now_ms, || self.try_set(key, &entry)),
        }
    }

    /// Removes a key.
    pub fn delete(&self, key: &str) {
        if let Some(sharing) = self.sharing() {
            return self.delete_here(sharing, key);
        }
        let removed = self.shard(key).lock().remove(key);
        if let Some(entry) = removed {
            self.release(1, entry.size(key));
        }
    }

    /// Adds to a number. A missing key counts as 0 and then lives for `ttl_ms`.
    ///
    /// # Errors
    /// [`StateError`], and nothing is changed.
    pub fn increment(&self, key: &str, delta: i64, ttl_ms: u32, now_ms: u64) -> Result<i64, StateError> {
        self.check(key, &[])?;
        if let Some(sharing) = self.sharing() {
            let expires_ms = expiry(ttl_ms, now_ms);
            return self
                .with_sweep(now_ms, || self.increment_here(sharing, (key, delta), expires_ms, now_ms));
        }
        self.with_sweep(now_ms, || {
            let mut shard = self.shard(key).lock();
            let live = shard.get_mut(key).filter(|entry| entry.expires_ms > now_ms);
            if let Some(entry) = live {
                return entry.add(delta);
            }
            let entry = Entry::new(&delta.to_le_bytes(), ttl_ms, now_ms);
            self.put(&mut shard, key, entry)?;
            Ok(delta)
        })
    }

    /// Removes every key.
    pub fn clear(&self) {
        for shard in &self.shards {
            let gone = std::mem::take(&mut *shard.lock());
            self.release(gone.len(), gone.iter().map(|(key, entry)| entry.size(key)).sum());
        }
    }

    pub(crate) fn entry(&self, key: &str, now_ms: u64) -> Option<Entry> {
        let shard = self.shard(key).lock();
        shard.get(key)?.at(now_ms)
    }

    pub(crate) fn check(&self, key: &str, value: &[u8]) -> Result<(), StateError> {
        if key.len() > self.quota.key_bytes {
            return Err(StateError::KeyTooLong);
        }
        if value.len() > self.quota.value_bytes {
            return Err(StateError::ValueTooLarge);
        }
        Ok(())
    }

    fn try_set(&self, key: &str, entry: &Entry) -> Result<(), StateError> {
        self.put(&mut self.shard(key).lock(), key, entry.clone())
    }

    fn put(&self, shard: &mut Shard, key: &str, entry: Entry) -> Result<(), StateError> {
        let new = entry.size(key);
        let old = shard.get(key).map(|old| old.size(key));
        self.reserve(usize::from(old.is_none()), new.saturating_sub(old.unwrap_or(0)))?;
        self.release(0, old.unwrap_or(0).saturating_sub(new));
        match shard.get_mut(key) {
            Some(place) => *place = entry,
            None => drop(shard.insert(key.into(), entry)),
        }
        Ok(())
    }

    /// Retries `write` once after a sweep when the quota is used up.
    fn with_sweep<T>(&self, now_ms: u64, write: impl Fn() -> Result<T, StateError>) -> Result<T, StateError> {
        match write() {
            Err(StateError::NoRoom) if self.sweep(now_ms) => write(),
            outcome => outcome,
        }
    }

    fn sweep(&self, now_ms: u64) -> bool {
        let last = self.swept_ms.load(Ordering::Relaxed);
        if now_ms < last.saturating_add(SWEEP_INTERVAL_MS) {
            return false;
        }
        if self.swept_ms.compare_exchange(last, now_ms, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return false;
        }
        for shard in &self.shards {
            let (mut keys, mut bytes) = (0, 0);
            shard.lock().retain(|key, entry| {
                let live = entry.expires_ms > now_ms;
                if !live {
                    keys += 1;
                    bytes += entry.size(key);
                }
                live
            });
            self.release(keys, bytes);
        }
        true
    }

    fn reserve(&self, keys: usize, bytes: usize) -> Result<(), StateError> {
        take(&self.keys, keys, self.quota.keys)?;
        take(&self.bytes, bytes, self.quota.total_bytes).inspect_err(|_| self.release(keys, 0))
    }

    fn release(&self, keys: usize, bytes: usize) {
        self.keys.fetch_sub(keys, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    #[expect(clippy::cast_possible_truncation, clippy::indexing_slicing, reason = "a remainder below SHARDS")]
    fn shard(&self, key: &str) -> &Mutex<Shard> {
        &self.shards[(self.hasher.hash_one(key) % SHARDS as u64) as usize]
    }
}

impl Entry {
    fn new(value: &[u8], ttl_ms: u32, now_ms: u64) -> Self {
        Self { value: value.into(), expires_ms: expiry(ttl_ms, now_ms), origin: None }
    }

    /// Returns the bytes that the quota counts.
    fn size(&self, key: &str) -> usize {
        let origin = self.origin.as_ref().map_or(0, |origin| origin.size());
        key.len() + self.value.len() + ENTRY_OVERHEAD + origin
    }

    /// Returns the entry as it is at a time; `None` if it has expired, or was removed.
    fn at(&self, now_ms: u64) -> Option<Self> {
        match &self.origin {
            _ if self.expires_ms <= now_ms => None,
            Some(origin) => origin.at(self, now_ms),
            None => Some(self.clone()),
        }
    }

    fn add(&mut self, delta: i64) -> Result<i64, StateError> {
        let number = <[u8; 8]>::try_from(&*self.value).map_err(|_| StateError::NotANumber)?;
        let sum = i64::from_le_bytes(number).saturating_add(delta);
        self.value.copy_from_slice(&sum.to_le_bytes());
        Ok(sum)
    }
}

fn take(used: &AtomicUsize, more: usize, limit: usize) -> Result<(), StateError> {
    let taken = used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
        used.checked_add(more).filter(|sum| more == 0 || *sum <= limit)
    });
    taken.map(drop).map_err(|_| StateError::NoRoom)
}

/// Returns when something expires: `ttl_ms` after now, or never if it is 0.
fn expiry(ttl_ms: u32, now_ms: u64) -> u64 {
    if ttl_ms == 0 { u64::MAX } else { now_ms.saturating_add(u64::from(ttl_ms)) }
}

#[cfg(test)]
mod tests;
