//! Counts the bytes of bodies. All requests in flight together have a limit.

use crate::{budget::Share, openai::error::ApiError};

/// Counts bytes of a body that arrived.
///
/// # Errors
/// The bodies of all requests in flight take too much memory.
pub(crate) fn reserve(held: &mut Share, more: usize) -> Result<(), ApiError> {
    if held.grow_body(more) { Ok(()) } else { Err(ApiError::BodyBytesInFlight(held.limit())) }
}
