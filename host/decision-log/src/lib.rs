//! Format of the gateway's decision log: what the gateway writes, and what `pointsman trace export` and
//! `pointsman calibrate --log` read.
//!
//! A file is a sequence of zstd frames, each complete in itself, whose content is lines of JSON: one
//! [`FileHeader`], then one [`LoggedRequest`] for each request in the order in which they ended. Neither
//! holds text of a prompt or an answer.

use prefix_index::Prefix;
use serde::{Deserialize, Serialize};

/// Value of [`FileHeader::log`].
pub const LOG_NAME: &str = "pointsman-decisions";
/// Version of the format.
pub const LOG_VERSION: u32 = 1;
/// First part of the name of a file.
pub const FILE_PREFIX: &str = "decisions-";
/// Last part of the name of a file.
pub const FILE_SUFFIX: &str = ".jsonl.zst";

/// Depth in blocks up to which every block of a prompt is logged.
const EVERY: u32 = 2_048;
/// Depth up to which one block in 32 is logged. Beyond it, one in 1,024 is.
const SPARSE: u32 = 65_536;

/// First line of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileHeader {
    /// [`LOG_NAME`].
    pub log: String,
    /// [`LOG_VERSION`].
    pub version: u32,
    /// Tokens in a block of [`LoggedBlocks`]: `routing.block_size` of the gateway.
    pub block_tokens: u32,
    /// When the file was begun, milliseconds since the Unix epoch.
    pub started_at_ms: u64,
    /// Version of the gateway.
    pub gateway: String,
}

/// One request that ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoggedRequest {
    /// Arrival, microseconds since the Unix epoch.
    pub arrived_at_us: u64,
    /// Endpoint, as in metrics.
    pub endpoint: String,
    /// Model; `other` when no worker serves it.
    pub model: String,
    /// Salted hash of the tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_hash: Option<u64>,
    /// Salted hash of the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_hash: Option<u64>,
    /// Priority; higher is served first.
    #[serde(default)]
    pub priority: f32,
    /// Prompt tokens, as routing counted them.
    pub input_tokens: u32,
    /// Whether that number was estimated from bytes.
    #[serde(default)]
    pub input_estimated: bool,
    /// Output tokens of all sequences.
    pub output_tokens: u32,
    /// Number of choices of each prompt, if more than one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choices: Option<u32>,
    /// Number of prompts, if more than one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompts: Option<u32>,
    /// The client's cap on output tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// Identity of the prompt's prefix.
    #[serde(default)]
    pub blocks: LoggedBlocks,
    /// The decisions, in order; those of retries, too.
    #[serde(default)]
    pub decisions: Vec<LoggedDecision>,
    /// How the request ended.
    pub outcome: LoggedOutcome,
}

/// Identity of a prompt's prefix. Each id names a block and everything before it, so that two prompts with an
/// equal id are equal up to there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoggedBlocks {
    /// Salted ids, each deeper than the one before.
    pub ids: Vec<u64>,
    /// Depth of each id in blocks; empty: 1, 2, 3, …
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub depths: Vec<u32>,
}

/// One decision of a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoggedDecision {
    /// Id of the decision's record in the gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Slot.
    pub slot: String,
    /// Model of the slot; `None`: the slot of all models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot_model: Option<String>,
    /// Lane that decided: `active` or `canary`.
    pub lane: String,
    /// Generation that decided.
    pub generation: u64,
    /// Policy in it; `None` if a native mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Digest of the policy's bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Digest of the policy's settings; `None`: it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings_digest: Option<String>,
    /// Name of the last filter before the policy; `None`: no filter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// Scorers that ranked, with their weights, and the picker; `None`: no scorers, or a single one with
    /// weight 1 whose least cost is picked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scorers: Option<String>,
    /// Kind of the decider: `policy`, `native`, `fallback`, `pin`, `session` or `plan`.
    pub decider: String,
    /// Reason of a fallback, or the native mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// 0 for the leg's first try.
    #[serde(default)]
    pub attempt: u32,
    /// Whether the leg was decided again later, because the attempt of the request failed.
    #[serde(default)]
    pub retried: bool,
    /// Worker that was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u64>,
    /// Its data-parallel rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// When it was decided, microseconds since the Unix epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_us: Option<u64>,
    /// Number of eligible candidates.
    #[serde(default)]
    pub candidates: u32,
    /// Blocks that the choice was expected to have cached: device, host, disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_blocks: Option<[u32; 3]>,
    /// `remote`, `local` or `shed` of a decode override; the code of a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<String>,
    /// Answer of the slot's shadow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow: Option<LoggedShadow>,
}

