//! Where a request would run, without running it [F2]: `POST /v1/route` and the annotation
//! `query_instance_id:`.
//!
//! A preview changes nothing: no booking, no record in the index, no round-robin cursor.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use pointsman_orchestration::{Attempts, Event, LegOrder, Shape};
use pointsman_routing::{
    CandidateId, CostTerms, Pairing, Purpose, Query, RouteError, RoutePreview, RouterConfigOverride,
    RoutingRequest, cost,
};
use pointsman_workers::{Leg, Snapshot};
use serde_json::{Map, Value, json};

use crate::{
    big_numbers::with_texts,
    openai::{error::ApiError, request::Request, request_id::set_request_id},
    orchestrate::{self, RequestPlan, failure::quarantine::would_be_quarantined, plan},
    state::State,
    tokenization::RequestTokens,
};

/// Returns where the legs would run. `tokens` are the ids from a tokenizer when the client sent text.
///
/// # Errors
/// The errors of routing the legs.
pub(crate) fn preview(
    state: &State,
    request: &Arc<Request>,
    tokens: Option<&RequestTokens>,
    routing_request: &RoutingRequest,
    snapshot: &Snapshot,
    planning: &RequestPlan,
) -> Result<Value, ApiError> {
    let preview = Preview { state, request, routing_request, snapshot };
    let legs = preview.legs(planning)?;
    let mut worker_id = Map::new();
    for routed in &legs {
        // One worker that runs the whole request decodes, too.
        let [worker, rank] = match routed.receipt.leg {
            Leg::Prefill => ["prefill_worker_id", "prefill_dp_rank"],
            Leg::Decode | Leg::Aggregated => ["decode_worker_id", "decode_dp_rank"],
        };
        worker_id.insert(worker.to_owned(), json!(routed.receipt.worker));
        worker_id.insert(rank.to_owned(), json!(routed.receipt.rank));
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
        answer.insert("legs".to_owned(), legs.iter().map(leg).collect());
    }
    Ok(with_texts(answer))
}

/// Returns the answer of `POST /v1/route`.
pub(crate) fn of_route(request: &Request, preview: &Value, request_id: &str) -> Response<Bytes> {
    answer(request, (preview.to_string(), "application/json"), request_id)
}

/// Returns the answer to a client that asked where its request would run: JSON, or one item of a stream if it
/// asked for a stream.
pub(crate) fn response(request: &Request, preview: &Value, request_id: &str) -> Response<Bytes> {
    let (text, content_type) = match request.stream {
        true if !request.endpoint.format().is_named() => {
            (format!("data: {preview}\n\ndata: [DONE]\n\n"), "text/event-stream")
        }
        true => (format!("event: query_instance_id\ndata: {preview}\n\n"), "text/event-stream"),
        false => (preview.to_string(), "application/json"),
    };
    answer(request, (text, content_type), request_id)
}

/// Returns an answer with the same headers as the answer of a request that runs.
fn answer(request: &Request, (text, content_type): (String, &'static str), id: &str) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(text));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    set_request_id(headers, request.endpoint.format(), id);
    if let Some(warning) = &request.hints.warning {
        headers.insert("x-pointsman-warning", warning.clone());
    }
    response
}

/// A request that is routed without booking workers.
#[derive(Clone, Copy)]
struct Preview<'a> {
    state: &'a State,
    request: &'a Arc<Request>,
    routing_request: &'a RoutingRequest,
    snapshot: &'a Snapshot,
}

impl Preview<'_> {
    /// Routes the legs as the driver would, prefill first in the result.
    fn legs(self, planning: &RequestPlan) -> Result<Vec<RoutePreview>, ApiError> {
        if let Some(error) = would_be_quarantined(self.state, self.request) {
            return Err(error);
        }
        let mut shape = planning.shape;
        if let Some(planned) = planning.planned {
            if let Ok(local) = self.route(Leg::Aggregated, None, Some(planned)) {
                return Ok(vec![local]);
            }
            if plan::pair_takes_over(self.request, self.snapshot, &[]) {
                shape = Shape::Remote;
            }
        }
        if shape == Shape::Aggregated {
            let local = self.route(Leg::Aggregated, None, None);
            return Ok(vec![local.map_err(|error| self.client_error(error))?]);
        }
        let policy = plan::retry_policy(self.state, self.request, self.snapshot);
        let routed = match policy.order {
            LegOrder::PrefillFirst => self.prefill_first(),
            LegOrder::DecodeFirst => self.decode_first(),
        };
        let (leg, error) = match routed {
            Ok(pair) => return Ok(pair.into()),
            Err(failed) => failed,
        };
        if leg == Leg::Prefill
            && policy.local_fallback
            && Attempts::unroutable(leg, &error) == Event::NoPrefill
        {
            let local = self.route(Leg::Aggregated, None, None);
            // A failure of prefill explains more than "no worker", and a pause more than a failure.
            let told =
                |local: RouteError| self.client_error(if local.pause().is_some() { local } else { error });
            return local.map(|local| vec![local]).map_err(told);
        }
        Err(self.client_error(error))
    }

    fn prefill_first(self) -> Result<[RoutePreview; 2], (Leg, RouteError)> {
        let prefill = self.leg(Leg::Prefill, None)?;
        let decode = self.leg(Leg::Decode, Some(&prefill))?;
        Ok([prefill, decode])
    }

    fn decode_first(self) -> Result<[RoutePreview; 2], (Leg, RouteError)> {
        let decode = self.leg(Leg::Decode, None)?;
        let prefill = self.leg(Leg::Prefill, Some(&decode))?;
        Ok([prefill, decode])
    }

    fn leg(self, leg: Leg, other: Option<&RoutePreview>) -> Result<RoutePreview, (Leg, RouteError)> {
        self.route(leg, other, None).map_err(|error| (leg, error))
    }

    fn route(
        self,
        leg: Leg,
        other: Option<&RoutePreview>,
        planned: Option<CandidateId>,
    ) -> Result<RoutePreview, RouteError> {
        let Self { state, request, routing_request, snapshot } = self;
        let question = plan::question(state, request, routing_request, snapshot, leg);
        // A session that the request opens starts without its earlier bindings (A2).
        let opens = request.hints.session_control.is_some_and(|control| control.open);
        let query = Query {
            explain: true,
            other_leg: other.map(|other| orchestrate::id_of(&other.candidate)),
            pairing: Pairing { is_first: leg == Leg::Decode && other.is_none(), ..question.pairing },
            planned,
            session: question.session.filter(|_| !opens),
            ..question
        };
        let over = match leg {
            Leg::Decode => state.router.decode_config(&query, Purpose::Preview).0,
            Leg::Prefill | Leg::Aggregated => RouterConfigOverride::default(),
        };
        state.router.preview(&query, &over)
    }

    fn client_error(self, error: RouteError) -> ApiError {
        let Self { state, request, .. } = self;
        ApiError::of_refusal(error, state.settings.busy_status, || state.queue.pressure(&request.model))
    }
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
