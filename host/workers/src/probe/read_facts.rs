//! Reads an engine's facts before its worker is eligible, and again later (B5).

use super::{
    CHECK_URL, CHECKS_PER_READING, Checked, MAX_FACTS_BODY, MAX_FIRST_INTERVAL, Probe,
    client::Response,
    figures::{Figures, figures},
    models,
    pace::spread,
    parse,
};
use crate::{
    facts::{Contradiction, EngineFacts, FactName},
    id::{Engine, ModelName, Role},
    registry::ListedModels,
    spec::KvTransport,
    worker::Health,
};

/// Number of readings that may fail before a worker is used with the configured values alone.
const MAX_FACT_FAILURES: u32 = 3;

/// Why the facts of an engine cannot be used.
pub(super) enum Problem {
    /// A request failed, or was answered with nonsense.
    Failed(String),
    /// The engine did not list its models in time.
    TimedOut(String),
    /// The engine listed its models before, and has no list any more.
    NotListed(String),
    /// The engine reports other facts than the configuration has. The worker says which.
    Contradiction,
}

impl From<String> for Problem {
    fn from(problem: String) -> Self {
        Self::Failed(problem)
    }
}

impl Probe {
    /// Reads the facts. Those of an engine whose description changed are known: it is checked first, and its
    /// facts are read after that. Returns whether they are stale, and the number of checks since they were
    /// read.
    pub(super) async fn begin(&mut self) -> (bool, u32) {
        match self.worker.health() {
            Health::Unknown => {
                self.read_facts().await;
                (false, 0)
            }
            Health::Healthy if !self.worker.is_misconfigured() => (false, CHECKS_PER_READING - 1),
            Health::Healthy | Health::Unhealthy => (true, 0),
        }
    }

    /// Reads the facts, and repeats until it succeeds.
    async fn read_facts(&mut self) {
        let (mut last, mut failures) = (String::new(), 0);
        loop {
            match self.facts(failures < MAX_FACT_FAILURES).await {
                Ok(()) => return,
                Err(Problem::Contradiction) => {}
                Err(Problem::Failed(problem) | Problem::TimedOut(problem) | Problem::NotListed(problem)) => {
                    failures += 1;
                    if problem != last {
                        self.worker.set_problem(Some(problem.clone()));
                        self.log("not_ready", &problem);
                        last = problem;
                    }
                }
            }
            let config = *self.config.borrow();
            let shortest = config.interval.min(MAX_FIRST_INTERVAL);
            // Many engines that are away take no more than their share of the probes.
            let failing = self.failing.set(true);
            tokio::time::sleep(spread(config.interval_of_failing(shortest, failing))).await;
        }
    }

    /// Checks the health, and reads the facts again if they may be `stale`, after some checks, or if the
    /// engine has another role now. `checks` counts those since the facts were read.
    pub(super) async fn check_in_turn(&mut self, stale: bool, checks: &mut u32) -> Result<Checked, String> {
        let checked = self.check(stale).await?;
        if !matches!(checked, Checked::Healthy) {
            return Ok(checked);
        }
        *checks = if stale { 0 } else { *checks + 1 };
        if *checks < CHECKS_PER_READING && !self.has_switched().await {
            return Ok(checked);
        }
        *checks = 0;
        self.read_again().await
    }

    /// Reads the facts of an engine that answers. Facts that cannot be read now are read later.
    ///
    /// # Errors
    /// The engine has no list of models any more.
    async fn read_again(&mut self) -> Result<Checked, String> {
        match self.facts(false).await {
            Ok(()) => Ok(Checked::Healthy),
            Err(Problem::Contradiction) => Ok(Checked::Misconfigured),
            Err(Problem::NotListed(problem)) => Err(problem),
            Err(Problem::Failed(problem) | Problem::TimedOut(problem)) => {
                self.log("facts_not_read", &problem);
                Ok(Checked::Healthy)
            }
        }
    }

