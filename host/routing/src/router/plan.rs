//! The decode override: is remote prefill worth it (spec D4), and what config the decode leg gets (spec D2).

use std::sync::Arc;

use pointsman_workers::Leg;
use tokio::time::Instant;

use super::{OnFailure, Purpose, Router, SCRATCH, Scratch, eligible::eligible_rows};
use crate::{
    check,
    decisions::DecisionId,
    facts::columns::{DecisionFacts, Inputs, Needs},
    policy::{Call, Failure, Plan, Policy, RouterConfigOverride, ShedReason},
    query::{CandidateId, Query},
    scope::Scope,
    slot::{Generation, GenerationHandle, Lane, Program, ShadowVerdict, SlotKind},
};

/// A decode override's word for one request.
#[derive(Clone, Debug, PartialEq)]
pub struct OverrideDecision {
    /// Remote, local or shed.
    pub plan: Plan,
    /// The generation that said so.
    pub generation: Generation,
    /// Its lane.
    pub lane: Lane,
    /// Whether it learns from what becomes of its word.
    pub learns: bool,
    /// Why the policy's word was not used, when it was not.
    pub fallback: Option<&'static str>,
    /// The decode candidate it was asked about.
    pub decode: Option<CandidateId>,
    /// Its place in the ring of decisions.
    pub id: Option<DecisionId>,
}

impl Router {
    /// Asks the decode override whether remote prefill is worth it. `query` is the decode leg's; nothing is booked.
    ///
    /// Facts of workers are gathered only when the policy wants any: one row for the previewed decode choice, the whole
    /// matrix for prefill. Without a usable answer the plan is remote, which is always legal.
    #[must_use]
    pub fn plan(&self, query: &Query<'_>) -> OverrideDecision {
        let started = Instant::now();
        let snapshot = self.slots.get(query.model, SlotKind::DecodeOverride).snapshot();
        let active = snapshot.serving(query.request);
        let (generation, lane, learns) = (active.generation, active.lane, active.learns);
        let remote = OverrideDecision {
            plan: Plan::Remote,
            generation,
            lane,
            learns,
            fallback: None,
            decode: None,
            id: None,
        };
        let planned = match &active.program {
            Program::DecodeOverride(policy) => {
                SCRATCH.with_borrow_mut(|scratch| scratch.buffers.recorder.begin(&active.summary, &[]));
                let mut planned =
                    match self.ask(query, active, |policy| self.decide(active, policy, query), policy) {
                        Ok((plan, decode)) => OverrideDecision { plan, decode, ..remote },
                        Err(reason) => {
                            let plan = plan_without(snapshot.on_failure.unwrap_or(self.on_failure));
                            OverrideDecision { plan, fallback: Some(reason), ..remote }
                        }
                    };
                planned.id = self.keep_plan(query, &planned, started);
                planned
            }
            _ => remote,
        };
        if let Some(shadow) = snapshot.shadowing(query.request) {
            self.compare(shadow, query, &planned.plan);
        }
        planned
    }

    /// Asks the shadow for its plan, and counts whether it is the one in force.
    fn compare(&self, shadow: &GenerationHandle, query: &Query<'_>, plan: &Plan) {
        let Program::DecodeOverride(policy) = &shadow.program else { return };
        let _scope = Scope::preview();
        SCRATCH.with_borrow_mut(|scratch| scratch.buffers.recorder.begin(&shadow.summary, &[]));
        let opinion = match self.ask(query, shadow, |policy| self.decide(shadow, policy, query), policy) {
            Ok((other, _)) if other == *plan => ShadowVerdict::Agrees,
            Ok(_) => ShadowVerdict::Disagrees,
            Err("breaker_open" | "not_ready") => return,
            Err(_) => ShadowVerdict::Failed,
        };
        shadow.agreement.note(opinion);
    }

    /// The override of the router config for the decode leg, and why it is the native one when it is.
    #[must_use]
    pub fn decode_config(&self, query: &Query<'_>) -> (RouterConfigOverride, Option<&'static str>) {
        let snapshot = self.slots.get(query.model, SlotKind::DecodeOverride).snapshot();
        let active = snapshot.serving(query.request);
        let Program::DecodeOverride(policy) = &active.program else {
            return (RouterConfigOverride::DECODE_DEFAULT, None);
        };
        let call = |policy: &Arc<dyn Policy>| {
            SCRATCH.with_borrow_mut(|scratch| {
                let Scratch { inputs, buffers, .. } = scratch;
                let config = self.config.with(&query.request.config);
                buffers.recorder.begin(&active.summary, &[]);
                let facts = buffers.recorder.stage(0, &[], |out| {
                    DecisionFacts::new(query, config, &[], inputs).write_request(&policy.info().wants, out);
                });
                let over = policy.decode_config(&call_of(query, 0), facts);
                // It is not recorded; nothing of it may be taken for what the next call reads.
                buffers.recorder.take_state(policy.info());
                let over = over?;
                over.check().map_err(Failure::Invalid)?;
                Ok(over)
            })
        };
        match self.ask(query, active, call, policy) {
            Ok(over) => (over, None),
            Err(reason) => (RouterConfigOverride::DECODE_DEFAULT, Some(reason)),
        }
    }

