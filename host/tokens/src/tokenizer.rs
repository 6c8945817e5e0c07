//! Tokenizer of one model: its chat templates and its encoder.

use std::{
    collections::BTreeMap,
    fmt,
    hash::{BuildHasher, Hasher, RandomState},
    path::Path,
    sync::atomic::AtomicBool,
};

use minijinja::Value;

use crate::{
    byte_cache::CacheStats,
    content_format::ContentFormat,
    encode::{Encoder, EncoderKind, Reuse},
    error::{EncodeError, TokenizerError},
    folder::Folder,
    json::Json,
    messages::KnownMessages,
    options::{self, ChatOptions, LoadOptions},
    prompt_key::{KeyMaker, PromptForm, PromptKey},
    prompt_tokens::PromptTokens,
    rendered::Rendered,
    template::ChatTemplate,
};

/// Converts requests to the tokens that an engine of this model will see.
///
/// All methods may run on many threads at once. They are synchronous, and their time is proportional to the
/// part of a prompt that is not cached; run long prompts off the reactor.
pub struct Tokenizer {
    encoder: Encoder,
    /// Makes the keys of prompts; `None` without a cache.
    keys: Option<KeyMaker>,
    messages: KnownMessages,
    templates: BTreeMap<String, ChatTemplate>,
    /// Variables of every template: the special tokens, then the operator's variables.
    base: Vec<(Value, Value)>,
}

impl Tokenizer {
    /// Loads a Hugging Face model directory with default options.
    ///
    /// # Errors
    /// [`TokenizerError`] names the file and the problem. A missing chat template is not an error.
    pub fn load(folder: &Path) -> Result<Self, TokenizerError> {
        Self::load_with(folder, &LoadOptions::default())
    }

    /// Loads a Hugging Face model directory.
    ///
    /// # Errors
    /// [`TokenizerError`] names the file and the problem.
    pub fn load_with(folder: &Path, options: &LoadOptions) -> Result<Self, TokenizerError> {
        let read = Folder::read(folder)?;
        let mut base: Vec<(Value, Value)> =
            read.special.iter().map(|(name, token)| (Value::from(*name), Value::from(token))).collect();
        if let Some(json) = &options.template_kwargs {
            let invalid = |problem: String| TokenizerError::invalid("template_kwargs", problem);
            let Json(kwargs) = serde_json::from_str(json).map_err(|error| invalid(error.to_string()))?;
            base.extend(options::pairs(&kwargs).map_err(|error| invalid(error.to_string()))?);
        }
        let mut sources = read.templates.clone();
        if let Some(template) = &options.chat_template {
            let given = ("chat_template".into(), template.clone());
            sources = BTreeMap::from([("default".to_owned(), given)]);
        }
        let mut templates = BTreeMap::new();
        for (name, (path, source)) in sources {
            let template = ChatTemplate::compile(&source, options.content_format)
                .map_err(|error| TokenizerError::invalid(&path, format!("template `{name}`: {error}")))?;
            templates.insert(name, template);
        }
        let (for_segments, for_messages) = (options.cache_bytes / 4, options.cache_bytes / 4);
        let for_pieces = options.cache_bytes - for_segments - for_messages;
        let encoder = Encoder::new(read, [for_pieces, for_segments], options.fast_encoder)
            .map_err(|error| TokenizerError::invalid(folder.join("tokenizer.json"), error))?;
        tracing::info!(
            folder = %folder.display(),
            templates = templates.len(),
            encoder = encoder.kind().label(),
            reuse = encoder.reuse().label(),
            "tokenizer loaded"
        );
        let keys = (options.cache_bytes > 0).then(KeyMaker::new);
        let messages = KnownMessages::new(for_messages, RandomState::new().build_hasher().finish());
        Ok(Self { encoder, keys, messages, templates, base })
    }

    /// Returns the tokens of a chat request. `messages_json` is the raw JSON of the field `messages`.
    ///
    /// # Errors
    /// [`EncodeError`]: measure the request in bytes instead.
    pub fn chat(&self, messages_json: &str, options: &ChatOptions) -> Result<Vec<u32>, EncodeError> {
        let tokens = self.chat_until(messages_json, None, options, &AtomicBool::new(false))?;
        Ok(tokens.to_vec())
    }

