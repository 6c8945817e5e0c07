//! Engines, etcd, NATS, gateways and clients as processes, each of which can be taken away.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use pointsman_test_stopping_proxy::StoppingProxy;
use tokio::time::{Instant, sleep};

use super::Fault;
use crate::{
    discovery::{
        Server as _,
        etcd::{Etcd, section},
    },
    e2e_nats::{
        clients::{Clients, Tally},
        rig::Nats,
    },
    fleet::{self, Fleet, Process, free_port},
    sh,
    table::Checks,
};

/// Roles of the engines.
pub(super) const ENGINES: [&str; 6] = ["prefill", "prefill", "prefill", "decode", "decode", "decode"];
pub(super) const GATEWAYS: usize = 3;

/// Probes that notice a killed engine soon, and a source whose workers may leave one by one.
const CONFIG: &str = "[probe]\ninterval = '500ms'\n[discovery]\ndrain = '2s'\nremoval_share = 1.0\n\
                      [server]\nthreads = 1\n";

/// Everything that runs.
pub(super) struct Rig {
    bin: PathBuf,
    dir: PathBuf,
    engines: Vec<Engine>,
    nats: Nats,
    etcd: Etcd,
    /// The third gateway's networks.
    to_nats: StoppingProxy,
    to_etcd: StoppingProxy,
    gateways: Vec<Option<Gateway>>,
    lost: Lost,
}

struct Engine {
    role: &'static str,
    address: String,
    process: Option<Process>,
}

struct Gateway {
    fleet: Fleet,
    clients: Clients,
}

/// Requests of clients whose gateway was killed.
#[derive(Default)]
struct Lost {
    whole: u64,
    one_error: u64,
    /// With neither, before the gateway was killed.
    before: u64,
    /// With neither, because it was killed.
    killed: u64,
}

impl Rig {
    pub(super) async fn start(bin: &Path, dir: &Path) -> anyhow::Result<Self> {
        let (nats, etcd) = (Nats::start(dir).await?, Etcd::start(dir).await?);
        let to_nats = StoppingProxy::start(nats.port).await?;
        let to_etcd = StoppingProxy::start(etcd.ports[0]).await?;
        let mut engines = Vec::new();
        for role in ENGINES {
            let address = format!("127.0.0.1:{}", free_port()?);
            engines.push(Engine { role, address, process: None });
        }
        let (bin, dir, lost) = (bin.to_owned(), dir.to_owned(), Lost::default());
        let gateways = (0..GATEWAYS).map(|_| None).collect();
        let mut rig = Self { bin, dir, engines, nats, etcd, to_nats, to_etcd, gateways, lost };
        for engine in 0..ENGINES.len() {
            rig.start_engine(engine).await?;
        }
        for gateway in 0..GATEWAYS {
            rig.start_gateway(gateway).await?;
        }
        rig.whole(Duration::from_secs(60)).await?;
        Ok(rig)
    }

    /// Takes something away. `leaves`: an engine is also removed from etcd, if that is there.
    pub(super) async fn fail(
        &mut self,
        fault: Fault,
        engine: usize,
        gateway: usize,
        leaves: bool,
    ) -> anyhow::Result<()> {
        match fault {
            Fault::Engine => {
                if let Some(engine) = self.engines.get_mut(engine) {
                    engine.process = None;
                }
                if leaves {
                    // Fails while etcd is away: then the engine stays registered.
                    let _ = self.etcd.delete(id(engine)).await;
                }
            }
            Fault::Nats => self.nats.kill(),
            Fault::Etcd => self.etcd.fail().await?,
            Fault::Gateway => self.kill_gateway(gateway).await,
            Fault::NetworkToNats => self.to_nats.stop(true),
            Fault::NetworkToEtcd => self.to_etcd.stop(true),
        }
        Ok(())
    }

    /// Brings back what was taken away. A gateway comes last: it waits for its engines.
    pub(super) async fn repair(
        &mut self,
        faults: &[Fault],
        engine: usize,
        gateway: usize,
    ) -> anyhow::Result<()> {
        if faults.contains(&Fault::Nats) {
            self.nats.spawn().await?;
        }
        if faults.contains(&Fault::Etcd) {
            self.etcd.recover().await?;
        }
        self.to_nats.stop(false);
        self.to_etcd.stop(false);
        if faults.contains(&Fault::Engine) {
            self.start_engine(engine).await?;
        }
        if faults.contains(&Fault::Gateway) {
            self.start_gateway(gateway).await?;
        }
        Ok(())
    }

