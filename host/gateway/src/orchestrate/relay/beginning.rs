//! The first events of a stream: until the client has one, another worker may still answer the request.

use super::{MAX_CHUNK, Relay};
use crate::{
    openai::{
        background::is_in_background,
        request::Endpoint,
        seen,
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
    /// the stream can only be continued. Events that engines send before they know whether they will generate
    /// anything wait for the next one: the role of a chat, or what announces a response or a message.
    ///
    /// # Errors
    /// The stream begins with an error, or with bytes that are not an event.
    pub(super) fn begins(&mut self, events: &[u8]) -> Result<bool, CallError> {
        if self.begun {
            return Ok(true);
        }
        let mut earlier: Option<Seen> = None;
        let mut has_answer = false;
        for event in first_events(events) {
            let seen = match look_at_whole(self.drive.request.endpoint, event) {
                // A prompt may be all that was to be computed: its usage says so.
                Err(_)
                    if sse::is_done(event) && earlier.as_ref().is_some_and(|seen| seen.usage.is_some()) =>
                {
                    has_answer = true;
                    break;
                }
                seen => seen?,
            };
            self.has_output |= comes_with_output(self.drive.request.endpoint, event);
            has_answer = !self.may_wait(event, &seen, earlier.is_none());
            earlier = Some(seen);
            if has_answer {
                break;
            }
        }
        if earlier.is_none() {
            return Ok(true);
        }
        if !has_answer && events.len() <= MAX_CHUNK {
            if self.waiting == 0 {
                self.commented_at = self.read_at;
            }
            self.waiting = events.len();
            return Ok(false);
        }
        (self.begun, self.waiting) = (true, 0);
        self.set_timer();
        if self.resumption.seam.is_none() {
            self.drive.legs.stream_began();
        }
        Ok(true)
    }

    /// Returns whether an event at the beginning waits for the next one. A response in the background goes on
    /// without its client, who needs the id.
    fn may_wait(&self, event: &[u8], seen: &Seen, is_first: bool) -> bool {
        let request = &self.drive.request;
        match request.endpoint {
            Endpoint::ChatCompletions => is_first && has_only_role(seen),
            Endpoint::Responses | Endpoint::Messages => {
                seen::is_announcement(event) && !is_in_background(request)
            }
            _ => false,
        }
    }
}

/// Whether engines send an event, which is not an error, only with their first output. So they do with the
/// role of a chat and the beginning of a message. They announce a response before they generate anything.
fn comes_with_output(endpoint: Endpoint, event: &[u8]) -> bool {
    endpoint != Endpoint::Responses || !seen::is_announcement(event)
}

/// Whether an event of a chat has neither a token nor the end of the answer.
fn has_only_role(seen: &Seen) -> bool {
    !(seen.token || seen.finish || seen.done)
}
