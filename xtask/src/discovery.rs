//! `e2e-etcd` and `e2e-kubernetes`: 500 workers are registered and removed in the real etcd, or in a double
//! of the Kubernetes API server, while the server fails. No worker may be lost, no request may fail, and
//! decisions may take little longer than with a constant set of workers.

use std::{path::Path, time::Duration};

use anyhow::Context as _;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::{
    beside::Beside,
    decisions::{Decisions, now_us},
    fleet::{self, EngineSpec, Fleet},
    load::{Arrivals, Load, Target},
    proc::Memory,
    sh,
    stats::quantile,
    table::Checks,
};

pub(crate) mod etcd;
mod kubernetes;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of workers.
    #[arg(long, default_value_t = 500)]
    workers: u64,
    /// Duration of each phase, seconds.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Requests a second.
    #[arg(long, default_value_t = 50)]
    rate: u32,
    /// Seed that chooses the workers to remove.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Largest allowed ratio of the p99 of the durations of decisions while workers change to the p99 while they
/// do not.
const RATIO: f64 = 1.2;
/// Largest allowed growth of resident memory from the first to the second phase in which workers change.
const GROWTH: f64 = 0.05;
/// Time between two changes.
const PAUSE: Duration = Duration::from_millis(20);
/// Time between two readings of decisions. It is short, because receipts of 500 candidates are large and the
/// gateway keeps few of them.
const READ: Duration = Duration::from_secs(1);
/// At most one in this number of workers is removed at a time.
const AWAY: u64 = 4;
/// Maximum time to wait for all workers.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server at which workers are registered.
pub(crate) trait Server {
    /// Registers a worker at an address.
    async fn put(&mut self, id: u64, address: &str) -> anyhow::Result<()>;
    /// Removes a worker.
    async fn delete(&mut self, id: u64) -> anyhow::Result<()>;
    /// Stops the server.
    async fn fail(&mut self) -> anyhow::Result<()>;
    /// Starts the server again, and makes it forget old revisions.
    async fn recover(&mut self) -> anyhow::Result<()>;
    /// Returns the section of the gateway's configuration.
    fn config(&self) -> String;
    /// Returns the name of the source.
    fn source(&self) -> &'static str;
}

/// Runs the check with the real etcd.
pub(crate) async fn run_etcd(args: &Args) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("pointsman-etcd-").tempdir()?;
    let server = etcd::Etcd::start(dir.path()).await?;
    run(args, dir.path(), server).await
}

/// Runs the check with a double of the Kubernetes API server.
pub(crate) async fn run_kubernetes(args: &Args) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("pointsman-kubernetes-").tempdir()?;
    let server = kubernetes::Double::start().await?;
    run(args, dir.path(), server).await
}

/// The gateway, and the server at which its workers are registered.
struct Rig<S> {
    server: S,
    fleet: Fleet,
    /// Addresses of the workers. They belong to one engine, which listens on every loopback address.
    addresses: Vec<String>,
    args: (u64, Duration, u32),
    random: StdRng,
    decisions: Decisions,
    checks: Checks,
}

async fn run(args: &Args, dir: &Path, mut server: impl Server) -> anyhow::Result<()> {
    let bin = fleet::build("release")?;
    let spec = EngineSpec::new("vllm", "aggregated", "--overhead-ms 1 --prefill-ms-per-token 0 --itl-ms 1");
    let engine = spec.start_at(&bin, dir, 1, "0.0.0.0:0")?;
    let port = engine.listening().rsplit(':').next().unwrap_or_default().to_owned();
    let addresses: Vec<String> =
        (0..args.workers).map(|n| format!("127.1.{}.{}:{port}", n / 250, n % 250 + 1)).collect();
    for (id, address) in (1..).zip(&addresses) {
        server.put(id, address).await?;
    }
    let config = format!(
        "[decisions]\nkeep = 20000\nbytes = 4194304\n[probe]\ninterval = \"5s\"\nload_interval = \"0s\"\n\
         [discovery]\nconfirm_after = \"3s\"\n{}",
        server.config()
    );
    let began = Instant::now();
    let fleet = fleet::gateway(&bin, dir, &config, &[]).await?;
    let mut rig = Rig {
        server,
        fleet,
        addresses,
        args: (args.workers, Duration::from_secs(args.seconds), args.rate),
        random: StdRng::seed_from_u64(args.seed),
        decisions: Decisions::default(),
        checks: Checks::default(),
    };
    let all = rig.eligible(args.workers).await?;
    rig.checks.check(
        "workers eligible after the start",
        format!("{all} of {}", args.workers),
        all == args.workers,
    );
    rig.checks.show("time from the start of the gateway", format!("{:.1} s", began.elapsed().as_secs_f64()));
    rig.phases().await?;
    drop(engine);
    rig.checks.finish()
}

