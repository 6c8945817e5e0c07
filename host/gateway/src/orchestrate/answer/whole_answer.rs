//! Whether an answer that is not streamed is complete, and answers that are vectors in binary.

use bytes::Bytes;
use http::{HeaderMap, Response, header};
use pointsman_orchestration::Event;

use crate::{
    budget::Share,
    openai::{
        generate,
        request::{Endpoint, Request},
        results::{list_of, missing_list},
        seen,
        sse::{self, Seen},
    },
    orchestrate::{
        Drive,
        answer::first_event::{content_type, error_in, may_be_json, no_event_stream, overload_of_response},
    },
    upstream::{CallError, METADATA},
};

/// Whether a request asks for vectors.
pub(crate) fn asks_for_vectors(request: &Request) -> bool {
    matches!(request.endpoint, Endpoint::Embeddings | Endpoint::Pooling)
}

/// Whether an answer is vectors in binary, as vLLM writes them for the formats `bytes` and `bytes_only`.
pub(crate) fn is_binary(request: &Request, answer: &Response<Bytes>) -> bool {
    let content_type = answer.headers().get(header::CONTENT_TYPE);
    asks_for_vectors(request)
        && content_type.is_some_and(|kind| kind.as_bytes().starts_with(b"application/octet-stream"))
}

impl Drive {
    /// Examines a whole answer, and returns whether it has the list of its results and is not cut, as far as
    /// that can be seen without a parser. One that is not searched for private fields counts as having
    /// them.
    pub(crate) fn look_at_whole(&self, body: &[u8]) -> (Seen, bool) {
        match self.request.endpoint {
            Endpoint::Generate => {
                (Seen { may_have_private_fields: true, ..generate::whole(self.request.n, body) }, false)
            }
            // Audio has nothing to be read.
            Endpoint::Speech if !body.starts_with(b"{") => {
                (Seen { may_have_private_fields: true, ..Seen::default() }, false)
            }
            endpoint => {
                let (seen, is_whole) = sse::look_at_body(body, list_of(endpoint).unwrap_or_default());
                (seen::of_whole_answer(self.request.is_chat(), body, seen), is_whole)
            }
        }
    }

    /// Judges a whole answer, and returns what it has. The JSON of vectors' header has the usage.
    ///
    /// # Errors
    /// It is an error, is cut, or lacks the list of its results.
    pub(crate) fn judge_whole(&self, whole: &Response<Bytes>) -> Result<Seen, CallError> {
        let (endpoint, body) = (self.request.endpoint, whole.body());
        if is_binary(&self.request, whole) {
            let metadata = whole.headers().get(METADATA);
            return Ok(metadata
                .map(|json| seen::in_whole_answer(false, json.as_bytes()))
                .unwrap_or_default());
        }
        let kind = content_type(whole);
        if self.request.stream && !may_be_json(kind) {
            return Err(no_event_stream(kind));
        }
        let (seen, is_whole) = self.look_at_whole(body);
        let flaw = flaw_of(endpoint, whole, is_whole);
        let error = || error_in(&seen, body).or_else(|| overload_of_response(endpoint.format(), body));
        match flaw {
            Some(Flaw::Cut) => Err(Flaw::Cut.into()),
            _ => error().or_else(|| flaw.map(CallError::from)).map_or(Ok(seen), Err),
        }
    }

    /// Keeps vectors in binary for the client, with the header that says where each begins.
    pub(crate) fn answered_binary(&mut self, mut whole: Response<Bytes>, seen: &Seen, held: Share) -> Event {
        let mut headers = std::mem::take(whole.headers_mut());
        let kept = [header::CONTENT_TYPE, METADATA];
        let kept = kept.into_iter().filter_map(|name| headers.remove(&name).map(|value| (name, value)));
        *whole.headers_mut() = kept.collect::<HeaderMap>();
        self.served_whole(seen, b"");
        self.accepted(self.answering());
        self.whole = Some(whole);
        self.runs.answering.held = Some(held);
        Event::Ended
    }
}

/// Why a whole answer counts as failed. No byte was sent downstream yet, so another worker may answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
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

/// Returns what is wrong with a whole answer. `is_whole`: a look at it found its list and its end.
fn flaw_of(endpoint: Endpoint, answer: &Response<Bytes>, is_whole: bool) -> Option<Flaw> {
    // Some servers send blanks while they generate, so that no proxy takes them for dead.
    let body = sse::without_mark(answer.body()).trim_ascii_start();
    let content_type = answer.headers().get(header::CONTENT_TYPE);
    let is_json = content_type.is_none_or(|kind| kind.as_bytes().starts_with(b"application/json"));
    // Transcripts may be text or subtitles.
    if endpoint.is_form() && !is_json {
        return None;
    }
    let may_be_list = matches!(endpoint, Endpoint::Generate | Endpoint::Rerank(_) | Endpoint::Classify(_));
    let is_list = may_be_list && body.starts_with(b"[");
    let is_value = body.starts_with(b"{") || is_list || endpoint.is_form();
    if !is_value {
        return Some(Flaw::Cut);
    }
    // Only keys with escapes, and endpoints without a list, need a parser.
    if is_whole {
        return None;
    }
    match missing_list(endpoint, body) {
        Ok(missing) => missing.map(Flaw::Without),
        Err(_) => (!sse::is_closed(body)).then_some(Flaw::Cut),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i3_one_pass_finds_the_flaws_that_a_parser_finds() {
        let flaw = |body: &str, is_whole| {
            flaw_of(Endpoint::ChatCompletions, &Response::new(Bytes::from(body.to_owned())), is_whole)
        };
        let lacks = Some(Flaw::Without("choices"));
        for (body, expected) in [
            // I3.14
            (r#"{"choices":[{"logprob":NaN}]}"#, None),
            (r#"{"choices":[{"logprob":NaN}]"#, Some(Flaw::Cut)),
            ("\u{feff} \n{\"choices\":[]}\n", None),
            (r#"{"choices":[]}}"#, Some(Flaw::Cut)),
            (r#"{"choices":[]}{"choices":[]}"#, Some(Flaw::Cut)),
            (r#"[{"choices":[]}]"#, Some(Flaw::Cut)),
            (r#"x{"choices":[]}"#, Some(Flaw::Cut)),
            // I3.20
            (r#"{"choices":null}"#, lacks),
            (r#"{"message":{"choices":[]}}"#, lacks),
            (r#"{"text":"\"choices\":["}"#, lacks),
            (r#"{"\u0063hoices":[]}"#, None),
            (r#"{"choices":null,"choices":[]}"#, None),
        ] {
            let (_, is_whole) = sse::look_at_body(body.as_bytes(), "choices");
            assert_eq!([flaw(body, is_whole), flaw(body, false)], [expected, expected], "{body}");
        }
    }
}
