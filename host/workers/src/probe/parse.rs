//! Parses engines' responses to probes about facts. No I/O.

use std::collections::{BTreeMap, BTreeSet};

use prefix_index::events::MAX_BLOCK_SIZE;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::exposition::samples;
use crate::{
    facts::{EngineFacts, MAX_DP_SIZE},
    id::Role,
};

mod prefix_cache;

use prefix_cache::PrefixCaches;

/// Parses Mooncake's bootstrap server, `{"0": "id"}` or `{"0": {"engine_id": "id"}}`, and returns the engine
/// id of each of the `dp_size` ranks. With ranks on several nodes the server names them by the numbers of all
/// nodes, of which this engine has those from `first_rank` on.
pub(super) fn engine_ids(body: &[u8], dp_size: u32, first_rank: Option<u32>) -> Result<Vec<String>, String> {
    let ids: BTreeMap<u32, EngineId> =
        serde_json::from_slice(body).map_err(|error| format!("GET /query: {error}"))?;
    let smallest = ids.keys().next().copied().unwrap_or(0);
    let has_more = u32::try_from(ids.len()).is_ok_and(|size| size > dp_size);
    let is_global = smallest > 0 || has_more;
    let first = if is_global { first_rank.unwrap_or(smallest) } else { 0 };
    let of = |rank| match ids.get(&rank) {
        Some(EngineId::Plain(id) | EngineId::Entry { engine_id: id }) => Ok(id.clone()),
        None => Err(format!(
            "GET /query: rank {rank} has no engine id, only {:?}; check bootstrap_host and bootstrap_port",
            ids.keys()
        )),
    };
    (first..first.saturating_add(dp_size)).map(of).collect()
}

#[derive(Deserialize)]
#[serde(untagged)]
enum EngineId {
    Plain(String),
    Entry { engine_id: String },
}

/// Reads the KV cache's block size, its number of blocks and whether prefixes are cached from the metric
/// `vllm:cache_config_info`, counts the data-parallel ranks by their label, and recognises the connector by
/// its metrics. The Rust frontend has the metrics of all connectors: then the connector is not known.
pub(super) fn vllm_facts(metrics: &[u8]) -> EngineFacts {
    let (mut facts, mut ranks, mut connectors) = (EngineFacts::default(), BTreeSet::new(), BTreeSet::new());
    let mut prefix_caches = PrefixCaches::default();
    for sample in samples(metrics) {
        let name = sample.name.strip_prefix("ray_").unwrap_or(sample.name);
        let of_vllm = name.strip_prefix("vllm").and_then(|rest| rest.strip_prefix([':', '_']));
        prefix_caches.note(of_vllm.unwrap_or(name), &sample);
        let Some(name) = of_vllm else { continue };
        // With ranks on several nodes, one server may list 8 to 15.
        if matches!(name, "cache_config_info" | "num_requests_running") {
            ranks.extend(sample.label("engine").filter(|label| !label.is_empty()));
        }
        if name == "cache_config_info" {
            let number = |label| sample.label(label)?.parse().ok().filter(|value| *value > 0);
            let block_size = number("block_size").filter(|size| *size <= MAX_BLOCK_SIZE);
            facts.block_size = facts.block_size.or(block_size);
            facts.total_blocks = facts.total_blocks.or_else(|| number("num_gpu_blocks"));
        }
        let connector = CONNECTORS.iter().find(|(prefix, _)| name.starts_with(prefix));
        connectors.extend(connector.and_then(|(_, connector)| *connector));
    }
    let first_rank = ranks.iter().filter_map(|label| label.parse().ok()).min();
    let first_rank = first_rank.filter(|first| *first < MAX_DP_SIZE);
    let dp_size = u32::try_from(ranks.len()).ok().filter(|ranks| (1..=MAX_DP_SIZE).contains(ranks));
    let only = connectors.pop_first().filter(|_| connectors.is_empty());
    let prefix_cache = prefix_caches.known();
    EngineFacts { dp_size, first_rank, connector: only.map(str::to_owned), prefix_cache, ..facts }
}

