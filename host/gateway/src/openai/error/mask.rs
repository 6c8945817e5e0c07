//! Takes what engines tell about each other out of their error texts (A5.2): addresses, rooms, and values of
//! the fields with which they hand over.

use std::net::{Ipv4Addr, Ipv6Addr};

use bytes::Bytes;
use memchr::memmem;

use crate::upstream::CallError;

/// Stands where something was taken out.
const HIDDEN: &[u8] = b"[hidden]";
/// Maximum number of searches for an address in the client's body.
const MAX_LOOKUPS: usize = 16;
/// Longest IPv6 address as text, bytes.
const MAX_IPV6: usize = 39;
/// Number of bytes of a value or a list that tell whether it is one. What is hidden may be longer. It bounds
/// how often a byte is looked at.
const MAX_LOOK: usize = 256;
/// Names whose value is taken out.
const KEYS: [&[u8]; 9] = [
    b"bootstrap_room",
    b"bootstrap_host",
    b"bootstrap_addr",
    b"bootstrap_port",
    b"remote_host",
    b"remote_port",
    b"remote_engine_id",
    b"remote_block_ids",
    b"remote_request_id",
];
/// Ends of names of files, before which a line's number may stand.
const FILES: [&str; 23] = [
    "py",
    "pyx",
    "rs",
    "cc",
    "cpp",
    "cxx",
    "cu",
    "cuh",
    "h",
    "hpp",
    "go",
    "js",
    "ts",
    "so",
    "json",
    "yaml",
    "toml",
    "txt",
    "md",
    "jinja",
    "safetensors",
    "bin",
    "gguf",
];

/// Last labels of names of hosts, besides those of countries, which have two letters.
const DOMAINS: [&str; 14] = [
    "com", "net", "org", "cloud", "local", "internal", "intranet", "private", "corp", "lan", "home", "svc",
    "cluster", "consul",
];
/// Words before the name of a host.
const HOST_WORDS: [&[u8]; 15] = [
    b"to", b"from", b"with", b"via", b"host", b"peer", b"server", b"node", b"worker", b"url", b"addr",
    b"address", b"prefill", b"decode", b"remote",
];
/// Number of bytes before a name in which such a word is looked for.
const MAX_WORD: usize = 16;

/// Facts about the request of an error.
#[derive(Default)]
pub(crate) struct RequestFacts<'a> {
    pub id: &'a str,
    /// Body that the client sent. An address that it has is the client's own, such as that of an image.
    pub body: &'a [u8],
    /// Rooms of the handoff.
    pub rooms: &'a [u64],
    /// Hosts of the workers of its legs.
    pub hosts: Vec<&'a str>,
    /// Whether the gateway aborted the leg that failed, or the client has left.
    pub is_cancelled: bool,
}

/// Takes out what a client must not see; `None` when there is nothing. The log has the
/// whole text.
pub(super) fn masked_error(error: &CallError, facts: &RequestFacts<'_>) -> Option<CallError> {
    let of =
        |text: &str| masked(text.as_bytes(), facts).map(|text| String::from_utf8_lossy(&text).into_owned());
    Some(match error {
        CallError::Status { status, content_type, retry, body, in_body } => CallError::Status {
            status: *status,
            content_type: content_type.clone(),
            retry: retry.clone(),
            body: Bytes::from(masked(body, facts)?),
            in_body: *in_body,
        },
        CallError::Closed(text) => CallError::Closed(of(text)?),
        CallError::Broken(text) => CallError::Broken(of(text)?),
        CallError::Protocol(text) => CallError::Protocol(of(text)?),
        CallError::TooLarge(text) => CallError::TooLarge(of(text)?),
        _ => return None,
    })
}

/// Returns a text without what a client must not see; `None` when there is nothing.
pub(crate) fn masked(text: &[u8], facts: &RequestFacts<'_>) -> Option<Vec<u8>> {
    let mut mask = Mask { text, facts, out: Vec::new(), copied: 0, lookups: 0 };
    let mut at = 0;
    while at < text.len() {
        at = mask.next(at);
    }
    if mask.copied == 0 {
        return None;
    }
    mask.out.extend_from_slice(text.get(mask.copied..).unwrap_or_default());
    Some(mask.out)
}

