//! What an operator says of a worker: parsed once, from a config table or a `--worker` flag, and immutable after.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::id::{Engine, ModelName, Role, WorkerId};

/// How a vLLM worker hands KV blocks over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvTransport {
    /// `NixlConnector`: the prefill answer carries the parameters.
    #[default]
    Nixl,
    /// `MooncakeConnector`: a transfer id known before prefill.
    Mooncake,
    /// `P2pNcclConnector`: identity within the request id.
    P2pNccl,
}

/// Where a bootstrap handoff finds the prefill worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Bootstrap {
    /// Host; the worker URL's when not given.
    pub host: Option<String>,
    /// Port; sent as null when not given.
    pub port: Option<u16>,
}

/// Where a prefill worker's KV blocks may be transferred to (spec D3): written `required:DOMAIN` or
/// `preferred:DOMAIN:WEIGHT`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TransferRule {
    /// A key of the worker's topology, as `rack`.
    pub domain: String,
    /// Weight of the preference; `None`: required.
    pub weight: Option<f32>,
}

/// What every taint that stems from a worker's topology begins with.
pub const TOPOLOGY_TAINT: &str = "dynamo.topology/";

/// An operator's description of a worker.
#[derive(Clone, PartialEq, Serialize)]
pub struct WorkerSpec {
    /// Configured, or hashed from the URL.
    pub id: WorkerId,
    /// Absolute `http://host:port[/path]`, without a slash at the end.
    pub url: Arc<str>,
    /// What it may serve.
    pub role: Role,
    /// The dialect it speaks.
    pub engine: Engine,
    /// Models it serves; empty: learnt from its `/v1/models`.
    pub models: Vec<ModelName>,
    /// Data-parallel ranks, at least 1.
    pub dp_size: u32,
    /// Bootstrap address (SGLang prefill).
    pub bootstrap: Bootstrap,
    /// How it hands blocks over (vLLM).
    pub transport: KvTransport,
    /// Free labels, for policies.
    pub labels: BTreeMap<String, String>,
    /// Taints that requests may require or prefer.
    pub taints: BTreeSet<String>,
    /// Where it stands, by domain; each entry is a taint `dynamo.topology/<domain>=<value>` too.
    pub topology: BTreeMap<String, String>,
    /// Where its KV blocks may go (prefill workers).
    pub kv_transfer: Option<TransferRule>,
    /// `host:port` of its KV transport (vLLM P2pNccl).
    pub kv_addr: Option<String>,
    /// `tcp://host:port` of its KV events (ZMQ); with several ranks, rank `r` is at port + r.
    pub kv_events: Option<String>,
    /// `tcp://host:port` where past events can be asked for.
    pub kv_replay: Option<String>,
    /// Whether it can prefill without a handoff.
    pub local_prefill: bool,
    /// E4: whether closing a prefill in flight is safe.
    pub prefill_cancellable: bool,
    /// Requests it may have at once.
    pub max_concurrency: Option<u32>,
    /// Its KV blocks; learnt from the engine when not given.
    pub total_blocks: Option<u32>,
    /// LoRA adapters it has; empty: not known.
    pub loras: Vec<String>,
    /// Sent as a bearer token.
    #[serde(skip)]
    pub api_key: Option<String>,
}

/// A worker description that does not parse.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {problem}")]
pub struct SpecError {
    /// The key at fault.
    pub key: String,
    /// What is wrong with its value, the value included.
    pub problem: String,
}

/// A worker as written in a config table: every field optional but role, engine and URL.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Raw {
    id: Option<u64>,
    url: Option<String>,
    role: Option<String>,
    engine: Option<String>,
    models: Vec<String>,
    dp_size: Option<u32>,
    bootstrap_host: Option<String>,
    bootstrap_port: Option<u16>,
    transport: Option<KvTransport>,
    labels: BTreeMap<String, String>,
    taints: BTreeSet<String>,
    topology: BTreeMap<String, String>,
    kv_transfer: Option<String>,
    kv_addr: Option<String>,
    kv_events: Option<String>,
    kv_replay: Option<String>,
    local_prefill: Option<bool>,
    prefill_cancellable: bool,
    max_concurrency: Option<u32>,
    total_blocks: Option<u32>,
    loras: Vec<String>,
    api_key: Option<String>,
}

