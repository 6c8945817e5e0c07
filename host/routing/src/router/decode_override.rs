//! The decode override: whether remote prefill is worth it (D4), and the configuration of the decode leg
//! (D2).

use std::sync::Arc;

use pointsman_workers::{Invariant, Leg, Pool};
use tokio::time::Instant;

use super::{Router, choose::may_call, eligible::eligible_rows};
use crate::{
    answer_checks,
    buffers::{BufferPool, DecisionBuffers},
    config::RouterConfigOverride,
    context::{DecisionContext, Purpose},
    decision_facts::DecisionFacts,
    ids::{DecisionId, Generation},
    inputs::Needs,
    policy::{Failure, OnFailure, Plan, Policy, ShedReason},
    query::{CandidateId, Pairing, Query},
    receipt::{ShadowAnswer, ShadowResult},
    slot::{GenerationHandle, Lane, Program, ProgramSummary, ShadowVerdict, SlotKind},
};

/// The decision of a decode override about one request.
#[derive(Clone, Debug)]
pub struct OverrideDecision {
    /// Remote prefill, local prefill, or refuse.
    pub plan: Plan,
    /// The generation that decided.
    pub generation: Generation,
    /// The generation's lane.
    pub lane: Lane,
    /// The program of the generation, when the slot has a policy.
    pub program: Option<Arc<ProgramSummary>>,
    /// The shadow's answer, when it was called.
    pub shadow: Option<ShadowResult>,
    /// Whether the generation, or the slot's shadow, observes outcomes.
    pub learns: bool,
    /// Why the policy's answer was not used, when it was not.
    pub fallback: Option<&'static str>,
    /// The previewed decode candidate that the policy saw.
    pub decode: Option<CandidateId>,
    /// The id of the decision's record.
    pub id: Option<DecisionId>,
}

/// Why a policy gave no usable answer: label of the reason, and the failure's own text.
struct Unanswered {
    reason: &'static str,
    detail: String,
}

/// A policy's plan and the decode candidate that it saw.
type Answer = (Plan, Option<CandidateId>);

impl Router {
    /// Decides whether remote prefill is worth it. `query` is the decode leg's; nothing is booked.
    ///
    /// Worker facts are computed only when the policy asks for any: one row for the previewed decode choice,
    /// the whole matrix for prefill. Without a usable answer the plan is remote, which is always legal.
    #[must_use]
    pub fn plan(&self, query: &Query<'_>, purpose: Purpose) -> OverrideDecision {
        let started = Instant::now();
        let slot = self.slot(query, SlotKind::DecodeOverride).snapshot();
        let generation = slot.serving(query.request);
        let mut decision = OverrideDecision {
            plan: Plan::Remote,
            generation: generation.generation,
            lane: generation.lane,
            program: generation.program.ranker().map(|_| generation.summary.clone()),
            shadow: None,
            learns: slot.learns(generation),
            fallback: None,
            decode: None,
            id: None,
        };
        let compare = |plan: &Plan| {
            let shadow = slot.shadowing(query.request).filter(|_| purpose == Purpose::Route);
            shadow.and_then(|shadow| self.compare_plans(shadow, query, plan, generation.lane))
        };
        decision.shadow = if let Program::DecodeOverride(policy) = &generation.program {
            BufferPool::with_buffers(|buffers| {
                buffers.program.begin(&generation.summary, &[]);
                let answer = counted(generation, (purpose, query.request_id), || {
                    self.ask_for_plan(query, purpose, generation, policy, buffers)
                });
                let mut detail = String::new();
                match answer {
                    Ok((plan, decode)) => (decision.plan, decision.decode) = (plan, decode),
                    Err(unanswered) => {
                        decision.plan = plan_after_failure(slot.on_failure.unwrap_or(self.on_failure));
                        decision.fallback = Some(unanswered.reason);
                        detail = unanswered.detail;
                    }
                }
                let took = started.elapsed();
                let shadow = compare(&decision.plan);
                if purpose == Purpose::Route {
                    let recorded = (shadow.clone(), &*detail);
                    decision.id = self.record_override(query, &decision, recorded, took, buffers);
                }
                shadow
            })
        } else {
            compare(&decision.plan)
        };
        decision
    }

