//! Random numbers from a call's seed. Policies have no other randomness, so that decisions can be replayed.

/// SplitMix64, a generator of 64-bit numbers.
///
/// ```
/// # use pointsman_policy_sdk::{Call, Rng};
/// # let call = Call::default();
/// let mut rng = Rng::new(call.seed);
/// assert!(rng.below(6) < 6);
/// ```
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Makes a generator. Use the seed of the call.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns 64 uniform bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a uniform number in `0..bound`; 0 when `bound` is 0.
    #[expect(clippy::cast_possible_truncation, reason = "the product's high half is below the bound")]
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.bits()) * bound as u128) >> 64) as usize
    }

    /// Returns a uniform number in [0, 1).
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit exactly")]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_uniform_and_follow_the_seed() {
        let mut counts = [0_u32; 5];
        for seed in 0..10_000 {
            counts[Rng::new(seed).below(5)] += 1;
        }
        assert!(counts.iter().all(|count| (1_850..2_150).contains(count)), "{counts:?}");
        assert_eq!(Rng::new(7).bits(), Rng::new(7).bits());
        assert_eq!(Rng::new(7).below(0), 0);
        assert!((0..1_000).all(|seed| (0.0..1.0).contains(&Rng::new(seed).unit())));
    }
}
