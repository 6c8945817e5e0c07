//! Errors at load and for a request.

use std::{io, path::PathBuf};

/// Why a model directory cannot be loaded. The message names the file.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file is missing or cannot be read.
    #[error("cannot read tokenizer file {}: {error}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        error: io::Error,
    },
    /// The content of a file is invalid.
    #[error("cannot load tokenizer: {}: {problem}", path.display())]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// Why the tokens of a request cannot be computed. The caller falls back to byte blocks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A message has a part that is not text. Its tokens depend on the engine's processor.
    #[error("messages: cannot tokenize a part of type `{0}`: expected text")]
    Multimodal(String),
    /// A field does not have the form that the engine expects.
    #[error("{field}: {problem}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A field changes the prompt in a way that this crate does not support.
    #[error("{0}: is not supported by the gateway's tokenizer")]
    Unsupported(String),
    /// The model folder has no chat template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// The chat template called `raise_exception`.
    #[error("the chat template refused the request: {0}")]
    Refused(String),
    /// The chat template failed.
    #[error("chat template: {0}")]
    Template(String),
    /// The tokenizer failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The text is too long, and the tokenizer cannot encode it in pieces.
    #[error("tokenizer: cannot encode {0} bytes in one piece")]
    TooLong(usize),
    /// The caller stopped the encode.
    #[error("tokenizer: stopped by the caller")]
    Stopped,
}

impl TokenizerError {
    pub(crate) fn invalid(path: impl Into<PathBuf>, problem: impl ToString) -> Self {
        Self::Invalid { path: path.into(), problem: problem.to_string() }
    }

    /// Returns the stable label in logs.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Read { .. } => "read",
            Self::Invalid { .. } => "invalid",
        }
    }
}

impl EncodeError {
    pub(crate) fn invalid(field: &'static str, problem: impl ToString) -> Self {
        Self::Invalid { field, problem: problem.to_string() }
    }

    /// Returns the stable label in metrics.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Multimodal(_) => "multimodal",
            Self::Invalid { .. } => "invalid",
            Self::Unsupported(_) => "unsupported",
            Self::NoTemplate => "no_template",
            Self::Refused(_) => "refused",
            Self::Template(_) => "template",
            Self::Tokenizer(_) => "tokenizer",
            Self::TooLong(_) => "too_long",
            Self::Stopped => "stopped",
        }
    }
}
