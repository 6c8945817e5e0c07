//! Numbers of the events in a stream of the Responses API.

use std::sync::LazyLock;

use memchr::memmem::FinderRev;

/// The number of the last event that a client got.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LastNumber(Option<u64>);

impl LastNumber {
    /// Notes events. A quote within a text is escaped, so that only a key looks like the key.
    pub(crate) fn note(&mut self, events: &[u8]) {
        static KEY: LazyLock<FinderRev<'static>> = LazyLock::new(|| FinderRev::new("\"sequence_number\":"));
        let mut before = events;
        while let Some(at) = KEY.rfind(before) {
            let value = events.get(at + KEY.needle().len()..).unwrap_or_default().trim_ascii_start();
            let digits = value.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let number =
                value.get(..digits).and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
            // The end of the bytes may be within a number.
            if number.is_some() && digits < value.len() {
                self.0 = number;
                return;
            }
            before = before.get(..at).unwrap_or_default();
        }
    }

    /// The number of the next event.
    pub(crate) fn next(self) -> u64 {
        self.0.map_or(0, |last| last.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i6_the_next_event_of_a_response_has_the_next_number() {
        let next = |events: &str| {
            let mut last = LastNumber(Some(2));
            last.note(events.as_bytes());
            last.next()
        };
        // I6.5
        assert_eq!(LastNumber::default().next(), 0);
        assert_eq!(next(r#"data: {"sequence_number":7,"type":"a"}"#), 8);
        assert_eq!(next("data: {\"sequence_number\": 7}\n\ndata: {\"sequence_number\":8}\n\n"), 9);
        assert_eq!(next(r#"{"sequence_number":7,"delta":"\"sequence_number\":9,"}"#), 8);
        assert_eq!(next(r#"{"sequence_number":7,"metadata":{"sequence_number":"9"}}"#), 8);
        assert_eq!(next(r#"{"sequence_number":7},{"sequence_number":1"#), 8, "it may be 12");
        assert_eq!(next(r#"{"delta":"a"}"#), 3);
        assert_eq!(next(r#"{"sequence_number":99999999999999999999}"#), 3);
    }
}
