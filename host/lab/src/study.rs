//! Several comparisons of the same arms: with other fleets, step times and loads, and a summary of all.

use serde::Serialize;

use crate::{
    max_load::MaxLoad,
    report::{Comparison, RankBy, Ranked, tied, too_few_seeds},
};

/// All results of one command.
#[derive(Clone, Debug, Serialize)]
pub struct Study {
    /// Sentences that say which arm is best, by how much, and how certain that is.
    pub summary: Vec<String>,
    /// Warnings about all comparisons of the study together.
    pub warnings: Vec<String>,
    /// Figure that ranks the arms.
    pub rank_by: RankBy,
    /// One comparison for each combination of fleet, step time and speed, in this order.
    pub comparisons: Vec<Comparison>,
    /// Highest loads within the SLO, if the user asked for them.
    pub max_load: Vec<MaxLoad>,
}

impl Study {
    /// Combines comparisons of the same arms.
    #[must_use]
    pub fn new(comparisons: Vec<Comparison>, max_load: Vec<MaxLoad>, rank_by: RankBy) -> Self {
        let mut summary = Vec::new();
        summary.extend(comparisons.first().and_then(|first| best(first, rank_by)));
        summary.extend(stays(&comparisons));
        summary.extend(max_load.iter().map(MaxLoad::sentence));
        let warnings = ranking_changes(&comparisons, rank_by);
        Self { summary, warnings, rank_by, comparisons, max_load }
    }
}

impl Comparison {
    /// Returns the property in which this comparison differs from the study's other comparisons.
    #[must_use]
    pub fn setting(&self) -> String {
        let rate = self.offered_per_s;
        format!(
            "{}, step time {}, {}x arrivals ({rate:.2} requests/s)",
            self.fleet, self.step_time, self.speed
        )
    }
}

impl Comparison {
    /// Returns the arm that is better than every other by more than the intervals, or `None` if there is
    /// none.
    fn winner(&self) -> Option<&Ranked> {
        let (first, rest) = self.ranking.split_first()?;
        let is_clear = rest.is_empty() || !rest.iter().all(Ranked::is_unclear);
        (is_clear && tied(&self.ranking).next().is_none()).then_some(first)
    }
}

/// Says which arm is best, by how much, and how certain that is. Returns `None` if no difference was found.
fn best(comparison: &Comparison, rank_by: RankBy) -> Option<String> {
    let (first, rest) = comparison.ranking.split_first()?;
    let (name, value) = (rank_by.name(), rank_by.shown(first.value.mean));
    let unclear = too_few_seeds(&comparison.ranking, rank_by);
    let unclear = unclear.map_or_else(String::new, |told| format!(" There are {told}."));
    let rest: Vec<&Ranked> = rest.iter().filter(|ranked| !ranked.is_unclear()).collect();
    let Some(second) = rest.first() else {
        return Some(format!(
            "{} has a {name} of {value} on {}.{unclear}",
            first.label,
            comparison.setting()
        ));
    };
    if comparison.winner().is_none() {
        return Some(no_difference(comparison, first, rank_by) + &unclear);
    }
    let arms = rest.len() + 1;
    let sure =
        second.worse_percent.interval().map_or(" (one seed: no interval)".to_owned(), |(low, high)| {
            format!(" (95 % interval {low:.1} to {high:.1} %, {} seeds: more than noise)", comparison.seeds)
        });
    let last = rest.last().filter(|_| rest.len() > 1);
    let last = last.map_or_else(String::new, |last| {
        format!("; the last, {}, is {:.1} % worse", last.label, last.worse_percent.mean)
    });
    Some(format!(
        "{} is the best of {arms} arms by {name}, {value}, on {}. The second, {}, is {:.1} % worse{sure}{last}.{unclear}",
        first.label,
        comparison.setting(),
        second.label,
        second.worse_percent.mean,
    ))
}

/// Says that the best arms do not differ measurably, and what was tested.
fn no_difference(comparison: &Comparison, first: &Ranked, rank_by: RankBy) -> String {
    let equal: Vec<&Ranked> = tied(&comparison.ranking).collect();
    let shown = |ranked: &&Ranked| format!("{} ({})", ranked.label, rank_by.shown(ranked.value.mean));
    let arms: Vec<String> = std::iter::once(&first).chain(&equal).map(shown).collect();
    let seeds = comparison.seeds;
    let tested = match equal.as_slice() {
        _ if seeds < 2 => "the values are equal, and one seed allows no test".to_owned(),
        [one] if one.worse_percent.plus_minus == Some(0.0) => {
            format!("the values are equal with each of {seeds} seeds")
        }
        [one] => {
            let (low, high) = one.worse_percent.interval().unwrap_or_default();
            format!(
                "the 95 % interval of their difference, {low:.1} to {high:.1} %, includes 0 (Student's t over {seeds} \
                 seeds, compared in pairs)"
            )
        }
        _ => format!(
            "the 95 % interval of the difference of each to {} includes 0 (Student's t over {seeds} seeds, compared \
             in pairs)",
            first.label
        ),
    };
    let others: Vec<&Ranked> = comparison.ranking.iter().skip(1).filter(|ranked| !ranked.is_tied()).collect();
    let others = others.first().map_or_else(String::new, |next| {
        let (count, worse) = (others.len(), next.worse_percent.mean);
        format!(" The best of the other {count}, {}, is {worse:.1} % worse.", next.label)
    });
    let among = if arms.len() == 2 { "between" } else { "among" };
    let (name, arms, setting) = (rank_by.name(), joined(&arms), comparison.setting());
    format!("No difference found by {name} {among} {arms} on {setting}: {tested}.{others}")
}

/// Joins names as in a sentence.
fn joined(names: &[String]) -> String {
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        _ => names.concat(),
    }
}

/// Says which arms are best in all comparisons, if there is more than one comparison.
fn stays(comparisons: &[Comparison]) -> Option<String> {
    let all = comparisons.len();
    let winner = |comparison: &Comparison| comparison.winner().map(|ranked| ranked.label.clone());
    let first = winner(comparisons.first()?);
    if all < 2 {
        return None;
    }
    if comparisons.iter().all(|comparison| winner(comparison) == first) {
        return Some(match first {
            Some(_) => format!("It is the best in all {all} comparisons."),
            None => format!("No difference was found in any of the {all} comparisons."),
        });
    }
    let mut groups: Vec<(Option<String>, Vec<String>)> = Vec::new();
    for comparison in comparisons {
        let (winner, setting) = (winner(comparison), comparison.setting());
        match groups.iter_mut().find(|(other, _)| *other == winner) {
            Some((_, settings)) => settings.push(setting),
            None => groups.push((winner, vec![setting])),
        }
    }
    let group = |(winner, settings): &(Option<String>, Vec<String>)| {
        let what =
            winner.as_ref().map_or("no difference was found".to_owned(), |arm| format!("{arm} is the best"));
        let (count, settings) = (settings.len(), settings.join("; "));
        format!("{what} in {count} ({settings})")
    };
    let groups: Vec<String> = groups.iter().map(group).collect();
    Some(format!("Of {all} comparisons: {}.", joined(&groups)))
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

/// Whether two arms differ by more than their intervals. With one seed there is no interval, and every
/// difference counts.
fn is_apart(better: &Ranked, worse: &Ranked) -> bool {
    let half = |ranked: &Ranked| ranked.value.plus_minus.unwrap_or(0.0);
    (worse.value.mean - better.value.mean).abs() > half(better) + half(worse)
}

#[cfg(test)]
mod tests;
