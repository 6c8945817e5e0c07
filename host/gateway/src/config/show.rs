//! The configuration in force: each value with where it came from, without secrets.

use std::fmt;

use pointsman_config_file::join;
use pointsman_workers::{WorkerSpec, url_without_secrets};
use serde::{Serialize, Serializer, ser::SerializeSeq as _};
use toml::{Table, Value};

use super::{Config, Origin, SECRET_KEYS, secret::HIDDEN};

/// Source of a value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Source {
    /// Neither the file nor the environment nor a flag gives it.
    Default,
    /// A line of the file.
    Line(usize),
    /// A flag or an environment variable.
    Given(String),
}

/// The configuration in force.
#[derive(Debug)]
pub(crate) struct Shown<'a> {
    values: Table,
    origin: &'a Origin,
}

/// One value of it.
#[derive(Debug, Serialize)]
pub(crate) struct ShownValue {
    /// Dotted path.
    pub(crate) path: String,
    pub(crate) value: Value,
    pub(crate) source: Source,
}

impl Config {
    /// Returns the configuration with where each value came from. Secrets are hidden. Keys without a value
    /// are missing.
    ///
    /// # Errors
    /// A value has no form in TOML; none of the sections has such a value.
    pub(crate) fn shown(&self) -> Result<Shown<'_>, toml::ser::Error> {
        let mut values = Table::try_from(self)?;
        values.iter_mut().for_each(|(key, value)| hide(key, value));
        Ok(Shown { values, origin: &self.origin })
    }
}

impl Shown<'_> {
    /// Returns every value with its path and source.
    pub(crate) fn values(&self) -> Vec<ShownValue> {
        let mut all = Vec::new();
        self.collect("", &self.values, &mut all);
        all
    }

    fn collect(&self, path: &str, table: &Table, all: &mut Vec<ShownValue>) {
        for (key, value) in table {
            let path = join(path, key);
            match value {
                Value::Table(inner) if has_header(value) => self.collect(&path, inner, all),
                Value::Array(elements) if has_header(value) => {
                    for (index, inner) in elements.iter().filter_map(Value::as_table).enumerate() {
                        self.collect(&format!("{path}[{index}]"), inner, all);
                    }
                }
                _ => {
                    let source = self.origin.source(&path);
                    let value = if is_secret_number(key, value) {
                        Value::String(HIDDEN.to_owned())
                    } else {
                        value.clone()
                    };
                    all.push(ShownValue { path, value, source });
                }
            }
        }
    }

    /// Writes the values of the table at `path`, then the tables in it. `header` is the path without indexes.
    fn write(&self, f: &mut fmt::Formatter<'_>, path: &str, header: &str, table: &Table) -> fmt::Result {
        for (key, value) in table.iter().filter(|(_, value)| !has_header(value)) {
            let source = self.origin.source(&join(path, key));
            let line = if is_secret_number(key, value) {
                format!("# {key} = {HIDDEN}")
            } else {
                format!("{} = {value}", quoted(key))
            };
            writeln!(f, "{line:<48} # {}", source.text(self.origin))?;
        }
        for (key, value) in table.iter().filter(|(_, value)| has_header(value)) {
            let (path, header) = (join(path, key), join(header, &quoted(key)));
            if let Some(inner) = value.as_table() {
                if inner.values().any(|value| !has_header(value)) {
                    writeln!(f, "\n[{header}]")?;
                }
                self.write(f, &path, &header, inner)?;
            }
            let elements = value.as_array().into_iter().flatten();
            for (index, inner) in elements.filter_map(Value::as_table).enumerate() {
                writeln!(f, "\n[[{header}]]")?;
                self.write(f, &format!("{path}[{index}]"), &header, inner)?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, "", "", &self.values)
    }
}

impl Origin {
    fn source(&self, path: &str) -> Source {
        if let Some(given) = self.flags.of(path) {
            return Source::Given(given);
        }
        let in_file = self.unread.path_in_file(path);
        self.lines.at(&in_file).map_or(Source::Default, |(line, _)| Source::Line(line))
    }
}

impl Source {
    fn text(&self, origin: &Origin) -> String {
        match self {
            Self::Default => "default".to_owned(),
            Self::Given(by) => by.clone(),
            Self::Line(line) => {
                let file = origin.file.as_deref().map(|file| file.display().to_string()).unwrap_or_default();
                format!("{file}:{line}")
            }
        }
    }
}

/// Serializes workers with the keys of the configuration file.
pub(super) fn workers<S: Serializer>(workers: &[WorkerSpec], serializer: S) -> Result<S::Ok, S::Error> {
    let mut list = serializer.serialize_seq(Some(workers.len()))?;
    for worker in workers {
        list.serialize_element(&worker.as_written())?;
    }
    list.end()
}

/// Hides a text whose key is that of a secret, wherever the key stands, and the user and query of a URL.
fn hide(key: &str, value: &mut Value) {
    match value {
        Value::String(text) if SECRET_KEYS.contains(&key) => HIDDEN.clone_into(text),
        // An issuer is compared as it stands, and is not called.
        Value::String(text) if text.contains("://") && key != "issuer" => *text = url_without_secrets(text),
        Value::Array(elements) => elements.iter_mut().for_each(|inner| hide("", inner)),
        Value::Table(table) => table.iter_mut().for_each(|(key, inner)| hide(key, inner)),
        _ => {}
    }
}

/// Returns whether a value is written below a header of its own: a table that is not empty, or tables in an
/// array.
fn has_header(value: &Value) -> bool {
    match value {
        Value::Table(inner) => !inner.is_empty(),
        Value::Array(elements) => !elements.is_empty() && elements.iter().all(Value::is_table),
        _ => false,
    }
}

/// Returns whether the value of a key is a secret number. The default, 0, is not secret. TOML has no way to
/// hide a number where it stands.
fn is_secret_number(key: &str, value: &Value) -> bool {
    key == "hash_salt" && value.as_integer() != Some(0)
}

/// Returns a key in TOML's form: bare where possible, else quoted.
fn quoted(key: &str) -> String {
    let bare =
        !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if bare { key.to_owned() } else { Value::String(key.to_owned()).to_string() }
}
