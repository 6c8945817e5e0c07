//! Reads workers from pods and EndpointSlices.

use std::{collections::BTreeMap, sync::Arc};

use pointsman_workers::WorkerSpec;
use serde::{Deserialize, Deserializer};

use super::super::{
    llm_d_role::{ENCODE, ROLE_LABEL, role_of},
    table::Invalid,
};
use super::{KubernetesSourceConfig, PortOfWorker, Resource};
use crate::found::Found;

/// Prefix of the labels and annotations that are keys of a worker.
const PREFIX: &str = "pointsman.dev/";
/// Label or annotation with the role.
const OWN_ROLE: &str = "pointsman.dev/role";
/// Keys that may be given several times: their values are lists.
const LISTS: [&str; 3] = ["model", "taint", "lora"];

/// Metadata of an object or list.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Meta {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) resource_version: String,
    /// Token for the next page of a list.
    #[serde(rename = "continue")]
    pub(super) more: String,
    #[serde(deserialize_with = "or_default")]
    labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    annotations: BTreeMap<String, String>,
    deletion_timestamp: Option<String>,
}

#[derive(Deserialize)]
struct WithMeta {
    #[serde(default)]
    metadata: Meta,
}

/// A pod or an EndpointSlice.
pub(super) enum Object {
    Pod(Pod),
    Slice(Slice),
}

