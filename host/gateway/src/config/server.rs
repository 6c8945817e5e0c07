//! `[server]`: the listeners, and what clients and operators may do.

#![allow(rustdoc::bare_urls, reason = "descriptions of keys are comments of the example, too")]

use std::net::SocketAddr;

use http::{HeaderName, HeaderValue};
use pointsman_config_file::{Report, section};

use super::{Http2, KeyDigest, Problem, Secret, Tls};

/// The listeners, and what clients and operators may do.
#[section(rules)]
pub struct Server {
    /// Address for clients.
    #[key(default = SocketAddr::from(([127, 0, 0, 1], 8080)), restart)]
    pub listen: SocketAddr,
    /// Address for operators; keep it off the clients' network.
    #[key(default = SocketAddr::from(([127, 0, 0, 1], 9090)), restart)]
    pub admin_listen: SocketAddr,
    /// Number of threads that serve clients; 0: one for every two cores.
    #[key(restart)]
    pub threads: usize,
    /// Number of threads that encode prompts above 4 KiB; 0: one for every two cores, at least two.
    #[key(restart)]
    pub tokenizer_threads: usize,
    /// Limit of a request body in bytes.
    #[key(default = 32 * 1024 * 1024)]
    pub max_body_bytes: usize,
    /// Accept nvext and x-*-instance-id hints from clients.
    #[key(default = true)]
    pub trust_hints: bool,
    /// Clients may see decisions (x-pointsman-decision, the legs of /v1/route); set false for clients that
    /// you do not trust.
    #[key(default = true)]
    pub tell_decisions: bool,
    /// Requests per second for each key and each subject of a token, or for all clients together without
    /// keys; 0: no limit.
    pub requests_per_second: u32,
    /// Origins of pages that may call from a browser: "https://chat.example", or "*"; empty: none.
    #[key(restart)]
    pub cors_origins: Vec<String>,
    /// Header in which a proxy of auth.trusted_proxies names the tenant of a request whose key has none;
    /// empty: none.
    pub tenant_header: String,
    /// Bearer token for every change on the admin listener.
    #[key(example = "{ file = \"/run/secrets/token\" }")]
    pub admin_token: Option<Secret>,
    /// Whether reads need the token, too, except /healthz, /readyz and the empty page.
    pub admin_token_reads: bool,
    /// Whether admin_listen may be on a network without a token.
    #[key(restart)]
    pub admin_insecure: bool,
    /// Host names of the admin listener, besides IP addresses and localhost.
    pub admin_names: Vec<String>,
    /// TLS for clients; no table: plain HTTP. See "TLS".
    #[key(nested)]
    pub tls: Option<Tls>,
    /// HTTP/2 for clients, only with [server.tls]. See "HTTP/2".
    #[key(nested)]
    pub http2: Http2,
    /// TLS for operators, with the keys of [server.tls]; no table: plain HTTP.
    #[key(
        example = "{ cert_file = \"/etc/pointsman/admin.crt\", key_file = \"/etc/pointsman/admin.key\" }",
        nested
    )]
    pub admin_tls: Option<Tls>,
}

/// Returns what is wrong with an address if the listener of another key takes its port there, too. An
/// unspecified address takes the port on all addresses; that of IPv6 also on those of IPv4.
pub(super) fn taken(address: SocketAddr, (key, other): (&str, SocketAddr)) -> Option<String> {
    let covers =
        |all: SocketAddr, one: SocketAddr| all.ip().is_unspecified() && (all.is_ipv6() || one.is_ipv4());
    if address.port() == 0 || address.port() != other.port() {
        None
    } else if address.ip() == other.ip() {
        Some(format!("`{address}` is also the address of {key}: use another port"))
    } else if covers(address, other) || covers(other, address) {
        Some(format!("`{address}` and `{other}` of {key} take the same port: use another port"))
    } else {
        None
    }
}

impl Server {
    fn rules(&self, report: &mut Report<'_>) {
        if let Some(message) = taken(self.admin_listen, ("server.listen", self.listen)) {
            report.add("admin_listen", message);
        }
        for (position, origin) in self.cors_origins.iter().enumerate() {
            let host = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
            let fits = origin == "*" || host.is_some_and(|host| !host.is_empty() && !host.contains('/'));
            if !fits || HeaderValue::from_str(origin).is_err() {
                let message = format!(
                    "`{origin}` is not an origin: expected `https://HOST`, `http://HOST:PORT` or `*`"
                );
                report.add(&format!("cors_origins[{position}]"), message);
            }
        }
        if !self.tenant_header.is_empty() && self.tenant_header().is_none() {
            let message = format!("`{}` is not the name of an HTTP header", self.tenant_header);
            report.add("tenant_header", message);
        }
        self.check_names(report);
    }

    fn check_names(&self, report: &mut Report<'_>) {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        let bad = |name: &String| name.is_empty() || !name.bytes().all(fits);
        if let Some((index, name)) = self.admin_names.iter().enumerate().find(|(_, name)| bad(name)) {
            let message =
                format!("`{name}` is not a host name: expected letters, digits, `-` and `.`, without a port");
            report.add(&format!("admin_names[{index}]"), message);
        }
    }

    /// Returns the header in which a proxy names the tenant.
    pub(crate) fn tenant_header(&self) -> Option<HeaderName> {
        HeaderName::try_from(&self.tenant_header).ok()
    }

    /// Returns the origins of pages that may call the clients' listener.
    pub(crate) fn origins(&self) -> Vec<HeaderValue> {
        self.cors_origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()).collect()
    }

    /// Returns what is wrong with the token of operators. `others`: operators have other ways to prove who
    /// they are.
    pub(super) fn token_problem(&self, others: bool) -> Option<Problem> {
        let problem = |key: &str, message: String| Some(Problem::new(format!("server.{key}"), message));
        match &self.admin_token {
            Some(token) if token.expose().is_empty() => {
                let message = "the token is empty: give one, or remove the key to let every operator in";
                problem("admin_token", message.to_owned())
            }
            Some(token) => problem("admin_token", KeyDigest::sha256(token.expose()).published()?),
            None if others => None,
            None if self.admin_token_reads => {
                problem("admin_token_reads", "`true` needs a token: add `admin_token`".to_owned())
            }
            None if !self.admin_listen.ip().is_loopback() && !self.admin_insecure => {
                let message = format!(
                    "`{}` can be reached from the network, and there is no admin token: add `admin_token`, listen on \
                     127.0.0.1, or set `admin_insecure = true` to let everyone change this gateway",
                    self.admin_listen
                );
                problem("admin_listen", message)
            }
            None => None,
        }
    }

    /// Returns the number of threads that serve clients: by default one for every two cores.
    ///
    /// The kernel's part of their work, KV events, the index and compiles use the other cores, and one busy
    /// thread costs less than two that often sleep.
    #[must_use]
    pub(crate) fn client_threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)),
            threads => threads,
        }
    }

    /// Returns the number of threads that encode long prompts: by default one for every two cores, and at
    /// least two, so that one very long prompt leaves a thread to the others.
    #[must_use]
    pub(crate) fn encode_threads(&self) -> usize {
        match self.tokenizer_threads {
            0 => std::thread::available_parallelism().map_or(2, |cores| cores.get().div_ceil(2).max(2)),
            threads => threads,
        }
    }
}
