//! The objects within `nvext` that Dynamo's frontends know, and which of its keys have no effect here.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderValue};
use json_splice::JsonBody;
use serde::Deserialize;

use super::{
    QUERY_ONLY,
    headers::{PRIORITY, VLLM_PRIORITY},
};
use crate::openai::{request_error::RequestError, short_text::shortened};

/// Keys of `nvext` that are read.
const KNOWN: [&str; 26] = [
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
    "expected_output_tokens",
    "lora_name",
    "priority",
    "priority_jump",
    "allowed_worker_ids",
    "required_taints",
    "preferred_taints",
    "session_id",
    "ttft_target",
    "itl_target",
    "router_config_override",
    "token_data",
    "annotations",
    "session_control",
    "mm_routing_info",
    "agent_hints",
    "agent_context",
    "routing_constraints",
    "router",
    "request_timestamp_ms",
    "mdc_sum",
];
/// Keys of the objects within `nvext` that are read.
const INNER: [(&str, &[&str]); 6] = [
    ("agent_hints", &["priority", "strict_priority", "osl", "latency_sensitivity"]),
    ("agent_context", &["session_id", "parent_session_id", "session_final"]),
    ("routing_constraints", &["required_taints", "preferred_taints"]),
    ("router", &["ttft_target", "itl_target"]),
    ("session_control", &["session_id", "action", "timeout"]),
    ("mm_routing_info", &["routing_token_ids", "block_mm_infos"]),
];
/// Maximum number of keys that a warning names.
const MAX_NAMED: usize = 8;
/// Maximum length of a key in a warning, characters.
const MAX_KEY: usize = 64;

/// `nvext.agent_hints`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct AgentHints {
    /// Higher goes first. Dynamo's router takes it as seconds by which the request jumps the queue.
    pub(super) priority: Option<i32>,
    /// Tier in the queue.
    pub(super) strict_priority: Option<u32>,
    /// Expected output tokens.
    pub(super) osl: Option<u32>,
    /// The former name of `priority`.
    pub(super) latency_sensitivity: Option<f64>,
}

impl AgentHints {
    /// Seconds by which the request jumps the queue.
    #[expect(clippy::cast_possible_truncation, reason = "the number is finite")]
    pub(super) fn jump(&self) -> Option<f32> {
        let jump = self.priority.map(f64::from).or(self.latency_sensitivity)?;
        Some(jump.max(0.0) as f32)
    }

    /// Tier in the queue.
    #[expect(clippy::cast_precision_loss, reason = "tiers are small numbers")]
    pub(super) fn tier(&self) -> Option<f32> {
        self.strict_priority.map(|tier| tier as f32)
    }
}

/// `nvext.routing_constraints`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Constraints {
    pub(super) required_taints: Vec<String>,
    pub(super) preferred_taints: BTreeMap<String, f32>,
}

/// `nvext.router`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RouterParams {
    pub(super) ttft_target: Option<f64>,
    pub(super) itl_target: Option<f64>,
}

/// `nvext.agent_context`: what the request is a part of. It goes to the access log, and policies see hashes
/// of it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(crate) struct AgentContext {
    /// The agent's session.
    pub session_id: Option<String>,
    /// The session that began it.
    pub parent_session_id: Option<String>,
    /// Whether the session ends with this request.
    pub session_final: Option<bool>,
}

