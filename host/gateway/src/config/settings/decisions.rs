//! `[decisions]`: the record in memory and the log on disk.

use std::path::PathBuf;

use crate::config::Secret;

settings! {
    /// The record of decisions.
    DecisionSettings {
        /// Number of decisions kept; 0: none.
        "decisions.keep" keep: usize,
        /// Memory limit of the recorded inputs in bytes.
        "decisions.bytes" bytes: usize,
        /// Facts recorded with each decision, in addition to those the policy reads.
        "decisions.facts" facts: Vec<String>,
    }
}

settings! {
    /// The decision log.
    DecisionLogSettings {
        /// Its directory; `None` if no log.
        "decisions.log_dir" dir: Option<PathBuf>,
        /// Size from which a file is not continued, bytes.
        "decisions.log_file_bytes" file_bytes: u64,
        /// Size of all files together, bytes.
        "decisions.log_total_bytes" total_bytes: u64,
        /// Salt of block ids; `None`: one that is kept in the directory.
        "decisions.log_salt" salt: Option<Secret>,
    }
}
