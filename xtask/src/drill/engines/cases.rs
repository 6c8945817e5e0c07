//! Errors of engines: one row for each kind, with the legs on which it is tested and the results that clients
//! may get.

use std::time::Duration;

mod edits;

/// A step of a scripted answer.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Send(Vec<u8>),
    /// Sends in small pieces.
    Drip(Vec<u8>),
    /// Sends the same bytes until the connection fails.
    Repeat(Vec<u8>),
    Pause(Duration),
    /// Keeps the connection open until the other side closes it.
    Hang,
    Close,
    Reset,
}

/// The engine's own answer; its body is without framing.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) stream: bool,
    pub(super) body: Vec<u8>,
}

/// Way in which an engine misbehaves.
#[derive(Clone, Debug)]
pub(super) enum Script {
    /// The same answer to every request; the engine does not get the request.
    Steps(Vec<Step>),
    /// The engine's own answer with a change.
    Edit(fn(&Answer) -> Vec<Step>),
}

/// Requests to which a script applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Generation,
    Health,
    Models,
    Abort,
}

/// Results that clients may get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// Every request is served, because the answer is sound or another worker takes over.
    Served,
    /// Requests to which the script applies may end with one valid error.
    OneError,
    /// Streams to which the script applies may end with one valid error; other requests are served.
    StreamError,
}

/// One kind of misbehaviour.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) target: Target,
    pub(super) script: Script,
    pub(super) expected: Expected,
}

impl Target {
    pub(super) fn meets(self, line: &str) -> bool {
        match self {
            Self::Generation => line.starts_with("post /v1/"),
            Self::Health => line.starts_with("get /health"),
            Self::Models => line.starts_with("get /v1/models"),
            Self::Abort => line.starts_with("post /abort_request"),
        }
    }
}

/// Mark in bytes that must not reach any client.
pub(super) const SMUGGLED: &str = "SMUGGLED";

fn text(text: impl Into<String>) -> Step {
    Step::Send(text.into().into_bytes())
}

