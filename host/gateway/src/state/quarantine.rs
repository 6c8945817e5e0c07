//! Requests that break engines, by the hash of their body.
//!
//! When two workers break on the same body in the same way, the request is to blame, and the body is refused
//! for a while. A body that any worker served lately is not to blame: engines that fail at random would
//! otherwise take a body with them that many clients send.
//!
//! A decode worker may also break on what a prefill worker hands over. While that may explain the failures,
//! they count against the body only together with a failure of another request.

use std::{
    collections::{HashMap, VecDeque},
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use pointsman_workers::{Leg, WorkerId};
use tokio::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Maximum number of remembered bodies. The oldest is forgotten first.
const MAX_BODIES: usize = 1_024;
/// Number of places for hashes of bodies that were served. A hash replaces the one in its place.
const SERVED: usize = 4_096;

/// Size of each of the three samples of a long body that its hash covers: at the beginning, in the middle and
/// at the end.
const SAMPLE: usize = 8 * 1024;

/// Bodies that broke a worker, and those that are refused.
#[derive(Debug)]
pub(crate) struct Quarantine {
    table: Mutex<Table>,
    /// Number of entries. While it is 0, no request is refused.
    len: AtomicUsize,
    /// Hashes of bodies that were served lately.
    served: Box<[AtomicU64]>,
    /// Random seed of the hashes, so that clients cannot choose bodies whose hashes collide.
    seed: u64,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<u64, Entry>,
    order: VecDeque<u64>,
}

/// A body that broke a worker.
#[derive(Clone, Copy, Debug)]
struct Entry {
    broke: Broke,
    /// Whether two workers broke in this way.
    by_two: bool,
    /// When the entry is forgotten.
    until: Instant,
    /// Whether the body is to blame.
    refused: bool,
    /// How often the worker was charged with the body in the row of its last charge.
    charges: u32,
    /// Charges of the worker that broke before the body was found to be to blame.
    wrong_charges: Option<WrongCharges>,
}

/// Failures that a worker was charged with for a body that turned out to be to blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrongCharges {
    pub(crate) worker: WorkerId,
    pub(crate) number: u32,
    /// The row of its failures that they belong to.
    pub(crate) row: u32,
}

/// A worker that broke, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broke {
    pub(crate) worker: WorkerId,
    /// The leg that it served.
    pub(crate) leg: Leg,
    /// Stable label of the failure.
    pub(crate) way: &'static str,
    /// The prefill worker of its handoff that is to blame, unless the body is.
    pub(crate) blames_prefill: Option<WorkerId>,
    /// Whether it is the first failure of its request.
    pub(crate) is_first: bool,
    /// The row of failures of which the worker is charged with this one, unless the body is to blame; `None`:
    /// it is not charged, or with a broken handoff.
    pub(crate) row: Option<u32>,
}

impl Default for Quarantine {
    fn default() -> Self {
        let served = std::iter::repeat_with(AtomicU64::default).take(SERVED).collect();
        Self { table: Mutex::default(), len: AtomicUsize::new(0), served, seed: rand::random() }
    }
}

