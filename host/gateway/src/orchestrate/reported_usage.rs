//! Records the usage that the engine of an answer reports.

use pointsman_workers::Leg;

use super::{Drive, relay};
use crate::{connectors::connector_for, openai::sse::Usage};

impl Drive {
    /// Records usage, with the prefill leg's cached tokens where the decode leg's number is wrong.
    pub(super) fn usage(&mut self, usage: Usage) {
        let own = usage.cached_tokens.filter(|_| self.decode_knows_cached_tokens());
        let usage = Usage { cached_tokens: self.cached_tokens.or(own), ..usage };
        if let Some(booking) = self.runs.answering.booking.own() {
            booking.prompt_reported(usage.prompt_tokens, usage.cached_tokens);
        }
        self.account.usage(usage);
    }

    /// Records the cached tokens that the prefill leg reported, also in an answer of decode that came before.
    pub(crate) fn prefill_reported(&mut self, cached_tokens: Option<u32>) {
        self.cached_tokens = cached_tokens;
        if cached_tokens.is_none() {
            return;
        }
        if let Some(mut whole) = self.whole.take() {
            let (seen, _) = self.look_at_whole(whole.body());
            let edited = relay::edit(whole.body(), &seen, cached_tokens, self.request.endpoint.format());
            edited.into_iter().for_each(|edited| *whole.body_mut() = edited.into());
            self.whole = Some(whole);
        }
        if self.account.has_usage() {
            self.account.usage(Usage { cached_tokens, ..Usage::default() });
        }
    }

    /// Returns the cached tokens that the prefill leg reported, if the number of the decode leg is wrong.
    pub(crate) fn cached_by_prefill(&self) -> Option<u32> {
        self.cached_tokens.filter(|_| !self.decode_knows_cached_tokens())
    }

    /// Returns whether the engine that answers knows how much of the prompt was cached.
    fn decode_knows_cached_tokens(&self) -> bool {
        let candidate = self.candidate(Leg::Decode).filter(|_| self.answering() == Leg::Decode);
        candidate.is_none_or(|candidate| connector_for(candidate.worker.spec()).decode_knows_cached_tokens())
    }
}
