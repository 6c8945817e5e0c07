//! Reads the server-sent events of `GET /events`.

use std::time::Duration;

use pointsman_admin_cli::{Gateway, GatewayError, unreachable};
use reqwest::Response;

/// Longest silence: the gateway sends a comment every 15 s.
const IDLE_TIMEOUT: Duration = Duration::from_secs(40);
/// Largest event, bytes.
const MAX_EVENT_BYTES: usize = 32 << 20;

/// One event: its kind and its data.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) kind: String,
    pub(super) data: String,
}

/// An open stream of events.
#[derive(Debug)]
pub(super) struct Events {
    response: Response,
    buffer: Vec<u8>,
}

impl Events {
    /// Connects.
    pub(super) async fn open(gateway: &Gateway) -> Result<Self, GatewayError> {
        Ok(Self { response: gateway.stream("/events").await?, buffer: Vec::new() })
    }

    /// Returns the next event. A dropped call loses nothing.
    pub(super) async fn next(&mut self) -> Result<Event, GatewayError> {
        let url = self.response.url().to_string();
        let broken =
            |problem: &str| GatewayError::Unreachable { url: url.clone(), problem: problem.to_owned() };
        loop {
            while let Some(event) = take_event(&mut self.buffer) {
                if let Some(event) = event {
                    return Ok(event);
                }
            }
            if self.buffer.len() > MAX_EVENT_BYTES {
                return Err(GatewayError::TooLarge { url, limit: MAX_EVENT_BYTES });
            }
            let chunk = tokio::time::timeout(IDLE_TIMEOUT, self.response.chunk()).await;
            match chunk.map_err(|_| broken("no event for 40 s"))? {
                Ok(Some(chunk)) => self.buffer.extend_from_slice(&chunk),
                Ok(None) => return Err(broken("the gateway ended the stream of events")),
                Err(error) => return Err(unreachable(&url, &error)),
            }
        }
    }
}

/// Takes the first whole event out of the buffer; the inner `None` stands for a comment.
fn take_event(buffer: &mut Vec<u8>) -> Option<Option<Event>> {
    let end = buffer.windows(2).position(|pair| pair == b"\n\n")?;
    let text: Vec<u8> = buffer.drain(..end + 2).collect();
    let text = String::from_utf8_lossy(&text);
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    let event = field("event: ").zip(field("data: "));
    Some(event.map(|(kind, data)| Event { kind, data }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_events_are_taken_and_comments_skipped() {
        let mut buffer = b"event: a\ndata: {}\n\n:\n\nevent: b\nda".to_vec();
        let event = |kind: &str, data: &str| Event { kind: kind.to_owned(), data: data.to_owned() };
        assert_eq!(take_event(&mut buffer), Some(Some(event("a", "{}"))));
        assert_eq!(take_event(&mut buffer), Some(None));
        assert_eq!(take_event(&mut buffer), None);
        buffer.extend(b"ta: 7\n\n");
        assert_eq!(take_event(&mut buffer), Some(Some(event("b", "7"))));
        assert!(buffer.is_empty());
    }
}
