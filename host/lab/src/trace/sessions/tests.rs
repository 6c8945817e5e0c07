use super::*;
use crate::trace::{Trace, TraceError};

fn parse(lines: &[&str], skip_bad: bool) -> Result<Trace, TraceError> {
    let text = lines.join("\n");
    Trace::parse(text.as_bytes(), "trace", "trace".to_owned(), None, None, skip_bad)
}

fn line(at: u32, rest: &str) -> String {
    format!(r#"{{"timestamp": {at}, "input_length": 5, "output_length": 5, {rest}}}"#)
}

#[test]
fn a_fork_names_a_session_that_began_before_it() {
    let (parent, child) =
        (line(5, r#""session_id": "a""#), line(6, r#""session_id": 7, "parent_session_id": "a""#));
    let trace = parse(&[&parent, &child], false).unwrap();
    assert_eq!(trace.requests[1].parent.as_deref(), Some("a"));
    let table = [
        (
            line(6, r#""session_id": 7, "parent_session_id": "b""#),
            "`parent_session_id` is \"b\", which no earlier line has",
        ),
        (
            line(6, r#""session_id": 7, "parent_session_id": 7"#),
            "`parent_session_id` is \"7\", which no earlier line has",
        ),
        (
            line(4, r#""session_id": 7, "parent_session_id": "a""#),
            "`parent_session_id` is \"a\", which begins later",
        ),
        (line(6, r#""parent_session_id": "a""#), "`parent_session_id` needs a `session_id`"),
        (line(6, r#""join": true"#), "`join` needs a `session_id`"),
        (line(6, r#""session_id": "a", "delay": -1"#), "`delay` is -1"),
        (line(6, &format!(r#""session_id": "{}""#, "x".repeat(257))), "`session_id` has 257 bytes"),
    ];
    for (bad, problem) in table {
        let error = parse(&[&parent, &bad, &child], false).unwrap_err().to_string();
        assert!(error.starts_with("trace, line 2: ") && error.contains(problem), "{error}");
        let trace = parse(&[&parent, &bad, &child], true).unwrap();
        assert_eq!((trace.requests.len(), trace.skipped), (2, 1));
    }
}

#[test]
fn the_numbers_of_sessions_and_of_turns_have_limits() {
    assert_eq!(next_turn(MAX_TURNS - 1), Ok(MAX_TURNS));
    assert!(next_turn(MAX_TURNS).unwrap_err().contains("more than 100000 requests"));
    assert!(check_count(MAX_SESSIONS - 1).is_ok());
    assert!(check_count(MAX_SESSIONS).unwrap_err().contains("expected at most 10000000"));
}
