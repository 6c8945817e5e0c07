//! Shared by vLLM's transports: the prefill leg asks for one token that is not streamed, and some requests
//! cannot be split.

use std::borrow::Cow;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use json_splice::{Edit, JsonBody};
use pointsman_orchestration::is_up;
use pointsman_workers::{Candidate, Engine};

use super::{LegContext, Pools, Target, clean, token_header, with_usage};
use crate::{
    openai::lax::WholeNumber,
    openai::request::{Endpoint, Request},
    upstream::LegHeaders,
};

/// A handoff has one consumer, and these have several, or need the whole prompt at one place.
pub(super) fn unsplittable(request: &Request) -> Option<&'static str> {
    let truthy = |key| request.body.get(key).is_some_and(|value| !matches!(value, "null" | "false"));
    if request.n > 1 {
        return Some("n");
    }
    if request.prompts > 1 {
        return Some("list_of_prompts");
    }
    // Beam search runs requests of its own, without a handoff.
    ["echo", "prompt_logprobs", "best_of", "use_beam_search"]
        .into_iter()
        .find(|key| match *key {
            "best_of" => request.body.get(key).is_some_and(|value| !matches!(value, "null" | "1")),
            _ => truthy(key),
        })
        .or_else(|| refused_in_decode(request))
}

/// Fields for which every engine refuses a decode leg, and which the prefill leg lacks or has with other
/// values. One engine then refuses the request at once, before a prompt is computed for nothing.
fn refused_in_decode(request: &Request) -> Option<&'static str> {
    let (body, cap) = (&request.body, request.max_tokens);
    if cap == Some(0) {
        return Some("a limit of 0 output tokens");
    }
    if request.is_chat() && !request.stream && body.counts("stream_options").items > 0 {
        return Some("stream_options without stream");
    }
    let takes_minimum = !matches!(request.endpoint, Endpoint::Messages | Endpoint::Responses);
    match body.read::<WholeNumber>("min_tokens").ok().flatten() {
        _ if !takes_minimum || body.get("min_tokens").is_none() => None,
        None => Some("min_tokens is not a whole number from 0 on"),
        Some(WholeNumber(minimum)) => {
            cap.is_some_and(|cap| minimum > cap).then_some("min_tokens above max_tokens")
        }
    }
}

/// Engines before 0.27 parse the one token of a prefill as the JSON of a tool call that the client forces,
/// and answer 500 or 400 (vllm#36794, #38911). No other `tool_choice` is safe: `none` leaves the tools out
/// of the prompt before 0.10, or as the operator says, and engines without a parser refuse `auto`.
///
/// Engines before 0.32 may cut a prompt to what `max_tokens` leaves of the context, so that the legs would
/// have different prompts (vllm#42474).
///
/// The handler of `/v1/responses` takes a handoff from 0.19 on (vllm#37424).
///
/// Engines from 0.20 on refuse a limit of output tokens above their context, which earlier ones lower
/// (vllm#40324), and from 0.32 on a budget for thinking that is not below the limit.
pub(super) fn refused_by(request: &Request, [prefill, decode]: Pools<'_>) -> Option<&'static str> {
    let all_can = |version| all_since(version, prefill) && all_since(version, decode);
    if request.endpoint == Endpoint::Responses && !all_can((0, 19)) {
        return Some(request.endpoint.path());
    }
    if forces_tool(request) && !all_since((0, 27), prefill) {
        return Some("tool_choice");
    }
    let cuts = cuts_prompt(request).filter(|_| !all_can((0, 32)));
    if cuts.is_some() {
        return cuts;
    }
    if asks_for_more_than(decode, request) && all_since((0, 20), decode) {
        return Some("a limit of output tokens above the context of each decode worker");
    }
    (thinks_too_long(request) && all_since((0, 32), decode))
        .then_some("thinking.budget_tokens is not below max_tokens")
}

/// Returns the field by which the engine cuts a prompt that does not fit its context: a negative limit, or
/// for a response any `truncation` but `disabled` (`openai/responses/protocol.py`, `build_tok_params`).
fn cuts_prompt(request: &Request) -> Option<&'static str> {
    let (field, cuts): (_, fn(&str) -> bool) = match request.endpoint {
        Endpoint::Responses => ("truncation", |value| value != "\"disabled\""),
        _ => ("truncate_prompt_tokens", |limit| limit.trim_start_matches(['"', ' ']).starts_with('-')),
    };
    request.body.get(field).is_some_and(cuts).then_some(field)
}

