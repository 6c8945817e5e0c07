//! Routing hints of a request [A2, A3]: from headers and from the body's `nvext` object; a header wins.

use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use json_splice::JsonBody;
use pointsman_routing::{MAX_NUMBER, RouterConfigOverride};
use pointsman_workers::{DpRank, Leg, WorkerId};
use serde::Deserialize;

use crate::{
    openai::limits::text_within,
    openai::media_ids::MediaIds,
    openai::request_error::{RequestError, read},
};

mod headers;
mod lineage;
mod lists;
mod nvext;

use headers::{
    INSTANCE, ITL_TARGET, PREFILL_INSTANCE, PREFILL_RANK, PRIORITY, RANK, STRICT_PRIORITY, TTFT_TARGET,
    header, session, target_ms,
};
pub(crate) use lineage::Lineage;
pub(crate) use nvext::AgentContext;
use nvext::{AgentHints, BlockObjects, Constraints, Multimodal, RouterParams};

/// Whether a listener takes hints from its clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum HintTrust {
    /// Takes the hints.
    #[default]
    Trusted,
    /// Ignores the hints, unread.
    Ignored,
}

/// The prefill rank that means "unset".
const UNSET_RANK: u32 = u32::MAX;

/// Maximum length of a text hint, and of a header with a hint, bytes.
const MAX_TEXT_BYTES: usize = 512;
/// Maximum length of the cache salt, bytes: vLLM's.
const MAX_SALT_BYTES: usize = 1_024;

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
    /// Workers it may run on; `None`: any.
    pub allowed_workers: Option<Vec<WorkerId>>,
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
    /// Token ids of the prompt, for engines.
    pub token_ids: Option<Vec<u32>>,
    /// Token ids that routing hashes in their place; not empty.
    pub routing_token_ids: Option<Vec<u32>>,
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
    /// Whether the request continues what the worker of `backend` has: a stored response, or a session.
    pub continues: bool,
    /// The session that the request continues and an engine keeps.
    pub engine_session: Option<EngineSession>,
    /// Media that the request names by ids of its client.
    pub media: MediaIds,
    /// Agent context of the request, for the access log.
    pub agent: AgentContext,
    /// The agent program that it belongs to; `None` if it names no session.
    pub lineage: Option<Lineage>,
    /// When the client made the request, milliseconds by its clock, for the access log.
    pub request_timestamp_ms: Option<f64>,
    /// Checksum of the model card that the client knows, for the access log.
    pub mdc_sum: Option<String>,
    /// Warning in the answer about keys that have no effect.
    pub warning: Option<HeaderValue>,
}

/// Keys of a session that an engine keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EngineSession {
    /// Key of the tenant's session.
    pub own: u64,
    /// Key of the session without a tenant; `None` if no tenants are configured.
    pub of_any: Option<u64>,
}

/// Action of a request on its session (A2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionControl {
    /// Ends the session's bindings before this request, so that it is routed without them.
    pub open: bool,
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
    allowed_worker_ids: Option<Vec<u64>>,
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
    agent_hints: AgentHints,
    agent_context: AgentContext,
    routing_constraints: Constraints,
    router: RouterParams,
    request_timestamp_ms: Option<f64>,
    mdc_sum: Option<String>,
}

#[derive(Deserialize)]
struct SessionObject {
    session_id: String,
    action: Option<SessionAction>,
    /// Timeout of the session, seconds.
    timeout: Option<u32>,
}

impl SessionObject {
    fn control(&self) -> SessionControl {
        SessionControl {
            open: self.action == Some(SessionAction::Open),
            close: self.action == Some(SessionAction::Close),
            timeout: Duration::from_secs(self.timeout.unwrap_or(300).into()),
        }
    }
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum SessionAction {
    Open,
    Bind,
    Close,
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
        let (cache_salt, probe) = (salt(body)?, read(body, "_HEALTH_CHECK")?.unwrap_or(false));
        // Almost every request.
        if body.get("nvext").is_none() && !headers::are_in(headers) {
            return Ok(Self { cache_salt, probe, ..Self::default() });
        }
        Self::given(headers, body).map(|given| Self { cache_salt, probe, ..given })
    }

