//! The assembly: from a configuration to a running gateway. Owns everything that lives as long as the daemon.

use std::{collections::HashSet, net::SocketAddr, num::NonZeroU32, sync::Arc, time::Duration};

use anyhow::Context as _;
use parking_lot::Mutex;
use pointsman_policy_runtime::PolicyManager;
use pointsman_routing::{Learning, Router};
use pointsman_workers::{
    Feeds, IndexConfig, PrefixIndex, Registry, WorkerId,
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
    hints::{HintTrust, Hints},
    legs::Terms,
    limit::Limiter,
    parking::Parking,
    server,
    sessions::Sessions,
    subject::Measure,
    telemetry::metrics::Metrics,
    tokens::Tokens,
    upstream::Upstream,
};

pub(crate) mod slots;

/// Values that requests need again and again.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Refuse instead of prefilling locally.
    pub enforce_disagg: bool,
    /// A request's deadline.
    pub request_timeout: Duration,
    /// What a request is allowed.
    pub terms: Terms,
    /// How long a session stays bound when its request does not say; `None`: only requests with a session control bind.
    pub session_affinity: Option<Duration>,
    /// A booking without life is freed after this.
    pub booking_ttl: Duration,
    /// How long a request may wait for a worker that is not busy.
    pub queue_timeout: Duration,
    /// Status when every worker is busy.
    pub busy_status: u16,
    /// Whether hints are taken.
    pub trust: HintTrust,
    /// Whether clients that ask are told why a worker was chosen.
    pub tell_decisions: bool,
    /// Largest body.
    pub max_body_bytes: usize,
    /// Keys of clients; none: everybody may.
    pub api_keys: Vec<String>,
    /// What operators must give to change anything; none: everybody may.
    pub admin_token: Option<String>,
    /// Whether operators must give it to read, too.
    pub admin_token_reads: bool,
    /// How prompts are measured.
    pub measure: Measure,
}

impl Settings {
    /// How long this request's session is bound where it runs; `None`: not at all.
    #[must_use]
    pub fn affinity(&self, hints: &Hints) -> Option<Duration> {
        hints.session.as_ref()?;
        hints.session_control.map(|control| control.timeout).or(self.session_affinity)
    }
}

/// The gateway's parts.
#[derive(Debug)]
pub struct App {
    /// Values from the configuration.
    pub settings: Settings,
    /// The workers.
    pub registry: Arc<Registry>,
    /// The router.
    pub router: Router,
    /// Takes what became of decisions to the policies that learn from it.
    pub learning: Arc<Learning>,
    /// How often each key may ask.
    pub limiter: Option<Limiter>,
    /// Token ids of prompts.
    pub tokens: Tokens,
    /// What engines tell of their caches.
    pub feeds: Arc<Feeds>,
    /// Where requests wait when everybody is busy.
    pub parking: Arc<Parking>,
    /// Where sessions are bound.
    pub sessions: Sessions,
    /// Calls to workers.
    pub upstream: Upstream,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// All metrics, for `/metrics`.
    pub exposition: Mutex<prometheus_client::registry::Registry>,
    /// The policies' keeper.
    pub policies: PolicyManager,
    /// The configuration's keeper.
    pub config: ConfigReloader,
    /// Tasks that outlive their request.
    pub tracker: TaskTracker,
    /// Set when the daemon was told to end.
    pub draining: CancellationToken,
}

/// A gateway that serves.
#[derive(Debug)]
pub struct Running {
    /// Its parts.
    pub app: Arc<App>,
    /// Where clients connect.
    pub address: SocketAddr,
    /// Where operators connect.
    pub admin: SocketAddr,
    stop: CancellationToken,
    drain: Duration,
    servers: TaskTracker,
}