/// Prefix of a connector's metrics, and the connector. Mooncake's store only shares a cache: it says nothing
/// about the connector of handoffs.
const CONNECTORS: [(&str, Option<&str>); 3] =
    [("nixl_", Some("NixlConnector")), ("mooncake_store_", None), ("mooncake_", Some("MooncakeConnector"))];

/// Parses vLLM's `/server_info?config_format=json`: the KV connector and its role.
pub(super) fn vllm_config(body: &[u8]) -> EngineFacts {
    #[derive(Deserialize)]
    struct Info {
        vllm_config: Config,
    }
    #[derive(Deserialize)]
    struct Config {
        /// `None`: the Rust frontend leaves it out, whatever it is.
        #[serde(default, deserialize_with = "given")]
        kv_transfer_config: Option<Option<Transfer>>,
    }
    #[derive(Deserialize)]
    struct Transfer {
        kv_connector: Option<String>,
        kv_role: Option<String>,
    }
    let Ok(Info { vllm_config }) = serde_json::from_slice(body) else { return EngineFacts::default() };
    let none = || Some("none".to_owned());
    let Some(transfer) = vllm_config.kv_transfer_config else { return EngineFacts::default() };
    let Some(transfer) = transfer else {
        return EngineFacts { connector: none(), ..EngineFacts::default() };
    };
    let role = match transfer.kv_role.as_deref() {
        Some("kv_producer") => Some(Role::Prefill),
        Some("kv_consumer") => Some(Role::Decode),
        _ => None,
    };
    let connector = transfer.kv_connector.as_deref().map(short).or_else(none);
    EngineFacts { connector, role, ..EngineFacts::default() }
}

/// Reads a value that is there, null included.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Parses vLLM's `/version`.
pub(super) fn vllm_version(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Version {
        version: String,
    }
    let Version { version } = serde_json::from_slice(body).ok()?;
    Some(short(&version)).filter(|version| !version.is_empty())
}

/// Returns whether vLLM says that a state holds: `is_sleeping` or `is_paused`.
pub(super) fn holds(state: &str, body: &[u8]) -> bool {
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    answer.get(state) == Some(&Value::Bool(true))
}

/// Cuts a name that an engine reports.
fn short(name: &str) -> String {
    /// Characters that are kept.
    const MOST: usize = 64;
    name.chars().take(MOST).collect()
}

#[derive(Deserialize)]
struct ServerInfo {
    disaggregation_mode: Option<Value>,
    disaggregation_bootstrap_port: Option<Value>,
    dp_size: Option<Value>,
    page_size: Option<Value>,
    max_total_num_tokens: Option<Value>,
    max_total_tokens: Option<Value>,
    max_running_requests: Option<Value>,
    version: Option<Value>,
    enable_pd_role_switch: Option<Value>,
    kv_events: Option<Value>,
    disable_radix_cache: Option<Value>,
    #[serde(default, deserialize_with = "states")]
    internal_states: Vec<Value>,
}

/// Reads a list; any other value counts as an empty list.
fn states<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Value>, D::Error> {
    Ok(match Value::deserialize(deserializer)? {
        Value::Array(list) => list,
        _ => Vec::new(),
    })
}

