//! Requests that wait until a worker can serve their model, whose pool may be scaled to zero (F7.9).
//!
//! They are not in the order of the queue, so no request of another model waits for their turn. They count
//! for its bounds. When a worker can serve their model, all of them ask to be admitted as if they arrived.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use pointsman_workers::ModelName;
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

/// Class, due time and ticket of a request: the first one is the first to be woken.
type Rank = (Reverse<i64>, i64, u64);

#[derive(Debug, Default)]
pub(super) struct WorkerWaits {
    /// Places of requests, by model.
    held: BTreeMap<ModelName, Held>,
    bytes: usize,
    /// Those of them that nothing has woken.
    asleep: BTreeMap<ModelName, BTreeMap<Rank, Arc<Notify>>>,
}

/// Requests of a model that have a place, and the bytes of their bodies.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    requests: usize,
    bytes: usize,
}

/// The wait of a request for a worker that can serve its model. It has a place in the queue, and dropping it
/// releases the place.
#[derive(Debug)]
pub struct WorkerWait {
    queue: Arc<AdmissionQueue>,
    model: ModelName,
    rank: Rank,
    bytes: usize,
    tokens: u64,
    since: Instant,
    woken: Arc<Notify>,
    /// Whether another place replaced its own.
    is_over: bool,
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
        if !inner.has_room(admission_request) || !inner.worker_waits.has_room(&inner.rules, model, bytes) {
            return None;
        }
        let (due_us, _) = admission_request.dues_us(inner.origin, &inner.rules);
        let rank = (Reverse(class_of(&inner.rules, request)), due_us, inner.tickets);
        let tokens = u64::from(request.prompt_tokens);
        inner.tickets += 1;
        inner.bytes += bytes;
        inner.tokens += tokens;
        inner.worker_waits.bytes += bytes;
        let held = inner.worker_waits.held.entry(model.clone()).or_default();
        held.requests += 1;
        held.bytes += bytes;
        let (since, woken) = (Instant::now(), Arc::default());
        let (queue, model) = (self.clone(), model.clone());
        Some(Box::new(WorkerWait { queue, model, rank, bytes, tokens, since, woken, is_over: false }))
    }

    /// Returns the number of requests that wait until a worker can serve their model, by model.
    #[must_use]
    pub fn worker_waits(&self) -> BTreeMap<ModelName, usize> {
        let inner = self.inner.lock();
        inner.worker_waits.held.iter().map(|(model, held)| (model.clone(), held.requests)).collect()
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

    /// Returns whether their share of the queue, and the model's part of it, has room for another one. A
    /// model without any may have one that is larger than its part of the bytes.
    fn has_room(&self, rules: &QueueRules, model: &ModelName, bytes: usize) -> bool {
        let (places, most_bytes) = ((rules.limit / SHARE).max(1), rules.bytes / SHARE);
        let fits = |sum: usize, most: usize| sum.checked_add(bytes).is_some_and(|sum| sum <= most);
        if self.count(None) >= places || !fits(self.bytes, most_bytes) {
            return false;
        }
        let models = rules.waiting_models.max(1);
        let held = self.held.get(model);
        held.is_none_or(|held| held.requests < places / models && fits(held.bytes, most_bytes / models))
    }

    fn sleep(&mut self, wait: &WorkerWait) {
        self.asleep.entry(wait.model.clone()).or_default().insert(wait.rank, wait.woken.clone());
    }
}

impl WorkerWait {
    /// Waits until a worker may serve the model: another request found one, or some time has passed.
    pub async fn woken(&self, until: Instant) {
        self.queue.inner.lock().worker_waits.sleep(self);
        let _ = tokio::time::timeout_at(Place::retry_at(until), self.woken.notified()).await;
    }

