//! Order in which blocks reported by engines are evicted: least recently used first, from the tail of a run,
//! and no block before the blocks that follow it.
//!
//! Only runs whose tail has no successor are queued. A run with a successor leaves the queue when its turn
//! comes, and is put at the head when its last successor is gone. So evicting a block costs the same however
//! deep prompts are. A run that was used since it was queued goes to the back once more (second chance).

use std::collections::VecDeque;

use super::{Candidate, memory::heap};

/// Identifies a run of one engine cache. Numbers are reused; `born` distinguishes the users of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunId {
    pub(super) number: u32,
    pub(super) born: u32,
}

/// Runs of one engine cache that have to be queued.
#[derive(Debug, Default)]
pub(super) struct Queueable {
    /// New runs. They are evicted last.
    pub(super) new: Vec<RunId>,
    /// Runs whose last successor was removed. They are evicted next.
    pub(super) exposed: Vec<RunId>,
}

/// The runs of all candidates, next victim first.
#[derive(Debug, Default)]
pub(super) struct EvictionQueue(VecDeque<(Candidate, RunId)>);

impl EvictionQueue {
    /// Moves the runs of `queueable` into the queue.
    pub(super) fn enqueue(&mut self, candidate: Candidate, queueable: &mut Queueable) {
        let runs = queueable.new.len() + queueable.exposed.len();
        if self.0.capacity() - self.0.len() < runs {
            self.0.reserve_exact(runs.max(self.0.len() / 4));
        }
        self.0.extend(queueable.new.drain(..).map(|run| (candidate, run)));
        queueable.exposed.drain(..).for_each(|run| self.0.push_front((candidate, run)));
    }

    pub(super) fn pop(&mut self) -> Option<(Candidate, RunId)> {
        self.0.pop_front()
    }

    /// Gives a run that was used a second chance.
    pub(super) fn push_back(&mut self, run: (Candidate, RunId)) {
        self.0.push_back(run);
    }

    /// Puts a run back after only some of its blocks were evicted.
    pub(super) fn push_front(&mut self, run: (Candidate, RunId)) {
        self.0.push_front(run);
    }

    /// Removes entries of runs that no longer exist, once there are more of them than of the `known` runs.
    pub(super) fn compact(&mut self, known: usize, exists: impl FnMut(&(Candidate, RunId)) -> bool) {
        if self.0.len() > 2 * known + 4_096 || known == 0 {
            self.0.retain(exists);
            self.0.shrink_to(self.0.len() + self.0.len() / 4);
        }
    }

    /// Returns the bytes that the queue takes on the heap.
    pub(super) fn bytes(&self) -> usize {
        heap(self.0.capacity() * size_of::<(Candidate, RunId)>())
    }
}
