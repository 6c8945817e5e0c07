//! Listeners, certificates, tokens of operators, and traces.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use anyhow::bail;

use super::{Flavor, Import, arguments::Given, keys::digest};
use crate::report::{Kind, Place, plain};

/// The gateway's local address for operators.
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// The default of its port.
const ADMIN_PORT: u16 = 9_090;
/// Longest id of an operator.
const MAX_ID: usize = 64;

impl Import<'_> {
    /// Addresses of clients and operators.
    pub(super) fn listeners(&mut self) -> anyhow::Result<()> {
        let default = if self.flavor == Flavor::Vllm { "127.0.0.1" } else { "0.0.0.0" };
        let (port, source, given_port) = self.port("port", 30_000)?;
        let given_host = self.line.last("host");
        let host = given_host.map_or(default, Given::value);
        let (ip, exact) = address(host);
        let listen = SocketAddr::new(ip, port).to_string();
        let comment = match given_host {
            Some(given) if given.place != Place::Default => format!("{}, {source}", given.flag()),
            _ => source,
        };
        self.draft.set("server", "listen", listen, comment);
        self.tell_number("port", given_port, "server.listen");
        if let Some(given) = given_host {
            let ours =
                format!("server.listen: `{}` is not an address: listening on all addresses", plain(host));
            if exact {
                self.note_translation(given, Kind::Translated, "server.listen");
            } else {
                self.note_translation(given, Kind::Approximated, ours);
            }
        }
        if self.flavor != Flavor::Production {
            self.metrics(port)?;
        } else if port == ADMIN_PORT {
            let listen = SocketAddr::new(LOCAL, ADMIN_PORT + 1).to_string();
            self.draft.set("server", "admin_listen", listen, "its default port is the one of --port");
        }
        self.cors()?;
        self.request_ids();
        self.traces()
    }

    /// The address of the metrics becomes that of the operators' listener, which also changes things.
    fn metrics(&mut self, clients: u16) -> anyhow::Result<()> {
        let (mut port, mut source, given) = self.port("prometheus-port", 29_000)?;
        match given {
            Some(given) if port == clients => {
                bail!("{}: `{port}` is also the port of --port: use another one", given.at())
            }
            None if port == clients => {
                (port, source) = (port + 1, "the default of --prometheus-port is that of --port".to_owned());
            }
            _ => {}
        }
        let listen = SocketAddr::new(LOCAL, port).to_string();
        self.draft.set("server", "admin_listen", listen, format!("{source}: metrics are at /metrics"));
        let ours = "server.admin_listen: metrics are at /metrics, with other names (docs/metrics.md)";
        match given {
            Some(given) => self.note_translation(given, Kind::Approximated, ours),
            None => self.report.add(Kind::Approximated, Place::Default, "--prometheus-port", ours),
        }
        if let Some(given) = self.line.last("prometheus-host") {
            let is_local = address(given.value()).0.is_loopback();
            let ours = "server.admin_listen stays on this machine, because it can change the gateway: for a \
                        network, set it with admin_token = { file = … }, and admin_token_reads = false for the scraper";
            self.note_translation(given, if is_local { Kind::Translated } else { Kind::Approximated }, ours);
        }
        Ok(())
    }

    /// Origins of pages, without the `/` that is not a part of them.
    fn cors(&mut self) -> anyhow::Result<()> {
        let Some(given) = self.line.last("cors-allowed-origins") else { return Ok(()) };
        let origins = given.values.iter().map(|origin| origin.trim().trim_end_matches('/'));
        let origins: Vec<&str> = origins.filter(|origin| !origin.is_empty()).collect();
        for origin in &origins {
            let host = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
            let is_host = |host: &str| {
                !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
            };
            if *origin != "*" && !host.is_some_and(is_host) {
                bail!(
                    "{}: `{}` is not an origin: expected https://HOST, http://HOST:PORT or *",
                    given.at(),
                    plain(origin)
                );
            }
        }
        if origins.is_empty() {
            self.note_translation(given, Kind::Translated, "left out: it names no origin");
        } else {
            self.draft.set("server", "cors_origins", origins, given.flag());
            self.note_translation(given, Kind::Translated, "server.cors_origins");
        }
        Ok(())
    }

    fn request_ids(&mut self) {
        let Some(given) = self.line.last("request-id-headers") else { return };
        let known = given.values.iter().any(|header| header.eq_ignore_ascii_case("x-request-id"));
        let ours = "the request id is read from x-request-id only";
        self.note_translation(given, if known { Kind::Approximated } else { Kind::Missing }, ours);
    }

    fn traces(&mut self) -> anyhow::Result<()> {
        if let Some(given) = self.line.last("enable-trace") {
            let at = self.line.last("otlp-traces-endpoint");
            let Some(endpoint) = traces_endpoint(at.map_or("localhost:4317", Given::value)) else {
                let ours =
                    "left out: it is not the address of a collector: expected HOST:PORT or https://HOST:PORT";
                [Some(given), at]
                    .into_iter()
                    .flatten()
                    .for_each(|given| self.note_translation(given, Kind::Missing, ours));
                return Ok(());
            };
            self.draft.set(
                "traces",
                "endpoint",
                endpoint,
                format!("{}, over HTTP instead of gRPC", at.unwrap_or(given).flag()),
            );
            let (ratio, source, given_ratio) = self.fraction("otel-sampling-ratio", 1.0)?;
            let is_share = (0.0..=1.0).contains(&ratio);
            anyhow::ensure!(is_share, "--otel-sampling-ratio: `{ratio}` is not between 0 and 1");
            let mut ours = "[traces]: OTLP over HTTP, usually port 4318; set sample_ratio";
            if let Some(given) = given_ratio {
                ours = "[traces]: OTLP over HTTP, usually port 4318";
                self.draft.set("traces", "sample_ratio", ratio, source);
                self.note_translation(given, Kind::Translated, "traces.sample_ratio");
            }
            self.note_translation(given, Kind::Approximated, ours);
            if let Some(given) = at {
                self.note_translation(
                    given,
                    Kind::Approximated,
                    "traces.endpoint: OTLP over HTTP, usually port 4318",
                );
            }
        }
        Ok(())
    }

    /// Certificates, and keys of operators.
    pub(super) fn security(&mut self) -> anyhow::Result<()> {
        for (table, cert, key) in [
            ("server.tls", "tls-cert-path", "tls-key-path"),
            ("upstream.tls", "client-cert-path", "client-key-path"),
        ] {
            for (flag, other, name) in [(cert, key, "cert_file"), (key, cert, "key_file")] {
                let Some(given) = self.line.last(flag) else { continue };
                if self.line.last(other).is_some() {
                    self.draft.set(table, name, given.value(), given.flag());
                    self.note_translation(given, Kind::Translated, format!("{table}.{name}"));
                } else if self.line.has(other) {
                    let ours =
                        format!("left out: the value of --{other} is a variable: give the value itself");
                    self.note_translation(given, Kind::Missing, ours);
                } else {
                    bail!("{}: --{other} is missing: a certificate and its key belong together", given.at())
                }
            }
        }
        if let Some(given) = self.line.last("ca-cert-paths") {
            match given.values.as_slice() {
                [one] => {
                    self.draft.set("upstream.tls", "ca_file", one.as_str(), given.flag());
                    self.note_translation(given, Kind::Translated, "upstream.tls.ca_file");
                }
                [] => self.note_translation(given, Kind::Translated, "no authorities"),
                _ => {
                    let ours = "upstream.tls.ca_file is one file: put the certificates of all into it";
                    self.note_translation(given, Kind::Missing, ours);
                }
            }
        }
        self.operators()
    }

    /// Keys of the control plane become digests, so that no key is in the file.
    fn operators(&mut self) -> anyhow::Result<()> {
        let Some(given) = self.line.last("control-plane-api-keys") else { return Ok(()) };
        let (mut ids, mut digests) = (BTreeSet::new(), BTreeSet::new());
        for entry in &given.values {
            let parts: Vec<&str> = entry.splitn(4, ':').collect();
            let [id, _name, role, key] = parts.as_slice() else {
                bail!("{}: --control-plane-api-keys: expected ID:NAME:ROLE:KEY", given.place)
            };
            if key.trim().is_empty() {
                bail!("{}: --control-plane-api-keys: a key is empty", given.place)
            }
            let role = match role.to_ascii_lowercase().as_str() {
                "admin" => "operator",
                "user" => "viewer",
                _ => bail!("{}: --control-plane-api-keys: the role is neither admin nor user", given.place),
            };
            let fits = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_';
            let id: String =
                id.chars().map(|letter| if fits(letter) { letter } else { '-' }).take(MAX_ID).collect();
            let digest = digest(key);
            if !digests.insert(digest.clone()) {
                bail!("{}: two entries have the same key: give each its own", given.at())
            }
            let id = unique(if id.is_empty() { "key" } else { &id }, &ids);
            ids.insert(id.clone());
            let operator = self.draft.element("auth.operators", given.flag());
            operator.set("id", id, "").set("role", role, "").set("digest", digest, "");
        }
        self.note_translation(given, Kind::Translated, "[[auth.operators]]: their digests");
        Ok(())
    }
}

