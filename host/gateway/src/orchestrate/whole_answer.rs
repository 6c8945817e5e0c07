//! Whether an answer that is not streamed is complete, and answers that are vectors in binary.

use bytes::Bytes;
use http::{HeaderMap, Response, header};
use pointsman_orchestration::Event;

use super::Drive;
use crate::{
    budget::Share,
    openai::{
        generate,
        request::{Endpoint, Request},
        results::missing_list,
        seen,
        sse::{self, Seen},
    },
    upstream::{CallError, METADATA},
};

/// Whether a request asks for vectors.
pub(super) fn asks_for_vectors(request: &Request) -> bool {
    matches!(request.endpoint, Endpoint::Embeddings | Endpoint::Pooling)
}

/// Whether an answer is vectors in binary, as vLLM writes them for the formats `bytes` and `bytes_only`.
pub(super) fn is_binary(request: &Request, answer: &Response<Bytes>) -> bool {
    let content_type = answer.headers().get(header::CONTENT_TYPE);
    asks_for_vectors(request)
        && content_type.is_some_and(|kind| kind.as_bytes().starts_with(b"application/octet-stream"))
}

impl Drive {
    /// Examines a whole answer.
    pub(crate) fn look_at_whole(&self, body: &[u8]) -> Seen {
        match self.request.endpoint {
            Endpoint::Generate => generate::whole(self.request.n, body),
            // Audio has nothing to be read.
            Endpoint::Speech if !body.starts_with(b"{") => Seen::default(),
            _ => seen::in_whole_answer(self.request.is_chat(), body),
        }
    }

    /// Keeps vectors in binary for the client, with the header that says where each begins. Its JSON has the
    /// usage, too.
    pub(super) fn answered_binary(&mut self, mut whole: Response<Bytes>, held: Share) -> Event {
        let mut headers = std::mem::take(whole.headers_mut());
        let kept = [header::CONTENT_TYPE, METADATA];
        let kept = kept.into_iter().filter_map(|name| headers.remove(&name).map(|value| (name, value)));
        *whole.headers_mut() = kept.collect::<HeaderMap>();
        let metadata = whole.headers().get(METADATA);
        let seen = metadata.map(|json| seen::in_whole_answer(false, json.as_bytes())).unwrap_or_default();
        self.served_whole(&seen, b"");
        self.accepted(self.answering());
        self.whole = Some(whole);
        self.runs.answering.held = Some(held);
        Event::Ended
    }
}

/// Why a whole answer counts as failed. No byte was sent downstream yet, so another worker may answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    /// It is not a value of JSON, or cut. A truncated body may have a matching length.
    Cut,
    /// It lacks the list of its results.
    Without(&'static str),
}

impl From<Flaw> for CallError {
    fn from(flaw: Flaw) -> Self {
        Self::Protocol(match flaw {
            Flaw::Cut => "the answer is not a JSON object".to_owned(),
            Flaw::Without(list) => format!("the answer has no list `{list}`"),
        })
    }
}

/// Returns what is wrong with a whole answer.
pub(super) fn flaw_of(request: &Request, answer: &Response<Bytes>) -> Option<Flaw> {
    // Some servers send blanks while they generate, so that no proxy takes them for dead.
    let body = sse::without_mark(answer.body()).trim_ascii_start();
    let content_type = answer.headers().get(header::CONTENT_TYPE);
    let is_json = content_type.is_none_or(|kind| kind.as_bytes().starts_with(b"application/json"));
    // Transcripts may be text or subtitles.
    if request.endpoint.is_form() && !is_json {
        return None;
    }
    let may_be_list =
        matches!(request.endpoint, Endpoint::Generate | Endpoint::Rerank(_) | Endpoint::Classify(_));
    let is_list = may_be_list && body.starts_with(b"[");
    let is_value = body.starts_with(b"{") || is_list || request.endpoint.is_form();
    if !is_value {
        return Some(Flaw::Cut);
    }
    match missing_list(request.endpoint, body) {
        Ok(missing) => missing.map(Flaw::Without),
        Err(_) => (!is_closed(body)).then_some(Flaw::Cut),
    }
}

/// Whether every list and object of a text like JSON is closed. Engines in Python write NaN and Infinity,
/// which JSON does not have; many clients take them.
fn is_closed(text: &[u8]) -> bool {
    let (mut open, mut bytes) = (Vec::new(), text.trim_ascii_end().iter());
    while let Some(byte) = bytes.next() {
        match byte {
            b'{' => open.push(b'}'),
            b'[' => open.push(b']'),
            b'}' | b']' => {
                if open.pop() != Some(*byte) {
                    return false;
                }
                if open.is_empty() {
                    return bytes.next().is_none();
                }
            }
            b'"' => {
                // Ends at the next quote that is not escaped.
                while let Some(within) = bytes.next() {
                    match within {
                        b'\\' => drop(bytes.next()),
                        b'"' => break,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i3_an_answer_with_nan_is_whole_unless_it_was_cut() {
        let whole = br#"{"choices":[{"text":"a \"} b","logprob":-Infinity,"x":[NaN]}]} "#;
        // I3.14
        assert!(is_closed(whole));
        for length in 0..whole.len() - 1 {
            assert!(!is_closed(&whole[..length]), "{length}");
        }
        for broken in [&br#"{"a":[}"#[..], br#"{}{"#, br#"{"a":1}x"#, b"x", b""] {
            assert!(!is_closed(broken));
        }
    }
}
