//! The sections of the file, apart from models, policies and workers: keys, types and defaults.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use pointsman_routing::RouterConfig;
use serde::{Deserialize, Serialize};

use super::duration;

/// `[server]`: the listeners, and what clients and operators may do.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    /// Address of the clients' listener.
    pub listen: SocketAddr,
    /// Address of the operators' listener.
    pub admin_listen: SocketAddr,
    /// Number of threads that serve clients; 0: one for every two cores.
    pub threads: usize,
    /// Limit of a request body in bytes.
    pub max_body_bytes: usize,
    /// Whether the routing hints of clients are used.
    pub trust_hints: bool,
    /// Whether a client may see why a worker was chosen.
    pub tell_decisions: bool,
    /// Requests per second for each key, or for all clients together when there are no keys; 0: no limit.
    pub requests_per_second: u32,
    /// Bearer tokens of clients; empty: no token is needed.
    pub api_keys: Vec<String>,
    /// Bearer token that operators need to change anything; `None`: no token is needed.
    pub admin_token: Option<String>,
    /// File that contains the operators' token.
    pub admin_token_file: Option<PathBuf>,
    /// Whether operators need the token to read, too; health and readiness never need it.
    pub admin_token_reads: bool,
}

/// `[routing]`: how requests are routed.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Routing {
    /// Refuse a request without a prefill worker instead of prefilling locally.
    pub enforce_disagg: bool,
    /// Tokens in a block of the prefix index.
    pub block_size: u32,
    /// Estimated bytes of a token, for prompts without token ids.
    pub bytes_per_token: u32,
    /// Which leg is routed first.
    pub order: LegOrder,
    /// Number of further attempts of a request, over all legs.
    pub retries: u32,
    /// Prefill locally after remote prefill failed for good; ignored with `enforce_disagg`.
    pub local_fallback: bool,
    /// How long each session stays bound to its workers; 0: only sessions with a session control are bound.
    #[serde(deserialize_with = "duration::deserialize")]
    pub session_affinity: Duration,
    /// HTTP status when every eligible worker is busy.
    pub busy_status: u16,
    /// Salt of the session, LoRA and tenant hashes that policies see.
    pub hash_salt: u64,
    /// Parameters of the native cost.
    pub cost: RouterConfig,
}

/// Which leg of a disaggregated request is routed first (D5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LegOrder {
    /// Prefill. Decode is routed when prefill's worker, or its answer, is known.
    #[default]
    PrefillFirst,
    /// Decode. Its booking lasts while prefill runs.
    DecodeFirst,
}

/// `[index]`: the prefix index.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Index {
    /// Memory limit in bytes.
    pub byte_budget: usize,
    /// How long a decision counts as cached.
    #[serde(deserialize_with = "duration::deserialize")]
    pub ttl: Duration,
}

/// `[queue]`: requests that wait while every eligible worker is busy.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Queue {
    /// Number of requests that may wait; 0: none.
    pub limit: usize,
    /// How long a request may wait.
    #[serde(deserialize_with = "duration::deserialize")]
    pub timeout: Duration,
}

/// `[decisions]`: the record of decisions.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Decisions {
    /// Number of decisions kept; 0: none.
    pub keep: usize,
    /// Memory limit of the recorded inputs in bytes.
    pub bytes: usize,
    /// Facts recorded with each decision, in addition to those the policy reads.
    pub facts: Vec<String>,
}

/// `[timeouts]`: time limits.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// Limit of connecting to a worker.
    #[serde(deserialize_with = "duration::deserialize")]
    pub connect: Duration,
    /// Limit of a whole request, from its first byte.
    #[serde(deserialize_with = "duration::deserialize")]
    pub request: Duration,
    /// How long a client may pause while it uploads a body.
    #[serde(deserialize_with = "duration::deserialize")]
    pub body_idle: Duration,
    /// Time without a token after which a booking is released.
    #[serde(deserialize_with = "duration::deserialize")]
    pub booking: Duration,
    /// How long requests in flight may run after the drain began.
    #[serde(deserialize_with = "duration::deserialize")]
    pub drain: Duration,
}

/// `[probe]`: how workers are probed.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Probe {
    /// Interval of health checks.
    #[serde(deserialize_with = "duration::deserialize")]
    pub interval: Duration,
    /// Limit of one health check.
    #[serde(deserialize_with = "duration::deserialize")]
    pub timeout: Duration,
    /// Interval of reading a worker's own load figures; 0: never.
    #[serde(deserialize_with = "duration::deserialize")]
    pub load_interval: Duration,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            admin_listen: SocketAddr::from(([127, 0, 0, 1], 9090)),
            threads: 0,
            max_body_bytes: 32 * 1024 * 1024,
            trust_hints: true,
            tell_decisions: true,
            requests_per_second: 0,
            api_keys: Vec::new(),
            admin_token: None,
            admin_token_file: None,
            admin_token_reads: false,
        }
    }
}

impl Default for Routing {
    fn default() -> Self {
        Self {
            enforce_disagg: false,
            block_size: 16,
            bytes_per_token: 4,
            order: LegOrder::PrefillFirst,
            retries: 2,
            local_fallback: false,
            session_affinity: Duration::ZERO,
            busy_status: 529,
            hash_salt: 0,
            cost: RouterConfig::default(),
        }
    }
}

impl Default for Index {
    fn default() -> Self {
        Self { byte_budget: 256 * 1024 * 1024, ttl: Duration::from_secs(120) }
    }
}

impl Default for Queue {
    fn default() -> Self {
        Self { limit: 0, timeout: Duration::from_secs(30) }
    }
}

impl Default for Decisions {
    fn default() -> Self {
        Self { keep: 10_000, bytes: 32 * 1024 * 1024, facts: Vec::new() }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            request: Duration::from_secs(600),
            body_idle: Duration::from_secs(30),
            booking: Duration::from_secs(300),
            drain: Duration::from_secs(30),
        }
    }
}

impl Default for Probe {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(2),
            timeout: Duration::from_secs(1),
            load_interval: Duration::from_secs(5),
        }
    }
}
