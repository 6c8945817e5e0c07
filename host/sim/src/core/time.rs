//! Formulas of durations.

use std::time::Duration;

use rand::RngExt;

/// Durations on the modelled hardware.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimeModel {
    /// Fixed duration of a prefill.
    pub overhead: Duration,
    /// Additional duration for each prompt token that is not cached.
    pub prefill_per_token: Duration,
    /// Inter-token latency of a single sequence.
    pub itl: Duration,
    /// Duration of the KV transfer for each prompt token.
    pub transfer_per_token: Duration,
    /// Slowdown factor of a full batch compared with a single sequence; at least 1.
    pub load_factor: f64,
    /// Size of a full batch.
    pub max_num_seqs: u32,
    /// Relative standard deviation of the jitter, which is clamped to ±[`TimeModel::MAX_JITTER`].
    pub jitter: f64,
    /// Fraction by which a decode step slows down while a prompt is computed in the same batch (chunked
    /// prefill).
    pub interference: f64,
}

impl TimeModel {
    /// Largest difference of the jitter from 1.
    pub const MAX_JITTER: f64 = 0.7;

    /// Returns the load factor: `1 + (f - 1) * (running - 1) / (max_num_seqs - 1)`.
    #[must_use]
    pub fn load(&self, running: u32) -> f64 {
        if self.max_num_seqs <= 1 {
            return 1.0;
        }
        let share = f64::from(running.saturating_sub(1)) / f64::from(self.max_num_seqs - 1);
        1.0 + (self.load_factor - 1.0) * share
    }

    /// Returns the duration of a prefill: `(overhead + (isl - cached) * per token) * load * jitter`.
    #[must_use]
    pub fn prefill(&self, isl: u32, cached: u32, running: u32, jitter: f64) -> Duration {
        let base = self.overhead + self.prefill_per_token * isl.saturating_sub(cached);
        base.mul_f64(self.load(running) * jitter)
    }

    /// Returns the duration of a KV transfer: `isl * per token * jitter`. It does not depend on the batch.
    #[must_use]
    pub fn transfer(&self, isl: u32, jitter: f64) -> Duration {
        (self.transfer_per_token * isl).mul_f64(jitter)
    }

    /// Returns the duration of a decode step: `ITL * load * jitter`, longer while `prefilling` prompts share
    /// the batch.
    #[must_use]
    pub fn step(&self, running: u32, prefilling: u32, jitter: f64) -> Duration {
        let interference = if prefilling > 0 { 1.0 + self.interference } else { 1.0 };
        self.itl.mul_f64(self.load(running) * interference * jitter)
    }

    /// Returns the duration of a decode: `(out - 1) * ITL * load * jitter`. The prefill generates the first
    /// token.
    #[must_use]
    pub fn decode(&self, out: u32, running: u32, jitter: f64) -> Duration {
        self.step(running, 0, jitter) * out.saturating_sub(1)
    }

    /// Draws a factor around 1 from a clamped normal distribution.
    pub fn draw_jitter(&self, rng: &mut impl RngExt) -> f64 {
        if self.jitter <= 0.0 {
            return 1.0;
        }
        // Box-Muller; 1 - u keeps the logarithm's argument above 0.
        let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * rng.random::<f64>()).cos();
        1.0 + (normal * self.jitter).clamp(-Self::MAX_JITTER, Self::MAX_JITTER)
    }
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::SmallRng};

    use super::*;

    const MODEL: TimeModel = TimeModel {
        overhead: Duration::from_millis(30),
        prefill_per_token: Duration::from_micros(200),
        itl: Duration::from_millis(12),
        transfer_per_token: Duration::from_micros(5),
        load_factor: 3.0,
        max_num_seqs: 5,
        jitter: 0.1,
        interference: 0.5,
    };

    fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    #[test]
    fn load_grows_from_one_to_the_factor() {
        let table = [(0, 1.0), (1, 1.0), (2, 1.5), (3, 2.0), (5, 3.0)];
        for (running, load) in table {
            assert!((MODEL.load(running) - load).abs() < 1e-12, "running {running}");
        }
        assert!((TimeModel { max_num_seqs: 1, ..MODEL }.load(1) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn prefill_counts_what_is_not_cached() {
        // (isl, cached, running, jitter) -> ms
        let table = [
            (1000, 0, 1, 1.0, 230),  // 30 + 1000 * 0.2
            (1000, 800, 1, 1.0, 70), // 30 + 200 * 0.2
            (1000, 800, 3, 1.0, 140),
            (1000, 800, 3, 0.5, 70),
            (10, 20, 1, 1.0, 30),
        ];
        for (isl, cached, running, jitter, want) in table {
            assert_eq!(MODEL.prefill(isl, cached, running, jitter), ms(want), "isl {isl} cached {cached}");
        }
    }

    #[test]
    fn transfer_ignores_load_and_decode_feels_it() {
        assert_eq!(MODEL.transfer(2000, 1.0), ms(10));
        assert_eq!(MODEL.transfer(2000, 1.5), ms(15));
        assert_eq!(MODEL.step(1, 0, 1.0), ms(12));
        assert_eq!(MODEL.step(1, 1, 1.0), ms(18));
        assert_eq!(MODEL.decode(1, 1, 1.0), ms(0));
        assert_eq!(MODEL.decode(11, 1, 1.0), ms(120));
        assert_eq!(MODEL.decode(11, 5, 1.0), ms(360));
    }

    #[test]
    fn jitter_is_seeded_centred_and_clamped() {
        let draw = |sigma: f64, seed| {
            let (model, mut rng) = (TimeModel { jitter: sigma, ..MODEL }, SmallRng::seed_from_u64(seed));
            (0..4000).map(|_| model.draw_jitter(&mut rng)).collect::<Vec<_>>()
        };
        assert_eq!(draw(0.1, 7), draw(0.1, 7));
        assert_ne!(draw(0.1, 7), draw(0.1, 8));
        let mean = draw(0.1, 7).iter().sum::<f64>() / 4000.0;
        assert!((mean - 1.0).abs() < 0.01, "mean {mean}");
        let wild = draw(5.0, 7);
        assert!(wild.iter().all(|x| (0.3 - 1e-9..=1.7 + 1e-9).contains(x)));
        assert!(wild.iter().any(|x| *x < 0.301) && wild.iter().any(|x| *x > 1.699));
        assert_eq!(draw(0.0, 7), vec![1.0; 4000]);
    }
}
