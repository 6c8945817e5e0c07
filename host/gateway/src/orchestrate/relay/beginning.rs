//! The first events of a stream: until the client has one, another worker may still answer the request.

use tokio::time::{Duration, Instant};

use super::{MAX_CHUNK, Relay};
use crate::{orchestrate::answer::first_event::Beginning, upstream::CallError};

/// Time in which a client without events gets this many keep-alives. Then it gets the events that wait: it
/// may give up a stream without events.
const MAX_KEEP_ALIVES: u32 = 4;
/// Interval of keep-alives for that time where the client gets none.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

impl Relay {
    /// Whether the client reads a stream of which no event arrived: it has the head, and comments at most.
    pub(super) fn client_has_nothing(&self) -> bool {
        let has_nothing = !self.begun && !self.closed && self.resumption.seam.is_none();
        has_nothing && !self.over && !self.detached && !self.drive.gone.is_cancelled()
    }

    /// Returns whether these events, of which none was passed on, are passed on now. From the first one on,
    /// the stream can only be continued. Events that engines send before they know whether they will generate
    /// anything wait for the next one, but not for long: the role of a chat, or what announces a response or
    /// a message.
    ///
    /// # Errors
    /// The stream begins with an error, or with bytes that are not an event.
    pub(super) fn begins(&mut self, events: &[u8]) -> Result<bool, CallError> {
        if self.begun {
            return Ok(true);
        }
        if let Some(has_output) = self.drive.began_with_head.take() {
            self.has_output |= has_output;
        } else {
            let beginning = Beginning::of(&self.drive.request, events, None);
            self.has_output |= beginning.has_output;
            beginning.outcome?;
            if !beginning.has_events {
                return Ok(true);
            }
            let may_wait = self.wait_ends().is_none_or(|end| Instant::now() < end);
            if !beginning.has_answer && events.len() <= MAX_CHUNK && may_wait {
                if std::mem::replace(&mut self.waiting, events.len()) == 0 {
                    (self.commented_at, self.waiting_since) = (self.read_at, self.read_at);
                    self.set_timer();
                }
                return Ok(false);
            }
        }
        (self.begun, self.waiting) = (true, 0);
        self.set_timer();
        if self.resumption.seam.is_none() {
            self.drive.legs.stream_began();
        }
        Ok(true)
    }

    /// When the events that wait are passed on, also if no other one comes. At the end of the answer another
    /// worker is tried instead.
    pub(super) fn wait_ends(&self) -> Option<Instant> {
        let configured = self.drive.state.settings.leg_timeouts.stream_comment;
        let every = if configured.is_zero() { KEEP_ALIVE_INTERVAL } else { configured };
        (self.waiting > 0 && self.incoming.is_some()).then(|| self.waiting_since + every * MAX_KEEP_ALIVES)
    }
}
