//! One slot under management: its lanes, and what scans, failures and operators do to them.

use std::{collections::VecDeque, path::PathBuf, sync::Arc};

use pointsman_routing::{Digest, Failure, Lane, Slot, SlotEvent};

use super::{
    Probation, SlotConfig,
    command::{Change, CommandError, SlotName, slot_label},
    managed_lane::{Content, ManagedLane, Source},
    now_ms,
    program_builder::{BuildError, Planned, ProgramBuilder, Refused},
    status::{RefusalRecord, SlotState},
};
use crate::{
    access::{Access, Grant},
    refusal::Refusal,
    spec::{LaneSpec, SlotSpec},
    state::State,
};

/// Refusals kept for the status.
const KEPT: usize = 16;
/// Quarantined contents kept.
const QUARANTINED: usize = 32;

pub(super) struct ManagedSlot {
    pub(super) slot: Arc<Slot>,
    pub(super) spec: SlotSpec,
    access: Access,
    pub(super) active: ManagedLane,
    pub(super) canary: ManagedLane,
    pub(super) shadow: ManagedLane,
    /// What [`Slot::rollback`] would bring back.
    pub(super) previous: Option<Content>,
    pub(super) state: SlotState,
    /// The content in force came by a removal: there is nothing better to go back to by itself.
    removed: bool,
    pub(super) rollbacks: u64,
    pub(super) refusals: VecDeque<RefusalRecord>,
    /// What no lane of this slot takes again, as long as this process lives.
    quarantined: VecDeque<Content>,
}

impl ManagedSlot {
    pub(super) fn new(config: SlotConfig) -> Self {
        let lane = |mode: Lane| {
            let label = config.slot.kind();
            let name = match mode {
                Lane::Active => format!("{label}.wasm"),
                mode => format!("{label}.{mode}.wasm"),
            };
            let model = config.slot.model().map(|model| PathBuf::from(model.as_str())).unwrap_or_default();
            ManagedLane::new(
                model.join(name),
                config.initial.filter(|_| mode == Lane::Active).map(|initial| initial.0),
            )
        };
        config.slot.set_on_failure(config.spec.on_failure);
        Self {
            active: lane(Lane::Active),
            canary: lane(Lane::Canary),
            shadow: lane(Lane::Shadow),
            slot: config.slot,
            spec: config.spec,
            access: config.access,
            previous: None,
            state: SlotState::Default,
            removed: false,
            rollbacks: 0,
            refusals: VecDeque::new(),
            quarantined: VecDeque::new(),
        }
    }

    pub(super) fn name(&self) -> SlotName {
        (self.slot.kind(), self.slot.model().cloned())
    }

    /// What its policies remember.
    pub(super) fn memory(&self) -> &State {
        self.access.state()
    }

    /// Whether a policy of any lane may remember anything.
    pub(super) fn may_remember(&self) -> bool {
        let SlotSpec { active, canary, shadow, .. } = &self.spec;
        [active, canary, shadow].iter().any(|lane| lane.grants.contains(&Grant::State))
    }

    pub(super) fn lanes(&self) -> [&ManagedLane; 3] {
        [&self.active, &self.canary, &self.shadow]
    }

    /// Takes another spec; the next scan applies it.
    pub(super) fn configure(&mut self, spec: SlotSpec) {
        if self.spec.on_failure != spec.on_failure {
            self.slot.set_on_failure(spec.on_failure);
        }
        self.spec = spec;
    }

    /// Reads what each lane should run, and applies what is new.
    pub(super) fn scan(&mut self, builder: &mut ProgramBuilder) -> Vec<Change> {
        Lane::ALL.into_iter().filter_map(|mode| self.scan_lane(mode, builder)).collect()
    }

    /// Goes on with the lanes that waited for a compile. Their files are read again: only what is still wanted is installed.
    pub(super) fn resume(&mut self, builder: &mut ProgramBuilder) -> Vec<Change> {
        let waited = Lane::ALL.into_iter().filter(|mode| std::mem::take(&mut self.lane(*mode).pending));
        let waited: Vec<Lane> = waited.collect();
        waited.into_iter().filter_map(|mode| self.scan_lane(mode, builder)).collect()
    }

    fn scan_lane(&mut self, mode: Lane, builder: &mut ProgramBuilder) -> Option<Change> {
        let spec = self.spec_of(mode).clone();
        let lane = self.lane(mode);
        lane.pending = false;
        let there = builder.folder.has(&lane.file);
        if lane.may_come_back(there) {
            return None;
        }
        let planned = match builder.plan(Some(&lane.file), &spec) {
            Err(refused) => return self.refuse(mode, None, &refused),
            Ok(None) => return self.end_trial(mode),
            Ok(Some(planned)) => planned,
        };
        if self.is_quarantined(planned.fingerprint) {
            return self.keep_out(mode, &planned);
        }
        let settled = self.lane(mode).is_settled(planned.fingerprint);
        if mode != Lane::Active {
            self.slot.set_share(mode, spec.share);
        }
        if settled { self.name_source(mode, &planned) } else { self.bring_in(mode, planned, &spec, builder) }
    }

