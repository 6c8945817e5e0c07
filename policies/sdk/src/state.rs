//! Values that the host keeps between calls. All instances of a slot share them, and they survive reloads,
//! but no restart.
//!
//! Every write can fail, and the host can remove any value: a policy must be able to decide without. Natively
//! the functions work on a memory of the thread ([`testing`]) whose clock stands still, so that a policy with
//! state can be tested like any other.
//!
//! ```
//! use std::time::Duration;
//! use pointsman_policy_sdk::state;
//!
//! let count = state::increment("tenant/7", 1, Duration::from_secs(1)).unwrap_or(0);
//! assert_eq!((count, state::number("tenant/7")), (1, Some(1)));
//! ```

use std::time::Duration;

/// Why a write failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateError {
    /// The key is too long.
    KeyTooLong,
    /// The value is too large.
    ValueTooLarge,
    /// The slot has reached its limit of keys or bytes.
    NoRoom,
    /// The value is not a number, which has 8 bytes, little-endian.
    NotANumber,
}

/// Returns the value of a key.
#[must_use]
pub fn get(key: &str) -> Option<Vec<u8>> {
    imp::get(key)
}

/// Returns the number that [`increment`] wrote. `None`: the key is missing, or its value is not a number.
#[must_use]
pub fn number(key: &str) -> Option<i64> {
    get(key).and_then(|value| value.try_into().ok()).map(i64::from_le_bytes)
}

/// Writes a value that expires after `ttl`, rounded up to milliseconds. A zero `ttl` never expires.
///
/// # Errors
/// [`StateError`]; the old value stays.
pub fn set(key: &str, value: &[u8], ttl: Duration) -> Result<(), StateError> {
    imp::set(key, value, milliseconds(ttl))
}

/// Removes a key.
pub fn delete(key: &str) {
    imp::delete(key);
}

/// Adds to a number atomically and returns the sum. A missing number starts at 0 and expires after `ttl`
/// (zero: never). Later additions do not extend that time.
///
/// # Errors
/// [`StateError`]; the old value stays.
pub fn increment(key: &str, delta: i64, ttl: Duration) -> Result<i64, StateError> {
    imp::increment(key, delta, milliseconds(ttl))
}

/// Rounds up: 0 would mean that the value never expires.
fn milliseconds(ttl: Duration) -> u32 {
    u32::try_from(ttl.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}

#[cfg(target_family = "wasm")]
mod imp {
    use super::StateError;
    use crate::bindings::__glue::memory::pointsman::policy::state;

    pub(super) fn get(key: &str) -> Option<Vec<u8>> {
        state::get(key)
    }

    pub(super) fn set(key: &str, value: &[u8], ttl_ms: u32) -> Result<(), StateError> {
        state::set(key, value, ttl_ms).map_err(error)
    }

    pub(super) fn delete(key: &str) {
        state::delete(key);
    }

    pub(super) fn increment(key: &str, delta: i64, ttl_ms: u32) -> Result<i64, StateError> {
        state::increment(key, delta, ttl_ms).map_err(error)
    }

    fn error(failed: state::StateError) -> StateError {
        match failed {
            state::StateError::KeyTooLong => StateError::KeyTooLong,
            state::StateError::ValueTooLarge => StateError::ValueTooLarge,
            state::StateError::NoRoom => StateError::NoRoom,
            state::StateError::NotANumber => StateError::NotANumber,
        }
    }
}

#[cfg(not(target_family = "wasm"))]
mod imp {
    use std::{cell::RefCell, collections::BTreeMap};

    use super::StateError;

    /// Values with the time at which they expire.
    #[derive(Default)]
    pub(super) struct Memory {
        pub(super) values: BTreeMap<String, (Vec<u8>, u64)>,
        pub(super) now_ms: u64,
        pub(super) full: bool,
    }

    thread_local! {
        pub(super) static MEMORY: RefCell<Memory> = RefCell::default();
    }

    pub(super) fn get(key: &str) -> Option<Vec<u8>> {
        MEMORY.with_borrow(|memory| {
            let (value, until) = memory.values.get(key)?;
            (*until > memory.now_ms).then(|| value.clone())
        })
    }

    pub(super) fn set(key: &str, value: &[u8], ttl_ms: u32) -> Result<(), StateError> {
        MEMORY.with_borrow_mut(|memory| {
            if memory.full {
                return Err(StateError::NoRoom);
            }
            let until = if ttl_ms == 0 { u64::MAX } else { memory.now_ms + u64::from(ttl_ms) };
            memory.values.insert(key.to_owned(), (value.to_vec(), until));
            Ok(())
        })
    }

    pub(super) fn delete(key: &str) {
        MEMORY.with_borrow_mut(|memory| drop(memory.values.remove(key)));
    }

    pub(super) fn increment(key: &str, delta: i64, ttl_ms: u32) -> Result<i64, StateError> {
        let Some(value) = get(key) else { return set(key, &delta.to_le_bytes(), ttl_ms).map(|()| delta) };
        let number = <[u8; 8]>::try_from(value).map_err(|_| StateError::NotANumber)?;
        let sum = i64::from_le_bytes(number).saturating_add(delta);
        MEMORY.with_borrow_mut(|memory| {
            if let Some((value, _)) = memory.values.get_mut(key) {
                *value = sum.to_le_bytes().to_vec();
            }
        });
        Ok(sum)
    }
}

/// The memory of native tests. Each thread has its own, so that tests do not interfere.
#[cfg(not(target_family = "wasm"))]
pub mod testing {
    use std::{collections::BTreeMap, time::Duration};

    use super::imp::{MEMORY, Memory};

    /// Replaces everything by these numbers, and resets clock and limit.
    pub fn preset(numbers: &BTreeMap<String, i64>) {
        let values =
            numbers.iter().map(|(key, number)| (key.clone(), (number.to_le_bytes().to_vec(), u64::MAX)));
        let values = values.collect();
        MEMORY.set(Memory { values, ..Memory::default() });
    }

    /// Advances the clock.
    pub fn advance(time: Duration) {
        let passed = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        MEMORY.with_borrow_mut(|memory| memory.now_ms = memory.now_ms.saturating_add(passed));
    }

    /// Sets whether [`super::set`], and [`super::increment`] of a missing key, fail with
    /// [`super::StateError::NoRoom`].
    pub fn full(full: bool) {
        MEMORY.with_borrow_mut(|memory| memory.full = full);
    }
}

#[cfg(all(test, not(target_family = "wasm")))]
mod tests {
    use super::*;

    #[test]
    fn the_native_memory_behaves_as_the_contract_says() {
        testing::preset(&[("n".to_owned(), 5)].into());
        assert_eq!(increment("n", 2, Duration::ZERO), Ok(7));
        assert_eq!(increment("m", 1, Duration::from_micros(1)), Ok(1));
        testing::advance(Duration::from_millis(1));
        assert_eq!(
            (number("n"), number("m")),
            (Some(7), None),
            "a life of a microsecond lasts one millisecond"
        );
        set("t", b"text", Duration::ZERO).unwrap();
        assert_eq!(increment("t", 1, Duration::ZERO), Err(StateError::NotANumber));
        testing::full(true);
        assert_eq!(set("u", b"", Duration::ZERO), Err(StateError::NoRoom));
        delete("t");
        assert_eq!(get("t"), None);
    }
}
