//! Draws the share of requests by worker, as one bar of segments for each arm.

use std::fmt::Write as _;

use super::{colours::colour, escape};
use crate::report::{ArmReport, Comparison, RoleShares};

/// Maximum number of workers with a segment of their own; the others share one.
const MAX_SEGMENTS: usize = 40;
/// Left end and width of the bars, and the height of a row, pixels.
const LEFT: f64 = 170.0;
const WIDTH: f64 = 400.0;
const ROW: f64 = 20.0;

/// Draws the shares for each role.
pub(super) fn shares(html: &mut String, report: &Comparison) {
    let roles = report.arms.iter().flat_map(|arm| &arm.workers).map(|role| role.role);
    let mut seen = Vec::new();
    for role in roles {
        if seen.contains(&role) {
            continue;
        }
        seen.push(role);
        let of = |arm: &'_ ArmReport| arm.workers.iter().position(|one| one.role == role);
        let bars: Vec<(usize, &str, &RoleShares)> = report
            .arms
            .iter()
            .enumerate()
            .filter_map(|(place, arm)| Some((place, arm.label.as_str(), arm.workers.get(of(arm)?)?)))
            .collect();
        if bars.iter().any(|(_, _, shares)| shares.workers.len() > 1) {
            plot(html, role.as_str(), &bars);
        }
    }
}

fn plot(html: &mut String, role: &str, bars: &[(usize, &str, &RoleShares)]) {
    let height = 30.0 + ROW * f64::from(u32::try_from(bars.len()).unwrap_or(u32::MAX)) + 8.0;
    let count = bars.first().map_or(0, |(_, _, shares)| shares.workers.len());
    let title = format!("Share of requests of {count} {role} workers, the busiest first");
    let _ = write!(
        html,
        "<svg class=\"shares\" viewBox=\"0 0 720 {height}\" width=\"720\" height=\"{height}\" role=\"img\" \
         aria-label=\"{title}\"><text x=\"{LEFT}\" y=\"15\" class=\"title\">{title}</text>"
    );
    let mut at = 30.0;
    for (place, label, shares) in bars {
        let _ = write!(
            html,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            at + 11.0,
            escape(&super::plot::short(label))
        );
        bar(html, at, *place, shares);
        at += ROW;
    }
    html.push_str("</svg>");
}

fn bar(html: &mut String, at: f64, place: usize, shares: &RoleShares) {
    let sorted = shares.sorted();
    let mut left = LEFT;
    let mut segment = |title: String, share: f64, opacity: f64| {
        let width = share * WIDTH;
        let _ = write!(
            html,
            "<rect x=\"{left:.2}\" y=\"{at}\" width=\"{width:.2}\" height=\"14\" style=\"fill:{};stroke:var(--page)\" \
             fill-opacity=\"{opacity}\"><title>{title}</title></rect>",
            colour(place)
        );
        left += width;
    };
    for (worker, share) in sorted.iter().take(MAX_SEGMENTS) {
        segment(format!("worker {worker}: {:.1} %", share * 100.0), *share, 1.0);
    }
    let rest = sorted.get(MAX_SEGMENTS..).unwrap_or_default();
    let others: f64 = rest.iter().map(|(_, share)| share).sum();
    if !rest.is_empty() {
        segment(format!("{} others: {:.1} %", rest.len(), others * 100.0), others, 0.4);
    }
    if let Some((worker, share)) = sorted.first() {
        let mark = if shares.one_gets_most() { " (most)" } else { "" };
        let _ = write!(
            html,
            "<text x=\"{:.0}\" y=\"{:.0}\">worker {worker}: {:.1} %{mark}</text>",
            LEFT + WIDTH + 8.0,
            at + 11.0,
            share * 100.0
        );
    }
}
