//! Rolls back what fails in its first calls, and what an operator rejects.

use pointsman_routing::{Failure, Lane, SlotEvent};

use super::{
    super::{
        Probation,
        command::{CommandError, slot_label},
        managed_lane::{Content, Source},
        plan::Plan,
        program_builder::ProgramBuilder,
        record::{Change, rolled_back},
        status::SlotState,
    },
    ManagedSlot, RolledBack,
    put_back::Cause,
};

/// Number of quarantined contents that a slot remembers.
const MAX_QUARANTINED: usize = 32;

/// Content that was taken out of a lane.
struct Quarantined {
    content: Content,
    /// Lane and file that it came from.
    lane: Lane,
    file: String,
    /// Names the configured filters that are not in force now; empty if all are.
    filters_off: String,
}

impl ManagedSlot {
    /// Rolls a generation back if a failure in its first calls requires it. Returns the change.
    pub(in super::super) fn handle_failure(
        &mut self,
        event: &SlotEvent,
        probation: Probation,
    ) -> Option<Change> {
        let running = self.running(event.lane).is_some_and(|handle| handle.generation == event.generation);
        let exceeded_deadline = matches!(event.failure, Failure::Timeout { .. });
        #[expect(clippy::cast_precision_loss, reason = "calls of a probation are few")]
        let often =
            event.failures >= 3 && event.failures as f64 > probation.failure_share * event.calls as f64;
        if !running || event.calls > probation.calls || !(exceeded_deadline || often) {
            return None;
        }
        if event.lane == Lane::Active && (self.removed || self.previous.is_none()) {
            return None;
        }
        let quarantined = self.quarantine(event.lane, Cause::Failure { step: event.step as usize })?;
        let Quarantined { content, lane, file, filters_off } = quarantined;
        self.rollbacks += 1;
        let message = rolled_back(event) + &filters_off;
        tracing::warn!(
            slot = slot_label(&self.name()),
            lane = %event.lane,
            generation = event.generation.0,
            digest = content.main.map(|digest| digest.to_string()),
            error = message,
            "policy rolled back"
        );
        self.refuse_rolled_back(lane, file, content, message);
        let result = if event.lane == Lane::Active { "rolled_back" } else { "withdrawn" };
        Some(self.change(event.lane, result, event.failure.kind()))
    }

    /// Rolls a lane back by command. What its files asked for before, and what is not compiled yet, stays out
    /// as well: it must not replace what the operator went back to.
    pub(in super::super) fn roll_back(
        &mut self,
        mode: Lane,
        builder: &ProgramBuilder,
    ) -> Result<Change, CommandError> {
        let name = slot_label(&self.name());
        let generation = self.running(mode).map(|handle| handle.generation.0);
        let pending = self.pending(mode, builder);
        let rolled_back = self.quarantine(mode, Cause::Command);
        let is_rolled_back = rolled_back.is_some();
        if let Some(Quarantined { content, lane, file, filters_off }) = rolled_back {
            let digest = content.main.map(|digest| digest.to_string());
            tracing::info!(slot = name, lane = %mode, generation, digest, "policy rolled back by command");
            let message = format!(
                "rolled back by an operator; change the file or its settings to try again, or undo the \
                 rollback{filters_off}"
            );
            self.refuse_rolled_back(lane, file, content, message);
        }
        let result = match (is_rolled_back, &pending, mode) {
            (false, None, _) => return Err(CommandError::NothingToRollBack(name)),
            (false, Some(_), _) => "kept",
            (true, _, Lane::Active) => "rolled_back",
            (true, ..) => "withdrawn",
        };
        if let Some(plan) = pending {
            self.hold_back(mode, &plan);
        }
        Ok(self.change(mode, result, "command"))
    }

