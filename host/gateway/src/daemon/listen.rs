//! Binds the sockets of the listeners.

use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpSocket};

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

/// Listens on an address, or takes the socket of the service manager in its place.
pub(super) fn listen(
    inherited: Option<std::net::TcpListener>,
    address: SocketAddr,
    send_buffer: u32,
) -> Result<TcpListener, BindError> {
    let Some(listener) = inherited else { return bind(address, send_buffer) };
    let taken = socket2::SockRef::from(&listener).set_send_buffer_size(send_buffer as usize);
    limit_unsent(&listener);
    taken.and_then(|()| TcpListener::from_std(listener)).map_err(|error| BindError { address, error })
}

/// Listens on an address. Accepted connections inherit the limits of what is not sent.
pub(super) fn bind(address: SocketAddr, send_buffer: u32) -> Result<TcpListener, BindError> {
    let listen = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.set_send_buffer_size(send_buffer)?;
        limit_unsent(&socket);
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().map_err(|error| BindError { address, error })
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
