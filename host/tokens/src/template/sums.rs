//! Lets templates print long texts without copies of them.
//!
//! Most templates print sums: `{{ '<|user|>' + message.content + '<|end|>' }}` copies the content twice
//! before it is printed. Where one summand is a text in quotes, a sum is either a text or an error, so that
//! the summands may as well be printed one after the other.

use std::borrow::Cow;

use minijinja::{
    Error, ErrorKind, State, Value, filters,
    machinery::{WhitespaceConfig, parse},
    syntax::SyntaxConfig,
    value::{StringInput, ValueKind},
};
use serde_json::{Value as Node, json};

/// Filter that fails for anything but a text, like a sum with a text.
pub(super) const TEXT_FILTER: &str = "pointsman_summand";

/// Returns a template that prints the same, with printed sums taken apart where possible.
pub(super) fn printed_apart(source: &str) -> String {
    let mut out = String::with_capacity(source.len() * 2);
    let mut rest = source;
    while let Some((before, tag, after)) = next_tag(rest) {
        out.push_str(before);
        let apart = split_sum(tag).filter(|apart| is_same(tag, apart));
        out.push_str(&apart.map_or(Cow::Borrowed(tag), Cow::Owned));
        rest = after;
    }
    out.push_str(rest);
    // A tag may be within a raw block, where it is text.
    if is_same(source, &out) { out } else { source.to_owned() }
}

/// The filter [`TEXT_FILTER`].
pub(super) fn text(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.clone()),
        kind => {
            let problem = format!("tried to use + operator on a string and {kind}");
            Err(Error::new(ErrorKind::InvalidOperation, problem))
        }
    }
}

/// The filter `trim`, which returns the text itself where there is nothing to trim.
pub(super) fn trim(
    state: &State<'_, '_>,
    value: &Value,
    chars: Option<Cow<'_, str>>,
) -> Result<Value, Error> {
    let text = value.as_str().filter(|_| value.kind() == ValueKind::String && chars.is_none());
    if text.is_some_and(|text| text.trim().len() == text.len()) {
        return Ok(value.clone());
    }
    Ok(filters::trim(StringInput::new(state, value)?, chars))
}

/// Returns the text before the next tag that prints, the tag, and the text after it. Other tags and comments
/// belong to the text.
fn next_tag(source: &str) -> Option<(&str, &str, &str)> {
    let mut from = 0;
    loop {
        let start = from + source.get(from..)?.find('{')?;
        let rest = source.get(start..)?;
        let close = match rest.as_bytes().get(1) {
            Some(b'{') => {
                let end = start + print_end(rest)?;
                return Some((source.get(..start)?, source.get(start..end)?, source.get(end..)?));
            }
            Some(b'%') => "%}",
            Some(b'#') => "#}",
            _ => "{",
        };
        from = start + rest.find(close)? + close.len();
    }
}

/// Returns the length of a tag that prints.
fn print_end(tag: &str) -> Option<usize> {
    let mut end = None;
    outside_of_brackets(tag.get(2..)?, |at, rest| {
        if rest.starts_with("}}") {
            end = Some(at + 4);
        }
        end.is_none()
    });
    end
}

/// Returns a tag with one tag for each summand; `None` if it prints no sum.
fn split_sum(tag: &str) -> Option<String> {
    let inner = tag.strip_prefix("{{")?.strip_suffix("}}")?;
    let (open, inner) = match inner.strip_prefix(['-', '+']) {
        Some(rest) => (tag.get(..3)?, rest),
        None => ("{{", inner),
    };
    let (inner, close) = match inner.strip_suffix('-') {
        Some(rest) => (rest, "-}}"),
        None => (inner, "}}"),
    };
    let (mut summands, mut start) = (Vec::new(), 0);
    outside_of_brackets(inner, |at, rest| {
        if rest.starts_with('+') {
            summands.extend(inner.get(start..at));
            start = at + 1;
        }
        true
    });
    if summands.is_empty() {
        return None;
    }
    summands.push(inner.get(start..)?);
    let print = |summand: &&str| match summand.trim() {
        quoted if quoted.starts_with(['\'', '"']) => quoted.to_owned(),
        other => format!("({other})|{TEXT_FILTER}"),
    };
    let printed: Vec<String> = summands.iter().map(print).collect();
    Some(format!("{open} {} {close}", printed.join(" }}{{ ")))
}

/// Calls `each` for every place that is outside of brackets and quotes, until it returns false.
fn outside_of_brackets(text: &str, mut each: impl FnMut(usize, &str) -> bool) {
    let (mut depth, mut quote, mut escaped) = (0_usize, None, false);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(_), _) if escaped => escaped = false,
            (Some(_), '\\') => escaped = true,
            (Some(open), _) if open == c => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(c),
            (None, '(' | '[' | '{') => depth += 1,
            (None, ')' | ']' | '}') if depth > 0 => depth -= 1,
            (None, _) if depth == 0 => {
                if !each(at, text.get(at..).unwrap_or_default()) {
                    return;
                }
            }
            (None, _) => {}
        }
    }
}

