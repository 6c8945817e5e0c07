//! What belongs to one store: the guest's limits, its log, its way to the slot's state, and, for guests that import WASI, an empty world whose clock and
//! randomness come from the call.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use pointsman_routing::{Call, scope};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use wasmtime::{
    ResourceLimiter, UpdateDeadline,
    component::{HasSelf, Linker, ResourceTable},
};
use wasmtime_wasi::{HostMonotonicClock, HostWallClock, WasiCtx, WasiCtxView, WasiView};

use crate::{
    access::Access,
    bindings::{filter::pointsman::policy::log as wit_log, memory::pointsman::policy::state as wit},
    meter::Counted,
    state::{State, StateError, scratch::Scratch},
    ticker::TICK,
};

mod log;

use log::GuestLog;

/// A store's data.
pub(crate) struct Guest {
    wasi: WasiCtx,
    table: ResourceTable,
    memory_bytes: usize,
    /// Linear memory of all its modules together.
    pub(crate) memory_used: usize,
    /// A growth was denied: the trap that follows is about memory.
    pub(crate) denied: bool,
    /// CPU time the present call may take.
    budget: Duration,
    /// The thread's CPU time when the present call met its first tick.
    first_tick: Option<Duration>,
    inputs: Arc<Inputs>,
    log: GuestLog,
    state: Arc<State>,
    /// Where writes go that must not last.
    scratch: Option<Scratch>,
    /// Until it serves, it is configured and probed: no write of it lasts.
    probing: bool,
    counted: Counted,
}

/// What WASI clocks and randomness answer from.
#[derive(Debug, Default)]
struct Inputs {
    now_us: AtomicU64,
    seed: AtomicU64,
    call: AtomicU64,
}

impl Guest {
    /// A guest that is configured and probed first.
    pub(crate) fn new(policy: Arc<str>, memory_bytes: usize, access: &Access, counted: Counted) -> Self {
        let inputs = Arc::new(Inputs::default());
        let log = GuestLog::new(policy, access.log().clone(), inputs.clone());
        let mut wasi = WasiCtx::builder();
        wasi.stdout(log.clone()).stderr(log.clone());
        wasi.wall_clock(Clock(inputs.clone())).monotonic_clock(Clock(inputs.clone()));
        wasi.secure_random(Dice::new(inputs.clone())).insecure_random(Dice::new(inputs.clone()));
        wasi.insecure_random_seed(0);
        wasi.allow_tcp(false).allow_udp(false).allow_ip_name_lookup(false);
        Self {
            wasi: wasi.build(),
            table: ResourceTable::new(),
            memory_bytes,
            memory_used: 0,
            denied: false,
            budget: Duration::ZERO,
            first_tick: None,
            inputs,
            log,
            state: access.state().clone(),
            scratch: Some(Scratch::alone()),
            probing: true,
            counted,
        }
    }

    /// From now on it serves: what it writes lasts.
    pub(crate) fn serve(&mut self) {
        self.probing = false;
    }

    /// Sets what this call is told.
    pub(crate) fn begin(&mut self, call: &Call) {
        self.inputs.now_us.store(call.now_us, Ordering::Relaxed);
        self.inputs.seed.store(call.seed, Ordering::Relaxed);
        self.inputs.call.fetch_add(1, Ordering::Relaxed);
        self.log.begin();
        self.scratch = match (self.probing, scope::is_preview()) {
            (true, _) => Some(Scratch::alone()),
            (false, true) => Some(Scratch::over()),
            (false, false) => None,
        };
    }

    fn now_ms(&self) -> u64 {
        self.inputs.now_us.load(Ordering::Relaxed) / 1_000
    }

    /// Gives the code that runs next this much CPU time.
    pub(crate) fn allow(&mut self, budget: Duration) {
        (self.budget, self.first_tick) = (budget, None);
    }

    fn note_write(&self, key: &str) {
        if !self.probing {
            scope::note_state_write(key);
        }
    }

    /// Called at every tick that the guest runs into. A tick is wall-clock time, and on a busy machine most of it may
    /// have gone to somebody else: only CPU time is held against the guest. Reading it costs a system call, so the
    /// clock starts at the first tick, and no call that ends before one pays for it.
    pub(crate) fn at_tick(&mut self) -> UpdateDeadline {
        let now = thread_cpu_time();
        let Some(first) = self.first_tick else {
            self.first_tick = Some(now);
            return UpdateDeadline::Continue(1);
        };
        let left = self.budget.saturating_sub(TICK).mul_f64(0.9);
        if now.saturating_sub(first) >= left {
            UpdateDeadline::Interrupt
        } else {
            UpdateDeadline::Continue(1)
        }
    }

