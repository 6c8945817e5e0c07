//! `[server]`: the listeners, and what clients and operators may do.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
};

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
    /// Plain keys of clients; need auth.plain_api_keys. Use [[auth.keys]].
    pub api_keys: Vec<Secret>,
    /// Plain keys of tenants, by name: { team-a = ["…"] }. Use [[auth.keys]].
    pub tenants: BTreeMap<String, Vec<Secret>>,
    /// Origins of pages that may call from a browser: "https://chat.example", or "*"; empty: none.
    #[key(restart)]
    pub cors_origins: Vec<String>,
    /// Header in which a proxy of auth.trusted_proxies names the tenant of a request whose key has none;
    /// empty: none.
    pub tenant_header: String,
    /// Bearer token for every change on the admin listener.
    #[key(example = "\"…\"", read)]
    pub admin_token: Option<Secret>,
    /// File with that token.
    #[key(example = "\"/run/secrets/token\"", read)]
    pub admin_token_file: Option<PathBuf>,
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

impl Server {
    fn rules(&self, report: &mut Report<'_>) {
        if self.listen == self.admin_listen && self.listen.port() != 0 {
            let message =
                format!("`{}` is also the address of server.listen: use another port", self.admin_listen);
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
        self.check_tenants(report);
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

    /// Checks that each key belongs to one tenant at most, and that no name is empty.
    fn check_tenants(&self, report: &mut Report<'_>) {
        let mut owners: BTreeMap<&str, &str> = self.api_keys.iter().map(|key| (key.expose(), "")).collect();
        for (tenant, keys) in &self.tenants {
            let path = format!("tenants.{tenant}");
            if tenant.is_empty() {
                report.add(&path, "the name of a tenant is empty: give it a name");
            }
            for (position, key) in keys.iter().enumerate() {
                let path = format!("{path}[{position}]");
                if key.expose().is_empty() {
                    report.add(&path, "the key is empty: every client would know it");
                } else if let Some(owner) = owners.insert(key.expose(), tenant) {
                    let owner = if owner.is_empty() { "server.api_keys" } else { owner };
                    let message = format!("the same key belongs to `{owner}`, too: give each tenant its own");
                    report.add(&path, message);
                }
            }
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

    /// Returns the token that operators need, from its key or its file. `others`: operators have other ways
    /// to prove who they are.
    ///
    /// # Errors
    /// The problem with it.
    pub(super) fn operators_token(&self, others: bool) -> Result<Option<Secret>, Problem> {
        let problem = |key: &str, message: String| Err(Problem::new(format!("server.{key}"), message));
        let (key, token) = match (&self.admin_token, &self.admin_token_file) {
            (Some(_), Some(_)) => {
                let message = "`admin_token` is given, too: remove one of them";
                return problem("admin_token_file", message.to_owned());
            }
            (Some(token), None) => ("admin_token", Some(token.clone())),
            (None, Some(file)) => ("admin_token_file", Some(read_token(file)?)),
            (None, None) => ("admin_token", None),
        };
        if token.as_ref().is_some_and(|token| token.expose().is_empty()) {
            let message = "the token is empty: give one, or remove the key to let every operator in";
            return problem(key, message.to_owned());
        }
        if let Some(message) = token.as_ref().and_then(|token| KeyDigest::sha256(token.expose()).published())
        {
            return problem(key, message);
        }
        if token.is_none() && !others && self.admin_token_reads {
            let message = "`true` needs a token: add `admin_token` or `admin_token_file`";
            return problem("admin_token_reads", message.to_owned());
        }
        if token.is_none() && !others && !self.admin_listen.ip().is_loopback() && !self.admin_insecure {
            let message = format!(
                "`{}` can be reached from the network, and there is no admin token: add `admin_token_file`, listen \
                 on 127.0.0.1, or set `admin_insecure = true` to let everyone change this gateway",
                self.admin_listen
            );
            return problem("admin_listen", message);
        }
        Ok(token)
    }

    /// Returns the number of threads that serve clients: by default one for every two cores.
    ///
    /// The kernel's part of their work, KV events, the index and compiles use the other cores, and one busy
    /// thread costs less than two that often sleep.
    #[must_use]
    pub fn client_threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)),
            threads => threads,
        }
    }

    /// Returns the number of threads that encode long prompts: by default one for every two cores, and at
    /// least two, so that one very long prompt leaves a thread to the others.
    #[must_use]
    pub fn encode_threads(&self) -> usize {
        match self.tokenizer_threads {
            0 => std::thread::available_parallelism().map_or(2, |cores| cores.get().div_ceil(2).max(2)),
            threads => threads,
        }
    }
}

fn read_token(file: &Path) -> Result<Secret, Problem> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        let message =
            format!("cannot read `{}`: {error}; check the path and its permissions", file.display());
        Problem::new("server.admin_token_file", message)
    })?;
    Ok(text.trim().into())
}
