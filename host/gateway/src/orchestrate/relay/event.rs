//! What one event of the answer means for its request, and how it reaches the client.

use pointsman_orchestration::Event;

use super::{CachedTokens, Relay, edit};
use crate::{
    openai::{
        endpoint::Format,
        seen,
        sse::{self, Seen},
        token_ids::Lists,
    },
    orchestrate::answer::first_event::error_in,
    upstream::CallError,
};

impl Relay {
    /// Examines an event, and notes it for the rest of the answer. Fails if the event is an error.
    pub(super) fn look_and_note(&mut self, event: &[u8], lists: &Lists) -> Result<Seen, CallError> {
        let mut transcript = self.resumption.transcript.as_mut().ok();
        if let Some(seen) = transcript.as_mut().and_then(|transcript| transcript.note_known(event, lists)) {
            return Ok(seen);
        }
        let seen = self.drive.look(event);
        if let Some(error) = error_in(&seen, event) {
            return Err(error);
        }
        if let Some(transcript) = transcript {
            transcript.note(event, &seen, lists);
        }
        Ok(seen)
    }

    /// Counts what an event has, and tells the legs.
    pub(super) fn account_for(&mut self, seen: &Seen) {
        self.closed |= seen.done;
        if self.drive.count(seen, self.read_at) {
            self.report(Event::FirstToken);
            self.free_rest();
            self.offer_to_pause();
        }
        if seen.finish && !self.finish_seen {
            self.finish_seen = true;
            self.report(Event::FinishSeen);
        }
    }

    /// Whether the cached tokens of an event may change. A usage without them in an event of a token stays,
    /// unless the event is the last one.
    pub(super) fn counts_cached(&self, seen: &Seen) -> bool {
        let may_lack = self.format.is_named() || seen.finish || !seen.token;
        seen.cached_at.is_some() || (seen.usage.is_some() && may_lack)
    }

    /// Returns an event with other cached tokens, and without the fields of the handoff; `None` if it stays.
    pub(super) fn edited(&self, event: &[u8], seen: &Seen, cached: CachedTokens) -> Option<Vec<u8>> {
        let edited = edit(event, seen, cached, self.format);
        let private = || {
            let event = edited.as_deref().unwrap_or(event);
            self.drive.without_private_fields(self.drive.answering(), event)
        };
        let hidden = if seen.may_have_private_fields { private() } else { None };
        hidden.or(edited)
    }

    /// Passes an event on without the token ids that the gateway asked for.
    pub(super) fn push_without_ids(&mut self, event: &[u8], lists: &Lists) {
        if !self.drive.wants_ids() {
            self.push(event);
        } else if !lists.is_only_ids(event) {
            lists.hide(event, |part| self.push(part));
        }
    }

    /// Sends bytes to the client, unless they are held back.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        match &mut self.held {
            Some(held) => held.extend_from_slice(bytes),
            None => self.send(bytes),
        }
    }

    /// Sends what was held back, with the cached tokens that prefill has reported since then.
    pub(super) fn release(&mut self) {
        let held = self.held.take().unwrap_or_default();
        let cached = self.drive.shown_cached_tokens();
        let edits = cached != CachedTokens::OfAnswer;
        for place in sse::events(&held) {
            let event = held.get(place).unwrap_or_default();
            let edited = || {
                let seen = seen::event(self.format, event);
                if self.counts_cached(&seen) { edit(event, &seen, cached, self.format) } else { None }
            };
            self.send(edits.then(edited).flatten().as_deref().unwrap_or(event));
        }
    }

    /// Sends bytes to the client.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        if self.format == Format::Responses {
            self.last_number.note(bytes);
        }
        self.out.extend_from_slice(bytes);
    }
}
