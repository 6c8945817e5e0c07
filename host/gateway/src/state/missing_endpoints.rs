//! Endpoints that engines lack: they answered a request with 404 that another engine took.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use arc_swap::ArcSwap;
use pointsman_workers::{Snapshot, Worker, WorkerId};
use tokio::time::Instant;

/// How long it is remembered. A wrong note costs the engine its share of the endpoint for this time.
const KEPT: Duration = Duration::from_mins(5);

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
    until: Instant,
}

impl MissingEndpoints {
    /// Notes that the engine of a worker lacks an endpoint. Returns whether that is new.
    pub(crate) fn note(&self, worker: &Arc<Worker>, path: &'static str) -> bool {
        let (now, id) = (Instant::now(), worker.id());
        let missing = Missing {
            worker: Arc::downgrade(worker),
            id,
            process: worker.process(),
            path,
            until: now + KEPT,
        };
        let before = self.0.rcu(|known| {
            let others =
                known.iter().filter(|other| other.until > now && (other.id, other.path) != (id, path));
            others.cloned().chain([missing.clone()]).collect::<Vec<_>>()
        });
        !before.iter().any(|known| known.path == path && known.until > now && known.is_of(worker))
    }

    /// Returns the workers that lack an endpoint, as far as is known.
    pub(crate) fn workers(&self, path: &str, workers: &Snapshot) -> Vec<WorkerId> {
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
        known.iter().filter(is_now).map(|missing| missing.id).collect()
    }
}

impl Missing {
    fn is_of(&self, worker: &Arc<Worker>) -> bool {
        std::ptr::eq(self.worker.as_ptr(), Arc::as_ptr(worker)) && self.process == worker.process()
    }
}

#[cfg(test)]
mod tests {
    use pointsman_workers::{Registry, WorkerSpec};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn i17_what_an_engine_lacks_is_remembered_for_five_minutes_and_its_process() {
        let registry = Registry::default();
        let spec = WorkerSpec::parse_flag("id=1,role=aggregated,engine=vllm,url=http://a:1").unwrap();
        registry.upsert(spec.clone());
        let missing = MissingEndpoints::default();
        let lack = |path| missing.workers(path, &registry.snapshot());
        let worker = || registry.snapshot().get(WorkerId(1)).unwrap().clone();
        assert!(missing.note(&worker(), "/rerank") && !missing.note(&worker(), "/rerank"));
        assert!(missing.note(&worker(), "/score"));
        assert_eq!((lack("/rerank"), lack("/v1/rerank")), (vec![WorkerId(1)], Vec::new()));
        tokio::time::advance(KEPT).await;
        // I17.7
        assert!(lack("/rerank").is_empty() && missing.0.load().is_empty());
        assert!(missing.note(&worker(), "/rerank"));
        registry.upsert(WorkerSpec { max_concurrency: Some(4), ..spec });
        // I17.7
        assert!(lack("/rerank").is_empty());
        assert!(missing.note(&worker(), "/rerank") && missing.0.load().len() == 1);
    }
}
