//! What an operator says at load, and what a request says beside its messages.

use std::time::SystemTime;

use minijinja::{Value, value::ValueKind};
use serde::de::DeserializeOwned;

use crate::{
    error::EncodeError,
    template::{ContentFormat, json::Json},
    tools,
};

/// How a model folder is loaded. Give here what the engines were started with.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Bytes that remembered pieces may take; 0 switches the cache off. 32 MiB unless said.
    pub cache_bytes: usize,
    /// A Jinja template in place of the folder's (vLLM `--chat-template`).
    pub chat_template: Option<String>,
    /// The shape of content in place of the detected one (vLLM `--chat-template-content-format`).
    pub content_format: Option<ContentFormat>,
    /// A JSON object of template variables that requests may override (vLLM `--default-chat-template-kwargs`).
    pub template_kwargs: Option<String>,
}

/// Fields of a chat request that change its prompt, beside the messages.
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

/// Keys of `chat_template_kwargs` that are arguments of `apply_chat_template` and no template variables.
const RESERVED: [&str; 12] = [
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
        Self { cache_bytes: 32 << 20, chat_template: None, content_format: None, template_kwargs: None }
    }
}

impl ChatOptions {
    /// Options of a request that says nothing. `now` is what `strftime_now` shows, in UTC.
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

    /// Reads the options from a request's top-level fields. `get` gives the raw JSON of a field.
    ///
    /// # Errors
    /// [`EncodeError::Invalid`] for a field of the wrong shape, [`EncodeError::Unsupported`] for one that is not modelled.
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

/// The entries of an object of template variables. As in vLLM, null and "auto" mean unset.
pub(crate) fn pairs(kwargs: &Value) -> Result<Vec<(Value, Value)>, EncodeError> {
    const FIELD: &str = "chat_template_kwargs";
    let object = kwargs.as_object().filter(|_| kwargs.kind() == ValueKind::Map);
    let Some(entries) = object.and_then(|object| object.try_iter_pairs()) else {
        return Err(EncodeError::invalid(FIELD, "is no object"));
    };
    let mut out = Vec::new();
    for (key, value) in entries {
        match key.as_str() {
            Some(name) if RESERVED.contains(&name) => {
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
