//! Chooses which of three costs decides: load, prefix match or free cache. Knows columns of numbers and no
//! facts.

use serde::Deserialize;

/// Thresholds of imbalance and of a useful prefix match.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Thresholds {
    /// Share of the prompt's blocks, 0 to 1. A worker that has more of them cached can serve as the best
    /// match.
    pub cache_threshold: f32,
    /// Largest difference in active requests between the most and the least loaded worker at which the load
    /// is balanced.
    pub balance_abs_threshold: u32,
    /// Largest ratio of the two at which the load is balanced.
    pub balance_rel_threshold: f32,
    /// What decides for a request without a useful match.
    pub on_miss: OnMiss,
}

/// What decides for a request without a useful match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnMiss {
    /// Active requests, as in SGLang's model gateway.
    #[default]
    LeastLoaded,
    /// Free cache, as in SGLang's earlier router.
    MostFree,
}

/// Worker facts, one slice for each fact, all of equal length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns<'a> {
    /// Active requests.
    pub(crate) requests: &'a [u32],
    /// KV blocks in use, with this request.
    pub(crate) decode_blocks: &'a [u32],
    /// KV blocks of the engine; 0 when unknown.
    pub(crate) total_blocks: &'a [u32],
    /// Cached prefix blocks on the device.
    pub(crate) device: &'a [u32],
    /// Cached prefix blocks in host memory, beyond the device's.
    pub(crate) host: &'a [u32],
    /// Cached prefix blocks on disk, beyond the host's.
    pub(crate) disk: &'a [u32],
}

/// Cost that decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Branch {
    /// Active requests: the load is out of balance.
    OutOfBalance,
    /// Active requests: no worker has enough of the prefix.
    Miss,
    /// Share of the prompt that is not cached: a worker has enough of the prefix.
    BestMatch,
    /// KV blocks in use, more for a smaller cache: no worker has enough of the prefix.
    MostFree,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            cache_threshold: 0.3,
            balance_abs_threshold: 64,
            balance_rel_threshold: 1.5,
            on_miss: OnMiss::default(),
        }
    }
}

impl Thresholds {
    /// Checks the thresholds.
    ///
    /// # Errors
    /// Names the first threshold that is out of range.
    pub fn check(&self) -> Result<(), String> {
        let Self { cache_threshold: share, balance_rel_threshold: factor, .. } = self;
        if !(0.0..=1.0).contains(share) {
            return Err(format!("cache-threshold: {share} is not between 0 and 1"));
        }
        if !factor.is_finite() || *factor < 1.0 {
            return Err(format!("balance-rel-threshold: {factor} is not a finite number of 1 or more"));
        }
        Ok(())
    }

    /// Returns what decides, and the cost of each row.
    pub(crate) fn costs(&self, request_blocks: u32, columns: &Columns<'_>) -> (Branch, Vec<f32>) {
        let loads = || columns.requests.iter().copied().map(single).collect();
        if self.out_of_balance(columns.requests) {
            return (Branch::OutOfBalance, loads());
        }
        let shares = columns.matches(request_blocks);
        if shares.iter().any(|share| *share > self.cache_threshold) {
            return (Branch::BestMatch, shares.iter().map(|share| 1.0 - share).collect());
        }
        match self.on_miss {
            OnMiss::LeastLoaded => (Branch::Miss, loads()),
            OnMiss::MostFree => (Branch::MostFree, columns.occupied()),
        }
    }

    fn out_of_balance(&self, requests: &[u32]) -> bool {
        let most = requests.iter().copied().max().unwrap_or(0);
        let least = requests.iter().copied().min().unwrap_or(0);
        most.saturating_sub(least) > self.balance_abs_threshold
            && f64::from(most) > f64::from(least) * f64::from(self.balance_rel_threshold)
    }
}

impl Columns<'_> {
    /// Returns the share of the prompt's blocks that each row has cached, at most 1.
    fn matches(&self, request_blocks: u32) -> Vec<f32> {
        let rows = self.device.iter().zip(self.host).zip(self.disk);
        rows.map(|((device, host), disk)| {
            let cached = device.saturating_add(*host).saturating_add(*disk);
            if request_blocks == 0 { 0.0 } else { (single(cached) / single(request_blocks)).min(1.0) }
        })
        .collect()
    }

    /// Returns the blocks in use of each row, plus the blocks that its cache is smaller than the largest.
    /// Without all sizes, caches count as equal.
    fn occupied(&self) -> Vec<f32> {
        let sized = self.total_blocks.iter().all(|total| *total > 0);
        let largest = self.total_blocks.iter().copied().max().unwrap_or(0);
        let rows = self.decode_blocks.iter().zip(self.total_blocks);
        rows.map(|(booked, total)| {
            let missing = if sized { largest.saturating_sub(*total) } else { 0 };
            single(booked.saturating_add(missing))
        })
        .collect()
    }
}

