//! Probing: reads a worker's facts once, then its health and, sparsely, its own load figures.
//!
//! One task a worker, ended with the worker (spec B4). Own bookings are the first word on load; scraping may slow an engine down.

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
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    id::{Engine, ModelName, Role, WorkerId},
    registry::Registry,
    spec::KvTransport,
    worker::{EngineLoad, Health, Worker},
};

mod parse;

/// Largest answer of a probe.
const MAX_ANSWER: usize = 8 * 1024 * 1024;
/// Failed health checks in a row that make a worker unhealthy.
const FAILURES: u32 = 2;

/// How workers are probed.
#[derive(Clone, Copy, Debug)]
pub struct ProbeConfig {
    /// Between health checks.
    pub interval: Duration,
    /// Limit of one check.
    pub timeout: Duration,
    /// Between reads of load figures; 0: never.
    pub load_interval: Duration,
}

/// Probes every worker of a registry.
#[derive(Debug)]
pub struct Prober;

type Http = Client<HttpConnector, Empty<Bytes>>;

/// What a probe call brought.
enum Answer {
    Ok(Bytes),
    /// 404, 405, 501: the engine does not have it, and will not.
    Absent,
    /// Anything else: ask again.
    Unknown(String),
}

impl Prober {
    /// Probes until `stop`; workers that join or leave meanwhile are noticed.
    pub fn start(
        registry: Arc<Registry>,
        config: ProbeConfig,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) {
        let tasks = tracker.clone();
        tracker.spawn(async move {
            // A connection takes some 20 KB: of those that all first probes together took, two an address are kept.
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
                        Probe::new(&http, worker, &registry, config).start(&tasks, token.clone());
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
    config: ProbeConfig,
    load_path: Option<&'static str>,
}

impl Probe {
    fn new(http: &Http, worker: &Arc<Worker>, registry: &Arc<Registry>, config: ProbeConfig) -> Self {
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
                Answer::Ok(_) | Answer::Absent => {
                    failures = 0;
                    if self.worker.set_health(Health::Healthy) {
                        self.say("healthy", "");
                    }
                }
                Answer::Unknown(problem) => {
                    failures += 1;
                    if failures >= FAILURES && self.worker.set_health(Health::Unhealthy) {
                        self.say("unhealthy", &problem);
                    }
                }
            }
            if !self.config.load_interval.is_zero() && Instant::now() >= load_due {
                load_due = Instant::now() + self.config.load_interval;
                self.read_load().await;
            }
            // A failed connect of a request has the worker checked at once; a check that then succeeds brings it back.
            tokio::select! {
                () = tokio::time::sleep(self.config.interval) => {}
                () = self.worker.nudged() => failures = FAILURES,
            }
        }
    }

    /// Asks for facts until the worker told them (spec B5).
    async fn read_facts(&self) {
        let mut last = String::new();
        loop {
            let problem = match self.facts().await {
                Ok(()) => return,
                Err(problem) => problem,
            };
            if problem != last {
                self.say("not ready", &problem);
                last = problem;
            }
            tokio::time::sleep(self.config.interval.min(Duration::from_millis(500))).await;
        }
    }

    async fn facts(&self) -> Result<(), String> {
        let spec = self.worker.spec();
        match self.get("/v1/models").await {
            Answer::Ok(body) => {
                let list = parse::models(&body)?;
                if let Some(other) =
                    list.owner.as_deref().and_then(engine_of).filter(|owner| *owner != spec.engine)
                    && spec.engine != Engine::Openai
                {
                    return Err(format!("configured as {}, but it is {other}", spec.engine));
                }
                let names = list.names.iter().map(|name| ModelName::new(name)).collect();
                self.registry.learn_models(spec.id, names);
            }
            Answer::Absent if !spec.models.is_empty() => {}
            Answer::Absent => return Err("it lists no models, and none are configured".to_owned()),
            Answer::Unknown(problem) => return Err(problem),
        }
        if spec.engine == Engine::Vllm
            && let Answer::Ok(body) = self.get("/metrics").await
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

    /// Mooncake's decode leg names the prefill engine by an id that only its bootstrap server tells.
    async fn engine_ids(&self) -> Result<(), String> {
        let address = self.worker.spec().bootstrap_address();
        match self.get_at(&format!("{address}/query")).await {
            Answer::Ok(body) => {
                self.worker.set_engine_ids(parse::engine_ids(&body)?);
                Ok(())
            }
            Answer::Absent => Err(format!("GET {address}/query: there is none")),
            Answer::Unknown(problem) => Err(problem),
        }
    }

    async fn read_load(&mut self) {
        let Some(path) = self.load_path else { return };
        match self.get(path).await {
            Answer::Ok(body) => {
                if let Some(figures) = parse::load(&body) {
                    self.worker.set_engine_load(EngineLoad {
                        running: figures.running,
                        waiting: figures.waiting,
                        kv_usage: figures.kv_usage,
                        read_at: Instant::now(),
                    });
                }
            }
            Answer::Absent => self.load_path = None,
            Answer::Unknown(_) => {}
        }
    }

    async fn get(&self, path: &str) -> Answer {
        self.get_at(&format!("{}{path}", self.worker.spec().url)).await
    }

    async fn get_at(&self, url: &str) -> Answer {
        match tokio::time::timeout(self.config.timeout, self.call(url)).await {
            Ok(Ok((status, body))) if status.is_success() => Answer::Ok(body),
            Ok(Ok((
                StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED,
                _,
            ))) => Answer::Absent,
            Ok(Ok((status, _))) => Answer::Unknown(format!("GET {url} answered {status}")),
            Ok(Err(problem)) => Answer::Unknown(problem),
            Err(_) => Answer::Unknown(format!("GET {url} took longer than {:?}", self.config.timeout)),
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
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
        body.map(|body| (status, body.to_bytes())).map_err(|error| format!("GET {url}: {error}"))
    }

    fn say(&self, state: &str, problem: &str) {
        let spec = self.worker.spec();
        tracing::info!(worker = %spec.id, url = %spec.url, role = %spec.role, state, problem, "worker");
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
