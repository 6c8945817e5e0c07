//! Compares the figures of two arms, pair by pair, and judges a cell. It works on numbers and reads no files.

use std::collections::BTreeMap;

use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};
use serde::Serialize;

/// Number of resamples of the bootstrap.
const RESAMPLES: usize = 2_000;
/// Largest ratio at which a figure counts as not worse.
const TOLERANCE: f64 = 1.02;
/// Ratio above which a figure counts as lost.
const LOST: f64 = 1.05;
/// Width of an interval above which the cell gets more seeds.
const WIDE: f64 = 0.05;

/// Figures of an arm, one value for each seed.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Figures {
    /// Mean and 90th percentile of the time to first token, and mean of the time to last token, milliseconds.
    pub(super) ttft_mean: Vec<f64>,
    pub(super) ttft_p90: Vec<f64>,
    pub(super) e2e_mean: Vec<f64>,
    /// Requests a second within the SLO.
    pub(super) goodput: Vec<f64>,
    /// Median and 99th percentile of the inter-token latency, milliseconds. They are shown and not judged.
    pub(super) itl_p50: Vec<f64>,
    pub(super) itl_p99: Vec<f64>,
}

/// Figures by arm.
pub(super) type Arms = BTreeMap<String, Figures>;

/// How much worse one arm is than another in a figure; 1.1 means 10 % worse.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Ratio {
    pub(super) mean: f64,
    /// Bounds of the 95 % interval of the paired bootstrap.
    pub(super) low: f64,
    pub(super) high: f64,
}

/// A rival, and how much worse the judged arm is: in mean TTFT, p90 TTFT, mean E2E and goodput.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Against {
    pub(super) rival: String,
    pub(super) ratios: [Ratio; 4],
}

/// Judgement of a cell.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Judgement {
    /// Comparison with the rival that has the lowest mean TTFT.
    pub(super) ttft: Against,
    /// Comparison with the rival that has the highest goodput.
    pub(super) goodput: Against,
}

/// Names of the figures of [`Against`].
pub(super) const NAMES: [&str; 4] = ["TTFT mean", "TTFT p90", "E2E mean", "goodput"];

/// Verdict on a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// No interval extends beyond 2 % worse.
    Holds,
    /// An interval extends beyond that, and no figure is more than 5 % worse.
    Misses,
    /// A figure is more than 5 % worse.
    Loses,
}

impl Judgement {
    /// Judges the arm `ours` among all arms; `None` without it or without a rival.
    pub(super) fn of(arms: &Arms, ours: &str) -> Option<Self> {
        let our = arms.get(ours)?;
        let rivals = || arms.iter().filter(|(name, _)| *name != ours);
        let least = |(_, one): &(&String, &Figures), (_, other): &(&String, &Figures)| {
            mean(&one.ttft_mean).total_cmp(&mean(&other.ttft_mean))
        };
        // Where several keep the SLO for every request, the fastest of them counts.
        let most = |one: &(&String, &Figures), other: &(&String, &Figures)| {
            mean(&one.1.goodput).total_cmp(&mean(&other.1.goodput)).then_with(|| least(other, one))
        };
        let ttft = rivals().min_by(least)?;
        let goodput = rivals().max_by(most)?;
        Some(Self { ttft: Against::of(our, ttft), goodput: Against::of(our, goodput) })
    }

    fn ratios(&self) -> impl Iterator<Item = &Ratio> {
        self.ttft.ratios.iter().chain(&self.goodput.ratios)
    }

    pub(super) fn verdict(&self) -> Verdict {
        if self.ratios().all(|ratio| ratio.high <= TOLERANCE) {
            Verdict::Holds
        } else if self.ratios().any(|ratio| ratio.mean > LOST) {
            Verdict::Loses
        } else {
            Verdict::Misses
        }
    }

    /// Whether an interval is too wide for a verdict.
    pub(super) fn is_unsure(&self) -> bool {
        self.ratios().any(|ratio| ratio.high - ratio.low > WIDE)
    }

    /// Returns the largest mean ratio, the figure and the rival.
    pub(super) fn worst(&self) -> (f64, &'static str, &str) {
        let all = [&self.ttft, &self.goodput].into_iter();
        let named = all.flat_map(|against| {
            let ratios = against.ratios.iter().zip(NAMES);
            ratios.map(|(ratio, name)| (ratio.mean, name, against.rival.as_str()))
        });
        named.max_by(|one, other| one.0.total_cmp(&other.0)).unwrap_or((1.0, "", ""))
    }
}

impl Against {
    fn of(ours: &Figures, (name, rival): (&String, &Figures)) -> Self {
        Self {
            rival: name.clone(),
            ratios: [
                Ratio::of(&ours.ttft_mean, &rival.ttft_mean),
                Ratio::of(&ours.ttft_p90, &rival.ttft_p90),
                Ratio::of(&ours.e2e_mean, &rival.e2e_mean),
                // Lower goodput is worse.
                Ratio::of(&rival.goodput, &ours.goodput),
            ],
        }
    }
}

