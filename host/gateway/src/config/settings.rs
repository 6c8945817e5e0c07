//! The configuration after validation, split by type into what a reload applies and what only a restart can
//! change.
//!
//! A new key has to be put into [`Static`] or into a section of [`Reloadable`]: `resolve` takes each section
//! of the file apart without `..`, so a key that is in neither does not compile.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::PathBuf,
    time::Duration,
};

use http::{HeaderName, HeaderValue};
use pointsman_routing::{BusyByLeg, Digest, OnFailure, RouterConfig, SlotKind};
use pointsman_workers::WorkerSpec;

use super::{
    Discovery, ExtProc, HashSalt, Http2, LegOrder, Queue, Replicas, Secret, SlotEntry, TenantEntry, Tls,
    UpstreamTls, tenants,
};

mod model;

pub(crate) use auth::{
    AuthSettings, CertificateSettings, JwtSettings, KeySettings, KeySource, OperatorSettings,
};
pub use decisions::{DecisionLogSettings, DecisionSettings};
pub use model::ModelSettings;
pub use probe::ProbeSettings;
pub use timeouts::TimeoutSettings;
pub use traces::TraceSettings;

/// A validated configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Values that only a restart changes.
    pub fixed: Static,
    /// Values that a reload changes.
    pub reloadable: Reloadable,
}

/// Defines a struct of settings whose fields have dotted paths, and the comparison of two of them by path.
/// Fields and comparison come from one list, so no field can be left out of the comparison.
macro_rules! settings {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $path:literal $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }

        impl $name {
            /// Appends the dotted path of each key whose value differs in `new`.
            pub(super) fn changed_keys(&self, new: &Self, paths: &mut Vec<String>) {
                $(if self.$field != new.$field { paths.push($path.to_owned()); })*
            }
        }
    };
}

mod auth;
mod decisions;
mod probe;
mod timeouts;
mod traces;

/// Values that only a restart changes.
#[derive(Clone, Debug, PartialEq)]
pub struct Static {
    /// `[server]`: the listeners.
    pub listeners: Listeners,
    /// Tokens in a block of the prefix index.
    pub block_size: u32,
    /// `[policies]`: the policy engine and the directory.
    pub policies: PolicyRuntime,
    /// `[index]`.
    pub index: IndexSettings,
    /// `[discovery]`.
    pub discovery: Discovery,
    /// `[ext_proc]`.
    pub ext_proc: ExtProc,
    /// `[replicas]`.
    pub replicas: Replicas,
    /// Slots that single models have; their content is reloadable.
    pub model_slots: BTreeMap<String, BTreeSet<SlotKind>>,
}

settings! {
    /// Where the gateway listens.
    Listeners {
        /// Address of the clients' listener.
        "server.listen" listen: SocketAddr,
        /// Address of the operators' listener.
        "server.admin_listen" admin_listen: SocketAddr,
        /// Number of threads that serve clients; 0: one for every two cores.
        "server.threads" threads: usize,
        /// Number of threads that encode long prompts; 0: one for every two cores, at least two.
        "server.tokenizer_threads" tokenizer_threads: usize,
        /// Origins of pages that may call the clients' listener.
        "server.cors_origins" cors_origins: Vec<HeaderValue>,
        /// Whether the operators' listener may be on a network without a token.
        "server.admin_insecure" admin_insecure: bool,
    }
}

settings! {
    /// The policy engine, and the directory of policies.
    PolicyRuntime {
        /// Directory of policies that is watched.
        "policies.dir" dir: Option<PathBuf>,
        /// CPU time limit of a policy call.
        "policies.deadline" deadline: Duration,
        /// CPU time limit of instantiation, `describe` and `configure` together.
        "policies.configure_deadline" configure_deadline: Duration,
        /// CPU time limit of one batch of outcomes.
        "policies.observe_deadline" observe_deadline: Duration,
        /// Memory limit of a policy instance in bytes.
        "policies.memory_bytes" memory_bytes: usize,
        /// Number of calls during which a new generation is on probation.
        "policies.probation_calls" probation_calls: u64,
        /// Share of failed calls above which a generation on probation is rolled back.
        "policies.probation_failure_share" probation_failure_share: f64,
        /// Quiet time after a change of the directory before it is read.
        "policies.debounce" debounce: Duration,
        /// Interval of unconditional scans of the directory.
        "policies.rescan" rescan: Duration,
        /// Directory in which compiled policies are cached.
        "policies.compile_cache" compile_cache: Option<PathBuf>,
        /// Address space limit of the process that compiles a file, in bytes.
        "policies.compile_memory_bytes" compile_memory_bytes: u64,
        /// CPU time limit of that process.
        "policies.compile_cpu" compile_cpu: Duration,
        /// Time limit of that process.
        "policies.compile_timeout" compile_timeout: Duration,
    }
}

