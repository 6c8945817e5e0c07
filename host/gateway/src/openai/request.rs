//! A client's request: parsed once from headers and body, and immutable afterwards. Errors name the field.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use json_splice::JsonBody;
use pointsman_tokens::{PromptBytes, TEMPLATE_FIELDS};
use pointsman_workers::ModelName;

use crate::{
    config::Limits,
    openai::client_key::forwarded,
    openai::endpoint::PromptKeys,
    openai::error::ApiError,
    openai::form::{self, Form},
    openai::generate,
    openai::hints::{HintTrust, Hints},
    openai::lax::Flag,
    openai::limits::{check_batch, check_lists, check_model},
    openai::request_error::{RequestError, read},
    openai::sampling::Sampling,
    openai::trace_context::TraceContext,
};

pub(crate) use crate::openai::endpoint::Endpoint;

mod prompt_use;
mod shape;

use shape::{is_list_of_prompts, only_prompt, prompts_of, shape_of};

/// Stands in front of the bodies of some clients. Engines skip it.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A parsed request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The endpoint.
    pub endpoint: Endpoint,
    /// The body as the client wrote it; an empty object when it is a form.
    pub body: JsonBody,
    /// The body of an endpoint that takes a form.
    pub form: Option<Form>,
    /// Field that comes before the prompt.
    preamble: Option<&'static str>,
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
    /// Token ids the client sent instead of text, of a single prompt, also of a list of one.
    pub token_ids: Option<Vec<u32>>,
    /// Routing hints.
    pub hints: Hints,
    /// The trace it belongs to.
    pub trace: TraceContext,
    /// The client's key as `authorization` header, when engines get it.
    pub authorization: Option<HeaderValue>,
}

/// Rules for reading requests: whose hints are taken, and the limits that an operator may set.
#[derive(Clone, Debug)]
pub(crate) struct RequestRules {
    /// Whether hints are taken from clients.
    pub trust: HintTrust,
    /// `[limits]`.
    pub limits: Limits,
    /// Whether engines get the client's key.
    pub forward_authorization: bool,
}

#[cfg(test)]
impl From<HintTrust> for RequestRules {
    /// The default limits.
    fn from(trust: HintTrust) -> Self {
        Self { trust, limits: Limits::default(), forward_authorization: false }
    }
}

impl Request {
    /// Parses a request with a form. `unnamed` returns its model if it names none.
    ///
    /// # Errors
    /// The error names the field.
    pub(crate) fn of_form(
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: Bytes,
        rules: &RequestRules,
        unnamed: impl FnOnce() -> Result<String, ApiError>,
    ) -> Result<Arc<Self>, ApiError> {
        let (form, fields) = form::read(headers, body)?;
        let model = fields.model.map_or_else(unnamed, Ok)?;
        check_model(&model)?;
        let body = JsonBody::empty();
        let hints = Hints::parse(headers, &body, rules.trust)?;
        let parsed = Self { stream: fields.stream, ..Self::bare(endpoint, &model, body, hints) };
        Ok(Self { form: Some(form), ..parsed }.traced(headers, rules))
    }

    /// A request without a body.
    ///
    /// # Errors
    /// [`RequestError`] names the header.
    pub(crate) fn without_body(
        endpoint: Endpoint,
        headers: &HeaderMap,
        model: &str,
        rules: &RequestRules,
    ) -> Result<Arc<Self>, RequestError> {
        check_model(model)?;
        let body = JsonBody::empty();
        let hints = Hints::parse(headers, &body, rules.trust)?;
        Ok(Self::bare(endpoint, model, body, hints).traced(headers, rules))
    }

    fn bare(endpoint: Endpoint, model: &str, body: JsonBody, hints: Hints) -> Self {
        Self {
            endpoint,
            model: ModelName::new(model),
            stream: false,
            prompt_key: "prompt",
            preamble: None,
            form: None,
            include_usage: false,
            n: 1,
            max_tokens: None,
            prompts: 1,
            token_ids: hints.token_ids.clone(),
            hints,
            body,
            trace: TraceContext::begin(),
            authorization: None,
        }
    }

    /// Continues the client's trace, where hints are taken from clients, and keeps its key, where engines get
    /// it.
    fn traced(self, headers: &HeaderMap, rules: &RequestRules) -> Arc<Self> {
        let given = (rules.trust == HintTrust::Trusted).then(|| TraceContext::of(headers));
        let trace = given.unwrap_or(self.trace);
        let authorization = if rules.forward_authorization { forwarded(headers) } else { None };
        Arc::new(Self { trace, authorization, ..self })
    }

