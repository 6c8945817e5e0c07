//! Parses and checks single values of a worker's description.

use std::{collections::BTreeMap, fmt, net::Ipv6Addr, str::FromStr};

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

/// Returns a host as a URL has it: an IPv6 address gets its brackets.
pub(super) fn host_in_url(key: &str, text: &str) -> Result<String, SpecError> {
    if text.parse::<Ipv6Addr>().is_ok() {
        return Ok(format!("[{text}]"));
    }
    if is_host_in_url(text) {
        return Ok(text.to_owned());
    }
    let problem = "is not a host: write a name or an IP address, without a scheme, a port or a zone";
    Err(error(key, format!("`{text}` {problem}")))
}

/// Checks that a text is a host and a port. Without its brackets, an IPv6 address would not end before the
/// port.
pub(super) fn check_address(key: &str, text: &str) -> Result<(), SpecError> {
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    let is_address = text.rsplit_once(':').is_some_and(|(host, port)| is_host_in_url(host) && is_port(port));
    let problem = "is not of the form host:port, with an IPv6 address in brackets, such as [fd00::1]:14579";
    if is_address { Ok(()) } else { Err(error(key, format!("`{text}` {problem}"))) }
}

/// Returns whether a text is a host as a URL has it.
fn is_host_in_url(text: &str) -> bool {
    match text.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').is_some_and(|address| address.parse::<Ipv6Addr>().is_ok()),
        None => {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            !text.is_empty() && text.bytes().all(fits)
        }
    }
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
