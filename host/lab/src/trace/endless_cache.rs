//! Upper bound of the hit rate: one cache for all engines that never evicts.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use super::Trace;

/// Returns the share of prompt tokens that such a cache would hold, 0 to 1, in blocks of `block_tokens`. A
/// prompt has its number of tokens, and for each full block a hash of the prompt up to its end. The last
/// token of each prompt counts as computed, as in an engine.
#[expect(clippy::cast_precision_loss, reason = "numbers of tokens stay below 2^53")]
pub(crate) fn endless_cache_hit_rate<C: Iterator<Item = u64>>(
    prompts: impl Iterator<Item = (u32, C)>,
    block_tokens: u32,
) -> f64 {
    let mut seen = HashSet::new();
    let (mut cached, mut all) = (0_u64, 0_u64);
    for (tokens, chain) in prompts {
        let usable = tokens.saturating_sub(1) / block_tokens.max(1);
        let mut is_held = true;
        for (place, hash) in (0..).zip(chain) {
            is_held &= !seen.insert(hash) && place < usable;
            cached += if is_held { u64::from(block_tokens) } else { 0 };
        }
        all += u64::from(tokens);
    }
    if all == 0 { 0.0 } else { cached as f64 / all as f64 }
}

impl Trace {
    /// Returns the share of prompt tokens that one unlimited cache for all engines would hold, 0 to 1, in
    /// blocks of the trace: an upper bound of any hit rate.
    #[must_use]
    pub(crate) fn endless_cache_hit_rate(&self) -> f64 {
        let prompts = self.requests.iter().map(|request| {
            let full = (request.input_tokens / self.block_tokens.max(1)) as usize;
            let chain = request.blocks.iter().take(full).scan(0_u64, |prefix, block| {
                let mut hasher = DefaultHasher::new();
                (*prefix, *block).hash(&mut hasher);
                *prefix = hasher.finish();
                Some(*prefix)
            });
            (request.input_tokens, chain)
        });
        endless_cache_hit_rate(prompts, self.block_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{prepared::prepare, trace::TraceRequest};

    /// Ids of the blocks of a prompt, and its number of tokens.
    type Prompt = (&'static [u64], u32);

    fn trace(prompts: &[Prompt]) -> Trace {
        let request = |(ids, tokens): &Prompt| TraceRequest {
            input_tokens: *tokens,
            blocks: ids.iter().copied().collect(),
            ..TraceRequest::default()
        };
        let requests = prompts.iter().map(request).collect();
        Trace { block_tokens: 512, requests, ..Trace::default() }
    }

    #[test]
    fn whole_blocks_after_an_equal_prefix_are_held_but_never_the_last_token() {
        let table: [(&str, &[Prompt], f64); 5] = [
            ("another last block", &[(&[1, 2, 3], 1_536), (&[1, 2, 4], 1_536)], 1_024.0 / 3_072.0),
            ("another first block", &[(&[1, 2], 1_024), (&[9, 2], 1_024)], 0.0),
            ("a partial block", &[(&[1, 2], 600), (&[1, 2], 600)], 512.0 / 1_200.0),
            ("the block of the last token", &[(&[1], 512), (&[1], 512)], 0.0),
            ("one block twice", &[(&[0, 0], 1_024)], 0.0),
        ];
        for (name, prompts, expected) in table {
            let trace = trace(prompts);
            let rate = trace.endless_cache_hit_rate();
            assert!((rate - expected).abs() < 1e-9, "{name}: {rate}");
            // `compare` has the same figure for engines with blocks of this size.
            let prepared = prepare(&trace, trace.block_tokens);
            let prompts = trace.requests.iter().zip(&prepared);
            let prompts = prompts.map(|(one, prepared)| (one.input_tokens, prepared.chain.iter().copied()));
            assert!((endless_cache_hit_rate(prompts, 512) - expected).abs() < 1e-9, "{name}");
        }
    }
}
