//! Accepts connections and serves HTTP/1.1 on them, with or without TLS, for clients and for operators.

use std::{sync::Arc, time::Duration};

use axum::Router;
use futures_util::TryFutureExt as _;
use hyper::{Request, body::Incoming, service::Service as _};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    accept_errors::AcceptErrors,
    audience::Audience,
    client_socket::ClientSocket,
    client_stream::ClientStream,
    first_byte::FirstByte,
    handshake::{self, Secured},
    peer::Peer,
    pieces::Pieces,
    refuse_connection::{Refusals, TooMany},
};
use crate::{
    budget::Share, orchestrate::client_connection::ClientConnection, state::SharedState,
    state::address_budget::AddressShare, telemetry::metrics::Metrics,
};

/// Pause after a failed accept: connections that end in it free their file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Largest head of a request, and the bytes of an answer that the HTTP server may hold for a client.
const MAX_BUFFER: usize = 32 * 1024;

/// Accepts connections until `stop` is cancelled, then lets the open ones finish their request.
pub(crate) async fn serve(
    listener: TcpListener,
    audience: Audience,
    routes: Router,
    shared: SharedState,
    stop: CancellationToken,
) {
    let tasks = TaskTracker::new();
    let budget = audience.connections(&shared);
    let metrics = shared.get().metrics.clone();
    let (mut errors, mut refusals) = (AcceptErrors::default(), Refusals::new(audience));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                errors.note(&error);
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(share) = budget.take(1) else {
            metrics.connection_ended("too_many");
            let handshake = audience.tls(&shared.get()).handshake();
            if let Some(refusal) = refusals.of(stream, handshake, TooMany::InAll(budget.limit())) {
                tasks.spawn(refusal);
            }
            continue;
        };
        let of_address = match audience.of_address(&shared, peer.ip()) {
            Ok(share) => share,
            Err(limit) => {
                metrics.connection_ended("too_many_of_address");
                let handshake = audience.tls(&shared.get()).handshake();
                if let Some(refusal) = refusals.of(stream, handshake, TooMany::OfAddress(limit)) {
                    tasks.spawn(refusal);
                }
                continue;
            }
        };
        let shares = (share, of_address);
        let open = Open { metrics: metrics.clone(), audience, peer: Peer(peer.ip()), _shares: shares };
        open.metrics.connections.inc();
        tasks.spawn(serve_connection(stream, open, routes.clone(), shared.clone(), stop.clone()));
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

/// An open connection, as metrics and limits count it.
struct Open {
    metrics: Arc<Metrics>,
    audience: Audience,
    peer: Peer,
    _shares: (Share, Option<AddressShare>),
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
    routes: Router,
    shared: SharedState,
    stop: CancellationToken,
) {
    // Without Nagle's algorithm an event does not wait for the acknowledgement of the event before it.
    let _ = stream.set_nodelay(true);
    let (idle, write, tls) = {
        let state = shared.get();
        let settings = &state.settings;
        let tls = open.audience.tls(&state).handshake();
        (settings.client_idle_timeout, settings.client_write_timeout, tls)
    };
    let (client, peer) = (ClientConnection::default(), open.peer);
    let socket = ClientSocket::new(stream, client.clone(), write, stop.clone());
    let (io, certificate) = match tls {
        None => (ClientStream::Plain(socket), None),
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
    let (routes, of_requests) = (TowerToHyperService::new(routes), client.clone());
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        let extensions = request.extensions_mut();
        extensions.insert(FirstByte(of_requests.begin_request()));
        extensions.insert(of_requests.clone());
        extensions.insert(peer);
        if let Some(certificate) = &certificate {
            extensions.insert(certificate.clone());
        }
        routes.call(request).map_ok(|answer| answer.map(Pieces::of))
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(idle).max_buf_size(MAX_BUFFER);
    let connection = builder.serve_connection(TokioIo::new(io), service).with_upgrades();
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Some(reason) = ended.err().and_then(|error| reason(&error, &client)) {
        open.metrics.connection_ended(reason);
    }
}

/// Why the gateway ended a connection; `None`: the client did.
fn reason(error: &hyper::Error, client: &ClientConnection) -> Option<&'static str> {
    if client.is_too_slow() {
        Some("write_timeout")
    } else if error.is_parse() {
        Some("malformed")
    } else if error.is_timeout() {
        Some("idle")
    } else {
        None
    }
}
