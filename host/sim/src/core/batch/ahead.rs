//! Work that an engine does before a new sequence has its first token, and work that its cache saves.

use super::BatchEngine;

impl BatchEngine {
    /// Returns the number of a prompt's tokens in cached blocks that a new sequence could use now. The last
    /// token is never among them.
    #[must_use]
    pub fn cached_tokens(&self, prompt: &[u64], isl: u32) -> u32 {
        let usable = (isl.saturating_sub(1) / self.limits.block_size.max(1)) as usize;
        let cached = self.pool.cached_run(prompt.iter().take(usable).copied());
        u32::try_from(cached).unwrap_or(u32::MAX).saturating_mul(self.limits.block_size)
    }

    /// Returns the prompt tokens that the engine has to compute until a new sequence has its first token: the
    /// tokens of the running and waiting sequences, and the sequence's own tokens after its cached blocks.
    #[must_use]
    pub fn prompt_tokens_ahead(&self, prompt: &[u64], isl: u32) -> u64 {
        let ahead = |open: &super::Running| u64::from(open.sequence.isl.saturating_sub(open.computed));
        let own = u64::from(isl.saturating_sub(self.cached_tokens(prompt, isl)));
        self.running.iter().chain(&self.waiting).map(ahead).sum::<u64>() + own
    }
}
