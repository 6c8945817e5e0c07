//! Routes a connection that is upgraded, and opens its other half at a worker.

use std::sync::Arc;

use http::HeaderMap;
use pointsman_routing::{Purpose, RouterConfigOverride, RoutingRequest};
use pointsman_workers::{Booking, Candidate, Leg};
use tokio::time::Instant;

use super::{
    Refusals, id_of,
    outcome::{note_failure, note_success},
    plan, target,
};
use crate::{
    connectors::{LegContext, RequestToken, leg_headers},
    openai::{
        error::ApiError,
        request::Request,
        trace_context::{Links, Span},
    },
    state::State,
    telemetry::{account::Account, traces::LegTarget},
    upstream::{self, Destination, Silence, UpgradedCall, Upstream},
};

/// An open connection to a worker, and the load that it is booked for.
pub(crate) struct Session {
    pub(crate) engine: UpgradedCall,
    pub(crate) candidate: Candidate,
    pub(crate) booking: Booking,
}

/// Chooses a worker and upgrades a connection to it. Another worker is tried within the retries.
/// `path` is the client's path and query, `headers` are those of the upgrade.
///
/// # Errors
/// [`ApiError`] of the routing, or of the last worker.
pub(crate) async fn open(
    state: &Arc<State>,
    upstream: &Upstream,
    request: &Arc<Request>,
    routing_request: &RoutingRequest,
    (path, headers): (&str, HeaderMap),
    account: &mut Account,
) -> Result<Session, ApiError> {
    let snapshot = state.registry.snapshot();
    account.records(state.router.decisions(), &state.learning, &state.decision_stats, None);
    plan(state, request, routing_request, &snapshot, Purpose::Route, None)?;
    let (mut tried, mut failure, mut links) = (Vec::new(), None, Links::default());
    let (mut refusals, pin) = (Refusals::default(), request.hints.pinned(Leg::Aggregated));
    for attempt in 0..=state.settings.split(&request.model).retry_policy.retries {
        let question = plan::question(state, request, routing_request, &snapshot, Leg::Aggregated);
        let request_id = Some(account.request_id.as_str());
        let query = pointsman_routing::Query { attempt, tried: &tried, request_id, ..question };
        let mut refused = None;
        let routed = state.router.route_noting(&query, &RouterConfigOverride::default(), &mut refused);
        account.refused(refused);
        let routed = match routed {
            Ok(routed) => routed,
            Err(error) => {
                let pause = error.pause();
                let cause = ApiError::of_route(error, state.settings.busy_status);
                refusals.note_pause(pause, &cause);
                return Err(refusals.answer(failure.unwrap_or(cause)));
            }
        };
        account.decided(routed.receipt, routing_request);
        let candidate = routed.candidate;
        let mut headers = headers.clone();
        let span = Span::fresh();
        headers.extend(account.trace_context(request).headers(span, links));
        let target = LegTarget { leg: Leg::Aggregated, candidate: &candidate, attempt, links };
        account.leg_sent(span, target);
        links.failed = Some(span);
        let sent = Instant::now();
        match call(state, upstream, &candidate, path, headers).await {
            Ok(engine) => {
                note_success(state, Leg::Aggregated, &candidate);
                bind(state, request, routing_request, &candidate);
                return Ok(Session { engine, candidate, booking: routed.booking });
            }
            Err(error) => {
                note_failure(state, Leg::Aggregated, (&candidate, sent), &error, false);
                account.leg_ended(Leg::Aggregated, Err(error.kind()));
                tried.push(id_of(&candidate));
                let (retryable, refusal) = (error.retryable(), error.refusal());
                let error = ApiError::from(error);
                if let Some((worker, _)) = pin {
                    return Err(error.of_pinned(Leg::Aggregated, worker));
                }
                if !retryable {
                    return Err(error);
                }
                refusals.note(refusal, &error, &candidate.worker);
                failure = Some(error);
            }
        }
    }
    Err(refusals.answer(failure.unwrap_or_else(|| ApiError::BadUpstream("the engine failed".to_owned()))))
}

/// Records that the worker of a session did not take the client's bytes in time. The leg was counted when the
/// session was opened.
pub(crate) fn note_silence(candidate: &Candidate) {
    candidate.load().observe_outcome(false);
    candidate.worker.note_outcome(false);
    candidate.worker.note_timeout();
}

async fn call(
    state: &State,
    upstream: &Upstream,
    candidate: &Candidate,
    path: &str,
    mut headers: HeaderMap,
) -> Result<UpgradedCall, upstream::CallError> {
    let target = target(candidate);
    let context = LegContext {
        token: RequestToken::fresh(),
        prefill: None,
        decode: Some(target),
        engine_id: None,
        rooms: &[],
        handoff: None,
    };
    headers.extend(leg_headers(&context, target, None));
    let to = Destination::new(target.spec, path);
    let silence = Silence { what: "upgrade", key: "head", limit: state.settings.leg_timeouts.head };
    upstream::within(silence, upstream.upgrade(&to, headers, &state.tracker)).await
}

/// Binds the session to the worker that answered (F8).
fn bind(state: &State, request: &Request, routing_request: &RoutingRequest, candidate: &Candidate) {
    let ttl = state.settings.affinity(&request.hints);
    if let (Some(ttl), Some(session)) = (ttl, routing_request.session_hash) {
        state.sessions.bind(session, Leg::Aggregated, id_of(candidate), ttl);
    }
}
