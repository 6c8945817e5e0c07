//! Computes the tokens that an engine will see for a request, in the same way as vLLM.
//!
//! [`Tokenizer::load`] reads a Hugging Face model directory. [`Tokenizer::chat`] renders the chat template
//! and encodes the text; [`Tokenizer::completion`] encodes a plain prompt. Long texts are split into pieces
//! that encode independently, and the tokens of each piece are cached, so that the next turn of a
//! conversation encodes only its new text.
//!
//! The crate parses JSON of the OpenAI API. It contains no HTTP, no engines and no block hashes. All calls
//! are synchronous. Encoding a long prompt that is not cached takes tens of milliseconds, so callers run such
//! prompts off the reactor, on the threads of an [`EncodePool`].
//!
//! After any [`EncodeError`], the caller measures the request in bytes ([`PromptBytes`]) and forwards it to
//! the engine.

mod byte_cache;
mod content_format;
mod encode;
mod error;
mod folder;
mod json;
mod messages;
mod options;
mod pool;
mod prompt_bytes;
mod prompt_key;
mod prompt_tokens;
mod python;
mod rendered;
mod template;
mod tokenizer;
mod tools;

pub use crate::{
    byte_cache::CacheStats,
    content_format::ContentFormat,
    encode::{EncoderKind, Reuse},
    error::{EncodeError, TokenizerError},
    options::{ChatOptions, LoadOptions},
    pool::{EncodePool, PoolFull, PoolLimits, Ticket, Work},
    prompt_bytes::{MEDIA_TOKENS, PromptBytes, TEMPLATE_FIELDS},
    prompt_key::{PromptForm, PromptKey},
    prompt_tokens::{PromptTokens, TokenSegment},
    tokenizer::Tokenizer,
};