    fn ask<T>(
        &self,
        query: &Query<'_>,
        active: &GenerationHandle,
        call: impl FnOnce(&Arc<dyn Policy>) -> Result<T, Failure>,
        policy: &Arc<dyn Policy>,
    ) -> Result<T, &'static str> {
        if !active.breaker.try_call() {
            return Err("breaker_open");
        }
        let scope = Scope::decision(active.generation, false, query.request_id);
        let started = Instant::now();
        let outcome = call(policy);
        drop(scope);
        active.note(&outcome, started.elapsed());
        outcome.map_err(|failure| failure.kind())
    }

    fn decide(
        &self,
        active: &GenerationHandle,
        policy: &Arc<dyn Policy>,
        query: &Query<'_>,
    ) -> Result<(Plan, Option<CandidateId>), Failure> {
        let wants = &policy.info().wants;
        let config = self.config.with(&query.request.config);
        if wants.worker.is_empty() {
            return SCRATCH.with_borrow_mut(|Scratch { inputs, buffers, .. }| {
                let gathered = DecisionFacts::new(query, config, &[], inputs);
                let facts = buffers.recorder.stage(0, &[], |out| gathered.write_request(wants, out));
                let plan = policy.decide(&call_of(query, 0), facts, &[], &[]);
                buffers.recorder.take_state(policy.info());
                Ok((plan.and_then(check::plan)?, None))
            });
        }
        // Nobody to decode on: routing the leg will say so in its own words.
        let preview = self.choose(query, config, Purpose::Preview);
        SCRATCH.with_borrow_mut(|scratch| scratch.buffers.recorder.begin(&active.summary, &[]));
        let Ok(preview) = preview else { return Ok((Plan::Remote, None)) };
        let prefill = Query { leg: Leg::Prefill, ..*query };
        let pool = query.snapshot.pool(query.model, Leg::Prefill);
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { rows, inputs, buffers, .. } = scratch;
            let decode = std::slice::from_ref(&preview.candidate);
            if eligible_rows(&prefill, pool, rows).is_err() {
                rows.clear();
            }
            buffers.recorder.begin(&active.summary, rows);
            let facts = buffers.recorder.stage(0, rows, |out| {
                self.gather(inputs, wants, query, config, decode, &[0]);
                DecisionFacts::new(query, config, decode, inputs).write(wants, &[0], out);
                self.gather(inputs, wants, &prefill, config, pool, rows);
                DecisionFacts::new(&prefill, config, pool, inputs).write_workers(wants, rows, out);
            });
            let (request, facts) = facts.split_at_checked(wants.request_width()).unwrap_or_default();
            let (decode, matrix) = facts.split_at_checked(wants.worker_width()).unwrap_or_default();
            let plan = policy.decide(&call_of(query, rows.len()), request, decode, matrix);
            buffers.recorder.take_state(policy.info());
            Ok((plan.and_then(check::plan)?, Some((preview.candidate.worker.id(), preview.candidate.rank))))
        })
    }

    fn gather(
        &self,
        inputs: &mut Inputs,
        wants: &crate::facts::Wants,
        query: &Query<'_>,
        config: crate::RouterConfig,
        pool: &[pointsman_workers::Candidate],
        rows: &[u32],
    ) {
        inputs.compute(Needs::of(wants), query, &config, pool, rows, &self.index);
    }
}

fn plan_without(on_failure: OnFailure) -> Plan {
    let shed = |status| Plan::Shed(ShedReason { status, reason: "routing policy failed".into() });
    match on_failure {
        OnFailure::Fallback => Plan::Remote,
        OnFailure::Shed => shed(429),
        OnFailure::Reject => shed(503),
    }
}

fn call_of(query: &Query<'_>, rows: usize) -> Call {
    Call {
        leg: query.leg,
        attempt: query.attempt,
        rows: u32::try_from(rows).unwrap_or(u32::MAX),
        seed: query.seed,
        now_us: query.now_us,
    }
}
