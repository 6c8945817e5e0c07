//! vLLM with the NIXL connector: prefill first, its answer carries opaque parameters, decode gets them with
//! the client's own body. Both legs carry the same `X-Request-Id`.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use pointsman_orchestration::HandoffKind;

use super::{
    Connector, LegContext, Pools, PrefillAnswer, PromptUsage, Target, given_up, python_json, unread, usage,
    vllm,
};
use crate::{
    openai::{request::Request, seen},
    upstream::LegHeaders,
};

#[derive(Debug)]
pub(super) struct VllmNixl;

/// Handoff parameters of the prefill request. Streamed it would answer no parameters and still pin its
/// blocks.
const ASK: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false}"#;
/// The fields of the parameters that are looked at. Without the first four, a decode engine of any version
/// recomputes silently, never answers, or dies.
#[derive(Deserialize)]
struct Parameters<'a> {
    #[serde(borrow)]
    remote_block_ids: Option<&'a RawValue>,
    #[serde(borrow)]
    remote_engine_id: Option<&'a RawValue>,
    #[serde(borrow)]
    remote_host: Option<&'a RawValue>,
    #[serde(borrow)]
    remote_port: Option<&'a RawValue>,
    /// Decode engines need it from vLLM 0.13 on, whose prefill engines all send it. Older ones do not, and
    /// pair with older decode engines only.
    #[serde(borrow, default, deserialize_with = "seen::some")]
    remote_request_id: Option<&'a RawValue>,
    #[serde(borrow)]
    bootstrap_room: Option<&'a RawValue>,
    /// Cached tokens, in vLLM. The usage has them only if the engine was told to
    /// (`--enable-prompt-tokens-details`).
    #[serde(borrow)]
    remote_prefill_cached_tokens: Option<&'a RawValue>,
    /// The same in vLLM Ascend.
    #[serde(borrow)]
    remote_num_cached_tokens: Option<&'a RawValue>,
}

/// The answer of a prefill.
#[derive(Deserialize)]
pub(super) struct Answer<'a> {
    #[serde(default)]
    choices: Vec<Choice>,
    /// `message` for an answer of the Messages API, which has no choices.
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    stop_reason: Option<String>,
    /// `response` for an answer of the Responses API, which has no choices either.
    #[serde(default)]
    object: Option<String>,
    #[serde(default)]
    status: Option<String>,
    #[serde(borrow, default)]
    kv_transfer_params: Option<&'a RawValue>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice {
    finish_reason: Option<String>,
}

impl<'a> Parameters<'a> {
    /// Reads an object.
    fn read(json: &'a str) -> Option<Self> {
        serde_json::from_str(json).ok().filter(|_| json.starts_with('{'))
    }

    /// The field that is missing for a handoff.
    fn missing(&self) -> Option<&'static str> {
        let fields = [
            ("remote_block_ids", self.remote_block_ids),
            ("remote_engine_id", self.remote_engine_id),
            ("remote_host", self.remote_host),
            ("remote_port", self.remote_port),
        ];
        let missing = fields.into_iter().find(|(_, value)| value.is_none()).map(|(name, _)| name);
        let lacks_id = self.remote_request_id.is_some_and(|id| id.get() == "null");
        missing.or(lacks_id.then_some("remote_request_id"))
    }

    fn cached_tokens(&self) -> Option<u32> {
        let fields = [self.remote_prefill_cached_tokens, self.remote_num_cached_tokens];
        fields.into_iter().flatten().find_map(|field| field.get().parse().ok())
    }
}

impl Answer<'_> {
    fn is_response(&self) -> bool {
        self.object.as_deref() == Some("response")
    }

    /// Why generation ended, if the answer says so; `None` if it is not an answer.
    pub(super) fn finish(&self) -> Option<Option<&str>> {
        if self.kind.as_deref() == Some("message") {
            return Some(self.stop_reason.as_deref());
        }
        if self.is_response() {
            return Some(self.status.as_deref());
        }
        self.choices.first().map(|choice| choice.finish_reason.as_deref())
    }
}

