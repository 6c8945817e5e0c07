//! The end of an engine's body.

use pointsman_orchestration::Event;

use super::Relay;
use crate::{
    openai::sse::{self, Splitter},
    orchestrate::Drive,
    upstream::CallError,
};

/// The event that ends a stream of OpenAI's.
const DONE: &[u8] = b"data: [DONE]\n\n";

impl Relay {
    /// The engine's body has ended, as it should or because it is not read any more.
    pub(super) fn end(&mut self) {
        self.incoming = None;
        if self.bytes.is_some() {
            self.closed = true;
        } else if !self.closed {
            self.complete();
        }
        if self.over || self.resumption.is_pending {
            // The last event was an error.
            return;
        }
        if !self.closed {
            self.fail(ended_early(self.splitter.rest() > self.waiting));
            return;
        }
        self.drive.served();
        self.report(Event::Ended);
    }

    /// The engine's connection broke. A whole answer may have come before.
    pub(super) fn broke(&mut self, error: CallError) {
        if !self.closed {
            self.end_last_event();
        }
        if self.closed {
            self.end();
        } else if !self.over && !self.resumption.is_pending {
            self.fail(error);
        }
    }

    /// Adds what some servers leave out at the end of a whole answer: the blank line behind the last event,
    /// or `[DONE]` after the finish reason of the only choice, and after the usage that was asked for.
    fn complete(&mut self) {
        self.end_last_event();
        let is_whole = self.finish_seen && self.splitter.rest() == 0 && self.drive.lacks_only_done();
        if is_whole && !self.closed && !self.over {
            self.closed = true;
            self.push(DONE);
        }
    }

    /// Stops reading the engine's answer. Its connection closes when the leg is stopped.
    pub(super) fn stop_reading(&mut self) {
        let unread = self.incoming.take();
        self.drive.runs.answering.unread = unread.or(self.drive.runs.answering.unread.take());
    }

    /// Whether the client got the whole answer, and nothing failed.
    pub(super) fn finished_well(&self) -> bool {
        self.drive.runs.answering.failure.is_none() && self.held.is_none()
    }

    fn end_last_event(&mut self) {
        if end_last_event(&mut self.splitter) {
            self.relay_whole_events();
        }
    }
}

impl Drive {
    /// Returns whether a stream that ended after a finish reason lacks nothing but `[DONE]`.
    pub(crate) fn lacks_only_done(&self) -> bool {
        let has_usage = self.account.has_usage() || !self.request.include_usage;
        has_usage && self.request.items() == 1 && !self.request.endpoint.format().is_named()
    }
}

/// Returns the error of a stream whose body ended in time, but too early.
pub(crate) fn ended_early(is_within_event: bool) -> CallError {
    let place = if is_within_event { "within an event" } else { "before its last event" };
    CallError::Broken(format!("the stream ended {place}"))
}

/// Ends the last event of a body that is over if only its blank line is missing. Returns whether it does.
pub(crate) fn end_last_event(splitter: &mut Splitter) -> bool {
    let event = splitter.first(splitter.rest());
    let is_json = || serde_json::from_slice::<serde::de::IgnoredAny>(sse::object(event)).is_ok();
    let is_whole = sse::is_event(event) && (sse::is_done(event) || is_json());
    if is_whole {
        splitter.end();
    }
    is_whole
}
