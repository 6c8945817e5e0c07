//! One request of the bench, with the time of every event.

use anyhow::{bail, ensure};
use bytes::Bytes;
use sse::Splitter;
use tokio::time::timeout;

use crate::{
    client::{CHAT, Client, LIMIT, Received},
    proc::monotonic_nanos,
};

/// Measurements of clients.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Times from sending a request to its first event, or to the whole answer.
    pub(super) ttft_ns: Vec<f64>,
    /// Times from the engine's write of an event to the client's read.
    pub(super) hops_ns: Vec<f64>,
    /// Number of events with the time of their write.
    pub(super) events: u64,
    /// Number of pieces in which streams arrived.
    pub(super) chunks: u64,
}

/// Sends a request and reads the answer to its end. Returns an error when the answer is not whole or takes
/// more than a minute.
pub(super) async fn post(client: &Client, body: Bytes, seen: &mut Seen) -> anyhow::Result<()> {
    let whole = timeout(LIMIT, exchange(client, body, seen)).await;
    whole.unwrap_or_else(|_| bail!("an answer did not end within {LIMIT:?}"))
}

async fn exchange(client: &Client, body: Bytes, seen: &mut Seen) -> anyhow::Result<()> {
    let (mut splitter, mut events, mut done, mut first) = (Splitter::default(), 0, false, true);
    let (started, mut received, mut whole) = (monotonic_nanos(), Received::default(), Ok(0));
    let piece = |piece: &[u8]| {
        let now = monotonic_nanos();
        if std::mem::take(&mut first) {
            seen.ttft_ns.push(nanos(now - started));
        }
        splitter.room().extend_from_slice(piece);
        whole = splitter.whole();
        let bytes = splitter.first(whole.unwrap_or(0));
        for event in sse::events(bytes).filter_map(|place| bytes.get(place)) {
            let event = String::from_utf8_lossy(event);
            done |= event.contains("[DONE]");
            if let Some(sent) = stamp(&event) {
                events += 1;
                seen.hops_ns.push(nanos(now.saturating_sub(sent)));
            }
        }
        splitter.discard(whole.unwrap_or(0));
        seen.chunks += u64::from(events > 0);
    };
    client.read(CHAT, &[], body, &mut received, piece).await?;
    whole?;
    ensure!(received.status == 200, "a request was answered with status {}", received.status);
    ensure!(!received.body.is_empty(), "an answer was empty");
    ensure!(events == 0 || done, "a stream ended without [DONE]");
    seen.events += events;
    Ok(())
}

/// Returns the time at which the engine wrote the event, nanoseconds of the monotonic clock.
fn stamp(event: &str) -> Option<u64> {
    let (_, rest) = event.rsplit_once("\"t\":\"")?;
    rest.split('"').next()?.parse().ok()
}

fn nanos(value: u64) -> f64 {
    value as f64
}

impl Seen {
    /// Adds the measurements of another client.
    pub(super) fn add(&mut self, other: Self) {
        self.ttft_ns.extend(other.ttft_ns);
        self.hops_ns.extend(other.hops_ns);
        self.events += other.events;
        self.chunks += other.chunks;
    }
}

#[cfg(test)]
mod tests {
    use super::stamp;

    #[test]
    fn stamps() {
        assert_eq!(stamp(r#"data: {"id":"t","choices":[],"t":"0000000000000042"}"#), Some(42));
        assert_eq!(stamp("data: [DONE]"), None);
    }
}
