//! Why a worker must not be chosen, and what its ranks know of that.

use std::sync::atomic::Ordering;

use super::{Health, Worker};

/// Why a worker must not be chosen now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ineligible {
    /// The worker's facts were not read yet.
    NotReady,
    /// The engine contradicts the worker's description.
    Misconfigured,
    /// The worker does not answer its health checks.
    Unhealthy,
    /// The engine sleeps: it answers its health checks, and requests wait until it is woken.
    Asleep,
    /// An operator paused the engine: it answers its health checks, and requests wait until it resumes.
    EnginePaused,
    /// The worker is draining.
    Draining,
    /// Its last requests or handoffs failed and a breaker is open, a request timed out and another one tries
    /// it now, another worker is asked about its refusal, or the engine has lost the rank. It may still be
    /// chosen if no other worker is left.
    Failing,
    /// Its engine refused a request because it has too much to do, and the pause has not ended.
    Paused,
    /// Requests wait for it, and it makes no progress. It may be chosen if no other worker is left.
    Stuck,
    /// It has reached its limit of concurrent requests.
    AtCapacity,
}

impl Worker {
    /// Returns why the candidate must not be chosen now; `None` if it may.
    #[must_use]
    pub fn ineligible(&self) -> Option<Ineligible> {
        self.ineligible_when(true)
    }

    /// Like [`Worker::ineligible`], for a request that a worker serves although it drains.
    #[must_use]
    pub fn ineligible_although_draining(&self) -> Option<Ineligible> {
        self.ineligible_when(false)
    }

    /// Returns whether the worker drains or leaves. One that contradicts its description is not one of these.
    #[must_use]
    pub fn drains(&self) -> bool {
        (self.draining() || self.leaving()) && !self.is_misconfigured()
    }

    /// Returns whether the worker does not answer its health checks or its last legs failed lately. A worker
    /// that drains may be stopped, and one that contradicts its description is not one of these.
    #[must_use]
    pub fn is_faulty(&self) -> bool {
        let is_meant = self.drains() || self.is_misconfigured();
        !is_meant && (self.health() != Health::Healthy || self.failed_lately())
    }

    fn ineligible_when(&self, drain_counts: bool) -> Option<Ineligible> {
        if self.is_misconfigured() {
            return Some(Ineligible::Misconfigured);
        }
        match self.health() {
            Health::Unknown => return Some(Ineligible::NotReady),
            Health::Unhealthy => return Some(Ineligible::Unhealthy),
            Health::Healthy => {}
        }
        if self.is_asleep() {
            return Some(Ineligible::Asleep);
        }
        if self.is_engine_paused() {
            return Some(Ineligible::EnginePaused);
        }
        if drain_counts && (self.draining() || self.leaving()) {
            return Some(Ineligible::Draining);
        }
        if self.is_ejected() {
            return Some(Ineligible::Stuck);
        }
        // Before `Failing`: a failing worker is tried when no other is left, one that refuses more work is
        // not.
        if self.pause().is_some() {
            return Some(Ineligible::Paused);
        }
        let on_trial = self.state.suspect.load(Ordering::Acquire) && self.own_requests() > 0;
        let is_paused = self.state.breaker.is_paused() || self.state.broken_handoffs.is_paused();
        if on_trial || is_paused || self.state.refusing.is_doubted() {
            return Some(Ineligible::Failing);
        }
        self.is_at_capacity().then_some(Ineligible::AtCapacity)
    }

    /// Returns whether the worker has reached its limit of concurrent requests.
    #[must_use]
    pub fn is_at_capacity(&self) -> bool {
        let taken = || self.active_requests().saturating_add(self.reserved());
        self.spec.max_concurrency.is_some_and(|limit| taken() >= limit)
    }

    /// Returns whether the ranks were updated with the worker's being eligible without a condition.
    pub(super) fn is_surely_eligible(&self) -> bool {
        self.ranks.first().is_some_and(|rank| rank.surely_eligible())
    }

