//! Data of one store: the guest's limits, its log, its access to the slot's state, and an empty WASI world
//! whose clocks and randomness come from the call.

use std::{mem, sync::Arc, time::Duration};

use pointsman_routing::{Call, DecisionContext, Purpose, StateAccesses};
use wasmtime::{
    ResourceLimiter, Store, Trap, UpdateDeadline,
    component::{HasSelf, Linker, ResourceTable},
};
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};

use crate::{
    access::Access,
    bindings::{filter::pointsman::policy::log as wit_log, memory::pointsman::policy::state as wit_state},
    capacity::{
        CORE_INSTANCES_PER_POLICY, MEMORIES_PER_POLICY, TABLE_ELEMENTS_PER_POLICY, TABLES_PER_POLICY,
    },
    meter::Counted,
    state::{State, scratch::Scratch, shadow::ShadowState},
    ticker::TICK,
};

mod current_call;
mod log;
mod state_host;
mod wasi;

use current_call::CurrentCall;
use log::GuestLog;
use wasi::{CallClock, CallRng};

/// Handles of WASI streams, pollables and others that a guest may have open: each takes memory of the host.
const MAX_HANDLES: usize = 1_000;
/// Random bytes that a guest gets at a time: no deadline ends such a call.
const MAX_RANDOM_BYTES: u64 = 64 * 1024;
/// Least number of bytes that a call of a host function counts as.
const BYTES_OF_A_CALL: usize = 512;
/// Bytes that host functions get between two looks at the guest's CPU time.
const BYTES_BETWEEN_TICKS: usize = 64 * 1024;

/// Data of one store.
pub(crate) struct Guest {
    wasi: WasiCtx,
    table: ResourceTable,
    /// Limit of `memory_used`.
    pub(crate) memory_bytes: usize,
    /// Linear memory of all the guest's modules together, bytes.
    pub(crate) memory_used: usize,
    /// Elements of all its tables together.
    table_elements: usize,
    /// Whether a growth was denied: the trap that follows is a memory failure.
    pub(crate) denied: bool,
    /// CPU time of the present call, at most.
    pub(crate) time_limit: TimeLimit,
    /// The thread's CPU time at the present call's first tick.
    first_tick: Option<Duration>,
    /// Bytes that host functions got since the last tick that [`Guest::spend`] made.
    host_bytes: usize,
    call: Arc<CurrentCall>,
    log: GuestLog,
    state: Arc<State>,
    shadow: Arc<ShadowState>,
    /// The shadow's state, while a shadow is called.
    shadow_state: Option<Arc<State>>,
    /// Receives writes that must not last.
    scratch: Option<Scratch>,
    /// The present call's accesses to the state, when its decision is recorded.
    accesses: Option<StateAccesses>,
    /// Whether the guest is still configured and probed: none of its writes lasts.
    probing: bool,
    counted: Counted,
}

/// CPU time that a guest may use.
#[derive(Clone, Copy)]
pub(crate) struct TimeLimit {
    pub(crate) time: Duration,
    /// Key of the configuration that sets it.
    pub(crate) key: &'static str,
}

impl Guest {
    /// A guest that is configured and probed first.
    pub(crate) fn new(policy: Arc<str>, memory_bytes: usize, access: &Access, counted: Counted) -> Self {
        let call = Arc::new(CurrentCall::new(policy));
        let log = GuestLog::new(access.log().clone(), call.clone());
        let mut wasi = WasiCtx::builder();
        wasi.stdout(log.clone()).stderr(log.of_stderr());
        wasi.wall_clock(CallClock(call.clone())).monotonic_clock(CallClock(call.clone()));
        wasi.secure_random(CallRng::new(call.clone())).insecure_random(CallRng::new(call.clone()));
        wasi.insecure_random_seed(0).max_random_size(MAX_RANDOM_BYTES);
        wasi.allow_tcp(false).allow_udp(false).allow_ip_name_lookup(false);
        let mut table = ResourceTable::new();
        table.set_max_capacity(MAX_HANDLES);
        Self {
            wasi: wasi.build(),
            table,
            memory_bytes,
            memory_used: 0,
            table_elements: 0,
            denied: false,
            time_limit: TimeLimit { time: Duration::ZERO, key: "" },
            first_tick: None,
            host_bytes: 0,
            call,
            log,
            state: access.state().clone(),
            shadow: access.shadow().clone(),
            shadow_state: None,
            scratch: Some(Scratch::alone()),
            accesses: None,
            probing: true,
            counted,
        }
    }

    /// Makes the guest's store enforce its limits.
    pub(crate) fn limit(store: &mut Store<Self>) {
        store.limiter(|guest| guest);
        store.set_max_component_handles(MAX_HANDLES);
        store.epoch_deadline_callback(|mut store| Ok(store.data_mut().at_tick()));
    }

    /// Ends configuration and probe: from now on writes last.
    pub(crate) fn serve(&mut self) {
        self.probing = false;
        self.call.serve();
    }

    /// Notes the name that the policy gives itself.
    pub(crate) fn set_policy(&mut self, name: &str) {
        self.call.set_policy(name);
    }

