//! Routing hints of a request [A2, A3]: from headers and from the body's `nvext` object; a header wins.

use std::time::Duration;

use http::HeaderMap;
use pointsman_routing::RouterConfigOverride;
use pointsman_workers::{DpRank, Leg, WorkerId};
use serde::Deserialize;

use crate::{
    openai::json::JsonBody,
    openai::request_error::{RequestError, read},
};

/// Whether a listener takes hints from its clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum HintTrust {
    /// Takes them.
    #[default]
    Trusted,
    /// Ignores them, unread.
    Ignored,
}

/// The prefill rank that means "unset".
const UNSET_RANK: u32 = u32::MAX;

/// Routing hints of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Hints {
    /// Worker of any leg that has no pin of its own.
    pub backend: Option<WorkerId>,
    /// Worker of the prefill leg.
    pub prefill: Option<WorkerId>,
    /// Worker of the decode leg.
    pub decode: Option<WorkerId>,
    /// Data-parallel rank.
    pub dp_rank: Option<DpRank>,
    /// Rank of the prefill leg.
    pub prefill_dp_rank: Option<DpRank>,
    /// Expected output tokens.
    pub expected_output_tokens: Option<u32>,
    /// LoRA adapter.
    pub lora: Option<String>,
    /// Strict priority, higher first.
    pub priority: f32,
    /// Seconds by which it jumps the queue.
    pub priority_jump: f32,
    /// Workers it may run on; empty is any.
    pub allowed_workers: Vec<WorkerId>,
    /// Taints a worker must have.
    pub required_taints: Vec<String>,
    /// Taints with the weight of the preference.
    pub preferred_taints: Vec<(String, f32)>,
    /// Session id.
    pub session: Option<String>,
    /// Target time to first token, milliseconds.
    pub ttft_target_ms: Option<f64>,
    /// Target inter-token latency, milliseconds.
    pub itl_target_ms: Option<f64>,
    /// The client's override of the router config.
    pub config: RouterConfigOverride,
    /// Token ids of the prompt.
    pub token_ids: Option<Vec<u32>>,
    /// Salt of the prefix cache.
    pub cache_salt: Option<String>,
    /// Multimodal object hashes, a list a block (H1).
    pub block_objects: Vec<Vec<u64>>,
    /// Session control.
    pub session_control: Option<SessionControl>,
    /// Whether the request is a preview: the client asks where it would run (F2).
    pub query_only: bool,
    /// A probe of one worker [A1]: runs there alone, whatever its role.
    pub probe: bool,
}

/// What a request does with its session (A2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionControl {
    /// Ends the session's bindings after this request.
    pub close: bool,
    /// How long a binding lasts.
    pub timeout: Duration,
}

/// Prefix of the annotation that makes a request a preview (F2).
const QUERY_ONLY: &str = "query_instance_id:";

#[derive(Default, Deserialize)]
#[serde(default)]
struct NvExt {
    backend_instance_id: Option<u64>,
    prefill_worker_id: Option<u64>,
    decode_worker_id: Option<u64>,
    dp_rank: Option<u32>,
    prefill_dp_rank: Option<u32>,
    expected_output_tokens: Option<u32>,
    lora_name: Option<String>,
    priority: Option<f32>,
    priority_jump: Option<f32>,
    allowed_worker_ids: Vec<u64>,
    required_taints: Vec<String>,
    preferred_taints: std::collections::BTreeMap<String, f32>,
    session_id: Option<String>,
    ttft_target: Option<f64>,
    itl_target: Option<f64>,
    router_config_override: Option<RouterConfigOverride>,
    token_data: Option<Vec<u32>>,
    annotations: Vec<String>,
    session_control: Option<SessionObject>,
    mm_routing_info: Option<Multimodal>,
}

