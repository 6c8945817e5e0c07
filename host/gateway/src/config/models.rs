//! `[models.NAME]`: what engines do not report about a model, and the slots that it has of its own.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use pointsman_config_file::{Report, duration::millis, section};
use pointsman_routing::{BusyByLeg, SlotKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{LegOrder, SlotEntry, sections::check_busy, slots};

/// Properties of a model that engines do not report; the table has the model's name. They hold for its
/// adapters, too, unless the adapter has a table with the same key.
#[section(rules)]
pub struct Model {
    /// Directory with tokenizer.json and tokenizer_config.json: prompts are hashed by token. Or "engine": ask
    /// a vLLM engine of the model (POST /tokenize), 16 requests at once.
    #[key(example = "\"/models/my-model\"")]
    pub tokenizer: Option<TokenSource>,
    /// How long a request waits for its tokens, also of a directory.
    #[key(default = millis(200))]
    pub tokenizer_timeout: Duration,
    /// Memory in bytes for cached data of prompts: pieces, beginnings, messages, block hashes; 0: none.
    #[key(default = 32 * 1024 * 1024)]
    pub tokenizer_cache_bytes: usize,
    /// Overrides routing.enforce_disagg for this model.
    #[key(example = "true")]
    pub enforce_disagg: Option<bool>,
    /// Overrides routing.order for this model.
    #[key(example = "\"decode-first\"")]
    pub order: Option<LegOrder>,
    /// Overrides routing.local_fallback for this model.
    #[key(example = "true")]
    pub local_fallback: Option<bool>,
    /// Overrides routing.continuations for this model.
    #[key(example = "0", range = 0..=8)]
    pub continuations: Option<u32>,
    /// From what the rest of a stream begins when its engine failed: "text" (default), or "exact": from token
    /// ids, where the engines are vLLM and the temperature is 0.
    #[key(example = "\"exact\"")]
    pub continuation: Option<ContinuationForm>,
    /// How long a request waits while no worker can serve the model, such as one scaled to zero. It has a
    /// place in the queue (queue.limit). Default: it is refused at once.
    #[key(example = "\"5m\"", positive)]
    pub wait_for_workers: Option<Duration>,
    /// Target for the time to first token of requests that name none and whose tenant has none; default:
    /// none.
    #[key(example = "\"2s\"", positive)]
    pub ttft_target: Option<Duration>,
    /// The same for the inter-token latency.
    #[key(example = "\"50ms\"", positive)]
    pub itl_target: Option<Duration>,
    /// Overrides routing.busy for this model; keys that are left out keep the values of routing.busy.
    #[key(example = "{ decode = { kv_usage = 0.95 } }")]
    pub busy: BusyByLeg,
    /// Slots of this model; slots that are left out come from [policies.slots].
    #[key(example = "{ prefill = { builtin = \"least-loaded\" } }", nested, changes = slots::changes)]
    pub slots: BTreeMap<SlotKind, SlotEntry>,
}

/// From what the rest of a stream begins whose engine failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ContinuationForm {
    /// From its text.
    #[default]
    Text,
    /// From its token ids: the gateway asks engines for them.
    Exact,
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

impl Model {
    fn rules(&self, report: &mut Report<'_>) {
        check_busy(&self.busy, &mut report.at("busy"));
    }
}
