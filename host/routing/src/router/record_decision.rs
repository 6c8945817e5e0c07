//! Keeping what was decided: from the router's buffers into the ring of decisions.

use pointsman_workers::Leg;
use tokio::time::Instant;

use super::{OverrideDecision, Purpose, RouteError, Router, SCRATCH};
use crate::{
    config::RouterConfig,
    decisions::{DecidedBy, DecisionHeader, DecisionId, DecisionResult},
    facts::Wants,
    policy::Plan,
    query::Query,
    receipt::{Decider, Receipt, ShadowResult},
};

static NOTHING: Wants = Wants { request: Vec::new(), worker: Vec::new() };

/// What a record tells of a decision, besides what the recorder holds.
struct Told<'a> {
    by: DecidedBy,
    result: DecisionResult,
    temperature: f32,
    cached_blocks: Option<[u32; 3]>,
    shadow: Option<ShadowResult>,
    costed: bool,
    reason: &'a str,
    detail: &'a str,
}

impl Router {
    /// Facts to record whatever the policy wants.
    pub(super) fn always(&self, query: &Query<'_>, purpose: Purpose) -> &Wants {
        if purpose == Purpose::Route && self.records(query) { self.decisions.always() } else { &NOTHING }
    }

    /// Records a choice.
    pub(super) fn keep(
        &self,
        query: &Query<'_>,
        config: RouterConfig,
        receipt: &Receipt,
    ) -> Option<DecisionId> {
        let detail = match &receipt.decider {
            Decider::Fallback { detail, .. } => detail,
            _ => "",
        };
        let told = Told {
            by: receipt.decider.by(),
            result: DecisionResult::Chosen(receipt.worker, receipt.rank),
            temperature: config.temperature as f32,
            cached_blocks: receipt.cached_known.then_some(receipt.cached_blocks),
            shadow: receipt.shadow,
            costed: true,
            reason: receipt.reason.as_deref().unwrap_or_default(),
            detail,
        };
        self.write(query, query.leg, &told, receipt.took)
    }

    /// Records that a program was asked and nobody came of it. That there was nobody to ask about is no decision.
    pub(super) fn keep_refusal(
        &self,
        query: &Query<'_>,
        config: RouterConfig,
        error: &RouteError,
        started: Instant,
    ) {
        let asked = SCRATCH.with_borrow(|scratch| scratch.buffers.recorder.stages() > 0);
        let code = match error {
            RouteError::Shed(_) => "shed",
            RouteError::PolicyFailed(_) => "policy_failed",
            _ => "nobody_left",
        };
        if asked && self.records(query) {
            let told = Told {
                by: DecidedBy::Policy,
                result: DecisionResult::Refused(code),
                temperature: config.temperature as f32,
                cached_blocks: None,
                shadow: None,
                costed: false,
                reason: "",
                detail: &error.to_string(),
            };
            self.write(query, query.leg, &told, started.elapsed());
        }
    }

    /// Records a decode override's word.
    pub(super) fn keep_plan(
        &self,
        query: &Query<'_>,
        planned: &OverrideDecision,
        started: Instant,
    ) -> Option<DecisionId> {
        let (word, reason) = match &planned.plan {
            Plan::Remote => ("remote", ""),
            Plan::Local => ("local", ""),
            Plan::Shed(shed) => ("shed", shed.reason.as_str()),
        };
        let told = Told {
            by: planned.fallback.map_or(DecidedBy::Policy, DecidedBy::Fallback),
            result: DecisionResult::Planned(word, planned.decode),
            temperature: 0.0,
            cached_blocks: None,
            shadow: None,
            costed: false,
            reason,
            detail: "",
        };
        self.write(query, Leg::Decode, &told, started.elapsed())
    }

    fn records(&self, query: &Query<'_>) -> bool {
        self.decisions.is_on() && query.request_id.is_some()
    }

    fn write(
        &self,
        query: &Query<'_>,
        leg: Leg,
        told: &Told<'_>,
        took: tokio::time::Duration,
    ) -> Option<DecisionId> {
        let request_id = query.request_id.filter(|_| self.decisions.is_on())?;
        let plans = matches!(told.result, DecisionResult::Planned(..));
        let pool = query.snapshot.pool(query.model, if plans { Leg::Prefill } else { leg });
        SCRATCH.with_borrow_mut(|scratch| {
            let (recorder, rows) = (&mut scratch.buffers.recorder, &scratch.rows);
            let costs = if told.costed { scratch.buffers.costs.as_slice() } else { &[] };
            let head = DecisionHeader {
                model: query.model.clone(),
                program: recorder.program()?.clone(),
                leg,
                attempt: query.attempt,
                by: told.by,
                result: told.result,
                seed: query.seed,
                now_us: query.now_us,
                temperature: told.temperature,
                cached_blocks: told.cached_blocks,
                shadow: told.shadow,
                took,
                outcome: None,
                cut: false,
                stages: recorder.stages(),
                reads: recorder.reads(),
            };
            // A plan drops no rows, and may have been made without looking at any.
            let rows = if plans { None } else { Some(rows.as_slice()) };
            recorder.end(pool, rows, costs, [request_id, told.reason, told.detail]);
            self.decisions.record(head, recorder.texts(), recorder.words())
        })
    }
}
