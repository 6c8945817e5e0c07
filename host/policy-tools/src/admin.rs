//! `pointsman policy reload`, `rollback` and `promote`: ask a running gateway through its admin listener.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context as _;
use bytes::Bytes;
use clap::Args;
use http::{Request, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::output::print;

/// Longest time to wait for the gateway, which may compile a policy before it answers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// Characters of a path segment or query value that are escaped.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');
/// Longest answer that is printed, bytes.
const MAX_ANSWER_BYTES: usize = 1 << 20;

/// A running gateway.
#[derive(Debug, Args)]
pub(crate) struct Gateway {
    /// Address of the gateway's admin listener.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9090")]
    admin: String,
    /// File with the admin token.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// Arguments of `reload`.
#[derive(Debug, Args)]
pub struct ReloadArgs {
    #[command(flatten)]
    gateway: Gateway,
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
    gateway: Gateway,
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
    gateway: Gateway,
}

impl ReloadArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        self.gateway.post("/policies/reload")
    }
}

impl RollbackArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let query = query(&[("lane", Some(&self.lane)), ("model", self.model.as_ref())]);
        self.gateway.post(&format!("/policies/{}/rollback{query}", encoded(&self.slot)))
    }
}

impl PromoteArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let query = query(&[("from", self.from.as_ref()), ("model", self.model.as_ref())]);
        self.gateway.post(&format!("/policies/{}/promote{query}", encoded(&self.slot)))
    }
}

impl Gateway {
    /// Sends the request and prints the answer. Returns a failure if the gateway refuses.
    fn post(&self, path: &str) -> anyhow::Result<ExitCode> {
        let url = format!("{}{path}", self.admin.trim_end_matches('/'));
        let mut request = Request::post(&url).header(header::CONTENT_TYPE, "application/json");
        if let Some(file) = &self.token_file {
            let token = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
            request = request.header(header::AUTHORIZATION, format!("Bearer {}", token.trim()));
        }
        let request = request.body(Empty::<Bytes>::new()).with_context(|| url.clone())?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (status, body) = runtime.block_on(async {
            let client = Client::builder(TokioExecutor::new()).build_http();
            let exchange = async {
                let response = client.request(request).await?;
                let (parts, body) = response.into_parts();
                let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await;
                anyhow::Ok((parts.status, body.map_err(|error| anyhow::anyhow!(error))?.to_bytes()))
            };
            let answer = tokio::time::timeout(ANSWER_TIMEOUT, exchange).await;
            let answer = answer.with_context(|| format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()));
            answer.and_then(|exchange| exchange).with_context(|| format!("cannot reach the gateway at {url}"))
        })?;
        print(&format!("{}\n", String::from_utf8_lossy(&body)))?;
        Ok(if status.is_success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Builds a query string from the values that are given.
fn query(pairs: &[(&str, Option<&String>)]) -> String {
    let given = pairs.iter().filter_map(|(key, value)| Some(format!("{key}={}", encoded((*value)?))));
    let given: Vec<String> = given.collect();
    if given.is_empty() { String::new() } else { format!("?{}", given.join("&")) }
}

fn encoded(value: &str) -> String {
    utf8_percent_encode(value, RESERVED).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_escapes_values_and_omits_absent_keys() {
        let model = "org/na me".to_owned();
        assert_eq!(query(&[("from", None), ("model", Some(&model))]), "?model=org%2Fna%20me");
        assert_eq!(query(&[("from", None)]), "");
    }
}
