//! The processes of a scenario: engines, etcd, NATS, gateways. Each can be stopped and restarted.

use std::{
    cell::RefCell,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use pointsman_guest_build::GuestBuild;
use pointsman_test_stopping_proxy::StoppingProxy;
use serde_json::Value;
use tempfile::TempDir;
use tokio::time::Instant;

use super::scenario::{Fault, FleetSpec, Source};
use crate::{
    certificates::Certificates,
    client::Client,
    discovery::{
        Server as _,
        etcd::{Etcd, section},
    },
    fleet::{self, EngineSpec, Fleet, Process},
    load::Target,
    nats::Nats,
    poll, sh,
};

/// Maximum time after the start until everything works.
const START: Duration = Duration::from_secs(60);
/// Maximum time until the gateways notice that something is away, unless a fault has a limit of its own.
const NOTICE: Duration = Duration::from_secs(30);

/// All processes of a scenario.
pub(crate) struct Rig {
    bin: PathBuf,
    dir: TempDir,
    source: Source,
    config: String,
    pub(super) engines: Vec<Engine>,
    /// Position of the engine that the file of workers leaves out.
    left_out: Option<usize>,
    nats: Option<Nats>,
    etcd: Option<Etcd>,
    /// Proxies through which the last gateway reaches etcd and NATS.
    to_nats: Option<StoppingProxy>,
    to_etcd: Option<StoppingProxy>,
    certificates: Option<Certificates>,
    /// Policies to install in turn.
    pub(super) policies: Vec<Vec<u8>>,
    pub(super) gateways: Vec<Option<Gateway>>,
    /// Number of gateways started so far.
    started: u32,
}

/// An engine, which may be stopped.
pub(super) struct Engine {
    spec: EngineSpec,
    /// Address that the engine had at its first start.
    address: String,
    pub(super) process: Option<Process>,
}

/// A running gateway.
pub(super) struct Gateway {
    pub(super) fleet: Fleet,
    pub(super) target: Target,
}

impl Rig {
    /// Starts all processes, and waits until everything works.
    pub(crate) async fn start(spec: &FleetSpec, bin: &Path) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("pointsman-drill-").tempdir()?;
        let policies = spec.policies.iter().map(|name| GuestBuild::new(&sh::root(), name).build());
        let policies = policies.collect::<Result<Vec<_>, _>>()?;
        let nats = if spec.nats { Some(Nats::start(dir.path()).await?) } else { None };
        let etcd = if spec.source == Source::Etcd { Some(Etcd::start(dir.path()).await?) } else { None };
        let to_nats = match &nats {
            Some(nats) => Some(StoppingProxy::start(nats.port).await?),
            None => None,
        };
        let to_etcd = match &etcd {
            Some(etcd) => Some(StoppingProxy::start(etcd.ports[0]).await?),
            None => None,
        };
        let certificates = if spec.tls { Some(Certificates::write(dir.path())?) } else { None };
        let engines = spec.engines.iter().flat_map(|engines| {
            let one = EngineSpec::new(&engines.dialect, &engines.role, &spec.flags).worker(&engines.worker);
            vec![one; engines.count]
        });
        let engines = engines.map(|spec| Engine { spec, address: String::new(), process: None });
        let mut rig = Self {
            bin: bin.to_owned(),
            source: spec.source,
            config: spec.config.clone(),
            engines: engines.collect(),
            left_out: None,
            nats,
            etcd,
            to_nats,
            to_etcd,
            certificates,
            policies,
            gateways: (0..spec.gateways).map(|_| None).collect(),
            started: 0,
            dir,
        };
        for place in 0..rig.engines.len() {
            rig.start_engine(place).await?;
        }
        for place in 0..spec.gateways {
            rig.start_gateway(place).await?;
        }
        rig.whole(START).await?;
        Ok(rig)
    }

    /// Returns the running gateways.
    pub(crate) fn fleets(&self) -> impl Iterator<Item = &Fleet> {
        self.gateways.iter().flatten().map(|gateway| &gateway.fleet)
    }

    /// Returns a client of each gateway, by position; `None` for one that does not run.
    pub(crate) fn clients(&self) -> Vec<Option<Client>> {
        self.gateways
            .iter()
            .map(|gateway| gateway.as_ref().map(|gateway| gateway.fleet.client.clone()))
            .collect()
    }

    /// Returns the number of engines, with those that do not run.
    pub(crate) fn engines(&self) -> usize {
        self.engines.len()
    }

    /// Returns the first gateway.
    pub(super) fn fleet(&self) -> anyhow::Result<&Fleet> {
        self.fleets().next().context("no gateway runs")
    }

    pub(super) async fn start_engine(&mut self, place: usize) -> anyhow::Result<()> {
        let (bin, dir, source) = (&self.bin, self.dir.path(), self.source);
        let engine = self.engines.get_mut(place).context("an engine without a place")?;
        // A source that names engines in a file can find a restarted engine at another address.
        let again = !engine.address.is_empty() && source != Source::File;
        let listen = if again { engine.address.as_str() } else { "127.0.0.1:0" };
        let process = engine.spec.start_at(bin, dir, place + 1, listen)?;
        engine.address = process.listening();
        engine.process = Some(process);
        let (address, role) = (engine.address.clone(), engine.spec.role.clone());
        match (&mut self.etcd, source) {
            (Some(etcd), _) => etcd.register(place as u64 + 1, &address, &role).await,
            (None, Source::File) => self.write_workers(),
            _ => Ok(()),
        }
    }

    pub(super) fn kill_engine(&mut self, place: usize) {
        if let Some(engine) = self.engines.get_mut(place) {
            engine.process = None;
        }
    }

    /// Writes the file of workers without the engine at `place`.
    pub(super) fn leave_out(&mut self, place: Option<usize>) -> anyhow::Result<()> {
        self.left_out = place;
        self.write_workers()
    }

    fn workers_file(&self) -> PathBuf {
        self.dir.path().join("workers.toml")
    }

    fn write_workers(&self) -> anyhow::Result<()> {
        let mut text = String::new();
        let all = self.engines.iter().enumerate().filter(|(place, _)| Some(*place) != self.left_out);
        for (place, engine) in all.filter(|(_, engine)| engine.process.is_some()) {
            text.push_str(&format!(
                "[[workers]]\nurl = 'http://{}'\nrole = '{}'\nengine = 'vllm'\nlabels.place = '{place}'\n{}\n",
                engine.address,
                engine.spec.role,
                engine.spec.worker.trim_start_matches(','),
            ));
        }
        let staged = self.workers_file().with_extension("staged");
        std::fs::write(&staged, text)?;
        Ok(std::fs::rename(staged, self.workers_file())?)
    }

    async fn start_gateway(&mut self, place: usize) -> anyhow::Result<()> {
        let dir = self.dir.path().join(format!("gateway-{place}"));
        std::fs::create_dir_all(&dir)?;
        let config = self.gateway_config(place);
        let flag = |(place, engine): (usize, &Engine)| {
            let announced = engine.process.as_ref().map(|process| &process.announced);
            engine.spec.worker_flag(place + 1, announced.unwrap_or(&Value::Null))
        };
        let flags = match self.source {
            Source::Flags => self.engines.iter().enumerate().map(flag).collect(),
            Source::File | Source::Etcd => Vec::new(),
        };
        let mut fleet = fleet::gateway(&self.bin, &dir, &config, &flags).await?;
        self.started += 1;
        let target = Target {
            address: fleet.gateway.listening(),
            authority: self.certificates.as_ref().map(|files| files.authority.clone()),
            instance: self.started,
        };
        fleet.client = target.client()?;
        if let Some(gateway) = self.gateways.get_mut(place) {
            *gateway = Some(Gateway { fleet, target });
        }
        Ok(())
    }

    fn gateway_config(&self, place: usize) -> String {
        // The last gateway reaches the servers through proxies, which can be stopped.
        let last = place + 1 == self.gateways.len();
        let port = |own: u16, proxy: &Option<StoppingProxy>| {
            proxy.as_ref().filter(|_| last).map_or(own, |proxy| proxy.address.port())
        };
        let mut config = self.config.clone();
        if let Some(etcd) = &self.etcd {
            config.push_str(&section(port(etcd.ports[0], &self.to_etcd)));
        }
        if self.source == Source::File {
            let file = self.workers_file();
            config.push_str(&format!("[[discovery.files]]\nname = 'rack'\npath = {file:?}\n"));
        }
        if let Some(nats) = &self.nats {
            let port = port(nats.port, &self.to_nats);
            let name = format!("name = \"gateway-{place}\"");
            config.push_str(&format!("[replicas]\nservers = [\"nats://127.0.0.1:{port}\"]\n{name}\n"));
        }
        if let Some(certificates) = &self.certificates {
            config.push_str(&format!("[server.tls]\n{}", certificates.table()));
        }
        config
    }

    /// Changes the queue's timeout in the file of the first gateway, and makes the gateway read the file
    /// again.
    pub(super) async fn reload_config(&self, turn: u64) -> anyhow::Result<()> {
        let text = format!("[queue]\ntimeout = '{}s'\n", 10 + turn % 2);
        let config = self.gateway_config(0).replace("[queue]\n", &text);
        std::fs::write(self.dir.path().join("gateway-0/pointsman.toml"), config)?;
        let answer = self.fleet()?.admin.post("/config/reload", "").await?;
        let answer: Value = serde_json::from_str(&answer)?;
        let applied = answer["applied"].as_array().context("the reload lists no applied keys")?;
        ensure!(applied.iter().any(|key| key == "queue.timeout"), "the reload applied nothing: {answer}");
        Ok(())
    }

    /// Replaces the listener's certificate.
    pub(super) fn renew_certificate(&self) -> anyhow::Result<()> {
        self.certificates.as_ref().context("the scenario has no TLS")?.renew()
    }

    /// Causes a fault. With `leaves`, a killed engine is also removed from etcd, if the scenario uses etcd.
    /// Returns the instance of the gateway that was killed.
    pub(crate) async fn fail(
        &mut self,
        fault: Fault,
        place: usize,
        leaves: bool,
    ) -> anyhow::Result<Option<u32>> {
        match fault {
            Fault::Engine => {
                self.kill_engine(place);
                if let (true, Some(etcd)) = (leaves, &mut self.etcd) {
                    // This fails while etcd is stopped, and the engine then stays registered.
                    let _ = etcd.delete(place as u64 + 1).await;
                }
            }
            Fault::Nats => self.nats.iter_mut().for_each(Nats::kill),
            Fault::Etcd => self.etcd.as_mut().context("the scenario has no etcd")?.fail().await?,
            Fault::Gateway => {
                let gateway = self.gateways.get_mut(place).and_then(Option::take);
                return Ok(gateway.map(|gateway| gateway.target.instance));
            }
            Fault::NetworkToNats => self.to_nats.iter().for_each(|proxy| proxy.stop(true)),
            Fault::NetworkToEtcd => self.to_etcd.iter().for_each(|proxy| proxy.stop(true)),
        }
        Ok(None)
    }

    /// Repairs a fault. A gateway starts last, because it waits for its engines.
    pub(crate) async fn repair(
        &mut self,
        faults: &[Fault],
        engine: usize,
        gateway: usize,
    ) -> anyhow::Result<()> {
        if let (true, Some(nats)) = (faults.contains(&Fault::Nats), &mut self.nats) {
            nats.spawn().await?;
        }
        if let (true, Some(etcd)) = (faults.contains(&Fault::Etcd), &mut self.etcd) {
            etcd.recover().await?;
        }
        self.to_nats.iter().chain(&self.to_etcd).for_each(|proxy| proxy.stop(false));
        if faults.contains(&Fault::Engine) {
            self.start_engine(engine).await?;
        }
        if faults.contains(&Fault::Gateway) {
            self.start_gateway(gateway).await?;
        }
        Ok(())
    }

    /// Waits until the gateways show that something is away. Returns the time from the fault until then.
    pub(super) async fn notices(&self, fault: Fault) -> anyhow::Result<Duration> {
        let began = Instant::now();
        match fault {
            Fault::Nats => {
                for fleet in self.fleets() {
                    until(fleet, "/readyz", NOTICE, |ready| {
                        ready["ready"] == true && ready["replicas"]["alone"] == true
                    })
                    .await?;
                }
            }
            Fault::Gateway => {
                let others = self.fleets().count() - 1;
                for fleet in self.fleets() {
                    let forgotten =
                        |status: &Value| status["peers"].as_array().is_some_and(|all| all.len() == others);
                    until(fleet, "/replicas", NOTICE, forgotten).await?;
                }
            }
            Fault::NetworkToNats => {
                if let Some(fleet) = self.fleets().last() {
                    until(fleet, "/replicas", NOTICE, |status| status["connected"] == false).await?;
                }
            }
            Fault::Engine | Fault::Etcd | Fault::NetworkToEtcd => {}
        }
        Ok(began.elapsed())
    }

    /// Waits until each gateway has all engines and knows the load of all other gateways. Returns how long it
    /// took.
    pub(super) async fn whole(&self, limit: Duration) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let (others, engines) = (self.gateways.len() - 1, self.engines.len());
        for fleet in self.fleets() {
            let left = limit.saturating_sub(began.elapsed());
            until(fleet, "/workers", left, |status| {
                let workers = status["workers"].as_array().map_or(&[][..], Vec::as_slice);
                workers.len() == engines && workers.iter().all(|worker| worker["ineligible"].is_null())
            })
            .await?;
            if self.nats.is_some() {
                until(fleet, "/replicas", limit.saturating_sub(began.elapsed()), |status| {
                    let peers = status["peers"].as_array().map_or(&[][..], Vec::as_slice);
                    let in_sync = peers.iter().all(|peer| peer["in_sync"] == true);
                    status["connected"] == true && peers.len() == others && in_sync
                })
                .await?;
            }
        }
        Ok(began.elapsed())
    }

    /// Returns the states of the engines that answer.
    pub(crate) async fn states(&self) -> Vec<Value> {
        let mut states = Vec::new();
        for process in self.engines.iter().filter_map(|engine| engine.process.as_ref()) {
            states.extend(process.client().json("/sim/state").await);
        }
        states
    }
}

/// Waits until the answer to a path of the admin listener fulfils a condition.
async fn until(
    fleet: &Fleet,
    path: &str,
    limit: Duration,
    fits: impl Fn(&Value) -> bool,
) -> anyhow::Result<()> {
    let last = RefCell::default();
    let find = || async {
        *last.borrow_mut() = fleet.admin.json(path).await?;
        Ok(fits(&last.borrow()).then_some(()))
    };
    let found = poll::until(&format!("{path} is as it must be"), limit, find).await;
    found.with_context(|| last.borrow().to_string().chars().take(600).collect::<String>())
}
