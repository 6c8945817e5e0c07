//! `[[discovery.etcd]]`: workers of keys of etcd.

use std::{path::PathBuf, time::Duration};

use pointsman_config_file::{Report, duration::secs, section};

/// Workers of the keys below a prefix.
#[section(rules)]
pub struct DiscoveryEtcd {
    /// Name of the source, unique among those of etcd.
    #[key(example = "\"main\"")]
    pub name: String,
    /// Base URLs of the members, tried in turn.
    #[key(example = "[\"https://etcd-0:2379\", \"https://etcd-1:2379\"]")]
    pub endpoints: Vec<String>,
    /// Beginning of the keys.
    #[key(default = "/pointsman/workers/".to_owned())]
    pub prefix: String,
    /// Time limit of one request.
    #[key(default = secs(5), positive)]
    pub timeout: Duration,
    /// How often all keys are read, besides after each failure.
    #[key(default = secs(60), positive)]
    pub resync: Duration,
    /// PEM file with the authorities that sign the members' certificates; default: those of the system.
    #[key(example = "\"/etc/pointsman/etcd-ca.crt\"")]
    pub ca_file: Option<PathBuf>,
    /// PEM file with the gateway's certificate.
    #[key(example = "\"/etc/pointsman/etcd.crt\"")]
    pub cert_file: Option<PathBuf>,
    /// PEM file with its key.
    #[key(example = "\"/etc/pointsman/etcd.key\"")]
    pub key_file: Option<PathBuf>,
    /// User; default: no authentication.
    #[key(example = "\"pointsman\"")]
    pub username: Option<String>,
    /// File with the user's password.
    #[key(example = "\"/run/secrets/etcd\"")]
    pub password_file: Option<PathBuf>,
}

impl DiscoveryEtcd {
    fn rules(&self, report: &mut Report<'_>) {
        if !cfg!(feature = "etcd") {
            report.add("", "this build cannot read etcd: build it with the feature `etcd`");
        }
        if self.endpoints.is_empty() {
            report.add("endpoints", "is empty: give the URL of a member");
        }
        for (number, url) in self.endpoints.iter().enumerate() {
            super::check_url(&format!("endpoints[{number}]"), url, report);
        }
        report.pair(("cert_file", self.cert_file.is_some()), ("key_file", self.key_file.is_some()));
        report.pair(("username", self.username.is_some()), ("password_file", self.password_file.is_some()));
    }
}
