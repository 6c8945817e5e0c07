//! Parses and checks single values of a worker's description.

use std::{collections::BTreeMap, fmt, str::FromStr};

use super::{SpecError, TransferRule, error};

/// Returns a key without the line break at its end, as files and variables have. No message shows it.
pub(super) fn api_key(key: &str) -> Result<String, SpecError> {
    let key = key.strip_suffix('\n').map_or(key, |line| line.strip_suffix('\r').unwrap_or(line));
    let fits = |byte: u8| byte == b'\t' || (b' '..=b'~').contains(&byte);
    let problem = if key.trim().is_empty() {
        "the key is empty: give the engine's, or remove `api_key`"
    } else if key.contains(['\r', '\n']) {
        "the key has several lines: give one line"
    } else if key.bytes().all(fits) {
        return Ok(key.to_owned());
    } else {
        "the key has characters that an HTTP header must not have"
    };
    Err(error("api_key", problem.to_owned()))
}

pub(super) fn in_range(key: &str, value: Option<u32>, most: u32) -> Result<Option<u32>, SpecError> {
    match value {
        Some(value) if !(1..=most).contains(&value) => {
            Err(error(key, format!("`{value}` is out of range: expected 1 to {most}")))
        }
        _ => Ok(value),
    }
}

pub(super) fn transfer_rule(
    rule: &str,
    topology: &BTreeMap<String, String>,
) -> Result<TransferRule, SpecError> {
    let problem = |text: &str| error("kv_transfer", format!("`{rule}`: {text}"));
    let mut parts = rule.split(':');
    let (kind, domain, weight) = (parts.next(), parts.next().unwrap_or_default(), parts.next());
    let weight = match (kind, weight) {
        (Some("required"), None) => None,
        (Some("preferred"), Some(weight)) => {
            let weight: f32 = parse("kv_transfer", weight)?;
            Some(weight)
                .filter(|weight| weight.is_finite())
                .ok_or_else(|| problem("the weight has to be finite"))?
                .into()
        }
        _ => return Err(problem("expected required:DOMAIN or preferred:DOMAIN:WEIGHT")),
    };
    // Reject contradictions now; otherwise every request would fail [D3].
    if !topology.contains_key(domain) {
        return Err(problem("the domain is missing in the worker's topology"));
    }
    Ok(TransferRule { domain: domain.to_owned(), weight })
}

/// Parses a name, whose error has the value.
pub(super) fn parse_name<T: FromStr<Err: fmt::Display>>(key: &str, name: &str) -> Result<T, SpecError> {
    name.parse().map_err(|e| error(key, format!("{e}")))
}

pub(super) fn parse<T: FromStr>(key: &str, value: &str) -> Result<T, SpecError>
where
    T::Err: fmt::Display,
{
    value.parse().map_err(|e| error(key, format!("`{value}`: {e}")))
}
