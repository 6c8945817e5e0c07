//! The page: what the router did, what each policy would have done, how sure, and why.

use std::collections::HashMap;

use pointsman_lab::{ArmReport, Ended, Figure, RunResult, Window};

use super::{
    answers::Answer,
    assign::{Assigned, How},
    counts::Counts,
    document::Block,
    engines::EngineLog,
    finish::{Forecast, best, by_ttft},
    interval,
    tracker::Followed,
    writer::Written,
};

mod certainty;

/// Difference of two figures, percent, that counts as a reason.
const NOTABLE_PERCENT: f64 = 5.0;

/// Difference of two hit rates that is more than rounding.
const NOTABLE_HITS: f64 = 0.03;

/// What was observed.
pub(super) struct Observation<'a> {
    pub(super) seconds: f64,
    pub(super) counts: &'a Counts,
    /// Those that were served, in the order of arrival.
    pub(super) written: &'a [Written],
    /// Number of requests that are left out, because their answers were errors.
    pub(super) failed: usize,
    pub(super) assigned: &'a [Assigned],
    pub(super) followed: &'a Followed,
    pub(super) answers: &'a HashMap<u64, Answer>,
    /// Why the trace could not be written with all that is known.
    pub(super) incomplete: Option<String>,
    pub(super) logs: &'a [EngineLog],
    pub(super) total: Window,
}

/// Means over requests, as measured or as forecast.
#[derive(Clone, Copy, Debug, Default)]
struct Means {
    ttft_ms: f64,
    itl_ms: f64,
    hit_rate: f64,
}

impl Means {
    fn measured(window: &Window) -> Self {
        Self {
            ttft_ms: 1e3 * ratio(window.ttft_s, window.first_tokens),
            itl_ms: 1e3 * ratio(window.itl_s, window.intervals),
            hit_rate: ratio(window.cached_tokens, window.queried_tokens),
        }
    }

    fn forecast(result: &RunResult) -> Self {
        let complete = || result.outcomes.iter().filter(|outcome| outcome.ended == Ended::Complete);
        let sum = |value: fn(&pointsman_lab::Outcome) -> f64| complete().map(value).sum::<f64>();
        let decode = |outcome: &pointsman_lab::Outcome| (outcome.e2e - outcome.ttft).as_secs_f64();
        Self {
            ttft_ms: 1e3 * ratio(sum(|outcome| outcome.ttft.as_secs_f64()), number(complete().count())),
            itl_ms: 1e3 * ratio(sum(decode), sum(|outcome| f64::from(outcome.osl.saturating_sub(1)))),
            hit_rate: ratio(sum(|outcome| f64::from(outcome.cached)), sum(|outcome| f64::from(outcome.isl))),
        }
    }
}

/// Returns the page. `forecast` is `None` when there were too few requests.
pub(super) fn blocks(seen: &Observation<'_>, forecast: Option<&Forecast>) -> Vec<Block> {
    let mut blocks = vec![heading("What your router did (measured)")];
    add_router_table(&mut blocks, seen);
    if let Some(forecast) = forecast {
        blocks.push(heading("What each policy would have done (forecast)"));
        policies(&mut blocks, forecast);
        blocks.push(heading("Why"));
        match certainty::cannot_tell(seen) {
            Some(warning) => blocks.push(warning),
            None => blocks.extend(reasons(forecast).into_iter().map(Block::Sentence)),
        }
        blocks.extend(guess_warning(seen, forecast));
    }
    blocks.push(heading("How sure"));
    certainty::add(&mut blocks, seen, forecast);
    blocks
}

