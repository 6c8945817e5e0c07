//! `pointsman policy reload`, `rollback` and `promote`: ask a running gateway through its admin listener.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use pointsman_admin_cli::{GatewayArgs, query, segment};
use pointsman_cli::print;

/// Longest time to wait for the gateway, which may compile a policy before it answers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// Arguments of `reload`.
#[derive(Debug, Args)]
pub struct ReloadArgs {
    #[command(flatten)]
    gateway: GatewayArgs,
}

/// Arguments of `rollback`.
#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// Slot: prefill, decode, aggregated or decode-override.
    slot: String,
    /// Model, for a slot of one model.
    #[arg(long)]
    model: Option<String>,
    /// Lane of the slot: active, canary or shadow.
    #[arg(long, default_value = "active")]
    lane: String,
    #[command(flatten)]
    gateway: GatewayArgs,
}

/// Arguments of `promote`.
#[derive(Debug, Args)]
pub struct PromoteArgs {
    /// Slot: prefill, decode, aggregated or decode-override.
    slot: String,
    /// Model, for a slot of one model.
    #[arg(long)]
    model: Option<String>,
    /// Lane to promote: canary or shadow; required if the slot has both.
    #[arg(long)]
    from: Option<String>,
    #[command(flatten)]
    gateway: GatewayArgs,
}

impl ReloadArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        post(&self.gateway, "/policies/reload")
    }
}

impl RollbackArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let query = query(&[("lane", Some(&self.lane)), ("model", self.model.as_deref())]);
        post(&self.gateway, &format!("/policies/{}/rollback{query}", segment(&self.slot)))
    }
}

impl PromoteArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let query = query(&[("from", self.from.as_deref()), ("model", self.model.as_deref())]);
        post(&self.gateway, &format!("/policies/{}/promote{query}", segment(&self.slot)))
    }
}

/// Sends the request and prints the answer. Returns a failure if the gateway refuses.
fn post(gateway: &GatewayArgs, path: &str) -> anyhow::Result<ExitCode> {
    let gateway = gateway.client()?.with_timeout(ANSWER_TIMEOUT);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on(gateway.post(path))?;
    print(&answer.text())?;
    Ok(if answer.succeeded() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
