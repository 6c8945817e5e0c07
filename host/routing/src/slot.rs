//! Slots: the extension points of routing, and the successive generations of policies in each.
//!
//! Readers pin one [`SlotSnapshot`] by a lock-free load and keep it for the leg. One writer, the policy
//! manager, installs, tries and rolls back. The router reports failures through [`GenerationHandle::note`];
//! the manager decides what follows.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use pointsman_workers::{Leg, ModelName};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::{ids::Generation, policy::OnFailure};

mod content;
mod generation;
mod one_worker;
mod snapshot;
mod stats;
mod summary;

pub use content::{NativeMode, Normalize, Picker, Program, WeightedScorer};
pub use generation::{GenerationHandle, LastFailure, SlotEvent};
use generation::{LaneStats, Place};
pub use one_worker::{MIN_IN_A_ROW, OneWorker, OnlyChoice};
pub use snapshot::{SlotSnapshot, Trial};
pub use stats::{AgreementStats, CALL_BUCKETS_US, CallStats, ShadowVerdict};
pub use summary::{PolicySummary, ProgramSummary};

/// The extension points that a policy may implement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, JsonSchema)]
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

/// The lanes of a slot: how a generation takes part in decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lane {
    /// Serves requests.
    #[default]
    Active,
    /// Serves a share of requests.
    Canary,
    /// Runs beside the serving generation; its answer is only compared.
    Shadow,
}