    /// Like [`Tokenizer::chat`], for a request with this key, but ends soon after another thread sets
    /// `stopped`. Messages that occurred before are known by the key.
    ///
    /// # Errors
    /// Same as [`Tokenizer::chat`], and [`EncodeError::Stopped`].
    pub fn chat_until(
        &self,
        messages_json: &str,
        key: Option<&PromptKey>,
        options: &ChatOptions,
        stopped: &AtomicBool,
    ) -> Result<PromptTokens, EncodeError> {
        let text = self.rendered(messages_json, key, options)?;
        self.encoder.encode(&text, options.add_special_tokens, stopped)
    }

    /// Returns the text of a chat request before encoding.
    ///
    /// # Errors
    /// Same as [`Tokenizer::chat`].
    pub fn render(&self, messages_json: &str, options: &ChatOptions) -> Result<String, EncodeError> {
        Ok(self.rendered(messages_json, None, options)?.from(0).into_owned())
    }

    fn rendered(
        &self,
        messages_json: &str,
        key: Option<&PromptKey>,
        options: &ChatOptions,
    ) -> Result<Rendered, EncodeError> {
        let template = self.template(options.tools.is_some())?;
        let items = key.map_or(&[][..], |key| &key.items);
        let messages = self.messages.read(messages_json, items, template.format())?;
        template.render(messages, options, &self.base)
    }

    /// Returns the tokens of a completion request. vLLM adds special tokens unless the request disables it.
    ///
    /// # Errors
    /// [`EncodeError::Tokenizer`].
    pub fn completion(&self, prompt: &str, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        let tokens = self.completion_until(prompt.to_owned(), add_special_tokens, &AtomicBool::new(false))?;
        Ok(tokens.to_vec())
    }

    /// Like [`Tokenizer::completion`], but ends soon after another thread sets `stopped`.
    ///
    /// # Errors
    /// Same as [`Tokenizer::completion`], and [`EncodeError::Stopped`].
    pub fn completion_until(
        &self,
        prompt: String,
        add_special_tokens: bool,
        stopped: &AtomicBool,
    ) -> Result<PromptTokens, EncodeError> {
        self.encoder.encode(&prompt.into(), add_special_tokens, stopped)
    }

    /// Returns the key of a request's prompt, by which [`Tokenizer::known`] finds its tokens; `None` if they
    /// are not kept. `prompt_json` is the raw JSON of its messages or prompt, `item_ends` are the ends of the
    /// messages in it (fewer or none are allowed), and `get` returns the raw JSON of a field.
    pub fn prompt_key<'a>(
        &self,
        form: PromptForm,
        prompt_json: &str,
        item_ends: &[u32],
        get: impl Fn(&str) -> Option<&'a str>,
    ) -> Option<PromptKey> {
        let mut key = self.keys.as_ref()?.key(form, prompt_json, item_ends, get)?;
        let shows_time = form == PromptForm::Chat && self.templates.values().any(ChatTemplate::shows_time);
        key.whole = key.whole.filter(|_| !shows_time);
        Some(key)
    }

    /// Returns the tokens of a prompt that was kept.
    #[must_use]
    pub fn known(&self, prompt: &PromptKey) -> Option<PromptTokens> {
        self.encoder.kept_tokens(prompt.whole?)
    }

    /// Keeps the tokens of a prompt, within the bounds of the cache.
    pub fn remember(&self, prompt: &PromptKey, tokens: &PromptTokens) {
        prompt.whole.into_iter().for_each(|key| self.encoder.keep_whole(key, tokens));
    }

    /// Returns which implementation encodes the texts.
    #[must_use]
    pub fn encoder(&self) -> EncoderKind {
        self.encoder.kind()
    }

    /// Returns how far texts are split into cached pieces.
    #[must_use]
    pub fn reuse(&self) -> Reuse {
        self.encoder.reuse()
    }

    /// Returns the counters of the cache.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        self.encoder.cache_stats()
    }

    /// Returns the form of content that the chat template expects; `None` without a template.
    #[must_use]
    pub fn content_format(&self) -> Option<ContentFormat> {
        self.template(false).ok().map(ChatTemplate::format)
    }

    fn template(&self, tools: bool) -> Result<&ChatTemplate, EncodeError> {
        let tool_use = self.templates.get("tool_use").filter(|_| tools);
        tool_use.or_else(|| self.templates.get("default")).ok_or(EncodeError::NoTemplate)
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let templates: Vec<&String> = self.templates.keys().collect();
        let mut shown = f.debug_struct("Tokenizer");
        shown.field("templates", &templates).field("reuse", &self.reuse()).finish_non_exhaustive()
    }
}
