//! Running streams that make room: with `preempt`, one of the lowest class pauses while a request of a higher
//! class waits, and continues later (L5).
//!
//! ```text
//! a request waits --> asks the newest stream of the lowest class, within share and rate
//! that stream, between two of its events --> begin: is it still asked?
//!                                            it ends its legs, and its rest waits in the queue
//! the rest has workers --> end
//! ```
//! A request that waits no longer withdraws what it asked.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use fair_queue::Line as _;
use pointsman_routing::RoutingRequest;
use pointsman_workers::{Leg, ModelName};
use tokio::time::{Duration, Instant};

use super::{
    AdmissionQueue, AdmissionRequest, Inner, Place,
    rules::{LineId, class_of},
};

/// One in this many streams is paused at a time, and one in any case.
const PAUSED_SHARE: usize = 4;
/// Time between two questions to streams: at most ten of them pause in a second.
const ASK_INTERVAL: Duration = Duration::from_millis(100);
/// How long a request waits for the answer of the stream that it asked before it asks another one. The engine
/// may be slow, or the client may not read.
const ANSWER_TIME: Duration = Duration::from_secs(1);

/// A model, and the leg that answers.
type Pool = (ModelName, Leg);
/// Class of a stream, and its number: the lowest class comes first, and of it the newest stream.
type Rank = (i64, Reverse<u64>);

/// The streams that may pause. Streams of one pool make room for its requests.
#[derive(Debug, Default)]
pub(super) struct Preemption {
    pools: HashMap<Pool, Streams>,
    /// Number of streams so far.
    streams: u64,
}

#[derive(Debug, Default)]
struct Streams {
    /// Those that run, and whether they are asked to pause.
    running: BTreeMap<Rank, Arc<AtomicBool>>,
    paused: usize,
    /// When one was asked last.
    asked_at: Option<Instant>,
}

/// What a request that waits asks of streams.
#[derive(Debug)]
pub(super) struct Asking {
    pool: Pool,
    class: i64,
    /// Streams that it asked and that have not answered.
    asked: Vec<Arc<AtomicBool>>,
    asked_at: Option<Instant>,
}

/// A stream that may pause. Dropping it ends its part.
#[derive(Debug)]
pub struct PausableStream {
    queue: Arc<AdmissionQueue>,
    pool: Pool,
    rank: Rank,
    asked: Arc<AtomicBool>,
    /// Since when it is paused.
    paused: Option<Instant>,
}

impl AdmissionQueue {
    /// Number of streams that are paused now.
    #[must_use]
    pub fn paused(&self) -> usize {
        self.inner.lock().preemption.paused(None)
    }

    /// Adds a stream that may pause, by the leg that answers; `None` while no stream does.
    #[must_use]
    pub fn may_pause(
        self: &Arc<Self>,
        admission_request: &AdmissionRequest<'_>,
        answering: Leg,
    ) -> Option<PausableStream> {
        if !self.preempts.load(Ordering::Relaxed) {
            return None;
        }
        let mut inner = self.inner.lock();
        let class = class_of(&inner.rules, admission_request.request);
        let preemption = &mut inner.preemption;
        preemption.streams += 1;
        let (rank, asked) = ((class, Reverse(preemption.streams)), Arc::new(AtomicBool::new(false)));
        let pool = (admission_request.model.clone(), answering);
        preemption.pools.entry(pool.clone()).or_default().running.insert(rank, asked.clone());
        drop(inner);
        Some(PausableStream { queue: self.clone(), pool, rank, asked, paused: None })
    }
}

impl Inner {
    /// Number of requests that the limits of the queue count: not the rests of streams that paused.
    pub(super) fn counted(&self, model: Option<&ModelName>) -> usize {
        let all = model.map_or(self.order.len(), |model| self.order.of_group(model));
        all.saturating_sub(self.preemption.paused(model)) + self.worker_waits.count(model)
    }

    /// Returns what a request may ask of streams. They pause for no request that only some workers may serve,
    /// because they may run on others.
    pub(super) fn asking(&self, line: &LineId, request: &RoutingRequest) -> Option<Asking> {
        if !self.rules.preempt || !line.takes_any_worker() {
            return None;
        }
        let answering = if line.leg() == Leg::Prefill { Leg::Decode } else { line.leg() };
        let pool = (line.group().clone(), answering);
        Some(Asking { pool, class: class_of(&self.rules, request), asked: Vec::new(), asked_at: None })
    }
}

