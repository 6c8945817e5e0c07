//! Makes a trial the active generation, or says why it cannot be.

use pointsman_routing::Lane;

use super::{
    super::{
        command::{CommandError, slot_label},
        managed_lane::{Content, Source},
        program_builder::ProgramBuilder,
        record::Change,
        status::SlotState,
    },
    ManagedSlot,
};

impl ManagedSlot {
    /// Makes a trial the active generation, with its warm instances.
    pub(in super::super) fn promote(
        &mut self,
        from: Option<Lane>,
        builder: &ProgramBuilder,
    ) -> Result<Change, CommandError> {
        let snapshot = self.slot.snapshot();
        let mode = match (from, &snapshot.canary, &snapshot.shadow) {
            (Some(mode), ..) => mode,
            (None, Some(_), Some(_)) => {
                let lanes = self.lanes_with_policies();
                return Err(CommandError::Ambiguous { slot: slot_label(&self.name()), lanes });
            }
            (None, Some(_), None) => Lane::Canary,
            (None, None, _) => Lane::Shadow,
        };
        let trial = if mode == Lane::Canary { &snapshot.canary } else { &snapshot.shadow };
        let (Some(trial), Some(content), true) = (trial, self.lane(mode).content, mode != Lane::Active)
        else {
            return Err(self.nothing_to_promote(from));
        };
        if let Some(digest) = content.main {
            builder.trust.check_pin(&self.active.file, digest).map_err(CommandError::Refused)?;
        }
        self.slot.install(trial.handle.program.clone());
        self.withdraw(mode);
        self.previous = self.active.content;
        self.active.held = Some(self.active.wanted);
        self.active.set_content(Content { source: Source::Promoted, ..content });
        (self.state, self.removed) = (SlotState::Active, false);
        let lane = self.lane(mode);
        lane.clear();
        let from = (mode, lane.found.clone());
        // The file of the trial may stay in the directory. It must not start the trial again.
        lane.held = Some(Some(content.fingerprint));
        self.promoted_from = Some(from);
        self.log_content(Lane::Active, "policy promoted");
        Ok(self.change(Lane::Active, "promoted", mode.as_str()))
    }

    fn nothing_to_promote(&self, from: Option<Lane>) -> CommandError {
        let what = from.map_or("a canary or shadow", |lane| match lane {
            Lane::Active => "anything but its active lane",
            Lane::Canary => "a canary",
            Lane::Shadow => "a shadow",
        });
        let trials = [Lane::Canary, Lane::Shadow];
        let running = trials.into_iter().find(|lane| self.running(*lane).is_some());
        let asked = |lane: &Lane| from.is_none_or(|from| from == *lane || from == Lane::Active);
        let advice = match running {
            Some(lane) => format!("name `{lane}`"),
            None => match trials.into_iter().filter(asked).find_map(|lane| self.obstacle(lane)) {
                Some(obstacle) => obstacle,
                None => {
                    let files = trials.into_iter().filter(asked).map(|lane| self.lane_of(lane));
                    let files: Vec<String> = files.map(|lane| format!("`{}`", lane.file.display())).collect();
                    format!("put the policy at {} first", files.join(" or "))
                }
            },
        };
        let slot = slot_label(&self.name());
        CommandError::NothingToPromote { slot, what, lanes: self.lanes_with_policies(), advice }
    }

    /// Why a trial does not run although its file is there, and what to do.
    fn obstacle(&self, mode: Lane) -> Option<String> {
        let lane = self.lane_of(mode);
        let file = lane.found.display();
        if !lane.waits_for.is_empty() {
            return Some(format!(
                "`{file}` is being compiled: try again when `GET /policies` lists the {mode}"
            ));
        }
        if let Some(refusal) = lane.refusals.first() {
            return Some(format!("`{}` was refused ({}): correct it first", refusal.file, refusal.kind));
        }
        let promoted = lane.wanted.is_some() && lane.held == Some(lane.wanted);
        promoted.then(|| format!("`{file}` was promoted before: change it to start a new trial"))
    }

    /// Returns the lanes that run something, with the policy of each.
    fn lanes_with_policies(&self) -> String {
        let lanes = Lane::ALL.into_iter().filter_map(|lane| Some(format!("{lane} `{}`", self.policy(lane)?)));
        lanes.collect::<Vec<_>>().join(", ")
    }
}
