//! `/v1/rerank`, `/v1/score`, `/pooling` and `/classify`: scores depend only on the texts. So do images.

use std::sync::Arc;

use axum::{
    Extension,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode, Uri},
    response::Response,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::{answer::cut_body, generate, json as answer, refuse};
use crate::{
    config::Dialect,
    engine::{Engine, InFlight, Outcome},
    failure::Failure,
    faults::Break,
    leg::Leg,
    server::Conn,
};

#[derive(Deserialize)]
struct Rerank {
    model: Option<String>,
    query: Value,
    documents: Vec<Value>,
}

#[derive(Deserialize)]
struct Score {
    model: Option<String>,
    #[serde(alias = "queries", alias = "query")]
    text_1: Value,
    #[serde(alias = "documents", alias = "items")]
    text_2: Value,
}

#[derive(Deserialize)]
struct Pooled {
    model: Option<String>,
    #[serde(alias = "text")]
    input: Value,
}

/// Answers `/pooling`, `/classify` and `/v1/classify`.
pub(super) async fn pooled(
    State(engine): State<Arc<Engine>>,
    Extension(conn): Extension<Conn>,
    uri: Uri,
    headers: HeaderMap,
    bytes: Bytes,
) -> Response {
    let model = |asked: &Pooled| asked.model.clone();
    let asked = match ask(&engine, &conn, uri.path(), &headers, &bytes, model).await {
        Ok(asked) => asked,
        Err(response) => return *response,
    };
    if let Some(refused) = refuse_ids(&engine, &bytes, &asked.input) {
        return refused;
    }
    let value = score_of(&Value::Null, &asked.input);
    let one = if uri.path().ends_with("/classify") {
        json!({ "index": 0, "label": "LABEL_0", "probs": [value], "num_classes": 1 })
    } else {
        json!({ "index": 0, "object": "pooling", "data": [value] })
    };
    let usage = json!({ "prompt_tokens": 1, "total_tokens": 1 });
    let body = json!({
        "id": "pool-1", "object": "list", "created": 0, "model": engine.config.model, "data": [one],
        "usage": usage,
    });
    answer(StatusCode::OK, body.to_string())
}

/// Body of `/v1/images/generations`.
#[derive(Deserialize)]
struct Images {
    model: Option<String>,
    prompt: Value,
}

pub(super) async fn images(
    State(engine): State<Arc<Engine>>,
    Extension(conn): Extension<Conn>,
    uri: Uri,
    headers: HeaderMap,
    bytes: Bytes,
) -> Response {
    let model = |asked: &Images| asked.model.clone();
    match ask(&engine, &conn, uri.path(), &headers, &bytes, model).await {
        Ok(asked) => {
            let image = json!({ "b64_json": score_of(&Value::Null, &asked.prompt).to_string() });
            answer(StatusCode::OK, json!({ "created": 0, "data": [image] }).to_string())
        }
        Err(response) => *response,
    }
}

pub(super) async fn rerank(
    State(engine): State<Arc<Engine>>,
    Extension(conn): Extension<Conn>,
    uri: Uri,
    headers: HeaderMap,
    bytes: Bytes,
) -> Response {
    let model = |asked: &Rerank| asked.model.clone();
    let asked = match ask(&engine, &conn, uri.path(), &headers, &bytes, model).await {
        Ok(asked) => asked,
        Err(response) => return *response,
    };
    let scored = asked.documents.iter().map(|document| score_of(&asked.query, document));
    let mut order: Vec<(usize, f64)> = scored.enumerate().collect();
    order.sort_by(|left, right| right.1.total_cmp(&left.1));
    let text = |index: usize| asked.documents.get(index).cloned().unwrap_or_default();
    // SGLang's answer is a list.
    let body = if engine.config.dialect == Dialect::Sglang {
        let one =
            |(index, score): (usize, f64)| json!({ "score": score, "document": text(index), "index": index });
        order.into_iter().map(one).collect()
    } else {
        let one = |(index, score): (usize, f64)| json!({ "index": index, "document": { "text": text(index) }, "relevance_score": score });
        let results: Vec<Value> = order.into_iter().map(one).collect();
        let tokens = asked.documents.len();
        let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
        json!({ "id": "rerank-1", "model": engine.config.model, "usage": usage, "results": results })
    };
    answer(StatusCode::OK, body.to_string())
}