/// Returns the address of a host, and whether the host is one; for a name, the unspecified address.
fn address(host: &str) -> (IpAddr, bool) {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    match host {
        "localhost" => (LOCAL, true),
        host => host.parse().map_or((IpAddr::V4(Ipv4Addr::UNSPECIFIED), false), |ip| (ip, true)),
    }
}

/// Returns the URL of OTLP over HTTP for an address of OTLP over gRPC, which has another port by default;
/// `None`: it has no host.
fn traces_endpoint(address: &str) -> Option<String> {
    let (scheme, rest) = address.trim().split_once("://").unwrap_or(("http", address.trim()));
    let scheme = if scheme.eq_ignore_ascii_case("https") { "https" } else { "http" };
    let rest = rest.trim_end_matches('/');
    if rest.is_empty() || rest.starts_with([':', '/']) || !rest.bytes().all(|byte| byte.is_ascii_graphic()) {
        return None;
    }
    Some(match rest.strip_suffix(":4317") {
        Some(host) => format!("{scheme}://{host}:4318"),
        None => format!("{scheme}://{rest}"),
    })
}

/// Returns an id that is not taken: with a number, if the given one is.
fn unique(id: &str, taken: &BTreeSet<String>) -> String {
    let numbered = (2..).map(|number| {
        let number = format!("-{number}");
        let kept: String = id.chars().take(MAX_ID - number.len()).collect();
        kept + &number
    });
    let mut ids = std::iter::once(id.to_owned()).chain(numbered);
    ids.find(|id| !taken.contains(id)).unwrap_or_default()
}
