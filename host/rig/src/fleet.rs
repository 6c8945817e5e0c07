//! Real processes on free loopback ports: simulated engines and the gateway.
//!
//! Each [`Process`] ends its own child by its process id when it is dropped, and no other process.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use serde_json::Value;
use tokio::time::{Instant, sleep};

pub use self::{
    engines::EngineSpec,
    process::{End, Process, free_port},
};
use crate::{client::Client, metrics_text::samples, poll::until};

mod engines;
mod process;

/// Longest wait until every worker is eligible: a thousand workers are probed by one gateway on a busy
/// machine.
const READY: Duration = Duration::from_secs(60);

/// The gateway, its engines, and the policy directory that it watches.
#[derive(Debug)]
pub struct Fleet {
    /// The gateway.
    pub gateway: Process,
    /// Its simulated engines.
    pub engines: Vec<Process>,
    /// The folder of policies that the gateway watches.
    pub policies: PathBuf,
    /// Client of the admin port.
    pub admin: Client,
    /// Client of the request port.
    pub client: Client,
}

/// Starts simulated engines and the gateway in front of them.
pub async fn start(bin: &Path, dir: &Path, engines: &[EngineSpec], config: &str) -> anyhow::Result<Fleet> {
    let (mut processes, mut workers) = (Vec::new(), Vec::new());
    for (place, spec) in engines.iter().enumerate() {
        let process = spec.start(bin, dir, place + 1)?;
        workers.push(spec.worker_flag(place + 1, &process.announced));
        processes.push(process);
    }
    let mut fleet = gateway(bin, dir, config, &workers).await?;
    fleet.engines = processes;
    Ok(fleet)
}

/// Starts the gateway in front of running workers and waits until all of them are eligible.
pub async fn gateway(bin: &Path, dir: &Path, config: &str, workers: &[String]) -> anyhow::Result<Fleet> {
    let policies = dir.join("policies");
    std::fs::create_dir_all(&policies)?;
    let file = dir.join("pointsman.toml");
    std::fs::write(&file, config)?;
    let mut command = std::process::Command::new(bin.join("pointsman"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    command.arg("--config").arg(file).arg("--policies").arg(&policies);
    command.env("RUST_LOG", "info,pointsman::access=warn");
    for worker in workers {
        command.args(["--worker", worker]);
    }
    let gateway = Process::announcing("gateway", command, dir)?;
    let admin =
        Client::new(gateway.announced["admin"].as_str().context("the gateway announced no admin port")?);
    let client = Client::new(&gateway.listening());
    let fleet = Fleet { gateway, engines: Vec::new(), policies, admin, client };
    let eligible = || async { Ok(fleet.eligible().await.then_some(())) };
    let all = until("every worker is eligible", READY, eligible).await;
    all.with_context(|| format!("see {}", fleet.gateway.log.display()))?;
    Ok(fleet)
}

impl Fleet {
    /// Address of the admin port, `host:port`.
    pub fn admin_address(&self) -> String {
        self.gateway.announced["admin"].as_str().unwrap_or_default().to_owned()
    }

    /// Installs a policy by renaming it into the watched directory.
    pub fn drop_policy(&self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let staged = self.policies.join(".staged");
        std::fs::write(&staged, bytes)?;
        Ok(std::fs::rename(staged, self.policies.join(name))?)
    }

    /// State of a slot, from the admin port.
    pub async fn slot(&self, name: &str) -> anyhow::Result<Value> {
        let status = self.admin.json("/policies").await?;
        let slots = status["slots"].as_array().context("/policies lists no slots")?;
        let slot = slots.iter().find(|slot| slot["slot"] == name);
        slot.cloned().with_context(|| format!("/policies lists no slot `{name}`"))
    }

    /// Waits until the gateway receives the KV events of so many engines.
    pub async fn kv_feeds(&self, count: usize, limit: Duration) -> anyhow::Result<()> {
        let live = || async {
            let metrics = self.metrics().await?;
            let feeds = samples(&metrics, "pointsman_kv_feed_live");
            Ok((feeds.iter().filter(|one| one.value == 1.0).count() == count).then_some(()))
        };
        let what = format!("the KV events of {count} engines arrive; see {}", self.gateway.log.display());
        until(&what, limit, live).await
    }

    /// Text of `/metrics`.
    pub async fn metrics(&self) -> anyhow::Result<String> {
        self.admin.get("/metrics").await
    }

    /// Waits until no request is booked, and returns how many still were after `limit`.
    pub async fn booked(&self, limit: Duration) -> anyhow::Result<u64> {
        let started = Instant::now();
        loop {
            let booked = active_requests(&self.admin.json("/workers").await?);
            if booked == 0 || started.elapsed() > limit {
                return Ok(booked);
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// A number of the engines' state, summed over the engines that answer.
    pub async fn engines_sum(&self, pointer: &str) -> u64 {
        let mut sum = 0;
        for engine in &self.engines {
            let state = engine.client().json("/sim/state").await.unwrap_or_default();
            let value = state.pointer(pointer);
            sum += value.and_then(|value| value.as_u64().or(value.as_bool().map(u64::from))).unwrap_or(0);
        }
        sum
    }

    /// Lets the processes run on after this command, and returns their process ids.
    pub fn detach(self) -> Vec<u32> {
        let mut all: Vec<Process> = std::iter::once(self.gateway).chain(self.engines).collect();
        all.retain_mut(|process| matches!(process.ended(), Ok(None)));
        all.into_iter().map(Process::detach).collect()
    }

    async fn eligible(&self) -> bool {
        let workers = self.admin.json("/workers").await.unwrap_or_default();
        let workers = workers["workers"].as_array();
        workers.is_some_and(|all| !all.is_empty() && all.iter().all(|one| one["ineligible"].is_null()))
    }
}

fn active_requests(workers: &Value) -> u64 {
    let workers = workers["workers"].as_array().into_iter().flatten();
    let ranks = workers.flat_map(|worker| worker["ranks"].as_array().into_iter().flatten());
    ranks.filter_map(|rank| rank["active_requests"].as_u64()).sum()
}

#[cfg(test)]
mod tests {
    use super::active_requests;

    #[test]
    fn active_requests_are_summed_over_workers_and_ranks() {
        let workers = serde_json::json!({ "workers": [
            { "ranks": [{ "active_requests": 1 }, { "active_requests": 2 }] },
            { "ranks": [{ "active_requests": 4 }] }, { "ranks": [] },
        ]});
        assert_eq!(active_requests(&workers), 7);
    }
}
