//! The native cost (G): ranks candidates for the fallback and the `kv` mode. The `kv-aware` policy computes
//! the same.

use crate::config::RouterConfig;

/// Terms of one candidate's cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostTerms {
    /// Prompt tokens, ISL.
    pub prompt_tokens: u32,
    /// Tokens in a block; 0 counts as 1.
    pub block_size: u32,
    /// Prompt tokens booked here whose prefill has not completed.
    pub active_prefill_tokens: u32,
    /// Blocks booked here after admission.
    pub decode_blocks: u32,
    /// Requests booked here.
    pub active_requests: u32,
    /// Cached prefix blocks on device, in host memory, on disk.
    pub cached: [u32; 3],
    /// Sum of the weights of the preferred taints it has.
    pub taint_preference: f32,
}

/// Cost in blocks, lower is better.
///
/// `load_scale * max(0, (active_prefill_tokens + ISL) / block - credit) + decode_blocks + w_active *
/// active_requests`; with `track_prefill_tokens` off the first term has neither load nor ISL, and with a
/// credit above 0 `max(0, decode_blocks - credit_blocks)` stands for both load terms. Preferred taints
/// multiply by `exp(-tanh(sum))`.
#[must_use]
pub fn cost(terms: &CostTerms, config: &RouterConfig) -> f32 {
    let block = f64::from(terms.block_size.max(1));
    let [device, host, disk] = terms.cached.map(f64::from);
    let credit = config.overlap_score_credit * device
        + config.host_cache_credit * host
        + config.disk_cache_credit * disk;
    let decode_blocks = f64::from(terms.decode_blocks);
    let load = if config.track_prefill_tokens {
        let tokens = f64::from(terms.active_prefill_tokens) + f64::from(terms.prompt_tokens);
        config.prefill_load_scale * (tokens / block - credit).max(0.0) + decode_blocks
    } else if config.overlap_score_credit > 0.0 {
        (decode_blocks - credit).max(0.0)
    } else {
        decode_blocks
    };
    let cost = load + config.active_request_weight * f64::from(terms.active_requests);
    if terms.taint_preference == 0.0 {
        return cost as f32;
    }
    let preference = f64::from(terms.taint_preference);
    #[expect(clippy::cast_possible_truncation, reason = "costs are compared, not counted")]
    let cost = (cost * (-preference.tanh()).exp()) as f32;
    cost
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: CostTerms = CostTerms {
        prompt_tokens: 1_000,
        block_size: 16,
        active_prefill_tokens: 600,
        decode_blocks: 70,
        active_requests: 3,
        cached: [20, 8, 4],
        taint_preference: 0.0,
    };

    fn check(terms: CostTerms, config: RouterConfig, expected: f32) {
        let got = cost(&terms, &config);
        assert!((got - expected).abs() < 1e-3, "got {got}, expected {expected}");
    }

    #[test]
    fn g_cost_table() {
        let base = RouterConfig::default();
        // 1600 / 16 - (20 + 0.75 * 8 + 0.25 * 4) + 70
        // G1.1
        check(TERMS, base, 143.0);
        check(TERMS, RouterConfig { prefill_load_scale: 2.0, ..base }, 216.0);
        check(TERMS, RouterConfig { active_request_weight: 1.5, ..base }, 147.5);
        check(TERMS, RouterConfig { overlap_score_credit: 0.0, ..base }, 163.0);
        // More credit than load: the term ends at 0.
        check(CostTerms { cached: [500, 0, 0], ..TERMS }, base, 70.0);
        // Not tracking: both load terms are max(0, decode - credit).
        // G1.2, G1.3
        check(TERMS, RouterConfig { track_prefill_tokens: false, ..base }, 43.0);
        // G1.2
        check(TERMS, RouterConfig { track_prefill_tokens: false, overlap_score_credit: 0.0, ..base }, 70.0);
        // exp(-tanh(1)) = 0.466921...
        // G1.4
        check(CostTerms { taint_preference: 1.0, ..TERMS }, base, 143.0 * 0.466_921);
    }
}
