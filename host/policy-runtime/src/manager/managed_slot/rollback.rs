//! Rolls back what fails in its first calls, and what an operator rejects.

use pointsman_routing::{Failure, Lane, SlotEvent};

use super::{
    super::{
        Probation,
        command::{CommandError, slot_label},
        managed_lane::Content,
        record::{Change, rolled_back},
        status::SlotState,
    },
    ManagedSlot, RolledBack,
};

/// Number of quarantined contents that a slot remembers.
const MAX_QUARANTINED: usize = 32;

impl ManagedSlot {
    /// Rolls a generation back if a failure in its first calls requires it. Returns the change.
    pub(in super::super) fn handle_failure(
        &mut self,
        event: &SlotEvent,
        probation: Probation,
    ) -> Option<Change> {
        let running = self.running(event.lane).is_some_and(|handle| handle.generation == event.generation);
        let exceeded_deadline = event.failure == Failure::Timeout;
        #[expect(clippy::cast_precision_loss, reason = "calls of a probation are few")]
        let often =
            event.failures >= 3 && event.failures as f64 > probation.failure_share * event.calls as f64;
        if !running || event.calls > probation.calls || !(exceeded_deadline || often) {
            return None;
        }
        if event.lane == Lane::Active && (self.removed || self.previous.is_none()) {
            return None;
        }
        let content = self.quarantine(event.lane)?;
        self.rollbacks += 1;
        let file = self.lane(event.lane).found.display().to_string();
        let message = rolled_back(event);
        tracing::warn!(
            slot = slot_label(&self.name()),
            lane = %event.lane,
            generation = event.generation.0,
            digest = content.main.map(|digest| digest.to_string()),
            error = message,
            "policy rolled back"
        );
        self.refuse_rolled_back(event.lane, file, content, message);
        let result = if event.lane == Lane::Active { "rolled_back" } else { "withdrawn" };
        Some(self.change(event.lane, result, event.failure.kind()))
    }

    /// Rolls a lane back by command.
    pub(in super::super) fn roll_back(&mut self, mode: Lane) -> Result<Change, CommandError> {
        let name = slot_label(&self.name());
        let generation = self.running(mode).map(|handle| handle.generation.0);
        let content = self.quarantine(mode).ok_or_else(|| CommandError::NothingToRollBack(name.clone()))?;
        let digest = content.main.map(|digest| digest.to_string());
        tracing::info!(slot = name, lane = %mode, generation, digest, "policy rolled back by command");
        let file = self.lane(mode).found.display().to_string();
        let message =
            "rolled back by an operator; change the file or its settings to try again, or undo the rollback"
                .to_owned();
        self.refuse_rolled_back(mode, file, content, message);
        let result = if mode == Lane::Active { "rolled_back" } else { "withdrawn" };
        Ok(self.change(mode, result, "command"))
    }

    /// Records that a lane does not run what directory and configuration ask for.
    fn refuse_rolled_back(&mut self, lane: Lane, file: String, content: Content, message: String) {
        let record = self.refusal(lane, file, content.main, "rolled_back", message);
        self.lane(lane).refusals = vec![record.clone()];
        self.remember(record);
    }

    /// Takes the content out of a lane and quarantines it. Returns `None` when the lane is empty, has no
    /// previous content, or runs what replaced a removed file.
    fn quarantine(&mut self, mode: Lane) -> Option<Content> {
        let content = self.lane(mode).content?;
        let policy = self.policy(mode).unwrap_or_default();
        if mode == Lane::Active {
            // A removed file serves no more, and what replaced it is not at fault.
            if self.removed {
                return None;
            }
            let previous = self.previous?;
            self.slot.rollback()?;
            self.previous = None;
            self.active.set_content(previous);
            self.active.held = None;
            self.state = SlotState::RolledBack;
            self.removed = false;
        } else {
            self.slot.withdraw(mode);
            self.lane(mode).clear();
        }
        if self.quarantined.len() >= MAX_QUARANTINED {
            self.quarantined.pop_front();
        }
        self.quarantined.push_back(RolledBack { content, policy, undone: false });
        Some(content)
    }
}
