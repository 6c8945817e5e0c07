//! The probe: calls with made-up facts, repeated on a second instance. A policy that fails here never serves.

use pointsman_routing::{
    Call, Decision, DecisionContext, Failure, Moment, ObservedOutcome, Purpose, World, answer_checks,
    facts::{FactType, RequestFact, Wants, WorkerColumn, WorkerFact},
};
use pointsman_workers::{DpRank, Leg, WorkerId};
use tokio::time::Duration;

use crate::instance::{Answer, Instance};

/// Numbers of candidate rows of the probe calls.
pub(crate) const ROWS: [u32; 3] = [1, 2, 64];

/// A call with made-up facts, in the order of the policy's request.
#[derive(Clone, Debug)]
pub struct SampleCall {
    /// Arguments of the call other than the facts.
    pub call: Call,
    /// The request facts.
    pub request: Vec<u32>,
    /// The worker facts of `call.rows` candidates, column by column.
    pub candidates: Vec<u32>,
    /// The worker facts of one worker: the previewed decode candidate of a decode override.
    pub decode: Vec<u32>,
}

impl SampleCall {
    /// A call with this many candidate rows.
    #[must_use]
    pub fn new(wants: &Wants, rows: u32) -> Self {
        let call =
            Call { leg: Leg::Prefill, attempt: 0, rows, seed: 0x5eed + u64::from(rows), now_us: NOW_US };
        Self {
            call,
            request: request_facts(wants),
            candidates: worker_facts(wants, rows),
            decode: worker_facts(wants, 1),
        }
    }

    /// The same call as for most requests: no explanation is wanted and no taint is preferred. Both cost a
    /// policy time, so the probe wants both, and a measurement of the usual cost must not.
    #[must_use]
    pub fn ordinary(wants: &Wants, rows: u32) -> Self {
        let mut sample = Self::new(wants, rows);
        let mut place = 0;
        for fact in &wants.request {
            if *fact == RequestFact::Explain {
                sample.request.iter_mut().skip(place).take(1).for_each(|value| *value = 0);
            }
            place += fact.ty().width();
        }
        for (matrix, rows) in [(&mut sample.candidates, rows as usize), (&mut sample.decode, 1)] {
            let mut place = 0;
            for column in &wants.worker {
                if *column == WorkerColumn::Fact(WorkerFact::TaintPreference) {
                    matrix.iter_mut().skip(place * rows).take(rows).for_each(|value| *value = 0);
                }
                place += column.ty().width();
            }
        }
        sample
    }

    /// Request facts, then candidates: the input of filters, scorers and selectors.
    #[must_use]
    pub fn facts(&self) -> Vec<u32> {
        self.request.iter().chain(&self.candidates).copied().collect()
    }
}

/// Time of the probe calls, microseconds since the Unix epoch.
const NOW_US: u64 = 1_700_000_000_000_000;

/// Lets a policy that learns observe made-up outcomes: a success, a retried leg, and a request whose client
/// disconnected.
pub(crate) fn observe(instance: &mut Instance) -> Result<(), Failure> {
    let fine = ObservedOutcome {
        decision: None,
        seed: 0x5eed,
        leg: Leg::Prefill,
        attempt: 0,
        worker: WorkerId(1),
        rank: DpRank(0),
        by_policy: true,
        retried: false,
        status: 200,
        ttft: Some(Duration::from_millis(50)),
        itl: Some(Duration::from_millis(10)),
        duration: Duration::from_secs(1),
        prompt_tokens: 1_000,
        output_tokens: 96,
        cached_predicted: Some(512),
        cached_reported: Some(496),
    };
    let none = ObservedOutcome { ttft: None, itl: None, cached_reported: None, output_tokens: 0, ..fine };
    let outcomes = [fine, ObservedOutcome { retried: true, ..fine }, ObservedOutcome { status: 499, ..none }];
    instance.observe(&mut context(), Moment { now_us: NOW_US, seed: 0x5eed }, &outcomes)
}

/// No write of a probe lasts, and no request is behind it.
fn context() -> DecisionContext<'static> {
    DecisionContext::new(Purpose::Preview)
}

