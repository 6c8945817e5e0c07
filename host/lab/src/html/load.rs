//! Results of all comparisons of a study: the ranking in each comparison, and figures over load.

use std::fmt::Write as _;

use super::{
    escape, name,
    plot::{self, Axis, Line},
};
use crate::{
    report::{ArmReport, Comparison, Ranked, tied},
    study::Study,
};

/// Shows the ranking of each comparison.
pub(super) fn rankings(html: &mut String, study: &Study) {
    let figure = study.rank_by.name();
    let _ = write!(html, "<h2>Ranking by {figure}</h2><div class=\"rankings\">");
    for report in &study.comparisons {
        let _ = write!(
            html,
            "<table class=\"ranking\"><caption>{}</caption><tr><th></th><th>arm</th><th>{figure}</th><th>beside the \
             best</th></tr>",
            escape(&report.setting())
        );
        for (number, ranked) in report.ranking.iter().enumerate() {
            html.push_str(&row(report, number, ranked, study));
        }
        html.push_str("</table>");
    }
    html.push_str("</div>");
}

fn row(report: &Comparison, number: usize, ranked: &Ranked, study: &Study) -> String {
    let place = report.arms.iter().position(|arm| arm.label == ranked.label).unwrap_or_default();
    let is_first = number == 0;
    // Arms that do not differ measurably from the first share its rank.
    let is_best = ranked.is_tied() && !ranked.is_unclear();
    let before = report.ranking.iter().take(number).filter(|ranked| !ranked.is_unclear()).count();
    let rank = if is_best { 1 } else { before + 1 };
    let rank = if ranked.is_unclear() { String::new() } else { rank.to_string() };
    let half = |half: Option<f64>, decimals: usize| {
        half.map_or_else(String::new, |half| format!(" ± {half:.decimals$}"))
    };
    let (shown, half_of_value) = match &ranked.value {
        Some(value) => (escape(&study.rank_by.shown(value.mean)), value.plus_minus),
        None => ("\u{2013}".to_owned(), None),
    };
    let behind = match (is_first, is_best) {
        _ if ranked.value.is_none() => ranked.served(),
        (true, _) if tied(&report.ranking).next().is_some() => "lowest mean".to_owned(),
        (true, _) => "best".to_owned(),
        _ if ranked.is_unclear() => "too few seeds to tell".to_owned(),
        (_, true) => "no difference found".to_owned(),
        (_, false) => {
            ranked.worse_percent.as_ref().map_or_else(String::new, |worse| match worse.excludes_zero() {
                None => format!("{:.1} % worse, not tested", worse.mean),
                Some(_) => format!("{:.1}{} % worse", worse.mean, half(worse.plus_minus, 1)),
            })
        }
    };
    let class = if is_best { " class=\"best\"" } else { "" };
    let decimals = if study.rank_by.more_is_better() { 3 } else { 1 };
    format!(
        "<tr{class}><td>{rank}</td><td>{}</td><td>{shown}{}</td><td>{behind}</td></tr>",
        name(place, &ranked.label),
        half(half_of_value, decimals),
    )
}

/// Returns groups of comparisons that differ only in their speed, with at least two speeds each.
fn by_speed(study: &Study) -> Vec<Vec<&Comparison>> {
    let mut groups: Vec<Vec<&Comparison>> = Vec::new();
    for report in &study.comparisons {
        let same = |group: &&mut Vec<&Comparison>| {
            group
                .first()
                .is_some_and(|one| (&one.fleet, &one.step_time) == (&report.fleet, &report.step_time))
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.push(report),
            None => groups.push(vec![report]),
        }
    }
    groups.retain(|group| group.len() > 1);
    for group in &mut groups {
        group.sort_by(|a, b| a.offered_per_s.total_cmp(&b.offered_per_s));
    }
    groups
}

/// A figure over load: title, unit, whether its axis is logarithmic, and the figure of an arm.
type Plot = (&'static str, &'static str, bool, fn(&ArmReport) -> f64);

const GOODPUT: Plot = ("Goodput over load", "goodput, requests/s", false, |arm| arm.figures.goodput.mean);

/// Draws each figure over load.
pub(super) fn plots(html: &mut String, study: &Study) {
    let plots: [Plot; 4] = [
        GOODPUT,
        ("Share of requests within the SLO over load", "share, %", false, |arm| {
            arm.figures.slo_share.mean * 100.0
        }),
        ("TTFT p90 over load", "TTFT p90, ms", true, |arm| arm.figures.ttft_p90.mean),
        ("Share of what is possible over load", "mean TTFT of the bound / of the arm, %", false, |arm| {
            arm.percent_of_relaxation.mean
        }),
    ];
    for group in by_speed(study) {
        let Some(first) = group.first() else { continue };
        let (fleet, step_time) = (escape(&first.fleet), escape(&first.step_time));
        let _ = write!(html, "<h2>Over load: {fleet}, step time {step_time}</h2>");
        plots.into_iter().for_each(|plot| html.push_str(&over_load(first, &group, plot)));
    }
}

/// Draws goodput over load, for the first fleet and step time with more than one speed.
pub(super) fn goodput(study: &Study) -> Option<String> {
    let group = by_speed(study).into_iter().next()?;
    Some(over_load(group.first()?, &group, GOODPUT))
}

fn over_load(first: &Comparison, group: &[&Comparison], (title, unit, logarithmic, pick): Plot) -> String {
    let label = format!("arrivals, {}/s", first.offered_unit.name());
    let x = Axis { label: &label, logarithmic: false, range: None };
    let y = Axis { label: unit, logarithmic, range: None };
    let lines = first.arms.iter().enumerate().map(|(place, arm)| {
        let points = group.iter().filter_map(|report| {
            let there = report.arms.get(place)?;
            Some((report.offered_per_s, pick(there)))
        });
        Line { name: &arm.label, place, points: points.collect(), with_dots: true }
    });
    plot::lines(title, x, y, &lines.collect::<Vec<_>>())
}

/// Shows the highest loads within the SLO.
pub(super) fn highest(html: &mut String, study: &Study) {
    for loads in &study.max_load {
        let _ = write!(
            html,
            "<h2>Highest load within the SLO: {}, step time {}</h2><p>{} Each load was found by bisection to \
             2.2 %.</p><table><tr><th>arm</th><th>highest load</th></tr>",
            escape(&loads.fleet),
            escape(&loads.step_time),
            escape(&loads.sentence()),
        );
        for (place, arm) in loads.arms.iter().enumerate() {
            let _ = write!(
                html,
                "<tr><td>{}</td><td>{}</td></tr>",
                name(place, &arm.label),
                escape(&arm.shown())
            );
        }
        html.push_str("</table>");
    }
}
