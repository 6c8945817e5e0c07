//! Problems of a configuration file: where each one is and what is wrong there.

use std::{collections::BTreeMap, fmt, path::PathBuf, sync::Arc};

use toml::de::{DeTable, DeValue};

/// One thing that is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Dotted path of the key; empty for a problem of the file as a whole.
    pub path: String,
    /// The problem, and what to do about it.
    pub message: String,
    /// Line and column in the file, from 1; columns count characters.
    pub place: Option<(usize, usize)>,
    /// Flag or environment variable that gave the value, when it did not come from the file.
    pub flag: Option<String>,
}

/// Line and column.
pub type Place = (usize, usize);

/// Everything that is wrong with a configuration.
#[derive(Debug)]
pub struct ConfigErrors {
    /// The file, when the configuration came from one.
    pub file: Option<PathBuf>,
    /// The problems in the order of their lines.
    pub problems: Vec<Problem>,
}

/// The place of each key and array element of a file, by dotted path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lines(Arc<BTreeMap<String, Place>>);

impl Problem {
    /// A problem of the value at a dotted path.
    #[must_use]
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into(), place: None, flag: None }
    }
}

impl ConfigErrors {
    /// Problems of a configuration whose file has these lines. Problems of flags come first.
    #[must_use]
    pub fn new(file: Option<PathBuf>, mut problems: Vec<Problem>, lines: &Lines) -> Self {
        for problem in problems.iter_mut().filter(|problem| problem.flag.is_none()) {
            problem.place = problem.place.or_else(|| lines.of(&problem.path));
        }
        problems.sort_by_key(|problem| problem.place);
        Self { file, problems }
    }
}

impl Lines {
    /// Finds the places of all keys in a parsed `text`.
    pub(crate) fn new(text: &str, document: &DeTable<'_>) -> Self {
        let starts = line_starts(text);
        let mut lines = BTreeMap::new();
        let mut add = |path: String, at: usize| {
            let _ = lines.insert(path, place_of(text, &starts, at));
        };
        table(document, "", &mut add);
        Self(Arc::new(lines))
    }

    /// Returns the place of a key that the file has.
    #[must_use]
    pub fn at(&self, path: &str) -> Option<Place> {
        self.0.get(path).copied()
    }

    /// Returns the place of a key, or of the innermost table around it that the file has.
    fn of(&self, path: &str) -> Option<Place> {
        let mut path = path;
        loop {
            if let Some(place) = self.0.get(path) {
                return Some(*place);
            }
            path = path.get(..path.rfind(['.', '['])?)?;
        }
    }
}

/// Returns the starts of a text's lines.
pub(crate) fn line_starts(text: &str) -> Vec<usize> {
    std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect()
}

/// The place of the byte `at` in a text whose lines begin at `starts`.
pub(crate) fn place_of(text: &str, starts: &[usize], at: usize) -> Place {
    let line = starts.partition_point(|start| *start <= at);
    let start = line.checked_sub(1).and_then(|line| starts.get(line)).copied().unwrap_or(0);
    let before = text.get(start..at).map_or(at - start, |before| before.chars().count());
    (line, before + 1)
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
#[must_use]
pub fn join(path: &str, key: &str) -> String {
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

impl ConfigErrors {
    /// Returns a problem as it is shown, on one line: file, line and column, or the flag, before its text. A
    /// file that it names may have a line end in its name.
    #[must_use]
    pub fn shown(&self, problem: &Problem) -> String {
        let place = match (&problem.flag, &self.file, problem.place) {
            (Some(flag), ..) => return format!("{flag}: {}", problem.message).replace('\n', "\\n"),
            (None, Some(file), Some((line, column))) => format!("{}:{line}:{column}: ", file.display()),
            (None, Some(file), None) => format!("{}: ", file.display()),
            (None, None, Some((line, _))) => format!("line {line}: "),
            (None, None, None) => String::new(),
        };
        format!("{place}{problem}").replace('\n', "\\n")
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<String> = self.problems.iter().map(|problem| self.shown(problem)).collect();
        f.write_str(&shown.join("\n"))
    }
}

impl std::error::Error for ConfigErrors {}
