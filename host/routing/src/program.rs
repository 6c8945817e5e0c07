//! Runs a generation's program over the candidate rows and checks every answer before it is used (invariant
//! 4).

use std::{sync::Arc, time::Duration};

use crate::{
    answer_checks,
    buffers::ProgramBuffers,
    context::{DecisionContext, Purpose},
    cost::cost,
    decision_facts::DecisionFacts,
    native::{self, Cursors},
    pick,
    policy::{Decision, Failure, Policy, ShedReason},
    slot::{GenerationHandle, NativeMode, Picker, Program, WeightedScorer},
};

/// The checked answer of a program.
#[derive(Debug, PartialEq)]
pub(crate) enum Verdict {
    /// This position of the pool, with the policy's own reason.
    Row(u32, Option<String>),
    /// The policy has no opinion.
    Abstained,
    /// The policy refuses the request.
    Shed(ShedReason),
    /// The filters dropped every row.
    NoRowLeft,
    /// A policy gave no usable answer.
    Failed(FailedCall),
}

/// A call without a usable answer.
#[derive(Debug, PartialEq)]
pub(crate) struct FailedCall {
    pub(crate) failure: Failure,
    /// Step of the program that failed.
    pub(crate) step: u32,
}

/// One run of a program.
pub(crate) struct Run<'run, 'call> {
    pub(crate) facts: &'run DecisionFacts<'run>,
    pub(crate) cursors: &'run Cursors,
    pub(crate) context: &'run mut DecisionContext<'call>,
    pub(crate) buffers: &'run mut ProgramBuffers,
}

/// Why a run ended before its last policy answered.
enum Stop {
    NoRowLeft,
    Failed(FailedCall),
}

/// Returns what a failure in this step ends the run with.
fn failed(step: u32) -> impl Fn(Failure) -> Stop {
    move |failure| Stop::Failed(FailedCall { failure, step })
}

impl Verdict {
    /// Counts the call that gave this verdict.
    pub(crate) fn count(&self, generation: &GenerationHandle, took: Duration, request_id: Option<&str>) {
        let failed = match self {
            Self::Failed(FailedCall { failure, step }) => Some((failure, *step)),
            _ => None,
        };
        generation.note_call(failed, took, request_id);
    }
}

impl Run<'_, '_> {
    /// Runs `program` over `rows`: positions of the pool, at least one. Filters compact them.
    pub(crate) fn run(&mut self, program: &Program, rows: &mut Vec<u32>) -> Verdict {
        let verdict = match program {
            Program::Native(mode) => return self.native(*mode, rows),
            Program::Selector { filters, selector } => {
                self.filter(filters, rows).and_then(|step| self.select(step, &**selector, rows))
            }
            Program::Scorers { filters, scorers, picker } => {
                self.filter(filters, rows).and_then(|step| self.score(step, scorers, *picker, rows))
            }
            Program::DecodeOverride(policy) => Err(failed(0)(policy.lacks("select"))),
        };
        match verdict {
            Ok(verdict) => verdict,
            Err(Stop::NoRowLeft) => Verdict::NoRowLeft,
            Err(Stop::Failed(failed)) => Verdict::Failed(failed),
        }
    }

    /// Ranks `rows` natively.
    pub(crate) fn native(&mut self, mode: NativeMode, rows: &[u32]) -> Verdict {
        let facts = self.facts;
        let query = facts.query;
        let requests = |row: u32| facts.terms(row).active_requests;
        let position = match mode {
            NativeMode::RoundRobin if self.context.purpose() != Purpose::Route => {
                self.cursors.peek(query.model, query.leg, rows.len())
            }
            NativeMode::RoundRobin => self.cursors.next(query.model, query.leg, rows.len()),
            NativeMode::Random => native::random(rows.len(), query.seed),
            NativeMode::PowerOfTwo => native::power_of_two(rows, requests, query.seed),
            NativeMode::LeastLoaded => {
                self.rank(rows, |row| f64::from(requests(row)) as f32);
                pick::minimum(&self.buffers.costs, query.seed)
            }
            NativeMode::Kv => {
                let config = facts.config;
                self.rank(rows, |row| cost(&facts.terms(row), &config));
                pick::pick(Picker::Min, &self.buffers.costs, config.temperature as f32, query.seed)
            }
            // Only a pin can choose here, and a pinned leg runs no program.
            NativeMode::Direct => None,
        };
        match position.and_then(|position| rows.get(position)) {
            Some(row) => Verdict::Row(*row, None),
            None => Verdict::NoRowLeft,
        }
    }