/// A text whose first bytes were looked at.
struct Mask<'a> {
    text: &'a [u8],
    facts: &'a RequestFacts<'a>,
    out: Vec<u8>,
    /// Number of bytes of the text that are in `out`, or were left out.
    copied: usize,
    lookups: usize,
}

impl Mask<'_> {
    /// Looks at what begins at `at`, and returns where to go on.
    fn next(&mut self, at: usize) -> usize {
        let end = self.run(at, is_of_name);
        if end == at {
            return self.bracketed_ipv6(at).unwrap_or(at + 1);
        }
        let piece = self.slice(at, end);
        if KEYS.iter().any(|key| is_key(piece, key)) {
            return self.value_of_key(end).unwrap_or(end);
        }
        if let Some(end) = self.bare_ipv6(at) {
            return end;
        }
        if self.is_room(at, end) {
            self.hide(at, end, self.is_json_value(at));
            return end;
        }
        self.address(at, end).unwrap_or(end)
    }

    /// Whether the text from `from` to `to` is a room of the request.
    fn is_room(&self, from: usize, to: usize) -> bool {
        let number =
            std::str::from_utf8(self.slice(from, to)).ok().and_then(|number| number.parse::<u64>().ok());
        number.is_some_and(|number| number > 0 && self.facts.rooms.contains(&number))
    }

    /// Hides the address whose host is, or ends, the name from `from` to `end`. Returns where it ends.
    fn address(&mut self, from: usize, end: usize) -> Option<usize> {
        let port_end = self.port(end);
        let name = self.slice(from, end);
        // A dot may end a sentence.
        let trimmed = if port_end.is_some() { name } else { without_dots(name) };
        // vLLM's P2pNccl has addresses within its ids.
        let skipped = trimmed.iter().rposition(|byte| *byte == b'_').map_or(0, |at| at + 1);
        let host = std::str::from_utf8(trimmed.get(skipped..)?).ok()?;
        let at = from + skipped;
        let is_in_url = self.text.get(..at)?.ends_with(b"://");
        let is_known = self.facts.hosts.iter().any(|known| known.eq_ignore_ascii_case(host));
        let ip: Option<Ipv4Addr> = host.parse().ok();
        let is_address = match (ip, port_end) {
            (Some(_), Some(_)) => true,
            (Some(ip), None) => is_local(ip) || is_known,
            (None, Some(_)) => {
                is_known || is_in_url || host == "localhost" || self.has_port_of_host(host, at, end)
            }
            // Alone, a name without a dot may be anything.
            (None, None) => is_known && (is_in_url || host.contains('.')),
        };
        let end = port_end.unwrap_or(from + trimmed.len());
        if !is_address || host.is_empty() || self.is_of_client(at, end) {
            return None;
        }
        self.hide(at, end, false);
        Some(end)
    }

    /// Whether a name with dots that begins at `at` and the port behind it are an address: not a line of a
    /// file or of a Python module.
    fn has_port_of_host(&self, host: &str, at: usize, colon: usize) -> bool {
        let Some((_, label)) = host.rsplit_once('.') else { return false };
        let port = self.slice(colon + 1, self.run(colon + 1, |byte| byte.is_ascii_digit()));
        let is_high = port.len() >= 4 && !port.starts_with(b"0");
        let is_label = label.len() > 1 && label.bytes().all(|byte| byte.is_ascii_alphabetic());
        let is_host = || host.contains('-') || is_domain(label) || self.is_named_as_host(at);
        is_high && is_label && !FILES.contains(&label) && is_host()
    }

    /// Whether the word before `at` says that a host follows.
    fn is_named_as_host(&self, at: usize) -> bool {
        let before = self.slice(at.saturating_sub(MAX_WORD), at);
        let end = before.iter().rposition(u8::is_ascii_alphabetic).map_or(0, |last| last + 1);
        let (word, between) = before.split_at(end);
        let from = word.iter().rposition(|byte| !byte.is_ascii_alphabetic()).map_or(0, |last| last + 1);
        let (path, word) = word.split_at(from);
        // A module may have such a name.
        let is_part = path.ends_with(b".") || between.contains(&b'.');
        !is_part && HOST_WORDS.iter().any(|one| word.eq_ignore_ascii_case(one))
    }

    /// Returns the end of the port behind a host that ends at `end`.
    fn port(&self, end: usize) -> Option<usize> {
        (self.text.get(end) == Some(&b':')).then_some(())?;
        let port_end = self.run(end + 1, |byte| byte.is_ascii_digit());
        let next = self.text.get(port_end).copied().unwrap_or(b' ');
        let is_port = (1..=5).contains(&(port_end - end - 1)) && !next.is_ascii_alphanumeric();
        is_port.then_some(port_end)
    }

    /// Hides `[address]`, with its port.
    fn bracketed_ipv6(&mut self, at: usize) -> Option<usize> {
        let inner = self.text.get(at..)?.strip_prefix(b"[")?;
        let length = inner.iter().take(MAX_IPV6 + 1).position(|byte| *byte == b']')?;
        let end = at + length + 2;
        let port = self.port(end);
        // `[::1]` alone is a slice of Python, too.
        (parses(inner.get(..length)?) && (port.is_some() || length >= 8)).then_some(())?;
        let end = port.unwrap_or(end);
        if self.is_of_client(at, end) {
            return Some(end);
        }
        self.hide(at, end, false);
        Some(end)
    }

    /// Hides an IPv6 address without brackets. Times and namespaces have fewer colons.
    fn bare_ipv6(&mut self, at: usize) -> Option<usize> {
        let rest = self.text.get(at..at.saturating_add(MAX_IPV6 + 1).min(self.text.len()))?;
        let is_one = |byte: &&u8| byte.is_ascii_hexdigit() || **byte == b':';
        let address = rest.get(..rest.iter().take_while(is_one).count())?;
        let end = at + address.len();
        let is_part =
            self.slice(0, at).ends_with(b":") || self.text.get(end).is_some_and(u8::is_ascii_alphanumeric);
        let colons = || memchr::memchr_iter(b':', address).count();
        (!is_part && address.len() >= 8 && colons() > 2 && parses(address)).then_some(())?;
        if !self.is_of_client(at, end) {
            self.hide(at, end, false);
        }
        Some(end)
    }

    /// Hides the value of a key that ends at `end`. Returns the end of the value.
    fn value_of_key(&mut self, end: usize) -> Option<usize> {
        let is_quote = |byte: u8| matches!(byte, b'"' | b'\'' | b'\\');
        let is_blank = |byte: u8| byte == b' ';
        let behind_quote = self.run(end, is_quote);
        let colon = self.run(behind_quote, is_blank);
        let separator = self.text.get(colon).copied().filter(|byte| matches!(byte, b'=' | b':'));
        let open = self.run(colon + usize::from(separator.is_some()), is_blank);
        let from = self.run(open, is_quote);
        let is_list = from == open && self.text.get(from) == Some(&b'[');
        let look = self.slice(from, from.saturating_add(MAX_LOOK).min(self.text.len()));
        let value = if is_list {
            look
        } else {
            look.get(..look.iter().take_while(|byte| is_of_value(**byte)).count()).unwrap_or_default()
        };
        let value = if is_list || from > open { value } else { without_dots(value) };
        let is_nothing = matches!(value, b"" | b"None" | b"null" | b"True" | b"False" | b"true" | b"false");
        // Words may follow the name in a sentence.
        let is_value = match separator {
            Some(b'=') => true,
            Some(_) => from > open || is_list || value.iter().any(u8::is_ascii_digit),
            None => behind_quote == end && open > end && value.iter().any(u8::is_ascii_digit),
        };
        if is_nothing || !is_value {
            return None;
        }
        let to = match is_list {
            true if self.slice(end, behind_quote) == b"\"" => self.json_list_end(from),
            true => self.list_end(from),
            false if value.len() < MAX_LOOK => from + value.len(),
            false => self.run(from, is_of_value),
        };
        self.hide(from, to, behind_quote > end && from == open);
        Some(to)
    }

    /// The end of the list of JSON that begins at `from`. Its texts may have brackets.
    fn json_list_end(&self, from: usize) -> usize {
        let (mut open, mut in_text, mut is_escaped) = (0_usize, false, false);
        let ends = |byte: &u8| {
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' => is_escaped = true,
                b'"' => in_text = !in_text,
                b'[' if !in_text => open += 1,
                b']' if !in_text => open -= 1,
                _ => {}
            }
            open == 0
        };
        let list = self.text.get(from..).unwrap_or_default();
        list.iter().position(ends).map_or(self.text.len(), |length| from + length + 1)
    }

    /// The end of the list that begins at `from` within a text: it may be cut off. The text may be one of
    /// JSON, which has to end as it did.
    fn list_end(&self, from: usize) -> usize {
        let mut open = 0_usize;
        for (at, byte) in self.text.iter().enumerate().skip(from) {
            match byte {
                b'[' => open += 1,
                b']' if open == 1 => return at + 1,
                b']' => open -= 1,
                b',' | b' ' | b'\'' => {}
                other if is_of_name(*other) => {}
                _ => return at,
            }
        }
        self.text.len()
    }

    /// Whether the client sent the text from `from` to `to` itself.
    fn is_of_client(&mut self, from: usize, to: usize) -> bool {
        self.lookups += 1;
        self.lookups <= MAX_LOOKUPS && memmem::find(self.facts.body, self.slice(from, to)).is_some()
    }

    /// Whether a value of JSON begins at `at`.
    fn is_json_value(&self, at: usize) -> bool {
        let before = self.slice(0, at).trim_ascii_end();
        before.ends_with(b":") || before.ends_with(b"[") || before.ends_with(b",")
    }

    /// Leaves out the text from `from` to `to`, which may be a number or a list of JSON.
    fn hide(&mut self, from: usize, to: usize, is_json: bool) {
        self.out.extend_from_slice(self.text.get(self.copied..from).unwrap_or_default());
        self.out.extend_from_slice(if is_json { b"null" } else { HIDDEN });
        self.copied = to;
    }

    fn slice(&self, from: usize, to: usize) -> &[u8] {
        self.text.get(from..to).unwrap_or_default()
    }

    /// The end of the bytes of this kind that begin at `from`.
    fn run(&self, from: usize, is_one: impl Fn(u8) -> bool) -> usize {
        let rest = self.text.get(from..).unwrap_or_default();
        from + rest.iter().take_while(|byte| is_one(**byte)).count()
    }
}

