//! Accepts connections and serves them, with or without TLS, for clients and for operators.

use std::{
    convert::Infallible,
    future::ready,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::{FutureExt as _, future::Either};
use hyper::{
    Request, StatusCode,
    body::Incoming,
    header::{CONNECTION, HeaderValue},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    accept_errors::AcceptErrors,
    audience::Audience,
    client_socket::ClientSocket,
    client_stream::ClientStream,
    connected::{Connected, Service},
    handshake::{self, Secured},
    http2::{self, Limits},
    peer::Sender,
    refuse_connection::Refusals,
    request_head,
    room::{Room, Rooms},
    unread_body::CurrentBody,
};
use crate::{
    orchestrate::client::connection::ClientConnection,
    state::{Settings, SharedState, State, drain_end::DrainEnd},
    telemetry::metrics::Metrics,
};

/// Pause after a failed accept: connections that end in it free their file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// How long connections that the kernel already has are accepted, before a listener closes and resets them.
const LAST_ACCEPTS: Duration = Duration::from_millis(20);
/// How long an idle connection of HTTP/1.1 stays open after the drain began: a request may be on its way.
pub(crate) const LAST_REQUEST: Duration = Duration::from_secs(1);
/// Largest head of a request, and the bytes of an answer that the HTTP server may hold for a client.
const MAX_BUFFER: usize = 32 * 1024;

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) listener: TcpListener,
    /// Whether a service manager keeps it open: connections then wait in it for the next process.
    pub(crate) outlives_process: bool,
}

impl From<TcpListener> for Socket {
    fn from(listener: TcpListener) -> Self {
        Self { listener, outlives_process: false }
    }
}