pub(super) async fn score(
    State(engine): State<Arc<Engine>>,
    Extension(conn): Extension<Conn>,
    uri: Uri,
    headers: HeaderMap,
    bytes: Bytes,
) -> Response {
    let model = |asked: &Score| asked.model.clone();
    let asked = match ask(&engine, &conn, uri.path(), &headers, &bytes, model).await {
        Ok(asked) => asked,
        Err(response) => return *response,
    };
    let others = asked.text_2.as_array().cloned().unwrap_or_else(|| vec![asked.text_2.clone()]);
    let data: Vec<Value> = others
        .iter()
        .enumerate()
        .map(|(index, other)| json!({ "index": index, "object": "score", "score": score_of(&asked.text_1, other) }))
        .collect();
    let usage = json!({ "prompt_tokens": others.len(), "total_tokens": others.len() });
    let body = json!({
        "id": "score-1", "object": "list", "created": 0, "model": engine.config.model, "data": data,
        "usage": usage,
    });
    answer(StatusCode::OK, body.to_string())
}

/// Records a request and carries out the faults that leave no answer.
pub(super) async fn faulted(
    engine: &Arc<Engine>,
    conn: &Conn,
    path: &str,
    headers: &HeaderMap,
    bytes: &Bytes,
) -> Option<Response> {
    engine.record(|| generate::record(path, Some(Leg::Aggregated), headers, bytes));
    let faults = engine.faults.pick(Leg::Aggregated.into(), bytes);
    let mut flight = InFlight::new(engine, Leg::Aggregated);
    let shape = engine.config.dialect.shape();
    let response = generate::act_out(engine, shape, &faults, conn, false, &mut flight).await;
    let cut = matches!(faults.body_break(), Some((Break::Cut, _)));
    flight.end(if cut { Outcome::Fault } else { Outcome::Ok });
    response.or_else(|| cut.then(|| cut_body(r#"{"object":"list","data":[{"index":0}]}"#)))
}

/// Refuses a list of inputs whose ids are not a list, as SGLang 0.5.23 does.
pub(super) fn refuse_ids(engine: &Engine, body: &[u8], input: &Value) -> Option<Response> {
    let is_list = input.as_array().is_some_and(|items| items.first().is_some_and(|item| !item.is_number()));
    let one_id = || {
        serde_json::from_slice::<Value>(body).is_ok_and(|body| body.get("rid").is_some_and(Value::is_string))
    };
    let refused = engine.config.dialect == Dialect::Sglang && is_list && one_id();
    refused.then(|| {
        let message = "Internal server error: The rid should be a list.";
        let error = json!({
            "object": "error", "message": message, "type": "InternalServerError", "param": null, "code": 500,
        });
        answer(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    })
}

/// Records a request, carries out its faults, and reads its body.
async fn ask<T: DeserializeOwned>(
    engine: &Arc<Engine>,
    conn: &Conn,
    path: &str,
    headers: &HeaderMap,
    bytes: &Bytes,
    model: impl Fn(&T) -> Option<String>,
) -> Result<T, Box<Response>> {
    if let Some(response) = faulted(engine, conn, path, headers, bytes).await {
        return Err(Box::new(response));
    }
    let asked: T = serde_json::from_slice(bytes).map_err(|error| {
        Box::new(refuse(engine, &Failure::shape(format!("1 validation error:\n  {error}"))))
    })?;
    match model(&asked).filter(|model| *model != engine.config.model) {
        Some(model) => {
            let failure = Failure::not_found(format!("The model `{model}` does not exist."));
            Err(Box::new(refuse(engine, &failure)))
        }
        None => Ok(asked),
    }
}

fn score_of(query: &Value, document: &Value) -> f64 {
    let hash = xxh3_64(format!("{query}\n{document}").as_bytes());
    f64::from(u32::try_from(hash >> 32).unwrap_or(0)) / f64::from(u32::MAX)
}
