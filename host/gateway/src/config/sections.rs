//! The sections of the file, apart from models, policies and workers: keys, types and defaults.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use pointsman_orchestration::LegOrder;
use pointsman_routing::{BusyByLeg, RouterConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{HashSalt, Http2, Secret, Tls, duration};

/// `[server]`: the listeners, and what clients and operators may do.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    /// Address of the clients' listener.
    pub listen: SocketAddr,
    /// Address of the operators' listener.
    pub admin_listen: SocketAddr,
    /// Number of threads that serve clients; 0: one for every two cores.
    pub threads: usize,
    /// Number of threads that encode long prompts; 0: one for every two cores, at least two.
    pub tokenizer_threads: usize,
    /// Limit of a request body in bytes.
    pub max_body_bytes: usize,
    /// Whether the routing hints of clients are used.
    pub trust_hints: bool,
    /// Whether a client may see why a worker was chosen.
    pub tell_decisions: bool,
    /// Requests per second for each key and each subject of a token, or for all clients together when there
    /// are no keys; 0: no limit.
    pub requests_per_second: u32,
    /// Bearer tokens of clients; empty: no token is needed.
    pub api_keys: Vec<Secret>,
    /// Bearer tokens of tenants, by the tenant's name. They are API keys, too.
    pub tenants: BTreeMap<String, Vec<Secret>>,
    /// Origins of pages that may call the clients' listener from a browser, or `*` for all; empty: none.
    pub cors_origins: Vec<String>,
    /// Header in which a trusted proxy names the tenant of a request whose key has none; empty: no header.
    pub tenant_header: String,
    /// Bearer token that operators need to change anything; `None` if no token is needed.
    pub admin_token: Option<Secret>,
    /// File that contains the operators' token.
    pub admin_token_file: Option<PathBuf>,
    /// Whether operators need the token to read, too; health and readiness never need it.
    pub admin_token_reads: bool,
    /// Whether the operators' listener may be on a network without a token.
    pub admin_insecure: bool,
    /// Names in the `Host` header under which operators reach their listener, besides addresses and
    /// `localhost`.
    pub admin_names: Vec<String>,
    /// TLS of the clients' listener; `None`: plain HTTP.
    pub tls: Option<Tls>,
    /// HTTP/2 for clients, on a listener with TLS.
    pub http2: Http2,
    /// TLS of the operators' listener; `None`: plain HTTP.
    pub admin_tls: Option<Tls>,
}

/// `[routing]`: how requests are routed.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
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
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub session_affinity: Duration,
    /// HTTP status when every eligible worker is busy.
    pub busy_status: u16,
    /// How long a request body that broke two workers is refused; 0: never.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub quarantine: Duration,
    /// Salt of the session, LoRA and tenant hashes that policies see.
    pub hash_salt: HashSalt,
    /// Thresholds beyond which a worker is busy, by leg.
    pub busy: BusyByLeg,
    /// Parameters of the native cost.
    pub cost: RouterConfig,
}

/// `[index]`: the prefix index.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Index {
    /// Memory limit in bytes.
    pub byte_budget: usize,
    /// How long a decision counts as cached.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub ttl: Duration,
}

/// `[limits]`: what one client, and all of them together, may use.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Choices of a prompt: `n` and `best_of`.
    pub choices: u32,
    /// Prompts of a request.
    pub prompts: u32,
    /// Sequences of a request: all choices of all prompts.
    pub sequences: u32,
    /// Number of open connections of clients.
    pub connections: usize,
    /// Number of open connections of one address, of IPv6 of a /64 network; 0: no limit.
    pub connections_per_address: usize,
    /// Number of requests over HTTP/2, in all connections together.
    pub http2_requests: usize,
    /// Number of open WebSocket connections of clients.
    pub realtime_connections: usize,
    /// Size of the bodies of all requests in flight in bytes.
    pub body_bytes_in_flight: usize,
    /// Smallest rate of an upload in bytes per second, after the time of `timeouts.body_idle`; 0: any rate.
    pub min_body_rate: u32,
}

/// `[decisions]`: the record of decisions.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Decisions {
    /// Number of decisions kept; 0: none.
    pub keep: usize,
    /// Memory limit of the recorded inputs in bytes.
    pub bytes: usize,
    /// Facts recorded with each decision, in addition to those the policy reads.
    pub facts: Vec<String>,
    /// Directory of the decision log; `None` if no log.
    pub log_dir: Option<PathBuf>,
    /// Size from which a file of the log is not continued, bytes.
    pub log_file_bytes: u64,
    /// Size of all files of the log together, bytes.
    pub log_total_bytes: u64,
    /// Salt of the log's block ids; `None`: one that is kept in `log_dir`.
    pub log_salt: Option<Secret>,
}

