//! SGLang: a bootstrap handoff. Both legs get the same body and run together, tied by a room number at the
//! prefill worker's bootstrap address.

use std::borrow::Cow;

use bytes::Bytes;
use http::HeaderName;
use json_splice::Edit;
use pointsman_workers::{Candidate, Engine, Role};
use serde_json::json;

use pointsman_orchestration::{HandoffKind, is_up};

use super::{
    Abort, Connector, IdDetail, LegContext, Pools, RequestToken, Target, clean, rooms, token_header,
    vllm::rank_header, with_usage,
};
use crate::{
    openai::{
        lax::WholeNumber,
        request::{Endpoint, Request},
    },
    upstream::LegHeaders,
};

/// The bootstrap host that means a transfer without a partner: SGLang warms up its workers with it
/// (`srt/disaggregation/utils.py`, `FAKE_BOOTSTRAP_HOST`).
const NO_PARTNER: &str = "2.2.2.2";

#[derive(Debug)]
pub(super) struct Sglang;

impl Connector for Sglang {
    fn handoff(&self) -> Option<HandoffKind> {
        Some(HandoffKind::Bootstrap)
    }

    fn continues_messages(&self) -> bool {
        true
    }

    /// With several choices, the engine runs a prompt once to fill its cache and then once more for each
    /// choice. All these runs use the same room (`managers/tokenizer_manager.py`, `_handle_batch_request`),
    /// so the pair hangs.
    fn unsplittable(&self, request: &Request) -> Option<&'static str> {
        if request.n > 1 {
            return Some("n");
        }
        of_prefill_only(request).or_else(|| too_many_logprobs(request))
    }

    /// Engines before 0.5.23 drop the handoff fields of these APIs.
    fn refused_by(&self, request: &Request, [prefill, decode]: Pools<'_>) -> Option<&'static str> {
        let can = |one: &Candidate| is_at_least(one.worker.facts().version.as_deref(), &[0, 5, 23]);
        let is_sglang = |one: &&Candidate| one.worker.spec().engine == Engine::Sglang && is_up(one);
        let all_can = || prefill.iter().chain(decode).filter(is_sglang).all(can);
        let is_named = matches!(request.endpoint, Endpoint::Messages | Endpoint::Responses);
        (is_named && !all_can()).then(|| request.endpoint.path())
    }

    fn hands_over_responses(&self) -> bool {
        true
    }

    fn prefill(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let mut edit = pair(request, context);
        if let Some(target) = context.prefill.filter(|target| target.spec.dp_size > 1) {
            edit = edit.set("routed_dp_rank", target.rank.to_string());
        }
        // The client's response is that of the decode leg.
        if request.endpoint == Endpoint::Responses { edit.set("store", "false") } else { edit }.finish()
    }

    fn decode(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let mut edit = pair(request, context);
        if let Some(target) = context.decode.filter(|target| target.spec.dp_size > 1) {
            edit = edit.set("routed_dp_rank", target.rank.to_string());
        }
        if let Some(target) = context.prefill.filter(|target| target.spec.dp_size > 1) {
            edit = edit.set("disagg_prefill_dp_rank", target.rank.to_string());
        }
        edit.finish()
    }

    fn single(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let mut edit = with_id(adapted(request, context), request, context.token);
        if let Some(target) = context.decode.filter(|target| target.spec.dp_size > 1) {
            edit = edit.set("routed_dp_rank", target.rank.to_string());
        }
        let half = context.decode.filter(|target| target.spec.role != Role::Aggregated);
        if let Some(target) = half.filter(|_| request.hints.probe) {
            // A worker of a pair refuses a request without a partner.
            let room = rooms(1, target.spec.dp_size, target.rank);
            edit = edit
                .set("bootstrap_host", json!(NO_PARTNER).to_string())
                .set("bootstrap_room", json!(room.first()).to_string());
        }
        edit.finish()
    }

    fn abortable(&self) -> bool {
        true
    }

    /// The engine ignores an id that it does not know, and knows the items of a batch only. A form has no id.
    fn abort(&self, request: &Request, token: RequestToken) -> Option<Abort> {
        if request.form.is_some() {
            return None;
        }
        let body = |rid: String| Bytes::from(json!({ "rid": rid, "abort_all": false }).to_string());
        let bodies = if has_ids_of_items(request) {
            ids_of_items(request, token).map(body).collect()
        } else if request.endpoint == Endpoint::Responses {
            vec![body(response_id(token))]
        } else {
            vec![body(token.to_string())]
        };
        Some(Abort { path: "/abort_request", bodies })
    }

    /// The body of a message has no field for the id, and the engine ignores the one for the rank.
    fn headers(&self, context: &LegContext<'_>, target: Target<'_>) -> LegHeaders {
        if context.endpoint != Some(Endpoint::Messages) {
            return LegHeaders::new();
        }
        let (_, id) = token_header(context.token.digits().as_bytes());
        let id = (HeaderName::from_static("x-override-rid"), id);
        std::iter::once(id).chain(rank_header(target)).collect()
    }

    fn id_detail(&self, request: &Request) -> Option<IdDetail> {
        has_ids_of_items(request).then_some(IdDetail::ItemNumber)
    }
}

/// Returns the field that asks for what only the prefill engine has: the client gets the answer of the decode
/// engine.
fn of_prefill_only(request: &Request) -> Option<&'static str> {
    const FIELDS: [&str; 4] =
        ["return_hidden_states", "return_routed_experts", "return_indexer_topk", "token_ids_logprob"];
    let is_set = |field| is_set(request, field);
    let begins_in_prompt =
        || request.body.get("logprob_start_len").is_some_and(|start| has_other_than("-1", start));
    match request.endpoint {
        Endpoint::Generate if is_set("return_logprob") && begins_in_prompt() => Some("logprob_start_len"),
        Endpoint::Completions if is_set("echo") && is_set("logprobs") => Some("echo"),
        _ => FIELDS.into_iter().find(|field| is_set(field)),
    }
}

