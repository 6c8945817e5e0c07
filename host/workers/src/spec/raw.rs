//! Parses and validates descriptions of workers.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use prefix_index::events::MAX_BLOCK_SIZE;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Bootstrap, KvTransport, SpecError, TOPOLOGY_TAINT, WorkerSpec, error,
    nulls::{or_default, text},
    rank_endpoint,
    template::{self, Parts, PortText, SAMPLE},
    url::{base_url, check_server_name},
    values::{api_key, check_address, host_in_url, in_range, parse, parse_name, transfer_rule},
};
use crate::{
    facts::{FactName, MAX_DP_SIZE},
    id::{Engine, ModelName, Role, WorkerId},
};

/// A description as written in a configuration table, not validated.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Worker")]
pub(super) struct RawSpec {
    /// Number of the worker; default: hash of the URL.
    #[schemars(extend("x-position" = 8, "x-example" = "1"))]
    pub(super) id: Option<u64>,
    /// Address of the engine; http:// without TLS. Without a port: 443 or 80.
    #[schemars(extend("x-position" = 2, "x-example" = "\"https://10.0.0.1:8000\""))]
    pub(super) url: Option<String>,
    /// With https:// only: name that the certificate must have; default: the url's host.
    #[schemars(extend("x-position" = 3, "x-example" = "\"engine.example\""))]
    pub(super) tls_server_name: Option<String>,
    /// "prefill", "decode" or "aggregated"; SGLang reports it.
    #[schemars(with = "Option<Role>")]
    #[schemars(extend("x-position" = 0, "x-example" = "\"prefill\""))]
    pub(super) role: Option<String>,
    /// "vllm", "sglang", "trtllm" or "openai".
    #[schemars(with = "Engine")]
    #[schemars(extend("x-position" = 1, "x-example" = "\"vllm\""))]
    pub(super) engine: Option<String>,
    /// Names of the worker's models; empty: learned from /v1/models.
    #[schemars(extend("x-position" = 9, "x-example" = "[]"))]
    #[serde(deserialize_with = "or_default")]
    pub(super) models: Vec<String>,
    /// Data-parallel ranks; SGLang and vLLM report it.
    #[schemars(extend("x-position" = 10, "x-example" = "1"))]
    pub(super) dp_size: Option<u32>,
    /// Host of the bootstrap server of SGLang or Mooncake; default: the url's host.
    #[schemars(extend("x-position" = 13, "x-example" = "\"10.0.0.1\""))]
    pub(super) bootstrap_host: Option<String>,
    /// Port of the bootstrap server; SGLang reports it.
    #[schemars(extend("x-position" = 14, "x-example" = "8998"))]
    pub(super) bootstrap_port: Option<PortText>,
    /// KV connector of vLLM: "nixl", "mooncake" or "p2p_nccl". vLLM reports NIXL and, from 0.33, Mooncake.
    #[schemars(extend("x-position" = 11, "x-example" = "\"nixl\""))]
    pub(super) transport: Option<KvTransport>,
    /// Prefill and decode workers pair only if this text is equal; default with NIXL: the engine's version.
    #[schemars(extend("x-position" = 12, "x-example" = "\"0.33.0\""))]
    pub(super) kv_compatibility: Option<String>,
    /// Labels for policies, such as the fact label-is/zone=a.
    #[schemars(extend("x-position" = 18, "x-example" = "{ zone = \"a\" }"))]
    #[serde(deserialize_with = "or_default")]
    pub(super) labels: BTreeMap<String, String>,
    /// Taints, which requests may require or prefer.
    #[schemars(extend("x-position" = 19, "x-example" = "[\"spot\"]"))]
    #[serde(deserialize_with = "or_default")]
    pub(super) taints: BTreeSet<String>,
    /// Location by domain. Each entry is also a taint dynamo.topology/rack=r1.
    #[schemars(extend("x-position" = 20, "x-example" = "{ rack = \"r1\" }"))]
    #[serde(deserialize_with = "or_default")]
    pub(super) topology: BTreeMap<String, String>,
    /// Decode workers that may get this prefill worker's blocks: "required:rack" or "preferred:rack:2.0".
    #[schemars(extend("x-position" = 21, "x-example" = "\"required:rack\""))]
    pub(super) kv_transfer: Option<String>,
    /// host:port of the KV transport of P2pNccl.
    #[schemars(extend("x-position" = 15, "x-example" = "\"10.0.0.1:14579\""))]
    pub(super) kv_addr: Option<String>,
    /// ZMQ PUB of the engine's KV events; rank r uses port + r. With {host}: the port that is set on every
    /// node, without: that of the worker's first rank. SGLang reports it.
    #[schemars(extend("x-position" = 16, "x-example" = "\"tcp://{host}:5557\""))]
    pub(super) kv_events: Option<String>,
    /// Address that replays past events; {host}: host of the url.
    #[schemars(extend("x-position" = 17, "x-example" = "\"tcp://{host}:5558\""))]
    pub(super) kv_replay: Option<String>,
    /// Whether the worker can prefill without a handoff; decode workers of stock SGLang or with P2pNccl
    /// cannot.
    #[schemars(extend("x-position" = 22, "x-example" = "true"))]
    pub(super) local_prefill: Option<bool>,
    /// Whether a prefill in flight is closed when its client leaves; default: with NIXL of vLLM 0.33 and
    /// later.
    #[schemars(extend("x-position" = 23, "x-example" = "false"))]
    pub(super) prefill_cancellable: Option<bool>,
    /// Seconds for which its engine keeps blocks that no decode worker pulls; 30 when absent.
    #[schemars(extend("x-position" = 24, "x-example" = "30"))]
    pub(super) handoff_lease_s: Option<u32>,
    /// Maximum number of requests at the same time; default: no limit of the gateway.
    #[schemars(extend("x-position" = 5, "x-example" = "64"))]
    pub(super) max_concurrency: Option<u32>,
    /// Tokens in a KV block; default: learned from the engine.
    #[schemars(extend("x-position" = 25, "x-example" = "16"))]
    pub(super) block_size: Option<u32>,
    /// KV blocks of a rank; default: learned from the engine.
    #[schemars(extend("x-position" = 26, "x-example" = "28000"))]
    pub(super) total_blocks: Option<u32>,
    /// LoRA adapters of the worker, for hints that name one; `models` needs those that it loads on request.
    #[schemars(extend("x-position" = 27, "x-example" = "[]"))]
    #[serde(deserialize_with = "or_default")]
    pub(super) loras: Vec<String>,
    /// Key that the gateway sends to this worker.
    #[schemars(extend("x-position" = 4, "x-example" = "\"…\""))]
    #[serde(deserialize_with = "text")]
    pub(super) api_key: Option<String>,
    /// Value of `{rank}`.
    #[serde(skip)]
    pub(super) rank: u32,
    /// Whether the port of `kv_events` is that of the engines' own setting. Known when that is filled in.
    #[serde(skip)]
    pub(super) has_engine_port: bool,
}

