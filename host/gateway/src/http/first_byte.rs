//! When the first byte of a request arrived. Time to first token, duration and deadline count from there.
//!
//! The HTTP server hands over a request when its head is complete. A connection therefore notes the first
//! read after its last write, which is the first byte of the next request.

use axum::http::Extensions;
use tokio::time::Instant;

/// When the first byte of a request arrived; an extension of the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstByte(pub(super) Instant);

impl FirstByte {
    /// Returns when the first byte of a request arrived.
    pub(super) fn of(extensions: &Extensions) -> Instant {
        extensions.get::<Self>().map_or_else(Instant::now, |first| first.0)
    }
}
