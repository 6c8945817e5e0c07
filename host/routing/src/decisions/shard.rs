//! One shard: heads in a queue, and their words in a circle of fixed size. What the circle needs next, the oldest give up.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::{DecisionHeader, Outcome, encoding};

#[derive(Debug)]
pub(super) struct Shard {
    pub(super) ring: Mutex<Ring>,
    /// Outcomes that came while the ring was held; written down by whoever holds it next.
    late: Mutex<Vec<(u64, Outcome)>>,
}

#[derive(Debug)]
pub(super) struct Ring {
    /// Rising; beside `heads`, so that they can be searched and copied quickly.
    numbers: VecDeque<u64>,
    heads: VecDeque<(DecisionHeader, Extent)>,
    keep: usize,
    next: u64,
    circle: Box<[u32]>,
    at: usize,
}

/// Where a head's words lie in the circle.
#[derive(Clone, Copy, Debug)]
struct Extent {
    start: usize,
    len: usize,
}

impl Shard {
    pub(super) fn new(keep: usize, words: usize) -> Self {
        let ring = Ring {
            numbers: VecDeque::with_capacity(keep),
            heads: VecDeque::with_capacity(keep),
            keep,
            next: 0,
            circle: vec![0; words].into_boxed_slice(),
            at: 0,
        };
        Self { ring: Mutex::new(ring), late: Mutex::default() }
    }

    /// The numbers kept, rising.
    pub(super) fn numbers(&self) -> Vec<u64> {
        let mut numbers = Vec::with_capacity(self.ring.lock().numbers.len());
        numbers.extend(&self.ring.lock().numbers);
        numbers
    }

    /// The greatest numbers kept, at most `count`, falling.
    pub(super) fn last(&self, count: usize) -> Vec<u64> {
        let mut numbers = Vec::with_capacity(count);
        numbers.extend(self.ring.lock().numbers.iter().rev().take(count));
        numbers
    }

    /// A copy of one decision, when it is wanted.
    pub(super) fn copy(
        &self,
        number: u64,
        wanted: impl FnOnce(&DecisionHeader, &str) -> bool,
    ) -> Option<(DecisionHeader, Vec<u32>)> {
        let mut ring = self.ring.lock();
        self.write_late(&mut ring);
        let place = ring.place(number)?;
        let (head, extent) = ring.heads.get(place)?;
        let words = ring.circle.get(extent.start..extent.start + extent.len)?;
        let request = encoding::first_text(words);
        wanted(head, &request).then(|| (head.clone(), words.to_vec()))
    }

    /// Writes down an outcome, at once or as soon as the ring is free; the caller does not wait for it.
    pub(super) fn outcome(&self, number: u64, outcome: Outcome) {
        match self.ring.try_lock() {
            Some(mut ring) => {
                ring.outcome(number, outcome);
                self.write_late(&mut ring);
            }
            None => self.late.lock().push((number, outcome)),
        }
    }

    fn write_late(&self, ring: &mut Ring) {
        for (number, outcome) in self.late.lock().drain(..) {
            ring.outcome(number, outcome);
        }
    }
}

impl Ring {
    /// Puts a decision in under the next number, which is at least `least`.
    pub(super) fn push(&mut self, least: u64, mut head: DecisionHeader, texts: &[u32], words: &[u32]) -> u64 {
        head.cut = texts.len() + words.len() > self.circle.len();
        let words = if head.cut { &[] } else { words };
        let len = texts.len() + words.len();
        let start = self.room(len);
        if let Some(space) = self.circle.get_mut(start..start + len)
            && let Some((front, back)) = space.split_at_mut_checked(texts.len())
        {
            front.copy_from_slice(texts);
            back.copy_from_slice(words);
        }
        while self.heads.len() >= self.keep.max(1) {
            self.pop();
        }
        let number = self.next.max(least);
        self.next = number + 1;
        self.numbers.push_back(number);
        self.heads.push_back((head, Extent { start, len }));
        number
    }

    /// Makes room for `len` words, at most the circle's: whoever lies there is dropped, and all that are older.
    fn room(&mut self, len: usize) -> usize {
        if self.at + len > self.circle.len() {
            // From the start again. What lies between here and the end is older than what lies there.
            self.free_until(self.circle.len());
            self.at = 0;
        }
        let start = self.at;
        self.free_until(start + len);
        self.at = start + len;
        start
    }

    /// Drops the oldest as long as they lie between the writing place and `end`.
    fn free_until(&mut self, end: usize) {
        while let Some((_, oldest)) = self.heads.front()
            && (self.at..end).contains(&oldest.start)
        {
            self.pop();
        }
    }

    fn pop(&mut self) {
        self.numbers.pop_front();
        self.heads.pop_front();
    }

    fn place(&self, number: u64) -> Option<usize> {
        self.numbers.binary_search(&number).ok()
    }

    fn outcome(&mut self, number: u64, outcome: Outcome) {
        let place = self.place(number);
        if let Some((head, _)) = place.and_then(|place| self.heads.get_mut(place)) {
            head.outcome = Some(outcome);
        }
    }
}
