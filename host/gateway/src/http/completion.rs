//! Serves one request of a client: admitted, parsed, measured, planned, and then driven to its answer.

use std::sync::Arc;

use axum::http::{Request as HttpRequest, Response};
use bytes::Bytes;
use http_body::Body;
use tokio_util::sync::CancellationToken;

use super::{
    admit::{Admitted, admit, identify},
    arrival::Arrival,
    body::ReadError,
    prepare::{Prepared, Received, Refused, prepare},
    request_id,
};
use crate::{
    openai::{error::ApiError, request::Endpoint},
    orchestrate::{self, client::after_disconnect::AfterDisconnect, relay::Answer, tell_decisions},
    state::State,
    telemetry::account::Account,
    upstream::Upstream,
};

/// Body from which on a client may have left unnoticed while it was read, bytes.
const LARGE_BODY: usize = 64 * 1024;

/// Serves a request, unless `page` says why its page may not send it. Its account, with the number of
/// requests in flight, begins before the body is read.
pub(super) async fn serve<B>(
    (state, mut upstream): (Arc<State>, Upstream),
    endpoint: Endpoint,
    arrival: Arrival,
    request: HttpRequest<B>,
    page: Result<(), ApiError>,
) -> Response<Answer>
where
    B: Body<Data = Bytes, Error: Into<ReadError>> + Unpin,
{
    let (parts, body) = request.into_parts();
    let Arrival { sender, first_byte: started, client } = arrival;
    if let Some(client) = &client {
        client.set_deadline(started + state.settings.request_timeout);
    }
    let mut account = Account::new(state.metrics.clone(), request_id(&parts.headers), endpoint, started);
    if let Some(traces) = &state.traces {
        account.traced(traces.begin(&parts.headers, state.settings.request_rules.trust, started));
    }
    let admitted = async {
        page?;
        upstream.set_via_from(&parts.headers)?;
        let caller = identify(&state, &parts.headers, &sender).await?;
        account.counts_for(state.tenant_metrics.of(caller.tenant_name()));
        admit(&state, caller, &parts.headers, body, started).await
    };
    let admitted = tokio::select! {
        biased;
        admitted = admitted => admitted,
        () = state.drain_end.seen() => Err(ApiError::Draining),
    };
    let answer = match admitted {
        Err(error) => refuse(Refused::new(account, error)),
        Ok(Admitted { body, caller, held }) => {
            account.stage("receive", started);
            client.iter().for_each(|client| client.set_answering(true));
            account.holds(held);
            let (gone, tracker) = (CancellationToken::new(), state.tracker.clone());
            let received = Received { endpoint, headers: parts.headers, body, caller, account, only: None };
            let work = answer(state, upstream, received, gone.clone());
            AfterDisconnect::new(work, gone, tracker).await
        }
    };
    answer.map(|answer| answer.on(client))
}

async fn answer(
    state: Arc<State>,
    upstream: Upstream,
    received: Received,
    gone: CancellationToken,
) -> Response<Answer> {
    if received.body.len() > LARGE_BODY {
        // The connection looks for its end now: a client that sent a large body and left is not worth the
        // parsing.
        tokio::task::yield_now().await;
        if gone.is_cancelled() {
            return refuse(Refused::new(received.account, ApiError::ClientClosed));
        }
    }
    match prepare(&state, &upstream, received, &gone).await {
        Ok(Prepared::Planned { planned, account }) => {
            orchestrate::drive(state, upstream, planned, account, gone).await
        }
        Ok(Prepared::Preview { answer, account }) => {
            account.discard();
            answer.map(Answer::whole)
        }
        Err(refused) => refuse(refused),
    }
}

/// Answers with an error and records it.
fn refuse(Refused { mut account, error, explain }: Refused) -> Response<Answer> {
    let format = account.endpoint.format();
    account.ended(error.status_as(format).as_u16(), error.code());
    let mut response = error.response_as(format, &account.request_id);
    account.add_limit_headers(response.headers_mut());
    if explain {
        tell_decisions(&account, response.headers_mut());
    }
    response.map(Answer::whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<A, B, C, D, F: Future>(_: impl Fn(A, B, C, D) -> F) -> usize {
        size_of::<F>()
    }

    /// It is moved into a box for each request: the larger the box, the longer the allocator looks for it.
    #[test]
    fn the_future_of_a_request_has_no_room_for_its_rare_steps() {
        let size = size_of_future(answer);
        assert!(size <= 2_048, "{size} bytes: box what few requests wait for");
    }
}
