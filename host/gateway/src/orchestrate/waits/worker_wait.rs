//! A request waits for a worker of its model when none is left: the last one went while it was in the queue,
//! or failed it (F7.16).

use pointsman_orchestration::{Event, Queued, Waiting};
use pointsman_routing::RouteError;
use pointsman_workers::{Leg, ModelName, PerLeg, Snapshot, WorkerId};
use tokio::time::{Duration, Instant};

use crate::{
    openai::{error::ApiError, request::Request},
    orchestrate::{
        Drive,
        availability::{has_workers, has_workers_without},
        plan::why_no_worker,
        route::parking,
    },
    state::State,
};

/// How long a request waits for the health check of a worker that broke its connection.
const MAX_WAIT_FOR_CHECK: Duration = Duration::from_secs(5);
/// Time between two looks whether the check has ended.
const CHECK_POLL: Duration = Duration::from_millis(250);

impl Drive {
    /// Has the request wait for a worker of its model, if none is left and requests of the model wait for
    /// one. The wait replaces its place in the queue. Returns whether it waits.
    pub(crate) fn wait_for_worker(
        &mut self,
        leg: Leg,
        error: &RouteError,
        place: &mut Option<Queued>,
    ) -> bool {
        if !matches!(error, RouteError::NoWorker { .. }) || self.has_worker() || self.attempts.is_paused() {
            return false;
        }
        let (state, request) = (&self.state, &self.request);
        let snapshot = state.registry.snapshot();
        let is_choosy = request.hints.names_worker() || self.routing_request.allowed_workers.is_some();
        let Some((_, limit)) = state.settings.worker_wait(&request.model, &snapshot).filter(|_| !is_choosy)
        else {
            return false;
        };
        if state.draining.is_cancelled() {
            return false;
        }
        if has_workers(request, &snapshot, &state.settings) {
            return self.wait_for_check(leg, &snapshot);
        }
        *place = None;
        let parking = parking(state, request, &self.routing_request, &self.account, leg);
        let waits = self.attempts.wait_for_worker(leg, &parking, limit);
        if waits {
            self.account.waits("workers", leg);
        }
        waits
    }

    /// Has the request wait until a health check tells whether the workers that broke its connection died, if
    /// no others are left. Returns whether it waits.
    fn wait_for_check(&mut self, leg: Leg, snapshot: &Snapshot) -> bool {
        let may_have_died = self
            .broke
            .iter()
            .filter(|(worker, at)| at.elapsed() < MAX_WAIT_FOR_CHECK && worker.may_have_died(*at));
        let without: Vec<WorkerId> = may_have_died.map(|(worker, _)| worker.id()).collect();
        let settings = &self.state.settings;
        if without.is_empty() || has_workers_without(&self.request, snapshot, settings, &without) {
            return false;
        }
        self.attempts.wait_until(leg, Instant::now() + CHECK_POLL);
        self.account.waits("workers", leg);
        true
    }

    /// Whether a leg has its worker, or a part of the answer was sent.
    fn has_worker(&self) -> bool {
        let PerLeg { prefill, answering } = &self.runs;
        let is_booked = prefill.booking.is_booked() || answering.booking.is_booked() || self.place.is_some();
        is_booked || self.legs.owes() || self.legs.has_open_handoff() || self.rest.is_some()
    }

    /// Ends a wait for a worker when a worker can serve the model, the time is over, or the gateway drains.
    /// Returns whether the request waits on, or failed.
    pub(crate) fn waits_for_worker(&mut self) -> bool {
        let Some(Waiting::Worker(wait, leg, until)) = self.attempts.waiting() else { return false };
        let (state, leg) = (&self.state, *leg);
        self.snapshot = state.registry.snapshot();
        if has_workers(&self.request, &self.snapshot, &state.settings) {
            let _ = wait.wake_others();
            return false;
        }
        let cause = if state.draining.is_cancelled() {
            ApiError::Draining
        } else if wait.gave_way() {
            too_many_wait(&self.request.model)
        } else if Instant::now() < *until {
            return true;
        } else {
            waited_in_vain(state, &self.request, *until - wait.since(), &self.snapshot)
        };
        self.attempts.resume();
        self.attempts.stop();
        self.leave_queue();
        // That an engine failed explains more.
        self.runs[leg].failure.get_or_insert(cause);
        self.report(Event::Unroutable);
        true
    }
}

/// Returns the error of a request for which no worker came in time.
pub(crate) fn waited_in_vain(
    state: &State,
    request: &Request,
    limit: Duration,
    snapshot: &Snapshot,
) -> ApiError {
    let (model, why) = (&request.model, why_no_worker(state, request, snapshot));
    ApiError::NoWorker(format!(
        "waiting for a worker of the model `{model}`: none could serve it within {limit:?}, the limit of \
         models.NAME.wait_for_workers: {why}; retry after the time in `retry-after`"
    ))
}

/// Returns the error of a request that may not wait for a worker.
pub(crate) fn too_many_wait(model: &ModelName) -> ApiError {
    ApiError::TooManyWait(format!(
        "waiting for a worker of the model `{model}`: as many requests wait for workers as may (its part of half of \
         queue.limit and queue.bytes, or queue.models.NAME.limit); retry after the time in `retry-after`"
    ))
}
