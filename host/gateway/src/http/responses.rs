//! `/v1/responses/{id}`: reads, deletes and cancels a response at the worker that stored it [I12].

use std::convert::Infallible;

use axum::{
    body::Body,
    extract::State as Extract,
    http::{Method, Request as HttpRequest, Response, header, request::Parts},
};
use bytes::Bytes;
use futures_util::stream;
use pointsman_workers::InFlight;
use tokio::time::timeout_at;

use super::{
    DataThread, PathText,
    admit::{check_rate, identify},
    arrival::Arrival,
    request_id,
};
use crate::{
    budget::Share,
    connectors::connector_for,
    openai::{
        client_key::forwarded, endpoint::Endpoint, error::ApiError, hide::without_fields,
        request_id::set_request_id, sse, stream_headers::set_stream_headers,
    },
    orchestrate::affinity::stored::{self, StoredCall, events::StoredEvents},
    state::State,
    telemetry::account::Account,
    upstream::{self, Upstream},
};

/// `GET` and `DELETE` of a stored response.
pub(super) async fn one(
    thread: Extract<DataThread>,
    PathText(id): PathText,
    request: HttpRequest<Body>,
) -> Response<Body> {
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let path = format!("/v1/responses/{id}{query}");
    serve(&thread, request.into_parts().0, &id, path).await
}

/// `POST /v1/responses/{id}/cancel`
pub(super) async fn cancel(
    thread: Extract<DataThread>,
    PathText(id): PathText,
    request: HttpRequest<Body>,
) -> Response<Body> {
    let path = format!("/v1/responses/{id}/cancel");
    serve(&thread, request.into_parts().0, &id, path).await
}

async fn serve(thread: &DataThread, request: Parts, id: &str, path: String) -> Response<Body> {
    let (state, mut upstream) = thread.context();
    let Arrival { sender, first_byte: started, .. } = Arrival::of(&request.extensions);
    let headers = &request.headers;
    let mut account =
        Account::new(state.metrics.clone(), request_id(headers), Endpoint::StoredResponse, started);
    let deadline = started + state.settings.request_timeout;
    let may_have_all = path.contains("starting_after=");
    let answered = async {
        // A browser asks before it sends DELETE, and shows the page no answer to GET.
        if request.method == Method::POST {
            thread.check_page(headers, &request.uri)?;
        }
        upstream.set_via_from(headers)?;
        let caller = identify(&state, headers, &sender).await?;
        account.counts_for(state.tenant_metrics.of(caller.tenant_name()));
        check_rate(&state, &caller)?;
        let forwards = state.settings.request_rules.forward_authorization;
        let authorization = if forwards { forwarded(headers) } else { None };
        let call = StoredCall {
            method: if request.method == Method::HEAD { Method::GET } else { request.method },
            id,
            path,
            tenant: caller.tenant_hash(),
            authorization: authorization.as_ref(),
        };
        answer(&state, &upstream, &call, &account.request_id).await
    };
    let answered = tokio::select! {
        biased;
        answered = timeout_at(deadline, answered) => answered.unwrap_or(Err(ApiError::Deadline)),
        () = state.drain_end.seen() => Err(ApiError::Draining),
    };
    match answered {
        Ok(Answered::Whole(response)) => {
            account.ended(response.status().as_u16(), "ok");
            response.map(Body::from)
        }
        Ok(Answered::Stream(response)) => {
            let (timeouts, ends) = (state.settings.leg_timeouts, (deadline, state.drain_end.clone()));
            response.map(|body| events(StoredEvents::new(body, timeouts, ends, account, may_have_all)))
        }
        Err(error) => {
            account.ended(error.status().as_u16(), error.code());
            error.response(&account.request_id).map(Body::from)
        }
    }
}

/// An engine's answer.
enum Answered {
    Whole(Response<Bytes>),
    /// With its share of the bytes of bodies in flight.
    Stream(Response<(upstream::Body, Share)>),
}

/// Makes the call.
async fn answer(
    state: &State,
    upstream: &Upstream,
    call: &StoredCall<'_>,
    request_id: &str,
) -> Result<Answered, ApiError> {
    let (answered, worker) = stored::call(state, upstream, call).await?;
    let pause = state.settings.leg_timeouts.pause();
    let (head, mut body) = answered.into_parts();
    body.of_call(InFlight::new(worker.clone(), None));
    let content_type = head.headers.get(header::CONTENT_TYPE).cloned();
    let is_stream = content_type.as_ref().is_some_and(|kind| sse::is_stream(kind.as_bytes()));
    let mut response = Response::new(());
    *response.status_mut() = head.status;
    response.headers_mut().extend(content_type.map(|kind| (header::CONTENT_TYPE, kind)));
    set_request_id(response.headers_mut(), Endpoint::StoredResponse.format(), request_id);
    if is_stream {
        set_stream_headers(response.headers_mut());
        let held = state.body_bytes.share_of(call.tenant);
        return Ok(Answered::Stream(response.map(|()| (body, held))));
    }
    let mut held = state.body_bytes.share_of(call.tenant);
    let whole = upstream::collect(body, Some(pause), Some(&mut held)).await?;
    let fields = connector_for(worker.spec()).private_answer_fields();
    let whole = without_fields(&whole, fields).map_or(whole, Bytes::from);
    Ok(Answered::Whole(response.map(|()| whole)))
}

/// The body of a stream of events.
fn events(events: StoredEvents) -> Body {
    Body::from_stream(stream::unfold(events, |mut events| async move {
        let bytes = events.next().await?;
        Some((Ok::<_, Infallible>(bytes), events))
    }))
}