    /// Reads the models. Returns their owner.
    async fn read_models(&mut self) -> Result<Option<String>, Problem> {
        let spec = self.worker.spec().clone();
        let mut answer = self.get("/v1/models").await;
        if self.worker.health() == Health::Unknown {
            // No health check came before.
            answer = self.or_speaks_tls(&format!("{}/v1/models", spec.url), answer).await;
        }
        self.worker.set_refused(answer.is_refusal(), answer.refuses_key());
        if let Response::TimedOut(problem) = answer {
            return Err(Problem::TimedOut(problem));
        }
        let Some(body) = answer.body()? else {
            let url = &spec.url;
            return match (self.worker.model_readings(), spec.models.is_empty()) {
                (1.., _) => Err(Problem::NotListed(format!(
                    "{url} answers 404 to /v1/models, where it listed its models before: {CHECK_URL}"
                ))),
                (0, true) => Err(Problem::Failed(format!(
                    "the engine does not support /v1/models: {CHECK_URL}, or configure the worker's models"
                ))),
                (0, false) => Ok(None),
            };
        };
        let list = models::models(&body)?;
        if let Some(other) = list.owner.as_deref().and_then(engine_of)
            && spec.engine != Engine::Openai
            && other != spec.engine
        {
            let contradiction = Contradiction::new(FactName::Engine, spec.engine, other);
            return Err(self.refuse(Contradiction { reporter: "GET /v1/models", ..contradiction }));
        }
        if let Some(contradiction) = spec.models_contradicted(&list.names, list.count) {
            return Err(self.refuse(contradiction));
        }
        self.tell_left_out(list.count);
        let adapter = |(name, model): &(String, String)| (ModelName::new(name), ModelName::new(model));
        let adapters = list.adapters.iter().map(adapter).collect();
        let [models, base_models] = [&list.names, &list.base_models]
            .map(|names| names.iter().map(|name| ModelName::new(name)).collect());
        let is_changed = self.worker.set_context_lengths(list.lengths);
        self.registry.learn_models(spec.id, ListedModels { models, base_models, adapters }, is_changed);
        self.worker.note_models_read();
        Ok(list.owner)
    }

    /// Reads models and facts once. With `patient`, a question about facts that the engine does not answer is
    /// a failure; otherwise the configured values do.
    pub(super) async fn facts(&mut self, patient: bool) -> Result<(), Problem> {
        let spec = self.worker.spec().clone();
        let owner = self.read_models().await?;
        let (reported, problem) = match spec.engine {
            Engine::Vllm => {
                let (facts, problem) = self.vllm_facts().await;
                let takes_global_ranks = owner.as_deref() == Some(RUST_FRONTEND);
                (EngineFacts { takes_global_ranks, ..facts }, problem)
            }
            Engine::Sglang => self.sglang_facts().await,
            Engine::Trtllm | Engine::Openai => (EngineFacts::default(), None),
        };
        if patient && let Some(problem) = problem {
            return Err(Problem::Failed(problem));
        }
        self.use_facts(reported, problem).await?;
        let spec = self.worker.spec();
        if spec.engine == Engine::Vllm
            && spec.transport == KvTransport::Mooncake
            && spec.role == Role::Prefill
        {
            self.engine_ids().await?;
        }
        Ok(())
    }

    /// Logs how many models are left out, when their number changed.
    fn tell_left_out(&mut self, listed: usize) {
        let left_out = listed.saturating_sub(models::MAX_MODELS);
        if std::mem::replace(&mut self.left_out, left_out) != left_out && left_out > 0 {
            let (worker, url, limit) = (self.worker.id(), &self.worker.spec().url, models::MAX_MODELS);
            tracing::warn!(%worker, %url, listed, limit, left_out, "engine lists too many models");
        }
    }

    /// Completes the worker with what its engine reports. `problem` says why facts are missing.
    async fn use_facts(&mut self, reported: EngineFacts, problem: Option<String>) -> Result<(), Problem> {
        let spec = self.worker.spec().clone();
        let earlier = self.worker.facts();
        // Earlier facts are better than none while the engine does not answer.
        let facts = if problem.is_some() { reported.or(&earlier) } else { reported };
        if facts.role.is_none() && spec.from_engine.contains(&FactName::Role) {
            let why = problem.unwrap_or_else(|| "the engine does not report it".to_owned());
            return Err(Problem::Failed(format!("role: is not configured: {why}")));
        }
        let completed = match spec.completed(&facts) {
            Ok(completed) => completed,
            Err(contradiction) => return Err(self.refuse(contradiction)),
        };
        if completed != spec {
            // The engine of another description is another process, or knows nothing yet.
            self.index.forget_records(spec.id);
            self.registry.complete(&self.worker, completed);
            // The completed worker is probed by a task of its own; this one is about to be stopped.
            std::future::pending::<()>().await;
        }
        if let Some(connector) = facts.unknown_connector()
            && facts.connector != earlier.connector
            && spec.role != Role::Aggregated
            && spec.from_engine.contains(&FactName::Transport)
        {
            let (worker, url, transport) = (spec.id, &spec.url, spec.transport);
            tracing::warn!(%worker, %url, connector, %transport, "unknown KV connector; handed over by the default transport");
        }
        self.worker.set_contradiction(None);
        let unknown = spec.unknown_facts(&facts);
        let was_complete = !std::mem::replace(&mut self.incomplete, problem.is_some());
        if let Some(problem) = problem
            && was_complete
        {
            let (worker, url) = (spec.id, &spec.url);
            tracing::warn!(%worker, %url, ?unknown, problem, "engine facts unknown; configured values are used");
        }
        self.worker.set_facts(facts);
        if !self.worker.caches_prefixes() {
            // With each reading: a decision may have been recorded while this one was stored.
            self.index.forget_records(spec.id);
        }
        Ok(())
    }

