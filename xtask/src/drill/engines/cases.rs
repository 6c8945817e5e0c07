//! Errors of engines, as `xtask/drill/engines.toml` has them: the steps of an answer, and the results that
//! clients may get.

use std::time::Duration;

use serde::Deserialize;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::sleep,
};

/// Size of the pieces of a slow answer, bytes, and the pause between two of them.
const DRIP: (usize, Duration) = (40, Duration::from_millis(1));
/// Mark in bytes that must not reach any client.
pub(super) const SMUGGLED: &str = "SMUGGLED";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cases {
    case: Vec<Case>,
}

/// One kind of misbehaviour.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Case {
    pub(super) name: String,
    /// Beginning of the request lines to which the steps apply, in lower case.
    #[serde(default = "generations")]
    pub(super) target: String,
    #[serde(default)]
    pub(super) expected: Expected,
    /// Whether the steps use the engine's own answer, which it is asked for.
    #[serde(default)]
    pub(super) edits: bool,
    pub(super) steps: Vec<Step>,
}

/// Results that clients may get.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Expected {
    /// Every request is served, because the answer is sound or another worker takes over.
    #[default]
    Served,
    /// Requests to which the steps apply may end with one valid error.
    OneError,
    /// Streams to which the steps apply may end with one valid error; other requests are served.
    StreamError,
}

/// A step of an answer. Texts may have the names of [`Answer::fill_in`].
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Step {
    Send(String),
    /// Sends in small pieces.
    Drip(String),
    /// Sends a text so many times.
    Fill(String, usize),
    /// As `fill`, until the connection fails.
    Repeat(String, usize),
    /// An answer with this status and an error as its body.
    Broken(String),
    /// Sends as one chunk.
    Chunk(String),
    /// Sends the engine's body, one chunk for each byte.
    ByteChunks,
    /// Sends every byte from 0 to 255.
    EveryByte,
    /// Sends the engine's answer with the header for its length; the events of a stream are changed before.
    Whole {
        #[serde(default)]
        before: String,
        /// A text, and what replaces it.
        #[serde(default)]
        replace: Option<(String, String)>,
    },
    PauseMs(u64),
    Times(usize, Vec<Step>),
    /// Keeps the connection open until the other side closes it.
    Hang,
    Close,
    Reset,
}

/// The engine's own answer; its body is without framing.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    pub(super) stream: bool,
    pub(super) body: String,
}

fn generations() -> String {
    "post /v1/".to_owned()
}

/// Returns all cases.
pub(super) fn all() -> anyhow::Result<Vec<Case>> {
    let cases: Cases = toml::from_str(include_str!("../../../drill/engines.toml"))?;
    Ok(cases.case)
}

impl Answer {
    fn kind(&self) -> &'static str {
        if self.stream { "text/event-stream" } else { "application/json" }
    }

    /// Returns the first event and the rest, or the halves of a body that is not streamed.
    fn parts(&self) -> (&str, &str) {
        let end = self.body.find("\n\n").filter(|_| self.stream).map_or(self.body.len() / 2, |end| end + 2);
        self.body.split_at_checked(end).unwrap_or((&self.body, ""))
    }

    /// Replaces names in a text: heads without their end, and parts of the answer.
    fn fill_in(&self, text: &str) -> String {
        if !text.contains('$') {
            return text.to_owned();
        }
        let (first, rest) = self.parts();
        let part = rest.get(..rest.len().min(20)).unwrap_or(rest);
        let odd = if self.stream { "Text/Event-Stream ; charset=UTF-8" } else { "Application/JSON" };
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {}\r\n", self.kind());
        let length = self.body.len();
        [
            ("$json", "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"),
            ("$chunked", &format!("{head}transfer-encoding: chunked\r\n\r\n")),
            ("$head", &head),
            ("$type", self.kind()),
            ("$Type", odd),
            ("$longer", &(length + 100).to_string()),
            ("$shorter", &(length / 2).to_string()),
            ("$first", first),
            ("$part", part),
            ("$body", &self.body),
        ]
        .iter()
        .fold(text.to_owned(), |text, (name, value)| text.replace(name, value))
    }

    fn whole(&self, before: &str, replace: Option<&(String, String)>) -> String {
        let (from, to) = replace.map_or(("", ""), |(from, to)| (from, to));
        let body = match self.stream {
            true if from.is_empty() => format!("{before}{}", self.body),
            true => format!("{before}{}", self.body.replace(from, to)),
            false => self.body.clone(),
        };
        format!("{}content-length: {}\r\n\r\n{body}", self.fill_in("$head"), body.len())
    }
}

