//! Limits of the scheduler.

/// Limits of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Maximum number of sequences that run at once.
    pub max_num_seqs: u32,
    /// Maximum number of tokens in one step (chunked prefill).
    pub max_batched_tokens: u32,
    /// Number of KV blocks.
    pub blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Whether the engine only computes prompts.
    pub prefill_only: bool,
}
