//! Reads a gateway's decisions, and finds those that were made near a swap of policies.

use std::{collections::BTreeMap, time::SystemTime};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::{fleet::Fleet, stats::sorted};

/// A decision whose distance from a swap is at most this counts as near it, microseconds.
const NEAR_US: u64 = 200_000;

/// One decision. Times are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Decision {
    /// Wall-clock time.
    pub(crate) at_us: u64,
    pub(crate) took_us: f64,
    pub(crate) generation: u64,
}

/// Decisions by their ids.
#[derive(Debug, Default)]
pub(crate) struct Decisions {
    all: BTreeMap<String, Decision>,
}

impl Decisions {
    /// Adds the receipts that are new since the last read, at most `most`.
    pub(crate) async fn read(&mut self, fleet: &Fleet, most: u32) -> anyhow::Result<()> {
        // The newest receipt comes first, so all receipts after the first known one are known.
        for line in fleet.admin.get(&format!("/decisions/export?limit={most}")).await?.lines() {
            let (id, decision) = parse(line)?;
            if self.all.insert(id, decision).is_some() {
                break;
            }
        }
        Ok(())
    }

    /// Returns the durations of the decisions since a wall-clock time, ascending, in microseconds.
    pub(crate) fn since(&self, at_us: u64) -> Vec<f64> {
        let since = self.all.values().filter(|decision| decision.at_us >= at_us);
        sorted(since.map(|decision| decision.took_us).collect())
    }

    /// Returns the time of the first decision of each generation except the first, ascending.
    fn swaps(&self) -> Vec<u64> {
        let mut first: BTreeMap<u64, u64> = BTreeMap::new();
        for decision in self.all.values() {
            let since = first.entry(decision.generation).or_insert(decision.at_us);
            *since = (*since).min(decision.at_us);
        }
        let mut swaps: Vec<u64> = first.into_values().skip(1).collect();
        swaps.sort_unstable();
        swaps
    }

    /// Returns the times from each rename to the first decision of the installed policy, microseconds.
    pub(crate) fn delays(&self, renames: &[u64]) -> Vec<f64> {
        let delay = |swap: u64| {
            let before = renames.partition_point(|rename| *rename <= swap).checked_sub(1)?;
            renames.get(before).map(|rename| (swap - rename) as f64)
        };
        self.swaps().into_iter().filter_map(delay).collect()
    }

    /// Returns the durations of the decisions near a swap, and those of the others, ascending.
    pub(crate) fn near_a_swap(&self) -> (Vec<f64>, Vec<f64>) {
        let swaps = self.swaps();
        let is_near = |at: u64| {
            let place = swaps.partition_point(|swap| *swap <= at);
            let around = [place.checked_sub(1), Some(place)].into_iter().flatten();
            around.filter_map(|place| swaps.get(place)).any(|swap| swap.abs_diff(at) <= NEAR_US)
        };
        let (near, rest): (Vec<Decision>, Vec<Decision>) =
            self.all.values().partition(|decision| is_near(decision.at_us));
        let durations = |all: Vec<Decision>| sorted(all.iter().map(|decision| decision.took_us).collect());
        (durations(near), durations(rest))
    }
}

/// Returns the wall-clock time, microseconds.
pub(crate) fn now_us() -> anyhow::Result<u64> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(u64::try_from(now.as_micros())?)
}

/// Parses one line of `/decisions/export`.
fn parse(line: &str) -> anyhow::Result<(String, Decision)> {
    let one: Value = serde_json::from_str(line)?;
    let id = one["id"].as_str().context("a receipt has no id")?;
    let decision = Decision {
        at_us: one["call"]["now_us"].as_u64().context("a receipt has no call.now_us")?,
        took_us: one["took_us"].as_f64().context("a receipt has no took_us")?,
        generation: one["generation"].as_u64().context("a receipt has no generation")?,
    };
    ensure!(decision.took_us >= 0.0, "a receipt has a negative took_us: {line}");
    Ok((id.to_owned(), decision))
}

#[cfg(test)]
mod tests {
    use super::{Decision, Decisions};

    fn decisions() -> Decisions {
        // One decision is made each 100 ms. Generation 2 decides first at 1.0 s, and generation 3 at 2.0 s.
        let one = |n: u64| {
            let generation = 1 + n / 10;
            (format!("{n:03}"), Decision { at_us: n * 100_000, took_us: n as f64, generation })
        };
        Decisions { all: (0..30).map(one).collect() }
    }

    #[test]
    fn swaps_and_what_is_near_them() {
        let decisions = decisions();
        assert_eq!(decisions.swaps(), [1_000_000, 2_000_000]);
        let (near, rest) = decisions.near_a_swap();
        assert_eq!(near, [8.0, 9.0, 10.0, 11.0, 12.0, 18.0, 19.0, 20.0, 21.0, 22.0]);
        assert_eq!(rest.len(), 20);
    }

    #[test]
    fn delays_are_counted_from_the_last_rename_before() {
        assert_eq!(decisions().delays(&[990_000, 1_400_000, 1_960_000]), [10_000.0, 40_000.0]);
        assert!(decisions().delays(&[5_000_000]).is_empty());
    }
}
