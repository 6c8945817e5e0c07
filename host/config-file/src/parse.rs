//! Parses the text of a file into its raw configuration, and collects every problem.
//!
//! serde stops at the first problem. Parsing therefore removes the key at fault and tries again until no
//! problem is left.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use serde_path_to_error::Segment;
use toml::{Value, de::DeTable};

use crate::{
    overrides::{Override, Overrides},
    problem::{Lines, Problem, join, line_starts, place_of},
    references,
};

/// Maximum number of problems reported for one file.
const MAX_PROBLEMS: usize = 100;

/// The readable part of a text, and the problems with the rest.
#[derive(Clone, Debug, Default)]
pub struct Parsed<T> {
    /// The value, without the keys that could not be read.
    pub value: T,
    /// The problems of keys and types.
    pub problems: Vec<Problem>,
    /// Line of each key.
    pub lines: Lines,
    /// Elements of arrays that could not be read and are missing from the value.
    pub unread: UnreadElements,
}

/// Parses a text. No message shows the value of a key in `secrets`, and such a value may be
/// `{ env = "NAME" }` or `{ file = "PATH" }`.
///
/// # Errors
/// The text is not TOML. Has all syntax errors.
pub fn parse<T: DeserializeOwned + Default>(text: &str, secrets: &[&str]) -> Result<Parsed<T>, Vec<Problem>> {
    parse_with(text, secrets, &[])
}

/// Like [`parse`], with `overrides` in place of values of the text.
///
/// # Errors
/// Same as [`parse`].
pub fn parse_with<T: DeserializeOwned + Default>(
    text: &str,
    secrets: &[&str],
    overrides: &[Override],
) -> Result<Parsed<T>, Vec<Problem>> {
    let (document, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        let starts = line_starts(text);
        let problem = |error: toml::de::Error| Problem {
            place: error.span().map(|span| place_of(text, &starts, span.start)),
            ..Problem::new("", format!("TOML syntax: {}", error.message()))
        };
        return Err(errors.into_iter().map(problem).collect());
    }
    let lines = Lines::new(text, document.get_ref());
    let table = <toml::Table as serde::Deserialize>::deserialize(toml::de::Deserializer::from(document));
    let mut table = Value::Table(table.map_err(|error| vec![Problem::new("", error.message())])?);
    let (mut problems, mut removed) = (Vec::new(), Removed::default());
    let mut overrides = Overrides::new(overrides);
    problems.extend(overrides.apply(&mut table));
    for broken in references::follow(&mut table, secrets).into_iter().take(MAX_PROBLEMS) {
        let segments: Vec<Segment> = broken.segments.iter().map(Segment::from).collect();
        let problem = Problem::new(removed.path(&segments), broken.message);
        problems.push(overrides.named(problem, &keys(&segments), &lines));
        removed.remove(&mut table, &segments);
    }
    loop {
        match serde_path_to_error::deserialize::<_, T>(table.clone()) {
            Ok(value) => return Ok(Parsed { value, problems, lines, unread: removed.elements }),
            Err(error) => {
                let segments: Vec<Segment> = error.path().iter().cloned().collect();
                let message = error.into_inner().message().to_owned();
                let keys = keys(&segments);
                if overrides.retry_as_text(&mut table, &keys, &message) {
                    continue;
                }
                let message = overrides.first_message(&keys).unwrap_or(message);
                let found = removed.problems(&segments, &message, secrets);
                problems.extend(found.into_iter().map(|problem| overrides.named(problem, &keys, &lines)));
                if problems.len() >= MAX_PROBLEMS || !removed.remove(&mut table, &segments) {
                    return Ok(Parsed { problems, lines, ..Parsed::default() });
                }
            }
        }
    }
}

/// Parts removed so far: keys by path, and elements of arrays by their index in the file.
#[derive(Debug, Default)]
struct Removed {
    keys: BTreeSet<String>,
    elements: UnreadElements,
}

