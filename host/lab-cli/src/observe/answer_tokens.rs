//! Counts the output tokens of an answer as it passes.

use std::sync::LazyLock;

use hyper::{HeaderMap, header};
use memchr::memmem::Finder;
use sse::Splitter;

/// Bytes of an answer of JSON in which its usage is looked for: it stands at the end.
const TAIL: usize = 16 * 1024;
/// Name of the count in `usage`, of chats and completions.
static COUNT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"completion_tokens\":"));
/// Beginnings of text in an event. Engines send an event for each token, unless they are behind.
static TEXTS: LazyLock<[Finder<'static>; 5]> = LazyLock::new(|| {
    ["\"content\":", "\"text\":", "\"reasoning\":", "\"reasoning_content\":", "\"arguments\":"]
        .map(Finder::new)
});

/// An answer so far.
#[derive(Debug)]
pub(super) enum AnswerTokens {
    Events {
        splitter: Splitter,
        /// Events with text.
        with_text: u32,
        /// As the engine reported them last.
        reported: Option<u32>,
    },
    /// The end of an answer of JSON.
    Whole(Vec<u8>),
    /// An event was too long to be read.
    Unknown,
}

impl AnswerTokens {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let kind = headers.get(header::CONTENT_TYPE).map_or(&b""[..], |kind| kind.as_bytes());
        if sse::is_stream(kind) {
            Self::Events { splitter: Splitter::default(), with_text: 0, reported: None }
        } else {
            Self::Whole(Vec::new())
        }
    }

    /// Adds bytes of the answer.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        match self {
            Self::Events { splitter, with_text, reported } => {
                splitter.room().extend_from_slice(bytes);
                let Ok(whole) = splitter.whole() else {
                    *self = Self::Unknown;
                    return;
                };
                let events = splitter.first(whole);
                for event in sse::events(events).filter_map(|place| events.get(place)) {
                    *with_text = with_text.saturating_add(u32::from(has_text(event)));
                    *reported = usage(event).or(*reported);
                }
                splitter.discard(whole);
            }
            Self::Whole(end) => {
                end.extend_from_slice(bytes);
                end.drain(..end.len().saturating_sub(TAIL));
            }
            Self::Unknown => {}
        }
    }

    /// Returns the tokens so far, as the engine reports them; else the number of events with text.
    pub(super) fn count(&self) -> Option<u32> {
        match self {
            Self::Events { with_text, reported, .. } => {
                reported.or(Some(*with_text).filter(|count| *count > 0))
            }
            Self::Whole(end) => usage(end),
            Self::Unknown => None,
        }
    }
}

/// Returns the count after the last name of it.
fn usage(bytes: &[u8]) -> Option<u32> {
    let at = COUNT.find_iter(bytes).last()? + COUNT.needle().len();
    let digits = bytes.get(at..)?.trim_ascii_start();
    let length = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(digits.get(..length)?).ok()?.parse().ok()
}

/// Whether an event has text that is not empty.
fn has_text(event: &[u8]) -> bool {
    TEXTS.iter().any(|name| {
        name.find_iter(event).any(|at| {
            let value = event.get(at + name.needle().len()..).unwrap_or_default().trim_ascii_start();
            value.starts_with(b"\"") && !value.starts_with(b"\"\"")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(kind: &'static str, chunks: &[&str]) -> Option<u32> {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, kind.parse().unwrap());
        let mut tokens = AnswerTokens::of(&headers);
        chunks.iter().for_each(|chunk| tokens.add(chunk.as_bytes()));
        tokens.count()
    }

    #[test]
    fn events_with_text_are_counted_and_reported_usage_is_preferred() {
        let stream = [
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\nda",
            "ta: {\"choices\":[{\"delta\":{\"content\": \"a\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n",
            "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n",
        ];
        assert_eq!(tokens("text/event-stream; charset=utf-8", &stream), Some(2));
        let with_usage =
            [stream[0], stream[1], "data: {\"choices\":[],\"usage\":{\"completion_tokens\":7}}\n\n"];
        assert_eq!(tokens("text/event-stream", &with_usage), Some(7));
        assert_eq!(tokens("text/event-stream", &[": ping\n\n"]), None);
    }

    #[test]
    fn a_whole_answer_has_its_usage_at_the_end() {
        let long = format!("{{\"choices\":[{{\"text\":\"{}\"}}],", "x".repeat(100_000));
        let end = "\"usage\":{\"prompt_tokens\":1,\"completion_tokens\": 34,\"total_tokens\":35}}";
        assert_eq!(tokens("application/json", &[&long, end]), Some(34));
        assert_eq!(tokens("application/json", &["{\"error\":{}}"]), None);
    }
}
