//! `pointsman policy reload`, `rollback`, `promote`: an operator's word to a running daemon, over its admin listener.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use bytes::Bytes;
use clap::Args;
use http::{Request, header};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};

use crate::output::print;

/// Which daemon.
#[derive(Debug, Args)]
pub(crate) struct Gateway {
    /// Its admin listener.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9090")]
    admin: String,
    /// File with its admin token.
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
    /// prefill, decode, aggregated or decode-override.
    slot: String,
    /// The model whose own slot is meant.
    #[arg(long)]
    model: Option<String>,
    /// active, canary or shadow.
    #[arg(long, default_value = "active")]
    lane: String,
    #[command(flatten)]
    gateway: Gateway,
}

/// Which slot, and of which daemon.
#[derive(Debug, Args)]
pub struct PromoteArgs {
    /// prefill, decode, aggregated or decode-override.
    slot: String,
    /// The model whose own slot is meant.
    #[arg(long)]
    model: Option<String>,
    /// canary or shadow; needed when both are there.
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
    /// Prints the daemon's answer; a failure when it says no.
    fn post(&self, path: &str) -> anyhow::Result<ExitCode> {
        let url = format!("{}{path}", self.admin.trim_end_matches('/'));
        let mut request = Request::post(&url);
        if let Some(file) = &self.token_file {
            let token = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
            request = request.header(header::AUTHORIZATION, format!("Bearer {}", token.trim()));
        }
        let request = request.body(Empty::<Bytes>::new()).with_context(|| url.clone())?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (status, body) = runtime.block_on(async {
            let client = Client::builder(TokioExecutor::new()).build_http();
            let response = client.request(request).await.with_context(|| url.clone())?;
            let (parts, body) = response.into_parts();
            anyhow::Ok((parts.status, body.collect().await?.to_bytes()))
        })?;
        print(&format!("{}\n", String::from_utf8_lossy(&body)))?;
        Ok(if status.is_success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn query(pairs: &[(&str, Option<&String>)]) -> String {
    let given = pairs.iter().filter_map(|(key, value)| Some(format!("{key}={}", encoded((*value)?))));
    let given: Vec<String> = given.collect();
    if given.is_empty() { String::new() } else { format!("?{}", given.join("&")) }
}

/// Percent-encoded, all but plain letters, digits and a few marks.
fn encoded(value: &str) -> String {
    let one = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    value.bytes().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_with_a_slash_are_encoded_and_absent_keys_left_out() {
        let model = "org/na me".to_owned();
        assert_eq!(query(&[("from", None), ("model", Some(&model))]), "?model=org%2Fna%20me");
        assert_eq!(query(&[("from", None)]), "");
    }
}
