//! `[[discovery.dns]]`: workers of SRV records.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::duration;

/// `[[discovery.dns]]`: workers of the SRV records of a name.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DiscoveryDns {
    /// Name of the source, unique among those of DNS.
    pub name: String,
    /// Absolute name of the records.
    pub record: String,
    /// Name servers, tried in turn; empty: those of `/etc/resolv.conf`.
    pub servers: Vec<SocketAddr>,
    /// Shortest time between two lookups, whatever time to live the records have.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub interval: Duration,
    /// Limit of waiting for one server.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// Keys of the `--worker` flag, which records do not have.
    pub defaults: BTreeMap<String, String>,
}

impl Default for DiscoveryDns {
    fn default() -> Self {
        Self {
            name: String::new(),
            record: String::new(),
            servers: Vec::new(),
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(2),
            defaults: BTreeMap::new(),
        }
    }
}

impl DiscoveryDns {
    pub(super) fn check(&self, path: &str, add: &mut impl FnMut(&str, String)) {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if self.record.is_empty() || self.record.len() > 253 || !self.record.bytes().all(fits) {
            let message =
                format!("`{}` is not a name: expected for example `_http._tcp.engines.example`", self.record);
            add(&format!("{path}.record"), message);
        }
        super::check_times(path, &[("interval", self.interval), ("timeout", self.timeout)], add);
        super::check_defaults(path, &self.defaults, add);
    }
}
