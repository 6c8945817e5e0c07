//! `pointsman policy reload`, `rollback` and `promote`: ask a running gateway through its admin listener.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use pointsman_admin_cli::{Answer, GatewayArgs, query, report_gateway_error, segment};
use pointsman_cli::print;

use crate::report::Report;

/// Longest time to wait for the gateway, which may compile a policy before it answers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// Arguments of `reload`.
#[derive(Debug, Args)]
pub struct ReloadArgs {
    /// Print the JSON of the answer unchanged.
    #[arg(long)]
    json: bool,
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
    #[arg(long, default_value = "active", conflicts_with = "undo")]
    lane: String,
    /// Let the policy run again that the slot rolled back last.
    #[arg(long)]
    undo: bool,
    /// Print the JSON of the answer unchanged.
    #[arg(long)]
    json: bool,
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
    /// Print the JSON of the answer unchanged.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

impl ReloadArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        ask(&self.gateway, Method::Post, "/policies/reload", self.json)
    }
}

impl RollbackArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let (method, lane) =
            if self.undo { (Method::Delete, None) } else { (Method::Post, Some(&*self.lane)) };
        let query = query(&[("lane", lane), ("model", self.model.as_deref())]);
        ask(&self.gateway, method, &format!("/policies/{}/rollback{query}", segment(&self.slot)), self.json)
    }
}

impl PromoteArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let query = query(&[("from", self.from.as_deref()), ("model", self.model.as_deref())]);
        let path = format!("/policies/{}/promote{query}", segment(&self.slot));
        ask(&self.gateway, Method::Post, &path, self.json)
    }
}

enum Method {
    Post,
    Delete,
}

/// Sends the request and prints what it did. Returns a failure if the gateway refuses.
fn ask(gateway: &GatewayArgs, method: Method, path: &str, json: bool) -> anyhow::Result<ExitCode> {
    let gateway = gateway.client()?.with_timeout(ANSWER_TIMEOUT);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on(async {
        match method {
            Method::Post => gateway.post(path).await,
            Method::Delete => gateway.delete(path).await,
        }
    });
    report_gateway_error(answer.map_err(Into::into).and_then(|answer| print_answer(&answer, json)))
}

fn print_answer(answer: &Answer, json: bool) -> anyhow::Result<ExitCode> {
    let report: Report = answer.read()?;
    print(&if json { answer.text() } else { report.sentences() })?;
    Ok(ExitCode::SUCCESS)
}