    fn rank(&mut self, rows: &[u32], cost: impl Fn(u32) -> f32) {
        self.buffers.costs.clear();
        self.buffers.costs.extend(rows.iter().map(|row| cost(*row)));
    }

    /// Runs the filters and returns the step after them.
    fn filter(&mut self, filters: &[Arc<dyn Policy>], rows: &mut Vec<u32>) -> Result<u32, Stop> {
        let mut step = 0;
        for filter in filters {
            let call = self.facts.query.call(rows.len());
            let ProgramBuffers { recorder, kept, .. } = &mut *self.buffers;
            let facts = recorder.stage(step, rows, |out| self.facts.write(&filter.info().wants, rows, out));
            let outcome = filter.keep(self.context, &call, facts, kept);
            recorder.take_state(self.context.state_accesses());
            outcome.map_err(failed(step))?;
            answer_checks::kept(kept, rows.len()).map_err(failed(step))?;
            step += 1;
            retain_positions(rows, kept);
            if rows.is_empty() {
                return Err(Stop::NoRowLeft);
            }
        }
        Ok(step)
    }

    fn select(&mut self, step: u32, selector: &dyn Policy, rows: &[u32]) -> Result<Verdict, Stop> {
        let call = self.facts.query.call(rows.len());
        let ProgramBuffers { recorder, costs, .. } = &mut *self.buffers;
        let facts = recorder.stage(step, rows, |out| self.facts.write(&selector.info().wants, rows, out));
        let decision = selector.select(self.context, &call, facts);
        recorder.take_state(self.context.state_accesses());
        match decision.map_err(failed(step))? {
            Decision::Abstain => Ok(Verdict::Abstained),
            Decision::Shed(shed) => Ok(Verdict::Shed(answer_checks::shed(shed).map_err(failed(step))?)),
            Decision::Choose { row, costs: given, reason } => {
                answer_checks::choice(row, &given, rows.len()).map_err(failed(step))?;
                costs.clear();
                costs.extend(given);
                let row = rows.get(row as usize).copied().ok_or(Stop::NoRowLeft)?;
                Ok(Verdict::Row(row, reason))
            }
        }
    }

    fn score(
        &mut self,
        first: u32,
        scorers: &[WeightedScorer],
        picker: Picker,
        rows: &[u32],
    ) -> Result<Verdict, Stop> {
        let call = self.facts.query.call(rows.len());
        let ProgramBuffers { recorder, scores, costs, .. } = &mut *self.buffers;
        costs.clear();
        costs.resize(rows.len(), 0.0);
        for (step, scorer) in (first..).zip(scorers) {
            let wants = &scorer.policy.info().wants;
            let facts = recorder.stage(step, rows, |out| self.facts.write(wants, rows, out));
            let outcome = scorer.policy.score(self.context, &call, facts, scores);
            recorder.take_state(self.context.state_accesses());
            outcome.map_err(failed(step))?;
            answer_checks::costs(scores, rows.len()).map_err(failed(step))?;
            pick::normalize(scorer.normalize, scores);
            for (sum, score) in costs.iter_mut().zip(scores.iter()) {
                *sum += scorer.weight * score;
            }
        }
        answer_checks::costs(costs, rows.len()).map_err(failed(first))?;
        let temperature = self.facts.config.temperature as f32;
        let position = pick::pick(picker, costs, temperature, call.seed);
        let row = position.and_then(|position| rows.get(position)).ok_or(Stop::NoRowLeft)?;
        Ok(Verdict::Row(*row, None))
    }
}

/// Keeps the rows at the given positions, which rise.
fn retain_positions(rows: &mut Vec<u32>, positions: &[u32]) {
    let (mut position, mut wanted) = (0_u32, positions.iter().peekable());
    rows.retain(|_| {
        let keep = wanted.next_if(|wanted| **wanted == position).is_some();
        position += 1;
        keep
    });
}
