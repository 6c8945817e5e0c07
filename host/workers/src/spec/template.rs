//! Addresses of a worker that are written with parts of its URL: `tcp://{host}:5557`.
//!
//! One text of a source describes many workers. In it, `{host}` and `{port}` stand for the host and port of
//! each worker's URL, and `{rank}` for the index of its port in its pod. Numbers can be added and subtracted:
//! `{port+1000}`.

use std::{fmt, net::Ipv6Addr};

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Visitor};

use super::{SpecError, error, rank_endpoint};

/// Values of a worker's URL and source for its addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts<'a> {
    /// Host of the URL; an IPv6 address has its brackets.
    pub(super) host: &'a str,
    pub(super) port: u16,
    pub(super) rank: u32,
}

/// Values with which a template can be checked before there is a worker.
pub(super) const SAMPLE: Parts<'static> = Parts { host: "host", port: 8_000, rank: 0 };

/// A port, or the text from which it is calculated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum PortText {
    Number(u16),
    Template(String),
}

impl PortText {
    /// Writes the port.
    ///
    /// # Errors
    /// It is not a port, or has braces that are not understood.
    pub(super) fn fill(&self, key: &str, parts: Parts<'_>) -> Result<u16, SpecError> {
        match self {
            Self::Number(port) => Ok(*port),
            Self::Template(text) => {
                let port = fill(key, text, parts)?;
                port.parse().map_err(|e| error(key, format!("`{text}`: {e}")))
            }
        }
    }
}

impl<'de> Deserialize<'de> for PortText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PortVisitor)
    }
}

struct PortVisitor;

impl Visitor<'_> for PortVisitor {
    type Value = PortText;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a port, or a text such as \"{port+1000}\"")
    }

    fn visit_u64<E: serde::de::Error>(self, port: u64) -> Result<PortText, E> {
        let unexpected = || E::invalid_value(serde::de::Unexpected::Unsigned(port), &self);
        u16::try_from(port).map(PortText::Number).map_err(|_| unexpected())
    }

    fn visit_i64<E: serde::de::Error>(self, port: i64) -> Result<PortText, E> {
        let unexpected = || E::invalid_value(serde::de::Unexpected::Signed(port), &self);
        u16::try_from(port).map(PortText::Number).map_err(|_| unexpected())
    }

    fn visit_str<E>(self, text: &str) -> Result<PortText, E> {
        Ok(PortText::Template(text.to_owned()))
    }
}

/// Hosts that stand for all addresses of a machine. An engine's own settings listen there.
const ALL_ADDRESSES: [&str; 4] = ["", "*", "0.0.0.0", "[::]"];

/// Writes an endpoint `tcp://host:port`. Without a host, or with all addresses as host, it is the worker's
/// own.
///
/// # Errors
/// The text is not such an endpoint, or has braces that are not understood.
pub(super) fn endpoint(key: &str, text: &str, parts: Parts<'_>) -> Result<String, SpecError> {
    let parted = text.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':'));
    let filled = match parted.filter(|(host, _)| ALL_ADDRESSES.contains(host)) {
        Some((_, port)) => fill(key, &format!("tcp://{}:{port}", parts.host), parts)?,
        None => fill(key, text, parts)?,
    };
    let address = filled.strip_prefix("tcp://").unwrap_or_default();
    if is_bare_ipv6(address) {
        let problem = "has an IPv6 address without brackets: write for example tcp://[fd00::1]:5557";
        return Err(error(key, format!("`{text}` {problem}")));
    }
    if rank_endpoint(&filled, 0).is_none() || !has_ipv6_in_brackets(address) {
        return Err(error(key, format!("`{text}` is not of the form tcp://host:port")));
    }
    Ok(filled)
}

/// Returns whether an address is an IPv6 address without brackets. Its last part may be the port, or not.
fn is_bare_ipv6(address: &str) -> bool {
    let host = address.split_once('%').map_or(address, |(host, _)| host);
    let is_digit = |byte: u8| byte.is_ascii_hexdigit() || b":.".contains(&byte);
    host.matches(':').count() > 1 && host.bytes().all(is_digit)
}

/// Returns whether the brackets of an address, if it has any, hold an IPv6 address.
fn has_ipv6_in_brackets(address: &str) -> bool {
    let Some((host, _)) = address.strip_prefix('[').and_then(|rest| rest.rsplit_once(':')) else {
        return !address.contains(['[', ']']);
    };
    let inside = host.strip_suffix(']').map(|host| host.split_once('%').map_or(host, |(host, _)| host));
    inside.is_some_and(|host| host.parse::<Ipv6Addr>().is_ok())
}

/// Returns whether an endpoint has the port of the engines' own setting: the host is that of each worker's
/// URL, and the port is a number.
pub(super) fn has_engine_port(text: &str) -> bool {
    let parted = text.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':'));
    parted.is_some_and(|(host, port)| {
        (ALL_ADDRESSES.contains(&host) || host == "{host}") && !port.contains(['{', '}'])
    })
}