    /// Parses a request with a JSON body.
    ///
    /// # Errors
    /// [`RequestError`] names the field.
    pub(crate) fn parse(
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: Bytes,
        rules: &RequestRules,
    ) -> Result<Arc<Self>, RequestError> {
        Self::of_json(endpoint, headers, json_object(body)?, rules, None)
    }

    /// Reads a request from its JSON body. `unnamed` is its model if it names none.
    ///
    /// # Errors
    /// [`RequestError`] names the field.
    pub(crate) fn of_json(
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: JsonBody,
        rules: &RequestRules,
        unnamed: Option<String>,
    ) -> Result<Arc<Self>, RequestError> {
        let limits = &rules.limits;
        let PromptKeys { preamble, key, required } = endpoint.prompt_keys(&body);
        check_lists(&body, key)?;
        let named = if names_model(&body) { read(&body, "model")? } else { unnamed };
        let model: String = named.ok_or_else(|| RequestError::new("model", "is missing"))?;
        check_model(&model)?;
        let Flag(stream) = read(&body, "stream")?.unwrap_or(Flag(false));
        let options: StreamOptions = read(&body, "stream_options")?.unwrap_or_default();
        let sampling = Sampling::of(endpoint, &body, limits)?;
        let prompt = match body.get(key) {
            Some(prompt) => prompt,
            None if required => return Err(RequestError::new(key, "is missing")),
            None => "",
        };
        let (mut prompts, token_ids) = prompts_of(endpoint, &body, key, prompt)?;
        // The engine answers embeddings and, after them, each prompt beside them, also an empty one (C7b.5).
        if key == "prompt_embeds"
            && let Some(other) = body.get("prompt").filter(|prompt| *prompt != "null")
        {
            prompts += prompts_of(endpoint, &body, "prompt", other)?.0;
        }
        check_batch(key, prompts, sampling.sequences, limits)?;
        sampling.check_prompts(prompts)?;
        let prompts = u32::try_from(prompts).unwrap_or(u32::MAX);
        let mut hints = Hints::parse(headers, &body, rules.trust)?;
        if endpoint == Endpoint::Generate && hints.lora.is_none() {
            hints.lora = generate::adapter(&body)?;
        }
        let token_ids = hints.token_ids.clone().or(token_ids).filter(|_| !key.ends_with("_embeds"));
        let parsed = Self {
            stream: stream && endpoint.streams(),
            preamble,
            prompt_key: key,
            include_usage: options.include_usage.is_some_and(|Flag(is_set)| is_set),
            n: sampling.n,
            max_tokens: sampling.max_tokens,
            prompts,
            token_ids,
            ..Self::bare(endpoint, &model, body, hints)
        };
        Ok(parsed.traced(headers, rules))
    }

    /// Takes `input_ids` for a chat's prompt, as SGLang does, unless the messages are far longer (L1.11).
    pub(crate) fn take_input_ids(&mut self) {
        let (key, items) = ("input_ids", self.body.counts("input_ids").items);
        let messages = self.body.get(self.prompt_key).map_or(0, str::len);
        let is_prompt = self.endpoint == Endpoint::ChatCompletions && messages <= items.saturating_mul(4);
        let Some(ids) = self.body.get(key).filter(|ids| is_prompt && *ids != "null") else { return };
        if self.token_ids.is_none() {
            (_, self.token_ids) = shape_of(key, ids, items);
        }
        self.prompt_key = key;
    }

    /// Returns the same request with another body for the engines. It is not routed: it has no token ids.
    #[must_use]
    pub(crate) fn with_body(&self, body: JsonBody) -> Arc<Self> {
        let hints = Hints { token_ids: None, routing_token_ids: None, ..self.hints.clone() };
        Arc::new(Self { body, hints, token_ids: None, ..self.clone() })
    }

    /// The token ids that the client gave [A4]: those of a multimodal prompt, otherwise those for the engine.
    #[must_use]
    pub(crate) fn given_token_ids(&self) -> Option<&[u32]> {
        let multimodal = self.hints.routing_token_ids.as_deref().filter(|_| !self.has_embeds());
        multimodal.or(self.token_ids.as_deref())
    }

    /// Those that routing hashes: without those that vLLM cuts off; `None` if it is not known how many.
    #[must_use]
    pub(crate) fn routing_token_ids(&self) -> Option<&[u32]> {
        self.given_token_ids().and_then(|ids| prompt_use::kept_ids(&self.body, ids))
    }

