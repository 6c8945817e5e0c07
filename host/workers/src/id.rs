//! Basic types: ids, ranks, roles, legs, engines.

use std::{fmt, str::FromStr, sync::Arc};

pub use prefix_index::{BlockHash, DpRank, WorkerId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Name of a model as clients use it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ModelName(pub Arc<str>);

/// Kind of requests that a worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill legs only.
    Prefill,
    /// Decode legs only.
    Decode,
    /// Requests whose prefill and decode run in one leg.
    Aggregated,
}

/// An upstream call of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Leg {
    /// Runs prefill and decode on one worker.
    Aggregated,
    /// Computes the prompt's KV blocks.
    Prefill,
    /// Generates tokens from transferred KV blocks.
    Decode,
}

/// Engine of a worker, which determines the dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    Trtllm,
    /// Any other OpenAI-compatible server. Aggregated requests only.
    Openai,
}

/// A name that is not one of the allowed ones.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown {what} `{value}`: expected {allowed}")]
pub struct UnknownName {
    what: &'static str,
    value: String,
    allowed: &'static str,
}

impl Role {
    /// Returns whether this role alone allows `leg`. A decode worker that can prefill locally may also serve
    /// the aggregated leg.
    #[must_use]
    pub fn serves(self, leg: Leg) -> bool {
        match self {
            Self::Aggregated => leg == Leg::Aggregated,
            Self::Prefill => leg == Leg::Prefill,
            Self::Decode => leg == Leg::Decode,
        }
    }

    /// Returns the stable label of this role in configurations and metrics.
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
    /// Returns the stable label of this leg in metrics, logs and policy slots.
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
    /// Returns the stable label of this engine in configurations and metrics.
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
    /// Creates a model name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(Arc::from(name))
    }

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Role {
    type Err = UnknownName;

    fn from_str(value: &str) -> Result<Self, UnknownName> {
        match value {
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            "aggregated" => Ok(Self::Aggregated),
            _ => Err(UnknownName {
                what: "role",
                value: value.to_owned(),
                allowed: "prefill, decode or aggregated",
            }),
        }
    }
}

impl FromStr for Engine {
    type Err = UnknownName;

    fn from_str(value: &str) -> Result<Self, UnknownName> {
        match value {
            "vllm" => Ok(Self::Vllm),
            "sglang" => Ok(Self::Sglang),
            "trtllm" => Ok(Self::Trtllm),
            "openai" => Ok(Self::Openai),
            _ => Err(UnknownName {
                what: "engine",
                value: value.to_owned(),
                allowed: "vllm, sglang, trtllm or openai",
            }),
        }
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