    fn bring_in(
        &mut self,
        mode: Lane,
        mut planned: Planned,
        spec: &LaneSpec,
        builder: &mut ProgramBuilder,
    ) -> Option<Change> {
        let before = planned.fingerprint;
        let outcome = builder.assemble(self.slot.kind(), &mut planned, spec, &self.access);
        let program = match outcome {
            Ok(program) => program,
            Err(BuildError::Refused(refused)) => return self.refuse(mode, Some(before), &refused),
            Err(BuildError::Pending) => {
                self.lane(mode).pending = true;
                return None;
            }
        };
        let took = u64::try_from(builder.took.as_millis()).unwrap_or(u64::MAX);
        let source = if planned.has_own() { Source::File } else { Source::Default };
        let content = Content { fingerprint: planned.fingerprint, main: planned.main(), source };
        // A plan that grew may have become what is there already, or what must not be.
        if content.fingerprint != before && self.is_quarantined(content.fingerprint) {
            return self.keep_out(mode, &planned);
        }
        let lane = self.lane(mode);
        if lane.is_settled(content.fingerprint) {
            return None;
        }
        lane.load_ms = took;
        let gone = source == Source::Default && lane.in_force.is_some_and(|old| old.source == Source::File);
        if mode == Lane::Active {
            self.slot.install(program);
            self.previous = self.active.in_force;
            (self.removed, self.state) =
                (gone, if source == Source::File { SlotState::Active } else { SlotState::Default });
        } else {
            self.slot.try_out(mode, program, spec.share);
        }
        self.lane(mode).took_over(content);
        tracing::info!(slot = slot_label(&self.name()), lane = %mode, load_ms = took, "policy installed");
        let (result, reason) = if gone { ("removed", "file_gone") } else { ("installed", "changed") };
        Some(self.change(mode, result, reason))
    }

    fn is_quarantined(&self, fingerprint: Digest) -> bool {
        self.quarantined.iter().any(|content| content.fingerprint == fingerprint)
    }

    /// Digests to show for what is quarantined.
    pub(super) fn quarantined(&self) -> Vec<Digest> {
        self.quarantined.iter().map(|content| content.main.unwrap_or(content.fingerprint)).collect()
    }

    /// Content that was rolled back lies there (again): it stays out, and who put it there is told.
    fn keep_out(&mut self, mode: Lane, planned: &Planned) -> Option<Change> {
        let lane = self.lane(mode);
        if lane.wanted.replace(planned.fingerprint) == Some(planned.fingerprint) {
            return None;
        }
        lane.held = None;
        let refusal = Refusal::Quarantined("it was rolled back in this slot before".to_owned());
        let refused = Refused { file: lane.file.clone(), digest: planned.main(), refusal: Box::new(refusal) };
        self.refuse(mode, None, &refused)
    }

    /// A trial of which neither file nor spec is left.
    fn end_trial(&mut self, mode: Lane) -> Option<Change> {
        let lane = self.lane(mode);
        (lane.wanted, lane.held) = (None, None);
        let was = lane.in_force.is_some();
        if was || lane.refusal.is_some() {
            lane.emptied();
        }
        if !was || mode == Lane::Active {
            return None;
        }
        self.slot.withdraw(mode);
        Some(self.change(mode, "removed", "file_gone"))
    }

    /// The content in force may have come another way than it lies there now: what was promoted is the file, by and by.
    fn name_source(&mut self, mode: Lane, planned: &Planned) -> Option<Change> {
        let source = if planned.has_own() { Source::File } else { Source::Default };
        let content = self.lane(mode).in_force.as_mut()?;
        if content.fingerprint != planned.fingerprint || content.source == source {
            return None;
        }
        content.source = source;
        if mode == Lane::Active {
            self.state = if planned.has_own() { SlotState::Active } else { SlotState::Default };
        }
        Some(self.change(mode, "kept", "same_content"))
    }

    /// Judges a failure of a generation in force; the change when it had to go.
    pub(super) fn failed(&mut self, event: &SlotEvent, probation: Probation) -> Option<Change> {
        let snapshot = self.slot.snapshot();
        let trial = match event.lane {
            Lane::Active => Some(&snapshot.active),
            Lane::Canary => snapshot.canary.as_ref().map(|trial| &trial.handle),
            Lane::Shadow => snapshot.shadow.as_ref().map(|trial| &trial.handle),
        };
        let present = trial.is_some_and(|active| active.generation == event.generation);
        let stopped = event.failure == Failure::Timeout;
        #[expect(clippy::cast_precision_loss, reason = "calls of a probation are few")]
        let often =
            event.failures >= 3 && event.failures as f64 > probation.failure_share * event.calls as f64;
        if !present || event.calls > probation.calls || !(stopped || often) {
            return None;
        }
        if event.lane == Lane::Active && (self.removed || self.previous.is_none()) {
            return None;
        }
        let content = self.leave(event.lane)?;
        self.rollbacks += 1;
        let file = self.lane(event.lane).file.display().to_string();
        let record = RefusalRecord::rolled_back(file, content.main, event, now_ms());
        tracing::warn!(slot = slot_label(&self.name()), lane = %event.lane, message = record.message, "policy rolled back");
        self.remember(record);
        let result = if event.lane == Lane::Active { "rolled_back" } else { "withdrawn" };
        Some(self.change(event.lane, result, event.failure.kind()))
    }

