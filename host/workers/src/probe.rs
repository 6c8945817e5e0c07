//! Prober: reads each worker's facts once, then checks its health and rarely reads its load figures.
//!
//! One task per worker, which ends when the worker leaves (B4). Load figures are read rarely because scraping
//! may slow down an engine; decisions rely on the gateway's own bookings.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::{sync::watch, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    id::{Engine, ModelName, Role, WorkerId},
    registry::Registry,
    spec::KvTransport,
    worker::{EngineLoad, Health, Worker},
};

mod parse;

/// Limit of a response body in bytes.
const MAX_BODY: usize = 8 * 1024 * 1024;
/// Consecutive failed health checks that make a worker unhealthy.
const MAX_FAILURES: u32 = 2;

/// Intervals and limits of probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeConfig {
    /// Time between health checks.
    pub interval: Duration,
    /// Time limit of a request.
    pub timeout: Duration,
    /// Time between reads of load figures; 0 to never read them.
    pub load_interval: Duration,
}

/// Probes the workers of a registry.
#[derive(Debug)]
pub struct Prober;

type Http = Client<HttpConnector, Empty<Bytes>>;

/// Result of a probe request.
enum Response {
    Ok(Bytes),
    /// Status 404, 405 or 501: the engine does not support the request.
    Absent,
    /// Any other status or an error, with its description. The request may be repeated.
    Failed(String),
}