/// Longest lease of a handoff, seconds.
const MAX_HANDOFF_LEASE_S: u32 = 86_400;

/// Problem of a worker without a role.
const NO_ROLE: &str = "is missing: expected prefill, decode or aggregated";
/// Keys of the flag form, for messages.
const FLAG_KEYS: &str = "role, engine, url, id, model, dp_size, bootstrap_host, bootstrap_port, transport, \
                         kv_compatibility, kv_transfer, kv_addr, kv_events, kv_replay, label.NAME, \
                         topology.NAME, taint, lora, local_prefill, prefill_cancellable, handoff_lease_s, \
                         max_concurrency, block_size, total_blocks, api_key, tls_server_name";

impl RawSpec {
    /// Sets the value of a key of the flag form.
    pub(super) fn set(&mut self, key: &str, value: &str) -> Result<(), SpecError> {
        match key {
            "id" => self.id = Some(parse(key, value)?),
            "url" => self.url = Some(value.to_owned()),
            "tls_server_name" => self.tls_server_name = Some(value.to_owned()),
            "role" => self.role = Some(parse_name::<Role>(key, value)?.to_string()),
            "engine" => self.engine = Some(parse_name::<Engine>(key, value)?.to_string()),
            "model" => self.models.push(value.to_owned()),
            "dp_size" => self.dp_size = Some(parse(key, value)?),
            "bootstrap_host" | "kv_addr" => {
                template::fill(key, value, SAMPLE)?;
                let address = if key == "kv_addr" { &mut self.kv_addr } else { &mut self.bootstrap_host };
                *address = Some(value.to_owned());
            }
            "bootstrap_port" => {
                let port = PortText::Template(value.to_owned());
                port.fill(key, SAMPLE)?;
                self.bootstrap_port = Some(port);
            }
            "transport" => {
                self.transport = Some(match value {
                    "nixl" => KvTransport::Nixl,
                    "mooncake" => KvTransport::Mooncake,
                    "p2p_nccl" => KvTransport::P2pNccl,
                    _ => {
                        return Err(error(
                            key,
                            format!("unknown transport `{value}`: expected nixl, mooncake or p2p_nccl"),
                        ));
                    }
                });
            }
            "kv_compatibility" => self.kv_compatibility = Some(value.to_owned()),
            "kv_transfer" => self.kv_transfer = Some(value.to_owned()),
            "kv_events" | "kv_replay" => {
                template::endpoint(key, value, SAMPLE)?;
                let endpoint = if key == "kv_events" { &mut self.kv_events } else { &mut self.kv_replay };
                *endpoint = Some(value.to_owned());
            }
            "taint" => drop(self.taints.insert(value.to_owned())),
            "lora" => self.loras.push(value.to_owned()),
            "local_prefill" => self.local_prefill = Some(parse(key, value)?),
            "prefill_cancellable" => self.prefill_cancellable = Some(parse(key, value)?),
            "handoff_lease_s" => self.handoff_lease_s = Some(parse(key, value)?),
            "max_concurrency" => self.max_concurrency = Some(parse(key, value)?),
            "block_size" => self.block_size = Some(parse(key, value)?),
            "total_blocks" => self.total_blocks = Some(parse(key, value)?),
            "api_key" => self.api_key = Some(api_key(value)?),
            _ => match key.split_once('.') {
                Some(("label", name)) if !name.is_empty() => {
                    self.labels.insert(name.to_owned(), value.to_owned());
                }
                Some(("topology", name)) if !name.is_empty() => {
                    self.topology.insert(name.to_owned(), value.to_owned());
                }
                _ => return Err(error(key, format!("unknown key `{key}`: expected one of {FLAG_KEYS}"))),
            },
        }
        Ok(())
    }