    /// The interfaces of the contract that a guest may import.
    pub(crate) fn link_ours(linker: &mut Linker<Self>) -> wasmtime::Result<()> {
        wit_log::add_to_linker::<Self, HasSelf<Self>>(linker, |guest| guest)?;
        wit::add_to_linker::<Self, HasSelf<Self>>(linker, |guest| guest)
    }
}

impl ResourceLimiter for Guest {
    fn memory_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        if desired <= self.memory_bytes {
            self.memory_used += desired.saturating_sub(current);
            self.counted.grew(desired);
            return Ok(true);
        }
        self.denied = true;
        // A plain "no" makes a Rust guest abort somewhere else; this says where.
        Err(wasmtime::Error::msg(format!("memory of {desired} bytes, allowed are {}", self.memory_bytes)))
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        Ok(desired <= 10_000)
    }
}

impl wit_log::Host for Guest {
    fn log(&mut self, level: wit_log::Level, message: String) {
        let level = match level {
            wit_log::Level::Debug => tracing::Level::DEBUG,
            wit_log::Level::Info => tracing::Level::INFO,
            wit_log::Level::Warn => tracing::Level::WARN,
            wit_log::Level::Error => tracing::Level::ERROR,
        };
        self.log.write(level, &message);
    }
}

impl wit::Host for Guest {
    fn get(&mut self, key: String) -> Option<Vec<u8>> {
        let now = self.now_ms();
        let value = match &self.scratch {
            Some(scratch) => scratch.get(&self.state, &key, now),
            None => self.state.get(&key, now),
        };
        if !self.probing {
            scope::note_state_read(&key, value.as_deref());
        }
        value
    }

    fn set(&mut self, key: String, value: Vec<u8>, ttl_ms: u32) -> Result<(), wit::StateError> {
        let now = self.now_ms();
        self.note_write(&key);
        let outcome = match &mut self.scratch {
            Some(scratch) => scratch.set(&self.state, &key, &value, ttl_ms, now),
            None => self.state.set(&key, &value, ttl_ms, now),
        };
        outcome.map_err(told)
    }

    fn delete(&mut self, key: String) {
        self.note_write(&key);
        match &mut self.scratch {
            Some(scratch) => scratch.delete(&key),
            None => self.state.delete(&key),
        }
    }

    fn increment(&mut self, key: String, delta: i64, ttl_ms: u32) -> Result<i64, wit::StateError> {
        let now = self.now_ms();
        let outcome = match &mut self.scratch {
            Some(scratch) => scratch.increment(&self.state, &key, delta, ttl_ms, now),
            None => self.state.increment(&key, delta, ttl_ms, now),
        };
        if let (Ok(sum), false) = (&outcome, self.probing) {
            // The sum tells what was there; whether it was a zero or nothing makes no difference to a sum.
            scope::note_state_read(&key, Some(&sum.saturating_sub(delta).to_le_bytes()));
            scope::note_state_write(&key);
        }
        outcome.map_err(told)
    }
}

fn told(error: StateError) -> wit::StateError {
    match error {
        StateError::KeyTooLong => wit::StateError::KeyTooLong,
        StateError::ValueTooLarge => wit::StateError::ValueTooLarge,
        StateError::NoRoom => wit::StateError::NoRoom,
        StateError::NotANumber => wit::StateError::NotANumber,
    }
}

impl WasiView for Guest {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

struct Clock(Arc<Inputs>);

impl HostWallClock for Clock {
    fn resolution(&self) -> Duration {
        Duration::from_micros(1)
    }

    fn now(&self) -> Duration {
        Duration::from_micros(self.0.now_us.load(Ordering::Relaxed))
    }
}

impl HostMonotonicClock for Clock {
    fn resolution(&self) -> u64 {
        1_000
    }

    fn now(&self) -> u64 {
        self.0.now_us.load(Ordering::Relaxed).saturating_mul(1_000)
    }
}

/// Randomness that begins anew from the seed of each call.
struct Dice {
    inputs: Arc<Inputs>,
    call: u64,
    rng: SmallRng,
}

impl Dice {
    fn new(inputs: Arc<Inputs>) -> Self {
        Self { inputs, call: 0, rng: SmallRng::seed_from_u64(0) }
    }

    fn rng(&mut self) -> &mut SmallRng {
        let call = self.inputs.call.load(Ordering::Relaxed);
        if call != self.call {
            self.call = call;
            self.rng = SmallRng::seed_from_u64(self.inputs.seed.load(Ordering::Relaxed));
        }
        &mut self.rng
    }
}

impl rand::TryRng for Dice {
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
