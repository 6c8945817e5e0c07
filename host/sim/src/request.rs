//! Parses and checks the body of a request, with the engine's checks and errors.

use axum::http::{HeaderMap, header};
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::Value;

use crate::{
    api::Api,
    config::{Dialect, SimConfig},
    core::{Piece, Prompt},
    engine::{Finish, Plan, random_hex},
    failure::Failure,
    faults::{Break, FaultKind, Picked},
};

mod convert;
mod message;
mod native;

use message::{Content, Message};

/// Fields of a body that the model uses. All others are accepted and ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Body {
    pub(crate) model: Option<String>,
    messages: Option<Vec<Message>>,
    add_generation_prompt: Option<bool>,
    continue_final_message: bool,
    system: Option<Content>,
    input: Option<Input>,
    instructions: Option<String>,
    pub(crate) previous_response_id: Option<String>,
    max_output_tokens: Option<u32>,
    prompt: Option<PromptField>,
    text: Option<Value>,
    input_ids: Option<Value>,
    sampling_params: Option<Value>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    min_tokens: u32,
    n: Option<u32>,
    #[serde(deserialize_with = "lax_bool")]
    pub(crate) stream: bool,
    stream_options: Option<StreamOptions>,
    #[serde(deserialize_with = "lax_bool")]
    ignore_eos: bool,
    temperature: Option<f64>,
    pub(crate) return_token_ids: bool,
    pub(crate) kv_transfer_params: Option<Value>,
    pub(crate) bootstrap_host: Option<OneOrMany<String>>,
    pub(crate) bootstrap_port: Option<OneOrMany<Option<u16>>>,
    pub(crate) bootstrap_room: Option<OneOrMany<u64>>,
    pub(crate) rid: Option<OneOrMany<String>>,
    request_id: Option<String>,
    pub(crate) routed_dp_rank: Option<u32>,
    pub(crate) disagg_prefill_dp_rank: Option<u32>,
}

/// A single value, or one for each sequence of a batch.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany<T> {
    Many(Vec<T>),
    One(T),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Message>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum PromptField {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    IdLists(Vec<Vec<u32>>),
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    #[serde(deserialize_with = "lax_bool")]
    include_usage: bool,
    continuous_usage_stats: bool,
}

/// Number of output tokens of a completion that does not set a length.
const DEFAULT_COMPLETION: u32 = 16;
/// Represents the text of a template between the assistant's last message and the next one.
const NEW_TURN: &str = "turn";
/// Maximum number of sequences of a request.
const MAX_SEQUENCES: usize = 1024;