    /// Reads the hints in the headers and in `nvext`.
    fn given(headers: &HeaderMap, body: &JsonBody) -> Result<Self, RequestError> {
        nvext::check_objects(body)?;
        lists::check(body)?;
        let ext: NvExt = read(body, "nvext")?.unwrap_or_default();
        ext.check()?;
        let instance: Option<u64> = header(headers, &INSTANCE)?;
        let prefill: Option<u64> = header(headers, &PREFILL_INSTANCE)?;
        let rank: Option<u32> = header(headers, &RANK)?;
        let prefill_rank = header(headers, &PREFILL_RANK)?.or(ext.prefill_dp_rank);
        let session = session(headers)?;
        let lineage = Lineage::parse(headers, session.clone(), &ext)?;
        let agent_hints = agent_hints(headers, ext.agent_hints)?;
        let mut preferred_taints = ext.routing_constraints.preferred_taints;
        preferred_taints.extend(ext.preferred_taints);
        let mut required_taints = ext.required_taints;
        required_taints.extend(ext.routing_constraints.required_taints);
        let config = ext.router_config_override.unwrap_or_default();
        let control = ext.session_control.as_ref().map(SessionObject::control);
        let controlled = ext.session_control.map(|control| control.session_id);
        let multimodal = ext.mm_routing_info.unwrap_or_default();
        let routing_token_ids = Some(multimodal.routing_token_ids).filter(|ids| !ids.is_empty());
        // The blocks are those of the routing tokens: without these, they are blocks of nothing.
        let objects = routing_token_ids.as_ref().map(|_| multimodal.block_mm_infos).unwrap_or_default();
        let hashes =
            |block: BlockObjects| block.mm_objects.into_iter().map(|object| object.mm_hash).collect();
        config.check().map_err(|problem| RequestError::new("nvext.router_config_override", &problem))?;
        let config = config.without_weight();
        let hints = Self {
            backend: instance.or(ext.backend_instance_id).map(WorkerId),
            prefill: prefill.or(ext.prefill_worker_id).map(WorkerId),
            decode: instance.or(ext.decode_worker_id).map(WorkerId),
            dp_rank: rank.or(ext.dp_rank).map(DpRank),
            prefill_dp_rank: prefill_rank.filter(|rank| *rank != UNSET_RANK).map(DpRank),
            expected_output_tokens: ext.expected_output_tokens.or(agent_hints.osl),
            lora: ext.lora_name,
            priority: ext.priority.or(agent_hints.tier()).unwrap_or(0.0),
            priority_jump: ext.priority_jump.or(agent_hints.jump()).unwrap_or(0.0),
            allowed_workers: ext.allowed_worker_ids.map(|ids| ids.into_iter().map(WorkerId).collect()),
            required_taints,
            preferred_taints: preferred_taints.into_iter().collect(),
            session: session.id.or(controlled).or(ext.session_id),
            ttft_target_ms: target_ms(headers, &TTFT_TARGET)?.or(ext.ttft_target).or(ext.router.ttft_target),
            itl_target_ms: target_ms(headers, &ITL_TARGET)?.or(ext.itl_target).or(ext.router.itl_target),
            config,
            token_ids: ext.token_data,
            routing_token_ids,
            block_objects: objects.into_iter().map(Option::unwrap_or_default).map(hashes).collect(),
            session_control: control,
            query_only: ext.annotations.iter().any(|annotation| annotation.starts_with(QUERY_ONLY)),
            agent: ext.agent_context,
            lineage,
            request_timestamp_ms: ext.request_timestamp_ms,
            mdc_sum: ext.mdc_sum,
            ..Self::default()
        };
        Ok(Self { warning: nvext::warning(headers, body, &ext.annotations, hints.has_lone_rank()), ..hints })
    }

    /// Returns whether the client names a worker that is to run the request.
    pub(crate) fn names_worker(&self) -> bool {
        let backend = self.backend.filter(|_| !self.continues);
        self.probe || self.prefill.or(self.decode).or(backend).is_some()
    }

    /// Returns the worker that has what the request continues, which the gateway found.
    pub(crate) fn holder(&self) -> Option<WorkerId> {
        self.backend.filter(|_| self.continues)
    }

    /// Returns whether a rank is given without the worker that has it.
    fn has_lone_rank(&self) -> bool {
        let workers = [self.prefill, self.decode, self.backend];
        let lone = self.dp_rank.is_some() && workers.iter().all(Option::is_none);
        lone || self.prefill_dp_rank.is_some() && self.prefill.is_none()
    }

