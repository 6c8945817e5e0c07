//! Admits a request: refuses it before its body is read, or reads the body.

use axum::{body::Body, http::HeaderMap};
use bytes::Bytes;
use tokio::time::Instant;

use super::{
    auth::authorize_client,
    body::{self, BodyLimits},
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
    /// Who sent the request.
    pub(super) caller: Caller,
    /// The body's part of the bytes in flight.
    pub(super) held: Share,
}

/// Checks that the daemon takes requests, the API key and the rate limit, and reads the body. `started` is
/// when the first byte of the request arrived.
///
/// # Errors
/// [`ApiError`] that names the check or the limit.
pub(super) async fn admit(
    state: &State,
    headers: &HeaderMap,
    body: Body,
    started: Instant,
    sender: &Sender,
) -> Result<Admitted, ApiError> {
    let caller = let_in(state, headers, sender).await?;
    let mut held = state.body_bytes.share();
    let body = body::read(body, BodyLimits::of(state, started), &mut held).await?;
    Ok(Admitted { body, caller, held })
}

/// Checks that the daemon takes requests, the API key and the rate limit. Returns who sent the request.
///
/// # Errors
/// [`ApiError`] that names the check.
pub(crate) async fn let_in(state: &State, headers: &HeaderMap, sender: &Sender) -> Result<Caller, ApiError> {
    if state.draining.is_cancelled() {
        return Err(ApiError::Draining);
    }
    let caller = authorize_client(state, headers, sender).await?;
    if let Some(limiter) = &state.limiter {
        limiter
            .check(caller.id.as_deref().unwrap_or_default())
            .map_err(|error| ApiError::RateLimited(error.per_second))?;
    }
    Ok(caller)
}
