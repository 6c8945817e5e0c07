//! Kinds of errors that change the engine's own answer.

use std::time::Duration;

use super::{Answer, Expected, SMUGGLED, Step, beginning, begun, chunk, chunked, edited, head, text, whole};

/// Returns for each kind its name, the results that clients may get, and the change of the engine's own
/// answer.
#[expect(clippy::type_complexity, clippy::too_many_lines, reason = "a table of answers")]
pub(super) fn all() -> Vec<(&'static str, Expected, fn(&Answer) -> Vec<Step>)> {
    use Expected::{OneError, Served, StreamError};
    vec![
        ("a slow head and body, in small pieces", Served, |answer| {
            vec![
                Step::Drip(b"HTTP/1.1 200 OK\r\n".to_vec()),
                Step::Send(match head(answer, "") {
                    Step::Send(bytes) => bytes.get(17..).unwrap_or_default().to_vec(),
                    _ => Vec::new(),
                }),
                Step::Drip(answer.body.clone()),
                Step::Close,
            ]
        }),
        ("103 before the answer", Served, |answer| {
            [vec![text("HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")], whole(answer, &answer.body)].concat()
        }),
        ("another answer behind the answer", Served, |answer| {
            let more = format!("HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{SMUGGLED}");
            [whole(answer, &answer.body), vec![text(more), Step::Hang]].concat()
        }),
        ("no length, ended by the connection", Served, |answer| {
            vec![head(answer, ""), Step::Send(answer.body.clone()), Step::Close]
        }),
        ("one chunk for each byte", Served, |answer| {
            let chunks = answer.body.iter().map(|byte| chunk(&[*byte]));
            [chunked(answer)].into_iter().chain(chunks).chain([text("0\r\n\r\n")]).collect()
        }),
        ("a byte order mark", Served, |answer| edited(answer, |body| format!("\u{feff}{body}"))),
        ("lines that end with CRLF", Served, |answer| edited(answer, |body| body.replace('\n', "\r\n"))),
        ("lines that end with CR", Served, |answer| edited(answer, |body| body.replace('\n', "\r"))),
        ("comments between events", Served, |answer| {
            edited(answer, |body| format!(": ping\n\n{}", body.replace("\n\n", "\n\n: ping\n\n")))
        }),
        ("fields event, id and retry", Served, |answer| {
            edited(answer, |body| body.replace("data: {", "event: x\nid: 7\nretry: 1\ndata: {"))
        }),
        ("Text/Event-Stream", Served, |answer| {
            let kind = if answer.stream { "Text/Event-Stream ; charset=UTF-8" } else { "Application/JSON" };
            let head = format!("HTTP/1.1 200 OK\r\nCONTENT-TYPE: {kind}\r\n\r\n");
            vec![text(head), Step::Send(answer.body.clone()), Step::Close]
        }),
        ("the answer, then kept open", StreamError, |answer| {
            vec![chunked(answer), chunk(&answer.body), Step::Hang]
        }),
        ("the answer, then reset", StreamError, |answer| {
            vec![chunked(answer), chunk(&answer.body), Step::Pause(Duration::from_millis(20)), Step::Reset]
        }),
        ("the answer, then more for ever", StreamError, |answer| {
            let more = format!("data: {{\"choices\":[],\"x\":\"{SMUGGLED}\"}}\n\n");
            vec![
                chunked(answer),
                chunk(&answer.body),
                Step::Repeat(match chunk(more.as_bytes()) {
                    Step::Send(bytes) => bytes,
                    _ => Vec::new(),
                }),
            ]
        }),
        ("no end mark", StreamError, |answer| edited(answer, |body| body.replace("data: [DONE]\n\n", ""))),
        ("cut within an event", StreamError, |answer| {
            let more = answer.body.get(beginning(answer).len()..).unwrap_or_default();
            begun(answer, vec![chunk(more.get(..more.len().min(20)).unwrap_or_default()), Step::Close])
        }),
        ("closed after the first event", StreamError, |answer| begun(answer, vec![Step::Close])),
        ("reset after the first event", StreamError, |answer| begun(answer, vec![Step::Reset])),
        ("silent after the first event", StreamError, |answer| begun(answer, vec![Step::Hang])),
        ("silent after the head", StreamError, |answer| vec![chunked(answer), Step::Hang]),
        ("closed after the head", StreamError, |answer| vec![chunked(answer), Step::Close]),
        ("garbage after the first event", StreamError, |answer| {
            begun(answer, vec![chunk(b"<html>\n\n"), Step::Hang])
        }),
        ("NUL after the first event", StreamError, |answer| {
            begun(answer, vec![chunk(b"\0\0\n\n"), Step::Hang])
        }),
        ("half an event as a whole one", StreamError, |answer| {
            begun(answer, vec![chunk(b"data: {\"id\":\n\n"), Step::Hang])
        }),
        ("an error event after the first event", StreamError, |answer| {
            begun(answer, vec![chunk(b"data: {\"error\":{\"message\":\"broken\"}}\n\n"), Step::Hang])
        }),
        ("a garbage chunk after the first event", StreamError, |answer| {
            begun(answer, vec![text("zz\r\n"), Step::Hang])
        }),
        ("an event of 100 MB", StreamError, |answer| {
            let megabyte = match chunk(&[b'x'; 1 << 20]) {
                Step::Send(bytes) => bytes,
                _ => Vec::new(),
            };
            let events = std::iter::repeat_n(Step::Send(megabyte), 100);
            begun(answer, [chunk(b"data: ")].into_iter().chain(events).chain([Step::Hang]).collect())
        }),
        ("a length that is too long", StreamError, |answer| {
            let length = answer.body.len() + 100;
            vec![
                head(answer, &format!("content-length: {length}\r\n")),
                Step::Send(answer.body.clone()),
                Step::Close,
            ]
        }),
        ("a length that is too short", StreamError, |answer| {
            let length = answer.body.len() / 2;
            vec![head(answer, &format!("content-length: {length}\r\n")), Step::Send(answer.body.clone())]
        }),
        ("a length and chunks", StreamError, |answer| {
            vec![
                head(answer, "content-length: 9\r\ntransfer-encoding: chunked\r\n"),
                chunk(&answer.body),
                text("0\r\n\r\n"),
            ]
        }),
        ("200 with an error of status 400", OneError, |_| {
            let body = r#"{"error":{"message":"bad","code":400}}"#;
            vec![text(format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            ))]
        }),
    ]
}
