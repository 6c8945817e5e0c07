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

/// Returns the session and the arrival in seconds of each request, in the order of the trace.
fn arrivals(trace: &Trace) -> Vec<(&str, u64)> {
    trace.requests.iter().map(|one| (one.session.as_deref().unwrap(), one.at.as_secs())).collect()
}

#[test]
fn o10_the_turns_of_a_session_keep_the_order_of_the_file() {
    let of = |session: &str, at: u32, tokens: u32| {
        let line = line(at, &format!(r#""session_id": "{session}""#));
        line.replace("\"input_length\": 5", &format!("\"input_length\": {tokens}"))
    };
    let lines =
        [of("a", 9_000, 1), of("b", 4_000, 2), of("a", 3_000, 3), of("a", 9_000, 4), of("a", 10_000, 5)];
    let trace = parse(&lines.each_ref().map(String::as_str), false).unwrap();
    let tokens: Vec<u32> = trace.requests.iter().map(|one| one.input_tokens).collect();
    // O10.13
    assert_eq!(tokens, [2, 1, 3, 4, 5]);
    assert_eq!(arrivals(&trace), [("b", 0), ("a", 5), ("a", 5), ("a", 5), ("a", 6)]);
    let note = "1 requests of the trace have a `timestamp` before that of an earlier turn of their session, and got the \
                time of that turn";
    // O10.13
    assert_eq!(trace.notes, [note]);
}

fn untimed(rest: &str) -> String {
    format!(r#"{{"input_length": 50, "output_length": 5, {rest}}}"#)
}

#[test]
fn a_turn_without_a_time_arrives_with_the_turn_before_it() {
    let (p, c) = (r#""session_id": "p""#, r#""session_id": "c""#);
    let lines = [
        line(0, p),
        line(500_000, c),
        untimed(&format!(r#"{c}, "delay": 5"#)),
        untimed(&format!(r#"{p}, "delay": 5"#)),
        line(600_000, &format!(r#"{c}, "delay": 5"#)),
        untimed(c),
    ];
    let trace = parse(&lines.each_ref().map(String::as_str), false).unwrap();
    assert_eq!(arrivals(&trace), [("p", 0), ("p", 0), ("c", 500), ("c", 500), ("c", 600), ("c", 600)]);
    let lengths: Vec<u32> = trace.requests.iter().map(|one| one.input_tokens).collect();
    assert_eq!(lengths, [5, 50, 5, 50, 5, 50]);
    // What is exported has all times.
    let mut out = Vec::new();
    trace.write_mooncake(&mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    assert_eq!(parse(&text.lines().collect::<Vec<_>>(), false).unwrap().requests, trace.requests);
}

#[test]
fn a_fork_and_a_join_without_a_time_arrive_after_what_they_wait_for() {
    let (p, c) = (r#""session_id": "p""#, r#""session_id": "c""#);
    let lines = [
        line(0, r#""session_id": "o""#),
        line(500_000, p),
        untimed(&format!(r#"{c}, "parent_session_id": "p""#)),
        line(700_000, &format!(r#"{c}, "delay": 5"#)),
        untimed(&format!(r#"{p}, "join": true"#)),
    ];
    let trace = parse(&lines.each_ref().map(String::as_str), false).unwrap();
    assert_eq!(arrivals(&trace), [("o", 0), ("p", 500), ("c", 500), ("c", 700), ("p", 700)]);
    let mut waits: Vec<(usize, usize)> = crate::trace::Order::of(&trace).pairs().collect();
    waits.sort_unstable();
    assert_eq!(waits, [(1, 2), (1, 4), (2, 3), (3, 4)]);
}

#[test]
fn a_turn_of_the_selected_model_without_a_time_keeps_the_time_of_its_session() {
    let lines = [
        line(0, r#""session_id": "p", "model": "a""#),
        line(500_000, r#""session_id": "c", "model": "b""#),
        untimed(r#""session_id": "c", "model": "a", "delay": 5"#),
    ];
    let trace = parse(&lines.each_ref().map(String::as_str), false).unwrap().of_model("a").unwrap();
    assert_eq!(arrivals(&trace), [("p", 0), ("c", 500)]);
}

#[test]
fn o10_11_a_turn_without_time_and_delay_follows_the_answer_before_it_at_once() {
    let session = r#""session_id": "s""#;
    for group in ["", r#", "group_id": 1"#] {
        let of = |line: String| line.replace(session, &format!("{session}{group}"));
        let lines = [line(0, session), untimed(session), untimed(session)].map(of);
        let trace = parse(&lines.each_ref().map(String::as_str), false).unwrap();
        let delays: Vec<_> = trace.requests.iter().map(|one| one.delay).collect();
        // O10.11
        assert_eq!(delays, [None, Some(Duration::ZERO), Some(Duration::ZERO)]);
        let mut waits: Vec<(usize, usize)> = crate::trace::Order::of(&trace).pairs().collect();
        waits.sort_unstable();
        // O10.11
        assert_eq!(waits, [(0, 1), (1, 2)]);
    }
}
