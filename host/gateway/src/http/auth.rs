//! Bearer tokens of clients and operators, and the tenant of a request.

use std::net::IpAddr;

use axum::http::{HeaderMap, header};
use pointsman_workers::name_hash;
use subtle::ConstantTimeEq;

use crate::{
    openai::error::ApiError,
    state::{Settings, State, api_keys::ApiKeys, bad_keys::DELAY},
};

/// Lets a request with one of `keys` pass; without keys, every request. Returns the name of the key's tenant.
///
/// # Errors
/// [`ApiError::Unauthorized`] or [`ApiError::Forbidden`].
fn authorize<'a>(keys: &'a ApiKeys, headers: &HeaderMap) -> Result<Option<&'a str>, ApiError> {
    if keys.is_empty() {
        return Ok(None);
    }
    let given = client_key(headers).ok_or(ApiError::Unauthorized)?;
    let tenant = keys.find(given).ok_or(ApiError::Forbidden)?;
    Ok(tenant.map(AsRef::as_ref))
}

/// Authorizes a request. Returns the salted hash of its tenant: that of its key, else the one that a trusted
/// proxy names in the configured header.
///
/// # Errors
/// As [`authorize`].
fn tenant(settings: &Settings, headers: &HeaderMap) -> Result<Option<u64>, ApiError> {
    let of_key = authorize(&settings.api_keys, headers)?.map(str::as_bytes);
    let named =
        || settings.tenant_header.as_ref().and_then(|name| headers.get(name)).map(|name| name.as_bytes());
    let name = of_key.or_else(named).filter(|name| !name.is_empty());
    Ok(name.map(|name| name_hash(name, settings.measure.salt)))
}

/// Lets a client's request with a known key pass, and returns its tenant. Wrong keys are counted, and slowed
/// down when an address sends many.
///
/// # Errors
/// As [`authorize`], and [`ApiError::TooManyWrongKeys`].
pub(super) async fn authorize_client(
    state: &State,
    headers: &HeaderMap,
    peer: IpAddr,
) -> Result<Option<u64>, ApiError> {
    match tenant(&state.settings, headers) {
        Err(ApiError::Forbidden) => Err(wrong_key(state, "clients", peer, ApiError::Forbidden).await),
        other => other,
    }
}

/// Counts a wrong key and returns its `error`, or another one after a delay when `peer` sent many.
pub(crate) async fn wrong_key(
    state: &State,
    listener: &'static str,
    peer: IpAddr,
    error: ApiError,
) -> ApiError {
    state.metrics.wrong_key(listener);
    if !state.bad_keys.note(peer) {
        return error;
    }
    tokio::time::sleep(DELAY).await;
    ApiError::TooManyWrongKeys
}

/// Returns the API key of a client: a bearer token, or the header in which clients of the Anthropic API send
/// it.
pub(super) fn client_key(headers: &HeaderMap) -> Option<&str> {
    bearer(headers).or_else(|| headers.get("x-api-key")?.to_str().ok())
}

/// Returns the bearer token of a request.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

/// Compares a token with the expected one. The time depends on the lengths only.
pub(crate) fn is_token(given: &str, expected: &str) -> bool {
    given.as_bytes().ct_eq(expected.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_request_needs_one_of_the_keys_when_there_are_any() {
        let keys = ApiKeys::new(&["alpha".into(), "beta".into()], &BTreeMap::new());
        let with = |value: &str| {
            let headers = [(header::AUTHORIZATION, value.parse().unwrap())].into_iter().collect();
            authorize(&keys, &headers)
        };
        assert_eq!(authorize(&ApiKeys::default(), &HeaderMap::new()), Ok(None));
        assert_eq!(authorize(&keys, &HeaderMap::new()), Err(ApiError::Unauthorized));
        assert_eq!((with("Bearer alpha"), with("Bearer beta")), (Ok(None), Ok(None)));
        assert_eq!(with("Basic alpha"), Err(ApiError::Unauthorized));
        for wrong in ["Bearer alph", "Bearer alphaa", "Bearer ", "Bearer gamma"] {
            assert_eq!(with(wrong), Err(ApiError::Forbidden), "{wrong}");
        }
    }
}
