//! What the manager tells: per slot what runs and since when, and what was refused and why.

use std::collections::VecDeque;

use pointsman_routing::{
    Digest, Generation, GenerationHandle, Lane, Origin, Program, SlotEvent, SlotKind, Trial, World,
};
use serde::Serialize;

use super::{
    command::Change,
    managed_lane::{ManagedLane, Source},
    managed_slot::ManagedSlot,
};
use crate::{spec::LaneSpec, state::State};

/// All slots at one moment.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ManagerStatus {
    /// Every slot.
    pub slots: Vec<SlotStatus>,
    /// Reloads by result and reason.
    pub reloads: Vec<ReloadCount>,
    /// The last changes of lanes, oldest first.
    pub history: VecDeque<ChangeRecord>,
    /// Files in the folder that are no slot's and no part's.
    pub strays: Vec<String>,
}

/// One slot.
#[derive(Clone, Debug, Serialize)]
pub struct SlotStatus {
    /// Which.
    pub slot: SlotKind,
    /// The model it serves; none: all without a slot of their own.
    pub model: Option<String>,
    /// The file it is filled from.
    pub file: String,
    /// What the generation in force is.
    pub state: SlotState,
    /// Where its content came from.
    pub source: Source,
    /// The generation in force.
    pub generation: Generation,
    /// What runs: a policy's name, or `native:<mode>`.
    pub policy: String,
    /// Its version.
    pub version: Option<String>,
    /// Its digest.
    pub digest: Option<Digest>,
    /// Its world.
    pub world: Option<World>,
    /// Where its code came from.
    pub origin: Option<Origin>,
    /// All policies of the generation, in the order they are called.
    pub parts: Vec<PartStatus>,
    /// Calls it served.
    pub calls: u64,
    /// Calls it failed.
    pub failures: u64,
    /// Whether its breaker is open: the fallback serves.
    pub breaker_open: bool,
    /// When it was installed, milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// How long admission took, milliseconds.
    pub load_ms: u64,
    /// Whether there is content to roll back to.
    pub can_roll_back: bool,
    /// Automatic rollbacks of this slot, withdrawn trials included.
    pub rollbacks: u64,
    /// Digests that were rolled back; they are not tried again until the file's content or its settings change.
    pub quarantined: Vec<Digest>,
    /// The last refusals.
    pub refusals: VecDeque<RefusalRecord>,
    /// What its policies may import; those of trials may import what is said there.
    pub grants: Vec<&'static str>,
    /// What its policies remember; none where nobody may.
    pub memory: Option<MemoryStatus>,
    /// What serves a share of requests.
    pub canary: Option<LaneStatus>,
    /// What looks on.
    pub shadow: Option<LaneStatus>,
}

/// What a slot's policies keep in `state`, against what they may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryStatus {
    /// Keys; what has expired counts until it is met or swept.
    pub entries: usize,
    /// Keys there may be.
    pub entries_limit: usize,
    /// Bytes of keys and values, with 64 for each entry.
    pub bytes: usize,
    /// Bytes there may be.
    pub bytes_limit: usize,
}

/// A trial.
#[derive(Clone, Debug, Serialize)]
pub struct LaneStatus {
    /// Its generation.
    pub generation: Generation,
    /// Share of requests, 0 to 1.
    pub share: f64,
    /// What runs.
    pub policy: String,
    /// Its version.
    pub version: Option<String>,
    /// Its digest.
    pub digest: Option<Digest>,
    /// What its policies may import.
    pub grants: Vec<&'static str>,
    /// All policies of the generation.
    pub parts: Vec<PartStatus>,
    /// Calls it had.
    pub calls: u64,
    /// Calls it failed.
    pub failures: u64,
    /// Whether its breaker is open: nobody asks it.
    pub breaker_open: bool,
    /// When it began, milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// As a shadow: requests in which it would have chosen the same.
    pub agree: u64,
    /// … another, or none.
    pub disagree: u64,
    /// … gave no usable answer.
    pub failed: u64,
}

/// One policy of a generation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartStatus {
    /// Its world.
    pub world: World,
    /// Its name.
    pub policy: String,
    /// Its version.
    pub version: String,
    /// Its digest.
    pub digest: Digest,
    /// Where it came from.
    pub origin: Origin,
    /// As a scorer: its weight.
    pub weight: Option<f32>,
    /// It imports `state`.
    pub remembers: bool,
    /// It exports `learning`.
    pub learns: bool,
}

/// What the generation in force is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SlotState {
    /// The slot's default serves.
    Default,
    /// The file, or what was promoted, serves.
    Active,
    /// The content before serves again.
    RolledBack,
}

/// A file that was refused, or a generation that was rolled back.
#[derive(Clone, Debug, Serialize)]
pub struct RefusalRecord {
    /// The file, or the name of the built-in policy.
    pub file: String,
    /// Digest of its content, when it could be read.
    pub digest: Option<Digest>,
    /// Stable label.
    pub kind: &'static str,
    /// Human-readable text.
    pub message: String,
    /// When, milliseconds since the Unix epoch.
    pub at_ms: u64,
}

/// A change of a lane, and when.
#[derive(Clone, Debug, Serialize)]
pub struct ChangeRecord {
    /// When, milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// What.
    #[serde(flatten)]
    pub change: Change,
    /// What the lane runs after it; none when it is empty.
    pub policy: Option<String>,
}

/// How often reloads ended so.
#[derive(Clone, Debug, Serialize)]
pub struct ReloadCount {
    /// `installed`, `refused`, `removed`, `rolled_back`, `withdrawn` or `promoted`.
    pub result: &'static str,
    /// Why.
    pub reason: &'static str,
    /// How often.
    pub count: u64,
}

