//! Workers of DNS SRV records.
//!
//! Each record names a host and a port. The records are looked up again when their time to live is over. A
//! name that does not exist, or has no records, says nothing about the workers. The source counts as away
//! then.

use std::{collections::BTreeMap, net::SocketAddr, path::Path, time::Duration};

use pointsman_workers::WorkerSpec;

use crate::{
    fleet::Reporter,
    found::{Found, Read, Refusal, SourceSnapshot},
    source::Source,
    sources::scheme::Scheme,
};

mod lookup;

use lookup::{Records, Transports};

/// Longest time between two lookups.
const MAX_INTERVAL: Duration = Duration::from_secs(300);
/// Port of name servers.
const PORT: u16 = 53;
/// The file that names the servers of this host.
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Maximum number of name servers that are tried.
const MAX_SERVERS: usize = 8;

/// Name of the records, and the servers that have them.
#[derive(Clone, Debug, PartialEq)]
pub struct DnsSourceConfig {
    /// Absolute name of the records, for example `_http._tcp.engines.example`.
    pub record: String,
    /// Name servers, tried in turn; empty: those of `/etc/resolv.conf`.
    pub servers: Vec<SocketAddr>,
    /// Shortest time between two lookups, whatever the records say.
    pub interval: Duration,
    /// Time limit for the answer of one server.
    pub timeout: Duration,
    /// Scheme of the workers' URLs.
    pub scheme: Scheme,
    /// Values of the keys that a record does not have: engine, role and others.
    pub defaults: BTreeMap<String, String>,
}

/// Looks up SRV records.
#[derive(Debug)]
pub struct DnsSource {
    config: DnsSourceConfig,
    transports: Transports,
}

impl DnsSource {
    /// Creates the source; nothing is looked up yet.
    #[must_use]
    pub fn new(config: DnsSourceConfig) -> Self {
        Self { config, transports: Transports::default() }
    }

    /// Asks the servers in turn.
    async fn look_up(&mut self) -> Result<Records, String> {
        let DnsSourceConfig { record, servers, timeout, .. } = &self.config;
        let servers =
            if servers.is_empty() { system_servers(Path::new(RESOLV_CONF)).await? } else { servers.clone() };
        let mut problems = Vec::new();
        for server in servers.into_iter().take(MAX_SERVERS) {
            match self.transports.srv(record, server, *timeout).await {
                Ok(records) => return Ok(records),
                Err(problem) => problems.push(format!("{server}: {problem}")),
            }
        }
        Err(format!("looking up SRV records of `{record}`: {}", problems.join("; ")))
    }

    fn snapshot(&self, records: &Records) -> SourceSnapshot {
        let (mut workers, mut refused) = (Vec::new(), Vec::new());
        for (host, port) in &records.targets {
            let url = self.config.scheme.url(host, *port);
            let pairs = self.config.defaults.iter().map(|(key, value)| (key.as_str(), value.as_str()));
            match WorkerSpec::from_pairs(pairs.chain([("url", url.as_str())])) {
                Ok(spec) => workers.push(Found::staying(spec)),
                Err(error) => refused.push(Refusal::new(&url, &error.to_string())),
            }
        }
        SourceSnapshot { workers, refused, read: Read::Whole }
    }
}

impl Source for DnsSource {
    async fn run(mut self, reporter: Reporter) {
        loop {
            let pause = match self.look_up().await {
                Ok(records) => {
                    reporter.present(self.snapshot(&records));
                    records.ttl.clamp(self.config.interval, MAX_INTERVAL.max(self.config.interval))
                }
                Err(problem) => {
                    reporter.away(problem);
                    self.config.interval
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = reporter.recheck() => {}
            }
        }
    }
}

/// Reads the name servers of this host.
async fn system_servers(path: &Path) -> Result<Vec<SocketAddr>, String> {
    let text = tokio::fs::read_to_string(path).await;
    let text = text.map_err(|error| format!("reading {}: {error}", path.display()))?;
    let named = text.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    let servers: Vec<SocketAddr> =
        named.filter_map(|address| Some(SocketAddr::new(address.trim().parse().ok()?, PORT))).collect();
    if servers.is_empty() {
        return Err(format!("{} names no server: set `servers` of the source", path.display()));
    }
    Ok(servers)
}

#[cfg(test)]
mod tests;