    /// Tells every rank whether it is eligible without a condition: a decision reads that beside the rank's
    /// load, and asks [`Worker::ineligible`] only when it is not so.
    ///
    /// Code that changes an input of [`Worker::ineligible`] calls this afterwards. The lock orders the calls,
    /// so that the last one has seen every change.
    pub(super) fn tell_ranks(&self) {
        let told = self.state.told.lock();
        let conditional = told.is_limited
            || self.state.suspect.load(Ordering::Acquire)
            || self.state.back_pressure.is_noted()
            || self.state.learned_limit.is_noted()
            || self.state.warm_up.runs()
            || self.state.refusing.is_doubted()
            || self.is_failing();
        // The worker's own description may be an earlier one, with a limit.
        let is_eligible = || matches!(self.ineligible(), None | Some(Ineligible::AtCapacity));
        let eligible = !conditional && is_eligible();
        told.tell(eligible, &self.state.lost_ranks);
    }
}

impl Ineligible {
    /// Returns whether the worker cannot serve at all, as opposed to being avoided.
    #[must_use]
    pub fn is_down(self) -> bool {
        matches!(
            self,
            Self::NotReady
                | Self::Misconfigured
                | Self::Unhealthy
                | Self::Asleep
                | Self::EnginePaused
                | Self::Draining
        )
    }

    /// Returns the stable label in metrics and records.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotReady => "not_ready",
            Self::Misconfigured => "misconfigured",
            Self::Unhealthy => "unhealthy",
            Self::Asleep => "asleep",
            Self::EnginePaused => "engine_paused",
            Self::Draining => "draining",
            Self::Failing => "failing",
            Self::Paused => "paused",
            Self::Stuck => "stuck",
            Self::AtCapacity => "at_capacity",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use proptest::prelude::*;

    use super::*;
    use crate::{
        facts::{Contradiction, FactName},
        spec::WorkerSpec,
        worker::Refusal,
    };

