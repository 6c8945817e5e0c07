//! The bytes of a connection to an engine: the socket itself, or TLS on it.

use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use http1_client::{Transport, WireError};
use pointsman_workers::{EngineTls, Peer, Resolver, is_tls_alert, server_name, tls_problem};
use rustls::ClientConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::either::Either;

use super::{
    call_context::CallContext,
    destination::{Destination, Parts},
};

/// Silence of an address after which the next one of the host is tried, too.
const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);

/// A connection to an engine: without TLS, or with it.
#[derive(Debug)]
pub(super) struct EngineStream {
    bytes: Either<TcpStream, Box<TlsStream<TcpStream>>>,
    /// With what the engine was verified; `None` without TLS.
    verified: Option<Verified>,
    /// The name that it was opened for; `None` for an IP address.
    peer: Option<Box<Peer>>,
}

/// With what an engine was verified.
#[derive(Debug)]
struct Verified {
    config: Arc<ClientConfig>,
    server_name: Option<Arc<str>>,
}

impl EngineStream {
    /// Connects; no Nagle.
    pub(super) async fn open(to: &Destination, parts: Parts<'_>, context: &CallContext) -> io::Result<Self> {
        let stream = connect(parts.authority, &context.resolver).await?;
        stream.set_nodelay(true)?;
        let peer = context.resolver.peer(parts.authority, stream.peer_addr()?).map(Box::new);
        if !parts.has_tls {
            return Ok(Self { bytes: Either::Left(stream), verified: None, peer });
        }
        let config = context.tls.config().map_err(io::Error::other)?;
        let name = server_name(parts.host(), to.server_name.as_deref()).map_err(io::Error::other)?;
        let connected = TlsConnector::from(config.clone()).connect(name, stream).await;
        let stream = connected.map_err(|error| match tls_problem(&error) {
            Some(problem) => io::Error::other(problem),
            None => error,
        })?;
        let verified = Verified { config, server_name: to.server_name.clone() };
        Ok(Self { bytes: Either::Right(Box::new(stream)), verified: Some(verified), peer })
    }

    /// Returns whether a new connection to `to` could go to the same address, and would be verified with the
    /// same.
    pub(super) fn is_current(&self, to: &Destination, tls: &EngineTls) -> bool {
        let same =
            |verified: &Verified| verified.server_name == to.server_name && tls.is_current(&verified.config);
        self.verified.as_ref().is_none_or(same) && self.peer.as_ref().is_none_or(|peer| peer.is_current())
    }
}

/// Connects to the first address of a host that takes the connection. While one is silent, the next is tried
/// besides (RFC 8305): a name may have an IPv6 address that nothing serves.
async fn connect(authority: &str, resolver: &Resolver) -> io::Result<TcpStream> {
    if let Ok(address) = authority.parse::<SocketAddr>() {
        return TcpStream::connect(address).await;
    }
    connect_to_any(in_turn(resolver.addresses(authority).await?)).await
}

/// Puts addresses in the order in which they are tried: those of both families in turn.
fn in_turn(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let is_first =
        |address: &SocketAddr| addresses.first().is_some_and(|first| first.is_ipv6() == address.is_ipv6());
    let (first, second): (Vec<_>, Vec<_>) = addresses.iter().partition(|address| is_first(address));
    let mut second = second.into_iter();
    let mut ordered: Vec<SocketAddr> =
        first.into_iter().flat_map(|one| [Some(one), second.next()]).flatten().collect();
    ordered.extend(second);
    ordered
}

async fn connect_to_any(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let mut waiting = addresses.into_iter();
    let mut attempts = FuturesUnordered::new();
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    loop {
        let next = waiting.next();
        let is_last = next.is_none();
        attempts.extend(next.map(TcpStream::connect));
        if attempts.is_empty() {
            return Err(last);
        }
        tokio::select! {
            Some(connected) = attempts.next() => match connected {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            },
            () = tokio::time::sleep(NEXT_ADDRESS_AFTER), if !is_last => {}
        }
    }
}

impl Transport for EngineStream {
    /// Classifies a failed read or write. The text names no address.
    fn error(error: &io::Error) -> WireError {
        match tls_problem(error) {
            Some(problem) if is_tls_alert(error) => WireError::Refused(problem),
            Some(problem) => WireError::Transport(problem),
            None => WireError::of(error),
        }
    }
}

impl AsyncRead for EngineStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.bytes).poll_read(cx, buffer)
    }
}

impl AsyncWrite for EngineStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.bytes).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.bytes).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.bytes.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.bytes).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.bytes).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn an_address_that_refuses_or_is_silent_is_no_obstacle() {
        let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = engine.local_addr().unwrap().port();
        // I2.13: a name whose first address may be IPv6
        connect(&format!("localhost:{port}"), &Resolver::default()).await.unwrap();
        let closed: SocketAddr = "127.0.0.1:1".parse().unwrap();
        // A blocked backlog is silent.
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let blocked = silent.local_addr().unwrap();
        let mut held = Vec::new();
        while let Ok(Ok(stream)) =
            tokio::time::timeout(Duration::from_millis(100), TcpStream::connect(blocked)).await
        {
            held.push(stream);
        }
        let at = engine.local_addr().unwrap();
        for addresses in [vec![closed, at], vec![blocked, at], vec![blocked, closed, at]] {
            let connected = tokio::time::timeout(Duration::from_secs(2), connect_to_any(addresses)).await;
            assert_eq!(connected.unwrap().unwrap().peer_addr().unwrap(), at);
        }
        assert_eq!(connect_to_any(vec![closed]).await.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        assert!(connect_to_any(Vec::new()).await.unwrap_err().to_string().contains("no address"));
    }

    #[test]
    fn addresses_of_both_families_are_tried_in_turn() {
        let of =
            |list: &[&str]| -> Vec<SocketAddr> { list.iter().map(|text| text.parse().unwrap()).collect() };
        let six = ["[::1]:1", "[::2]:1", "[::3]:1"];
        let mixed = of(&[&six[..], &["1.1.1.1:1"]].concat());
        assert_eq!(in_turn(mixed), of(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "[::3]:1"]));
        assert_eq!(in_turn(of(&six)), of(&six));
    }
}
