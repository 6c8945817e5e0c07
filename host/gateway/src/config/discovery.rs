//! `[discovery]`: workers that are not in this file.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use pointsman_discovery::{FileFormat, FleetRules, GuardRules};
use pointsman_workers::WorkerSpec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Problem, duration};

mod dns;
mod etcd;
mod kubernetes;

pub use dns::DiscoveryDns;
pub use etcd::DiscoveryEtcd;
pub use kubernetes::{DiscoveryKubernetes, DiscoveryResource};

/// `[discovery]`: workers that are not in this file.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Discovery {
    /// Most workers of all sources together, apart from those of this file and of operators.
    pub max_workers: usize,
    /// How long the requests of a worker that left its source may run.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub drain: Duration,
    /// Share of a source's workers, 0 to 1. The removal of more waits for a second confirmation.
    pub removal_share: f64,
    /// The removal of fewer workers does not wait.
    pub removal_min: usize,
    /// Time until the second confirmation.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub confirm_after: Duration,
    /// Longest lease of a worker that registers itself.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub max_lease: Duration,
    /// Files of workers.
    pub files: Vec<DiscoveryFile>,
    /// Names with SRV records.
    pub dns: Vec<DiscoveryDns>,
    /// Prefixes of keys of etcd.
    pub etcd: Vec<DiscoveryEtcd>,
    /// Objects of Kubernetes.
    pub kubernetes: Vec<DiscoveryKubernetes>,
}

/// `[[discovery.files]]`: a file of workers that is read again when it changes.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DiscoveryFile {
    /// Name of the source, unique among files.
    pub name: String,
    /// Path. The file's extension decides how it is parsed: `.toml`, `.json`, `.yaml` or `.yml`.
    pub path: PathBuf,
    /// Format of the file.
    pub format: DiscoveryFileFormat,
    /// How often it is read.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub interval: Duration,
    /// Keys of the `--worker` flag for endpoints of llm-d's file, which has neither engines nor transports.
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

impl Default for Discovery {
    fn default() -> Self {
        Self {
            max_workers: 4_096,
            drain: Duration::from_secs(30),
            removal_share: 0.5,
            removal_min: 4,
            confirm_after: Duration::from_secs(10),
            max_lease: Duration::from_secs(600),
            files: Vec::new(),
            dns: Vec::new(),
            etcd: Vec::new(),
            kubernetes: Vec::new(),
        }
    }
}

impl Default for DiscoveryFile {
    fn default() -> Self {
        Self {
            name: String::new(),
            path: PathBuf::new(),
            format: DiscoveryFileFormat::default(),
            interval: Duration::from_secs(1),
            defaults: BTreeMap::new(),
        }
    }
}

impl Discovery {
    /// Returns the bounds and times of the fleet.
    pub(crate) fn rules(&self) -> FleetRules {
        let guard = GuardRules {
            share: self.removal_share,
            min_workers: self.removal_min,
            confirm_after: self.confirm_after,
        };
        FleetRules { max_workers: self.max_workers, drain: self.drain, guard }
    }

    /// Whether any source of workers is configured.
    pub(crate) fn has_sources(&self) -> bool {
        let Self { files, dns, etcd, kubernetes, .. } = self;
        !(files.is_empty() && dns.is_empty() && etcd.is_empty() && kubernetes.is_empty())
    }

