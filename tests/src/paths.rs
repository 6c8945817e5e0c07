//! Paths of the inference APIs.

/// Chats of the `OpenAI` API.
pub const CHAT: &str = "/v1/chat/completions";
/// Completions of the `OpenAI` API.
pub const COMPLETIONS: &str = "/v1/completions";
/// Responses of the `OpenAI` API.
pub const RESPONSES: &str = "/v1/responses";
/// Messages of the Anthropic API.
pub const MESSAGES: &str = "/v1/messages";
