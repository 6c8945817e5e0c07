//! Workers of a file that is read again and again.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    time::Duration,
};

use crate::{
    fleet::Reporter,
    found::{Found, Read, Refusal, SourceSnapshot},
    source::Source,
    sources::scheme::Scheme,
};

mod llm_d;
mod syntax;

pub use syntax::has_known_syntax;
use syntax::{WorkersFile, parse};

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
    /// Scheme of the URLs of workers in llm-d's file.
    pub scheme: Scheme,
    /// Values of keys that an endpoint of llm-d's file does not have.
    pub defaults: BTreeMap<String, String>,
}

/// Reads a file of workers.
#[derive(Debug)]
pub struct FileSource {
    config: FileSourceConfig,
    /// Last workers of the endpoints of llm-d's file.
    known: llm_d::Known,
}

impl FileSource {
    /// Creates the source; nothing is read yet.
    #[must_use]
    pub fn new(config: FileSourceConfig) -> Self {
        Self { config, known: llm_d::Known::new() }
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

    fn parse(&mut self, bytes: &[u8]) -> Result<SourceSnapshot, String> {
        let FileSourceConfig { path, format, scheme, defaults, .. } = &self.config;
        let (listed, refused) = match format {
            FileFormat::Workers => {
                let WorkersFile { workers } = parse(path, bytes)?;
                ((1..).zip(workers.into_iter().map(Found::staying)).collect(), Vec::new())
            }
            FileFormat::LlmD => llm_d::workers(&parse(path, bytes)?, (*scheme, defaults), &mut self.known),
        };
        Ok(without_repeated(listed, refused))
    }
}

impl Source for FileSource {
    async fn run(mut self, reporter: Reporter) {
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
                            Ok(snapshot) => {
                                reporter.present(snapshot);
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

/// Refuses workers that a file lists a second time, by their position in its list.
fn without_repeated(listed: Vec<(usize, Found)>, refused: Vec<Refusal>) -> SourceSnapshot {
    let mut snapshot = SourceSnapshot { workers: Vec::new(), refused, read: Read::Whole };
    let (mut ids, mut urls) = (HashMap::new(), HashMap::new());
    for (place, found) in listed {
        let (url, id) = (found.spec.url.clone(), found.spec.id);
        let earlier = urls.get(&url).map(|at| (at, "URL")).or_else(|| ids.get(&id).map(|at| (at, "id")));
        if let Some((earlier, what)) = earlier {
            let problem =
                format!("worker {place} of the file has the {what} of worker {earlier}: remove one of them");
            snapshot.refused.push(Refusal::new(&url, &problem));
        } else {
            urls.insert(url, place);
            ids.insert(id, place);
            snapshot.workers.push(found);
        }
    }
    snapshot
}

#[cfg(test)]
mod tests;
