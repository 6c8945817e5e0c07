//! The bytes of a connection to an engine: the socket itself, or TLS on it.

use std::{io, sync::Arc};

use pointsman_workers::{EngineTls, server_name, tls_problem};
use rustls::ClientConfig;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::either::Either;

use super::destination::{Destination, Parts};

/// A connection to an engine: without TLS, or with it.
pub(super) type EngineStream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// With what an engine was verified.
#[derive(Debug)]
pub(super) struct Verified {
    config: Arc<ClientConfig>,
    server_name: Option<Arc<str>>,
}

/// Connects; no Nagle.
pub(super) async fn open(
    to: &Destination,
    parts: Parts<'_>,
    tls: &EngineTls,
) -> io::Result<(EngineStream, Option<Verified>)> {
    let stream = TcpStream::connect(parts.authority).await?;
    stream.set_nodelay(true)?;
    if !parts.has_tls {
        return Ok((Either::Left(stream), None));
    }
    let config = tls.config().map_err(io::Error::other)?;
    let name = server_name(parts.host(), to.server_name.as_deref()).map_err(io::Error::other)?;
    let connected = TlsConnector::from(config.clone()).connect(name, stream).await;
    let stream = connected.map_err(|error| match tls_problem(&error) {
        Some(problem) => io::Error::other(problem),
        None => error,
    })?;
    let verified = Verified { config, server_name: to.server_name.clone() };
    Ok((Either::Right(Box::new(stream)), Some(verified)))
}

impl Verified {
    /// Whether a new connection to `to` would be verified with the same.
    pub(super) fn is_current(&self, to: &Destination, tls: &EngineTls) -> bool {
        self.server_name == to.server_name && tls.is_current(&self.config)
    }
}
