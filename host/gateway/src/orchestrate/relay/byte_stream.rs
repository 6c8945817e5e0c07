//! Bodies that pass byte by byte: audio, and events of endpoints whose forms differ between engines. Their
//! end is the end of the body.

use std::io;

use super::Relay;
use crate::{openai::error::ApiError, orchestrate::Drive};

/// A body that is not looked at.
#[derive(Clone, Copy)]
pub(super) struct ByteStream {
    /// Whether the client reads events, so that an error can be one.
    has_events: bool,
    /// Whether a part of it is missing, which the client learns from the end of its connection.
    is_cut: bool,
}

impl ByteStream {
    /// Returns whether the stream of a request is one. `has_events`: what its content type says.
    pub(super) fn of(drive: &Drive, has_events: bool) -> Option<Self> {
        drive.request.endpoint.streams_bytes().then_some(Self { has_events, is_cut: false })
    }
}

impl Relay {
    /// Passes on what the engine has sent.
    pub(super) fn pass_bytes(&mut self) {
        let mut splitter = std::mem::take(&mut self.splitter);
        self.push(splitter.first(splitter.rest()));
        splitter.discard(splitter.rest());
        self.splitter = splitter;
        self.event_at = self.read_at;
        if !std::mem::replace(&mut self.begun, true) {
            self.drive.legs.stream_began();
            self.drive.took_request(self.drive.answering());
            self.set_timer();
        }
        self.move_if_asked();
    }

    /// Ends a stream for the client, with one valid error event if it has events.
    pub(super) fn end_with_error(&mut self, cause: &ApiError) {
        match &mut self.bytes {
            Some(bytes) if !bytes.has_events => bytes.is_cut = true,
            bytes => {
                if bytes.is_some() {
                    // The last event may lack its end.
                    self.out.extend_from_slice(b"\n\n");
                }
                let event = cause.event(self.format, &self.drive.account.request_id, self.last_number);
                self.out.extend_from_slice(&event);
            }
        }
    }

    /// Returns the error that ends the client's connection, if a part of the body is missing.
    pub(super) fn cut(&self) -> Option<io::Error> {
        let is_cut = self.bytes.is_some_and(|bytes| bytes.is_cut);
        is_cut
            .then(|| io::Error::new(io::ErrorKind::UnexpectedEof, "the engine did not send the whole answer"))
    }
}
