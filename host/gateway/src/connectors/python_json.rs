//! Answers of servers in Python, which write the numbers NaN and Infinity that JSON lacks: a log probability
//! of a prefill answer may be one.

use serde::Deserialize;

/// Reads an answer. `repaired` has its text if that had to be changed.
///
/// # Errors
/// It is not JSON, apart from such numbers.
pub(super) fn read<'a, T: Deserialize<'a>>(
    text: &'a str,
    repaired: &'a mut String,
) -> Result<T, serde_json::Error> {
    serde_json::from_str(text).or_else(|error| {
        *repaired = with_nulls(text).ok_or(error)?;
        serde_json::from_str(repaired)
    })
}

/// Returns a text with `null` in the place of each such number; `None` if it has none.
fn with_nulls(text: &str) -> Option<String> {
    const NUMBERS: [&str; 3] = ["NaN", "Infinity", "-Infinity"];
    let (mut repaired, mut copied, mut from) = (String::new(), 0, 0);
    while let Some(place) = memchr::memchr3(b'"', b'N', b'I', text.as_bytes().get(from..)?) {
        let at = from + place;
        let rest = text.get(at..)?;
        if rest.starts_with('"') {
            from = at + end_of_string(rest);
            continue;
        }
        let begin = at - usize::from(text.get(..at)?.ends_with('-'));
        let number =
            NUMBERS.iter().find(|number| text.get(begin..).is_some_and(|text| text.starts_with(**number)));
        let end = begin + number?.len();
        repaired.push_str(text.get(copied..begin)?);
        repaired.push_str("null");
        (copied, from) = (end, end);
    }
    repaired.push_str(text.get(copied..)?);
    (copied > 0).then_some(repaired)
}

/// Returns the length of the string with which a text begins.
fn end_of_string(text: &str) -> usize {
    let mut is_escaped = false;
    let is_end = |(_, byte): &(usize, u8)| {
        let ends = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        ends
    };
    text.bytes().enumerate().skip(1).find(is_end).map_or(text.len(), |(at, _)| at + 1)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn numbers_that_json_lacks_are_null_and_strings_stay() {
        let read = |text: &str| read::<Value>(text, &mut String::new()).ok();
        let text = r#"{"a":[NaN,-Infinity, Infinity,-1],"NaN":"is \"NaN\" \\","I":{"b":NaN}}"#;
        let expected = json!({"a": [null, null, null, -1], "NaN": "is \"NaN\" \\", "I": {"b": null}});
        assert_eq!(read(text), Some(expected));
        assert_eq!(read(r#"{"a":1}"#), Some(json!({"a": 1})));
        for wrong in [r#"{"a":Nan}"#, r#"{"a":NaN"#, r#"{"a":"NaN}"#, "NaN\"", "-", "I"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
