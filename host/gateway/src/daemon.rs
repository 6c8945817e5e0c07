//! The assembly: from a configuration to a running gateway. Owns everything that lives as long as the daemon.

use std::{collections::HashSet, net::SocketAddr, num::NonZeroU32, sync::Arc, time::Duration};

use anyhow::Context as _;
use parking_lot::Mutex;
use pointsman_routing::{Learning, Router};
use pointsman_workers::{
    IndexConfig, PrefixIndex, Registry, WorkerId,
    probe::{ProbeConfig, Prober},
};
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    admin,
    config::{
        Config,
        reload::{ConfigReloader, ConfigSource},
    },
    http,
    limit::Limiter,
    openai::hints::HintTrust,
    orchestrate::legs::RetryPolicy,
    state::admission_queue::AdmissionQueue,
    state::sessions::Sessions,
    state::{Settings, State},
    telemetry::metrics::Metrics,
    tokenization::Tokens,
    tokenization::routing_request::Measure,
    upstream::Upstream,
};

pub(crate) mod slots;

/// A gateway that serves.
#[derive(Debug)]
pub struct Daemon {
    /// Its parts.
    pub state: Arc<State>,
    /// Where clients connect.
    pub address: SocketAddr,
    /// Where operators connect.
    pub admin: SocketAddr,
    stop: CancellationToken,
    drain: Duration,
    servers: TaskTracker,
}

impl Daemon {
    /// Builds the parts, binds the listeners and begins to serve.
    ///
    /// # Errors
    /// A listener cannot be bound, a built-in policy refuses its settings, or the policy folder is not there.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        Self::start_from(config, None).await
    }

    /// As [`Daemon::start`], and reads the configuration again from `source` when it changes.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub async fn start_from(config: &Config, source: Option<ConfigSource>) -> anyhow::Result<Self> {
        let listener = bind(config.server.listen).await?.into_std()?;
        let admin_listener = bind(config.server.admin_listen).await?;
        let stop = CancellationToken::new();
        let state = Arc::new(build(config, source)?);
        let probe = ProbeConfig {
            interval: config.probe.interval,
            timeout: config.probe.timeout,
            load_interval: config.probe.load_interval,
        };
        Prober::start(state.registry.clone(), probe, state.tracker.clone(), stop.clone());
        state.tracker.spawn(forget_leavers(state.clone(), stop.clone()));
        state.tracker.spawn(ConfigReloader::watch(state.clone(), stop.clone()));
        start_feeds(&state, &stop, &state.tracker)?;
        let servers = TaskTracker::new();
        let (address, admin) = (listener.local_addr()?, admin_listener.local_addr()?);
        for number in 0..config.server.threads() {
            let (state, listener) = (state.clone(), listener.try_clone()?);
            let (stop, alive) = (stop.clone(), servers.token());
            let thread = std::thread::Builder::new().name(format!("pointsman-data-{number}"));
            thread.spawn(move || {
                let _alive = alive;
                serve_on_this_thread(&state, listener, stop);
            })?;
        }
        servers.spawn(http::serve(admin_listener, admin::routes(state.clone()), stop.clone()));
        servers.close();
        tracing::info!(%address, %admin, enforce_disagg = config.routing.enforce_disagg, "serving");
        Ok(Self { state, address, admin, stop, drain: config.timeouts.drain, servers })
    }

    /// Ends: refuses new requests, lets those under way finish for at most the drain time, then stops.
    pub async fn drain(self) {
        self.state.draining.cancel();
        let deadline = tokio::time::Instant::now() + self.drain;
        while self.state.metrics.inflight.get() > 0 && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.stop.cancel();
        self.state.tracker.close();
        let left =
            deadline.saturating_duration_since(tokio::time::Instant::now()) + Duration::from_millis(500);
        let ended = tokio::time::timeout(left, async {
            self.servers.wait().await;
            self.state.tracker.wait().await;
        });
        if ended.await.is_err() {
            tracing::warn!(requests = self.state.metrics.inflight.get(), "ended with requests under way");
        }
    }
}

