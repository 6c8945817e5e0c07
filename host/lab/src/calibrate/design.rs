//! Plans the requests to send: bursts that isolate the terms of the step time, and a mix that checks the
//! result.
//!
//! A lone prompt of `n` tokens takes the overhead and `c0 + c1 + c2*n + c3*n + c4*n^2` (once for each chunk)
//! until its first token. Its further tokens take `c0 + c1 + c2*kv + c3 + c4` each. Bursts of `B` prompts
//! give steps with `B` sequences, and steps that mix prompts with decoding. Varying the length and the
//! concurrency separates the terms.

use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng, seq::SliceRandom as _};
use serde::Serialize;

/// Number of prompt lengths that lone requests have.
const LENGTHS: u32 = 6;
/// Number of times that each burst is sent, if the limit of requests allows it.
const REPEATS: usize = 3;
/// Largest share of the KV capacity that a burst fills, so that no sequence is preempted.
const MAX_KV_SHARE: f64 = 0.8;

/// Limits of the planned requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DesignLimits {
    /// Maximum number of requests in all bursts.
    pub burst_requests: u32,
    /// Number of requests in the mix.
    pub mix_requests: u32,
    /// Maximum number of concurrent requests.
    pub max_concurrency: u32,
    /// Shortest prompt, tokens.
    pub min_prompt: u32,
    /// Longest prompt, tokens.
    pub max_prompt: u32,
    /// Number of output tokens of a request in a burst.
    pub output_tokens: u32,
    /// Number of tokens that the KV cache holds.
    pub kv_tokens: u64,
    /// Seed of the lengths, the order and the pauses.
    pub seed: u64,
}

/// Requests that are sent to an idle engine at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Burst {
    /// Number of requests.
    pub requests: u32,
    /// Number of prompt tokens of each request.
    pub isl: u32,
    /// Number of output tokens of each request.
    pub osl: u32,
}

/// A request of the mix.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MixRequest {
    /// Prompt tokens.
    pub isl: u32,
    /// Output tokens.
    pub osl: u32,
    /// Pause of its user before it, as a multiple of the time that a request takes.
    pub pause: f64,
}

/// All planned requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Design {
    /// Requests to which the coefficients are fitted, in the order of sending.
    pub bursts: Vec<Burst>,
    /// Requests that check the result.
    pub mix: Vec<MixRequest>,
    /// Users of the mix: each waits for the answer to its request, pauses, and sends the next one.
    pub users: u32,
}

/// Plans the requests.
#[must_use]
pub fn design(limits: &DesignLimits) -> Design {
    let mut rng = SmallRng::seed_from_u64(limits.seed);
    let lengths = lengths(limits.min_prompt, limits.max_prompt);
    let mut left = limits.burst_requests;
    let mut bursts = Vec::new();
    for burst in std::iter::repeat_n(candidates(limits, &lengths), REPEATS).flatten() {
        if burst.requests <= left {
            left -= burst.requests;
            bursts.push(burst);
        }
    }
    // The order is random, so that a drift of the machine does not look like an effect of the length.
    bursts.shuffle(&mut rng);
    let mix = (0..limits.mix_requests).map(|_| mix_request(limits, &mut rng)).collect();
    Design { bursts, mix, users: limits.max_concurrency }
}

/// Prompt lengths from shortest to longest, each longer than the one before by the same factor.
fn lengths(min: u32, max: u32) -> Vec<u32> {
    let steps = f64::from(LENGTHS - 1);
    let factor = (f64::from(max) / f64::from(min)).powf(1.0 / steps);
    let mut lengths: Vec<u32> = (0..LENGTHS)
        .map(|step| to_u32(f64::from(min) * factor.powf(f64::from(step))).clamp(min, max))
        .collect();
    lengths.dedup();
    lengths
}

