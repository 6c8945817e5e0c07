//! Calls to engines for tokens: a fixed number at a time. Further ones wait, and tenants take turns by bytes.

use std::{fmt, sync::Arc};

use fair_queue::{FairQueue, Key, NO_TENANT, Position, Rules};
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Number of concurrent calls for one model.
const MAX_CALLS: usize = 16;
/// Number of calls that wait.
const MAX_WAITING: usize = 64;
/// Size of the prompts that wait, bytes.
const MAX_WAITING_BYTES: usize = 16 * 1024 * 1024;
/// Cost of a call beside its bytes, so that many short prompts are not free.
const FIXED_COST: u64 = 1_024;
/// The order of waiting calls: by tenants only.
const ORDER: Rules = Rules { ageing_turn: 0, credit: 0.0, check: |right| debug_assert!(right) };

/// The calls for one model.
pub(super) struct CallQueue {
    state: Mutex<State>,
}

struct State {
    /// Number of calls that may begin. It is 0 while any waits.
    free: usize,
    waiting: FairQueue<(), Waiting>,
    /// Size of the prompts that wait, bytes.
    bytes: usize,
    /// Number of calls that waited so far.
    arrived: u64,
}

struct Waiting {
    bytes: usize,
    turn: oneshot::Sender<CallPermit>,
}

/// The right to call an engine. Dropping it passes it on.
pub(super) struct CallPermit(Arc<CallQueue>);

/// A call that waits. Dropping it gives up its place.
struct Place<'a> {
    queue: &'a CallQueue,
    position: Position<()>,
}

impl CallQueue {
    pub(super) fn new() -> Arc<Self> {
        let waiting = FairQueue::new(ORDER);
        Arc::new(Self { state: Mutex::new(State { free: MAX_CALLS, waiting, bytes: 0, arrived: 0 }) })
    }

    /// Waits until a call for a prompt of `bytes` may begin. Returns `None` if the queue is full. A full
    /// queue drops the last call of the tenant with the most waiting calls, if that makes room for this one.
    pub(super) async fn enter(self: &Arc<Self>, tenant: Option<u64>, bytes: usize) -> Option<CallPermit> {
        let (turn, called) = oneshot::channel();
        let position = {
            let mut state = self.state.lock();
            if state.free > 0 {
                state.free -= 1;
                return Some(CallPermit(self.clone()));
            }
            state.insert(tenant.unwrap_or(NO_TENANT), Waiting { bytes, turn })?
        };
        let _place = Place { queue: self, position };
        called.await.ok()
    }
}

impl State {
    /// Adds a call, unless too many others wait that would not come after it.
    fn insert(&mut self, tenant: u64, waiting: Waiting) -> Option<Position<()>> {
        let bytes = waiting.bytes;
        let fits = |calls: usize, sum: usize| {
            calls < MAX_WAITING && sum.checked_add(bytes).is_some_and(|sum| sum <= MAX_WAITING_BYTES)
        };
        let (mut calls, mut sum) = (self.waiting.len(), self.bytes);
        if !fits(calls, sum) {
            let suffices = |other: &Waiting| {
                (calls, sum) = (calls - 1, sum - other.bytes);
                fits(calls, sum)
            };
            for last in self.waiting.last_after(&(), tenant, |other| cost(other.bytes), suffices)? {
                self.remove(&last);
            }
        }
        let key = Key::in_turn(self.arrived);
        self.arrived += 1;
        self.bytes += bytes;
        Some(self.waiting.insert((), tenant, 1.0, key, waiting))
    }

    fn remove(&mut self, position: &Position<()>) -> Option<Waiting> {
        let removed = self.waiting.remove(position)?;
        self.bytes -= removed.bytes;
        Some(removed)
    }

    /// Takes the next call, and charges its tenant for it.
    fn pop(&mut self) -> Option<Waiting> {
        let (position, next) = self.waiting.next(|()| true)?;
        let cost = cost(next.bytes);
        self.waiting.charge(&position, 1.0, cost);
        self.remove(&position)
    }
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        let next = {
            let mut state = self.0.state.lock();
            let next = state.pop();
            state.free += usize::from(next.is_none());
            next
        };
        // A permit that comes back, because nothing waits for it any more, is passed on as it is dropped.
        drop(next.map(|next| next.turn.send(Self(self.0.clone()))));
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.queue.state.lock().remove(&self.position);
    }
}

