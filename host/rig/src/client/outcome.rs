//! Verdict on an answer: complete, one valid error, or anything else.

use serde_json::Value;

/// How a request ended for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A whole JSON answer.
    Whole,
    /// A stream of valid events that ends with `[DONE]`.
    Streamed,
    /// One valid error: an error body, or a stream whose last event is an error.
    OneError,
    /// Anything else, with the reason.
    Neither(String),
}

/// Judges an answer from its status and its whole text.
pub fn judge(success: bool, text: &str, stream: bool) -> Outcome {
    if success && stream {
        return judge_stream(text);
    }
    let Ok(json) = serde_json::from_str::<Value>(text) else {
        return Outcome::Neither(format!("the body is not JSON: {text}"));
    };
    match success {
        true if json["choices"].is_array() => Outcome::Whole,
        false if is_error(&json) => Outcome::OneError,
        _ => Outcome::Neither(text.to_owned()),
    }
}

fn is_error(json: &Value) -> bool {
    json["error"].is_object() || json["message"].is_string()
}

fn judge_stream(text: &str) -> Outcome {
    let events = text.split_terminator("\n\n").map(str::trim_start);
    let events: Vec<&str> = events.filter(|event| !event.is_empty() && !event.starts_with(':')).collect();
    for (place, event) in events.iter().enumerate() {
        let rest = events.get(place + 1..).unwrap_or_default();
        let Some(data) = event.strip_prefix("data: ") else {
            return Outcome::Neither(format!("not an event: {event:?}"));
        };
        if data == "[DONE]" {
            return match rest {
                [] => Outcome::Streamed,
                _ => Outcome::Neither(format!("events after [DONE]: {rest:?}")),
            };
        }
        let Ok(json) = serde_json::from_str::<Value>(data) else {
            return Outcome::Neither(format!("the event is not JSON: {data}"));
        };
        if json["error"].is_object() {
            // An engine may send its end mark after its own error event.
            return match rest {
                [] | ["data: [DONE]"] => Outcome::OneError,
                _ => Outcome::Neither(format!("events after an error: {rest:?}")),
            };
        }
    }
    Outcome::Neither("the stream has no end".to_owned())
}

#[cfg(test)]
mod tests {
    use super::{Outcome, judge};

    const TOKEN: &str = "data: {\"choices\":[]}\n\n";
    const ERROR: &str = "data: {\"error\":{\"code\":\"deadline\"}}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    #[test]
    fn whole_answers() {
        assert_eq!(judge(true, "{\"choices\":[]}", false), Outcome::Whole);
        assert_eq!(judge(false, "{\"error\":{}}", false), Outcome::OneError);
        assert_eq!(judge(false, "{\"message\":\"no\"}", true), Outcome::OneError);
        for (success, text) in [(true, "{\"error\":{}}"), (true, "{}"), (false, "{}"), (false, "<html>")] {
            assert!(matches!(judge(success, text, false), Outcome::Neither(_)), "{success} {text}");
        }
    }

    #[test]
    fn streams() {
        let judged = |parts: &[&str]| judge(true, &parts.concat(), true);
        assert_eq!(judged(&[": comment\n\n", " \n \n", TOKEN, " \n", DONE]), Outcome::Streamed);
        assert_eq!(judged(&[TOKEN, ERROR]), Outcome::OneError);
        assert_eq!(judged(&[TOKEN, ERROR, DONE]), Outcome::OneError);
        let invalid: [&[&str]; 5] = [
            &[TOKEN],
            &[TOKEN, DONE, TOKEN],
            &[TOKEN, ERROR, TOKEN],
            &[TOKEN, "data: {half\n\n", DONE],
            &["event: x\n\n", DONE],
        ];
        for parts in invalid {
            assert!(matches!(judged(parts), Outcome::Neither(_)), "{parts:?}");
        }
    }
}
