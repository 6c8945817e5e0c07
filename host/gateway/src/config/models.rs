//! `[models.NAME]`: what engines do not report about a model, and the slots that it has of its own.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use pointsman_routing::{BusyByLeg, SlotKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{LegOrder, SlotEntry, duration};

/// Settings of a model.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Model {
    /// Source of the token ids of prompts; `None`: prompts are measured in bytes.
    pub tokenizer: Option<TokenSource>,
    /// How long a request waits for an engine's token ids.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub tokenizer_timeout: Duration,
    /// Memory limit of cached tokenizations in bytes; 0: no cache.
    pub tokenizer_cache_bytes: usize,
    /// Overrides `routing.enforce_disagg` for this model.
    pub enforce_disagg: Option<bool>,
    /// Overrides `routing.order` for this model.
    pub order: Option<LegOrder>,
    /// Overrides `routing.local_fallback` for this model.
    pub local_fallback: Option<bool>,
    /// Overrides thresholds of `routing.busy` for this model.
    pub busy: BusyByLeg,
    /// Slots of this model only; the others are those for all models.
    pub slots: BTreeMap<SlotKind, SlotEntry>,
}

/// Source of a model's token ids.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(from = "PathBuf", into = "PathBuf")]
pub enum TokenSource {
    /// `engine`: an engine of the model tokenizes.
    Engine,
    /// A Hugging Face model directory with `tokenizer.json` and `tokenizer_config.json`.
    Folder(PathBuf),
}

impl From<PathBuf> for TokenSource {
    fn from(path: PathBuf) -> Self {
        if path.as_os_str() == "engine" { Self::Engine } else { Self::Folder(path) }
    }
}

impl From<TokenSource> for PathBuf {
    fn from(source: TokenSource) -> Self {
        match source {
            TokenSource::Engine => Self::from("engine"),
            TokenSource::Folder(path) => path,
        }
    }
}

impl Default for Model {
    fn default() -> Self {
        Self {
            tokenizer: None,
            tokenizer_timeout: Duration::from_millis(200),
            tokenizer_cache_bytes: 32 * 1024 * 1024,
            enforce_disagg: None,
            order: None,
            local_fallback: None,
            busy: BusyByLeg::new(),
            slots: BTreeMap::new(),
        }
    }
}
