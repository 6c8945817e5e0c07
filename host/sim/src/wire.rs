//! Formats responses, chunks and errors, one file per engine. It does no I/O and makes no decisions.

use crate::{
    api::Api,
    config::Dialect,
    core::Prompt,
    engine::{Finish, Step},
    failure::Failure,
};

mod generate;
mod named;
mod openai;
mod sglang;
mod vllm;

/// Values that all chunks of a response share.
#[derive(Debug)]
pub(crate) struct Meta {
    pub(crate) api: Api,
    pub(crate) chat: bool,
    pub(crate) id: String,
    /// SGLang: the id of each output.
    pub(crate) item_ids: Vec<String>,
    pub(crate) created: u64,
    /// Name of the model as a JSON string.
    pub(crate) model: String,
    pub(crate) fingerprint: String,
    /// Whether the stream ends with a usage chunk.
    pub(crate) include_usage: bool,
    /// Whether every chunk has a usage.
    pub(crate) continuous_usage: bool,
    pub(crate) token_ids: bool,
    /// Whether there is a list of prompts, or several outputs of a prompt.
    pub(crate) batch: bool,
    pub(crate) prompts: Vec<Prompt>,
    /// Number of outputs for each prompt.
    pub(crate) n: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt: u32,
    pub(crate) completion: u32,
    pub(crate) cached: u32,
    /// Number of prompt tokens in full blocks that were computed for this request and can be shared now.
    pub(crate) created_cache: u32,
}

/// A complete response.
#[derive(Clone, Debug, Default)]
pub(crate) struct Choice {
    pub(crate) index: u32,
    pub(crate) text: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: Option<Finish>,
    /// Number of prompt tokens that were not computed for it.
    pub(crate) cached: u32,
}

/// JSON format of an engine.
pub(crate) trait Shape: Sync {
    /// Returns the first chunks of a chat response, before the first token.
    fn open(&self, meta: &Meta, index: u32, usage: Option<Usage>) -> Vec<String>;

    /// Returns the chunks of one step. `first` marks the first step of an output.
    fn step(&self, meta: &Meta, step: &Step, first: bool, usage: Option<Usage>) -> Vec<String>;

    /// Returns the chunk that repeats an output so far, in the API that does so in each chunk.
    fn repeat(&self, _meta: &Meta, _said: &Choice) -> Option<String> {
        None
    }

    /// Returns the chunk with the usage.
    fn usage(&self, meta: &Meta, usage: Usage) -> String;

    /// Returns the chunks after the last token. `said` is the whole output, for the APIs that repeat it.
    fn close(&self, meta: &Meta, usage: Usage, _said: &Choice) -> Vec<String> {
        let usage = meta.include_usage.then(|| self.usage(meta, usage));
        usage.into_iter().chain(["[DONE]".to_owned()]).collect()
    }

    /// Returns the bytes of one event.
    fn frame(&self, data: &str) -> String {
        format!("data: {data}\n\n")
    }

    /// Returns a complete body. `params` are the handoff parameters of a prefill.
    fn whole(&self, meta: &Meta, choices: &[Choice], usage: Usage, params: Option<&str>) -> String;

    /// Returns an error body.
    fn error(&self, failure: &Failure) -> String;

    /// Returns the data of an error event in a stream.
    fn error_event(&self, failure: &Failure) -> String {
        self.error(failure)
    }
}

impl Dialect {
    /// Returns the format of an API.
    pub(crate) fn shape_of(self, api: Api) -> &'static dyn Shape {
        match api {
            Api::Messages => &named::Messages,
            Api::Responses => &named::Responses,
            Api::Generate => &generate::Generate,
            Api::Chat | Api::Completions => self.shape(),
        }
    }

    /// Returns the format of the OpenAI chat and completions APIs.
    pub(crate) fn shape(self) -> &'static dyn Shape {
        match self {
            Self::Vllm => &vllm::Vllm,
            Self::Sglang => &sglang::Sglang,
            Self::Openai => &openai::Openai,
        }
    }
}

impl Choice {
    /// Adds a step.
    pub(crate) fn add(&mut self, step: &Step) {
        self.text += step.text;
        self.tokens.extend(step.token);
        (self.finish, self.cached) = (step.finish, step.cached);
    }
}

impl Meta {
    /// Returns the name of the model as a JSON value.
    fn model_name(&self) -> serde_json::Value {
        serde_json::from_str(&self.model).unwrap_or_default()
    }

    /// Returns the common start of every object: id, object, created, model.
    fn head(&self, id: &str, object: &str) -> String {
        let Self { created, model, .. } = self;
        format!(r#"{{"id":"{id}","object":"{object}","created":{created},"model":{model}"#)
    }

    fn chunk_head(&self) -> String {
        self.head(&self.id, if self.chat { "chat.completion.chunk" } else { "text_completion" })
    }

    /// Returns the start of a chunk of output number `index`, which may have an id of its own.
    fn item_head(&self, index: u32) -> String {
        let id = self.item_ids.get(index as usize).unwrap_or(&self.id);
        self.head(id, if self.chat { "chat.completion.chunk" } else { "text_completion" })
    }

    fn whole_head(&self) -> String {
        self.head(&self.id, if self.chat { "chat.completion" } else { "text_completion" })
    }

    fn prompt_ids(&self, index: u32) -> String {
        let prompt = self.prompts.get((index / self.n.max(1)) as usize);
        match prompt {
            Some(prompt) if self.token_ids => json(prompt.tokens()),
            _ => "null".to_owned(),
        }
    }

    fn ids(&self, tokens: &[u32]) -> String {
        if self.token_ids { json(tokens) } else { "null".to_owned() }
    }
}

impl Usage {
    pub(crate) fn total(self) -> u32 {
        self.prompt + self.completion
    }
}

impl Finish {
    fn json(of: Option<Self>) -> &'static str {
        match of {
            None => "null",
            Some(Self::Length) => r#""length""#,
            Some(Self::Stop) => r#""stop""#,
            Some(Self::Abort) => r#""abort""#,
        }
    }
}

fn json<T: serde::Serialize + ?Sized>(value: &T) -> String {
    // Strings and numbers can always be serialised.
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests;