/// Writes an address, a host or a number.
///
/// # Errors
/// The text has braces that are not understood, or names all addresses of a machine.
pub(super) fn fill(key: &str, text: &str, parts: Parts<'_>) -> Result<String, SpecError> {
    let problem = |what: String| error(key, format!("`{text}`: {what}"));
    let (mut filled, mut rest) = (String::new(), text);
    while let Some((before, behind)) = rest.split_once('{') {
        let Some((name, behind)) = behind.split_once('}') else {
            return Err(problem("`{` without `}`: write for example tcp://{host}:5557".to_owned()));
        };
        filled.push_str(before);
        match name {
            "host" => filled.push_str(parts.host),
            _ => filled.push_str(&sum(name, parts).map_err(problem)?.to_string()),
        }
        rest = behind;
    }
    if rest.contains('}') {
        return Err(problem("`}` without `{`: write for example tcp://{host}:5557".to_owned()));
    }
    filled.push_str(rest);
    let address = filled.strip_prefix("tcp://").unwrap_or(&filled);
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let listens = |host: &&str| host.contains('*') || ["0.0.0.0", "::", "[::]"].contains(host);
    if let Some(host) = [host, address].into_iter().find(listens) {
        return Err(problem(format!("`{host}` is where an engine listens, not where it is: write {{host}}")));
    }
    Ok(filled)
}

/// Calculates a port: numbers, `port` and `rank`, with `+` and `-` between them.
fn sum(text: &str, parts: Parts<'_>) -> Result<u16, String> {
    let unknown =
        || format!("`{{{text}}}` is not known: expected {{host}}, {{port}}, {{rank}} or {{port+1000}}");
    let (mut total, mut rest, mut sign) = (0_i64, text, 1);
    loop {
        let end = rest.find(['+', '-']).unwrap_or(rest.len());
        let (term, behind) = rest.split_at(end);
        total += sign
            * match term.trim() {
                "port" => i64::from(parts.port),
                "rank" => i64::from(parts.rank),
                number => i64::from(number.parse::<u16>().map_err(|_| unknown())?),
            };
        let Some(operator) = behind.chars().next() else { break };
        sign = if operator == '+' { 1 } else { -1 };
        rest = behind.get(1..).unwrap_or_default();
    }
    u16::try_from(total).map_err(|_| format!("`{{{text}}}` is {total}: expected a port, 0 to 65535"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_port_and_rank_stand_for_those_of_the_worker() {
        let parts = Parts { host: "[fd00::1]", port: 8_001, rank: 1 };
        let table = [
            ("tcp://{host}:5557", "tcp://[fd00::1]:5557"),
            ("tcp://:5557", "tcp://[fd00::1]:5557"),
            ("tcp://*:5557", "tcp://[fd00::1]:5557"),
            ("tcp://0.0.0.0:{5557+rank}", "tcp://[fd00::1]:5558"),
            ("tcp://[::]:5557", "tcp://[fd00::1]:5557"),
            ("tcp://{host}:{5557+rank}", "tcp://[fd00::1]:5558"),
            ("tcp://{host}:{port - 2444 + rank}", "tcp://[fd00::1]:5558"),
            ("tcp://relay-{rank}:5557", "tcp://relay-1:5557"),
            ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),
            ("tcp://[fe80::1%eth0]:5557", "tcp://[fe80::1%eth0]:5557"),
        ];
        for (text, expected) in table {
            // P11.1
            assert_eq!(endpoint("kv_events", text, parts).unwrap(), expected, "{text}");
        }
        assert_eq!(fill("bootstrap_port", "{port+998}", parts).unwrap(), "8999");
    }

    #[test]
    fn p11_a_plain_port_at_the_worker_s_host_is_that_of_the_engine_s_setting() {
        // P11.4
        for text in ["tcp://{host}:5557", "tcp://*:5557", "tcp://:5557", "tcp://[::]:5557"] {
            assert!(has_engine_port(text), "{text}");
        }
        for text in [
            "tcp://10.0.0.1:5557",
            "tcp://relay-{host}:5557",
            "tcp://{host}:{5557+rank}",
            "tcp://{host}:{port+1000}",
        ] {
            assert!(!has_engine_port(text), "{text}");
        }
    }

    #[test]
    fn what_is_not_an_address_is_refused_with_what_to_write() {
        let table = [
            ("tcp://*", "`*` is where an engine listens, not where it is: write {host}"),
            ("tcp://*.local:5557", "`*.local` is where an engine listens"),
            ("tcp://{ip}:5557", "`{ip}` is not known: expected {host}, {port}, {rank} or {port+1000}"),
            ("tcp://{host}:{port*2}", "`{port*2}` is not known"),
            ("tcp://{host}:{}", "`{}` is not known"),
            ("tcp://{host:5557", "`{host:5557` without"),
            ("tcp://host}:5557", "`}` without `{`"),
            ("tcp://{host}:{port+60000}", "`{port+60000}` is 68000: expected a port"),
            ("tcp://{host}:{rank-1}", "`{rank-1}` is -1"),
            ("tcp://{host}", "is not of the form tcp://host:port"),
            ("{host}:5557", "is not of the form tcp://host:port"),
            (
                "tcp://fd00::1:5557",
                "has an IPv6 address without brackets: write for example tcp://[fd00::1]:5557",
            ),
            ("tcp://fd00::1", "has an IPv6 address without brackets"),
            ("tcp://fe80::1%eth0:5557", "has an IPv6 address without brackets"),
            ("tcp://::ffff:10.0.0.1:5557", "has an IPv6 address without brackets"),
            ("tcp://[fd00::1]", "is not of the form tcp://host:port"),
            ("tcp://[a]:5557", "is not of the form tcp://host:port"),
            ("tcp://[fd00::1:5557", "is not of the form tcp://host:port"),
        ];
        for (text, expected) in table {
            // P11.2
            let problem = endpoint("kv_events", text, SAMPLE).unwrap_err().problem;
            let expected = expected.replace("`{host:5557` without", "`{` without `}`");
            assert!(problem.contains(&expected), "{text}: {problem}");
        }
    }
}
