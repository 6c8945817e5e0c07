//! The first events of a stream: until the client has one, another worker may still answer the request.

use super::{MAX_CHUNK, Relay};
use crate::{
    openai::{
        request::Endpoint,
        sse::{self, Seen},
    },
    orchestrate::first_event::look_at_first,
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
    /// The stream begins with an error.
    pub(super) fn begins(&mut self, events: &[u8]) -> Result<bool, CallError> {
        if self.begun {
            return Ok(true);
        }
        let all = sse::events(events).filter_map(|place| events.get(place));
        let mut with_data = all.filter(|event| sse::has_data(event));
        let Some(first) = with_data.next() else { return Ok(true) };
        let second = with_data.next();
        // An event that waits was looked at when it came.
        if self.waiting > 0 || self.has_only_role(first)? {
            if second.is_none() && events.len() <= MAX_CHUNK {
                self.waiting = events.len();
                return Ok(false);
            }
            second.map(|second| look_at_first(self.format, second)).transpose()?;
        }
        (self.begun, self.waiting) = (true, 0);
        self.set_timer();
        if self.resumption.seam.is_none() {
            self.drive.legs.stream_began();
        }
        Ok(true)
    }

    /// Whether the first event has neither a token nor the end of the answer, and is of a chat.
    ///
    /// # Errors
    /// It is an error.
    fn has_only_role(&self, event: &[u8]) -> Result<bool, CallError> {
        let Seen { token, finish, done, .. } = look_at_first(self.format, event)?;
        Ok(self.drive.request.endpoint == Endpoint::ChatCompletions
            && sse::is_event(event)
            && !(token || finish || done))
    }
}
