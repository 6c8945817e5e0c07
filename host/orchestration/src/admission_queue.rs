//! Queue of requests that wait because every eligible worker is busy (F7). It is off by default and bounded.
//! Its order is strict priority, then arrival time minus the priority jump. A request holds its place as a
//! value, so it leaves the queue when its client does.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, futures::OwnedNotified},
    time::{Duration, Instant},
};

/// How often a queued request retries when no capacity was released: a worker may have joined or recovered.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// The waiting requests.
#[derive(Debug)]
pub struct AdmissionQueue {
    limit: AtomicUsize,
    /// Number of requests in the queue, so that freeing a worker takes no lock while nothing waits.
    waiting: AtomicUsize,
    origin: Instant,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    tickets: u64,
    places: BTreeMap<Key, Weak<Notify>>,
}

/// Smallest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    priority: Reverse<i64>,
    due_us: i64,
    ticket: u64,
}

/// A place in the queue. Dropping it releases the place.
#[derive(Debug)]
pub struct Place {
    queue: Arc<AdmissionQueue>,
    key: Key,
    notify: Arc<Notify>,
}

impl AdmissionQueue {
    /// Returns a queue of at most `limit` requests; 0: no request waits.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit: AtomicUsize::new(limit),
            waiting: AtomicUsize::new(0),
            origin: Instant::now(),
            inner: Mutex::default(),
        })
    }

    /// Changes the limit. Requests that already wait stay in the queue.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Takes a place; `None` when the queue is full.
    #[must_use]
    pub fn park(self: &Arc<Self>, priority: f32, jump_s: f32, arrived: Instant) -> Option<Place> {
        let mut inner = self.inner.lock();
        if inner.places.len() >= self.limit.load(Ordering::Relaxed) {
            return None;
        }
        inner.tickets += 1;
        let arrived =
            i64::try_from(arrived.saturating_duration_since(self.origin).as_micros()).unwrap_or(i64::MAX);
        let key = Key {
            priority: Reverse(thousandths(priority)),
            due_us: arrived.saturating_sub(thousandths(jump_s).saturating_mul(1_000)),
            ticket: inner.tickets,
        };
        let notify = Arc::new(Notify::new());
        // Capacity may have been released a moment ago: the first attempt is made at once.
        notify.notify_one();
        inner.places.insert(key, Arc::downgrade(&notify));
        self.waiting.store(inner.places.len(), Ordering::SeqCst);
        Some(Place { queue: self.clone(), key, notify })
    }

    /// Wakes the first request of the queue: capacity was released.
    pub fn wake(&self) {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        let inner = self.inner.lock();
        let first = inner.places.values().next().and_then(Weak::upgrade);
        drop(inner);
        if let Some(first) = first {
            first.notify_one();
        }
    }

    /// Number of requests in the queue.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.inner.lock().places.len()
    }
}

impl Place {
    /// Waits until routing may succeed.
    pub async fn turn(&self, until: Instant) {
        let _ = tokio::time::timeout_at(Self::retry_at(until), self.woken()).await;
    }

    /// When a request that waits until `until` retries, although no capacity was released.
    #[must_use]
    pub fn retry_at(until: Instant) -> Instant {
        until.min(Instant::now() + RETRY_INTERVAL)
    }

    /// Resolves when capacity was released and this request is first. Independent of the place's lifetime.
    pub fn woken(&self) -> OwnedNotified {
        self.notify.clone().notified_owned()
    }

    /// Wakes the next request of the queue: the released capacity did not fit this one.
    pub fn pass_on(&self) {
        let inner = self.queue.inner.lock();
        let behind = (std::ops::Bound::Excluded(self.key), std::ops::Bound::Unbounded);
        let next = inner.places.range(behind).next().and_then(|(_, place)| place.upgrade());
        drop(inner);
        if let Some(next) = next {
            next.notify_one();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inner = self.queue.inner.lock();
        inner.places.remove(&self.key);
        self.queue.waiting.store(inner.places.len(), Ordering::SeqCst);
        drop(inner);
        // A wake-up that arrived too late for this request goes to the next one.
        self.queue.wake();
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a float cast saturates, and is 0 for NaN")]
fn thousandths(value: f32) -> i64 {
    (f64::from(value) * 1_000.0) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn f7_order_is_priority_then_arrival_less_jump() {
        let queue = AdmissionQueue::new(8);
        let now = Instant::now();
        let late = queue.park(0.0, 0.0, now + Duration::from_secs(2)).unwrap();
        let jumped = queue.park(0.0, 5.0, now + Duration::from_secs(4)).unwrap();
        let first = queue.park(0.0, 0.0, now).unwrap();
        let strict = queue.park(1.0, 0.0, now + Duration::from_secs(9)).unwrap();
        let order: Vec<u64> = queue.inner.lock().places.keys().map(|key| key.ticket).collect();
        // F7.2
        assert_eq!(order, [strict.key.ticket, jumped.key.ticket, first.key.ticket, late.key.ticket]);
    }

    #[tokio::test(start_paused = true)]
    async fn f7_it_is_bounded_and_a_request_leaves_with_its_place() {
        let queue = AdmissionQueue::new(1);
        let place = queue.park(0.0, 0.0, Instant::now()).unwrap();
        // F7.3
        assert!(queue.park(9.0, 0.0, Instant::now()).is_none());
        drop(place);
        // F7.4
        assert_eq!(queue.waiting(), 0);
        assert!(AdmissionQueue::new(0).park(0.0, 0.0, Instant::now()).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn f7_a_wake_up_reaches_the_first_and_is_passed_on() {
        let queue = AdmissionQueue::new(4);
        let (first, second) =
            (queue.park(0.0, 0.0, Instant::now()).unwrap(), queue.park(0.0, 0.0, Instant::now()).unwrap());
        let started = Instant::now();
        let far = started + Duration::from_secs(9);
        first.turn(far).await;
        second.turn(far).await;
        queue.wake();
        first.turn(far).await;
        assert_eq!(started.elapsed(), Duration::ZERO);
        first.pass_on();
        second.turn(far).await;
        assert_eq!(started.elapsed(), Duration::ZERO);
        second.turn(far).await;
        assert_eq!(started.elapsed(), RETRY_INTERVAL, "nothing was freed");
        second.turn(Instant::now() + Duration::from_millis(1)).await;
        assert_eq!(started.elapsed(), RETRY_INTERVAL + Duration::from_millis(1), "the queue timeout ends it");
    }
}