/// KV events are taken on a thread of their own: it waits when the index is behind, and nobody waits for it.
fn start_feeds(state: &Arc<State>, stop: &CancellationToken, alive: &TaskTracker) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (feeds, registry, index) =
        (state.feeds.clone(), state.registry.clone(), state.router.index().clone());
    let (stop, alive) = (stop.clone(), alive.token());
    std::thread::Builder::new().name("pointsman-feeds".to_owned()).spawn(move || {
        runtime.block_on(feeds.run(registry, index, stop));
        drop(alive);
    })?;
    Ok(())
}

/// The clients' listener on a runtime of its own: whatever a request does stays on its thread, and no thread wakes another
/// for an event.
fn serve_on_this_thread(state: &Arc<State>, listener: std::net::TcpListener, stop: CancellationToken) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "no runtime for clients");
            return;
        }
    };
    runtime.block_on(async {
        match TcpListener::from_std(listener) {
            Ok(listener) => http::serve(listener, http::routes(state.clone()), stop).await,
            Err(error) => tracing::error!(%error, "cannot listen"),
        }
        // What was detached from its client goes on here, as long as the drain allows.
        state.tracker.wait().await;
    });
}

/// Takes workers that left out of the index (spec H4).
async fn forget_leavers(state: Arc<State>, stop: CancellationToken) {
    let mut changes = state.registry.subscribe();
    let mut known: HashSet<WorkerId> = HashSet::new();
    loop {
        let snapshot = state.registry.snapshot();
        known.retain(|id| {
            let stays = snapshot.get(*id).is_some();
            if !stays {
                state.router.index().remove_worker(*id);
            }
            stays
        });
        known.extend(snapshot.workers().iter().map(|worker| worker.id()));
        drop(snapshot);
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}

async fn bind(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
}

fn build(config: &Config, source: Option<ConfigSource>) -> anyhow::Result<State> {
    let registry = Arc::new(Registry::default());
    for worker in &config.workers {
        registry.upsert(worker.clone());
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let (slots, manager) = slots::build(config, cpus)?;
    let index = prefix_index(config)?;
    let mut exposition = prometheus_client::registry::Registry::default();
    let metrics = Arc::new(Metrics::new(&mut exposition));
    let router = Router::new(slots, Arc::new(index), config.routing.cost, config.policies.on_failure);
    let router = router.recording(config.decisions.ring()?);
    let upstream = Upstream::new(config.timeouts.connect);
    Ok(State {
        settings: settings(config)?,
        tokens: Tokens::load(&config.models, &registry, &upstream)?,
        registry,
        learning: Arc::new(Learning::start(router.slots().clone())?),
        router,
        limiter: NonZeroU32::new(config.server.requests_per_second).map(Limiter::new),
        feeds: Arc::default(),
        queue: AdmissionQueue::new(config.queue.limit),
        sessions: Sessions::default(),
        upstream,
        metrics,
        exposition: Mutex::new(exposition),
        policies: manager,
        config: ConfigReloader::new(config.clone(), source),
        tracker: TaskTracker::new(),
        draining: CancellationToken::new(),
    })
}

fn prefix_index(config: &Config) -> std::io::Result<PrefixIndex> {
    PrefixIndex::new(IndexConfig {
        byte_budget: config.index.byte_budget,
        ttl: config.index.ttl,
        block_size: config.routing.block_size as usize,
    })
}

fn settings(config: &Config) -> anyhow::Result<Settings> {
    let (server, routing) = (&config.server, &config.routing);
    Ok(Settings {
        enforce_disagg: routing.enforce_disagg,
        request_timeout: config.timeouts.request,
        terms: RetryPolicy {
            order: routing.order,
            retries: routing.retries,
            local_fallback: routing.local_fallback && !routing.enforce_disagg,
        },
        session_affinity: Some(routing.session_affinity).filter(|ttl| !ttl.is_zero()),
        booking_ttl: config.timeouts.booking,
        queue_timeout: config.queue.timeout,
        busy_status: routing.busy_status,
        trust: if server.trust_hints { HintTrust::Trusted } else { HintTrust::Ignored },
        tell_decisions: server.tell_decisions,
        max_body_bytes: server.max_body_bytes,
        api_keys: server.api_keys.clone(),
        admin_token: server.operators_token().map_err(anyhow::Error::msg)?,
        admin_token_reads: server.admin_token_reads,
        measure: Measure {
            block_size: routing.block_size,
            bytes_per_token: routing.bytes_per_token,
            salt: routing.hash_salt,
        },
    })
}
