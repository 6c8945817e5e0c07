//! Upper bound of the hit rate: one cache for all engines that never evicts.

use std::collections::HashSet;

use crate::{prepared::Prepared, trace::Trace};

/// Returns the share of prompt tokens that such a cache would hold, 0 to 1, in blocks of `block_tokens`. The
/// last token of each prompt counts as computed, as in an engine.
#[expect(clippy::cast_precision_loss, reason = "numbers of tokens stay below 2^53")]
pub(super) fn endless_cache_hit_rate(trace: &Trace, prepared: &[Prepared], block_tokens: u32) -> f64 {
    let mut seen: HashSet<u64> = HashSet::new();
    let (mut cached, mut all) = (0_u64, 0_u64);
    for (request, hashes) in trace.requests.iter().zip(prepared) {
        let usable = (request.input_tokens.saturating_sub(1) / block_tokens.max(1)) as usize;
        let run = hashes.chain.iter().take(usable).take_while(|hash| seen.contains(hash)).count();
        cached += run as u64 * u64::from(block_tokens);
        all += u64::from(request.input_tokens);
        seen.extend(hashes.chain.iter());
    }
    if all == 0 { 0.0 } else { cached as f64 / all as f64 }
}