settings! {
    /// The prefix index.
    IndexSettings {
        /// Memory limit in bytes.
        "index.byte_budget" byte_budget: usize,
        /// How long a decision counts as cached.
        "index.ttl" ttl: Duration,
    }
}

/// Values that a reload changes. A request reads one snapshot of them from its first byte to its last.
#[derive(Clone, Debug, PartialEq)]
pub struct Reloadable {
    /// `[server]`.
    pub server: ServerSettings,
    /// `[auth]`.
    pub(crate) auth: AuthSettings,
    /// `[routing]`.
    pub routing: RoutingSettings,
    /// `[policies]`.
    pub policies: PolicySettings,
    /// `[queue]`.
    pub queue: Queue,
    /// `[tenants.NAME]`.
    pub tenants: BTreeMap<String, TenantEntry>,
    /// `[limits]`.
    pub limits: LimitSettings,
    /// `[decisions]`.
    pub decisions: DecisionSettings,
    /// The log of `[decisions]`.
    pub decision_log: DecisionLogSettings,
    /// `[traces]`.
    pub traces: TraceSettings,
    /// `[timeouts]`.
    pub timeouts: TimeoutSettings,
    /// `[upstream]`.
    pub upstream: UpstreamSettings,
    /// `[probe]`.
    pub probe: ProbeSettings,
    /// `[models.NAME]`.
    pub models: BTreeMap<String, ModelSettings>,
    /// `[[workers]]`.
    pub workers: Vec<WorkerSpec>,
}

settings! {
    /// Rights of clients and operators.
    ServerSettings {
        /// Limit of a request body in bytes.
        "server.max_body_bytes" max_body_bytes: usize,
        /// Whether the routing hints of clients are used.
        "server.trust_hints" trust_hints: bool,
        /// Whether a client may see why a worker was chosen.
        "server.tell_decisions" tell_decisions: bool,
        /// Requests per second for each key; 0: no limit.
        "server.requests_per_second" requests_per_second: u32,
        /// Bearer tokens of clients; empty: no token is needed.
        "server.api_keys" api_keys: Vec<Secret>,
        /// Bearer tokens of tenants, by the tenant's name.
        "server.tenants" tenants: BTreeMap<String, Vec<Secret>>,
        /// Header in which a trusted proxy names the tenant; `None` if no header.
        "server.tenant_header" tenant_header: Option<HeaderName>,
        /// Bearer token of operators; `None` if no token is needed.
        "server.admin_token" admin_token: Option<Secret>,
        /// Whether operators need the token to read.
        "server.admin_token_reads" admin_token_reads: bool,
        /// Names under which operators reach their listener.
        "server.admin_names" admin_names: Vec<String>,
        /// TLS of the clients' listener; `None`: plain HTTP.
        "server.tls" tls: Option<Tls>,
        /// HTTP/2 for clients.
        "server.http2" http2: Http2,
        /// TLS of the operators' listener; `None`: plain HTTP.
        "server.admin_tls" admin_tls: Option<Tls>,
    }
}

settings! {
    /// How requests are routed.
    RoutingSettings {
        /// Refuse a request without a prefill worker instead of prefilling locally.
        "routing.enforce_disagg" enforce_disagg: bool,
        /// Estimated bytes of a token, for prompts without token ids.
        "routing.bytes_per_token" bytes_per_token: u32,
        /// Which leg is routed first.
        "routing.order" order: LegOrder,
        /// Number of further attempts of a request, over all legs.
        "routing.retries" retries: u32,
        /// Prefill locally after remote prefill failed for good.
        "routing.local_fallback" local_fallback: bool,
        /// How long each session stays bound to its workers; 0: only sessions with a session control are
        /// bound.
        "routing.session_affinity" session_affinity: Duration,
        /// HTTP status when every eligible worker is busy.
        "routing.busy_status" busy_status: u16,
        /// How long a request body that broke two workers is refused; 0: never.
        "routing.quarantine" quarantine: Duration,
        /// Salt of the session, LoRA and tenant hashes.
        "routing.hash_salt" hash_salt: HashSalt,
        /// Thresholds beyond which a worker is busy, by leg.
        "routing.busy" busy: BusyByLeg,
        /// Parameters of the native cost.
        "routing.cost" cost: RouterConfig,
    }
}