    /// Writes the addresses with the parts of the URL.
    fn fill_addresses(&mut self, url: &str) -> Result<(), SpecError> {
        let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
        let authority = authority.split('/').next().unwrap_or(authority);
        let (host, port) = authority.rsplit_once(':').unwrap_or((authority, ""));
        let parts = Parts { host, port: port.parse().unwrap_or(0), rank: self.rank };
        self.has_engine_port = self.kv_events.as_deref().is_some_and(template::has_engine_port);
        for (key, endpoint) in [("kv_events", &mut self.kv_events), ("kv_replay", &mut self.kv_replay)] {
            if let Some(text) = endpoint {
                *text = template::endpoint(key, text, parts)?;
            }
        }
        if let Some(text) = &mut self.kv_addr {
            let filled = template::fill("kv_addr", text, parts)?;
            check_address("kv_addr", &filled)?;
            *text = filled;
        }
        if let Some(text) = &mut self.bootstrap_host {
            *text = host_in_url("bootstrap_host", &template::fill("bootstrap_host", text, parts)?)?;
        }
        if let Some(port) = &mut self.bootstrap_port {
            *port = PortText::Number(port.fill("bootstrap_port", parts)?);
        }
        Ok(())
    }

    /// Returns the port of the bootstrap server, which is written.
    fn bootstrap_port(&self) -> Option<u16> {
        match self.bootstrap_port {
            Some(PortText::Number(port)) => Some(port),
            _ => None,
        }
    }

    /// Returns the transport, when the keys are there that vLLM requires with it.
    fn checked_transport(&self, engine: Engine, role: Role) -> Result<KvTransport, SpecError> {
        let transport = self.transport.unwrap_or_default();
        if engine != Engine::Vllm || role == Role::Aggregated {
            return Ok(transport);
        }
        match transport {
            KvTransport::P2pNccl if self.kv_addr.is_none() => {
                Err(error("kv_addr", "is missing: transport p2p_nccl needs it in the request id".to_owned()))
            }
            KvTransport::Mooncake if role == Role::Prefill && self.bootstrap_port.is_none() => Err(error(
                "bootstrap_port",
                "is missing: transport mooncake reads the engine id there".to_owned(),
            )),
            _ => Ok(transport),
        }
    }

    /// Checks that the last rank has a port at each address.
    fn check_last_rank(&self, rank: u32) -> Result<(), SpecError> {
        for (key, endpoint) in [("kv_events", &self.kv_events), ("kv_replay", &self.kv_replay)] {
            if let Some(endpoint) = endpoint.as_ref().filter(|first| rank_endpoint(first, rank).is_none()) {
                let problem = format!("`{endpoint}`: the port of rank {rank} would be above 65535");
                return Err(error(key, problem));
            }
        }
        Ok(())
    }

