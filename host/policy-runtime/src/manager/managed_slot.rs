//! One managed slot: its lanes, and how scans, failures and commands change them.

use std::{collections::VecDeque, path::PathBuf, sync::Arc};

use pointsman_routing::{Digest, GenerationHandle, Lane, Slot};

use super::{
    SlotConfig,
    command::{SlotName, slot_label},
    managed_lane::{Content, ManagedLane, Source},
    plan::{self, Plan, Refused},
    program_builder::{BuildError, ProgramBuilder},
    record::{Change, RefusalRecord},
    status::{CompilingStatus, SlotState},
    strays::lane_file,
};
use crate::{
    access::{Access, Grant},
    guest_info::truncate,
    spec::{LaneSpec, SlotSpec},
    state::State,
};

mod inheritance;
mod promote;
mod put_back;
mod report;
mod rollback;
mod undo;

use undo::RolledBack;

pub(super) struct ManagedSlot {
    pub(super) slot: Arc<Slot>,
    pub(super) spec: SlotSpec,
    access: Access,
    pub(super) active: ManagedLane,
    pub(super) canary: ManagedLane,
    pub(super) shadow: ManagedLane,
    /// Content that [`Slot::rollback`] restores.
    pub(super) previous: Option<Content>,
    pub(super) state: SlotState,
    /// Lane and file that the promoted content came from.
    promoted_from: Option<(Lane, PathBuf)>,
    /// Whether the active content replaced a removed file. Failures then cause no roll-back: the file is
    /// gone.
    removed: bool,
    pub(super) rollbacks: u64,
    pub(super) refusals: VecDeque<RefusalRecord>,
    /// Content that no lane of this slot takes again until the process ends or an operator undoes the
    /// rollback.
    quarantined: VecDeque<RolledBack>,
}

impl ManagedSlot {
    pub(super) fn new(config: SlotConfig) -> Self {
        let lane = |mode: Lane| {
            let name = lane_file(config.slot.kind(), mode);
            let model = config.slot.model().map(|model| PathBuf::from(model.as_str())).unwrap_or_default();
            ManagedLane::new(
                model.join(name),
                config.initial.filter(|_| mode == Lane::Active).map(|initial| initial.0),
            )
        };
        config.slot.set_on_failure(config.spec.on_failure);
        config.slot.set_max_rows(config.spec.max_rows);
        config.access.state().set_shared(config.spec.shared_state);
        Self {
            active: lane(Lane::Active),
            canary: lane(Lane::Canary),
            shadow: lane(Lane::Shadow),
            slot: config.slot,
            spec: config.spec,
            access: config.access,
            previous: None,
            state: SlotState::Default,
            promoted_from: None,
            removed: false,
            rollbacks: 0,
            refusals: VecDeque::new(),
            quarantined: VecDeque::new(),
        }
    }

    pub(super) fn name(&self) -> SlotName {
        (self.slot.kind(), self.slot.model().cloned())
    }

    /// Returns the state that its policies share.
    pub(super) fn memory(&self) -> &State {
        self.access.state()
    }

    /// Returns whether any lane grants `state`.
    pub(super) fn grants_state(&self) -> bool {
        let SlotSpec { active, canary, shadow, .. } = &self.spec;
        [active, canary, shadow].iter().any(|lane| lane.grants.contains(&Grant::State))
    }

    pub(super) fn lanes(&self) -> [&ManagedLane; 3] {
        [&self.active, &self.canary, &self.shadow]
    }

