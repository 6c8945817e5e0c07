//! Facts that an engine reports of itself (B5).

use std::fmt;

use serde::Serialize;

use crate::id::Role;

/// Maximum number of data-parallel ranks of a worker, configured or reported.
pub(crate) const MAX_DP_SIZE: u32 = 4_096;

/// A fact that both the configuration and the engine may state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FactName {
    /// Dialect of the engine.
    Engine,
    /// Models that the engine serves.
    Model,
    /// Role (SGLang's disaggregation mode).
    Role,
    /// Number of data-parallel ranks.
    DpSize,
    /// Port of the bootstrap server of a prefill worker.
    BootstrapPort,
    /// KV connector (vLLM).
    Transport,
    /// Properties that both workers of a pair must share.
    KvCompatibility,
    /// Tokens in a KV block.
    BlockSize,
    /// Number of KV blocks of a rank.
    TotalBlocks,
    /// Maximum number of concurrent requests of the engine itself.
    MaxRunningRequests,
    /// Addresses of the engine's KV events and of their replay.
    KvEvents,
    /// Number of the engine's first rank, which vLLM adds to the ports of its KV events.
    FirstRank,
    /// Whether the worker can prefill without a handoff. No engine reports it; it follows from the role.
    LocalPrefill,
}

/// Properties that an engine reports of itself; `None` for those that it does not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EngineFacts {
    /// Role.
    pub role: Option<Role>,
    /// Number of data-parallel ranks.
    pub dp_size: Option<u32>,
    /// Number of the engine's first rank among those of all engines that share a model (vLLM's hybrid and
    /// external load balancing).
    pub first_rank: Option<u32>,
    /// Whether requests name a rank by its number among those of all engines (vLLM's Rust frontend).
    pub takes_global_ranks: bool,
    /// Port of the bootstrap server. Only of a prefill worker.
    pub bootstrap_port: Option<u16>,
    /// The engine's own name of its KV connector; `none` if it has none.
    pub connector: Option<String>,
    /// The engine's version.
    pub version: Option<String>,
    /// Tokens in a KV block.
    pub block_size: Option<u32>,
    /// Number of KV blocks of a rank.
    pub total_blocks: Option<u32>,
    /// Maximum number of concurrent requests.
    pub max_running_requests: Option<u32>,
    /// Port of the KV events of the first rank, at the worker's own host.
    pub kv_events_port: Option<u16>,
    /// Port that replays the KV events of the first rank.
    pub kv_replay_port: Option<u16>,
    /// Whether the role may change while the engine runs (SGLang's `/pd_role_switch`).
    pub switches_role: bool,
    /// Whether a prompt's KV is kept for later prompts with the same prefix.
    pub prefix_cache: Option<bool>,
}

/// The configuration and the engine differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error(
    "{fact} is configured as `{configured}`, but {reporter} reports `{reported}`: correct the worker's \
     configuration or the engine's start arguments"
)]
pub struct Contradiction {
    /// The fact.
    pub fact: FactName,
    /// Value in the configuration.
    pub configured: String,
    /// Value that the engine reports.
    pub reported: String,
    /// Source of the report, for messages.
    #[serde(skip)]
    pub reporter: &'static str,
}

impl FactName {
    /// Returns the name in configurations, metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Model => "model",
            Self::Role => "role",
            Self::DpSize => "dp_size",
            Self::BootstrapPort => "bootstrap_port",
            Self::Transport => "transport",
            Self::KvCompatibility => "kv_compatibility",
            Self::BlockSize => "block_size",
            Self::TotalBlocks => "total_blocks",
            Self::MaxRunningRequests => "max_running_requests",
            Self::KvEvents => "kv_events",
            Self::FirstRank => "first_rank",
            Self::LocalPrefill => "local_prefill",
        }
    }
}

impl fmt::Display for FactName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Contradiction {
    pub(crate) fn new(fact: FactName, configured: impl fmt::Display, reported: impl fmt::Display) -> Self {
        let (configured, reported) = (configured.to_string(), reported.to_string());
        Self { fact, configured, reported, reporter: "the engine" }
    }
}

impl EngineFacts {
    /// Fills missing facts from an earlier report.
    #[must_use]
    pub fn or(self, earlier: &Self) -> Self {
        Self {
            role: self.role.or(earlier.role),
            dp_size: self.dp_size.or(earlier.dp_size),
            first_rank: self.first_rank.or(earlier.first_rank),
            takes_global_ranks: self.takes_global_ranks || earlier.takes_global_ranks,
            bootstrap_port: self.bootstrap_port.or(earlier.bootstrap_port),
            connector: self.connector.or_else(|| earlier.connector.clone()),
            version: self.version.or_else(|| earlier.version.clone()),
            block_size: self.block_size.or(earlier.block_size),
            total_blocks: self.total_blocks.or(earlier.total_blocks),
            max_running_requests: self.max_running_requests.or(earlier.max_running_requests),
            kv_events_port: self.kv_events_port.or(earlier.kv_events_port),
            kv_replay_port: self.kv_replay_port.or(earlier.kv_replay_port),
            switches_role: self.switches_role || earlier.switches_role,
            prefix_cache: self.prefix_cache.or(earlier.prefix_cache),
        }
    }
}
