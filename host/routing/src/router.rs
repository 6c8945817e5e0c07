//! The router: one path for every leg. Pins a generation, gathers facts, calls the policy, books the choice.
//!
//! Never waits: no lock that a reload holds, no compile, no I/O.

use std::{cell::RefCell, sync::Arc};

use pointsman_workers::{BookingRequest, Candidate, PrefixIndex, WorkerId};
use tokio::time::Instant;

use crate::{
    config::RouterConfig,
    cost::CostTerms,
    decisions::{Decisions, recorder::ALWAYS},
    facts::columns::{DecisionFacts, Inputs, Needs},
    native::Cursors,
    policy::ShedReason,
    program::{Buffers, Run, Verdict},
    query::{CandidateId, Query},
    receipt::{Decider, Receipt, ShadowResult},
    scope::Scope,
    slot::{GenerationHandle, NativeMode, Program, SlotKind},
    slots::Slots,
};

mod answer;
mod eligible;
mod plan;
mod record_decision;
mod shadow;

pub use answer::{RouteError, RoutePreview, Routed};
use eligible::{candidate_rows, settled};
pub use plan::OverrideDecision;

/// What to do when a policy gives no usable answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFailure {
    /// The native fallback decides.
    #[default]
    Fallback,
    /// Refuse with 429 and a time to retry.
    Shed,
    /// Refuse with 503.
    Reject,
}

/// Routes legs.
#[derive(Debug)]
pub struct Router {
    slots: Slots,
    index: Arc<PrefixIndex>,
    config: RouterConfig,
    on_failure: OnFailure,
    fallback: NativeMode,
    cursors: Arc<Cursors>,
    decisions: Arc<Decisions>,
}

/// Whether a choice is acted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// It is.
    Route,
    /// It only tells what would be: nothing may change by it.
    Preview,
}

#[derive(Default)]
struct Scratch {
    rows: Vec<u32>,
    inputs: Inputs,
    buffers: Buffers,
    beside: shadow::Beside,
}

