//! `/v1/embeddings`: returns a vector for each input, which depends only on the input.

use axum::{http::StatusCode, response::Response};
use serde::Deserialize;
use serde_json::json;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{
    call::{Call, Refused},
    json as answer,
    pooling::refuse_ids,
};

#[derive(Deserialize)]
struct Asked {
    model: String,
    input: serde_json::Value,
    #[serde(default)]
    dimensions: Option<u32>,
}

pub(super) async fn embeddings(call: Call) -> Result<Response, Refused> {
    call.faulted().await?;
    let asked: Asked = serde_json::from_slice(&call.bytes).map_err(|error| {
        let body =
            json!({ "error": { "message": error.to_string(), "type": "BadRequestError", "code": 400 } });
        answer(StatusCode::BAD_REQUEST, body.to_string())
    })?;
    refuse_ids(&call, &asked.input)?;
    let batch = asked.input.as_array().filter(|items| items.first().is_some_and(|item| !item.is_number()));
    let inputs = batch.map_or_else(|| vec![asked.input.clone()], Clone::clone);
    let dimensions = asked.dimensions.unwrap_or(8).min(4_096);
    let vector = |input: &serde_json::Value| -> Vec<f64> {
        let text = input.to_string();
        let one = |place: u32| {
            let hash = xxh3_64_with_seed(text.as_bytes(), place.into());
            f64::from(u32::try_from(hash >> 32).unwrap_or(0)) / f64::from(u32::MAX)
        };
        (0..dimensions).map(one).collect()
    };
    let data: Vec<_> = inputs
        .iter()
        .enumerate()
        .map(|(index, input)| json!({ "object": "embedding", "index": index, "embedding": vector(input) }))
        .collect();
    let usage = json!({ "prompt_tokens": inputs.len(), "total_tokens": inputs.len() });
    let body = json!({ "object": "list", "model": asked.model, "data": data, "usage": usage });
    Ok(answer(StatusCode::OK, body.to_string()))
}
