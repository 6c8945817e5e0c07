//! One shard of the ring: a queue of headers, and a ring of words of fixed size that holds their texts and
//! packed inputs. New words overwrite those of the oldest decisions.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::{
    header::{DecisionHeader, Outcome},
    packed::unpack,
};
use crate::encoding::WordReader;

#[derive(Debug)]
pub(super) struct Shard {
    pub(super) ring: Mutex<Ring>,
    /// Outcomes that arrived while the ring was locked; the next lock holder adds them.
    late_outcomes: Mutex<Vec<(u64, Outcome)>>,
}

#[derive(Debug)]
pub(super) struct Ring {
    /// Rising, parallel to `headers`, so that they can be searched and copied quickly.
    numbers: VecDeque<u64>,
    headers: VecDeque<(DecisionHeader, Extent)>,
    keep: usize,
    next: u64,
    words_ring: Box<[u32]>,
    at: usize,
}

/// Position of a decision's words in the ring.
#[derive(Clone, Copy, Debug)]
struct Extent {
    start: usize,
    texts: usize,
    packed: usize,
}

impl Shard {
    pub(super) fn new(keep: usize, words: usize) -> Self {
        let ring = Ring {
            numbers: VecDeque::with_capacity(keep),
            headers: VecDeque::with_capacity(keep),
            keep,
            next: 0,
            words_ring: vec![0; words].into_boxed_slice(),
            at: 0,
        };
        Self { ring: Mutex::new(ring), late_outcomes: Mutex::default() }
    }

    /// The recorded numbers, rising.
    pub(super) fn numbers(&self) -> Vec<u64> {
        let mut numbers = Vec::with_capacity(self.ring.lock().numbers.len());
        numbers.extend(&self.ring.lock().numbers);
        numbers
    }

    /// The `count` greatest recorded numbers, falling.
    pub(super) fn last(&self, count: usize) -> Vec<u64> {
        let mut numbers = Vec::with_capacity(count);
        numbers.extend(self.ring.lock().numbers.iter().rev().take(count));
        numbers
    }

    /// Copies one decision, when it is wanted.
    pub(super) fn copy(
        &self,
        number: u64,
        wanted: impl FnOnce(&DecisionHeader, &str) -> bool,
    ) -> Option<(DecisionHeader, Vec<u32>)> {
        let mut ring = self.ring.lock();
        self.add_late_outcomes(&mut ring);
        let position = ring.position(number)?;
        let (header, extent) = ring.headers.get(position)?;
        let stored = ring.words_ring.get(extent.start..extent.start + extent.texts + extent.packed)?;
        let (texts, packed) = stored.split_at_checked(extent.texts)?;
        let request = WordReader(texts).text().unwrap_or_default();
        wanted(header, &request).then(|| {
            let mut words = texts.to_vec();
            unpack(packed, &mut words);
            (header.clone(), words)
        })
    }

    /// Adds an outcome, now or when the ring is next unlocked. Never waits.
    pub(super) fn outcome(&self, number: u64, outcome: Outcome) {
        match self.ring.try_lock() {
            Some(mut ring) => {
                ring.outcome(number, outcome);
                self.add_late_outcomes(&mut ring);
            }
            None => self.late_outcomes.lock().push((number, outcome)),
        }
    }

    fn add_late_outcomes(&self, ring: &mut Ring) {
        for (number, outcome) in self.late_outcomes.lock().drain(..) {
            ring.outcome(number, outcome);
        }
    }
}

impl Ring {
    /// Adds a decision under the next number, which is at least `least`.
    pub(super) fn push(
        &mut self,
        least: u64,
        mut header: DecisionHeader,
        texts: &[u32],
        packed: &[u32],
    ) -> u64 {
        header.inputs_dropped = texts.len() + packed.len() > self.words_ring.len();
        let packed = if header.inputs_dropped { &[] } else { packed };
        let len = texts.len() + packed.len();
        let start = self.allocate(len);
        if let Some(space) = self.words_ring.get_mut(start..start + len)
            && let Some((front, back)) = space.split_at_mut_checked(texts.len())
        {
            front.copy_from_slice(texts);
            back.copy_from_slice(packed);
        }
        while self.headers.len() >= self.keep.max(1) {
            self.pop();
        }
        let number = self.next.max(least);
        self.next = number + 1;
        self.numbers.push_back(number);
        self.headers.push_back((header, Extent { start, texts: texts.len(), packed: packed.len() }));
        number
    }

    /// Frees `len` words, at most the ring's length, and returns their position. Drops the decisions that
    /// they belonged to and all older ones.
    fn allocate(&mut self, len: usize) -> usize {
        if self.at + len > self.words_ring.len() {
            // Wrap around. The decisions between here and the end are older than those at the start.
            self.free_until(self.words_ring.len());
            self.at = 0;
        }
        let start = self.at;
        self.free_until(start + len);
        self.at = start + len;
        start
    }

    /// Drops the oldest decisions that lie between the write position and `end`.
    fn free_until(&mut self, end: usize) {
        while let Some((_, oldest)) = self.headers.front()
            && (self.at..end).contains(&oldest.start)
        {
            self.pop();
        }
    }

    fn pop(&mut self) {
        self.numbers.pop_front();
        self.headers.pop_front();
    }

    fn position(&self, number: u64) -> Option<usize> {
        self.numbers.binary_search(&number).ok()
    }

    fn outcome(&mut self, number: u64, outcome: Outcome) {
        let position = self.position(number);
        if let Some((header, _)) = position.and_then(|position| self.headers.get_mut(position)) {
            header.outcome = Some(outcome);
        }
    }
}
