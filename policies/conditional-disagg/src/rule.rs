//! When the decode worker should prefill by itself.

use serde::Deserialize;

/// What the operator may set.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Off: every prefill is remote.
    pub enabled: bool,
    /// Local only below this many new (not cached) prompt tokens.
    pub max_new_tokens: u32,
    /// Local only when new tokens are less than this share of the prompt.
    pub max_new_share: f32,
    /// Local as well when even the least busy prefill worker has more prompt tokens than this waiting; 0: never.
    pub prefill_busy_tokens: u32,
    /// Never local when the decode worker has more prompt tokens than this waiting.
    pub decode_busy_tokens: u32,
    /// Never local when the decode worker's KV cache is fuller than this.
    pub decode_busy_kv_usage: f32,
    /// Never local when the engine's own load figures are older than this, or missing, milliseconds.
    pub max_load_age_ms: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enabled: false,
            max_new_tokens: 2_048,
            max_new_share: 0.7,
            prefill_busy_tokens: 0,
            decode_busy_tokens: 4_096,
            decode_busy_kv_usage: 0.9,
            max_load_age_ms: 30_000,
        }
    }
}

/// The decode worker that would be chosen now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeWorker {
    /// Whether its engine can prefill without a handoff.
    pub(crate) can_prefill: bool,
    /// Prompt tokens that wait there.
    pub(crate) prefill_tokens: u32,
    /// Requests that wait in the engine.
    pub(crate) queue: u32,
    /// Share of its KV cache in use.
    pub(crate) kv_usage: f32,
    /// Age of the engine's figures.
    pub(crate) load_age_ms: u32,
}

impl Settings {
    /// Shares lie in [0, 1].
    ///
    /// # Errors
    /// Names the first that does not.
    pub fn check(&self) -> Result<(), String> {
        let shares =
            [("max-new-share", self.max_new_share), ("decode-busy-kv-usage", self.decode_busy_kv_usage)];
        match shares.iter().find(|(_, share)| !(0.0..=1.0).contains(share)) {
            Some((name, share)) => Err(format!("{name}: {share} is not within 0 to 1")),
            None => Ok(()),
        }
    }
}

/// Whether to prefill on the decode worker: few new tokens, or the prefill pool is busy; never when the decode worker
/// cannot, is busy itself, or nobody knows whether it is.
#[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^24 where the share matters")]
pub(crate) fn local(
    settings: &Settings,
    prompt_tokens: u32,
    new_tokens: u32,
    decode: &DecodeWorker,
    least_busy_prefill: Option<u32>,
) -> bool {
    let known = decode.load_age_ms <= settings.max_load_age_ms;
    let busy = decode.prefill_tokens > settings.decode_busy_tokens
        || decode.queue > 0
        || decode.kv_usage > settings.decode_busy_kv_usage;
    if !decode.can_prefill || !known || busy {
        return false;
    }
    let few = new_tokens < settings.max_new_tokens
        && (new_tokens as f32) < settings.max_new_share * prompt_tokens as f32;
    let pool_busy = settings.prefill_busy_tokens > 0
        && least_busy_prefill.is_some_and(|tokens| tokens > settings.prefill_busy_tokens);
    few || pool_busy
}
