//! Detects whether a template expects the content of a message as a string or as a list of parts.
//!
//! Engines decide by the template's syntax tree: a template that loops over the content of a message expects
//! parts. The rules follow `_detect_content_format` in vLLM's `renderers/hf.py`. The tree is converted to
//! JSON, so that this file need not name every kind of node.

use std::collections::HashMap;

use minijinja::{
    Error, ErrorKind,
    machinery::{WhitespaceConfig, parse},
    syntax::SyntaxConfig,
};
use serde_json::Value as Node;

/// Form of a message's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// A string; parts are joined with newlines. vLLM calls it `string`.
    Text,
    /// A list of parts. vLLM calls it `openai`.
    Parts,
}

/// A `{% for %}` loop of the template.
struct Loop<'a> {
    node: &'a Node,
    over: &'a Node,
    target: Option<&'a str>,
}

impl ContentFormat {
    /// Returns the format that a template expects.
    pub(crate) fn detect(source: &str) -> Result<Self, Error> {
        let white = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
        let tree = parse(source, "chat", SyntaxConfig, white)?;
        let root = serde_json::to_value(&tree).map_err(|error| {
            Error::new(ErrorKind::BadSerialization, "the syntax tree is not JSON").with_source(error)
        })?;
        Ok(if loops_over_content(&root) { Self::Parts } else { Self::Text })
    }
}

fn loops_over_content(root: &Node) -> bool {
    let loops: Vec<Loop<'_>> = all(root, "stmt", "ForLoop").into_iter().filter_map(Loop::of).collect();
    let messages = aliases(root, "messages");
    let is_messages = |node: &Node| messages.iter().any(|name| touches(node, name, None));
    let message: Vec<&str> =
        loops.iter().filter(|found| is_messages(found.over)).filter_map(|found| found.target).collect();
    let is_content = |node: &Node| message.iter().any(|name| touches(node, name, Some("content")));
    let calls = all(root, "expr", "Call");
    // For each loop inside a macro: the parameters that receive a message's content from any call.
    let mut inside: HashMap<*const Node, Vec<&str>> = HashMap::new();
    for declared in all(root, "stmt", "Macro") {
        let parameters = content_parameters(declared, &calls, &is_content);
        for found in all(declared, "stmt", "ForLoop") {
            inside.insert(std::ptr::from_ref(found), parameters.clone());
        }
    }
    loops.iter().any(|found| {
        is_content(found.over)
            || match (inside.get(&std::ptr::from_ref(found.node)), variable(found.over)) {
                (Some(parameters), Some(name)) => parameters.contains(&name),
                (None, name) => name == Some("content"),
                (Some(_), None) => false,
            }
    })
}

/// Returns the names that are assigned a variable, or a slice of it.
fn aliases<'a>(root: &'a Node, name: &'a str) -> Vec<&'a str> {
    let mut names = vec![name];
    let sets = all(root, "stmt", "Set");
    let mut next = 0;
    while let Some(known) = names.get(next).copied() {
        next += 1;
        for set in &sets {
            let (Some(target), Some(expr)) = (field(set, "target"), field(set, "expr")) else { continue };
            match variable(target) {
                Some(alias) if touches(expr, known, None) && !names.contains(&alias) => names.push(alias),
                _ => {}
            }
        }
    }
    names
}

/// Returns the parameters of a macro that receive the content of a message from any call.
fn content_parameters<'a>(
    declared: &'a Node,
    calls: &[&'a Node],
    is_content: &impl Fn(&Node) -> bool,
) -> Vec<&'a str> {
    let name = field(declared, "name").and_then(Node::as_str);
    let parameters: Vec<&str> = list(declared, "args").iter().filter_map(variable).collect();
    let mut found = Vec::new();
    let own = |call: &&&Node| name.is_some() && field(call, "expr").and_then(variable) == name;
    for call in calls.iter().filter(own) {
        let mut place = 0;
        for argument in list(call, "args") {
            if let Some(value) = argument.get("Pos") {
                found.extend(parameters.get(place).filter(|_| is_content(value)));
                place += 1;
            }
            if let Some([key, value]) = argument.get("Kwarg").and_then(Node::as_array).map(Vec::as_slice) {
                let named = key.as_str().filter(|key| parameters.contains(key));
                found.extend(named.filter(|_| is_content(value)));
            }
        }
    }
    found
}