/// An extension point, for one model or for all.
pub struct Slot {
    place: Place,
    snapshot: ArcSwap<SlotSnapshot>,
    /// The program before the active one, for rollback. Its lock serializes writers; readers never take it.
    previous: Mutex<Option<Program>>,
    last: AtomicU64,
    stats: [LaneStats; 3],
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
        let place = Place { kind, model, events };
        let stats: [LaneStats; 3] = Default::default();
        let [serving, ..] = &stats;
        let first =
            GenerationHandle::new(place.clone(), Generation(1), Lane::Active, program, serving.clone());
        let active = Arc::new(first);
        let snapshot = SlotSnapshot { active, canary: None, shadow: None, on_failure: None, max_rows: None };
        Self {
            place,
            snapshot: ArcSwap::from_pointee(snapshot),
            previous: Mutex::new(None),
            last: AtomicU64::new(1),
            stats,
        }
    }

    /// The slot's kind.
    #[must_use]
    pub fn kind(&self) -> SlotKind {
        self.place.kind
    }

    /// Returns the model that the slot serves; `None`: all models without a slot of their own.
    #[must_use]
    pub fn model(&self) -> Option<&ModelName> {
        self.place.model.as_ref()
    }

    /// Pins the present generations of all lanes. Never waits.
    #[must_use]
    pub fn snapshot(&self) -> Arc<SlotSnapshot> {
        self.snapshot.load_full()
    }

    /// Pins the active generation. Never waits.
    #[must_use]
    pub fn pin(&self) -> Arc<GenerationHandle> {
        self.snapshot.load().active.clone()
    }

    /// Calls of a lane, all its generations together.
    #[must_use]
    pub fn stats(&self, lane: Lane) -> &Arc<CallStats> {
        &self.lane(lane).calls
    }

    /// Batches of outcomes delivered to a lane, all its generations together.
    #[must_use]
    pub fn observed(&self, lane: Lane) -> &Arc<CallStats> {
        &self.lane(lane).observed
    }

    fn lane(&self, lane: Lane) -> &LaneStats {
        let [active, canary, shadow] = &self.stats;
        match lane {
            Lane::Active => active,
            Lane::Canary => canary,
            Lane::Shadow => shadow,
        }
    }

    /// Installs `program` as the next generation and keeps the previous one for [`Slot::rollback`].
    pub fn install(&self, program: Program) -> Generation {
        let mut previous = self.previous.lock();
        let before = self.snapshot.load_full();
        *previous = Some(before.active.program.clone());
        self.swap(&before, program)
    }

    /// Returns the program that [`Slot::rollback`] would install.
    #[must_use]
    pub fn previous(&self) -> Option<Program> {
        self.previous.lock().clone()
    }

    /// Installs the previous program again, as a new generation. `None` when there is none.
    pub fn rollback(&self) -> Option<Generation> {
        self.rollback_to(self.previous()?)
    }

    /// Like [`Slot::rollback`], but installs `program` in the place of the previous one.
    pub fn rollback_to(&self, program: Program) -> Option<Generation> {
        let mut previous = self.previous.lock();
        previous.take()?;
        Some(self.swap(&self.snapshot.load_full(), program))
    }

    /// Starts a trial of `program` beside the active generation for a share (0 to 1) of requests. Replaces
    /// the lane's trial. The active lane has no trials: `None`.
    pub fn try_out(&self, lane: Lane, program: Program, share: f64) -> Option<Generation> {
        let _turn = self.previous.lock();
        let handle = Arc::new(self.make(lane, program));
        let generation = handle.generation;
        self.put(lane, Some(Trial { handle, share })).then_some(generation)
    }

    /// Changes a trial's share of requests; its generation stays.
    pub fn set_share(&self, lane: Lane, share: f64) {
        let _turn = self.previous.lock();
        let snapshot = self.snapshot.load_full();
        let trial = if lane == Lane::Canary { &snapshot.canary } else { &snapshot.shadow };
        if let Some(trial) = trial {
            self.put(lane, Some(Trial { handle: trial.handle.clone(), share }));
        }
    }

    /// Ends a trial, from the next leg on.
    pub fn withdraw(&self, lane: Lane) {
        let _turn = self.previous.lock();
        self.put(lane, None);
    }

    /// Sets the slot's own reaction to failures; `None`: the router's.
    pub fn set_on_failure(&self, on_failure: Option<OnFailure>) {
        let _turn = self.previous.lock();
        let snapshot = self.snapshot.load_full();
        self.snapshot.store(Arc::new(SlotSnapshot { on_failure, ..(*snapshot).clone() }));
    }

    /// Sets the number of candidates that the slot's policies see at most; `None`: all that are eligible.
    pub fn set_max_rows(&self, max_rows: Option<u32>) {
        let _turn = self.previous.lock();
        let snapshot = self.snapshot.load_full();
        self.snapshot.store(Arc::new(SlotSnapshot { max_rows, ..(*snapshot).clone() }));
    }

    fn put(&self, lane: Lane, trial: Option<Trial>) -> bool {
        let mut snapshot = (*self.snapshot.load_full()).clone();
        match lane {
            Lane::Active => return false,
            Lane::Canary => snapshot.canary = trial,
            Lane::Shadow => snapshot.shadow = trial,
        }
        self.snapshot.store(Arc::new(snapshot));
        true
    }

    fn swap(&self, before: &SlotSnapshot, program: Program) -> Generation {
        let active = Arc::new(self.make(Lane::Active, program));
        let generation = active.generation;
        self.snapshot.store(Arc::new(SlotSnapshot { active, ..before.clone() }));
        generation
    }

    fn make(&self, lane: Lane, program: Program) -> GenerationHandle {
        let number = Generation(self.last.fetch_add(1, Ordering::Relaxed) + 1);
        GenerationHandle::new(self.place.clone(), number, lane, program, self.lane(lane).clone())
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { kind, model, .. } = &self.place;
        f.debug_struct("Slot").field("kind", kind).field("model", model).finish_non_exhaustive()
    }
}

impl SlotKind {
    /// All kinds, in the order in which a request uses them.
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

    /// The stable label, which is also the file name (`<label>.wasm`) in the policy directory.
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

impl Lane {
    /// Every lane.
    pub const ALL: [Self; 3] = [Self::Active, Self::Canary, Self::Shadow];

    /// The stable label, which is also the middle of a trial's file name (`<slot>.<label>.wasm`).
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Canary => "canary",
            Self::Shadow => "shadow",
        }
    }
}

impl fmt::Display for SlotKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reads a label as a string, not as an enum variant: errors can then name the key of a table.
impl<'de> Deserialize<'de> for SlotKind {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const LABELS: &[&str] = &["prefill", "decode", "aggregated", "decode-override"];
        let label = String::deserialize(deserializer)?;
        let named = Self::ALL.into_iter().find(|kind| kind.as_str() == label);
        named.ok_or_else(|| serde::de::Error::unknown_variant(&label, LABELS))
    }
}
