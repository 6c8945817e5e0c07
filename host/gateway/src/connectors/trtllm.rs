//! TensorRT-LLM: a completed handoff. The context leg answers parameters and the prompt's token ids; the
//! generation leg is the original with the ids in the prompt's place. Without ids it computes them itself:
//! some releases answer none to a chat (TensorRT-LLM#14844).

use bytes::Bytes;
use json_splice::{Edit, JsonBody};
use serde::Deserialize;
use serde_json::{json, value::RawValue};

use pointsman_orchestration::HandoffKind;

use super::{
    Connector, LegContext, PrefillAnswer, Target, clean, given_up, python_json, token_header, unread, usage,
    with_model,
};
use crate::{
    openai::{
        hide::{Fields, finders},
        lax::Flag,
        request::{Endpoint, Request},
    },
    upstream::LegHeaders,
};

#[derive(Debug)]
pub(super) struct Trtllm;

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    #[serde(borrow)]
    prompt_token_ids: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_token_ids_b64: Option<&'a RawValue>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    finish_reason: Option<String>,
    #[serde(borrow)]
    disaggregated_params: Option<&'a RawValue>,
}

/// The field of the prompt's token ids, a list.
const IDS: &str = "prompt_token_ids";
/// The field of the same ids as base64, which chats only have.
const IDS_BASE64: &str = "prompt_token_ids_b64";
const PARAMETERS: &str = "disaggregated_params";
/// The field of the parameters by which decode finds the blocks. The engine's own gateway refuses parameters
/// without it (`serve/openai_disagg_service.py`, `_verify_ctx_response`).
const BLOCKS: &str = "ctx_request_id";

impl Connector for Trtllm {
    fn handoff(&self) -> Option<HandoffKind> {
        Some(HandoffKind::Completed)
    }

    /// A handoff has one consumer of one sequence. A decode engine has neither the text of the prompt, to
    /// which it would add its own (`serve/postprocess_handlers.py`), nor the logits of it.
    fn unsplittable(&self, request: &Request) -> Option<&'static str> {
        if request.endpoint == Endpoint::Messages {
            return Some("/v1/messages");
        }
        if request.n > 1 {
            return Some("n");
        }
        if request.prompts > 1 {
            return Some("list_of_prompts");
        }
        if request.body.get("best_of").is_some_and(|sequences| !matches!(sequences, "null" | "1")) {
            return Some("best_of");
        }
        let is_set = |field: &&str| !matches!(request.body.read(field), Ok(None | Some(Flag(false))));
        if is_set(&"use_beam_search") {
            return Some("use_beam_search");
        }
        let mut fields = ["echo", "return_context_logits"].into_iter();
        fields.find(is_set).filter(|_| request.endpoint == Endpoint::Completions)
    }

    fn prefill(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let ask = json!({ "request_type": "context_only", "disagg_request_id": context.rooms.first() });
        clean_body(request)
            .remove("stream_options")
            .set("stream", "false")
            .set("disaggregated_params", ask.to_string())
            .finish()
    }

    fn decode(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        generation(clean_body(request), request.endpoint, context)
    }

    fn decode_one_token(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let mut edit = clean_prompt(request).remove("stream_options").remove("max_completion_tokens");
        if request.body.get("min_tokens").is_some_and(|min| min != "0") {
            edit = edit.set("min_tokens", "1");
        }
        generation(edit.set("stream", "false").set("max_tokens", "1"), request.endpoint, context)
    }

    fn single(&self, request: &Request, _: &LegContext<'_>) -> Bytes {
        clean_body(request).finish()
    }

    /// The engine sends the prompt's ids with the parameters, also when they are not needed (C8).
    fn private_answer_fields(&self) -> &'static Fields {
        static FIELDS: Fields = Fields::new(|| {
            finders(&[
                "disaggregated_params",
                "prompt_token_ids",
                "prompt_token_ids_b64",
                "kv_transfer_params",
            ])
        });
        &FIELDS
    }

    fn headers(&self, context: &LegContext<'_>, _: Target<'_>) -> LegHeaders {
        vec![token_header(context.token.digits().as_bytes())]
    }

    fn read_prefill(&self, body: &[u8]) -> PrefillAnswer {
        let mut repaired = String::new();
        let text = match std::str::from_utf8(body) {
            Ok(text) => text,
            Err(error) => return PrefillAnswer::MissingData(error.to_string()),
        };
        let answer: Answer<'_> = match python_json::read(text, &mut repaired) {
            Ok(answer) => answer,
            Err(error) => return unread(&error),
        };
        let Some(choice) = answer.choices.first() else {
            return PrefillAnswer::MissingData("no choices".to_owned());
        };
        match choice.finish_reason.as_deref() {
            Some("length" | "not_finished") | None => {}
            Some(end) => return given_up(end).unwrap_or(PrefillAnswer::WasAll),
        }
        let Some(parameters) = choice.disaggregated_params.and_then(|json| parse(json.get())) else {
            return PrefillAnswer::MissingParameters;
        };
        if parameters.get(BLOCKS).is_none_or(|id| id == "null") {
            return PrefillAnswer::Incomplete(BLOCKS);
        }
        let parameters = parameters.edit().set("request_type", "\"generation_only\"").finish();
        let mut handoff = format!(r#"{{"{PARAMETERS}":{}"#, String::from_utf8_lossy(&parameters));
        let fields = [(IDS, answer.prompt_token_ids), (IDS_BASE64, answer.prompt_token_ids_b64)];
        for (field, json) in fields.into_iter().filter_map(|(field, json)| Some((field, json?.get()))) {
            if has_ids(json) {
                handoff.extend([",\"", field, "\":", json]);
            }
        }
        PrefillAnswer::Handoff { parameters: handoff + "}", prompt: usage::of_prompt(answer.usage) }
    }

    /// What was transferred counts as cached.
    fn decode_knows_cached_tokens(&self) -> bool {
        false
    }
}