/// Returns whether `apart` is `source` with printed sums taken apart, by comparing the syntax trees.
fn is_same(source: &str, apart: &str) -> bool {
    match (tree(source), tree(apart)) {
        (Some(mut source), Some(apart)) => {
            take_sums_apart(&mut source);
            source == apart
        }
        _ => false,
    }
}

/// Returns the syntax tree of a template without the places of its nodes.
fn tree(source: &str) -> Option<Node> {
    let white = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
    let tree = parse(source, "chat", SyntaxConfig, white).ok()?;
    let mut tree = serde_json::to_value(&tree).ok()?;
    without_places(&mut tree);
    Some(tree)
}

fn without_places(node: &mut Node) {
    match node {
        Node::Object(fields) if fields.contains_key("start_line") => *node = Node::Null,
        Node::Object(fields) => fields.values_mut().for_each(without_places),
        Node::Array(items) => items.iter_mut().for_each(without_places),
        _ => {}
    }
}

/// Replaces each statement that prints a sum with a text by statements that print its summands.
fn take_sums_apart(node: &mut Node) {
    match node {
        Node::Object(fields) => fields.values_mut().for_each(take_sums_apart),
        Node::Array(items) => {
            items.iter_mut().for_each(take_sums_apart);
            *items = items.drain(..).flat_map(printed).collect();
        }
        _ => {}
    }
}

fn printed(statement: Node) -> Vec<Node> {
    let is_print = statement.get("stmt").and_then(Node::as_str) == Some("EmitExpr");
    let sum = statement.pointer("/inner/0/expr").filter(|_| is_print).map(summands).unwrap_or_default();
    if sum.len() < 2 || !sum.iter().any(|summand| is_text(summand)) {
        return vec![statement];
    }
    let print = |expr: Node| json!({"stmt": "EmitExpr", "inner": [{"expr": expr}, null]});
    let checked = |summand: &Node| {
        let filter = json!({"name": TEXT_FILTER, "expr": summand, "args": []});
        if is_text(summand) { summand.clone() } else { json!({"expr": "Filter", "inner": [filter, null]}) }
    };
    sum.into_iter().map(|summand| print(checked(summand))).collect()
}

/// Returns the summands of a sum, or the expression itself.
fn summands(expr: &Node) -> Vec<&Node> {
    let inner = |name: &str| expr.pointer("/inner/0").and_then(|inner| inner.get(name));
    let is_sum = expr.get("expr").and_then(Node::as_str) == Some("BinOp")
        && inner("op").and_then(Node::as_str) == Some("Add");
    match (inner("left"), inner("right")) {
        (Some(left), Some(right)) if is_sum => summands(left).into_iter().chain([right]).collect(),
        _ => vec![expr],
    }
}

fn is_text(expr: &Node) -> bool {
    expr.get("expr").and_then(Node::as_str) == Some("Const")
        && expr.pointer("/inner/0/value").is_some_and(Node::is_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_sums_with_a_text_are_taken_apart() {
        for (source, expected) in [
            ("{{ 'a' + b }}", "{{ 'a' }}{{ (b)|pointsman_summand }}"),
            (
                "{{- '<|' + m['c'] + \"|}}>\" + n.o|trim -}}",
                "{{- '<|' }}{{ (m['c'])|pointsman_summand }}{{ \"|}}>\" }}{{ (n.o|trim)|pointsman_summand -}}",
            ),
            (
                "x {% if a %} {{'+' + f(b + c)}}{% endif %} y",
                "x {% if a %} {{ '+' }}{{ (f(b + c))|pointsman_summand }}{% endif %} y",
            ),
            ("{{ a + b + '}' }}", "{{ (a)|pointsman_summand }}{{ (b)|pointsman_summand }}{{ '}' }}"),
        ] {
            assert_eq!(printed_apart(source), expected);
        }
    }

    #[test]
    fn everything_else_stays() {
        for source in [
            "{{ a + b }}",
            "{{ 'a' ~ b }}",
            "{{ ('a' + b) }}|{{ ('a' + b)|upper }}",
            "{{ 'a' + b if c else d }}",
            "{{ 'a' + b == c }}",
            "{{ 'a' + b - c }}",
            "{# {{ 'a' + b }} #}{% raw %}{{ 'a' + b }}{% endraw %}",
            "{% set x = 'a' + b %}{{ x }}",
            "{{ {'a': 'b' + c} }}{{ 'a + b' }}",
            "{{ 'a' + b",
        ] {
            assert_eq!(printed_apart(source), source);
        }
    }
}
