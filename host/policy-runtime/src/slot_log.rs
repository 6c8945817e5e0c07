//! Log lines of a slot's policies: their limit, and the last ones for operators.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use pointsman_workers::unix_ms;
use serde::Serialize;

use crate::log_limit::LogLimit;

/// Number of lines that a slot keeps.
const KEPT: usize = 200;

/// Limit of a slot's log lines, and the last of them.
#[derive(Debug, Default)]
pub(crate) struct SlotLog {
    pub(crate) limit: LogLimit,
    // A request's thread holds the lock to move one line, and a reader to clone at most 200 pointers. The
    // limit keeps lines at 50 a second.
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Number of the newest line; 0 before the first.
    last: u64,
    lines: VecDeque<Arc<PolicyLine>>,
}

/// A line that a policy logged.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyLine {
    /// Number of the line in its slot since the start of the process, from 1.
    pub number: u64,
    /// Time, milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// `error`, `warn`, `info` or `debug`.
    pub level: &'static str,
    /// Name of the policy.
    pub policy: Arc<str>,
    /// Whether a call with made-up facts logged it, before the policy or one of its instances served.
    pub trial: bool,
    /// Generation that logged it. `None` while a file is tried before it is installed.
    pub generation: Option<u64>,
    /// Id of the request. `None` for a preview and for a trial call.
    pub request_id: Option<String>,
    /// The text, at most 512 characters, as the policy gave it.
    pub text: String,
}

/// Lines of a slot.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PolicyLines {
    /// The lines, oldest first.
    pub lines: Vec<Arc<PolicyLine>>,
    /// Number of the newest line of the slot; 0 if the slot has no line.
    pub last: u64,
}

impl SlotLog {
    /// Keeps a line in the place of the oldest one. Sets its number and time.
    pub(crate) fn keep(&self, line: PolicyLine) {
        let mut line = PolicyLine { at_ms: unix_ms(), ..line };
        let mut kept = self.kept.lock();
        kept.last += 1;
        line.number = kept.last;
        if kept.lines.len() >= KEPT {
            kept.lines.pop_front();
        }
        kept.lines.push_back(Arc::new(line));
    }

    /// Returns the kept lines with a number above `after`.
    pub(crate) fn after(&self, after: u64) -> PolicyLines {
        let kept = self.kept.lock();
        let lines = kept.lines.iter().filter(|line| line.number > after).cloned().collect();
        PolicyLines { lines, last: kept.last }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_lines_are_kept_and_numbered_and_older_ones_are_given_up() {
        let log = SlotLog::default();
        assert_eq!((log.after(0).last, log.after(0).lines.len()), (0, 0));
        for number in 0..KEPT as u64 + 5 {
            log.keep(PolicyLine {
                number: 0,
                at_ms: 0,
                level: "info",
                policy: Arc::from("x"),
                trial: false,
                generation: Some(2),
                request_id: None,
                text: number.to_string(),
            });
        }
        let all = log.after(0);
        assert_eq!((all.lines.len(), all.last), (KEPT, 205));
        let ends = [&all.lines[0], &all.lines[KEPT - 1]].map(|line| (line.number, line.text.clone()));
        assert_eq!(ends, [(6, "5".to_owned()), (205, "204".to_owned())]);
        assert_eq!(log.after(204).lines.len(), 1);
        assert!(log.after(205).lines.is_empty() && log.after(u64::MAX).lines.is_empty());
    }
}
