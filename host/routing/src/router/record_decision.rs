//! Records decisions: copies one from the router's buffers into the ring of decisions.

use std::sync::Arc;

use pointsman_workers::Leg;
use tokio::time::{Duration, Instant};

use super::{OverrideDecision, Router, choose::NotChosen};
use crate::{
    buffers::{DecisionBuffers, ProgramBuffers},
    config::RouterConfig,
    context::Purpose,
    decisions::{DecidedBy, DecisionHeader, DecisionResult},
    facts::Wants,
    ids::DecisionId,
    policy::Plan,
    query::Query,
    receipt::{Decider, Receipt, RefusedDecision, ShadowResult},
    slot::ProgramSummary,
};

static NO_FACTS: Wants = Wants { request: Vec::new(), worker: Vec::new() };

/// Record of a decision without the recorded facts.
struct Entry<'a> {
    by: DecidedBy,
    result: DecisionResult,
    temperature: f32,
    cached_blocks: Option<[u32; 3]>,
    shadow: Option<ShadowResult>,
    failed_shadow: Option<Arc<ProgramSummary>>,
    has_costs: bool,
    reason: &'a str,
    detail: &'a str,
}

impl Router {
    /// Facts to record for every decision, also those that its policy does not request.
    pub(super) fn always_recorded(&self, query: &Query<'_>, purpose: Purpose) -> &Wants {
        if purpose == Purpose::Route && self.records(query) { self.decisions.always() } else { &NO_FACTS }
    }

    /// Records a choice.
    pub(super) fn record_choice(
        &self,
        query: &Query<'_>,
        config: RouterConfig,
        receipt: &Receipt,
        buffers: &mut DecisionBuffers,
    ) -> Option<DecisionId> {
        let detail = match &receipt.decider {
            Decider::Fallback { detail, .. } => detail,
            _ => "",
        };
        let entry = Entry {
            by: DecidedBy::from(&receipt.decider),
            result: DecisionResult::Chosen(receipt.worker, receipt.rank),
            temperature: config.temperature as f32,
            cached_blocks: receipt.cached_known.then_some(receipt.cached_blocks),
            shadow: receipt.shadow.clone(),
            failed_shadow: receipt.failed_shadow().cloned(),
            has_costs: true,
            reason: receipt.reason.as_deref().unwrap_or_default(),
            detail,
        };
        self.record(query, query.leg, entry, receipt.took, buffers)
    }

    /// Records that the slot refused the request, and returns the decision. The absence of eligible
    /// candidates is not a decision.
    pub(super) fn refused(
        &self,
        query: &Query<'_>,
        config: RouterConfig,
        refused: &NotChosen,
        buffers: &mut DecisionBuffers,
        started: Instant,
    ) -> Option<RefusedDecision> {
        let (_, code) = refused.refusal?;
        let program = buffers.program.recorder.program()?.clone();
        let id = self.record_refusal(query, config, refused, buffers, started);
        Some(RefusedDecision { id, program, code })
    }

    fn record_refusal(
        &self,
        query: &Query<'_>,
        config: RouterConfig,
        refused: &NotChosen,
        buffers: &mut DecisionBuffers,
        started: Instant,
    ) -> Option<DecisionId> {
        let (by, code) = refused.refusal.filter(|_| self.records(query))?;
        let entry = Entry {
            by,
            result: DecisionResult::Refused(code),
            temperature: config.temperature as f32,
            cached_blocks: None,
            shadow: None,
            failed_shadow: None,
            has_costs: false,
            reason: "",
            detail: &refused.error.to_string(),
        };
        self.record(query, query.leg, entry, started.elapsed(), buffers)
    }

    /// Records the decision of a decode override. `detail`: text of its failure.
    pub(super) fn record_override(
        &self,
        query: &Query<'_>,
        decision: &OverrideDecision,
        (shadow, detail): (Option<ShadowResult>, &str),
        took: Duration,
        buffers: &mut DecisionBuffers,
    ) -> Option<DecisionId> {
        let reason = match &decision.plan {
            Plan::Remote | Plan::Local => "",
            Plan::Shed(shed) => shed.reason.as_str(),
        };
        let entry = Entry {
            by: decision.fallback.map_or(DecidedBy::Policy, DecidedBy::Fallback),
            result: DecisionResult::Planned(decision.plan.as_str(), decision.decode),
            temperature: 0.0,
            cached_blocks: None,
            shadow,
            failed_shadow: None,
            has_costs: false,
            reason,
            detail,
        };
        self.record(query, Leg::Decode, entry, took, buffers)
    }

    /// Returns whether decisions about this query are recorded.
    pub(super) fn records(&self, query: &Query<'_>) -> bool {
        self.decisions.is_on() && query.request_id.is_some()
    }

    fn record(
        &self,
        query: &Query<'_>,
        leg: Leg,
        entry: Entry<'_>,
        took: Duration,
        buffers: &mut DecisionBuffers,
    ) -> Option<DecisionId> {
        let request_id = query.request_id.filter(|_| self.decisions.is_on())?;
        let is_plan = matches!(entry.result, DecisionResult::Planned(..));
        let pool = query.snapshot.pool(query.model, if is_plan { Leg::Prefill } else { leg });
        let DecisionBuffers { rows, program: ProgramBuffers { recorder, costs, .. }, .. } = buffers;
        let header = DecisionHeader {
            model: query.model.clone(),
            program: recorder.program()?.clone(),
            leg,
            attempt: query.attempt,
            by: entry.by,
            result: entry.result,
            seed: query.seed,
            now_us: query.now_us,
            temperature: entry.temperature,
            cached_blocks: entry.cached_blocks,
            shadow: entry.shadow,
            failed_shadow: entry.failed_shadow,
            took,
            outcome: None,
            inputs_dropped: false,
            eligible: recorder.eligible(),
            stages: recorder.stages(),
            stateful_stages: recorder.stateful_stages(),
        };
        // A plan drops no rows, and may have been made without any.
        let rows = if is_plan { None } else { Some(rows.as_slice()) };
        let costs = if entry.has_costs { costs.as_slice() } else { &[] };
        recorder.end(pool, rows, costs, [request_id, entry.reason, entry.detail]);
        self.decisions.record(header, recorder.recorded())
    }
}
