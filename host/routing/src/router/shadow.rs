//! The shadow's word on a decision that is already made: asked on the same facts, compared, counted, never acted on.

use tokio::time::Instant;

use super::{Purpose, Router, needs, note};
use crate::{
    facts::columns::{DecisionFacts, Needs},
    policy::Failure,
    program::{Buffers, Run, Verdict},
    query::CandidateId,
    receipt::ShadowResult,
    scope::Scope,
    slot::{GenerationHandle, Program, ShadowVerdict},
};

/// Buffers of the shadow's run: what the active one left in its own (costs, rows) belongs to the receipt.
#[derive(Default)]
pub(super) struct Beside {
    rows: Vec<u32>,
    buffers: Buffers,
}

impl Beside {
    /// Keeps the rows as they are before the active one's filters; what the shadow needs besides.
    pub(super) fn begin(&mut self, shadow: Option<&GenerationHandle>, rows: &[u32]) -> Needs {
        self.rows.clear();
        let Some(shadow) = shadow else { return Needs::default() };
        self.rows.extend_from_slice(rows);
        needs(&shadow.program)
    }

    /// The rows it keeps; `rows` when there is no shadow.
    pub(super) fn rows_or<'a>(&'a self, rows: &'a [u32]) -> &'a [u32] {
        if self.rows.is_empty() { rows } else { &self.rows }
    }

    /// Asks the shadow where the request would have gone; `chosen` is where it goes. `None` when it was not asked.
    pub(super) fn ask(
        &mut self,
        router: &Router,
        shadow: &GenerationHandle,
        gathered: &DecisionFacts<'_>,
        chosen: u32,
    ) -> Option<ShadowResult> {
        if !shadow.breaker.try_call() {
            return None;
        }
        let started = Instant::now();
        let Self { rows, buffers } = self;
        buffers.recorder.begin(&shadow.summary, rows);
        // A preview moves no round-robin cursor, and leaves the slot's state as it is.
        let _scope = Scope::decision(shadow.generation, true, gathered.query.request_id);
        let purpose = Purpose::Preview;
        let verdict = Run { active: shadow, gathered, cursors: &router.cursors, buffers, purpose }.run(rows);
        if !matches!(shadow.program, Program::Native(_)) {
            note(shadow, &verdict, started.elapsed());
        }
        let opinion = match &verdict {
            Verdict::Row(row, _) if *row == chosen => ShadowVerdict::Agrees,
            Verdict::Failed(Failure::NotReady) => return None,
            Verdict::Failed(_) => ShadowVerdict::Failed,
            _ => ShadowVerdict::Disagrees,
        };
        shadow.agreement.note(opinion);
        let id = |row: u32| -> Option<CandidateId> {
            let candidate = gathered.pool.get(row as usize)?;
            Some((candidate.worker.id(), candidate.rank))
        };
        let choice = match verdict {
            Verdict::Row(row, _) => id(row),
            _ => None,
        };
        Some(ShadowResult { generation: shadow.generation, choice, agrees: opinion == ShadowVerdict::Agrees })
    }
}
