//! Serves one request of a client: admitted, parsed, measured, planned, and then driven to its answer.

use std::sync::Arc;

use axum::{
    body::Body,
    http::{HeaderMap, Request as HttpRequest, Response, header},
};
use bytes::Bytes;
use pointsman_routing::Purpose;
use tokio_util::sync::CancellationToken;

use super::{DataThread, admit::admit, first_byte::FirstByte, request_id};
use crate::{
    openai::{
        error::ApiError,
        request::{Endpoint, Request},
    },
    orchestrate::{self, after_disconnect::AfterDisconnect, preview, relay::Answer},
    state::State,
    telemetry::account::Account,
    tokenization::routing_request::subject,
    upstream::Upstream,
};

/// A request whose body was read.
struct Received {
    endpoint: Endpoint,
    headers: HeaderMap,
    body: Bytes,
    account: Account,
}

/// Serves a request. Its account, with the number of requests in flight, begins before the body is read.
pub(super) async fn serve(
    thread: &DataThread,
    endpoint: Endpoint,
    request: HttpRequest<Body>,
) -> Response<Body> {
    let (state, upstream) = thread.context();
    let (parts, body) = request.into_parts();
    let started = FirstByte::of(&parts.extensions);
    let account = Account::new(state.metrics.clone(), request_id(&parts.headers), endpoint, started);
    let answer = match admit(&state, &parts.headers, body, started).await {
        Err(error) => refuse(account, &error),
        Ok(body) => {
            let (gone, tracker) = (CancellationToken::new(), state.tracker.clone());
            let received = Received { endpoint, headers: parts.headers, body, account };
            let work = answer(state, upstream, received, gone.clone());
            AfterDisconnect::new(work, gone, tracker).await
        }
    };
    answer.map(Body::new)
}

async fn answer(
    state: Arc<State>,
    upstream: Upstream,
    received: Received,
    gone: CancellationToken,
) -> Response<Answer> {
    let Received { endpoint, headers, body, mut account } = received;
    let request = match Request::parse(endpoint, &headers, body, state.settings.trust) {
        Ok(request) => request,
        Err(error) => return refuse(account, &error.into()),
    };
    account.set_model(&request.model, state.registry.snapshot().activation(&request.model).is_some());
    let deadline = account.started() + state.settings.request_timeout;
    let tokens = tokio::select! {
        biased;
        tokens = state.tokens.of(&request, &upstream, &state.metrics) => tokens,
        () = gone.cancelled() => None,
        () = tokio::time::sleep_until(deadline) => return refuse(account, &ApiError::Deadline),
    };
    // Nothing was sent for a client that left: planning and prefill would be wasted.
    if gone.is_cancelled() {
        return refuse(account, &ApiError::ClientClosed);
    }
    let subject = subject(&request, &state.settings.measure, tokens.as_deref());
    let snapshot = state.registry.snapshot();
    if request.hints.query_only {
        let plan = orchestrate::plan(&state, &request, &subject, &snapshot, Purpose::Preview, None);
        return match plan.and_then(|plan| preview::preview(&state, &request, &subject, &snapshot, &plan)) {
            Ok(answer) => {
                account.discard();
                whole_json(&answer)
            }
            Err(error) => refuse(account, &error),
        };
    }
    let plan =
        orchestrate::plan(&state, &request, &subject, &snapshot, Purpose::Route, Some(&account.request_id));
    let plan = match plan {
        Ok(plan) => plan,
        Err(error) => return refuse(account, &error),
    };
    let account = account.recording(state.router.decisions().clone(), state.learning.clone(), plan.word);
    let explain = state.settings.tell_decisions && headers.contains_key("x-pointsman-decision");
    let planned = orchestrate::PlannedRequest { request, subject, snapshot, plan, explain };
    orchestrate::drive(state, upstream, planned, account, gone).await
}

/// Answers with an error and records it.
fn refuse(mut account: Account, error: &ApiError) -> Response<Answer> {
    account.ended(error.status().as_u16(), error.code());
    error.response(&account.request_id).map(Answer::whole)
}

fn whole_json(value: &serde_json::Value) -> Response<Answer> {
    let mut response = Response::new(Answer::whole(Bytes::from(value.to_string())));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}
