//! Records the usage that the engine of an answer reports.

use pointsman_orchestration::HandoffKind;
use pointsman_workers::Leg;

use super::{
    Drive,
    relay::{self, CachedTokens},
};
use crate::{
    connectors::{PromptUsage, connector_for},
    openai::{request::Endpoint, sse::Usage},
};

/// Context that is assumed of a model whose engine reports none, tokens: more than any has.
pub(super) const UNKNOWN_CONTEXT: u32 = 1 << 24;
/// Turns that an engine may take for an answer of the Responses API. Each has a prompt of its own.
const MAX_TURNS: u32 = 64;

impl Drive {
    /// Records usage, with the prefill leg's cached tokens where the decode leg's number is wrong, and
    /// returns what it recorded.
    pub(super) fn usage(&mut self, usage: Usage) -> Usage {
        let own = usage.cached_tokens.filter(|_| self.decode_knows_cached_tokens());
        let usage = Usage { cached_tokens: self.cached_tokens.or(own), ..usage };
        let usage = self.within_context(self.answering(), usage);
        if let Some(booking) = self.runs.answering.booking.own() {
            booking.prompt_reported(usage.prompt_tokens, usage.cached_tokens);
        }
        self.account.usage(usage);
        usage
    }

    /// Records what the prefill engine reports of the prompt. Most clients do not ask for usage, so that the
    /// decode engine reports nothing. If it does, its number of tokens replaces this one. The prompt of a
    /// rest contains what the client got already, and does not count.
    pub(super) fn prompt_computed(&mut self, prompt: PromptUsage) {
        if prompt.tokens > 0 && self.rest.is_none() {
            let PromptUsage { tokens: prompt_tokens, cached_tokens, .. } = prompt;
            let usage = Usage { prompt_tokens, completion_tokens: None, cached_tokens };
            self.account.usage(self.within_context(Leg::Prefill, usage));
        }
    }

    /// Forgets what the prefill engine of an earlier attempt reported, while the client has nothing of its
    /// answer.
    pub(super) fn forget_prompt(&mut self) {
        if self.rest.is_none() {
            (self.cached_tokens, self.created_tokens) = (None, None);
            self.account.forget_prompt();
        }
    }

    /// Lowers what an engine reports to what the model can have. A wrong number would count in the figures of
    /// all requests, and overflow sums.
    pub(crate) fn within_context(&self, leg: Leg, usage: Usage) -> Usage {
        let Usage { prompt_tokens, completion_tokens, cached_tokens } = usage;
        let request = &self.request;
        let known = self.candidate(leg).filter(|_| request.endpoint.generates());
        let context = known.and_then(|candidate| candidate.worker.context_length(&request.model));
        let turns = if request.endpoint == Endpoint::Responses { MAX_TURNS } else { 1 };
        let sequences = request.items().max(1).saturating_mul(turns);
        let most = context.unwrap_or(UNKNOWN_CONTEXT).saturating_mul(sequences);
        Usage {
            prompt_tokens: prompt_tokens.min(most),
            completion_tokens: completion_tokens.map(|tokens| tokens.min(most)),
            cached_tokens: cached_tokens.map(|tokens| tokens.min(most)),
        }
    }

    /// Records the cached tokens that the prefill leg reported, also in an answer of decode that came before.
    pub(crate) fn prefill_reported(&mut self, cached_tokens: Option<u32>) {
        self.cached_tokens = cached_tokens;
        if let Some(mut whole) = self.whole.take() {
            let (seen, _) = self.look_at_whole(whole.body());
            let cached = self.shown_cached_tokens();
            let edited = relay::edit(whole.body(), &seen, cached, self.request.endpoint.format());
            edited.into_iter().for_each(|edited| *whole.body_mut() = edited.into());
            self.whole = Some(whole);
        }
        if cached_tokens.is_some() && self.account.has_usage() {
            let usage = Usage { cached_tokens, ..Usage::default() };
            self.account.usage(self.within_context(Leg::Prefill, usage));
        }
    }

    /// Returns the cached tokens for the client. While prefill runs, those of the answer are not replaced:
    /// what prefill reports later is.
    pub(crate) fn shown_cached_tokens(&self) -> CachedTokens {
        match self.cached_tokens {
            _ if self.decode_knows_cached_tokens() => CachedTokens::OfAnswer,
            Some(cached) => CachedTokens::OfPrefill(cached, self.created_tokens),
            None if self.prefill_runs() => CachedTokens::OfAnswer,
            None => CachedTokens::Unknown,
        }
    }

    /// Returns whether the engine that answers knows how much of the prompt was cached: also where it got no
    /// blocks, because the prefill had nothing to hand over.
    fn decode_knows_cached_tokens(&self) -> bool {
        let candidate = self.candidate(Leg::Decode).filter(|_| self.answering() == Leg::Decode);
        candidate.is_none_or(|candidate| {
            let connector = connector_for(candidate.worker.spec());
            let hands_over = self.handoff.is_some() || connector.handoff() != Some(HandoffKind::Completed);
            let is_alone = self.executor.calls() && !hands_over;
            is_alone || connector.decode_knows_cached_tokens()
        })
    }
}
