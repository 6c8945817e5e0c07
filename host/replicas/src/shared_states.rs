//! The state of policies as entries of a bucket in JetStream.
//!
//! | key of the bucket | written by | content |
//! | --- | --- | --- |
//! | `SLOT.KEY.v` | the last writer | `at` and `by` (the stamp), `value` in base64, `expires_ms` |
//! | `SLOT.KEY.c.GATEWAY` | one gateway | `at`, `by`, `incarnation`, `sum`, `expires_ms` |
//! | `probe.k.c.GATEWAY` | one gateway, with each connection | the same, expired |
//!
//! SLOT is `prefill`, or `prefill_MODEL` with the model in base64 for a slot of one model. KEY is `k` and the
//! policy's key in base64 (URL alphabet, without padding). A removed key has neither value nor sum.

use std::{collections::HashMap, sync::Arc};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD as BASE64};
use pointsman_routing::{SharedContent, SharedState, Stamp, StateChange};
use serde::{Deserialize, Serialize};

use crate::peers::writer_of;

/// Maximum size of an entry, bytes: the largest value in base64, with its frame.
const MAX_ENTRY: usize = 16 * 1024;

/// The states of the slots by a name that is fit for a part of a key: letters, digits, `-` and `_`.
#[derive(Clone, Debug, Default)]
pub struct SharedStates(Arc<HashMap<String, Arc<dyn SharedState>>>);

/// An entry of the bucket.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Body {
    at: u64,
    by: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    incarnation: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sum: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expires_ms: Option<u64>,
}

/// Why an entry is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EntryError {
    #[error("its key is not one of a shared state")]
    Key,
    #[error("it is longer than {MAX_ENTRY} bytes")]
    TooLong,
    #[error("it is not an entry of a shared state")]
    Body,
}

impl SharedStates {
    /// Creates the table.
    pub fn new(states: impl IntoIterator<Item = (String, Arc<dyn SharedState>)>) -> Self {
        Self(Arc::new(states.into_iter().collect()))
    }

    /// Returns whether the operator wants any state shared at present.
    #[must_use]
    pub fn any(&self) -> bool {
        self.shared().next().is_some()
    }

    /// Returns the number of slots that share their state.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shared().count()
    }

    /// Lets all states note changes in the name of a gateway.
    pub(crate) fn share(&self, gateway: &str, incarnation: u64) {
        self.0.values().for_each(|state| state.share(writer_of(gateway), incarnation));
    }

    /// Returns the state of a slot.
    pub(crate) fn get(&self, slot: &str) -> Option<&Arc<dyn SharedState>> {
        self.0.get(slot)
    }

    /// Returns all states that the operator wants shared at present.
    pub(crate) fn shared(&self) -> impl Iterator<Item = (&str, &Arc<dyn SharedState>)> {
        self.0.iter().filter(|(_, state)| state.is_shared()).map(|(slot, state)| (slot.as_str(), state))
    }
}

/// Returns the name of a slot, for all models or for one.
#[must_use]
pub fn slot_name(kind: &str, model: Option<&str>) -> String {
    model.map_or_else(|| kind.to_owned(), |model| format!("{kind}_{}", BASE64.encode(model)))
}

/// Returns a change of a slot's state as a key of the bucket and its entry.
pub(crate) fn to_entry(slot: &str, gateway: &str, change: &StateChange) -> (String, Vec<u8>) {
    let key = format!("k{}", BASE64.encode(&change.key));
    let Stamp { time_us: at, writer: by } = change.stamp;
    let empty = Body { at, by, value: None, incarnation: None, sum: None, expires_ms: None };
    let (key, body) = match &change.content {
        SharedContent::Value { value, expires_ms } => {
            let (value, expires_ms) = (Some(BASE64.encode(value)), Some(*expires_ms));
            (format!("{slot}.{key}.v"), Body { value, expires_ms, ..empty })
        }
        SharedContent::Deleted => (format!("{slot}.{key}.v"), empty),
        SharedContent::Part { incarnation, sum, expires_ms, .. } => {
            let body = Body {
                incarnation: Some(*incarnation),
                sum: Some(*sum),
                expires_ms: Some(*expires_ms),
                ..empty
            };
            (format!("{slot}.{key}.c.{gateway}"), body)
        }
    };
    (key, serde_json::to_vec(&body).unwrap_or_default())
}