#[derive(Deserialize)]
pub(super) struct Pod {
    #[serde(default)]
    metadata: Meta,
    #[serde(default)]
    spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodSpec {
    #[serde(deserialize_with = "or_default")]
    containers: Vec<Container>,
    #[serde(deserialize_with = "or_default")]
    init_containers: Vec<Container>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Container {
    #[serde(deserialize_with = "or_default")]
    ports: Vec<ContainerPort>,
    /// `Always` makes an init container a sidecar, which runs as long as the pod.
    restart_policy: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ContainerPort {
    #[serde(deserialize_with = "or_default")]
    name: String,
    container_port: u16,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PodStatus {
    #[serde(deserialize_with = "or_default")]
    phase: String,
    #[serde(rename = "podIP", deserialize_with = "or_default")]
    pod_ip: String,
    /// One address of each family.
    #[serde(rename = "podIPs", deserialize_with = "or_default")]
    pod_ips: Vec<PodIp>,
    #[serde(deserialize_with = "or_default")]
    conditions: Vec<PodCondition>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PodIp {
    ip: String,
}

#[derive(Deserialize)]
struct PodCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

#[derive(Deserialize)]
pub(super) struct Slice {
    #[serde(default)]
    metadata: Meta,
    /// Null for a service without pods, and so are the ports.
    #[serde(default, deserialize_with = "or_default")]
    endpoints: Vec<Endpoint>,
    #[serde(default, deserialize_with = "or_default")]
    ports: Vec<SlicePort>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Endpoint {
    #[serde(deserialize_with = "or_default")]
    addresses: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    conditions: Conditions,
    #[serde(deserialize_with = "or_default")]
    target_ref: TargetRef,
}

/// The pod behind an endpoint.
#[derive(Default, Deserialize)]
#[serde(default)]
struct TargetRef {
    #[serde(deserialize_with = "or_default")]
    uid: String,
}

/// A missing condition is unknown, and an endpoint of unknown state counts as ready.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Conditions {
    ready: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct SlicePort {
    name: Option<String>,
    port: Option<u16>,
}

/// Reads a value that may be null: the API server writes null for lists and maps without entries.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(value: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or_default())
}

/// Reads the metadata of an object.
///
/// # Errors
/// It is not an object.
pub(super) fn meta(text: &str) -> Result<Meta, String> {
    let object: WithMeta =
        serde_json::from_str(text).map_err(|error| format!("an event of the watch: {error}"))?;
    Ok(object.metadata)
}

impl Object {
    /// Reads an object.
    ///
    /// # Errors
    /// It is not one of this kind.
    pub(super) fn parse(text: &str, resource: Resource) -> Result<Self, String> {
        let parsed = match resource {
            Resource::Pods => serde_json::from_str(text).map(Self::Pod),
            Resource::EndpointSlices => serde_json::from_str(text).map(Self::Slice),
        };
        parsed.map_err(|error| error.to_string())
    }

    pub(super) fn meta(&self) -> &Meta {
        match self {
            Self::Pod(pod) => &pod.metadata,
            Self::Slice(slice) => &slice.metadata,
        }
    }

    /// Returns the workers that the object describes.
    ///
    /// # Errors
    /// The labels and annotations do not describe a worker. What the object says of its pods still counts.
    pub(super) fn workers(&self, config: &KubernetesSourceConfig) -> Result<Vec<Found>, Invalid> {
        let described = match self {
            Self::Pod(pod) => pod.workers(config),
            Self::Slice(slice) => slice.workers(config),
        };
        let has_none = self.meta().is_encoder();
        described.map_err(|problem| Invalid { problem, pods: Some(self.pods()), has_none })
    }

    /// Returns the uids of its pods, and whether each ends.
    fn pods(&self) -> BTreeMap<String, bool> {
        match self {
            Self::Pod(pod) => pod.metadata.pods(),
            Self::Slice(slice) => slice.pods(),
        }
    }
}

impl Meta {
    /// Returns the uid of this pod, and whether it ends.
    pub(super) fn pods(&self) -> BTreeMap<String, bool> {
        [(self.uid.clone(), self.is_ending())].into()
    }

    fn is_ending(&self) -> bool {
        self.deletion_timestamp.is_some()
    }

    /// Returns the role of llm-d, unless a label or an annotation of ours comes before it.
    pub(super) fn llm_d_role(&self) -> Option<&str> {
        self.labels.get(ROLE_LABEL).map(String::as_str).filter(|_| !self.has_own_role())
    }

    /// Returns whether a label or an annotation of ours gives the role.
    pub(super) fn has_own_role(&self) -> bool {
        [&self.labels, &self.annotations].into_iter().any(|all| all.contains_key(OWN_ROLE))
    }

    fn is_encoder(&self) -> bool {
        self.llm_d_role() == Some(ENCODE)
    }
}

/// State of the workers of a pod.
#[derive(Clone, Copy)]
struct Readiness {
    leaving: bool,
    unready: bool,
}

impl Readiness {
    /// A pod that terminates is not ready, but may still answer.
    fn new(ready: bool, leaving: bool) -> Self {
        Self { leaving, unready: !ready && !leaving }
    }

    /// Returns the workers of a pod, with their descriptions. One that is not ready and cannot be read is
    /// gone.
    fn found(self, specs: Result<Vec<WorkerSpec>, String>, uid: &str) -> Result<Vec<Found>, String> {
        let Self { leaving, unready } = self;
        let specs = if unready { specs.unwrap_or_default() } else { specs? };
        let identity = |rank: usize| (!uid.is_empty()).then(|| Arc::from(format!("{uid}/{rank}")));
        let found =
            |(rank, spec)| Found { leaving, unready, identity: identity(rank), ..Found::staying(spec) };
        Ok(specs.into_iter().enumerate().map(found).collect())
    }
}

impl Endpoint {
    fn is_leaving(&self) -> bool {
        self.conditions.terminating == Some(true)
    }
}

impl Container {
    fn is_sidecar(&self) -> bool {
        self.restart_policy.as_deref() == Some("Always")
    }
}

impl Pod {
    fn workers(&self, config: &KubernetesSourceConfig) -> Result<Vec<Found>, String> {
        let leaving = self.metadata.is_ending();
        let ready = self.status.conditions.iter().any(|one| one.kind == "Ready" && one.status == "True");
        let has_ended = ["Failed", "Succeeded"].contains(&self.status.phase.as_str());
        if self.status.pod_ip.is_empty() || (has_ended && !ready && !leaving) {
            return Ok(Vec::new());
        }
        let sidecars = self.spec.init_containers.iter().filter(|one| one.is_sidecar());
        let ports = self.spec.containers.iter().chain(sidecars).flat_map(|container| &container.ports);
        let named = |name: &str| ports.clone().find(|port| port.name == name).map(|port| port.container_port);
        let status = &self.status;
        // IPv4 comes first, as for the slices of a service: engines listen there by default.
        let v4 = status.pod_ips.iter().map(|one| &one.ip).find(|ip| !ip.is_empty() && !ip.contains(':'));
        let address = v4.unwrap_or(&status.pod_ip);
        let specs = workers(config, &self.metadata, address, named);
        Readiness::new(ready, leaving).found(specs, &self.metadata.uid)
    }
}

impl Slice {
    fn workers(&self, config: &KubernetesSourceConfig) -> Result<Vec<Found>, String> {
        let named = |name: &str| {
            self.ports.iter().find(|port| port.name.as_deref() == Some(name)).and_then(|port| port.port)
        };
        let mut all = Vec::new();
        for endpoint in &self.endpoints {
            let readiness = Readiness::new(endpoint.conditions.ready != Some(false), endpoint.is_leaving());
            // All addresses of an endpoint are the same one; clients use the first.
            let Some(address) = endpoint.addresses.first() else { continue };
            let specs = workers(config, &self.metadata, address, named);
            all.extend(readiness.found(specs, &endpoint.target_ref.uid)?);
        }
        Ok(all)
    }

    fn pods(&self) -> BTreeMap<String, bool> {
        let of = |endpoint: &Endpoint| (endpoint.target_ref.uid.clone(), endpoint.is_leaving());
        self.endpoints.iter().map(of).collect()
    }
}

/// Describes the workers at an address, one for each port: by the defaults, then by labels, then by
/// annotations.
fn workers(
    config: &KubernetesSourceConfig,
    meta: &Meta,
    address: &str,
    port_of: impl Fn(&str) -> Option<u16>,
) -> Result<Vec<WorkerSpec>, String> {
    let said = meta.labels.iter().chain(&meta.annotations);
    let said = said.filter_map(|(key, value)| Some((key.strip_prefix(PREFIX)?.to_owned(), value.clone())));
    let said: BTreeMap<String, String> = said.collect();
    let mut keys: BTreeMap<String, String> = config.defaults.clone();
    if let Some(role) = meta.llm_d_role() {
        keys.insert("role".to_owned(), role_of(role)?.to_owned());
    }
    keys.extend(said);
    if keys.contains_key("url") {
        return Err(format!(
            "{PREFIX}url: the URL is that of the pod: give {PREFIX}scheme and {PREFIX}port instead"
        ));
    }
    let told = keys.remove("scheme").map(|scheme| scheme.parse());
    let scheme = told.transpose().map_err(|e| format!("{PREFIX}scheme: {e}"))?.unwrap_or(config.scheme);
    let told = keys.remove("port");
    let told = told.map(|ports| PortOfWorker::parse_list(&ports).map_err(|e| format!("{PREFIX}port: {e}")));
    let told = told.transpose()?;
    let ports = told.as_ref().unwrap_or(&config.ports);
    if ports.len() > 1 && keys.contains_key("id") {
        return Err("`id` cannot be given for the workers of several ports: remove it".to_owned());
    }
    let one = |(rank, port): (u32, &PortOfWorker)| {
        let port = match port {
            PortOfWorker::Number(port) => *port,
            PortOfWorker::Name(name) => port_of(name)
                .ok_or_else(|| format!("no port is named `{name}`: correct discovery.kubernetes.port"))?,
        };
        let url = scheme.url(address, port);
        let pairs = pairs(&keys).chain([("url", url.as_str())]);
        WorkerSpec::from_pairs_of_rank(pairs, rank).map_err(|error| error.to_string())
    };
    (0..).zip(ports).map(one).collect()
}

/// Returns keys and values as those of the `--worker` flag.
fn pairs(keys: &BTreeMap<String, String>) -> impl Iterator<Item = (&str, &str)> {
    keys.iter().flat_map(|(key, value)| {
        let values: Vec<&str> = if LISTS.contains(&key.as_str()) {
            value.split(',').map(str::trim).collect()
        } else {
            vec![value]
        };
        values.into_iter().map(move |value| (key.as_str(), value))
    })
}
