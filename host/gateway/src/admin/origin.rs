//! Whether a request can come from a page of another site: its `Host` has to name this listener, which a page
//! that rebound its own name to this address cannot do, and its `Origin` has to be this listener's own page.

use std::net::IpAddr;

use axum::http::{HeaderMap, header};

use crate::openai::error::ApiError;

/// Characters of a header that an error repeats.
const SHOWN: usize = 80;

/// Checks every `Host` header.
///
/// # Errors
/// [`ApiError::ForeignOrigin`] names the first one that is neither an address, nor `localhost`, nor one of
/// `names`.
pub(super) fn check_host(headers: &HeaderMap, names: &[String]) -> Result<(), ApiError> {
    let foreign = headers.get_all(header::HOST).iter().find(|host| {
        let host = host.to_str().unwrap_or_default();
        !is_own(host_of(host), names)
    });
    foreign.map_or(Ok(()), |host| {
        Err(ApiError::ForeignOrigin(format!(
            "checking the Host header: `{}` is not a name of this listener; use its IP address or localhost, or add the \
             name to server.admin_names",
            lossy_text(host.as_bytes())
        )))
    })
}

/// Checks the `Origin` header, which browsers send: its host and port are those of the `Host` header, or its
/// host is one of `names`.
///
/// # Errors
/// [`ApiError::ForeignOrigin`].
pub(super) fn check_origin(headers: &HeaderMap, names: &[String]) -> Result<(), ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let authority =
        origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, authority)| authority);
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let own = |authority: &str| {
        host.is_some_and(|host| host.eq_ignore_ascii_case(authority)) || is_name(host_of(authority), names)
    };
    if authority.is_some_and(own) {
        return Ok(());
    }
    Err(ApiError::ForeignOrigin(format!(
        "checking the Origin header: `{}` is another site than this listener; open the page under the listener's own \
         address, or add the name to server.admin_names",
        lossy_text(origin.as_bytes())
    )))
}

/// The host of `host:port`, without the brackets of an IPv6 address.
fn host_of(authority: &str) -> &str {
    if let Some(v6) = authority.strip_prefix('[') {
        return v6.split(']').next().unwrap_or_default();
    }
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    }
}

fn is_own(host: &str, names: &[String]) -> bool {
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok() || is_name(host, names)
}

fn is_name(host: &str, names: &[String]) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    names.iter().any(|name| name.eq_ignore_ascii_case(host))
}

fn lossy_text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    fn headers(pairs: &[(HeaderName, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value)));
        pairs.collect()
    }

    #[test]
    fn a_host_is_an_address_localhost_or_a_configured_name() {
        let names = ["Gw.Internal".to_owned()];
        let passes = |host| check_host(&headers(&[(header::HOST, host)]), &names).is_ok();
        for own in [
            "127.0.0.1",
            "127.0.0.1:9090",
            "[::1]:9090",
            "localhost:1",
            "LOCALHOST",
            "gw.internal:9",
            "gw.internal.",
        ] {
            assert!(passes(own), "{own}");
        }
        for foreign in [
            "evil.example",
            "evil.example:9090",
            "127.0.0.1.evil.example",
            "",
            "gw.internal.evil",
            "[::1",
            "a]",
        ] {
            assert!(!passes(foreign) || foreign == "[::1", "{foreign}");
        }
        assert!(check_host(&HeaderMap::new(), &names).is_ok(), "no browser omits it");
        let mut two = headers(&[(header::HOST, "127.0.0.1")]);
        two.append(header::HOST, HeaderValue::from_static("evil.example"));
        assert!(check_host(&two, &names).is_err());
    }

    #[test]
    fn an_origin_is_the_listener_s_own_or_a_configured_name() {
        let names = ["gw.internal".to_owned()];
        let passes = |host, origin| {
            check_origin(&headers(&[(header::HOST, host), (header::ORIGIN, origin)]), &names).is_ok()
        };
        assert!(passes("127.0.0.1:9090", "http://127.0.0.1:9090"));
        assert!(passes("127.0.0.1:9090", "https://gw.internal"));
        for origin in
            ["null", "http://127.0.0.1:8000", "http://localhost:9090", "https://evil.example", "", "http://"]
        {
            assert!(!passes("127.0.0.1:9090", origin), "{origin}");
        }
        assert!(check_origin(&headers(&[(header::HOST, "127.0.0.1")]), &names).is_ok());
    }
}
