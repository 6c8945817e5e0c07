//! Several comparisons of the same arms: with other fleets, step times and loads, and a summary of all.

use serde::Serialize;

use crate::{
    arrivals::ArrivalUnit,
    max_load::MaxLoad,
    report::{Comparison, Figure, RankBy, Ranked, tied, too_few_seeds, vary_runs},
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
        let (fleet, step_time, speed, unit) =
            (&self.fleet, &self.step_time, self.speed, self.offered_unit.name());
        let measured = self.measured();
        if self.offered_per_s <= 0.0 {
            let measured = measured.map_or_else(String::new, |measured| format!(" ({measured})"));
            return format!("{fleet}, step time {step_time}, all {unit} at once{measured}");
        }
        let measured = measured.map_or_else(String::new, |measured| format!("; {measured}"));
        format!(
            "{fleet}, step time {step_time}, {speed}x arrivals ({:.2} {unit}/s{measured})",
            self.offered_per_s
        )
    }

    /// Returns the rate of the requests that arrived in the runs of the arms, which depends on the arms when
    /// requests wait for answers.
    fn measured(&self) -> Option<String> {
        let mut rates: Vec<f64> = self.arms.iter().map(|arm| arm.figures.requests_per_s.mean).collect();
        rates.sort_by(f64::total_cmp);
        let (least, most) = (rates.first()?, rates.last()?);
        let [least, most] = [least, most].map(|rate| format!("{rate:.2}"));
        let range = if least == most { most } else { format!("{least} to {most}") };
        (self.offered_unit != ArrivalUnit::Requests).then(|| format!("measured: {range} requests/s"))
    }
}

impl Comparison {
    /// Returns the arm that is better than every other by more than the intervals, or `None` if there is
    /// none.
    fn winner(&self) -> Option<&Ranked> {
        let first = self.ranking.first().filter(|first| first.value.is_some())?;
        let mut others = placed(&self.ranking).skip(1).peekable();
        let has_unclear = self.ranking.iter().any(Ranked::is_unclear);
        let is_clear = others.peek().is_some() || !has_unclear;
        let is_untested = self.seeds > 1 && others.any(|(ranked, ..)| ranked.is_untested());
        (is_clear && !is_untested && tied(&self.ranking).next().is_none()).then_some(first)
    }
}

/// Returns the arms that have a value and a place.
fn placed(ranking: &[Ranked]) -> impl Iterator<Item = (&Ranked, &Figure, &Figure)> {
    let placed = ranking.iter().filter(|ranked| !ranked.is_unclear());
    placed.filter_map(|ranked| Some((ranked, ranked.value.as_ref()?, ranked.worse_percent.as_ref()?)))
}

/// Says which arm is best, by how much, and how certain that is.
fn best(comparison: &Comparison, rank_by: RankBy) -> Option<String> {
    let first = comparison.ranking.first()?;
    let name = rank_by.name();
    let unclear = too_few_seeds(&comparison.ranking, rank_by);
    let mut after = unclear.map_or_else(String::new, |told| format!(" There are {told}."));
    after.push_str(&unequal_shares(comparison, rank_by));
    let Some(value) = &first.value else {
        return Some(format!(
            "No arm has a {name} on {}: too many requests were not answered.{after}",
            comparison.setting()
        ));
    };
    let value = rank_by.shown(value.mean);
    let rest: Vec<(&Ranked, &Figure, &Figure)> = placed(&comparison.ranking).skip(1).collect();
    let Some((second, _, behind)) = rest.first() else {
        return Some(format!("{} has a {name} of {value} on {}.{after}", first.label, comparison.setting()));
    };
    if tied(&comparison.ranking).next().is_some() {
        return Some(no_difference(comparison, rank_by) + &after);
    }
    if rest.iter().any(|(ranked, ..)| ranked.is_untested()) && comparison.seeds > 1 {
        return Some(unvaried(comparison, rank_by) + &after);
    }
    let arms = rest.len() + 1;
    let sure = behind.interval().map_or(" (one seed: no interval)".to_owned(), |(low, high)| {
        format!(" (95 % interval {low:.1} to {high:.1} %, {} seeds: more than noise)", comparison.seeds)
    });
    let last = rest.last().filter(|_| rest.len() > 1);
    let last = last.map_or_else(String::new, |(last, _, behind)| {
        format!("; the last, {}, is {:.1} % worse", last.label, behind.mean)
    });
    Some(format!(
        "{} is the best of {arms} arms by {name}, {value}, on {}. The second, {}, is {:.1} % worse{sure}{last}.{after}",
        first.label,
        comparison.setting(),
        second.label,
        behind.mean,
    ))
}

