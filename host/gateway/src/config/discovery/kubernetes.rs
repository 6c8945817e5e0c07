//! `[[discovery.kubernetes]]`: workers of pods or EndpointSlices.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::duration;

/// Where a pod finds its service account.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// `[[discovery.kubernetes]]`: workers of pods, or of the endpoints of a service.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DiscoveryKubernetes {
    /// Name of the source, unique among those of Kubernetes.
    pub name: String,
    /// Base URL of the API server.
    pub api: String,
    /// Namespace.
    pub namespace: String,
    /// What is listed.
    pub resource: DiscoveryResource,
    /// Label selector.
    pub selector: String,
    /// Number or name of the workers' port. Several with commas between them: each is a worker of its own.
    pub port: String,
    /// Keys of the `--worker` flag that labels and annotations do not give.
    pub defaults: BTreeMap<String, String>,
    /// File with the bearer token, read for each request; empty: none is sent.
    pub token_file: PathBuf,
    /// File with the authority of the API server (PEM); empty: those of the system.
    pub ca_file: PathBuf,
    /// Limit of a list, and of the head of a watch.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// How long one watch runs; another follows.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
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

impl Default for DiscoveryKubernetes {
    fn default() -> Self {
        Self {
            name: String::new(),
            api: "https://kubernetes.default.svc".to_owned(),
            namespace: "default".to_owned(),
            resource: DiscoveryResource::default(),
            selector: String::new(),
            port: "http".to_owned(),
            defaults: BTreeMap::new(),
            token_file: PathBuf::from(ACCOUNT).join("token"),
            ca_file: PathBuf::from(ACCOUNT).join("ca.crt"),
            timeout: Duration::from_secs(10),
            watch: Duration::from_secs(60),
        }
    }
}

impl DiscoveryKubernetes {
    pub(super) fn check(&self, path: &str, add: &mut impl FnMut(&str, String)) {
        if !cfg!(feature = "kubernetes") {
            add(path, "this build cannot read Kubernetes: build it with the feature `kubernetes`".to_owned());
        }
        super::check_url(&format!("{path}.api"), &self.api, add);
        if self.selector.is_empty() {
            add(
                &format!("{path}.selector"),
                "is empty: select the workers, for example `app=vllm`".to_owned(),
            );
        }
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if self.namespace.is_empty() || !self.namespace.bytes().all(fits) {
            let message = format!("`{}` is not a name: expected letters, digits and `-`", self.namespace);
            add(&format!("{path}.namespace"), message);
        }
        #[cfg(feature = "kubernetes")]
        if let Err(problem) = pointsman_discovery::PortOfWorker::parse_list(&self.port) {
            add(&format!("{path}.port"), problem);
        }
        super::check_times(path, &[("timeout", self.timeout), ("watch", self.watch)], add);
        super::check_defaults(path, &self.defaults, add);
    }
}
