//! Positions of mistakes in a formula.

use std::fmt;

/// Mistake in a formula, and its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Offset in the formula, bytes.
    pub at: usize,
    /// What is wrong, and what to write instead.
    pub text: String,
}

impl Mistake {
    pub(crate) fn new(at: usize, text: impl Into<String>) -> Self {
        Self { at, text: text.into() }
    }

    /// Describes the mistake with its position in `formula`: the column, and the line when there are several.
    #[must_use]
    pub fn describe(&self, formula: &str) -> String {
        let (line, column) = position(formula, self.at);
        if formula.trim_end().contains('\n') {
            format!("line {line}, column {column}: {}", self.text)
        } else {
            format!("column {column}: {}", self.text)
        }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Returns line and column of a byte of `text`, both from 1. Columns count characters.
#[must_use]
pub fn position(text: &str, at: usize) -> (usize, usize) {
    let mut before = at.min(text.len());
    while !text.is_char_boundary(before) {
        before -= 1;
    }
    let before = text.get(..before).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let last = before.rsplit('\n').next().unwrap_or_default();
    (line, last.chars().count() + 1)
}