settings! {
    /// Contents of slots, and the files that may replace them.
    PolicySettings {
        /// Reaction of the router to a failure of a policy.
        "policies.on_failure" on_failure: OnFailure,
        /// Whether a file needs the signature of a trusted key.
        "policies.require_signed" require_signed: bool,
        /// Trusted minisign public keys, those from files included.
        "policies.trusted_keys" trusted_keys: Vec<String>,
        /// Whether signatures have to name path and version.
        "policies.signatures_bind" signatures_bind: bool,
        /// Smallest versions of signatures, by path without `.wasm`.
        "policies.min_versions" min_versions: BTreeMap<String, u64>,
        /// Digests that files must have, by path without `.wasm`.
        "policies.pins" pins: BTreeMap<String, Digest>,
        /// Content of the slots for all models.
        "policies.slots" slots: BTreeMap<SlotKind, SlotEntry>,
    }
}

settings! {
    /// Limits of one client.
    LimitSettings {
        /// Choices of a prompt: `n` and `best_of`.
        "limits.choices" choices: u32,
        /// Prompts of a request.
        "limits.prompts" prompts: u32,
        /// Sequences of a request: all choices of all prompts.
        "limits.sequences" sequences: u32,
        /// Number of open connections of clients.
        "limits.connections" connections: usize,
        /// Number of open connections of one address; 0: no limit.
        "limits.connections_per_address" connections_per_address: usize,
        /// Number of requests over HTTP/2, in all connections together.
        "limits.http2_requests" http2_requests: usize,
        /// Number of open WebSocket connections of clients.
        "limits.realtime_connections" realtime_connections: usize,
        /// Size of the bodies of all requests in flight in bytes.
        "limits.body_bytes_in_flight" body_bytes_in_flight: usize,
        /// Smallest rate of an upload in bytes per second; 0: any rate.
        "limits.min_body_rate" min_body_rate: u32,
    }
}

settings! {
    /// Calls to workers.
    UpstreamSettings {
        /// How long an idle connection is kept.
        "upstream.idle_timeout" idle_timeout: Duration,
        /// Number of idle connections that each data thread keeps for a worker.
        "upstream.idle_connections" idle_connections: usize,
        /// Whether engines get the client's `authorization` header.
        "upstream.forward_authorization" forward_authorization: bool,
        /// TLS to workers.
        "upstream.tls" tls: UpstreamTls,
    }
}

impl Static {
    /// Returns the dotted paths of the keys that need a restart to change from `self` to `new`.
    #[must_use]
    pub fn changed(&self, new: &Self) -> Vec<String> {
        let Self { listeners, block_size, policies, index, discovery, ext_proc, replicas, model_slots } =
            self;
        let mut paths = Vec::new();
        listeners.changed_keys(&new.listeners, &mut paths);
        if *block_size != new.block_size {
            paths.push("routing.block_size".to_owned());
        }
        policies.changed_keys(&new.policies, &mut paths);
        index.changed_keys(&new.index, &mut paths);
        discovery.changed_keys(&new.discovery, &mut paths);
        ext_proc.changed_keys(&new.ext_proc, &mut paths);
        replicas.changed_keys(&new.replicas, &mut paths);
        paths.extend(model::changed_slots(model_slots, &new.model_slots));
        paths
    }
}

impl Reloadable {
    /// Returns the dotted paths of the keys whose value differs in `new`.
    #[must_use]
    pub fn changed(&self, new: &Self) -> Vec<String> {
        let Self {
            server,
            auth,
            routing,
            policies,
            queue,
            tenants,
            limits,
            decisions,
            decision_log,
            traces,
            timeouts,
            upstream,
            probe,
            models,
            workers,
        } = self;
        let mut paths = Vec::new();
        server.changed_keys(&new.server, &mut paths);
        auth.changed_keys(&new.auth, &mut paths);
        routing.changed_keys(&new.routing, &mut paths);
        policies.changed_keys(&new.policies, &mut paths);
        queue.changed_keys(&new.queue, &mut paths);
        tenants::changed_keys(tenants, &new.tenants, &mut paths);
        limits.changed_keys(&new.limits, &mut paths);
        decisions.changed_keys(&new.decisions, &mut paths);
        decision_log.changed_keys(&new.decision_log, &mut paths);
        traces.changed_keys(&new.traces, &mut paths);
        timeouts.changed_keys(&new.timeouts, &mut paths);
        upstream.changed_keys(&new.upstream, &mut paths);
        probe.changed_keys(&new.probe, &mut paths);
        for name in models.keys().chain(new.models.keys()).collect::<BTreeSet<_>>() {
            let missing = ModelSettings::unset();
            let of = |models: &BTreeMap<String, ModelSettings>| models.get(name).unwrap_or(&missing).clone();
            of(models).changed_keys(&of(&new.models), name, &mut paths);
        }
        if *workers != new.workers {
            paths.push("workers".to_owned());
        }
        paths
    }
}