/// Removes the reserved fields, and the token ids that the engine would take in the messages' place: the
/// gateway routed by the messages.
fn clean_prompt(request: &Request) -> Edit<'_> {
    with_model(clean(request), request).remove("prompt_token_ids")
}

/// The client's body with one cap on output tokens: the engine refuses a chat with both names of the cap
/// (`serve/openai_protocol.py`), and of a completion it knows `max_tokens` only.
fn clean_body(request: &Request) -> Edit<'_> {
    const NAMES: [&str; 2] = ["max_tokens", "max_completion_tokens"];
    let given = NAMES.map(|name| request.body.get(name));
    let [Some(_), Some(newer)] = given else { return clean_prompt(request) };
    let keeps_newer = request.endpoint != Endpoint::Completions && newer != "null";
    clean_prompt(request).remove(if keeps_newer { "max_tokens" } else { "max_completion_tokens" })
}

fn parse(json: &str) -> Option<JsonBody> {
    JsonBody::parse(Bytes::copy_from_slice(json.as_bytes())).ok()
}

/// Returns whether a value is a list or a text with anything in it.
fn has_ids(json: &str) -> bool {
    let is_list = json.strip_prefix('[').is_some_and(|rest| rest.trim_start() != "]");
    is_list || (json.starts_with('"') && json != "\"\"")
}

/// Without a handoff the worker prefills locally.
fn generation(edit: Edit<'_>, endpoint: Endpoint, context: &LegContext<'_>) -> Bytes {
    let Some(handoff) = context.handoff.and_then(parse) else { return edit.finish() };
    let place = |field, place| Some((place, handoff.get(field)?.to_owned()));
    let ids = match endpoint {
        Endpoint::Completions => place(IDS, "prompt"),
        // The engine takes one of both.
        _ => place(IDS_BASE64, IDS_BASE64).or_else(|| place(IDS, IDS)),
    };
    let fields = place(PARAMETERS, PARAMETERS).into_iter().chain(ids);
    fields.fold(edit, |edit, (field, json)| edit.set(field, json)).finish()
}