impl Branch {
    /// Returns the reason for the receipt.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::OutOfBalance => "load out of balance: least loaded",
            Self::Miss => "no match: least loaded",
            Self::BestMatch => "best match",
            Self::MostFree => "no match: most free cache",
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^24")]
fn single(count: u32) -> f32 {
    count as f32
}

#[cfg(test)]
mod tests {
    use pointsman_policy_sdk::{Rng, least};

    use super::*;

    fn columns<'a>(
        requests: &'a [u32],
        device: &'a [u32],
        decode: &'a [u32],
        total: &'a [u32],
    ) -> Columns<'a> {
        const NONE: &[u32] = &[0; 8];
        Columns {
            requests,
            decode_blocks: decode,
            total_blocks: total,
            device,
            host: &NONE[..device.len()],
            disk: &NONE[..device.len()],
        }
    }

    #[test]
    fn balance_is_lost_only_past_both_thresholds() {
        let thresholds = Thresholds::default();
        assert!(thresholds.out_of_balance(&[65, 0]), "nothing against something is any factor");
        assert!(!thresholds.out_of_balance(&[64, 0]), "just the number");
        assert!(thresholds.out_of_balance(&[196, 130]));
        assert!(!thresholds.out_of_balance(&[195, 130]), "just the factor");
        assert!(!thresholds.out_of_balance(&[]));
    }

    #[test]
    fn each_branch_has_its_own_cost() {
        let thresholds = Thresholds::default();
        let busy = columns(&[90, 10], &[4, 4], &[1, 2], &[0, 0]);
        assert_eq!(thresholds.costs(4, &busy), (Branch::OutOfBalance, vec![90.0, 10.0]));
        let cached = columns(&[9, 10], &[1, 3], &[1, 2], &[0, 0]);
        assert_eq!(thresholds.costs(4, &cached), (Branch::BestMatch, vec![0.75, 0.25]));
        let fresh = columns(&[9, 10], &[1, 0], &[7, 2], &[100, 90]);
        assert_eq!(thresholds.costs(4, &fresh), (Branch::Miss, vec![9.0, 10.0]));
        let earlier = Thresholds { on_miss: OnMiss::MostFree, ..thresholds };
        assert_eq!(earlier.costs(4, &fresh), (Branch::MostFree, vec![7.0, 12.0]));
    }

    #[test]
    fn a_threshold_of_one_never_follows_a_match() {
        let thresholds = Thresholds { cache_threshold: 1.0, ..Thresholds::default() };
        let whole = columns(&[0, 0], &[u32::MAX, 4], &[1, 2], &[0, 0]);
        assert_eq!(thresholds.costs(4, &whole).0, Branch::Miss);
    }

    #[test]
    fn a_threshold_of_nought_follows_any_match_but_no_nothing() {
        let thresholds = Thresholds { cache_threshold: 0.0, ..Thresholds::default() };
        assert_eq!(thresholds.costs(99, &columns(&[0], &[1], &[0], &[0])).0, Branch::BestMatch);
        assert_eq!(thresholds.costs(99, &columns(&[0], &[0], &[0], &[0])).0, Branch::Miss);
    }

    #[test]
    fn equal_matches_are_drawn_uniformly() {
        let (_, costs) = Thresholds::default().costs(4, &columns(&[0; 3], &[4, 1, 4], &[9, 0, 0], &[0; 3]));
        let mut counts = [0_u32; 3];
        for seed in 0..3_000 {
            counts[least(&costs, &mut Rng::new(seed)).unwrap()] += 1;
        }
        assert_eq!(counts[1], 0);
        assert!((1_400..1_600).contains(&counts[0]), "{counts:?}");
    }

    #[test]
    fn any_bits_give_finite_costs_and_a_row() {
        for seed in 0..2_000 {
            let mut rng = Rng::new(seed);
            let mut column = || -> Vec<u32> { (0..5).map(|_| (rng.bits() >> 32) as u32).collect() };
            let (requests, device, decode, total) = (column(), column(), column(), column());
            let columns = columns(&requests, &device, &decode, &total);
            for (blocks, on_miss) in
                [(0, OnMiss::LeastLoaded), (1, OnMiss::MostFree), (u32::MAX, OnMiss::MostFree)]
            {
                let (_, costs) = Thresholds { on_miss, ..Thresholds::default() }.costs(blocks, &columns);
                assert!(costs.iter().all(|cost| cost.is_finite() && *cost >= 0.0), "{costs:?}");
                assert!(least(&costs, &mut rng.clone()).is_some_and(|row| row < 5));
            }
        }
    }

    #[test]
    fn no_rows_have_no_least() {
        assert_eq!(least(&[], &mut Rng::new(1)), None);
    }
}