    /// Returns what is wrong with the values.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut add =
            |path: &str, message: String| problems.push(Problem::new(format!("discovery.{path}"), message));
        if self.max_workers == 0 {
            add("max_workers", "`0` would refuse every worker: expected 1 or more".to_owned());
        }
        let share = self.removal_share;
        if !(0.0..=1.0).contains(&share) {
            add("removal_share", format!("`{share}` is not a share: expected 0 to 1"));
        }
        if self.max_lease < Duration::from_secs(1) {
            add("max_lease", format!("`{:?}` is too short: expected 1s or more", self.max_lease));
        }
        for (number, file) in self.files.iter().enumerate() {
            let path = format!("files[{number}]");
            if file.path.as_os_str().is_empty() {
                add(&format!("{path}.path"), "is missing: give the path of the file".to_owned());
            }
            if file.interval.is_zero() {
                add(
                    &format!("{path}.interval"),
                    "`0s` would read without a pause: expected more than 0".to_owned(),
                );
            }
            if file.format == DiscoveryFileFormat::Workers && !file.defaults.is_empty() {
                add(&format!("{path}.defaults"), "is only for `format = \"llm-d\"`: remove it".to_owned());
            }
            check_defaults(&path, &file.defaults, &mut add);
        }
        for (number, dns) in self.dns.iter().enumerate() {
            dns.check(&format!("dns[{number}]"), &mut add);
        }
        check_names("dns", self.dns.iter().map(|dns| dns.name.as_str()), &mut add);
        for (number, etcd) in self.etcd.iter().enumerate() {
            etcd.check(&format!("etcd[{number}]"), &mut add);
        }
        for (number, kubernetes) in self.kubernetes.iter().enumerate() {
            kubernetes.check(&format!("kubernetes[{number}]"), &mut add);
        }
        check_names("etcd", self.etcd.iter().map(|etcd| etcd.name.as_str()), &mut add);
        let of_kubernetes = self.kubernetes.iter().map(|source| source.name.as_str());
        check_names("kubernetes", of_kubernetes, &mut add);
        check_names("files", self.files.iter().map(|file| file.name.as_str()), &mut add);
        problems
    }

    /// Appends the dotted path of each key whose value differs in `new`.
    pub(super) fn changed_keys(&self, new: &Self, paths: &mut Vec<String>) {
        let Self { max_workers, drain, removal_share, removal_min, confirm_after, max_lease, .. } = self;
        let Self { files, dns, etcd, kubernetes, .. } = self;
        #[expect(clippy::float_cmp, reason = "compares what two files say")]
        let share = *removal_share != new.removal_share;
        let keys = [
            ("max_workers", *max_workers != new.max_workers),
            ("drain", *drain != new.drain),
            ("removal_share", share),
            ("removal_min", *removal_min != new.removal_min),
            ("confirm_after", *confirm_after != new.confirm_after),
            ("max_lease", *max_lease != new.max_lease),
            ("files", *files != new.files),
            ("dns", *dns != new.dns),
            ("etcd", *etcd != new.etcd),
            ("kubernetes", *kubernetes != new.kubernetes),
        ];
        paths.extend(
            keys.into_iter().filter(|(_, changed)| *changed).map(|(key, _)| format!("discovery.{key}")),
        );
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

/// Checks the base URL of a server.
fn check_url(path: &str, url: &str, add: &mut impl FnMut(&str, String)) {
    let host = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    if !host.is_some_and(|host| !host.is_empty() && !host.contains(['@', '?', '#'])) {
        let shown = if url.contains('@') { "[secret]" } else { url };
        add(path, format!("`{shown}` is not a URL: expected `https://HOST:PORT` or `http://HOST:PORT`"));
    }
}

/// Checks that limits of time are not zero.
fn check_times(path: &str, times: &[(&str, Duration)], add: &mut impl FnMut(&str, String)) {
    for (key, _) in times.iter().filter(|(_, time)| time.is_zero()) {
        add(&format!("{path}.{key}"), "`0s` would end everything at once: expected more than 0".to_owned());
    }
}

/// Checks keys and values that complete descriptions of workers.
fn check_defaults(path: &str, defaults: &BTreeMap<String, String>, add: &mut impl FnMut(&str, String)) {
    for (key, value) in defaults {
        if let Err(error) = WorkerSpec::check_pair(key, value) {
            add(&format!("{path}.defaults.{key}"), error.problem);
        }
    }
}

/// Checks that each source of a kind has a name of its own.
fn check_names<'a>(kind: &str, names: impl Iterator<Item = &'a str>, add: &mut impl FnMut(&str, String)) {
    let mut known = BTreeSet::new();
    for (number, name) in names.enumerate() {
        let path = format!("{kind}[{number}].name");
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > 64 || !name.bytes().all(fits) {
            add(
                &path,
                format!("`{name}` is not a name: expected up to 64 letters, digits, `-`, `_` and `.`"),
            );
        } else if !known.insert(name) {
            add(&path, format!("`{name}` is already the name of another source: give each its own"));
        }
    }
}
