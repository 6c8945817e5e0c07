//! Base URLs of workers.

use std::net::Ipv6Addr;

use super::{SpecError, error};
use crate::tls::server_name;

/// Scheme of a URL, and its default port.
const SCHEMES: [(&str, &str); 2] = [("http://", ":80"), ("https://", ":443")];

/// Returns the absolute base URL with its port, which is that of the scheme if the URL has none.
pub(super) fn base_url(url: &str) -> Result<String, SpecError> {
    let trimmed = url.trim_end_matches('/');
    let url = url_without_secrets(url);
    let known = SCHEMES.iter().find_map(|(scheme, port)| {
        let (start, rest) = trimmed.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some((*scheme, *port, rest))
    });
    let (scheme, default_port, rest) =
        known.ok_or_else(|| error("url", format!("`{url}` does not start with http:// or https://")))?;
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let fits = |byte: u8| byte.is_ascii_graphic() && !b"?#@".contains(&byte);
    let port = authority.rsplit_once(':').map(|(_, port)| port).filter(|port| !port.ends_with(']'));
    let problem = |what: &str| Err(error("url", format!("`{url}`{what}")));
    if trimmed.contains(['?', '#']) {
        return problem(": the URL of a worker has no query");
    }
    if authority.contains('@') {
        return problem(": a URL has no user and no password; set api_key of the worker");
    }
    if authority.is_empty() || authority.starts_with(':') || !trimmed.bytes().all(fits) {
        return problem(&format!(" is not of the form {scheme}host[:port][/path]"));
    }
    let host = port.and_then(|port| authority.strip_suffix(port)?.strip_suffix(':')).unwrap_or(authority);
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_ip = bracketed.is_none_or(|address| address.parse::<Ipv6Addr>().is_ok());
    if !is_ip || bracketed.is_none() && host.contains([':', '[', ']']) {
        return problem(
            ": write an IPv6 address in brackets and without a zone, such as http://[fd00::1]:8000",
        );
    }
    if port.is_some_and(|port| !port.parse::<u16>().is_ok_and(|port| port > 0)) {
        return problem(": the port is not a number from 1 to 65535");
    }
    if path.ends_with("/v1") || path.contains("/v1/") {
        return problem(": leave /v1 and what follows it out; the gateway adds the path of each request");
    }
    let port = if port.is_some() { "" } else { default_port };
    Ok(format!("{scheme}{authority}{port}{path}"))
}

/// Checks the name that a certificate must have.
pub(super) fn check_server_name(name: Option<&str>, url: &str) -> Result<(), SpecError> {
    let Some(name) = name else { return Ok(()) };
    if !url.starts_with("https://") {
        return Err(error("tls_server_name", format!("`{name}` has no effect: the url has no https://")));
    }
    server_name(name, None)
        .map(drop)
        .map_err(|_| error("tls_server_name", format!("`{name}` is neither a DNS name nor an address")))
}

/// Returns a URL for messages: what stands before an `@` may be a user and a password, and a query may have a
/// key. The text need not be a valid URL.
#[must_use]
pub fn url_without_secrets(url: &str) -> String {
    let (scheme, rest) = url.split_at(url.find("://").map_or(0, |at| at + 3));
    let (address, query) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
    if query.contains('@') {
        // The mark may be part of a password.
        return format!("{scheme}[secret]");
    }
    let query = query.get(..1).map_or_else(String::new, |mark| format!("{mark}[secret]"));
    match address.rsplit_once('@') {
        Some((_, address)) => format!("{scheme}[secret]@{address}{query}"),
        None => format!("{scheme}{address}{query}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k5_a_url_is_shown_without_user_and_query() {
        let table = [
            ("https://a:1/x", "https://a:1/x"),
            ("https://u:SECRET@a/x?k=SECRET", "https://[secret]@a/x?[secret]"),
            ("nats://SECRET@a#SECRET", "nats://[secret]@a#[secret]"),
            ("u:SECRET@a", "[secret]@a"),
            ("https://u:SECRET?SECRET@a/x", "https://[secret]"),
            ("https://a?SECRET", "https://a?[secret]"),
            ("", ""),
        ];
        for (url, shown) in table {
            // K5.4
            assert_eq!(url_without_secrets(url), shown);
        }
    }
}
