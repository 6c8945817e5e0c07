//! One spelling of JSON's strings, so that equal texts have equal bytes: clients may write a character as an
//! escape.

use bytes::Bytes;

/// Returns JSON with characters in place of escapes, where a string may have both.
pub(super) fn plain(body: Bytes) -> Bytes {
    if !body.contains(&b'\\') {
        return body;
    }
    let mut plain = Vec::with_capacity(body.len());
    let mut rest = &body[..];
    while let Some(at) = rest.iter().position(|byte| *byte == b'\\') {
        let (before, escaped) = rest.split_at(at);
        plain.extend_from_slice(before);
        let (letter, length) = read_escape(escaped);
        let (escape, behind) = escaped.split_at_checked(length).unwrap_or((escaped, &[]));
        match letter {
            Some(letter) if letter >= ' ' && !matches!(letter, '"' | '\\') => {
                plain.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
            }
            // One of the escapes of a letter that must be escaped.
            Some(letter) => {
                let quoted = serde_json::to_string(&letter).unwrap_or_default();
                plain.extend_from_slice(
                    quoted.get(1..quoted.len().saturating_sub(1)).unwrap_or_default().as_bytes(),
                );
            }
            None => plain.extend_from_slice(escape),
        }
        rest = behind;
    }
    plain.extend_from_slice(rest);
    plain.into()
}

/// Returns the letter of an escape of the form `\uXXXX` or `\/`, and the length of the escape. Other escapes
/// have one spelling.
fn read_escape(escaped: &[u8]) -> (Option<char>, usize) {
    match escaped.get(1) {
        Some(b'/') => (Some('/'), 2),
        Some(b'u') => match (unit(escaped), escaped.get(6..).and_then(unit)) {
            (Some(high @ 0xd800..=0xdbff), Some(low @ 0xdc00..=0xdfff)) => {
                (char::from_u32(0x1_0000 + ((high - 0xd800) << 10) + (low - 0xdc00)), 12)
            }
            (Some(unit), _) => (char::from_u32(unit), 6),
            (None, _) => (None, 2),
        },
        _ => (None, 2),
    }
}

/// Returns the number of an escape of the form `\uXXXX`.
fn unit(escaped: &[u8]) -> Option<u32> {
    let digits = escaped.strip_prefix(b"\\u")?.get(..4)?;
    digits.iter().try_fold(0, |unit, digit| Some(unit * 16 + char::from(*digit).to_digit(16)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_have_one_spelling_and_the_text_stays_the_same() {
        for (written, expected) in [
            (r#""\u0041\/\u00e9\uD83D\ude00""#, "\"A/é😀\""),
            (r#""\u0022\u005C\u000a\u001B\n\\u0041""#, r#""\"\\\n\u001b\n\\u0041""#),
            (r#""\ud83d \u00""#, r#""\ud83d \u00""#),
            ("\"a\\", "\"a\\"),
        ] {
            let found = plain(Bytes::from_static(written.as_bytes()));
            assert_eq!(std::str::from_utf8(&found), Ok(expected));
            if let Ok(text) = serde_json::from_str::<String>(written) {
                assert_eq!(serde_json::from_slice::<String>(&found).unwrap(), text);
            }
        }
    }
}