/// Routing tokens of a multimodal prompt: what routing hashes in place of the token ids (A4).
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Multimodal {
    pub(super) routing_token_ids: Vec<u32>,
    pub(super) block_mm_infos: Vec<Option<BlockObjects>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct BlockObjects {
    pub(super) mm_objects: Vec<Object>,
}

#[derive(Deserialize)]
pub(super) struct Object {
    pub(super) mm_hash: u64,
}

/// Refuses a list in the place of an object: it would be read as the object's values in their order.
///
/// # Errors
/// [`RequestError`] names the field.
pub(super) fn check_objects(body: &JsonBody) -> Result<(), RequestError> {
    let check = |body: &JsonBody, key: &str, path: &str| {
        let is_list = body.get(key).is_some_and(|value| value.starts_with('['));
        let refused = || RequestError::new(path, "a list is in the place of an object; send `{…}`");
        if is_list { Err(refused()) } else { Ok(()) }
    };
    check(body, "nvext", "nvext")?;
    let Some(Ok(ext)) = body.object("nvext") else { return Ok(()) };
    let objects = INNER.iter().map(|(name, _)| *name).chain(["router_config_override"]);
    objects.into_iter().try_for_each(|name| check(&ext, name, &format!("nvext.{name}")))
}

const OF_HEADER: &str = "x-vllm-priority is ignored: send `priority` in the body";
const OF_RANK: &str =
    "a rank without a worker is ignored: send x-worker-instance-id or x-prefill-instance-id with it";

/// Returns the warning about keys and annotations of `nvext`, headers, and a rank without a worker, that lack
/// their effect, for a header; `None`: none does.
pub(super) fn warning(
    headers: &HeaderMap,
    body: &JsonBody,
    annotations: &[String],
    lone_rank: bool,
) -> Option<HeaderValue> {
    let mut parts = of_nvext(body, annotations).unwrap_or_default();
    parts.extend(lone_rank.then(|| OF_RANK.to_owned()));
    parts.extend(of_priority(headers, body));
    let [of_vllm] = &VLLM_PRIORITY;
    parts.extend(headers.contains_key(of_vllm).then(|| OF_HEADER.to_owned()));
    if parts.is_empty() { None } else { HeaderValue::try_from(parts.join("; ")).ok() }
}

fn of_nvext(body: &JsonBody, annotations: &[String]) -> Option<Vec<String>> {
    let ext = body.object("nvext")?.ok()?;
    let unknown = annotations.iter().filter(|annotation| !annotation.starts_with(QUERY_ONLY));
    let mut ignored: Vec<String> =
        unknown.map(|annotation| format!("nvext.annotations.{}", key_for_header(annotation))).collect();
    let mut look = |prefix: &str, object: &JsonBody, known: &[&str]| {
        let unknown = object.keys().filter(|key| !known.contains(key));
        ignored.extend(unknown.map(|key| format!("{prefix}.{}", key_for_header(key))));
    };
    look("nvext", &ext, &KNOWN);
    for (name, known) in INNER {
        if let Some(Ok(inner)) = ext.object(name) {
            look(&format!("nvext.{name}"), &inner, known);
        }
    }
    let more = ignored.len().saturating_sub(MAX_NAMED);
    ignored.truncate(MAX_NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let ignored = (!ignored.is_empty())
        .then(|| format!("ignored, not known or not supported: {}{more}", ignored.join(", ")));
    Some(ignored.into_iter().collect())
}

/// Returns the warning that these priorities order only the queue.
fn of_priority(headers: &HeaderMap, body: &JsonBody) -> Option<String> {
    let is_sent = |object: &JsonBody| object.get("priority").is_some_and(|priority| priority != "null");
    let ext = body.object("nvext").and_then(Result::ok);
    let inner = ext.as_ref().and_then(|ext| ext.object("agent_hints")).and_then(Result::ok);
    let [header] = &PRIORITY;
    let sent = [
        ext.as_ref().is_some_and(is_sent).then_some("nvext.priority"),
        inner.as_ref().is_some_and(is_sent).then_some("nvext.agent_hints.priority"),
        headers.contains_key(header).then_some(header.as_str()),
    ];
    let sent: Vec<&str> = sent.into_iter().flatten().collect();
    let (names, verb) = (sent.join(" and "), if sent.len() == 1 { "orders" } else { "order" });
    let text =
        || format!("{names} {verb} the gateway's queue only: send `priority` for the engine's scheduler");
    (!sent.is_empty()).then(text)
}

/// A key as a header may have it.
fn key_for_header(key: &str) -> String {
    let text: String = key.chars().take(MAX_KEY).collect();
    shortened(&text.escape_default().to_string())
}
