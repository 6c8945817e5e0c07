//! Random factors for durations.

use rand::RngExt;

/// Relative standard deviation of a duration, clamped to ±[`Jitter::MAX`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Jitter(pub f64);

impl Jitter {
    /// Largest difference of the factor from 1.
    pub const MAX: f64 = 0.7;

    /// Draws a factor around 1 from a clamped normal distribution.
    pub fn draw(self, rng: &mut impl RngExt) -> f64 {
        if self.0 <= 0.0 {
            return 1.0;
        }
        // Box-Muller transform. `1 - u` keeps the logarithm's argument above 0.
        let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * rng.random::<f64>()).cos();
        1.0 + (normal * self.0).clamp(-Self::MAX, Self::MAX)
    }
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::SmallRng};

    use super::*;

    #[test]
    fn jitter_is_seeded_centred_and_clamped() {
        let draw = |sigma: f64, seed| {
            let mut rng = SmallRng::seed_from_u64(seed);
            (0..4000).map(|_| Jitter(sigma).draw(&mut rng)).collect::<Vec<_>>()
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
