//! Prober: reads each worker's facts once, then checks its health and rarely reads its load figures.
//!
//! One task per worker, which ends when the worker leaves (B4). Load figures are read rarely because scraping
//! may slow down an engine; decisions rely on the gateway's own bookings.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Semaphore, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    columns::EngineLoad,
    facts::EngineFacts,
    id::Engine,
    log_limit::LogLimit,
    registry::{Followed, Registry},
    tls::EngineTls,
    worker::{Health, Worker},
};

mod client;
mod one_token;
mod pace;
mod parse;
mod read_facts;
mod signs;
mod stuck;

use client::{Clients, ProbeClient, Response};
use pace::{Failing, spread};
use read_facts::Problem;
use stuck::Watch;

/// Limit of a response body in bytes.
const MAX_BODY: usize = 8 * 1024 * 1024;
/// Limit of the body of a response with an engine's facts in bytes.
const MAX_FACTS_BODY: usize = 1024 * 1024;
/// Consecutive failed health checks that make a worker unhealthy.
const MAX_FAILURES: u32 = 2;
/// Load figures that could not be read in a row, after which the last ones are forgotten.
pub const MAX_LOAD_FAILURES: u32 = 3;
/// Most requests at a time. Further ones wait for their turn.
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
    /// Time between reads of load figures; 0 to never read them.
    pub load_interval: Duration,
    /// Most requests to all workers together each second. With more workers, the two times above grow.
    pub max_per_second: u32,
    /// Silence that makes a worker stuck while requests wait for it; 0: none does.
    pub wedge_after: Duration,
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

/// Consecutive failed health checks of a worker, and what follows from them.
#[derive(Debug, Default)]
pub struct HealthChecks {
    failures: u32,
}

impl HealthChecks {
    /// Whether the last check failed.
    #[must_use]
    pub fn failing(&self) -> bool {
        self.failures > 0
    }

    /// The engine answered, but must not be used.
    fn answered(&mut self) {
        self.failures = 0;
    }

    /// The check passed. Returns whether the worker was not healthy before.
    pub fn passed(&mut self, worker: &Worker) -> bool {
        self.failures = 0;
        worker.set_health(Health::Healthy)
    }

    /// The check failed. Returns whether the worker is unhealthy now and was not before.
    pub fn failed(&mut self, worker: &Worker) -> bool {
        self.failures += 1;
        if self.failures == 1 {
            worker.watch_answers();
        }
        if self.failures < MAX_FAILURES {
            return false;
        }
        let changed = worker.set_health(Health::Unhealthy);
        worker.release_waiting();
        changed
    }

    /// A request asked for a check. After a failed connect, one successful check makes the worker healthy and
    /// one failure keeps it unhealthy.
    pub fn requested(&mut self, worker: &Worker) {
        if worker.health() == Health::Unhealthy {
            self.failures = MAX_FAILURES;
        }
    }
}

/// Probes the workers of a registry.
#[derive(Debug)]
pub struct Prober;

/// What a check found out.
enum Checked {
    Healthy,
    /// The engine contradicts the worker's description.
    Misconfigured,
    /// The gateway could not ask.
    Unknown,
}

