//! Serves HTTP/2 on a connection of a client.
//!
//! [`ClientSocket`](super::client_socket::ClientSocket) bounds the connection as a whole. Here each stream is
//! bounded: what waits for it, for how long, and how often a client may abandon one.

use std::{sync::Arc, time::Duration};

use futures_util::{
    TryFutureExt as _,
    future::{Either, ready},
};
use http_body_util::Either as EitherBody;
use hyper::{Request, Response, body::Incoming, server::conn::http2::Builder};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    client_stream::ClientStream,
    connected::{AnswerBody, Connected},
    request_head, request_id,
};
use crate::state::drain_end::DrainEnd;
use crate::{budget::Budget, config::Http2, openai::error::ApiError, orchestrate::relay::Answer};

mod request_body;
mod spawn;
mod streams;

use request_body::RequestBody;
use spawn::Spawn;
use streams::{StreamBody, Streams};

/// Largest list of header fields of a request: names, values and 32 bytes for each.
const MAX_HEADERS: u32 = 32 * 1024;
/// Bytes of a request body that a client may send before the gateway reads them: for one stream, and for all
/// streams of a connection.
const STREAM_WINDOW: u32 = 128 * 1024;
const CONNECTION_WINDOW: u32 = 256 * 1024;
/// The same for all streams of a proxy's connection.
const PROXY_WINDOW: u32 = 16 * 1024 * 1024;
/// Requests on one connection of a proxy at the same time. It opens another connection for more.
const PROXY_STREAMS: u32 = 1_000;
/// Bytes of an answer that wait for the window of one stream, besides one piece.
const MAX_UNSENT: usize = 32 * 1024;
/// How long an idle connection may take to end after its GOAWAY.
const GOODBYE: Duration = Duration::from_secs(1);

/// Limits of a connection.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) http2: Http2,
    /// How long no request may be open.
    pub(super) idle: Duration,
    /// How long a client may accept nothing of an answer.
    pub(super) write: Duration,
    /// Bytes that a client may send on all streams before the gateway reads them.
    connection_window: u32,
    /// Open requests of all connections of clients; `None`: those of this one do not count.
    requests: Option<Arc<Budget>>,
}

impl Limits {
    /// Returns the limits of a client's connection. `requests` counts the requests of all clients.
    pub(super) fn of_clients(http2: Http2, idle: Duration, write: Duration, requests: Arc<Budget>) -> Self {
        Self { http2, idle, write, connection_window: CONNECTION_WINDOW, requests: Some(requests) }
    }

    /// Returns the limits of a proxy's connection, which has the requests of many clients: those that these
    /// abandon are not counted, and one that waits for its endpoint does not stop the others. The picker
    /// has a limit of its own.
    pub(super) fn of_proxies(self) -> Self {
        let http2 = Http2 { max_concurrent_streams: PROXY_STREAMS, max_resets: u32::MAX, ..self.http2 };
        Self { http2, connection_window: PROXY_WINDOW, requests: None, ..self }
    }
}

/// Serves a connection until it ends. When `draining` is cancelled, the client gets a GOAWAY: it opens no
/// further requests, and the open ones finish. Returns why the gateway ended it; `None`: the client did.
pub(super) async fn serve(
    io: ClientStream,
    connected: Connected,
    limits: Limits,
    tasks: TaskTracker,
    (draining, drain_end): (CancellationToken, DrainEnd),
) -> Option<&'static str> {
    let Limits { http2, idle, write, connection_window, requests } = limits;
    let streams = Streams::new(http2.max_resets);
    let (of_requests, of_bodies) = (streams.clone(), tasks.clone());
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        // A stream has no bytes before its head, which arrives whole.
        let stream = of_requests.open();
        let client = stream.client().clone();
        let place = requests.as_ref().and_then(|requests| requests.reserve(1));
        let refused = requests.as_ref().filter(|_| place.is_none());
        let refused = refused.map(|requests| refusal(&request, requests.limit()));
        let refused = refused.or_else(|| request_head::refusal(&request));
        let body = StreamBody::of(stream, &request, place);
        let request = request.map(|body| RequestBody::new(body, of_bodies.clone()));
        let answer = match refused {
            Some(refused) => Either::Left(ready(Ok(refused))),
            None => Either::Right(connected.answer(request, Instant::now(), client)),
        };
        answer.map_ok(move |answer| answer.map(|answer| body.with(answer)))
    });
    let mut builder =
        Builder::new(Spawn { streams: streams.clone(), tasks, write, drain_end: drain_end.of_connection() });
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(http2.max_concurrent_streams)
        .max_header_list_size(MAX_HEADERS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(connection_window)
        .max_send_buf_size(MAX_UNSENT)
        .keep_alive_interval(http2.keep_alive_interval)
        .keep_alive_timeout(http2.keep_alive_timeout);
    let connection = builder.serve_connection(TokioIo::new(io), service);
    tokio::pin!(connection);
    // When the connection became idle, and how long it may stay so.
    let (mut since, mut idle, mut is_ending, mut why) = (Instant::now(), idle, false, None);
    loop {
        tokio::select! {
            ended = connection.as_mut() => return ended.err().and_then(|error| reason(&error)).or(why),
            () = streams.abandoned_too_often() => return Some("resets"),
            () = streams.idle(since, idle) => {
                if is_ending {
                    return why;
                }
                why = Some("idle");
            }
            () = draining.cancelled(), if !is_ending => {}
        }
        is_ending = true;
        (since, idle) = (Instant::now(), GOODBYE);
        connection.as_mut().graceful_shutdown();
    }
}

/// Answers a request that is one too many.
fn refusal(request: &Request<Incoming>, limit: usize) -> Response<AnswerBody> {
    let response = ApiError::TooManyStreams(limit).response(&request_id(request.headers()));
    response.map(|text| EitherBody::Left(Answer::whole(text)))
}

/// Why a connection failed: one of a fixed list; `None`: the client ended it.
fn reason(error: &hyper::Error) -> Option<&'static str> {
    if error.is_timeout() {
        return Some("keep_alive");
    }
    // The library ends a connection without an error only when a ping was not answered.
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<h2::Error>())?;
    match cause.reason() {
        Some(h2::Reason::NO_ERROR) if cause.is_library() => Some("keep_alive"),
        // Early resets, frames of one head, empty frames: the library does not say which.
        Some(h2::Reason::ENHANCE_YOUR_CALM) if cause.is_library() => Some("flood"),
        Some(_) if cause.is_library() => Some("malformed"),
        _ => None,
    }
}