    /// Returns the lanes that wait for a compile.
    pub(super) fn compiling(&self) -> impl Iterator<Item = CompilingStatus> + '_ {
        let lanes = Lane::ALL.into_iter().zip(self.lanes());
        let waiting = lanes.filter(|(_, lane)| !lane.waits_for.is_empty());
        waiting.map(|(mode, lane)| CompilingStatus {
            slot: self.slot.kind(),
            model: self.slot.model().map(ToString::to_string),
            lane: mode,
            file: lane.found.display().to_string(),
            since_ms: lane.waits_since_ms,
        })
    }

    /// Returns whether a file of its lanes may be in the middle of a replacement.
    pub(super) fn may_be_in_replacement(&self) -> bool {
        self.lanes().into_iter().any(ManagedLane::may_be_in_replacement)
    }

    /// Prepares a scan that an operator asked for. It tries files again that ended their compiler, whose
    /// quarantine may be over, and reports at once what it refuses.
    pub(super) fn prepare_reload(&mut self) {
        for mode in Lane::ALL {
            self.lane(mode).prepare_reload();
        }
    }

    /// Takes a new spec. The next scan applies it.
    pub(super) fn configure(&mut self, spec: SlotSpec) {
        if self.spec.on_failure != spec.on_failure {
            self.slot.set_on_failure(spec.on_failure);
        }
        if self.spec.max_rows != spec.max_rows {
            self.slot.set_max_rows(spec.max_rows);
        }
        self.access.state().set_shared(spec.shared_state);
        self.spec = spec;
    }

    /// Lets the next scan refuse at once what may not be whole.
    pub(super) fn judge_at_once(&mut self) {
        Lane::ALL.into_iter().for_each(|mode| self.lane(mode).judge_at_once());
    }

    /// Reads what each lane shall run, and applies what is new.
    pub(super) fn scan(&mut self, builder: &mut ProgramBuilder) -> Vec<Change> {
        // Lanes without a file come last: theirs may have been renamed to that of another lane.
        let has_file = |mode: &Lane| builder.has(&self.lane_of(*mode).file);
        let (there, missing): (Vec<Lane>, Vec<Lane>) = Lane::ALL.into_iter().partition(has_file);
        there.into_iter().chain(missing).filter_map(|mode| self.scan_lane(mode, builder)).collect()
    }

    /// Scans the lanes that wait for a compile. Reading their files again makes sure that only what is still
    /// wanted is installed.
    pub(super) fn resume(&mut self, builder: &mut ProgramBuilder) -> Vec<Change> {
        let waited = Lane::ALL.into_iter().filter(|mode| !self.lane(*mode).waits_for.is_empty());
        let waited: Vec<Lane> = waited.collect();
        waited.into_iter().filter_map(|mode| self.scan_lane(mode, builder)).collect()
    }

    fn scan_lane(&mut self, mode: Lane, builder: &mut ProgramBuilder) -> Option<Change> {
        let change = self.scan_file(mode, builder);
        self.lane(mode).end_scan();
        change
    }

    fn scan_file(&mut self, mode: Lane, builder: &mut ProgramBuilder) -> Option<Change> {
        let spec = self.spec_now(mode, builder);
        let lane = self.lane(mode);
        lane.inherited_by = spec.inherited_by.clone();
        lane.waits_for.clear();
        let (file, own) = (lane.file.clone(), lane.own);
        let exists = builder.has(&file);
        let moved = !exists
            && self.lanes().iter().any(|lane| {
                lane.file != file && lane.own.is_some() && lane.own == own && builder.has(&lane.file)
            });
        let lane = self.lane(mode);
        lane.asked = None;
        if lane.may_come_back(exists, moved) {
            return None;
        }
        if let Some(found) = builder.find(&lane.file) {
            lane.found = found;
        }
        let plan = builder.plan(Some(&lane.file), &spec);
        lane.set_read(plan::read(&plan));
        let plan = match plan {
            Err(refused) => return self.refuse(mode, None, &refused),
            Ok(None) => return self.end_trial(mode),
            Ok(Some(plan)) => plan,
        };
        if self.misses_rank(mode, &plan, builder) {
            return None;
        }
        let lane = self.lane(mode);
        lane.found = plan.own_file().unwrap_or(&lane.file).clone();
        lane.own = plan.own.as_ref().map(|own| own.digest);
        lane.asked = Some(plan.fingerprint);
        if self.is_quarantined(plan.fingerprint) {
            return self.refuse_quarantined(mode, &plan);
        }
        let settled = self.lane(mode).is_settled(plan.fingerprint);
        if mode != Lane::Active {
            self.slot.set_share(mode, spec.share);
        }
        if !settled {
            return self.install(mode, plan, &spec, builder);
        }
        self.record_versions(mode, &plan, builder);
        self.update_source(mode, &plan)
    }

    /// Records the signed versions of a plan that the lane runs.
    fn record_versions(&self, mode: Lane, plan: &Plan, builder: &ProgramBuilder) {
        if self.lane_of(mode).content.is_some_and(|content| content.fingerprint == plan.fingerprint) {
            plan.signed().for_each(|version| builder.trust.installed(version));
        }
    }

    /// Builds the program of a plan and puts it into the lane.
    fn install(
        &mut self,
        mode: Lane,
        mut plan: Plan,
        spec: &LaneSpec,
        builder: &mut ProgramBuilder,
    ) -> Option<Change> {
        let before = plan.fingerprint;
        let outcome = builder.build(self.name(), &mut plan, spec, &self.access);
        let program = match outcome {
            Ok(program) => program,
            Err(BuildError::Refused(refused)) => return self.refuse(mode, Some(before), &refused),
            Err(BuildError::Pending) => {
                self.lane(mode).wait_for(builder.compiler.asked());
                return None;
            }
        };
        let load_ms = u64::try_from(builder.compiler.took().as_millis()).unwrap_or(u64::MAX);
        let source = if plan.has_own_file() { Source::File } else { Source::Default };
        let content = plan.content(source);
        // Building can extend the plan, so that it is now content that runs already or is quarantined.
        self.lane(mode).asked = Some(content.fingerprint);
        if content.fingerprint != before && self.is_quarantined(content.fingerprint) {
            return self.refuse_quarantined(mode, &plan);
        }
        let lane = self.lane(mode);
        if lane.is_settled(content.fingerprint) {
            return None;
        }
        lane.load_ms = load_ms;
        let gone = source == Source::Default && lane.content.is_some_and(|old| old.source == Source::File);
        if mode == Lane::Active {
            self.slot.install(program);
            self.previous = self.active.content;
            (self.removed, self.state) =
                (gone, if source == Source::File { SlotState::Active } else { SlotState::Default });
        } else {
            self.slot.try_out(mode, program, spec.share);
        }
        self.lane(mode).set_content(content);
        self.record_versions(mode, &plan, builder);
        [before, content.fingerprint].into_iter().for_each(|one| self.undo_took_effect(one));
        self.log_content(mode, "policy installed");
        let (result, reason) = if gone { ("removed", "file_gone") } else { ("installed", "changed") };
        Some(self.change(mode, result, reason))
    }

    /// Returns the generation that a lane runs.
    fn running(&self, mode: Lane) -> Option<Arc<GenerationHandle>> {
        let snapshot = self.slot.snapshot();
        match mode {
            Lane::Active => Some(snapshot.active.clone()),
            Lane::Canary => snapshot.canary.as_ref().map(|trial| trial.handle.clone()),
            Lane::Shadow => snapshot.shadow.as_ref().map(|trial| trial.handle.clone()),
        }
    }

    /// Ends a trial that has neither a file nor a spec any more.
    fn end_trial(&mut self, mode: Lane) -> Option<Change> {
        let lane = self.lane(mode);
        (lane.wanted, lane.held) = (None, None);
        let was = lane.content.is_some();
        if was || !lane.refusals.is_empty() {
            lane.clear();
        }
        if !was || mode == Lane::Active {
            return None;
        }
        self.withdraw(mode);
        Some(self.change(mode, "removed", "file_gone"))
    }

    /// Records that the running content now comes from another source. A promoted trial becomes the file's
    /// content when an operator copies it there. A rollback is over when files and settings ask for what it
    /// restored.
    fn update_source(&mut self, mode: Lane, plan: &Plan) -> Option<Change> {
        let (source, state) = match plan.has_own_file() {
            true => (Source::File, SlotState::Active),
            false => (Source::Default, SlotState::Default),
        };
        let is_rolled_back = mode == Lane::Active && self.state == SlotState::RolledBack;
        let content = self.lane(mode).content.as_mut()?;
        if content.fingerprint != plan.fingerprint || (content.source == source && !is_rolled_back) {
            return None;
        }
        content.source = source;
        if mode == Lane::Active {
            self.state = state;
        }
        Some(self.change(mode, "kept", "same_content"))
    }

    fn refuse(&mut self, mode: Lane, fingerprint: Option<Digest>, refused: &Refused) -> Option<Change> {
        if refused.is_unfinished() && self.lane(mode).waits_for_the_rest() {
            return None;
        }
        let record = |refused: &Refused| {
            let refusal = &refused.refusal;
            let message = truncate(refusal.to_string()) + refusal.how_to_repeat();
            let message = message + &self.inherited_settings(mode, refused).unwrap_or_default();
            let file = refused.file.display().to_string();
            self.refusal(mode, file, refused.digest, refused.refusal.kind(), message)
        };
        let records: Vec<RefusalRecord> = refused.all().into_iter().map(record).collect();
        fingerprint.into_iter().for_each(|fingerprint| self.undo_failed(fingerprint));
        // The next scan tries again what may pass by then.
        let settled = fingerprint.filter(|_| !refused.may_pass_by_itself());
        if !self.lane(mode).refuse(settled, records.clone()) {
            return None;
        }
        for record in records {
            tracing::warn!(
                slot = slot_label(&self.name()),
                lane = %mode,
                file = record.file,
                kind = record.kind,
                error = record.message,
                "policy refused"
            );
            self.remember(record);
        }
        Some(self.change(mode, "refused", refused.refusal.kind()))
    }

    fn change(&self, lane: Lane, result: &'static str, reason: &'static str) -> Change {
        let generation = self.running(lane).map(|handle| handle.generation);
        let (slot, model) = self.name();
        Change { slot, model: model.map(|model| model.to_string()), lane, result, reason, generation }
    }

    fn lane_of(&self, mode: Lane) -> &ManagedLane {
        match mode {
            Lane::Active => &self.active,
            Lane::Canary => &self.canary,
            Lane::Shadow => &self.shadow,
        }
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
