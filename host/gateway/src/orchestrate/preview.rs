//! Where a request would run, without running it [F2]: `POST /v1/route` and the annotation
//! `query_instance_id:`.
//!
//! A preview changes nothing: no booking, no record in the index, no round-robin cursor.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use pointsman_orchestration::Shape;
use pointsman_routing::{
    CandidateId, CostTerms, Purpose, Query, RoutePreview, RouterConfigOverride, RoutingRequest, cost,
};
use pointsman_workers::{Leg, Snapshot};
use serde_json::{Map, Value, json};

use crate::{
    openai::{endpoint::Format, error::ApiError, request::Request},
    orchestrate::{self, RequestPlan},
    state::State,
    tokenization::RequestTokens,
};

/// Returns where the legs would run. `tokens` are the ids from a tokenizer when the client sent text.
///
/// # Errors
/// As routing them would fail.
pub(crate) fn preview(
    state: &State,
    request: &Arc<Request>,
    tokens: Option<&RequestTokens>,
    routing_request: &RoutingRequest,
    snapshot: &Snapshot,
    planning: &RequestPlan,
) -> Result<Value, ApiError> {
    let question = |leg| Query {
        explain: true,
        ..orchestrate::question(state, request, routing_request, snapshot, leg)
    };
    let (mut worker_id, mut legs) = (Map::new(), Vec::new());
    if planning.shape == Shape::Remote {
        let prefill = routed(state, &question(Leg::Prefill), &RouterConfigOverride::default())?;
        let query =
            Query { other_leg: Some(orchestrate::id_of(&prefill.candidate)), ..question(Leg::Decode) };
        legs.push(leg(&prefill));
        worker_id.insert("prefill_worker_id".to_owned(), json!(prefill.receipt.worker));
        worker_id.insert("prefill_dp_rank".to_owned(), json!(prefill.receipt.rank));
        let over = state.router.decode_config(&query, Purpose::Preview).0;
        let decode = routed(state, &query, &over)?;
        legs.push(leg(&decode));
        worker_id.insert("decode_worker_id".to_owned(), json!(decode.receipt.worker));
        worker_id.insert("decode_dp_rank".to_owned(), json!(decode.receipt.rank));
    } else {
        let query = Query { planned: planning.planned, ..question(Leg::Aggregated) };
        let single = routed(state, &query, &RouterConfigOverride::default())?;
        legs.push(leg(&single));
        worker_id.insert("decode_worker_id".to_owned(), json!(single.receipt.worker));
        worker_id.insert("decode_dp_rank".to_owned(), json!(single.receipt.rank));
    }
    let known = || tokens.map(RequestTokens::to_vec);
    // Without a tokenizer, the ids of a text are not known.
    let token_ids = request.token_ids.clone().or_else(known);
    let mut answer = json!({
        "worker_id": worker_id,
        "token_ids": token_ids,
        "prompt_tokens": routing_request.prompt_tokens,
        "prompt_tokens_estimated": routing_request.prompt_tokens_estimated,
        "prompt_blocks": routing_request.prefix.named_blocks(),
    });
    if let Some(answer) = answer.as_object_mut().filter(|_| state.settings.tell_decisions) {
        answer.insert("legs".to_owned(), Value::from(legs));
    }
    Ok(answer)
}

/// Returns the answer to a client that asked where its request would run: JSON, or one item of a stream if it
/// asked for a stream.
pub(crate) fn response(request: &Request, preview: &Value) -> Response<Bytes> {
    let (text, content_type) = match request.stream {
        true if request.endpoint.format() == Format::OpenAi => {
            (format!("data: {preview}\n\ndata: [DONE]\n\n"), "text/event-stream")
        }
        true => (format!("event: query_instance_id\ndata: {preview}\n\n"), "text/event-stream"),
        false => (preview.to_string(), "application/json"),
    };
    let mut response = Response::new(Bytes::from(text));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    if let Some(warning) = &request.hints.warning {
        headers.insert("x-pointsman-warning", warning.clone());
    }
    response
}

fn routed(state: &State, query: &Query<'_>, over: &RouterConfigOverride) -> Result<RoutePreview, ApiError> {
    state.router.preview(query, over).map_err(|error| ApiError::of_route(error, state.settings.busy_status))
}

/// Describes a leg: its receipt, the load of its worker, and the cost terms of every candidate.
fn leg(explained: &RoutePreview) -> Value {
    let load = explained.candidate.load();
    let runner_up = explained.receipt.runner_up();
    let candidates = explained.terms.iter().map(|(id, terms)| candidate(explained, *id, terms, runner_up));
    json!({
        "receipt": explained.receipt,
        "load": {
            "active_requests": load.active_requests(),
            "active_prefill_tokens": load.active_prefill_tokens(),
            "decode_blocks": load.decode_blocks(),
        },
        "runner_up": runner_up.map(|(worker, dp_rank, cost)| json!({ "worker": worker, "dp_rank": dp_rank, "cost": cost })),
        "candidates": candidates.collect::<Vec<_>>(),
    })
}

/// Describes a candidate. `cost` is the cost it was ranked by, when known; `native_cost` follows from the
/// terms.
fn candidate(
    explained: &RoutePreview,
    (worker, dp_rank): CandidateId,
    terms: &CostTerms,
    runner_up: Option<(pointsman_workers::WorkerId, pointsman_workers::DpRank, f32)>,
) -> Value {
    let receipt = &explained.receipt;
    let [device, host, disk] = terms.cached;
    let own = receipt.costs.iter().find(|(other, rank, _)| (*other, *rank) == (worker, dp_rank));
    json!({
        "worker": worker, "dp_rank": dp_rank,
        "chosen": (receipt.worker, receipt.rank) == (worker, dp_rank),
        "runner_up": runner_up.is_some_and(|(other, rank, _)| (other, rank) == (worker, dp_rank)),
        "cost": own.map(|(_, _, cost)| cost),
        "native_cost": cost(terms, &explained.config),
        "cached_blocks": { "device": device, "host": host, "disk": disk },
        "terms": {
            "prompt_tokens": terms.prompt_tokens, "block_size": terms.block_size,
            "active_prefill_tokens": terms.active_prefill_tokens, "decode_blocks": terms.decode_blocks,
            "active_requests": terms.active_requests, "taint_preference": terms.taint_preference,
        },
    })
}
