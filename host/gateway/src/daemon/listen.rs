//! Sockets of the listeners: bound at the start, and listening when requests are served.

use std::net::{SocketAddr, TcpListener};

use tokio::net::TcpSocket;

use crate::config::Problem;

/// Bytes that the kernel buffers for a client that does not read: without a limit, it is several megabytes.
pub(super) const CLIENT_SEND_BUFFER: u32 = 128 * 1024;
/// Bytes that the kernel buffers for an operator that does not read.
pub(super) const ADMIN_SEND_BUFFER: u32 = 64 * 1024;
/// Unsent bytes from which on the kernel reports that it accepts no more. It reports that it accepts more
/// when half of them are left. Without this limit it does when a third of the send buffer is free, for which
/// a slow client needs longer than it may accept nothing.
const UNSENT: u32 = 16 * 1024;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// A socket with its address. It refuses connections until it listens, so that proxies ask another gateway.
#[derive(Debug)]
pub(super) enum BoundSocket {
    /// The socket, with the address of the configuration.
    Own(TcpSocket, SocketAddr),
    /// The socket of the service manager. Connections wait in it.
    Inherited(TcpListener),
}

impl BoundSocket {
    /// Returns the address.
    pub(super) fn address(&self) -> std::io::Result<SocketAddr> {
        match self {
            Self::Own(socket, _) => socket.local_addr(),
            Self::Inherited(listener) => listener.local_addr(),
        }
    }

    /// Returns whether the service manager keeps the socket when this process closes it.
    pub(super) fn is_inherited(&self) -> bool {
        matches!(self, Self::Inherited(_))
    }

    /// Listens. `path` is the key of the address.
    ///
    /// # Errors
    /// Another process that was bound to the address, too, listens there now.
    pub(super) fn listen(self, path: &'static str) -> Result<TcpListener, Problem> {
        match self {
            Self::Own(socket, address) => {
                let listener = socket.listen(BACKLOG).and_then(tokio::net::TcpListener::into_std);
                listener.map_err(|error| cannot_listen(path)(BindError { address, error }))
            }
            Self::Inherited(listener) => Ok(listener),
        }
    }
}

/// Binds a socket to an address, or takes the socket of the service manager in its place.
pub(super) fn bind_or_inherit(
    inherited: Option<TcpListener>,
    address: SocketAddr,
    send_buffer: u32,
) -> Result<BoundSocket, BindError> {
    let Some(listener) = inherited else { return bind(address, send_buffer) };
    let taken = socket2::SockRef::from(&listener).set_send_buffer_size(send_buffer as usize);
    limit_unsent(&listener);
    taken.map_err(|error| BindError { address, error })?;
    Ok(BoundSocket::Inherited(listener))
}

/// Binds a socket to an address. Accepted connections inherit the limits of what is not sent.
pub(super) fn bind(address: SocketAddr, send_buffer: u32) -> Result<BoundSocket, BindError> {
    let bind = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.set_send_buffer_size(send_buffer)?;
        limit_unsent(&socket);
        socket.bind(address)?;
        Ok(BoundSocket::Own(socket, address))
    };
    bind().map_err(|error| BindError { address, error })
}

/// Sets the limit of unsent bytes, where the system has it: some sandboxes do not.
fn limit_unsent(socket: &impl std::os::fd::AsFd) {
    let _ = socket2::SockRef::from(socket).set_tcp_notsent_lowat(UNSENT);
}

/// Why an address cannot be listened on.
pub(super) struct BindError {
    pub(super) address: SocketAddr,
    pub(super) error: std::io::Error,
}

/// Returns the problem of a listener at `path`.
pub(super) fn cannot_listen(path: &'static str) -> impl Fn(BindError) -> Problem {
    move |BindError { address, error }| {
        let advice = match error.kind() {
            std::io::ErrorKind::AddrInUse => "stop the process that uses it, or use another port",
            std::io::ErrorKind::PermissionDenied => "use a port of 1024 or more, or allow this process to",
            _ => "use an address of this machine",
        };
        Problem::new(path, format!("cannot listen on `{address}`: {error}; {advice}"))
    }
}

#[cfg(test)]
mod tests {
    use std::{io::ErrorKind, net::TcpStream};

    use super::*;

    #[tokio::test]
    async fn n10_a_bound_socket_refuses_connections_and_the_second_of_two_does_not_listen() {
        let first = bind(([127, 0, 0, 1], 0).into(), CLIENT_SEND_BUFFER).ok().unwrap();
        let address = first.address().unwrap();
        // N10.4
        assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let second = bind(address, CLIENT_SEND_BUFFER).ok().unwrap();
        let listener = first.listen("server.listen").unwrap();
        TcpStream::connect(address).unwrap();
        // N10.4
        let refused = second.listen("server.listen").unwrap_err();
        assert!(refused.message.starts_with(&format!("cannot listen on `{address}`")), "{refused:?}");
        // N10.4
        assert_eq!(bind(address, CLIENT_SEND_BUFFER).err().unwrap().error.kind(), ErrorKind::AddrInUse);
        drop(listener);
    }
}
