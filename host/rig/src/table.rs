//! Tables of checks: one row for each check, with its value and verdict.

use std::fmt::Display;

use crate::terminal::print;

/// Rows printed so far and how many of their checks failed.
#[derive(Debug, Default)]
pub struct Checks {
    failed: u32,
}

impl Checks {
    /// Prints a value that is shown but not judged.
    pub fn show(&mut self, what: &str, value: impl Display) {
        self.check(what, value, true);
    }

    /// Prints a value and whether it is as required.
    pub fn check(&mut self, what: &str, value: impl Display, passed: bool) {
        print(&row(what, &value.to_string(), passed));
        self.failed += u32::from(!passed);
    }

    /// Prints a count that has to be zero.
    pub fn none(&mut self, what: &str, count: u64) {
        self.check(what, count, count == 0);
    }

    /// Returns an error when a check failed.
    pub fn finish(self) -> anyhow::Result<()> {
        anyhow::ensure!(self.failed == 0, "{} checks failed; see the rows marked FAILED", self.failed);
        Ok(())
    }
}

fn row(what: &str, value: &str, passed: bool) -> String {
    format!("| {what:<60} | {value:>24} | {} |", if passed { "ok" } else { "FAILED" })
}

/// Lays out rows in columns as wide as their longest cell.
pub fn columns(rows: &[Vec<String>]) -> Vec<String> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max();
    let widths: Vec<usize> = (0..count).map(|column| width(column).unwrap_or(0)).collect();
    let lay_out = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(lay_out).collect()
}

#[cfg(test)]
mod tests {
    use super::{Checks, columns};

    #[test]
    fn a_failed_check_fails_the_table() {
        let mut checks = Checks::default();
        checks.show("requests", 10);
        checks.none("requests lost", 0);
        assert!(Checks::default().finish().is_ok());
        checks.none("bookings left", 2);
        let error = checks.finish().unwrap_err().to_string();
        assert!(error.starts_with("1 checks failed"), "{error}");
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["a".to_owned(), "long cell".into()], vec!["µµµ".into(), "b".into(), "c".into()]];
        assert_eq!(columns(&rows), ["a    long cell", "µµµ  b          c"]);
    }
}
