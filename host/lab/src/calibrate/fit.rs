//! Fits an engine's step time and a link's transfer time.

use pointsman_sim::core::{BatchLimits, PromptKv};
use pointsman_workers::Role;
use serde::Serialize;

use super::{
    Experiment, Sample,
    least_squares::{Row, Solution, solve},
    predict::predict,
    replay::{Arrival, Features, replay},
};
use crate::{
    fleet::{EngineGroup, Fleet, Links, StepTimeSpec},
    stats::quantile,
};

/// Maximum number of rounds; each computes the schedule again with the coefficients of the round before.
const ROUNDS: usize = 30;
/// Relative change of a coefficient below which the rounds end.
const SETTLED: f64 = 1e-6;
/// Smallest duration by which an error is divided to get a relative error, milliseconds: the resolution of a
/// client.
const LEAST_SCALE_MS: f64 = 1.0;
/// Bandwidth of a transfer whose bytes take no measurable time, 10^9 bytes a second.
const UNLIMITED_GB_S: f64 = 10_000.0;

/// A fitted figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Term {
    /// Time of a request outside of steps, ms.
    RequestOverhead,
    /// Fixed time of a step, ms.
    C0,
    /// Time of a sequence in a step, ms.
    C1,
    /// Time of a context token in a step, ms.
    C2,
    /// Time of a new token, ms.
    C3,
    /// Time of the square of a sequence's new tokens, ms.
    C4,
    /// Latency of a transfer, ms.
    Latency,
    /// Time of a transferred token, ms.
    TransferToken,
}

/// A fitted figure with its uncertainty.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TermFit {
    /// The figure.
    pub term: Term,
    /// Its value, ms.
    pub value: f64,
    /// Its standard error, ms; `None` when the value is 0.
    pub standard_error: Option<f64>,
    /// Whether the requests determine it. Otherwise it is fixed at 0.
    pub identified: bool,
}

/// Coefficients of an engine, milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Coefficients {
    /// Time of a request outside of steps.
    pub request_overhead: f64,
    /// `c0..c4` of the step time.
    pub step: [f64; 5],
}

/// A fitted engine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// The figures.
    pub terms: Vec<TermFit>,
    /// Number of requests that were fitted.
    pub requests: usize,
    /// Number of requests that were not fitted, because they do not fit into the engine's KV cache or hit its
    /// prefix cache.
    pub left_out: usize,
}

pub(super) const ENGINE_TERMS: [Term; 6] =
    [Term::RequestOverhead, Term::C0, Term::C1, Term::C2, Term::C3, Term::C4];
/// Order of preference when the requests cannot distinguish two columns: c0, c3, overhead, c1, c2, c4.
pub(super) const ENGINE_ORDER: [usize; 6] = [1, 4, 0, 2, 3, 5];

impl Fit {
    /// Returns the coefficients.
    #[must_use]
    pub fn coefficients(&self) -> Coefficients {
        let of = |wanted: Term| self.terms.iter().find(|fit| fit.term == wanted).map_or(0.0, |fit| fit.value);
        Coefficients {
            request_overhead: of(Term::RequestOverhead),
            step: [Term::C0, Term::C1, Term::C2, Term::C3, Term::C4].map(of),
        }
    }

    /// Returns whether a step takes time. Otherwise the engine cannot be simulated.
    pub(super) fn takes_time(&self) -> bool {
        self.coefficients().step.iter().any(|value| *value > 0.0)
    }

    /// Writes the coefficients into a group of engines.
    pub fn apply(&self, group: &mut EngineGroup) {
        let Coefficients { request_overhead, step: [c0, c1, c2, c3, c4] } = self.coefficients();
        group.request_overhead_ms = request_overhead;
        group.step_time = StepTimeSpec::Linear { c0, c1, c2, c3, c4 };
    }
}

/// Fits an engine's coefficients to what clients measured. `group` gives the limits of the engine. Returns
/// `None` when no request can be used.
#[must_use]
pub fn fit_engine(experiments: &[Experiment], group: &EngineGroup, block_tokens: u32) -> Option<Fit> {
    let usable: Vec<Experiment> = experiments.iter().filter(|one| is_usable(one)).cloned().collect();
    let all: usize = experiments.iter().map(|one| one.samples.len()).sum();
    // The schedule of a lone request hardly depends on the coefficients, so the fit starts with lone
    // requests.
    let lone: Vec<Experiment> = usable.iter().filter(|one| one.samples.len() == 1).cloned().collect();
    let mut solution = None;
    for part in [&lone, &usable] {
        for _ in 0..ROUNDS {
            let start = solution.as_ref().map_or([1.0, 10.0, 0.0, 0.0, 0.1, 0.0], values);
            let rows = rows(part, group, block_tokens, start);
            if rows.is_empty() {
                break;
            }
            let next = solve(&rows, &ENGINE_ORDER);
            let settled = settled(&start, &next.values);
            solution = Some(next);
            if settled {
                break;
            }
        }
    }
    let solution = solution?;
    let requests = rows(&usable, group, block_tokens, solution.values)
        .iter()
        .filter(|row| row.features.first().is_some_and(|weight| *weight > 0.0))
        .count();
    let terms = terms(&solution, ENGINE_TERMS);
    Some(Fit { terms, requests, left_out: all - requests })
}

fn values(solution: &Solution<6>) -> [f64; 6] {
    solution.values
}

pub(super) fn settled(before: &[f64; 6], after: &[f64; 6]) -> bool {
    before.iter().zip(after).all(|(before, after)| (before - after).abs() <= SETTLED * before.abs().max(1e-6))
}

