//! Builds the state from the configuration, binds the listeners, serves, and drains.

use std::{collections::HashSet, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context as _;
use pointsman_routing::{Learning, Router};
use pointsman_workers::{
    IndexConfig, PrefixIndex, Registry, WorkerId,
    probe::{ProbeConfig, Prober},
};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    admin,
    config::{
        Config,
        reload::{ConfigReloader, ConfigSource, ReloadError, Reloaded},
        settings::Settings as Configured,
    },
    http::{self, DataThread},
    state::admission_queue::AdmissionQueue,
    state::sessions::Sessions,
    state::{Settings, SharedState, State},
    telemetry::metrics::Metrics,
    tokenization::Tokens,
};

mod reload;
mod slots;

/// A running gateway.
#[derive(Debug)]
pub struct Daemon {
    state: SharedState,
    /// Address of the clients' listener.
    pub address: SocketAddr,
    /// Address of the operators' listener.
    pub admin: SocketAddr,
    stop: CancellationToken,
    servers: TaskTracker,
}

impl Daemon {
    /// Builds the state, binds the listeners and starts to serve.
    ///
    /// # Errors
    /// A listener cannot be bound, a built-in policy refuses its settings, or the policy directory does not
    /// exist.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        Self::start_from(config, None).await
    }

    /// As [`Daemon::start`], and reads the configuration again from `source` when it changes.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub async fn start_from(config: &Config, source: Option<ConfigSource>) -> anyhow::Result<Self> {
        let settings = config.resolve()?;
        let listeners = settings.fixed.listeners.clone();
        let listener = bind(listeners.listen).await?.into_std()?;
        let admin_listener = bind(listeners.admin_listen).await?;
        let stop = CancellationToken::new();
        let (probe, probe_config) = watch::channel(reload::probe_config(&settings.reloadable.probe));
        let shared = SharedState::new(build(settings, source, probe)?);
        let state = shared.get();
        Prober::start(state.registry.clone(), probe_config, state.tracker.clone(), stop.clone());
        state.tracker.spawn(remove_departed_workers(state.clone(), stop.clone()));
        state.tracker.spawn(watch_file(shared.clone(), stop.clone()));
        start_feeds(&state, &stop, &state.tracker)?;
        let servers = TaskTracker::new();
        let (address, admin) = (listener.local_addr()?, admin_listener.local_addr()?);
        for number in 0..listeners.client_threads() {
            let (shared, listener) = (shared.clone(), listener.try_clone()?);
            let (stop, alive) = (stop.clone(), servers.token());
            let thread = std::thread::Builder::new().name(format!("pointsman-data-{number}"));
            thread.spawn(move || {
                let _alive = alive;
                serve_on_this_thread(&shared, listener, stop);
            })?;
        }
        servers.spawn(http::listener::serve(admin_listener, admin::routes(shared.clone()), stop.clone()));
        servers.close();
        tracing::info!(%address, %admin, enforce_disagg = state.settings.enforce_disagg, "serving");
        Ok(Self { state: shared, address, admin, stop, servers })
    }

    /// Returns the state in force now.
    #[must_use]
    pub fn state(&self) -> Arc<State> {
        self.state.get()
    }

    /// Reads the configuration again and applies what a reload can change.
    ///
    /// # Errors
    /// As [`ConfigReloader::reload`].
    pub async fn reload(&self) -> Result<Reloaded, ReloadError> {
        self.state().config.reload(&self.state).await
    }

    /// Refuses new requests, waits for those in flight for at most the drain timeout, then stops.
    pub async fn drain(self) {
        let state = self.state();
        state.draining.cancel();
        let deadline = tokio::time::Instant::now() + state.settings.drain_timeout;
        while state.metrics.inflight.get() > 0 && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.stop.cancel();
        state.tracker.close();
        let left =
            deadline.saturating_duration_since(tokio::time::Instant::now()) + Duration::from_millis(500);
        let ended = tokio::time::timeout(left, async {
            self.servers.wait().await;
            state.tracker.wait().await;
        });
        if ended.await.is_err() {
            tracing::warn!(
                inflight = state.metrics.inflight.get(),
                "drain timeout expired with requests in flight"
            );
        }
    }
}

/// Starts the thread that reads KV events. It blocks while the index is behind, which must delay no request.
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

/// Serves clients on a runtime of this thread. A request stays on its thread, with its connections to
/// engines, so that an event wakes no other thread.
fn serve_on_this_thread(shared: &SharedState, listener: std::net::TcpListener, stop: CancellationToken) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "data thread not started: its runtime cannot be built");
            return;
        }
    };
    runtime.block_on(async {
        match TcpListener::from_std(listener) {
            Ok(listener) => {
                http::listener::serve(listener, http::routes(DataThread::new(shared.clone())), stop).await
            }
            Err(error) => {
                tracing::error!(%error, "data thread not started: its listener cannot be registered")
            }
        }
        // Work for clients that left finishes here, where its sockets are registered.
        shared.get().tracker.wait().await;
    });
}

/// Removes workers that left from the prefix index (H4).
async fn remove_departed_workers(state: Arc<State>, stop: CancellationToken) {
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

async fn watch_file(shared: SharedState, stop: CancellationToken) {
    let config = shared.get().config.clone();
    config.watch(&shared, stop).await;
}

fn build(
    settings: Configured,
    source: Option<ConfigSource>,
    probe: watch::Sender<ProbeConfig>,
) -> anyhow::Result<State> {
    let Configured { fixed, reloadable } = &settings;
    let registry = Arc::new(Registry::default());
    for worker in &reloadable.workers {
        registry.upsert(worker.clone());
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let (slots, manager) = slots::build(&settings, cpus)?;
    let index = PrefixIndex::new(IndexConfig {
        byte_budget: fixed.index.byte_budget,
        ttl: fixed.index.ttl,
        block_size: fixed.block_size as usize,
    })?;
    let metrics = Arc::new(Metrics::default());
    let router = Router::new(slots, Arc::new(index), reloadable.routing.cost, reloadable.policies.on_failure);
    let router = router.recording(reload::record_of_decisions(&reloadable.decisions)?);
    Ok(State {
        settings: Settings::new(fixed.block_size, reloadable),
        tokens: Arc::new(Tokens::load(&reloadable.models, &registry, None)?),
        registry,
        learning: Arc::new(Learning::start(router.slots().clone())?),
        router: Arc::new(router),
        limiter: reload::rate_limiter(&reloadable.server),
        feeds: Arc::default(),
        queue: AdmissionQueue::new(reloadable.queue.limit),
        sessions: Arc::new(Sessions::default()),
        metrics,
        policies: Arc::new(manager),
        probe: Arc::new(probe),
        config: Arc::new(ConfigReloader::new(settings, source)),
        tracker: TaskTracker::new(),
        draining: CancellationToken::new(),
    })
}
