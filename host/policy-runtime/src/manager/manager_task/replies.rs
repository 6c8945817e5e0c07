//! Answers of commands: at once, or when the compiles have finished that they wait for.

use std::time::Duration;

use tokio::{sync::oneshot, time::Instant};

use super::{
    super::{
        command::{Command, CommandError, Report, SlotName},
        managed_slot::ManagedSlot,
        record::{Change, UndoneRollback},
        strays::Stray,
    },
    ManagerTask,
};

/// Channel of a command's answer.
type Reply = oneshot::Sender<Result<Report, CommandError>>;

/// A command that waits for compiles, with what it did so far.
pub(super) struct Waiting {
    pub(super) done: Done,
    reply: Reply,
    until: Instant,
}

/// What a command did.
#[derive(Default)]
pub(super) struct Done {
    pub(super) changed: Vec<Change>,
    /// The rollback that it undid. The command is about this slot only.
    pub(super) undone: Option<(SlotName, UndoneRollback)>,
}

impl Done {
    /// Adds what finished compiles changed.
    pub(super) fn add(&mut self, changes: &[Change]) {
        let slot = self.undone.as_ref().map(|(slot, _)| slot);
        let is_own = |change: &&Change| {
            slot.is_none_or(|(kind, model)| {
                change.slot == *kind && change.model == model.as_ref().map(ToString::to_string)
            })
        };
        self.changed.extend(changes.iter().filter(is_own).cloned());
    }
}

impl From<Vec<Change>> for Done {
    fn from(changed: Vec<Change>) -> Self {
        Self { changed, undone: None }
    }
}

impl ManagerTask {
    /// When the next command has waited for compiles long enough.
    pub(super) fn next_reply(&self) -> Instant {
        let next = self.waiting.iter().map(|waiting| waiting.until).min();
        next.unwrap_or_else(|| Instant::now() + Duration::from_secs(3_600))
    }

    /// Answers the commands that have waited long enough.
    pub(super) fn reply_in_time(&mut self) {
        let now = Instant::now();
        let (late, waiting) = std::mem::take(&mut self.waiting).into_iter().partition(|one| one.until <= now);
        self.waiting = waiting;
        self.reply(late);
    }

    fn reply(&mut self, waiting: Vec<Waiting>) {
        for Waiting { done, reply, .. } in waiting {
            // The caller may have given up waiting; the command is done all the same.
            let _ = reply.send(self.report(done));
        }
    }

    /// Runs a command and sends its report, at once or when the compiles have finished that it waits for.
    pub(super) fn handle_command(&mut self, command: Command, reply: Reply) {
        let waits =
            matches!(command, Command::Reload | Command::Configure { .. } | Command::UndoRollBack { .. });
        match self.run_command(command) {
            Ok(done) if waits && self.compiles_for(&done) => {
                let until = Instant::now() + self.reply_within;
                self.waiting.push(Waiting { done, reply, until });
            }
            outcome => {
                let report = outcome.and_then(|done| self.report(done));
                // The caller may have given up waiting; the command is done all the same.
                let _ = reply.send(report);
                // A rollback may have cancelled what another command waits for.
                self.reply_when_compiled();
            }
        }
    }

    /// Returns whether a compile is under way that the command has to wait for.
    fn compiles_for(&self, done: &Done) -> bool {
        match &done.undone {
            None => !self.builder.compiler.is_idle(),
            Some((slot, _)) => self
                .managed
                .iter()
                .any(|managed| managed.name() == *slot && managed.compiling().next().is_some()),
        }
    }

    /// Answers the commands whose compiles have finished.
    pub(super) fn reply_when_compiled(&mut self) {
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let (waiting, done) = waiting.partition(|one| self.compiles_for(&one.done));
        self.waiting = waiting;
        self.reply(done);
    }

    fn report(&mut self, Done { changed, undone }: Done) -> Result<Report, CommandError> {
        if let Some((slot, undone)) = &undone {
            let managed = self.managed.iter_mut().find(|managed| managed.name() == *slot);
            managed.map_or(Ok(()), |managed| managed.check_undone(undone))?;
        }
        let lanes = self.managed.iter().flat_map(ManagedSlot::lanes);
        Ok(Report {
            changed,
            refused: lanes.flat_map(|lane| lane.refusals.clone()).collect(),
            compiling: self.compiling(),
            strays: self.strays.iter().map(Stray::name).collect(),
            stray_problems: self.strays.iter().map(Stray::problem).collect(),
            more_strays: self.more_strays,
            slots: self.managed.iter().map(ManagedSlot::summary).collect(),
            undone: undone.map(|(_, undone)| undone),
        })
    }
}