/// Indexes in the file of array elements that were removed, by the path of the array.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnreadElements(BTreeMap<String, BTreeSet<usize>>);

impl Removed {
    /// The problems that serde found at `segments`, without the consequences of earlier removals.
    fn problems(&self, segments: &[Segment], message: &str, secrets: &[&str]) -> Vec<Problem> {
        // A worker's description names the keys at fault itself, each on a line of its own.
        let lines = message.lines().map(|line| line.split_once(": ").filter(|(key, _)| is_key(key)));
        let named: Option<Vec<(&str, &str)>> = lines.collect();
        match named.filter(|named| !named.is_empty() && ends_in_element(segments)) {
            Some(named) => {
                let one = |(key, text)| self.problem(segments, Some(key), text, secrets);
                named.into_iter().filter_map(one).collect()
            }
            None => self.problem(segments, None, message, secrets).into_iter().collect(),
        }
    }

    /// The problem of the value at `segments`, or of a `key` of it; `None` for a consequence.
    fn problem(
        &self,
        segments: &[Segment],
        key: Option<&str>,
        message: &str,
        secrets: &[&str],
    ) -> Option<Problem> {
        let path = self.path(segments);
        // A worker's description does not show its secrets itself.
        let message = if is_secret(&path, secrets) { without_value(message) } else { message.to_owned() };
        let path = key.map_or_else(|| path.clone(), |key| join(&path, key));
        let missing = quoted(&message).next().filter(|_| message.starts_with("missing field"));
        let lost = missing.map_or_else(|| path.clone(), |key| join(&path, key));
        (!self.keys.contains(&lost)).then(|| {
            let message = explain(&message, &path);
            Problem::new(path, message)
        })
    }

    /// Removes the value at `segments`, or the innermost one around it; `false` when there is none.
    fn remove(&mut self, root: &mut Value, segments: &[Segment]) -> bool {
        (1..=segments.len())
            .rev()
            .any(|depth| self.remove_at(root, segments.get(..depth).unwrap_or_default()))
    }

    fn remove_at(&mut self, root: &mut Value, segments: &[Segment]) -> bool {
        let Some((last, parents)) = segments.split_last() else { return false };
        let mut at = root;
        for segment in parents {
            let inner = match segment {
                Segment::Map { key } | Segment::Enum { variant: key } => at.get_mut(key.as_str()),
                Segment::Seq { index } => at.get_mut(*index),
                Segment::Unknown => None,
            };
            let Some(inner) = inner else { return false };
            at = inner;
        }
        match (last, at) {
            (Segment::Map { key } | Segment::Enum { variant: key }, Value::Table(table)) => {
                let found = table.remove(key).is_some();
                if found {
                    let path = self.path(segments);
                    self.keys.insert(path);
                }
                found
            }
            (Segment::Seq { index }, Value::Array(elements)) if *index < elements.len() => {
                elements.remove(*index);
                let array = self.path(parents);
                let removed = self.elements.0.entry(array).or_default();
                removed.insert(original(removed, *index))
            }
            _ => false,
        }
    }

    /// The dotted path in the file: indexes count elements that were removed, too.
    fn path(&self, segments: &[Segment]) -> String {
        let mut path = String::new();
        for segment in segments {
            match segment {
                Segment::Map { key } | Segment::Enum { variant: key } => path = join(&path, key),
                Segment::Seq { index } => {
                    let index = self.elements.index_in_file(&path, *index);
                    path.push_str(&format!("[{index}]"));
                }
                Segment::Unknown => {}
            }
        }
        path
    }
}

impl UnreadElements {
    /// Returns the index in the file of the element of `array` that is at `index` after the removals.
    fn index_in_file(&self, array: &str, index: usize) -> usize {
        self.0.get(array).map_or(index, |removed| original(removed, index))
    }