/// Returns whether an expression is the variable (or its `key`), a slice of it, or either through filters and
/// tests.
fn touches(node: &Node, name: &str, key: Option<&str>) -> bool {
    match kind(node) {
        Some("Filter" | "Test" | "Slice") => {
            field(node, "expr").is_some_and(|inner| touches(inner, name, key))
        }
        Some("GetAttr") => {
            key.is_some() && is_variable(node, name) && field(node, "name").and_then(Node::as_str) == key
        }
        Some("GetItem") => {
            let index = field(node, "subscript_expr").filter(|index| kind(index) == Some("Const"));
            let index = index.and_then(|index| field(index, "value")).and_then(Node::as_str);
            key.is_some() && is_variable(node, name) && index == key
        }
        _ => key.is_none() && variable(node) == Some(name),
    }
}

fn is_variable(node: &Node, name: &str) -> bool {
    field(node, "expr").and_then(variable) == Some(name)
}

fn variable(node: &Node) -> Option<&str> {
    (kind(node) == Some("Var")).then(|| field(node, "id").and_then(Node::as_str)).flatten()
}

fn kind(node: &Node) -> Option<&str> {
    node.get("expr").and_then(Node::as_str)
}

/// Returns the fields of a node, which is a tag beside `inner: [fields, span]`.
fn field<'a>(node: &'a Node, name: &str) -> Option<&'a Node> {
    node.get("inner")?.get(0)?.get(name)
}

fn list<'a>(node: &'a Node, name: &str) -> &'a [Node] {
    field(node, name).and_then(Node::as_array).map_or(&[], Vec::as_slice)
}

impl<'a> Loop<'a> {
    fn of(node: &'a Node) -> Option<Self> {
        Some(Self { node, over: field(node, "iter")?, target: field(node, "target").and_then(variable) })
    }
}

fn all<'a>(root: &'a Node, tag: &str, name: &str) -> Vec<&'a Node> {
    let mut found = Vec::new();
    let mut open = vec![root];
    while let Some(node) = open.pop() {
        match node {
            Node::Object(fields) => {
                if fields.get(tag).and_then(Node::as_str) == Some(name) {
                    found.push(node);
                }
                open.extend(fields.values());
            }
            Node::Array(items) => open.extend(items),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(source: &str, expected: ContentFormat) {
        assert_eq!(ContentFormat::detect(source).unwrap(), expected, "{source}");
    }

    #[test]
    fn a_loop_over_content_wants_parts() {
        for source in [
            "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}",
            "{% for m in messages %}{% for c in m['content']|list %}{{ c.text }}{% endfor %}{% endfor %}",
            "{% set loop_messages = messages[1:] %}{% set again = loop_messages %}{% for m in again %}\
             {% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}\
             {% endif %}{% endfor %}",
            "{% for m in messages %}{% set content = m.content %}{% for c in content %}x{% endfor %}{% endfor %}",
            "{% macro show(what, x) %}{% for c in what %}{{ c }}{% endfor %}{% endmacro %}\
             {% for m in messages %}{{ show(m.content, 1) }}{% endfor %}",
            "{% macro show(what) %}{% for c in what %}{{ c }}{% endfor %}{% endmacro %}\
             {% for m in messages %}{{ show(what=m['content']) }}{% endfor %}",
        ] {
            check(source, ContentFormat::Parts);
        }
    }

    #[test]
    fn everything_else_wants_text() {
        for source in [
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{{ m['content'] }}{% endfor %}",
            "{% for m in others %}{% for c in m.content %}x{% endfor %}{% endfor %}",
            "{% macro show(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}\
             {% for m in messages %}{{ show(m.role) }}{% endfor %}",
        ] {
            check(source, ContentFormat::Text);
        }
    }
}
