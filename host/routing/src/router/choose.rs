//! The choice of a worker for one leg, before anything is booked or recorded.

use std::sync::Arc;

use pointsman_workers::{Candidate, DpRank, Engine, Leg, Pool, WorkerId};
use tokio::time::Instant;

use super::{
    RouteError, Router,
    eligible::{candidate_rows, none_left, preset_row},
    shadow::{self, Made},
};
use crate::{
    buffers::DecisionBuffers,
    config::RouterConfig,
    context::{DecisionContext, Purpose},
    cost::CostTerms,
    decision_facts::DecisionFacts,
    decisions::{ALWAYS, DecidedBy},
    inputs::Needs,
    policy::{OnFailure, ShedReason},
    program::{FailedCall, Run, Verdict},
    query::{CandidateId, Query},
    receipt::{Decider, Receipt, ShadowResult},
    slot::{GenerationHandle, NativeMode, Program, ProgramSummary, SlotKind},
};

/// A chosen candidate and the content of its receipt.
pub(super) struct Chosen {
    pub(super) candidate: Candidate,
    /// Position in the pool.
    pub(super) row: u32,
    pub(super) cached: [u32; 3],
    pub(super) terms: Vec<(CandidateId, CostTerms)>,
    generation: Arc<GenerationHandle>,
    decider: Decider,
    reason: Option<String>,
    candidates: u32,
    cached_known: bool,
    costs: Vec<(WorkerId, DpRank, f32)>,
    shadow: Option<ShadowResult>,
    shadow_program: Option<Arc<ProgramSummary>>,
    /// Whether a policy of the slot observes the outcome.
    learns: bool,
}

/// Why no candidate was chosen.
pub(super) struct NotChosen {
    pub(super) error: RouteError,
    /// Decider that refused the request, and the recorded code; `None` if no candidate was eligible, which is
    /// not a decision.
    pub(super) refusal: Option<(DecidedBy, &'static str)>,
}

/// The answer of a program, or that the native fallback has to choose.
enum Choice {
    /// Position in the pool, the decider, and the policy's own reason.
    Row(u32, Decider, Option<String>),
    /// The policy gave no usable answer.
    FallBack { reason: &'static str, detail: String },
}

impl Router {
    /// Chooses without booking or recording.
    pub(super) fn choose(
        &self,
        query: &Query<'_>,
        config: RouterConfig,
        purpose: Purpose,
        buffers: &mut DecisionBuffers,
    ) -> Result<Chosen, NotChosen> {
        match self.choose_among(query, config, purpose, buffers, true) {
            // Filters know no other candidates than those of the short list.
            Err(none) if none.is_nobody_left() && buffers.program.recorder.is_short() => {
                self.choose_among(query, config, purpose, buffers, false)
            }
            done => done,
        }
    }

