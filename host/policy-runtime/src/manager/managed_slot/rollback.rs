//! Rolls back what fails in its first calls, and what an operator rejects.

use pointsman_routing::{Failure, Lane, SlotEvent};

use super::{
    super::{
        Probation,
        command::{CommandError, slot_label},
        managed_lane::Content,
        now_ms,
        record::{Change, RefusalRecord},
        status::SlotState,
    },
    ManagedSlot,
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
        let file = self.lane(event.lane).file.display().to_string();
        let record = RefusalRecord::rolled_back(file, content.main, event, now_ms());
        tracing::warn!(
            slot = slot_label(&self.name()),
            lane = %event.lane,
            generation = event.generation.0,
            error = record.message,
            "policy rolled back"
        );
        self.remember(record);
        let result = if event.lane == Lane::Active { "rolled_back" } else { "withdrawn" };
        Some(self.change(event.lane, result, event.failure.kind()))
    }

    /// Rolls a lane back by command.
    pub(in super::super) fn roll_back(&mut self, mode: Lane) -> Result<Change, CommandError> {
        let name = slot_label(&self.name());
        self.quarantine(mode).ok_or_else(|| CommandError::NothingToRollBack(name.clone()))?;
        tracing::info!(slot = name, lane = %mode, "policy rolled back by command");
        let result = if mode == Lane::Active { "rolled_back" } else { "withdrawn" };
        Ok(self.change(mode, result, "command"))
    }

    /// Takes the content out of a lane and quarantines it. Returns `None` when the lane is empty or has no
    /// previous content.
    fn quarantine(&mut self, mode: Lane) -> Option<Content> {
        let content = self.lane(mode).content?;
        if mode == Lane::Active {
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
        self.quarantined.push_back(content);
        Some(content)
    }
}
