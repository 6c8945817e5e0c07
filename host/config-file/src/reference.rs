//! The reference of a configuration, written from its JSON Schema: an example with every key, and the keys
//! that need a restart.
//!
//! Of the schema's own words it uses `x-position` (order of the keys), `x-example`, `x-range` and
//! `x-restart`, which the attribute [`section`](macro@crate::section) writes.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use crate::problem::join;

/// Column of the comments, and the width of the page.
const COLUMN: usize = 35;
const WIDTH: usize = 120;

/// Returns an example with every key, its default and what it does. Keys and tables without a default are
/// comments: without `# ` they are valid, too.
#[must_use]
pub fn example(schema: &Value) -> String {
    let mut writer = Writer { root: schema, text: String::new() };
    for (name, property) in properties(schema) {
        writer.table(name, property, false);
    }
    writer.text.trim_start().to_owned()
}

/// Returns the keys that need a restart, as the rows of a table in Markdown: section, keys.
#[must_use]
pub fn restart_table(schema: &Value) -> String {
    let mut rows = String::new();
    for (name, property) in properties(schema) {
        let (section, _) = resolve(schema, property);
        let all: Vec<(&str, &Value)> = properties(section).collect();
        let keys: Vec<String> =
            all.iter().filter(|(_, key)| needs_restart(key)).map(|(key, _)| format!("`{key}`")).collect();
        if keys.is_empty() {
            continue;
        }
        let keys = if keys.len() == all.len() { "all".to_owned() } else { keys.join(", ") };
        let _ = writeln!(rows, "| `[{name}]` | {keys} |");
    }
    rows
}

/// Removes what only the reference needs.
pub fn strip(schema: &mut Value) {
    match schema {
        Value::Object(entries) => {
            entries.retain(|key, _| !matches!(key.as_str(), "x-position" | "x-example" | "x-range"));
            entries.values_mut().for_each(strip);
        }
        Value::Array(elements) => elements.iter_mut().for_each(strip),
        _ => {}
    }
}

/// Kind of a key's value.
enum Kind<'a> {
    Value,
    /// A table; `None` is a possible value of an optional one.
    Table {
        schema: &'a Value,
        optional: bool,
    },
    /// Tables by name.
    Named(&'a Value),
    /// Tables in an array.
    List(&'a Value),
}

struct Writer<'a> {
    root: &'a Value,
    text: String,
}

impl Writer<'_> {
    /// Writes the table, or tables, of a key. `in_comment`: the table around it is a comment.
    fn table(&mut self, header: &str, property: &Value, in_comment: bool) {
        let doc = description(property);
        match kind(self.root, property) {
            Kind::Value => {}
            Kind::Table { schema, optional } => {
                let in_comment = in_comment || optional;
                self.line(&format!("[{header}]"), &doc, in_comment, true);
                self.keys(header, schema, in_comment);
            }
            Kind::Named(schema) => {
                let name = property["x-example"].as_str().unwrap_or("NAME");
                let header = join(header, name);
                self.line(&format!("[{header}]"), &doc, true, true);
                self.keys(&header, schema, true);
            }
            Kind::List(schema) => {
                self.line(&format!("[[{header}]]"), &doc, true, true);
                self.keys(header, schema, true);
            }
        }
    }

    /// Writes the keys of a table, then the tables in it.
    fn keys(&mut self, header: &str, schema: &Value, in_comment: bool) {
        let mut tables = Vec::new();
        for (key, property) in properties(schema) {
            if !matches!(kind(self.root, property), Kind::Value) {
                tables.push((key, property));
                continue;
            }
            let default = property.get("default").filter(|default| !default.is_null()).map(toml);
            let example = property["x-example"].as_str().map(str::to_owned);
            let is_comment = in_comment || default.is_none();
            let value = if in_comment { example.or(default) } else { default.or(example) };
            let value = value.unwrap_or_else(|| "\"…\"".to_owned());
            let mut doc = description(property);
            if let Some(range) = property["x-range"].as_str() {
                let _ = write!(doc, "; {range}");
            }
            self.line(&format!("{key} = {value}"), &doc, is_comment, false);
        }
        for (key, property) in tables {
            self.table(&join(header, key), property, in_comment);
        }
    }

    /// Writes a line with its comment, which may continue on further lines.
    fn line(&mut self, line: &str, doc: &str, is_comment: bool, is_header: bool) {
        let before = if is_header { "\n" } else { "" };
        let mut line = format!("{before}{}{line}", if is_comment { "# " } else { "" });
        let mut width = line.trim_start().chars().count();
        let mut begun = false;
        for word in doc.split_whitespace() {
            let start = if begun { width } else { width.max(COLUMN - 1) };
            if start + 1 + word.chars().count() + if begun { 0 } else { 2 } > WIDTH {
                self.text.push_str(line.trim_end());
                self.text.push('\n');
                (line, width, begun) = (String::new(), 0, false);
            }
            if !begun {
                line.push_str(&" ".repeat((COLUMN - 1).saturating_sub(width)));
                line.push_str(" #");
                (width, begun) = (width.max(COLUMN - 1) + 2, true);
            }
            line.push(' ');
            line.push_str(word);
            width += 1 + word.chars().count();
        }
        self.text.push_str(&line);
        self.text.push('\n');
    }
}

