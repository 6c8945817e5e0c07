//! Problems of a configuration file: where each one is and what is wrong there.

use std::{collections::BTreeMap, fmt, path::PathBuf, sync::Arc};

use toml::de::{DeTable, DeValue};

/// One thing that is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Dotted path of the key; empty for a problem of the file as a whole.
    pub path: String,
    /// What is wrong, and what to do about it.
    pub message: String,
    /// Line in the file, from 1.
    pub line: Option<usize>,
}

/// Everything that is wrong with a configuration.
#[derive(Debug)]
pub struct ConfigErrors {
    /// The file, when the configuration came from one.
    pub file: Option<PathBuf>,
    /// The problems in the order of their lines.
    pub problems: Vec<Problem>,
}

/// The line of each key and array element of a file, by dotted path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Lines(Arc<BTreeMap<String, usize>>);

impl Problem {
    pub(super) fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into(), line: None }
    }
}

impl ConfigErrors {
    /// Problems of a configuration whose file has these lines.
    pub(super) fn new(file: Option<PathBuf>, mut problems: Vec<Problem>, lines: &Lines) -> Self {
        for problem in &mut problems {
            problem.line = problem.line.or_else(|| lines.of(&problem.path));
        }
        problems.sort_by_key(|problem| problem.line);
        Self { file, problems }
    }
}

impl Lines {
    /// Finds the lines of all keys in a parsed `text`.
    pub(super) fn new(text: &str, document: &DeTable<'_>) -> Self {
        let starts: Vec<usize> =
            std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        let mut lines = BTreeMap::new();
        let mut add = |path: String, at: usize| {
            let _ = lines.insert(path, starts.partition_point(|start| *start <= at));
        };
        table(document, "", &mut add);
        Self(Arc::new(lines))
    }

    /// Returns the line of a key, or of the innermost table around it that the file has.
    fn of(&self, path: &str) -> Option<usize> {
        let mut path = path;
        loop {
            if let Some(line) = self.0.get(path) {
                return Some(*line);
            }
            path = path.get(..path.rfind(['.', '['])?)?;
        }
    }
}

fn table(document: &DeTable<'_>, path: &str, add: &mut impl FnMut(String, usize)) {
    for (key, inner) in document {
        let path = join(path, key.get_ref());
        add(path.clone(), key.span().start);
        value(inner.get_ref(), &path, add);
    }
}

fn value(item: &DeValue<'_>, path: &str, add: &mut impl FnMut(String, usize)) {
    if let Some(inner) = item.as_table() {
        table(inner, path, add);
    } else if let Some(elements) = item.as_array() {
        for (index, element) in elements.iter().enumerate() {
            let path = format!("{path}[{index}]");
            add(path.clone(), element.span().start);
            value(element.get_ref(), &path, add);
        }
    }
}

/// Returns the dotted path of `key` in the table at `path`.
pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            match (&self.file, problem.line) {
                (Some(file), Some(line)) => write!(f, "{}:{line}: ", file.display())?,
                (Some(file), None) => write!(f, "{}: ", file.display())?,
                (None, Some(line)) => write!(f, "line {line}: ")?,
                (None, None) => {}
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}
