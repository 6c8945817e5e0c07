//! Queue of requests that wait because every eligible worker is busy, or because as many requests are in
//! flight as may be (F7, L3). It is off by default and bounded. `fair_queue` has the order of the tenants.
//!
//! ```text
//! admit --> Admission  unconfirmed: counted as in flight
//!   |         | route fails: withdrawn; the request takes a Place, or passes its turn on
//!   |         | route succeeds: confirmed; the tenant is charged, the next request is woken
//!   |         ` drop: no longer in flight; the charge is replaced by the real tokens
//!   `-----> wait: a Place, woken in turn when capacity is released
//! ```
//! Both are values, so a request leaves the queue when its client does.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use fair_queue::{FairQueue, Key, Line as _, NO_TENANT, Position, Rules};
use parking_lot::Mutex;
use pointsman_routing::{CandidateId, RoutingRequest};
use pointsman_workers::{Invariant, Leg, ModelName};
use tokio::{
    sync::{Notify, futures::OwnedNotified},
    time::{Duration, Instant},
};

mod admission;
mod displacement;
mod drain_rate;
mod first_token_times;
mod preemption;
mod pressure;
mod rules;
#[cfg(test)]
mod tests;
mod worker_waits;

pub use admission::Admission;
pub use preemption::PausableStream;
pub use pressure::Pressure;
pub use rules::{
    AdmissionRequest, DEFAULT_OUTPUT_TOKENS, MAX_OUTPUT_ESTIMATE, ModelBounds, QueueOrder, QueueRules,
    TenantShare, estimated_output,
};
pub use worker_waits::WorkerWait;

use drain_rate::DrainRate;
use preemption::{Asking, Preemption};
use rules::{LineId, class_of, micros};
use worker_waits::WorkerWaits;

/// The order of waiting requests. Every fourth admission ages, so that no band starves (L3.6), and a tenant
/// that was idle passes others twice (L3.5).
const ORDER: Rules =
    Rules { ageing_turn: 4, credit: 2.0, check: |right| Invariant::WaitingRequests.check(right) };
/// How often queued requests are tried when no capacity was released: a worker may have joined or recovered.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// The waiting requests, and the number of those in flight.
#[derive(Debug)]
pub struct AdmissionQueue {
    /// Whether nothing is counted and no request waits.
    off: AtomicBool,
    /// Number of requests in the queue, so that freeing a worker takes no lock while nothing waits.
    waiting: AtomicUsize,
    /// Whether streams pause for requests of a higher class.
    preempts: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// The time from which dues and deadlines are counted.
    origin: Instant,
    rules: QueueRules,
    order: FairQueue<LineId, Weak<Turn>>,
    bytes: usize,
    /// Prompt tokens of the requests in the queue.
    tokens: u64,
    tickets: u64,
    inflight: usize,
    inflight_of: HashMap<ModelName, usize>,
    /// Lines that found no worker since capacity was released.
    refused: BTreeSet<LineId>,
    drain: DrainRate,
    first_token_times: first_token_times::FirstTokenTimes,
    polled: Instant,
    /// The request whose turn it is. There is one at a time, so that the order holds.
    called: Weak<Turn>,
    preemption: Preemption,
    worker_waits: WorkerWaits,
}

/// Tells a waiting request that it may try.
#[derive(Debug, Default)]
struct Turn {
    notify: Arc<Notify>,
    /// Whether it is the request's turn.
    has_come: AtomicBool,
    /// Whether capacity was released since the request began its attempt. Changed under the queue's lock.
    has_come_again: AtomicBool,
    /// Whether another request took its place. Changed under the queue's lock.
    lost_place: AtomicBool,
    /// Size of the request's body.
    bytes: usize,
    /// Tokens of its prompt.
    tokens: u64,
}

/// A place in the queue. Dropping it releases the place.
#[derive(Debug)]
pub struct Place {
    queue: Arc<AdmissionQueue>,
    position: Position<LineId>,
    turn: Arc<Turn>,
    /// What it asks of running streams, if they may pause for it.
    asking: Option<Asking>,
}

/// Whether a request may look for a worker now.
#[derive(Debug)]
pub enum Admit {
    /// The queue is off: nothing is counted.
    Uncounted,
    /// The request may look for a worker. The admission is not confirmed yet.
    Now(Admission),
    /// Others are ahead of it, or as many requests are in flight as may be.
    Wait,
}

