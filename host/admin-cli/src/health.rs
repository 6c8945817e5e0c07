//! `pointsman health`: a check for container runtimes and load balancers that run a command.

use std::{process::ExitCode, time::Duration};

use clap::Args;

use crate::{answer::Answer, block_on, conclude, gateway::GatewayArgs};

/// Arguments of `health`.
#[derive(Debug, Args)]
pub struct HealthArgs {
    /// Ask whether requests can be served (`/readyz`), not only whether the process answers (`/healthz`).
    #[arg(long)]
    ready: bool,
    /// Longest time for the answer, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 3)]
    timeout: u64,
    #[command(flatten)]
    gateway: GatewayArgs,
}

impl HealthArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let gateway = self.gateway.client()?.with_timeout(Duration::from_secs(self.timeout));
        let path = if self.ready { "/readyz" } else { "/healthz" };
        let answer: Answer = block_on(async { Ok(gateway.get(path).await?) })?;
        let code = if answer.succeeded() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        conclude(&format!("{}\n", answer.text().trim_end()), code)
    }
}
