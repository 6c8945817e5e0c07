//! `[[discovery.etcd]]`: workers of keys of etcd.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::duration;

/// `[[discovery.etcd]]`: workers of the keys below a prefix.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DiscoveryEtcd {
    /// Name of the source, unique among those of etcd.
    pub name: String,
    /// Base URLs of the members, tried in turn.
    pub endpoints: Vec<String>,
    /// Beginning of the keys.
    pub prefix: String,
    /// Limit of one request.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// How often all keys are read, besides after each failure.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub resync: Duration,
    /// File with the authorities that sign the members' certificates (PEM); none: those of the system.
    pub ca_file: Option<PathBuf>,
    /// File with the gateway's certificate (PEM).
    pub cert_file: Option<PathBuf>,
    /// File with its key (PEM).
    pub key_file: Option<PathBuf>,
    /// User; none: no authentication.
    pub username: Option<String>,
    /// File with the user's password.
    pub password_file: Option<PathBuf>,
}

impl Default for DiscoveryEtcd {
    fn default() -> Self {
        Self {
            name: String::new(),
            endpoints: Vec::new(),
            prefix: "/pointsman/workers/".to_owned(),
            timeout: Duration::from_secs(5),
            resync: Duration::from_secs(60),
            ca_file: None,
            cert_file: None,
            key_file: None,
            username: None,
            password_file: None,
        }
    }
}

impl DiscoveryEtcd {
    pub(super) fn check(&self, path: &str, add: &mut impl FnMut(&str, String)) {
        if !cfg!(feature = "etcd") {
            add(path, "this build cannot read etcd: build it with the feature `etcd`".to_owned());
        }
        if self.endpoints.is_empty() {
            add(&format!("{path}.endpoints"), "is empty: give the URL of a member".to_owned());
        }
        for (number, url) in self.endpoints.iter().enumerate() {
            super::check_url(&format!("{path}.endpoints[{number}]"), url, add);
        }
        super::check_times(path, &[("timeout", self.timeout), ("resync", self.resync)], add);
        let pairs = [
            ("cert_file", "key_file", self.cert_file.is_some(), self.key_file.is_some()),
            ("username", "password_file", self.username.is_some(), self.password_file.is_some()),
        ];
        for (one, other, has_one, has_other) in pairs {
            if has_one != has_other {
                let (given, missing) = if has_one { (one, other) } else { (other, one) };
                add(&format!("{path}.{given}"), format!("needs `{missing}`, too: give both or none"));
            }
        }
    }
}
