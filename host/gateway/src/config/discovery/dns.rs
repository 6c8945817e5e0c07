//! `[[discovery.dns]]`: workers of SRV records.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use pointsman_config_file::{Report, duration::secs, section};

use super::DiscoveryScheme;

/// Workers of the SRV records of a name.
#[section(rules)]
pub struct DiscoveryDns {
    /// Name of the source, unique among those of DNS.
    #[key(example = "\"engines\"")]
    pub name: String,
    /// Absolute name of the records.
    #[key(example = "\"_http._tcp.engines.example\"")]
    pub record: String,
    /// Name servers, tried in turn: ["10.0.0.53:53"]; empty: those of /etc/resolv.conf.
    pub servers: Vec<SocketAddr>,
    /// Shortest time between two lookups; else the records' time to live, up to 5m.
    #[key(default = secs(5), positive)]
    pub interval: Duration,
    /// Time limit for the answer of one server.
    #[key(default = secs(2), positive)]
    pub timeout: Duration,
    /// Scheme of the workers' URLs: "http" or "https".
    pub scheme: DiscoveryScheme,
    /// Keys of the --worker flag, which records do not have.
    #[key(example = "{ engine = \"vllm\", role = \"decode\" }")]
    #[serde(deserialize_with = "super::defaults::read")]
    #[schemars(with = "BTreeMap<String, super::defaults::FlagValue>")]
    pub defaults: BTreeMap<String, String>,
}

impl DiscoveryDns {
    fn rules(&self, report: &mut Report<'_>) {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        let is_label = |label: &str| (1..=63).contains(&label.len()) && label.bytes().all(fits);
        let name = self.record.strip_suffix('.').unwrap_or(&self.record);
        if name.len() > 253 || !name.split('.').all(is_label) {
            let message =
                format!("`{}` is not a name: expected for example `_http._tcp.engines.example`", self.record);
            report.add("record", message);
        }
        super::defaults::check(&self.defaults, self.scheme, &[], report);
    }
}
