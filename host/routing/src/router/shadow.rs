//! The shadow of a slot: runs on the facts of a decision that is already made. Its answer is compared and
//! counted, and never acted on. Beside a canary it is not counted: the shadow is tried against the active
//! generation.

use tokio::time::Instant;

use crate::{
    buffers::BufferPool,
    context::{DecisionContext, Purpose},
    decision_facts::DecisionFacts,
    decisions::{Recorder, SHADOW},
    native::Cursors,
    policy::Failure,
    program::{FailedCall, Run, Verdict},
    receipt::{ShadowAnswer, ShadowResult},
    slot::{GenerationHandle, Lane, Program, ShadowVerdict},
};

/// What was decided, with which a shadow's choice is compared.
#[derive(Clone, Copy)]
pub(super) struct Made {
    pub(super) row: u32,
    pub(super) lane: Lane,
    /// Whether the facts contain the cached blocks.
    pub(super) cached_known: bool,
}

/// Runs the shadow over `rows` and compares its choice with what was `made`. `None` when the shadow was not
/// called. The facts that a failed call got go to the recorder of the decision.
pub(super) fn compare(
    shadow: &GenerationHandle,
    facts: &DecisionFacts<'_>,
    cursors: &Cursors,
    rows: &[u32],
    made: Made,
    recorder: &mut Recorder,
) -> Option<ShadowResult> {
    if !shadow.breaker.try_call() {
        return None;
    }
    let started = Instant::now();
    let verdict = BufferPool::with_buffers(|buffers| {
        buffers.rows.clear();
        buffers.rows.extend_from_slice(rows);
        buffers.program.begin(&shadow.summary, rows);
        let mut context = DecisionContext::new(Purpose::Shadow)
            .with_generation(shadow.generation)
            .with_request_id(facts.query.request_id);
        let mut run = Run { facts, cursors, context: &mut context, buffers: &mut buffers.program };
        let verdict = run.run(&shadow.program, &mut buffers.rows);
        if let Verdict::Failed(FailedCall { step, failure }) = &verdict
            && *failure != Failure::NotReady
            && let Some(policy) = shadow.summary.policies.get(*step as usize)
        {
            let (wants, rows) = (&policy.wants, &buffers.rows);
            recorder.stage(SHADOW + step, rows, |out| facts.write(wants, rows, out));
        }
        verdict
    });
    if !matches!(shadow.program, Program::Native(_)) {
        verdict.count(shadow, started.elapsed(), facts.query.request_id);
    }
    let (shadow_verdict, answer) = match &verdict {
        Verdict::Row(row, _) if *row == made.row => (ShadowVerdict::Agrees, ShadowAnswer::Chose),
        Verdict::Row(..) => (ShadowVerdict::Disagrees, ShadowAnswer::Chose),
        Verdict::Abstained => (ShadowVerdict::Disagrees, ShadowAnswer::Abstained),
        Verdict::Shed(shed) => (ShadowVerdict::Refuses, ShadowAnswer::refused(shed)),
        Verdict::NoRowLeft => (ShadowVerdict::Refuses, ShadowAnswer::NobodyLeft),
        Verdict::Failed(FailedCall { failure: Failure::NotReady, .. }) => return None,
        Verdict::Failed(FailedCall { failure, .. }) => (ShadowVerdict::Failed, ShadowAnswer::failed(failure)),
    };
    if made.lane == Lane::Active {
        shadow.agreement.note(shadow_verdict);
    }
    let row = match verdict {
        Verdict::Row(row, _) => Some(row),
        _ => None,
    };
    let choice = row.and_then(|row| facts.candidate_id(row));
    let cached_blocks = row.filter(|_| made.cached_known).map(|row| facts.cached(row));
    let agrees = shadow_verdict == ShadowVerdict::Agrees;
    let generation = shadow.generation;
    Some(ShadowResult { generation, answer, choice, plan: None, agrees, cached_blocks })
}
