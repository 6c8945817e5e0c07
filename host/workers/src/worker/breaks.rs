//! When the engine last broke on requests: whether it broke on one of them alone, and works on the others.

use parking_lot::Mutex;
use tokio::time::{Duration, Instant};

use super::Worker;

/// How long after one request of an engine that dies the others have broken, too.
const TOGETHER: Duration = Duration::from_secs(1);
/// How long they have before a sign of life counts: what the engine wrote before it died may still arrive.
const OTHERS_BREAK: Duration = Duration::from_millis(200);
/// Time between two looks for a sign of life.
const LOOK: Duration = Duration::from_millis(50);

/// The last two times.
#[derive(Debug, Default)]
pub(super) struct Breaks(Mutex<[Option<Instant>; 2]>);

impl Breaks {
    fn note(&self) {
        let mut last = self.0.lock();
        let [_, newest] = *last;
        *last = [newest, Some(Instant::now())];
    }

    fn were_two(&self) -> bool {
        self.0.lock().iter().all(|at| at.is_some_and(|at| at.elapsed() <= TOGETHER))
    }
}

impl Worker {
    /// Notes that the engine broke on a request.
    pub fn note_broke(&self) {
        self.state.breaks.note();
    }

    /// Waits until it is known whether the engine, which just broke on a request, works on others of this
    /// gateway: bytes of one arrived since, or it passed a health check. Without such a sign within a second,
    /// the engine may have died, and the request is not to blame.
    pub async fn broke_alone(&self) -> bool {
        let from = Instant::now();
        tokio::time::sleep(OTHERS_BREAK).await;
        let activity = self.activity();
        activity.take_heard();
        let since = Instant::now();
        self.check_health();
        while self.may_have_broken_alone() && from.elapsed() < TOGETHER {
            tokio::time::sleep(LOOK).await;
            let works = activity.take_heard() || activity.passed_check_since(since);
            if works && self.may_have_broken_alone() {
                return true;
            }
        }
        false
    }

    /// Whether the engine broke on no other request, although it has others of this gateway.
    fn may_have_broken_alone(&self) -> bool {
        self.own_requests() > 0 && !self.state.breaks.were_two() && !self.is_down()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prefix_index::Prefix;

    use super::*;
    use crate::{Booking, BookingRequest, Leg, worker::healthy};

    /// An engine that broke on one request and has another one.
    fn broken() -> (Arc<Worker>, Booking) {
        let worker = healthy();
        let booking =
            worker.candidates()[0].book(&BookingRequest::new(Leg::Aggregated, Prefix::default(), 16, 16));
        worker.note_sign_of_life();
        worker.note_broke();
        (worker, booking)
    }

    /// Whether it broke alone, and after how many milliseconds that was known. `then` happens to the engine
    /// after so many milliseconds.
    async fn judged(worker: &Worker, after: u64, then: impl FnOnce(&Worker)) -> (bool, u128) {
        let from = Instant::now();
        let happens = async {
            tokio::time::sleep(Duration::from_millis(after)).await;
            then(worker);
        };
        let (alone, ()) = tokio::join!(worker.broke_alone(), happens);
        (alone, from.elapsed().as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn i14_an_engine_that_broke_on_a_request_is_not_acquitted_without_a_sign_of_life() {
        let (worker, other) = broken();
        // I14.8
        assert_eq!(judged(&worker, 0, |_| {}).await, (false, 1_000), "it may have died");
        let (worker, _other) = broken();
        assert_eq!(judged(&worker, 150, Worker::note_sign_of_life).await, (false, 1_000), "written before");
        let (worker, _other) = broken();
        assert_eq!(judged(&worker, 520, Worker::note_sign_of_life).await, (true, 550));
        let (worker, _other) = broken();
        let passes = |worker: &Worker| worker.activity().note_health(Instant::now());
        assert_eq!(judged(&worker, 520, passes).await, (true, 550));
        let (worker, _other) = broken();
        assert_eq!(judged(&worker, 520, Worker::note_broke).await, (false, 550), "it broke on others, too");
        let (worker, other_too) = broken();
        drop((other, other_too));
        assert_eq!(judged(&worker, 0, |_| {}).await, (false, 200), "it has no other request");
    }

    #[tokio::test(start_paused = true)]
    async fn two_breaks_within_a_second_are_the_engine_s() {
        let breaks = Breaks::default();
        breaks.note();
        assert!(!breaks.were_two());
        tokio::time::advance(TOGETHER).await;
        breaks.note();
        assert!(breaks.were_two());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(!breaks.were_two());
    }
}
