//! `[discovery]`: workers that are not in this file.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use pointsman_config_file::{Report, duration::secs, section};
use pointsman_discovery::{FileFormat, FleetRules, GuardRules, Scheme, has_known_syntax};
use pointsman_workers::url_without_secrets;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod defaults;
mod dns;
mod etcd;
mod kubernetes;

pub use dns::DiscoveryDns;
pub use etcd::DiscoveryEtcd;
pub use kubernetes::{DiscoveryKubernetes, DiscoveryResource};

/// Workers that are not in this file, see discovery.md.
#[section(restart, rules)]
pub struct Discovery {
    /// Maximum number of workers from all sources together, besides those of this file and of operators.
    #[key(default = 4_096, range = 1.., reason = "would refuse every worker")]
    pub max_workers: usize,
    /// How long the requests of a worker that left its source may run.
    #[key(default = secs(30))]
    pub drain: Duration,
    /// Whether running streams of a worker that left its source continue on other workers
    /// (continuation.md).
    #[key(default = false)]
    pub r#move: bool,
    /// Share of a source's workers; the removal of more waits for a second reading.
    #[key(default = 0.5, range = 0.0..=1.0, reason = "is not a share")]
    pub removal_share: f64,
    /// The removal of fewer workers than this does not wait.
    #[key(default = 4)]
    pub removal_min: usize,
    /// Time until the second reading.
    #[key(default = secs(10))]
    pub confirm_after: Duration,
    /// Longest lease of a worker that registers itself (PUT /workers/{id}).
    #[key(default = secs(600), range = secs(1).., reason = "is too short")]
    pub max_lease: Duration,
    /// A file of workers that is read again when it changes.
    #[key(nested)]
    pub files: Vec<DiscoveryFile>,
    /// SRV records.
    #[key(nested)]
    pub dns: Vec<DiscoveryDns>,
    /// A worker in each key of etcd below a prefix.
    #[key(nested)]
    pub etcd: Vec<DiscoveryEtcd>,
    /// Pods of Kubernetes, or the endpoints of a service.
    #[key(nested)]
    pub kubernetes: Vec<DiscoveryKubernetes>,
}

/// A file of workers that is read again when it changes.
#[section(rules)]
pub struct DiscoveryFile {
    /// Name of the source, unique among files.
    #[key(example = "\"rack-1\"")]
    pub name: String,
    /// Path of the file; its ending decides the syntax: .toml, .json, .yaml or .yml.
    #[key(example = "\"/etc/pointsman/workers.yaml\"")]
    pub path: PathBuf,
    /// "workers": a list with the keys of `[[workers]]`; "llm-d": endpoints file of its router.
    pub format: DiscoveryFileFormat,
    /// Interval at which the file is read.
    #[key(default = secs(1), positive, reason = "would read without a pause")]
    pub interval: Duration,
    /// Scheme of the URLs of workers in llm-d's file: "http" or "https".
    pub scheme: DiscoveryScheme,
    /// Keys of the --worker flag for llm-d's file, which has neither engines nor transports: { engine =
    /// "vllm", role = "decode" }.
    #[serde(deserialize_with = "defaults::read")]
    #[schemars(with = "BTreeMap<String, defaults::FlagValue>")]
    pub defaults: BTreeMap<String, String>,
}

/// Format of a file of workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiscoveryFileFormat {
    /// `workers`: a list of workers with the keys of `[[workers]]`.
    #[default]
    Workers,
    /// The endpoints file of llm-d's router.
    LlmD,
}

/// Scheme of the URLs of workers whose source gives only their addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiscoveryScheme {
    /// Without TLS.
    #[default]
    Http,
    /// With TLS, as `[upstream.tls]` says.
    Https,
}

impl Discovery {
    /// Returns the bounds and times of the fleet.
    pub(crate) fn fleet_rules(&self) -> FleetRules {
        let guard = GuardRules {
            share: self.removal_share,
            min_workers: self.removal_min,
            confirm_after: self.confirm_after,
        };
        FleetRules { max_workers: self.max_workers, drain: self.drain, moves: self.r#move, guard }
    }

    /// Returns whether any source of workers is configured.
    pub(crate) fn has_sources(&self) -> bool {
        let Self { files, dns, etcd, kubernetes, .. } = self;
        !(files.is_empty() && dns.is_empty() && etcd.is_empty() && kubernetes.is_empty())
    }

    fn rules(&self, report: &mut Report<'_>) {
        check_names("files", self.files.iter().map(|file| file.name.as_str()), report);
        check_names("dns", self.dns.iter().map(|dns| dns.name.as_str()), report);
        check_names("etcd", self.etcd.iter().map(|etcd| etcd.name.as_str()), report);
        check_names("kubernetes", self.kubernetes.iter().map(|source| source.name.as_str()), report);
    }
}

impl DiscoveryFile {
    fn rules(&self, report: &mut Report<'_>) {
        if self.path.as_os_str().is_empty() {
            report.add("path", "is missing: give the path of the file");
        } else if !has_known_syntax(&self.path) {
            let path = self.path.display();
            report.add(
                "path",
                format!("`{path}` has no known syntax: expected the extension toml, json, yaml or yml"),
            );
        }
        if self.format == DiscoveryFileFormat::Workers && !self.defaults.is_empty() {
            report.add("defaults", "is only for `format = \"llm-d\"`: remove it");
        }
        if self.format == DiscoveryFileFormat::Workers && self.scheme != DiscoveryScheme::Http {
            report.add("scheme", "is only for `format = \"llm-d\"`: the file has URLs; remove it");
        }
        if self.format == DiscoveryFileFormat::LlmD {
            defaults::check(&self.defaults, self.scheme, &["role"], report);
        }
    }
}

impl From<DiscoveryFileFormat> for FileFormat {
    fn from(format: DiscoveryFileFormat) -> Self {
        match format {
            DiscoveryFileFormat::Workers => Self::Workers,
            DiscoveryFileFormat::LlmD => Self::LlmD,
        }
    }
}

impl From<DiscoveryScheme> for Scheme {
    fn from(scheme: DiscoveryScheme) -> Self {
        match scheme {
            DiscoveryScheme::Http => Self::Http,
            DiscoveryScheme::Https => Self::Https,
        }
    }
}

/// Checks the base URL of a server.
fn check_url(key: &str, url: &str, report: &mut Report<'_>) {
    let host = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    if !host.is_some_and(|host| !host.is_empty() && !host.contains(['@', '?', '#'])) {
        let shown = url_without_secrets(url);
        let message = format!("`{shown}` is not a URL: expected `https://HOST:PORT` or `http://HOST:PORT`");
        report.add(key, message);
    }
}

/// Checks that each source of a kind has a name of its own.
fn check_names<'a>(kind: &str, names: impl Iterator<Item = &'a str>, report: &mut Report<'_>) {
    let mut known = BTreeSet::new();
    for (number, name) in names.enumerate() {
        let key = format!("{kind}[{number}].name");
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > 64 || !name.bytes().all(fits) {
            let message =
                format!("`{name}` is not a name: expected up to 64 letters, digits, `-`, `_` and `.`");
            report.add(&key, message);
        } else if !known.insert(name) {
            let message = format!("`{name}` is already the name of another source: give each its own");
            report.add(&key, message);
        }
    }
}
