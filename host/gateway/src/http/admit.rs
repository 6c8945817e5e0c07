//! Admits a request: refuses it before its body is read, or reads the body.

use axum::http::HeaderMap;
use bytes::Bytes;
use http_body::Body;
use tokio::time::Instant;

use super::{
    auth::authorize_client,
    body::{self, BodyLimits, ReadError},
    content_coding::Coding,
    peer::Sender,
};
use crate::{
    budget::Share,
    openai::error::ApiError,
    state::{State, caller::Caller},
};

/// A request that was let in.
pub(super) struct Admitted {
    pub(super) body: Bytes,
    /// Sender of the request.
    pub(super) caller: Caller,
    /// The body's part of the bytes in flight.
    pub(super) held: Share,
}

/// Returns who sent a request.
///
/// # Errors
/// The daemon drains, or the credentials are wrong.
pub(crate) async fn identify(
    state: &State,
    headers: &HeaderMap,
    sender: &Sender,
) -> Result<Caller, ApiError> {
    if state.draining.is_cancelled() {
        return Err(ApiError::Draining);
    }
    authorize_client(state, headers, sender).await
}

/// Checks the rate limit of the caller, and reads and decodes the body. `started` is when the first byte
/// of the request arrived.
///
/// # Errors
/// [`ApiError`] that names the limit.
pub(super) async fn admit(
    state: &State,
    caller: Caller,
    headers: &HeaderMap,
    body: impl Body<Data = Bytes, Error: Into<ReadError>> + Unpin,
    started: Instant,
) -> Result<Admitted, ApiError> {
    check_rate(state, &caller)?;
    let mut held = state.body_bytes.share_of(caller.tenant_hash());
    let coding = Coding::of(headers)?;
    let body = body::read(body, coding, BodyLimits::of(state, started), &mut held).await?;
    Ok(Admitted { body, caller, held })
}

/// Checks the rate limit of the caller.
///
/// # Errors
/// The limit is reached.
pub(crate) fn check_rate(state: &State, caller: &Caller) -> Result<(), ApiError> {
    let Some(limiter) = &state.limiter else { return Ok(()) };
    limiter.check(&caller.id).map_err(|error| ApiError::RateLimited(error.per_second))
}
