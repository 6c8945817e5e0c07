//! Runs a generation's program over the candidate rows, and checks every answer before it is used (invariant 4).

use crate::{
    check,
    cost::cost,
    decisions::recorder::Recorder,
    facts::columns::DecisionFacts,
    native::Cursors,
    pick,
    policy::{Call, Decision, Failure, Policy, ShedReason},
    router::Purpose,
    slot::{GenerationHandle, NativeMode, Picker, Program, WeightedScorer},
};

/// What a program said.
#[derive(Debug, PartialEq)]
pub(crate) enum Verdict {
    /// This position of the pool, with the policy's own reason.
    Row(u32, Option<String>),
    /// No opinion.
    Abstained,
    /// Refuse the request.
    Shed(ShedReason),
    /// Filters left nobody.
    NobodyLeft,
    /// No usable answer.
    Failed(Failure),
}

/// Reusable buffers of one decision.
#[derive(Default)]
pub(crate) struct Buffers {
    /// What the policies were handed.
    pub(crate) recorder: Recorder,
    kept: Vec<u32>,
    one: Vec<f32>,
    /// The weighed costs of the rows that were ranked last, for receipts.
    pub(crate) costs: Vec<f32>,
}

/// One run: the generation, the question, the buffers.
pub(crate) struct Run<'a> {
    pub(crate) active: &'a GenerationHandle,
    pub(crate) gathered: &'a DecisionFacts<'a>,
    pub(crate) cursors: &'a Cursors,
    pub(crate) buffers: &'a mut Buffers,
    pub(crate) purpose: Purpose,
}

impl Run<'_> {
    /// Runs the program over `rows` (positions of the pool, at least one; filters compact it).
    pub(crate) fn run(&mut self, rows: &mut Vec<u32>) -> Verdict {
        let active = self.active;
        let verdict = match &active.program {
            Program::Native(mode) => return self.native(*mode, rows),
            Program::Selector { filters, selector } => {
                self.filter(filters, rows).and_then(|step| self.select(step, &**selector, rows))
            }
            Program::Scorers { filters, scorers, picker } => {
                self.filter(filters, rows).and_then(|step| self.score(step, scorers, *picker, rows))
            }
            Program::DecodeOverride(policy) => Err(Stop::Failed(policy.lacks("select"))),
        };
        match verdict {
            Ok(verdict) => verdict,
            Err(Stop::NobodyLeft) => Verdict::NobodyLeft,
            Err(Stop::Failed(failure)) => Verdict::Failed(failure),
        }
    }

    /// Ranks `rows` natively.
    pub(crate) fn native(&mut self, mode: NativeMode, rows: &[u32]) -> Verdict {
        let seed = self.gathered.query.seed;
        let gathered = self.gathered;
        let requests = |row: u32| gathered.terms(row).active_requests;
        let place = match mode {
            NativeMode::RoundRobin if self.purpose == Purpose::Preview => {
                self.cursors.peek(gathered.query.leg, rows.len())
            }
            NativeMode::RoundRobin => self.cursors.next(gathered.query.leg, rows.len()),
            NativeMode::Random => crate::native::random(rows.len(), seed),
            NativeMode::PowerOfTwo => crate::native::power_of_two(rows, requests, seed),
            NativeMode::LeastLoaded => {
                self.rank(rows, |row| f64::from(requests(row)) as f32);
                pick::minimum(&self.buffers.costs, seed)
            }
            NativeMode::Kv => {
                let config = gathered.config;
                self.rank(rows, |row| cost(&gathered.terms(row), &config));
                pick::pick(Picker::Min, &self.buffers.costs, config.temperature as f32, seed)
            }
            // Only a pin can choose here, and pins never reach a program.
            NativeMode::Direct => None,
        };
        match place.and_then(|place| rows.get(place)) {
            Some(row) => Verdict::Row(*row, None),
            None => Verdict::NobodyLeft,
        }
    }

    fn rank(&mut self, rows: &[u32], cost: impl Fn(u32) -> f32) {
        self.buffers.costs.clear();
        self.buffers.costs.extend(rows.iter().map(|row| cost(*row)));
    }

    /// Runs the filters; the step that follows them.
    fn filter(&mut self, filters: &[std::sync::Arc<dyn Policy>], rows: &mut Vec<u32>) -> Result<u32, Stop> {
        let mut step = 0;
        for filter in filters {
            let call = self.call(rows.len());
            let Buffers { recorder, kept, .. } = &mut *self.buffers;
            let facts =
                recorder.stage(step, rows, |out| self.gathered.write(&filter.info().wants, rows, out));
            step += 1;
            let outcome = filter.keep(&call, facts, kept);
            recorder.take_state(filter.info());
            outcome.map_err(Stop::Failed)?;
            check::kept(kept, rows.len()).map_err(Stop::Failed)?;
            let kept = kept.iter().filter_map(|place| rows.get(*place as usize).copied());
            let kept: Vec<u32> = kept.collect();
            *rows = kept;
            if rows.is_empty() {
                return Err(Stop::NobodyLeft);
            }
        }
        Ok(step)
    }

    fn select(&mut self, step: u32, selector: &dyn Policy, rows: &[u32]) -> Result<Verdict, Stop> {
        let call = self.call(rows.len());
        let write = |out: &mut Vec<u32>| self.gathered.write(&selector.info().wants, rows, out);
        let decision = selector.select(&call, self.buffers.recorder.stage(step, rows, write));
        self.buffers.recorder.take_state(selector.info());
        match decision.map_err(Stop::Failed)? {
            Decision::Abstain => Ok(Verdict::Abstained),
            Decision::Shed(shed) => Ok(Verdict::Shed(check::shed(shed).map_err(Stop::Failed)?)),
            Decision::Choose { row, costs, reason } => {
                check::choice(row, &costs, rows.len()).map_err(Stop::Failed)?;
                self.buffers.costs.clear();
                self.buffers.costs.extend(costs);
                let row = rows.get(row as usize).copied().ok_or(Stop::NobodyLeft)?;
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
        let call = self.call(rows.len());
        let buffers = &mut *self.buffers;
        for (step, scorer) in (first..).zip(scorers) {
            let wants = &scorer.policy.info().wants;
            let facts = buffers.recorder.stage(step, rows, |out| self.gathered.write(wants, rows, out));
            let outcome = scorer.policy.score(&call, facts, &mut buffers.one);
            buffers.recorder.take_state(scorer.policy.info());
            outcome.map_err(Stop::Failed)?;
            check::costs(&buffers.one, rows.len()).map_err(Stop::Failed)?;
            pick::normalize(scorer.normalize, &mut buffers.one);
            if step == first {
                buffers.costs.clear();
                buffers.costs.resize(rows.len(), 0.0);
            }
            for (sum, one) in buffers.costs.iter_mut().zip(&buffers.one) {
                *sum += scorer.weight * one;
            }
        }
        check::costs(&buffers.costs, rows.len()).map_err(Stop::Failed)?;
        let temperature = self.gathered.config.temperature as f32;
        let place = pick::pick(picker, &buffers.costs, temperature, call.seed);
        let row = place.and_then(|place| rows.get(place)).ok_or(Stop::NobodyLeft)?;
        Ok(Verdict::Row(*row, None))
    }

    fn call(&self, rows: usize) -> Call {
        let query = self.gathered.query;
        Call {
            leg: query.leg,
            attempt: query.attempt,
            rows: u32::try_from(rows).unwrap_or(u32::MAX),
            seed: query.seed,
            now_us: query.now_us,
        }
    }
}

enum Stop {
    NobodyLeft,
    Failed(Failure),
}
