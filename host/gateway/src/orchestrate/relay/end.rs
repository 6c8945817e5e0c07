//! The end of an engine's body.

use pointsman_orchestration::Event;

use super::Relay;
use crate::{
    openai::{
        endpoint::Format,
        seen,
        sse::{self, Splitter},
    },
    upstream::CallError,
};

/// The event that ends a stream of OpenAI's.
const DONE: &[u8] = b"data: [DONE]\n\n";

impl Relay {
    /// The engine's body has ended, as it should or because it is not read any more.
    pub(super) fn end(&mut self) {
        self.incoming = None;
        if !self.closed {
            self.complete();
        }
        if self.over {
            return;
        }
        if !self.closed {
            let place = if self.splitter.rest() > 0 { "within an event" } else { "before its last event" };
            self.fail(CallError::Broken(format!("the stream ended {place}")));
            return;
        }
        self.drive.served();
        self.report(Event::Ended);
    }

    /// Adds what some servers leave out at the end of a whole answer: the blank line behind the last event,
    /// or `[DONE]` behind the finish reason of the only choice.
    fn complete(&mut self) {
        if ends_with(&mut self.splitter, self.format) {
            self.relay_whole_events();
        }
        let is_whole = self.finish_seen && self.splitter.rest() == 0 && self.drive.request.items() == 1;
        if is_whole && !self.closed && !self.over && self.format == Format::OpenAi {
            self.closed = true;
            self.push(DONE);
        }
    }
}

/// Ends the last event of a body that is over if that event ends an answer, and only its blank line is
/// missing. Returns whether it does.
pub(crate) fn ends_with(splitter: &mut Splitter, format: Format) -> bool {
    let event = splitter.first(splitter.rest());
    let is_last = !event.is_empty() && sse::is_event(event) && seen::event(format, event).done;
    if is_last {
        splitter.end();
    }
    is_last
}
