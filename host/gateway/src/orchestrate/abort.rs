//! Aborts a leg by its request id, where the engine can. The connection of a leg that is cancelled stays open
//! until the engine has answered: SGLang forgets a request whose connection closes, ignores an abort of it
//! that comes later, and generates the rest of its answer (sglang#36333).

use std::{mem, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Response, StatusCode};
use pointsman_workers::{Leg, Worker};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Drive, target};
use crate::{
    connectors::{connector_for, leg_headers},
    upstream::{self, CallError, Destination, LegHeaders, Silence, Upstream},
};

/// Delays between repetitions of an abort.
const RETRY_DELAYS: [Duration; 4] =
    [Duration::from_millis(50), Duration::from_millis(250), Duration::from_secs(1), Duration::from_secs(5)];
/// Delay of the last abort: how long an engine may take to look at a request whose connection was closed.
const FINAL_DELAY: Duration = Duration::from_millis(50);
/// Longest time for which a leg that is cancelled waits for the answer to its abort. Its work has to stop
/// within 100 ms (E2.1).
const MAX_WAIT: Duration = Duration::from_millis(80);

/// The calls that abort one leg.
struct AbortCalls {
    upstream: Upstream,
    to: Destination,
    headers: LegHeaders,
    /// One body for each item of the request about which the engine is asked.
    bodies: Vec<Bytes>,
    /// Whether the request has several items. One of them is not asked about again when the engine has
    /// answered, all together have the time of one abort, and they have a share of the turns only.
    is_list: bool,
    worker: Arc<Worker>,
    limit: Duration,
}

impl Drive {
    /// Asks the engine of a leg to abort it, if the engine can. Does nothing while such a call is on its way.
    pub(super) fn abort(&mut self, leg: Leg) {
        let run = &mut self.runs[leg];
        run.aborted = true;
        if run.abort_answered.as_ref().is_some_and(|answered| !answered.is_cancelled()) {
            return;
        }
        let candidate = self.runs[leg].candidate.as_ref().filter(|_| self.executor.calls());
        let Some(candidate) = candidate else { return };
        let spec = candidate.worker.spec();
        let Some(abort) = connector_for(spec).abort(&self.request, self.token) else { return };
        let calls = AbortCalls {
            upstream: self.upstream.clone(),
            to: Destination::new(spec, abort.path),
            headers: leg_headers(&self.context(), target(candidate), self.request.authorization.as_ref()),
            is_list: abort.bodies.len() > 1,
            bodies: abort.bodies,
            worker: candidate.worker.clone(),
            limit: self.state.settings.leg_timeouts.abort,
        };
        let over = self.over.get_or_insert_default().clone();
        if self.legs.is_finished() {
            over.cancel();
        }
        let answered = CancellationToken::new();
        self.runs[leg].abort_answered = Some(answered.clone());
        self.state.tracker.spawn(calls.run(over, answered));
    }

    /// Ends the call of a leg and releases its booking. The connection closes when the engine has answered an
    /// abort that is on its way, at the latest after [`MAX_WAIT`].
    pub(super) fn stop(&mut self, leg: Leg) {
        let run = &mut self.runs[leg];
        let (connection, answered) = (run.stop(), run.abort_answered.take());
        self.free(leg);
        if let Some(answered) = answered.filter(|answered| !answered.is_cancelled() && connection.is_open()) {
            let wait = MAX_WAIT.min(self.state.settings.leg_timeouts.abort);
            self.state.tracker.spawn(async move {
                let _ = tokio::time::timeout(wait, answered.cancelled()).await;
                drop(connection);
            });
        }
    }
}

impl AbortCalls {
    /// Asks the engine until `over` is cancelled: no leg runs any more. Cancels `answered` after the first
    /// time.
    async fn run(mut self, over: CancellationToken, answered: CancellationToken) {
        let until = Instant::now() + self.limit;
        // An abort may arrive before the request that it is meant for: it is repeated while that one runs.
        for pause in RETRY_DELAYS {
            self.ask_until(until).await;
            answered.cancel();
            if self.bodies.is_empty() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = over.cancelled() => break,
            }
        }
        // It is sent once more afterwards: the engine may read the request only after its connection was
        // closed.
        if over.is_cancelled() {
            tokio::time::sleep(FINAL_DELAY).await;
            self.ask_until(until).await;
        }
    }

    /// Asks the engine once, about a list for no longer than this.
    async fn ask_until(&mut self, until: Instant) {
        if self.is_list {
            // What is left of the list then is given up.
            let _ = tokio::time::timeout_at(until, self.ask()).await;
        } else {
            self.ask().await;
        }
    }

    /// Asks the engine once to abort each item.
    async fn ask(&mut self) {
        let mut rest = mem::take(&mut self.bodies).into_iter();
        let mut again = Vec::new();
        while let Some(body) = rest.next() {
            let mut sent = self.send(&body).await;
            // The engine may have closed a connection that was kept since the last item.
            if matches!(sent, Err(CallError::Closed(_) | CallError::Broken(_))) {
                sent = self.send(&body).await;
            }
            if !self.is_list || !matches!(sent, Ok(_) | Err(CallError::Status { .. })) {
                again.push(body);
            }
            if let Err(error) = sent {
                log_failed_abort(&self.worker, &error);
                // An engine that closed the connection or refused one item may take the others. An
                // unreachable worker is not tried once for each of them, because there may be thousands.
                if !matches!(error, CallError::Broken(_) | CallError::Status { .. }) {
                    again.extend(rest);
                    break;
                }
            }
        }
        self.bodies = again;
    }

    /// Sends one abort. The wait for its turn counts: aborts that an engine does not answer end together.
    async fn send(&self, body: &Bytes) -> Result<Response<Bytes>, CallError> {
        let silence = Silence { what: "answer to an abort", key: "abort", limit: self.limit };
        let call = async {
            let _turn = self.worker.abort_turn(self.is_list).await;
            self.upstream.whole(&self.to, &self.headers, body.clone()).await
        };
        upstream::with_time_limit(silence, call).await
    }
}

/// Logs that an abort failed. If the engine does not take the key, no abort of it succeeds: that is a
/// warning, once for each worker.
fn log_failed_abort(worker: &Worker, error: &CallError) {
    let id = worker.id();
    let is_of_key =
        matches!(error, CallError::Status { status: StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, .. });
    if is_of_key && worker.note_abort_not_allowed() {
        tracing::warn!(
            worker = %id, %error,
            "abort not allowed: requests of clients that left may run on; start the engine without \
             --admin-api-key, or with the api_key of the worker as its value"
        );
    } else {
        tracing::debug!(worker = %id, %error, "abort failed");
    }
}