    /// Wakes the other requests of the model, in their order, because a worker can serve it. Returns whether
    /// one of them comes before this one.
    #[must_use]
    pub fn wake_others(&self) -> bool {
        let asleep = self.queue.inner.lock().worker_waits.asleep.remove(&self.model).unwrap_or_default();
        let mut others = asleep.iter().filter(|(rank, _)| **rank != self.rank).peekable();
        let is_after = others.peek().is_some_and(|(rank, _)| **rank < self.rank);
        others.for_each(|(_, other)| other.notify_one());
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
    /// Releases the place of a request that waited for a worker.
    pub(super) fn end_wait(&mut self, wait: &mut WorkerWait) {
        if !std::mem::replace(&mut wait.is_over, true) {
            self.release(wait);
        }
    }

    fn release(&mut self, wait: &WorkerWait) {
        self.bytes -= wait.bytes;
        self.tokens -= wait.tokens;
        let waits = &mut self.worker_waits;
        waits.bytes -= wait.bytes;
        if let Some(held) = waits.held.get_mut(&wait.model) {
            held.requests -= 1;
            held.bytes -= wait.bytes;
            if held.requests == 0 {
                waits.held.remove(&wait.model);
            }
        }
        if let Some(asleep) = waits.asleep.get_mut(&wait.model) {
            asleep.remove(&wait.rank);
            if asleep.is_empty() {
                waits.asleep.remove(&wait.model);
            }
        }
    }
}

impl Drop for WorkerWait {
    fn drop(&mut self) {
        if !self.is_over {
            self.queue.inner.lock().release(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use pointsman_routing::RoutingRequest;

    use super::*;
    use crate::admission_queue::{Leg, ModelBounds, QueueRules};

    fn wait(
        queue: &Arc<AdmissionQueue>,
        model: &str,
        priority: f32,
        bytes: usize,
    ) -> Option<Box<WorkerWait>> {
        let (model, arrived) = (ModelName::new(model), Instant::now());
        let request = RoutingRequest { priority, n: 1, ..RoutingRequest::default() };
        queue.wait_for_worker(&AdmissionRequest {
            model: &model,
            request: &request,
            pin: None,
            arrived,
            bytes,
        })
    }

    fn park(queue: &Arc<AdmissionQueue>, model: &str) -> Option<Place> {
        let (model, arrived, request) = (ModelName::new(model), Instant::now(), RoutingRequest::default());
        let asks = AdmissionRequest { model: &model, request: &request, pin: None, arrived, bytes: 1 };
        queue.park(&asks, Leg::Aggregated, &[], None)
    }

    /// The worker that came is busy. Returns whether the request waits in the queue.
    fn waits_on(attempts: &mut crate::Attempts, queue: &Arc<AdmissionQueue>) -> bool {
        let (model, request, arrived) = (ModelName::new("a"), RoutingRequest::default(), Instant::now());
        let admission_request =
            AdmissionRequest { model: &model, request: &request, pin: None, arrived, bytes: 1 };
        let timeout = Duration::from_secs(30);
        let parking = crate::Parking { queue, admission_request, timeout };
        let busy = pointsman_routing::RouteError::AllBusy(Leg::Aggregated);
        match attempts.enter(Leg::Aggregated, None, &parking) {
            crate::Entry::Route(place) => {
                let after = attempts.after_refusal(Leg::Aggregated, &busy, place, &parking);
                after == crate::AfterRefusal::Wait
            }
            crate::Entry::Wait => true,
            crate::Entry::Refused => false,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn f7_worker_waits_take_half_of_the_queue_and_count_for_its_limits() {
        let models = BTreeMap::from([(ModelName::new("a"), ModelBounds { limit: 1, max_inflight: 0 })]);
        let queue = AdmissionQueue::new(QueueRules { bytes: 10, models, ..QueueRules::waiting(6) });
        assert!(wait(&queue, "b", 0.0, 6).is_none(), "more than half of the bytes");
        let a = wait(&queue, "a", 0.0, 1);
        // F7.11
        assert!(a.is_some() && wait(&queue, "a", 0.0, 1).is_none(), "the limit of the model");
        let _b = [wait(&queue, "b", 0.0, 1).unwrap(), wait(&queue, "b", 0.0, 1).unwrap()];
        // F7.11
        assert!(wait(&queue, "b", 0.0, 1).is_none(), "half of the places");
        assert_eq!((queue.waiting(), queue.waiting_bytes()), (0, 3));
        assert!(park(&queue, "a").is_none());
        let others = [park(&queue, "c"), park(&queue, "c"), park(&queue, "c")];
        // F7.11
        assert!(others.iter().all(Option::is_some) && park(&queue, "c").is_none(), "the rest is left");
        drop(others);
        drop(a);
        assert_eq!(queue.worker_waits(), BTreeMap::from([(ModelName::new("b"), 2)]));
        assert!(park(&queue, "a").is_some());
    }

    #[test]
    fn f7_worker_waits_of_each_model_have_their_part_of_the_share() {
        let rules = QueueRules { bytes: 80, waiting_models: 2, ..QueueRules::waiting(9) };
        let queue = AdmissionQueue::new(rules);
        let a = [wait(&queue, "a", 0.0, 1).unwrap(), wait(&queue, "a", 0.0, 1).unwrap()];
        // F7.11
        assert!(wait(&queue, "a", 0.0, 1).is_none(), "two of the four places");
        let large = wait(&queue, "b", 0.0, 30);
        // F7.11
        assert!(large.is_some(), "the first one may be larger than the part of its model");
        assert!(wait(&queue, "b", 0.0, 1).is_none(), "its bytes");
        drop(large);
        let _b = [wait(&queue, "b", 0.0, 1).unwrap(), wait(&queue, "b", 0.0, 1).unwrap()];
        drop(a);
        // With more models than places, each may have one.
        let queue = AdmissionQueue::new(QueueRules { waiting_models: 9, ..QueueRules::waiting(4) });
        let a = wait(&queue, "a", 0.0, 1);
        assert!(a.is_some() && wait(&queue, "a", 0.0, 1).is_none());
        let b = wait(&queue, "b", 0.0, 1);
        assert!(b.is_some() && wait(&queue, "c", 0.0, 1).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn f7_worker_waits_are_woken_in_their_order_and_leave_nothing() {
        let queue = AdmissionQueue::new(QueueRules::waiting(8));
        let waits = [0.0, 2.0, 1.0].map(|priority| wait(&queue, "a", priority, 1).unwrap());
        let other = wait(&queue, "b", 9.0, 1).unwrap();
        let far = Instant::now() + Duration::from_secs(60);
        let [first, second, third] = waits;
        let mut tasks = tokio::task::JoinSet::new();
        for wait in [second, third] {
            tasks.spawn(async move {
                wait.woken(far).await;
                wait
            });
        }
        tokio::task::yield_now().await;
        let before = Instant::now();
        // F7.13
        assert!(first.wake_others(), "the two others come first");
        let order = [tasks.join_next().await.unwrap().unwrap(), tasks.join_next().await.unwrap().unwrap()];
        assert_eq!(order.each_ref().map(|wait| wait.rank.0), [Reverse(2_000), Reverse(1_000)]);
        assert_eq!(before.elapsed(), Duration::ZERO);
        assert!(!order[0].wake_others());
        other.woken(far).await;
        assert!(before.elapsed() > Duration::ZERO, "another model's wakes nothing");
        drop((first, order, other));
        let inner = queue.inner.lock();
        let left = (inner.bytes, inner.tokens, inner.worker_waits.bytes);
        assert_eq!(left, (0, 0, 0));
        assert!(inner.worker_waits.asleep.is_empty() && inner.worker_waits.held.is_empty());
    }

    /// Its place becomes the next one, so nothing can take it in between.
    #[test]
    fn f7_requests_that_waited_keep_their_places_when_fewer_may_wait() {
        let queue = AdmissionQueue::new(QueueRules::waiting(4));
        let waited = [wait(&queue, "a", 0.0, 1), wait(&queue, "a", 0.0, 1)];
        queue.set_rules(QueueRules { bytes: 1, ..QueueRules::waiting(1) });
        let mut attempts = waited.map(crate::Attempts::after_wait);
        let wait = attempts.each_mut().map(|attempts| waits_on(attempts, &queue));
        // F7.13
        assert_eq!((wait, queue.waiting()), ([true; 2], 2));
        assert!(queue.worker_waits().is_empty() && park(&queue, "a").is_none());
        drop(attempts);
        assert_eq!((queue.waiting(), queue.waiting_bytes()), (0, 0));
    }

    /// A request that waited keeps its place until it has another one: nothing takes it meanwhile.
    #[tokio::test(start_paused = true)]
    async fn f7_a_request_that_waited_for_a_worker_has_room_in_the_queue() {
        let queue = AdmissionQueue::new(QueueRules::waiting(1));
        let waited = wait(&queue, "a", 0.0, 1);
        tokio::time::advance(Duration::from_secs(3)).await;
        let mut attempts = crate::Attempts::after_wait(waited);
        assert!(park(&queue, "a").is_none());
        let waits = waits_on(&mut attempts, &queue);
        // F7.13
        assert_eq!((waits, queue.waiting()), (true, 1));
        assert!(queue.worker_waits().is_empty());
        tokio::time::advance(Duration::from_secs(2)).await;
        attempts.resume().unwrap();
        // F7.13
        assert_eq!(attempts.queued(), Duration::from_secs(5));
    }
}