impl AdmissionQueue {
    /// Returns an empty queue.
    #[must_use]
    pub fn new(rules: QueueRules) -> Arc<Self> {
        let (off, preempts) = (AtomicBool::new(rules.is_off()), AtomicBool::new(rules.preempt));
        let origin = Instant::now();
        let inner = Inner {
            origin,
            rules,
            order: FairQueue::new(ORDER),
            bytes: 0,
            tokens: 0,
            tickets: 0,
            inflight: 0,
            inflight_of: HashMap::new(),
            refused: BTreeSet::new(),
            drain: DrainRate::default(),
            first_token_times: first_token_times::FirstTokenTimes::default(),
            polled: origin,
            called: Weak::new(),
            preemption: Preemption::default(),
            worker_waits: WorkerWaits::default(),
        };
        Arc::new(Self { off, waiting: AtomicUsize::new(0), preempts, inner: Mutex::new(inner) })
    }

    /// Changes the rules. Requests that already wait stay in the queue; their tenants' new weights apply to
    /// what is admitted from now on.
    pub fn set_rules(&self, rules: QueueRules) {
        self.off.store(rules.is_off(), Ordering::Relaxed);
        self.preempts.store(rules.preempt, Ordering::Relaxed);
        self.inner.lock().rules = rules;
        self.wake();
    }

    /// Decides whether a request may look for a worker for a leg. `place` is the place that it has.
    #[must_use]
    pub fn admit(
        self: &Arc<Self>,
        admission_request: &AdmissionRequest<'_>,
        leg: Leg,
        place: Option<&Place>,
    ) -> Admit {
        if place.is_none() && self.off.load(Ordering::Relaxed) {
            return Admit::Uncounted;
        }
        let mut inner = self.inner.lock();
        let others_first = match place {
            Some(place) => !place.is_its_turn(),
            None => inner.order.has(&admission_request.line(leg, &[])),
        };
        if others_first || !inner.may_run(admission_request.model) {
            return Admit::Wait;
        }
        if let Some(place) = place {
            // The attempt that begins now sees all capacity that was released so far.
            place.turn.has_come_again.store(false, Ordering::SeqCst);
        }
        inner.inflight += 1;
        *inner.inflight_of.entry(admission_request.model.clone()).or_insert(0) += 1;
        drop(inner);
        Admit::Now(Admission::unconfirmed(self.clone(), admission_request))
    }

    /// Returns whether requests wait for workers of a leg, so that this one would pass them.
    #[must_use]
    pub fn has_line(&self, admission_request: &AdmissionRequest<'_>, leg: Leg) -> bool {
        self.waiting() > 0 && self.inner.lock().order.has(&admission_request.line(leg, &[]))
    }

    /// Takes a place, in a full queue that of another request where L3.14 allows it; otherwise `None`.
    /// `tried` are workers that the request tried already. A request that waited for a worker has a place,
    /// which becomes this one. No other request takes the place if `keeps_place`.
    #[must_use]
    pub fn park(
        self: &Arc<Self>,
        admission_request: &AdmissionRequest<'_>,
        leg: Leg,
        tried: &[CandidateId],
        waited: Option<&WorkerWait>,
        keeps_place: bool,
    ) -> Option<Place> {
        let mut inner = self.inner.lock();
        let had_place = waited.is_some_and(|wait| inner.end_wait(wait));
        let taken = if had_place { Vec::new() } else { inner.find_or_make_room(admission_request)? };
        let mut place = self.insert(&mut inner, admission_request, leg, tried);
        if !keeps_place {
            let need = admission_request.need(&inner.rules);
            inner.order.may_lose_place(&place.position, need);
        }
        inner.order.take(&place.position, &taken);
        place.asking = inner.asking(&place.position.line, admission_request.request);
        Some(place)
    }

    /// Takes a place for the rest of a stream that paused. The share of streams that are paused bounds how
    /// many there are, and `limits.body_bytes_in_flight` their bodies.
    #[must_use]
    pub(crate) fn park_rest(
        self: &Arc<Self>,
        admission_request: &AdmissionRequest<'_>,
        leg: Leg,
        tried: &[CandidateId],
    ) -> Place {
        // The client has its first token already.
        let request = RoutingRequest { ttft_target_us: None, ..admission_request.request.clone() };
        let rest = AdmissionRequest { request: &request, bytes: 0, ..*admission_request };
        self.insert(&mut self.inner.lock(), &rest, leg, tried)
    }