impl Prober {
    /// Starts probing, with the intervals and limits that `config` holds at the time, until `stop` is
    /// cancelled. Follows the registry as workers join and leave.
    pub fn start(
        registry: Arc<Registry>,
        config: watch::Receiver<ProbeConfig>,
        tls: Arc<EngineTls>,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) {
        let tasks = tracker.clone();
        let (publisher, stopped) = (registry.clone(), stop.clone());
        let clients = Clients::new(tls);
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
                    |_| {},
                    |worker, token| {
                        let shared = (&clients, &turns, &failing);
                        Probe::new(shared, worker, &registry, config.clone()).start(&tasks, token.clone());
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
    config: watch::Receiver<ProbeConfig>,
    load_path: Option<&'static str>,
    /// Load figures that could not be read, in a row.
    load_failures: u32,
    /// The engine did not answer a question about its facts: ask again with the next check.
    incomplete: bool,
}

impl Probe {
    fn new(
        (clients, turns, failing): (&Clients, &Arc<Semaphore>, &Failing),
        worker: &Arc<Worker>,
        registry: &Arc<Registry>,
        config: watch::Receiver<ProbeConfig>,
    ) -> Self {
        Self {
            client: clients.of(worker.spec()),
            turns: turns.clone(),
            failing: failing.of_another(),
            worker: worker.clone(),
            registry: registry.clone(),
            config,
            load_path: load_path(worker.spec().engine),
            load_failures: 0,
            incomplete: false,
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
        self.read_facts().await;
        let (mut health, mut stale, mut checks) = (HealthChecks::default(), false, 0_u32);
        let mut load_due = Instant::now();
        loop {
            let checked = Instant::now();
            // An engine that was away may have restarted: with another model, or other engine ids.
            stale |= health.failing() || self.incomplete || self.worker.take_stale_facts();
            match self.check(stale).await {
                Ok(Checked::Unknown) => {}
                Ok(Checked::Misconfigured) => {
                    health.answered();
                    stale = true;
                }
                Ok(Checked::Healthy) => {
                    checks = if stale { 0 } else { checks + 1 };
                    stale = false;
                    if checks == CHECKS_PER_READING {
                        checks = 0;
                        stale = self.read_again().await;
                    }
                    health.answered();
                    if !stale && health.passed(&self.worker) {
                        self.worker.set_problem(None);
                        self.log("healthy", "");
                    }
                }
                Err(problem) => self.failed(&mut health, &problem),
            }
            let config = *self.config.borrow();
            let pace = config.pace(self.registry.snapshot().workers().len());
            if config.load_interval.is_zero() {
                self.worker.set_engine_load(None);
            } else if Instant::now() >= load_due {
                load_due = Instant::now() + spread(pace.load_interval);
                self.read_load().await;
            }
            // What fails is confirmed, and found again, as soon as in a small fleet, unless much fails.
            let failing = self.failing.set(health.failing());
            let interval = if health.failing() {
                config.interval_of_failing(config.interval, failing)
            } else {
                spread(pace.interval)
            };
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                () = self.worker.check_requested() => {
                    tokio::time::sleep_until(checked + MIN_REQUESTED_GAP.min(config.interval)).await;
                    health.requested(&self.worker);
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
        match self.get("/health").await {
            Response::Ok(_) | Response::Absent if stale => {
                self.load_path = load_path(self.worker.spec().engine);
                match self.facts(false).await {
                    Ok(()) => Ok(Checked::Healthy),
                    Err(Problem::Contradiction) => Ok(Checked::Misconfigured),
                    Err(Problem::Failed(problem)) => Err(problem),
                }
            }
            Response::Ok(_) | Response::Absent => Ok(Checked::Healthy),
            Response::Shortage(problem) => {
                log_shortage(&problem);
                Ok(Checked::Unknown)
            }
            Response::Failed(problem) => Err(problem),
        }
    }

    fn failed(&self, health: &mut HealthChecks, problem: &str) {
        if health.failed(&self.worker) {
            self.worker.set_problem(Some(problem.to_owned()));
            self.log("unhealthy", problem);
        }
    }

    /// Reads the load figures. Those that could not be read several times in a row are forgotten: an old
    /// figure must not keep a worker busy.
    async fn read_load(&mut self) {
        let Some(path) = self.load_path else { return };
        let figures = match self.get(path).await {
            Response::Ok(body) => {
                self.worker.note_signs(signs::of(&body));
                parse::load(&body)
            }
            Response::Absent => {
                self.load_path = None;
                self.worker.note_signs(None);
                return self.worker.set_engine_load(None);
            }
            Response::Failed(_) | Response::Shortage(_) => None,
        };
        if let Some(parse::Figures { running, waiting, kv_usage }) = figures {
            self.load_failures = 0;
            let read_at = Instant::now();
            return self.worker.set_engine_load(Some(EngineLoad { running, waiting, kv_usage, read_at }));
        }
        self.load_failures += 1;
        if self.load_failures >= MAX_LOAD_FAILURES {
            self.worker.set_engine_load(None);
            self.worker.note_signs(None);
        }
    }

    async fn get(&self, path: &str) -> Response {
        self.get_at(&format!("{}{path}", self.worker.spec().url), MAX_BODY).await
    }

    /// Sends a request whose response may have `max_body` bytes.
    async fn get_at(&self, url: &str, max_body: usize) -> Response {
        // Never closed.
        let _turn = self.turns.acquire().await;
        let limit = self.config.borrow().timeout;
        self.client.get(url, self.worker.spec().api_key.as_deref(), max_body, limit).await
    }

    fn log(&self, state: &str, problem: &str) {
        let spec = self.worker.spec();
        let (worker, url, role) = (spec.id, &spec.url, spec.role);
        tracing::info!(%worker, %url, %role, state, problem, "worker state changed");
    }
}

/// Logs that this host cannot connect, at most once a second for all workers together.
fn log_shortage(problem: &str) {
    static LINES: LogLimit = LogLimit::new(Duration::from_secs(1));
    if let Some(suppressed) = LINES.due() {
        tracing::error!(problem, suppressed, "probe not sent: raise the file descriptor limit (ulimit -n)");
    }
}

/// Waits for another configuration; forever once no other can come.
async fn changed(config: &mut watch::Receiver<ProbeConfig>) {
    if config.changed().await.is_err() {
        std::future::pending().await
    }
}

fn load_path(engine: Engine) -> Option<&'static str> {
    match engine {
        Engine::Vllm | Engine::Sglang => Some("/metrics"),
        Engine::Trtllm | Engine::Openai => None,
    }
}

#[cfg(test)]
mod tests;
