//! Several comparisons of the same arms: other fleets, step times and loads; and what they say together.

use serde::Serialize;

use crate::{
    max_load::MaxLoad,
    report::{Comparison, RankBy, Ranked},
};

/// Everything that one command found.
#[derive(Clone, Debug, Serialize)]
pub struct Study {
    /// Which arm, by how much, and how sure: sentences.
    pub summary: Vec<String>,
    /// Warnings about all comparisons of the study together.
    pub warnings: Vec<String>,
    /// Figure that ranks the arms.
    pub rank_by: RankBy,
    /// The comparisons: for each fleet each step time, and for each of these each speed.
    pub comparisons: Vec<Comparison>,
    /// Highest loads within the SLO, when they were asked for.
    pub max_load: Vec<MaxLoad>,
}

impl Study {
    /// Puts comparisons of the same arms together.
    #[must_use]
    pub fn new(comparisons: Vec<Comparison>, max_load: Vec<MaxLoad>, rank_by: RankBy) -> Self {
        let mut summary = Vec::new();
        summary.extend(comparisons.first().and_then(|first| best(first, rank_by)));
        summary.extend(stays(&comparisons));
        summary.extend(max_load.first().map(highest));
        let warnings = ranking_changes(&comparisons, rank_by);
        Self { summary, warnings, rank_by, comparisons, max_load }
    }
}

impl Comparison {
    /// Returns the property in which it differs from the study's other comparisons.
    #[must_use]
    pub fn setting(&self) -> String {
        let rate = self.offered_per_s;
        format!(
            "{}, step time {}, {}x arrivals ({rate:.2} requests/s)",
            self.fleet, self.step_time, self.speed
        )
    }
}

fn best(comparison: &Comparison, rank_by: RankBy) -> Option<String> {
    let (first, rest) = comparison.ranking.split_first()?;
    let (name, value) = (rank_by.name(), rank_by.shown(first.value.mean));
    let Some(second) = rest.first() else {
        return Some(format!("{} has a {name} of {value} on {}.", first.label, comparison.setting()));
    };
    let arms = comparison.arms.len();
    let sure = match (second.is_sure(), second.worse_percent.plus_minus) {
        (Some(sure), Some(half)) => {
            let (low, high) = (second.worse_percent.mean - half, second.worse_percent.mean + half);
            let verdict = if sure { "more than noise" } else { "within noise" };
            format!(" (95 % interval {low:.1} to {high:.1} %, {} seeds: {verdict})", comparison.seeds)
        }
        _ => " (one seed: no interval)".to_owned(),
    };
    let last = rest.last().filter(|_| rest.len() > 1);
    let last = last.map_or_else(String::new, |last| {
        format!("; the last, {}, is {:.1} % worse", last.label, last.worse_percent.mean)
    });
    Some(format!(
        "{} is the best of {arms} arms by {name}, {value}, on {}. The second, {}, is {:.1} % worse{sure}{last}.",
        first.label,
        comparison.setting(),
        second.label,
        second.worse_percent.mean,
    ))
}

/// Tells whether the best arm of the first comparison is also the best of the others.
fn stays(comparisons: &[Comparison]) -> Option<String> {
    let best = |comparison: &Comparison| comparison.ranking.first().map(|ranked| ranked.label.clone());
    let first = best(comparisons.first()?)?;
    let others: Vec<String> = comparisons
        .iter()
        .filter_map(|comparison| Some((best(comparison)?, comparison.setting())))
        .filter(|(label, _)| *label != first)
        .map(|(label, setting)| format!("{label} on {setting}"))
        .collect();
    match (comparisons.len(), others.len()) {
        (1, _) => None,
        (all, 0) => Some(format!("It is the best in all {all} comparisons.")),
        (all, lost) => Some(format!(
            "It is the best in {} of {all} comparisons; otherwise: {}.",
            all - lost,
            others.join("; ")
        )),
    }
}

fn highest(loads: &MaxLoad) -> String {
    let arms: Vec<String> = loads.arms.iter().map(|arm| format!("{}: {}", arm.label, arm.shown())).collect();
    format!(
        "Highest load at which {:.0} % of the requests keep the SLO, on {} with step time {}: {}.",
        loads.slo_share * 100.0,
        loads.fleet,
        loads.step_time,
        arms.join("; ")
    )
}

/// Names each pair of arms whose order differs between two comparisons by more than noise in both.
fn ranking_changes(comparisons: &[Comparison], rank_by: RankBy) -> Vec<String> {
    let Some((first, rest)) = comparisons.split_first() else { return Vec::new() };
    let changes = rest.iter().filter_map(|other| {
        let swapped: Vec<String> = pairs(&first.ranking)
            .filter(|(better, worse)| {
                find(&other.ranking, &better.label).zip(find(&other.ranking, &worse.label)).is_some_and(
                    |((at, better_there), (before, worse_there))| {
                        before < at && is_apart(better, worse) && is_apart(worse_there, better_there)
                    },
                )
            })
            .map(|(better, worse)| format!("{} before {}", better.label, worse.label))
            .collect();
        (!swapped.is_empty()).then(|| {
            format!(
                "the ranking by {} changes by more than noise between {} and {}: {} holds only for the first",
                rank_by.name(),
                first.setting(),
                other.setting(),
                swapped.join(", ")
            )
        })
    });
    changes.collect()
}

fn pairs(ranking: &[Ranked]) -> impl Iterator<Item = (&Ranked, &Ranked)> {
    let later = |place: usize| ranking.iter().skip(place + 1);
    ranking.iter().enumerate().flat_map(move |(place, better)| later(place).map(move |worse| (better, worse)))
}

fn find<'a>(ranking: &'a [Ranked], label: &str) -> Option<(usize, &'a Ranked)> {
    ranking.iter().enumerate().find(|(_, ranked)| ranked.label == label)
}

/// Whether two arms differ by more than their intervals. One seed has none: then every difference counts.
fn is_apart(better: &Ranked, worse: &Ranked) -> bool {
    let half = |ranked: &Ranked| ranked.value.plus_minus.unwrap_or(0.0);
    (worse.value.mean - better.value.mean).abs() > half(better) + half(worse)
}

#[cfg(test)]
mod tests;
