//! Handoffs on which decode workers break before their first token. The prefill worker answered well, and may
//! still be the cause: what it hands over cannot be loaded.
//!
//! One failure does not show which worker of the pair is to blame. The prefill worker is when two decode
//! workers broke on its handoffs since one of them was taken, and both on no other prefill worker's since
//! they took one. Otherwise the decode worker is charged, as with any other failure.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use super::Worker;
use crate::{
    breaker::{Breaker, BreakerRules},
    id::WorkerId,
};

/// Partners that show a fault of a worker. More are not remembered.
const ENOUGH: usize = 2;

/// The handoffs of a worker, to it or from it, that broke since one was taken.
#[derive(Debug)]
pub(super) struct BrokenHandoffs {
    /// Opens when they are this worker's fault. A prefill that succeeds does not close it.
    breaker: Breaker,
    /// Whether one broke. Handoffs that are taken read this and nothing else while it is false.
    any: AtomicBool,
    /// Prefill workers on whose handoffs this decode worker broke.
    sources: Mutex<Vec<WorkerId>>,
    /// Decode workers that broke on handoffs of this prefill worker alone. Locked before their `sources`.
    witnesses: Mutex<Vec<Weak<Worker>>>,
}

impl BrokenHandoffs {
    pub(super) fn new() -> Self {
        Self {
            // Handoffs that are taken are not counted, so there is no rate.
            breaker: Breaker::new(BreakerRules { failure_rate: None, ..BreakerRules::WORKER }),
            any: AtomicBool::new(false),
            sources: Mutex::default(),
            witnesses: Mutex::default(),
        }
    }

    /// Whether this worker is to blame for several in a row.
    pub(super) fn is_open(&self) -> bool {
        self.breaker.is_open()
    }

    /// Like [`Self::is_open`], but only until so long after the pause.
    pub(super) fn is_open_until(&self, after_pause: Duration) -> bool {
        self.breaker.is_open_until(after_pause)
    }

    /// Like [`Self::is_open`], until the pause ends.
    pub(super) fn is_paused(&self) -> bool {
        self.breaker.is_paused()
    }

    fn add_source(&self, prefill: WorkerId) {
        let mut sources = self.sources.lock();
        if sources.len() < ENOUGH && !sources.contains(&prefill) {
            sources.push(prefill);
        }
    }

    fn are_all_from(&self, prefill: WorkerId) -> bool {
        self.sources.lock().iter().all(|source| *source == prefill)
    }
}

impl Worker {
    /// Reports that `decode` broke on a handoff of this worker before its first token. Returns whether this
    /// worker is to blame, unless the request is.
    #[must_use]
    pub fn note_handoff_broke(&self, decode: &Arc<Self>) -> bool {
        decode.state.broken_handoffs.add_source(self.id());
        decode.state.broken_handoffs.any.store(true, Ordering::Release);
        self.state.broken_handoffs.any.store(true, Ordering::Release);
        let mut witnesses = self.state.broken_handoffs.witnesses.lock();
        let is_one = |worker: &Weak<Self>| {
            worker.upgrade().is_some_and(|worker| worker.state.broken_handoffs.are_all_from(self.id()))
        };
        witnesses.retain(is_one);
        let is_known = witnesses.iter().any(|worker| worker.as_ptr() == Arc::as_ptr(decode));
        let is_witness = decode.state.broken_handoffs.are_all_from(self.id());
        if !is_known && witnesses.len() < ENOUGH && is_witness {
            witnesses.push(Arc::downgrade(decode));
        }
        witnesses.len() >= ENOUGH && is_witness
    }

    /// Charges this prefill worker with a handoff that broke. The decode workers that were charged before are
    /// not any more.
    pub fn charge_as_source(&self) {
        self.charge_broken_handoff();
        let witnesses = self.state.broken_handoffs.witnesses.lock().clone();
        for worker in witnesses.iter().filter_map(Weak::upgrade) {
            worker.state.broken_handoffs.breaker.record_success(0);
            worker.forget_failure();
            worker.tell_ranks();
        }
    }

    /// Charges this worker with a handoff that broke. Several in a row leave it out for a pause.
    pub fn charge_broken_handoff(&self) {
        self.state.broken_handoffs.breaker.record_failure(0);
        self.state.broken_handoffs.any.store(true, Ordering::Release);
        self.tell_ranks();
    }

    /// Reports that a handoff, to this worker or from it, was taken.
    pub fn note_handoff_taken(&self) {
        let BrokenHandoffs { breaker, any, sources, witnesses } = &self.state.broken_handoffs;
        // Read first: threads share the flag, and it is almost never set.
        if any.load(Ordering::Relaxed) && any.swap(false, Ordering::AcqRel) {
            sources.lock().clear();
            witnesses.lock().clear();
            breaker.record_success(0);
            self.forget_failure();
            self.tell_ranks();
        }
    }

