//! Requests that wait until a worker can serve their model, whose pool may be scaled to zero (F7.9).
//!
//! They are not in the order of the queue, so no request of another model waits for their turn. They count
//! for its bounds. When a worker can serve their model, all of them ask to be admitted as if they arrived.
//! When there is no room, the tenant with the most waiting requests loses its newest one to a request of
//! another tenant, if that makes room.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use fair_queue::{FairQueue, Key, NO_TENANT, Position, Rules};
use pointsman_workers::{Invariant, ModelName};
use tokio::{
    sync::Notify,
    time::{Duration, Instant},
};

use super::{
    AdmissionQueue, AdmissionRequest, Inner, Place,
    rules::{QueueRules, class_of},
};

/// One in this many places of the queue, and of its bytes, is for these requests. A pool that does not come
/// leaves the others to the models that are served.
const SHARE: usize = 2;

/// Tenants share the places of a model by number.
const SHARES: Rules =
    Rules { ageing_turn: 0, credit: 0.0, check: |right| Invariant::WaitingRequests.check(right) };

/// Class, due time and ticket of a request: the first one is the first to be woken.
type Rank = (Reverse<i64>, i64, u64);

#[derive(Debug)]
pub(super) struct WorkerWaits {
    /// Places of requests, by model.
    held: BTreeMap<ModelName, Held>,
    bytes: usize,
    /// The same places, by model and tenant.
    shares: FairQueue<WaitingFor, Waiting>,
    /// Those of them that nothing has woken.
    asleep: BTreeMap<ModelName, BTreeMap<Rank, Arc<Wake>>>,
}

/// The requests that wait for a worker of a model.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct WaitingFor(ModelName);

impl fair_queue::Line for WaitingFor {
    type Group = ModelName;

    fn group(&self) -> &ModelName {
        &self.0
    }
}

/// What a request holds of the queue while it waits.
#[derive(Debug)]
struct Waiting {
    rank: Rank,
    bytes: usize,
    tokens: u64,
    wake: Arc<Wake>,
}

/// Wakes a request.
#[derive(Debug, Default)]
struct Wake {
    notify: Notify,
    /// Whether another request has its place. Changed under the queue's lock.
    gave_way: AtomicBool,
}

/// Requests of a model that have a place, and the bytes of their bodies.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub(super) requests: usize,
    pub(super) bytes: usize,
}

/// The wait of a request for a worker that can serve its model. It has a place in the queue, and dropping it
/// releases the place.
#[derive(Debug)]
pub struct WorkerWait {
    queue: Arc<AdmissionQueue>,
    position: Position<WaitingFor>,
    rank: Rank,
    since: Instant,
    wake: Arc<Wake>,
}

impl AdmissionQueue {
    /// Takes a place for a request whose model no worker can serve; `None` when there is no room.
    #[must_use]
    pub fn wait_for_worker(
        self: &Arc<Self>,
        admission_request: &AdmissionRequest<'_>,
    ) -> Option<Box<WorkerWait>> {
        let AdmissionRequest { model, request, bytes, .. } = *admission_request;
        let mut inner = self.inner.lock();
        if !inner.make_room(admission_request) {
            return None;
        }
        let (due_us, _) = admission_request.dues_us(inner.origin, &inner.rules);
        let key = Key::in_turn(inner.tickets);
        let rank = (Reverse(class_of(&inner.rules, request)), due_us, key.ticket);
        let tokens = u64::from(request.prompt_tokens);
        inner.tickets += 1;
        inner.bytes += bytes;
        inner.tokens += tokens;
        let weight = inner.rules.share(request.tenant_hash).weight;
        let (tenant, wake) = (request.tenant_hash.unwrap_or(NO_TENANT), Arc::<Wake>::default());
        let waits = &mut inner.worker_waits;
        waits.bytes += bytes;
        let held = waits.held.entry(model.clone()).or_default();
        held.requests += 1;
        held.bytes += bytes;
        let waiting = Waiting { rank, bytes, tokens, wake: wake.clone() };
        let position = waits.shares.insert(WaitingFor(model.clone()), tenant, weight, key, waiting);
        let (queue, since) = (self.clone(), Instant::now());
        Some(Box::new(WorkerWait { queue, position, rank, since, wake }))
    }

    /// Returns the number of requests that wait until a worker can serve their model, by model.
    #[must_use]
    pub fn worker_waits(&self) -> BTreeMap<ModelName, usize> {
        let inner = self.inner.lock();
        inner.worker_waits.held.iter().map(|(model, held)| (model.clone(), held.requests)).collect()
    }
}

impl Default for WorkerWaits {
    fn default() -> Self {
        let (held, asleep) = (BTreeMap::new(), BTreeMap::new());
        Self { held, bytes: 0, shares: FairQueue::new(SHARES), asleep }
    }
}

impl WorkerWaits {
    /// Number of requests, of a model or of all.
    pub(super) fn count(&self, model: Option<&ModelName>) -> usize {
        match model {
            Some(model) => self.held.get(model).map_or(0, |held| held.requests),
            None => self.held.values().map(|held| held.requests).sum(),
        }
    }