/// `[timeouts]`: time limits.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// Limit of connecting to a worker.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub connect: Duration,
    /// Limit of a whole request, from its first byte.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub request: Duration,
    /// How long a client may pause while it uploads a body.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub body_idle: Duration,
    /// How long the head of a streamed answer, and then its first event, may take.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub head: Duration,
    /// How long the head of a prefill leg's answer may take.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub prefill_head: Duration,
    /// How long the head of an answer that is not streamed may take: it comes when all tokens are there.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub whole_head: Duration,
    /// How long an engine may pause between two events of a stream, or within a whole answer, while its
    /// worker makes no progress.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub event_idle: Duration,
    /// How long it may pause in any case, if that is longer.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub event_idle_max: Duration,
    /// Silence of a stream after which its client gets a comment, so that proxies keep the connection; 0:
    /// never.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub stream_comment: Duration,
    /// How long a call to abort a leg may take.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub abort: Duration,
    /// How long a connection may stay without a whole request head: between requests, or within a head.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub client_idle: Duration,
    /// How long a client may accept no byte of an answer.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub client_write: Duration,
    /// How long both ends of a WebSocket connection may be silent.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub realtime_idle: Duration,
    /// Time without a token after which a booking is released.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub booking: Duration,
    /// How long requests in flight may run after the drain began.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub drain: Duration,
}

/// `[probe]`: how workers are probed.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Probe {
    /// Interval of health checks.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub interval: Duration,
    /// Limit of one request of a probe.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// Limit of the health check of an engine that is slow to answer them, or may be.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub health_timeout: Duration,
    /// Interval of reading a worker's own load figures; 0: never.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub load_interval: Duration,
    /// Most requests of probes to all workers together each second; with more workers, both intervals grow.
    pub max_per_second: u32,
    /// How long requests may wait for a worker that makes no progress until it is put aside; 0: never.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub wedge_after: Duration,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            admin_listen: SocketAddr::from(([127, 0, 0, 1], 9090)),
            threads: 0,
            tokenizer_threads: 0,
            max_body_bytes: 32 * 1024 * 1024,
            trust_hints: true,
            tell_decisions: true,
            requests_per_second: 0,
            api_keys: Vec::new(),
            tenants: BTreeMap::new(),
            cors_origins: Vec::new(),
            tenant_header: String::new(),
            admin_token: None,
            admin_token_file: None,
            admin_token_reads: false,
            admin_insecure: false,
            admin_names: Vec::new(),
            tls: None,
            http2: Http2::default(),
            admin_tls: None,
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
            quarantine: Duration::from_secs(60),
            hash_salt: HashSalt::default(),
            busy: BusyByLeg::new(),
            cost: RouterConfig::default(),
        }
    }
}

impl Default for Index {
    fn default() -> Self {
        Self { byte_budget: 256 * 1024 * 1024, ttl: Duration::from_secs(120) }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            choices: 128,
            prompts: 2_048,
            sequences: 4_096,
            connections: 10_000,
            connections_per_address: 0,
            http2_requests: 10_000,
            realtime_connections: 256,
            body_bytes_in_flight: 512 * 1024 * 1024,
            min_body_rate: 1_024,
        }
    }
}

impl Default for Decisions {
    fn default() -> Self {
        Self {
            keep: 10_000,
            bytes: 32 * 1024 * 1024,
            facts: Vec::new(),
            log_dir: None,
            log_file_bytes: 64 * 1024 * 1024,
            log_total_bytes: 1024 * 1024 * 1024,
            log_salt: None,
        }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            request: Duration::from_secs(600),
            body_idle: Duration::from_secs(30),
            head: Duration::from_secs(60),
            prefill_head: Duration::from_secs(120),
            whole_head: Duration::from_secs(300),
            event_idle: Duration::from_secs(60),
            event_idle_max: Duration::from_secs(360),
            stream_comment: Duration::from_secs(15),
            abort: Duration::from_secs(5),
            client_idle: Duration::from_secs(75),
            client_write: Duration::from_secs(30),
            realtime_idle: Duration::from_secs(300),
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
            health_timeout: Duration::from_secs(5),
            load_interval: Duration::from_secs(5),
            max_per_second: 1_000,
            wedge_after: Duration::from_secs(30),
        }
    }
}