#[derive(Deserialize)]
struct SessionObject {
    session_id: String,
    action: Option<SessionAction>,
    /// Seconds.
    timeout: Option<u32>,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum SessionAction {
    Open,
    Bind,
    Close,
}

/// Routing tokens of a multimodal prompt: what routing hashes in place of the token ids (A4).
#[derive(Default, Deserialize)]
#[serde(default)]
struct Multimodal {
    routing_token_ids: Vec<u32>,
    block_mm_infos: Vec<Option<BlockObjects>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct BlockObjects {
    mm_objects: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    mm_hash: u64,
}

impl Hints {
    /// Reads hints.
    ///
    /// # Errors
    /// [`RequestError`] names the header or field that does not parse.
    pub(crate) fn parse(
        headers: &HeaderMap,
        body: &JsonBody,
        trust: HintTrust,
    ) -> Result<Self, RequestError> {
        if trust == HintTrust::Ignored {
            return Ok(Self::default());
        }
        let ext: NvExt = read(body, "nvext")?.unwrap_or_default();
        let instance: Option<u64> =
            header(headers, &["x-worker-instance-id", "x-dynamo-worker-instance-id"])?;
        let prefill: Option<u64> =
            header(headers, &["x-prefill-instance-id", "x-dynamo-prefill-instance-id"])?;
        let rank: Option<u32> = header(headers, &["x-dp-rank", "x-dynamo-dp-rank", "x-data-parallel-rank"])?;
        let prefill_rank: Option<u32> = header(headers, &["x-prefill-dp-rank", "x-dynamo-prefill-dp-rank"])?;
        let session: Option<String> = header(headers, &["x-session-id", "x-dynamo-session-id"])?;
        let config = ext.router_config_override.unwrap_or_default();
        let control = ext.session_control.as_ref().map(|control| SessionControl {
            close: control.action == Some(SessionAction::Close),
            timeout: Duration::from_secs(control.timeout.unwrap_or(300).into()),
        });
        let controlled = ext.session_control.map(|control| control.session_id);
        let multimodal = ext.mm_routing_info.unwrap_or_default();
        let routing_tokens = Some(multimodal.routing_token_ids).filter(|ids| !ids.is_empty());
        let blocks = multimodal.block_mm_infos.into_iter().map(Option::unwrap_or_default);
        let hashes =
            |block: BlockObjects| block.mm_objects.into_iter().map(|object| object.mm_hash).collect();
        config.check().map_err(|problem| RequestError::new("nvext.router_config_override", &problem))?;
        Ok(Self {
            backend: instance.or(ext.backend_instance_id).map(WorkerId),
            prefill: prefill.or(ext.prefill_worker_id).map(WorkerId),
            decode: instance.or(ext.decode_worker_id).map(WorkerId),
            dp_rank: rank.or(ext.dp_rank).map(DpRank),
            prefill_dp_rank: prefill_rank
                .or(ext.prefill_dp_rank)
                .filter(|rank| *rank != UNSET_RANK)
                .map(DpRank),
            expected_output_tokens: ext.expected_output_tokens,
            lora: ext.lora_name,
            priority: ext.priority.unwrap_or(0.0),
            priority_jump: ext.priority_jump.unwrap_or(0.0),
            allowed_workers: ext.allowed_worker_ids.into_iter().map(WorkerId).collect(),
            required_taints: ext.required_taints,
            preferred_taints: ext.preferred_taints.into_iter().collect(),
            session: session.or(controlled).or(ext.session_id),
            ttft_target_ms: ext.ttft_target,
            itl_target_ms: ext.itl_target,
            config,
            token_ids: routing_tokens.or(ext.token_data),
            cache_salt: read(body, "cache_salt")?,
            block_objects: blocks.map(hashes).collect(),
            session_control: control,
            query_only: ext.annotations.iter().any(|annotation| annotation.starts_with(QUERY_ONLY)),
            probe: read(body, "_HEALTH_CHECK")?.unwrap_or(false),
        })
    }

