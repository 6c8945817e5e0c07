//! Pages of other sites. A browser asks before it sends their requests, and `server.cors_origins` answers.
//! Some it sends without asking: forms, texts and WebSockets. Those are refused here.

use axum::http::{HeaderMap, HeaderValue, Uri, header};

use super::credentials::bearer;
use crate::openai::{client_key::API_KEY, error::ApiError, short_text::shortened};

/// Refuses a request that a browser sends for a page of another site without asking, unless `allowed` has the
/// page's origin. Only browsers send an origin, so that programs pass.
///
/// # Errors
/// [`ApiError::ForeignOrigin`].
pub(super) fn check_page(headers: &HeaderMap, uri: &Uri, allowed: &[HeaderValue]) -> Result<(), ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let is_allowed = allowed.iter().any(|allowed| allowed == origin || allowed == "*");
    if is_allowed || is_asked_for(headers) || is_of_this_site(origin, headers, uri) {
        return Ok(());
    }
    Err(ApiError::ForeignOrigin(format!(
        "checking the Origin header: `{}` is another site, and its browser sends such a request without asking; \
         send a key, or JSON (`content-type: application/json`), or add the origin to server.cors_origins",
        shortened(&String::from_utf8_lossy(origin.as_bytes()))
    )))
}

/// Returns whether a body is said to be JSON. A form of another site's page cannot say so without asking
/// first.
pub(crate) fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

/// Returns whether a browser asks before it sends a request with these headers for a page of another site.
/// It does not ask for the credentials of other schemes that it holds, and attaches them by itself.
fn is_asked_for(headers: &HeaderMap) -> bool {
    let has_token = bearer(headers).is_ok_and(|token| token.is_some());
    is_json(headers) || has_token || headers.contains_key(API_KEY)
}

/// Returns whether a page has the origin of this listener, or of a proxy before it that changes the host.
/// Browsers send `sec-fetch-site` over HTTPS and to localhost only.
fn is_of_this_site(origin: &HeaderValue, headers: &HeaderMap, uri: &Uri) -> bool {
    let site = headers.get("sec-fetch-site");
    if site.is_some_and(|site| site == "same-origin") {
        return true;
    }
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    // HTTP/2 has the host in the address.
    let host = host.or_else(|| uri.authority().map(|authority| authority.as_str()));
    let authority = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
    authority.zip(host).is_some_and(|((_, authority), host)| authority.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;

    use super::*;

    #[test]
    fn i7_only_what_a_browser_sends_without_asking_is_refused() {
        let text = (header::CONTENT_TYPE, "text/plain");
        let foreign = (header::ORIGIN, "http://evil.example");
        let passes = |more: &[(HeaderName, &'static str)], uri: &str, allowed: &[&'static str]| {
            let host = (header::HOST, "10.0.0.1:8080");
            let given = [host].into_iter().filter(|_| uri.starts_with('/')).chain(more.iter().cloned());
            let headers = given.map(|(name, value)| (name, HeaderValue::from_static(value))).collect();
            let allowed: Vec<HeaderValue> = allowed.iter().map(|one| HeaderValue::from_static(one)).collect();
            check_page(&headers, &uri.parse().unwrap(), &allowed).is_ok()
        };
        let held = |value| vec![foreign.clone(), (header::AUTHORIZATION, value)];
        for given in [
            vec![foreign.clone()],
            vec![foreign.clone(), text.clone()],
            vec![(header::ORIGIN, "null")],
            held("Basic YTpi"),
            held("Negotiate YII"),
            held("Bearer"),
        ] {
            // I7.10
            assert!(
                !passes(&given, "/", &[]) && !passes(&given, "/", &["https://evil.example"]),
                "{given:?}"
            );
            assert!(passes(&given, "/", &["http://evil.example", "*"]), "{given:?}");
        }
        assert!(passes(std::slice::from_ref(&foreign), "/", &["http://evil.example"]));
        for sent_by_others in [
            (header::CONTENT_TYPE, "Application/JSON; charset=utf-8"),
            (header::AUTHORIZATION, "Bearer a"),
            (header::AUTHORIZATION, "bEARER a"),
            (API_KEY, "a"),
            (HeaderName::from_static("sec-fetch-site"), "same-origin"),
        ] {
            // I7.10
            assert!(passes(&[foreign.clone(), sent_by_others.clone()], "/", &[]), "{sent_by_others:?}");
        }
        let own = (header::ORIGIN, "http://10.0.0.1:8080");
        // I7.10
        assert!(passes(std::slice::from_ref(&text), "/", &[]));
        assert!(passes(&[own.clone(), text.clone()], "/", &[]));
        assert!(passes(&[own.clone(), text.clone()], "https://10.0.0.1:8080/v1", &[]), "HTTP/2");
        assert!(!passes(&[own, text], "https://10.0.0.2:8080/v1", &[]));
    }
}
