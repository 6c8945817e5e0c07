//! Readings of all engines' models, for requests whose model, or a leg of it, no worker has: an engine may
//! have loaded an adapter a moment ago.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use tokio::time::{Duration, Instant};

use super::{Registry, Snapshot};
use crate::{
    hash::name_hash,
    id::ModelName,
    worker::{Health, Worker},
};

/// Mean time between two readings, at least. It grows by itself with each [`SMALL_FLEET`] workers.
const PAUSE: Duration = Duration::from_secs(2);
const SMALL_FLEET: usize = 100;
/// How many readings may follow each other at once, in a fleet of fewer than [`SMALL_FLEET`] workers.
const BURST: u32 = 4;
/// The same for a name that had a reading a moment ago: requests that repeat a name leave readings to others.
const BURST_OF_KNOWN: u32 = 2;
/// How long a name is known after a reading for it.
const KNOWN_FOR: Duration = Duration::from_secs(60);
/// Number of names that are known. Above it, all others count as known, too.
const MAX_KNOWN: usize = 1_000;
/// Longest wait of a request, and longest time of a reading.
const WAIT: Duration = Duration::from_secs(1);
/// How often a request looks whether all engines were read.
const LOOK: Duration = Duration::from_millis(20);
/// Longest time between two readings for requests that are served without them.
const LONGEST_PAUSE: Duration = Duration::from_secs(16);

/// A worker that is read, and how often its models were before.
type Unread = (Weak<Worker>, u32);

/// The last reading.
#[derive(Debug)]
pub(super) struct Reread {
    begun: Instant,
    /// When the token bucket is full again.
    due: Instant,
    /// The pause for requests that are served without a reading, while the snapshot is that of `version`.
    patient_pause: Duration,
    version: u64,
    workers: Arc<[Unread]>,
    /// Hashes of the names that requests asked for, and when they last waited for a reading.
    known: HashMap<u64, Instant>,
}

impl Registry {
    /// Has the models of all engines read again for a request for `model`, unless they were too often, and
    /// waits until they were or `is_found` holds. Workers with configured models are not read.
    pub async fn reread_models(&self, model: &ModelName, is_found: impl Fn(&Snapshot) -> bool) {
        let came = Instant::now();
        let until = came + WAIT;
        let mut seen = None;
        // One that began before may have missed what was loaded since.
        while let Some((begun, workers)) = self.join_reading(model) {
            loop {
                let snapshot = self.snapshot();
                if seen.replace(snapshot.version) != Some(snapshot.version) && is_found(&snapshot) {
                    return;
                }
                drop(snapshot);
                let now = Instant::now();
                if now >= until {
                    return;
                }
                if !is_running(begun, &workers) {
                    break;
                }
                tokio::time::sleep_until(until.min(now + LOOK)).await;
            }
            if begun >= came {
                return;
            }
        }
    }

    /// Has the models of all engines read again, for a request that is served without waiting for it. While
    /// the readings change nothing, each comes after twice the time. It begins only while the token bucket is
    /// full: the other tokens are left for requests that wait.
    pub fn reread_models_later(&self) {
        // Never waits: another request begins a reading then.
        let Some(mut reread) = self.reread.try_lock() else { return };
        let snapshot = self.snapshot();
        let is_due = |last: &Reread| {
            let now = Instant::now();
            let was_patient = last.version != snapshot.version || now >= last.begun + last.patient_pause;
            was_patient && now >= last.due
        };
        if reread.as_ref().is_none_or(is_due) {
            *reread = Some(Reread::begin(&snapshot, reread.take()));
        }
    }

    /// Joins the reading that runs, or begins one. Returns when it began, and its workers; `None` if there is
    /// nothing to wait for.
    fn join_reading(&self, model: &ModelName) -> Option<(Instant, Arc<[Unread]>)> {
        let seen = self.reread.lock().as_ref().map(Reread::reading);
        let runs = seen.as_ref().is_some_and(|(begun, workers)| is_running(*begun, workers));
        let name = name_hash(model.as_str().as_bytes(), 0);
        let (mut reread, now) = (self.reread.lock(), Instant::now());
        // Another request may have begun one meanwhile.
        let is_over = |last: &Reread| !runs && seen.as_ref().is_some_and(|(begun, _)| *begun == last.begun);
        if reread.as_ref().is_none_or(is_over) {
            if !reread.as_ref().is_none_or(|last| last.may_begin_another(name, now)) {
                return None;
            }
            *reread = Some(Reread::begin(&self.snapshot(), reread.take()));
        }
        let last = reread.as_mut()?;
        if last.known.len() < MAX_KNOWN {
            last.known.insert(name, now);
        }
        Some(last.reading()).filter(|(_, workers)| !workers.is_empty())
    }
}

/// Returns whether requests still wait for this reading.
fn is_running(begun: Instant, workers: &[Unread]) -> bool {
    let is_unread = |(worker, before): &Unread| {
        let unread =
            |worker: Arc<Worker>| worker.model_readings() == *before && worker.health() == Health::Healthy;
        worker.upgrade().is_some_and(unread)
    };
    Instant::now() < begun + WAIT && workers.iter().any(is_unread)
}