impl Ratio {
    /// Returns the ratio of the means, and its interval from pairs that are drawn with replacement.
    fn of(above: &[f64], below: &[f64]) -> Self {
        let pairs: Vec<(f64, f64)> = above.iter().copied().zip(below.iter().copied()).collect();
        let ratio = |sums: (f64, f64)| match sums {
            (above, below) if above.max(below) <= 0.0 => 1.0,
            // Neither arm has a value.
            (above, below) if above.min(below).is_infinite() => 1.0,
            // A value is compared with zero.
            (above, below) => above / below.max(1e-9),
        };
        let add = |sums: (f64, f64), pair: &(f64, f64)| (sums.0 + pair.0, sums.1 + pair.1);
        let mut rng = SmallRng::seed_from_u64(1);
        let mut resampled: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let drawn = (0..pairs.len()).filter_map(|_| pairs.get(rng.random_range(0..pairs.len())));
                ratio(drawn.fold((0.0, 0.0), add))
            })
            .collect();
        resampled.sort_unstable_by(f64::total_cmp);
        let at = |place: usize| resampled.get(place).copied().unwrap_or(1.0);
        Self {
            mean: ratio(pairs.iter().fold((0.0, 0.0), add)),
            low: at(RESAMPLES / 40),
            high: at(RESAMPLES - 1 - RESAMPLES / 40),
        }
    }
}

/// Returns the mean; 0 without values.
pub(super) fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// Returns the geometric mean; 1 without values.
pub(super) fn geometric_mean(values: &[f64]) -> f64 {
    let logs: f64 = values.iter().map(|value| value.ln()).sum();
    if values.is_empty() { 1.0 } else { (logs / values.len() as f64).exp() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(ttft: &[f64], goodput: &[f64]) -> Figures {
        Figures {
            ttft_mean: ttft.to_vec(),
            ttft_p90: ttft.to_vec(),
            e2e_mean: ttft.iter().map(|value| value * 10.0).collect(),
            goodput: goodput.to_vec(),
            itl_p50: vec![10.0; ttft.len()],
            itl_p99: ttft.iter().map(|value| value / 10.0).collect(),
        }
    }

    fn judge(ours: Figures) -> Judgement {
        let fast = figures(&[100.0, 200.0, 150.0, 120.0], &[4.0; 4]);
        let many = figures(&[110.0, 220.0, 165.0, 132.0], &[5.0; 4]);
        let arms = [("ours", ours), ("fast", fast), ("many", many)];
        Judgement::of(&arms.into_iter().map(|(name, arm)| (name.to_owned(), arm)).collect(), "ours").unwrap()
    }

    #[test]
    fn a_cell_is_judged_against_the_fastest_rival_and_the_one_with_most_goodput() {
        let mut ours = figures(&[101.0, 202.0, 151.5, 121.2], &[5.0; 4]);
        ours.ttft_p90.iter_mut().chain(&mut ours.e2e_mean).for_each(|value| *value *= 0.9);
        let judged = judge(ours);
        assert_eq!((judged.ttft.rival.as_str(), judged.goodput.rival.as_str()), ("fast", "many"));
        assert_eq!(judged.verdict(), Verdict::Holds);
        assert!(!judged.is_unsure());
        let (worst, figure, rival) = judged.worst();
        assert!((worst - 1.01).abs() < 1e-9 && figure == "TTFT mean" && rival == "fast", "{worst} {figure}");
    }

    #[test]
    fn of_rivals_with_equal_goodput_the_fastest_counts() {
        let arms = [("ours", 100.0), ("fast", 90.0), ("slow", 120.0)];
        let arms = arms.map(|(name, ttft)| (name.to_owned(), figures(&[ttft; 4], &[5.0; 4])));
        let judged = Judgement::of(&arms.into_iter().collect(), "ours").unwrap();
        assert_eq!((judged.ttft.rival.as_str(), judged.goodput.rival.as_str()), ("fast", "fast"));
    }

    #[test]
    fn two_percent_are_a_miss_and_five_are_a_loss() {
        let ours = |factor: f64, goodput: f64| {
            judge(figures(&[100.0, 200.0, 150.0, 120.0].map(|value| value * factor), &[goodput; 4])).verdict()
        };
        assert_eq!(ours(1.03, 5.0), Verdict::Misses);
        assert_eq!(ours(1.06, 5.0), Verdict::Loses);
        assert_eq!(ours(0.9, 4.85), Verdict::Misses, "goodput counts, too");
        assert_eq!(ours(0.9, 5.5), Verdict::Holds);
    }

    #[test]
    fn a_wide_interval_is_no_proof() {
        let judged = judge(figures(&[60.0, 240.0, 100.0, 160.0], &[5.0; 4]));
        assert!(judged.ttft.ratios[0].mean < TOLERANCE, "{judged:?}");
        assert!(judged.is_unsure());
        assert_eq!(judged.verdict(), Verdict::Misses);
    }

    #[test]
    fn pairs_cancel_what_both_share_and_nothing_against_nothing_is_equal() {
        let ratio = Ratio::of(&[10.0, 1_000.0, 50.0], &[5.0, 500.0, 25.0]);
        assert!(
            [ratio.mean, ratio.low, ratio.high].iter().all(|value| (value - 2.0).abs() < 1e-9),
            "{ratio:?}"
        );
        let equal = Ratio { mean: 1.0, low: 1.0, high: 1.0 };
        assert_eq!(Ratio::of(&[0.0; 3], &[0.0; 3]), equal);
        assert_eq!(Ratio::of(&[f64::INFINITY; 3], &[f64::INFINITY; 3]), equal);
        assert!(Ratio::of(&[f64::INFINITY; 3], &[5.0; 3]).mean.is_infinite());
        assert!((geometric_mean(&[0.5, 2.0]) - 1.0).abs() < 1e-9);
    }
}
