//! Writes the answers of a real engine into files, which tests read as fixtures.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt as _;
use serde_json::Value;

use super::RealEngine;

/// Writes answers into a directory.
#[derive(Debug)]
pub(crate) struct Recorder {
    dir: PathBuf,
}

impl Recorder {
    /// Returns a recorder for a directory, and creates the directory.
    pub(crate) fn new(dir: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir)?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Writes the answer to a GET, whatever its status.
    pub(crate) async fn get(&self, engine: &RealEngine, path: &str, file: &str) -> anyhow::Result<()> {
        self.write(engine, Method::GET, path, Bytes::new(), file).await
    }

    /// Writes the answer to a POST, whatever its status.
    pub(crate) async fn post(
        &self,
        engine: &RealEngine,
        path: &str,
        body: &Value,
        file: &str,
    ) -> anyhow::Result<()> {
        self.write(engine, Method::POST, path, body.to_string().into(), file).await
    }

    async fn write(
        &self,
        engine: &RealEngine,
        method: Method,
        path: &str,
        body: Bytes,
        file: &str,
    ) -> anyhow::Result<()> {
        let answer = engine.client().send(method, path, &[], body).await?;
        let bytes = answer.into_body().collect().await?.to_bytes();
        Ok(std::fs::write(self.dir.join(file), bytes)?)
    }
}
