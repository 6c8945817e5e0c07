//! Readings of all engines' models, for requests whose model, or a leg of it, no worker has: an engine may
//! have loaded an adapter a moment ago.

use std::sync::{Arc, Weak};

use tokio::time::{Duration, Instant};

use super::{Registry, Snapshot};
use crate::worker::{Health, Worker};

/// Least time between two readings. It grows by itself with each [`SMALL_FLEET`] workers.
const PAUSE: Duration = Duration::from_secs(2);
const SMALL_FLEET: usize = 100;
/// Longest wait for a reading.
const WAIT: Duration = Duration::from_secs(1);
/// How often a request looks whether all engines were read.
const LOOK: Duration = Duration::from_millis(20);
/// Longest time between two readings for requests that are served without them.
const LONGEST_PAUSE: Duration = Duration::from_secs(16);

/// A worker that is read, and how often its models were before.
type Unread = (Weak<Worker>, u32);

/// A reading that requests wait for.
#[derive(Debug)]
pub(super) struct Reread {
    begun: Instant,
    pause: Duration,
    /// The pause for requests that are served without a reading, while the snapshot is that of `version`.
    patient_pause: Duration,
    version: u64,
    workers: Arc<[Unread]>,
}

impl Registry {
    /// Has the models of all engines read again, unless they were a moment ago, and waits until they were or
    /// `is_found` holds. Workers with configured models are not read.
    pub async fn reread_models(&self, is_found: impl Fn(&Snapshot) -> bool) {
        let Some((until, workers)) = self.begin_reading() else { return };
        let is_read = |(worker, before): &Unread| {
            let unread = |worker: Arc<Worker>| {
                worker.model_readings() == *before && worker.health() == Health::Healthy
            };
            !worker.upgrade().is_some_and(unread)
        };
        let mut seen = None;
        loop {
            let snapshot = self.snapshot();
            if seen.replace(snapshot.version) != Some(snapshot.version) && is_found(&snapshot) {
                return;
            }
            if workers.iter().all(is_read) || Instant::now() >= until {
                return;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Has the models of all engines read again, for a request that is served without waiting for it. While
    /// the readings change nothing, each comes after twice the time.
    pub fn reread_models_later(&self) {
        // Never waits: another request begins a reading then.
        let Some(mut reread) = self.reread.try_lock() else { return };
        let snapshot = self.snapshot();
        let is_due = |last: &Reread| {
            let pause = if last.version == snapshot.version { last.patient_pause } else { last.pause };
            Instant::now() >= last.begun + pause
        };
        if reread.as_ref().is_none_or(is_due) {
            *reread = Some(Reread::begin(&snapshot, reread.as_ref()));
        }
    }

    /// Begins a reading, or joins the one that runs. Returns its end and its workers; `None` if there is
    /// nothing to wait for.
    fn begin_reading(&self) -> Option<(Instant, Arc<[Unread]>)> {
        let (mut reread, now) = (self.reread.lock(), Instant::now());
        let is_recent = |last: &&Reread| now < last.begun + last.pause;
        let last = match reread.as_ref().filter(is_recent) {
            Some(last) => last,
            None => {
                let begun = Reread::begin(&self.snapshot(), reread.as_ref());
                reread.insert(begun)
            }
        };
        let until = last.begun + WAIT;
        (now < until && !last.workers.is_empty()).then(|| (until, last.workers.clone()))
    }
}

impl Reread {
    /// Asks for the models of all engines.
    fn begin(snapshot: &Snapshot, last: Option<&Self>) -> Self {
        let learns = |worker: &&Arc<Worker>| worker.spec().models.is_empty();
        let mut workers = Vec::new();
        for worker in snapshot.workers().iter().filter(learns) {
            workers.push((Arc::downgrade(worker), worker.model_readings()));
            worker.note_restart();
        }
        let times = u32::try_from(workers.len() / SMALL_FLEET).unwrap_or(u32::MAX);
        let pause = PAUSE.saturating_mul(times.saturating_add(1));
        let before = last.filter(|last| last.version == snapshot.version).map(|last| last.patient_pause);
        let patient_pause = before.unwrap_or(pause).saturating_mul(2).min(LONGEST_PAUSE).max(pause);
        let (begun, version, workers) = (Instant::now(), snapshot.version, workers.into());
        Self { begun, pause, patient_pause, version, workers }
    }
}
