//! Builds the state from the configuration, binds the listeners, serves, and drains.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use ::http::HeaderValue;
use pointsman_certificates::pem::Expired;
use pointsman_orchestration::AdmissionQueue;
use pointsman_routing::{Learning, Router};
use pointsman_workers::unix_ms;
use pointsman_workers::{
    Registry, Resolver,
    probe::{ProbeConfig, Prober},
};
use prefix_index::{IndexConfig, PrefixIndex};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    admin,
    budget::Budget,
    config::{
        Config, Problem,
        reload::{ConfigReloader, ConfigSource, ReloadError, Reloaded},
        settings::Settings as Configured,
    },
    http::{self, DataThread, audience::Audience, connected::Service},
    replicas::Replicas,
    state::continuations::MAX_TRANSCRIPTS,
    state::{
        Settings, SharedState, State, drain_end::DrainEnd, memory_limit::body_limit,
        open_files::connection_limit,
    },
    tasks::Tasks,
    telemetry::{decision_log::DecisionLog, decision_stats::DecisionStats, metrics::Metrics, traces::Traces},
    tenant_limits::TenantLimits,
    tls::TlsContext,
    tokenization::Tokens,
    upstream::own_via,
};

mod check;
mod discovery;
mod drain;
#[cfg_attr(not(feature = "ext-proc"), path = "daemon/ext_proc/off.rs")]
mod ext_proc;
mod first_checks;
mod listen;
mod reload;
pub(crate) mod service_manager;
mod slots;
mod sockets;

pub(crate) use check::check;
use first_checks::FirstChecks;
use service_manager::Heartbeats;
pub use service_manager::InheritedSockets;
use sockets::Sockets;

/// Searches for stored responses at the same time.
const MAX_RESPONSE_SEARCHES: usize = 16;

/// A running gateway.
#[derive(Debug)]
pub struct Daemon {
    state: SharedState,
    /// Address of the clients' listener.
    pub address: SocketAddr,
    /// Address of the operators' listener.
    pub admin: SocketAddr,
    /// Address of the endpoint picker's listener, if there is one.
    pub ext_proc: Option<SocketAddr>,
    stop: CancellationToken,
    /// Cancelled when the data threads must drop what they still do.
    abandon: CancellationToken,
    servers: TaskTracker,
}

impl Daemon {
    /// Builds the state, binds the listeners and starts to serve.
    ///
    /// # Errors
    /// A listener cannot be bound, a built-in policy refuses its settings, or the policy directory does not
    /// exist.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        Self::start_from(config, None, InheritedSockets::default()).await
    }

    /// Like [`Daemon::start`], but reads the configuration again from `source` when it changes. Sockets of
    /// the service manager take the place of the configured addresses.
    ///
    /// # Errors
    /// Same as [`Daemon::start`].
    pub async fn start_from(
        config: &Config,
        source: Option<ConfigSource>,
        sockets: InheritedSockets,
    ) -> anyhow::Result<Self> {
        let (source, settings) = (source.map(|source| source.with_keys_of(config)), config.resolve()?);
        check::log_advice(&settings);
        let server = settings.server.clone();
        let refused = |problems: Vec<Problem>| config.errors(config.in_file(problems));
        let Sockets { clients, admin, picker } = Sockets::bind(&settings, sockets).map_err(refused)?;
        let (probe, probe_config) = watch::channel(reload::probe_config(&settings));
        let (discovery, replicas) = (settings.discovery.clone(), settings.replicas.clone());
        let (block_size, first_checks) = (settings.routing.block_size, FirstChecks::of(&settings));
        let shared = SharedState::new(build(config, settings, source, probe)?);
        let admin_listener = admin.listen("server.admin_listen").map_err(|problem| refused(vec![problem]))?;
        let admin_listener = TcpListener::from_std(admin_listener)?;
        let state = shared.get();
        let (stop, abandon) = (state.tasks.stop().clone(), CancellationToken::new());
        discovery::start_sources(&state, &discovery, &stop);
        let (registry, index) = (state.registry.clone(), state.router.index().clone());
        let tls_and_names = (state.tls.engines().clone(), state.resolver.clone());
        Prober::start(registry, index, probe_config, tls_and_names, state.tracker.clone(), stop.clone());
        state.tracker.spawn(remove_departed_workers(state.clone(), stop.clone()));
        state.tracker.spawn(watch_file(shared.clone(), stop.clone()));
        state.tracker.spawn(sample_load(shared.clone(), stop.clone()));
        state.tracker.spawn(state.tls.clone().watch(state.metrics.clone(), stop.clone()));
        start_feeds(&state, &stop, &state.tracker)?;
        let (tables, token) = ((state.registry.clone(), state.router.index().clone()), stop.clone());
        let (address, settings) = (clients.address()?, (&replicas, block_size));
        state.replicas.start(settings, address, tables, &state.policies, token, &state.tracker)?;
        let servers = TaskTracker::new();
        let admin = admin_listener.local_addr()?;
        let routes = Service::of_router(admin::routes(shared.clone()));
        let serve = http::listener::serve(
            admin_listener.into(),
            Audience::Operators,
            routes,
            shared.clone(),
            stop.clone(),
        );
        servers.spawn(serve);
        first_checks.wait(&state.registry).await;
        let outlives_process = clients.is_inherited();
        let (listener, ext_proc) = sockets::listen(clients, picker).map_err(refused)?;
        state.serving.store(true, Ordering::Release);
        let beats = Heartbeats::new(server.client_threads());
        state.tracker.spawn(beats.clone().report(stop.clone()));
        for number in 0..server.client_threads() {
            let beat = beats.clone().report_alive(number);
            let (shared, origins) = (shared.clone(), server.origins());
            let clients = (listener.try_clone()?, outlives_process);
            let ext_proc = ext_proc.as_ref().map(ext_proc::PickerListener::try_clone).transpose()?;
            let (ends, alive) = ((stop.clone(), abandon.clone()), servers.token());
            let thread = std::thread::Builder::new().name(format!("pointsman-data-{number}"));
            thread.spawn(move || {
                let _alive = alive;
                serve_on_this_thread(&shared, (clients, ext_proc), &origins, beat, ends);
            })?;
        }
        servers.close();
        let ext_proc = ext_proc.as_ref().map(ext_proc::PickerListener::address).transpose()?;
        tracing::info!(%address, %admin, ?ext_proc, enforce_disagg = state.settings.split.enforce_disagg, "serving");
        Ok(Self { state: shared, address, admin, ext_proc, stop, abandon, servers })
    }

    /// Returns the state in force now.
    #[must_use]
    pub fn state(&self) -> Arc<State> {
        self.state.get()
    }

    /// Reads the configuration again and applies what a reload can change.
    ///
    /// # Errors
    /// [`ReloadError`]; then nothing changed.
    pub async fn reload(&self) -> Result<Reloaded, ReloadError> {
        self.state().config.reload(&self.state).await
    }
}

