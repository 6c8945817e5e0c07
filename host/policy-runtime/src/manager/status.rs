//! What the manager tells: per slot what runs and since when, and what was refused and why.

use std::collections::VecDeque;

use pointsman_routing::{Digest, Failure, Generation, Origin, SlotKind, World};
use serde::Serialize;

/// All slots at one moment.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ManagerStatus {
    /// Every slot.
    pub slots: Vec<SlotStatus>,
    /// Reloads by result (`installed`, `refused`, `removed`, `rolled_back`) and reason.
    pub reloads: Vec<ReloadCount>,
    /// Files in the folder that are no slot's.
    pub strays: Vec<String>,
}

/// One slot.
#[derive(Clone, Debug, Serialize)]
pub struct SlotStatus {
    /// Which.
    pub slot: SlotKind,
    /// The model it serves; none: all without a slot of their own.
    pub model: Option<String>,
    /// The file it is filled from.
    pub file: String,
    /// What the generation in force is.
    pub state: SlotState,
    /// The generation in force.
    pub generation: Generation,
    /// What runs: a policy's name, or `native:<mode>`.
    pub policy: String,
    /// Its version.
    pub version: Option<String>,
    /// Its digest.
    pub digest: Option<Digest>,
    /// Its world.
    pub world: Option<World>,
    /// Where it came from.
    pub origin: Option<Origin>,
    /// Calls it served.
    pub calls: u64,
    /// Calls it failed.
    pub failures: u64,
    /// Whether its breaker is open: the fallback serves.
    pub breaker_open: bool,
    /// When it was installed, milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// How long admission took, milliseconds.
    pub load_ms: u64,
    /// Automatic rollbacks of this slot.
    pub rollbacks: u64,
    /// Digests that were rolled back; they are not tried again until the file's content changes.
    pub quarantined: Vec<Digest>,
    /// The last refusals.
    pub refusals: VecDeque<RefusalRecord>,
}

/// What the generation in force is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SlotState {
    /// The slot's default serves.
    Default,
    /// The file serves.
    Active,
    /// The content before serves again.
    RolledBack,
}

/// A file that was refused, or a generation that was rolled back.
#[derive(Clone, Debug, Serialize)]
pub struct RefusalRecord {
    /// Digest of the file's content, when it could be read.
    pub digest: Option<Digest>,
    /// Stable label.
    pub kind: &'static str,
    /// In words.
    pub message: String,
    /// When, milliseconds since the Unix epoch.
    pub at_ms: u64,
}

/// How often reloads ended so.
#[derive(Clone, Debug, Serialize)]
pub struct ReloadCount {
    /// `installed`, `refused`, `removed` or `rolled_back`.
    pub result: &'static str,
    /// Why.
    pub reason: &'static str,
    /// How often.
    pub count: u64,
}

impl RefusalRecord {
    pub(super) fn rolled_back(
        digest: Option<Digest>,
        calls: u64,
        failures: u64,
        failure: &Failure,
        at_ms: u64,
    ) -> Self {
        let message =
            format!("rolled back after {failures} failures in its first {calls} calls, the last: {failure}");
        Self { digest, kind: "rolled_back", message, at_ms }
    }
}