    /// Returns the path in the file of a path in the configuration.
    #[must_use]
    pub fn path_in_file(&self, path: &str) -> String {
        let (mut in_file, mut rest) = (String::new(), path);
        while let Some((array, after)) = rest.split_once('[') {
            in_file.push_str(array);
            match after.split_once(']').and_then(|(index, after)| Some((index.parse().ok()?, after))) {
                Some((index, after)) => {
                    let index = self.index_in_file(&in_file, index);
                    in_file.push_str(&format!("[{index}]"));
                    rest = after;
                }
                // A bracket in the name of a model.
                None => {
                    in_file.push('[');
                    rest = after;
                }
            }
        }
        in_file + rest
    }
}

/// Index in the file of the element that is now at `index`, after the elements at `removed` were removed.
fn original(removed: &BTreeSet<usize>, index: usize) -> usize {
    removed.iter().fold(index, |index, gone| if *gone <= index { index + 1 } else { index })
}

/// The names in a path, up to the first element of an array.
fn keys(segments: &[Segment]) -> Vec<&str> {
    let names = segments.iter().map_while(|segment| match segment {
        Segment::Map { key } | Segment::Enum { variant: key } => Some(key.as_str()),
        Segment::Seq { .. } | Segment::Unknown => None,
    });
    names.collect()
}

/// Returns whether the value at a path is a secret, or one of a list of secrets.
fn is_secret(path: &str, secrets: &[&str]) -> bool {
    let mut keys = path.split('.').map(|key| key.split('[').next().unwrap_or(key));
    keys.any(|key| secrets.contains(&key))
        || secrets.iter().any(|secret| secret.contains('.') && path.starts_with(secret))
}

/// serde's message about a value of a wrong type, without the value: `invalid type: string, expected a
/// sequence`.
fn without_value(message: &str) -> String {
    let (found, expected) = message.rsplit_once(", expected ").unwrap_or(("invalid value", "another one"));
    let kind = found.split(['"', '`']).next().unwrap_or_default().trim_end();
    format!("{kind}, expected {expected} (the value is a secret and is not shown)")
}

fn ends_in_element(segments: &[Segment]) -> bool {
    matches!(segments.last(), Some(Segment::Seq { .. }))
}

fn is_key(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
}

/// The texts between backticks.
fn quoted(message: &str) -> impl Iterator<Item = &str> {
    message.split('`').skip(1).step_by(2)
}

/// serde's message about the value at `path`, with a suggestion for a name that it does not know.
fn explain(message: &str, path: &str) -> String {
    let mut names = quoted(message);
    let kind = if message.starts_with("unknown field") {
        "key"
    } else if message.starts_with("unknown variant") {
        "value"
    } else if message.starts_with("invalid socket address") {
        return r#"the value is not an address: expected IP:PORT such as "127.0.0.1:8080""#.to_owned();
    } else {
        return without_rust_type(message, path);
    };
    let unknown = names.next().unwrap_or_default();
    let known: Vec<&str> = names.collect();
    let closest = known.iter().max_by(|a, b| {
        let likeness = |name: &str| strsim::jaro_winkler(unknown, name);
        likeness(a).total_cmp(&likeness(b))
    });
    match closest.filter(|name| strsim::jaro_winkler(unknown, name) > 0.8) {
        Some(name) => format!("unknown {kind} `{unknown}`: did you mean `{name}`?"),
        None => format!("unknown {kind} `{unknown}`: expected one of {}", known.join(", ")),
    }
}

/// serde's message, with words for the Rust type that it expected.
fn without_rust_type(message: &str, path: &str) -> String {
    let Some((found, expected)) = message.rsplit_once(", expected ") else { return message.to_owned() };
    // Behind it: that the value is a secret.
    let (name, rest) = expected.find(" (").map_or((expected, ""), |at| expected.split_at(at));
    let plain = match name {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number of 0 or more".to_owned(),
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "a sequence" if found.ends_with("map") => format!("a list of tables: write [[{path}]]"),
        name if name.starts_with("struct ") => "a table".to_owned(),
        name => name.to_owned(),
    };
    format!("{found}, expected {plain}{rest}")
}
