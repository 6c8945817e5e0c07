//! How long a feed of KV events has not been live, and why.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::{Duration, Instant};

/// Time without a live feed after which that is a problem: longer than the longest delay of a reconnect and
/// a failing attempt.
const GRACE: Duration = Duration::from_secs(10);

/// The outage of one feed.
#[derive(Debug)]
pub(super) struct Outage(Mutex<State>);

#[derive(Debug)]
struct State {
    since: Instant,
    /// Why the last attempt failed or the events cannot be read, once the outage is a problem.
    reason: Option<Arc<str>>,
}

impl Default for Outage {
    fn default() -> Self {
        Self(Mutex::new(State { since: Instant::now(), reason: None }))
    }
}

impl Outage {
    /// Begins the time again: the feed became live or no longer is, or its worker is not healthy.
    pub(super) fn restart(&self) {
        *self.0.lock() = State { since: Instant::now(), reason: None };
    }

    /// Notes that one more attempt failed. Returns whether the outage became a problem with it.
    pub(super) fn lasts(&self, reason: &str) -> bool {
        let is_long = self.0.lock().since.elapsed() >= GRACE;
        is_long && self.begin(reason)
    }

    /// Makes the outage a problem at once, or replaces its reason. Returns whether it was none before.
    pub(super) fn begin(&self, reason: &str) -> bool {
        self.0.lock().reason.replace(reason.into()).is_none()
    }

    /// Returns the reason, if the outage is a problem.
    pub(super) fn reason(&self) -> Option<Arc<str>> {
        self.0.lock().reason.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_outage_is_a_problem_after_its_grace_once_until_it_ends() {
        let outage = Outage::default();
        for _ in 0..2 {
            tokio::time::advance(GRACE - Duration::from_millis(1)).await;
            assert!(!outage.lasts("refused") && outage.reason().is_none());
            tokio::time::advance(Duration::from_millis(1)).await;
            assert!(outage.lasts("refused"));
            assert!(!outage.lasts("silent"), "told before");
            assert_eq!(outage.reason().as_deref(), Some("silent"));
            outage.restart();
            assert_eq!(outage.reason(), None);
        }
    }
}
