//! Finds the `EndpointPickerConfig` in a file: as a document of its own, or as a text in a `ConfigMap` or in
//! Helm values.

use crate::yaml::{self, Node, Value};

/// What the document calls itself.
const KIND: &str = "EndpointPickerConfig";

/// Returns the configuration of a file.
///
/// # Errors
/// The file is not YAML, or does not have exactly one configuration.
pub(super) fn find(text: &str) -> Result<Node, String> {
    let documents = yaml::parse(text)?;
    let mut found = Vec::new();
    for document in documents {
        if is_config(&document) { found.push(document) } else { within(&document, &mut found)? }
    }
    let count = found.len();
    match found.pop() {
        Some(config) if count == 1 => Ok(config),
        Some(_) => {
            Err(format!("{count} documents of the kind `{KIND}`: put the one to import in a file of its own"))
        }
        None => Err(format!(
            "no document of the kind `{KIND}`: give the endpoint picker's configuration, a ConfigMap or Helm \
             values that contain it"
        )),
    }
}

fn is_config(node: &Node) -> bool {
    node.get("kind").and_then(Node::text) == Some(KIND)
}

/// Collects the configurations that are texts within a document.
fn within(node: &Node, found: &mut Vec<Node>) -> Result<(), String> {
    match &node.value {
        Value::Scalar(text) if text.contains(KIND) && text.contains('\n') => {
            let inside = |problem| format!("in the text that begins at line {}: {problem}", node.line);
            for mut inner in yaml::parse(text).map_err(inside)? {
                if is_config(&inner) {
                    // The line of a block is that of its first line with text.
                    let blank = text.chars().take_while(|letter| *letter == '\n').count();
                    inner.move_down((node.line - 1).saturating_sub(blank));
                    found.push(inner);
                }
            }
        }
        Value::Scalar(_) => {}
        Value::List(nodes) => nodes.iter().try_for_each(|node| within(node, found))?,
        Value::Map(entries) => entries.iter().try_for_each(|(_, node)| within(node, found))?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "kind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n";

    fn indented(text: &str, by: usize) -> String {
        text.lines().map(|line| format!("{}{line}\n", " ".repeat(by))).collect()
    }

    #[test]
    fn s2_the_configuration_is_found_in_a_config_map_and_in_helm_values_with_the_file_s_lines() {
        let map = format!("kind: ConfigMap\ndata:\n  epp.yaml: |\n{}", indented(CONFIG, 4));
        let values = format!("a: 1\n---\ninferenceExtension:\n  custom:\n    x: |\n{}", indented(CONFIG, 6));
        let later = format!("data:\n  x: |\n\n\n{}", indented(CONFIG, 4));
        for (text, line) in [(CONFIG.to_owned(), 3), (map, 6), (values, 8), (later, 7)] {
            let config = find(&text).unwrap();
            let plugin = &config.get("plugins").unwrap().list()[0];
            // S2.1
            assert_eq!(plugin.get("type").unwrap().line, line, "{text}");
            assert!(text.lines().nth(line - 1).unwrap().contains("queue-scorer"), "{text}");
        }
    }

    #[test]
    fn s2_a_file_without_the_configuration_or_with_two_is_refused() {
        // S2.1
        assert!(find("kind: Pod\n").unwrap_err().contains("no document of the kind"));
        let two = format!("{CONFIG}---\n{CONFIG}");
        // S2.1
        assert!(find(&two).unwrap_err().starts_with("2 documents"));
        let broken = format!("data:\n  x: |\n{}    [\n", indented(CONFIG, 4));
        assert!(
            find(&broken).unwrap_err().starts_with("in the text that begins at line 3: "),
            "{:?}",
            find(&broken)
        );
    }
}