impl RefusalRecord {
    pub(super) fn rolled_back(file: String, digest: Option<Digest>, event: &SlotEvent, at_ms: u64) -> Self {
        let message = format!(
            "rolled back after {} failures in its first {} calls, the last: {}",
            event.failures, event.calls, event.failure
        );
        Self { file, digest, kind: "rolled_back", message, at_ms }
    }
}

impl ManagedSlot {
    /// The name of what a lane runs now.
    pub(super) fn policy(&self, lane: Lane) -> Option<String> {
        let snapshot = self.slot.snapshot();
        let trial = |trial: &Option<Trial>| trial.as_ref().map(|trial| name(&trial.handle.program));
        match lane {
            Lane::Active => Some(name(&snapshot.active.program)),
            Lane::Canary => trial(&snapshot.canary),
            Lane::Shadow => trial(&snapshot.shadow),
        }
    }

    pub(super) fn status(&self) -> SlotStatus {
        let snapshot = self.slot.snapshot();
        let active = &snapshot.active;
        let info = active.program.ranker();
        SlotStatus {
            slot: self.slot.kind(),
            model: self.slot.model().map(ToString::to_string),
            file: self.active.file.display().to_string(),
            state: self.state,
            source: self.active.in_force.map_or(Source::Default, |content| content.source),
            generation: active.generation,
            policy: name(&active.program),
            version: info.map(|info| info.version.to_string()),
            digest: info.map(|info| info.digest),
            world: info.map(|info| info.world),
            origin: info.map(|info| info.origin.clone()),
            parts: parts(&active.program),
            calls: active.calls(),
            failures: active.failures(),
            breaker_open: active.breaker.is_open(),
            since_ms: self.active.since_ms,
            load_ms: self.active.load_ms,
            can_roll_back: self.previous.is_some(),
            rollbacks: self.rollbacks,
            quarantined: self.quarantined(),
            refusals: self.refusals.clone(),
            grants: names(&self.spec.active),
            memory: self.may_remember().then(|| MemoryStatus::of(self.memory())),
            canary: snapshot
                .canary
                .as_ref()
                .map(|trial| trial_status(trial, &self.canary, &self.spec.canary)),
            shadow: snapshot
                .shadow
                .as_ref()
                .map(|trial| trial_status(trial, &self.shadow, &self.spec.shadow)),
        }
    }
}

impl SlotStatus {
    /// The numbers that requests move, as they are now.
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
        }
        for (status, trial) in [(&mut self.canary, canary), (&mut self.shadow, shadow)] {
            if let (Some(status), Some(trial)) = (status, trial)
                && status.generation == trial.handle.generation
            {
                status.count(&trial.handle);
            }
        }
    }
}

impl MemoryStatus {
    fn of(state: &State) -> Self {
        let ((entries, bytes), quota) = (state.usage(), state.quota());
        Self { entries, entries_limit: quota.keys, bytes, bytes_limit: quota.total_bytes }
    }
}

impl LaneStatus {
    fn count(&mut self, active: &GenerationHandle) {
        (self.calls, self.failures) = (active.calls(), active.failures());
        self.breaker_open = active.breaker.is_open();
        let [(_, agree), (_, disagree), (_, failed)] = active.agreement.counts();
        (self.agree, self.disagree, self.failed) = (agree, disagree, failed);
    }
}

fn names(spec: &LaneSpec) -> Vec<&'static str> {
    spec.grants.iter().map(|grant| grant.as_str()).collect()
}

fn trial_status(trial: &Trial, lane: &ManagedLane, spec: &LaneSpec) -> LaneStatus {
    let active = &trial.handle;
    let info = active.program.ranker();
    let mut status = LaneStatus {
        generation: active.generation,
        share: trial.share,
        policy: name(&active.program),
        version: info.map(|info| info.version.to_string()),
        digest: info.map(|info| info.digest),
        grants: names(spec),
        parts: parts(&active.program),
        calls: 0,
        failures: 0,
        breaker_open: false,
        since_ms: lane.since_ms,
        agree: 0,
        disagree: 0,
        failed: 0,
    };
    status.count(active);
    status
}

fn parts(program: &Program) -> Vec<PartStatus> {
    let weights: Vec<f32> = match program {
        Program::Scorers { scorers, .. } => scorers.iter().map(|scorer| scorer.weight).collect(),
        _ => Vec::new(),
    };
    let mut weights = weights.into_iter();
    let one = |policy: &std::sync::Arc<dyn pointsman_routing::Policy>| {
        let info = policy.info();
        PartStatus {
            world: info.world,
            policy: info.name.to_string(),
            version: info.version.to_string(),
            digest: info.digest,
            origin: info.origin.clone(),
            weight: if info.world == World::Scorer { weights.next() } else { None },
            remembers: info.remembers,
            learns: info.learns,
        }
    };
    program.policies().map(one).collect()
}

fn name(program: &Program) -> String {
    match program {
        Program::Native(mode) => {
            let name = serde_json::to_value(mode).ok().and_then(|name| name.as_str().map(str::to_owned));
            format!("native:{}", name.unwrap_or_default())
        }
        // A filter that was dropped in is what an operator looks for.
        Program::Selector { filters, .. } | Program::Scorers { filters, .. } => {
            let filter = filters.last().map(|filter| filter.info());
            let named = program.ranker();
            let names = filter.into_iter().chain(named).map(|info| &*info.name);
            names.collect::<Vec<_>>().join("+")
        }
        Program::DecodeOverride(policy) => policy.info().name.to_string(),
    }
}
