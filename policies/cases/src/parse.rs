//! Reads a `cases.toml` and checks every name and value, so that running a case cannot fail for its form.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::{
    Case, Expect, FactTable, FactType, Outcome, Values,
    facts::{Value, closest},
};

/// Problem of a `cases.toml`. The caller puts the name of the file in front of the message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CasesError {
    /// The text is not TOML, or has a top-level key other than `case`.
    #[error("the file is not a list of cases: {0}")]
    Document(String),
    /// The file has no case.
    #[error("the file has no cases: add a [[case]] table")]
    Empty,
    /// A case has an unknown or missing field, or a value that does not fit.
    #[error("case \"{case}\": {field}: {problem}")]
    Case {
        /// Name of the case, or its number in the file, from 1, when it has no name.
        case: String,
        /// Path of the field within the case, as in `rows[1].kv-usage`.
        field: String,
        /// Description of the problem, with a suggestion for a misspelt name.
        problem: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    #[serde(default)]
    case: Vec<toml::Table>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawCase {
    name: String,
    settings: Option<toml::Table>,
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    now_us: u64,
    #[serde(default)]
    attempt: u32,
    #[serde(default)]
    state: BTreeMap<String, i64>,
    #[serde(default)]
    outcomes: Vec<Outcome>,
    #[serde(default)]
    request: RawValues,
    #[serde(default)]
    rows: Vec<RawValues>,
    #[serde(default)]
    decode: RawValues,
    expect: Expect,
}

type RawValues = BTreeMap<String, Value>;

/// Reads and checks the cases of a `cases.toml`. Names get hashes that differ from those of a gateway.
///
/// # Errors
/// [`CasesError`] names the case and the field that is wrong.
pub fn parse(text: &str, facts: &FactTable) -> Result<Vec<Case>, CasesError> {
    parse_hashing(text, facts, &fnv)
}

/// Like [`parse`], with `hash` for the names of tenants, sessions, adapters and agent programs.
///
/// # Errors
/// [`CasesError`] names the case and the field that is wrong.
pub fn parse_hashing(
    text: &str,
    facts: &FactTable,
    hash: &dyn Fn(&str) -> u64,
) -> Result<Vec<Case>, CasesError> {
    let file: RawFile = toml::from_str(text).map_err(|error| {
        let is_large = error.message().contains("too large");
        let hint = if is_large { "write a number above 9223372036854775807 in quotes\n" } else { "" };
        CasesError::Document(format!("{error}{hint}"))
    })?;
    if file.case.is_empty() {
        return Err(CasesError::Empty);
    }
    (1..).zip(file.case).map(|(number, table)| read(number, table, facts, hash)).collect()
}

/// FNV-1a.
fn fnv(name: &str) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325;
    name.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Replaces `tenant:NAME`, as a text or as a key of a table, by the decimal hash of the tenant NAME, as the
/// gateway does.
fn hash_tenants(value: toml::Value, hash: &dyn Fn(&str) -> u64) -> toml::Value {
    let hashed = |text: String| match text.strip_prefix("tenant:") {
        Some(name) => hash(name).to_string(),
        None => text,
    };
    match value {
        toml::Value::String(text) => toml::Value::String(hashed(text)),
        toml::Value::Array(values) => {
            toml::Value::Array(values.into_iter().map(|value| hash_tenants(value, hash)).collect())
        }
        toml::Value::Table(entries) => {
            let entry = |(key, value)| (hashed(key), hash_tenants(value, hash));
            toml::Value::Table(entries.into_iter().map(entry).collect())
        }
        other => other,
    }
}

fn read(
    number: usize,
    table: toml::Table,
    facts: &FactTable,
    hash: &dyn Fn(&str) -> u64,
) -> Result<Case, CasesError> {
    let name = table.get("name").and_then(toml::Value::as_str);
    let case = name.map_or_else(|| number.to_string(), str::to_owned);
    let wrong = |field: String, problem: String| CasesError::Case { case: case.clone(), field, problem };
    if let Some(toml::Value::Table(expect)) = table.get("expect")
        && expect.len() != 1
    {
        let names: Vec<&str> = expect.keys().map(String::as_str).collect();
        let problem = match names.as_slice() {
            [] => "is empty; name one answer, as in `{ row = 0 }`".to_owned(),
            names => format!("has {} answers ({}); leave one of them", names.len(), names.join(", ")),
        };
        return Err(wrong("expect".to_owned(), problem));
    }
    let raw: RawCase = serde_path_to_error::deserialize(table).map_err(|error| {
        let path = error.path().to_string();
        let problem = error.into_inner();
        let field = if path == "." { "fields".to_owned() } else { path };
        wrong(field, with_suggestion(problem.message().trim_end()))
    })?;
    let encode = |place: String, values: RawValues, ty: &dyn Fn(&str) -> Result<FactType, String>| {
        let encoded = values.into_iter().map(|(name, value)| {
            let words = ty(&name).and_then(|ty| value.words(&name, ty, hash));
            match words {
                Ok(words) => Ok((name, words)),
                Err(problem) => Err(wrong(format!("{place}.{name}"), problem)),
            }
        });
        encoded.collect::<Result<Values, CasesError>>()
    };
    let rows = raw.rows.into_iter().enumerate();
    let rows = rows.map(|(row, values)| encode(format!("rows[{row}]"), values, &|name| facts.worker(name)));
    let rows = rows.collect::<Result<_, _>>()?;
    let settings = raw.settings.map(|table| hash_tenants(toml::Value::Table(table), hash));
    let settings = settings.map(|table| serde_json::to_string(&table)).transpose();
    Ok(Case {
        settings: settings.map_err(|error| wrong("settings".to_owned(), error.to_string()))?,
        seed: raw.seed,
        now_us: raw.now_us,
        attempt: raw.attempt,
        state: raw.state,
        outcomes: raw.outcomes,
        request: encode("request".to_owned(), raw.request, &|name| facts.request(name))?,
        rows,
        decode: encode("decode".to_owned(), raw.decode, &|name| facts.worker(name))?,
        expect: raw.expect,
        name: raw.name,
    })
}

/// Adds the closest valid name to serde's message about an unknown one: unknown field `row`, expected one of
/// `rows`, ….
fn with_suggestion(message: &str) -> String {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let suggestion = match quoted.next() {
        Some(name) if message.starts_with("unknown ") => closest(name, quoted),
        _ => None,
    };
    match suggestion {
        Some(name) => format!("{message}; did you mean `{name}`?"),
        None => message.to_owned(),
    }
}

#[cfg(test)]
mod tests;
