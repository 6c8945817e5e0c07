//! vLLM with the NIXL connector: prefill first, its answer carries opaque parameters, decode gets them with the client's
//! own body. Both legs carry the same `X-Request-Id`.

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Connector, LegContext, PrefillAnswer, RequestToken, Target, clean, token_header};
use crate::{legs::HandoffKind, request::Request, upstream::LegHeaders};

/// The dialect.
#[derive(Debug)]
pub(super) struct VllmNixl;

/// What prefill is asked for. Streamed it would answer no parameters and still pin its blocks.
const ASK: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false}"#;
/// Fields of the parameters without which a decode engine recomputes silently, or dies.
const NEEDED: [&str; 4] = ["remote_block_ids", "remote_engine_id", "remote_host", "remote_port"];

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(borrow, default)]
    kv_transfer_params: Option<&'a RawValue>,
    #[serde(default)]
    usage: Option<UsageObject>,
}

#[derive(Deserialize)]
struct Choice {
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct UsageObject {
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u32>,
}

impl Connector for VllmNixl {
    fn handoff(&self) -> Option<HandoffKind> {
        Some(HandoffKind::Completed)
    }

    /// A handoff has one consumer, and these have several, or need the whole prompt at one place.
    fn unsplittable(&self, request: &Request) -> Option<&'static str> {
        let truthy = |key| request.body.get(key).is_some_and(|value| !matches!(value, "null" | "false"));
        if request.n > 1 {
            return Some("n");
        }
        if request.prompts > 1 {
            return Some("list_of_prompts");
        }
        ["echo", "prompt_logprobs", "best_of"].into_iter().find(|key| match *key {
            "best_of" => request.body.get(key).is_some_and(|value| !matches!(value, "null" | "1")),
            _ => truthy(key),
        })
    }

    fn prefill(&self, request: &Request, _: &LegContext<'_>) -> Bytes {
        // min_tokens 1: end-of-sequence cannot end the step, so parameters always come and decode samples the token.
        let mut edit = clean(request)
            .remove("stream_options")
            .remove("logprobs")
            .remove("top_logprobs")
            .set("stream", "false")
            .set("max_tokens", "1")
            .set("min_tokens", "1")
            .set("kv_transfer_params", ASK);
        if request.body.get("max_completion_tokens").is_some() {
            edit = edit.set("max_completion_tokens", "1");
        }
        edit.finish()
    }

    fn decode(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let edit = clean(request);
        match context.handoff {
            Some(parameters) => edit.set("kv_transfer_params", parameters).finish(),
            // No parameters at all: the worker prefills locally, which is always legal.
            None => edit.finish(),
        }
    }

    fn decode_one_token(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let mut edit = clean(request).remove("stream_options").set("stream", "false").set("max_tokens", "1");
        if request.body.get("max_completion_tokens").is_some() {
            edit = edit.set("max_completion_tokens", "1");
        }
        if request.body.get("min_tokens").is_some_and(|min| min != "0") {
            edit = edit.set("min_tokens", "1");
        }
        edit.set("kv_transfer_params", context.handoff.unwrap_or("null")).finish()
    }

    fn headers(&self, token: RequestToken, target: Target<'_>) -> LegHeaders {
        let mut headers = vec![token_header(token)];
        if target.spec.dp_size > 1 {
            headers.push((HeaderName::from_static("x-data-parallel-rank"), HeaderValue::from(target.rank.0)));
        }
        headers
    }

    fn read_prefill(&self, body: &[u8]) -> PrefillAnswer {
        let answer: Answer<'_> = match serde_json::from_slice(body) {
            Ok(answer) => answer,
            Err(error) => return PrefillAnswer::MissingData(error.to_string()),
        };
        let Some(choice) = answer.choices.first() else {
            return PrefillAnswer::MissingData("no choices".to_owned());
        };
        let Some(parameters) = answer.kv_transfer_params.filter(|parameters| parameters.get() != "null")
        else {
            return match choice.finish_reason.as_deref() {
                Some("length") | None => PrefillAnswer::MissingParameters,
                Some(_) => PrefillAnswer::WasAll,
            };
        };
        let fields: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(parameters.get()).unwrap_or_default();
        let present = |field: &&str| fields.get(*field).is_some_and(|value| !value.is_null());
        match NEEDED.iter().find(|field| !present(field)) {
            Some(field) => PrefillAnswer::Incomplete(field),
            None => PrefillAnswer::Handoff {
                parameters: parameters.get().to_owned(),
                cached_tokens: answer.usage.and_then(|usage| usage.prompt_tokens_details?.cached_tokens),
            },
        }
    }

    /// 0 on new engines, nearly the whole prompt on older ones: what was transferred counts as cached there.
    fn decode_knows_cached_tokens(&self) -> bool {
        false
    }
}
