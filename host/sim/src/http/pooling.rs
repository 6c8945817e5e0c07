//! `/v1/rerank`, `/v1/score`, `/pooling` and `/classify`: scores depend only on the texts. So do images.

use axum::{http::StatusCode, response::Response};
use serde::Deserialize;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    call::{Call, Refused},
    json as answer,
};
use crate::config::Dialect;

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
pub(super) async fn pooled(call: Call) -> Result<Response, Refused> {
    let asked = call.read(|asked: &Pooled| asked.model.as_ref()).await?;
    refuse_ids(&call, &asked.input)?;
    let value = score_of(&Value::Null, &asked.input);
    let one = if call.path.ends_with("/classify") {
        json!({ "index": 0, "label": "LABEL_0", "probs": [value], "num_classes": 1 })
    } else {
        json!({ "index": 0, "object": "pooling", "data": [value] })
    };
    let usage = json!({ "prompt_tokens": 1, "total_tokens": 1 });
    let body = json!({
        "id": "pool-1", "object": "list", "created": 0, "model": call.engine.config.model, "data": [one],
        "usage": usage,
    });
    Ok(answer(StatusCode::OK, body.to_string()))
}

/// Body of `/v1/images/generations`.
#[derive(Deserialize)]
struct Images {
    model: Option<String>,
    prompt: Value,
}

pub(super) async fn images(call: Call) -> Result<Response, Refused> {
    let asked = call.read(|asked: &Images| asked.model.as_ref()).await?;
    let image = json!({ "b64_json": score_of(&Value::Null, &asked.prompt).to_string() });
    Ok(answer(StatusCode::OK, json!({ "created": 0, "data": [image] }).to_string()))
}

pub(super) async fn rerank(call: Call) -> Result<Response, Refused> {
    let asked = call.read(|asked: &Rerank| asked.model.as_ref()).await?;
    let scored = asked.documents.iter().map(|document| score_of(&asked.query, document));
    let mut order: Vec<(usize, f64)> = scored.enumerate().collect();
    order.sort_by(|left, right| right.1.total_cmp(&left.1));
    let text = |index: usize| asked.documents.get(index).cloned().unwrap_or_default();
    // SGLang's answer is a list.
    let body = if call.engine.config.dialect == Dialect::Sglang {
        let one =
            |(index, score): (usize, f64)| json!({ "score": score, "document": text(index), "index": index });
        order.into_iter().map(one).collect()
    } else {
        let one = |(index, score): (usize, f64)| json!({ "index": index, "document": { "text": text(index) }, "relevance_score": score });
        let results: Vec<Value> = order.into_iter().map(one).collect();
        let tokens = asked.documents.len();
        let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
        json!({ "id": "rerank-1", "model": call.engine.config.model, "usage": usage, "results": results })
    };
    Ok(answer(StatusCode::OK, body.to_string()))
}

pub(super) async fn score(call: Call) -> Result<Response, Refused> {
    let asked = call.read(|asked: &Score| asked.model.as_ref()).await?;
    let others = asked.text_2.as_array().cloned().unwrap_or_else(|| vec![asked.text_2.clone()]);
    let data: Vec<Value> = others
        .iter()
        .enumerate()
        .map(|(index, other)| json!({ "index": index, "object": "score", "score": score_of(&asked.text_1, other) }))
        .collect();
    let usage = json!({ "prompt_tokens": others.len(), "total_tokens": others.len() });
    let body = json!({
        "id": "score-1", "object": "list", "created": 0, "model": call.engine.config.model, "data": data,
        "usage": usage,
    });
    Ok(answer(StatusCode::OK, body.to_string()))
}

/// Refuses a list of inputs whose ids are not a list, as SGLang 0.5.23 does.
pub(super) fn refuse_ids(call: &Call, input: &Value) -> Result<(), Refused> {
    let is_list = input.as_array().is_some_and(|items| items.first().is_some_and(|item| !item.is_number()));
    let body = || serde_json::from_slice::<Value>(&call.bytes);
    let one_id = || body().is_ok_and(|body| body.get("rid").is_some_and(Value::is_string));
    if call.engine.config.dialect != Dialect::Sglang || !is_list || !one_id() {
        return Ok(());
    }
    let message = "Internal server error: The rid should be a list.";
    let error = json!({
        "object": "error", "message": message, "type": "InternalServerError", "param": null, "code": 500,
    });
    Err(answer(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into())
}

fn score_of(query: &Value, document: &Value) -> f64 {
    let hash = xxh3_64(format!("{query}\n{document}").as_bytes());
    f64::from(u32::try_from(hash >> 32).unwrap_or(0)) / f64::from(u32::MAX)
}
