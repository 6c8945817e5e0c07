//! The wait for room among the bodies in flight [I6.15, I6.22].

use std::{
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Instant, Interval, interval_at};

/// Longest wait for room, and how often it is looked for.
const TIMEOUT: Duration = Duration::from_secs(5);
const INTERVAL: Duration = Duration::from_millis(20);

/// The moments of a wait at which room is looked for, and the end of the wait; `None` while nothing waits.
#[derive(Debug, Default)]
pub(crate) struct RoomWait(Option<Box<(Interval, Instant)>>);

impl RoomWait {
    /// Polls for the next moment. Returns whether the wait may go on after it.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let now = Instant::now();
        let begins = || Box::new((interval_at(now + INTERVAL, INTERVAL), now + TIMEOUT));
        let wait = self.0.get_or_insert_with(begins);
        wait.0.poll_tick(cx).map(|_| Instant::now() < wait.1)
    }

    /// Ends the wait. Returns whether there was one.
    pub(crate) fn end(&mut self) -> bool {
        self.0.take().is_some()
    }
}
