//! Takes values out of an engine's JSON that a client must not see.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde_json::value::RawValue;

/// Names of fields, each with its searcher.
pub(crate) type Fields = LazyLock<Vec<Finder<'static>>>;

/// Makes the searchers of these fields.
pub(crate) fn finders(names: &[&'static str]) -> Vec<Finder<'static>> {
    names.iter().copied().map(Finder::new).collect()
}

/// Replaces the value of every one of `fields`, on any level, by null. `None` if the body has none of them.
/// `body` is valid JSON.
#[must_use]
pub(crate) fn without_fields(body: &[u8], fields: &[Finder<'static>]) -> Option<Vec<u8>> {
    // Almost no answer has one with a value, so the search for the names comes before the search for the ends
    // of strings.
    if !fields.iter().any(|field| may_have_value(body, field)) {
        return None;
    }
    let (mut out, mut from, mut at) = (Vec::new(), 0, 0);
    while let Some(quote) = find(body, at, b'"') {
        let end = string_end(body, quote + 1)?;
        at = end + 1;
        let text = body.get(quote + 1..end).unwrap_or_default();
        let Some(value) =
            value_behind(body, at).filter(|_| fields.iter().any(|field| field.needle() == text))
        else {
            continue;
        };
        let length = value_length(body.get(value..)?)?;
        at = value + length;
        if body.get(value..at) != Some(b"null") {
            out.extend_from_slice(body.get(from..value)?);
            out.extend_from_slice(b"null");
            from = at;
        }
    }
    if from == 0 {
        return None;
    }
    out.extend_from_slice(body.get(from..)?);
    Some(out)
}

/// Returns whether the name of `field` stands in quotes before a colon and a value that is not null. Text in
/// a string can look like that, too.
fn may_have_value(body: &[u8], field: &Finder<'_>) -> bool {
    field.find_iter(body).any(|at| {
        let end = at + field.needle().len();
        let value = (body.get(end) == Some(&b'"')).then(|| value_behind(body, end + 1)).flatten();
        value.is_some_and(|value| !body.get(value..).unwrap_or_default().starts_with(b"null"))
    })
}

fn find(bytes: &[u8], from: usize, byte: u8) -> Option<usize> {
    memchr::memchr(byte, bytes.get(from..)?).map(|at| from + at)
}

/// The closing quote of the string whose content begins at `from`.
fn string_end(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        at += memchr::memchr2(b'"', b'\\', bytes.get(at..)?)?;
        if bytes.get(at) == Some(&b'"') {
            return Some(at);
        }
        at += 2;
    }
}

/// Returns the start of the value whose key ends at `from`; `None` when the string that ends there is not a
/// key.
fn value_behind(bytes: &[u8], from: usize) -> Option<usize> {
    let colon = skip_blanks(bytes, from);
    (bytes.get(colon) == Some(&b':')).then(|| skip_blanks(bytes, colon + 1))
}

fn skip_blanks(bytes: &[u8], from: usize) -> usize {
    let rest = bytes.get(from..).unwrap_or_default();
    from + rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}

/// Length of the JSON value that `bytes` begin with.
fn value_length(bytes: &[u8]) -> Option<usize> {
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<&RawValue>();
    Some(values.next()?.ok()?.get().len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a5_values_of_private_fields_become_null_on_every_level_and_text_stays() {
        let fields = finders(&["secret", "ids"]);
        let hide = |body: &str| {
            let hidden = without_fields(body.as_bytes(), &fields);
            hidden.map(|bytes| String::from_utf8(bytes).unwrap())
        };
        let cases = [
            (r#"{"a":1}"#, None),
            (r#"{"secret":null,"text":"\"secret\":1"}"#, None),
            (r#"{"text":"secret","b":["secret","ids"]}"#, None),
            (r#"{"ids" : null,"text":"\"ids\":[1]","b":{"secret":null}}"#, None),
            (
                r#"{"ids":null,"text":"\"ids\":[1]","b":{"ids": 2}}"#,
                Some(r#"{"ids":null,"text":"\"ids\":[1]","b":{"ids": null}}"#),
            ),
            (r#"{"secret":{"a":[1,{"ids":2}]},"b":2}"#, Some(r#"{"secret":null,"b":2}"#)),
            (
                r#"{"c":[{"secret" : "x\"y","t":"\\"},{"ids":[1,2]}],"ids":-1.5e3}"#,
                Some(r#"{"c":[{"secret" : null,"t":"\\"},{"ids":null}],"ids":null}"#),
            ),
        ];
        for (body, expected) in cases {
            // A5.14
            assert_eq!(hide(body).as_deref(), expected, "{body}");
        }
    }
}