    /// Runs the shadow and compares its plan with `plan`. Only what the active lane decided is counted.
    /// `None`: the shadow was not called.
    fn compare_plans(
        &self,
        shadow: &GenerationHandle,
        query: &Query<'_>,
        plan: &Plan,
        lane: Lane,
    ) -> Option<ShadowResult> {
        let Program::DecodeOverride(policy) = &shadow.program else { return None };
        let answer = BufferPool::with_buffers(|buffers| {
            buffers.program.begin(&shadow.summary, &[]);
            counted(shadow, (Purpose::Shadow, query.request_id), || {
                self.ask_for_plan(query, Purpose::Shadow, shadow, policy, buffers)
            })
        });
        let kind = |plan: &Plan| match plan {
            Plan::Remote | Plan::Local => ShadowAnswer::Chose,
            Plan::Shed(shed) => ShadowAnswer::refused(shed),
        };
        let (verdict, kind) = match &answer {
            Ok((other, _)) if other == plan => (ShadowVerdict::Agrees, kind(other)),
            Ok((other @ Plan::Shed(_), _)) if !matches!(plan, Plan::Shed(_)) => {
                (ShadowVerdict::Refuses, kind(other))
            }
            Ok((other, _)) => (ShadowVerdict::Disagrees, kind(other)),
            Err(Unanswered { reason: "breaker_open" | "not_ready", .. }) => return None,
            Err(Unanswered { reason, detail }) => {
                (ShadowVerdict::Failed, ShadowAnswer::Failed { kind: reason, detail: detail.as_str().into() })
            }
        };
        if lane == Lane::Active {
            shadow.agreement.note(verdict);
        }
        Some(ShadowResult {
            generation: shadow.generation,
            answer: kind,
            choice: None,
            plan: answer.ok().map(|(plan, _)| plan.as_str()),
            agrees: verdict == ShadowVerdict::Agrees,
            cached_blocks: None,
        })
    }

    /// Returns the override of the router configuration for the decode leg, and why it is the native one when
    /// it is.
    #[must_use]
    pub fn decode_config(
        &self,
        query: &Query<'_>,
        purpose: Purpose,
    ) -> (RouterConfigOverride, Option<&'static str>) {
        let slot = self.slot(query, SlotKind::DecodeOverride).snapshot();
        let generation = slot.serving(query.request);
        let Program::DecodeOverride(policy) = &generation.program else {
            return (RouterConfigOverride::DECODE_DEFAULT, None);
        };
        let answer = counted(generation, (purpose, query.request_id), || {
            BufferPool::with_buffers(|DecisionBuffers { inputs, program, .. }| {
                let config = self.config.with(&query.request.config);
                program.begin(&generation.summary, &[]);
                let facts = program.recorder.stage(0, &[], |out| {
                    DecisionFacts::new(query, config, Pool::empty(), inputs)
                        .write_request(&policy.info().wants, out);
                });
                // This call is not recorded, so its state accesses are not noted.
                let mut context = DecisionContext::new(purpose)
                    .with_generation(generation.generation)
                    .with_request_id(query.request_id);
                let over = policy.decode_config(&mut context, &query.call(0), facts)?;
                over.check().map_err(Failure::Invalid)?;
                Ok(over)
            })
        });
        // An override that asks for facts of workers decides from request to request where to prefill: then a
        // credit that the client gave is meant (D2).
        let keeps_credit = !policy.info().wants.worker.is_empty();
        let credit = query.request.config.overlap_score_credit.filter(|_| keeps_credit);
        match answer {
            Ok(over) => (
                RouterConfigOverride { overlap_score_credit: credit.or(over.overlap_score_credit), ..over },
                None,
            ),
            Err(unanswered) => (RouterConfigOverride::DECODE_DEFAULT, Some(unanswered.reason)),
        }
    }

