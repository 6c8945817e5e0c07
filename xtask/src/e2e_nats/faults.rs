//! A worker, the server and a gateway are killed, and a network is cut, while clients send requests.

use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use pointsman_test_stopping_proxy::StoppingProxy;
use tokio::time::{Instant, sleep};

use super::{
    Args,
    clients::{Clients, Tally},
    rig::{Engines, Nats, agree, gateway, until},
};
use crate::{fleet::Fleet, sh, table::Checks};

/// Time of each phase: longer than a lease.
const PHASE: Duration = Duration::from_secs(5);

/// Everything that runs.
struct Rig<'a> {
    bin: &'a Path,
    dir: &'a Path,
    engines: Engines,
    nats: Nats,
    proxy: StoppingProxy,
    gateways: Vec<Fleet>,
    clients: Vec<Clients>,
}

/// Runs all failures and judges them.
pub(super) async fn run(args: &Args, bin: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("pointsman-nats-").tempdir()?;
    let engines = Engines::start(bin, dir.path(), args.engines)?;
    let nats = Nats::start(dir.path()).await?;
    let proxy = StoppingProxy::start(nats.port).await?;
    let mut rig =
        Rig { bin, dir: dir.path(), engines, nats, proxy, gateways: Vec::new(), clients: Vec::new() };
    for number in 1..=3 {
        rig.start_gateway(number).await?;
    }
    let took = agree(&rig.gateways.iter().collect::<Vec<_>>()).await?;
    checks.show("time until three gateways know each other", seconds(took));
    sleep(PHASE / 2).await;
    rig.worker_killed(checks).await?;
    rig.server_killed(checks).await?;
    rig.gateway_killed(checks).await?;
    rig.partitioned(checks).await?;
    rig.at_rest(checks).await
}

impl Rig<'_> {
    /// Starts a gateway and its clients. The last one reaches the server through the proxy.
    async fn start_gateway(&mut self, number: usize) -> anyhow::Result<()> {
        let port = if number == 3 { self.proxy.address.port() } else { self.nats.port };
        // A gateway that starts late would wait for a worker that was killed before.
        let alive = if self.engines.processes.len() < self.engines.flags.len() { 1 } else { 0 };
        let workers = self.engines.flags.get(alive..).unwrap_or_default();
        let fleet = gateway(self.bin, self.dir, number, workers, Some(port)).await?;
        let place = number - 1;
        self.clients.insert(place, Clients::start(fleet.client.clone()));
        self.gateways.insert(place, fleet);
        Ok(())
    }

    async fn worker_killed(&mut self, checks: &mut Checks) -> anyhow::Result<()> {
        drop(self.engines.processes.remove(0));
        sleep(PHASE).await;
        self.judge("a killed worker", checks);
        Ok(())
    }

    async fn server_killed(&mut self, checks: &mut Checks) -> anyhow::Result<()> {
        self.nats.kill();
        sleep(PHASE).await;
        for gateway in &self.gateways {
            let ready = gateway.admin.json("/readyz").await?;
            let alone = ready["ready"] == true && ready["replicas"]["alone"] == true;
            checks.check("NATS killed: /readyz is 200 and says alone", alone, alone);
        }
        self.nats.spawn().await?;
        let healed = agree(&self.gateways.iter().collect::<Vec<_>>()).await?;
        checks.check("NATS back: time until all agree", seconds(healed), healed < PHASE);
        self.judge("killed NATS", checks);
        Ok(())
    }

    async fn gateway_killed(&mut self, checks: &mut Checks) -> anyhow::Result<()> {
        drop(self.gateways.remove(1));
        let began = Instant::now();
        for gateway in &self.gateways {
            let one =
                |status: &serde_json::Value| status["peers"].as_array().is_some_and(|peers| peers.len() == 1);
            until(gateway, "the killed gateway is forgotten", one).await?;
        }
        checks.check(
            "gateway killed: time until it is forgotten (lease 3 s)",
            seconds(began.elapsed()),
            began.elapsed() < PHASE,
        );
        let tally = self.clients.remove(1).end().await;
        let lost = tally.neither.load(Relaxed);
        checks.show("requests that the killed gateway took with it, or that found it gone", lost);
        self.start_gateway(2).await?;
        let healed = agree(&self.gateways.iter().collect::<Vec<_>>()).await?;
        checks.check("gateway restarted: time until all agree", seconds(healed), healed < PHASE);
        self.judge("a killed gateway (clients of the others)", checks);
        Ok(())
    }

    async fn partitioned(&mut self, checks: &mut Checks) -> anyhow::Result<()> {
        self.proxy.stop(true);
        let began = Instant::now();
        if let Some(third) = self.gateways.get(2) {
            until(third, "the third gateway notices", |status| status["connected"] == false).await?;
        }
        checks.check("network cut: time until it is noticed", seconds(began.elapsed()), true);
        sleep(PHASE).await;
        self.proxy.stop(false);
        let healed = agree(&self.gateways.iter().collect::<Vec<_>>()).await?;
        checks.check("network back: time until all agree", seconds(healed), healed < PHASE);
        self.judge("a cut network", checks);
        Ok(())
    }

    /// Stops the clients. Nothing may stay booked anywhere, here or as load of others.
    async fn at_rest(self, checks: &mut Checks) -> anyhow::Result<()> {
        let mut whole = 0;
        for clients in self.clients {
            whole += clients.end().await.whole.load(Relaxed);
        }
        checks.check("requests with a whole answer", whole, whole > 0);
        for (number, gateway) in (1..).zip(&self.gateways) {
            let booked = gateway.booked(PHASE).await?;
            checks.none(&format!("gateway {number}: bookings left, own and of others"), booked);
        }
        Ok(())
    }

    fn judge(&self, what: &str, checks: &mut Checks) {
        let sum = |read: fn(&Tally) -> &AtomicU64| -> u64 {
            self.clients.iter().map(|clients| read(&clients.tally).load(Relaxed)).sum()
        };
        let neither = sum(|tally| &tally.neither);
        let shown = format!("{}, {}, {neither}", sum(|tally| &tally.whole), sum(|tally| &tally.one_error));
        checks.check(&format!("after {what}: whole, one error, neither"), shown, neither == 0);
        let problem = self.clients.iter().find_map(|clients| clients.tally.problem.lock().clone());
        if let Some(problem) = problem {
            sh::status(&format!("the first of these: {problem}"));
        }
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}