fn add_router_table(blocks: &mut Vec<Block>, seen: &Observation<'_>) {
    let mut rows = vec![row(&[
        "worker",
        "answers",
        "share %",
        "TTFT ms",
        "ITL ms",
        "hit rate",
        "prompt tokens/s",
        "read",
    ])];
    let line = |name: String, window: &Window, read: String| {
        let means = Means::measured(window);
        vec![
            name,
            format!("{:.0}", window.first_tokens),
            format!("{:.1}", 100.0 * ratio(window.first_tokens, seen.total.first_tokens)),
            format!("{:.1}", means.ttft_ms),
            format!("{:.2}", means.itl_ms),
            format!("{:.3}", means.hit_rate),
            format!("{:.0}", ratio(window.prompt_tokens, seen.seconds)),
            read,
        ]
    };
    for log in seen.logs {
        let read = format!("{} of {}", log.readings - log.failures, log.readings);
        rows.push(line(log.url.clone(), &log.total(), read));
    }
    rows.push(line("all".to_owned(), &seen.total, String::new()));
    blocks.push(Block::Table(rows));
    let rate = ratio(number(seen.written.len()), seen.seconds);
    blocks.push(Block::Sentence(format!(
        "Observed for {:.0} s: {} requests in the trace, {rate:.2} a second. Times, hit rates and shares are those of \
         the engines' metrics.",
        seen.seconds,
        seen.written.len(),
    )));
}

fn policies(blocks: &mut Vec<Block>, forecast: &Forecast) {
    let Some(comparison) = forecast.comparison() else { return };
    let (own, imbalance) = (Means::forecast(&forecast.observed), forecast.observed.imbalance);
    let mut rows = vec![row(&[
        "",
        "TTFT mean ms",
        "beside yours %",
        "TTFT p90 ms",
        "ITL mean ms",
        "hit rate",
        "imbalance",
    ])];
    rows.push(vec![
        "your router, simulated".to_owned(),
        format!("{:.1}", own.ttft_ms),
        String::new(),
        format!("{:.1}", p90_ttft_ms(&forecast.observed)),
        format!("{:.2}", own.itl_ms),
        format!("{:.3}", own.hit_rate),
        format!("{imbalance:.2}"),
    ]);
    for arm in by_ttft(&comparison.arms) {
        let figures = &arm.figures;
        let half = figures.ttft_mean.plus_minus.map_or_else(String::new, |half| format!(" ±{half:.1}"));
        rows.push(vec![
            arm.label.clone(),
            shown(&figures.ttft_mean, |mean| format!("{mean:.1}{half}")),
            shown(&figures.ttft_mean, |mean| format!("{:+.1}", change(mean, own.ttft_ms))),
            shown(&figures.ttft_p90, |p90| format!("{p90:.1}")),
            shown(&figures.itl_over_tokens, |mean| format!("{mean:.2}")),
            format!("{:.3}", figures.hit_rate.mean),
            format!("{:.2}", figures.imbalance.mean),
        ]);
    }
    blocks.push(Block::Table(rows));
    blocks.push(Block::Sentence(
        "Every row is simulated on the same trace and the same model of your engines, so that rows can be compared with \
         each other. ± is half of the 95 % confidence interval over the seeds; it is 0 for a policy \
         that draws nothing at random."
            .to_owned(),
    ));
}

/// Says whether the best policy is faster or slower than the observed assignment, and why.
fn reasons(forecast: &Forecast) -> Vec<String> {
    let Some(comparison) = forecast.comparison() else { return Vec::new() };
    let Some(best) = best(&comparison.arms) else {
        return vec![
            "Each policy left requests without an answer, so that their mean TTFTs cannot be compared."
                .to_owned(),
        ];
    };
    if comparison.engines < 2 {
        return vec!["There is one engine: every policy sends each request to it.".to_owned()];
    }
    let own = Means::forecast(&forecast.observed);
    let by = change(best.figures.ttft_mean.mean, own.ttft_ms);
    let half = half_interval(forecast, &best.figures.ttft_mean);
    let sure =
        half.filter(|half| (best.figures.ttft_mean.mean - own.ttft_ms).abs() > *half && by.abs() >= 1.0);
    let plus_minus = half.map_or_else(
        || "too few requests tell how sure that is".to_owned(),
        |half| format!("99 % interval: ±{:.1} % of your router's", 100.0 * ratio(half, own.ttft_ms)),
    );
    if sure.is_none() {
        return vec![format!(
            "No difference was found: the policy with the shortest mean TTFT, {}, changes it by {by:+.1} % \
             ({plus_minus}). The same choices in another order, or other requests of the same kind, may change as much.",
            best.label
        )];
    }
    if by > 0.0 {
        return vec![format!(
            "Your router's own choices are the best: the nearest policy, {}, has a mean TTFT that is {by:.1} % longer \
             ({plus_minus}).",
            best.label
        )];
    }
    let mut told = vec![format!(
        "{} has a mean TTFT that is {:.1} % shorter than that of your router ({plus_minus}).",
        best.label, -by
    )];
    told.extend(causes(best, &own, forecast.observed.imbalance));
    told
}

