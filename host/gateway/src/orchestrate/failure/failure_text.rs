//! What an engine answered to a leg that failed, as operators read it: the beginning of its text, in one
//! line. Engines repeat what clients sent, so it ends where they begin to quote.

use pointsman_workers::Leg;

use crate::{
    openai::{
        error::{answered, engine_text},
        short_text::shortened,
    },
    upstream::CallError,
};

/// Says how a leg failed.
pub(crate) fn failure_text(leg: Leg, error: &CallError) -> String {
    let what = match error {
        // No status was named (I1.4).
        CallError::Status { status, body, in_body: true, .. } if status.as_u16() == 502 => {
            format!("the engine ended its answer with an error: {}", engine_text(body))
        }
        CallError::Status { status, body, .. } => format!("the engine {}", answered(*status, body)),
        other => other.to_string(),
    };
    format!("the last {leg} leg failed: {}", one_line(&what).trim_end_matches(':'))
}

/// Returns a text up to the first value that it quotes or its first line break, cut to a length. Other
/// control characters are escaped.
pub(super) fn one_line(text: &str) -> String {
    let ends = |(at, found): (usize, char)| match found {
        '"' | '`' | '\n' | '\r' | '{' | '[' => true,
        '\'' => !is_within_word(text, at),
        _ => false,
    };
    let end = text.char_indices().find(|found| ends(*found)).map_or(text.len(), |(at, _)| at);
    let text = text.get(..end).unwrap_or_default().trim_end().escape_debug().to_string();
    shortened(&text.replace("\\'", "'"))
}

/// Whether the apostrophe at `at` is one of a word, such as "model's" or "can't". Python writes bytes as
/// `b'…'`, so a letter before it is not enough.
fn is_within_word(text: &str, at: usize) -> bool {
    const ENDS: [&str; 7] = ["s", "t", "re", "ve", "ll", "d", "m"];
    let (before, behind) = text.split_at(at);
    let letters = |text: &str| text.bytes().take_while(u8::is_ascii_alphabetic).count();
    let behind = behind.get(1..).unwrap_or_default();
    let end = behind.get(..letters(behind)).unwrap_or_default();
    let is_word = before.bytes().rev().take(3).filter(u8::is_ascii_alphabetic).count() == 3;
    let is_closed = behind.as_bytes().get(end.len()) != Some(&b'\'');
    is_word && is_closed && ENDS.contains(&end)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::StatusCode;

    use super::*;
    use crate::upstream::RetryAdvice;

    fn of_status(status: u16, in_body: bool, body: &'static str) -> String {
        let status = StatusCode::from_u16(status).unwrap();
        let (content_type, retry) = (None, RetryAdvice::default());
        let body = Bytes::from_static(body.as_bytes());
        failure_text(Leg::Decode, &CallError::Status { status, content_type, retry, body, in_body })
    }

    #[test]
    fn f6_the_text_of_a_failed_leg_is_short_has_one_line_and_quotes_no_client() {
        // F6.16
        for (status, body, expected) in [
            (500, "Internal Server Error", "the engine answered 500: Internal Server Error"),
            (500, "", "the engine answered 500"),
            (500, r#"{"detail":"secret"}"#, "the engine answered 500"),
            (
                500,
                r#"{"error":{"message":"CUDA error: an illegal memory access\nCompile with","code":500}}"#,
                "the engine answered 500: CUDA error: an illegal memory access",
            ),
            (500, "cannot run 'tell me a secret'", "the engine answered 500: cannot run"),
            (
                500,
                "This model's maximum context length is 8 tokens, so you can't ask for 'secret'",
                "the engine answered 500: This model's maximum context length is 8 tokens, so you can't ask for",
            ),
            (500, "cannot decode b's tell me'", "the engine answered 500: cannot decode b"),
            (500, "unknown role='s'", "the engine answered 500: unknown role="),
            (500, "the names'secret'", "the engine answered 500: the names"),
            (503, "no\u{1b}[2J room\u{202e}\r\nlevel=ERROR", "the engine answered 503: no\\u{1b}"),
            (500, "left\u{2028}right\tto", "the engine answered 500: left\\u{2028}right\\tto"),
        ] {
            assert_eq!(of_status(status, false, body), format!("the last decode leg failed: {expected}"));
        }
        assert_eq!(
            of_status(502, true, r#"{"error":{"message":"out of memory"}}"#),
            "the last decode leg failed: the engine ended its answer with an error: out of memory"
        );
        let long = one_line(&"a\u{7}".repeat(2_000));
        assert_eq!(long.chars().count(), 301, "{long}");
        let reset = CallError::Broken("reset by peer (os error 104)".to_owned());
        assert_eq!(
            failure_text(Leg::Prefill, &reset),
            "the last prefill leg failed: connection failed: reset by peer (os error 104)"
        );
        assert_eq!(
            one_line("answered 400: Input should be valid: [{'input': 'hi'}]"),
            "answered 400: Input should be valid:"
        );
    }
}
