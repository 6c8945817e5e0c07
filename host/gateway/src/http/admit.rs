//! Admits a request: refuses it before its body is read, or reads the body.

use axum::{body::Body, http::HeaderMap};
use bytes::Bytes;
use tokio::time::Instant;

use super::{
    auth::{authorize, bearer},
    body::{self, BodyLimits},
};
use crate::{openai::error::ApiError, state::State};

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
) -> Result<Bytes, ApiError> {
    let settings = &state.settings;
    if state.draining.is_cancelled() {
        return Err(ApiError::Draining);
    }
    authorize(&settings.api_keys, headers)?;
    if let Some(limiter) = &state.limiter {
        limiter
            .check(bearer(headers).unwrap_or_default())
            .map_err(|error| ApiError::RateLimited(error.per_second))?;
    }
    let limits = BodyLimits {
        bytes: settings.max_body_bytes,
        idle: settings.body_idle_timeout,
        deadline: started + settings.request_timeout,
    };
    body::read(body, limits).await
}
