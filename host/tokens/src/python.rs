//! Prints values as Python does: `str`, `repr`, and `json.dumps` with the arguments of transformers.

use std::fmt::{self, Write};

use minijinja::{
    Error, ErrorKind, Output, Value,
    value::{Kwargs, ValueKind},
};

/// Arguments of `json.dumps`.
struct Style {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sorted: bool,
}

/// Prints a value as `{{ value }}` does.
pub(crate) fn print(value: &Value, out: &mut Output<'_>) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text).map_err(Error::from),
        None => out.write_str(&text(value)).map_err(Error::from),
    }
}

/// Returns `str(value)`.
pub(crate) fn text(value: &Value) -> String {
    let mut out = String::new();
    match value.as_str() {
        Some(text) => out.push_str(text),
        None if value.is_undefined() => {}
        None => repr(value, &mut out),
    }
    out
}

/// The filter `tojson`, with the arguments that transformers passes.
pub(crate) fn tojson(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let pick = |given: Option<Value>, name| match given {
        Some(given) => Ok(Some(given)),
        None => kwargs.get::<Option<Value>>(name),
    };
    let ascii = pick(ensure_ascii, "ensure_ascii")?.is_some_and(|ascii| ascii.is_true());
    let indent = pick(indent, "indent")?.filter(|indent| !indent.is_none());
    let indent = match indent {
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?),
        }),
        None => None,
    };
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let sorted = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let mut separators = separators.unwrap_or_default().into_iter();
    let between = if indent.is_some() { "," } else { ", " };
    let style = Style {
        ascii,
        item: separators.next().unwrap_or_else(|| between.to_owned()),
        key: separators.next().unwrap_or_else(|| ": ".to_owned()),
        indent,
        sorted,
    };
    let mut out = String::new();
    json(value, &style, 0, &mut out)?;
    Ok(Value::from(out))
}

fn json(value: &Value, style: &Style, depth: usize, out: &mut String) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&match number(value).as_str() {
            "nan" => "NaN".to_owned(),
            "inf" => "Infinity".to_owned(),
            "-inf" => "-Infinity".to_owned(),
            other => other.to_owned(),
        }),
        ValueKind::String => quote(value.as_str().unwrap_or_default(), style.ascii, out),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            block(['[', ']'], &items, style, depth, out, |item, out| json(item, style, depth + 1, out))?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sorted {
                keys.sort();
            }
            block(['{', '}'], &keys, style, depth, out, |key, out| {
                quote(&text(key), style.ascii, out);
                out.push_str(&style.key);
                json(&value.get_item(key)?, style, depth + 1, out)
            })?;
        }
        kind => {
            let problem = format!("{kind} is not JSON serializable");
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
    }
    Ok(())
}

fn block(
    [open, close]: [char; 2],
    items: &[Value],
    style: &Style,
    depth: usize,
    out: &mut String,
    mut write: impl FnMut(&Value, &mut String) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |depth: usize, out: &mut String| {
        if let Some(indent) = style.indent.as_ref().filter(|_| !items.is_empty()) {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    };
    out.push(open);
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push_str(&style.item);
        }
        line(depth + 1, out);
        write(item, out)?;
    }
    line(depth, out);
    out.push(close);
    Ok(())
}

fn quote(text: &str, ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if u32::from(c) < 0x20 || (ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    escape(out, format_args!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn repr(value: &Value, out: &mut String) {
    let items = || value.try_iter().into_iter().flatten().enumerate();
    match value.kind() {
        ValueKind::String => repr_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::Seq => {
            out.push('[');
            for (index, item) in items() {
                out.push_str(if index > 0 { ", " } else { "" });
                repr(&item, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in items() {
                out.push_str(if index > 0 { ", " } else { "" });
                repr(&key, out);
                out.push_str(": ");
                repr(&value.get_item(&key).unwrap_or_default(), out);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

fn repr_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote || c == '\\' => out.extend(['\\', c]),
            c if u32::from(c) < 0x20 || matches!(c, '\u{7f}'..='\u{a0}' | '\u{ad}') => {
                escape(out, format_args!("\\x{:02x}", u32::from(c)));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => float_text(float),
        _ => value.to_string(),
    }
}

/// Prints a float as `repr` does: with the fewest digits, and with an exponent below 1e-4 and from 1e16 on.
fn float_text(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    let scientific = format!("{float:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let power: i32 = exponent.parse().unwrap_or_default();
    if (-4..16).contains(&power) || float == 0.0 {
        let plain = float.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if power < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", power.abs())
}

fn escape(out: &mut String, args: fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = out.write_fmt(args);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::Json;

    #[test]
    fn floats_are_python_floats() {
        for (float, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.234_567_890_123_456_8e17, "1.2345678901234568e+17"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (-2.5e-300, "-2.5e-300"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(float_text(float), text);
        }
    }

    #[test]
    fn text_is_quoted_as_python_quotes() {
        for (text, quoted) in [
            ("a", "'a'"),
            ("it's", "\"it's\""),
            ("it's \"x\"", "'it\\'s \"x\"'"),
            ("\n\u{1}\u{7f}\\é", "'\\n\\x01\\x7f\\\\é'"),
        ] {
            let mut out = String::new();
            repr_text(text, &mut out);
            assert_eq!(out, quoted);
        }
    }

    #[test]
    fn json_is_what_json_dumps_writes() {
        let Json(value) = serde_json::from_str(r#"{"b":[1,2.0,"<é\u0001😀"],"a":{},"c":null}"#).unwrap();
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", tojson);
        let run = |call: &str| {
            let source = format!("{{{{ v|tojson{call} }}}}");
            environment.render_str(&source, minijinja::context! { v => value }).unwrap()
        };
        assert_eq!(run(""), r#"{"b": [1, 2.0, "<é\u0001😀"], "a": {}, "c": null}"#);
        assert_eq!(
            run("(ensure_ascii=true, sort_keys=true, separators=(',', ':'))"),
            r#"{"a":{},"b":[1,2.0,"<\u00e9\u0001\ud83d\ude00"],"c":null}"#
        );
        assert_eq!(
            run("(indent=1)"),
            "{\n \"b\": [\n  1,\n  2.0,\n  \"<é\\u0001😀\"\n ],\n \"a\": {},\n \"c\": null\n}"
        );
        assert!(environment.render_str("{{ nope|tojson }}", ()).is_err());
        assert!(environment.render_str("{{ 1|tojson(colour=2) }}", ()).is_err());
    }
}
