//! Fields that ask for what the simulation does not have: adapters, images, audio and video.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Parts of the names of such fields.
const PARTS: [&str; 5] = ["lora", "adapter", "image", "audio", "video"];
/// Parts of lines with such a field, whatever the case of its first letters. Most lines have none of them,
/// and are not parsed again.
const HINTS: [&str; 7] = ["ora", "ORA", "oRA", "dapter", "mage", "udio", "ideo"];

/// Names of the fields that some line sets.
#[derive(Clone, Debug, Default)]
pub(super) struct Dropped(BTreeSet<String>);

impl Dropped {
    /// Looks at a line of JSON.
    pub(super) fn look_at(&mut self, line: &str) {
        if !HINTS.iter().any(|hint| line.contains(hint)) {
            return;
        }
        let Ok(fields) = serde_json::from_str::<Map<String, Value>>(line) else { return };
        for (name, value) in fields {
            if is_dropped(&name) && !is_unset(&value) {
                self.0.insert(name);
            }
        }
    }

    /// Looks at a column of CSV.
    pub(super) fn look_at_column(&mut self, name: &str, text: &str) {
        let is_unset =
            text.parse() == Ok(0.0) || ["", "false", "null", "nan"].contains(&&*text.to_lowercase());
        if !is_unset && !self.0.contains(name) {
            self.0.insert(name.to_owned());
        }
    }

    /// Returns what a reader of results has to know, if a line has such a field.
    pub(super) fn note(&self) -> Option<String> {
        let names: Vec<String> = self.0.iter().map(|name| format!("`{name}`")).collect();
        (!names.is_empty()).then(|| {
            format!(
                "fields of the trace without effect: {}; the simulation has no adapters, images, audio or video, and a \
                 prompt has the tokens of its length",
                names.join(", ")
            )
        })
    }
}

/// Whether the simulation drops a field with this name.
pub(super) fn is_dropped(name: &str) -> bool {
    let name = name.to_lowercase();
    PARTS.iter().any(|part| name.contains(part))
}

fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}