impl fmt::Debug for CallQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallQueue").finish_non_exhaustive()
    }
}

#[expect(clippy::cast_precision_loss, reason = "shares need no more precision")]
fn cost(bytes: usize) -> f64 {
    u64::try_from(bytes).unwrap_or(u64::MAX).saturating_add(FIXED_COST) as f64
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    type Call = std::pin::Pin<Box<dyn Future<Output = Option<CallPermit>>>>;

    fn enter(queue: &Arc<CallQueue>, tenant: u64, bytes: usize) -> Call {
        let queue = queue.clone();
        Box::pin(async move { queue.enter(Some(tenant), bytes).await })
    }

    /// Calls that run, and those of tenant 1 that wait.
    fn full(waiting: usize, bytes: usize) -> (Arc<CallQueue>, Vec<CallPermit>, Vec<Call>) {
        let queue = CallQueue::new();
        let run = || enter(&queue, 1, bytes).now_or_never().flatten().unwrap();
        let running = (0..MAX_CALLS).map(|_| run()).collect();
        let mut waiting: Vec<_> = (0..waiting).map(|_| enter(&queue, 1, bytes)).collect();
        waiting.iter_mut().for_each(|call| assert!(call.now_or_never().is_none()));
        (queue, running, waiting)
    }

    #[test]
    fn h7_a_call_of_another_tenant_comes_second_and_takes_the_place_of_the_last_one() {
        let (queue, mut running, mut waiting) = full(MAX_WAITING, 10);
        // H7.16
        assert!(enter(&queue, 1, 10).now_or_never().is_some_and(|refused| refused.is_none()));
        let mut other = enter(&queue, 2, 10);
        assert!((&mut other).now_or_never().is_none());
        // H7.16
        assert!(waiting.pop().unwrap().now_or_never().is_some_and(|refused| refused.is_none()));
        running.pop();
        let first = (&mut waiting[0]).now_or_never().flatten().unwrap();
        assert!((&mut other).now_or_never().is_none());
        drop(first);
        assert!(other.now_or_never().flatten().is_some());
    }

    #[test]
    fn h7_calls_give_way_only_if_that_makes_room() {
        let (queue, _running, mut small) = full(3, 10);
        let mut large = enter(&queue, 3, MAX_WAITING_BYTES - 30);
        assert!((&mut large).now_or_never().is_none());
        // H7.16
        assert!(enter(&queue, 2, 100).now_or_never().is_some_and(|refused| refused.is_none()));
        assert!(small.iter_mut().all(|call| call.now_or_never().is_none()), "they would not suffice");
        let mut other = enter(&queue, 2, 15);
        assert!((&mut other).now_or_never().is_none());
        let gave_way = small.iter_mut().map(|call| call.now_or_never().is_some());
        // H7.16
        assert_eq!(gave_way.collect::<Vec<_>>(), [false, true, true]);
        assert!(large.now_or_never().is_none());
    }

    #[test]
    fn h7_calls_that_are_given_up_leave_their_permit_and_their_bytes_to_others() {
        let (queue, mut running, mut waiting) = full(3, MAX_WAITING_BYTES / 3);
        // H7.16
        assert!(enter(&queue, 1, 10).now_or_never().is_some_and(|refused| refused.is_none()), "their bytes");
        assert!(enter(&queue, 2, MAX_WAITING_BYTES + 1).now_or_never().is_some_and(|call| call.is_none()));
        drop(waiting.remove(1));
        running.pop();
        // It has its permit, and does not look.
        drop(waiting.remove(0));
        let last = waiting.remove(0).now_or_never().flatten();
        assert!(last.is_some());
        drop((last, running));
        let state = queue.state.lock();
        assert_eq!((state.free, state.bytes, state.waiting.is_empty()), (MAX_CALLS, 0, true));
    }
}
