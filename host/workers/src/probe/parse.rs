//! Parses engines' responses to probes. No I/O.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Models that an engine lists, and their owner, which names the engine.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Models {
    pub(super) names: Vec<String>,
    pub(super) owner: Option<String>,
}

/// Load figures of an engine.
#[derive(Debug, PartialEq)]
pub(super) struct Figures {
    pub(super) running: u32,
    pub(super) waiting: u32,
    pub(super) kv_usage: f32,
}

#[derive(Deserialize)]
struct List {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    owned_by: Option<String>,
}

/// Parses the response of `/v1/models`.
pub(super) fn models(body: &[u8]) -> Result<Models, String> {
    let list: List = serde_json::from_slice(body).map_err(|error| format!("GET /v1/models: {error}"))?;
    let owner = list.data.first().and_then(|model| model.owned_by.clone());
    Ok(Models { names: list.data.into_iter().map(|model| model.id).collect(), owner })
}

/// Parses the engine ids by rank from Mooncake's bootstrap server: `{"0": "id"}` or `{"0": {"engine_id":
/// "id"}}`.
pub(super) fn engine_ids(body: &[u8]) -> Result<Vec<String>, String> {
    let ranks: BTreeMap<u32, EngineId> =
        serde_json::from_slice(body).map_err(|error| format!("GET /query: {error}"))?;
    let all = ranks.keys().copied().eq(0..u32::try_from(ranks.len()).unwrap_or(u32::MAX));
    if ranks.is_empty() || !all {
        return Err(format!(
            "GET /query: ranks {:?} are not consecutive from 0",
            ranks.keys().collect::<Vec<_>>()
        ));
    }
    Ok(ranks.into_values().map(|(EngineId::Plain(id) | EngineId::Entry { engine_id: id })| id).collect())
}

#[derive(Deserialize)]
#[serde(untagged)]
enum EngineId {
    Plain(String),
    Entry { engine_id: String },
}

/// Parses the number of KV blocks from the metric `vllm:cache_config_info{…num_gpu_blocks="…"}`.
pub(super) fn vllm_blocks(metrics: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(metrics).ok()?;
    let line = text.lines().find(|line| line.starts_with("vllm:cache_config_info{"))?;
    let (_, rest) = line.split_once("num_gpu_blocks=\"")?;
    rest.split('"').next()?.parse().ok().filter(|blocks| *blocks > 0)
}

/// Parses the load figures from vLLM's or SGLang's metrics. Of several series of one name (ranks), counts are
/// added and the highest usage is taken.
pub(super) fn load(metrics: &[u8]) -> Option<Figures> {
    let text = std::str::from_utf8(metrics).ok()?;
    let series = |names: [&str; 2]| -> Vec<f64> {
        let value = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            let bare = name.split('{').next()?;
            if names.contains(&bare) { value.parse::<f64>().ok() } else { None }
        };
        text.lines().filter(|line| !line.starts_with('#')).filter_map(value).collect()
    };
    let running = series(["vllm:num_requests_running", "sglang:num_running_reqs"]);
    let waiting = series(["vllm:num_requests_waiting", "sglang:num_queue_reqs"]);
    let usage = series(["vllm:kv_cache_usage_perc", "sglang:token_usage"]);
    if running.is_empty() {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a float cast saturates")]
    let total = |values: &[f64]| values.iter().sum::<f64>() as u32;
    #[expect(clippy::cast_possible_truncation, reason = "a share between 0 and 1")]
    let kv_usage = usage.iter().copied().fold(0.0, f64::max) as f32;
    Some(Figures { running: total(&running), waiting: total(&waiting), kv_usage })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_and_metrics_of_a_real_engine_are_parsed() {
        let models = models(include_bytes!("../../../../tests/fixtures/engines/models.json")).unwrap();
        assert_eq!(models, Models { names: vec!["tiny".into()], owner: Some("vllm".into()) });
        let metrics = include_bytes!("../../../../tests/fixtures/engines/metrics.txt");
        assert_eq!(vllm_blocks(metrics), Some(32_768));
        assert_eq!(load(metrics), Some(Figures { running: 0, waiting: 0, kv_usage: 0.0 }));
    }

    #[test]
    fn mooncake_engine_ids_are_parsed_in_both_forms_and_gaps_are_errors() {
        assert_eq!(engine_ids(br#"{"1":"b","0":"a"}"#), Ok(vec!["a".to_owned(), "b".to_owned()]));
        let entry = br#"{"0":{"engine_id":"a","worker_addr":{}}}"#;
        assert_eq!(engine_ids(entry), Ok(vec!["a".to_owned()]));
        assert!(engine_ids(br#"{"1":"b"}"#).is_err() && engine_ids(b"{}").is_err());
    }

    #[test]
    fn counts_of_ranks_add_up_and_the_highest_usage_counts() {
        let text = b"sglang:num_running_reqs{rank=\"0\"} 3.0\nsglang:num_running_reqs{rank=\"1\"} 4.0\nsglang:num_queue_reqs 2\nsglang:token_usage{rank=\"0\"} 0.25\nsglang:token_usage{rank=\"1\"} 0.5\n";
        assert_eq!(load(text), Some(Figures { running: 7, waiting: 2, kv_usage: 0.5 }));
        assert_eq!(load(b"# nothing\nother 1\n"), None);
        assert_eq!(vllm_blocks(b"vllm:cache_config_info{num_gpu_blocks=\"None\"} 1.0"), None);
    }
}
