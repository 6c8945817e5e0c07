//! Content that was rolled back: keeps it out, and lets it run again when an operator undoes the rollback.

use pointsman_routing::{Digest, Lane};

use super::{
    super::{
        command::{CommandError, slot_label},
        managed_lane::{Content, Source},
        plan::{Plan, Refused},
        program_builder::ProgramBuilder,
        record::{Change, UndoneRollback},
        status::RollbackStatus,
    },
    ManagedSlot,
};
use crate::refusal::Refusal;

/// Content that a slot rolled back.
#[derive(Clone)]
pub(super) struct RolledBack {
    pub(super) content: Content,
    /// Name of the policy, or the file of one that was not compiled yet.
    pub(super) policy: String,
    /// Lane that ran it or asked for it, and the file there.
    pub(super) lane: Lane,
    pub(super) file: String,
    /// Whether an operator undid the rollback. It is in force again when the content is refused.
    pub(super) undone: bool,
}

impl RolledBack {
    fn digest(&self) -> Digest {
        self.content.main.unwrap_or(self.content.fingerprint)
    }

    /// Says how to ask for it again. `own`: digest of the file that its lane has now.
    fn advice(&self, own: Option<Digest>) -> String {
        if self.content.source == Source::Default || (own.is_some() && own == self.content.main) {
            "give the slot the settings of that time again".to_owned()
        } else {
            format!("put it at `{}` again", self.file)
        }
    }
}

impl ManagedSlot {
    /// Lets the newest content run again that was rolled back and that files and configuration ask for. A
    /// trial that was promoted before begins again as a trial. `changes` gets what the scan for it changed.
    pub(in super::super) fn undo_roll_back(
        &mut self,
        builder: &mut ProgramBuilder,
        changes: &mut Vec<Change>,
    ) -> Result<UndoneRollback, CommandError> {
        let slot = slot_label(&self.name());
        // A file may have changed since the last scan.
        let (mut refused, mut files) = (Vec::new(), Vec::new());
        for mode in Lane::ALL {
            let plan = builder.plan(Some(&self.lane_of(mode).file), &self.spec_now(mode, builder));
            self.lane(mode).asked = plan.as_ref().ok().and_then(|plan| Some(plan.as_ref()?.fingerprint));
            let own = plan.as_ref().ok().and_then(|plan| Some(plan.as_ref()?.own.as_ref()?.digest));
            files.extend(own.map(|own| (mode, own)));
            refused.extend(plan.err().map(|refused| (mode, refused)));
        }
        let place = self.undo_place();
        let Some(rolled_back) = place.and_then(|place| self.quarantined.get_mut(place)) else {
            return Err(self.cannot_undo(slot, &refused, &files));
        };
        rolled_back.undone = true;
        let fingerprint = rolled_back.content.fingerprint;
        let (policy, digest) = (rolled_back.policy.clone(), rolled_back.digest());
        for lane in Lane::ALL {
            self.lane(lane).allow(fingerprint);
        }
        tracing::info!(slot, policy, %digest, "rollback undone by command");
        changes.extend(self.scan(builder));
        let undone = UndoneRollback { slot, policy, digest, fingerprint };
        self.check_undone(&undone).map(|()| undone)
    }

    /// `refused` are the lanes whose files or settings cannot be used, `files` those with a file of their
    /// own.
    fn cannot_undo(
        &self,
        slot: String,
        refused: &[(Lane, Refused)],
        files: &[(Lane, Digest)],
    ) -> CommandError {
        let Some(one) = self.quarantined.iter().rev().find(|one| !one.undone) else {
            return CommandError::NothingToUndo(slot);
        };
        let policy = one.policy.clone();
        match refused.iter().find(|(lane, _)| *lane == one.lane) {
            Some((_, Refused { file, refusal, .. })) => {
                let why = format!("`{}` was refused ({}): {refusal}", file.display(), refusal.kind());
                CommandError::UndoRefused { slot, policy, why }
            }
            None => {
                let own = files.iter().find(|(lane, _)| *lane == one.lane).map(|(_, own)| *own);
                CommandError::NoFileToUndo { slot, policy, digest: one.digest(), advice: one.advice(own) }
            }
        }
    }

    /// Returns an error if the content of an undone rollback was refused since, or if nothing asks for it any
    /// more. The rollback is then in force again.
    pub(in super::super) fn check_undone(&mut self, undone: &UndoneRollback) -> Result<(), CommandError> {
        let compiles = self.compiling().next().is_some();
        let same = |one: &&mut RolledBack| one.content.fingerprint == undone.fingerprint;
        // What runs again is forgotten.
        let Some(one) = self.quarantined.iter_mut().find(same) else { return Ok(()) };
        if one.undone && compiles {
            return Ok(());
        }
        one.undone = false;
        let one = one.clone();
        let own = self.lane_of(one.lane).own;
        let (slot, policy) = (undone.slot.clone(), undone.policy.clone());
        let lanes = self.lanes();
        let asks = lanes.iter().filter(|lane| lane.asked == Some(undone.fingerprint));
        let refusal = asks.flat_map(|lane| &lane.refusals).next();
        Err(match refusal.or_else(|| self.lane_of(one.lane).refusals.first()) {
            Some(one) => {
                let why = format!("`{}` was refused ({}): {}", one.file, one.kind, one.message);
                CommandError::UndoRefused { slot, policy, why }
            }
            None => {
                CommandError::NoFileToUndo { slot, policy, digest: undone.digest, advice: one.advice(own) }
            }
        })
    }

    /// Returns the rollback that an undo would end now.
    pub(in super::super) fn undoable(&self) -> Option<RollbackStatus> {
        let rolled_back = self.quarantined.get(self.undo_place()?)?;
        Some(RollbackStatus { policy: rolled_back.policy.clone(), digest: rolled_back.digest() })
    }

    fn undo_place(&self) -> Option<usize> {
        let is_asked = |one: &RolledBack| {
            !one.undone && self.lanes().iter().any(|lane| lane.lacks(one.content.fingerprint))
        };
        self.quarantined.iter().rposition(is_asked)
    }

    /// Forgets an undone rollback whose content runs again.
    pub(super) fn undo_took_effect(&mut self, fingerprint: Digest) {
        self.quarantined.retain(|one| !one.undone || one.content.fingerprint != fingerprint);
    }

    /// Puts a rollback in force again whose content was refused, so that the undo can be tried again.
    pub(super) fn undo_failed(&mut self, fingerprint: Digest) {
        let same = self.quarantined.iter_mut().filter(|one| one.content.fingerprint == fingerprint);
        same.for_each(|one| one.undone = false);
    }

    pub(super) fn is_quarantined(&self, fingerprint: Digest) -> bool {
        self.quarantined.iter().any(|one| !one.undone && one.content.fingerprint == fingerprint)
    }

    /// Returns the digests to show for quarantined content.
    pub(super) fn quarantined(&self) -> Vec<Digest> {
        self.quarantined.iter().filter(|one| !one.undone).map(RolledBack::digest).collect()
    }

    /// Refuses content that was rolled back, once for each time that it appears.
    pub(super) fn refuse_quarantined(&mut self, mode: Lane, plan: &Plan) -> Option<Change> {
        let lane = self.lane(mode);
        if lane.wanted.replace(plan.fingerprint) == Some(plan.fingerprint) {
            return None;
        }
        lane.held = None;
        let refusal = Refusal::Quarantined(
            "this slot rolled it back before; change the file or its settings to try again".to_owned(),
        );
        let refused = Refused::new(lane.found.clone(), plan.main_digest(), refusal);
        self.refuse(mode, None, &refused)
    }
}
