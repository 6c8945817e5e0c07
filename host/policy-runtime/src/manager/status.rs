//! Status of all slots, as `GET /policies` shows it.

use std::collections::VecDeque;

use pointsman_routing::{
    Digest, Generation, GenerationHandle, Lane, LastFailure, OnlyChoice, Origin, SlotKind, Trial, World,
};
use serde::Serialize;

use super::{
    managed_lane::Source,
    record::{ChangeRecord, RefusalRecord, ReloadCount},
};
use crate::state::State;

/// Status of all slots at one time.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ManagerStatus {
    /// The slots, those for all models first.
    pub slots: Vec<SlotStatus>,
    /// Number of changes by result and reason.
    pub reloads: Vec<ReloadCount>,
    /// Last changes of lanes, oldest first.
    pub history: VecDeque<ChangeRecord>,
    /// Policy files in the directory that belong to no slot.
    pub strays: Vec<String>,
    /// What is wrong with the name of each of them, and which name is near.
    pub stray_problems: Vec<String>,
    /// Number of further such files, which are not listed.
    pub more_strays: usize,
    /// Files that are being compiled.
    pub compiling: Vec<CompilingStatus>,
}

/// A file that is being compiled. What its lane runs stays until it is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CompilingStatus {
    /// The slot.
    pub slot: SlotKind,
    /// Model of the slot. `None`: all models without a slot of their own.
    pub model: Option<String>,
    /// The lane.
    pub lane: Lane,
    /// File of the lane, relative to the policy directory.
    pub file: String,
    /// Time at which the lane began to wait, milliseconds since the Unix epoch.
    pub since_ms: u64,
}

/// Status of one slot.
#[derive(Clone, Debug, Serialize)]
pub struct SlotStatus {
    /// The slot.
    pub slot: SlotKind,
    /// Model that it serves. `None` stands for all models without a slot of their own.
    pub model: Option<String>,
    /// File of the active lane, relative to the policy directory.
    pub file: String,
    /// State of the active lane.
    pub state: SlotState,
    /// Source of the active content.
    pub source: Source,
    /// Active generation.
    pub generation: Generation,
    /// Name of the active policy, or `native:<mode>`.
    pub policy: String,
    /// Version of the policy.
    pub version: Option<String>,
    /// SHA-256 of its file.
    pub digest: Option<Digest>,
    /// World of the policy.
    pub world: Option<World>,
    /// File that its code comes from, or built in.
    pub origin: Option<Origin>,
    /// All policies of the active generation, in the order they are called.
    pub parts: Vec<PartStatus>,
    /// Calls of the active generation.
    pub calls: u64,
    /// Failed calls of the active generation.
    pub failures: u64,
    /// Whether its breaker is open, so that the fallback serves.
    pub breaker_open: bool,
    /// Last failed call of the active generation.
    pub last_failure: Option<LastFailure>,
    /// The only candidate that it chooses, after many decisions in a row for one. `None` if it chooses
    /// several.
    pub only_choice: Option<OnlyChoice>,
    /// Time of installation, milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// Duration of loading, milliseconds.
    pub load_ms: u64,
    /// Whether a roll-back is possible.
    pub can_roll_back: bool,
    /// Name of the policy that a roll-back restores.
    pub previous: Option<String>,
    /// Automatic roll-backs in this slot, withdrawn trials included.
    pub rollbacks: u64,
    /// Digests of content that was rolled back. It is not tried again until the file or its settings change.
    pub quarantined: Vec<Digest>,
    /// The rollback that an undo would end now. `None` while no file or setting asks for what was rolled
    /// back.
    pub undo: Option<RollbackStatus>,
    /// Last refusals, oldest first.
    pub refusals: VecDeque<RefusalRecord>,
    /// Grants of the active lane.
    pub grants: Vec<&'static str>,
    /// Size of the slot's `state`. `None` if no lane grants `state`.
    pub memory: Option<MemoryStatus>,
    /// The canary.
    pub canary: Option<LaneStatus>,
    /// The shadow.
    pub shadow: Option<LaneStatus>,
}

/// A rollback that can be undone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RollbackStatus {
    /// Name of the policy that was rolled back.
    pub policy: String,
    /// Digest of its content.
    pub digest: Digest,
}

/// Size of a slot's `state`, with its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryStatus {
    /// Number of keys. An expired key counts until an access or the sweep removes it.
    pub entries: usize,
    /// Largest number of keys.
    pub entries_limit: usize,
    /// Bytes of keys and values, plus 64 for each entry.
    pub bytes: usize,
    /// Largest number of bytes.
    pub bytes_limit: usize,
}

