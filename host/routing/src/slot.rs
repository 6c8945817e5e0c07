//! Slots: the places a policy fills, and the generations that fill them one after the other.
//!
//! Readers pin one [`Active`] by a lock-free load and keep it for the leg. One writer (the policy manager) installs and
//! rolls back. Failures are reported by the router through [`Active::note`]; what to do about them is the writer's call.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use pointsman_workers::{Leg, ModelName};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::{Duration, Instant};

use crate::{
    policy::{Failure, Policy},
    recipe::Recipe,
};

/// The number of one loaded version of a slot's content; counts up from 1 and is never used twice in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

/// The places a policy may fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SlotKind {
    /// Chooses the prefill worker.
    Prefill,
    /// Chooses the decode worker.
    Decode,
    /// Chooses the worker of requests that run on one worker.
    Aggregated,
    /// Decides whether remote prefill is worth it, and configures the decode leg.
    DecodeOverride,
}

/// Selectors built into the host (spec F1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NativeMode {
    /// Each candidate in turn.
    RoundRobin,
    /// Uniform.
    Random,
    /// The less loaded of two drawn at random.
    PowerOfTwo,
    /// The fewest active requests.
    LeastLoaded,
    /// The cost of spec G.
    Kv,
    /// An external router chooses by header; a request without a choice is 400.
    Direct,
}

/// How a scorer's costs are brought to one scale before they are weighed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Normalize {
    /// As they are.
    #[default]
    None,
    /// `(c - min) / (max - min)`; all equal: 0.
    MinMax,
    /// Scores in [0, 1], higher is better: clamped, used as `1 - x`.
    Unit,
}

/// How a row is picked from the weighed costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Picker {
    /// The minimum, ties uniform; or softmax when the temperature in force is above 0.
    #[default]
    Min,
    /// `p ~ exp(-(c - min) / ((max - min) * T))`.
    Softmax {
        /// T above 0.
        temperature: f32,
    },
    /// Probability in proportion to `max - c`; all equal: uniform.
    WeightedRandom,
}

/// One scorer of a slot with its weight.
#[derive(Clone, Debug)]
pub struct WeightedScorer {
    /// The loaded scorer.
    pub policy: Arc<dyn Policy>,
    /// Multiplies its normalized costs.
    pub weight: f32,
    /// Scale of its costs.
    pub normalize: Normalize,
}

/// What a generation runs.
#[derive(Clone, Debug)]
pub enum Program {
    /// A native selector; for the decode-override slot: the native default of spec D2 and D4.
    Native(NativeMode),
    /// Filters in order, then one selector.
    Selector {
        /// Run in order, each on what the one before left.
        filters: Vec<Arc<dyn Policy>>,
        /// Chooses among the rest.
        selector: Arc<dyn Policy>,
    },
    /// Filters in order, then weighed scorers and a picker.
    Scorers {
        /// Run in order, each on what the one before left.
        filters: Vec<Arc<dyn Policy>>,
        /// At least one.
        scorers: Vec<WeightedScorer>,
        /// Picks from the weighed costs.
        picker: Picker,
    },
    /// A decode override.
    DecodeOverride(Arc<dyn Policy>),
}

/// One generation in force.
#[derive(Debug)]
pub struct Active {
    /// Its number.
    pub generation: Generation,
    /// What it runs.
    pub program: Program,
    /// Whether it is called at all.
    pub breaker: Breaker,
    /// What it runs, as records tell it.
    pub(crate) recipe: Arc<Recipe>,
    slot: SlotKind,
    model: Option<ModelName>,
    calls: AtomicU64,
    failures: AtomicU64,
    events: mpsc::UnboundedSender<SlotEvent>,
}

/// A failure of a generation in service, told to the policy manager.
#[derive(Clone, Debug)]
pub struct SlotEvent {
    /// The slot's kind.
    pub slot: SlotKind,
    /// The slot's model; `None` is every model without a slot of its own.
    pub model: Option<ModelName>,
    /// The generation that failed.
    pub generation: Generation,
    /// Calls it had served when it failed, this one included.
    pub calls: u64,
    /// How many of them failed.
    pub failures: u64,
    /// How.
    pub failure: Failure,
}

/// Stops calling a policy that fails: closed, then open for a pause, then one call is let through.
///
/// A timeout opens it at the first; other failures after [`Breaker::TOLERANCE`] in a row.
#[derive(Debug)]
pub struct Breaker {
    in_a_row: AtomicU32,
    /// Milliseconds after `epoch` at which the next call may try again; 0 is closed.
    retry_at_ms: AtomicU64,
    epoch: Instant,
}

/// A place that a policy fills, for one model or for all.
pub struct Slot {
    kind: SlotKind,
    model: Option<ModelName>,
    active: ArcSwap<Active>,
    /// The generation before, for rollback. Touched by the writer only.
    previous: Mutex<Option<Program>>,
    last: AtomicU64,
    events: mpsc::UnboundedSender<SlotEvent>,
}