    /// Refuses the worker until configuration and engine agree.
    fn refuse(&self, contradiction: Contradiction) -> Problem {
        let spec = self.worker.spec();
        let (worker, url, problem) = (spec.id, &spec.url, contradiction.to_string());
        if self.worker.set_contradiction(Some(contradiction)) {
            tracing::error!(%worker, %url, problem, "worker is misconfigured");
        }
        Problem::Contradiction
    }

    /// Reads what SGLang says about its start arguments and state, by the endpoint's new or old name.
    async fn sglang_facts(&self) -> (EngineFacts, Option<String>) {
        for path in ["/server_info", "/get_server_info"] {
            let url = format!("{}{path}", self.worker.spec().url);
            match self.get_at(&url, MAX_FACTS_BODY).await.body() {
                Ok(None) => {}
                Ok(Some(body)) => {
                    return match parse::sglang_facts(&body) {
                        Ok(facts) if facts.switches_role => self.role_now(facts).await,
                        Ok(facts) => (facts, None),
                        Err(problem) => (EngineFacts::default(), Some(format!("GET {path}: {problem}"))),
                    };
                }
                Err(problem) => return (EngineFacts::default(), Some(problem)),
            }
        }
        (EngineFacts::default(), None)
    }

    /// Returns whether the engine, which may switch its role while it runs, has another one than it said.
    pub(super) async fn has_switched(&self) -> bool {
        let facts = self.worker.facts();
        if !facts.switches_role {
            return false;
        }
        let Response::Ok(body) = self.model_info().await else { return false };
        parse::sglang_role_now(&body).is_some_and(|role| Some(role) != facts.role)
    }

    async fn model_info(&self) -> Response {
        let url = format!("{}/model_info", self.worker.spec().url);
        self.get_at(&url, MAX_FACTS_BODY).await
    }

    /// Reads the role of an SGLang engine that may have switched it.
    async fn role_now(&self, facts: EngineFacts) -> (EngineFacts, Option<String>) {
        match self.model_info().await.body() {
            Ok(Some(body)) => {
                let role = parse::sglang_role_now(&body).or(facts.role);
                (EngineFacts { role, ..facts }, None)
            }
            Ok(None) => (facts, None),
            Err(problem) => (EngineFacts { role: None, ..facts }, Some(problem)),
        }
    }

    /// Reads the cache's size from vLLM's metrics, of a worker of a pair also the version, and the connector
    /// from the metrics or from `/server_info`, which vLLM offers in development mode only.
    async fn vllm_facts(&mut self) -> (EngineFacts, Option<String>) {
        let (mut facts, problem) = match self.get("/metrics").await.body() {
            Ok(Some(body)) => {
                let mut figures = figures(&body);
                self.confirm_awake(&mut figures).await;
                self.observe(figures);
                (parse::vllm_facts(&body), None)
            }
            Ok(None) => {
                self.observe(Figures::default());
                (EngineFacts::default(), None)
            }
            Err(problem) => (EngineFacts::default(), Some(problem)),
        };
        if self.worker.spec().role == Role::Aggregated {
            return (facts, problem);
        }
        let url = format!("{}/version", self.worker.spec().url);
        facts.version = match self.get_at(&url, MAX_FACTS_BODY).await.body() {
            Ok(body) => body.and_then(|body| parse::vllm_version(&body)),
            // Another answer would make another worker of it.
            Err(_) => self.worker.facts().version.clone(),
        };
        if facts.connector.is_none() {
            let url = format!("{}/server_info?config_format=json", self.worker.spec().url);
            if let Ok(Some(body)) = self.get_at(&url, MAX_FACTS_BODY).await.body() {
                facts = parse::vllm_config(&body).or(&facts);
                if facts.unknown_connector().is_some() {
                    // The connector may be a cache, also without the engine's own.
                    facts.prefix_cache = facts.prefix_cache.filter(|has| *has);
                }
            }
        }
        (facts, problem)
    }

    /// Reads the engine ids from Mooncake's bootstrap server. The decode leg needs them to name the prefill
    /// engine.
    async fn engine_ids(&self) -> Result<(), String> {
        let url = format!("{}/query", self.worker.spec().bootstrap_address());
        let Some(body) = self.get_at(&url, MAX_FACTS_BODY).await.body()? else {
            return Err(format!("GET {url}: not supported; check bootstrap_host and bootstrap_port"));
        };
        let (dp_size, first_rank) = (self.worker.spec().dp_size, self.worker.facts().first_rank);
        if self.worker.set_engine_ids(parse::engine_ids(&body, dp_size, first_rank)?) {
            self.process_ended("another engine id");
        }
        Ok(())
    }
}

/// Owner of the models that vLLM's Rust frontend lists.
const RUST_FRONTEND: &str = "vllm-frontend-rs";

fn engine_of(owner: &str) -> Option<Engine> {
    match owner {
        "vllm" | RUST_FRONTEND => Some(Engine::Vllm),
        "sglang" => Some(Engine::Sglang),
        _ => None,
    }
}