fn head(answer: &Answer, lines: &str) -> Step {
    let kind = if answer.stream { "text/event-stream" } else { "application/json" };
    text(format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{lines}\r\n"))
}

fn chunk(data: &[u8]) -> Step {
    Step::Send([format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat())
}

fn chunked(answer: &Answer) -> Step {
    head(answer, "transfer-encoding: chunked\r\n")
}

/// Returns the answer with the header for its length.
fn whole(answer: &Answer, body: &[u8]) -> Vec<Step> {
    vec![head(answer, &format!("content-length: {}\r\n", body.len())), Step::Send(body.to_vec())]
}

/// Returns the answer's first event, or the first half of a body that is not streamed.
fn beginning(answer: &Answer) -> &[u8] {
    let end = answer.body.windows(2).position(|pair| pair == b"\n\n").map(|end| end + 2);
    let end = end.filter(|_| answer.stream).unwrap_or(answer.body.len() / 2);
    answer.body.get(..end).unwrap_or_default()
}

/// Returns the beginning of the answer, followed by other steps.
fn begun(answer: &Answer, then: Vec<Step>) -> Vec<Step> {
    [vec![chunked(answer), chunk(beginning(answer))], then].concat()
}

fn edited(answer: &Answer, edit: impl Fn(&str) -> String) -> Vec<Step> {
    let body = if answer.stream {
        edit(&String::from_utf8_lossy(&answer.body))
    } else {
        String::from_utf8_lossy(&answer.body).into_owned()
    };
    whole(answer, body.as_bytes())
}

/// Returns the cases that send the same bytes as the answer to every request.
#[expect(clippy::too_many_lines, reason = "a table of answers")]
fn steps() -> Vec<(&'static str, Vec<Step>)> {
    let json = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
    let status = |status: &str| {
        text(format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: 30\r\n\r\n{}",
            r#"{"error":{"message":"broken"}}"#
        ))
    };
    vec![
        ("closes at once", vec![Step::Close]),
        ("resets at once", vec![Step::Reset]),
        ("closes after a moment", vec![Step::Pause(Duration::from_millis(50)), Step::Close]),
        ("never answers", vec![Step::Hang]),
        ("half a status line, then silence", vec![text("HTTP/1.1 20"), Step::Hang]),
        ("half a head, then silence", vec![text("HTTP/1.1 200 OK\r\ncontent-ty"), Step::Hang]),
        ("half a head, then closed", vec![text("HTTP/1.1 200 OK\r\ncontent-ty"), Step::Close]),
        ("half a head, then reset", vec![text("HTTP/1.1 200 OK\r\ncontent-ty"), Step::Reset]),
        ("another protocol", vec![text("220 mail ready\r\n"), Step::Hang]),
        ("HTTP/2", vec![text("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), Step::Hang]),
        ("HTTP/0.9", vec![text("<html>hello</html>\n"), Step::Close]),
        ("binary", vec![Step::Send((0..=255).collect()), Step::Close]),
        ("status 500", vec![status("500 Internal Server Error")]),
        ("status 502", vec![status("502 Bad Gateway")]),
        ("status 503", vec![status("503 Service Unavailable")]),
        ("status 429", vec![status("429 Too Many Requests")]),
        ("refuses with status 400", vec![status("400 Bad Request")]),
        ("status of two digits", vec![status("20 OK")]),
        ("status 999", vec![status("999 No")]),
        ("switches protocols", vec![status("101 Switching Protocols")]),
        ("redirects", vec![text("HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n")]),
        ("no content", vec![text("HTTP/1.1 204 No Content\r\n\r\n")]),
        ("a flood of 1xx heads", vec![Step::Repeat(b"HTTP/1.1 100 Continue\r\n\r\n".to_vec())]),
        ("a header of 200 KB", vec![text(format!("{json}x: {}\r\n\r\n", "y".repeat(200_000)))]),
        ("an endless header", vec![text(format!("{json}x: ")), Step::Repeat(vec![b'y'; 8_192])]),
        ("101 headers", vec![text(format!("{json}{}\r\n", "x: y\r\n".repeat(101)))]),
        ("NUL in a header", vec![text(format!("{json}x: \0\r\n\r\n"))]),
        ("two lengths", vec![text(format!("{json}content-length: 1\r\ncontent-length: 2\r\n\r\n{{}}"))]),
        ("a negative length", vec![text(format!("{json}content-length: -2\r\n\r\n{{}}"))]),
        (
            "a length over 64 bits",
            vec![text(format!("{json}content-length: 99999999999999999999\r\n\r\n{{}}"))],
        ),
        ("an unknown coding", vec![text(format!("{json}transfer-encoding: gzip\r\n\r\n{{}}"))]),
        (
            "a compressed answer",
            vec![text(format!("{json}content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{{}}"))],
        ),
        (
            "a page",
            vec![text("HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>")],
        ),
        ("no content type", vec![text("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")]),
        ("an array", vec![text(format!("{json}content-length: 2\r\n\r\n[]"))]),
        ("an empty body", vec![text(format!("{json}content-length: 0\r\n\r\n"))]),
        ("NUL bytes", vec![text(format!("{json}content-length: 4\r\n\r\n\0\0\0\0"))]),
        (
            "200 with an error",
            vec![text(format!("{json}content-length: 30\r\n\r\n{}", r#"{"error":{"message":"broken"}}"#))],
        ),
        (
            "an error event first",
            vec![
                text(
                    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {\"error\":{\"message\":\"broken\"}}\n\n",
                ),
                Step::Close,
            ],
        ),
        (
            "an endless body without events",
            vec![text(format!("{json}\r\n")), Step::Repeat(vec![b' '; 65_536])],
        ),
        ("an endless error body", vec![text("HTTP/1.1 500 No\r\n\r\n"), Step::Repeat(vec![b'e'; 65_536])]),
        ("a garbage chunk size", vec![text(format!("{json}transfer-encoding: chunked\r\n\r\nzz\r\n{{}}"))]),
        (
            "a chunk size over 64 bits",
            vec![text(format!("{json}transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n"))],
        ),
        (
            "endless chunk extensions",
            vec![
                text(format!("{json}transfer-encoding: chunked\r\n\r\n2;")),
                Step::Repeat(vec![b'x'; 8_192]),
            ],
        ),
        (
            "endless trailers",
            vec![
                text(format!("{json}transfer-encoding: chunked\r\n\r\n0\r\n")),
                Step::Repeat(b"a: b\r\n".to_vec()),
            ],
        ),
    ]
}

/// Returns the cases for requests of the gateway other than generations.
fn side_calls() -> Vec<(&'static str, Target, Vec<Step>)> {
    let page = || vec![text("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>")];
    vec![
        ("health checks are never answered", Target::Health, vec![Step::Hang]),
        ("health checks are reset", Target::Health, vec![Step::Reset]),
        ("health checks get 500", Target::Health, vec![text("HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")]),
        (
            "an endless answer to a health check",
            Target::Health,
            vec![text("HTTP/1.1 200 OK\r\n\r\n"), Step::Repeat(vec![b'x'; 65_536])],
        ),
        ("the list of models is a page", Target::Models, page()),
        ("aborts are never answered", Target::Abort, vec![Step::Hang]),
    ]
}

/// Returns all cases.
pub(super) fn all() -> Vec<Case> {
    let steps = steps().into_iter().map(|(name, steps)| Case {
        name,
        target: Target::Generation,
        script: Script::Steps(steps),
        // The client has received nothing, so another worker serves the request.
        expected: match name {
            "an error event first" => Expected::StreamError,
            // The engine refuses the request itself.
            "refuses with status 400" => Expected::OneError,
            _ => Expected::Served,
        },
    });
    let edits = edits::all().into_iter().map(|(name, expected, edit)| Case {
        name,
        target: Target::Generation,
        script: Script::Edit(edit),
        expected,
    });
    let side_calls = side_calls().into_iter().map(|(name, target, steps)| Case {
        name,
        target,
        script: Script::Steps(steps),
        expected: Expected::Served,
    });
    steps.chain(edits).chain(side_calls).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Answer, Script, all};

    #[test]
    fn there_are_eighty_kinds_with_names_of_their_own() {
        let all = all();
        let names: BTreeSet<_> = all.iter().map(|case| case.name).collect();
        assert_eq!(names.len(), all.len());
        assert!(all.len() >= 77, "{} kinds, and those of processes", all.len());
    }

    #[test]
    fn every_change_of_an_answer_has_steps() {
        let stream = Answer { stream: true, body: b"data: {}\n\ndata: [DONE]\n\n".to_vec() };
        let whole = Answer { stream: false, body: b"{\"choices\":[]}".to_vec() };
        for case in all() {
            if let Script::Edit(edit) = case.script {
                assert!(!edit(&stream).is_empty() && !edit(&whole).is_empty(), "{}", case.name);
            }
        }
    }
}