    /// Like [`Router::choose`]. With `may_shorten` the slot's `max_rows` applies.
    #[expect(clippy::too_many_lines, reason = "one decision from its candidates to its choice, in order")]
    fn choose_among(
        &self,
        query: &Query<'_>,
        config: RouterConfig,
        purpose: Purpose,
        buffers: &mut DecisionBuffers,
        may_shorten: bool,
    ) -> Result<Chosen, NotChosen> {
        let slot = self.slot(query, SlotKind::of(query.leg)).snapshot();
        let generation = slot.serving(query.request);
        let on_failure = slot.on_failure.unwrap_or(self.on_failure);
        let pool = query.snapshot.pool(query.model, query.leg);
        let DecisionBuffers { rows, shadow_rows, inputs, short_list, program, state_accesses } = buffers;
        candidate_rows(query, &self.busy, pool, rows)?;
        let candidates = u32::try_from(rows.len()).unwrap_or(u32::MAX);
        let preset = preset_row(query, pool, rows);
        // Native selectors read columns and need no short list.
        let asks = may_shorten && preset.is_none() && !matches!(generation.program, Program::Native(_));
        let max_rows = slot.max_rows.filter(|most| asks && candidates > *most);
        let compares = purpose == Purpose::Route && preset.is_none();
        let shadow_generation = slot.shadowing(query.request).filter(|_| compares);
        let explains = purpose == Purpose::Preview && query.explain;
        let always = self.always_recorded(query, purpose);
        let mut needs = Needs::of_program(&generation.program).or(Needs::of(always));
        if query.pin.is_some() || explains || max_rows.is_some() {
            needs = needs.or(Needs::COST);
        }
        let needs_of = |generation: &Arc<GenerationHandle>| Needs::of_program(&generation.program);
        let needs = needs.or(shadow_generation.map(needs_of).unwrap_or_default());
        inputs.compute(needs, query, &config, pool, rows, &self.index);
        if let Some(most) = max_rows {
            short_list.shorten(rows, most, inputs, query.seed);
        }
        program.begin(&generation.summary, rows);
        program.recorder.set_eligible(candidates);
        // The shadow sees the rows as they are before the serving program filters them.
        shadow_rows.clear();
        if shadow_generation.is_some() {
            shadow_rows.extend_from_slice(rows);
        }
        let mut cached_known = needs.cached;
        let facts = DecisionFacts::new(query, config, pool, inputs);
        let terms = if explains { facts.all_terms(rows) } else { Vec::new() };
        if preset.is_none() && !always.is_empty() {
            program.recorder.stage(ALWAYS, rows, |out| facts.write(always, rows, out));
        }
        let accesses = (purpose == Purpose::Route && self.records(query)).then_some(state_accesses);
        let mut context = DecisionContext::new(purpose)
            .with_generation(generation.generation)
            .with_request_id(query.request_id)
            .with_state_accesses(accesses);
        let mut run = Run { facts: &facts, cursors: &self.cursors, context: &mut context, buffers: program };
        let mut choice = match preset {
            Some((row, decider)) => Choice::Row(row, decider, None),
            None => match run_program(&mut run, generation, on_failure, rows) {
                // The prefill ran: policies no longer refuse. The filters may have dropped rows.
                Err(refused) if query.is_committed() => {
                    candidate_rows(query, &self.busy, pool, rows)?;
                    Choice::FallBack { reason: "committed", detail: refused.error.to_string() }
                }
                done => done?,
            },
        };
        if let Choice::FallBack { reason, detail } = choice {
            // The fallback ranks by inputs that the policy may not have asked for.
            let all_rows = if shadow_rows.is_empty() { &*rows } else { &*shadow_rows };
            inputs.compute(needs.or(Needs::COST), query, &config, pool, all_rows, &self.index);
            cached_known = true;
            let facts = DecisionFacts::new(query, config, pool, inputs);
            let mut run =
                Run { facts: &facts, cursors: &self.cursors, context: &mut context, buffers: program };
            choice = match run.native(self.fallback, rows) {
                Verdict::Row(row, _) => Choice::Row(row, Decider::Fallback { reason, detail }, None),
                _ => return Err(none_left(query, "no candidate is left").into()),
            };
        }
        let Choice::Row(row, decider, reason) = choice else {
            return Err(none_left(query, "no candidate is left").into());
        };
        let facts = DecisionFacts::new(query, config, pool, inputs);
        let shadow = shadow_generation.and_then(|shadow| {
            let made = Made { row, lane: generation.lane, cached_known };
            let recorder = &mut program.recorder;
            shadow::compare(shadow, &facts, &self.cursors, shadow_rows, made, recorder)
        });
        let shadow_program = shadow.as_ref().and(shadow_generation).map(|shadow| shadow.summary.clone());
        let candidate =
            pool.get(row as usize).cloned().ok_or_else(|| none_left(query, "no candidate is left"))?;
        let costs = if query.explain { ranked(pool, rows, &program.costs) } else { Vec::new() };
        let cached = inputs.cached(row);
        let learns = slot.learns(generation);
        let generation = generation.clone();
        Ok(Chosen {
            candidate,
            row,
            cached,
            terms,
            generation,
            decider,
            reason,
            candidates,
            cached_known,
            costs,
            shadow,
            shadow_program,
            learns,
        })
    }
}

/// Runs the generation's program, counts the call, and turns its verdict into a choice.
fn run_program(
    run: &mut Run<'_, '_>,
    generation: &GenerationHandle,
    on_failure: OnFailure,
    rows: &mut Vec<u32>,
) -> Result<Choice, NotChosen> {
    let query = run.facts.query;
    let native = match generation.program {
        Program::Native(mode) => Some(mode),
        _ => None,
    };
    if native == Some(NativeMode::Direct) {
        let refusal = Some((DecidedBy::Native(NativeMode::Direct), "no_pin"));
        return Err(NotChosen { error: RouteError::NoPin(query.leg), refusal });
    }
    if native.is_none() && !may_call(generation, run.context.purpose()) {
        return fall_back(on_failure, "breaker_open", String::new());
    }
    let started = Instant::now();
    let verdict = run.run(&generation.program, rows);
    if native.is_none() && run.context.purpose() != Purpose::Preview {
        verdict.count(generation, started.elapsed(), query.request_id);
    }
    match verdict {
        Verdict::Row(row, reason) => {
            let decider = native.map_or(Decider::Policy, |mode| Decider::Native { mode });
            Ok(Choice::Row(row, decider, reason))
        }
        Verdict::Shed(shed) => Err(NotChosen::by_policy(RouteError::Shed(shed), "shed")),
        Verdict::Abstained => Ok(Choice::FallBack { reason: "abstain", detail: String::new() }),
        Verdict::NoRowLeft => match native {
            Some(mode) => {
                let refusal = Some((DecidedBy::Native(mode), "nobody_left"));
                Err(NotChosen { error: none_left(query, "no candidate is left"), refusal })
            }
            None => {
                let error = none_left(query, "the filters dropped every candidate");
                Err(NotChosen::by_policy(error, "nobody_left"))
            }
        },
        Verdict::Failed(FailedCall { failure, .. }) => {
            fall_back(on_failure, failure.kind(), failure.to_string())
        }
    }
}

/// Returns whether the breaker lets a call through. A preview changes no state (F2): it does not take the one
/// trial after a pause.
pub(super) fn may_call(generation: &GenerationHandle, purpose: Purpose) -> bool {
    match purpose {
        Purpose::Preview => !generation.breaker.is_paused(),
        Purpose::Route | Purpose::Shadow => generation.breaker.try_call(),
    }
}

/// Applies the configured reaction to a policy's failure.
fn fall_back(on_failure: OnFailure, reason: &'static str, detail: String) -> Result<Choice, NotChosen> {
    match on_failure {
        OnFailure::Fallback => Ok(Choice::FallBack { reason, detail }),
        OnFailure::Shed => {
            let shed = ShedReason { status: 429, reason: "routing policy failed".into() };
            Err(NotChosen::by_policy(RouteError::Shed(shed), "policy_failed"))
        }
        OnFailure::Reject => Err(NotChosen::by_policy(RouteError::PolicyFailed(reason), "policy_failed")),
    }
}

fn ranked(pool: &Pool, rows: &[u32], costs: &[f32]) -> Vec<(WorkerId, DpRank, f32)> {
    let ranked = rows.iter().filter_map(|row| pool.get(*row as usize)).zip(costs);
    ranked.map(|(candidate, cost)| (candidate.worker_id(), candidate.rank, *cost)).collect()
}

impl NotChosen {
    /// Returns whether the program's filters dropped every candidate.
    fn is_nobody_left(&self) -> bool {
        self.refusal.is_some_and(|(_, code)| code == "nobody_left")
    }

