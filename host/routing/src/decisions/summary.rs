//! A recorded decision in one line, without the recorded facts.

use pointsman_workers::Leg;
use serde::Serialize;
use serde_json::Value;

use super::{
    header::Outcome,
    record::{Costed, Record, choice, decider, plan, refused},
};
use crate::{ids::DecisionId, policy::Digest, receipt::ShadowResult, slot::Lane};

/// A decision without its inputs. Every field is as in the whole record (docs/receipts.md).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecisionSummary {
    /// The decision's id.
    pub id: DecisionId,
    /// Time of the decision, milliseconds since the Unix epoch.
    pub at_ms: u64,
    request_id: String,
    model: String,
    leg: Leg,
    attempt: u32,
    slot: &'static str,
    slot_model: Option<String>,
    generation: u64,
    mode: Lane,
    program: String,
    policy: Option<String>,
    settings_digest: Option<Digest>,
    decider: Value,
    reason: String,
    choice: Value,
    runner_up: Option<Costed>,
    shadow: Option<ShadowResult>,
    eligible: u32,
    plan: Value,
    refused: Value,
    took_us: f64,
    /// How the request ended; `None` while it runs.
    pub outcome: Option<Outcome>,
}

impl Record {
    /// Returns the record without its inputs.
    #[must_use]
    pub fn summary(&self) -> DecisionSummary {
        let (header, parts) = (&self.header, self.parts());
        let chosen = parts.chosen(header.result);
        DecisionSummary {
            id: self.id,
            at_ms: header.now_us / 1_000,
            runner_up: parts.runner_up(chosen.as_ref()),
            shadow: header.shadow.clone(),
            eligible: header.eligible,
            model: header.model.to_string(),
            leg: header.leg,
            attempt: header.attempt,
            slot: header.program.slot.as_str(),
            slot_model: header.program.model.as_ref().map(ToString::to_string),
            generation: header.program.generation.0,
            mode: header.program.lane,
            program: header.program.name.to_string(),
            policy: header.program.ranker().map(|step| step.name.to_string()),
            settings_digest: header.program.ranker().and_then(|step| step.settings_digest),
            decider: decider(header.by, &parts.detail),
            choice: choice(header.result, chosen),
            plan: plan(header.result),
            refused: refused(header.result, &parts.detail),
            took_us: header.took.as_secs_f64() * 1e6,
            outcome: header.outcome,
            request_id: parts.request_id,
            reason: parts.reason,
        }
    }
}