/// Accepts connections until `stop` is cancelled, or until the drain begins: those of proxies, and those that
/// the next process can serve. Then it lets the open ones finish their request.
pub(crate) async fn serve(
    Socket { listener, outlives_process }: Socket,
    audience: Audience,
    service: Service,
    shared: SharedState,
    stop: CancellationToken,
) {
    let tasks = TaskTracker::new();
    let metrics = shared.get().metrics.clone();
    let (mut errors, mut refusals) = (AcceptErrors::default(), Refusals::new(audience));
    let mut rooms = Rooms::new(audience, &shared);
    let draining = shared.get().draining.child_token();
    let closes = closes_for_drain(audience, draining.clone());
    tokio::pin!(closes);
    loop {
        let accepted = tokio::select! {
            biased;
            () = draining.cancelled(), if outlives_process => break,
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
            () = closes.as_mut() => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                errors.note(&error);
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let room = match rooms.take(peer.ip()) {
            Ok(room) => room,
            Err(exceeded) => {
                metrics.connection_ended(exceeded.reason());
                let handshake = audience.tls(&shared.get()).handshake();
                if let Some(refusal) = refusals.of(stream, handshake, exceeded) {
                    tasks.spawn(refusal);
                }
                continue;
            }
        };
        let open = Open { metrics: metrics.clone(), audience, peer: peer.ip(), room: room.clone() };
        open.metrics.connections.inc();
        let (shared, of_streams, stop) = (shared.clone(), tasks.clone(), stop.clone());
        let serving = serve_connection(stream, open, service.clone(), shared, of_streams, stop);
        if audience == Audience::Operators {
            tasks.spawn(room.until_it_gives_way(serving, metrics.clone()));
        } else {
            tasks.spawn(serving);
        }
    }
    drop(listener);
    // Until then the watchdog sees this thread.
    stop.cancelled().await;
    tasks.close();
    tasks.wait().await;
}

/// Ready when a listener must close for the drain, if it does before the end.
async fn closes_for_drain(audience: Audience, draining: CancellationToken) {
    if !audience.closes_for_drain() {
        std::future::pending::<()>().await;
    }
    draining.cancelled().await;
    tokio::time::sleep(LAST_ACCEPTS).await;
}

/// An open connection, as metrics and limits count it.
struct Open {
    metrics: Arc<Metrics>,
    audience: Audience,
    peer: IpAddr,
    room: Arc<Room>,
}

impl Open {
    fn handshake_failed(&self, reason: &'static str) {
        self.metrics.connection_ended("handshake");
        self.metrics.tls.failed(self.audience.label(), reason);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.metrics.connections.dec();
    }
}

async fn serve_connection(
    stream: TcpStream,
    open: Open,
    service: Service,
    shared: SharedState,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    // Without Nagle's algorithm an event does not wait for the acknowledgement of the event before it.
    let _ = stream.set_nodelay(true);
    let (limits, tls, drain) = {
        let state = shared.get();
        let Settings { http2, client_idle_timeout: idle, client_write_timeout: write, .. } = state.settings;
        let idle = open.audience.idle(idle);
        let limits = Limits::of_clients(http2, idle, write, state.http2_requests.clone());
        let limits = if open.audience.speaks_http2_only() { limits.of_proxies() } else { limits };
        let drain = Drain::of(&state, stop.clone());
        (limits, open.audience.tls(&state).handshake(), drain)
    };
    let (client, peer) = (ClientConnection::default(), open.peer);
    let socket = ClientSocket::new(stream, client.clone(), limits.write, stop.clone());
    let (io, certificate) = match tls {
        None if open.audience.speaks_http2_only() => (ClientStream::Plain(socket), None),
        None => (ClientStream::Plain(socket.with_http1_only()), None),
        Some(tls) => {
            let secured = tokio::select! {
                secured = handshake::accept(socket, &tls, peer) => secured,
                () = stop.cancelled() => return,
            };
            match secured {
                Ok(Secured { stream, certificate }) => (ClientStream::Tls(Box::new(stream)), certificate),
                Err(reason) => return open.handshake_failed(reason),
            }
        }
    };
    let connected = Connected::new(service, Sender { address: peer, certificate }, open.room.clone());
    let ended = if io.speaks_http2() || open.audience.speaks_http2_only() {
        // Its state is large, and connections of HTTP/1.1 need no room for it.
        Box::pin(http2::serve(io, connected, limits, tasks, (drain.begun, drain.end))).await
    } else {
        serve_http1(io, connected, client.clone(), limits.idle, drain).await
    };
    let ended = if client.is_too_slow() { Some("write_timeout") } else { ended };
    if let Some(reason) = ended {
        open.metrics.connection_ended(reason);
    }
}

/// The steps in which the daemon ends, for a connection.
struct Drain {
    /// The gateway is not ready any more.
    stopping: CancellationToken,
    begun: CancellationToken,
    end: DrainEnd,
    stop: CancellationToken,
}

impl Drain {
    fn of(state: &State, stop: CancellationToken) -> Self {
        let (stopping, begun) = (state.stopping.clone(), state.draining.clone());
        Self { stopping, begun, end: state.drain_end.clone(), stop }
    }
}

/// State of a connection of HTTP/1.1.
#[derive(Default)]
struct Http1 {
    /// Whether it had a request.
    begun: AtomicBool,
    /// Whether it ends with its next answer.
    ending: AtomicBool,
    /// The body of the current request.
    body: CurrentBody,
}

/// Serves HTTP/1.1 until the connection ends: with the next answer once the gateway is not ready any more, so
/// that its client sends further requests to another gateway. Returns why the gateway ended it; `None`: the
/// client did.
async fn serve_http1(
    io: ClientStream,
    connected: Connected,
    client: ClientConnection,
    idle: Duration,
    drain: Drain,
) -> Option<&'static str> {
    let state = Arc::new(Http1::default());
    let of_requests = state.clone();
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let state = of_requests.clone();
        state.begun.store(true, Ordering::Relaxed);
        let first_byte = client.begin_request();
        let answer = match request_head::refusal(&request) {
            Some(refused) => Either::Left(ready(Ok(refused))),
            None => Either::Right(connected.answer(state.body.of(request), first_byte, client.clone())),
        };
        answer.then(move |answer| {
            state.body.is_read().map(move |is_read| {
                let Ok(mut answer) = answer;
                let ends = !is_read || state.ending.load(Ordering::Relaxed);
                if ends && answer.status() != StatusCode::SWITCHING_PROTOCOLS {
                    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(answer)
            })
        })
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(idle).max_buf_size(MAX_BUFFER);
    let connection = builder.serve_connection(TokioIo::new(io), service).with_upgrades();
    tokio::pin!(connection);
    let ends = async {
        drain.stopping.cancelled().await;
        state.ending.store(true, Ordering::Relaxed);
        drain.begun.cancelled().await;
        // A request may be on its way, and is answered. If it is the first one, for as long as possible.
        let is_new = !state.begun.load(Ordering::Relaxed);
        tokio::select! {
            () = drain.stop.cancelled() => {}
            () = tokio::time::sleep(LAST_REQUEST), if !is_new => {}
            () = drain.end.passed() => {}
        }
    };
    let ended = tokio::select! {
        biased;
        () = ends => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                ended = connection.as_mut() => ended,
                // Its requests look whether the drain ends when they are polled.
                () = drain.end.passed() => connection.await,
            }
        }
        ended = connection.as_mut() => ended,
    };
    let error = ended.err()?;
    if error.is_parse() {
        Some("malformed")
    } else if error.is_timeout() {
        Some("idle")
    } else {
        None
    }
}
