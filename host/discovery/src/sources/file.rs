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
    sources::{blocking::FileReader, scheme::Scheme},
};

mod llm_d;
mod syntax;

pub use syntax::has_known_syntax;
use syntax::{WorkersFile, parse};

/// Largest file in bytes.
const MAX_FILE_BYTES: u64 = 8 * 1024 * 1024;
/// How long one reading may take.
const READ_LIMIT: Duration = Duration::from_secs(5);
/// Number of readings in a row that differ from the one before, after which the source counts as away.
const MAX_CHANGES: u32 = 5;

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
    file: FileReader,
    /// Last workers of the endpoints of llm-d's file.
    known: llm_d::Known,
    /// The bytes in force.
    applied: Option<Vec<u8>>,
    before: Option<Reading>,
    /// Number of readings in a row that differ from the one before.
    changes: u32,
    /// Whether the first reading has begun.
    begun: bool,
}

/// The last reading of a file.
#[derive(Debug)]
struct Reading {
    bytes: Vec<u8>,
    parsed: Result<SourceSnapshot, String>,
}

impl FileSource {
    /// Creates the source; nothing is read yet.
    #[must_use]
    pub fn new(config: FileSourceConfig) -> Self {
        Self {
            file: FileReader::new(config.path.clone(), MAX_FILE_BYTES),
            config,
            known: llm_d::Known::new(),
            applied: None,
            before: None,
            changes: 0,
            begun: false,
        }
    }

    /// Parses the file. `known`: the last workers of its endpoints, which change with it.
    fn parse(&self, bytes: &[u8], known: &mut llm_d::Known) -> Result<SourceSnapshot, String> {
        let FileSourceConfig { path, format, scheme, defaults, .. } = &self.config;
        let parsed = match format {
            FileFormat::Workers => parse(path, bytes).map(|WorkersFile { workers }| {
                ((1..).zip(workers.into_iter().map(Found::staying)).collect(), Vec::new())
            }),
            FileFormat::LlmD => {
                parse(path, bytes).map(|file| llm_d::workers(&file, (*scheme, defaults), known))
            }
        };
        match parsed {
            Ok((listed, refused)) => Ok(without_repeated(listed, refused)),
            Err(problem) => Err(format!("parsing {}: {problem}", path.display())),
        }
    }

    /// Reads the file, and applies it if it is another one than before and complete.
    async fn step(&mut self, reporter: &Reporter) {
        let is_first = !std::mem::replace(&mut self.begun, true);
        let bytes = match self.file.read(READ_LIMIT).await {
            Ok(bytes) => bytes,
            Err(problem) => {
                reporter.away(problem);
                (self.applied, self.before, self.changes) = (None, None, 0);
                return;
            }
        };
        if self.applied.as_ref() == Some(&bytes) {
            reporter.alive();
            (self.before, self.changes) = (None, 0);
            return;
        }
        let mut known = self.known.clone();
        let parsed = self.parse(&bytes, &mut known);
        // A file that is being written differs between two readings. One that is generated again and again
        // may differ in a comment.
        let is_complete =
            is_first || self.before.as_ref().is_some_and(|before| before.is_same(&bytes, &parsed));
        self.changes = if is_complete { 0 } else { self.changes + 1 };
        self.before = Some(Reading { bytes: bytes.clone(), parsed: parsed.clone() });
        match parsed {
            Ok(snapshot) if is_complete => {
                reporter.present(snapshot);
                (self.applied, self.known) = (Some(bytes), known);
            }
            Err(problem) if is_complete => reporter.away(problem),
            _ if self.changes >= MAX_CHANGES => {
                reporter.away(format!(
                    "reading {}: its workers differ in each of {} readings, one each {:?}; write it less often",
                    self.config.path.display(),
                    self.changes + 1,
                    self.config.interval
                ));
                self.applied = None;
            }
            _ => {}
        }
    }
}

impl Reading {
    /// Whether the next reading has the same bytes, or other bytes with the same workers.
    fn is_same(&self, bytes: &[u8], parsed: &Result<SourceSnapshot, String>) -> bool {
        self.bytes == bytes || matches!((&self.parsed, parsed), (Ok(before), Ok(now)) if before == now)
    }
}

impl Source for FileSource {
    async fn run(mut self, reporter: Reporter) {
        loop {
            self.step(&reporter).await;
            tokio::select! {
                () = tokio::time::sleep(self.config.interval) => {}
                () = reporter.recheck() => self.applied = None,
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
