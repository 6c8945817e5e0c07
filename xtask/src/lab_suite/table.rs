//! The table of `lab-suite` in Markdown, and the conclusion below it.

use anyhow::ensure;

use super::{
    Measured,
    judge::{Against, Verdict, geometric_mean, mean},
};

/// Minimum share of the cells that must hold.
const SHARE: f64 = 0.9;

/// Returns the lines to print.
pub(super) fn lines(measured: &[Measured], ours: &str) -> Vec<String> {
    let mut lines = vec![
        "Ratios are TTFT mean, TTFT p90, E2E mean and goodput; above 1, the default is worse.".to_owned(),
        "ITL: its p50 and p99 to those of the rival with the least TTFT; not judged.".to_owned(),
        String::new(),
        "| cell | rate | least TTFT | ratios | ITL | most goodput | ratios | seeds | verdict |".to_owned(),
        "| --- | ---: | --- | --- | --- | --- | --- | ---: | --- |".to_owned(),
    ];
    lines.extend(measured.iter().map(|one| row(one, ours)));
    lines.push(String::new());
    lines.extend(conclusion(measured, ours));
    lines
}

/// Returns an error when too few cells hold or a figure is lost.
pub(super) fn check(measured: &[Measured]) -> anyhow::Result<()> {
    let lost: Vec<&str> = with(measured, Verdict::Loses).map(|one| one.cell.name.as_str()).collect();
    ensure!(lost.is_empty(), "more than 5 % worse than a rival: {}", lost.join(", "));
    let (holds, all) = (with(measured, Verdict::Holds).count(), measured.len());
    ensure!(share(holds, all) >= SHARE, "{holds} of {all} cells hold; expected {:.0} %", SHARE * 100.0);
    Ok(())
}

fn with(measured: &[Measured], verdict: Verdict) -> impl Iterator<Item = &Measured> {
    measured.iter().filter(move |one| one.judgement.verdict() == verdict)
}

fn row(one: &Measured, ours: &str) -> String {
    let seeds = one.arms.get(ours).map_or(0, |arm| arm.ttft_mean.len());
    let verdict = match one.judgement.verdict() {
        Verdict::Holds => "holds",
        Verdict::Misses => "misses",
        Verdict::Loses => "loses",
    };
    format!(
        "| {} | {:.2} | {} | {} | {} | {} | {} | {seeds} | {verdict} |",
        one.cell.name,
        one.rate,
        one.judgement.ttft.rival,
        ratios(&one.judgement.ttft),
        inter_token(one, ours),
        one.judgement.goodput.rival,
        ratios(&one.judgement.goodput),
    )
}

/// Returns the ratios of the median and of the 99th percentile of the inter-token latency to those of the
/// rival with the least TTFT.
fn inter_token(one: &Measured, ours: &str) -> String {
    let (Some(our), Some(rival)) = (one.arms.get(ours), one.arms.get(&one.judgement.ttft.rival)) else {
        return String::new();
    };
    let ratio = |ours: &[f64], theirs: &[f64]| mean(ours) / mean(theirs);
    format!("{:.3} {:.3}", ratio(&our.itl_p50, &rival.itl_p50), ratio(&our.itl_p99, &rival.itl_p99))
}

fn ratios(against: &Against) -> String {
    against.ratios.iter().map(|ratio| format!("{:.3}", ratio.mean)).collect::<Vec<_>>().join(" ")
}

fn conclusion(measured: &[Measured], ours: &str) -> Vec<String> {
    let (holds, all) = (with(measured, Verdict::Holds).count(), measured.len());
    let mut lines = vec![format!("{holds} of {all} cells hold.")];
    let worst =
        measured.iter().max_by(|one, other| one.judgement.worst().0.total_cmp(&other.judgement.worst().0));
    if let Some(one) = worst {
        let (ratio, figure, rival) = one.judgement.worst();
        lines.push(format!("Worst cell: {}, {figure} {ratio:.3} of {rival}'s.", one.cell.name));
    }
    for rival in ["kv-aware", "cache-aware"] {
        let ratios: Vec<f64> = measured
            .iter()
            .filter_map(|one| {
                let (our, other) = (one.arms.get(ours)?, one.arms.get(rival)?);
                Some(mean(&our.ttft_mean) / mean(&other.ttft_mean))
            })
            .collect();
        lines.push(format!("Geometric mean of the mean TTFT: {:.3} of {rival}'s.", geometric_mean(&ratios)));
    }
    lines.extend(measured.iter().filter_map(|one| {
        let (ratio, figure, rival) = one.judgement.worst();
        let why = match one.judgement.verdict() {
            Verdict::Holds => return None,
            Verdict::Misses if ratio <= 1.02 => "the interval reaches beyond 2 %".to_owned(),
            _ => format!("{figure} {ratio:.3} of {rival}'s"),
        };
        Some(format!("Miss: {}: {why}.", one.cell.name))
    }));
    lines
}

fn share(part: usize, all: usize) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}