impl Place {
    /// Asks a stream of a lower class to make room, if one can.
    pub(crate) fn ask_for_room(&mut self) {
        let Some(asking) = &mut self.asking else { return };
        let mut inner = self.queue.inner.lock();
        let is_full = !inner.may_run(&asking.pool.0);
        // Streams take no room for prefill, except that they count as in flight.
        if self.position.line.leg() == Leg::Prefill && !is_full {
            return;
        }
        let now = Instant::now();
        asking.asked.retain(|asked| asked.load(Ordering::Relaxed));
        let is_early = asking.asked_at.is_some_and(|at| now.duration_since(at) < ANSWER_TIME);
        if is_early && !asking.asked.is_empty() {
            return;
        }
        let streams = &mut inner.preemption;
        let mut asked = streams.ask(&asking.pool, asking.class, now);
        if asked.is_none() && is_full {
            // Every stream of the model counts as in flight.
            asked = streams.ask(&other_pool(&asking.pool), asking.class, now);
        }
        if let Some(asked) = asked {
            asking.asked.push(asked);
            asking.asked_at = Some(now);
        }
    }
}

/// The other leg that may answer requests for the model.
fn other_pool((model, leg): &Pool) -> Pool {
    (model.clone(), if *leg == Leg::Aggregated { Leg::Decode } else { Leg::Aggregated })
}

impl Asking {
    /// The request waits no longer.
    pub(super) fn withdraw(&self) {
        self.asked.iter().for_each(|asked| asked.store(false, Ordering::Relaxed));
    }
}

impl Preemption {
    /// Number of streams that are paused, of a model or of all.
    pub(super) fn paused(&self, model: Option<&ModelName>) -> usize {
        let pools = self.pools.iter().filter(|((of, _), _)| model.is_none_or(|model| of == model));
        pools.map(|(_, streams)| streams.paused).sum()
    }

    fn ask(&mut self, pool: &Pool, class: i64, now: Instant) -> Option<Arc<AtomicBool>> {
        self.pools.get_mut(pool)?.ask(class, now)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.pools.is_empty()
    }
}

impl Streams {
    fn may_pause_another(&self) -> bool {
        self.paused < ((self.running.len() + self.paused) / PAUSED_SHARE).max(1)
    }

    fn ask(&mut self, class: i64, now: Instant) -> Option<Arc<AtomicBool>> {
        let is_early = self.asked_at.is_some_and(|at| now.duration_since(at) < ASK_INTERVAL);
        if is_early || !self.may_pause_another() {
            return None;
        }
        let mut lower = self.running.iter().take_while(|(rank, _)| rank.0 < class);
        let (_, asked) = lower.find(|(_, asked)| !asked.load(Ordering::Relaxed))?;
        asked.store(true, Ordering::Relaxed);
        self.asked_at = Some(now);
        Some(asked.clone())
    }
}

impl PausableStream {
    /// Returns whether the stream is asked to pause.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// Returns whether the stream is paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.paused.is_some()
    }

    /// Pauses the stream, if it is still asked to. Returns whether it does.
    pub fn begin(&mut self) -> bool {
        let mut inner = self.queue.inner.lock();
        let is_asked = self.asked.swap(false, Ordering::Relaxed) && inner.rules.preempt;
        let Some(streams) = inner.preemption.pools.get_mut(&self.pool) else { return false };
        if !is_asked || !streams.may_pause_another() {
            return false;
        }
        streams.running.remove(&self.rank);
        streams.paused += 1;
        self.paused = Some(Instant::now());
        true
    }

    /// The stream continues. Returns how long it was paused.
    pub fn end(&mut self) -> Duration {
        let Some(since) = self.paused.take() else { return Duration::ZERO };
        if let Some(streams) = self.queue.inner.lock().preemption.pools.get_mut(&self.pool) {
            streams.paused -= 1;
            streams.running.insert(self.rank, self.asked.clone());
        }
        since.elapsed()
    }
}

impl Drop for PausableStream {
    fn drop(&mut self) {
        self.end();
        let mut inner = self.queue.inner.lock();
        let Some(streams) = inner.preemption.pools.get_mut(&self.pool) else { return };
        if let Some(asked) = streams.running.remove(&self.rank) {
            // Who asked it looks for another one.
            asked.store(false, Ordering::Relaxed);
        }
        if streams.running.is_empty() && streams.paused == 0 {
            inner.preemption.pools.remove(&self.pool);
        }
    }
}