    /// Starts a call in `context`.
    pub(crate) fn begin(&mut self, context: &mut DecisionContext<'_>, call: &Call) {
        self.call.begin(context, call);
        // The buffer moves here for the call and back in `end`: a store cannot borrow it.
        self.accesses = context.state_accesses().map(mem::take);
        let is_shadow = !self.probing && context.purpose() == Purpose::Shadow;
        let generation = context.generation().filter(|_| is_shadow);
        self.shadow_state = generation.and_then(|generation| self.shadow.of(generation));
        self.scratch = match (self.probing, context.purpose()) {
            (true, _) => Some(Scratch::alone()),
            (false, Purpose::Preview) => Some(Scratch::over()),
            // A late call of a shadow that has ended.
            (false, Purpose::Shadow) if self.shadow_state.is_none() => Some(Scratch::alone()),
            (false, Purpose::Route | Purpose::Shadow) => None,
        };
    }

    /// Returns what the guest wrote to stderr or as an error in the present call: the message of a panic.
    pub(crate) fn last_words(&self) -> Option<String> {
        self.call.with(|call| (!call.last_words.is_empty()).then(|| call.last_words.clone()))
    }

    /// Ends the call that [`Guest::begin`] started.
    pub(crate) fn end(&mut self, context: &mut DecisionContext<'_>) {
        if let (Some(noted), Some(accesses)) = (self.accesses.take(), context.state_accesses()) {
            *accesses = noted;
        }
        self.shadow_state = None;
    }

    /// Returns the state in which writes last: the slot's, or that of the shadow that is called.
    fn state(&self) -> &State {
        self.shadow_state.as_ref().unwrap_or(&self.state)
    }

    /// Returns the record of the call's accesses to the state; `None`: its decision is not recorded.
    fn noted_accesses(&mut self) -> Option<&mut StateAccesses> {
        self.accesses.as_mut()
    }

    fn now_ms(&self) -> u64 {
        self.call.now_us() / 1_000
    }

    /// Sets the CPU time of the code that runs next.
    pub(crate) fn allow(&mut self, limit: TimeLimit) {
        (self.time_limit, self.first_tick, self.host_bytes) = (limit, None, 0);
    }

    /// Called at every tick while the guest runs. Ticks are wall-clock time, and on a busy machine other
    /// threads use most of it, so only CPU time counts against the guest. Reading it costs a system call: the
    /// measurement starts at the first tick, and a call that ends before one costs nothing.
    fn at_tick(&mut self) -> UpdateDeadline {
        let now = thread_cpu_time();
        let Some(first) = self.first_tick else {
            self.first_tick = Some(now);
            return UpdateDeadline::Continue(1);
        };
        let left = self.time_limit.time.saturating_sub(TICK).mul_f64(0.9);
        if now.saturating_sub(first) >= left {
            UpdateDeadline::Interrupt
        } else {
            UpdateDeadline::Continue(1)
        }
    }

    /// Counts a call of a host function that got this many bytes. Code without loops and without functions of
    /// its own meets no tick, however often it calls the host.
    fn spend(&mut self, bytes: usize) -> wasmtime::Result<()> {
        self.host_bytes += BYTES_OF_A_CALL + bytes;
        if self.host_bytes < BYTES_BETWEEN_TICKS {
            return Ok(());
        }
        self.host_bytes = 0;
        match self.at_tick() {
            UpdateDeadline::Interrupt => Err(Trap::Interrupt.into()),
            _ => Ok(()),
        }
    }

    /// Links the interfaces of the contract that a guest may import.
    pub(crate) fn link_host(linker: &mut Linker<Self>) -> wasmtime::Result<()> {
        wit_log::add_to_linker::<Self, HasSelf<Self>>(linker, |guest| guest)?;
        wit_state::add_to_linker::<Self, HasSelf<Self>>(linker, |guest| guest)
    }
}

impl ResourceLimiter for Guest {
    fn memory_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        // The limit is for all memories together.
        let total = self.memory_used.saturating_add(desired.saturating_sub(current));
        if total <= self.memory_bytes {
            self.memory_used = total;
            self.counted.grew(total);
            return Ok(true);
        }
        self.denied = true;
        // `Ok(false)` would make a Rust guest abort later, elsewhere; an error stops it here.
        let message = format!("the guest asked for {total} bytes of memory (limit {})", self.memory_bytes);
        Err(wasmtime::Error::msg(message))
    }

    fn table_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        let total = self.table_elements.saturating_add(desired.saturating_sub(current));
        let fits = total <= TABLE_ELEMENTS_PER_POLICY;
        if fits {
            self.table_elements = total;
        }
        Ok(fits)
    }

    fn instances(&self) -> usize {
        CORE_INSTANCES_PER_POLICY as usize
    }

    fn tables(&self) -> usize {
        TABLES_PER_POLICY as usize
    }

    fn memories(&self) -> usize {
        MEMORIES_PER_POLICY as usize
    }
}

impl wit_log::Host for Guest {
    fn log(&mut self, level: wit_log::Level, message: String) -> wasmtime::Result<()> {
        self.spend(message.len())?;
        let level = match level {
            wit_log::Level::Debug => tracing::Level::DEBUG,
            wit_log::Level::Info => tracing::Level::INFO,
            wit_log::Level::Warn => tracing::Level::WARN,
            wit_log::Level::Error => tracing::Level::ERROR,
        };
        self.log.write(level, &message);
        Ok(())
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

#[cfg(test)]
mod tests;
