//! The listener of the endpoint picker. Each data thread serves it beside the clients' listener.

use std::{net::SocketAddr, sync::Arc};

use axum::Router;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::listen::{BoundSocket, CLIENT_SEND_BUFFER, bind, cannot_listen};
use crate::{
    budget::Budget,
    config::{ExtProc, Problem},
    http::{self, DataThread, audience::Audience, connected::Service},
    picker,
    state::SharedState,
};

/// Key of the address.
const LISTEN: &str = "ext_proc.listen";

/// The bound socket, and the limit of the requests on it.
#[derive(Debug)]
pub(super) struct PickerSocket {
    socket: BoundSocket,
    streams: Arc<Budget>,
}

/// The listener, and the limit of the requests on it.
#[derive(Debug)]
pub(super) struct PickerListener {
    socket: std::net::TcpListener,
    streams: Arc<Budget>,
}

/// Binds a socket to the configured address, if there is one.
pub(super) fn socket(settings: &ExtProc) -> Result<Option<PickerSocket>, Problem> {
    let Some(address) = settings.listen else { return Ok(None) };
    let socket = bind(address, CLIENT_SEND_BUFFER).map_err(cannot_listen(LISTEN))?;
    Ok(Some(PickerSocket { socket, streams: Budget::new(settings.max_streams) }))
}

impl PickerSocket {
    /// Listens.
    pub(super) fn listen(self) -> Result<PickerListener, Problem> {
        Ok(PickerListener { socket: self.socket.listen(LISTEN)?, streams: self.streams })
    }
}

impl PickerListener {
    /// Returns the same listener for another thread.
    pub(super) fn try_clone(&self) -> std::io::Result<Self> {
        Ok(Self { socket: self.socket.try_clone()?, streams: self.streams.clone() })
    }

    pub(super) fn address(&self) -> std::io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

/// Serves proxies until `stop` is cancelled. `own` are the clients' endpoints.
pub(super) async fn serve(
    listener: Option<PickerListener>,
    thread: DataThread,
    own: Router,
    shared: SharedState,
    stop: CancellationToken,
) {
    let Some(PickerListener { socket, streams }) = listener else { return };
    let max_body = shared.get().settings.max_body_bytes;
    match TcpListener::from_std(socket) {
        Ok(listener) => {
            let routes = picker::routes(thread, shared.clone(), own, streams, max_body);
            let service = Service::of_router(routes);
            http::listener::serve(listener.into(), Audience::Proxies, service, shared, stop).await;
        }
        Err(error) => {
            tracing::error!(%error, "endpoint picker not started: its listener cannot be registered")
        }
    }
}