impl Body {
    /// Parses and checks a body.
    pub(crate) fn parse(
        config: &SimConfig,
        api: Api,
        headers: &HeaderMap,
        bytes: &[u8],
    ) -> Result<Self, Failure> {
        let content_type =
            headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
        if !content_type.starts_with("application/json") {
            return Err(Failure::shape(
                "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            ));
        }
        let mut body: Self = serde_json::from_slice(bytes).map_err(|error| explain(bytes, &error))?;
        if let Some(model) = body.model.as_ref().filter(|model| **model != config.model) {
            let message = format!("The model `{model}` does not exist. Valid aliases: {}.", config.model);
            return Err(Failure::not_found(message).with_param("model"));
        }
        body.convert(config, api);
        if config.dialect == Dialect::Sglang {
            body.take_id(api, headers);
            body.take_rank(headers)?;
        }
        if api.is_chat() && body.messages.is_none() {
            return Err(missing("messages", bytes));
        }
        if body.stream_options.is_some() && !body.stream {
            return Err(Failure::shape(
                "1 validation error:\n  Value error, Stream options can only be defined when `stream=True`.",
            )
            .with_param("stream_options"));
        }
        // vLLM makes this check; `add_generation_prompt` is true by default for a chat. SGLang adds the
        // assistant's turn in any case.
        let both = body.continue_final_message && body.add_generation_prompt.unwrap_or(true);
        if both && config.dialect == Dialect::Vllm {
            return Err(Failure::shape(
                "1 validation error:\n  Value error, Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            ));
        }
        body.check_numbers(config)?;
        Ok(body)
    }

    fn check_numbers(&self, config: &SimConfig) -> Result<(), Failure> {
        let bad = |name: &'static str, value: String, message: String| {
            Err(Failure::bad(format!("{message} (parameter={name}, value={value})")).with_param(name))
        };
        if let Some(value) = self.temperature.filter(|value| *value < 0.0) {
            return bad(
                "temperature",
                format!("{value:?}"),
                format!("temperature must be non-negative, got {value:?}."),
            );
        }
        if self.n == Some(0) {
            return bad("n", "0".to_owned(), "n must be at least 1, got 0.".to_owned());
        }
        match self.max_out() {
            Some(0) => bad("max_tokens", "0".to_owned(), "max_tokens must be at least 1, got 0.".to_owned()),
            Some(value) if value > config.max_model_len => bad(
                "max_tokens",
                value.to_string(),
                format!(
                    "max_tokens={value} cannot be greater than max_model_len={}. Please request fewer output tokens.",
                    config.max_model_len
                ),
            ),
            _ => Ok(()),
        }
    }

    /// Returns the last message, if it is the assistant's.
    fn answered(&self) -> Option<&Message> {
        self.messages.as_ref()?.last().filter(|message| message.role == "assistant")
    }

    /// The ids of a chat's prompt that vLLM takes in the place of its messages.
    fn forwarded_ids(&self) -> Option<Vec<u32>> {
        let ids = self.kv_transfer_params.as_ref()?.get("prompt_token_ids")?;
        Vec::deserialize(ids).ok()
    }

    fn max_out(&self) -> Option<u32> {
        self.max_completion_tokens.or(self.max_tokens)
    }

    /// Returns whether the body has messages, for an endpoint that also accepts a prompt.
    pub(crate) fn is_chat(&self) -> bool {
        self.messages.is_some()
    }

    /// Returns whether the prompt is a list of prompts, even a list of one prompt.
    pub(crate) fn is_batch(&self) -> bool {
        matches!(self.prompt, Some(PromptField::Texts(_) | PromptField::IdLists(_)))
    }

    /// Returns the ids of SGLang's items. An item of a batch gets the batch's id with the item's number.
    /// Several choices of one prompt get random ids.
    pub(crate) fn item_ids(&self) -> Vec<String> {
        // The id is written to JSON without escaping.
        let clean = |rid: &String| rid.replace(['"', '\\'], "");
        let prompts = match &self.prompt {
            Some(PromptField::Texts(texts)) => texts.len(),
            Some(PromptField::IdLists(lists)) => lists.len(),
            _ => 1,
        };
        let items = 0..prompts.saturating_mul(self.n() as usize).min(MAX_SEQUENCES);
        match &self.rid {
            Some(_) if self.n() > 1 => items.map(|_| random_hex(32)).collect(),
            None => items.map(|_| random_hex(32)).collect(),
            Some(OneOrMany::One(rid)) if self.is_batch() => {
                items.map(|item| format!("{}_{item}", clean(rid))).collect()
            }
            Some(OneOrMany::One(rid)) => vec![clean(rid)],
            Some(OneOrMany::Many(rids)) => rids.iter().map(clean).collect(),
        }
    }

    /// Returns the number of outputs for each prompt.
    pub(crate) fn n(&self) -> u32 {
        self.n.unwrap_or(1)
    }

    /// Returns whether the stream ends with a usage chunk, and whether every chunk has a usage.
    pub(crate) fn usage(&self) -> (bool, bool) {
        let options = self.stream_options.unwrap_or_default();
        (options.include_usage, options.include_usage && options.continuous_usage_stats)
    }

    /// Returns the prompts: one for a chat, any number for a completion.
    pub(crate) fn prompts(&self, chat: bool) -> Result<Vec<Prompt>, Failure> {
        let prompts = if let Some(ids) = self.forwarded_ids().filter(|_| chat) {
            vec![Prompt::of_tokens(ids)]
        } else if chat {
            let messages = self.messages.iter().flatten();
            // A template closes the assistant's last message and begins another one, unless that message is
            // to be continued.
            let closed = self.answered().is_some() && !self.continue_final_message;
            let turn = closed.then_some(Piece::Text(NEW_TURN));
            vec![Prompt::of_pieces(messages.flat_map(|message| message.pieces()).chain(turn))]
        } else {
            match &self.prompt {
                None => Vec::new(),
                Some(PromptField::Text(text)) => vec![Prompt::of_texts([text.as_str()])],
                Some(PromptField::Ids(ids)) => vec![Prompt::of_tokens(ids.clone())],
                Some(PromptField::Texts(texts)) => {
                    texts.iter().map(|text| Prompt::of_texts([text.as_str()])).collect()
                }
                Some(PromptField::IdLists(lists)) => {
                    lists.iter().map(|ids| Prompt::of_tokens(ids.clone())).collect()
                }
            }
        };
        if prompts.is_empty() || prompts.iter().any(|prompt| prompt.isl() == 0) {
            return Err(Failure::bad(
                "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
            )
            .with_param("prompt"));
        }
        if prompts.len().saturating_mul(self.n() as usize) > MAX_SEQUENCES {
            return Err(Failure::bad(format!("more than {MAX_SEQUENCES} sequences in one request")));
        }
        Ok(prompts)
    }

    /// Returns one plan for each output of each prompt. `fixed` is the length that a handoff protocol
    /// imposes.
    pub(crate) fn plans(
        &self,
        config: &SimConfig,
        chat: bool,
        prompts: &[Prompt],
        fixed: Option<(u32, Finish)>,
        faults: &Picked,
    ) -> Result<Vec<Plan>, Failure> {
        let n = self.n();
        let stalls = matches!(faults.body_break(), Some((Break::Stall, _)));
        let mut plans = Vec::new();
        for prompt in prompts {
            let (mut words, mut finish) = match fixed {
                Some(fixed) => fixed,
                None => self.length(config, chat, prompt.isl())?,
            };
            if faults.has(&FaultKind::FirstTokenEos) {
                (words, finish) = (0, Finish::Stop);
            }
            for choice in 0..n {
                let index = u32::try_from(plans.len()).unwrap_or(u32::MAX);
                plans.push(Plan { prompt: prompt.clone(), choice, index, words, finish, stalls });
            }
        }
        Ok(plans)
    }

    fn length(&self, config: &SimConfig, chat: bool, isl: u32) -> Result<(u32, Finish), Failure> {
        let max = config.max_model_len;
        if isl > max {
            let more = u64::from(max) + 1;
            return Err(Failure::bad(format!(
                "This model's maximum context length is {max} tokens. However, your prompt contains at least {more} input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value={more})"
            ))
            .with_param("input_tokens"));
        }
        let room = max - isl;
        let wanted = self.max_out().unwrap_or(if chat { room } else { DEFAULT_COMPLETION.min(room) });
        if wanted > room || wanted == 0 {
            return Err(Failure::bad(format!(
                "This model's maximum context length is {max} tokens. However, you requested {wanted} output tokens and your prompt contains {isl} input tokens. Please reduce the length of the input prompt or the number of requested output tokens. (parameter=input_tokens, value={isl})"
            ))
            .with_param("input_tokens"));
        }
        // A continued answer ends where the whole answer would have ended.
        let begun = self.answered().filter(|_| self.continue_final_message);
        let begun = begun.map_or(0, |message| Prompt::of_pieces(message.pieces()).isl());
        let natural = config.natural_len.saturating_sub(begun).max(self.min_tokens).max(1);
        let natural = if self.ignore_eos { u32::MAX } else { natural };
        Ok(if natural < wanted { (natural, Finish::Stop) } else { (wanted, Finish::Length) })
    }
}

/// Reads a switch as pydantic does for both engines: also a number or a text.
fn lax_bool<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let text = value.as_str().map(str::to_ascii_lowercase);
    match (&value, text.as_deref()) {
        (Value::Bool(switch), _) => Ok(*switch),
        (Value::Null, _) | (_, Some("false" | "f" | "no" | "n" | "off" | "0")) => Ok(false),
        (_, Some("true" | "t" | "yes" | "y" | "on" | "1")) => Ok(true),
        _ if value.as_f64() == Some(0.0) => Ok(false),
        _ if value.as_f64() == Some(1.0) => Ok(true),
        _ => Err(D::Error::custom("Input should be a valid boolean, unable to interpret input")),
    }
}

/// Returns the engine's message for a body that cannot be parsed.
fn explain(bytes: &[u8], error: &serde_json::Error) -> Failure {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else {
        let loc = format!("body.{}", error.column().saturating_sub(1));
        let message = format!(
            "1 validation error:\n  {{'type': 'json_invalid', 'loc': '{loc}', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {{'error': 'Expecting value'}}}}"
        );
        return Failure::shape(message).with_param(loc);
    };
    match value.get("messages") {
        Some(messages) if !messages.is_array() => {
            let input = messages.as_str().map_or_else(|| messages.to_string(), |text| format!("'{text}'"));
            Failure::shape(format!(
                "1 validation error:\n  {{'type': 'list_type', 'loc': 'body.messages', 'msg': 'Input should be a valid list', 'input': {input}}}"
            ))
            .with_param("body.messages")
        }
        _ => Failure::shape(format!("1 validation error:\n  {error}")),
    }
}

fn missing(field: &str, bytes: &[u8]) -> Failure {
    let value = serde_json::from_slice::<Value>(bytes).unwrap_or_default();
    let fields = value.as_object().map_or(0, serde_json::Map::len);
    let loc = format!("body.{field}");
    Failure::shape(format!(
        "1 validation error:\n  {{'type': 'missing', 'loc': '{loc}', 'msg': 'Field required', 'input': '<dict of {fields} items>'}}"
    ))
    .with_param(loc)
}
