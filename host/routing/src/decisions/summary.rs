//! A decision in a line: what somebody who watches many of them wants to see, without the inputs.

use pointsman_workers::Leg;
use serde::Serialize;
use serde_json::Value;

use super::{
    DecisionId, Outcome, Record,
    record::{Costed, choice, decider, plan, refused},
};

/// A decision without its inputs; every field is as in the whole record (docs/receipts.md).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecisionSummary {
    /// Its name.
    pub id: DecisionId,
    /// When it was made, milliseconds since the Unix epoch.
    pub at_ms: u64,
    request_id: String,
    model: String,
    leg: Leg,
    attempt: u32,
    slot: &'static str,
    generation: u64,
    mode: crate::slot::Lane,
    policy: Option<String>,
    decider: Value,
    reason: String,
    choice: Value,
    runner_up: Option<Costed>,
    plan: Value,
    refused: Value,
    took_us: f64,
    /// What became of the request; `None` while it runs.
    pub outcome: Option<Outcome>,
}

impl Record {
    /// The record without its inputs.
    #[must_use]
    pub fn summary(&self) -> DecisionSummary {
        let (head, parts) = (&self.head, self.parts());
        let chosen = parts.chosen(head.result);
        DecisionSummary {
            id: self.id,
            at_ms: head.now_us / 1_000,
            runner_up: parts.runner_up(chosen.as_ref()),
            model: head.model.to_string(),
            leg: head.leg,
            attempt: head.attempt,
            slot: head.program.slot.as_str(),
            generation: head.program.generation.0,
            mode: head.program.lane,
            policy: head.program.ranker().map(|step| step.name.to_string()),
            decider: decider(head.by, &parts.detail),
            choice: choice(head.result, chosen),
            plan: plan(head.result),
            refused: refused(head.result, &parts.detail),
            took_us: head.took.as_secs_f64() * 1e6,
            outcome: head.outcome,
            request_id: parts.request_id,
            reason: parts.reason,
        }
    }
}
