//! Prober: reads each worker's facts once, then checks its health and rarely reads its load figures.
//!
//! One task per worker, which ends when the worker leaves (B4). Load figures are read rarely because scraping
//! may slow down an engine; decisions rely on the gateway's own bookings.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use prefix_index::PrefixIndex;
use tokio::{
    sync::{Semaphore, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    facts::EngineFacts,
    log_limit::LogLimit,
    registry::{Followed, Registry},
    resolver::Resolver,
    tls::EngineTls,
    worker::{Health, Worker},
};

mod ask_health;
mod client;
mod exposition;
mod figures;
mod gauges;
mod health;
mod load;
mod load_figures;
mod loads;
mod models;
mod one_token;
mod pace;
mod parse;
mod process;
mod read_facts;
mod speaks_tls;
mod stuck;

use ask_health::pause_path;
use client::{Clients, ProbeClient, Response};
use figures::Figures;
pub use health::HealthChecks;
use health::{KeptConnection, health_path};
use load::{Reported, Standstill};
use pace::{Failing, changed, spread};
use process::{metrics_path, sleep_path};
use read_facts::Problem;
use stuck::Watch;

/// The check that every engine answers.
const HEALTH: &str = "/health";
/// What to do about an engine whose paths are missing.
const CHECK_URL: &str = "check the url and its base path";
/// Maximum size of a response body in bytes.
const MAX_BODY: usize = 8 * 1024 * 1024;
/// Maximum size of the body of a response with an engine's facts in bytes.
const MAX_FACTS_BODY: usize = 1024 * 1024;
/// Load figures that could not be read in a row, after which the last ones are forgotten.
pub const MAX_LOAD_FAILURES: u32 = 3;
/// Maximum number of requests at a time. Further ones wait for their turn.
const MAX_AT_ONCE: usize = 256;
/// Number of checks after which the facts are read again: an engine may restart between two of them.
const CHECKS_PER_READING: u32 = 10;
/// Longest time between two questions to an engine that has not answered yet, unless many have not.
const MAX_FIRST_INTERVAL: Duration = Duration::from_millis(500);
/// Shortest time between checks that requests ask for.
pub const MIN_REQUESTED_GAP: Duration = Duration::from_millis(500);

/// Intervals and limits of probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeConfig {
    /// Time between health checks.
    pub interval: Duration,
    /// Time limit of a request.
    pub timeout: Duration,
    /// Time limit of the health check of an engine that is slow to answer, or may be.
    pub health_timeout: Duration,
    /// Time between reads of load figures; 0 to never read them.
    pub load_interval: Duration,
    /// Maximum number of requests per second, all workers together. With more workers, `interval` and
    /// `load_interval` grow.
    pub max_per_second: u32,
    /// Silence that makes a worker stuck while requests wait for it; 0: none does.
    pub stuck_after: Duration,
    /// Time between two looks at the activity of the workers.
    pub look_interval: Duration,
}

/// Returns the facts in the body of vLLM's `/metrics`: block size, number of blocks, connector.
#[must_use]
pub fn facts_of_vllm_metrics(metrics: &[u8]) -> EngineFacts {
    parse::vllm_facts(metrics)
}

/// Returns the facts in the body of SGLang's `/server_info`.
///
/// # Errors
/// The body is not the document.
pub fn facts_of_sglang_info(body: &[u8]) -> Result<EngineFacts, String> {
    parse::sglang_facts(body)
}

/// Probes the workers of a registry.
#[derive(Debug)]
pub struct Prober;

/// Result of a check.
enum Checked {
    Healthy,
    /// The engine contradicts the worker's description.
    Misconfigured,
    /// The gateway could not ask.
    Unknown,
    /// No answer came in time.
    TimedOut(String),
}

impl Prober {
    /// Starts probing, with the intervals and limits that `config` holds at the time, until `stop` is
    /// cancelled. Follows the registry as workers join and leave. `index` forgets what it assumes about the
    /// processes that end.
    pub fn start(
        registry: Arc<Registry>,
        index: Arc<PrefixIndex>,
        config: watch::Receiver<ProbeConfig>,
        (tls, resolver): (Arc<EngineTls>, Resolver),
        tracker: TaskTracker,
        stop: CancellationToken,
    ) {
        let tasks = tracker.clone();
        let (publisher, stopped) = (registry.clone(), stop.clone());
        let clients = Clients::new(tls, resolver);
        let watch = Watch::new(registry.clone(), config.clone(), clients.clone(), tracker.clone());
        tracker.spawn(async move {
            tokio::select! {
                () = publisher.publish_late() => {}
                () = watch.run(stopped.clone()) => {}
                () = stopped.cancelled() => {}
            }
        });
        tracker.spawn(async move {
            let turns = Arc::new(Semaphore::new(MAX_AT_ONCE));
            let failing = Failing::default();
            let mut followed = Followed::default();
            let mut changes = registry.subscribe();
            loop {
                let snapshot = registry.snapshot();
                followed.follow(
                    &snapshot,
                    &stop,
                    |_, _| false,
                    |_| {},
                    |worker, token| {
                        let shared = (&clients, &turns, &failing);
                        let probe = Probe::new(shared, worker, (&registry, &index), config.clone());
                        probe.start(&tasks, token.clone());
                    },
                );
                drop(snapshot);
                tokio::select! {
                    changed = changes.changed() => if changed.is_err() { return },
                    () = stop.cancelled() => return,
                }
            }
        });
    }
}