    async fn start_engine(&mut self, place: usize) -> anyhow::Result<()> {
        let Some(engine) = self.engines.get_mut(place) else { return Ok(()) };
        let mut command = Command::new(self.bin.join("pointsman-sim"));
        command.args(["--listen", &engine.address, "--engine", "vllm", "--role", engine.role]);
        command.args(["--threads", "1", "--max-num-seqs", "64"]);
        engine.process = Some(Process::announcing(&format!("engine-{place}"), command, &self.dir)?);
        self.etcd.register(id(place), &engine.address, engine.role).await
    }

    async fn start_gateway(&mut self, place: usize) -> anyhow::Result<()> {
        let third = place + 1 == GATEWAYS;
        let nats = if third { self.to_nats.address.port() } else { self.nats.port };
        let etcd = if third { self.to_etcd.address.port() } else { self.etcd.ports[0] };
        let config = format!(
            "{CONFIG}{}[replicas]\nservers = [\"nats://127.0.0.1:{nats}\"]\nname = \"gateway-{place}\"\n",
            section(etcd)
        );
        let dir = self.dir.join(format!("gateway-{place}"));
        std::fs::create_dir_all(&dir)?;
        let fleet = fleet::gateway(&self.bin, &dir, &config, &[]).await?;
        let clients = Clients::start(fleet.client.clone());
        if let Some(gateway) = self.gateways.get_mut(place) {
            *gateway = Some(Gateway { fleet, clients });
        }
        Ok(())
    }

    /// Ends a gateway as `kill -9` does. What its clients lose with it is counted apart.
    async fn kill_gateway(&mut self, place: usize) {
        let Some(Gateway { fleet, clients }) = self.gateways.get_mut(place).and_then(Option::take) else {
            return;
        };
        // A request that failed before is not explained by this end.
        let before = clients.tally.neither.load(Relaxed);
        drop(fleet);
        let tally = clients.end().await;
        self.lost.whole += tally.whole.load(Relaxed);
        self.lost.one_error += tally.one_error.load(Relaxed);
        self.lost.before += before;
        self.lost.killed += tally.neither.load(Relaxed).saturating_sub(before);
        self.unexplained(before, &tally);
    }

    fn unexplained(&self, count: u64, tally: &Tally) {
        if let (1.., Some(problem)) = (count, tally.problem.lock().clone()) {
            sh::status(&format!("neither a whole answer nor one error: {problem}"));
        }
    }

    /// Waits until each gateway knows the load of all others and has all engines. Returns how long it took.
    pub(super) async fn whole(&self, limit: Duration) -> anyhow::Result<Duration> {
        let began = Instant::now();
        for gateway in self.gateways.iter().flatten() {
            while let Err(problem) = is_whole(&gateway.fleet).await {
                anyhow::ensure!(began.elapsed() < limit, "not whole after {limit:?}: {problem:#}");
                sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(began.elapsed())
    }

    /// Stops the clients, and judges their answers and what is left.
    pub(super) async fn judge(mut self, checks: &mut Checks) -> anyhow::Result<()> {
        let (mut whole, mut one_error) = (self.lost.whole, self.lost.one_error);
        let mut neither = self.lost.before;
        let mut left = Vec::new();
        for gateway in std::mem::take(&mut self.gateways).into_iter().flatten() {
            let tally = gateway.clients.end().await;
            let count = |of: &AtomicU64| of.load(Relaxed);
            whole += count(&tally.whole);
            one_error += count(&tally.one_error);
            neither += count(&tally.neither);
            self.unexplained(count(&tally.neither), &tally);
            left.push(gateway.fleet);
        }
        checks.check("requests with a whole answer", whole, whole > 0);
        checks.show("requests with one valid error", one_error);
        checks.none("requests with neither", neither);
        checks.show("requests that a killed gateway took with it", self.lost.killed);
        for (number, fleet) in (1..).zip(&left) {
            let booked = fleet.booked(Duration::from_secs(30)).await?;
            checks.none(&format!("gateway {number}: bookings left, own and of others"), booked);
        }
        Ok(())
    }
}

async fn is_whole(fleet: &Fleet) -> anyhow::Result<()> {
    let status = fleet.admin.json("/replicas").await?;
    let peers = status["peers"].as_array().map_or(&[][..], Vec::as_slice);
    let in_sync = peers.iter().all(|peer| peer["in_sync"] == true);
    anyhow::ensure!(
        status["connected"] == true && peers.len() + 1 == GATEWAYS && in_sync,
        "gateways do not agree: {status}"
    );
    let workers = fleet.admin.json("/workers").await?;
    let workers = workers["workers"].as_array().map_or(&[][..], Vec::as_slice);
    let eligible = workers.iter().filter(|worker| worker["ineligible"].is_null()).count();
    anyhow::ensure!(
        eligible == ENGINES.len() && workers.len() == ENGINES.len(),
        "{eligible} of {} engines are eligible",
        ENGINES.len()
    );
    Ok(())
}

/// Id of the engine at a place.
fn id(place: usize) -> u64 {
    place as u64 + 1
}