impl WorkerSpec {
    /// The host part of the URL, without port.
    #[must_use]
    pub fn host(&self) -> &str {
        let rest = self.url.split_once("://").map_or(&*self.url, |(_, rest)| rest);
        let authority = rest.split('/').next().unwrap_or(rest);
        match authority.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
            _ => authority,
        }
    }

    /// Base URL of its bootstrap server (vLLM Mooncake).
    #[must_use]
    pub fn bootstrap_address(&self) -> String {
        let host = self.bootstrap.host.as_deref().unwrap_or_else(|| self.host());
        format!("http://{host}:{}", self.bootstrap.port.unwrap_or(0))
    }

    /// Whether a required transfer rule of this prefill worker forbids `decode` (spec D3).
    #[must_use]
    pub fn forbids_transfer_to(&self, decode: &Self) -> bool {
        let Some(rule) = self.kv_transfer.as_ref().filter(|rule| rule.weight.is_none()) else { return false };
        self.topology.get(&rule.domain) != decode.topology.get(&rule.domain)
    }

    /// The taint this prefill worker prefers in a decode worker, and how much (spec D3).
    #[must_use]
    pub fn preferred_transfer(&self) -> Option<(String, f32)> {
        let rule = self.kv_transfer.as_ref()?;
        let value = self.topology.get(&rule.domain)?;
        Some((format!("{TOPOLOGY_TAINT}{}={value}", rule.domain), rule.weight?))
    }

    /// Whether this worker can take the other leg of a request whose first leg runs on `other`.
    #[must_use]
    pub fn pairs_with(&self, other: &Self) -> bool {
        self.engine == other.engine && (self.engine != Engine::Vllm || self.transport == other.transport)
    }

    /// Parses the value of a `--worker` flag: `role=prefill,engine=vllm,url=http://…[,id=7][,dp_size=2]
    /// [,model=a][,bootstrap_host=…][,bootstrap_port=8998][,transport=nixl][,kv_addr=10.0.0.1:14579][,kv_events=tcp://…:5557][,kv_replay=tcp://…:5558][,label.zone=a]
    /// [,taint=x][,topology.rack=r1][,kv_transfer=required:rack][,lora=…]
    /// [,local_prefill=true][,prefill_cancellable=true][,max_concurrency=64][,total_blocks=512][,api_key=…]`.
    ///
    /// # Errors
    /// [`SpecError`] names the key and the value.
    pub fn parse_flag(flag: &str) -> Result<Self, SpecError> {
        let mut raw = Raw::default();
        for pair in flag.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) =
                pair.split_once('=').ok_or_else(|| error(pair, "is not of the form key=value".to_owned()))?;
            raw.set(key, value)?;
        }
        raw.resolve()
    }
}

impl<'de> Deserialize<'de> for WorkerSpec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Raw::deserialize(deserializer)?.resolve().map_err(serde::de::Error::custom)
    }
}

impl Raw {
    fn set(&mut self, key: &str, value: &str) -> Result<(), SpecError> {
        match key {
            "id" => self.id = Some(parse(key, value)?),
            "url" => self.url = Some(value.to_owned()),
            "role" => self.role = Some(value.to_owned()),
            "engine" => self.engine = Some(value.to_owned()),
            "model" => self.models.push(value.to_owned()),
            "dp_size" => self.dp_size = Some(parse(key, value)?),
            "bootstrap_host" => self.bootstrap_host = Some(value.to_owned()),
            "bootstrap_port" => self.bootstrap_port = Some(parse(key, value)?),
            "transport" => {
                self.transport = Some(match value {
                    "nixl" => KvTransport::Nixl,
                    "mooncake" => KvTransport::Mooncake,
                    "p2p_nccl" => KvTransport::P2pNccl,
                    _ => return Err(error(key, format!("`{value}` is none of: nixl, mooncake, p2p_nccl"))),
                });
            }
            "kv_transfer" => self.kv_transfer = Some(value.to_owned()),
            "kv_addr" => self.kv_addr = Some(value.to_owned()),
            "kv_events" => self.kv_events = Some(value.to_owned()),
            "kv_replay" => self.kv_replay = Some(value.to_owned()),
            "taint" => drop(self.taints.insert(value.to_owned())),
            "lora" => self.loras.push(value.to_owned()),
            "local_prefill" => self.local_prefill = Some(parse(key, value)?),
            "prefill_cancellable" => self.prefill_cancellable = parse(key, value)?,
            "max_concurrency" => self.max_concurrency = Some(parse(key, value)?),
            "total_blocks" => self.total_blocks = Some(parse(key, value)?),
            "api_key" => self.api_key = Some(value.to_owned()),
            _ => match key.split_once('.') {
                Some(("label", name)) if !name.is_empty() => {
                    self.labels.insert(name.to_owned(), value.to_owned());
                }
                Some(("topology", name)) if !name.is_empty() => {
                    self.topology.insert(name.to_owned(), value.to_owned());
                }
                _ => return Err(error(key, format!("unknown key (value `{value}`)"))),
            },
        }
        Ok(())
    }

