//! What an operator may ask of the manager while it runs, and what comes of it. The manager's own thread does it, between scans.

use pointsman_routing::{Generation, Lane, SlotKind};
use pointsman_workers::ModelName;
use serde::Serialize;
use tokio::sync::oneshot;

use super::status::RefusalRecord;
use crate::{refusal::Refusal, spec::SlotSpec, trust::TrustRules};

/// A slot by name.
pub type SlotName = (SlotKind, Option<ModelName>);

/// Something to do.
#[derive(Debug)]
pub enum Command {
    /// Read the folder now.
    Reload,
    /// Put the content before the present one in force again, or end a trial; what ran is quarantined.
    RollBack {
        /// Which slot.
        slot: SlotName,
        /// Which lane.
        lane: Lane,
    },
    /// Make a trial the active generation.
    Promote {
        /// Which slot.
        slot: SlotName,
        /// Which trial; `None`: the only one there is.
        from: Option<Lane>,
    },
    /// Take new specs, and a new trust, and apply what changed.
    Configure {
        /// Specs by slot; slots that are not named keep theirs.
        specs: Vec<(SlotName, SlotSpec)>,
        /// Who may bring policies from now on.
        trust: TrustRules,
    },
}

/// What came of a command.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// What changed by it.
    pub changed: Vec<Change>,
    /// What stands refused after it, whether for long or only now.
    pub refused: Vec<RefusalRecord>,
}

/// One change of a lane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The slot.
    pub slot: SlotKind,
    /// Its model.
    pub model: Option<String>,
    /// The lane.
    pub lane: Lane,
    /// `installed`, `kept`, `refused`, `removed`, `rolled_back`, `withdrawn` or `promoted`.
    pub result: &'static str,
    /// Why.
    pub reason: &'static str,
    /// The generation in force after it; none when the lane is empty.
    pub generation: Option<Generation>,
}

/// Why a command was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// There is no such slot.
    #[error("there is no slot `{0}`")]
    UnknownSlot(String),
    /// Nothing came before.
    #[error("slot `{0}` has nothing to roll back to")]
    NothingToRollBack(String),
    /// Nothing is on trial.
    #[error("slot `{0}` has nothing on trial to promote")]
    NothingToPromote(String),
    /// Both a canary and a shadow are there.
    #[error("slot `{0}` has a canary and a shadow: say which to promote")]
    Ambiguous(String),
    /// The content may not be there.
    #[error("{0}")]
    Refused(Refusal),
    /// The manager is gone.
    #[error("the policy manager has ended")]
    Ended,
}

/// A command on its way to the manager.
pub(super) type Order = (Command, oneshot::Sender<Result<Report, CommandError>>);

/// Returns the label of a slot in messages and log fields: `prefill`, or `model/prefill`.
pub(super) fn slot_label((kind, model): &SlotName) -> String {
    model.as_ref().map_or_else(|| kind.to_string(), |model| format!("{model}/{kind}"))
}
