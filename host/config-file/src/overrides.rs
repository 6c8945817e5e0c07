//! Values that take the place of those in a file, each by its path: environment variables.

use toml::{Table, Value};

use crate::problem::{Lines, Problem, join};

/// A value given outside the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// Source of the value, for messages: the name of the environment variable.
    pub name: String,
    /// Keys from the outermost table to the value.
    pub keys: Vec<String>,
    /// A TOML value, or the text of a string without quotation marks.
    pub text: String,
}

/// The overrides of one file, and which of them were read again as strings.
pub(crate) struct Overrides<'a> {
    all: Vec<Applied<'a>>,
}

struct Applied<'a> {
    given: &'a Override,
    /// Problem of the value before it was read as a string.
    first_message: Option<String>,
    /// Whether the value is in the table as a string.
    is_text: bool,
}

impl Override {
    /// Returns the dotted path of the value.
    #[must_use]
    pub fn path(&self) -> String {
        self.keys.iter().fold(String::new(), |path, key| join(&path, key))
    }

    /// The value: TOML if the text is exactly one TOML value, otherwise a string.
    fn value(&self) -> Value {
        let parsed = format!("value = {}", self.text).parse::<Table>();
        let single = parsed.ok().filter(|table| table.len() == 1).and_then(|mut table| table.remove("value"));
        single.unwrap_or_else(|| Value::String(self.text.clone()))
    }

    /// Returns whether one of the two paths begins with the other.
    fn touches(&self, keys: &[&str]) -> bool {
        !keys.is_empty() && self.keys.iter().zip(keys).all(|(own, other)| own == other)
    }
}

impl<'a> Overrides<'a> {
    pub(crate) fn new(overrides: &'a [Override]) -> Self {
        let applied = |given: &'a Override| Applied {
            given,
            first_message: None,
            is_text: matches!(given.value(), Value::String(_)),
        };
        Self { all: overrides.iter().map(applied).collect() }
    }

    /// Puts the values into the table. Returns the problems of those that have no place in it.
    pub(crate) fn apply(&self, root: &mut Value) -> Vec<Problem> {
        let problem = |given: &Override| {
            let message =
                format!("`{}` is not a table that has keys; check the variable's name", given.path());
            Problem { flag: Some(given.name.clone()), ..Problem::new(given.path(), message) }
        };
        let lost = self.all.iter().filter(|applied| !put(root, &applied.given.keys, applied.given.value()));
        lost.map(|applied| problem(applied.given)).collect()
    }

    /// Makes the value at `keys` a string, for a key that takes a string which looks like another value: `5`.
    pub(crate) fn retry_as_text(&mut self, root: &mut Value, keys: &[&str], message: &str) -> bool {
        let own = |applied: &&mut Applied<'_>| !applied.is_text && applied.given.keys == keys;
        let Some(applied) = self.all.iter_mut().find(own) else { return false };
        (applied.is_text, applied.first_message) = (true, Some(message.to_owned()));
        put(root, &applied.given.keys, Value::String(applied.given.text.clone()))
    }

    /// Returns what was wrong with the value at `keys` before it was read as a string.
    pub(crate) fn first_message(&self, keys: &[&str]) -> Option<String> {
        self.all.iter().find(|applied| applied.given.keys == keys)?.first_message.clone()
    }

    /// Gives the problem at `keys` the name of the override that caused it. A key that is also in the file
    /// keeps its place in the file.
    pub(crate) fn named(&self, mut problem: Problem, keys: &[&str], lines: &Lines) -> Problem {
        let cause = self.all.iter().map(|applied| applied.given).find(|given| {
            given.touches(keys) && (keys.len() >= given.keys.len() || lines.at(&problem.path).is_none())
        });
        problem.flag = problem.flag.take().or_else(|| cause.map(|given| given.name.clone()));
        problem
    }
}

/// Puts a value at its place, and makes the tables on the way. Returns whether there is such a place.
fn put(root: &mut Value, keys: &[String], value: Value) -> bool {
    let Some((last, tables)) = keys.split_last() else { return false };
    let mut at = root;
    for key in tables {
        let Some(table) = at.as_table_mut() else { return false };
        at = table.entry(key).or_insert_with(|| Value::Table(Table::new()));
    }
    at.as_table_mut().is_some_and(|table| {
        table.insert(last.clone(), value);
        true
    })
}