/// Log probabilities of a token that the metadata of a handoff have room for. The prefill engine ends when
/// there are more (`disaggregation/utils.py`, `max_top_logprobs_num`).
const MAX_TOP_LOGPROBS: u32 = 128;

/// Returns the field that asks for more log probabilities of a token than a pair hands over.
fn too_many_logprobs(request: &Request) -> Option<&'static str> {
    let (switch, field) = match request.endpoint {
        Endpoint::Completions => ("logprobs", "logprobs"),
        Endpoint::ChatCompletions => ("logprobs", "top_logprobs"),
        Endpoint::Generate => ("return_logprob", "top_logprobs_num"),
        Endpoint::Responses => ("include", "top_logprobs"),
        _ => return None,
    };
    let fits = |WholeNumber(number): WholeNumber| number <= MAX_TOP_LOGPROBS;
    let is_flag = || request.body.get(field) == Some("true");
    // A number that only the engine can read, such as "+129", may be too large.
    let one = || request.body.read::<WholeNumber>(field).is_ok_and(|one| one.is_none_or(fits));
    // One number for each prompt of a batch.
    let several = || {
        let each = request.body.read::<Vec<Option<WholeNumber>>>(field);
        each.is_ok_and(|each| each.into_iter().flatten().flatten().all(fits))
    };
    (is_set(request, switch) && !is_flag() && !one() && !several()).then_some(field)
}

/// Returns whether a body has the field, with a value other than none, no and zero.
fn is_set(request: &Request, field: &str) -> bool {
    request.body.get(field).is_some_and(|value| value != "0" && has_other_than("false", value))
}

/// Returns whether a value, or one in its list, is other than none, no and `unset`. A batch has a list with a
/// value for each prompt.
fn has_other_than(unset: &str, value: &str) -> bool {
    let mut values = value.split(|one: char| matches!(one, '[' | ']' | ',') || one.is_ascii_whitespace());
    values.any(|one| !matches!(one, "" | "null" | "false") && one != unset)
}

/// Starts the edit of a body, and names the adapter in it (B3.10). SGLang takes a model's name without a
/// colon for the base model (`openai/serving_base.py`, `_parse_model_parameter`), and the Messages API drops
/// the field.
fn adapted<'a>(request: &'a Request, context: &LegContext<'_>) -> Edit<'a> {
    let (edit, adapter) = (with_usage(clean(request), context), request.model.as_str());
    match context.parent {
        Some(parent) if request.endpoint == Endpoint::Messages || adapter.contains(':') => {
            edit.set("model", json!(format!("{parent}:{adapter}")).to_string())
        }
        Some(_) => edit.set("lora_path", json!(adapter).to_string()),
        None => edit,
    }
}

/// Returns whether the engine takes an id for each input only. From one id, it makes those of a list where it
/// generates text (`managers/io_struct.py`, `GenerateReqInput`), and nowhere else (`EmbeddingReqInput`).
fn takes_list_of_ids(request: &Request) -> bool {
    matches!(request.endpoint, Endpoint::Embeddings | Endpoint::Classify(_)) && request.has_list_of_prompts()
}

/// Returns whether the engine knows each item of the request by an id of its own.
fn has_ids_of_items(request: &Request) -> bool {
    request.is_batch() || takes_list_of_ids(request)
}

/// The ids of the items of a list, also of a list of one.
fn ids_of_items(request: &Request, token: RequestToken) -> impl Iterator<Item = String> {
    (0..request.prompts).map(move |item| format!("{token}_{item}"))
}

/// Sets the id by which the engine aborts a request. For a response, that is the response's own id.
fn with_id<'a>(edit: Edit<'a>, request: &Request, token: RequestToken) -> Edit<'a> {
    let id = if takes_list_of_ids(request) {
        json!(ids_of_items(request, token).collect::<Vec<_>>())
    } else {
        json!(token.to_string())
    };
    let edit = edit.set("rid", id.to_string());
    match request.endpoint {
        Endpoint::Responses => edit.set("request_id", json!(response_id(token)).to_string()),
        _ => edit,
    }
}

/// The id of a response, and of both legs of it.
fn response_id(token: RequestToken) -> String {
    format!("resp_{token}")
}

/// Returns whether an engine's version is known, and at least this one.
fn is_at_least(version: Option<&str>, least: &[u32]) -> bool {
    let numbers = version.map(|version| version.split('.').map_while(|number| number.parse().ok()).collect());
    numbers.is_some_and(|numbers: Vec<u32>| numbers.as_slice() >= least)
}

/// Fields that both legs share. A batch has three arrays of equal length, with one room number for each item.
fn pair<'a>(request: &'a Request, context: &LegContext<'_>) -> Edit<'a> {
    let prefill = context.prefill.map(|target| target.spec);
    let host = prefill.map_or("", |spec| spec.bootstrap.host.as_deref().unwrap_or_else(|| spec.host()));
    let port = prefill.and_then(|spec| spec.bootstrap.port);
    let (host, port, room) = if request.items() > 1 {
        let each = context.rooms.len();
        (json!(vec![host; each]), json!(vec![port; each]), json!(context.rooms))
    } else {
        (json!(host), json!(port), json!(context.rooms.first()))
    };
    with_id(adapted(request, context), request, context.token)
        .set("bootstrap_host", Cow::Owned(host.to_string()))
        .set("bootstrap_port", Cow::Owned(port.to_string()))
        .set("bootstrap_room", Cow::Owned(room.to_string()))
}
