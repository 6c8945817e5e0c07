//! Handles generation requests: determines the leg, draws faults, starts the sequences, and passes them to
//! [`super::answer`].

use std::sync::Arc;

use axum::{http::HeaderMap, response::Response};

use super::{
    answer::{self, Answer},
    call::{Call, act_out, record},
    refuse_as, stored,
};
use crate::{
    api::Api,
    config::Dialect,
    dialect::Incoming,
    engine::{Aborts, Engine, InFlight, Outcome, Sequence, random_hex, unix_now},
    failure::Failure,
    faults::Picked,
    leg::Leg,
    request::Body,
    wire::Meta,
};

pub(super) async fn serve(call: Call, api: Api) -> Response {
    let Call { engine, conn, headers, bytes, .. } = &call;
    let handshake = engine.config.dialect.handshake();
    let shape = engine.config.dialect.shape_of(api);
    let parsed = Body::parse(&engine.config, api, headers, bytes)
        .and_then(|body| handshake.leg(engine, &body).map(|leg| (body, leg)));
    engine.record(|| record(api.path(), parsed.as_ref().ok().map(|(_, leg)| *leg), headers, bytes));
    let (body, leg) = match parsed {
        Ok(parsed) => parsed,
        Err(failure) => {
            engine.counters.end(engine.role().leg(), Outcome::Invalid);
            return refuse_as(shape, &failure);
        }
    };
    if let Some(previous) = body.previous_response_id.as_ref().filter(|id| !engine.has_stored(id)) {
        engine.counters.end(leg, Outcome::Invalid);
        return stored::not_found(previous);
    }
    engine.awake().await;
    let faults = engine.faults.pick(leg.into(), bytes);
    let mut flight = InFlight::new(engine, leg);
    if let Some(response) = act_out(engine, shape, &faults, conn, body.stream, &mut flight).await {
        return response;
    }
    let ids = response_ids(engine.config.dialect, api, headers, &body);
    flight.id = ids.first().filter(|_| engine.config.record > 0).cloned();
    if let (Api::Responses, Some(id)) = (api, ids.first()) {
        engine.store(id);
    }
    match start(engine, api, &body, leg, &faults, ids).await {
        Ok(answer) if body.stream => answer.stream(flight, faults.body_break()),
        Ok(answer) => answer.whole(flight, faults.body_break()).await,
        Err(failure) => {
            flight.end(answer::outcome_of(&failure));
            refuse_as(shape, &failure)
        }
    }
}

/// Submits all sequences.
async fn start(
    engine: &Arc<Engine>,
    api: Api,
    body: &Body,
    leg: Leg,
    faults: &Picked,
    ids: Vec<String>,
) -> Result<Answer, Failure> {
    let (handshake, chat) = (engine.config.dialect.handshake(), api.is_chat());
    let prompts = body.prompts(chat)?;
    let sglang = engine.config.dialect == Dialect::Sglang;
    let id = ids.first().cloned().unwrap_or_default();
    let named = if sglang { ids } else { Vec::new() };
    let abort = Aborts::enter(engine, named.clone())
        .ok_or_else(|| Failure::bad(format!("Duplicate request ID detected: {id}")))?;
    if sglang && leg != Leg::Aggregated && body.n() > 1 {
        // The run that fills the cache and the runs of all choices wait in the same room.
        std::future::pending::<()>().await;
    }
    let fixed = if leg == Leg::Prefill { handshake.prefill_answer() } else { None };
    let plans = body.plans(&engine.config, chat, &prompts, fixed, faults)?;
    let incoming = Incoming { engine, body, faults, id: &id, sequences: plans.len() };
    let mut sequences = Vec::with_capacity(plans.len());
    for (index, plan) in plans.into_iter().enumerate() {
        let link = handshake.link(leg, &incoming, index)?;
        sequences.push(Sequence::submit(engine, plan, link, abort.token(index))?);
    }
    for sequence in sequences.iter_mut().filter(|sequence| sequence.decides_status()) {
        sequence.prepare().await?;
    }
    let (include_usage, continuous_usage) = body.usage();
    let meta = Meta {
        api,
        chat,
        id,
        item_ids: named,
        created: unix_now(),
        model: serde_json::to_string(&engine.config.model).unwrap_or_default(),
        fingerprint: engine.id.get(..8).unwrap_or_default().to_owned(),
        include_usage,
        continuous_usage: continuous_usage || api.is_named(),
        token_ids: body.return_token_ids,
        batch: body.is_batch() || body.n() > 1,
        prompts,
        n: body.n(),
    };
    Ok(Answer::new(engine, meta, sequences, abort))
}

/// Returns the ids of a response: SGLang has one for each item, the other engines one in all. vLLM and OpenAI
/// use the request's id or a random one, with a prefix. SGLang uses the body's `rid`.
fn response_ids(dialect: Dialect, api: Api, headers: &HeaderMap, body: &Body) -> Vec<String> {
    if dialect == Dialect::Sglang {
        return body.item_ids();
    }
    let given = headers.get("x-request-id").and_then(|value| value.to_str().ok());
    // The id is written to JSON without escaping.
    let given = given.filter(|id| !id.contains(['"', '\\']) && id.chars().all(|c| !c.is_control()));
    let id = given.map_or_else(|| random_hex(16), str::to_owned);
    vec![format!("{}{id}", api.id_prefix())]
}