    /// The worker and rank a leg is pinned to (F3). The prefill leg has a pin of its own only: of a request
    /// with two legs, the backend is where the answer comes from.
    #[must_use]
    pub(crate) fn pinned(&self, leg: Leg) -> Option<(WorkerId, Option<DpRank>)> {
        match leg {
            Leg::Prefill => self.prefill.map(|id| (id, self.prefill_dp_rank.or(self.dp_rank))),
            Leg::Decode => self.decode.or(self.backend).map(|id| (id, self.dp_rank)),
            Leg::Aggregated => self.backend.or(self.decode).map(|id| (id, self.dp_rank)),
        }
    }
}

impl NvExt {
    /// Checks the lengths of texts, and the sizes of numbers.
    fn check(&self) -> Result<(), RequestError> {
        let session = self.session_control.as_ref().map(|control| &control.session_id);
        let texts = [
            ("session_id", self.session_id.as_ref()),
            ("session_control.session_id", session),
            ("lora_name", self.lora_name.as_ref()),
            ("mdc_sum", self.mdc_sum.as_ref()),
            ("agent_context.session_id", self.agent_context.session_id.as_ref()),
            ("agent_context.parent_session_id", self.agent_context.parent_session_id.as_ref()),
        ];
        let texts = texts.into_iter().filter_map(|(field, text)| Some((field, text?)));
        let texts = texts
            .chain(self.required_taints.iter().map(|taint| ("required_taints", taint)))
            .chain(
                self.routing_constraints.required_taints.iter().map(|taint| ("routing_constraints", taint)),
            )
            .chain(
                self.routing_constraints.preferred_taints.keys().map(|taint| ("routing_constraints", taint)),
            )
            .chain(self.preferred_taints.keys().map(|taint| ("preferred_taints", taint)))
            .chain(self.annotations.iter().map(|annotation| ("annotations", annotation)));
        for (field, text) in texts {
            text_within(&format!("nvext.{field}"), text, MAX_TEXT_BYTES)?;
        }
        let numbers = [
            ("priority", self.priority.map(f64::from)),
            ("priority_jump", self.priority_jump.map(f64::from)),
            ("ttft_target", self.ttft_target),
            ("itl_target", self.itl_target),
            ("router.ttft_target", self.router.ttft_target),
            ("router.itl_target", self.router.itl_target),
            ("agent_hints.latency_sensitivity", self.agent_hints.latency_sensitivity),
            ("request_timestamp_ms", self.request_timestamp_ms),
        ];
        let numbers = numbers.into_iter().filter_map(|(field, number)| Some((field, number?)));
        let inner = self.routing_constraints.preferred_taints.values();
        let weights = self.preferred_taints.values().chain(inner);
        let weights = weights.map(|weight| ("preferred_taints", f64::from(*weight)));
        match numbers.chain(weights).find(|(_, number)| number.abs() > MAX_NUMBER) {
            Some((field, _)) => {
                let problem = format!("a number is larger than {MAX_NUMBER:e}; send a smaller one");
                Err(RequestError::new(&format!("nvext.{field}"), &problem))
            }
            None => Ok(()),
        }
    }
}

/// The agent's hints of the body, with those of the headers.
fn agent_hints(headers: &HeaderMap, given: AgentHints) -> Result<AgentHints, RequestError> {
    let jump: Option<i32> = header(headers, &PRIORITY)?;
    let tier: Option<u32> = header(headers, &STRICT_PRIORITY)?;
    let (priority, strict_priority) = (jump.or(given.priority), tier.or(given.strict_priority));
    Ok(AgentHints { priority, strict_priority, ..given })
}

/// Returns the salt of the block hashes. SGLang appends `extra_key` to it. A batch of `/generate` may have a
/// list of salts, one for each prompt. Its prompts are measured together.
fn salt(body: &JsonBody) -> Result<Option<String>, RequestError> {
    if body.get("cache_salt").is_some_and(|salt| salt.starts_with('[')) {
        return Ok(None);
    }
    let salt: Option<String> = read(body, "cache_salt")?;
    text_within("cache_salt", salt.as_deref().unwrap_or_default(), MAX_SALT_BYTES)?;
    let extra: Option<String> = body.read("extra_key").ok().flatten();
    text_within("extra_key", extra.as_deref().unwrap_or_default(), MAX_SALT_BYTES)?;
    Ok(match extra {
        Some(extra) => Some(salt.unwrap_or_default() + &extra),
        None => salt,
    })
}

#[cfg(test)]
mod tests;
