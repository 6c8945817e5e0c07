//! `[decisions]`.

use pointsman_routing::Decisions as Ring;

use super::Problems;
use crate::config::{
    Decisions,
    settings::{DecisionLogSettings, DecisionSettings},
};

/// Smallest limit of recorded inputs in bytes: less could not hold the inputs of one large decision.
const MIN_DECISION_BYTES: usize = 65_536;
/// Smallest size of a file of the log in bytes: less could not hold the record of one large request.
const MIN_FILE_BYTES: u64 = 1024 * 1024;

impl Problems {
    pub(super) fn decisions(&mut self, decisions: &Decisions) -> (DecisionSettings, DecisionLogSettings) {
        let Decisions { keep, bytes, ref facts, ref log_dir, log_file_bytes, log_total_bytes, ref log_salt } =
            *decisions;
        for (index, fact) in facts.iter().enumerate() {
            if let Err(unknown) = Ring::facts(&[fact]) {
                self.add(format!("decisions.facts[{index}]"), unknown.to_string());
            }
        }
        if keep > 0 && bytes < MIN_DECISION_BYTES {
            let message = format!(
                "`{bytes}` is too small: expected {MIN_DECISION_BYTES} or more, or `keep = 0` to record nothing"
            );
            self.add("decisions.bytes", message);
        }
        if log_file_bytes < MIN_FILE_BYTES {
            let message = format!("`{log_file_bytes}` is too small: expected {MIN_FILE_BYTES} or more");
            self.add("decisions.log_file_bytes", message);
        }
        // The oldest file is removed before another one begins.
        if log_total_bytes / 2 < log_file_bytes {
            let message = format!(
                "`{log_total_bytes}` is too small for two files of decisions.log_file_bytes ({log_file_bytes}): \
                 expected twice that or more"
            );
            self.add("decisions.log_total_bytes", message);
        }
        if log_dir.as_ref().is_some_and(|dir| dir.as_os_str().is_empty()) {
            self.add("decisions.log_dir", "the path is empty: name a directory, or leave the key out");
        }
        if log_salt.as_ref().is_some_and(|salt| salt.expose().is_empty()) {
            let message =
                "the salt is empty: everyone could compute the ids; leave the key out to have one made";
            self.add("decisions.log_salt", message);
        }
        let log = DecisionLogSettings {
            dir: log_dir.clone(),
            file_bytes: log_file_bytes,
            total_bytes: log_total_bytes,
            salt: log_salt.clone(),
        };
        (DecisionSettings { keep, bytes, facts: facts.clone() }, log)
    }
}
