//! Decides when the decode worker prefills by itself.

use serde::Deserialize;

/// Settings of the operator.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// `false`: every prefill is remote.
    pub enabled: bool,
    /// Local only below this number of new prompt tokens, those that are not cached.
    pub max_new_tokens: u32,
    /// Local only when new tokens are below this share of the prompt, 0 to 1; 1: any share.
    pub max_new_share: f32,
    /// Local also when the prompt has fewer tokens than this, whatever is new; 0: none.
    pub local_prompt_tokens: u32,
    /// Local also when every prefill worker has more waiting prompt tokens than this; 0: never.
    pub prefill_busy_tokens: u32,
    /// Never local when the decode worker has more waiting prompt tokens than this.
    pub decode_busy_tokens: u32,
    /// Never local when more requests than this wait in the decode worker's engine.
    pub decode_busy_queue: u32,
    /// Never local when the decode worker uses more than this share of its KV cache, 0 to 1.
    pub decode_busy_kv_usage: f32,
    /// Never local when the engine's load figures are missing, or older than this many milliseconds.
    pub max_load_age_ms: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enabled: false,
            max_new_tokens: 2_048,
            max_new_share: 0.7,
            local_prompt_tokens: 0,
            prefill_busy_tokens: 0,
            decode_busy_tokens: 4_096,
            decode_busy_queue: 0,
            decode_busy_kv_usage: 0.9,
            max_load_age_ms: 30_000,
        }
    }
}

/// The previewed decode worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeWorker {
    /// Whether it can prefill by itself.
    pub(crate) can_prefill: bool,
    /// Waiting prompt tokens.
    pub(crate) prefill_tokens: u32,
    /// Waiting requests in the engine.
    pub(crate) queue: u32,
    /// Share of its KV cache in use, 0 to 1.
    pub(crate) kv_usage: f32,
    /// Age of the engine's figures, milliseconds.
    pub(crate) load_age_ms: u32,
}

impl Settings {
    /// Checks that shares lie in [0, 1].
    ///
    /// # Errors
    /// Names the first one that does not.
    pub fn check(&self) -> Result<(), String> {
        let shares =
            [("max-new-share", self.max_new_share), ("decode-busy-kv-usage", self.decode_busy_kv_usage)];
        match shares.iter().find(|(_, share)| !(0.0..=1.0).contains(share)) {
            Some((name, share)) => Err(format!("{name}: {share} is not within 0 to 1")),
            None => Ok(()),
        }
    }
}

/// Returns whether to prefill on the decode worker: when the prompt is short or has few new tokens, or the
/// prefill pool is busy. Never when the decode worker cannot prefill, is busy, or has no recent figures.
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
        || decode.queue > settings.decode_busy_queue
        || decode.kv_usage > settings.decode_busy_kv_usage;
    if !decode.can_prefill || !known || busy {
        return false;
    }
    let small_share =
        settings.max_new_share >= 1.0 || (new_tokens as f32) < settings.max_new_share * prompt_tokens as f32;
    let few =
        prompt_tokens < settings.local_prompt_tokens || (new_tokens < settings.max_new_tokens && small_share);
    let pool_busy = settings.prefill_busy_tokens > 0
        && least_busy_prefill.is_some_and(|tokens| tokens > settings.prefill_busy_tokens);
    few || pool_busy
}