/// Returns whether the limit of output tokens is above the context of each worker of the pool that is up.
fn asks_for_more_than(pool: &[Candidate], request: &Request) -> bool {
    let context = |one: &Candidate| one.worker.context_length(&request.model);
    let mut up = pool.iter().filter(|one| is_up(one)).peekable();
    // A worker that just went down may come back.
    if up.peek().is_none() {
        return false;
    }
    request.max_tokens.is_some_and(|cap| up.all(|one| context(one).is_some_and(|at| at < cap)))
}

/// Returns whether a message's budget for thinking leaves no token for its text.
fn thinks_too_long(request: &Request) -> bool {
    let thinking = request.body.object("thinking").filter(|_| request.endpoint == Endpoint::Messages);
    let Some(Ok(thinking)) = thinking else { return false };
    let budget = thinking.read::<WholeNumber>("budget_tokens").ok().flatten();
    let is_enabled = thinking.get("type") == Some("\"enabled\"");
    is_enabled && budget.zip(request.max_tokens).is_some_and(|(WholeNumber(budget), cap)| budget >= cap)
}

/// Returns whether all vLLM workers of the pool that are up report at least this version.
fn all_since(version: (u32, u32), pool: &[Candidate]) -> bool {
    let matters = |one: &&Candidate| one.worker.spec().engine == Engine::Vllm && is_up(one);
    pool.iter().filter(matters).all(|one| one.worker.engine_version() >= Some(version))
}

/// Returns whether the answer has to be a call of a tool.
fn forces_tool(request: &Request) -> bool {
    let Some(choice) = request.body.get("tool_choice") else { return false };
    match request.endpoint {
        Endpoint::ChatCompletions | Endpoint::Responses => {
            choice.starts_with('{') || choice == "\"required\""
        }
        Endpoint::Messages => {
            let choice = JsonBody::parse(Bytes::copy_from_slice(choice.as_bytes())).ok();
            let kind = choice.as_ref().and_then(|choice| choice.get("type"));
            kind.is_some_and(|kind| matches!(kind, "\"any\"" | "\"tool\""))
        }
        _ => false,
    }
}

/// Starts the body of a leg that generates one token, without the fields that an engine refuses in it.
fn of_one_token(request: &Request) -> Edit<'_> {
    let edit = clean(request).remove("stream_options").set("stream", "false");
    if request.endpoint == Endpoint::Responses {
        // The client's response is that of the decode leg.
        return edit.set("max_output_tokens", "1").set("store", "false");
    }
    let edit = edit.set("max_tokens", "1");
    match request.body.get("max_completion_tokens") {
        Some(_) => edit.set("max_completion_tokens", "1"),
        None => edit,
    }
}

/// The prefill leg's body without a handoff. `min_tokens` is 1: end-of-sequence cannot end the step, so
/// parameters always come and decode samples the token. Log probabilities stay, so that prefill refuses those
/// that decode would refuse.
pub(super) fn prefill(request: &Request) -> Edit<'_> {
    let edit = of_one_token(request);
    // These endpoints have no `min_tokens`: a prefill may end with end-of-sequence (C8).
    match request.endpoint {
        Endpoint::Messages | Endpoint::Responses => edit,
        _ => edit.set("min_tokens", "1"),
    }
}

