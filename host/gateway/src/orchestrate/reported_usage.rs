//! Records the usage that the engine of an answer reports.

use pointsman_workers::Leg;

use super::Drive;
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

    /// Returns whether the engine that answers knows how much of the prompt was cached.
    pub(crate) fn decode_knows_cached_tokens(&self) -> bool {
        let candidate = self.candidate(Leg::Decode).filter(|_| self.answering() == Leg::Decode);
        candidate.is_none_or(|candidate| connector_for(candidate.worker.spec()).decode_knows_cached_tokens())
    }
}
