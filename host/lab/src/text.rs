//! Writes the report as tables for a terminal.

use std::fmt::Write as _;

use crate::{
    report::{ArmReport, Comparison, Figure, PairDifference, Possible},
    study::Study,
};

/// Returns the tables, the differences, the warnings and the summary.
#[must_use]
pub fn study(study: &Study) -> String {
    let mut text = String::new();
    for comparison in &study.comparisons {
        table(&mut text, comparison);
        text.push('\n');
    }
    for warning in &study.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    for sentence in &study.summary {
        let _ = writeln!(text, "{sentence}");
    }
    text
}

fn table(text: &mut String, report: &Comparison) {
    let _ = writeln!(
        text,
        "trace {}: {} requests on {}; {} seeds; SLO: TTFT <= {} ms and ITL <= {} ms\n\
         hit rate of an unlimited cache: {:.3}\n{}\n",
        report.trace,
        report.requests,
        report.setting(),
        report.seeds,
        report.slo.ttft_ms,
        report.slo.itl_ms,
        report.endless_cache_hit_rate,
        bounds(&report.possible),
    );
    let width = report.arms.iter().map(|arm| arm.label.chars().count()).max().unwrap_or(0).max(4);
    let _ = writeln!(
        text,
        "{:<width$} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>10} {:>9} {:>6} {:>6} {:>8} {:>10} {:>8}",
        "arm",
        "TTFT mean",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "ITL mean",
        "p99 ms",
        "E2E p50 ms",
        "good/s",
        "SLO",
        "hits",
        "preempt",
        "possible %",
        "found %",
    );
    for arm in &report.arms {
        row(text, arm, width);
    }
    shares(text, report, width);
    let first = report.arms.first().map_or("", |arm| arm.label.as_str());
    for pair in report.pairs.iter().filter(|pair| pair.first == first) {
        let _ = writeln!(
            text,
            "\n{}: {:.1} % of requests went elsewhere than with {first} or ended otherwise; {}",
            pair.second,
            pair.share * 100.0,
            changes(pair),
        );
    }
    if !report.warnings.is_empty() {
        text.push('\n');
    }
    for warning in &report.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
}

/// Describes the bounds of the mean time to first token.
pub(crate) fn bounds(possible: &Possible) -> String {
    let least = format!("mean TTFT: no policy is below {:.1} ms", possible.relaxation_ttft_ms.mean);
    let Some(found) = &possible.clairvoyant else { return least };
    let mean = found.ttft_ms.mean;
    match &found.not_beaten {
        None => format!("{least}; the clairvoyant search found {mean:.1} ms"),
        Some(arm) => format!("{least}; clairvoyant search: not found, {arm} is not beaten ({mean:.1} ms)"),
    }
}

/// Appends the share of the requests that each worker of a role served, for each arm, in percent.
fn shares(text: &mut String, report: &Comparison, width: usize) {
    let several = |arm: &'_ ArmReport| arm.workers.iter().any(|role| role.workers.len() > 1);
    if !report.arms.iter().any(several) {
        return;
    }
    let _ = writeln!(
        text,
        "\n{:<width$} {:<11} {:>8} {:>6} {:>6} {:>6} {:>6}   busiest",
        "share, %", "workers", "requests", "even", "least", "median", "most",
    );
    for arm in &report.arms {
        for role in arm.workers.iter().filter(|role| role.workers.len() > 1) {
            let sorted = role.sorted();
            let percent = |place: usize| sorted.get(place).map_or(0.0, |(_, share)| share * 100.0);
            let (busiest, last) = (sorted.first().map_or(0, |(worker, _)| *worker), sorted.len() - 1);
            let _ = writeln!(
                text,
                "{:<width$} {:<11} {:>8.0} {:>6.1} {:>6.1} {:>6.1} {:>6.1}   worker {busiest}",
                arm.label,
                format!("{} {}", sorted.len(), role.role.as_str()),
                role.requests,
                role.even() * 100.0,
                percent(last),
                role.median() * 100.0,
                percent(0),
            );
        }
    }
}

fn changes(pair: &PairDifference) -> String {
    if !pair.ttft_ms.has_value() {
        return "in a run, no such request was answered by both arms".to_owned();
    }
    let (ttft, e2e) = (change(&pair.ttft_ms), change(&pair.e2e_ms));
    format!("their TTFT changed by {ttft} ms on average, their E2E by {e2e} ms")
}

/// Returns a difference with its sign and interval, or a dash without a value.
pub(crate) fn change(figure: &Figure) -> String {
    if !figure.has_value() {
        return "–".to_owned();
    }
    let half = figure.plus_minus.map_or_else(String::new, |half| format!(" ± {half:.1}"));
    format!("{:+.1}{half}", figure.mean)
}

fn row(text: &mut String, arm: &ArmReport, width: usize) {
    let figures = &arm.figures;
    let mut line = format!("{:<width$}", arm.label);
    let mut cell = |figure: &Figure, width: usize, decimals: usize| {
        let _ = match figure.has_value() {
            true => write!(line, " {:>width$.decimals$}", figure.mean),
            false => write!(line, " {:>width$}", "-"),
        };
    };
    cell(&figures.ttft_mean, 9, 1);
    cell(&figures.ttft_p50, 9, 1);
    cell(&figures.ttft_p90, 9, 1);
    cell(&figures.ttft_p99, 9, 1);
    cell(&figures.itl_mean, 8, 2);
    cell(&figures.itl_p99, 8, 2);
    cell(&figures.e2e_p50, 10, 0);
    cell(&figures.goodput, 9, 3);
    cell(&figures.slo_share, 6, 3);
    cell(&figures.hit_rate, 6, 3);
    cell(&figures.preemptions, 8, 0);
    cell(&arm.percent_of_relaxation, 10, 1);
    match &arm.percent_of_clairvoyant {
        Some(percent) => cell(percent, 8, 1),
        None => line.push_str("        -"),
    }
    text.push_str(&line);
    if let Some(half) = figures.ttft_p90.plus_minus {
        let _ = write!(text, "   p90 ±{half:.1}");
    }
    text.push('\n');
}
