//! The small words everything else is written in: ids, ranks, roles, legs, engines.

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// One engine endpoint. Configured, or the xxh3-64 (seed 0) of its base URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub u64);

/// A data-parallel rank of a worker. A candidate is one (worker, rank).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DpRank(pub u32);

/// Sequence hash of a full block: names a block *and* everything before it (spec H1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u64);

/// A model as clients name it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ModelName(pub Arc<str>);

/// What a worker may serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill legs only.
    Prefill,
    /// Decode legs only.
    Decode,
    /// Prefill and decode of a request in one leg.
    Aggregated,
}

/// One upstream call of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leg {
    /// Prefill and decode on one worker.
    Aggregated,
    /// The prompt's KV blocks are computed here.
    Prefill,
    /// Tokens are generated here from transferred blocks.
    Decode,
}

/// The dialect a worker speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    Trtllm,
    /// Any OpenAI-compatible server; aggregated only.
    Openai,
}

/// A word that is none of the allowed ones.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{what} `{value}` is none of: {allowed}")]
pub struct UnknownWord {
    what: &'static str,
    value: String,
    allowed: &'static str,
}

impl WorkerId {
    /// The id of a worker that was given none: a hash of its base URL, so that it survives restarts.
    #[must_use]
    pub fn of_url(url: &str) -> Self {
        Self(xxh3_64(url.trim_end_matches('/').as_bytes()))
    }
}

impl Role {
    /// Whether a worker of this role may serve `leg` by its role alone; a decode worker that can prefill locally may serve
    /// the aggregated leg as well.
    #[must_use]
    pub fn serves(self, leg: Leg) -> bool {
        match self {
            Self::Aggregated => leg == Leg::Aggregated,
            Self::Prefill => leg == Leg::Prefill,
            Self::Decode => leg == Leg::Decode,
        }
    }

    /// The stable label of this role in configs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Aggregated => "aggregated",
        }
    }
}

impl Leg {
    /// The stable label of this leg in metrics, logs and slots.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl Engine {
    /// The stable label of this engine in configs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Trtllm => "trtllm",
            Self::Openai => "openai",
        }
    }
}

impl ModelName {
    /// A model name from text.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(Arc::from(name))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Role {
    type Err = UnknownWord;

    fn from_str(value: &str) -> Result<Self, UnknownWord> {
        match value {
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            "aggregated" => Ok(Self::Aggregated),
            _ => Err(UnknownWord {
                what: "role",
                value: value.to_owned(),
                allowed: "prefill, decode, aggregated",
            }),
        }
    }
}

impl FromStr for Engine {
    type Err = UnknownWord;

    fn from_str(value: &str) -> Result<Self, UnknownWord> {
        match value {
            "vllm" => Ok(Self::Vllm),
            "sglang" => Ok(Self::Sglang),
            "trtllm" => Ok(Self::Trtllm),
            "openai" => Ok(Self::Openai),
            _ => Err(UnknownWord {
                what: "engine",
                value: value.to_owned(),
                allowed: "vllm, sglang, trtllm, openai",
            }),
        }
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for DpRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Leg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
