//! Endpoints that a gateway probes: health, version, models, tokenization.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::{call::Call, json as json_response, refuse, refuse_as};
use crate::{
    api::Api,
    config::Dialect,
    engine::Engine,
    failure::Failure,
    faults::{FaultKind, FaultLeg},
    request::Body,
    server::Conn,
};

/// Time that SGLang waits in `/health` before it checks whether the scheduler has answered, in wall-clock
/// time.
const SGLANG_HEALTH_WAIT: Duration = Duration::from_secs(1);

pub(super) async fn health(State(engine): State<Arc<Engine>>, Extension(conn): Extension<Conn>) -> Response {
    if let Some(response) = faulty(&engine, FaultLeg::Health, &conn).await {
        return response;
    }
    if engine.config.dialect == Dialect::Sglang {
        tokio::time::sleep(SGLANG_HEALTH_WAIT).await;
    }
    StatusCode::OK.into_response()
}

/// Handles SGLang's `/ready`, which answers at once.
pub(super) async fn ready(State(engine): State<Arc<Engine>>, Extension(conn): Extension<Conn>) -> Response {
    if !engine.config.ready {
        return super::not_found().await;
    }
    faulty(&engine, FaultLeg::Health, &conn).await.unwrap_or_else(|| StatusCode::OK.into_response())
}

pub(super) async fn models(State(engine): State<Arc<Engine>>, Extension(conn): Extension<Conn>) -> Response {
    if let Some(response) = faulty(&engine, FaultLeg::Probe, &conn).await {
        return response;
    }
    let config = &engine.config;
    let model = json!({
        "id": config.model,
        "object": "model",
        "created": engine.started_unix,
        "owned_by": config.dialect.as_str(),
        "root": config.model,
        "parent": null,
        "max_model_len": config.max_model_len,
    });
    ok(&json!({"object": "list", "data": [model]}))
}

pub(super) async fn version(State(engine): State<Arc<Engine>>, Extension(conn): Extension<Conn>) -> Response {
    match faulty(&engine, FaultLeg::Probe, &conn).await {
        Some(response) => response,
        None => ok(&json!({"version": engine.config.version()})),
    }
}

/// Handles vLLM's `/tokenize`, for a prompt or for messages.
pub(super) async fn tokenize(call: Call) -> Response {
    let max = call.engine.config.max_model_len;
    tokens_of(&call, |tokens| {
        let (count, tokens) = (tokens.len(), serde_json::to_string(tokens).unwrap_or_default());
        format!(r#"{{"count":{count},"max_model_len":{max},"tokens":{tokens},"token_strs":null}}"#)
    })
    .await
}

/// Handles vLLM's `/v1/chat/completions/render`: the tokens of a chat, with the keys that routers read.
pub(super) async fn render(call: Call) -> Response {
    let model = &call.engine.config.model;
    tokens_of(&call, |tokens| json!({ "model": model, "token_ids": tokens }).to_string()).await
}

/// Answers with the result of `write` for the tokens of a request.
async fn tokens_of(call: &Call, write: impl FnOnce(&[u32]) -> String) -> Response {
    let Call { engine, conn, headers, bytes, .. } = call;
    if let Some(response) = faulty(engine, FaultLeg::Tokenize, conn).await {
        return response;
    }
    let parsed = Body::parse(&engine.config, Api::Completions, headers, bytes).and_then(|body| {
        let chat = body.is_chat();
        body.prompts(chat)
    });
    match parsed {
        Ok(prompts) => {
            let body = write(prompts.first().map_or(&[][..], |prompt| prompt.tokens()));
            json_response(StatusCode::OK, body)
        }
        Err(failure) => refuse(engine, &failure),
    }
}

/// Handles vLLM's `/detokenize`.
pub(super) async fn detokenize(call: Call) -> Response {
    let Call { engine, conn, bytes, .. } = &call;
    if let Some(response) = faulty(engine, FaultLeg::Tokenize, conn).await {
        return response;
    }
    match serde_json::from_slice::<Tokens>(bytes) {
        Ok(asked) => {
            let words: Vec<String> = asked.tokens.iter().map(|id| format!("t{id}")).collect();
            ok(&json!({ "prompt": words.join(" ") }))
        }
        Err(error) => refuse(engine, &Failure::shape(format!("1 validation error:\n  {error}"))),
    }
}

#[derive(serde::Deserialize)]
struct Tokens {
    tokens: Vec<u32>,
}

/// Handles `/v1/messages/count_tokens`.
pub(super) async fn count_tokens(call: Call) -> Response {
    let Call { engine, conn, headers, bytes, .. } = &call;
    if let Some(response) = faulty(engine, FaultLeg::Tokenize, conn).await {
        return response;
    }
    let parsed = Body::parse(&engine.config, Api::Messages, headers, bytes);
    match parsed.and_then(|body| body.prompts(true)) {
        Ok(prompts) => {
            let tokens: u32 = prompts.iter().map(crate::core::Prompt::isl).sum();
            ok(&json!({ "input_tokens": tokens }))
        }
        Err(failure) => refuse_as(engine.config.dialect.shape_of(Api::Messages), &failure),
    }
}

/// Carries out a fault that affects a probe.
pub(super) async fn faulty(engine: &Engine, leg: FaultLeg, conn: &Conn) -> Option<Response> {
    let faults = engine.faults.pick(leg, b"");
    if let Some(ms) = faults.slow_ms() {
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
    if faults.has(&FaultKind::Refuse) {
        conn.reset();
        std::future::pending::<()>().await;
    }
    if faults.has(&FaultKind::HangBeforeHeaders) {
        std::future::pending::<()>().await;
    }
    let (status, retry_after) = faults.status()?;
    Some(refuse(engine, &Failure::injected(status, retry_after)))
}

pub(super) fn ok(value: &serde_json::Value) -> Response {
    json_response(StatusCode::OK, value.to_string())
}
