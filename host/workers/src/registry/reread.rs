//! Readings of all engines' models, for requests that name an unknown one: an engine may have loaded an
//! adapter a moment ago.

use std::sync::{Arc, Weak};

use tokio::time::{Duration, Instant};

use super::Registry;
use crate::{
    id::ModelName,
    worker::{Health, Worker},
};

/// Least time between two readings. It grows by itself with each [`SMALL_FLEET`] workers.
const PAUSE: Duration = Duration::from_secs(2);
const SMALL_FLEET: usize = 100;
/// Longest wait for a reading.
const WAIT: Duration = Duration::from_secs(1);
/// How often a request looks whether all engines were read.
const LOOK: Duration = Duration::from_millis(20);

/// A worker that is read, and how often its models were before.
type Unread = (Weak<Worker>, u32);

/// A reading that requests wait for.
#[derive(Debug)]
pub(super) struct Reread {
    begun: Instant,
    pause: Duration,
    workers: Arc<[Unread]>,
}

impl Registry {
    /// Has the models of all engines read again, unless they were a moment ago, and waits until they were or
    /// `model` is served. Workers with configured models are not read.
    pub async fn reread_models(&self, model: &ModelName) {
        let Some((until, workers)) = self.begin_reading() else { return };
        let is_read = |(worker, before): &Unread| {
            let unread = |worker: Arc<Worker>| {
                worker.model_readings() == *before && worker.health() == Health::Healthy
            };
            !worker.upgrade().is_some_and(unread)
        };
        while !self.snapshot().serves(model) && !workers.iter().all(is_read) && Instant::now() < until {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Begins a reading, or joins the one that runs. Returns its end and its workers; `None` if there is
    /// nothing to wait for.
    fn begin_reading(&self) -> Option<(Instant, Arc<[Unread]>)> {
        let (mut reread, now) = (self.reread.lock(), Instant::now());
        if let Some(last) = reread.as_ref().filter(|last| now < last.begun + last.pause) {
            let until = last.begun + WAIT;
            return (now < until).then(|| (until, last.workers.clone()));
        }
        let snapshot = self.snapshot();
        let learns = |worker: &&Arc<Worker>| worker.spec().models.is_empty();
        let mut workers = Vec::new();
        for worker in snapshot.workers().iter().filter(learns) {
            workers.push((Arc::downgrade(worker), worker.model_readings()));
            worker.note_restart();
        }
        let times = u32::try_from(workers.len() / SMALL_FLEET).unwrap_or(u32::MAX);
        let begun = Reread {
            begun: now,
            pause: PAUSE.saturating_mul(times.saturating_add(1)),
            workers: workers.into(),
        };
        let workers = reread.insert(begun).workers.clone();
        Some((now + WAIT, workers)).filter(|(_, workers)| !workers.is_empty())
    }
}
