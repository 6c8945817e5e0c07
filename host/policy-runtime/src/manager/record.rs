//! Records of what happened to lanes: changes, refusals, and counts of both.

use pointsman_routing::{Digest, Failure, Generation, Lane, SlotEvent, SlotKind};
use serde::Serialize;

/// A change of a lane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The slot.
    pub slot: SlotKind,
    /// Model of the slot. `None` stands for all models without a slot of their own.
    pub model: Option<String>,
    /// The lane that changed.
    pub lane: Lane,
    /// `installed`, `kept`, `refused`, `removed`, `rolled_back`, `withdrawn` or `promoted`.
    pub result: &'static str,
    /// Cause, such as `changed`, `file_gone`, `command`, or the kind of a refusal or failure.
    pub reason: &'static str,
    /// Generation that the lane runs afterwards. `None` if the lane is empty.
    pub generation: Option<Generation>,
}

/// A change of a lane with its time.
#[derive(Clone, Debug, Serialize)]
pub struct ChangeRecord {
    /// Time, milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// The change.
    #[serde(flatten)]
    pub change: Change,
    /// Name of the policy that the lane runs afterwards. `None` if the lane is empty.
    pub policy: Option<String>,
}

/// A file that was refused, or a generation that was rolled back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RefusalRecord {
    /// The slot.
    pub slot: SlotKind,
    /// Model of the slot. `None` stands for all models without a slot of their own.
    pub model: Option<String>,
    /// The lane.
    pub lane: Lane,
    /// File, or name of the built-in policy.
    pub file: String,
    /// Digest of its content, when it could be read.
    pub digest: Option<Digest>,
    /// Stable label of the reason.
    pub kind: &'static str,
    /// Human-readable text.
    pub message: String,
    /// Time, milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Whether the lane is still asked to run what was refused.
    pub in_force: bool,
}

/// A rollback that an operator undid.
#[derive(Clone, Debug, Serialize)]
pub struct UndoneRollback {
    /// Label of the slot: `prefill`, or `model/prefill`.
    pub slot: String,
    /// Name of the policy that was rolled back, or the file of one that was not compiled yet.
    pub policy: String,
    /// Digest of its content.
    pub digest: Digest,
    #[serde(skip)]
    pub(super) fingerprint: Digest,
}

/// Number of changes with one result and reason.
#[derive(Clone, Debug, Serialize)]
pub struct ReloadCount {
    /// `installed`, `refused`, `removed`, `rolled_back`, `withdrawn` or `promoted`.
    pub result: &'static str,
    /// Cause, as in [`Change::reason`].
    pub reason: &'static str,
    /// Number of changes.
    pub count: u64,
}

/// Returns why a generation was rolled back.
pub(super) fn rolled_back(event: &SlotEvent) -> String {
    let failures = if event.failures == 1 { "failure" } else { "failures" };
    let calls = match event.calls {
        1 => "call".to_owned(),
        calls => format!("{calls} calls"),
    };
    let rule = match event.failure {
        Failure::Timeout { .. } => " (one is enough, whatever `policies.probation_failure_share` says)",
        _ => "",
    };
    // A client chooses the id: it is no part of the sentence.
    let quoted = |id: &str| format!(", in request `{}`", id.replace('`', "'"));
    let request = event.request_id.as_deref().map(quoted).unwrap_or_default();
    format!(
        "rolled back after {} {failures} in its first {calls}; last failure: {}{rule}{request}; change the file or \
         its settings to try again",
        event.failures, event.failure
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t8_the_id_of_a_request_is_no_part_of_the_sentence_about_a_rollback() {
        let event = SlotEvent {
            slot: SlotKind::Prefill,
            model: None,
            lane: Lane::Active,
            generation: Generation(2),
            calls: 3,
            failures: 1,
            failure: Failure::Trap("it panicked".into()),
            step: 0,
            request_id: Some("1`; it is harmless".into()),
        };
        // T8.3
        assert_eq!(
            rolled_back(&event),
            "rolled back after 1 failure in its first 3 calls; last failure: trap: it panicked, in request \
             `1'; it is harmless`; change the file or its settings to try again"
        );
    }
}
