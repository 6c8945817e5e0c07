//! When facts that engines report are published. A snapshot takes time in proportion to the workers, and each
//! of them reports when it joins: a snapshot for each report would take time in proportion to their square.

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Duration, Instant},
};

/// Least time between two snapshots of reported facts, as a multiple of what the last snapshot took.
const LEAST_GAP: u32 = 32;
/// Workers up to which every fact is published at once: their snapshots take little time.
const SMALL_FLEET: usize = 256;
/// Longest time that a reported fact waits.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Reported facts that wait to be published.
#[derive(Debug, Default)]
pub(super) struct Learned {
    state: Mutex<State>,
    waiting: Notify,
}

#[derive(Debug, Default)]
struct State {
    is_waiting: bool,
    /// When they may be published; `None`: now.
    due: Option<Instant>,
}

impl Learned {
    /// Returns whether a new fact may be published at once. If not, it waits.
    pub(super) fn may_publish(&self) -> bool {
        let mut state = self.state.lock();
        if state.due.is_none_or(|due| due <= Instant::now()) {
            return true;
        }
        state.is_waiting = true;
        self.waiting.notify_one();
        false
    }

    /// Notes that all facts are in the snapshot with this number of workers that was begun at `started`.
    pub(super) fn published(&self, workers: usize, started: Instant) {
        let now = Instant::now();
        let due = gap(workers, now.saturating_duration_since(started)).map(|gap| now + gap);
        *self.state.lock() = State { is_waiting: false, due };
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.state.lock().is_waiting
    }

    /// Waits for a fact that cannot be published at once. Returns when it can.
    pub(super) async fn due(&self) -> Instant {
        self.waiting.notified().await;
        self.state.lock().due.unwrap_or_else(Instant::now)
    }
}

/// Returns the time between two snapshots, by the number of workers in the last one and the time that it
/// took.
fn gap(workers: usize, took: Duration) -> Option<Duration> {
    (workers > SMALL_FLEET).then(|| took.saturating_mul(LEAST_GAP).min(LONGEST_WAIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b5_snapshots_of_reported_facts_take_a_small_share_of_the_time() {
        assert_eq!(gap(256, Duration::from_secs(3)), None);
        // B5.11
        assert_eq!(gap(257, Duration::from_millis(2)), Some(Duration::from_millis(64)));
        assert_eq!(gap(257, Duration::from_secs(3)), Some(Duration::from_secs(1)));
    }

    #[tokio::test(start_paused = true)]
    async fn facts_wait_while_the_last_snapshot_is_recent() {
        let learned = Learned::default();
        assert!(learned.may_publish() && !learned.is_waiting());
        let started = Instant::now();
        tokio::time::advance(Duration::from_millis(1)).await;
        learned.published(300, started);
        assert!(!learned.may_publish() && learned.is_waiting());
        assert_eq!(learned.due().await, Instant::now() + Duration::from_millis(32));
        tokio::time::advance(Duration::from_millis(32)).await;
        assert!(learned.may_publish());
        learned.published(1, Instant::now());
        assert!(!learned.is_waiting() && learned.may_publish());
    }
}
