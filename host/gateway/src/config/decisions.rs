//! `[decisions]`: the record of decisions in memory, and their log on disk.

use std::path::PathBuf;

use pointsman_config_file::{Report, section};
use pointsman_routing::Decisions as Ring;

use super::Secret;

/// Smallest limit of recorded inputs in bytes: less could not hold the inputs of one large decision.
const MIN_DECISION_BYTES: usize = 65_536;
/// Smallest size of a file of the log in bytes: less could not hold the record of one large request.
const MIN_FILE_BYTES: u64 = 1024 * 1024;
/// Size from which a file of the log is not continued, bytes.
const MAX_FILE_BYTES: u64 = 64 * 1024 * 1024;

/// Record of decisions, see receipts.md.
#[section(rules)]
pub struct Decisions {
    /// Number of decisions kept; 0: none.
    #[key(default = 10_000)]
    pub keep: usize,
    /// Memory in bytes for the inputs of decisions; beyond it, the oldest decisions lose their inputs; 65536
    /// or more.
    #[key(default = 32 * 1024 * 1024)]
    pub bytes: usize,
    /// Facts recorded for every leg, even if its policy does not ask for them; for `pointsman policy run`.
    pub facts: Vec<String>,
    /// Directory of the decision log: requests, decisions and outcomes, for `pointsman trace export`;
    /// default: no log. One directory for each gateway; made with mode 0700.
    #[key(example = "\"/var/log/pointsman\"")]
    pub log_dir: Option<PathBuf>,
    /// Size of all files of the log in bytes; the oldest are removed. A file ends at 64 MiB, or at half of
    /// this.
    #[key(default = 1024 * 1024 * 1024, range = 2 * MIN_FILE_BYTES..)]
    pub log_total_bytes: u64,
    /// Salt of the ids in the log; default: a random one, kept in log_dir/salt.
    #[key(example = "\"…\"")]
    pub log_salt: Option<Secret>,
}

/// The decision log.
#[derive(Clone, Debug, PartialEq)]
pub struct DecisionLogSettings {
    /// Its directory; `None` if no log.
    pub dir: Option<PathBuf>,
    /// Size from which a file is not continued, bytes.
    pub file_bytes: u64,
    /// Size of all files together, bytes.
    pub total_bytes: u64,
    /// Salt of block ids; `None`: one that is kept in the directory.
    pub salt: Option<Secret>,
}

impl Decisions {
    /// Returns the settings of the log.
    #[must_use]
    pub fn log(&self) -> DecisionLogSettings {
        DecisionLogSettings {
            dir: self.log_dir.clone(),
            // The oldest file is removed before another one begins.
            file_bytes: MAX_FILE_BYTES.min(self.log_total_bytes / 2),
            total_bytes: self.log_total_bytes,
            salt: self.log_salt.clone(),
        }
    }

    /// Returns whether both ask for the same record in memory.
    pub(crate) fn is_same_record(&self, other: &Self) -> bool {
        (self.keep, self.bytes, &self.facts) == (other.keep, other.bytes, &other.facts)
    }

    fn rules(&self, report: &mut Report<'_>) {
        for (index, fact) in self.facts.iter().enumerate() {
            if let Err(unknown) = Ring::facts(&[fact]) {
                report.add(&format!("facts[{index}]"), unknown.to_string());
            }
        }
        if self.keep > 0 && self.bytes < MIN_DECISION_BYTES {
            let message = format!(
                "`{}` is too small: expected {MIN_DECISION_BYTES} or more, or `keep = 0` to record nothing",
                self.bytes
            );
            report.add("bytes", message);
        }
        if self.log_dir.as_ref().is_some_and(|dir| dir.as_os_str().is_empty()) {
            report.add("log_dir", "the path is empty: name a directory, or leave the key out");
        }
        if self.log_salt.as_ref().is_some_and(|salt| salt.expose().is_empty()) {
            let message =
                "the salt is empty: everyone could compute the ids; leave the key out to have one made";
            report.add("log_salt", message);
        }
    }
}
