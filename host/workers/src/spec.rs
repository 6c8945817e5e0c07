//! An operator's description of a worker: parsed once, from a configuration table or a `--worker` flag, then
//! immutable.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    facts::FactName,
    id::{Engine, ModelName, Role, WorkerId},
};

mod completed;
mod nulls;
mod problems;
mod raw;
mod template;
mod traits;
mod url;
mod values;
mod written;

pub(crate) use completed::major_minor;
use raw::RawSpec;
pub use url::url_without_secrets;

/// KV connector of a vLLM worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KvTransport {
    /// `NixlConnector`: the prefill response contains the transfer parameters.
    #[default]
    Nixl,
    /// `MooncakeConnector`: both legs know the transfer id before prefill.
    Mooncake,
    /// `P2pNcclConnector`: the request id contains both workers' addresses.
    P2pNccl,
}

impl KvTransport {
    /// Returns whether an unmodified engine with this connector can prefill without a handoff in a role.
    /// SGLang's decode workers cannot, nor those with P2pNccl, which wait without a deadline for the prefill
    /// worker that a request id has to name. Others of vLLM and those of TensorRT-LLM can.
    fn prefills_locally(self, engine: Engine, role: Role) -> bool {
        match role {
            Role::Prefill => false,
            Role::Aggregated => true,
            Role::Decode => engine != Engine::Sglang && self != Self::P2pNccl,
        }
    }
}

impl fmt::Display for KvTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
            Self::P2pNccl => "p2p_nccl",
        })
    }
}

/// Address at which a bootstrap handoff finds the prefill worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Bootstrap {
    /// Host; `None` for the host of the worker's URL.
    pub host: Option<String>,
    /// Port; sent as null if absent.
    pub port: Option<u16>,
}

/// Restricts the decode workers to which a prefill worker transfers KV blocks (D3). Written `required:DOMAIN`
/// or `preferred:DOMAIN:WEIGHT`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TransferRule {
    /// Key of the worker's topology, for example `rack`.
    pub domain: String,
    /// Weight of the preference; `None` if the domain is required.
    pub weight: Option<f32>,
}

/// Default port of Mooncake's bootstrap server.
const MOONCAKE_PORT: u16 = 8998;
/// Lease of a handoff on a worker whose lease is not known: that of recent vLLM versions.
const HANDOFF_LEASE: Duration = Duration::from_secs(30);
/// Prefix of the taints derived from a worker's topology.
const TOPOLOGY_TAINT: &str = "dynamo.topology/";

