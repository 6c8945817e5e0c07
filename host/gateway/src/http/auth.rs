//! Bearer tokens of clients and operators.

use axum::http::{HeaderMap, header};
use subtle::{Choice, ConstantTimeEq};

use crate::openai::error::ApiError;

/// Lets a request with one of `keys` pass; without keys, every request.
///
/// # Errors
/// [`ApiError::Unauthorized`] or [`ApiError::Forbidden`].
pub(super) fn authorize(keys: &[String], headers: &HeaderMap) -> Result<(), ApiError> {
    if keys.is_empty() {
        return Ok(());
    }
    let given = bearer(headers).ok_or(ApiError::Unauthorized)?;
    // All keys are compared, so that the time does not depend on which of them matches.
    let none = Choice::from(0);
    let known = keys.iter().fold(none, |known, key| known | key.as_bytes().ct_eq(given.as_bytes()));
    if known.into() { Ok(()) } else { Err(ApiError::Forbidden) }
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
    use super::*;

    #[test]
    fn a_request_needs_one_of_the_keys_when_there_are_any() {
        let keys = ["alpha".to_owned(), "beta".to_owned()];
        let with = |value: &str| {
            let headers = [(header::AUTHORIZATION, value.parse().unwrap())].into_iter().collect();
            authorize(&keys, &headers)
        };
        assert_eq!(authorize(&[], &HeaderMap::new()), Ok(()));
        assert_eq!(authorize(&keys, &HeaderMap::new()), Err(ApiError::Unauthorized));
        assert_eq!((with("Bearer alpha"), with("Bearer beta")), (Ok(()), Ok(())));
        assert_eq!(with("Basic alpha"), Err(ApiError::Unauthorized));
        for wrong in ["Bearer alph", "Bearer alphaa", "Bearer ", "Bearer gamma"] {
            assert_eq!(with(wrong), Err(ApiError::Forbidden), "{wrong}");
        }
    }
}
