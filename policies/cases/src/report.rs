//! The result of running cases, one line per case.

use std::fmt;

use crate::{Answer, Case};

/// The results of the cases that ran so far. Displays one line per case, then the totals.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    lines: String,
    passed: usize,
    failed: usize,
}

impl Report {
    /// Records the answer to a case.
    pub fn record(&mut self, case: &Case, answer: &Answer) {
        if answer.meets(&case.expect) {
            self.passed += 1;
            self.lines.push_str(&format!("ok      {}\n", case.name));
        } else {
            self.failed += 1;
            self.lines.push_str(&format!("FAILED  {}: expected {}, got {answer}\n", case.name, case.expect));
        }
    }

    /// Returns whether every case had the expected answer.
    #[must_use]
    pub fn all_passed(&self) -> bool {
        self.failed == 0
    }
}

impl Report {
    /// Records a fact that a case sets and the policy does not ask for: it has no effect.
    pub fn warn(&mut self, case: &Case, fact: &str) {
        let name = &case.name;
        self.lines
            .push_str(&format!("warning {name}: the policy does not ask for {fact}, so it has no effect\n"));
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{} passed, {} failed", self.lines, self.passed, self.failed)
    }
}
