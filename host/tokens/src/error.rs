//! What can go wrong at load, and with a request.

use std::{io, path::PathBuf};

/// A model folder that cannot be used. The message names the file.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file is missing or unreadable.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file was read and makes no sense.
    #[error("{}: {problem}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

/// A request whose tokens cannot be told. The caller falls back to byte blocks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A message has a part that is no text; its tokens depend on the engine's processor.
    #[error("messages: a part of type `{0}` is not text")]
    Multimodal(String),
    /// A field does not have the shape that the engine wants.
    #[error("{field}: {problem}")]
    Invalid {
        /// The field of the request.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A field changes the prompt in a way that is not modelled here.
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
}

impl TokenizerError {
    pub(crate) fn invalid(path: impl Into<PathBuf>, problem: impl ToString) -> Self {
        Self::Invalid { path: path.into(), problem: problem.to_string() }
    }

    /// Stable label.
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

    /// Stable label, for metrics.
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
        }
    }
}
