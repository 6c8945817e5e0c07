//! Data and handles that request handlers share, without behaviour. `daemon` builds it; nothing here starts
//! or stops anything.

use std::{
    net::IpAddr,
    sync::{Arc, atomic::AtomicBool},
};

use arc_swap::ArcSwap;
use axum::extract::FromRef;
use pointsman_discovery::{Fleet, Leases};
use pointsman_orchestration::{AdmissionQueue, AgentPrograms, Sessions};
use pointsman_policy_runtime::PolicyManager;
use pointsman_routing::{Learning, Router};
use pointsman_workers::{Feeds, Registry, Resolver, probe::ProbeConfig};
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    budget::Budget, config::reload::ConfigReloader, count_by_key::CountByKey, replicas::Replicas,
    tasks::Tasks, telemetry::decision_log::DecisionLog, telemetry::decision_stats::DecisionStats,
    telemetry::hour::Hour, telemetry::metrics::Metrics, telemetry::tenant_metrics::TenantMetrics,
    telemetry::tenants::Tenants, telemetry::traces::Traces, tenant_limits::TenantLimits, tls::TlsContext,
    tokenization::Tokens, upstream::Via,
};

pub(crate) mod bad_keys;
pub(crate) mod caller;
pub(crate) mod certificates;
pub(crate) mod continuations;
pub(crate) mod drain_end;
pub(crate) mod jwt;
pub(crate) mod keys;
pub(crate) mod memory_limit;
pub(crate) mod missing_endpoints;
pub(crate) mod network;
pub(crate) mod open_files;
pub(crate) mod quarantine;
pub(crate) mod rate_limit;
pub(crate) mod settings;
pub(crate) mod slow_keys;

use bad_keys::BadKeys;
use drain_end::DrainEnd;
use jwt::TokenVerifier;
use missing_endpoints::MissingEndpoints;
use quarantine::Quarantine;
use rate_limit::RateLimiter;
pub(crate) use settings::Settings;
use slow_keys::SlowKeys;

/// State of a request handler: the values of one configuration, and handles to everything that lives as long
/// as the daemon. A request keeps the state it started with, so a reload changes nothing under it.
#[derive(Clone, Debug)]
pub struct State {
    /// Values derived from the configuration.
    pub(crate) settings: Settings,
    /// Workers that serve models.
    pub registry: Arc<Registry>,
    /// Load of other gateways.
    pub(crate) replicas: Replicas,
    /// Workers of all sources.
    pub(crate) fleet: Arc<Fleet>,
    /// Workers that registered themselves.
    pub(crate) leases: Arc<Leases>,
    /// Routing decisions.
    pub router: Arc<Router>,
    /// Reports outcomes of requests to the policies that learn from them.
    pub(crate) learning: Arc<Learning>,
    /// Rate limit of each API key; `None` when there is no limit.
    pub(crate) limiter: Option<Arc<RateLimiter>>,
    /// Limits of tenants; `None` when none is configured.
    pub(crate) tenant_limits: Option<TenantLimits>,
    /// Metrics of the tenants that the configuration names.
    pub(crate) tenant_metrics: Arc<TenantMetrics>,
    /// Addresses that sent wrong keys.
    pub(crate) bad_keys: Arc<BadKeys>,
    /// Verifies tokens of an identity server; `None` when no server is configured.
    pub(crate) jwt: Option<Arc<TokenVerifier>>,
    /// Verifies keys with slow digests.
    pub(crate) slow_keys: Arc<SlowKeys>,
    /// Token ids of prompts.
    pub(crate) tokens: Arc<Tokens>,
    /// Engines' events about their caches.
    pub(crate) feeds: Arc<Feeds>,
    /// Requests that wait because every eligible worker is busy.
    pub queue: Arc<AdmissionQueue>,
    /// Open connections of clients.
    pub connections: Arc<Budget>,
    /// Open connections of clients by address.
    pub(crate) connections_by_address: Arc<CountByKey<IpAddr>>,
    /// Requests over HTTP/2 that are open, in all connections.
    pub http2_requests: Arc<Budget>,
    /// Open WebSocket connections of clients.
    pub(crate) realtime: Arc<Budget>,
    /// Bytes of the bodies of all requests in flight.
    pub body_bytes: Arc<Budget>,
    /// Bytes of the transcripts of all streams.
    pub(crate) transcripts: Arc<Budget>,
    /// Workers that sessions are bound to.
    pub(crate) sessions: Arc<Sessions>,
    /// Agent programs that run here.
    pub(crate) programs: Arc<AgentPrograms>,
    /// Searches for the workers of stored responses that no gateway knows.
    pub(crate) response_searches: Arc<Budget>,
    /// Request bodies that break engines.
    pub(crate) quarantine: Arc<Quarantine>,
    /// Endpoints that engines lack.
    pub(crate) missing_endpoints: Arc<MissingEndpoints>,
    /// Requests in flight by tenant.
    pub(crate) tenants: Arc<Tenants>,
    /// Log of decisions and outcomes; `None` if it is off.
    pub(crate) decision_log: Option<Arc<DecisionLog>>,
    /// Records traces of requests; `None` if it is off.
    pub(crate) traces: Option<Arc<Traces>>,
    /// Decisions and their outcomes of the last hour.
    pub(crate) decision_stats: Arc<DecisionStats>,
    /// Load of the last hour, minute by minute.
    pub(crate) hour: Arc<Hour>,
    /// Counters and histograms.
    pub metrics: Arc<Metrics>,
    /// Policy manager.
    pub policies: Arc<PolicyManager>,
    /// Tells the prober another configuration.
    pub(crate) probe: Arc<watch::Sender<ProbeConfig>>,
    /// TLS of the listeners and towards engines.
    pub(crate) tls: Arc<TlsContext>,
    /// Addresses of the names of workers.
    pub(crate) resolver: Resolver,
    /// Header that names this gateway in requests to workers.
    pub(crate) via: Via,
    /// Reloads the configuration.
    pub(crate) config: Arc<ConfigReloader>,
    /// Tasks that may outlive the request that started them.
    pub tracker: TaskTracker,
    /// Starts tasks that end when the daemon stops.
    pub(crate) tasks: Tasks,
    /// Whether the clients' port is served. It is not while the first checks of workers run.
    pub(crate) serving: Arc<AtomicBool>,
    /// Cancelled when the daemon is to end. It is not ready any more, and serves until it drains.
    pub stopping: CancellationToken,
    /// Cancelled when the daemon begins to drain.
    pub draining: CancellationToken,
    /// Passes shortly before the daemon stops.
    pub drain_end: DrainEnd,
}

/// The state in force. A reload replaces it; handlers take one copy for each request.
#[derive(Clone, Debug)]
pub(crate) struct SharedState(Arc<ArcSwap<State>>);

impl SharedState {
    /// Puts the first state in force.
    #[must_use]
    pub(crate) fn new(state: State) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(state)))
    }

    /// Returns the state in force now.
    #[must_use]
    pub(crate) fn get(&self) -> Arc<State> {
        self.0.load_full()
    }

    /// Puts another state in force for requests that start from now on.
    pub(crate) fn replace(&self, state: State) {
        self.0.store(Arc::new(state));
    }
}

impl FromRef<SharedState> for Arc<State> {
    fn from_ref(shared: &SharedState) -> Self {
        shared.get()
    }
}
