//! A configuration as it is written: sections of keys, each with the reason for its value.

use toml::Value;

use crate::report::{is_hidden, plain};

/// Columns up to which a comment stands beside its key.
const WIDTH: usize = 110;

/// The table of the decode override.
pub(crate) const DECODE_OVERRIDE: &str = "policies.slots.decode-override";

/// A configuration file in the making.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    sections: Vec<Section>,
    /// Lines at the end, commented out: what the operator may want to complete.
    hints: Vec<String>,
}

/// A table, or one element of an array of tables.
#[derive(Debug)]
pub(crate) struct Section {
    header: String,
    comment: String,
    lines: Vec<Line>,
}

#[derive(Debug)]
struct Line {
    key: String,
    value: Value,
    comment: String,
}

impl Draft {
    /// Sets a key of the table with this dotted name. A key that is set already keeps its value. Returns
    /// whether the key has the given value now.
    pub(crate) fn set(
        &mut self,
        table: &str,
        key: &str,
        value: impl Into<Value>,
        comment: impl AsRef<str>,
    ) -> bool {
        let value = value.into();
        let section = self.table(table).set(key, value.clone(), comment);
        section.lines.iter().any(|line| line.key == key && line.value == value)
    }

    /// Returns the table with this dotted name, and adds it when it is missing.
    pub(crate) fn table(&mut self, name: &str) -> &mut Section {
        let header = format!("[{name}]");
        let known = self.sections.iter().position(|section| section.header == header);
        let place = known.unwrap_or_else(|| {
            self.sections.push(Section { header, comment: String::new(), lines: Vec::new() });
            self.sections.len() - 1
        });
        #[expect(clippy::indexing_slicing, reason = "the position of a section that was found or just added")]
        &mut self.sections[place]
    }

    /// Adds an element to the array of tables with this dotted name.
    pub(crate) fn element(&mut self, name: &str, comment: impl AsRef<str>) -> &mut Section {
        let comment = plain(comment.as_ref());
        self.sections.push(Section { header: format!("[[{name}]]"), comment, lines: Vec::new() });
        let last = self.sections.len() - 1;
        #[expect(clippy::indexing_slicing, reason = "a section was just added")]
        &mut self.sections[last]
    }

    /// Adds a table below the last element of an array of tables.
    pub(crate) fn table_of_element(&mut self, name: &str) -> &mut Section {
        self.sections.push(Section {
            header: format!("[{name}]"),
            comment: String::new(),
            lines: Vec::new(),
        });
        let last = self.sections.len() - 1;
        #[expect(clippy::indexing_slicing, reason = "a section was just added")]
        &mut self.sections[last]
    }

    /// Returns the worker with this URL.
    pub(crate) fn worker_at(&mut self, url: &str) -> Option<&mut Section> {
        let is_it = |line: &Line| line.key == "url" && line.value.as_str() == Some(url);
        let mut workers = self.sections.iter_mut().filter(|section| section.header == "[[workers]]");
        workers.find(|section| section.lines.iter().any(is_it))
    }

    /// Writes a decode override that prefills every prompt remotely. Without one, the default of the
    /// gateway's release would decide.
    pub(crate) fn always_remote(&mut self, source: impl AsRef<str>) {
        self.set(DECODE_OVERRIDE, "builtin", "conditional-disagg", source);
        self.set(&format!("{DECODE_OVERRIDE}.settings"), "enabled", false, "every prefill is remote");
    }

    /// Adds a line that is commented out.
    pub(crate) fn hint(&mut self, line: impl AsRef<str>) {
        self.hints.push(plain(line.as_ref()));
    }

    /// Returns whether the table has the key.
    pub(crate) fn has(&self, table: &str, key: &str) -> bool {
        let header = format!("[{table}]");
        let section = self.sections.iter().find(|section| section.header == header);
        section.is_some_and(|section| section.lines.iter().any(|line| line.key == key))
    }

