//! The end of the daemon: requests in flight finish, or end with an error, and their records are stored.

use std::time::Duration;

use tokio::time::Instant;

use super::Daemon;
use crate::state::State;

/// Time before the end of the drain in which open requests get an error, and their records are written.
const RESERVE: Duration = Duration::from_secs(2);
/// How long connections may take to close, and tasks to end, after the last request.
const CLOSING: Duration = Duration::from_millis(500);
/// How long the end of the daemon waits for the decision log, and for the exporter of traces.
const LOG_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the requests in flight are counted.
const COUNT_INTERVAL: Duration = Duration::from_millis(20);

impl Daemon {
    /// Refuses new requests, waits for those in flight for at most the drain timeout, then stops. Requests
    /// that are open shortly before its end are ended with an error.
    pub async fn drain(self) {
        let state = self.state();
        state.draining.cancel();
        state.policies.drain();
        let limit = state.settings.drain_timeout;
        let deadline = Instant::now() + limit;
        requests_ended(&state, deadline - RESERVE.min(limit / 2)).await;
        let inflight = state.metrics.inflight.get();
        if inflight > 0 {
            tracing::warn!(inflight, "requests in flight ended: they outlast timeouts.drain");
            state.drain_end.pass();
            requests_ended(&state, deadline).await;
        }
        self.stop.cancel();
        state.tracker.close();
        let left = deadline.saturating_duration_since(Instant::now()) + CLOSING;
        let ended = tokio::time::timeout(left, async {
            self.servers.wait().await;
            state.tracker.wait().await;
        });
        if ended.await.is_err() {
            tracing::warn!(
                inflight = state.metrics.inflight.get(),
                "drain timeout expired with requests in flight"
            );
            // Requests write their records when they are dropped.
            self.abandon.cancel();
            let _ = tokio::time::timeout(CLOSING, self.servers.wait()).await;
        }
        if let Some(log) = &state.decision_log {
            log.flush(LOG_FLUSH_TIMEOUT).await;
        }
        if let Some(traces) = &state.traces {
            traces.flush(LOG_FLUSH_TIMEOUT).await;
        }
    }
}

/// Waits until no request is in flight, or `until` has come.
async fn requests_ended(state: &State, until: Instant) {
    while state.metrics.inflight.get() > 0 && Instant::now() < until {
        tokio::time::sleep(COUNT_INTERVAL).await;
    }
}
