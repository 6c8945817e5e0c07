//! The address of a connection's other end; an extension of its requests.

use std::net::IpAddr;

use axum::http::Extensions;

/// The address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) IpAddr);

impl Peer {
    /// Returns the address of a request's connection; the unspecified one when there is no connection.
    pub(crate) fn of(extensions: &Extensions) -> IpAddr {
        extensions.get::<Self>().map_or(IpAddr::from([0, 0, 0, 0]), |peer| peer.0)
    }
}
