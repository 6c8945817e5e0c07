//! Workers of a file that is read again and again.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use pointsman_workers::WorkerSpec;
use serde::Deserialize;

use crate::{
    fleet::Reporter,
    found::{Found, Read, SourceSnapshot},
    source::Source,
};

mod llm_d;

/// Largest file in bytes.
const MAX_FILE_BYTES: u64 = 8 * 1024 * 1024;

/// Format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    /// `workers`: a list of workers with the keys of the configuration.
    Workers,
    /// The endpoints file of llm-d's router.
    LlmD,
}

/// A file of workers.
#[derive(Clone, Debug, PartialEq)]
pub struct FileSourceConfig {
    /// Path. The file's extension decides how it is parsed: `.toml`, `.json`, `.yaml` or `.yml`.
    pub path: PathBuf,
    /// Format of the file.
    pub format: FileFormat,
    /// Interval at which the file is read.
    pub interval: Duration,
    /// Values of keys that an endpoint of llm-d's file does not have.
    pub defaults: BTreeMap<String, String>,
}

/// Reads a file of workers.
#[derive(Debug)]
pub struct FileSource {
    config: FileSourceConfig,
}

/// Our own format.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkersFile {
    workers: Vec<WorkerSpec>,
}

impl FileSource {
    /// Creates the source; nothing is read yet.
    #[must_use]
    pub fn new(config: FileSourceConfig) -> Self {
        Self { config }
    }

    async fn read(&self) -> Result<Vec<u8>, String> {
        use tokio::io::AsyncReadExt as _;
        let problem = |error: std::io::Error| error.to_string();
        let file = tokio::fs::File::open(&self.config.path).await.map_err(problem)?;
        let mut bytes = Vec::new();
        file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).await.map_err(problem)?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(format!("it has more than {MAX_FILE_BYTES} bytes: split it"));
        }
        Ok(bytes)
    }

    fn parse(&self, bytes: &[u8]) -> Result<Vec<Found>, String> {
        let FileSourceConfig { path, format, defaults, .. } = &self.config;
        match format {
            FileFormat::Workers => {
                let file: WorkersFile = parse(path, bytes)?;
                Ok(file.workers.into_iter().map(Found::staying).collect())
            }
            FileFormat::LlmD => llm_d::workers(parse(path, bytes)?, defaults),
        }
    }
}

impl Source for FileSource {
    async fn run(self, reporter: Reporter) {
        let shown = self.config.path.display().to_string();
        // The bytes in force, and those of the last reading.
        let (mut applied, mut before) = (None, None);
        let mut first = true;
        loop {
            match self.read().await {
                // A file that is being written differs between two readings.
                Ok(bytes) if first || before.as_ref() == Some(&bytes) => {
                    if applied.as_ref() == Some(&bytes) {
                        reporter.alive();
                    } else {
                        match self.parse(&bytes) {
                            Ok(workers) => {
                                let read = Read::Whole;
                                reporter.present(SourceSnapshot { workers, refused: Vec::new(), read });
                                applied = Some(bytes.clone());
                            }
                            Err(problem) => reporter.away(format!("parsing {shown}: {problem}")),
                        }
                    }
                    before = Some(bytes);
                }
                Ok(bytes) => before = Some(bytes),
                Err(problem) => {
                    reporter.away(format!("reading {shown}: {problem}"));
                    (applied, before) = (None, None);
                }
            }
            first = false;
            tokio::select! {
                () = tokio::time::sleep(self.config.interval) => {}
                () = reporter.recheck() => applied = None,
            }
        }
    }
}

/// Parses a file in the syntax that its extension names.
fn parse<T: for<'de> Deserialize<'de>>(path: &Path, bytes: &[u8]) -> Result<T, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| format!("it is not UTF-8: {error}"))?;
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => toml::from_str(text).map_err(|error| error.to_string()),
        Some("json") => serde_json::from_str(text).map_err(|error| error.to_string()),
        Some("yaml" | "yml") => serde_yaml_ng::from_str(text).map_err(|error| error.to_string()),
        _ => Err("its syntax is not known: expected the extension toml, json, yaml or yml".to_owned()),
    }
}

#[cfg(test)]
mod tests;
