//! A sequence of a batch, and its state in the scheduler.

use std::sync::Arc;

use super::super::block_pool::BlockId;

/// Source of the KV of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptKv {
    /// The engine computes it.
    #[default]
    Computed,
    /// The engine computes it, except this number of first tokens, which count as cached whatever the model's
    /// cache contains.
    Cached(u32),
    /// Another engine computed it, and it arrived before the sequence was submitted.
    Received,
    /// It arrives from another engine after the admission. Until then the sequence holds blocks and does not
    /// run.
    Awaited,
}

/// A sequence to run.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Name of the sequence, chosen by the caller; unique among the running sequences.
    pub tag: u64,
    /// Sequence hashes of the full blocks of the prompt, or of prompt and output if the output is known.
    pub prompt: Arc<[u64]>,
    /// Prompt tokens, at least 1.
    pub isl: u32,
    /// Output tokens, at least 1.
    pub osl: u32,
    /// Source of the KV of the prompt.
    pub kv: PromptKv,
    /// Whether the sequence keeps its blocks after the last token until they are unpinned, so that another
    /// engine can read them.
    pub keeps_blocks: bool,
}

/// A token at the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Tag of the sequence.
    pub tag: u64,
    /// Number of the token, from 1.
    pub number: u32,
    /// Whether it was the last one.
    pub last: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Running {
    pub(super) sequence: Sequence,
    pub(super) blocks: Vec<BlockId>,
    /// Number of output tokens so far.
    pub(super) produced: u32,
    /// Tokens whose KV is computed, or will be at the end of the step.
    pub(super) computed: u32,
    /// Number of new tokens in the current step.
    pub(super) scheduled: u32,
    /// Number of blocks that were offered to the cache.
    pub(super) published: u32,
    pub(super) preempted: bool,
}

impl Running {
    pub(super) fn new(sequence: Sequence) -> Self {
        let blocks = Vec::new();
        Self { sequence, blocks, produced: 0, computed: 0, scheduled: 0, published: 0, preempted: false }
    }

    pub(super) fn known_tokens(&self) -> u32 {
        self.sequence.isl + self.produced
    }

    /// Returns whether another engine computed the prompt.
    pub(super) fn receives(&self) -> bool {
        matches!(self.sequence.kv, PromptKv::Received | PromptKv::Awaited)
    }

    /// Returns the hash of a full block: a known hash, or a unique one for a block of the output.
    pub(super) fn hash(&self, position: u32) -> u64 {
        let tag = self.sequence.tag;
        let output = || mix(tag ^ (u64::from(position) << 40) ^ 0x6f75_7470_7574);
        self.sequence.prompt.get(position as usize).copied().unwrap_or_else(output)
    }
}

/// Spreads a number over 64 bits (the finalizer of splitmix64).
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