/// A daemon that is dropped without [`Daemon::drain`] stops at once, with all of its threads.
impl Drop for Daemon {
    fn drop(&mut self) {
        let state = self.state();
        state.stopping.cancel();
        state.draining.cancel();
        self.stop.cancel();
        state.tracker.close();
    }
}

/// Starts the thread that reads KV events. It blocks while the index is behind, which must delay no request.
fn start_feeds(state: &Arc<State>, stop: &CancellationToken, alive: &TaskTracker) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (feeds, registry, index) =
        (state.feeds.clone(), state.registry.clone(), state.router.index().clone());
    let (resolver, stop, alive) = (state.resolver.clone(), stop.clone(), alive.token());
    std::thread::Builder::new().name("pointsman-feeds".to_owned()).spawn(move || {
        runtime.block_on(feeds.run(registry, index, resolver, stop));
        drop(alive);
    })?;
    Ok(())
}

/// Serves clients on a runtime of this thread. A request stays on its thread, with its connections to
/// engines, so that an event wakes no other thread.
fn serve_on_this_thread(
    shared: &SharedState,
    (clients, ext_proc): ((std::net::TcpListener, bool), Option<ext_proc::PickerListener>),
    cors_origins: &[HeaderValue],
    beat: impl Future<Output = ()>,
    (stop, abandon): (CancellationToken, CancellationToken),
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "data thread not started: its runtime cannot be built");
            return;
        }
    };
    let served = async {
        let (listener, outlives_process) = clients;
        match TcpListener::from_std(listener) {
            Ok(listener) => {
                let socket = http::listener::Socket { listener, outlives_process };
                let (thread, shared) = (DataThread::new(shared.clone(), cors_origins), shared.clone());
                // Each connection looks at the token with each event: threads do not share it.
                let stop = stop.child_token();
                let sweeper = thread.clone().close_idle_connections();
                let service = http::service(thread.clone());
                let own = service.router().clone();
                let picking = ext_proc::serve(ext_proc, thread, own, shared.clone(), stop.clone());
                let serving = http::listener::serve(socket, Audience::Clients, service, shared, stop);
                tokio::select! {
                    _ = async { tokio::join!(serving, picking) } => {}
                    () = sweeper => {}
                    () = beat => {}
                }
            }
            Err(error) => {
                tracing::error!(%error, "data thread not started: its listener cannot be registered")
            }
        }
        // Work for clients that left finishes here, where its sockets are registered.
        shared.get().tracker.wait().await;
    };
    if runtime.block_on(abandon.run_until_cancelled(served)).is_none() {
        runtime.shutdown_background();
    }
}

/// Removes workers that left from the prefix index (H4), also if another worker has their id now.
async fn remove_departed_workers(state: Arc<State>, stop: CancellationToken) {
    let mut changes = state.registry.subscribe();
    let mut known = state.registry.snapshot();
    loop {
        let snapshot = state.registry.snapshot();
        for worker in known.workers() {
            if !snapshot.get(worker.id()).is_some_and(|now| now.continues(worker)) {
                state.router.index().remove_worker(worker.id());
            }
        }
        known = snapshot;
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}

/// Samples the load once a minute, for the last hour of the operators' page, and forgets agent programs that
/// ended.
async fn sample_load(shared: SharedState, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(60)) => {}
            () = stop.cancelled() => return,
        }
        let state = shared.get();
        state.programs.expire();
        state.hour.sample(unix_ms(), &state.metrics, state.queue.waiting(), &state.registry.snapshot());
    }
}