impl Slot {
    /// A slot whose first generation runs `program`; failures go to `events`.
    #[must_use]
    pub fn new(
        kind: SlotKind,
        model: Option<ModelName>,
        program: Program,
        events: mpsc::UnboundedSender<SlotEvent>,
    ) -> Self {
        let first = Active::new(kind, model.clone(), Generation(1), program, events.clone());
        Self {
            kind,
            model,
            active: ArcSwap::from_pointee(first),
            previous: Mutex::new(None),
            last: AtomicU64::new(1),
            events,
        }
    }

    /// Which place this is.
    #[must_use]
    pub fn kind(&self) -> SlotKind {
        self.kind
    }

    /// The model it serves; `None` is every model without a slot of its own.
    #[must_use]
    pub fn model(&self) -> Option<&ModelName> {
        self.model.as_ref()
    }

    /// Pins the generation in force. Never waits.
    #[must_use]
    pub fn pin(&self) -> Arc<Active> {
        self.active.load_full()
    }

    /// Puts `program` in force as the next generation and keeps the one before for [`Slot::rollback`].
    pub fn install(&self, program: Program) -> Generation {
        let mut previous = self.previous.lock();
        *previous = Some(self.active.load().program.clone());
        self.swap(program)
    }

    /// Puts the content before the present one in force again, under a new number. `None` when there is none.
    pub fn rollback(&self) -> Option<Generation> {
        let program = self.previous.lock().take()?;
        Some(self.swap(program))
    }

    fn swap(&self, program: Program) -> Generation {
        let number = Generation(self.last.fetch_add(1, Ordering::Relaxed) + 1);
        let next = Active::new(self.kind, self.model.clone(), number, program, self.events.clone());
        self.active.store(Arc::new(next));
        number
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("kind", &self.kind).field("model", &self.model).finish_non_exhaustive()
    }
}

impl Active {
    fn new(
        slot: SlotKind,
        model: Option<ModelName>,
        generation: Generation,
        program: Program,
        events: mpsc::UnboundedSender<SlotEvent>,
    ) -> Self {
        Self {
            generation,
            recipe: Arc::new(Recipe::of(slot, generation, &program)),
            program,
            breaker: Breaker::new(),
            slot,
            model,
            calls: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            events,
        }
    }

    /// Counts one call and its outcome; a failure moves the breaker and is told to the policy manager.
    pub fn note<T>(&self, outcome: &Result<T, Failure>) {
        if matches!(outcome, Err(Failure::NotReady)) {
            return;
        }
        let calls = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        match outcome {
            Ok(_) => self.breaker.success(),
            Err(failure) => {
                let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
                self.breaker.failure(failure);
                let _ = self.events.send(SlotEvent {
                    slot: self.slot,
                    model: self.model.clone(),
                    generation: self.generation,
                    calls,
                    failures,
                    failure: failure.clone(),
                });
            }
        }
    }

    /// Calls so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Failed calls so far.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

impl Breaker {
    /// Failures in a row, other than timeouts, that it stands.
    pub const TOLERANCE: u32 = 5;
    /// How long it stays open before one call may try.
    pub const PAUSE: Duration = Duration::from_secs(5);

    fn new() -> Self {
        Self { in_a_row: AtomicU32::new(0), retry_at_ms: AtomicU64::new(0), epoch: Instant::now() }
    }

    /// Whether the policy may be called now. When the pause is over exactly one caller gets `true`.
    #[must_use]
    pub fn allows(&self) -> bool {
        let retry_at = self.retry_at_ms.load(Ordering::Acquire);
        if retry_at == 0 {
            return true;
        }
        let now = self.now_ms();
        let next = now + Self::pause_ms();
        now >= retry_at
            && self.retry_at_ms.compare_exchange(retry_at, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Whether it is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.retry_at_ms.load(Ordering::Acquire) != 0
    }

    fn success(&self) {
        if self.in_a_row.load(Ordering::Relaxed) != 0 {
            self.in_a_row.store(0, Ordering::Relaxed);
            self.retry_at_ms.store(0, Ordering::Release);
        }
    }

    fn failure(&self, failure: &Failure) {
        let in_a_row = self.in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
        if *failure == Failure::Timeout || in_a_row >= Self::TOLERANCE {
            self.retry_at_ms.store(self.now_ms() + Self::pause_ms(), Ordering::Release);
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn pause_ms() -> u64 {
        u64::try_from(Self::PAUSE.as_millis()).unwrap_or(u64::MAX)
    }
}

impl SlotKind {
    /// All slots, in the order a request meets them.
    pub const ALL: [Self; 4] = [Self::Prefill, Self::Decode, Self::Aggregated, Self::DecodeOverride];

    /// The slot that routes `leg`.
    #[must_use]
    pub fn of(leg: Leg) -> Self {
        match leg {
            Leg::Prefill => Self::Prefill,
            Leg::Decode => Self::Decode,
            Leg::Aggregated => Self::Aggregated,
        }
    }

    /// The stable label, which is also the file name (`<label>.wasm`) in the policy folder.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Aggregated => "aggregated",
            Self::DecodeOverride => "decode-override",
        }
    }
}

impl fmt::Display for SlotKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
