//! An outcome in a case: by default a successful request whose worker the policy chose.

use serde::Deserialize;

/// A finished request that the policy observes before the call of the case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Outcome {
    /// Seed of the call that made the decision.
    pub seed: u64,
    /// The leg; for a decode override, the leg that answered.
    pub leg: Leg,
    /// 0 for the first attempt of the leg.
    pub attempt: u32,
    /// Id of the chosen worker.
    pub worker_id: u64,
    /// Data-parallel rank of the chosen worker.
    pub dp_rank: u32,
    /// Whether the policy chose the worker, rather than a hint, a session or the fallback.
    pub by_policy: bool,
    /// Whether the leg was routed again later, so that another worker served the request.
    pub retried: bool,
    /// HTTP status of the request; 499 when the client disconnected.
    pub status: u16,
    /// Time to first token since the request arrived, microseconds.
    pub ttft_us: Option<u32>,
    /// Mean time between tokens, microseconds.
    pub itl_us: Option<u32>,
    /// Duration of the request, microseconds.
    pub duration_us: u64,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Output tokens.
    pub output_tokens: u32,
    /// Prompt tokens that the gateway predicted to be cached, if it made a prediction.
    pub cached_predicted: Option<u32>,
    /// Prompt tokens that the engine reported as cached, if it reported any.
    pub cached_reported: Option<u32>,
}

/// A leg of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Leg {
    /// Computes the prompt's KV cache.
    #[default]
    Prefill,
    /// Generates tokens.
    Decode,
    /// Does both on one worker.
    Aggregated,
}

impl Default for Outcome {
    fn default() -> Self {
        Self {
            seed: 0,
            leg: Leg::Prefill,
            attempt: 0,
            worker_id: 0,
            dp_rank: 0,
            by_policy: true,
            retried: false,
            status: 200,
            ttft_us: None,
            itl_us: None,
            duration_us: 0,
            prompt_tokens: 0,
            output_tokens: 0,
            cached_predicted: None,
            cached_reported: None,
        }
    }
}