async fn watch_file(shared: SharedState, stop: CancellationToken) {
    let config = shared.get().config.clone();
    config.watch(&shared, stop).await;
}

#[expect(clippy::too_many_lines, reason = "one line for each part of the state")]
fn build(
    config: &Config,
    settings: Configured,
    source: Option<ConfigSource>,
    probe: watch::Sender<ProbeConfig>,
) -> anyhow::Result<State> {
    let replicas = Replicas::new(&settings.replicas);
    let registry = Arc::new(Registry::with_journal(replicas.journal()));
    let resolver = Resolver::default();
    let (fleet, leases) = discovery::fleet(&registry, &resolver, &settings.discovery);
    fleet.set_configured(&settings.workers);
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let refused = |problems: Vec<Problem>| config.errors(config.in_file(problems));
    let opened = slots::open(&settings, config.policies.compiler.clone(), cpus);
    let opened = opened.map_err(|problem| refused(vec![problem]))?;
    let tracker = TaskTracker::new();
    let tasks = Tasks::new(&tracker);
    let tokens =
        Tokens::new(settings.server.encode_threads(), tasks.clone()).load(&settings.models, &registry);
    let tls = TlsContext::new();
    let certificates = tls.load(&settings.server, &settings.upstream, Expired::Accepted);
    let proxies = tls.load_proxies(settings.ext_proc.tls.as_ref(), Expired::Accepted);
    let (opened, tokens, certificates, proxies) = match (opened, tokens, certificates, proxies) {
        (opened, Ok(tokens), Ok(certificates), Ok(proxies)) if opened.problems.is_empty() => {
            (opened, tokens, certificates, proxies)
        }
        (opened, tokens, certificates, proxies) => {
            let certificates = [certificates.err(), proxies.err()].into_iter().flatten().flatten().collect();
            let others = [tokens.err().unwrap_or_default(), certificates];
            return Err(refused([opened.problems, others.concat()].concat()).into());
        }
    };
    let (slots, manager) = opened.start(&settings)?;
    let wrong = slots::refused_settings(&manager, &settings);
    if !wrong.is_empty() {
        return Err(refused(wrong).into());
    }
    let index = PrefixIndex::new(IndexConfig {
        byte_budget: settings.index.byte_budget,
        ttl: settings.index.ttl,
        block_size: settings.routing.block_size as usize,
    })?;
    let metrics = Arc::new(Metrics::default());
    tls.install(certificates, &metrics);
    tls.install_proxies(proxies, &metrics);
    let router = Router::new(slots, Arc::new(index), settings.routing.cost, settings.policies.on_failure);
    let router = router
        .with_busy(reload::busy_rules(&settings))
        .recording(reload::record_of_decisions(&settings.decisions)?);
    Ok(State {
        settings: Settings::new(&settings),
        tokens: Arc::new(tokens),
        registry,
        fleet,
        leases,
        learning: Arc::new(Learning::start(router.slots().clone())?),
        limiter: reload::rate_limiter(&settings),
        tenant_limits: TenantLimits::new(&settings.tenants, settings.routing.hash_salt.expose(), None),
        tenant_metrics: reload::tenant_metrics(&settings, &metrics),
        bad_keys: Arc::default(),
        slow_keys: Arc::default(),
        jwt: reload::token_verifier(None, &settings, &metrics, &tasks)
            .map_err(|error| anyhow::anyhow!(error))?,
        feeds: Arc::default(),
        queue: AdmissionQueue::new(reload::queue_rules(&settings)),
        connections: Budget::new(connection_limit(settings.limits.connections)),
        connections_by_address: Arc::default(),
        http2_requests: Budget::new(settings.limits.http2_requests),
        realtime: Budget::new(settings.limits.realtime_connections),
        body_bytes: Budget::new(body_limit(&settings)),
        transcripts: Budget::new(MAX_TRANSCRIPTS),
        sessions: replicas.sessions(),
        programs: Arc::default(),
        response_searches: Budget::new(MAX_RESPONSE_SEARCHES),
        replicas,
        quarantine: Arc::default(),
        missing_endpoints: Arc::default(),
        tenants: Arc::default(),
        decision_stats: Arc::new(DecisionStats::new(router.slots())),
        hour: Arc::default(),
        decision_log: DecisionLog::start(&settings.decisions.log(), settings.routing.block_size, &metrics)?,
        traces: Traces::start(&settings.traces, settings.server.listen, &metrics)?,
        metrics,
        router: Arc::new(router),
        policies: Arc::new(manager),
        probe: Arc::new(probe),
        resolver,
        via: own_via(),
        tls: Arc::new(tls),
        config: Arc::new(ConfigReloader::new(settings, source)),
        tracker,
        tasks,
        serving: Arc::default(),
        stopping: CancellationToken::new(),
        draining: CancellationToken::new(),
        drain_end: DrainEnd::default(),
    })
}