impl Prober {
    /// Starts probing, with the intervals and limits that `config` holds at the time, until `stop` is cancelled. Follows
    /// the registry as workers join and leave.
    pub fn start(
        registry: Arc<Registry>,
        config: watch::Receiver<ProbeConfig>,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) {
        let tasks = tracker.clone();
        tracker.spawn(async move {
            // A connection takes about 20 KB. The first probes of all workers open many at once; keep two per
            // address.
            let http: Http = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(2).build_http();
            let mut known: HashMap<WorkerId, (Arc<Worker>, CancellationToken)> = HashMap::new();
            let mut changes = registry.subscribe();
            loop {
                let snapshot = registry.snapshot();
                known.retain(|id, (worker, token)| {
                    let stays = snapshot.get(*id).is_some_and(|present| Arc::ptr_eq(present, worker));
                    if !stays {
                        token.cancel();
                    }
                    stays
                });
                for worker in snapshot.workers() {
                    if let Entry::Vacant(vacant) = known.entry(worker.id()) {
                        let token = stop.child_token();
                        Probe::new(&http, worker, &registry, config.clone()).start(&tasks, token.clone());
                        vacant.insert((worker.clone(), token));
                    }
                }
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
    http: Http,
    worker: Arc<Worker>,
    registry: Arc<Registry>,
    config: watch::Receiver<ProbeConfig>,
    load_path: Option<&'static str>,
}

impl Probe {
    fn new(
        http: &Http,
        worker: &Arc<Worker>,
        registry: &Arc<Registry>,
        config: watch::Receiver<ProbeConfig>,
    ) -> Self {
        Self {
            http: http.clone(),
            worker: worker.clone(),
            registry: registry.clone(),
            config,
            load_path: load_path(worker.spec().engine),
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
        let mut failures = 0;
        let mut load_due = Instant::now();
        loop {
            match self.get("/health").await {
                Response::Ok(_) | Response::Absent => {
                    failures = 0;
                    if self.worker.set_health(Health::Healthy) {
                        self.log("healthy", "");
                    }
                }
                Response::Failed(problem) => {
                    failures += 1;
                    if failures >= MAX_FAILURES && self.worker.set_health(Health::Unhealthy) {
                        self.log("unhealthy", &problem);
                    }
                }
            }
            let config = *self.config.borrow();
            if !config.load_interval.is_zero() && Instant::now() >= load_due {
                load_due = Instant::now() + config.load_interval;
                self.read_load().await;
            }
            // After a failed connect of a request, one successful check makes the worker healthy and one
            // failure keeps it unhealthy.
            tokio::select! {
                () = tokio::time::sleep(config.interval) => {}
                () = self.worker.check_requested() => failures = MAX_FAILURES,
                () = changed(&mut self.config) => load_due = Instant::now(),
            }
        }
    }

    /// Reads the facts, and repeats until it succeeds (B5).
    async fn read_facts(&self) {
        let mut last = String::new();
        loop {
            let problem = match self.facts().await {
                Ok(()) => return,
                Err(problem) => problem,
            };
            if problem != last {
                self.log("not_ready", &problem);
                last = problem;
            }
            let pause = self.config.borrow().interval.min(Duration::from_millis(500));
            tokio::time::sleep(pause).await;
        }
    }

    async fn facts(&self) -> Result<(), String> {
        let spec = self.worker.spec();
        match self.get("/v1/models").await {
            Response::Ok(body) => {
                let list = parse::models(&body)?;
                if let Some(other) =
                    list.owner.as_deref().and_then(engine_of).filter(|owner| *owner != spec.engine)
                    && spec.engine != Engine::Openai
                {
                    return Err(format!(
                        "engine is configured as `{}`, but /v1/models reports `{other}`",
                        spec.engine
                    ));
                }
                let names = list.names.iter().map(|name| ModelName::new(name)).collect();
                self.registry.learn_models(spec.id, names);
            }
            Response::Absent if !spec.models.is_empty() => {}
            Response::Absent => {
                return Err(
                    "the engine does not support /v1/models: configure the worker's models".to_owned()
                );
            }
            Response::Failed(problem) => return Err(problem),
        }
        if spec.engine == Engine::Vllm
            && let Response::Ok(body) = self.get("/metrics").await
            && let Some(blocks) = parse::vllm_blocks(&body)
        {
            self.worker.learn_total_blocks(blocks);
        }
        if spec.engine == Engine::Vllm
            && spec.transport == KvTransport::Mooncake
            && spec.role == Role::Prefill
        {
            self.engine_ids().await?;
        }
        Ok(())
    }

    /// Reads the engine ids from Mooncake's bootstrap server. The decode leg needs them to name the prefill
    /// engine.
    async fn engine_ids(&self) -> Result<(), String> {
        let address = self.worker.spec().bootstrap_address();
        match self.get_at(&format!("{address}/query")).await {
            Response::Ok(body) => {
                self.worker.set_engine_ids(parse::engine_ids(&body)?);
                Ok(())
            }
            Response::Absent => {
                Err(format!("GET {address}/query: not supported; check bootstrap_host and bootstrap_port"))
            }
            Response::Failed(problem) => Err(problem),
        }
    }

    async fn read_load(&mut self) {
        let Some(path) = self.load_path else { return };
        match self.get(path).await {
            Response::Ok(body) => {
                if let Some(figures) = parse::load(&body) {
                    self.worker.set_engine_load(EngineLoad {
                        running: figures.running,
                        waiting: figures.waiting,
                        kv_usage: figures.kv_usage,
                        read_at: Instant::now(),
                    });
                }
            }
            Response::Absent => self.load_path = None,
            Response::Failed(_) => {}
        }
    }

    async fn get(&self, path: &str) -> Response {
        self.get_at(&format!("{}{path}", self.worker.spec().url)).await
    }

    async fn get_at(&self, url: &str) -> Response {
        let limit = self.config.borrow().timeout;
        match tokio::time::timeout(limit, self.call(url)).await {
            Ok(Ok((status, body))) if status.is_success() => Response::Ok(body),
            Ok(Ok((
                StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED,
                _,
            ))) => Response::Absent,
            Ok(Ok((status, _))) => Response::Failed(format!("GET {url}: status {status}")),
            Ok(Err(problem)) => Response::Failed(problem),
            Err(_) => Response::Failed(format!("GET {url}: timed out after {limit:?}")),
        }
    }

    async fn call(&self, url: &str) -> Result<(StatusCode, Bytes), String> {
        let spec = self.worker.spec();
        let mut request = Request::builder().method(Method::GET).uri(url);
        if let Some(key) = &spec.api_key {
            request = request.header(http::header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(Empty::new()).map_err(|error| error.to_string())?;
        let response = self.http.request(request).await.map_err(|error| format!("GET {url}: {error}"))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_BODY).collect().await;
        body.map(|body| (status, body.to_bytes())).map_err(|error| format!("GET {url}: {error}"))
    }

    fn log(&self, state: &str, problem: &str) {
        let spec = self.worker.spec();
        let (worker, url, role) = (spec.id, &spec.url, spec.role);
        tracing::info!(%worker, %url, %role, state, problem, "worker state changed");
    }
}

/// Waits for another configuration; forever once no other can come.
async fn changed(config: &mut watch::Receiver<ProbeConfig>) {
    if config.changed().await.is_err() {
        std::future::pending().await
    }
}

fn engine_of(owner: &str) -> Option<Engine> {
    match owner {
        "vllm" => Some(Engine::Vllm),
        "sglang" => Some(Engine::Sglang),
        _ => None,
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
