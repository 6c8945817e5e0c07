//! `pointsman drain` and `undrain`.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use humantime_serde::re::humantime;
use serde::de::IgnoredAny;
use tokio::time::Instant;

use crate::{
    api::Workers,
    block_on,
    gateway::{Gateway, GatewayArgs},
    print,
    worker_name::id_of,
};

/// Time between two looks at the worker's requests.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Arguments of `drain`.
#[derive(Debug, Args)]
pub struct DrainArgs {
    #[command(flatten)]
    which: Which,
    /// Wait until no request of this gateway runs on the worker.
    #[arg(long)]
    wait: bool,
    /// Longest wait; then the exit code is 1, and the worker stays draining.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration, requires = "wait")]
    timeout: Duration,
    /// Print the JSON of the answer unchanged.
    #[arg(long, conflicts_with = "wait")]
    json: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

/// Arguments of `undrain`.
#[derive(Debug, Args)]
pub struct UndrainArgs {
    #[command(flatten)]
    which: Which,
    /// Print the JSON of the answer unchanged.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

/// Worker of the command.
#[derive(Debug, Args)]
struct Which {
    /// Id, URL or address of the worker, as `pointsman workers` shows them, or a beginning that no other
    /// worker has.
    worker: String,
}

impl UndrainArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let gateway = self.gateway.client()?;
        block_on(async {
            let id = id_of(&gateway, &self.which.worker).await?;
            let answer = gateway.delete(&format!("/workers/{id}/drain")).await?;
            if self.json {
                return answer.print_json();
            }
            answer.read::<IgnoredAny>()?;
            print(&format!("worker {id} gets requests again\n"))?;
            Ok(ExitCode::SUCCESS)
        })
    }
}

impl DrainArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let gateway = self.gateway.client()?;
        block_on(async {
            let id = id_of(&gateway, &self.which.worker).await?;
            let answer = gateway.post(&format!("/workers/{id}/drain")).await?;
            if self.json {
                return answer.print_json();
            }
            answer.read::<IgnoredAny>()?;
            if self.wait {
                return self.finished(&gateway, id).await;
            }
            print(&format!("worker {id} is draining; it gets no new request\n"))?;
            Ok(ExitCode::SUCCESS)
        })
    }

    /// Waits until the worker has no request.
    async fn finished(&self, gateway: &Gateway, id: u64) -> anyhow::Result<ExitCode> {
        let begun = Instant::now();
        loop {
            let workers: Workers = gateway.get("/workers").await?.read()?;
            let worker = workers.workers.iter().find(|worker| worker.id == id);
            let Some(worker) = worker else {
                print(&format!("worker {id} left the gateway\n"))?;
                return Ok(ExitCode::SUCCESS);
            };
            if !worker.draining {
                print(&format!("worker {id} is not draining any more: another operator ended the drain\n"))?;
                return Ok(ExitCode::FAILURE);
            }
            let active = worker.active();
            let waited = begun.elapsed();
            if active == 0 {
                print(&format!("worker {id} has no request after {:.1} s\n", waited.as_secs_f64()))?;
                return Ok(ExitCode::SUCCESS);
            }
            if waited >= self.timeout {
                let seconds = waited.as_secs_f64();
                print(&format!(
                    "worker {id} still has {active} requests after {seconds:.1} s; it stays draining\n"
                ))?;
                return Ok(ExitCode::FAILURE);
            }
            tokio::time::sleep(POLL_INTERVAL.min(self.timeout - waited)).await;
        }
    }
}
