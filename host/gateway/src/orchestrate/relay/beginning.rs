//! The first events of a stream: until the client has one, another worker may still answer the request.

use super::{MAX_CHUNK, Relay};
use crate::{
    openai::{
        request::Endpoint,
        sse::{self, Seen},
    },
    orchestrate::first_event::{first_events, look_at_whole},
    upstream::CallError,
};

impl Relay {
    /// Whether the client reads a stream of which no event arrived: it has the head, and comments at most.
    pub(super) fn client_has_nothing(&self) -> bool {
        let has_nothing = !self.begun && !self.closed && self.resumption.seam.is_none();
        has_nothing && !self.over && !self.detached && !self.drive.gone.is_cancelled()
    }

    /// Returns whether these events, of which none was passed on, are passed on now. From the first one on,
    /// the stream can only be continued. The first event of a chat waits for the next one if it has nothing
    /// but a role: engines send it before they know whether they will generate anything.
    ///
    /// # Errors
    /// The stream begins with an error, or with bytes that are not an event.
    pub(super) fn begins(&mut self, events: &[u8]) -> Result<bool, CallError> {
        if self.begun {
            return Ok(true);
        }
        let mut first_events = first_events(events);
        let Some(first) = first_events.next() else { return Ok(true) };
        let second = first_events.next();
        let endpoint = self.drive.request.endpoint;
        let seen = look_at_whole(endpoint, first)?;
        if endpoint == Endpoint::ChatCompletions && has_only_role(&seen) {
            if second.is_none() && events.len() <= MAX_CHUNK {
                self.waiting = events.len();
                return Ok(false);
            }
            match second.map(|second| look_at_whole(endpoint, second)) {
                // A prompt may be all that was to be computed: its usage says so.
                Some(Err(error)) if seen.usage.is_none() || !second.is_some_and(sse::is_done) => {
                    return Err(error);
                }
                _ => {}
            }
        }
        (self.begun, self.waiting) = (true, 0);
        self.set_timer();
        if self.resumption.seam.is_none() {
            self.drive.legs.stream_began();
        }
        Ok(true)
    }
}

/// Whether an event of a chat has neither a token nor the end of the answer.
fn has_only_role(seen: &Seen) -> bool {
    !(seen.token || seen.finish || seen.done)
}
