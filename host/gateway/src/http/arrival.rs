//! Facts about a request before it is read: its sender, the time of its first byte, and the connection for
//! its answer.
//!
//! Time to first token, duration and deadline count from the first byte. The HTTP server hands over a request
//! when its head is complete. A connection therefore notes the first read after its last write, which has the
//! first byte of the next request. Reads of nothing but ends of lines do not count: some clients send these
//! behind a body. The place in the queue counts from the last byte.

use axum::http::Extensions;
use tokio::time::Instant;

use super::peer::Sender;
use crate::orchestrate::client::connection::ClientConnection;

/// The arrival of a request; an extension of those that the router gets.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    pub(crate) sender: Sender,
    /// When the first byte arrived.
    pub(super) first_byte: Instant,
    /// The connection that takes the answer; `None` if it is not a client's.
    pub(super) client: Option<ClientConnection>,
}

impl Arrival {
    /// Returns an arrival now, without a connection to the client.
    pub(crate) fn now(sender: Sender) -> Self {
        Self { sender, first_byte: Instant::now(), client: None }
    }

    /// Returns the arrival of a request; for a request without a connection, the time is now.
    pub(crate) fn of(extensions: &Extensions) -> Self {
        extensions.get::<Self>().cloned().unwrap_or_else(|| Self::now(Sender::default()))
    }
}
