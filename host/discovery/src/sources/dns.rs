//! Workers of DNS SRV records.
//!
//! Each record names a host and a port. The records are looked up again when their time to live is over. A
//! name that does not exist, or has no records, says nothing about the workers. The source counts as away
//! then.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use pointsman_workers::WorkerSpec;
use tokio::time::{Instant, timeout_at};

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
/// Longest time for the addresses of all targets. Those that are left keep their last ones.
const MAX_ADDRESS_TIME: Duration = Duration::from_secs(10);
/// Maximum number of name servers that are tried.
const MAX_SERVERS: usize = 8;

/// Name of the records, and the servers that have them.
#[derive(Clone, Debug, PartialEq)]
pub struct DnsSourceConfig {
    /// Absolute name of the records, for example `_http._tcp.engines.example`.
    pub record: String,
    /// Name servers, tried in turn, also for the targets' addresses; empty: those of `/etc/resolv.conf`.
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
    /// Addresses of the targets that the servers of the configuration know.
    addresses: HashMap<String, Vec<IpAddr>>,
}

impl DnsSource {
    /// Creates the source; nothing is looked up yet.
    #[must_use]
    pub fn new(config: DnsSourceConfig) -> Self {
        Self { config, transports: Transports::default(), addresses: HashMap::new() }
    }

    /// Asks the servers in turn for the records, and the one that has them for the targets' addresses.
    async fn look_up(&mut self) -> Result<Records, String> {
        let DnsSourceConfig { record, servers, timeout, .. } = self.config.clone();
        let has_servers = !servers.is_empty();
        let servers = if has_servers { servers } else { system_servers(Path::new(RESOLV_CONF)).await? };
        let mut problems = Vec::new();
        for server in servers.into_iter().take(MAX_SERVERS) {
            match self.transports.srv(&record, server, timeout).await {
                Ok(mut records) => {
                    if has_servers {
                        self.find_addresses(&mut records, server).await;
                    }
                    return Ok(records);
                }
                Err(problem) => problems.push(format!("{server}: {problem}")),
            }
        }
        Err(format!("looking up SRV records of `{record}`: {}", problems.join("; ")))
    }

    /// Finds the targets' addresses: those in the answer, or else those that the server says when it is
    /// asked. The last ones stay while it does not answer. The system resolves names that it does not know.
    async fn find_addresses(&mut self, records: &mut Records, server: SocketAddr) {
        let (limit, end) = (self.config.timeout, Instant::now() + MAX_ADDRESS_TIME);
        let mut found = HashMap::new();
        for (target, _) in &records.targets {
            if found.contains_key(target) {
                continue;
            }
            let mut addresses = records.addresses.remove(target).unwrap_or_default();
            if addresses.is_empty() {
                let asked = self.transports.addresses(target, server, limit);
                if let Ok(Ok(answer)) = timeout_at(end, asked).await {
                    records.ttl = records.ttl.min(answer.ttl);
                    addresses = answer.addresses.into_values().flatten().collect();
                } else {
                    addresses = self.addresses.remove(target).unwrap_or_default();
                }
            }
            if !addresses.is_empty() {
                found.insert(target.clone(), addresses);
            }
        }
        self.addresses = found;
    }

    fn snapshot(&self, records: &Records) -> SourceSnapshot {
        let (mut workers, mut refused) = (Vec::new(), Vec::new());
        for (host, port) in &records.targets {
            let url = self.config.scheme.url(host, *port);
            let pairs = self.config.defaults.iter().map(|(key, value)| (key.as_str(), value.as_str()));
            match WorkerSpec::from_pairs(pairs.chain([("url", url.as_str())])) {
                Ok(spec) => {
                    let addresses = self.addresses.get(host).cloned().unwrap_or_default();
                    workers.push(Found { addresses, ..Found::staying(spec) });
                }
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