thread_local! {
    /// Buffers live with the thread: a decision allocates nothing that grows with the number of candidates.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Router {
    /// A router over `slots`, ranking natively by `kv` when a policy gives no answer.
    #[must_use]
    pub fn new(slots: Slots, index: Arc<PrefixIndex>, config: RouterConfig, on_failure: OnFailure) -> Self {
        let decisions = Arc::new(Decisions::off());
        Self {
            slots,
            index,
            config,
            on_failure,
            fallback: NativeMode::Kv,
            cursors: Arc::default(),
            decisions,
        }
    }

    /// The same router, which records its decisions.
    #[must_use]
    pub fn recording(mut self, decisions: Decisions) -> Self {
        self.decisions = Arc::new(decisions);
        self
    }

    /// Returns a router over the same slots, index and round-robin cursors, with these settings instead of its own.
    #[must_use]
    pub fn reconfigured(
        &self,
        config: RouterConfig,
        on_failure: OnFailure,
        decisions: Arc<Decisions>,
    ) -> Self {
        Self {
            slots: self.slots.clone(),
            index: self.index.clone(),
            config,
            on_failure,
            fallback: self.fallback,
            cursors: self.cursors.clone(),
            decisions,
        }
    }

    /// The decisions it recorded.
    #[must_use]
    pub fn decisions(&self) -> &Arc<Decisions> {
        &self.decisions
    }

    /// The slots it asks.
    #[must_use]
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// The prefix index it reads and, in approximate mode, writes.
    #[must_use]
    pub fn index(&self) -> &Arc<PrefixIndex> {
        &self.index
    }

    /// Chooses and books a worker for one leg. `over` is the decode override's config for this leg.
    ///
    /// # Errors
    /// [`RouteError`] when no worker may serve it, or the policy refuses.
    pub fn route(&self, query: &Query<'_>, over: &crate::RouterConfigOverride) -> Result<Routed, RouteError> {
        let started = Instant::now();
        let config = self.config.with(&query.request.config).with(over);
        let chosen = match self.choose(query, config, Purpose::Route) {
            Ok(chosen) => chosen,
            Err(error) => {
                self.keep_refusal(query, config, &error, started);
                return Err(error);
            }
        };
        let candidate = chosen.candidate.clone();
        let request = query.request;
        let [device, host, disk] = chosen.cached;
        let cached_tokens = (device + host + disk).saturating_mul(request.block_size);
        let booking = candidate.book(&BookingRequest {
            leg: query.leg,
            prompt_tokens: request.prompt_tokens,
            new_prefill_tokens: request.prompt_tokens.saturating_sub(cached_tokens),
            prefix: request.prefix.clone(),
            total_prompt_blocks: request.request_blocks(),
            block_size: request.block_size,
            expected_output_tokens: request.expected_output_tokens,
            assume_kv_reuse: config.assume_kv_reuse,
            track_prefill_tokens: config.track_prefill_tokens,
        });
        // F5: the decision itself is what approximate mode knows of caches.
        self.index.record(candidate.worker.id(), candidate.rank, request.prefix.hashes(), started);
        let mut receipt = chosen.receipt(query, started);
        receipt.id = self.keep(query, config, &receipt);
        Ok(Routed { candidate, booking, receipt })
    }

    /// Chooses as [`Router::route`] would now, and changes no state: no booking, no record in the index, no cursor moved
    /// (spec F2).
    ///
    /// # Errors
    /// As [`Router::route`].
    pub fn preview(
        &self,
        query: &Query<'_>,
        over: &crate::RouterConfigOverride,
    ) -> Result<RoutePreview, RouteError> {
        let started = Instant::now();
        let config = self.config.with(&query.request.config).with(over);
        let mut chosen = self.choose(query, config, Purpose::Preview)?;
        let terms = std::mem::take(&mut chosen.terms);
        let candidate = chosen.candidate.clone();
        Ok(RoutePreview { candidate, receipt: chosen.receipt(query, started), config, terms })
    }

    /// Chooses without booking or recording.
    fn choose(
        &self,
        query: &Query<'_>,
        config: RouterConfig,
        purpose: Purpose,
    ) -> Result<Chosen, RouteError> {
        let snapshot = self.slots.get(query.model, SlotKind::of(query.leg)).snapshot();
        let active = snapshot.serving(query.request);
        let on_failure = snapshot.on_failure.unwrap_or(self.on_failure);
        let _scope = Scope::decision(active.generation, purpose == Purpose::Preview, query.request_id);
        let pool = query.snapshot.pool(query.model, query.leg);
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { rows, inputs, buffers, beside } = scratch;
            buffers.recorder.clear();
            candidate_rows(query, pool, rows)?;
            buffers.costs.clear();
            let candidates = u32::try_from(rows.len()).unwrap_or(u32::MAX);
            buffers.recorder.begin(&active.summary, rows);
            let settled = settled(query, pool, rows);
            let asks = purpose == Purpose::Route && settled.is_none();
            let shadow = snapshot.shadowing(query.request).filter(|_| asks);
            let always = self.always(query, purpose);
            let all = query.pin.is_some() || explains(query, purpose);
            let needs = if all { Needs::ALL } else { needs(&active.program).or(Needs::of(always)) };
            let needs = needs.or(beside.begin(shadow.map(|shadow| &**shadow), rows));
            inputs.compute(needs, query, &config, pool, rows, &self.index);
            let mut cached_known = needs.cached;
            let gathered = DecisionFacts::new(query, config, pool, inputs);
            let terms = if explains(query, purpose) { terms(&gathered, rows) } else { Vec::new() };
            if settled.is_none() && !always.is_empty() {
                buffers.recorder.stage(ALWAYS, rows, |out| gathered.write(always, rows, out));
            }
            let mut choice = match settled {
                Some((row, decider)) => Choice::Row(row, decider, None),
                None => self.ask_program((active, on_failure), &gathered, rows, buffers, purpose)?,
            };
            if let Choice::FallBack { reason, detail } = choice {
                // The fallback ranks by inputs that the policy may not have wanted.
                inputs.compute(Needs::ALL, query, &config, pool, beside.rows_or(rows), &self.index);
                cached_known = true;
                let gathered = DecisionFacts::new(query, config, pool, inputs);
                let row = self.rank_natively(active, &gathered, rows, buffers, purpose)?;
                choice = Choice::Row(row, Decider::Fallback { reason, detail }, None);
            }
            let Choice::Row(row, decider, reason) = choice else {
                return Err(no_worker(query, String::new()));
            };
            let shadow = shadow.and_then(|shadow| {
                beside.ask(self, shadow, &DecisionFacts::new(query, config, pool, inputs), row)
            });
            let candidate = pool.get(row as usize).cloned().ok_or_else(|| no_worker(query, String::new()))?;
            let costs = if query.explain { explained(pool, rows, &buffers.costs) } else { Vec::new() };
            let cached = inputs.cached(row as usize);
            Ok(Chosen {
                active: active.clone(),
                candidate,
                decider,
                reason,
                candidates,
                cached,
                cached_known,
                costs,
                shadow,
                terms,
            })
        })
    }

    /// The fallback's word, which is always there as long as a row is.
    fn rank_natively(
        &self,
        active: &GenerationHandle,
        gathered: &DecisionFacts<'_>,
        rows: &[u32],
        buffers: &mut Buffers,
        purpose: Purpose,
    ) -> Result<u32, RouteError> {
        let mut run = Run { active, gathered, cursors: &self.cursors, buffers, purpose };
        match run.native(self.fallback, rows) {
            Verdict::Row(row, _) => Ok(row),
            _ => Err(no_worker(gathered.query, String::new())),
        }
    }

    fn ask_program(
        &self,
        (active, on_failure): (&GenerationHandle, OnFailure),
        gathered: &DecisionFacts<'_>,
        rows: &mut Vec<u32>,
        buffers: &mut Buffers,
        purpose: Purpose,
    ) -> Result<Choice, RouteError> {
        let native = match active.program {
            Program::Native(NativeMode::Direct) => return Err(RouteError::NoPin(gathered.query.leg)),
            Program::Native(mode) => Some(mode),
            _ => None,
        };
        if native.is_none() && !active.breaker.try_call() {
            return fall_back(on_failure, "breaker_open", String::new());
        }
        let started = Instant::now();
        let verdict = Run { active, gathered, cursors: &self.cursors, buffers, purpose }.run(rows);
        if native.is_none() && purpose == Purpose::Route {
            note(active, &verdict, started.elapsed());
        }
        match verdict {
            Verdict::Row(row, reason) => {
                let decider = native.map_or(Decider::Policy, |mode| Decider::Native { mode });
                Ok(Choice::Row(row, decider, reason))
            }
            Verdict::Shed(shed) => Err(RouteError::Shed(shed)),
            Verdict::Abstained => Ok(Choice::FallBack { reason: "abstain", detail: String::new() }),
            Verdict::NobodyLeft if native.is_some() => Err(no_worker(gathered.query, String::new())),
            Verdict::NobodyLeft => Err(no_worker(gathered.query, ": filters left none".to_owned())),
            Verdict::Failed(failure) => fall_back(on_failure, failure.kind(), failure.to_string()),
        }
    }
}

