//! What a policy remembers between calls, in the host: shared by all instances, kept through reloads, bounded.
//!
//! Every write may fail, and any value may be gone: a policy decides without, then. Natively the same functions work on a
//! memory of the thread ([`testing`]), whose time stands still, so that a policy with state is tested like any other.

use std::time::Duration;

/// Why nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateError {
    /// The key is longer than the host allows.
    KeyTooLong,
    /// The value is longer than the host allows.
    ValueTooLarge,
    /// The slot's keys or bytes are used up.
    NoRoom,
    /// The value is no number.
    NotANumber,
}

/// The value, when there is one.
#[must_use]
pub fn get(key: &str) -> Option<Vec<u8>> {
    imp::get(key)
}

/// The number, when there is one.
#[must_use]
pub fn number(key: &str) -> Option<i64> {
    get(key).and_then(|value| value.try_into().ok()).map(i64::from_le_bytes)
}

/// Writes a value that lives for `ttl`, in whole milliseconds; zero: until it is deleted.
///
/// # Errors
/// [`StateError`], and nothing is changed.
pub fn set(key: &str, value: &[u8], ttl: Duration) -> Result<(), StateError> {
    imp::set(key, value, milliseconds(ttl))
}

/// Removes a key.
pub fn delete(key: &str) {
    imp::delete(key);
}

/// Adds to a number in one step, whoever else does the same, and answers the sum. A missing one is 0 and then lives for
/// `ttl` (zero: until it is deleted), which later steps do not extend.
///
/// # Errors
/// [`StateError`], and nothing is changed.
pub fn increment(key: &str, delta: i64, ttl: Duration) -> Result<i64, StateError> {
    imp::increment(key, delta, milliseconds(ttl))
}

/// Rounded up: a short life must not become an endless one.
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
        state::set(key, value, ttl_ms).map_err(told)
    }

    pub(super) fn delete(key: &str) {
        state::delete(key);
    }

    pub(super) fn increment(key: &str, delta: i64, ttl_ms: u32) -> Result<i64, StateError> {
        state::increment(key, delta, ttl_ms).map_err(told)
    }

    fn told(error: state::StateError) -> StateError {
        match error {
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

    /// Values, and when they end.
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

/// The memory of native tests: one a thread, so that tests do not meet.
#[cfg(not(target_family = "wasm"))]
pub mod testing {
    use std::{collections::BTreeMap, time::Duration};

    use super::imp::{MEMORY, Memory};

    /// Forgets everything but these numbers.
    pub fn preset(numbers: &BTreeMap<String, i64>) {
        let values =
            numbers.iter().map(|(key, number)| (key.clone(), (number.to_le_bytes().to_vec(), u64::MAX)));
        let values = values.collect();
        MEMORY.set(Memory { values, ..Memory::default() });
    }

    /// Lets time pass.
    pub fn advance(time: Duration) {
        let passed = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        MEMORY.with_borrow_mut(|memory| memory.now_ms = memory.now_ms.saturating_add(passed));
    }

    /// From now on there is no room, or there is again.
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
