//! Figures of an arm: first over the requests of a run, then over the seeds.

use serde::Serialize;
use tokio::time::Duration;

use super::Slo;
use crate::{
    outcome::{Ended, Outcome},
    run::RunResult,
    stats::{half_interval, mean, quantile_of_all},
    trace::{Targets, Trace},
};

/// Shortest time from the first to the last arrival over which goodput counts.
const MIN_ARRIVAL_SPAN: Duration = Duration::from_secs(1);

/// A figure, over the seeds. An infinite one stands for a figure without a value, and is `null` in JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Mean.
    pub mean: f64,
    /// Half the width of the mean's 95 % confidence interval; absent with one seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plus_minus: Option<f64>,
    /// The value of each seed.
    pub values: Vec<f64>,
}

/// Declares the figures once, both for one run and for all seeds.
macro_rules! figures {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The figures of an arm. Latencies are in milliseconds. Means and ITL cover complete requests. In a
        /// quantile of TTFT and E2E, a request that was not served counts as infinite.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[expect(missing_docs, reason = "the name of a latency says which one and which quantile")]
        pub struct Figures { $($(#[$doc])* pub $name: Figure,)* }

        /// The figures of one run.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub(super) struct RunFigures { $($name: f64,)* }

        impl Figures {
            pub(super) fn over(runs: &[RunFigures]) -> Self {
                Self { $($name: Figure::of(runs.iter().map(|run| run.$name).collect()),)* }
            }
        }
    };
}

figures! {
    ttft_mean,
    ttft_p50,
    ttft_p90,
    ttft_p99,
    itl_mean,
    itl_p50,
    itl_p90,
    itl_p99,
    /// Mean over all intervals between tokens, in which a long answer counts more than a short one.
    itl_over_tokens,
    e2e_mean,
    e2e_p50,
    e2e_p90,
    e2e_p99,
    /// Requests a second that kept both limits, over the time from the first to the last arrival. In a burst,
    /// until the last token.
    goodput,
    /// Share of all requests that kept both limits, 0 to 1.
    slo_share,
    /// Share of prompt tokens that were cached, 0 to 1.
    hit_rate,
    /// Share of all requests that were answered completely, 0 to 1.
    served_share,
    /// Mean over time of the busiest engine's requests divided by the mean of all engines.
    imbalance,
    preemptions,
    /// Requests that a policy refused, or that found every worker busy.
    shed,
    /// Requests without an eligible worker.
    no_worker,
    /// Requests whose engines failed, and for which no retry succeeded.
    failed,
    /// Legs that were routed again after a failure.
    retries,
    /// Handoffs that no decode engine read before their lease ended.
    stranded,
    /// Mean time in the gateway's queue, milliseconds.
    queued_mean,
    /// Requests that fit into no engine.
    too_large,
    /// Requests for which the native fallback chose, because a policy abstained or failed.
    fell_back,
    /// Seconds from the first arrival to the last token.
    span_s,
    /// Requests a second over that time.
    requests_per_s,
}

/// Quantiles 0 to 100 % in steps of 1 %, milliseconds; means over the seeds. Those that fall on requests
/// without an answer are infinite.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[expect(missing_docs, reason = "the name says which latency")]
pub struct Quantiles {
    pub ttft: Vec<f64>,
    pub itl: Vec<f64>,
    pub e2e: Vec<f64>,
}

/// Latencies of the complete requests of a run, sorted, milliseconds.
struct Latencies {
    /// Number of requests, without those that fit into no engine, whatever an arm does.
    requests: usize,
    ttft: Vec<f64>,
    itl: Vec<f64>,
    e2e: Vec<f64>,
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn complete(result: &RunResult) -> impl Iterator<Item = &Outcome> {
    result.outcomes.iter().filter(|outcome| outcome.ended == Ended::Complete)
}

impl Latencies {
    fn of(result: &RunResult) -> Self {
        let sorted = |mut values: Vec<f64>| {
            values.sort_unstable_by(f64::total_cmp);
            values
        };
        let fits = |outcome: &&Outcome| outcome.ended != Ended::TooLarge;
        Self {
            requests: result.outcomes.iter().filter(fits).count(),
            ttft: sorted(complete(result).map(|outcome| milliseconds(outcome.ttft)).collect()),
            itl: sorted(complete(result).filter_map(Outcome::itl).map(milliseconds).collect()),
            e2e: sorted(complete(result).map(|outcome| milliseconds(outcome.e2e)).collect()),
        }
    }
}

impl Quantiles {
    pub(super) fn of(result: &RunResult) -> Self {
        let latencies = Latencies::of(result);
        let of = |sorted: &[f64], count: usize| {
            let shares = (0..=100_u32).map(|percent| f64::from(percent) / 100.0);
            shares.map(|share| quantile_of_all(sorted, count, share.max(1e-9))).collect()
        };
        let Latencies { requests, ttft, itl, e2e } = latencies;
        Self { ttft: of(&ttft, requests), itl: of(&itl, itl.len()), e2e: of(&e2e, requests) }
    }

    pub(super) fn over(runs: &[Self]) -> Self {
        let of = |pick: fn(&Self) -> &Vec<f64>| {
            let length = runs.iter().map(|run| pick(run).len()).max().unwrap_or(0);
            let at = |place: usize| -> Vec<f64> {
                runs.iter().filter_map(|run| pick(run).get(place).copied()).collect()
            };
            (0..length).map(|place| mean(&at(place))).collect()
        };
        Self { ttft: of(|run| &run.ttft), itl: of(|run| &run.itl), e2e: of(|run| &run.e2e) }
    }
}

impl Figure {
    pub(crate) fn of(values: Vec<f64>) -> Self {
        Self { mean: mean(&values), plus_minus: half_interval(&values), values }
    }

    /// Whether the figure has a value with every seed.
    #[must_use]
    pub fn has_value(&self) -> bool {
        self.mean.is_finite()
    }

    /// Whether the 95 % confidence interval excludes zero. `None` with one seed, and when the seeds give
    /// equal values other than zero, as runs without any randomness do: then there is nothing to test.
    #[must_use]
    pub fn excludes_zero(&self) -> Option<bool> {
        let half = self.plus_minus.filter(|half| *half > 0.0 || self.mean == 0.0)?;
        Some(self.mean.abs() > half)
    }

    /// Returns this figure minus another one, seed by seed.
    pub(crate) fn less(&self, other: &Self) -> Self {
        Self::of(self.values.iter().zip(&other.values).map(|(value, other)| value - other).collect())
    }

    /// Returns the ends of the confidence interval, or `None` with one seed.
    pub(crate) fn interval(&self) -> Option<(f64, f64)> {
        self.plus_minus.map(|half| (self.mean - half, self.mean + half))
    }
}

impl RunFigures {
    /// Returns the figures of a run. `is_burst`: the trace's arrivals have no rate.
    pub(super) fn of(result: &RunResult, slo: Slo, is_burst: bool) -> Self {
        let Latencies { requests, ttft, itl, e2e } = Latencies::of(result);
        let of_all = |sorted: &[f64], share: f64| quantile_of_all(sorted, requests, share);
        let itl_at = |share: f64| quantile_of_all(&itl, itl.len(), share);
        let count = |which: &dyn Fn(&Outcome) -> bool| {
            number(result.outcomes.iter().filter(|outcome| which(outcome)).count())
        };
        let ended = |how: Ended| count(&|outcome| outcome.ended == how);
        let good = number(good(result, slo));
        Self {
            ttft_mean: mean_of_some(&ttft),
            ttft_p50: of_all(&ttft, 0.5),
            ttft_p90: of_all(&ttft, 0.9),
            ttft_p99: of_all(&ttft, 0.99),
            itl_mean: mean_of_some(&itl),
            itl_p50: itl_at(0.5),
            itl_p90: itl_at(0.9),
            itl_p99: itl_at(0.99),
            itl_over_tokens: itl_over_tokens(result),
            e2e_mean: mean_of_some(&e2e),
            e2e_p50: of_all(&e2e, 0.5),
            e2e_p90: of_all(&e2e, 0.9),
            e2e_p99: of_all(&e2e, 0.99),
            goodput: good / goodput_seconds(result, is_burst),
            slo_share: slo_share(result, slo),
            hit_rate: hit_rate(result),
            served_share: ended(Ended::Complete) / number(result.outcomes.len().max(1)),
            imbalance: result.imbalance,
            preemptions: number(usize::try_from(result.preemptions).unwrap_or(usize::MAX)),
            shed: ended(Ended::Shed),
            no_worker: ended(Ended::NoWorker),
            failed: ended(Ended::Failed),
            retries: number(usize::try_from(result.retries).unwrap_or(usize::MAX)),
            stranded: number(usize::try_from(result.stranded).unwrap_or(usize::MAX)),
            queued_mean: mean(
                &complete(result).map(|outcome| milliseconds(outcome.queued)).collect::<Vec<_>>(),
            ),
            too_large: ended(Ended::TooLarge),
            fell_back: count(&|outcome| outcome.fell_back),
            span_s: result.span.as_secs_f64(),
            requests_per_s: requests_per_s(result),
        }
    }
}

/// Returns the mean time to first token of the complete requests, milliseconds; infinite without any.
pub(super) fn mean_ttft_ms(result: &RunResult) -> f64 {
    mean_of_some(&complete(result).map(|outcome| milliseconds(outcome.ttft)).collect::<Vec<_>>())
}

/// Returns the mean; infinite without values.
fn mean_of_some(values: &[f64]) -> f64 {
    if values.is_empty() { f64::INFINITY } else { mean(values) }
}

/// Returns whether all requests arrive within a moment. Jitter, which moves arrivals apart, does not count:
/// one figure has the same formula with every seed and arm.
pub(super) fn is_burst(trace: &Trace, speed: f64) -> bool {
    let first_to_last = trace.requests.first().zip(trace.requests.last());
    first_to_last.is_none_or(|(first, last)| (last.at - first.at).div_f64(speed) < MIN_ARRIVAL_SPAN)
}

/// Returns the number of requests a second, from the first arrival to the last token.
pub(crate) fn requests_per_s(result: &RunResult) -> f64 {
    number(result.outcomes.len()) / result.span.as_secs_f64().max(1e-9)
}

/// Returns the time over which goodput counts, seconds. It ends with the last arrival: until the last token,
/// one long answer at the end would decide the goodput of an arm. The arrivals of a burst have no rate.
fn goodput_seconds(result: &RunResult, is_burst: bool) -> f64 {
    let arrivals = || result.outcomes.iter().map(|outcome| outcome.at);
    let first_to_last = || arrivals().max().unwrap_or_default() - arrivals().min().unwrap_or_default();
    let time = if is_burst { result.span } else { first_to_last() };
    time.as_secs_f64().max(1e-9)
}

/// Returns the share of all requests that kept both limits, 0 to 1.
pub(crate) fn slo_share(result: &RunResult, slo: Slo) -> f64 {
    number(good(result, slo)) / number(result.outcomes.len().max(1))
}

/// Returns the number of requests that kept both limits: its client's targets, or else those of the report.
/// A request with one output token has no inter-token latency.
fn good(result: &RunResult, slo: Slo) -> usize {
    let keeps = |outcome: &&Outcome| {
        let Targets { ttft, itl } = outcome.targets;
        let (most_ttft, most_itl) =
            (ttft.map_or(slo.ttft_ms, milliseconds), itl.map_or(slo.itl_ms, milliseconds));
        let keeps_itl = outcome.itl().is_none_or(|itl| milliseconds(itl) <= most_itl);
        milliseconds(outcome.ttft) <= most_ttft && keeps_itl
    };
    complete(result).filter(keeps).count()
}

fn itl_over_tokens(result: &RunResult) -> f64 {
    let sums = complete(result).fold((0.0, 0.0), |(time, intervals), outcome| {
        let decoding = milliseconds(outcome.e2e) - milliseconds(outcome.ttft);
        (time + decoding, intervals + f64::from(outcome.osl.saturating_sub(1)))
    });
    if sums.1 > 0.0 { sums.0 / sums.1 } else { f64::INFINITY }
}

fn hit_rate(result: &RunResult) -> f64 {
    let sums = complete(result).fold((0_u64, 0_u64), |(cached, all), outcome| {
        (cached + u64::from(outcome.cached), all + u64::from(outcome.isl))
    });
    ratio(sums)
}

#[expect(clippy::cast_precision_loss, reason = "numbers of tokens stay below 2^53")]
fn ratio((part, all): (u64, u64)) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}

#[expect(clippy::cast_precision_loss, reason = "numbers of requests stay far below 2^53")]
fn number(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use pointsman_workers::Role;

    use super::*;
    use crate::{
        arm::Arm,
        fleet::{EngineGroup, Fleet},
        run::{RunOptions, run},
        trace::TraceRequest,
    };

    /// Returns the figures of so many requests that arrive after each other, the last with a longer answer.
    fn figures(requests: u32, pause: Duration, last_tokens: u32) -> RunFigures {
        moved_figures(requests, pause, last_tokens, Duration::ZERO)
    }

    fn moved_figures(requests: u32, pause: Duration, last_tokens: u32, jitter: Duration) -> RunFigures {
        let request = |number: u32| TraceRequest {
            at: pause * number,
            input_tokens: 64,
            output_tokens: if number + 1 == requests { last_tokens } else { 2 },
            ..TraceRequest::default()
        };
        let requests = (0..requests).map(request).collect();
        let trace = Trace { block_tokens: 64, requests, ..Trace::default() };
        let engines = vec![EngineGroup::new(Role::Aggregated, 1)];
        let fleet = Fleet { block_tokens: 64, engines, ..Fleet::default() };
        let arm = Arm::parse("round-robin").unwrap();
        let options = RunOptions { jitter, ..RunOptions::default() };
        let result = run(&arm, &trace, &fleet, options).unwrap();
        RunFigures::of(&result, Slo::default(), is_burst(&trace, options.speed))
    }

    #[test]
    fn o10_9_a_long_last_answer_does_not_change_goodput() {
        let [short, long] = [2, 3_000].map(|tokens| figures(11, Duration::from_secs(1), tokens));
        // O10.9
        assert!(long.span_s > 1.5 * short.span_s, "{} {}", long.span_s, short.span_s);
        assert_eq!((short.goodput, long.goodput), (1.1, 1.1));
        for together in [figures(1, Duration::ZERO, 9), figures(4, Duration::ZERO, 9)] {
            assert_eq!((together.goodput, together.slo_share), (together.requests_per_s, 1.0));
        }
        // Jitter neither is the time of a burst nor delays the first arrival, from which time counts.
        let [still, moved, far] = [0, 300, 9_000]
            .map(|jitter| moved_figures(4, Duration::ZERO, 300, Duration::from_millis(jitter)));
        // O10.9
        assert_eq!([moved.goodput, far.goodput], [moved.requests_per_s, far.requests_per_s]);
        let alone = moved_figures(1, Duration::ZERO, 300, Duration::from_millis(300));
        assert_eq!(alone.span_s, figures(1, Duration::ZERO, 300).span_s);
        assert!(moved.goodput < 1.1 * still.goodput, "{} {}", moved.goodput, still.goodput);
    }
}
