//! The gateway's own request to a worker that seems stuck: one token, no handoff, read to its end.

use std::time::Duration;

use bytes::Bytes;
use serde_json::json;

use super::client::{Posted, ProbeClient, Response};
use crate::{
    id::{Engine, ModelName, Role},
    spec::{KvTransport, WorkerSpec},
};

/// Maximum size of the answer's body in bytes.
const MAX_ANSWER: usize = 64 * 1024;

/// Result of the request for one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The engine made a token.
    Token,
    /// The engine refused the request, which proves that it answers.
    Refused,
    /// No answer, or an error.
    Nothing,
}

/// Asks for one token of `model`, for at most `limit`.
pub(super) async fn ask(
    client: &ProbeClient,
    spec: &WorkerSpec,
    model: &ModelName,
    limit: Duration,
) -> Answer {
    let key = spec.api_key.as_deref();
    if spec.engine == Engine::Sglang && spec.role != Role::Aggregated {
        // A worker of a pair takes no request without a partner. It can make a token for itself.
        let url = format!("{}/health_generate", spec.url);
        match client.get(&url, key, MAX_ANSWER, limit).await.0 {
            Response::Ok(_) => return Answer::Token,
            Response::Absent => {}
            Response::Untrusted(_)
            | Response::Status(..)
            | Response::Refused(_)
            | Response::TimedOut(_)
            | Response::Failed(_)
            | Response::Shortage(_) => {
                return Answer::Nothing;
            }
        }
    }
    // Its engine takes no request whose id names no pair.
    if spec.engine == Engine::Vllm && spec.transport == KvTransport::P2pNccl && spec.role != Role::Aggregated
    {
        return Answer::Nothing;
    }
    let completion = json!({ "model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0.0 });
    let message = json!({ "role": "user", "content": "Hello" });
    let chat = json!({ "model": model, "messages": [message], "max_tokens": 1, "temperature": 0.0 });
    for (path, body) in [("/v1/completions", completion), ("/v1/chat/completions", chat)] {
        let url = format!("{}{path}", spec.url);
        match client.post(&url, key, Bytes::from(body.to_string()), (MAX_ANSWER, limit)).await {
            Posted::Ok => return Answer::Token,
            Posted::Absent => {}
            Posted::Refused => return Answer::Refused,
            Posted::Failed => return Answer::Nothing,
        }
    }
    Answer::Refused
}
