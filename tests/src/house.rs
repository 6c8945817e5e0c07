//! A gateway with simulated engines, ready to serve.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use pointsman_gateway::{
    app::Running,
    config::{Config, reload::ConfigSource},
};
use pointsman_sim::{Dialect, Role, Sim, SimConfig, SimHandle};
use pointsman_workers::WorkerSpec;
use tempfile::TempDir;

use crate::client::Client;

/// What to build.
#[derive(Default)]
pub struct HouseBuilder {
    sims: Vec<(SimConfig, String)>,
    config: Config,
    reread: Option<(Option<PathBuf>, Reread)>,
}

/// Makes another configuration of the one that the house started with.
type Reread = Box<dyn Fn(&Config) -> anyhow::Result<Config> + Send + Sync>;

/// A running house.
pub struct House {
    /// The gateway.
    pub gateway: Running,
    /// The engines, in the order they were added; their worker ids count from 1.
    pub sims: Vec<SimHandle>,
    /// A client of the gateway.
    pub client: Client,
    /// A client of its admin port.
    pub admin: Client,
    policies: TempDir,
}

impl HouseBuilder {
    /// An empty house with quick probes.
    #[must_use]
    pub fn new() -> Self {
        let mut config = Config::default();
        config.server.listen = SocketAddr::from(([127, 0, 0, 1], 0));
        config.server.admin_listen = SocketAddr::from(([127, 0, 0, 1], 0));
        config.probe.interval = Duration::from_millis(50);
        config.probe.load_interval = Duration::from_millis(200);
        config.policies.debounce = Duration::from_millis(5);
        config.policies.rescan = Duration::from_millis(300);
        config.timeouts.drain = Duration::from_secs(5);
        Self { sims: Vec::new(), config, reread: None }
    }

    /// Changes the gateway's configuration.
    #[must_use]
    pub fn config(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// What a reload of the configuration reads, made of what the house started with; `watched`: a file whose changes
    /// lead to one.
    #[must_use]
    pub fn reread(
        mut self,
        watched: Option<PathBuf>,
        read: impl Fn(&Config) -> anyhow::Result<Config> + Send + Sync + 'static,
    ) -> Self {
        self.reread = Some((watched, Box::new(read)));
        self
    }

    /// Adds an engine that answers at once.
    #[must_use]
    pub fn sim(self, dialect: Dialect, role: Role) -> Self {
        self.sim_with(SimConfig::instant(dialect, role), "")
    }

    /// Adds an engine; `more` is appended to its `--worker` flag.
    #[must_use]
    pub fn sim_with(mut self, config: SimConfig, more: &str) -> Self {
        self.sims.push((config, more.to_owned()));
        self
    }

    /// Starts everything and waits until every worker is eligible.
    ///
    /// # Errors
    /// Something does not start, or a worker does not become eligible within 10 s.
    pub async fn start(mut self) -> anyhow::Result<House> {
        let policies = TempDir::new()?;
        self.config.policies.dir = Some(policies.path().to_owned());
        let mut sims = Vec::new();
        for (place, (config, more)) in self.sims.into_iter().enumerate() {
            let (dialect, role) = (config.dialect.as_str(), config.role.as_str());
            let sim = Sim::start(config).await?;
            let mut flag = format!("id={},role={role},engine={dialect},url={}{more}", place + 1, sim.url());
            if let Some(port) = sim.bootstrap_port() {
                flag.push_str(&format!(",bootstrap_port={port}"));
            }
            self.config.workers.push(WorkerSpec::parse_flag(&flag)?);
            sims.push(sim);
        }
        self.config.check()?;
        let started = self.config.clone();
        let source =
            self.reread.map(|(path, read)| ConfigSource { path, read: Arc::new(move || read(&started)) });
        let gateway = Running::start_from(&self.config, source).await?;
        let house = House {
            client: Client::new(gateway.address),
            admin: Client::new(gateway.admin),
            gateway,
            sims,
            policies,
        };
        house
            .until("every worker is eligible", |house| {
                house
                    .gateway
                    .app
                    .registry
                    .snapshot()
                    .workers()
                    .iter()
                    .all(|worker| worker.ineligible().is_none())
            })
            .await?;
        Ok(house)
    }
}

impl House {
    /// Prefill and decode engines of one dialect.
    ///
    /// # Errors
    /// As [`HouseBuilder::start`].
    pub async fn disaggregated(dialect: Dialect, prefill: usize, decode: usize) -> anyhow::Result<Self> {
        let mut builder = HouseBuilder::new();
        for _ in 0..prefill {
            builder = builder.sim(dialect, Role::Prefill);
        }
        for _ in 0..decode {
            builder = builder.sim(dialect, Role::Decode);
        }
        builder.start().await
    }

    /// Waits, at most 10 s, for a condition.
    ///
    /// # Errors
    /// It does not come.
    pub async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) -> anyhow::Result<()> {
        for _ in 0..2_000 {
            if condition(self) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        anyhow::bail!("never: {what}")
    }

    /// Requests booked on all workers now.
    #[must_use]
    pub fn booked(&self) -> u32 {
        self.gateway.app.registry.snapshot().workers().iter().map(|worker| worker.active_requests()).sum()
    }

    /// Waits until nothing is booked and nothing under way: every path releases its bookings.
    ///
    /// # Errors
    /// Something is left.
    pub async fn at_rest(&self) -> anyhow::Result<()> {
        let idle = |house: &Self| house.booked() == 0 && house.gateway.app.metrics.inflight.get() == 0;
        self.until("nothing is booked", idle).await
    }

    /// Puts a policy file in place by renaming it, as an operator's `cp` and `mv` would.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn drop_policy(&self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let staged = self.policy_path(".staged");
        std::fs::write(&staged, bytes)?;
        std::fs::rename(&staged, self.policy_path(name)).context("rename")
    }

    /// Where a policy file lies.
    #[must_use]
    pub fn policy_path(&self, name: &str) -> PathBuf {
        self.policies.path().join(name)
    }
}