/// Says that the runs do not vary from seed to seed, so that nothing can be tested.
fn unvaried(comparison: &Comparison, rank_by: RankBy) -> String {
    let shown = |(ranked, value, _): (&Ranked, &Figure, &Figure)| {
        format!("{} ({})", ranked.label, rank_by.shown(value.mean))
    };
    let placed = placed(&comparison.ranking).enumerate();
    let unvaried = placed.filter(|(number, (ranked, ..))| *number == 0 || ranked.is_untested());
    let arms: Vec<String> = unvaried.map(|(_, arm)| shown(arm)).collect();
    format!(
        "All {} seeds gave the same difference by {} between {} on {}, so that no test is possible: {}.",
        comparison.seeds,
        rank_by.name(),
        joined(&arms),
        comparison.setting(),
        vary_runs(comparison)
    )
}

/// Says what share of the requests each arm answered, if the shares differ or an arm has no value.
fn unequal_shares(comparison: &Comparison, rank_by: RankBy) -> String {
    let ranking = &comparison.ranking;
    let shares = || ranking.iter().map(|ranked| ranked.served_share);
    let is_equal = shares().all(|share| shares().all(|other| (share - other).abs() < 1e-9));
    if is_equal && ranking.iter().all(|ranked| ranked.value.is_some()) {
        return String::new();
    }
    let arm = |ranked: &Ranked| {
        let none = if ranked.value.is_none() {
            format!(", too few with some seed for a {}", rank_by.name())
        } else {
            String::new()
        };
        format!("{} {}{none}", ranked.label, ranked.served())
    };
    let arms: Vec<String> = ranking.iter().map(arm).collect();
    let differ = if is_equal { "" } else { "The arms answered different shares of the requests: " };
    format!(" {differ}{}.", arms.join("; "))
}

/// Says that the best arms do not differ measurably, and what was tested.
fn no_difference(comparison: &Comparison, rank_by: RankBy) -> String {
    let (equal, others): (Vec<_>, Vec<_>) =
        placed(&comparison.ranking).partition(|(ranked, ..)| ranked.is_tied());
    let shown = |(ranked, value, _): &(&Ranked, &Figure, &Figure)| {
        format!("{} ({})", ranked.label, rank_by.shown(value.mean))
    };
    let arms: Vec<String> = equal.iter().map(shown).collect();
    let seeds = comparison.seeds;
    let tested = match equal.as_slice() {
        _ if seeds < 2 => "the values are equal, and one seed allows no test".to_owned(),
        [_, (.., worse)] if worse.plus_minus == Some(0.0) => {
            format!("the values are equal with each of {seeds} seeds")
        }
        [_, (.., worse)] => {
            let (low, high) = worse.interval().unwrap_or_default();
            format!(
                "the 95 % interval of their difference, {low:.1} to {high:.1} %, includes 0 (Student's t over {seeds} \
                 seeds, compared in pairs)"
            )
        }
        _ => format!(
            "the 95 % interval of the difference of each to {} includes 0 (Student's t over {seeds} seeds, compared \
             in pairs)",
            equal.first().map_or("", |(first, ..)| first.label.as_str())
        ),
    };
    let others = others.first().map_or_else(String::new, |(next, _, worse)| {
        format!(" The best of the others, {}, is {:.1} % worse.", next.label, worse.mean)
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
            None => format!("No arm is measurably the best in any of the {all} comparisons."),
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
        let what = winner
            .as_ref()
            .map_or("no arm is measurably the best".to_owned(), |arm| format!("{arm} is the best"));
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
/// difference counts. An arm without a value is worse than one with a value.
fn is_apart(better: &Ranked, worse: &Ranked) -> bool {
    let half = |value: &Figure| value.plus_minus.unwrap_or(0.0);
    match (&better.value, &worse.value) {
        (Some(better), Some(worse)) => (worse.mean - better.mean).abs() > half(better) + half(worse),
        (better, worse) => better.is_some() && worse.is_none(),
    }
}

#[cfg(test)]
mod tests;