impl Running {
    /// Builds the parts, binds the listeners and begins to serve.
    ///
    /// # Errors
    /// A listener cannot be bound, a built-in policy refuses its settings, or the policy folder is not there.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        Self::start_from(config, None).await
    }

    /// As [`Running::start`], and reads the configuration again from `source` when it changes.
    ///
    /// # Errors
    /// As [`Running::start`].
    pub async fn start_from(config: &Config, source: Option<ConfigSource>) -> anyhow::Result<Self> {
        let listener = bind(config.server.listen).await?.into_std()?;
        let admin_listener = bind(config.server.admin_listen).await?;
        let stop = CancellationToken::new();
        let app = Arc::new(build(config, source)?);
        let probe = ProbeConfig {
            interval: config.probe.interval,
            timeout: config.probe.timeout,
            load_interval: config.probe.load_interval,
        };
        Prober::start(app.registry.clone(), probe, app.tracker.clone(), stop.clone());
        app.tracker.spawn(forget_leavers(app.clone(), stop.clone()));
        app.tracker.spawn(ConfigReloader::watch(app.clone(), stop.clone()));
        start_feeds(&app, &stop, &app.tracker)?;
        let servers = TaskTracker::new();
        let (address, admin) = (listener.local_addr()?, admin_listener.local_addr()?);
        for number in 0..config.server.threads() {
            let (app, listener) = (app.clone(), listener.try_clone()?);
            let (stop, alive) = (stop.clone(), servers.token());
            let thread = std::thread::Builder::new().name(format!("pointsman-data-{number}"));
            thread.spawn(move || {
                let _alive = alive;
                serve_on_this_thread(&app, listener, stop);
            })?;
        }
        servers.spawn(server::serve(admin_listener, admin::routes(app.clone()), stop.clone()));
        servers.close();
        tracing::info!(%address, %admin, enforce_disagg = config.routing.enforce_disagg, "serving");
        Ok(Self { app, address, admin, stop, drain: config.timeouts.drain, servers })
    }

    /// Ends: refuses new requests, lets those under way finish for at most the drain time, then stops.
    pub async fn drain(self) {
        self.app.draining.cancel();
        let deadline = tokio::time::Instant::now() + self.drain;
        while self.app.metrics.inflight.get() > 0 && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.stop.cancel();
        self.app.tracker.close();
        let left =
            deadline.saturating_duration_since(tokio::time::Instant::now()) + Duration::from_millis(500);
        let ended = tokio::time::timeout(left, async {
            self.servers.wait().await;
            self.app.tracker.wait().await;
        });
        if ended.await.is_err() {
            tracing::warn!(requests = self.app.metrics.inflight.get(), "ended with requests under way");
        }
    }
}

/// KV events are taken on a thread of their own: it waits when the index is behind, and nobody waits for it.
fn start_feeds(app: &Arc<App>, stop: &CancellationToken, alive: &TaskTracker) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (feeds, registry, index) = (app.feeds.clone(), app.registry.clone(), app.router.index().clone());
    let (stop, alive) = (stop.clone(), alive.token());
    std::thread::Builder::new().name("pointsman-feeds".to_owned()).spawn(move || {
        runtime.block_on(feeds.run(registry, index, stop));
        drop(alive);
    })?;
    Ok(())
}

/// The clients' listener on a runtime of its own: whatever a request does stays on its thread, and no thread wakes another
/// for an event.
fn serve_on_this_thread(app: &Arc<App>, listener: std::net::TcpListener, stop: CancellationToken) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "no runtime for clients");
            return;
        }
    };
    runtime.block_on(async {
        match TcpListener::from_std(listener) {
            Ok(listener) => server::serve(listener, server::routes(app.clone()), stop).await,
            Err(error) => tracing::error!(%error, "cannot listen"),
        }
        // What was detached from its client goes on here, as long as the drain allows.
        app.tracker.wait().await;
    });
}

/// Takes workers that left out of the index (spec H4).
async fn forget_leavers(app: Arc<App>, stop: CancellationToken) {
    let mut changes = app.registry.subscribe();
    let mut known: HashSet<WorkerId> = HashSet::new();
    loop {
        let snapshot = app.registry.snapshot();
        known.retain(|id| {
            let stays = snapshot.get(*id).is_some();
            if !stays {
                app.router.index().remove_worker(*id);
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

fn build(config: &Config, source: Option<ConfigSource>) -> anyhow::Result<App> {
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
    Ok(App {
        settings: settings(config)?,
        tokens: Tokens::load(&config.models, &registry, &upstream)?,
        registry,
        learning: Arc::new(Learning::start(router.slots().clone())?),
        router,
        limiter: NonZeroU32::new(config.server.requests_per_second).map(Limiter::new),
        feeds: Arc::default(),
        parking: Parking::new(config.queue.limit),
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
        terms: Terms {
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