/// Parses SGLang's `/server_info`: start arguments and state, with nulls and, in some versions, without some
/// of them.
pub(super) fn sglang_facts(body: &[u8]) -> Result<EngineFacts, String> {
    let info: ServerInfo = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let number = |value: &Option<Value>| {
        let number = value.as_ref()?.as_u64()?;
        u32::try_from(number).ok().filter(|number| *number > 0)
    };
    let role = sglang_role(info.disaggregation_mode.as_ref());
    let switches_role = info.enable_pd_role_switch == Some(Value::Bool(true));
    let port = number(&info.disaggregation_bootstrap_port).and_then(|port| u16::try_from(port).ok());
    // An engine that publishes events over a transport that cannot be followed is not described.
    let events = info.kv_events.filter(|events| events.get("publisher").is_some_and(|name| name == "zmq"));
    let event = |key: &str| events.as_ref()?.get(key).cloned();
    let event_port = |key: &str| number(&event(key)).and_then(|port| u16::try_from(port).ok());
    // The events' blocks may be larger than a page: several engines of one rank share it.
    let size = number(&event("block_size")).or_else(|| number(&info.page_size));
    let block_size = size.filter(|size| *size <= MAX_BLOCK_SIZE);
    // Versions that do not report the capacity report the argument that limits it.
    let tokens = number(&info.max_total_num_tokens).or_else(|| number(&info.max_total_tokens));
    let effective =
        info.internal_states.first().map(|state| state["effective_max_running_requests_per_dp"].clone());
    Ok(EngineFacts {
        role,
        dp_size: number(&info.dp_size).filter(|size| *size <= MAX_DP_SIZE),
        first_rank: None,
        takes_global_ranks: false,
        // Each engine that may switch its role has a bootstrap server.
        bootstrap_port: port.filter(|_| role == Some(Role::Prefill) || switches_role),
        connector: None,
        version: info.version.as_ref().and_then(Value::as_str).map(short),
        block_size,
        total_blocks: tokens.zip(block_size).map(|(tokens, size)| tokens / size).filter(|blocks| *blocks > 0),
        max_running_requests: number(&effective).or_else(|| number(&info.max_running_requests)),
        kv_events_port: event_port("endpoint_port_base"),
        kv_replay_port: event_port("replay_endpoint_port_base"),
        switches_role,
        prefix_cache: info.disable_radix_cache.as_ref().and_then(Value::as_bool).map(|disabled| !disabled),
    })
}

/// Parses SGLang's `/model_info`: the role of the moment. `/server_info` keeps the one that the engine
/// started with.
pub(super) fn sglang_role_now(body: &[u8]) -> Option<Role> {
    let info: Value = serde_json::from_slice(body).ok()?;
    sglang_role(info.get("disaggregation_mode"))
}

