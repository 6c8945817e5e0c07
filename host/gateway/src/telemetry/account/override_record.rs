//! The decode override's decision, kept until the outcome of its request is recorded.

use pointsman_routing::{DecisionId, Lane, OverrideDecision};

use crate::telemetry::decision_log::OverrideEntry;

/// A decode override's decision.
#[derive(Clone, Debug)]
pub(crate) struct OverrideRecord {
    pub(super) id: Option<DecisionId>,
    pub(super) lane: Lane,
    pub(super) seed: u64,
    pub(super) learns: bool,
    pub(super) by_policy: bool,
    /// The policy's decision; `None` if the slot has no policy.
    pub(super) entry: Option<OverrideEntry>,
}

impl OverrideRecord {
    /// Returns the record of a decision that was made with this seed.
    #[must_use]
    pub(crate) fn new(planned: &OverrideDecision, seed: u64) -> Self {
        let OverrideDecision { id, lane, learns, fallback, generation, .. } = *planned;
        let verdict = planned.plan.as_str();
        let entry = planned.program.clone().map(|program| OverrideEntry {
            id,
            lane,
            generation,
            program,
            fallback,
            verdict,
            shadow: planned.shadow.clone(),
        });
        Self { id, lane, seed, learns, by_policy: fallback.is_none(), entry }
    }
}