/// Description of a worker.
#[derive(Clone, PartialEq, Serialize)]
pub struct WorkerSpec {
    /// Configured id, or a hash of the URL.
    pub id: WorkerId,
    /// Absolute base URL `http://host:port[/path]` or `https://…`, with its port and without a trailing
    /// slash.
    pub url: Arc<str>,
    /// Name that the engine's certificate must have; `None` for the host of the URL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_server_name: Option<Arc<str>>,
    /// Kind of requests that the worker serves.
    pub role: Role,
    /// Engine, which determines the dialect.
    pub engine: Engine,
    /// Models; if empty, read from the engine's `/v1/models`.
    pub models: Vec<ModelName>,
    /// Number of data-parallel ranks, at least 1.
    pub dp_size: u32,
    /// Number by which requests name the engine's first rank (vLLM).
    #[serde(skip)]
    pub first_rank: u32,
    /// Bootstrap address (SGLang prefill).
    pub bootstrap: Bootstrap,
    /// KV connector (vLLM).
    pub transport: KvTransport,
    /// Property that a prefill and a decode worker must share to hand KV blocks over; `None` is unknown,
    /// which excludes nothing.
    pub kv_compatibility: Option<Arc<str>>,
    /// Free labels, for policies.
    pub labels: BTreeMap<String, String>,
    /// Taints that requests may require or prefer.
    pub taints: BTreeSet<String>,
    /// Location by domain. Each entry is also a taint `dynamo.topology/<domain>=<value>`.
    pub topology: BTreeMap<String, String>,
    /// Allowed or preferred targets of KV transfers (prefill workers).
    pub kv_transfer: Option<TransferRule>,
    /// `host:port` of the KV transport (vLLM P2pNccl).
    pub kv_addr: Option<String>,
    /// `tcp://host:port` of KV events (ZMQ). Rank `r` is at port + offset + r.
    pub kv_events: Option<String>,
    /// `tcp://host:port` of the replay socket for missed KV events. Rank `r` is at port + offset + r.
    pub kv_replay: Option<String>,
    /// Offset of the ports of the first rank; `None` until the engine was read.
    #[serde(skip)]
    pub kv_events_offset: Option<u32>,
    /// Whether the worker can prefill without a handoff.
    pub local_prefill: bool,
    /// Whether a prefill in flight can be cancelled safely (E4); `None`: if the engine is known to allow it.
    pub prefill_cancellable: Option<bool>,
    /// How long a prefill worker keeps the blocks of a handoff that no decode worker pulls, seconds; `None`
    /// if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handoff_lease_s: Option<u32>,
    /// Maximum number of concurrent requests.
    pub max_concurrency: Option<u32>,
    /// Tokens in a KV block of the engine; if absent, read from the engine.
    pub block_size: Option<u32>,
    /// Number of KV blocks of a rank; if absent, read from the engine.
    pub total_blocks: Option<u32>,
    /// Loaded LoRA adapters; empty if unknown.
    pub loras: Vec<String>,
    /// Facts that the configuration leaves to the engine. Their values here are defaults until it was read.
    pub from_engine: BTreeSet<FactName>,
    /// Bearer token for requests to the worker.
    #[serde(skip)]
    pub api_key: Option<String>,
}

/// Why a description is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {problem}")]
pub struct SpecError {
    /// Key with the invalid value.
    pub key: String,
    /// The problem, with the value.
    pub problem: String,
}

fn error(key: &str, problem: String) -> SpecError {
    SpecError { key: key.to_owned(), problem }
}