/// The properties of a table, in the order of its fields.
fn properties(schema: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let properties = schema["properties"].as_object().into_iter().flat_map(Map::iter);
    let mut sorted: Vec<(&str, &Value)> =
        properties.map(|(key, property)| (key.as_str(), property)).collect();
    sorted.sort_by_key(|(_, property)| property["x-position"].as_u64().unwrap_or(u64::MAX));
    sorted.into_iter()
}

/// Follows references. Returns whether the value may be missing, too.
fn resolve<'a>(root: &'a Value, schema: &'a Value) -> (&'a Value, bool) {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = root.pointer(reference.trim_start_matches('#')).unwrap_or(&Value::Null);
        return resolve(root, target);
    }
    let options = schema["anyOf"].as_array().map(Vec::as_slice).unwrap_or_default();
    match options {
        [inner, null] if null["type"] == "null" => (resolve(root, inner).0, true),
        _ => (schema, false),
    }
}

fn kind<'a>(root: &'a Value, property: &'a Value) -> Kind<'a> {
    let is_table = |schema: &Value| schema["properties"].is_object();
    let (schema, optional) = resolve(root, property);
    let by_name = resolve(root, &schema["additionalProperties"]).0;
    let example = property["x-example"].as_str();
    if is_table(by_name) && !example.is_some_and(|example| example.starts_with('{')) {
        return Kind::Named(by_name);
    }
    if example.is_some() {
        return Kind::Value;
    }
    let element = resolve(root, &schema["items"]).0;
    if is_table(schema) {
        Kind::Table { schema, optional }
    } else if is_table(element) {
        Kind::List(element)
    } else {
        Kind::Value
    }
}

fn needs_restart(key: &Value) -> bool {
    key["x-restart"] == true
}

/// The description of a key, for a comment.
fn description(property: &Value) -> String {
    let text = property["description"].as_str().unwrap_or_default().replace('`', "");
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").trim_end_matches('.').to_owned()
}

/// A value as TOML.
fn toml(value: &Value) -> String {
    toml::Value::try_from(value).map(|value| value.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_key_is_written_and_those_without_a_default_are_comments() {
        let section = json!({ "properties": {
            "late": { "x-position": 2, "default": 1.0, "description": "A weight.", "x-range": "0 or more" },
            "first": { "x-position": 0, "default": [], "description": "`[]`: none." },
            "path": { "x-position": 1, "default": null, "x-example": "\"/a\"", "x-restart": true },
        }});
        let schema = json!({ "properties": {
            "a": { "x-position": 1, "$ref": "#/$defs/A", "description": "The first section." },
            "list": { "x-position": 2, "type": "array", "items": { "$ref": "#/$defs/A" } },
            "by_name": { "x-position": 3, "additionalProperties": { "$ref": "#/$defs/A" }, "x-example": "\"*\"" },
            "maybe": { "x-position": 4, "anyOf": [{ "$ref": "#/$defs/A" }, { "type": "null" }] },
        }, "$defs": { "A": section } });
        let column = |text: &str, doc: &str| format!("{text:<34} # {doc}\n");
        let keys = |comment: &str| {
            column(&format!("{comment}first = []"), "[]: none")
                + "# path = \"/a\"\n"
                + &column(&format!("{comment}late = 1.0"), "A weight; 0 or more")
        };
        let expected = column("[a]", "The first section")
            + &keys("")
            + "\n# [[list]]\n"
            + &keys("# ")
            + "\n# [by_name.\"*\"]\n"
            + &keys("# ")
            + "\n# [maybe]\n"
            + &keys("# ");
        assert_eq!(example(&schema), expected);
        assert_eq!(restart_table(&schema), "| `[a]` | `path` |\n| `[maybe]` | `path` |\n");
    }

    #[test]
    fn a_long_comment_goes_on_in_the_next_line() {
        let doc = "word ".repeat(40);
        let schema =
            json!({ "properties": { "a": { "properties": { "k": { "default": 1, "description": doc } } } } });
        let text = example(&schema);
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert_eq!(text.matches("word").count(), 40);
        assert!(
            text.lines().skip(2).all(|line| line.starts_with(&" ".repeat(35)) && line[35..].starts_with('#'))
        );
    }
}