/// Reads an entry of the bucket. Returns its slot and the change.
pub(crate) fn from_entry<'a>(key: &'a str, body: &[u8]) -> Result<(&'a str, StateChange), EntryError> {
    let mut parts = key.split('.');
    let (slot, name) = parts.next().zip(parts.next()).ok_or(EntryError::Key)?;
    let gateway = match (parts.next(), parts.next(), parts.next()) {
        (Some("v"), None, None) => None,
        (Some("c"), Some(gateway), None) => Some(gateway),
        _ => return Err(EntryError::Key),
    };
    let decode = |text: &str, error| BASE64.decode(text).map_err(|_| error);
    let name = name.strip_prefix('k').ok_or(EntryError::Key)?;
    let name = String::from_utf8(decode(name, EntryError::Key)?).map_err(|_| EntryError::Key)?;
    if body.len() > MAX_ENTRY {
        return Err(EntryError::TooLong);
    }
    let body: Body = serde_json::from_slice(body).map_err(|_| EntryError::Body)?;
    let stamp = Stamp { time_us: body.at, writer: body.by };
    let content = match (gateway, body) {
        (None, Body { value: Some(value), expires_ms: Some(expires_ms), .. }) => {
            SharedContent::Value { value: decode(&value, EntryError::Body)?, expires_ms }
        }
        (None, Body { value: None, sum: None, .. }) => SharedContent::Deleted,
        // The key names the gateway that adds, so that the server can restrict who writes it.
        (
            Some(gateway),
            Body { incarnation: Some(incarnation), sum: Some(sum), expires_ms: Some(expires_ms), .. },
        ) => SharedContent::Part { writer: writer_of(gateway), incarnation, sum, expires_ms },
        _ => return Err(EntryError::Body),
    };
    Ok((slot, StateChange { key: name, stamp, content }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(key: &str, content: SharedContent) -> StateChange {
        StateChange { key: key.to_owned(), stamp: Stamp { time_us: 5, writer: u64::MAX }, content }
    }

    #[test]
    fn entries_are_read_as_they_were_written() {
        let part = SharedContent::Part {
            writer: writer_of("gw-1"),
            incarnation: 7,
            sum: i64::MIN,
            expires_ms: u64::MAX,
        };
        let value = SharedContent::Value { value: vec![0, 255], expires_ms: 9 };
        for (key, content) in [("", SharedContent::Deleted), ("a.*> \u{e9}", part), ("b", value)] {
            let change = change(key, content);
            let (key, body) = to_entry("decode_x", "gw-1", &change);
            assert!(key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)), "{key}");
            assert_eq!(from_entry(&key, &body), Ok(("decode_x", change)));
        }
    }

    #[test]
    fn q7_other_keys_and_bodies_are_refused() {
        let (key, body) = to_entry("decode", "gw", &change("b", SharedContent::Deleted));
        let long = vec![b' '; MAX_ENTRY + 1];
        // Q7.4
        for (key, body, error) in [
            ("decode", body.as_slice(), EntryError::Key),
            ("decode.kYg.x", &body, EntryError::Key),
            ("decode.Yg.v", &body, EntryError::Key),
            ("decode.k!.v", &body, EntryError::Key),
            ("decode.k_w.v", &body, EntryError::Key),
            ("decode.kYg.c.gw.more", &body, EntryError::Key),
            ("decode.kYg.c.gw", &body, EntryError::Body),
            (&key, b"{}", EntryError::Body),
            (&key, b"\xff", EntryError::Body),
            (&key, br#"{"at":1,"by":1,"value":"!","expires_ms":1}"#, EntryError::Body),
            (&key, &long, EntryError::TooLong),
        ] {
            assert_eq!(from_entry(key, body), Err(error), "{key}");
        }
    }
}
