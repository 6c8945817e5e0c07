//! The tokens an engine would see for a request, computed as vLLM computes them.
//!
//! [`Tokenizer::load`] reads a Hugging Face model folder. [`Tokenizer::chat`] renders the chat template and encodes the
//! text, [`Tokenizer::completion`] encodes a plain prompt. Long texts are cut into pieces that encode independently, and
//! the tokens of a piece are remembered, so that the next turn of a conversation encodes only what is new.
//!
//! What is absent: HTTP, engines, block hashes. The crate knows JSON of the OpenAI API and nothing of a request's way.
//! Everything is synchronous. A long prompt takes tens of milliseconds when nothing of it is remembered: callers run
//! such prompts off the reactor, on a bounded number of threads (each thread keeps a small word cache of its own).
//!
//! Any [`EncodeError`] means: measure this request in bytes and let the engine answer it.

mod encode;
mod error;
mod folder;
mod messages;
mod options;
mod template;
mod tokenizer;
mod tools;

pub use crate::{
    encode::{CacheStats, Reuse},
    error::{EncodeError, TokenizerError},
    options::{ChatOptions, LoadOptions},
    template::ContentFormat,
    tokenizer::Tokenizer,
};