struct Probe {
    client: ProbeClient,
    /// Turns of all probes together.
    turns: Arc<Semaphore>,
    failing: Failing,
    worker: Arc<Worker>,
    registry: Arc<Registry>,
    index: Arc<PrefixIndex>,
    config: watch::Receiver<ProbeConfig>,
    checks: HealthChecks,
    connection: KeptConnection,
    /// Whether the engine speaks TLS, if it was asked in the present row of failures.
    speaks_tls: Option<bool>,
    /// The engine may be another process than at the last check.
    reconnected: bool,
    health_path: &'static str,
    load_path: Option<&'static str>,
    sleep_path: Option<&'static str>,
    pause_path: Option<&'static str>,
    /// Last figures of the engine's metrics.
    figures: Option<Figures>,
    /// Load figures that could not be read, in a row.
    load_failures: u32,
    /// By rank.
    standstill: Vec<Standstill>,
    reported: Reported,
    /// The engine did not answer a request for its facts: repeat it with the next check.
    incomplete: bool,
    /// Number of the engine's models that are left out.
    left_out: usize,
}

impl Probe {
    fn new(
        (clients, turns, failing): (&Clients, &Arc<Semaphore>, &Failing),
        worker: &Arc<Worker>,
        (registry, index): (&Arc<Registry>, &Arc<PrefixIndex>),
        config: watch::Receiver<ProbeConfig>,
    ) -> Self {
        let engine = worker.spec().engine;
        Self {
            client: clients.of(worker.spec()),
            turns: turns.clone(),
            failing: failing.of_another(),
            worker: worker.clone(),
            registry: registry.clone(),
            index: index.clone(),
            config,
            checks: HealthChecks::default(),
            connection: KeptConnection::default(),
            speaks_tls: None,
            reconnected: false,
            health_path: health_path(engine),
            load_path: metrics_path(engine),
            sleep_path: sleep_path(engine),
            pause_path: pause_path(engine),
            figures: None,
            load_failures: 0,
            standstill: Vec::new(),
            reported: Reported::default(),
            incomplete: false,
            left_out: 0,
        }
    }

    fn start(self, tasks: &TaskTracker, stop: CancellationToken) {
        tasks.spawn(async move {
            tokio::select! {
                () = self.run() => {}
                () = stop.cancelled() => {}
            }
        });
    }

