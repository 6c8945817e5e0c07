//! Responses that engines run in the background.

use super::{
    lax::Flag,
    request::{Endpoint, Request},
    request_error::read,
};

/// Returns whether an engine answers in the background, whether or not the connection holds.
#[must_use]
pub(crate) fn is_in_background(request: &Request) -> bool {
    request.endpoint == Endpoint::Responses
        && matches!(read(&request.body, "background"), Ok(Some(Flag(true))))
}
