//! The syntaxes of a file of workers, and messages about them that say where and what to write.
//!
//! A message never quotes a line of the file, which may have a key.

use std::{fmt, path::Path};

use pointsman_workers::WorkerSpec;
use serde::{
    Deserialize, Deserializer,
    de::{
        DeserializeOwned, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor, value::SeqAccessDeserializer,
    },
};

/// Our own format: `workers` with a list, or the list alone.
pub(super) struct WorkersFile {
    pub(super) workers: Vec<WorkerSpec>,
}

impl<'de> Deserialize<'de> for WorkersFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WorkersVisitor)
    }
}

/// A list that is there. YAML would read null as an empty list, as in a file of which only the first line was
/// written.
pub(super) struct Listed<T>(pub(super) Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Listed<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let list = Option::deserialize(deserializer)?;
        list.map(Self).ok_or_else(|| D::Error::custom("the list is null: write [] for an empty list"))
    }
}

struct WorkersVisitor;

impl<'de> Visitor<'de> for WorkersVisitor {
    type Value = WorkersFile;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`workers` with a list of workers, which may be empty")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<WorkersFile, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(list)).map(|workers| WorkersFile { workers })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WorkersFile, A::Error> {
        let mut workers = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != "workers" {
                // Read, so that the error is at the key's place.
                map.next_value::<IgnoredAny>()?;
                return Err(A::Error::unknown_field(&key, &["workers"]));
            }
            if workers.replace(map.next_value::<Listed<WorkerSpec>>()?.0).is_some() {
                return Err(A::Error::duplicate_field("workers"));
            }
        }
        let workers = workers.ok_or_else(|| A::Error::missing_field("workers"))?;
        Ok(WorkersFile { workers })
    }
}

/// Syntax of a file.
enum Syntax {
    Toml,
    Json,
    Yaml,
}

impl Syntax {
    /// Returns the syntax that the extension of a file names.
    fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "toml" => Some(Self::Toml),
            "json" => Some(Self::Json),
            "yaml" | "yml" => Some(Self::Yaml),
            _ => None,
        }
    }
}

/// Returns whether the extension of a file names a syntax.
#[must_use]
pub fn has_known_syntax(path: &Path) -> bool {
    Syntax::of(path).is_some()
}

/// Parses a file in the syntax that its extension names.
///
/// # Errors
/// What is wrong, with the line where that is known.
pub(super) fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| format!("it is not UTF-8: {error}"))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim().is_empty() {
        return Err("it is empty: for no workers, write `workers` with an empty list".to_owned());
    }
    match Syntax::of(path) {
        Some(Syntax::Toml) => toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            format!("line {}: {}", before.matches('\n').count() + 1, error.message())
        }),
        Some(Syntax::Json) => serde_json::from_str(text).map_err(|error| of_json(text, &error)),
        Some(Syntax::Yaml) => of_yaml(text),
        None => Err("its syntax is not known: expected the extension toml, json, yaml or yml".to_owned()),
    }
}

/// Returns the message of an error of JSON. People write comments, which JSON does not have.
fn of_json(text: &str, error: &serde_json::Error) -> String {
    let line = text.lines().nth(error.line().saturating_sub(1)).unwrap_or_default();
    let at = line.get(error.column().saturating_sub(1)..).unwrap_or_default();
    if error.is_syntax() && at.starts_with(['/', '#']) {
        return format!(
            "line {}: JSON has no comments: remove them, or give the file the extension yaml with `#`",
            error.line()
        );
    }
    error.to_string()
}

/// Parses YAML, with merge keys (`<<`).
fn of_yaml<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let problem = |error: serde_yaml_ng::Error| {
        let line = error.location().and_then(|place| text.lines().nth(place.line().saturating_sub(1)));
        let indent: &str = line
            .map_or("", |line| line.split(|letter: char| !letter.is_whitespace()).next().unwrap_or_default());
        let hint = if indent.contains('\t') { ": YAML is indented with blanks, not with tabs" } else { "" };
        format!("{error}{hint}")
    };
    if !text.contains("<<") {
        return serde_yaml_ng::from_str(text).map_err(problem);
    }
    let mut value: serde_yaml_ng::Value = serde_yaml_ng::from_str(text).map_err(problem)?;
    value.apply_merge().map_err(problem)?;
    // Keys that only hold what is merged, by convention.
    if let serde_yaml_ng::Value::Mapping(map) = &mut value {
        map.retain(|key, _| !key.as_str().is_some_and(|key| key.starts_with("x-") || key.starts_with('.')));
    }
    serde_yaml_ng::from_value(value).map_err(problem)
}