    /// Validates the values and fills in the defaults.
    pub(super) fn resolve(mut self) -> Result<WorkerSpec, SpecError> {
        let missing = |key: &str| error(key, "is missing".to_owned());
        let required = |key: &str, value: Option<String>| value.ok_or_else(|| missing(key));
        let url = base_url(&required("url", self.url.clone())?)?;
        check_server_name(self.tls_server_name.as_deref(), &url)?;
        let api_key = self.api_key.as_deref().map(api_key).transpose()?;
        self.fill_addresses(&url)?;
        let engine: Engine = parse_name("engine", &required("engine", self.engine.clone())?)?;
        let role: Role = match &self.role {
            // SGLang reports it; the worker is not eligible before.
            None if engine == Engine::Sglang => Role::Aggregated,
            None => return Err(error("role", NO_ROLE.to_owned())),
            Some(role) => parse_name("role", role)?,
        };
        if engine == Engine::Openai && role != Role::Aggregated {
            return Err(error("role", format!("`{role}` is not supported by engine openai: use aggregated")));
        }
        let from_engine = self.left_to(engine);
        let dp_size = in_range("dp_size", self.dp_size, MAX_DP_SIZE)?.unwrap_or(1);
        self.check_last_rank(dp_size - 1)?;
        let block_size = in_range("block_size", self.block_size, MAX_BLOCK_SIZE)?;
        if self.max_concurrency == Some(0) {
            let problem = "`0` would refuse all requests: omit the key for no limit";
            return Err(error("max_concurrency", problem.to_owned()));
        }
        let kv_transfer =
            self.kv_transfer.as_deref().map(|rule| transfer_rule(rule, &self.topology)).transpose()?;
        let transport = self.checked_transport(engine, role)?;
        let bootstrap_port = self.bootstrap_port();
        let mut taints = self.taints;
        taints
            .extend(self.topology.iter().map(|(domain, value)| format!("{TOPOLOGY_TAINT}{domain}={value}")));
        Ok(WorkerSpec {
            id: self.id.map_or_else(|| WorkerId::of_url(&url), WorkerId),
            url: Arc::from(url),
            tls_server_name: self.tls_server_name.map(Arc::from),
            role,
            engine,
            models: self.models.iter().map(|name| ModelName::new(name)).collect(),
            dp_size,
            first_rank: 0,
            bootstrap: Bootstrap { host: self.bootstrap_host, port: bootstrap_port },
            transport,
            kv_compatibility: self.kv_compatibility.map(Arc::from),
            labels: self.labels,
            taints,
            topology: self.topology,
            kv_transfer,
            kv_addr: self.kv_addr,
            kv_events: self.kv_events,
            kv_replay: self.kv_replay,
            kv_events_offset: (!from_engine.contains(&FactName::FirstRank)).then_some(0),
            local_prefill: self.local_prefill.unwrap_or_else(|| transport.prefills_locally(engine, role)),
            prefill_cancellable: self.prefill_cancellable,
            handoff_lease_s: in_range("handoff_lease_s", self.handoff_lease_s, MAX_HANDOFF_LEASE_S)?,
            max_concurrency: self.max_concurrency,
            block_size,
            total_blocks: self.total_blocks,
            loras: self.loras,
            from_engine,
            api_key,
        })
    }

    /// Returns the facts that are not configured and that an engine of this kind may report.
    fn left_to(&self, engine: Engine) -> BTreeSet<FactName> {
        let sglang = engine == Engine::Sglang;
        let facts = [
            (FactName::Role, sglang && self.role.is_none()),
            (FactName::DpSize, (sglang || engine == Engine::Vllm) && self.dp_size.is_none()),
            (FactName::BootstrapPort, sglang && self.bootstrap_port.is_none()),
            (FactName::Transport, engine == Engine::Vllm && self.transport.is_none()),
            (FactName::KvCompatibility, engine == Engine::Vllm && self.kv_compatibility.is_none()),
            (FactName::FirstRank, engine == Engine::Vllm && self.has_engine_port),
            (FactName::LocalPrefill, self.local_prefill.is_none()),
            (FactName::KvEvents, sglang && self.kv_events.is_none() && self.kv_replay.is_none()),
        ];
        facts.into_iter().filter(|(_, left)| *left).map(|(fact, _)| fact).collect()
    }
}
