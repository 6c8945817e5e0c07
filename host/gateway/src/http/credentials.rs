//! Credentials of a request: a bearer token, or the header in which clients of the Anthropic API send their
//! key.

use axum::http::{HeaderMap, HeaderName, header};

use crate::openai::{client_key::API_KEY, error::ApiError};

/// Returns the key or token of a client's request.
///
/// # Errors
/// The request has two that differ: which one counts would be a guess.
pub(super) fn client_key(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    let bearer = once(headers, &header::AUTHORIZATION)?.and_then(token_of);
    // Some clients send the header empty when they have only the other one.
    let key = once(headers, &API_KEY)?.filter(|key| !key.trim().is_empty());
    match (bearer, key) {
        (Some(bearer), Some(key)) if bearer != key => {
            Err(ambiguous("`authorization` and `x-api-key` have different keys; send one of them"))
        }
        (bearer, key) => Ok(bearer.or(key)),
    }
}

/// Returns the bearer token of a request.
pub(crate) fn bearer(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    Ok(once(headers, &header::AUTHORIZATION)?.and_then(token_of))
}

/// The token of a header with the scheme `Bearer`, in any case (RFC 9110, section 11.1).
fn token_of(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim_start_matches(' '))
}

/// The value of a header that may come once.
fn once<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, ApiError> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    if values.next().is_some() {
        return Err(ambiguous(&format!("`{name}` appears more than once; send it once")));
    }
    Ok(first.and_then(|value| value.to_str().ok()))
}

fn ambiguous(problem: &str) -> ApiError {
    ApiError::InvalidRequest(format!("authenticating the request: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_of(pairs: &[(HeaderName, &'static str)]) -> Result<Option<String>, &'static str> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, value.parse().unwrap());
        }
        client_key(&headers).map(|key| key.map(str::to_owned)).map_err(|error| error.code())
    }

    #[test]
    fn a_request_has_one_key_or_is_refused() {
        let authorization = || header::AUTHORIZATION;
        let a = || Ok(Some("a".to_owned()));
        assert_eq!(key_of(&[(authorization(), "Bearer a")]), a());
        for other in ["bearer a", "BEARER a", "bEaReR   a"] {
            assert_eq!(key_of(&[(authorization(), other)]), a(), "{other}");
        }
        assert_eq!(key_of(&[(authorization(), "Bearera")]), Ok(None));
        assert_eq!(key_of(&[(API_KEY, "a")]), a());
        assert_eq!(key_of(&[(authorization(), "Bearer a"), (API_KEY, "a")]), a());
        assert_eq!(key_of(&[(authorization(), "Basic a"), (API_KEY, "a")]), a());
        assert_eq!(key_of(&[(authorization(), "Basic a")]), Ok(None));
        for empty in ["", " "] {
            // K1.5
            assert_eq!(key_of(&[(authorization(), "Bearer a"), (API_KEY, empty)]), a());
            assert_eq!(key_of(&[(API_KEY, empty)]), Ok(None));
        }
        let refused = Err("invalid_request");
        assert_eq!(key_of(&[(authorization(), "Bearer a"), (API_KEY, "b")]), refused);
        assert_eq!(key_of(&[(authorization(), "Bearer a"), (authorization(), "Bearer a")]), refused);
        assert_eq!(key_of(&[(API_KEY, "a"), (API_KEY, "b")]), refused);
    }
}
