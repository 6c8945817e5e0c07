//! Options of the operator at load, and options of a request beside its messages.

use std::time::SystemTime;

use minijinja::{Value, value::ValueKind};
use serde::de::DeserializeOwned;

use crate::{content_format::ContentFormat, error::EncodeError, json::Json, tools};

/// Options for loading a model. They should equal the options of the engines.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Maximum size of the cache in bytes; 0 disables the cache. Default: 32 MiB.
    pub cache_bytes: usize,
    /// Whether the fast encoder may serve, where it passes its self-test; else Hugging Face's library does.
    pub fast_encoder: bool,
    /// Jinja template that replaces the model's (vLLM `--chat-template`).
    pub chat_template: Option<String>,
    /// Form of content that replaces the detected one (vLLM `--chat-template-content-format`).
    pub content_format: Option<ContentFormat>,
    /// JSON object of template variables that requests may override (vLLM `--default-chat-template-kwargs`).
    pub template_kwargs: Option<String>,
}

/// Fields of a chat request beside the messages that change its prompt.
#[derive(Clone, Debug)]
pub struct ChatOptions {
    pub(crate) now: SystemTime,
    pub(crate) tools: Option<Value>,
    pub(crate) documents: Option<Value>,
    pub(crate) reasoning_effort: Option<Value>,
    pub(crate) add_generation_prompt: bool,
    pub(crate) continue_final_message: bool,
    pub(crate) add_special_tokens: bool,
    pub(crate) kwargs: Vec<(Value, Value)>,
}

/// Keys of `chat_template_kwargs` that are arguments of `apply_chat_template` and not template variables.
const RESERVED_KWARGS: [&str; 12] = [
    "messages",
    "conversation",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "continue_final_message",
];

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            cache_bytes: 32 << 20,
            fast_encoder: true,
            chat_template: None,
            content_format: None,
            template_kwargs: None,
        }
    }
}

impl ChatOptions {
    /// Returns the options of a request without any of the fields. `now` is the time that `strftime_now`
    /// shows, in UTC.
    #[must_use]
    pub fn new(now: SystemTime) -> Self {
        Self {
            now,
            tools: None,
            documents: None,
            reasoning_effort: None,
            add_generation_prompt: true,
            continue_final_message: false,
            add_special_tokens: false,
            kwargs: Vec::new(),
        }
    }

    /// Parses the options from a request's top-level fields. `get` returns the raw JSON of a field.
    ///
    /// # Errors
    /// [`EncodeError::Invalid`] for a malformed field, [`EncodeError::Unsupported`] for a field that this
    /// crate does not support.
    pub fn read<'a>(now: SystemTime, get: impl Fn(&str) -> Option<&'a str>) -> Result<Self, EncodeError> {
        for field in ["chat_template", "truncate_prompt_tokens"] {
            if field_of::<Json>(&get, field)?.is_some() {
                return Err(EncodeError::Unsupported(field.to_owned()));
            }
        }
        let value = |field| Ok::<_, EncodeError>(field_of::<Json>(&get, field)?.map(|Json(value)| value));
        let flag = |field, unsaid| Ok::<_, EncodeError>(field_of(&get, field)?.unwrap_or(unsaid));
        let options = Self {
            now,
            tools: get("tools").map(tools::read).transpose()?.flatten(),
            documents: value("documents")?,
            reasoning_effort: value("reasoning_effort")?,
            add_generation_prompt: flag("add_generation_prompt", true)?,
            continue_final_message: flag("continue_final_message", false)?,
            add_special_tokens: flag("add_special_tokens", false)?,
            kwargs: match value("chat_template_kwargs")? {
                Some(kwargs) => pairs(&kwargs)?,
                None => Vec::new(),
            },
        };
        if options.continue_final_message && options.add_generation_prompt {
            return Err(EncodeError::invalid(
                "continue_final_message",
                "`true` needs `add_generation_prompt` to be false",
            ));
        }
        Ok(options)
    }
}

/// Returns the entries of an object of template variables. As in vLLM, null and "auto" mean unset.
pub(crate) fn pairs(kwargs: &Value) -> Result<Vec<(Value, Value)>, EncodeError> {
    const FIELD: &str = "chat_template_kwargs";
    let object = kwargs.as_object().filter(|_| kwargs.kind() == ValueKind::Map);
    let Some(entries) = object.and_then(|object| object.try_iter_pairs()) else {
        return Err(EncodeError::invalid(FIELD, "is not an object"));
    };
    let mut out = Vec::new();
    for (key, value) in entries {
        match key.as_str() {
            Some(name) if RESERVED_KWARGS.contains(&name) => {
                return Err(EncodeError::Unsupported(format!("{FIELD}.{name}")));
            }
            _ if value.is_none() || value.as_str() == Some("auto") => {}
            _ => out.push((key, value)),
        }
    }
    Ok(out)
}

fn field_of<'a, T: DeserializeOwned>(
    get: &impl Fn(&str) -> Option<&'a str>,
    field: &'static str,
) -> Result<Option<T>, EncodeError> {
    let read = |json| serde_json::from_str::<Option<T>>(json);
    Ok(get(field).map(read).transpose().map_err(|error| EncodeError::invalid(field, error))?.flatten())
}
