//! Endpoints that engines lack: they answered a request with 404 that another engine took.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use arc_swap::ArcSwap;
use pointsman_workers::{Leg, Snapshot, Worker, WorkerId};
use tokio::time::Instant;

/// How long it is remembered.
const KEPT: Duration = Duration::from_mins(5);
/// How often a request may go to such an engine meanwhile. A proxy may have answered in its place.
const TRIAL_INTERVAL: Duration = Duration::from_secs(10);

/// The workers that lack an endpoint.
#[derive(Debug, Default)]
pub(crate) struct MissingEndpoints(ArcSwap<Vec<Missing>>);

#[derive(Clone, Debug)]
struct Missing {
    /// Not the worker that takes over with another description.
    worker: Weak<Worker>,
    id: WorkerId,
    /// The engine's process.
    process: u32,
    path: &'static str,
    leg: Leg,
    until: Instant,
    /// When the next request may go to it.
    trial: Instant,
}

impl MissingEndpoints {
    /// Notes that the engine of a worker lacks an endpoint, unless it has answered requests of it. Returns
    /// whether that is new.
    pub(crate) fn note(&self, worker: &Arc<Worker>, leg: Leg, path: &'static str) -> bool {
        if worker.has_answered_path(path) {
            return false;
        }
        let (now, id) = (Instant::now(), worker.id());
        let missing = Missing {
            worker: Arc::downgrade(worker),
            id,
            process: worker.process(),
            path,
            leg,
            until: now + KEPT,
            trial: now + TRIAL_INTERVAL,
        };
        let before = self.0.rcu(|known| {
            let others =
                known.iter().filter(|other| other.until > now && (other.id, other.path) != (id, path));
            others.cloned().chain([missing.clone()]).collect::<Vec<_>>()
        });
        !before.iter().any(|known| known.path == path && known.until > now && known.is_of(worker))
    }

    /// Returns the workers that lack an endpoint, as far as is known. Leaves one out whose trial is due: the
    /// leg may go to it.
    pub(crate) fn workers(&self, leg: Leg, path: &str, workers: &Snapshot) -> Vec<WorkerId> {
        let known = self.0.load();
        if known.is_empty() {
            return Vec::new();
        }
        let now = Instant::now();
        if known.iter().all(|missing| missing.until <= now) {
            self.0.compare_and_swap(&known, Arc::default());
            return Vec::new();
        }
        let is_now = |missing: &&Missing| {
            let holds = missing.path == path && missing.until > now;
            holds && workers.get(missing.id).is_some_and(|worker| missing.is_of(worker))
        };
        let mut lacking: Vec<&Missing> = known.iter().filter(is_now).collect();
        let due = lacking.iter().position(|missing| missing.leg == leg && missing.trial <= now);
        if let Some(due) = due
            && lacking.get(due).is_some_and(|missing| self.begin_trial(missing, now))
        {
            lacking.remove(due);
        }
        lacking.iter().map(|missing| missing.id).collect()
    }

    /// Returns whether the trial of a worker is this request's.
    fn begin_trial(&self, due: &Missing, now: Instant) -> bool {
        let is_due =
            |missing: &Missing| (missing.id, missing.path, missing.trial) == (due.id, due.path, due.trial);
        let begun = |missing: &Missing| {
            let trial = if is_due(missing) { now + TRIAL_INTERVAL } else { missing.trial };
            Missing { trial, ..missing.clone() }
        };
        let before = self.0.rcu(|known| known.iter().map(begun).collect::<Vec<_>>());
        before.iter().any(is_due)
    }
}

impl Missing {
    /// Returns whether it still holds for this worker.
    fn is_of(&self, worker: &Arc<Worker>) -> bool {
        std::ptr::eq(self.worker.as_ptr(), Arc::as_ptr(worker))
            && self.process == worker.process()
            && !worker.has_answered_path(self.path)
    }
}

#[cfg(test)]
mod tests {
    use pointsman_workers::{Registry, WorkerSpec};

    use super::*;

    const LEG: Leg = Leg::Aggregated;

    fn registry(workers: usize) -> Registry {
        let registry = Registry::default();
        for id in 1..=workers {
            let flag = format!("id={id},role=aggregated,engine=vllm,url=http://a:{id}");
            registry.upsert(WorkerSpec::parse_flag(&flag).unwrap());
        }
        registry
    }

    fn worker(registry: &Registry, id: u64) -> Arc<Worker> {
        registry.snapshot().get(WorkerId(id)).unwrap().clone()
    }

    #[tokio::test(start_paused = true)]
    async fn i17_what_an_engine_lacks_is_remembered_for_five_minutes_and_its_process() {
        let registry = registry(1);
        let missing = MissingEndpoints::default();
        let lack = |path| missing.workers(LEG, path, &registry.snapshot());
        let note = |path| missing.note(&worker(&registry, 1), LEG, path);
        assert!(note("/rerank") && !note("/rerank"));
        assert!(note("/score"));
        assert_eq!((lack("/rerank"), lack("/v1/rerank")), (vec![WorkerId(1)], Vec::new()));
        tokio::time::advance(KEPT).await;
        // I17.7
        assert!(lack("/rerank").is_empty() && missing.0.load().is_empty());
        assert!(note("/rerank"));
        let spec = worker(&registry, 1).spec().clone();
        registry.upsert(WorkerSpec { max_concurrency: Some(4), ..spec });
        // I17.7
        assert!(lack("/rerank").is_empty());
        assert!(note("/rerank") && missing.0.load().len() == 1);
    }

    #[tokio::test(start_paused = true)]
    async fn i17_a_request_each_ten_seconds_may_find_that_an_engine_has_an_endpoint() {
        let (registry, missing) = (registry(3), MissingEndpoints::default());
        let lack = |leg| {
            let lacking = missing.workers(leg, "/rerank", &registry.snapshot());
            lacking.iter().map(|id| id.0).collect::<Vec<_>>()
        };
        for id in [1, 2] {
            assert!(missing.note(&worker(&registry, id), LEG, "/rerank"));
        }
        assert_eq!(lack(LEG), [1, 2]);
        tokio::time::advance(TRIAL_INTERVAL).await;
        // I17.7: one worker for each request
        assert_eq!((lack(Leg::Decode), lack(LEG), lack(LEG)), (vec![1, 2], vec![2], vec![1]));
        assert_eq!(lack(LEG), [1, 2]);
        assert!(!missing.note(&worker(&registry, 1), LEG, "/rerank"), "it does lack it");
        worker(&registry, 2).note_answered_path("/rerank");
        // I17.7
        assert_eq!(lack(LEG), [1]);
        assert!(!missing.note(&worker(&registry, 2), LEG, "/rerank"), "a proxy answers");
        assert_eq!(lack(LEG), [1]);
    }
}
