//! Results of all comparisons of a study: the ranking in each, and figures over load.

use std::fmt::Write as _;

use super::{
    escape, name,
    plot::{self, Axis, Line},
};
use crate::{
    report::{Comparison, Figures},
    study::Study,
};

/// Shows the ranking figure of each arm in each comparison.
pub(super) fn overview(html: &mut String, study: &Study) {
    let Some(first) = study.comparisons.first() else { return };
    let _ = write!(html, "<div class=\"wide\"><table><tr><th>{}</th>", escape(study.rank_by.name()));
    for report in &study.comparisons {
        let _ = write!(html, "<th>{}</th>", escape(&report.setting()));
    }
    html.push_str("</tr>");
    for (place, arm) in first.arms.iter().enumerate() {
        let _ = write!(html, "<tr><td>{}</td>", name(place, &arm.label));
        for report in &study.comparisons {
            html.push_str(&ranked(report, &arm.label, study));
        }
        html.push_str("</tr>");
    }
    html.push_str("</table></div>");
}

fn ranked(report: &Comparison, label: &str, study: &Study) -> String {
    let found = report.ranking.iter().enumerate().find(|(_, ranked)| ranked.label == label);
    let Some((rank, ranked)) = found else { return "<td></td>".to_owned() };
    let class = if rank == 0 { " class=\"best\"" } else { "" };
    let value = escape(&study.rank_by.shown(ranked.value.mean));
    let worse = &ranked.worse_percent;
    let half = worse.plus_minus.map_or_else(String::new, |half| format!(" ± {half:.1}"));
    let noise = if ranked.is_sure() == Some(false) && rank > 0 { ", noise" } else { "" };
    let behind = if rank == 0 { "best".to_owned() } else { format!("{:+.1}{half} %{noise}", worse.mean) };
    format!("<td{class}>{value} <small>{behind}</small></td>")
}

/// Comparisons that differ in their speed only, with at least two speeds.
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

/// Draws figures over load.
pub(super) fn plots(html: &mut String, study: &Study) {
    type Pick = fn(&Figures) -> f64;
    let plots: [(&str, &str, bool, Pick); 3] = [
        ("Goodput over load", "goodput, requests/s", false, |figures| figures.goodput.mean),
        ("Share of requests within the SLO over load", "share, %", false, |figures| {
            figures.slo_share.mean * 100.0
        }),
        ("TTFT p90 over load", "TTFT p90, ms", true, |figures| figures.ttft_p90.mean),
    ];
    for group in by_speed(study) {
        let Some(first) = group.first() else { continue };
        let (fleet, step_time) = (escape(&first.fleet), escape(&first.step_time));
        let _ = write!(html, "<h2>Over load: {fleet}, step time {step_time}</h2>");
        for (title, unit, logarithmic, pick) in plots {
            let x = Axis { label: "arrivals, requests/s", logarithmic: false, range: None };
            let y = Axis { label: unit, logarithmic, range: None };
            let lines = first.arms.iter().enumerate().map(|(place, arm)| {
                let points = group.iter().filter_map(|report| {
                    let there = report.arms.get(place)?;
                    Some((report.offered_per_s, pick(&there.figures)))
                });
                Line { name: &arm.label, place, points: points.collect(), with_dots: true }
            });
            html.push_str(&plot::lines(title, x, y, &lines.collect::<Vec<_>>()));
        }
    }
}

/// Shows the highest loads within the SLO.
pub(super) fn highest(html: &mut String, study: &Study) {
    for loads in &study.max_load {
        let _ = write!(
            html,
            "<h2>Highest load within the SLO: {}, step time {}</h2><p>The highest rate of arrivals at which {:.0} % of the \
             requests keep both limits, found by bisection to 2.2 %.</p><table><tr><th>arm</th><th>highest load</th></tr>",
            escape(&loads.fleet),
            escape(&loads.step_time),
            loads.slo_share * 100.0,
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
