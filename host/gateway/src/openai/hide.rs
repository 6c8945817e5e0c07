//! Takes values out of an engine's JSON that a client must not see.

use std::{ops::Range, sync::LazyLock};

use memchr::memmem::Finder;

use crate::openai::sse;

/// Names of fields, each with its searcher.
pub(crate) type Fields = LazyLock<Vec<Finder<'static>>>;

/// Keys at the top level whose values engines write such fields into, too: the choices of an answer, and the
/// message or the response that a named event is about. Everything else may be the text of the model.
const CONTAINERS: [&[u8]; 3] = [b"choices", b"message", b"response"];

/// Makes the searchers of these fields.
pub(crate) fn finders(names: &[&'static str]) -> Vec<Finder<'static>> {
    names.iter().copied().map(Finder::new).collect()
}

/// Replaces the values of `fields` in an event or a body by null: at the top level, and in the objects of its
/// containers. `None` if it has none of them.
#[must_use]
pub(crate) fn without_fields(bytes: &[u8], fields: &[Finder<'static>]) -> Option<Vec<u8>> {
    // Almost no answer has one with a value, so the search for the names comes before the search for the ends
    // of strings.
    if !fields.iter().any(|field| may_have_value(bytes, field)) {
        return None;
    }
    let body = sse::without_mark(bytes).trim_ascii_start();
    let json = if body.starts_with(b"[") { body } else { sse::object(bytes) };
    let mut search = Search { json, fields, places: Vec::new() };
    // What was found before a place that is not JSON counts.
    let _ = search.container(0, true);
    let places = search.places;
    if places.is_empty() {
        return None;
    }
    let offset = json.as_ptr().addr() - bytes.as_ptr().addr();
    let (mut out, mut from) = (Vec::with_capacity(bytes.len()), 0);
    for place in places {
        out.extend_from_slice(bytes.get(from..offset + place.start)?);
        out.extend_from_slice(b"null");
        from = offset + place.end;
    }
    out.extend_from_slice(bytes.get(from..)?);
    Some(out)
}

/// A search through the upper levels of a text like JSON. The lines of an event's data may stand between two
/// values, and numbers may be `NaN`.
struct Search<'a> {
    json: &'a [u8],
    fields: &'a [Finder<'static>],
    /// Values of the fields that are not null.
    places: Vec<Range<usize>>,
}

impl Search<'_> {
    /// Searches the objects of the value that begins at `at`: itself, or those of a list. Returns its end.
    fn container(&mut self, at: usize, is_top: bool) -> Option<usize> {
        match self.json.get(at)? {
            b'{' => self.object(at + 1, is_top),
            b'[' => self.list(at + 1, is_top),
            _ => value_end(self.json, at),
        }
    }

    fn list(&mut self, mut at: usize, is_top: bool) -> Option<usize> {
        loop {
            at = skip(self.json, at, |byte| byte == b',' || byte.is_ascii_whitespace());
            at = match self.json.get(at)? {
                b']' => return Some(at + 1),
                b'{' => self.object(at + 1, is_top)?,
                _ => value_end(self.json, at)?,
            };
        }
    }

    fn object(&mut self, mut at: usize, is_top: bool) -> Option<usize> {
        loop {
            at = skip(self.json, at, |byte| !matches!(byte, b'"' | b'}'));
            if *self.json.get(at)? == b'}' {
                return Some(at + 1);
            }
            let name = at + 1;
            let quote = string_end(self.json, name)?;
            at = quote + 1;
            let Some(value) = value_behind(self.json, at) else { continue };
            let name = self.json.get(name..quote)?;
            at = if self.fields.iter().any(|field| field.needle() == name) {
                let end = value_end(self.json, value)?;
                if self.json.get(value..end) != Some(b"null") {
                    self.places.push(value..end);
                }
                end
            } else if is_top && CONTAINERS.contains(&name) {
                self.container(value, false)?
            } else {
                value_end(self.json, value)?
            };
        }
    }
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
    let colon = skip(bytes, from, |byte| byte.is_ascii_whitespace());
    (bytes.get(colon) == Some(&b':')).then(|| skip(bytes, colon + 1, |byte| byte.is_ascii_whitespace()))
}

