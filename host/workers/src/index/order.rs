//! In which order runs of engines' blocks give way when room is needed: the least recently used first, from the tail, and none
//! before those that go on from it.
//!
//! Only runs that nothing goes on from at their tail wait here. One that others go on from leaves the line when its turn
//! comes, and is put at its head when the last of them is gone; so each block costs the same, however deep prompts are. A run
//! that grew or was named since its turn began goes to the end once more.

use std::collections::VecDeque;

use super::{Candidate, bytes::heap};

/// A run: its number at its source, and which of the number's owners it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunId {
    pub(super) number: u32,
    pub(super) born: u32,
}

/// Runs that came into the line, or came back.
#[derive(Debug, Default)]
pub(super) struct Ripe {
    /// To the end.
    pub(super) new: Vec<RunId>,
    /// To the head: what went on from them is gone.
    pub(super) again: Vec<RunId>,
}

/// The line.
#[derive(Debug, Default)]
pub(super) struct Order(VecDeque<(Candidate, RunId)>);

impl Order {
    /// Takes in what a source brought about.
    pub(super) fn take(&mut self, candidate: Candidate, ripe: &mut Ripe) {
        let runs = ripe.new.len() + ripe.again.len();
        if self.0.capacity() - self.0.len() < runs {
            self.0.reserve_exact(runs.max(self.0.len() / 4));
        }
        self.0.extend(ripe.new.drain(..).map(|run| (candidate, run)));
        ripe.again.drain(..).for_each(|run| self.0.push_front((candidate, run)));
    }

    pub(super) fn pop(&mut self) -> Option<(Candidate, RunId)> {
        self.0.pop_front()
    }

    /// It was used since: another turn.
    pub(super) fn put_last(&mut self, run: (Candidate, RunId)) {
        self.0.push_back(run);
    }

    /// More of it is left.
    pub(super) fn put_first(&mut self, run: (Candidate, RunId)) {
        self.0.push_front(run);
    }

    /// Drops the places of runs that came and went, when they are more than those that are there.
    pub(super) fn tidy(&mut self, known: usize, stays: impl FnMut(&(Candidate, RunId)) -> bool) {
        if self.0.len() > 2 * known + 4_096 || known == 0 {
            self.0.retain(stays);
            self.0.shrink_to(self.0.len() + self.0.len() / 4);
        }
    }

    /// Bytes that the line takes.
    pub(super) fn bytes(&self) -> usize {
        heap(self.0.capacity() * size_of::<(Candidate, RunId)>())
    }
}