impl Quarantine {
    /// Returns whether there is no entry, so that no body is refused.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Relaxed) == 0
    }

    /// Returns the hash of a body. For a long body it covers the length and samples. Every request pays for
    /// the hash, and at 220 KB a hash of the whole body took a tenth of the gateway's CPU time.
    #[must_use]
    pub(crate) fn hash(&self, body: &[u8]) -> u64 {
        if body.len() <= 3 * SAMPLE {
            return xxh3_64_with_seed(body, self.seed);
        }
        let middle = (body.len() - SAMPLE) / 2;
        let starts = [0, middle, body.len() - SAMPLE];
        starts.into_iter().fold(self.seed ^ body.len() as u64, |seed, start| {
            xxh3_64_with_seed(body.get(start..start + SAMPLE).unwrap_or_default(), seed)
        })
    }

    /// Returns for how long a body is refused from now on; `None` if it is not.
    #[must_use]
    pub(crate) fn refuses(&self, hash: u64) -> Option<Duration> {
        let now = Instant::now();
        let table = self.table.lock();
        let entry = table.entries.get(&hash).filter(|entry| entry.refused && entry.until > now)?;
        Some(entry.until - now)
    }

    /// Records that a worker broke on a body. Returns whether the body is to blame. In that case the body is
    /// refused for `keep`.
    pub(crate) fn note(&self, hash: u64, broke: Broke, keep: Duration) -> bool {
        if self.place(hash).is_some_and(|place| place.load(Ordering::Relaxed) == hash) {
            return false;
        }
        let now = Instant::now();
        let mut table = self.table.lock();
        table.forget_expired(now);
        let before = table.entries.get(&hash).copied();
        let same =
            before.filter(|Entry { broke: before, .. }| (before.leg, before.way) == (broke.leg, broke.way));
        let is_other = same.is_some_and(|same| same.broke.worker != broke.worker);
        let by_two = is_other || same.is_some_and(|same| same.by_two);
        let repeats =
            by_two && broke.is_first && same.is_some_and(|same| same.broke.blames_prefill.is_some());
        let refused = before.is_some_and(|before| before.refused)
            || repeats
            || (is_other && broke.blames_prefill.is_none());
        let charged = |broke: Broke| (broke.worker, broke.row);
        let of_row = same.filter(|same| charged(same.broke) == charged(broke));
        let charges = of_row.map_or(0, |same| same.charges) + u32::from(broke.row.is_some());
        let wrong_charges = same.filter(|same| refused && !same.refused && is_other).and_then(|same| {
            let Broke { worker, row, .. } = same.broke;
            Some(WrongCharges { worker, number: same.charges, row: row? })
        });
        let entry = Entry { broke, by_two, until: now + keep, refused, charges, wrong_charges };
        table.entries.insert(hash, entry);
        if before.is_none() {
            table.order.push_back(hash);
        }
        while table.entries.len() > MAX_BODIES {
            let Some(oldest) = table.order.pop_front() else { break };
            table.entries.remove(&oldest);
        }
        self.len.store(table.entries.len(), Ordering::Relaxed);
        refused
    }

    /// Returns, once, what a worker was charged with for a body before that was found to be to blame.
    pub(crate) fn take_wrong_charges(&self, hash: u64) -> Option<WrongCharges> {
        self.table.lock().entries.get_mut(&hash)?.wrong_charges.take()
    }

    /// Acquits the bodies whose failures a prefill worker explains, which turned out to be broken.
    pub(crate) fn acquit_explained(&self, prefill: WorkerId) {
        let mut table = self.table.lock();
        let Table { entries, order } = &mut *table;
        entries.retain(|_, entry| entry.broke.blames_prefill != Some(prefill));
        order.retain(|hash| entries.contains_key(hash));
        self.len.store(entries.len(), Ordering::Relaxed);
    }

    /// Acquits a body that was served, also if it is refused: the request was sent before.
    pub(crate) fn served(&self, hash: u64) {
        if let Some(place) = self.place(hash)
            && place.load(Ordering::Relaxed) != hash
        {
            place.store(hash, Ordering::Relaxed);
        }
        if self.is_empty() {
            return;
        }
        let mut table = self.table.lock();
        table.forget_expired(Instant::now());
        if table.entries.remove(&hash).is_some() {
            table.order.retain(|other| *other != hash);
        }
        self.len.store(table.entries.len(), Ordering::Relaxed);
    }
}

impl Quarantine {
    /// The place of a hash among those that were served.
    fn place(&self, hash: u64) -> Option<&AtomicU64> {
        let place = usize::try_from(hash % SERVED as u64).ok()?;
        self.served.get(place)
    }
}

