//! Where a call goes, and with what TLS.

use std::sync::Arc;

use pointsman_workers::WorkerSpec;

/// An endpoint of a worker.
#[derive(Clone, Debug)]
pub(crate) struct Destination {
    url: String,
    /// Name that the engine's certificate must have; `None`: the host of the URL.
    pub(super) server_name: Option<Arc<str>>,
}

/// The parts of a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts<'a> {
    pub(super) has_tls: bool,
    /// Key of connections in the pool: `host:port`, for TLS with the scheme.
    pub(super) origin: &'a str,
    /// `host:port`.
    pub(super) authority: &'a str,
    /// Path and query.
    pub(super) path: &'a str,
}

impl Destination {
    /// Returns the endpoint of a worker at `path`.
    pub(crate) fn new(worker: &WorkerSpec, path: &str) -> Self {
        Self { url: [&*worker.url, path].concat(), server_name: worker.tls_server_name.clone() }
    }

    pub(super) fn parts(&self) -> Parts<'_> {
        let url = self.url.as_str();
        let secure = url.strip_prefix("https://");
        let rest = secure.or_else(|| url.strip_prefix("http://")).unwrap_or(url);
        let (authority, path) = rest.split_at(memchr::memchr(b'/', rest.as_bytes()).unwrap_or(rest.len()));
        let has_tls = secure.is_some();
        let origin = if has_tls { url.strip_suffix(path).unwrap_or(url) } else { authority };
        Parts { has_tls, origin, authority, path }
    }
}

#[cfg(test)]
impl From<&str> for Destination {
    fn from(url: &str) -> Self {
        Self { url: url.to_owned(), server_name: None }
    }
}

impl Parts<'_> {
    /// The host without its port.
    pub(super) fn host(&self) -> &str {
        self.authority.rsplit_once(':').map_or(self.authority, |(host, _)| host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_with_and_without_tls_are_kept_apart() {
        let plain = Destination::from("http://a:80/v1/x?y=z");
        let expected = Parts { has_tls: false, origin: "a:80", authority: "a:80", path: "/v1/x?y=z" };
        assert_eq!(plain.parts(), expected);
        let secure = Destination::from("https://[::1]:80/v1/x");
        let expected =
            Parts { has_tls: true, origin: "https://[::1]:80", authority: "[::1]:80", path: "/v1/x" };
        assert_eq!((secure.parts(), secure.parts().host()), (expected, "[::1]"));
    }
}
