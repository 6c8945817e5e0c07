//! WASI clocks and randomness, answered from the present call: a guest has no other time and no other chance.

use std::{sync::Arc, time::Duration};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use wasmtime_wasi::{HostMonotonicClock, HostWallClock};

use super::current_call::CurrentCall;

/// Answers both WASI clocks with the time of the call.
pub(super) struct CallClock(pub(super) Arc<CurrentCall>);

impl HostWallClock for CallClock {
    fn resolution(&self) -> Duration {
        Duration::from_micros(1)
    }

    fn now(&self) -> Duration {
        Duration::from_micros(self.0.now_us())
    }
}

impl HostMonotonicClock for CallClock {
    fn resolution(&self) -> u64 {
        1_000
    }

    fn now(&self) -> u64 {
        self.0.now_us().saturating_mul(1_000)
    }
}

/// Random numbers that restart from the seed of each call.
pub(super) struct CallRng {
    call: Arc<CurrentCall>,
    call_number: u64,
    rng: SmallRng,
}

impl CallRng {
    pub(super) fn new(call: Arc<CurrentCall>) -> Self {
        Self { call, call_number: 0, rng: SmallRng::seed_from_u64(0) }
    }

    fn rng(&mut self) -> &mut SmallRng {
        let (number, seed) = self.call.with(|call| (call.number, call.seed));
        if number != self.call_number {
            self.call_number = number;
            self.rng = SmallRng::seed_from_u64(seed);
        }
        &mut self.rng
    }
}

impl rand::TryRng for CallRng {
    type Error = std::convert::Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Self::Error> {
        Ok(self.rng().next_u32())
    }

    fn try_next_u64(&mut self) -> Result<u64, Self::Error> {
        Ok(self.rng().next_u64())
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Self::Error> {
        self.rng().fill_bytes(bytes);
        Ok(())
    }
}
