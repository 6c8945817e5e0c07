//! State of one call whose writes must not last: a probe or a preview. Dropped with the call.

use std::collections::HashMap;

use super::{Entry, State, StateError};

/// Keys that one call may write.
const MAX_KEYS: usize = 256;

/// Writes that overlay an unchanged state: the slot's for a preview, an empty one for a probe.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Written keys; `None`: deleted.
    written: HashMap<Box<str>, Option<Entry>>,
    /// Whether other keys are read from the slot's state.
    reads_through: bool,
}

impl Scratch {
    /// Over an empty state: every probe starts without memory.
    pub(crate) fn alone() -> Self {
        Self::default()
    }

    /// Over the slot's state.
    pub(crate) fn over() -> Self {
        Self { reads_through: true, ..Self::default() }
    }

    pub(crate) fn get(&self, state: &State, key: &str, now_ms: u64) -> Option<Vec<u8>> {
        self.entry(state, key, now_ms).map(|entry| entry.value.into_vec())
    }

    pub(crate) fn set(
        &mut self,
        state: &State,
        key: &str,
        value: &[u8],
        ttl_ms: u32,
        now_ms: u64,
    ) -> Result<(), StateError> {
        state.check(key, value)?;
        self.write(key, Some(Entry::new(value, ttl_ms, now_ms)))
    }

    pub(crate) fn delete(&mut self, key: &str) {
        let _ = self.write(key, None);
    }

    pub(crate) fn increment(
        &mut self,
        state: &State,
        key: &str,
        delta: i64,
        ttl_ms: u32,
        now_ms: u64,
    ) -> Result<i64, StateError> {
        state.check(key, &[])?;
        let mut entry = self
            .entry(state, key, now_ms)
            .unwrap_or_else(|| Entry::new(&0_i64.to_le_bytes(), ttl_ms, now_ms));
        let sum = entry.add(delta)?;
        self.write(key, Some(entry))?;
        Ok(sum)
    }

    fn entry(&self, state: &State, key: &str, now_ms: u64) -> Option<Entry> {
        match self.written.get(key) {
            Some(written) => written.clone().filter(|entry| entry.expires_ms > now_ms),
            None if self.reads_through => state.entry(key, now_ms),
            None => None,
        }
    }

    fn write(&mut self, key: &str, entry: Option<Entry>) -> Result<(), StateError> {
        if self.written.len() >= MAX_KEYS && !self.written.contains_key(key) {
            return Err(StateError::NoRoom);
        }
        self.written.insert(key.into(), entry);
        Ok(())
    }
}