    /// Returns whether their share of the queue, and the model's part of it, has room for another one,
    /// without some of the model. A model that has no other may have one that is larger than its part of the
    /// bytes.
    fn has_room(&self, rules: &QueueRules, asks: &AdmissionRequest<'_>, without: Held) -> bool {
        let (places, most_bytes) = ((rules.limit / SHARE).max(1), rules.bytes / SHARE);
        let fits = |sum: usize, most: usize| sum.checked_add(asks.bytes).is_some_and(|sum| sum <= most);
        if self.count(None) - without.requests >= places || !fits(self.bytes - without.bytes, most_bytes) {
            return false;
        }
        let models = rules.waiting_models.max(1);
        let held = self.held.get(asks.model).copied().unwrap_or_default();
        let (requests, bytes) = (held.requests - without.requests, held.bytes - without.bytes);
        requests == 0 || (requests < places / models && fits(bytes, most_bytes / models))
    }

    /// Returns the waiting requests to drop for a new one, if that makes room. Each is the newest request of
    /// the tenant that has the most for its weight at that point. Returns none if the new request is larger
    /// than the bytes of its model.
    fn give_way(
        &self,
        rules: &QueueRules,
        asks: &AdmissionRequest<'_>,
        has_room: impl Fn(Held) -> bool,
    ) -> Option<Vec<Position<WaitingFor>>> {
        if asks.bytes > rules.bytes / SHARE / rules.waiting_models.max(1) {
            return None;
        }
        let mut without = Held::default();
        let suffices = |waiting: &Waiting| {
            without.requests += 1;
            without.bytes += waiting.bytes;
            has_room(without)
        };
        let tenant = asks.request.tenant_hash.unwrap_or(NO_TENANT);
        self.shares.last_after(asks.model, tenant, |_| 1.0, suffices)
    }

    fn sleep(&mut self, wait: &WorkerWait) {
        if !wait.gave_way() {
            self.asleep.entry(wait.model().clone()).or_default().insert(wait.rank, wait.wake.clone());
        }
    }
}

impl WorkerWait {
    /// Waits until a worker may serve the model: another request found one, or some time has passed.
    pub async fn woken(&self, until: Instant) {
        self.queue.inner.lock().worker_waits.sleep(self);
        let _ = tokio::time::timeout_at(Place::retry_at(until), self.wake.notify.notified()).await;
    }

    /// Returns whether a request of another tenant has its place.
    #[must_use]
    pub fn gave_way(&self) -> bool {
        self.wake.gave_way.load(Ordering::SeqCst)
    }

    fn model(&self) -> &ModelName {
        &self.position.line.0
    }

    /// Wakes the other requests of the model, in their order, because a worker can serve it. Returns whether
    /// one of them comes before this one.
    #[must_use]
    pub fn wake_others(&self) -> bool {
        let asleep = self.queue.inner.lock().worker_waits.asleep.remove(self.model()).unwrap_or_default();
        let mut others = asleep.iter().filter(|(rank, _)| **rank != self.rank).peekable();
        let is_after = others.peek().is_some_and(|(rank, _)| **rank < self.rank);
        others.for_each(|(_, other)| other.notify.notify_one());
        is_after
    }

    /// When the wait began.
    #[must_use]
    pub fn since(&self) -> Instant {
        self.since
    }

    /// How long it has lasted.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }
}

impl Inner {
    /// Returns whether there is room for a new waiting request. Drops others where that makes room.
    fn make_room(&mut self, asks: &AdmissionRequest<'_>) -> bool {
        let has_room =
            |without| self.has_room(asks, without) && self.worker_waits.has_room(&self.rules, asks, without);
        if has_room(Held::default()) {
            return true;
        }
        let Some(last) = self.worker_waits.give_way(&self.rules, asks, has_room) else { return false };
        for wake in last.iter().filter_map(|position| self.release(position)) {
            wake.gave_way.store(true, Ordering::SeqCst);
            wake.notify.notify_one();
        }
        true
    }

    /// Releases the place of a request that waited for a worker. Returns whether it had one.
    pub(super) fn end_wait(&mut self, wait: &WorkerWait) -> bool {
        self.release(&wait.position).is_some()
    }

    /// Releases a place, unless that was done before.
    fn release(&mut self, position: &Position<WaitingFor>) -> Option<Arc<Wake>> {
        let (waits, model) = (&mut self.worker_waits, &position.line.0);
        let Waiting { rank, bytes, tokens, wake } = waits.shares.remove(position)?;
        self.bytes -= bytes;
        self.tokens -= tokens;
        waits.bytes -= bytes;
        if let Some(held) = waits.held.get_mut(model) {
            held.requests -= 1;
            held.bytes -= bytes;
            if held.requests == 0 {
                waits.held.remove(model);
            }
        }
        if let Some(asleep) = waits.asleep.get_mut(model) {
            asleep.remove(&rank);
            if asleep.is_empty() {
                waits.asleep.remove(model);
            }
        }
        Some(wake)
    }
}

impl Drop for WorkerWait {
    fn drop(&mut self) {
        self.queue.inner.lock().end_wait(self);
    }
}

#[cfg(test)]
mod tests;
