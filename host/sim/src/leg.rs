//! Legs of a request.

use serde::{Deserialize, Serialize};

/// Leg of a request, as the engine recognises it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leg {
    /// Computes the prompt's KV for another engine.
    Prefill,
    /// Reads the prompt's KV from another engine.
    Decode,
    /// Computes and uses the prompt's KV itself.
    Aggregated,
}

impl Leg {
    /// Returns the label of the leg.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Aggregated => "aggregated",
        }
    }
}
