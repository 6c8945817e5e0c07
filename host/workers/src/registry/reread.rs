//! Readings of all engines' models, for requests whose model, or a leg of it, no worker has: an engine may
//! have loaded an adapter a moment ago.

use std::sync::{Arc, Weak};

use tokio::time::{Duration, Instant, timeout_at};

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
/// Requests that wait for the next reading. A flood of unknown names must not keep more of them in memory.
pub(super) const MAX_WAITING: usize = 100;

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

    /// Like [`Self::reread_models`], for a request that is refused for good otherwise. If the last reading
    /// began before the request came, an engine may have loaded the model since: this waits for the next
    /// one, too, unless 100 requests do, or it is due only after 2 s.
    pub async fn reread_models_anew(&self, is_found: impl Fn(&Snapshot) -> bool) {
        let came = Instant::now();
        self.reread_models(&is_found).await;
        let older = |last: &&Reread| last.begun < came && !last.workers.is_empty();
        let next = self.reread.lock().as_ref().filter(older).map(|last| last.begun + last.pause);
        let Some(next) = next.filter(|next| *next <= came + PAUSE) else { return };
        let Ok(_place) = self.waiting.try_acquire() else { return };
        let mut changes = self.subscribe();
        let found = changes.wait_for(|_| is_found(&self.snapshot()));
        if timeout_at(next, found).await.is_err() {
            self.reread_models(&is_found).await;
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

#[cfg(test)]
mod tests {
    use tokio::task::JoinSet;

    use super::*;
    use crate::{id::ModelName, spec::WorkerSpec};

    fn join(registry: &Registry, flag: &str) {
        let flag = format!("role=aggregated,engine=vllm,{flag}");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap());
    }

    /// Adds a request for the model `ad`. Returns how long it waited.
    fn ask(registry: &Arc<Registry>, requests: &mut JoinSet<Duration>) {
        let (registry, came) = (registry.clone(), Instant::now());
        requests.spawn(async move {
            registry.reread_models_anew(|workers| workers.serves(&ModelName::new("ad"))).await;
            came.elapsed()
        });
    }

    #[tokio::test(start_paused = true)]
    async fn b5_some_requests_wait_for_the_next_reading_and_share_it() {
        let registry = Arc::new(Registry::default());
        join(&registry, "id=1,url=http://a:1");
        let mut requests = JoinSet::new();
        let begun = || registry.reread.lock().as_ref().map(|last| last.begun);
        let first = Instant::now();
        ask(&registry, &mut requests);
        requests.join_next().await.unwrap().unwrap();
        assert_eq!(begun(), Some(first));
        tokio::time::advance(PAUSE / 4).await;
        (0..MAX_WAITING + 50).for_each(|_| ask(&registry, &mut requests));
        let waits = requests.join_all().await;
        let waited = |least: Duration| waits.iter().filter(|wait| **wait >= least).count();
        // B5.16
        assert_eq!((waited(Duration::from_millis(1)), waited(PAUSE)), (MAX_WAITING, 0), "{waits:?}");
        assert!(begun().is_some_and(|begun| begun >= first + PAUSE && begun < first + PAUSE + LOOK));
        let mut requests = JoinSet::new();
        tokio::time::advance(PAUSE / 4).await;
        ask(&registry, &mut requests);
        tokio::time::sleep(PAUSE / 4).await;
        join(&registry, "id=2,url=http://a:2,model=ad");
        // B5.16: it is found meanwhile
        let wait = requests.join_next().await.unwrap().unwrap();
        assert!(wait < PAUSE / 2, "{wait:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn b5_no_request_waits_where_a_reading_finds_nothing_or_is_due_late() {
        let configured = Arc::new(Registry::default());
        join(&configured, "id=1,url=http://a:1,model=m");
        let many = Arc::new(Registry::default());
        (1..=SMALL_FLEET).for_each(|id| join(&many, &format!("id={id},url=http://a:{id}")));
        for registry in [configured, many] {
            let mut requests = JoinSet::new();
            for _ in 0..2 {
                ask(&registry, &mut requests);
                // B5.16
                assert_eq!(requests.join_next().await.unwrap().unwrap(), Duration::ZERO);
                tokio::time::advance(PAUSE / 4).await;
            }
        }
    }
}