    /// Returns the file. `source` names its source.
    pub(crate) fn text(&self, source: &str) -> String {
        let mut text = format!(
            "# Made by `pointsman import` from {}. Check it with `pointsman check-config FILE`.\n",
            plain(source)
        );
        for section in self.sections.iter().filter(|section| section.is_shown()) {
            text.push('\n');
            push_line(&mut text, &section.header, &section.comment);
            for Line { key, value, comment } in &section.lines {
                push_line(&mut text, &format!("{} = {}", key_text(key), value_text(value)), comment);
            }
        }
        if !self.hints.is_empty() {
            text.push('\n');
        }
        for hint in &self.hints {
            text.push_str(&format!("# {hint}\n"));
        }
        text
    }
}

impl Section {
    /// Sets a key. A key that is set already keeps its value.
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>, comment: impl AsRef<str>) -> &mut Self {
        if !self.lines.iter().any(|line| line.key == key) {
            let comment = plain(comment.as_ref());
            self.lines.push(Line { key: key.to_owned(), value: value.into(), comment });
        }
        self
    }

    /// An element of an array counts without keys, too.
    fn is_shown(&self) -> bool {
        !self.lines.is_empty() || self.header.starts_with("[[")
    }
}

/// Appends a line with its comment beside it, or above it where it is long.
fn push_line(text: &mut String, line: &str, comment: &str) {
    if comment.is_empty() {
        text.push_str(&format!("{line}\n"));
    } else if line.chars().count() + comment.chars().count() + 4 <= WIDTH {
        text.push_str(&format!("{line}  # {comment}\n"));
    } else {
        text.push_str(&format!("# {comment}\n{line}\n"));
    }
}

/// A value on one line.
pub(crate) fn value_text(value: &Value) -> String {
    match value {
        Value::String(text) => quoted(text),
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(value_text).collect();
            format!("[{}]", values.join(", "))
        }
        Value::Table(entries) => {
            let entries: Vec<String> = entries
                .iter()
                .map(|(key, value)| format!("{} = {}", key_text(key), value_text(value)))
                .collect();
            format!("{{ {} }}", entries.join(", "))
        }
        value => value.to_string(),
    }
}

/// A text in quotation marks, on one line.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            letter if is_hidden(letter) => quoted.push_str(&format!("\\U{:08X}", u32::from(letter))),
            letter => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}

/// Returns a key, or one part of a table's dotted name, in TOML's form: bare where possible, else quoted.
pub(crate) fn key_text(key: &str) -> String {
    let bare = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !key.is_empty() && key.bytes().all(bare) { key.to_owned() } else { quoted(key) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s1_whatever_names_and_values_are_the_text_is_the_toml_that_was_meant() {
        let evil = "a\"\\\n[server]\nadmin_insecure = true # \u{2028}";
        let mut draft = Draft::default();
        draft.set("models", evil, evil, evil);
        draft.element("workers", evil).set("url", evil, evil).set("url", "again", "");
        draft.table_of_element(&format!("workers.{}", key_text(evil))).set("x", 1, "");
        draft.hint(evil);
        let text = draft.text(evil);
        let parsed: toml::Table = text.parse().unwrap();
        // S1.5
        assert_eq!(parsed["models"][evil].as_str(), Some(evil), "{text}");
        assert_eq!(parsed["workers"][0]["url"].as_str(), Some(evil));
        assert_eq!(parsed["workers"][0][evil]["x"].as_integer(), Some(1));
        assert!(!parsed.contains_key("server"), "{text}");
    }

    #[test]
    fn a_comment_stands_beside_a_short_line_and_above_a_long_one() {
        let mut draft = Draft::default();
        draft.set("server", "listen", "0.0.0.0:1", "--port");
        draft.set("server", "cors_origins", vec!["x".repeat(100)], "--cors");
        let text = draft.text("x");
        assert!(text.contains("listen = \"0.0.0.0:1\"  # --port\n# --cors\ncors_origins"), "{text}");
        assert!(draft.has("server", "listen") && !draft.has("server", "port"));
    }
}