impl WorkerSpec {
    /// Returns the host of the URL, without port. An IPv6 address has its brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        let rest = self.url.split_once("://").map_or(&*self.url, |(_, rest)| rest);
        let authority = rest.split('/').next().unwrap_or(rest);
        match authority.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
            _ => authority,
        }
    }

    /// Returns whether calls to the engine use TLS.
    #[must_use]
    pub fn has_tls(&self) -> bool {
        self.url.starts_with("https://")
    }

    /// Returns the base URL of the bootstrap server (vLLM Mooncake), by default at the engine's default port.
    #[must_use]
    pub fn bootstrap_address(&self) -> String {
        let host = self.bootstrap.host.as_deref().unwrap_or_else(|| self.host());
        format!("http://{host}:{}", self.bootstrap.port.unwrap_or(MOONCAKE_PORT))
    }

    /// Returns whether this prefill worker's required transfer rule excludes `decode` (D3).
    #[must_use]
    pub fn forbids_transfer_to(&self, decode: &Self) -> bool {
        let Some(rule) = self.kv_transfer.as_ref().filter(|rule| rule.weight.is_none()) else { return false };
        self.topology.get(&rule.domain) != decode.topology.get(&rule.domain)
    }

    /// Returns how long this prefill worker keeps the blocks of a handoff that no decode worker pulls.
    #[must_use]
    pub fn handoff_lease(&self) -> Duration {
        self.handoff_lease_s.map_or(HANDOFF_LEASE, |seconds| Duration::from_secs(seconds.into()))
    }

    /// Returns the taint that this prefill worker prefers in a decode worker, and its weight (D3).
    #[must_use]
    pub fn preferred_transfer(&self) -> Option<(String, f32)> {
        let rule = self.kv_transfer.as_ref()?;
        let value = self.topology.get(&rule.domain)?;
        Some((format!("{TOPOLOGY_TAINT}{}={value}", rule.domain), rule.weight?))
    }

    /// Returns whether this worker can run the other leg of a request with a leg on `other`.
    #[must_use]
    pub fn pairs_with(&self, other: &Self) -> bool {
        let compatible = self.kv_compatibility.as_ref().zip(other.kv_compatibility.as_ref());
        self.handoff_protocol() == other.handoff_protocol()
            && compatible.is_none_or(|(own, other)| own == other)
    }

    /// Returns what has to be equal for two workers to pair, besides the compatibility where both know it.
    #[must_use]
    pub fn handoff_protocol(&self) -> impl Eq + std::hash::Hash + use<> {
        (self.engine, (self.engine == Engine::Vllm).then_some(self.transport))
    }

    /// Parses the value of a `--worker` flag: comma-separated `key=value` pairs. `engine` and `url` are
    /// required, and `role` unless the engine is SGLang, which reports it.
    ///
    /// ```text
    /// role=prefill,engine=vllm,url=http://10.0.0.1:8000[,id=7][,dp_size=2][,model=a]
    /// [,bootstrap_host=10.0.0.1][,bootstrap_port=8998][,transport=nixl][,kv_compatibility=0.33]
    /// [,kv_addr=10.0.0.1:14579]
    /// [,kv_events=tcp://{host}:5557][,kv_replay=tcp://{host}:5558]
    /// [,label.zone=a][,taint=x][,topology.rack=r1][,kv_transfer=required:rack][,lora=a]
    /// [,local_prefill=true][,prefill_cancellable=true][,handoff_lease_s=480][,max_concurrency=64]
    /// [,block_size=16][,total_blocks=512][,api_key=k][,tls_server_name=engine.example]
    /// ```
    ///
    /// # Errors
    /// [`SpecError`] names the key and the value.
    pub fn parse_flag(flag: &str) -> Result<Self, SpecError> {
        let pairs = flag.split(',').map(str::trim).filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| {
            pair.split_once('=').ok_or_else(|| error(pair, "is not of the form key=value".to_owned()))
        });
        Self::from_pairs(pairs.collect::<Result<Vec<_>, _>>()?)
    }

    /// Builds a description from keys and values of the `--worker` flag. A later value replaces an earlier
    /// one of its key, apart from keys that may be given several times.
    ///
    /// # Errors
    /// [`SpecError`] names the key and the value.
    pub fn from_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, SpecError> {
        Self::from_pairs_of_rank(pairs, 0)
    }

    /// Builds a description as [`WorkerSpec::from_pairs`] does, in whose addresses `{rank}` stands for
    /// `rank`.
    ///
    /// # Errors
    /// Same as [`WorkerSpec::from_pairs`].
    pub fn from_pairs_of_rank<'a>(
        pairs: impl IntoIterator<Item = (&'a str, &'a str)>,
        rank: u32,
    ) -> Result<Self, SpecError> {
        let mut raw = RawSpec { rank, ..RawSpec::default() };
        for (key, value) in pairs {
            raw.set(key, value)?;
        }
        raw.resolve()
    }
}

impl<'de> Deserialize<'de> for WorkerSpec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = RawSpec::deserialize(deserializer)?;
        raw.clone().resolve().map_err(|_| {
            // Reports one line for each key.
            let lines: Vec<String> = raw.problems().iter().map(ToString::to_string).collect();
            serde::de::Error::custom(lines.join("\n"))
        })
    }
}

impl fmt::Debug for WorkerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Keep the API key out of logs.
        f.debug_struct("WorkerSpec")
            .field("id", &self.id)
            .field("url", &self.url)
            .field("role", &self.role)
            .field("engine", &self.engine)
            .field("api_key", &self.api_key.as_ref().map(|_| "…"))
            .finish_non_exhaustive()
    }
}

/// Returns the endpoint of a rank: port of the first rank plus `rank`. `None` if `endpoint` is not
/// `tcp://host:port` or the port is out of range.
pub(crate) fn rank_endpoint(endpoint: &str, rank: u32) -> Option<String> {
    let (host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port = u32::from(port.parse::<u16>().ok()?).checked_add(rank).filter(|port| *port <= 65_535)?;
    (!host.is_empty()).then(|| format!("tcp://{host}:{port}"))
}

#[cfg(test)]
mod tests;
