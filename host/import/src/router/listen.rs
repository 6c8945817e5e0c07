//! Listeners, certificates, tokens of operators, and traces.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::bail;

use super::{Flavor, Import, arguments::Given, keys::digest};
use crate::report::{Kind, Place, plain};

/// The gateway's local address for operators.
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

impl Import<'_> {
    /// Addresses of clients and operators.
    pub(super) fn listeners(&mut self) -> anyhow::Result<()> {
        let default = if self.flavor == Flavor::Vllm { "127.0.0.1" } else { "0.0.0.0" };
        let (port, source, given_port) = self.number("port", 30_000)?;
        let port = to_port(port, "port")?;
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
            self.metrics()?;
        }
        self.cors();
        self.request_ids();
        self.traces()
    }

    /// The address of the metrics becomes that of the operators' listener, which also changes things.
    fn metrics(&mut self) -> anyhow::Result<()> {
        let (port, source, given) = self.number("prometheus-port", 29_000)?;
        let listen = SocketAddr::new(LOCAL, to_port(port, "prometheus-port")?).to_string();
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

    fn cors(&mut self) {
        let Some(given) = self.line.last("cors-allowed-origins") else { return };
        self.draft.set("server", "cors_origins", given.values.clone(), given.flag());
        self.note_translation(given, Kind::Translated, "server.cors_origins");
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
            let endpoint = at.map_or("localhost:4317", Given::value);
            let endpoint = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
            // The port of OTLP over gRPC, and that of OTLP over HTTP.
            let endpoint = match endpoint.strip_suffix(":4317") {
                Some(host) => format!("http://{host}:4318"),
                None => format!("http://{endpoint}"),
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
        let pairs = [
            ("tls-cert-path", "server.tls", "cert_file"),
            ("tls-key-path", "server.tls", "key_file"),
            ("client-cert-path", "upstream.tls", "cert_file"),
            ("client-key-path", "upstream.tls", "key_file"),
        ];
        for (flag, table, key) in pairs {
            if let Some(given) = self.line.last(flag) {
                self.draft.set(table, key, given.value(), given.flag());
                self.note_translation(given, Kind::Translated, format!("{table}.{key}"));
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
                id.chars().map(|letter| if fits(letter) { letter } else { '-' }).take(64).collect();
            self.draft.element("auth.operators", given.flag()).set("id", id, "").set("role", role, "").set(
                "digest",
                digest(key),
                "",
            );
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

fn to_port(port: i64, flag: &str) -> anyhow::Result<u16> {
    match u16::try_from(port) {
        Ok(port) if port > 0 => Ok(port),
        _ => bail!("--{flag}: `{port}` is not a port: expected 1 to 65535"),
    }
}