    async fn run(mut self) {
        let (mut stale, mut checks) = self.begin().await;
        let (mut load_due, mut checked) = (Instant::now(), Instant::now());
        loop {
            let before = std::mem::replace(&mut checked, Instant::now());
            // An engine that was away may have restarted: with another model, or other engine ids. A sleeping
            // engine may have been woken.
            stale |= self.checks.failing() || self.incomplete || self.worker.is_asleep();
            stale |= self.worker.take_stale_facts();
            // An engine that answered the check before may have gone after it worked.
            let since = if self.checks.failing() { before } else { checked };
            match self.check_in_turn(stale, &mut checks).await {
                Ok(Checked::Unknown) => {}
                Ok(Checked::Misconfigured) => {
                    self.checks.answered();
                    stale = true;
                }
                // The engine may have ended after it answered. The next check begins at once.
                Ok(Checked::Healthy) if self.worker.was_unreachable_since(checked) => {}
                Ok(Checked::Healthy) => {
                    stale = false;
                    self.worker.activity().note_health(checked);
                    if self.checks.passed(&self.worker) {
                        self.worker.set_problem(None);
                        self.log("healthy", "");
                    }
                }
                Ok(Checked::TimedOut(_)) if self.worker.works_since(since) => self.excused(),
                Ok(Checked::TimedOut(problem)) | Err(problem) => self.failed(&problem),
            }
            let config = *self.config.borrow();
            let pace = config.pace(self.registry.snapshot().workers().len());
            let reconnected = std::mem::take(&mut self.reconnected);
            if config.load_interval.is_zero() {
                self.worker.set_engine_load(None);
                self.worker.set_reports_load(false);
            } else if reconnected || Instant::now() >= load_due {
                load_due = Instant::now() + spread(pace.load_interval);
                self.read_load().await;
            }
            let failing = self.failing.set(self.checks.failing());
            let interval = config.next_interval(self.checks.failing().then_some(failing), pace.interval);
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                () = self.worker.check_requested() => {
                    tokio::time::sleep_until(checked + MIN_REQUESTED_GAP.min(config.interval)).await;
                    self.checks.requested(&self.worker);
                }
                () = self.worker.reading_requested() => {
                    tokio::time::sleep_until(checked + MIN_REQUESTED_GAP.min(config.interval)).await;
                    load_due = Instant::now();
                }
                () = changed(&mut self.config) => load_due = Instant::now(),
            }
        }
    }

    /// Checks the health, and reads the facts again if they may be `stale`.
    async fn check(&mut self, stale: bool) -> Result<Checked, String> {
        if stale {
            let engine = self.worker.spec().engine;
            (self.health_path, self.load_path) = (health_path(engine), metrics_path(engine));
            (self.sleep_path, self.pause_path) = (sleep_path(engine), pause_path(engine));
        }
        let mut answer = self.ask_health().await;
        if matches!(answer, Response::Absent) {
            answer = self.ask_without_health().await;
        }
        if !matches!(answer, Response::Ok(_) | Response::Absent | Response::Shortage(_)) {
            self.worker.set_refused(answer.is_refusal(), answer.refuses_key());
        }
        match answer {
            Response::Ok(_) | Response::Absent if stale || self.reconnected => {
                match self.facts(false).await {
                    Ok(()) => Ok(Checked::Healthy),
                    Err(Problem::Contradiction) => Ok(Checked::Misconfigured),
                    Err(Problem::TimedOut(problem)) => Ok(Checked::TimedOut(problem)),
                    Err(Problem::Failed(problem) | Problem::NotListed(problem)) => Err(problem),
                }
            }
            Response::Ok(_) | Response::Absent => Ok(Checked::Healthy),
            Response::Shortage(problem) => {
                log_shortage(&problem);
                Ok(Checked::Unknown)
            }
            Response::Refused(problem) => {
                self.process_gone();
                Err(problem)
            }
            Response::TimedOut(problem) => Ok(Checked::TimedOut(problem)),
            Response::Untrusted(problem) | Response::Status(_, problem) | Response::Failed(problem) => {
                Err(problem)
            }
        }
    }

    fn failed(&mut self, problem: &str) {
        let changed = self.checks.failed(&self.worker);
        if self.worker.health() == Health::Unhealthy {
            // A request that could not connect may have found it first.
            if changed || self.worker.problem().is_none() {
                self.log("unhealthy", problem);
            }
            self.worker.set_problem(Some(problem.to_owned()));
        }
    }

    async fn get(&self, path: &str) -> Response {
        self.get_at(&format!("{}{path}", self.worker.spec().url), MAX_BODY).await
    }

    /// Sends a request whose response may have `max_body` bytes.
    async fn get_at(&self, url: &str, max_body: usize) -> Response {
        let limit = self.config.borrow().timeout;
        self.send(url, max_body, limit).await.0
    }

    /// Sends a request when it is its turn. Also returns how long the answer took, and the local address of
    /// its connection.
    async fn send(
        &self,
        url: &str,
        max_body: usize,
        limit: Duration,
    ) -> (Response, Duration, Option<SocketAddr>) {
        // Never closed.
        let _turn = self.turns.acquire().await;
        let sent = Instant::now();
        let key = self.worker.spec().api_key.as_deref();
        let (answer, connection) = self.client.get(url, key, max_body, limit).await;
        (answer, sent.elapsed(), connection)
    }

    fn log(&self, state: &str, problem: &str) {
        let spec = self.worker.spec();
        let (worker, url, role) = (spec.id, &spec.url, spec.role);
        if self.worker.refuses_key() {
            tracing::warn!(%worker, %url, %role, state, problem, "worker state changed");
        } else {
            tracing::info!(%worker, %url, %role, state, problem, "worker state changed");
        }
    }
}

/// Logs that this host cannot connect, at most once a second for all workers together.
fn log_shortage(problem: &str) {
    static LINES: LogLimit = LogLimit::new(Duration::from_secs(1));
    if let Some(suppressed) = LINES.due() {
        tracing::error!(problem, suppressed, "probe not sent: raise the file descriptor limit (ulimit -n)");
    }
}

#[cfg(test)]
mod tests;