    /// Returns whether an engine computes the whole prompt, whatever it has cached.
    #[must_use]
    pub(crate) fn skips_cache(&self) -> bool {
        prompt_use::needs_prompt_logprobs(self.endpoint, &self.body)
    }

    /// The raw JSON of the prompt, for tokenizers. That of a list of one prompt is the prompt.
    #[must_use]
    pub(crate) fn prompt(&self) -> &str {
        let value = self.body.get(self.prompt_key).unwrap_or_default();
        value.get(self.prompt_range()).unwrap_or(value)
    }

    /// Where the prompt is within the value of its key.
    fn prompt_range(&self) -> Range<usize> {
        only_prompt(self.endpoint, &self.body, self.prompt_key)
    }

    /// Returns whether the prompt is given as embeddings, which no tokenizer makes.
    #[must_use]
    pub(crate) fn has_embeds(&self) -> bool {
        self.prompt_key.ends_with("_embeds")
    }

    /// The ends of the messages in the prompt, as far as they are known.
    #[must_use]
    pub(crate) fn message_ends(&self) -> &[u32] {
        self.body.object_ends(self.prompt_key)
    }

    /// Number of bytes that a tokenizer reads: the prompt, and what a chat template writes before it.
    #[must_use]
    pub(crate) fn tokenized_bytes(&self) -> usize {
        let before = TEMPLATE_FIELDS.iter().filter(|_| self.has_messages());
        let before: usize = before.filter_map(|key| self.body.get(key)).map(str::len).sum();
        before + self.prompt().len()
    }

    /// The bytes of the prompt, for blocks without tokens (H5).
    #[must_use]
    pub(crate) fn prompt_bytes(&self, bytes_per_token: u32) -> PromptBytes<'_> {
        let keys = self.preamble.into_iter().chain([self.prompt_key]);
        if self.has_messages() {
            PromptBytes::of_chat(&self.body, keys, bytes_per_token)
        } else if self.preamble.is_none() {
            PromptBytes::of_part(&self.body, self.prompt_key, self.prompt_range(), bytes_per_token)
        } else {
            PromptBytes::of_text(&self.body, keys, bytes_per_token)
        }
    }

    /// Returns whether the prompt is a conversation, which the engine's chat template turns into a text.
    fn has_messages(&self) -> bool {
        self.prompt_key == "messages" || self.endpoint == Endpoint::Responses
    }

    /// Returns whether it is a chat or a completion.
    #[must_use]
    pub(crate) fn is_chat(&self) -> bool {
        matches!(self.endpoint, Endpoint::ChatCompletions | Endpoint::Completions)
    }

    /// The body as the client sent it.
    #[must_use]
    pub(crate) fn bytes(&self) -> &Bytes {
        self.form.as_ref().map_or_else(|| self.body.bytes(), |form| &form.bytes)
    }

    /// Returns whether the prompt is a list of prompts, also of a single one.
    #[must_use]
    pub(crate) fn has_list_of_prompts(&self) -> bool {
        is_list_of_prompts(self.prompt_key, self.body.get(self.prompt_key).unwrap_or_default())
    }

    /// Returns whether text is generated for a list of prompts, also for a list of one.
    #[must_use]
    pub(crate) fn is_batch(&self) -> bool {
        self.endpoint.takes_batches() && self.has_list_of_prompts()
    }

    /// Items an engine sees: one for each choice of each prompt.
    #[must_use]
    pub(crate) fn items(&self) -> u32 {
        self.prompts.saturating_mul(self.n)
    }
}

/// Returns whether a body names a model. Engines take null and an empty text as none.
#[must_use]
pub(crate) fn names_model(body: &JsonBody) -> bool {
    body.get("model").is_some_and(|model| !matches!(model, "null" | "\"\""))
}

/// Parses a body that has to be a JSON object. Some clients write a byte order mark in front of it.
///
/// # Errors
/// [`RequestError`] with the place of what is wrong.
pub(crate) fn json_object(body: Bytes) -> Result<JsonBody, RequestError> {
    let body = if body.starts_with(BYTE_ORDER_MARK) { body.slice(BYTE_ORDER_MARK.len()..) } else { body };
    JsonBody::parse(body).map_err(|error| RequestError::new("body", &error.to_string()))
}

#[derive(Default, serde::Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<Flag>,
}

#[cfg(test)]
mod tests;
