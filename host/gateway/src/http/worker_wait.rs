//! A request for a model that no worker can serve now waits for one, for as long as `wait_for_workers` of the
//! model says (F7.9). Its pool may be scaled to zero.

use std::sync::Arc;

use pointsman_orchestration::{AdmissionRequest, WorkerWait};
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

use super::find_model::{check_limits, finds_model};
use crate::{
    openai::{error::ApiError, request::Request},
    orchestrate::{
        availability::has_workers,
        waits::worker_wait::{too_many_wait, waited_in_vain},
    },
    state::State,
    telemetry::account::Account,
    tokenization::routing_request::{TenantLoad, routing_request},
};

/// Waits until a worker can serve the request's model. Returns the request's place in the queue, if it had to
/// wait. `tenant` is the hash of its tenant, and `is_restricted` says whether a proxy chose the workers
/// already. `gone` is cancelled when its client leaves.
///
/// # Errors
/// [`ApiError`]: no worker came in time, too many requests wait, the client left, or the gateway drains.
pub(super) async fn wait_for_worker(
    state: &State,
    (request, tenant, is_restricted): (&mut Arc<Request>, Option<u64>, bool),
    account: &mut Account,
    gone: &CancellationToken,
) -> Result<Option<Box<WorkerWait>>, ApiError> {
    if is_restricted {
        return Ok(None);
    }
    match begin(state, request, tenant, account)? {
        None => Ok(None),
        Some(begun) => {
            // Boxed, because few requests wait here.
            let wait = Box::pin(until_served(state, request, begun, account, gone)).await?;
            // A worker that joined may have told which adapter the request names.
            let limits = state.tenant_limits.as_ref();
            let reserved = limits.map_or(Ok(()), |limits| {
                account.reserve(limits, tenant, &request.model, &state.registry.snapshot())
            });
            if reserved.is_err() {
                account.queued(wait.elapsed());
            }
            reserved.map(|()| Some(wait))
        }
    }
}

/// Takes a place in the queue, if the request waits. Returns the place, and how long it waits.
fn begin(
    state: &State,
    request: &Request,
    tenant: Option<u64>,
    account: &mut Account,
) -> Result<Option<(Box<WorkerWait>, Duration)>, ApiError> {
    let settings = &state.settings;
    // A request that names its worker waits for no other one.
    if settings.worker_waits.is_empty() || request.hints.names_worker() || request.hints.query_only {
        return Ok(None);
    }
    let snapshot = state.registry.snapshot();
    let Some((model, limit)) = settings.worker_wait(&request.model, &snapshot) else { return Ok(None) };
    if has_workers(request, &snapshot, settings) {
        return Ok(None);
    }
    account.model_is_known();
    let tenant = tenant.map(|hash| TenantLoad { hash, active_requests: 0 });
    let measured = (request, None, &*snapshot);
    let measured = routing_request(measured, &settings.measure, &settings.targets, None, tenant);
    let admission_request = AdmissionRequest {
        model,
        request: &measured,
        pin: None,
        arrived: account.received(),
        bytes: account.body_bytes(),
    };
    match state.queue.wait_for_worker(&admission_request) {
        Some(wait) => Ok(Some((wait, limit))),
        None => Err(too_many_wait(&request.model)),
    }
}

async fn until_served(
    state: &State,
    request: &mut Arc<Request>,
    (wait, limit): (Box<WorkerWait>, Duration),
    account: &mut Account,
    gone: &CancellationToken,
) -> Result<Box<WorkerWait>, ApiError> {
    let (until, deadline) = (wait.since() + limit, account.started() + state.settings.request_timeout);
    let served = loop {
        tokio::select! {
            biased;
            () = gone.cancelled() => break Err(ApiError::ClientClosed),
            // Another gateway can hold the request, and autoscalers may read this one's metrics no longer.
            () = state.draining.cancelled() => break Err(ApiError::Draining),
            () = wait.woken(until.min(deadline)) => {}
        }
        let (snapshot, now) = (state.registry.snapshot(), Instant::now());
        finds_model(request, &snapshot);
        if has_workers(request, &snapshot, &state.settings) {
            if wait.wake_others() {
                tokio::task::yield_now().await;
            }
            account.set_model(&request.model, &snapshot);
            break check_limits(request, &snapshot).map_err(ApiError::from);
        }
        if wait.gave_way() {
            break Err(too_many_wait(&request.model));
        }
        if now >= deadline {
            break Err(ApiError::Deadline);
        }
        if now >= until {
            break Err(waited_in_vain(state, request, limit, &snapshot));
        }
    };
    account.stage("workers", wait.since());
    if served.is_err() {
        account.queued(wait.elapsed());
    }
    served.map(|()| wait)
}