    /// Returns what a lane's files and settings ask for, if it neither runs nor was refused yet.
    fn pending(&self, mode: Lane, builder: &ProgramBuilder) -> Option<Plan> {
        let lane = self.lane_of(mode);
        let plan = builder.plan(Some(&lane.file), &self.spec_now(mode, builder)).ok()??;
        let asked = Some(plan.fingerprint);
        let previous = self.previous.filter(|_| mode == Lane::Active);
        let serves = [lane.content, previous].into_iter().flatten().any(|one| Some(one.fingerprint) == asked);
        // A file that is missing may be in the middle of a replacement.
        let is_removed = !plan.has_own_file()
            && (lane.own.is_some() || lane.content.is_some_and(|one| one.source == Source::File));
        // Behind a promotion that is rolled back there may be a file that was never compiled.
        let is_behind = mode == Lane::Active && lane.held == Some(asked);
        let is_known = lane.wanted == asked && lane.waits_for.is_empty() && !is_behind;
        (!serves && !is_removed && !is_known && !self.is_quarantined(plan.fingerprint)).then_some(plan)
    }

    /// Keeps content out that was not compiled yet.
    fn hold_back(&mut self, mode: Lane, plan: &Plan) {
        let source = if plan.has_own_file() { Source::File } else { Source::Default };
        let content = plan.content(source);
        let lane = self.lane(mode);
        lane.found = plan.own_file().unwrap_or(&lane.file).clone();
        let file = lane.found.display().to_string();
        lane.waits_for.clear();
        lane.waits_since_ms = 0;
        (lane.asked, lane.wanted) = (Some(plan.fingerprint), Some(plan.fingerprint));
        let message = "an operator rolled the slot back before this was compiled; change the file or its \
                       settings to try again, or undo the rollback"
            .to_owned();
        self.refuse_rolled_back(mode, file.clone(), content, message);
        self.remember_rolled_back(mode, content, file.clone(), file);
    }

    /// Records that a lane does not run what directory and configuration ask for.
    fn refuse_rolled_back(&mut self, lane: Lane, file: String, content: Content, message: String) {
        let record = self.refusal(lane, file, content.main, "rolled_back", message);
        // A trial that was promoted may have another successor by now.
        if lane == Lane::Active || self.lane(lane).content.is_none() {
            self.lane(lane).refusals = vec![record.clone()];
        }
        self.remember(record);
    }

    /// Takes the content out of a lane and quarantines it. Returns `None` when the lane is empty, has nothing
    /// to put back, or runs what replaced a removed file.
    fn quarantine(&mut self, mode: Lane, cause: Cause) -> Option<Quarantined> {
        let content = self.lane(mode).content?;
        let (from, file) = self.origin(mode, content);
        let policy = self.policy(mode).unwrap_or_default();
        let mut filters_off = String::new();
        if mode == Lane::Active {
            // A removed file serves no more, and what replaced it is not at fault.
            if self.removed {
                return None;
            }
            filters_off = self.put_back(content, cause)?;
            self.active.held = None;
            self.state = SlotState::RolledBack;
            self.removed = false;
        } else {
            self.withdraw(mode);
            self.lane(mode).clear();
        }
        self.remember_rolled_back(from, content, policy, file.clone());
        Some(Quarantined { content, lane: from, file, filters_off })
    }

    /// Ends a trial. The state that a shadow has of its own ends with it.
    pub(super) fn withdraw(&self, mode: Lane) {
        let shadow = self.running(mode).filter(|_| mode == Lane::Shadow);
        self.slot.withdraw(mode);
        if let Some(shadow) = shadow {
            self.access.shadow().end(shadow.generation);
        }
    }

    /// Returns the lane and the file that the content of a lane came from.
    fn origin(&self, mode: Lane, content: Content) -> (Lane, String) {
        match &self.promoted_from {
            Some((from, file)) if content.source == Source::Promoted => (*from, file.display().to_string()),
            _ => (mode, self.lane_of(mode).found.display().to_string()),
        }
    }

    fn remember_rolled_back(&mut self, lane: Lane, content: Content, policy: String, file: String) {
        self.quarantined.retain(|one| one.content.fingerprint != content.fingerprint);
        if self.quarantined.len() >= MAX_QUARANTINED {
            self.quarantined.pop_front();
        }
        self.quarantined.push_back(RolledBack { content, policy, lane, file, undone: false });
    }
}