/// Whether the model knows which tokens the engine computed: it does not know the content of the prefix
/// cache.
fn is_usable(experiment: &Experiment) -> bool {
    !experiment.samples.is_empty() && experiment.samples.iter().all(|sample| sample.cached == 0)
}

/// Makes an equation of each time to first token, and of each time between the first and the last token.
fn rows(
    experiments: &[Experiment],
    group: &EngineGroup,
    block_tokens: u32,
    coefficients: [f64; 6],
) -> Vec<Row<6>> {
    let [overhead, c0, c1, c2, c3, c4] = coefficients;
    // The bursts are complete requests, also those to a prefill engine.
    let limits = BatchLimits { prefill_only: false, ..group.limits(block_tokens) };
    let mut rows = Vec::new();
    for experiment in experiments {
        let requests: Vec<Arrival> = experiment.samples.iter().map(Arrival::of).collect();
        let work = replay(&requests, limits, overhead, [c0, c1, c2, c3, c4]);
        for (sample, work) in experiment.samples.iter().zip(work) {
            let Some(work) = work else { continue };
            rows.push(row(work.ttft, sample.ttft_ms, &coefficients));
            if sample.osl > 1 {
                rows.push(row(work.decode, sample.e2e_ms - sample.ttft_ms, &coefficients));
            }
        }
    }
    rows
}

/// Makes an equation whose error is relative to the larger of the measured and the predicted time. A time
/// that was measured much too short, because tokens were delayed and arrived together, must not outweigh all
/// others.
pub(super) fn row(features: Features, measured_ms: f64, coefficients: &[f64; 6]) -> Row<6> {
    let predicted: f64 = features.iter().zip(coefficients).map(|(weight, value)| weight * value).sum();
    Row { features, value: measured_ms, scale: measured_ms.max(predicted).max(LEAST_SCALE_MS) }
}

pub(super) fn terms<const N: usize>(solution: &Solution<N>, names: [Term; N]) -> Vec<TermFit> {
    let figures = solution.values.iter().zip(&solution.errors).zip(&solution.identified);
    let named = names.into_iter().zip(figures);
    named
        .map(|(term, ((value, error), identified))| TermFit {
            term,
            value: *value,
            standard_error: *error,
            identified: *identified,
        })
        .collect()
}

/// Fits the links of a fleet whose engines are fitted, to lone requests through a prefill and decode pair:
/// the transfer is the part of the time to first token that the engines do not explain. It is short compared
/// with the computation of a prompt, for which the model's error may be larger. `prefill` contains lone
/// requests to the prefill engine, and those of the same prompt length correct the model.
#[must_use]
pub fn fit_links(
    lone: &[Sample],
    fleet: &Fleet,
    bytes_per_token: u64,
    prefill: &[Sample],
) -> Option<(Links, Vec<TermFit>)> {
    let no_transfer = Links {
        bytes_per_token: 0,
        gigabytes_per_second: UNLIMITED_GB_S,
        latency_ms: 0.0,
        ..Links::default()
    };
    let fleet = Fleet { links: no_transfer, ..fleet.clone() };
    let mut rows = Vec::new();
    for sample in lone {
        let one = [Sample { at_ms: 0.0, ..*sample }];
        let Some(predicted) = predict(&fleet, &one).ok().and_then(|all| all.first().copied().flatten())
        else {
            continue;
        };
        let left = sample.ttft_ms - predicted.ttft_ms - prefill_error(sample.isl, prefill, &fleet);
        let scale = sample.ttft_ms.max(LEAST_SCALE_MS);
        rows.push(Row { features: [1.0, f64::from(sample.isl)], value: left, scale });
    }
    if rows.is_empty() {
        return None;
    }
    let solution = solve(&rows, &[0, 1]);
    let [latency_ms, per_token_ms] = solution.values;
    let links = Links {
        bytes_per_token,
        gigabytes_per_second: gigabytes_per_second(bytes_per_token, per_token_ms),
        latency_ms,
        ..Links::default()
    };
    Some((links, terms(&solution, [Term::Latency, Term::TransferToken])))
}

/// Returns by how much the prefill engine is slower than its model for a prompt of this length, ms.
fn prefill_error(isl: u32, prefill: &[Sample], fleet: &Fleet) -> f64 {
    let mut measured: Vec<f64> =
        prefill.iter().filter(|sample| sample.isl == isl).map(|sample| sample.ttft_ms).collect();
    measured.sort_by(f64::total_cmp);
    let group = fleet.engines.iter().find(|group| group.role == Role::Prefill);
    let (Some(group), false) = (group, measured.is_empty()) else { return 0.0 };
    let StepTimeSpec::Linear { c0, c1, c2, c3, c4 } = group.step_time else { return 0.0 };
    let overhead = group.request_overhead_ms;
    let values = [overhead, c0, c1, c2, c3, c4];
    let one = [Arrival { at_ms: 0.0, isl, osl: 1, kv: PromptKv::Computed }];
    let work = replay(&one, group.limits(fleet.block_tokens), overhead, [c0, c1, c2, c3, c4]);
    let Some(work) = work.first().copied().flatten() else { return 0.0 };
    let model: f64 = work.ttft.iter().zip(values).map(|(weight, value)| weight * value).sum();
    quantile(&measured, 0.5) - model
}

#[expect(clippy::cast_precision_loss, reason = "bytes of a token stay far below 2^53")]
pub(super) fn gigabytes_per_second(bytes_per_token: u64, per_token_ms: f64) -> f64 {
    if per_token_ms > 0.0 {
        (bytes_per_token as f64 / per_token_ms / 1e6).clamp(1e-6, UNLIMITED_GB_S)
    } else {
        UNLIMITED_GB_S
    }
}
