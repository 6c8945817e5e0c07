//! The endpoints that workers answer: paths, the shape of their bodies, and how prompts are found in them.

use json_splice::JsonBody;
use pointsman_workers::Engine;

/// An endpoint. An endpoint with several paths contains the path, because the engine is called on the same
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Endpoint {
    /// `/v1/chat/completions`
    ChatCompletions,
    /// `/v1/completions`
    Completions,
    /// `/generate`: SGLang's own endpoint, for texts and token ids.
    Generate,
    /// `/inference/v1/generate`: vLLM's own endpoint for token ids, on one worker.
    GenerateTokens,
    /// `/v1/embeddings`: one leg, never streamed.
    Embeddings,
    /// `/v2/embed`: the Cohere API.
    CohereEmbed,
    /// `/v1/responses`
    Responses,
    /// `/v1/responses/{id}`: a response that an engine stored.
    StoredResponse,
    /// `/v1/messages`: the Anthropic API.
    Messages,
    /// `/v1/messages/count_tokens`
    CountTokens,
    /// `/v1/rerank`, `/v2/rerank`, `/rerank`
    Rerank(&'static str),
    /// `/v1/score`, `/score`
    Score(&'static str),
    /// `/pooling`: what a pooling model makes of its input.
    Pooling,
    /// `/classify`, `/v1/classify`
    Classify(&'static str),
    /// `/v1/audio/transcriptions`: a form with a file.
    Transcriptions,
    /// `/v1/audio/translations`: a form with a file.
    Translations,
    /// `/v1/audio/speech`: a text, answered with audio.
    Speech,
    /// `/v1/images/generations`
    Images,
    /// `/tokenize`, `/v1/tokenize`: passed through to any worker that serves the model.
    Tokenize(&'static str),
    /// `/detokenize`, `/v1/detokenize`: as `/tokenize`.
    Detokenize(&'static str),
    /// `/v1/realtime`: a WebSocket.
    Realtime,
}

/// How the answers, events and errors of an endpoint are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Format {
    /// OpenAI's: unnamed events, `[DONE]` at the end.
    #[default]
    OpenAi,
    /// SGLang's `/generate`: unnamed events that repeat the whole output, `[DONE]` at the end.
    Generate,
    /// OpenAI's transcripts: unnamed events; chunks with `[DONE]` at the end, or events with a type, of which
    /// `transcript.text.done` is the last one.
    Transcript,
    /// OpenAI's Responses: named events, `response.completed` at the end.
    Responses,
    /// Anthropic's: named events, `message_stop` at the end.
    Anthropic,
}

impl Format {
    /// Returns whether events have names.
    #[must_use]
    pub(crate) fn is_named(self) -> bool {
        matches!(self, Self::Responses | Self::Anthropic)
    }

    /// Returns whether a stream may end with an event of its own, after which `[DONE]` may follow.
    #[must_use]
    pub(crate) fn has_last_event(self) -> bool {
        self.is_named() || self == Self::Transcript
    }

    /// Returns what the client of a silent stream gets between events, so that neither it nor a proxy gives
    /// up. Readers of the standard skip a line without a colon whose name they do not know. A blank line, as
    /// after a comment, ends a stream of openai-go before 3.43, and of openai-python after an event with an
    /// id: both take it for an event. A comment ends a measurement of `vllm bench serve` and of SGLang's
    /// `bench_serving`, which strip blanks.
    pub(crate) fn keep_alive(self) -> &'static [u8] {
        match self {
            Self::Anthropic => b"event: ping\ndata: {\"type\": \"ping\"}\n\n",
            _ => b" \n",
        }
    }
}

/// Keys of a body's prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PromptKeys {
    /// Field that comes first in the engine's prompt, if the body has it.
    pub preamble: Option<&'static str>,
    /// The prompt.
    pub key: &'static str,
    /// Whether a body without it is refused here.
    pub required: bool,
}

impl Endpoint {
    /// Every endpoint with a POST request.
    pub(crate) const POSTED: [Self; 25] = [
        Self::ChatCompletions,
        Self::Completions,
        Self::Generate,
        Self::GenerateTokens,
        Self::Embeddings,
        Self::CohereEmbed,
        Self::Responses,
        Self::Messages,
        Self::CountTokens,
        Self::Rerank("/v1/rerank"),
        Self::Rerank("/v2/rerank"),
        Self::Rerank("/rerank"),
        Self::Score("/v1/score"),
        Self::Score("/score"),
        Self::Pooling,
        Self::Classify("/classify"),
        Self::Classify("/v1/classify"),
        Self::Transcriptions,
        Self::Translations,
        Self::Speech,
        Self::Images,
        Self::Tokenize("/tokenize"),
        Self::Tokenize("/v1/tokenize"),
        Self::Detokenize("/detokenize"),
        Self::Detokenize("/v1/detokenize"),
    ];

    /// Returns the endpoint of a POST request to a path.
    #[must_use]
    pub(crate) fn posted(path: &str) -> Option<Self> {
        Self::POSTED.into_iter().find(|endpoint| endpoint.path() == path)
    }

    /// Its path, at the engines as well as here.
    #[must_use]
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Generate => "/generate",
            Self::GenerateTokens => "/inference/v1/generate",
            Self::Embeddings => "/v1/embeddings",
            Self::CohereEmbed => "/v2/embed",
            Self::Responses => "/v1/responses",
            Self::StoredResponse => "/v1/responses/{id}",
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
            Self::Rerank(path) | Self::Score(path) | Self::Classify(path) => path,
            Self::Tokenize(path) | Self::Detokenize(path) => path,
            Self::Pooling => "/pooling",
            Self::Transcriptions => "/v1/audio/transcriptions",
            Self::Translations => "/v1/audio/translations",
            Self::Speech => "/v1/audio/speech",
            Self::Images => "/v1/images/generations",
            Self::Realtime => "/v1/realtime",
        }
    }

    /// Stable metric label.
    #[must_use]
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat_completions",
            Self::Completions => "completions",
            Self::Generate => "generate",
            Self::GenerateTokens => "generate_tokens",
            Self::Embeddings => "embeddings",
            Self::CohereEmbed => "embed",
            Self::Responses => "responses",
            Self::StoredResponse => "stored_responses",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
            Self::Rerank(_) => "rerank",
            Self::Score(_) => "score",
            Self::Pooling => "pooling",
            Self::Classify(_) => "classify",
            Self::Transcriptions => "transcriptions",
            Self::Translations => "translations",
            Self::Speech => "speech",
            Self::Images => "images",
            Self::Tokenize(_) => "tokenize",
            Self::Detokenize(_) => "detokenize",
            Self::Realtime => "realtime",
        }
    }

    /// Returns whether prefill and decode may run on two workers, where the engine allows it. Those of a
    /// response may with some engines only.
    #[must_use]
    pub(crate) fn splits(self) -> bool {
        matches!(self, Self::ChatCompletions | Self::Completions | Self::Generate | Self::Messages)
    }

    /// Returns whether the engine generates text from the tokens of a prompt. These are the requests that
    /// `enforce_disagg` keeps off single workers.
    #[must_use]
    pub(crate) fn generates_text(self) -> bool {
        self.splits() || matches!(self, Self::Responses | Self::GenerateTokens)
    }

    /// Returns the only engine that has the endpoint; `None` if any may have it.
    #[must_use]
    pub(crate) fn engine(self) -> Option<Engine> {
        match self {
            Self::Generate => Some(Engine::Sglang),
            Self::GenerateTokens => Some(Engine::Vllm),
            _ => None,
        }
    }

    /// Returns whether the prompt may be a text or token ids, or a list of these.
    #[must_use]
    pub(crate) fn takes_batches(self) -> bool {
        matches!(self, Self::Completions | Self::Generate)
    }

    /// Returns whether the answer may be a stream.
    #[must_use]
    pub(crate) fn streams(self) -> bool {
        self.generates_text() || self.is_form() || self.streams_bytes()
    }

    /// Returns whether the bytes of a stream are passed on as they come: they are audio, or events in a form
    /// that differs between engines.
    #[must_use]
    pub(crate) fn streams_bytes(self) -> bool {
        matches!(self, Self::Speech | Self::Images)
    }

    /// Returns whether the body is a form (`multipart/form-data`).
    #[must_use]
    pub(crate) fn is_form(self) -> bool {
        matches!(self, Self::Transcriptions | Self::Translations)
    }

    /// Returns whether a worker answers without running the model, so that its role does not matter.
    #[must_use]
    pub(crate) fn needs_no_model_run(self) -> bool {
        matches!(self, Self::Tokenize(_) | Self::Detokenize(_) | Self::CountTokens)
    }

    /// How its answers are written.
    #[must_use]
    pub(crate) fn format(self) -> Format {
        match self {
            Self::Messages | Self::CountTokens => Format::Anthropic,
            Self::Responses => Format::Responses,
            Self::Generate => Format::Generate,
            Self::Transcriptions | Self::Translations => Format::Transcript,
            _ => Format::OpenAi,
        }
    }

    /// Returns the keys of the prompt in `body`.
    pub(super) fn prompt_keys(self, body: &JsonBody) -> PromptKeys {
        let first_of = |keys: [&'static str; 4]| {
            let [first, ..] = keys;
            keys.into_iter().find(|key| body.get(key).is_some()).unwrap_or(first)
        };
        let (preamble, key, required) = match self {
            // Embeddings replace any other prompt [A1].
            Self::Completions if body.get("prompt_embeds").is_some_and(|embeds| embeds != "null") => {
                (None, "prompt_embeds", true)
            }
            Self::Completions => (None, "prompt", true),
            Self::Generate => {
                // The engine counts the texts of a body that also has token ids.
                let is_given = |key: &&str| body.get(key).is_some_and(|value| value != "null");
                (
                    None,
                    ["text", "input_ids", "input_embeds"].into_iter().find(is_given).unwrap_or("text"),
                    true,
                )
            }
            Self::GenerateTokens => (None, "token_ids", true),
            // vLLM also embeds a chat.
            Self::Embeddings if body.get("input").is_none() && body.get("messages").is_some() => {
                (None, "messages", true)
            }
            Self::Embeddings | Self::Speech => (None, "input", true),
            Self::CohereEmbed => (None, first_of(["texts", "inputs", "images", "input"]), false),
            Self::Responses => (Some("instructions"), "input", true),
            Self::Messages | Self::CountTokens => (Some("system"), "messages", true),
            Self::Tokenize(_) if body.get("prompt").is_some() => (None, "prompt", true),
            Self::ChatCompletions | Self::Tokenize(_) => (None, "messages", true),
            // The engines have several spellings of these, and refuse a body that fits none.
            Self::Rerank(_) => (Some("query"), "documents", false),
            Self::Score(_) => {
                let key = first_of(["text_2", "documents", "items", "data_2"]);
                (Some(first_of(["text_1", "queries", "query", "data_1"])), key, false)
            }
            Self::Pooling | Self::Classify(_) => {
                (None, first_of(["input", "messages", "text", "prompt"]), false)
            }
            Self::Detokenize(_) => (None, "tokens", false),
            Self::Transcriptions
            | Self::Translations
            | Self::Images
            | Self::Realtime
            | Self::StoredResponse => (None, "prompt", false),
        };
        PromptKeys { preamble, key, required }
    }

    /// Returns whether the engine generates tokens.
    pub(crate) fn generates(self) -> bool {
        match self {
            Self::ChatCompletions | Self::Completions | Self::Responses | Self::Messages => true,
            Self::Generate | Self::GenerateTokens | Self::Speech => true,
            Self::Transcriptions | Self::Translations | Self::Realtime => true,
            Self::Embeddings | Self::CohereEmbed | Self::CountTokens | Self::Rerank(_) | Self::Score(_) => {
                false
            }
            Self::Pooling | Self::Classify(_) | Self::Images => false,
            Self::Tokenize(_) | Self::Detokenize(_) | Self::StoredResponse => false,
        }
    }
}