/// What a policy's failure leads to, as configured.
fn fall_back(on_failure: OnFailure, reason: &'static str, detail: String) -> Result<Choice, RouteError> {
    match on_failure {
        OnFailure::Fallback => Ok(Choice::FallBack { reason, detail }),
        OnFailure::Shed => {
            Err(RouteError::Shed(ShedReason { status: 429, reason: "routing policy failed".into() }))
        }
        OnFailure::Reject => Err(RouteError::PolicyFailed(reason)),
    }
}

/// The costly inputs that a program wants.
fn needs(program: &Program) -> Needs {
    match program {
        Program::Native(NativeMode::Kv) => Needs::ALL,
        Program::DecodeOverride(_) => Needs::default(),
        _ => {
            program.policies().map(|policy| Needs::of(&policy.info().wants)).fold(Needs::default(), Needs::or)
        }
    }
}

/// A program's word, or that the native fallback has to give one.
enum Choice {
    /// Position in the pool, who said so, and the policy's own reason.
    Row(u32, Decider, Option<String>),
    /// No usable answer.
    FallBack { reason: &'static str, detail: String },
}

struct Chosen {
    active: Arc<GenerationHandle>,
    candidate: Candidate,
    decider: Decider,
    reason: Option<String>,
    candidates: u32,
    cached: [u32; 3],
    cached_known: bool,
    costs: Vec<(WorkerId, pointsman_workers::DpRank, f32)>,
    shadow: Option<ShadowResult>,
    terms: Vec<(CandidateId, CostTerms)>,
}

impl Chosen {
    fn receipt(self, query: &Query<'_>, started: Instant) -> Receipt {
        let info = self.active.program.ranker();
        Receipt {
            id: None,
            leg: query.leg,
            attempt: query.attempt,
            slot: SlotKind::of(query.leg),
            generation: self.active.generation,
            lane: self.active.lane,
            shadow: self.shadow,
            policy: info.map(|info| info.name.clone()),
            digest: info.map(|info| info.digest),
            decider: self.decider,
            learns: self.active.learns,
            reason: self.reason,
            worker: self.candidate.worker.id(),
            rank: self.candidate.rank,
            candidates: self.candidates,
            cached_blocks: self.cached,
            cached_known: self.cached_known,
            costs: self.costs,
            seed: query.seed,
            now_us: query.now_us,
            took: started.elapsed(),
        }
    }
}

fn note(active: &GenerationHandle, verdict: &Verdict, took: std::time::Duration) {
    match verdict {
        Verdict::Failed(failure) => active.note::<()>(&Err(failure.clone()), took),
        _ => active.note(&Ok(()), took),
    }
}

fn explained(
    pool: &[Candidate],
    rows: &[u32],
    costs: &[f32],
) -> Vec<(WorkerId, pointsman_workers::DpRank, f32)> {
    let ranked = rows.iter().filter_map(|row| pool.get(*row as usize)).zip(costs);
    ranked.map(|(candidate, cost)| (candidate.worker.id(), candidate.rank, *cost)).collect()
}

/// Whether somebody wants to know what the costs are made of.
fn explains(query: &Query<'_>, purpose: Purpose) -> bool {
    purpose == Purpose::Preview && query.explain
}

fn terms(gathered: &DecisionFacts<'_>, rows: &[u32]) -> Vec<(CandidateId, CostTerms)> {
    let of = |row: &u32| {
        let candidate = gathered.pool.get(*row as usize)?;
        Some(((candidate.worker.id(), candidate.rank), gathered.terms(*row)))
    };
    rows.iter().filter_map(of).collect()
}

fn no_worker(query: &Query<'_>, detail: String) -> RouteError {
    RouteError::NoWorker { leg: query.leg, detail }
}

#[cfg(test)]
mod tests;
