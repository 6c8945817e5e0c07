//! Fields of a trace that have no effect: those that ask for what the simulation does not have (adapters,
//! images, audio and video), and those that no reader knows.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Parts of the names of fields that ask for what the simulation does not have.
const PARTS: [&str; 5] = ["lora", "adapter", "image", "audio", "video"];
/// Parts of lines with such a field, whatever the case of its first letters. Most lines have none of them,
/// and are not parsed again.
const HINTS: [&str; 7] = ["ora", "ORA", "oRA", "dapter", "mage", "udio", "ideo"];
/// Number of lines at the start of a file of JSON in which unknown names are looked for.
const SAMPLED_LINES: u32 = 100;
/// Maximum number of unknown names in a note.
const MAX_NAMES: usize = 10;

/// Names of the fields that some line sets.
#[derive(Clone, Debug, Default)]
pub(super) struct Dropped {
    names: BTreeSet<String>,
    /// Number of lines of JSON so far.
    lines: u32,
}

impl Dropped {
    /// Looks at a line of JSON, in a format with these fields.
    pub(super) fn look_at(&mut self, line: &str, known: &[&str]) {
        let is_sampled = self.lines < SAMPLED_LINES;
        self.lines += u32::from(is_sampled);
        if !is_sampled && !HINTS.iter().any(|hint| line.contains(hint)) {
            return;
        }
        let Ok(fields) = serde_json::from_str::<Map<String, Value>>(line) else { return };
        for (name, value) in fields {
            let is_unknown = is_sampled && !known.contains(&&*name);
            if (is_unknown || is_dropped(&name)) && !is_unset(&value) {
                self.names.insert(name);
            }
        }
    }

    /// Looks at a column of CSV.
    pub(super) fn look_at_column(&mut self, name: &str, text: &str) {
        let is_unset =
            text.parse() == Ok(0.0) || ["", "false", "null", "nan"].contains(&&*text.to_lowercase());
        if !is_unset && !self.names.contains(name) {
            self.names.insert(name.to_owned());
        }
    }

    /// Returns what a reader of results has to know, if a line has such a field. `known` are the fields of
    /// JSON in this format.
    pub(super) fn notes(&self, known: &[&str]) -> Vec<String> {
        let (dropped, unknown): (Vec<&str>, Vec<&str>) =
            self.names.iter().map(String::as_str).partition(|name| is_dropped(name));
        let list = |names: &[&str]| {
            let quoted = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>();
            quoted.join(", ")
        };
        let mut notes = Vec::new();
        if !dropped.is_empty() {
            notes.push(format!(
                "fields of the trace without effect: {}; the simulation has no adapters, images, audio or video, and a \
                 prompt has the tokens of its length",
                list(&dropped)
            ));
        }
        if !unknown.is_empty() {
            let (shown, others) = unknown.split_at(unknown.len().min(MAX_NAMES));
            let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
            let has = match known {
                // The help has the columns of CSV.
                [] => "`pointsman trace import --help` lists those of its format".to_owned(),
                _ => format!("its format has {}", list(known)),
            };
            notes.push(format!("fields of the trace that are not read: {}{more}; {has}", list(shown)));
        }
        notes
    }
}

/// Whether a field with this name asks for what the simulation does not have.
fn is_dropped(name: &str) -> bool {
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
