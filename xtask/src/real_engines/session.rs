//! First steps of each command with real engines: programs, directory, prompts, and the answers of one plain
//! engine.

use std::path::PathBuf;

use anyhow::ensure;
use serde_json::json;
use tempfile::TempDir;

use super::{Options, PATIENT, RealEngine, checks, continuations::Form};
use crate::{
    fleet::{self, Fleet},
    setup,
    table::Checks,
};

/// One run of a command.
#[derive(Debug)]
pub(crate) struct Session {
    bin: PathBuf,
    /// Logs, configurations and policies of the run.
    pub(crate) dir: TempDir,
    pub(crate) prompts: Vec<String>,
    pub(crate) checks: Checks,
}

impl Session {
    /// Builds the programs of the run. `engine` names its directory.
    pub(crate) fn begin(engine: &str, options: &Options) -> anyhow::Result<Self> {
        ensure!(options.prompts > 0, "--prompts 0 compares nothing: pass at least 1");
        setup::run()?;
        Ok(Self {
            bin: fleet::build("release")?,
            dir: tempfile::Builder::new().prefix(&format!("pointsman-{engine}-")).tempdir()?,
            prompts: (0..options.prompts).map(checks::prompt).collect(),
            checks: Checks::default(),
        })
    }

    /// Starts the gateway in front of engines.
    pub(crate) async fn gateway(&self, workers: &[String]) -> anyhow::Result<Fleet> {
        fleet::gateway(&self.bin, self.dir.path(), PATIENT, workers).await
    }

    /// Starts a gateway that continues streams in one form.
    pub(crate) async fn continuing(&self, form: Form, workers: &[String]) -> anyhow::Result<Fleet> {
        fleet::gateway(&self.bin, self.dir.path(), &form.config(), workers).await
    }

    /// Returns the answers of one plain engine, and a gateway with this engine as its only `worker`. Also
    /// tests that gateway.
    pub(crate) async fn plain_answers(
        &mut self,
        engine: &RealEngine,
        worker: String,
    ) -> anyhow::Result<(Vec<Vec<u64>>, Fleet)> {
        let expected = checks::answers(&engine.client(), &self.prompts).await?;
        let fleet = self.gateway(&[worker]).await?;
        let body = json!({
            "model": "tiny", "stream": true, "max_tokens": 12, "temperature": 0, "ignore_eos": true,
            "stream_options": { "include_usage": true },
            "messages": [{ "role": "user", "content": checks::prompt(0) }],
        });
        let streamed = fleet.client.stream_chat(&[], body.to_string()).await;
        let shown = streamed.problem.unwrap_or_else(|| format!("{} events", streamed.events));
        self.checks.check("one plain engine through the gateway, streamed", shown, streamed.complete);
        Ok((expected, fleet))
    }
}