    /// A change that decides on eligibility.
    #[derive(Clone, Copy, Debug)]
    enum Change {
        Health(Health),
        Draining(bool),
        Leaving(bool),
        Misconfigured(bool),
        Asleep(bool),
        EnginePaused(bool),
        Outcome(bool),
        Refusal(bool),
        Answered,
        Timeout,
        Ejected(bool),
        /// A handoff broke, or was taken.
        Handoff(bool),
        /// Another worker is asked about a refusal, and takes the request or not.
        Doubt(bool),
        Later,
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            prop_oneof![Just(Health::Healthy), Just(Health::Unhealthy), Just(Health::Unknown)]
                .prop_map(Change::Health),
            any::<bool>().prop_map(Change::Draining),
            any::<bool>().prop_map(Change::Leaving),
            any::<bool>().prop_map(Change::Misconfigured),
            any::<bool>().prop_map(Change::Asleep),
            any::<bool>().prop_map(Change::EnginePaused),
            prop::bool::weighted(0.3).prop_map(Change::Outcome),
            any::<bool>().prop_map(Change::Refusal),
            Just(Change::Answered),
            Just(Change::Timeout),
            any::<bool>().prop_map(Change::Ejected),
            prop::bool::weighted(0.3).prop_map(Change::Handoff),
            any::<bool>().prop_map(Change::Doubt),
            Just(Change::Later),
        ]
    }

    impl Change {
        async fn make(self, worker: &Arc<Worker>) {
            match self {
                Self::Health(health) => _ = worker.set_health(health),
                Self::Draining(on) => worker.set_draining(on),
                Self::Leaving(on) => worker.set_leaving(on),
                Self::Misconfigured(on) => _ = worker.set_contradiction(on.then(contradiction)),
                Self::Asleep(on) => _ = worker.set_asleep(on),
                Self::EnginePaused(on) => _ = worker.set_engine_paused(on),
                Self::Outcome(ok) => worker.note_outcome(ok),
                Self::Refusal(asks) => {
                    let retry_after = asks.then_some(Duration::from_secs(3));
                    let refusal = Refusal { retry_after, is_too_many: false };
                    worker.note_refusal(refusal, tokio::time::Instant::now(), 0);
                }
                Self::Answered => worker.note_answered(),
                Self::Timeout => worker.note_timeout(),
                Self::Ejected(on) => _ = worker.set_ejected(on),
                Self::Handoff(true) => worker.note_handoff_taken(),
                Self::Handoff(false) => worker.charge_broken_handoff(),
                Self::Doubt(takes) => {
                    worker.note_refused_request();
                    let doubt = worker.doubt();
                    assert!(!worker.is_surely_eligible());
                    if takes { _ = doubt.confirm(String::new()) } else { doubt.refute() }
                }
                Self::Later => tokio::time::advance(Duration::from_secs(1)).await,
            }
        }
    }

    fn contradiction() -> Contradiction {
        let [configured, reported] = ["16", "32"].map(str::to_owned);
        Contradiction { fact: FactName::BlockSize, configured, reported, reporter: "/metrics" }
    }

    fn worker(more: &str) -> Worker {
        let flag = format!("id=1,role=decode,engine=vllm,url=http://a:1,dp_size=2{more}");
        Worker::new(WorkerSpec::parse_flag(&flag).unwrap())
    }

    proptest! {
        #[test]
        fn ranks_never_say_eligible_when_the_worker_is_not(
            changes in proptest::collection::vec(change(), 1..60),
            limited in any::<bool>(),
        ) {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_time().start_paused(true).build().unwrap();
            runtime.block_on(async {
                let worker = Arc::new(worker(if limited { ",max_concurrency=1" } else { "" }));
                for change in changes {
                    change.make(&worker).await;
                    let sure = worker.ranks.iter().map(|rank| rank.surely_eligible());
                    let sure: Vec<bool> = sure.collect();
                    assert!(sure == [false; 2] || worker.ineligible().is_none(), "after {change:?}");
                    // Nothing is asked of the worker while it is well.
                    let suspect = worker.state.suspect.load(Ordering::Relaxed);
                    let refused = worker.state.back_pressure.is_noted() || worker.state.learned_limit.is_noted();
                    let conditional = limited || suspect || refused || worker.is_failing();
                    let well = worker.ineligible().is_none() && !conditional;
                    assert_eq!(sure, [well; 2], "after {change:?}");
                }
            });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_refuses_again_and_again_is_paused_and_not_one_to_try_as_the_last() {
        let worker = worker("");
        worker.set_health(Health::Healthy);
        let mut failures = 0;
        for _ in 0..7 {
            let refusal = Refusal { retry_after: None, is_too_many: false };
            failures += u32::from(worker.note_refusal(refusal, tokio::time::Instant::now(), 0));
            // I13.2
            assert_eq!(worker.ineligible(), Some(Ineligible::Paused));
            tokio::time::advance(worker.pause().unwrap().left).await;
            assert!(worker.pause().is_none());
        }
        assert!(failures > 0 && worker.state.breaker.is_open());
    }

    #[test]
    fn changes_of_several_threads_leave_the_ranks_right() {
        for _ in 0..200 {
            let worker = worker("");
            worker.set_health(Health::Healthy);
            std::thread::scope(|scope| {
                scope.spawn(|| [true, false].map(|on| worker.set_draining(on)));
                scope.spawn(|| [true, false].map(|on| worker.set_leaving(on)));
                scope.spawn(|| (0..6).for_each(|_| worker.note_outcome(false)));
                scope.spawn(|| worker.note_outcome(true));
            });
            let well = worker.ineligible().is_none() && !worker.state.breaker.is_open();
            assert!(worker.ranks.iter().all(|rank| rank.surely_eligible() == well));
        }
    }
}
