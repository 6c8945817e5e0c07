//! The host functions of the interface `state`: the slot's state, that of its shadow, or the call's scratch
//! where no write may last.

use super::Guest;
use crate::{bindings::memory::pointsman::policy::state, state::StateError};

impl state::Host for Guest {
    fn get(&mut self, key: String) -> wasmtime::Result<Option<Vec<u8>>> {
        self.spend(key.len())?;
        let now = self.now_ms();
        let value = match &self.scratch {
            Some(scratch) => scratch.get(&self.state, &key, now),
            None => self.state().get(&key, now),
        };
        if let Some(accesses) = self.noted_accesses() {
            accesses.note_read(&key, value.as_deref());
        }
        Ok(value)
    }

    fn set(
        &mut self,
        key: String,
        value: Vec<u8>,
        ttl_ms: u32,
    ) -> wasmtime::Result<Result<(), state::StateError>> {
        self.spend(key.len() + value.len())?;
        let now = self.now_ms();
        if let Some(accesses) = self.noted_accesses() {
            accesses.note_write(&key);
        }
        let outcome = match &mut self.scratch {
            Some(scratch) => scratch.set(&self.state, &key, &value, ttl_ms, now),
            None => self.state().set(&key, &value, ttl_ms, now),
        };
        Ok(outcome.map_err(to_wit))
    }

    fn delete(&mut self, key: String) -> wasmtime::Result<()> {
        self.spend(key.len())?;
        if let Some(accesses) = self.noted_accesses() {
            accesses.note_write(&key);
        }
        match &mut self.scratch {
            Some(scratch) => scratch.delete(&key),
            None => self.state().delete(&key),
        }
        Ok(())
    }

    fn increment(
        &mut self,
        key: String,
        delta: i64,
        ttl_ms: u32,
    ) -> wasmtime::Result<Result<i64, state::StateError>> {
        self.spend(key.len())?;
        let now = self.now_ms();
        let outcome = match &mut self.scratch {
            Some(scratch) => scratch.increment(&self.state, &key, delta, ttl_ms, now),
            None => self.state().increment(&key, delta, ttl_ms, now),
        };
        if let (Ok(sum), Some(accesses)) = (&outcome, self.noted_accesses()) {
            // The value before follows from the sum. A missing key counts as 0, which gives the same sum.
            accesses.note_read(&key, Some(&sum.saturating_sub(delta).to_le_bytes()));
            accesses.note_write(&key);
        }
        Ok(outcome.map_err(to_wit))
    }
}

fn to_wit(error: StateError) -> state::StateError {
    match error {
        StateError::KeyTooLong => state::StateError::KeyTooLong,
        StateError::ValueTooLarge => state::StateError::ValueTooLarge,
        StateError::NoRoom => state::StateError::NoRoom,
        StateError::NotANumber => state::StateError::NotANumber,
    }
}