    fn insert(
        self: &Arc<Self>,
        inner: &mut Inner,
        admission_request: &AdmissionRequest<'_>,
        leg: Leg,
        tried: &[CandidateId],
    ) -> Place {
        let (tenant, bytes) = (admission_request.request.tenant_hash, admission_request.bytes);
        let (rules, weight) = (&inner.rules, inner.rules.share(tenant).weight);
        let (due_us, deadline_us) = admission_request.dues_us(inner.origin, rules);
        let priority = std::cmp::Reverse(class_of(rules, admission_request.request));
        let key = Key { priority, due_us, ticket: inner.tickets, deadline_us };
        inner.tickets += 1;
        inner.bytes += bytes;
        let tokens = u64::from(admission_request.request.prompt_tokens);
        inner.tokens += tokens;
        let line = admission_request.line(leg, tried);
        let turn = Arc::new(Turn { bytes, tokens, ..Turn::default() });
        let is_first = !inner.order.has(&line);
        let position =
            inner.order.insert(line, tenant.unwrap_or(NO_TENANT), weight, key, Arc::downgrade(&turn));
        if is_first {
            // Capacity may have been released a moment ago: the first attempt is made at once.
            inner.refused.remove(&position.line);
            if !inner.someone_is_called() {
                inner.call(&turn);
            }
        }
        self.waiting.store(inner.order.len(), Ordering::SeqCst);
        Place { queue: self.clone(), position, turn, asking: None }
    }

    /// Wakes the next request: capacity was released.
    pub fn wake(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            let mut inner = self.inner.lock();
            inner.refused.clear();
            inner.call_next();
        }
    }

    /// Wakes the next request when none was woken for some time.
    fn poll(&self) {
        let mut inner = self.inner.lock();
        let now = Instant::now();
        if now.saturating_duration_since(inner.polled) >= RETRY_INTERVAL {
            inner.polled = now;
            inner.refused.clear();
            inner.call_next();
        }
    }

    /// Number of requests in the queue.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Bytes of the bodies of the requests in the queue.
    #[must_use]
    pub fn waiting_bytes(&self) -> usize {
        self.inner.lock().bytes
    }

    /// Number of admitted requests that have not ended; 0 while the queue is off.
    #[must_use]
    pub fn inflight(&self) -> usize {
        self.inner.lock().inflight
    }
}

impl Inner {
    /// Tells the next request of the lines that may be served that its turn has come.
    fn call_next(&mut self) {
        // A request is late once its first token would come after its target.
        let (now, times) = (micros(self.origin, Instant::now()), &self.first_token_times);
        self.order.pass_deadlines(|line| now.saturating_add(times.median_us(line.group())));
        let next = self.order.next(|line| !self.refused.contains(line));
        if let Some(turn) = next.and_then(|(_, turn)| turn.upgrade()) {
            self.call(&turn);
        }
    }

    /// Gives the turn to one request, and takes it from the one that has it.
    fn call(&mut self, turn: &Arc<Turn>) {
        if let Some(before) = self.called.upgrade().filter(|before| !Arc::ptr_eq(before, turn)) {
            before.has_come.store(false, Ordering::SeqCst);
        }
        self.called = Arc::downgrade(turn);
        if turn.has_come.swap(true, Ordering::SeqCst) {
            turn.has_come_again.store(true, Ordering::SeqCst);
        }
        turn.notify.notify_one();
    }

    fn someone_is_called(&self) -> bool {
        self.called.upgrade().is_some_and(|turn| turn.has_come.load(Ordering::SeqCst))
    }
}

impl Place {
    /// Waits until routing may succeed.
    pub async fn turn(&self, until: Instant) {
        let _ = tokio::time::timeout_at(Self::retry_at(until), self.woken()).await;
    }

    /// When a request that waits until `until` looks again, although no capacity was released.
    #[must_use]
    pub fn retry_at(until: Instant) -> Instant {
        until.min(Instant::now() + RETRY_INTERVAL)
    }

    /// Resolves when it is this request's turn. Independent of the place's lifetime.
    pub fn woken(&self) -> OwnedNotified {
        self.turn.notify.clone().notified_owned()
    }

    /// Returns whether capacity was released for this request.
    pub(crate) fn is_its_turn(&self) -> bool {
        self.turn.has_come.load(Ordering::SeqCst)
    }

    /// Keeps waiting. A turn came without success: the released capacity did not fit this request. The next
    /// one that other workers may serve is woken. When capacity was released during the attempt, it is this
    /// request's turn again, at once.
    pub(crate) fn try_later(&self) {
        let mut inner = self.queue.inner.lock();
        if !self.is_its_turn() {
            drop(inner);
            return self.queue.poll();
        }
        if self.turn.has_come_again.swap(false, Ordering::SeqCst) {
            self.turn.notify.notify_one();
            return;
        }
        self.turn.has_come.store(false, Ordering::SeqCst);
        inner.refused.insert(self.position.line.clone());
        inner.call_next();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inner = self.queue.inner.lock();
        inner.release_place(&self.position);
        self.asking.iter().for_each(Asking::withdraw);
        self.queue.waiting.store(inner.order.len(), Ordering::SeqCst);
        if self.is_its_turn() {
            // A turn that comes too late for this request goes to the next one.
            inner.refused.clear();
            inner.call_next();
        }
    }
}
