//! The chart's files, which need no `helm`: versions, values, their schema and their documentation.

use std::collections::BTreeSet;

use super::*;

/// A key of `values.yaml`.
#[derive(Debug)]
struct Entry {
    path: String,
    comment: String,
}

/// Keys of `values.yaml` in their order. The comment above a key describes it.
fn entries(text: &str) -> Vec<Entry> {
    let (mut found, mut above, mut parents) = (Vec::new(), Vec::<&str>::new(), Vec::<(usize, String)>::new());
    for line in text.lines() {
        let trimmed = line.trim_start();
        if let Some(comment) = trimmed.strip_prefix("# ") {
            above.push(comment);
            continue;
        }
        let key = trimmed.split_once(':').map(|(key, _)| key).filter(|key| !key.starts_with('-'));
        let Some(key) = key else {
            above.clear();
            continue;
        };
        let indent = line.len() - trimmed.len();
        parents.retain(|(column, _)| *column < indent);
        let path: Vec<&str> = parents.iter().map(|(_, key)| key.as_str()).chain([key]).collect();
        found.push(Entry { path: path.join("."), comment: above.join(" ") });
        parents.push((indent, key.to_owned()));
        above.clear();
    }
    found
}

/// Returns whether the keys below a path are the operator's, and not the chart's.
fn open(schema: &Value) -> bool {
    schema["additionalProperties"] != false
}

/// Paths of the schema's keys, without those below a key whose content is the operator's.
fn paths(schema: &Value, definitions: &Value, prefix: &str, found: &mut BTreeSet<String>) {
    for (key, property) in schema["properties"].as_object().into_iter().flatten() {
        let name = property["$ref"].as_str().and_then(|name| name.strip_prefix("#/definitions/"));
        // A definition is a type such as `probe`; its keys have no row of their own.
        let property = name.map_or(property, |name| &definitions[name]);
        let path = format!("{prefix}{key}");
        if name.is_none() && property["properties"].is_object() && !open(property) {
            paths(property, definitions, &format!("{path}."), found);
        } else {
            found.insert(path);
        }
    }
}

/// The value of a path, as one line of YAML.
fn default(values: &Value, path: &str) -> String {
    let value = path.split('.').fold(values, |value, key| &value[key]);
    serde_json::to_string(value).unwrap()
}

#[test]
fn n6_the_chart_has_the_version_of_the_release() {
    let about = yaml(&read("Chart.yaml"));
    // N6.11
    assert_eq!(
        (&about["version"], &about["appVersion"]),
        (&env!("CARGO_PKG_VERSION").into(), &env!("CARGO_PKG_VERSION").into())
    );
}

#[test]
fn n6_every_value_is_described_and_its_schema_knows_no_other() {
    let schema: Value = serde_json::from_str(&read("values.schema.json")).unwrap();
    let mut known = BTreeSet::new();
    paths(&schema, &schema["definitions"], "", &mut known);
    // Values of a parent chart.
    known.remove("global");
    let text = read("values.yaml");
    let values = yaml(&text);
    let described: Vec<Entry> =
        entries(&text).into_iter().filter(|entry| known.contains(&entry.path)).collect();
    let have: BTreeSet<String> = described.iter().map(|entry| entry.path.clone()).collect();
    // N6.11
    assert_eq!(have, known, "values.yaml and its schema have different keys");
    let silent: Vec<&str> =
        described.iter().filter(|entry| entry.comment.is_empty()).map(|entry| entry.path.as_str()).collect();
    // N6.11
    assert_eq!(silent, Vec::<&str>::new(), "values.yaml describes no such key");

    let row = |entry: &Entry| {
        let default = default(&values, &entry.path);
        format!("| `{}` | `{default}` | {} |\n", entry.path, entry.comment.replace('|', "\\|"))
    };
    let rows: String = described.iter().map(row).collect();
    let table = format!("| value | default | what it is |\n| --- | --- | --- |\n{rows}");
    let readme = read("README.md");
    let (head, _) = readme.split_once("-->\n\n").unwrap();
    let wanted = format!("{head}-->\n\n{table}");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(chart().join("README.md"), &wanted).unwrap();
    }
    // N6.11
    assert_eq!(read("README.md"), wanted, "the table is stale: the comment above it says how to write it");
}
