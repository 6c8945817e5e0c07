//! `[[discovery.kubernetes]]`: workers of pods or EndpointSlices.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use pointsman_config_file::{Report, duration::secs, section};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::DiscoveryScheme;

/// Directory of a pod's service account.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Keys that labels and annotations may give, and without which a description may be wrong.
const KEYS_OF_OBJECTS: &[&str] = &["engine", "role", "kv_addr", "bootstrap_port", "kv_transfer"];

/// Workers of pods, or of the endpoints of a service.
#[section(rules)]
pub struct DiscoveryKubernetes {
    /// Name of the source, unique among those of Kubernetes.
    #[key(example = "\"engines\"")]
    pub name: String,
    /// Base URL of the API server.
    #[key(default = "https://kubernetes.default.svc".to_owned())]
    pub api: String,
    /// Namespace.
    #[key(default = "default".to_owned())]
    pub namespace: String,
    /// Kind of the listed objects: "pods" or "endpoint-slices".
    pub resource: DiscoveryResource,
    /// Labels of the pods or slices.
    #[key(example = "\"app=vllm\"")]
    pub selector: String,
    /// Name or number of the workers' port, or several: "8000,8001". Each is a worker of its own.
    #[key(default = "http".to_owned())]
    pub port: String,
    /// Scheme of the workers' URLs, unless an annotation names the other: "http" or "https".
    pub scheme: DiscoveryScheme,
    /// Keys of the --worker flag that labels and annotations do not give.
    #[key(example = "{ engine = \"vllm\" }")]
    #[serde(deserialize_with = "super::defaults::read")]
    #[schemars(with = "BTreeMap<String, super::defaults::FlagValue>")]
    pub defaults: BTreeMap<String, String>,
    /// File with the bearer token, read for each request; "": none is sent.
    #[key(default = PathBuf::from(ACCOUNT).join("token"))]
    pub token_file: PathBuf,
    /// PEM file with the authority of the API server; "": those of the system.
    #[key(default = PathBuf::from(ACCOUNT).join("ca.crt"))]
    pub ca_file: PathBuf,
    /// Time limit of a list, and of the head of a watch.
    #[key(default = secs(10), positive)]
    pub timeout: Duration,
    /// How long one watch runs; another follows.
    #[key(default = secs(60), positive)]
    pub watch: Duration,
}

/// Kind of the objects that are listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiscoveryResource {
    /// Pods.
    #[default]
    Pods,
    /// EndpointSlices.
    EndpointSlices,
}

impl DiscoveryKubernetes {
    fn rules(&self, report: &mut Report<'_>) {
        if !cfg!(feature = "kubernetes") {
            report.add("", "this build cannot read Kubernetes: build it with the feature `kubernetes`");
        }
        super::check_url("api", &self.api, report);
        if self.selector.is_empty() {
            report.add("selector", "is empty: select the workers, for example `app=vllm`");
        }
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if self.namespace.is_empty() || !self.namespace.bytes().all(fits) {
            let message = format!("`{}` is not a name: expected letters, digits and `-`", self.namespace);
            report.add("namespace", message);
        }
        #[cfg(feature = "kubernetes")]
        if let Err(problem) = pointsman_discovery::PortOfWorker::parse_list(&self.port) {
            report.add("port", problem);
        }
        super::defaults::check(&self.defaults, self.scheme, KEYS_OF_OBJECTS, report);
    }
}
