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
pub struct Brief {
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
    mode: crate::slot::Mode,
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
    pub fn brief(&self) -> Brief {
        let (head, parts) = (&self.head, self.parts());
        let chosen = parts.chosen(head.ending);
        Brief {
            id: self.id,
            at_ms: head.now_us / 1_000,
            runner_up: parts.runner_up(chosen.as_ref()),
            model: head.model.to_string(),
            leg: head.leg,
            attempt: head.attempt,
            slot: head.recipe.slot.as_str(),
            generation: head.recipe.generation.0,
            mode: head.recipe.mode,
            policy: head.recipe.head().map(|step| step.name.to_string()),
            decider: decider(head.by, &parts.detail),
            choice: choice(head.ending, chosen),
            plan: plan(head.ending),
            refused: refused(head.ending, &parts.detail),
            took_us: head.took.as_secs_f64() * 1e6,
            outcome: head.outcome,
            request_id: parts.request_id,
            reason: parts.reason,
        }
    }
}