impl Connector for VllmNixl {
    fn handoff(&self) -> Option<HandoffKind> {
        Some(HandoffKind::Completed)
    }

    fn continues_messages(&self) -> bool {
        true
    }

    fn unsplittable(&self, request: &Request) -> Option<&'static str> {
        vllm::unsplittable(request)
    }

    fn refused_by(&self, request: &Request, pools: Pools<'_>) -> Option<&'static str> {
        vllm::refused_by(request, pools)
    }

    fn hands_over_responses(&self) -> bool {
        true
    }

    fn decode_stores_responses(&self) -> bool {
        true
    }

    fn takes_token_ids(&self) -> bool {
        true
    }

    fn single(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        vllm::single(request, context)
    }

    fn prefill(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        vllm::prefill(request).set("kv_transfer_params", vllm::with_prompt(ASK, context)).finish()
    }

    fn decode(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        match context.handoff {
            Some(parameters) => {
                vllm::hand_over(vllm::answering(request, context), parameters, context).finish()
            }
            // No parameters at all: the worker prefills locally, which is always legal.
            None => vllm::single(request, context),
        }
    }

    fn decode_one_token(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let parameters = context.handoff.unwrap_or("null");
        vllm::hand_over(vllm::one_token(request), parameters, context).finish()
    }

    fn headers(&self, context: &LegContext<'_>, target: Target<'_>) -> LegHeaders {
        vllm::headers(context, target)
    }

    fn read_prefill(&self, body: &[u8]) -> PrefillAnswer {
        // Checked once: a parser of bytes checks the encoding of each string.
        let text = match std::str::from_utf8(body) {
            Ok(text) => text,
            Err(error) => return PrefillAnswer::MissingData(error.to_string()),
        };
        let mut repaired = String::new();
        let answer: Answer<'_> = match python_json::read(text, &mut repaired) {
            Ok(answer) => answer,
            Err(error) => return unread(&error),
        };
        let Some(finish) = answer.finish() else {
            return PrefillAnswer::MissingData("no choices".to_owned());
        };
        let Some(parameters) = answer.kv_transfer_params.filter(|parameters| parameters.get() != "null")
        else {
            return match finish {
                Some("length" | "max_tokens" | "incomplete") | None => PrefillAnswer::MissingParameters,
                // Its events are many, and decode writes them.
                Some("completed") if answer.is_response() => PrefillAnswer::Nothing,
                Some(end @ ("failed" | "cancelled")) => {
                    PrefillAnswer::MissingData(format!("the engine ended it as `{end}`"))
                }
                Some(end) => given_up(end).unwrap_or(PrefillAnswer::WasAll),
            };
        };
        let Some(fields) = Parameters::read(parameters.get()) else {
            return PrefillAnswer::MissingParameters;
        };
        let is_bootstrap = fields.bootstrap_room.is_some();
        // Before 0.10.1 only whole blocks are handed over, and a short prompt has none. A decode engine fails
        // on an empty list.
        let ids = fields.remote_block_ids.and_then(|ids| ids.get().strip_prefix('['));
        let reported = usage::of_prompt(answer.usage);
        let cached_tokens = reported.cached_tokens.or_else(|| fields.cached_tokens());
        let prompt = PromptUsage { cached_tokens, ..reported };
        match fields.missing().filter(|_| !is_bootstrap) {
            Some(field) => PrefillAnswer::Incomplete(field),
            None if !is_bootstrap && ids.is_some_and(|ids| ids.trim_start() == "]") => PrefillAnswer::Nothing,
            None => PrefillAnswer::Handoff { parameters: parameters.get().to_owned(), prompt },
        }
    }

    /// 0 on new engines, nearly the whole prompt on older ones: what was transferred counts as cached there.
    fn decode_knows_cached_tokens(&self) -> bool {
        false
    }
}