impl<S: Server> Rig<S> {
    async fn phases(&mut self) -> anyhow::Result<()> {
        // The first phase fills the caches of the allocator and of connections.
        self.phase("first round", true, false).await?;
        let before = Memory::of(self.fleet.gateway.pid())?;
        let still = self.phase("workers stay", false, false).await?;
        let moving = self.phase("workers come and go", true, false).await?;
        let ratio = moving / still;
        self.checks
            .show("p99 of decisions, workers stay / come and go", format!("{still:.0} / {moving:.0} µs"));
        self.checks.check("their ratio (limit 1.2)", format!("{ratio:.2}"), ratio <= RATIO);
        self.phase("the server fails", true, true).await?;
        let after = Memory::of(self.fleet.gateway.pid())?;
        let growth = after.resident / before.resident - 1.0;
        let row = format!("growth of {:.1} MB resident (limit 5 %)", before.resident);
        self.checks.check(&row, format!("{:+.1} %", growth * 100.0), growth <= GROWTH);
        let booked = self.fleet.booked(Duration::from_secs(10)).await?;
        self.checks.none("requests still booked", booked);
        Ok(())
    }

    /// Sends requests for a time, while workers stay or come and go, or while the server also fails for a
    /// third of the time. Returns the p99 of the durations of decisions, microseconds.
    async fn phase(&mut self, what: &str, moves: bool, fails: bool) -> anyhow::Result<f64> {
        let (count, time, rate) = self.args;
        let since = now_us()?;
        let address = self.fleet.gateway.listening();
        let target = Target { address, authority: None, instance: 1 };
        let load = Load { arrivals: Arrivals::Paced(rate.into(), 8), ..Load::default() };
        let beside = Beside::start(&self.fleet, &target, load)?;
        let (began, mut gone) = (Instant::now(), Vec::new());
        let (mut failed, mut changes, mut fewest) = (false, 0_u64, count);
        let mut read = Instant::now();
        while began.elapsed() < time {
            if read.elapsed() > READ {
                read = Instant::now();
                self.read_decisions().await?;
            }
            if fails && !failed && began.elapsed() > time / 3 {
                failed = true;
                self.server.fail().await?;
                sleep(time / 3).await;
                fewest = self.workers().await?.len() as u64;
                self.server.recover().await?;
            }
            if moves {
                self.change(&mut gone).await?;
                changes += 1;
            }
            sleep(PAUSE).await;
        }
        for id in gone {
            self.put(id).await?;
        }
        let (sent, failures, problems) = beside.stop().await;
        let shown = format!("{sent}, {failures}");
        self.checks.check(&format!("{what}: requests sent, failed"), shown, sent > 0 && failures == 0);
        problems.iter().for_each(|problem| sh::status(problem));
        self.checks.check(&format!("{what}: changes of workers"), changes, (changes > 0) == moves);
        if fails {
            self.checks.check("fewest workers meanwhile", fewest, fewest >= count - count / AWAY);
        }
        self.settle(what).await?;
        self.read_decisions().await?;
        let took = self.decisions.since(since);
        anyhow::ensure!(!took.is_empty(), "no decision was recorded");
        Ok(quantile(&took, 0.99))
    }

    /// Removes a worker, or registers one that was removed.
    async fn change(&mut self, gone: &mut Vec<u64>) -> anyhow::Result<()> {
        let (count, ..) = self.args;
        let full = gone.len() as u64 >= count / AWAY;
        if !gone.is_empty() && (full || self.random.random_bool(0.5)) {
            let id = gone.swap_remove(self.random.random_range(0..gone.len()));
            return self.put(id).await;
        }
        let id = self.random.random_range(1..=count);
        if !gone.contains(&id) {
            self.server.delete(id).await?;
            gone.push(id);
        }
        Ok(())
    }

    async fn put(&mut self, id: u64) -> anyhow::Result<()> {
        let place = usize::try_from(id)? - 1;
        let address = self.addresses.get(place).context("a worker without an address")?.clone();
        self.server.put(id, &address).await
    }

    /// Waits until every worker is eligible and no request is queued.
    async fn settle(&mut self, when: &str) -> anyhow::Result<()> {
        let (count, ..) = self.args;
        let eligible = self.eligible(count).await?;
        let shown = format!("{eligible} of {count}");
        self.checks.check(&format!("{when}: workers eligible in the end"), shown, eligible == count);
        let status = self.fleet.admin.json("/discovery").await?;
        let sources = status["sources"].as_array().context("/discovery lists no sources")?;
        let source =
            sources.iter().find(|source| source["name"] == self.server.source()).context("no source")?;
        let shown = format!("{}, {}, {}", source["state"], source["refused_count"], status["leaving"]);
        let settled = source["state"] == "present" && source["refused_count"] == 0 && status["leaving"] == 0;
        self.checks.check("source: state, refused; workers that leave", shown, settled);
        Ok(())
    }

    /// Returns the number of eligible workers as soon as all are eligible, or after a time limit.
    async fn eligible(&self, count: u64) -> anyhow::Result<u64> {
        let began = Instant::now();
        loop {
            let workers = self.workers().await?;
            let eligible = workers.iter().filter(|worker| worker["ineligible"].is_null()).count() as u64;
            if (eligible == count && workers.len() as u64 == count) || began.elapsed() > PATIENCE {
                return Ok(eligible);
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    async fn workers(&self) -> anyhow::Result<Vec<Value>> {
        let mut list = self.fleet.admin.json("/workers").await?;
        serde_json::from_value(list["workers"].take()).context("/workers lists no workers")
    }

    /// Reads the decisions that the gateway keeps.
    async fn read_decisions(&mut self) -> anyhow::Result<()> {
        self.decisions.read(&self.fleet, 1_000).await
    }
}