/// Status of a trial.
#[derive(Clone, Debug, Serialize)]
pub struct LaneStatus {
    /// Generation of the trial.
    pub generation: Generation,
    /// Share of the requests, 0 to 1.
    pub share: f64,
    /// Name of the policy.
    pub policy: String,
    /// Version of the policy.
    pub version: Option<String>,
    /// SHA-256 of its file.
    pub digest: Option<Digest>,
    /// Grants of its policies.
    pub grants: Vec<&'static str>,
    /// All policies of the generation, in the order they are called.
    pub parts: Vec<PartStatus>,
    /// Calls of the generation.
    pub calls: u64,
    /// Failed calls of the generation.
    pub failures: u64,
    /// Whether its breaker is open, so that it is not called.
    pub breaker_open: bool,
    /// Last failed call of the generation.
    pub last_failure: Option<LastFailure>,
    /// Start of the trial, milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// Same as for the active lane.
    pub only_choice: Option<OnlyChoice>,
    /// For a shadow: number of requests for which it chose the same worker.
    pub agree: u64,
    /// For a shadow: number of requests for which it chose another worker, or abstained.
    pub disagree: u64,
    /// For a shadow: number of requests for which it failed or gave an unusable answer.
    pub failed: u64,
    /// For a shadow: number of requests that it would have refused, and that were not refused.
    pub shed: u64,
}

/// A policy of a generation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartStatus {
    /// World of the policy.
    pub world: World,
    /// Name of the policy.
    pub policy: String,
    /// Version of the policy.
    pub version: String,
    /// SHA-256 of its file.
    pub digest: Digest,
    /// SHA-256 of its settings. `None`: it has none.
    pub settings_digest: Option<Digest>,
    /// File that its code comes from, or built in.
    pub origin: Origin,
    /// Weight, for a scorer.
    pub weight: Option<f32>,
    /// Whether it imports `state`.
    pub remembers: bool,
    /// Whether it exports `learning`.
    pub learns: bool,
}

/// Summary of a slot's content.
#[derive(Clone, Debug, Serialize)]
pub struct SlotSummary {
    /// The slot.
    pub slot: SlotKind,
    /// Model that it serves. `None` stands for all models without a slot of their own.
    pub model: Option<String>,
    /// State of the active lane.
    pub state: SlotState,
    /// Source of the active content.
    pub source: Source,
    /// Generation that serves requests.
    pub active: Option<LaneSummary>,
    /// The canary, which serves a share of the requests.
    pub canary: Option<LaneSummary>,
    /// The shadow, which is called and compared.
    pub shadow: Option<LaneSummary>,
    /// The rollback that an undo would end now.
    pub undo: Option<RollbackStatus>,
}

/// Summary of a lane's content.
#[derive(Clone, Debug, Serialize)]
pub struct LaneSummary {
    /// Name of the policy, or `native:<mode>`.
    pub policy: String,
    /// Generation.
    pub generation: Generation,
    /// SHA-256 of the ranking policy's file.
    pub digest: Option<Digest>,
}

/// State of a slot's active lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SlotState {
    /// The configured content serves.
    Default,
    /// A file or a promoted trial serves.
    Active,
    /// The previous content serves again, after a roll-back.
    RolledBack,
}

impl SlotState {
    /// Returns the name that the JSON of the status shows.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Active => "active",
            Self::RolledBack => "rolled-back",
        }
    }
}

impl SlotStatus {
    /// Updates the figures that requests change.
    pub(super) fn refresh(
        &mut self,
        active: &GenerationHandle,
        canary: Option<&Trial>,
        shadow: Option<&Trial>,
        memory: &State,
    ) {
        if self.memory.is_some() {
            self.memory = Some(MemoryStatus::of(memory));
        }
        if active.generation == self.generation {
            (self.calls, self.failures) = (active.calls(), active.failures());
            self.breaker_open = active.breaker.is_open();
            self.last_failure = active.last_failure();
            self.only_choice = active.choices.only_choice();
        }
        for (status, trial) in [(&mut self.canary, canary), (&mut self.shadow, shadow)] {
            if let (Some(status), Some(trial)) = (status, trial)
                && status.generation == trial.handle.generation
            {
                status.update(&trial.handle);
            }
        }
    }
}

impl MemoryStatus {
    pub(super) fn of(state: &State) -> Self {
        let ((entries, bytes), quota) = (state.usage(), state.quota());
        Self { entries, entries_limit: quota.keys, bytes, bytes_limit: quota.total_bytes }
    }
}

impl LaneStatus {
    pub(super) fn update(&mut self, active: &GenerationHandle) {
        (self.calls, self.failures) = (active.calls(), active.failures());
        self.breaker_open = active.breaker.is_open();
        self.last_failure = active.last_failure();
        self.only_choice = active.choices.only_choice();
        [self.agree, self.disagree, self.failed, self.shed] =
            active.agreement.counts().map(|(_, count)| count);
    }
}