/// Answer of a slot's shadow.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoggedShadow {
    /// Its generation.
    pub generation: u64,
    /// Its policy; `None` if a native mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Digest of the policy's bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Digest of the policy's settings; `None`: it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings_digest: Option<String>,
    /// Name of the last filter before the policy; `None`: no filter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// Scorers that ranked, with their weights, and the picker; `None`: no scorers, or a single one with
    /// weight 1 whose least cost is picked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scorers: Option<String>,
    /// `chose`, `abstained`, `nobody_left`, `refused` or `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
    /// Status of a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Kind of a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Worker; `None` if it chose none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u64>,
    /// Its data-parallel rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Blocks that its choice was expected to have cached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_blocks: Option<[u32; 3]>,
    /// Whether the request went to its choice.
    pub agrees: bool,
}

/// How a request ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoggedOutcome {
    /// HTTP status, 499 when the client disconnected.
    pub status: u16,
    /// `ok`, or the code of an error.
    pub code: String,
    /// Time to first token, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// Mean time between tokens, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub itl_ms: Option<f64>,
    /// Time from the request's first byte to its end, milliseconds.
    pub e2e_ms: f64,
    /// Prompt tokens as the engine reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_reported: Option<u32>,
    /// Cached prompt tokens as predicted when the prompt's worker was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_predicted: Option<u32>,
    /// Cached prompt tokens as the engine reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_reported: Option<u32>,
}

impl LoggedRequest {
    /// Returns the number of prompt tokens as the engine counted them, or else as routing did; `None` if it
    /// was estimated from bytes.
    #[must_use]
    pub fn counted_tokens(&self) -> Option<u32> {
        let routed = Some(self.input_tokens).filter(|_| !self.input_estimated);
        self.outcome.prompt_reported.or(routed).filter(|tokens| *tokens > 0)
    }
}

impl LoggedBlocks {
    /// Names the blocks of a prefix with `id_of`. The deeper blocks of long prompts are named more sparsely,
    /// so that the size of a record is bounded: 16 million tokens in blocks of 16 have about 5,000 ids. Depth
    /// alone decides whether a block is named, so that prompts of different lengths share their ids.
    pub fn of(prefix: &Prefix, id_of: impl Fn(u64) -> u64) -> Self {
        let marks = (1_u32..).zip(prefix.hashes().iter()).map(|(mark, hash)| (prefix.blocks(mark), hash));
        let (depths, ids): (Vec<u32>, Vec<u64>) =
            marks.filter(|(depth, _)| is_logged(*depth)).map(|(depth, hash)| (depth, id_of(hash.0))).unzip();
        let is_dense = (1_u32..).zip(&depths).all(|(expected, depth)| expected == *depth);
        Self { ids, depths: if is_dense { Vec::new() } else { depths } }
    }

    /// Returns each id with its depth in blocks.
    pub fn marks(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let dense = self.depths.is_empty();
        (1_u32..).zip(&self.ids).enumerate().map(move |(place, (count, id))| {
            let depth = if dense { count } else { self.depths.get(place).copied().unwrap_or(u32::MAX) };
            (depth, *id)
        })
    }
}

/// Returns whether the block that ends at this depth is logged.
fn is_logged(depth: u32) -> bool {
    depth <= EVERY || (depth <= SPARSE && depth.is_multiple_of(32)) || depth.is_multiple_of(1_024)
}

#[cfg(test)]
mod tests {
    use prefix_index::Salt;

    use super::*;

    #[test]
    fn the_ids_of_a_long_prompt_are_bounded_and_are_those_of_a_short_one() {
        let tokens: Vec<u32> = (0..1_600_000).collect();
        let of = |length: usize| Prefix::of_tokens(&tokens[..length], 16, &Salt::default(), &[]);
        let long = LoggedBlocks::of(&of(1_600_000), |id| id);
        assert_eq!(long.ids.len(), 2_048 + (65_536 - 2_048) / 32 + (100_000 - 65_536) / 1_024);
        let short = LoggedBlocks::of(&of(40_000), |id| id);
        assert!(!short.depths.is_empty());
        let marks: Vec<_> = short.marks().collect();
        assert_eq!(marks, long.marks().take(marks.len()).collect::<Vec<_>>());
        let dense = LoggedBlocks::of(&of(100), |id| id + 1);
        assert_eq!((dense.depths.len(), dense.ids.len()), (0, 6));
        assert_eq!(dense.marks().last().map(|(depth, _)| depth), Some(6));
    }
}