/// Says in what the best policy differs from the observed assignment.
fn causes(best: &ArmReport, own: &Means, own_imbalance: f64) -> Vec<String> {
    let mut told = Vec::new();
    let (hits, imbalance) = (best.figures.hit_rate.mean, best.figures.imbalance.mean);
    let computed = change(1.0 - hits, 1.0 - own.hit_rate);
    if computed < -NOTABLE_PERCENT {
        told.push(format!(
            "It sends prompts to engines that have their beginning: {:.1} % of the prompt tokens are found in a cache \
             instead of {:.1} %, so that the engines compute {:.1} % fewer.",
            100.0 * hits,
            100.0 * own.hit_rate,
            -computed
        ));
    }
    if change(imbalance, own_imbalance) < -NOTABLE_PERCENT {
        told.push(format!(
            "It spreads the load more evenly: the busiest engine has {imbalance:.2} times the mean number of requests \
             instead of {own_imbalance:.2} times."
        ));
    }
    if told.is_empty() {
        told.push(
            "Neither its hit rate nor its balance differs much: what differs is which requests wait for each other. The \
             comparison below lists the decisions that cost and saved most."
                .to_owned(),
        );
    }
    told
}

/// Returns half the width of the interval of the difference between the best policy and the router. It covers
/// which requests there were, and the seeds.
fn half_interval(forecast: &Forecast, ttft_mean: &Figure) -> Option<f64> {
    let half = interval::of_ttft(forecast.best.as_ref()?, &forecast.observed)?;
    Some(half.hypot(ttft_mean.plus_minus.unwrap_or(0.0)))
}

/// Warns when the simulated router finds fewer tokens in caches than the real one did: some engines are
/// guessed wrongly.
fn guess_warning(seen: &Observation<'_>, forecast: &Forecast) -> Option<Block> {
    let (measured, own) = (Means::measured(&seen.total), Means::forecast(&forecast.observed));
    let has_guessed = seen.assigned.iter().any(|assigned| assigned.how == How::Guessed);
    (has_guessed && measured.hit_rate > own.hit_rate + NOTABLE_HITS).then(|| {
        Block::Warning(format!(
            "your router's measured hit rate is {:.3} and its simulated one {:.3}: some engines are guessed wrongly, \
             and what policies gain by better hits is overstated. {}",
            measured.hit_rate,
            own.hit_rate,
            certainty::to_know_engines(seen)
        ))
    })
}

/// Shows the mean of a figure, or a dash if it has no value.
fn shown(figure: &Figure, text: impl Fn(f64) -> String) -> String {
    if figure.has_value() { text(figure.mean) } else { "–".to_owned() }
}

fn p90_ttft_ms(result: &RunResult) -> f64 {
    let complete = result.outcomes.iter().filter(|outcome| outcome.ended == Ended::Complete);
    let mut times: Vec<f64> = complete.map(|outcome| 1e3 * outcome.ttft.as_secs_f64()).collect();
    times.sort_by(f64::total_cmp);
    // The nearest rank, as in the comparison.
    let rank = (times.len() * 9).div_ceil(10).saturating_sub(1);
    times.get(rank).copied().unwrap_or(0.0)
}

fn heading(text: &str) -> Block {
    Block::Heading(text.to_owned())
}

fn row(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|cell| (*cell).to_owned()).collect()
}

/// Returns the change from `before` to `now`, percent.
fn change(now: f64, before: f64) -> f64 {
    if before == 0.0 { 0.0 } else { 100.0 * (now / before - 1.0) }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}

fn number(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests;
