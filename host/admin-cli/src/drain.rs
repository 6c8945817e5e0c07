//! `pointsman drain`.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use humantime_serde::re::humantime;
use serde::de::IgnoredAny;
use tokio::time::Instant;

use crate::{
    answer::Answer,
    api::Workers,
    block_on,
    gateway::{Gateway, GatewayArgs},
    print,
};

/// Time between two looks at the worker's requests.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Arguments of `drain`.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// Id of the worker, as `pointsman workers` shows it.
    id: u64,
    /// Send requests to the worker again.
    #[arg(long, conflicts_with = "wait")]
    undo: bool,
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

impl DrainArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let gateway = self.gateway.client()?;
        block_on(async {
            let answer = self.change(&gateway).await?;
            if self.json {
                return answer.print_json();
            }
            answer.read::<IgnoredAny>()?;
            if self.wait {
                return self.finished(&gateway).await;
            }
            let done = if self.undo { "gets requests again" } else { "is draining; it gets no new request" };
            print(&format!("worker {} {done}\n", self.id))?;
            Ok(ExitCode::SUCCESS)
        })
    }

    async fn change(&self, gateway: &Gateway) -> anyhow::Result<Answer> {
        let path = format!("/workers/{}/drain", self.id);
        Ok(if self.undo { gateway.delete(&path).await? } else { gateway.post(&path).await? })
    }

    /// Waits until the worker has no request.
    async fn finished(&self, gateway: &Gateway) -> anyhow::Result<ExitCode> {
        let begun = Instant::now();
        loop {
            let workers: Workers = gateway.get("/workers").await?.read()?;
            let worker = workers.workers.iter().find(|worker| worker.id == self.id);
            let Some(worker) = worker else {
                print(&format!("worker {} left the gateway\n", self.id))?;
                return Ok(ExitCode::SUCCESS);
            };
            if !worker.draining {
                print(&format!(
                    "worker {} is not draining any more: another operator ended the drain\n",
                    self.id
                ))?;
                return Ok(ExitCode::FAILURE);
            }
            let active = worker.active();
            let waited = begun.elapsed();
            if active == 0 {
                print(&format!("worker {} has no request after {:.1} s\n", self.id, waited.as_secs_f64()))?;
                return Ok(ExitCode::SUCCESS);
            }
            if waited >= self.timeout {
                let seconds = waited.as_secs_f64();
                print(&format!(
                    "worker {} still has {active} requests after {seconds:.1} s; it stays draining\n",
                    self.id
                ))?;
                return Ok(ExitCode::FAILURE);
            }
            tokio::time::sleep(POLL_INTERVAL.min(self.timeout - waited)).await;
        }
    }
}