/// Returns the first place from `from` on whose byte is not one of these.
fn skip(bytes: &[u8], from: usize, is_one: impl Fn(u8) -> bool) -> usize {
    let rest = bytes.get(from..).unwrap_or_default();
    from + rest.iter().take_while(|byte| is_one(**byte)).count()
}

/// Returns the end of the value that begins at `at`.
fn value_end(bytes: &[u8], mut at: usize) -> Option<usize> {
    let mut open = 0_usize;
    loop {
        match bytes.get(at)? {
            b'"' => at = string_end(bytes, at + 1)?,
            b'{' | b'[' => open += 1,
            b'}' | b']' => open = open.checked_sub(1)?,
            _ if open == 0 => {
                let is_scalar = |byte: u8| !byte.is_ascii_whitespace() && !matches!(byte, b',' | b'}' | b']');
                return Some(skip(bytes, at, is_scalar).max(at + 1));
            }
            _ => {}
        }
        at += 1;
        if open == 0 {
            return Some(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hide(bytes: &str) -> Option<String> {
        let hidden = without_fields(bytes.as_bytes(), &finders(&["secret", "ids"]));
        hidden.map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn a5_private_fields_become_null_where_engines_write_them_and_all_else_stays() {
        let cases = [
            (r#"{"a":1}"#, None),
            (r#"{"secret":null,"text":"\"secret\":1"}"#, None),
            (r#"{"text":"secret","b":["secret","ids"]}"#, None),
            (r#"{"ids" : null,"text":"\"ids\":[1]","b":{"secret":null}}"#, None),
            // The model or the client wrote these.
            (r#"{"content":[{"input":{"secret":1}}],"b":{"ids": 2}}"#, None),
            (r#"{"choices":[{"message":{"secret":1},"b":[{"ids":2}]}]}"#, None),
            (r#"{"b":{"choices":[{"secret":1}]},"response":{"response":{"secret":1}}}"#, None),
            (r#"{"secret":{"a":[1,{"ids":2}]},"b":2}"#, Some(r#"{"secret":null,"b":2}"#)),
            (
                r#"{"choices":[{"secret" : "x\"y","t":"\\"},1,{"x":{"ids":3},"ids":[1,2]}],"ids":-1.5e3}"#,
                Some(r#"{"choices":[{"secret" : null,"t":"\\"},1,{"x":{"ids":3},"ids":null}],"ids":null}"#),
            ),
            (
                r#" [{"secret":1},{"a":[{"ids":1}],"ids":[NaN]}]"#,
                Some(r#" [{"secret":null},{"a":[{"ids":1}],"ids":null}]"#),
            ),
            (r#"{"a":NaN,"secret":"1","b":[-Infinity]}"#, Some(r#"{"a":NaN,"secret":null,"b":[-Infinity]}"#)),
            (r#"{"secret":{"a":1},"b":["#, Some(r#"{"secret":null,"b":["#)),
            (r#"{"b":2,"secret":{"a":1"#, None),
        ];
        for (body, expected) in cases {
            // A5.14
            assert_eq!(hide(body).as_deref(), expected, "{body}");
        }
    }

    #[test]
    fn a5_private_fields_of_events_become_null() {
        let cases = [
            (
                ": {\ndata: {\"choices\":[{\"secret\":{\"a\":1}}],\"secret\":1}\n\n",
                ": {\ndata: {\"choices\":[{\"secret\":null}],\"secret\":null}\n\n",
            ),
            (
                "event: a\ndata: {\"response\":{\"secret\":[1],\"output\":[{\"ids\":1}]}}\n\n",
                "event: a\ndata: {\"response\":{\"secret\":null,\"output\":[{\"ids\":1}]}}\n\n",
            ),
            (
                "data: {\"message\":{\"ids\":1},\"ids\":2}\n\n",
                "data: {\"message\":{\"ids\":null},\"ids\":null}\n\n",
            ),
            (
                "data: {\"choices\":[\ndata: {\"ids\":1}],\ndata: \"secret\":{\ndata: \"a\":1}}\n\n",
                "data: {\"choices\":[\ndata: {\"ids\":null}],\ndata: \"secret\":null}\n\n",
            ),
        ];
        for (event, expected) in cases {
            // A5.14
            assert_eq!(hide(event).as_deref(), Some(expected));
        }
    }
}
