//! A client's request: parsed once from headers and body, and immutable afterwards. Errors name the field.

use std::sync::Arc;

use bytes::Bytes;
use http::HeaderMap;
use pointsman_workers::ModelName;

use crate::{
    openai::hints::{HintTrust, Hints},
    openai::json::JsonBody,
    openai::request_error::{RequestError, read},
};

/// Which OpenAI endpoint was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Endpoint {
    /// `/v1/chat/completions`
    ChatCompletions,
    /// `/v1/completions`
    Completions,
    /// `/v1/embeddings`: one leg, never streamed.
    Embeddings,
    /// `/tokenize`: passed through to any worker that serves the model.
    Tokenize,
}

/// A parsed request.
#[derive(Debug)]
pub(crate) struct Request {
    /// The endpoint.
    pub endpoint: Endpoint,
    /// The body as the client wrote it.
    pub body: JsonBody,
    prompt_key: &'static str,
    /// The model asked for.
    pub model: ModelName,
    /// Whether the answer is to be streamed.
    pub stream: bool,
    /// Whether a stream ends with usage.
    pub include_usage: bool,
    /// Choices asked for.
    pub n: u32,
    /// Cap on output tokens, by whichever key.
    pub max_tokens: Option<u32>,
    /// Items of a batch: prompts in a list of prompts, else 1.
    pub prompts: u32,
    /// Token ids the client sent instead of text, of a single prompt.
    pub token_ids: Option<Vec<u32>>,
    /// Routing hints.
    pub hints: Hints,
}

impl Endpoint {
    /// Its path, at the engines as well as here.
    #[must_use]
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Tokenize => "/tokenize",
        }
    }

    /// Stable metric label.
    #[must_use]
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat_completions",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Tokenize => "tokenize",
        }
    }

    /// Whether prefill and decode may run on two workers.
    #[must_use]
    pub(crate) fn splits(self) -> bool {
        matches!(self, Self::ChatCompletions | Self::Completions)
    }

    fn prompt_key(self, body: &JsonBody) -> &'static str {
        match self {
            // Embeddings replace any other prompt [A1].
            Self::Completions if body.get("prompt_embeds").is_some_and(|embeds| embeds != "null") => {
                "prompt_embeds"
            }
            Self::Completions => "prompt",
            Self::Embeddings => "input",
            Self::Tokenize if body.get("prompt").is_some() => "prompt",
            Self::ChatCompletions | Self::Tokenize => "messages",
        }
    }
}

impl Request {
    /// Parses a request.
    ///
    /// # Errors
    /// [`RequestError`] names the field.
    pub(crate) fn parse(
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: Bytes,
        trust: HintTrust,
    ) -> Result<Arc<Self>, RequestError> {
        let body = JsonBody::parse(body).map_err(|error| RequestError::new("body", &error.to_string()))?;
        let model: String = read(&body, "model")?.ok_or_else(|| RequestError::new("model", "is missing"))?;
        let stream = read(&body, "stream")?.unwrap_or(false);
        let options: StreamOptions = read(&body, "stream_options")?.unwrap_or_default();
        let n = read(&body, "n")?.unwrap_or(1);
        if n == 0 {
            return Err(RequestError::new("n", "`0` choices were asked for"));
        }
        let max_tokens: Option<u32> = read(&body, "max_tokens")?;
        let max_completion_tokens = read(&body, "max_completion_tokens")?;
        let key = endpoint.prompt_key(&body);
        let prompt = body.get(key).ok_or_else(|| RequestError::new(key, "is missing"))?;
        let (prompts, token_ids) = shape_of(prompt);
        let hints = Hints::parse(headers, &body, trust)?;
        let token_ids = hints.token_ids.clone().or(token_ids).filter(|_| key != "prompt_embeds");
        Ok(Arc::new(Self {
            endpoint,
            model: ModelName::new(&model),
            stream: stream && endpoint.splits(),
            prompt_key: key,
            include_usage: options.include_usage,
            n,
            max_tokens: max_completion_tokens.or(max_tokens),
            prompts,
            token_ids,
            hints,
            body,
        }))
    }

    /// The raw JSON that makes up the prompt, for byte blocks (H5).
    #[must_use]
    pub(crate) fn prompt(&self) -> &str {
        self.body.get(self.prompt_key).unwrap_or_default()
    }

    /// Items an engine sees: one for each choice of each prompt.
    #[must_use]
    pub(crate) fn items(&self) -> u32 {
        self.prompts.saturating_mul(self.n)
    }
}

#[derive(Default, serde::Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: bool,
}

/// How many prompts there are, and the token ids when it is a single one given as ids.
fn shape_of(prompt: &str) -> (u32, Option<Vec<u32>>) {
    // A text, or a chat's messages, which are one prompt however many they are.
    let first = prompt.strip_prefix('[').map(|items| items.trim_ascii_start().as_bytes().first().copied());
    if matches!(first, None | Some(Some(b'{'))) {
        return (1, None);
    }
    if let Ok(ids) = serde_json::from_str::<Vec<u32>>(prompt) {
        return (1, Some(ids));
    }
    // A list of strings, or of token lists.
    match serde_json::from_str::<Vec<&serde_json::value::RawValue>>(prompt) {
        Ok(items) if !items.is_empty() => (u32::try_from(items.len()).unwrap_or(u32::MAX), None),
        _ => (1, None),
    }
}

#[cfg(test)]
mod tests;
