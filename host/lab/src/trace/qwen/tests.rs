use super::*;
use crate::trace::{Trace, TraceError};

fn parse(text: &str, skip_bad: bool) -> Result<Trace, TraceError> {
    Trace::parse(text.as_bytes(), "trace", "trace".to_owned(), None, None, skip_bad)
}

fn line(chat: i64, parent: i64, seconds: f64, input: u32, ids: &str) -> String {
    format!(
        r#"{{"chat_id": {chat}, "parent_chat_id": {parent}, "timestamp": {seconds}, "input_length": {input}, "output_length": 120, "type": "text", "turn": 1, "hash_ids": {ids}}}"#
    ) + "\n"
}

#[test]
fn chats_with_one_root_are_a_session_with_blocks_of_16_tokens_and_pauses_between() {
    let text = line(55, -1, 61.114, 20, "[1089, 1090]")
        + &line(60, -1, 61.2, 5, "[7]")
        + &line(159, 55, 70.0, 40, "[1089, 1090, 1091]")
        + &line(170, 159, 71.0, 33, "[1089, 1090, 9]")
        + &line(171, 900, 72.0, 16, "[3]")
        + &line(172, 900, 73.0, 16, "[3]");
    let trace = parse(&text, false).unwrap();
    assert_eq!(trace.block_tokens, 16);
    let sessions: Vec<&str> = trace.requests.iter().map(|one| one.session.as_deref().unwrap()).collect();
    assert_eq!(sessions, ["55", "60", "55", "55", "171", "172"]);
    assert_eq!(trace.requests[2].blocks[..], [1089, 1090, 1091]);
    // The trace does not record the ends of answers: 120 output tokens take 2 s at 60 a second, and 20 new
    // prompt tokens take 1 ms.
    let delays: Vec<Option<Duration>> = trace.requests.iter().map(|one| one.delay).collect();
    let first = Duration::from_millis(70_000 - 61_114 - 2_001);
    // A request that arrived before the nominal end of the answer before it has no pause.
    assert_eq!(delays, [None, None, Some(first), Some(Duration::ZERO), None, None]);
    let at: Vec<u64> = trace.requests.iter().map(|one| one.at.as_millis() as u64).collect();
    assert_eq!(at, [0, 86, 8_886, 9_886, 10_886, 11_886]);
}

#[test]
fn a_bad_line_is_named_with_its_field_or_skipped_and_counted() {
    let good = line(1, 2, 5.0, 16, "[3]");
    let edit = |from: &str, to: &str| {
        let line = line(10, 1, 6.0, 16, "[3]");
        assert!(line.contains(from), "{from}");
        line.replace(from, to)
    };
    let table = [
        (edit("\"chat_id\": 10", "\"chat_id\": \"x\""), "`chat_id`: invalid type"),
        (edit("\"chat_id\": 10", "\"chat_id\": -3"), "`chat_id` is -3"),
        (edit("\"chat_id\": 10", "\"chat_id\": 1"), "`chat_id` is 1, which an earlier line has"),
        (edit("\"chat_id\": 10", "\"chat_id\": 2"), "`chat_id` is 2, which an earlier line names"),
        (
            edit("\"parent_chat_id\": 1", "\"parent_chat_id\": 10"),
            "`parent_chat_id` is 10, the `chat_id` itself",
        ),
        (edit("\"parent_chat_id\": 1", "\"parent_chat_id\": -2"), "`parent_chat_id` is -2"),
        (edit("\"timestamp\": 6", "\"timestamp\": 4"), "`timestamp` is 4 s, before that"),
        (edit("\"timestamp\": 6", "\"timestamp\": -1"), "`timestamp` is -1"),
        (edit("\"timestamp\": 6, ", ""), "missing field `timestamp`"),
        (edit("\"turn\": 1", "\"turn\": 0"), "`turn` is 0"),
        (edit("\"turn\": 1", "\"turn\": -1"), "`turn`: invalid value"),
        (edit("[3]", "[3, 4]"), "`hash_ids` has 2 ids"),
        (edit("16", "99999999999"), "`input_length` is 99999999999"),
    ];
    for (bad, problem) in table {
        let text = format!("{good}{bad}{}", line(11, 1, 9.0, 16, "[3]"));
        let error = parse(&text, false).unwrap_err().to_string();
        assert!(error.starts_with("trace, line 2: ") && error.contains(problem), "{problem}: {error}");
        let trace = parse(&text, true).unwrap();
        assert_eq!((trace.requests.len(), trace.skipped), (2, 1), "{problem}");
    }
}

#[test]
fn o10_10_branches_of_a_chat_wait_for_its_answer_and_not_for_each_other() {
    let text = line(1, -1, 0.0, 20, "[1, 2]")
        + &line(2, 1, 10.0, 40, "[1, 2, 3]")
        + &line(3, 1, 10.1, 40, "[1, 2, 4]")
        + &line(4, 3, 20.0, 60, "[1, 2, 4, 5]");
    let trace = parse(&text, false).unwrap();
    let sessions: Vec<_> =
        trace.requests.iter().map(|one| (one.session.as_deref().unwrap(), one.parent.as_deref())).collect();
    // O10.10
    assert_eq!(sessions, [("1", None), ("2", Some("1")), ("3", Some("1")), ("3", None)]);
    let delays: Vec<_> = trace.requests.iter().map(|one| one.delay.map(|delay| delay.as_millis())).collect();
    // The answer to chat 1 ends at 2.001 s, that to chat 3 at 12.1 s.
    assert_eq!(delays, [None, Some(7_999), Some(8_099), Some(7_900)]);
    let waits = |trace: &Trace| {
        let mut waits: Vec<(usize, usize)> = crate::trace::Order::of(trace).pairs().collect();
        waits.sort_unstable();
        waits
    };
    // O10.10
    assert_eq!(waits(&trace), [(0, 1), (0, 2), (2, 3)]);
    let mut out = Vec::new();
    trace.write_mooncake(&mut out).unwrap();
    let again = Trace::parse(&*out, "trace", "trace".to_owned(), None, Some(16), false).unwrap();
    assert_eq!((waits(&again), &again.requests), (waits(&trace), &trace.requests));
}