fn sglang_role(mode: Option<&Value>) -> Option<Role> {
    match mode?.as_str()? {
        "prefill" => Some(Role::Prefill),
        "decode" => Some(Role::Decode),
        "null" => Some(Role::Aggregated),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_a_real_engine_are_parsed() {
        let metrics = include_bytes!("../../../../tests/fixtures/engines/metrics.txt");
        let facts = vllm_facts(metrics);
        assert_eq!((facts.block_size, facts.total_blocks, facts.connector), (Some(32), Some(32_768), None));
    }

    #[test]
    fn facts_of_a_real_sglang_are_parsed() {
        let plain = sglang_facts(include_bytes!(
            "../../../../tests/fixtures/engines/sglang-0.5.23/plain-server-info.json"
        ))
        .unwrap();
        let expected = EngineFacts {
            role: Some(Role::Aggregated),
            dp_size: Some(1),
            version: Some("0.5.23".into()),
            block_size: Some(1),
            total_blocks: Some(16_384),
            max_running_requests: Some(16),
            kv_events_port: Some(43_191),
            kv_replay_port: Some(41_555),
            prefix_cache: Some(true),
            ..EngineFacts::default()
        };
        assert_eq!(plain, expected);
        let prefill = sglang_facts(include_bytes!(
            "../../../../tests/fixtures/engines/sglang-0.5.23/prefill-server-info.json"
        ))
        .unwrap();
        let expected = EngineFacts {
            role: Some(Role::Prefill),
            bootstrap_port: Some(37_093),
            kv_events_port: None,
            kv_replay_port: None,
            ..expected
        };
        assert_eq!(prefill, expected);
        let now = include_bytes!("../../../../tests/fixtures/engines/sglang-0.5.23/prefill-model-info.json");
        assert_eq!(sglang_role_now(now), Some(Role::Prefill));
    }

    #[test]
    fn facts_of_a_real_decode_engine_of_vllm_with_nixl_are_parsed() {
        let facts =
            vllm_facts(include_bytes!("../../../../tests/fixtures/engines/vllm-0.33/decode-metrics.txt"));
        assert_eq!(facts.connector.as_deref(), Some("NixlConnector"));
        assert_eq!((facts.block_size, facts.total_blocks), (Some(32), Some(512)));
    }

    #[test]
    fn b5_mooncake_engine_ids_are_those_of_the_engine_s_own_ranks() {
        let ids = |body: &str, dp_size, first| engine_ids(body.as_bytes(), dp_size, first).ok();
        let some = |ids: &[&str]| Some(ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>());
        assert_eq!(ids(r#"{"1":"b","0":"a"}"#, 2, None), some(&["a", "b"]));
        assert_eq!(ids(r#"{"0":{"engine_id":"a","worker_addr":{}}}"#, 1, Some(0)), some(&["a"]));
        // B5.21
        assert_eq!(ids(r#"{"1":"b"}"#, 1, Some(1)), some(&["b"]));
        assert_eq!(ids(r#"{"2":"c","3":"d"}"#, 2, Some(2)), some(&["c", "d"]));
        assert_eq!(ids(r#"{"2":"c","3":"d"}"#, 2, None), some(&["c", "d"]), "the engine has no metrics");
        let all = r#"{"0":"a","1":"b","2":"c","3":"d"}"#;
        assert_eq!(ids(all, 1, Some(1)), some(&["b"]));
        assert_eq!(ids(all, 2, Some(2)), some(&["c", "d"]));
        assert_eq!(ids(all, 1, Some(0)), some(&["a"]), "the engine itself chooses the rank");
        for (lacking, dp_size, first) in [
            ("{}", 1, None),
            (r#"{"0":"a"}"#, 2, None),
            (r#"{"0":"a","2":"c"}"#, 2, None),
            (r#"{"3":"d"}"#, 1, Some(1)),
        ] {
            assert_eq!(ids(lacking, dp_size, first), None, "{lacking}");
        }
    }

    #[test]
    fn b5_facts_of_vllm_are_parsed_and_what_it_leaves_open_is_unknown() {
        let open = b"vllm:cache_config_info{mamba_block_size=\"9\",num_gpu_blocks=\"None\"} 1.0";
        assert_eq!(vllm_facts(open), EngineFacts::default());
        let nixl = vllm_facts(b"vllm:nixl_num_failed_transfers_total{engine=\"0\"} 0.0\n");
        assert_eq!(nixl.connector.as_deref(), Some("NixlConnector"));
        let mooncake =
            vllm_facts(b"vllm:mooncake_store_operation_total 1\nvllm:mooncake_num_failed_recvs_total 0.0\n");
        assert_eq!(mooncake.connector.as_deref(), Some("MooncakeConnector"));
        assert_eq!(vllm_facts(b"vllm:mooncake_store_operation_total 1\n").connector, None);
        let stamped =
            vllm_facts(b"vllm:cache_config_info{ block_size = \"16\", num_gpu_blocks=\"9\"} 1 1700000000000");
        assert_eq!((stamped.block_size, stamped.total_blocks), (Some(16), Some(9)));
        let config =
            |text: &str| vllm_config(format!(r#"{{"vllm_config":{text},"vllm_env":{{}}}}"#).as_bytes());
        let p2p =
            config(r#"{"kv_transfer_config":{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer"}}"#);
        assert_eq!((p2p.connector.as_deref(), p2p.role), (Some("P2pNcclConnector"), Some(Role::Prefill)));
        assert_eq!(config(r#"{"kv_transfer_config":null}"#).connector.as_deref(), Some("none"));
        assert_eq!(config(r#""as text""#), EngineFacts::default());
    }

    #[test]
    fn b5_facts_of_a_real_rust_frontend_of_vllm_leave_the_connector_open() {
        let metrics =
            include_bytes!("../../../../tests/fixtures/engines/vllm-0.33/rust-frontend-metrics.txt");
        let facts = vllm_facts(metrics);
        // B5.19
        assert_eq!((facts.connector, facts.dp_size, facts.first_rank), (None, Some(1), Some(0)));
        let info = r#"{"vllm_config":{"coordinator_mode":"None","model":"tiny","tokenizer":null}}"#;
        assert_eq!(vllm_config(info.as_bytes()), EngineFacts::default());
    }

    #[test]
    fn b5_the_first_rank_of_vllm_is_its_smallest_label() {
        let labels = |labels: &[&str]| {
            let line = |label| format!("vllm:num_requests_running{{engine=\"{label}\"}} 0\n");
            vllm_facts(labels.iter().map(line).collect::<String>().as_bytes())
        };
        let facts = labels(&["11", "9", "10"]);
        // B5.20
        assert_eq!((facts.dp_size, facts.first_rank), (Some(3), Some(9)));
        assert_eq!(labels(&["4000000000"]).first_rank, None, "no engine has so many ranks");
    }

    #[test]
    fn b5_facts_of_sglang_are_parsed_with_nulls_and_in_old_versions() {
        let body = br#"{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":8998,"dp_size":2,
            "page_size":64,"max_total_num_tokens":6400,"max_running_requests":null,"max_total_tokens":null,
            "internal_states":[{"effective_max_running_requests_per_dp":48}],"version":"0.5.9"}"#;
        let facts = sglang_facts(body).unwrap();
        let want = EngineFacts {
            role: Some(Role::Prefill),
            dp_size: Some(2),
            bootstrap_port: Some(8998),
            connector: None,
            version: Some("0.5.9".to_owned()),
            block_size: Some(64),
            total_blocks: Some(100),
            max_running_requests: Some(48),
            ..EngineFacts::default()
        };
        assert_eq!(facts, want);
        let plain =
            sglang_facts(br#"{"disaggregation_mode":"null","disaggregation_bootstrap_port":8998}"#).unwrap();
        assert_eq!((plain.role, plain.bootstrap_port), (Some(Role::Aggregated), None));
        assert_eq!(
            sglang_facts(br#"{"tp_size":1,"dp_size":"x","internal_states":7}"#),
            Ok(EngineFacts::default())
        );
        assert!(sglang_facts(b"<html>").is_err());
        let events = br#"{"page_size":16,"enable_pd_role_switch":true,"disaggregation_mode":"decode",
            "disaggregation_bootstrap_port":8998,"kv_events":{"publisher":"zmq","endpoint_host":"*",
            "endpoint_port_base":5557,"replay_endpoint_port_base":5560,"topic":"","block_size":32,"dp_size":1}}"#;
        let facts = sglang_facts(events).unwrap();
        // B5.12
        assert_eq!((facts.kv_events_port, facts.kv_replay_port), (Some(5557), Some(5560)));
        assert_eq!(facts.block_size, Some(32), "prompts are hashed in the events' blocks");
        // B5.13
        assert!(facts.switches_role && facts.bootstrap_port == Some(8998));
        for none in ["null", "7", r#"{"publisher":"null","endpoint_port_base":1}"#, r#"{"publisher":"zmq"}"#]
        {
            let facts = sglang_facts(format!(r#"{{"kv_events":{none}}}"#).as_bytes()).unwrap();
            assert_eq!(facts, EngineFacts::default(), "{none}");
        }
        let wild = br#"{"kv_events":{"publisher":"zmq","endpoint_port_base":70000}}"#;
        assert_eq!(sglang_facts(wild), Ok(EngineFacts::default()), "not a port");
        assert_eq!(sglang_role_now(br#"{"disaggregation_mode":"decode"}"#), Some(Role::Decode));
        assert_eq!(sglang_role_now(br#"{"model_path":"m"}"#), None, "an older version");
        let huge = br#"{"dp_size":4000000000,"page_size":4000000000}"#;
        assert_eq!(sglang_facts(huge), Ok(EngineFacts::default()), "no engine has so many ranks");
    }
}