impl Reread {
    /// Asks for the models of all engines.
    fn begin(snapshot: &Snapshot, last: Option<Self>) -> Self {
        let learns = |worker: &&Arc<Worker>| worker.spec().models.is_empty();
        let mut workers = Vec::new();
        for worker in snapshot.workers().iter().filter(learns) {
            workers.push((Arc::downgrade(worker), worker.model_readings()));
            worker.note_restart();
        }
        let times = u32::try_from(workers.len() / SMALL_FLEET).unwrap_or(u32::MAX);
        let pause = PAUSE.saturating_mul(times.saturating_add(1));
        let before = last.as_ref().filter(|last| last.version == snapshot.version);
        let before = before.map(|last| last.patient_pause);
        let patient_pause = before.unwrap_or(pause).saturating_mul(2).min(LONGEST_PAUSE).max(pause);
        let (begun, version, workers) = (Instant::now(), snapshot.version, workers.into());
        let (due, mut known) = last.map_or((begun, HashMap::new()), |last| (last.due, last.known));
        known.retain(|_, asked| *asked + KNOWN_FOR > begun);
        Self { begun, due: due.max(begun) + pause, patient_pause, version, workers, known }
    }

    fn reading(&self) -> (Instant, Arc<[Unread]>) {
        (self.begun, self.workers.clone())
    }

    /// Returns whether there may be another reading for a name at once.
    fn may_begin_another(&self, name: u64, now: Instant) -> bool {
        let is_known = self.known.get(&name).is_some_and(|asked| *asked + KNOWN_FOR > now);
        let burst = if is_known || self.known.len() >= MAX_KNOWN { BURST_OF_KNOWN } else { BURST };
        self.due.saturating_duration_since(now) <= PAUSE * (burst - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::registry, *};
    use crate::spec::WorkerSpec;

    /// Asks for models one after the other. Returns how many readings began for them.
    async fn readings<'a>(registry: &Registry, models: impl IntoIterator<Item = &'a str>) -> usize {
        let mut began = 0;
        for model in models {
            let due = || registry.reread.lock().as_ref().map(|last| last.due);
            let (before, came) = (due(), Instant::now());
            registry.reread_models(&ModelName::new(model), |_| false).await;
            assert_eq!(came.elapsed(), Duration::ZERO, "{model} waited");
            began += usize::from(due() != before);
        }
        began
    }

    #[tokio::test(start_paused = true)]
    async fn b5_names_that_were_not_asked_for_lately_have_a_few_readings_at_once() {
        let one = registry(1);
        // B5.16
        assert_eq!(readings(&one, ["a", "a", "a", "a"]).await, 2);
        assert_eq!(readings(&one, ["b", "a", "b", "c", "d", "e"]).await, 2);
        for _ in 0..10 {
            tokio::time::advance(PAUSE).await;
            // Repeated names take no reading from new ones.
            assert_eq!(readings(&one, ["a", "b", "a", "b"]).await, 0);
            assert_eq!(readings(&one, ["new", "a"]).await, 1);
            one.reread.lock().as_mut().unwrap().known.remove(&name_hash(b"new", 0));
        }
        tokio::time::advance(KNOWN_FOR).await;
        // B5.16
        assert_eq!(readings(&one, ["a", "b", "c", "d", "e", "a"]).await, 4);
    }

    #[tokio::test(start_paused = true)]
    async fn b5_a_large_fleet_is_read_less_often() {
        for (workers, expected) in [(99, 4), (100, 2), (300, 1)] {
            let all = registry(workers);
            // B5.16
            assert_eq!(readings(&all, ["a", "b", "c", "d", "e"]).await, expected, "{workers}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn b5_a_request_waits_no_longer_where_an_engine_does_not_answer() {
        let one = registry(1);
        one.snapshot().workers()[0].set_health(Health::Healthy);
        let wait = async |model: &str, after: u64| {
            tokio::time::sleep(Duration::from_millis(after)).await;
            let came = Instant::now();
            one.reread_models(&ModelName::new(model), |_| false).await;
            came.elapsed()
        };
        // The others come while the reading of the first one runs.
        let waits = tokio::join!(wait("a", 0), wait("b", 10), wait("c", 500));
        // B5.16
        assert_eq!(waits, (WAIT, WAIT, WAIT));
    }

    #[tokio::test(start_paused = true)]
    async fn b5_readings_for_later_take_none_from_requests_that_wait() {
        let one = registry(1);
        let joining = WorkerSpec::parse_flag("id=9,role=aggregated,engine=vllm,url=http://a:9").unwrap();
        assert_eq!(readings(&one, ["a", "b", "c", "d", "e"]).await, 4);
        let mut began = 0;
        for second in 0..60 {
            // The snapshot changes, so that the time between readings for later does not grow.
            one.upsert(joining.clone());
            one.reread_models_later();
            tokio::time::advance(PAUSE / 4).await;
            one.remove(joining.id);
            began += readings(&one, [format!("new {second}").as_str()]).await;
            tokio::time::advance(PAUSE / 4).await;
        }
        // B5.23: one in 2 s, after those that were ahead of their time
        assert_eq!(began, 29);
    }
}
