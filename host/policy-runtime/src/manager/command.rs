//! Commands of operators, their reports and errors. The manager's thread runs them between scans.

use pointsman_routing::{Digest, Lane, SlotKind};
use pointsman_workers::ModelName;
use serde::Serialize;
use tokio::sync::oneshot;

use super::{
    record::{Change, RefusalRecord, UndoneRollback},
    status::SlotSummary,
};
use crate::{refusal::Refusal, spec::SlotSpec, trust::TrustRules};

/// A slot by kind and model. Without a model: the slot of all models that have none of their own.
pub type SlotName = (SlotKind, Option<ModelName>);

/// A command of an operator.
#[derive(Debug)]
pub enum Command {
    /// Reads the policy directory now.
    Reload,
    /// Restores the previous content of the active lane, or ends a trial. Quarantines what ran.
    RollBack {
        /// The slot.
        slot: SlotName,
        /// The lane.
        lane: Lane,
    },
    /// Lets the content run again that a slot rolled back last.
    UndoRollBack {
        /// The slot.
        slot: SlotName,
    },
    /// Makes a trial the active generation.
    Promote {
        /// The slot.
        slot: SlotName,
        /// Lane of the trial. `None` stands for the only trial of the slot.
        from: Option<Lane>,
    },
    /// Takes new specs and trust rules, and applies what changed.
    Configure {
        /// New specs. Slots that are not listed keep theirs.
        specs: Vec<(SlotName, SlotSpec)>,
        /// New trust rules. They hold for files that are read from now on.
        trust: TrustRules,
    },
}

/// Result of a command.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Changes that it caused.
    pub changed: Vec<Change>,
    /// Refusals in force afterwards, older ones included.
    pub refused: Vec<RefusalRecord>,
    /// Lanes whose policies still compile.
    pub compiling: Vec<String>,
    /// Policy files in the directory that belong to no slot.
    pub strays: Vec<String>,
    /// What is wrong with the name of each of them, and which name is near.
    pub stray_problems: Vec<String>,
    /// Number of further such files, which are not listed.
    pub more_strays: usize,
    /// Policies that every slot runs now.
    pub slots: Vec<SlotSummary>,
    /// The rollback that the command undid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub undone: Option<UndoneRollback>,
}

/// Why a command failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// The slot does not exist.
    #[error("unknown slot `{0}`; `GET /policies` lists the slots")]
    UnknownSlot(String),
    /// The lane has no previous content, no trial, or runs its default because its file was removed.
    #[error("slot `{0}` has nothing to roll back to; install other content instead")]
    NothingToRollBack(String),
    /// The slot rolled nothing back.
    #[error("slot `{0}` has no rollback to undo")]
    NothingToUndo(String),
    /// Nothing asks for the content that the slot rolled back.
    #[error(
        "slot `{slot}` rolled back `{policy}` ({digest}), and no file or setting asks for it now: {advice}, then undo \
         the rollback"
    )]
    NoFileToUndo {
        /// The slot.
        slot: String,
        /// The policy that was rolled back last.
        policy: String,
        /// Digest of its content.
        digest: Digest,
        /// How to ask for it again.
        advice: String,
    },
    /// The content that was rolled back cannot be used any more.
    #[error("the rollback of `{policy}` in slot `{slot}` stays: {why}; undo it again when that is mended")]
    UndoRefused {
        /// The slot.
        slot: String,
        /// The policy that was rolled back.
        policy: String,
        /// File, kind and message of the refusal.
        why: String,
    },
    /// The slot does not run the trial, or none.
    #[error("slot `{slot}` does not have {what} to promote; it runs {lanes}; {advice}")]
    NothingToPromote {
        /// The slot.
        slot: String,
        /// The lane that was named, in words.
        what: &'static str,
        /// Lanes that run something, with their policies.
        lanes: String,
        /// What the operator has to do first.
        advice: String,
    },
    /// The slot has both a canary and a shadow.
    #[error("slot `{slot}` runs {lanes}; name the one to promote, `canary` or `shadow`")]
    Ambiguous {
        /// The slot.
        slot: String,
        /// Its lanes, with their policies.
        lanes: String,
    },
    /// The content cannot be used in the lane.
    #[error("{0}")]
    Refused(Refusal),
    /// The manager's thread has ended.
    #[error("the policy manager has ended; restart the gateway")]
    Ended,
}

/// A queued command, with the channel of its answer.
pub(super) type QueuedCommand = (Command, oneshot::Sender<Result<Report, CommandError>>);

/// Returns the label of a slot in messages and log fields: `prefill`, or `model/prefill`.
pub(super) fn slot_label((kind, model): &SlotName) -> String {
    model.as_ref().map_or_else(|| kind.to_string(), |model| format!("{model}/{kind}"))
}
