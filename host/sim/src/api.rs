//! The APIs through which text is generated.

use crate::config::{Dialect, SimConfig};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// SGLang's `/generate`
    Generate,
    /// `/v1/messages`
    Messages,
    /// `/v1/responses`
    Responses,
}

impl Api {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Generate => "/generate",
            Self::Messages => "/v1/messages",
            Self::Responses => "/v1/responses",
        }
    }

    /// Returns whether the prompt is a conversation.
    pub(crate) fn is_chat(self) -> bool {
        !matches!(self, Self::Completions | Self::Generate)
    }

    /// Returns whether events have names.
    pub(crate) fn is_named(self) -> bool {
        matches!(self, Self::Messages | Self::Responses)
    }

    /// Returns whether a stream repeats its output, at its end or in each event.
    pub(crate) fn repeats(self) -> bool {
        self.is_named() || self == Self::Generate
    }

    /// Returns whether the engine's handler of this API reads handoff fields. vLLM's handler of Responses
    /// before 0.19, and SGLang's handlers of Messages and Responses before 0.5.23, drop them.
    pub(crate) fn takes_handoff(self, config: &SimConfig) -> bool {
        let numbers = config.version().split('.').map_while(|number| number.parse::<u32>().ok());
        match config.dialect {
            _ if !self.is_named() => true,
            Dialect::Sglang => numbers.ge([0, 5, 23]),
            Dialect::Vllm => self == Self::Messages || numbers.ge([0, 19]),
            Dialect::Openai => false,
        }
    }

    /// Returns the beginning of a response's id.
    pub(crate) fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat | Self::Messages => "chatcmpl-",
            Self::Completions => "cmpl-",
            // SGLang's ids have no prefix.
            Self::Generate => "",
            Self::Responses => "resp_",
        }
    }
}
