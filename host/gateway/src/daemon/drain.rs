//! The end of the daemon: requests in flight finish, or end with an error, and their records are stored.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::Daemon;
use crate::{http::listener::LAST_REQUEST, state::State};

/// Time before the end of the drain in which open requests get an error, and their records are written.
const RESERVE: Duration = Duration::from_secs(2);
/// How long connections may take to close, and tasks to end, after the last request.
const CLOSING: Duration = Duration::from_millis(500);
/// How long the end of the daemon waits for the decision log, and for the exporter of traces.
const LOG_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the process may need after the drain, with a margin.
const AFTER_DRAIN: Duration = Duration::from_secs(15);
/// How often the requests in flight and the connections are counted.
const COUNT_INTERVAL: Duration = Duration::from_millis(20);

impl Daemon {
    /// Returns the longest time from the signal that ends the daemon to the end of the process.
    pub(crate) fn longest_end(&self) -> Duration {
        let state = self.state();
        let limits = state.settings.drain_delay.saturating_add(state.settings.drain_timeout);
        limits.saturating_add(AFTER_DRAIN)
    }

    /// Waits for the delay of the drain. Health checks find the gateway not ready, and requests are served.
    pub(crate) async fn delay_drain(&self) {
        let state = self.state();
        let delay = state.settings.drain_delay;
        state.stopping.cancel();
        if !delay.is_zero() {
            tracing::info!(?delay, "not ready any more; requests are served until the drain begins");
            sleep(delay).await;
        }
    }

    /// Refuses new requests, waits for those in flight for at most the drain timeout, then stops. Requests
    /// that are open shortly before its end are ended with an error.
    pub async fn drain(self) {
        let state = self.state();
        state.stopping.cancel();
        state.draining.cancel();
        state.policies.drain();
        let (begun, limit) = (Instant::now(), state.settings.drain_timeout);
        let (deadline, close_idle) = (begun + limit, begun + LAST_REQUEST);
        let reserve = deadline - RESERVE.min(limit / 2);
        let is_quiet =
            || no_request(&state) && (state.connections.used() == 0 || Instant::now() >= close_idle);
        wait_until(reserve, is_quiet).await;
        if no_request(&state) {
            // Requests that proxies sent before they knew may still come to the picker, and are served.
            self.stop.cancel();
            let _ = timeout_at(reserve, self.ended(&state)).await;
        }
        let inflight = state.metrics.inflight.get();
        if inflight > 0 {
            tracing::warn!(inflight, "requests in flight ended: they outlast timeouts.drain");
            state.drain_end.pass();
            wait_until(deadline, || no_request(&state)).await;
        }
        self.stop.cancel();
        if timeout_at(deadline.max(Instant::now()) + CLOSING, self.ended(&state)).await.is_err() {
            tracing::warn!(
                inflight = state.metrics.inflight.get(),
                "drain timeout expired with requests in flight"
            );
            // Requests write their records when they are dropped.
            self.abandon.cancel();
            let _ = timeout(CLOSING, self.servers.wait()).await;
        }
        if let Some(log) = &state.decision_log {
            log.flush(LOG_FLUSH_TIMEOUT).await;
        }
        if let Some(traces) = &state.traces {
            traces.flush(LOG_FLUSH_TIMEOUT).await;
        }
    }

    /// Waits until all connections and tasks have ended.
    async fn ended(&self, state: &State) {
        state.tracker.close();
        self.servers.wait().await;
        state.tracker.wait().await;
    }
}

fn no_request(state: &State) -> bool {
    state.metrics.inflight.get() <= 0
}

/// Waits until `holds`, or `end` has come.
async fn wait_until(end: Instant, holds: impl Fn() -> bool) {
    while !holds() && Instant::now() < end {
        sleep(COUNT_INTERVAL).await;
    }
}