    /// What a vLLM transport cannot do without, and endpoints that are none.
    fn check_transport(&self, engine: Engine, role: Role) -> Result<(), SpecError> {
        for (key, endpoint) in [("kv_events", &self.kv_events), ("kv_replay", &self.kv_replay)] {
            if let Some(endpoint) = endpoint
                && rank_endpoint(endpoint, 0).is_none()
            {
                return Err(error(key, format!("`{endpoint}` is not tcp://host:port")));
            }
        }
        if engine != Engine::Vllm || role == Role::Aggregated {
            return Ok(());
        }
        match self.transport {
            Some(KvTransport::P2pNccl) if self.kv_addr.is_none() => {
                Err(error("kv_addr", "is missing: p2p_nccl names both workers by it".to_owned()))
            }
            Some(KvTransport::Mooncake) if role == Role::Prefill && self.bootstrap_port.is_none() => {
                Err(error("bootstrap_port", "is missing: mooncake tells its engine id there".to_owned()))
            }
            _ => Ok(()),
        }
    }

    fn resolve(self) -> Result<WorkerSpec, SpecError> {
        let missing = |key: &str| error(key, "is missing".to_owned());
        let word = |key: &str, value: Option<String>| value.ok_or_else(|| missing(key));
        let url = base_url(&word("url", self.url.clone())?)?;
        let role: Role =
            word("role", self.role.clone())?.parse().map_err(|e| error("role", format!("{e}")))?;
        let engine: Engine =
            word("engine", self.engine.clone())?.parse().map_err(|e| error("engine", format!("{e}")))?;
        if engine == Engine::Openai && role != Role::Aggregated {
            return Err(error("role", format!("`{role}`: a plain openai engine can only be aggregated")));
        }
        let dp_size = self.dp_size.unwrap_or(1);
        if !(1..=4_096).contains(&dp_size) {
            return Err(error("dp_size", format!("`{dp_size}` is not within 1 to 4096")));
        }
        if self.max_concurrency == Some(0) {
            return Err(error(
                "max_concurrency",
                "`0` would never serve; leave it out for no limit".to_owned(),
            ));
        }
        let kv_transfer =
            self.kv_transfer.as_deref().map(|rule| transfer_rule(rule, &self.topology)).transpose()?;
        self.check_transport(engine, role)?;
        let mut taints = self.taints;
        taints
            .extend(self.topology.iter().map(|(domain, value)| format!("{TOPOLOGY_TAINT}{domain}={value}")));
        let stock_local = match role {
            Role::Prefill => false,
            Role::Aggregated => true,
            // Stock SGLang decode workers cannot prefill (engines.md); vLLM and TensorRT-LLM ones can.
            Role::Decode => engine != Engine::Sglang,
        };
        Ok(WorkerSpec {
            id: self.id.map_or_else(|| WorkerId::of_url(&url), WorkerId),
            url: Arc::from(url),
            role,
            engine,
            models: self.models.iter().map(|name| ModelName::new(name)).collect(),
            dp_size,
            bootstrap: Bootstrap { host: self.bootstrap_host, port: self.bootstrap_port },
            transport: self.transport.unwrap_or_default(),
            labels: self.labels,
            taints,
            topology: self.topology,
            kv_transfer,
            kv_addr: self.kv_addr,
            kv_events: self.kv_events,
            kv_replay: self.kv_replay,
            local_prefill: self.local_prefill.unwrap_or(stock_local),
            prefill_cancellable: self.prefill_cancellable,
            max_concurrency: self.max_concurrency,
            total_blocks: self.total_blocks,
            loras: self.loras,
            api_key: self.api_key,
        })
    }
}