/// The decode body of a client that left: one token, so that decode pulls the blocks and prefill frees them.
pub(super) fn one_token(request: &Request) -> Edit<'_> {
    const LOGPROBS: [&str; 4] = ["logprobs", "top_logprobs", "logprob_token_ids", "include"];
    let edit = LOGPROBS.into_iter().fold(of_one_token(request), Edit::remove);
    if request.body.get("min_tokens").is_some_and(|min| min != "0") {
        return edit.set("min_tokens", "1");
    }
    // A budget has to be less than `max_tokens`, and does not change the prompt. Without the field, thinking
    // that is disabled would be enabled in the prompt. The engine checks no budget in a prefill leg.
    let thinking = request.body.object("thinking").and_then(Result::ok);
    let has_budget = thinking.is_some_and(|thinking| thinking.get("type") == Some("\"enabled\""));
    if request.endpoint == Endpoint::Messages && has_budget { edit.remove("thinking") } else { edit }
}

/// Starts the body of a leg whose stream the client gets.
pub(super) fn answering<'a>(request: &'a Request, context: &LegContext<'_>) -> Edit<'a> {
    let edit = with_usage(clean(request), context);
    if context.ids.wanted { edit.set("return_token_ids", "true") } else { edit }
}

/// The body of a request that runs on one worker.
pub(super) fn single(request: &Request, context: &LegContext<'_>) -> Bytes {
    let edit = answering(request, context);
    match context.ids.prompt {
        Some(_) => edit.set("kv_transfer_params", with_prompt("{}", context).into_owned()).finish(),
        None => edit.finish(),
    }
}

/// Adds the ids of the prompt to handoff parameters: an engine takes them in the place of the messages
/// (`renderers/online_renderer.py`, `_reused_prompt_token_ids`). Both legs of a pair need the same prompt.
pub(super) fn with_prompt<'a>(parameters: &'a str, context: &LegContext<'_>) -> Cow<'a, str> {
    let open = parameters.trim_end().strip_suffix('}');
    let (Some(ids), Some(open)) = (context.ids.prompt, open) else { return Cow::Borrowed(parameters) };
    let comma = if open.trim_end().ends_with('{') { "" } else { "," };
    Cow::Owned(format!("{open}{comma}\"prompt_token_ids\":{ids}}}"))
}

/// Puts the prefill answer's parameters where decode looks for them. Parameters that carry bootstrap fields
/// themselves are a bootstrap (C9).
pub(super) fn hand_over<'a>(edit: Edit<'a>, parameters: &'a str, context: &LegContext<'_>) -> Edit<'a> {
    // Few parameters have the room, so its name is looked for first.
    let may_have_room = parameters.contains("room\"") || parameters.contains('\\');
    let parse = |parameters: &str| JsonBody::parse(Bytes::copy_from_slice(parameters.as_bytes())).ok();
    let fields = Some(parameters).filter(|_| may_have_room).and_then(parse);
    let Some(fields) = fields.filter(is_bootstrap) else {
        return edit.set("kv_transfer_params", with_prompt(parameters, context));
    };
    BOOTSTRAP.iter().fold(edit, |edit, key| match fields.get(key) {
        Some(value) => edit.set(key, value.to_owned()),
        None => edit,
    })
}

const BOOTSTRAP: [&str; 3] = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];

/// Returns whether a handoff result is a bootstrap.
fn is_bootstrap(parameters: &JsonBody) -> bool {
    parameters.get("bootstrap_room").is_some_and(|room| room != "null")
}

/// The attempt's id, and the rank where there are several.
pub(super) fn headers(context: &LegContext<'_>, target: Target<'_>) -> LegHeaders {
    // With room for the rank, a key and a trace.
    let mut headers = LegHeaders::with_capacity(5);
    headers.push(token_header(context.token.digits().as_bytes()));
    headers.extend(rank_header(target));
    headers
}

/// The rank, where there are several, by the number that the engine knows it by.
pub(super) fn rank_header(target: Target<'_>) -> Option<(HeaderName, HeaderValue)> {
    const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
    (target.spec.dp_size > 1).then(|| (RANK, HeaderValue::from(target.spec.first_rank + target.rank.0)))
}
