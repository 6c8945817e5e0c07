//! The shadow of a slot: runs on the facts of a decision that is already made. Its answer is compared and
//! counted, and never acted on. Beside a canary it is not counted: the shadow is tried against the active
//! generation.

use tokio::time::Instant;

use crate::{
    buffers::BufferPool,
    context::{DecisionContext, Purpose},
    decision_facts::DecisionFacts,
    native::Cursors,
    policy::Failure,
    program::{FailedCall, Run, Verdict},
    receipt::ShadowResult,
    slot::{GenerationHandle, Lane, Program, ShadowVerdict},
};

/// Runs the shadow over `rows` and compares its choice with the row and lane of `chosen`. `None` when the
/// shadow was not called. `cached_known`: the facts contain the cached blocks.
pub(super) fn compare(
    shadow: &GenerationHandle,
    facts: &DecisionFacts<'_>,
    cursors: &Cursors,
    rows: &[u32],
    (chosen, lane): (u32, Lane),
    cached_known: bool,
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
        run.run(&shadow.program, &mut buffers.rows)
    });
    if !matches!(shadow.program, Program::Native(_)) {
        verdict.count(shadow, started.elapsed());
    }
    let shadow_verdict = match &verdict {
        Verdict::Row(row, _) if *row == chosen => ShadowVerdict::Agrees,
        Verdict::Failed(FailedCall { failure: Failure::NotReady, .. }) => return None,
        Verdict::Failed(_) => ShadowVerdict::Failed,
        _ => ShadowVerdict::Disagrees,
    };
    if lane == Lane::Active {
        shadow.agreement.note(shadow_verdict);
    }
    let row = match verdict {
        Verdict::Row(row, _) => Some(row),
        _ => None,
    };
    let choice = row.and_then(|row| facts.candidate_id(row));
    let cached_blocks = row.filter(|_| cached_known).map(|row| facts.cached(row));
    let agrees = shadow_verdict == ShadowVerdict::Agrees;
    Some(ShadowResult { generation: shadow.generation, choice, plan: None, agrees, cached_blocks })
}
