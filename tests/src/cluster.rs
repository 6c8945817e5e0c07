//! Starts a gateway in process with simulated engines behind it.

use std::{
    env,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use pointsman_gateway::{
    config::{
        Config, DiscoveryFile, DiscoveryFileFormat, Environment, KeyDigest, KeyEntry, reload::ConfigSource,
    },
    daemon::{Daemon, InheritedSockets},
};
use pointsman_sim::{Dialect, Role, Sim, SimConfig, SimHandle};
use pointsman_workers::{Worker, WorkerId, WorkerSpec};
use serde_json::Value;
use tempfile::TempDir;

use crate::{client::Client, raw_engine::RawEngine};

/// Configuration of a [`TestCluster`] before it starts.
#[derive(Default)]
pub struct TestClusterBuilder {
    sims: Vec<(SimConfig, String)>,
    /// Engines that are chosen in this order.
    in_turn: Vec<SocketAddr>,
    config: Config,
    reread: Option<(Option<PathBuf>, Reread)>,
}

/// Derives a reloaded configuration from the one that the cluster started with.
type Reread = Box<dyn Fn(&Config) -> anyhow::Result<Config> + Send + Sync>;

/// A running gateway and its engines.
pub struct TestCluster {
    /// The gateway.
    pub gateway: Daemon,
    /// The engines in the order they were added; worker ids count from 1.
    pub sims: Vec<SimHandle>,
    /// Client of the gateway's request port.
    pub client: Client,
    /// Client of the gateway's admin port.
    pub admin: Client,
    policies: TempDir,
}

/// Entries of the configuration for API keys, each with its tenant. "": no tenant.
#[must_use]
pub fn client_keys(keys: &[(&str, &str)]) -> Vec<KeyEntry> {
    let entry = |(index, (key, tenant)): (usize, &(&str, &str))| KeyEntry {
        id: format!("key-{index}"),
        tenant: (*tenant).to_owned(),
        digest: Some(KeyDigest::sha256(key).to_string().into()),
    };
    keys.iter().enumerate().map(entry).collect()
}

/// Returns the directory in the target directory where all tests keep compiled policies. Without it, each
/// test would compile the built-in ones, for a second.
fn compiled_policies() -> Option<PathBuf> {
    let test = env::current_exe().ok()?;
    Some(test.ancestors().nth(2)?.join("compiled-policies"))
}

impl TestClusterBuilder {
    /// Creates a cluster without engines and with short probe intervals.
    #[must_use]
    pub fn new() -> Self {
        let mut config = Config::default();
        config.server.listen = SocketAddr::from(([127, 0, 0, 1], 0));
        config.server.admin_listen = SocketAddr::from(([127, 0, 0, 1], 0));
        config.probe.interval = Duration::from_millis(50);
        config.probe.load_interval = Duration::from_millis(200);
        config.policies.debounce = Duration::from_millis(5);
        config.policies.rescan = Duration::from_millis(300);
        config.policies.compile_cache = compiled_policies();
        config.timeouts.drain = Duration::from_secs(5);
        Self { sims: Vec::new(), in_turn: Vec::new(), config, reread: None }
    }

    /// Edits the gateway's configuration.
    #[must_use]
    pub fn config(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// Sets the configuration that a reload reads, derived from the initial one. A change of the file
    /// `watched` triggers a reload.
    #[must_use]
    pub fn reread(
        mut self,
        watched: Option<PathBuf>,
        read: impl Fn(&Config) -> anyhow::Result<Config> + Send + Sync + 'static,
    ) -> Self {
        self.reread = Some((watched, Box::new(read)));
        self
    }

    /// Adds an engine that answers without delay.
    #[must_use]
    pub fn sim(self, dialect: Dialect, role: Role) -> Self {
        self.sim_with(SimConfig::instant(dialect, role), "")
    }

    /// Adds a prefill and a decode engine that answer without delay.
    #[must_use]
    pub fn pair(self, dialect: Dialect) -> Self {
        self.sim(dialect, Role::Prefill).sim(dialect, Role::Decode)
    }

    /// Adds an engine and appends `more` to its `--worker` flag.
    #[must_use]
    pub fn sim_with(mut self, config: SimConfig, more: &str) -> Self {
        self.sims.push((config, more.to_owned()));
        self
    }

    /// Reads workers from a file every 20 ms, as the source `file:a`.
    #[must_use]
    pub fn worker_file(self, path: &Path) -> Self {
        let file = DiscoveryFile {
            name: "a".to_owned(),
            path: path.to_owned(),
            format: DiscoveryFileFormat::Workers,
            interval: Duration::from_millis(20),
            ..DiscoveryFile::default()
        };
        self.config(|config| config.discovery.files.push(file))
    }

    /// Adds engines as the workers 1, 2, …: the first one that may serve a request is chosen.
    #[must_use]
    pub fn in_turn<'a>(mut self, engines: impl IntoIterator<Item = &'a RawEngine>) -> Self {
        self.in_turn.extend(engines.into_iter().map(|engine| engine.address));
        self
    }

    /// Starts everything and waits until every worker is eligible.
    ///
    /// # Panics
    /// The gateway or an engine does not start, or a worker is not eligible within a minute.
    #[expect(clippy::panic, reason = "helpers of tests may fail as tests do")]
    pub async fn start(self) -> TestCluster {
        self.try_start().await.unwrap_or_else(|error| panic!("the cluster does not start: {error:?}"))
    }

    /// Like [`TestClusterBuilder::start`].
    ///
    /// # Errors
    /// Instead of the panic.
    pub async fn try_start(mut self) -> anyhow::Result<TestCluster> {
        let policies = TempDir::new()?;
        self.config.policies.dir.get_or_insert_with(|| policies.path().to_owned());
        let mut sims = Vec::new();
        for (place, (config, more)) in self.sims.into_iter().enumerate() {
            let (dialect, role) = (config.dialect.as_str(), config.role.as_str());
            let sim = Sim::start(config).await?;
            let mut flag = format!("id={},role={role},engine={dialect},url={}{more}", place + 1, sim.url());
            if let Some(port) = sim.bootstrap_port() {
                flag.push_str(&format!(",bootstrap_port={port}"));
            }
            if let Some(port) = sim.kv_events_port() {
                flag.push_str(&format!(",kv_events=tcp://127.0.0.1:{port}"));
            }
            self.config.workers.push(WorkerSpec::parse_flag(&flag)?);
            sims.push(sim);
        }
        if !self.in_turn.is_empty() {
            let cost = "[aggregated]\nbuiltin = 'formula'\nsettings = { cost = \"label_number('turn')\" }";
            self.config.policies.slots = toml::from_str(cost)?;
        }
        for (turn, address) in (1..).zip(self.in_turn) {
            let flag =
                format!("id={turn},role=aggregated,engine=openai,url=http://{address},label.turn={turn}");
            self.config.workers.push(WorkerSpec::parse_flag(&flag)?);
        }
        self.config.check()?;
        let started = self.config.clone();
        let source = self.reread.map(|(path, read)| {
            ConfigSource::new(path, Environment::default(), Arc::new(move || read(&started)))
        });
        let gateway = Daemon::start_from(&self.config, source, InheritedSockets::default()).await?;
        let cluster = TestCluster {
            client: Client::new(gateway.address),
            admin: Client::new(gateway.admin),
            gateway,
            sims,
            policies,
        };
        cluster.until("every worker is eligible", |cluster| cluster.ineligible() == 0).await?;
        Ok(cluster)
    }
}

impl TestCluster {
    /// Starts a cluster of prefill and decode engines of one dialect.
    ///
    /// # Errors
    /// Same as [`TestClusterBuilder::start`].
    pub async fn disaggregated(dialect: Dialect, prefill: usize, decode: usize) -> anyhow::Result<Self> {
        let mut builder = TestClusterBuilder::new();
        for _ in 0..prefill {
            builder = builder.sim(dialect, Role::Prefill);
        }
        for _ in 0..decode {
            builder = builder.sim(dialect, Role::Decode);
        }
        builder.try_start().await
    }

    /// Waits up to a minute for a condition.
    ///
    /// # Errors
    /// The condition does not hold in time.
    pub async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) -> anyhow::Result<()> {
        for _ in 0..12_000 {
            if condition(self) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        anyhow::bail!("waited a minute in vain for: {what}")
    }

    /// Number of requests booked on all workers now.
    #[must_use]
    pub fn booked(&self) -> u32 {
        self.gateway.state().registry.snapshot().workers().iter().map(|worker| worker.active_requests()).sum()
    }

    /// Number of workers that are not eligible.
    #[must_use]
    pub fn ineligible(&self) -> usize {
        let snapshot = self.gateway.state().registry.snapshot();
        snapshot.workers().iter().filter(|worker| worker.ineligible().is_some()).count()
    }

    /// Number of faults of a kind that hit a request, over all engines. The kind is named as in JSON; a
    /// status fault has its status added, as in `status-503`.
    #[must_use]
    pub fn faults_fired(&self, kind: &str) -> u64 {
        self.sims.iter().filter_map(|sim| sim.state().faults_fired.get(kind).copied()).sum()
    }

    /// Waits until no request is booked or in flight. Every path through the gateway must release its
    /// bookings.
    ///
    /// # Errors
    /// A booking or a request is left after a minute.
    pub async fn at_rest(&self) -> anyhow::Result<()> {
        let idle =
            |cluster: &Self| cluster.booked() == 0 && cluster.gateway.state().metrics.inflight.get() == 0;
        self.until("nothing is booked", idle).await
    }

    /// A worker of the registry.
    ///
    /// # Panics
    /// The gateway does not have it.
    #[must_use]
    #[expect(clippy::expect_used, reason = "helpers of tests may fail as tests do")]
    pub fn worker(&self, id: u64) -> Arc<Worker> {
        self.gateway.state().registry.snapshot().get(WorkerId(id)).expect("a worker of the gateway").clone()
    }

    /// Outcome of the newest decision, once everything ended.
    ///
    /// # Errors
    /// A request does not end, or the decisions cannot be read.
    pub async fn newest_outcome(&self) -> anyhow::Result<Value> {
        self.at_rest().await?;
        let list = self.admin.get("/decisions?limit=1").await?.json()?;
        Ok(list.pointer("/decisions/0/outcome").cloned().unwrap_or_default())
    }

    /// Receipt of the newest decision.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub async fn newest_receipt(&self) -> anyhow::Result<Value> {
        let list = self.admin.get("/decisions?limit=1").await?.json()?;
        let id = list.pointer("/decisions/0/id").and_then(Value::as_str).context("no decision")?;
        self.admin.get(&format!("/decisions/{id}")).await?.json()
    }

    /// Facts about the request in the receipt of the newest decision.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub async fn newest_facts(&self) -> anyhow::Result<Value> {
        let receipt = self.newest_receipt().await?;
        let mut stages = receipt.get("stages").and_then(Value::as_array).into_iter().flatten();
        let facts = stages.find(|stage| stage.get("policy").is_none()).and_then(|stage| stage.get("request"));
        Ok(facts.context("the receipt has no facts")?.clone())
    }

    /// Text of `/metrics`.
    ///
    /// # Errors
    /// It cannot be read.
    pub async fn metrics_text(&self) -> anyhow::Result<String> {
        Ok(String::from_utf8(self.admin.get("/metrics").await?.body.to_vec())?)
    }

    /// Number of handoffs with a result.
    ///
    /// # Errors
    /// The metrics cannot be read.
    pub async fn handoffs(&self, result: &str) -> anyhow::Result<f64> {
        let name = format!("pointsman_handoffs_total{{result=\"{result}\"}}");
        Ok(self.metric(&name).await?.into_iter().sum())
    }

    /// Values of the samples of `/metrics` whose line starts with this.
    ///
    /// # Errors
    /// The metrics cannot be read, or a value is not a number.
    pub async fn metric(&self, start: &str) -> anyhow::Result<Vec<f64>> {
        let text = self.metrics_text().await?;
        let lines = text.lines().filter(|line| line.starts_with(start));
        lines.map(|line| Ok(line.rsplit(' ').next().context("a sample has no value")?.parse()?)).collect()
    }

    /// Waits up to a minute until the samples of `/metrics` whose line starts with this add up to `least` or
    /// more, and returns their sum.
    ///
    /// # Errors
    /// The sum is less, or the metrics cannot be read.
    pub async fn until_counted(&self, start: &str, least: f64) -> anyhow::Result<f64> {
        let mut sum = 0.0;
        for _ in 0..3_000 {
            sum = self.metric(start).await?.iter().sum();
            if sum >= least {
                return Ok(sum);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::bail!("waited a minute in vain for {least} of {start}: {sum}")
    }

    /// Waits until the gateway receives the KV events of every engine that publishes them.
    ///
    /// # Errors
    /// A feed is not live after half a minute.
    pub async fn kv_events_live(&self) -> anyhow::Result<()> {
        let feeds = self.sims.iter().filter(|sim| sim.kv_events_port().is_some()).count();
        for _ in 0..6_000 {
            let live = self.metric("pointsman_kv_feed_live{").await?;
            if live.len() == feeds && live.iter().all(|one| *one == 1.0) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        anyhow::bail!("the KV events were not live within half a minute")
    }

    /// Waits until the index has applied everything that the engines published.
    ///
    /// # Errors
    /// A message did not arrive within half a minute.
    pub async fn kv_events_applied(&self) -> anyhow::Result<()> {
        let published: u64 = self.sims.iter().map(|sim| sim.state().kv_messages).sum();
        for _ in 0..6_000 {
            let received: f64 = self.metric("pointsman_kv_feed_messages_total{").await?.iter().sum();
            if received >= published as f64 {
                self.gateway.state().router.index().flush();
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        anyhow::bail!("the KV events did not arrive within half a minute")
    }

    /// Installs a policy file by an atomic rename, as an operator's `cp` and `mv` would.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn drop_policy(&self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let staged = self.policy_path(".staged");
        std::fs::write(&staged, bytes)?;
        std::fs::rename(&staged, self.policy_path(name)).context("rename")
    }

    /// Path of a policy file in the watched directory.
    #[must_use]
    pub fn policy_path(&self, name: &str) -> PathBuf {
        self.policies.path().join(name)
    }
}