/// Returns lone requests of each length, then bursts of 2, 4, 8 and so on with short, middle and long
/// prompts.
fn candidates(limits: &DesignLimits, lengths: &[u32]) -> Vec<Burst> {
    let osl = limits.output_tokens;
    let lone = lengths.iter().map(|isl| Burst { requests: 1, isl: *isl, osl });
    let mut concurrency: Vec<u32> = std::iter::successors(Some(2), |many: &u32| many.checked_mul(2))
        .take_while(|many| *many < limits.max_concurrency)
        .collect();
    concurrency.push(limits.max_concurrency);
    let of = |place: usize| lengths.get(place).or(lengths.last()).copied();
    let chosen = [of(1), of(3), of(lengths.len().saturating_sub(2))];
    let bursts = concurrency
        .iter()
        .filter(|many| **many > 1)
        .flat_map(|many| chosen.into_iter().flatten().map(|isl| Burst { requests: *many, isl, osl }));
    let fits = |burst: &Burst| {
        let tokens = u64::from(burst.requests) * (u64::from(burst.isl) + u64::from(burst.osl));
        burst.requests == 1 || tokens <= share_of_tokens(limits.kv_tokens)
    };
    lone.chain(bursts).filter(fits).collect()
}

/// Draws a request: log-uniform lengths, so that short prompts are as frequent as long ones, and an
/// exponential pause.
fn mix_request(limits: &DesignLimits, rng: &mut SmallRng) -> MixRequest {
    let mut log_uniform = |min: u32, max: u32| {
        let (low, high) = (f64::from(min).ln(), f64::from(max).ln());
        to_u32((low + (high - low) * rng.random::<f64>()).exp()).clamp(min, max)
    };
    let isl = log_uniform(limits.min_prompt, limits.max_prompt);
    let osl = log_uniform((limits.output_tokens / 4).max(2), limits.output_tokens.saturating_mul(2).max(2));
    let pause = -(1.0 - rng.random::<f64>()).ln();
    MixRequest { isl, osl, pause }
}

impl Design {
    /// Returns the numbers of requests, prompt tokens and output tokens.
    #[must_use]
    pub fn totals(&self) -> (u32, u64, u64) {
        let bursts = self.bursts.iter().map(|burst| (burst.requests, burst.isl, burst.osl));
        let mix = self.mix.iter().map(|request| (1, request.isl, request.osl));
        bursts.chain(mix).fold((0, 0, 0), |(requests, prompt, output), (count, isl, osl)| {
            let count_64 = u64::from(count);
            (requests + count, prompt + count_64 * u64::from(isl), output + count_64 * u64::from(osl))
        })
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded and not negative")]
fn to_u32(value: f64) -> u32 {
    value.round() as u32
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "tokens of a KV cache stay below 2^53"
)]
fn share_of_tokens(tokens: u64) -> u64 {
    (tokens as f64 * MAX_KV_SHARE) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: DesignLimits = DesignLimits {
        burst_requests: 120,
        mix_requests: 80,
        max_concurrency: 8,
        min_prompt: 16,
        max_prompt: 1_500,
        output_tokens: 32,
        kv_tokens: 16_384,
        seed: 1,
    };

    #[test]
    fn nothing_exceeds_a_limit() {
        for burst_requests in [0, 1, 7, 50, 200, 5_000] {
            for max_concurrency in [1, 2, 3, 8, 100] {
                let limits = DesignLimits { burst_requests, max_concurrency, ..LIMITS };
                let design = design(&limits);
                assert!(design.totals().0 <= burst_requests + 80, "{limits:?}");
                assert!(design.users <= max_concurrency);
                for burst in &design.bursts {
                    assert!(burst.requests <= max_concurrency && burst.isl <= 1_500, "{burst:?}");
                    assert!(u64::from(burst.requests * (burst.isl + burst.osl)) <= 16_384, "{burst:?}");
                }
                assert!(design.mix.iter().all(|one| (16..=1_500).contains(&one.isl) && one.osl <= 64));
            }
        }
    }

    #[test]
    fn lengths_and_concurrency_vary_and_the_seed_decides_the_order() {
        let plan = design(&LIMITS);
        let mut lone: Vec<u32> =
            plan.bursts.iter().filter(|burst| burst.requests == 1).map(|burst| burst.isl).collect();
        lone.sort_unstable();
        lone.dedup();
        assert_eq!((lone.len(), lone.first(), lone.last()), (6, Some(&16), Some(&1_500)));
        for many in [2, 4, 8] {
            assert!(plan.bursts.iter().any(|burst| burst.requests == many), "{many}");
        }
        assert_eq!(plan.mix.len(), 80);
        assert_eq!(plan, design(&LIMITS));
        assert_ne!(plan, design(&DesignLimits { seed: 2, ..LIMITS }));
    }
}
