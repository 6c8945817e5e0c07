//! Engines, NATS and gateways as processes.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context as _;
use serde_json::Value;
use tokio::{
    net::TcpStream,
    time::{Instant, sleep},
};

use crate::fleet::{self, End, EngineSpec, Fleet, Process, free_port};

/// Engines whose caches hold about a third of the prompts' common beginnings each: where a request goes
/// matters.
const ENGINE: &str = "--blocks 1500 --max-num-seqs 64 --jitter 0.05 --threads 1";
/// Longest wait for gateways to agree.
const PATIENCE: Duration = Duration::from_secs(30);

/// The real server.
pub(crate) struct Nats {
    process: Option<Process>,
    dir: PathBuf,
    pub(crate) port: u16,
}

/// Running engines and the flags that register them.
pub(crate) struct Engines {
    pub(crate) processes: Vec<Process>,
    pub(crate) flags: Vec<String>,
}

impl Nats {
    pub(crate) async fn start(dir: &Path) -> anyhow::Result<Self> {
        let mut nats = Self { process: None, dir: dir.to_owned(), port: free_port()? };
        nats.spawn().await?;
        Ok(nats)
    }

    /// Starts the server on its port.
    pub(crate) async fn spawn(&mut self) -> anyhow::Result<()> {
        let mut command = Command::new("nats-server");
        command.args(["-a", "127.0.0.1", "-p", &self.port.to_string()]);
        let process = Process::logging("nats", command, &self.dir, End::Kill);
        self.process = Some(process.context("starting NATS: install Debian's nats-server")?);
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            anyhow::ensure!(began.elapsed() < PATIENCE, "nats-server does not listen");
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Ends the server as `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.process = None;
    }
}

impl Engines {
    pub(crate) fn start(bin: &Path, dir: &Path, count: usize) -> anyhow::Result<Self> {
        let spec = EngineSpec::new("vllm", "aggregated", ENGINE);
        let mut engines = Self { processes: Vec::new(), flags: Vec::new() };
        for place in 1..=count {
            let process = spec.start(bin, dir, place)?;
            engines.flags.push(spec.worker_flag(place, &process.announced));
            engines.processes.push(process);
        }
        Ok(engines)
    }

    /// Returns the states of the engines that answer.
    pub(crate) async fn states(&self) -> Vec<Value> {
        let mut states = Vec::new();
        for engine in &self.processes {
            states.extend(engine.client().json("/sim/state").await);
        }
        states
    }
}

/// Starts a gateway. `nats`: port of the server that it tells its load over.
pub(crate) async fn gateway(
    bin: &Path,
    dir: &Path,
    number: usize,
    workers: &[String],
    nats: Option<u16>,
) -> anyhow::Result<Fleet> {
    let dir = dir.join(format!("gateway-{number}"));
    std::fs::create_dir_all(&dir)?;
    let replicas = nats.map(|port| {
        format!("[replicas]\nservers = [\"nats://127.0.0.1:{port}\"]\nname = \"gateway-{number}\"\n")
    });
    let config = format!("[server]\nthreads = 1\n{}", replicas.unwrap_or_default());
    fleet::gateway(bin, &dir, &config, workers).await
}

/// Waits until each gateway knows all bookings of all others. Returns how long that took.
pub(crate) async fn agree(gateways: &[&Fleet]) -> anyhow::Result<Duration> {
    let began = Instant::now();
    for gateway in gateways {
        until(gateway, "all gateways know each other", |status| {
            let peers = status["peers"].as_array().map_or(&[][..], Vec::as_slice);
            let in_sync = peers.iter().all(|peer| peer["in_sync"] == true);
            status["connected"] == true && peers.len() + 1 == gateways.len() && in_sync
        })
        .await?;
    }
    Ok(began.elapsed())
}

/// Waits until the exchange of a gateway is in a state. Returns how long that took.
pub(crate) async fn until(
    gateway: &Fleet,
    what: &str,
    fits: impl Fn(&Value) -> bool,
) -> anyhow::Result<Duration> {
    let began = Instant::now();
    loop {
        let status = gateway.admin.json("/replicas").await?;
        if fits(&status) {
            return Ok(began.elapsed());
        }
        anyhow::ensure!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}: {status}");
        sleep(Duration::from_millis(10)).await;
    }
}
