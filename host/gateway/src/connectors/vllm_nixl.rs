//! vLLM with the NIXL connector: prefill first, its answer carries opaque parameters, decode gets them with
//! the client's own body. Both legs carry the same `X-Request-Id`.

use bytes::Bytes;
use json_splice::JsonBody;
use serde::Deserialize;
use serde_json::value::RawValue;

use pointsman_orchestration::HandoffKind;

use super::{
    Connector, LegContext, Pools, PrefillAnswer, PromptUsage, Target, given_up, python_json, unread, usage,
    vllm,
};
use crate::{openai::request::Request, upstream::LegHeaders};

#[derive(Debug)]
pub(super) struct VllmNixl;

/// Handoff parameters of the prefill request. Streamed it would answer no parameters and still pin its
/// blocks.
const ASK: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false}"#;
/// Fields of the parameters without which a decode engine of any version recomputes silently, never answers,
/// or dies.
const NEEDED: [&str; 4] = ["remote_block_ids", "remote_engine_id", "remote_host", "remote_port"];
/// A field that decode engines need from vLLM 0.13 on, whose prefill engines all send it. Older ones do not,
/// and pair with older decode engines only.
const REQUEST_ID: &str = "remote_request_id";

/// Fields of the parameters with the number of cached tokens, in vLLM and in vLLM Ascend. The usage has it
/// only if the engine was told to (`--enable-prompt-tokens-details`).
const CACHED: [&str; 2] = ["remote_prefill_cached_tokens", "remote_num_cached_tokens"];

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
        let Ok(fields) = JsonBody::parse(Bytes::copy_from_slice(parameters.get().as_bytes())) else {
            return PrefillAnswer::MissingParameters;
        };
        let is_missing =
            |field: &&&str| fields.get(field).map_or(**field != REQUEST_ID, |value| value == "null");
        let missing = NEEDED.iter().chain([&REQUEST_ID]).find(is_missing);
        let is_bootstrap = vllm::is_bootstrap(&fields);
        // Before 0.10.1 only whole blocks are handed over, and a short prompt has none. A decode engine fails
        // on an empty list.
        let ids = fields.get(NEEDED[0]).and_then(|ids| ids.strip_prefix('['));
        let reported = usage::of_prompt(answer.usage);
        let in_parameters = || CACHED.iter().find_map(|field| fields.get(field)?.parse().ok());
        let prompt = PromptUsage { cached_tokens: reported.cached_tokens.or_else(in_parameters), ..reported };
        match missing.filter(|_| !is_bootstrap) {
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