fn chunk(data: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat()
}

impl Step {
    /// Performs the step. Returns `None` when the connection has ended.
    pub(super) async fn act(&self, client: &mut TcpStream, answer: &Answer) -> Option<()> {
        let bytes = match self {
            Self::Send(text) => answer.fill_in(text).into_bytes(),
            Self::Fill(text, count) => text.repeat(*count).into_bytes(),
            Self::Broken(status) => format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: 30\r\n\r\n{}",
                r#"{"error":{"message":"broken"}}"#
            )
            .into_bytes(),
            Self::Chunk(text) => chunk(answer.fill_in(text).as_bytes()),
            Self::ByteChunks => answer.body.bytes().flat_map(|byte| chunk(&[byte])).collect(),
            Self::EveryByte => (0..=255).collect(),
            Self::Whole { before, replace } => answer.whole(before, replace.as_ref()).into_bytes(),
            Self::Drip(text) => {
                for piece in answer.fill_in(text).as_bytes().chunks(DRIP.0) {
                    client.write_all(piece).await.ok()?;
                    sleep(DRIP.1).await;
                }
                return Some(());
            }
            Self::Repeat(text, count) => {
                let bytes = text.repeat(*count);
                while client.write_all(bytes.as_bytes()).await.is_ok() {}
                return None;
            }
            Self::PauseMs(pause) => {
                sleep(Duration::from_millis(*pause)).await;
                return Some(());
            }
            Self::Times(count, steps) => {
                for step in (0..*count).flat_map(|_| steps) {
                    Box::pin(step.act(client, answer)).await?;
                }
                return Some(());
            }
            Self::Hang => {
                let mut buffer = [0; 1024];
                while matches!(client.read(&mut buffer).await, Ok(1..)) {}
                return None;
            }
            Self::Close => return None,
            Self::Reset => {
                // Closing with a linger time of zero sends RST.
                let _ = client.set_zero_linger();
                return None;
            }
        };
        client.write_all(&bytes).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Answer, all};

    #[test]
    fn there_are_eighty_kinds_with_names_of_their_own() {
        let all = all().unwrap();
        let names: BTreeSet<_> = all.iter().map(|case| &case.name).collect();
        assert_eq!(names.len(), all.len());
        assert!(all.len() >= 77, "{} kinds, and those of processes", all.len());
    }

    #[test]
    fn names_in_texts_are_parts_of_the_answer() {
        let stream = Answer { stream: true, body: "data: {}\n\ndata: [DONE]\n\n".to_owned() };
        let text = stream.fill_in("$headx: $longer $shorter $Type|$first|$part");
        let expected = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx: 124 12 \
                        Text/Event-Stream ; charset=UTF-8|data: {}\n\n|data: [DONE]\n\n";
        assert_eq!(text, expected);
        let edit = ("data: [DONE]\n\n".to_owned(), String::new());
        assert!(
            stream.whole("\u{feff}", Some(&edit)).ends_with("content-length: 13\r\n\r\n\u{feff}data: {}\n\n")
        );
        let whole = Answer { stream: false, body: "{\"a\":1}".to_owned() };
        assert_eq!(whole.fill_in("$first|$part"), "{\"a|\":1}");
        assert!(whole.whole("\u{feff}", None).ends_with("\r\n\r\n{\"a\":1}"));
    }
}
