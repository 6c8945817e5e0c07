//! Splits a byte stream into server-sent events.

/// Bytes of a stream that are not yet a whole event.
#[derive(Debug, Default)]
pub struct EventSplitter {
    buffer: Vec<u8>,
}

impl EventSplitter {
    /// Appends bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Removes and returns the next whole event without its blank line.
    pub fn event(&mut self) -> Option<String> {
        let end = self.buffer.windows(2).position(|pair| pair == b"\n\n")?;
        let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
        Some(String::from_utf8_lossy(&event).trim_end().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::EventSplitter;

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        let stream = b"data: {\"a\":1}\n\ndata: two\n\ndata: [DONE]\n\n";
        for size in 1..=stream.len() {
            let mut splitter = EventSplitter::default();
            let mut events = Vec::new();
            for piece in stream.chunks(size) {
                splitter.push(piece);
                events.extend(std::iter::from_fn(|| splitter.event()));
            }
            assert_eq!(events, ["data: {\"a\":1}", "data: two", "data: [DONE]"], "pieces of {size} bytes");
        }
    }

    #[test]
    fn an_unfinished_event_is_held_back() {
        let mut splitter = EventSplitter::default();
        splitter.push(b"data: half\n");
        assert_eq!(splitter.event(), None);
        splitter.push(b"\n");
        assert_eq!(splitter.event().as_deref(), Some("data: half"));
    }
}
