//! One shard of the ring: a queue of headers, a ring of words of fixed size that holds their texts and packed
//! inputs, and the ids of candidates that decisions share. New words overwrite those of the oldest decisions.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use pointsman_workers::CandidateIds;

use super::{
    header::{DecisionHeader, Outcome},
    packed::unpack,
    recorder::Recorded,
    shared_ids::SharedIds,
};
use crate::encoding::WordReader;

/// Ids that decisions share take at most this part of a shard's words.
const SHARE_OF_IDS: usize = 8;

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
    headers: VecDeque<Entry>,
    keep: usize,
    next: u64,
    words_ring: Box<[u32]>,
    at: usize,
    shared: SharedIds,
}

#[derive(Debug)]
struct Entry {
    header: DecisionHeader,
    extent: Extent,
    /// The ids that the words have ranges of, when they are shared.
    ids: Option<Arc<CandidateIds>>,
}

/// Position of a decision's words in the ring.
#[derive(Clone, Copy, Debug)]
struct Extent {
    start: usize,
    texts: usize,
    packed: usize,
    /// Copied ids that the words have ranges of.
    ids: usize,
}

impl Extent {
    fn len(&self) -> usize {
        self.texts + self.packed + self.ids
    }
}

impl Shard {
    /// An eighth of the words may be ids that decisions share, the others are those of single decisions.
    pub(super) fn new(keep: usize, words: usize) -> Self {
        let shared = words / SHARE_OF_IDS;
        let ring = Ring {
            numbers: VecDeque::with_capacity(keep),
            headers: VecDeque::with_capacity(keep),
            keep,
            next: 0,
            words_ring: vec![0; words - shared].into_boxed_slice(),
            at: 0,
            shared: SharedIds::new(shared),
        };
        Self { ring: Mutex::new(ring), late_outcomes: Mutex::default() }
    }

    /// The recorded numbers, rising.
    pub(super) fn numbers(&self) -> Vec<u64> {
        let mut numbers = Vec::with_capacity(self.ring.lock().numbers.len());
        numbers.extend(&self.ring.lock().numbers);
        numbers
    }

    /// Returns the `count` greatest recorded numbers, in falling order.
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
    ) -> Option<(DecisionHeader, Vec<u32>, Option<Arc<CandidateIds>>)> {
        let mut ring = self.ring.lock();
        self.add_late_outcomes(&mut ring);
        let position = ring.position(number)?;
        let Entry { header, extent, ids } = ring.headers.get(position)?;
        let stored = ring.words_ring.get(extent.start..extent.start + extent.len())?;
        let (texts, stored) = stored.split_at_checked(extent.texts)?;
        let (packed, copied) = stored.split_at_checked(extent.packed)?;
        let request = WordReader(texts).text().unwrap_or_default();
        wanted(header, &request).then(|| {
            let mut words = texts.to_vec();
            unpack(packed, &mut words);
            let copied = || (extent.ids > 0).then(|| Arc::new(CandidateIds::of_words(copied)));
            (header.clone(), words, ids.clone().or_else(copied))
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
    pub(super) fn push(&mut self, least: u64, mut header: DecisionHeader, recorded: Recorded<'_>) -> u64 {
        let Recorded { texts, mut packed, ids } = recorded;
        let mut shared = ids.filter(|ids| self.shared.hold(ids)).cloned();
        let mut copied = ids.filter(|_| shared.is_none());
        let words =
            |copied: Option<&Arc<CandidateIds>>| copied.map_or(0, |ids| ids.len() * CandidateIds::WIDTH);
        header.inputs_dropped = texts.len() + packed.len() + words(copied) > self.words_ring.len();
        if header.inputs_dropped {
            (packed, copied) = (&[], None);
            shared.take().iter().for_each(|ids| self.shared.release(ids));
        }
        let mut extent = Extent { start: 0, texts: texts.len(), packed: packed.len(), ids: words(copied) };
        extent.start = self.allocate(extent.len());
        let mut at = extent.start;
        let columns = copied.map(|ids| ids.columns()).unwrap_or_default();
        for part in [texts, packed].into_iter().chain(columns) {
            if let Some(space) = self.words_ring.get_mut(at..at + part.len()) {
                space.copy_from_slice(part);
            }
            at += part.len();
        }
        while self.headers.len() >= self.keep.max(1) {
            self.pop();
        }
        let number = self.next.max(least);
        self.next = number + 1;
        self.numbers.push_back(number);
        self.headers.push_back(Entry { header, extent, ids: shared });
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
        while let Some(oldest) = self.headers.front()
            && (self.at..end).contains(&oldest.extent.start)
        {
            self.pop();
        }
    }

    fn pop(&mut self) {
        self.numbers.pop_front();
        if let Some(Entry { ids: Some(ids), .. }) = self.headers.pop_front() {
            self.shared.release(&ids);
        }
    }

    fn position(&self, number: u64) -> Option<usize> {
        // Numbers follow one another, apart from those at which this shard was locked.
        let from_end = usize::try_from(self.next.checked_sub(number)?).ok()?;
        let expected = self.numbers.len().checked_sub(from_end);
        let is_there = |at: &usize| self.numbers.get(*at) == Some(&number);
        expected.filter(is_there).or_else(|| self.numbers.binary_search(&number).ok())
    }

    fn outcome(&mut self, number: u64, outcome: Outcome) {
        let position = self.position(number);
        if let Some(entry) = position.and_then(|position| self.headers.get_mut(position)) {
            entry.header.outcome = Some(outcome);
        }
    }
}
