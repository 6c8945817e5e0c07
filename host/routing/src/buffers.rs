//! Buffers of one decision, reused by the decisions that follow on the same thread.
//!
//! A decision allocates nothing that grows with the number of candidates. Decisions nest (a decode override
//! previews the decode leg, a shadow runs beside the generation that serves), and each takes a set of its
//! own.

use std::{cell::RefCell, sync::Arc};

use crate::{
    decisions::Recorder, inputs::Inputs, short_list::ShortList, slot::ProgramSummary,
    state_accesses::StateAccesses,
};

/// Sets that a thread keeps: the deepest nesting is three.
const MAX_FREE_SETS: usize = 4;

thread_local! {
    #[expect(clippy::vec_box, reason = "a set is large, and each decision takes and returns it")]
    static FREE_SETS: RefCell<Vec<Box<DecisionBuffers>>> = const { RefCell::new(Vec::new()) };
}

/// Buffers of one decision.
#[derive(Default)]
pub(crate) struct DecisionBuffers {
    /// Candidates as positions in the pool, rising. Filters compact them.
    pub(crate) rows: Vec<u32>,
    /// Candidates of the shadow.
    pub(crate) shadow_rows: Vec<u32>,
    pub(crate) inputs: Inputs,
    pub(crate) short_list: ShortList,
    pub(crate) program: ProgramBuffers,
    pub(crate) state_accesses: StateAccesses,
}

/// Buffers of one run of a program.
#[derive(Default)]
pub(crate) struct ProgramBuffers {
    /// The facts that each policy was given.
    pub(crate) recorder: Recorder,
    /// Rows that a filter kept.
    pub(crate) kept: Vec<u32>,
    /// Costs of one scorer.
    pub(crate) scores: Vec<f32>,
    /// Weighted costs of the rows that were ranked last, for receipts.
    pub(crate) costs: Vec<f32>,
}

impl ProgramBuffers {
    /// Starts a run among `rows`.
    pub(crate) fn begin(&mut self, program: &Arc<ProgramSummary>, rows: &[u32]) {
        self.costs.clear();
        self.recorder.begin(program);
        self.recorder.set_candidates(rows);
    }
}

/// The thread's pool of buffer sets.
pub(crate) struct BufferPool;

impl BufferPool {
    /// Runs `decide` with a set of its own, which returns to the pool afterwards.
    pub(crate) fn with_buffers<T>(decide: impl FnOnce(&mut DecisionBuffers) -> T) -> T {
        let mut buffers = FREE_SETS.with_borrow_mut(Vec::pop).unwrap_or_default();
        let answer = decide(&mut buffers);
        buffers.program.recorder.clear();
        FREE_SETS.with_borrow_mut(|free| {
            if free.len() < MAX_FREE_SETS {
                free.push(buffers);
            }
        });
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_decisions_get_different_sets_and_both_are_reused() {
        BufferPool::with_buffers(|outer| {
            outer.rows.extend([1, 2, 3]);
            BufferPool::with_buffers(|inner| {
                assert!(inner.rows.is_empty());
                inner.rows.reserve(1_000);
            });
            assert_eq!(outer.rows, [1, 2, 3]);
            BufferPool::with_buffers(|inner| assert!(inner.rows.capacity() >= 1_000));
        });
        BufferPool::with_buffers(|first| {
            BufferPool::with_buffers(|second| {
                assert!(first.rows.capacity() > 0 && second.rows.capacity() > 0);
            })
        });
    }
}