    fn by_policy(error: RouteError, code: &'static str) -> Self {
        Self { error, refusal: Some((DecidedBy::Policy, code)) }
    }
}

impl From<RouteError> for NotChosen {
    fn from(error: RouteError) -> Self {
        Self { error, refusal: None }
    }
}

impl Chosen {
    /// Notes the candidate of a decision that the slot's program made, before it is booked.
    pub(super) fn note_candidate(&self, cached_blocks: u32) {
        if self.candidates > 1 && matches!(self.decider, Decider::Policy | Decider::Native { .. }) {
            let counts = cached_blocks == 0 || self.candidate.load().active_requests() > 0;
            self.generation.choices.note(self.candidate.worker_id(), self.candidate.rank, counts);
        }
    }

    pub(super) fn receipt(self, query: &Query<'_>, started: Instant) -> Receipt {
        let info = self.generation.program.ranker();
        Receipt {
            id: None,
            leg: query.leg,
            attempt: query.attempt,
            slot: SlotKind::of(query.leg),
            slot_model: self.generation.summary.model.clone(),
            generation: self.generation.generation,
            lane: self.generation.lane,
            shadow: self.shadow,
            shadow_program: self.shadow_program,
            program: self.generation.summary.clone(),
            policy: info.map(|info| info.name.clone()),
            digest: info.map(|info| info.digest),
            settings_digest: info.and_then(|info| info.settings_digest),
            decider: self.decider,
            learns: self.learns,
            moved: false,
            served_until_move: false,
            run: None,
            reason: self.reason,
            worker: self.candidate.worker_id(),
            rank: self.candidate.rank,
            candidates: self.candidates,
            cached_blocks: self.cached,
            cached_known: self.cached_known,
            cached_is_reported: query.leg != Leg::Prefill
                || self.candidate.worker.spec().engine != Engine::Sglang,
            engine_block: self.candidate.worker.block_size(),
            costs: self.costs,
            seed: query.seed,
            now_us: query.now_us,
            took: started.elapsed(),
        }
    }
}