/// Whether a byte may be part of the name of a host, or of a key.
fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_')
}

/// Whether a byte may be part of a value.
fn is_of_value(byte: u8) -> bool {
    is_of_name(byte) || byte == b':'
}

/// Whether the last label of a name is one of hosts.
fn is_domain(label: &str) -> bool {
    label.len() == 2 || DOMAINS.iter().any(|domain| label.eq_ignore_ascii_case(domain))
}

/// A name without the dots and colons behind it, which end a sentence.
fn without_dots(name: &[u8]) -> &[u8] {
    name.get(..name.iter().rposition(|byte| !matches!(byte, b'.' | b':')).map_or(0, |last| last + 1))
        .unwrap_or_default()
}

/// Whether a name is this key, or a path to it such as `request.bootstrap_room`.
fn is_key(name: &[u8], key: &[u8]) -> bool {
    name.strip_suffix(key).is_some_and(|before| before.is_empty() || before.ends_with(b"."))
}

/// Whether an address without a port is surely not a version, of which libraries have some with four parts.
fn is_local(ip: Ipv4Addr) -> bool {
    let is_shared = matches!(ip.octets(), [100, 64..=127, ..]);
    ip.is_private() || ip.is_loopback() || ip.is_link_local() || is_shared
}

fn parses(address: &[u8]) -> bool {
    std::str::from_utf8(address).is_ok_and(|address| address.parse::<Ipv6Addr>().is_ok())
}

#[cfg(test)]
mod tests;