    /// The worker and rank a leg is pinned to (F3).
    #[must_use]
    pub(crate) fn pinned(&self, leg: Leg) -> Option<(WorkerId, Option<DpRank>)> {
        match leg {
            Leg::Prefill => {
                self.prefill.or(self.backend).map(|id| (id, self.prefill_dp_rank.or(self.dp_rank)))
            }
            Leg::Decode => self.decode.or(self.backend).map(|id| (id, self.dp_rank)),
            Leg::Aggregated => self.backend.map(|id| (id, self.dp_rank)),
        }
    }
}

/// The first of several names that is there.
fn header<T: std::str::FromStr>(headers: &HeaderMap, names: &[&str]) -> Result<Option<T>, RequestError> {
    let Some((name, value)) = names.iter().find_map(|name| headers.get(*name).map(|value| (*name, value)))
    else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(value.as_bytes());
    let parsed = text.trim().parse().ok().map(Some);
    parsed.ok_or_else(|| RequestError::new(name, &format!("`{text}` does not parse")))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn hints(headers: &[(&'static str, &str)], nvext: &str, trust: HintTrust) -> Result<Hints, RequestError> {
        let body = JsonBody::parse(Bytes::from(format!(r#"{{"nvext":{nvext}}}"#))).unwrap();
        let headers =
            headers.iter().map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()));
        Hints::parse(&headers.collect(), &body, trust)
    }

    #[test]
    fn a3_a_header_beats_the_body_and_the_worker_header_sets_backend_and_decode() {
        let hints = hints(
            &[("x-worker-instance-id", "7"), ("x-dynamo-prefill-instance-id", "8"), ("x-data-parallel-rank", "1")],
            r#"{"backend_instance_id":1,"prefill_worker_id":2,"decode_worker_id":3,"dp_rank":5,"unknown":{}}"#,
            HintTrust::Trusted,
        )
        .unwrap();
        assert_eq!(
            (hints.backend, hints.prefill, hints.decode),
            (Some(WorkerId(7)), Some(WorkerId(8)), Some(WorkerId(7)))
        );
        assert_eq!(hints.dp_rank, Some(DpRank(1)));
    }

    #[test]
    fn a3_what_does_not_parse_is_named() {
        let error = hints(&[("x-dp-rank", "one")], "{}", HintTrust::Trusted).unwrap_err();
        assert_eq!(error.to_string(), "x-dp-rank: `one` does not parse");
        let error = hints(&[], r#"{"dp_rank":-1}"#, HintTrust::Trusted).unwrap_err();
        assert!(error.to_string().starts_with("nvext: `{\"dp_rank\":-1}`"), "{error}");
        let over = r#"{"router_config_override":{"router_temperature":-2}}"#;
        let error = hints(&[], over, HintTrust::Trusted).unwrap_err();
        assert_eq!(
            error.to_string(),
            "nvext.router_config_override: temperature -2 is not a finite number of 0 or more"
        );
    }

    #[test]
    fn a3_the_unset_prefill_rank_and_untrusted_hints() {
        let unset =
            hints(&[("x-prefill-dp-rank", "4294967295")], r#"{"prefill_dp_rank":2}"#, HintTrust::Trusted);
        assert_eq!(unset.unwrap().prefill_dp_rank, None);
        let ignored = hints(&[("x-dp-rank", "one")], r#"{"backend_instance_id":1}"#, HintTrust::Ignored);
        assert_eq!(ignored.unwrap(), Hints::default());
    }

    #[test]
    fn a2_session_control_names_the_session_and_its_timeout() {
        let control = |nvext: &str| hints(&[], nvext, HintTrust::Trusted).unwrap();
        let open = control(r#"{"session_control":{"session_id":"s","action":"open"}}"#);
        assert_eq!(open.session.as_deref(), Some("s"));
        let expected = SessionControl { close: false, timeout: Duration::from_secs(300) };
        assert_eq!(open.session_control, Some(expected));
        let close = control(r#"{"session_control":{"session_id":"s","action":"close","timeout":9}}"#);
        let expected = SessionControl { close: true, timeout: Duration::from_secs(9) };
        assert_eq!(close.session_control, Some(expected));
        assert!(
            hints(&[], r#"{"session_control":{"session_id":"s","action":"shut"}}"#, HintTrust::Trusted)
                .is_err()
        );
    }

    #[test]
    fn a4_routing_tokens_take_the_place_of_token_ids_when_there_are_any() {
        let tokens = |nvext: &str| hints(&[], nvext, HintTrust::Trusted).unwrap().token_ids;
        let both = r#"{"token_data":[1,2],"mm_routing_info":{"routing_token_ids":[7,8,9]}}"#;
        assert_eq!(tokens(both), Some(vec![7, 8, 9]));
        assert_eq!(
            tokens(r#"{"token_data":[1,2],"mm_routing_info":{"routing_token_ids":[]}}"#),
            Some(vec![1, 2])
        );
        let objects = r#"{"mm_routing_info":{"routing_token_ids":[1],"block_mm_infos":[null,{"mm_objects":[{"mm_hash":5}]}]}}"#;
        assert_eq!(hints(&[], objects, HintTrust::Trusted).unwrap().block_objects, [vec![], vec![5]]);
    }

    #[test]
    fn f2_an_annotation_that_begins_with_query_instance_id_only_asks() {
        let asks = |nvext: &str| hints(&[], nvext, HintTrust::Trusted).unwrap().query_only;
        assert!(asks(r#"{"annotations":["x","query_instance_id:"]}"#));
        assert!(asks(r#"{"annotations":["query_instance_id:7"]}"#));
        assert!(!asks(r#"{"annotations":["token_ids"]}"#));
    }

    #[test]
    fn f3_pins_by_leg() {
        let id = |id| Some(WorkerId(id));
        let all = Hints {
            backend: id(1),
            prefill: id(2),
            decode: id(3),
            dp_rank: Some(DpRank(4)),
            prefill_dp_rank: Some(DpRank(5)),
            ..Hints::default()
        };
        assert_eq!(all.pinned(Leg::Prefill), Some((WorkerId(2), Some(DpRank(5)))));
        assert_eq!(all.pinned(Leg::Decode), Some((WorkerId(3), Some(DpRank(4)))));
        assert_eq!(all.pinned(Leg::Aggregated), Some((WorkerId(1), Some(DpRank(4)))));
        let backend = Hints { backend: id(1), dp_rank: Some(DpRank(4)), ..Hints::default() };
        assert_eq!(backend.pinned(Leg::Prefill), Some((WorkerId(1), Some(DpRank(4)))));
        assert_eq!(backend.pinned(Leg::Decode), Some((WorkerId(1), Some(DpRank(4)))));
        assert_eq!(Hints { prefill: id(2), ..Hints::default() }.pinned(Leg::Aggregated), None);
    }
}