impl fmt::Debug for WorkerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key stays out of logs.
        f.debug_struct("WorkerSpec")
            .field("id", &self.id)
            .field("url", &self.url)
            .field("role", &self.role)
            .field("engine", &self.engine)
            .field("api_key", &self.api_key.as_ref().map(|_| "…"))
            .finish_non_exhaustive()
    }
}

/// The endpoint of a rank: the port of the first one, and so on.
pub(crate) fn rank_endpoint(endpoint: &str, rank: u32) -> Option<String> {
    let (host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port = u32::from(port.parse::<u16>().ok()?).checked_add(rank).filter(|port| *port <= 65_535)?;
    (!host.is_empty()).then(|| format!("tcp://{host}:{port}"))
}

fn transfer_rule(rule: &str, topology: &BTreeMap<String, String>) -> Result<TransferRule, SpecError> {
    let problem = |text: &str| error("kv_transfer", format!("`{rule}`: {text}"));
    let mut parts = rule.split(':');
    let (kind, domain, weight) = (parts.next(), parts.next().unwrap_or_default(), parts.next());
    let weight = match (kind, weight) {
        (Some("required"), None) => None,
        (Some("preferred"), Some(weight)) => {
            let weight: f32 = parse("kv_transfer", weight)?;
            Some(weight)
                .filter(|weight| weight.is_finite())
                .ok_or_else(|| problem("the weight is not finite"))?
                .into()
        }
        _ => return Err(problem("is neither required:DOMAIN nor preferred:DOMAIN:WEIGHT")),
    };
    // Metadata that contradicts itself fails before any request could (spec D3).
    if !topology.contains_key(domain) {
        return Err(problem("the worker's own topology does not have this domain"));
    }
    Ok(TransferRule { domain: domain.to_owned(), weight })
}

fn base_url(url: &str) -> Result<String, SpecError> {
    let trimmed = url.trim_end_matches('/');
    let rest = trimmed
        .strip_prefix("http://")
        .ok_or_else(|| error("url", format!("`{url}` does not begin with http://")))?;
    let authority = rest.split('/').next().unwrap_or(rest);
    let fits = |byte: u8| byte.is_ascii_graphic() && !b"?#@".contains(&byte);
    let bad = authority.is_empty() || !trimmed.bytes().all(fits);
    let port = authority.rsplit_once(':').map(|(_, port)| port).filter(|port| !port.ends_with(']'));
    if bad || port.is_some_and(|port| port.parse::<u16>().is_err()) {
        return Err(error("url", format!("`{url}` is not http://host[:port][/path]")));
    }
    Ok(trimmed.to_owned())
}

fn parse<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, SpecError>
where
    T::Err: fmt::Display,
{
    value.parse().map_err(|e| error(key, format!("`{value}`: {e}")))
}

fn error(key: &str, problem: String) -> SpecError {
    SpecError { key: key.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_gives_a_whole_spec() {
        let spec = WorkerSpec::parse_flag(
            "role=prefill,engine=sglang,url=http://10.0.0.1:30000/,bootstrap_port=8998,dp_size=2,label.zone=a,taint=x",
        )
        .unwrap();
        assert_eq!((&*spec.url, spec.host()), ("http://10.0.0.1:30000", "10.0.0.1"));
        assert_eq!((spec.dp_size, spec.bootstrap.port, spec.local_prefill), (2, Some(8998), false));
        assert_eq!(spec.id, WorkerId::of_url("http://10.0.0.1:30000"));
        assert_eq!(spec.labels.get("zone").map(String::as_str), Some("a"));
    }

    #[test]
    fn b1_stock_sglang_decode_cannot_prefill_locally_and_vllm_can() {
        let local = |flag: &str| WorkerSpec::parse_flag(flag).unwrap().local_prefill;
        assert!(!local("role=decode,engine=sglang,url=http://a:1"));
        assert!(local("role=decode,engine=vllm,url=http://a:1"));
        assert!(local("role=decode,engine=sglang,url=http://a:1,local_prefill=true"));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_value() {
        let cases = [
            (
                "role=cook,engine=vllm,url=http://a:1",
                "role: role `cook` is none of: prefill, decode, aggregated",
            ),
            ("role=decode,engine=vllm", "url: is missing"),
            ("role=decode,engine=vllm,url=a:1", "url: `a:1` does not begin with http://"),
            (
                "role=decode,engine=vllm,url=http://a:99999",
                "url: `http://a:99999` is not http://host[:port][/path]",
            ),
            (
                "role=decode,engine=vllm,url=http://a:1/b\tc",
                "url: `http://a:1/b\tc` is not http://host[:port][/path]",
            ),
            ("role=decode,engine=vllm,url=http://a:1,dp_size=0", "dp_size: `0` is not within 1 to 4096"),
            ("role=decode,engine=vllm,url=http://a:1,speed=9", "speed: unknown key (value `9`)"),
            (
                "role=decode,engine=openai,url=http://a:1",
                "role: `decode`: a plain openai engine can only be aggregated",
            ),
            ("role", "role: is not of the form key=value"),
        ];
        for (flag, expected) in cases {
            assert_eq!(WorkerSpec::parse_flag(flag).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn d3_topology_makes_taints_and_rules_and_contradictions_are_told() {
        let flag = "role=prefill,engine=vllm,url=http://a:1,topology.rack=r1,kv_transfer=";
        let spec = WorkerSpec::parse_flag(&format!("{flag}preferred:rack:2.5")).unwrap();
        assert!(spec.taints.contains("dynamo.topology/rack=r1"));
        assert_eq!(spec.preferred_transfer(), Some(("dynamo.topology/rack=r1".to_owned(), 2.5)));
        let strict = WorkerSpec::parse_flag(&format!("{flag}required:rack")).unwrap();
        let decode = |rack: &str| {
            WorkerSpec::parse_flag(&format!("role=decode,engine=vllm,url=http://b:1{rack}")).unwrap()
        };
        assert!(!strict.forbids_transfer_to(&decode(",topology.rack=r1")));
        assert!(
            strict.forbids_transfer_to(&decode(",topology.rack=r2"))
                && strict.forbids_transfer_to(&decode(""))
        );
        assert!(!spec.forbids_transfer_to(&decode("")));
        for (rule, problem) in [
            ("required:zone", "`required:zone`: the worker's own topology does not have this domain"),
            ("always:rack", "`always:rack`: is neither required:DOMAIN nor preferred:DOMAIN:WEIGHT"),
            ("preferred:rack:inf", "`preferred:rack:inf`: the weight is not finite"),
        ] {
            let error = WorkerSpec::parse_flag(&format!("{flag}{rule}")).unwrap_err();
            assert_eq!(error.to_string(), format!("kv_transfer: {problem}"));
        }
    }

    #[test]
    fn h6_every_rank_has_an_endpoint_of_its_own() {
        assert_eq!(rank_endpoint("tcp://10.0.0.1:5557", 2).as_deref(), Some("tcp://10.0.0.1:5559"));
        for bad in ["10.0.0.1:5557", "tcp://10.0.0.1", "tcp://:5557", "tcp://a:99999", "ipc:///x"] {
            assert_eq!(rank_endpoint(bad, 0), None);
        }
        let flag = "role=decode,engine=vllm,url=http://a:1,kv_events=ipc:///x";
        let error = WorkerSpec::parse_flag(flag).unwrap_err();
        assert_eq!(error.to_string(), "kv_events: `ipc:///x` is not tcp://host:port");
    }

    #[test]
    fn what_a_transport_needs_is_asked_for() {
        let error = |flag: &str| WorkerSpec::parse_flag(flag).unwrap_err().key;
        assert_eq!(error("role=decode,engine=vllm,url=http://a:1,transport=p2p_nccl"), "kv_addr");
        assert_eq!(error("role=prefill,engine=vllm,url=http://a:1,transport=mooncake"), "bootstrap_port");
    }

    #[test]
    fn a_key_stays_out_of_debug_output() {
        let spec = WorkerSpec::parse_flag("role=decode,engine=vllm,url=http://a:1,api_key=sekret").unwrap();
        assert!(!format!("{spec:?}").contains("sekret"));
    }
}