    /// An operator's word: away with what runs in this lane.
    pub(super) fn roll_back(&mut self, mode: Lane) -> Result<Change, CommandError> {
        let name = slot_label(&self.name());
        self.leave(mode).ok_or_else(|| CommandError::NothingToRollBack(name.clone()))?;
        tracing::info!(slot = name, lane = %mode, "policy rolled back by command");
        let result = if mode == Lane::Active { "rolled_back" } else { "withdrawn" };
        Ok(self.change(mode, result, "command"))
    }

    /// Takes what is in force out of a lane and quarantines it. `None` when there is nothing, or nothing to go back to.
    fn leave(&mut self, mode: Lane) -> Option<Content> {
        let content = self.lane(mode).in_force?;
        if mode == Lane::Active {
            let previous = self.previous?;
            self.slot.rollback()?;
            self.previous = None;
            self.active.took_over(previous);
            self.active.held = None;
            self.state = SlotState::RolledBack;
            self.removed = false;
        } else {
            self.slot.withdraw(mode);
            self.lane(mode).emptied();
        }
        if self.quarantined.len() >= QUARANTINED {
            self.quarantined.pop_front();
        }
        self.quarantined.push_back(content);
        Some(content)
    }

    /// An operator's word: a trial becomes the active generation, with its instances as they are.
    pub(super) fn promote(
        &mut self,
        from: Option<Lane>,
        builder: &ProgramBuilder,
    ) -> Result<Change, CommandError> {
        let name = slot_label(&self.name());
        let snapshot = self.slot.snapshot();
        let mode = match (from, &snapshot.canary, &snapshot.shadow) {
            (Some(mode), ..) => mode,
            (None, Some(_), Some(_)) => return Err(CommandError::Ambiguous(name)),
            (None, Some(_), None) => Lane::Canary,
            (None, None, _) => Lane::Shadow,
        };
        let trial = if mode == Lane::Canary { &snapshot.canary } else { &snapshot.shadow };
        let (Some(trial), Some(content), true) = (trial, self.lane(mode).in_force, mode != Lane::Active)
        else {
            return Err(CommandError::NothingToPromote(name));
        };
        if let Some(digest) = content.main {
            builder.trust.pinned(&self.active.file, digest).map_err(CommandError::Refused)?;
        }
        self.slot.install(trial.handle.program.clone());
        self.slot.withdraw(mode);
        self.previous = self.active.in_force;
        self.active.held = Some(self.active.wanted);
        self.active.took_over(Content { source: Source::Promoted, ..content });
        (self.state, self.removed) = (SlotState::Active, false);
        let lane = self.lane(mode);
        lane.emptied();
        // Its file may lie there for long: it is no trial any more.
        lane.held = Some(Some(content.fingerprint));
        tracing::info!(slot = name, from = %mode, "policy promoted");
        Ok(self.change(Lane::Active, "promoted", mode.as_str()))
    }

    fn refuse(&mut self, mode: Lane, fingerprint: Option<Digest>, refused: &Refused) -> Option<Change> {
        let record = self.lane(mode).refuse(fingerprint, refused)?;
        tracing::warn!(slot = slot_label(&self.name()), lane = %mode, file = record.file, kind = record.kind, message = record.message, "policy refused");
        let reason = record.kind;
        self.remember(record);
        Some(self.change(mode, "refused", reason))
    }

    fn remember(&mut self, record: RefusalRecord) {
        self.refusals.push_back(record);
        if self.refusals.len() > KEPT {
            self.refusals.pop_front();
        }
    }

    fn change(&self, lane: Lane, result: &'static str, reason: &'static str) -> Change {
        let snapshot = self.slot.snapshot();
        let generation = match lane {
            Lane::Active => Some(snapshot.active.generation),
            Lane::Canary => snapshot.canary.as_ref().map(|trial| trial.handle.generation),
            Lane::Shadow => snapshot.shadow.as_ref().map(|trial| trial.handle.generation),
        };
        let (slot, model) = self.name();
        Change { slot, model: model.map(|model| model.to_string()), lane, result, reason, generation }
    }

    fn lane(&mut self, mode: Lane) -> &mut ManagedLane {
        match mode {
            Lane::Active => &mut self.active,
            Lane::Canary => &mut self.canary,
            Lane::Shadow => &mut self.shadow,
        }
    }

    fn spec_of(&self, mode: Lane) -> &LaneSpec {
        match mode {
            Lane::Active => &self.spec.active,
            Lane::Canary => &self.spec.canary,
            Lane::Shadow => &self.spec.shadow,
        }
    }
}