/// Makes one call with made-up facts and checks the form of the answer.
pub(crate) fn call(
    instance: &mut Instance,
    world: World,
    wants: &Wants,
    rows: u32,
) -> Result<Answer, Failure> {
    let sample = SampleCall::new(wants, rows);
    let (call, all) = (sample.call, sample.facts());
    let mut context = context();
    match world {
        World::Filter => {
            let kept = instance.keep(&mut context, &call, &all)?;
            answer_checks::kept(&kept, rows as usize)?;
            Ok(Answer::Rows(kept))
        }
        World::Scorer => {
            let costs = instance.score(&mut context, &call, &all)?;
            answer_checks::costs(&costs, rows as usize)?;
            Ok(Answer::Costs(costs.into_iter().map(f32::to_bits).collect()))
        }
        World::Selector => Ok(Answer::Decision(match instance.select(&mut context, &call, &all)? {
            Decision::Choose { row, costs, reason } => {
                answer_checks::choice(row, &costs, rows as usize)?;
                Decision::Choose { row, costs, reason }
            }
            Decision::Shed(shed) => Decision::Shed(answer_checks::shed(shed)?),
            Decision::Abstain => Decision::Abstain,
        })),
        World::DecodeOverride => {
            let SampleCall { request, candidates, decode, .. } = &sample;
            let plan = instance.decide(&mut context, &call, request, decode, candidates)?;
            let plan = answer_checks::plan(plan)?;
            let over =
                instance.decode_config(&mut context, &Call { rows: 0, leg: Leg::Decode, ..call }, request)?;
            over.check().map_err(Failure::Invalid)?;
            Ok(Answer::Plan(plan, over))
        }
    }
}

fn request_facts(wants: &Wants) -> Vec<u32> {
    let value = |name: &str, ty| match (name, ty) {
        ("block-size", _) => vec![16],
        ("prompt-tokens", _) => vec![8_000],
        ("request-blocks", _) => vec![500],
        (_, FactType::U32) => vec![1],
        (_, FactType::F32) => vec![0.5_f32.to_bits()],
        (_, FactType::U64) => vec![7, 0],
    };
    wants.request.iter().flat_map(|fact| value(fact.name(), fact.ty())).collect()
}

/// Columns that differ by row: the first row all zeros, the last one at the end of what a fact can be.
fn worker_facts(wants: &Wants, rows: u32) -> Vec<u32> {
    let mut columns = Vec::with_capacity(wants.worker_width() * rows as usize);
    for (place, column) in (1_u32..).zip(&wants.worker) {
        let row_value = |row: u32| match row {
            0 => 0,
            row if row + 1 == rows => 100_000,
            row => (row * 37 + place * 11) % 97,
        };
        match column.ty() {
            FactType::U32 if is_flag(column) => columns.extend((0..rows).map(|row| row % 2)),
            FactType::U32 => columns.extend((0..rows).map(row_value)),
            #[expect(clippy::cast_precision_loss, reason = "made-up numbers below 2^24")]
            FactType::F32 => {
                columns.extend((0..rows).map(|row| (row_value(row) as f32 / 100_000.0).to_bits()))
            }
            FactType::U64 => {
                columns.extend((0..rows).map(row_value));
                columns.extend((0..rows).map(|_| 0));
            }
        }
    }
    columns
}

fn is_flag(column: &WorkerColumn) -> bool {
    matches!(
        column,
        WorkerColumn::LabelIs { .. }
            | WorkerColumn::TaintIs(_)
            | WorkerColumn::Fact(
                WorkerFact::LoraLoaded | WorkerFact::SessionBound | WorkerFact::LocalPrefill
            )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinary_call_differs_only_in_the_two_facts_that_cost_a_policy_time() {
        let wants = Wants::resolve(
            &["session-hash", "explain", "n"],
            &["worker-id", "taint-preference", "active-requests"],
        );
        let wants = wants.expect("known");
        let (probe, ordinary) = (SampleCall::new(&wants, 3), SampleCall::ordinary(&wants, 3));
        assert_eq!((&probe.request[..], &ordinary.request[..]), (&[7, 0, 1, 1][..], &[7, 0, 0, 1][..]));
        assert_eq!(ordinary.candidates[6..9], [0, 0, 0]);
        assert_ne!(probe.candidates[6..9], [0, 0, 0]);
        assert_eq!(probe.candidates[..6], ordinary.candidates[..6]);
        assert_eq!(probe.candidates[9..], ordinary.candidates[9..]);
        assert_eq!((ordinary.facts().len(), ordinary.decode.len()), (16, 4));
    }
}