    fn ask_for_plan(
        &self,
        query: &Query<'_>,
        purpose: Purpose,
        generation: &GenerationHandle,
        policy: &Arc<dyn Policy>,
        buffers: &mut DecisionBuffers,
    ) -> Result<Answer, Failure> {
        let wants = &policy.info().wants;
        let config = self.config.with(&query.request.config);
        // The preview of the decode leg is a decision of its own, with buffers of its own.
        let decode = if wants.worker.is_empty() {
            None
        } else {
            let preview =
                BufferPool::with_buffers(|buffers| self.choose(query, config, Purpose::Preview, buffers));
            match preview {
                Ok(chosen) => Some(chosen),
                // No decode worker is eligible: routing the decode leg reports it.
                Err(_) => return Ok((Plan::Remote, None)),
            }
        };
        let DecisionBuffers { rows, inputs, program, state_accesses, .. } = buffers;
        let recorder = &mut program.recorder;
        // Only workers that can pair with the worker that a hint names for decode.
        let pairing = Pairing { other_pin: query.pin, ..Pairing::default() };
        let prefill = Query { leg: Leg::Prefill, pairing, ..*query };
        let pool = query.snapshot.pool(query.model, Leg::Prefill);
        if decode.is_none() || eligible_rows(&prefill, &self.busy, pool, rows).is_err() {
            rows.clear();
        }
        recorder.set_candidates(rows);
        let facts = recorder.stage(0, rows, |out| {
            let Some(decode) = &decode else {
                return DecisionFacts::new(query, config, Pool::empty(), inputs).write_request(wants, out);
            };
            let (decode, row) = (query.snapshot.pool(query.model, query.leg), [decode.row]);
            let needs = Needs::of(wants);
            inputs.compute(needs, query, &config, decode, &row, &self.index);
            DecisionFacts::new(query, config, decode, inputs).write(wants, &row, out);
            inputs.compute(needs, &prefill, &config, pool, rows, &self.index);
            DecisionFacts::new(&prefill, config, pool, inputs).write_workers(wants, rows, out);
        });
        Invariant::FactWords.check(facts.len() >= wants.request_width());
        let (request, facts) = facts.split_at_checked(wants.request_width()).unwrap_or_default();
        let (decode_row, matrix) = facts.split_at_checked(wants.worker_width()).unwrap_or_default();
        let accesses = (purpose == Purpose::Route && self.records(query)).then_some(state_accesses);
        let mut context = DecisionContext::new(purpose)
            .with_generation(generation.generation)
            .with_request_id(query.request_id)
            .with_state_accesses(accesses);
        let plan = policy.decide(&mut context, &query.call(rows.len()), request, decode_row, matrix);
        recorder.take_state(context.state_accesses());
        let decode = decode.map(|chosen| (chosen.candidate.worker_id(), chosen.candidate.rank));
        Ok((plan.and_then(answer_checks::plan)?, decode))
    }
}

/// Calls the policy unless its breaker is open, and counts the call when it is not a preview.
fn counted<T>(
    generation: &GenerationHandle,
    (purpose, request_id): (Purpose, Option<&str>),
    call: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Unanswered> {
    if !may_call(generation, purpose) {
        return Err(Unanswered { reason: "breaker_open", detail: String::new() });
    }
    let started = Instant::now();
    let outcome = call();
    if purpose != Purpose::Preview {
        generation.note(&outcome, started.elapsed(), request_id);
    }
    outcome.map_err(|failure| Unanswered { reason: failure.kind(), detail: failure.to_string() })
}

fn plan_after_failure(on_failure: OnFailure) -> Plan {
    let shed = |status| Plan::Shed(ShedReason { status, reason: "routing policy failed".into() });
    match on_failure {
        OnFailure::Fallback => Plan::Remote,
        OnFailure::Shed => shed(429),
        OnFailure::Reject => shed(503),
    }
}