    /// Returns whether this worker is failing because several decode workers break on its handoffs.
    #[must_use]
    pub fn breaks_decode(&self) -> bool {
        self.state.broken_handoffs.is_open() && self.state.broken_handoffs.witnesses.lock().len() >= ENOUGH
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        spec::WorkerSpec,
        worker::{Health, Ineligible},
    };

    fn worker(id: u64, role: &str) -> Arc<Worker> {
        let flag = format!("id={id},role={role},engine=vllm,url=http://a:{id}");
        let worker = Arc::new(Worker::new(WorkerSpec::parse_flag(&flag).unwrap()));
        worker.set_health(Health::Healthy);
        worker
    }

    fn fleet() -> ([Arc<Worker>; 2], [Arc<Worker>; 2]) {
        ([1, 2].map(|id| worker(id, "prefill")), [3, 4].map(|id| worker(id, "decode")))
    }

    /// Reports what the gateway does when a handoff broke. Returns whether the prefill worker is to blame.
    fn breaks(prefill: &Worker, decode: &Arc<Worker>) -> bool {
        let is_to_blame = prefill.note_handoff_broke(decode);
        if is_to_blame {
            prefill.charge_as_source()
        } else {
            decode.charge_broken_handoff()
        }
        is_to_blame
    }

    fn takes(prefill: &Worker, decode: &Worker) {
        [prefill, decode].into_iter().for_each(Worker::note_handoff_taken);
    }

    #[test]
    fn e6_a_prefill_worker_whose_handoffs_two_decode_workers_break_on_is_charged_instead_of_them() {
        let ([bad, good], [one, two]) = fleet();
        for _ in 0..5 {
            assert!(!breaks(&bad, &one), "it may be the decode worker");
        }
        assert_eq!(one.ineligible(), Some(Ineligible::Failing));
        // E6.12
        assert!(breaks(&bad, &two));
        assert_eq!((one.ineligible(), one.is_failing(), two.is_failing()), (None, false, false));
        for decode in [&one, &two] {
            takes(&good, decode);
            assert!(breaks(&bad, decode), "what they take from others says nothing for it");
        }
        assert!(!bad.is_failing());
        // E6.12: five in a row, while its prefills succeed
        for decode in [&one, &two] {
            bad.note_outcome(true);
            breaks(&bad, decode);
        }
        assert_eq!((bad.ineligible(), bad.breaks_decode()), (Some(Ineligible::Failing), true));
        assert!([&good, &one, &two].iter().all(|worker| !worker.is_failing() && !worker.breaks_decode()));
        takes(&bad, &one);
        assert_eq!((bad.ineligible(), bad.is_failing(), bad.breaks_decode()), (None, false, false));
        assert!(!breaks(&bad, &one), "it begins anew");
    }

    #[test]
    fn e6_a_decode_worker_that_breaks_on_handoffs_of_two_prefill_workers_is_charged() {
        let ([first, second], [bad, good]) = fleet();
        for prefill in [&first, &second, &first, &second, &first] {
            // E6.12
            assert!(!breaks(prefill, &bad));
        }
        assert!(bad.is_failing());
        assert!(!breaks(&first, &good), "the other one is no witness");
        assert!(!first.is_failing() && !second.is_failing());
    }

    #[test]
    fn e6_a_pair_that_cannot_transfer_does_not_eject_its_prefill_worker() {
        let ([first, second], [one, two]) = fleet();
        for _ in 0..20 {
            // E6.12
            assert!(!breaks(&first, &one));
            takes(&second, &one);
            takes(&first, &two);
        }
        assert!([&first, &second, &one, &two].iter().all(|worker| !worker.is_failing()));
    }

    #[test]
    fn what_is_remembered_of_broken_handoffs_is_bounded() {
        let prefill: Vec<_> = (1..21).map(|id| worker(id, "prefill")).collect();
        let decode: Vec<_> = (21..41).map(|id| worker(id, "decode")).collect();
        for (one, other) in decode.iter().flat_map(|one| prefill.iter().map(move |other| (one, other))) {
            breaks(other, one);
        }
        for decode in &decode {
            takes(&prefill[0], decode);
        }
        for decode in &decode {
            breaks(&prefill[0], decode);
        }
        let kept = |worker: &Arc<Worker>| {
            let BrokenHandoffs { sources, witnesses, .. } = &worker.state.broken_handoffs;
            sources.lock().len().max(witnesses.lock().len())
        };
        assert!(prefill.iter().chain(&decode).map(kept).all(|kept| kept <= ENOUGH));
    }
}
