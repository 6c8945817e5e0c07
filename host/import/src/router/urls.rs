//! Addresses of engines as people write them, in the form that the gateway reads.

use super::arguments::without_passwords;
use crate::report::plain;

/// An address of an engine.
pub(super) struct EngineUrl {
    pub(super) url: String,
    /// What was left out, for a comment.
    pub(super) comment: String,
}

/// Returns the addresses in a value: one, or several with commas or blanks between them.
pub(super) fn addresses(value: &str) -> impl Iterator<Item = &str> {
    value.split(|letter: char| letter == ',' || letter.is_whitespace()).filter(|part| !part.is_empty())
}

/// Reads an address.
///
/// # Errors
/// The gateway cannot call it. The text says why, without credentials.
pub(super) fn engine_url(text: &str) -> Result<EngineUrl, String> {
    let shown = plain(&without_passwords(text.split('?').next().unwrap_or_default()));
    let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
    let scheme = scheme.to_ascii_lowercase();
    if scheme == "grpc" || scheme == "grpcs" || scheme == "ipc" || scheme == "tcp" {
        return Err(format!("{shown}: engines are called over HTTP"));
    }
    let base = rest.trim_end_matches('/');
    let closed = format!("{base}/");
    let base = closed.split_once("/v1/").map_or(base, |(base, _)| base).trim_end_matches('/');
    let authority = base.split('/').next().unwrap_or_default();
    let port = authority.rsplit_once(':').map(|(_, port)| port).filter(|port| !port.ends_with(']'));
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    let problem = if scheme != "http" && scheme != "https" {
        "expected http://HOST:PORT"
    } else if authority.starts_with('[') && authority.contains('%') {
        "an IPv6 address in a URL has no zone"
    } else if authority.contains('@') {
        "a URL has no credentials: set api_key of the worker"
    } else if !base.bytes().all(|byte| byte.is_ascii_graphic() && !b"?#@".contains(&byte)) {
        "expected http://HOST:PORT without a query"
    } else if authority.is_empty() || authority.starts_with(':') || port.is_some_and(|port| !is_port(port)) {
        "expected HOST:PORT, with a port from 1 to 65535"
    } else {
        let left = rest.trim_end_matches('/').len() > base.len();
        let comment = if left { "without /v1: the gateway adds the path of each request" } else { "" };
        return Ok(EngineUrl { url: format!("{scheme}://{base}"), comment: comment.to_owned() });
    };
    Err(format!("{shown}: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s3_addresses_are_read_as_people_write_them() {
        for (text, url) in [
            ("http://a:1", "http://a:1"),
            ("http://a:1/", "http://a:1"),
            ("HTTP://a:1//", "http://a:1"),
            ("http://a:1/v1", "http://a:1"),
            ("https://a/v1/", "https://a"),
            ("http://a:1/llm/v1", "http://a:1/llm"),
            ("http://a:1/v1/chat/completions", "http://a:1"),
            ("http://a:1/v1/v1", "http://a:1"),
            ("http://a/v1x", "http://a/v1x"),
            ("http://[::1]:8000/v1/", "http://[::1]:8000"),
            ("http://[fe80::1]", "http://[fe80::1]"),
        ] {
            let read = engine_url(text).ok().unwrap();
            // S3.7
            assert_eq!(read.url, url, "{text}");
            assert_eq!(read.comment.is_empty(), !text.contains("/v1") || text.contains("v1x"), "{text}");
        }
        for (text, why) in [
            ("a:1", "a:1: expected http://HOST:PORT"),
            ("grpc://a:1", "over HTTP"),
            ("http://", "expected HOST:PORT"),
            ("http://a:0", "a port from 1 to 65535"),
            ("http://a:b", "a port from 1 to 65535"),
            ("http://u:geheim@a:1", "http://[secret]@a:1: a URL has no credentials"),
            ("http://a:1?x=geheim", "without a query"),
            ("http://[fe80::1%eth0]:1", "http://[fe80::1%eth0]:1: an IPv6 address in a URL has no zone"),
            ("http://[fe80::1%25eth0]", "has no zone"),
        ] {
            let problem = engine_url(text).err().unwrap();
            assert!(problem.contains(why), "{text}: {problem}");
        }
        assert_eq!(addresses(" http://a:1,http://b:1  http://c:1 ").count(), 3);
    }
}