impl Table {
    /// Forgets the entries at the front that expired. All of them live equally long, unless a body broke
    /// another worker later: it is looked at again then.
    fn forget_expired(&mut self, now: Instant) {
        while let Some(oldest) = self.order.front().copied() {
            match self.entries.get(&oldest) {
                Some(entry) if entry.until > now => return,
                _ => drop(self.entries.remove(&oldest)),
            }
            self.order.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEEP: Duration = Duration::from_secs(60);

    fn broke(worker: u64, kind: &'static str) -> Broke {
        Broke {
            worker: WorkerId(worker),
            leg: Leg::Decode,
            way: kind,
            blames_prefill: None,
            is_first: true,
            row: Some(0),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_is_refused_when_two_workers_broke_on_it_in_the_same_way() {
        let table = Quarantine::default();
        assert!(table.is_empty());
        assert!(!table.note(1, broke(1, "broken"), KEEP));
        assert!(!table.note(1, broke(1, "broken"), KEEP), "the same worker");
        assert!(!table.note(1, broke(2, "status_5xx"), KEEP), "another way");
        assert!(table.note(1, broke(1, "status_5xx"), KEEP));
        assert_eq!((table.refuses(1), table.refuses(2)), (Some(KEEP), None));
        tokio::time::advance(KEEP).await;
        assert_eq!(table.refuses(1), None);
        table.served(2);
        assert!(table.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn i4_what_the_first_worker_was_charged_with_is_told_once_when_the_body_is_to_blame() {
        let table = Quarantine::default();
        let unread = Broke { row: None, ..broke(1, "broken") };
        let later = Broke { row: Some(1), ..broke(1, "broken") };
        for broke in [broke(1, "broken"), later, later, broke(2, "broken"), broke(3, "broken")] {
            table.note(1, broke, KEEP);
            let wrong = WrongCharges { worker: WorkerId(1), number: 2, row: 1 };
            let expected = (broke.worker == WorkerId(2)).then_some(wrong);
            // I4.3
            assert_eq!((table.take_wrong_charges(1), table.take_wrong_charges(1)), (expected, None));
        }
        table.note(2, unread, KEEP);
        assert!(table.note(2, broke(2, "broken"), KEEP));
        assert_eq!(table.take_wrong_charges(2), None, "it was not charged");
    }

    #[tokio::test(start_paused = true)]
    async fn failures_that_a_prefill_worker_explains_count_with_one_of_another_request() {
        let explained = |worker| Broke { blames_prefill: Some(WorkerId(9)), ..broke(worker, "broken") };
        let again = |broke| Broke { is_first: false, ..broke };
        let table = Quarantine::default();
        let refuses = |hash, all: &[Broke]| all.iter().fold(false, |_, broke| table.note(hash, *broke, KEEP));
        // I4.6
        assert!(!refuses(1, &[broke(1, "broken"), again(explained(2))]));
        // I4.7
        assert!(refuses(1, &[explained(2)]));
        table.acquit_explained(WorkerId(8));
        assert_eq!(table.refuses(1), Some(KEEP));
        // I4.8
        table.acquit_explained(WorkerId(9));
        assert_eq!(table.refuses(1), None);
        // I4.7: the worker may be broken
        assert!(!refuses(2, &[explained(1), explained(1), broke(1, "broken")]));
        assert!(!refuses(3, &[explained(1), again(explained(2)), broke(3, "status_5xx")]));
        // I4.6: a local prefill of the same request
        assert!(!refuses(4, &[explained(1), again(broke(1, "broken"))]));
        assert!(refuses(5, &[explained(1), again(broke(2, "broken"))]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_is_served_is_acquitted() {
        let table = Quarantine::default();
        table.note(1, broke(1, "broken"), KEEP);
        table.served(1);
        assert!(table.is_empty());
        assert!(!table.note(1, broke(2, "broken"), KEEP));
        assert!(!table.note(1, broke(3, "broken"), KEEP), "it was served lately");
        // Another body took its place.
        table.served(1 + SERVED as u64);
        assert!(!table.note(1, broke(2, "broken"), KEEP));
        assert!(table.note(1, broke(3, "broken"), KEEP));
        // A request that was sent before is answered.
        table.served(1);
        assert_eq!(table.refuses(1), None);
    }

    #[test]
    fn the_hash_of_a_long_body_covers_its_length_and_its_beginning_middle_and_end() {
        let table = Quarantine::default();
        for len in [3 * SAMPLE, 3 * SAMPLE + 1, 40 * SAMPLE] {
            let body = vec![b'x'; len];
            let mut hashes = vec![table.hash(&body), table.hash(&body[1..])];
            for place in [0, len / 2, len - 1] {
                let mut other = body.clone();
                other[place] = b'y';
                hashes.push(table.hash(&other));
            }
            hashes.sort_unstable();
            hashes.dedup();
            assert_eq!(hashes.len(), 5, "{len}");
            assert_eq!(table.hash(&body), table.hash(&body.clone()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_table_is_bounded_and_forgets_the_oldest_body() {
        let table = Quarantine::default();
        for hash in 0..2 * MAX_BODIES as u64 {
            table.note(hash, broke(1, "broken"), KEEP);
        }
        let inner = table.table.lock();
        assert_eq!((inner.entries.len(), inner.order.len()), (MAX_BODIES, MAX_BODIES));
        assert!(!inner.entries.contains_key(&0));
    }
}
