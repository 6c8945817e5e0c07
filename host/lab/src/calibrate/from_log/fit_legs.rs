//! Fits the engines of one role, and the link between two engines, to logged legs.

use pointsman_sim::core::{BatchLimits, PromptKv};
use pointsman_workers::Role;

use super::{
    LEAST_LEGS,
    legs::{Engine, Leg, Load, Place},
};
use crate::{
    calibrate::{
        Fit, HeldOut, Predicted, Sample, Term, TermFit,
        fit::{ENGINE_ORDER, ENGINE_TERMS, gigabytes_per_second, row, settled, terms},
        least_squares::{Row, Solution, solve},
        replay::{Arrival, Work, replay},
    },
    fleet::Links,
    stats::quantile,
};

/// Maximum number of rounds; each computes the schedule again with the coefficients of the round before.
const ROUNDS: usize = 12;
/// Largest relative standard error of a figure; a figure with a larger one counts as 0.
const MOST_UNCERTAIN: f64 = 0.5;
/// Columns of the terms of new tokens and of their squares.
const C3: usize = 4;
const C4: usize = 5;
/// The order of columns for engines that compute no prompts: there, the number of new tokens equals the
/// number of sequences.
const DECODE_ORDER: [usize; 6] = [1, 2, 3, 4, 0, 5];

/// Fits the engines of one role to their legs that ended by `until_us`. Returns `None` if there is no such
/// leg. Prompts that decode engines computed are fitted where there are at least `LEAST_LEGS` of them.
pub(super) fn fit_role(
    engines: &[&Engine],
    limits: BatchLimits,
    start_us: u64,
    until_us: u64,
) -> Option<Fit> {
    let limits = BatchLimits { prefill_only: false, ..limits };
    let fits_prompts = fits_prompts(engines, until_us);
    let order = if fits_prompts { ENGINE_ORDER } else { DECODE_ORDER };
    let mut values = start(engines);
    let (mut legs, mut left_out, mut solution) = (0, 0, None);
    for _ in 0..ROUNDS {
        let (rows, used, unused) = rows(engines, limits, start_us, until_us, fits_prompts, values);
        if rows.is_empty() {
            return None;
        }
        (legs, left_out) = (used, unused);
        let next = solve_distinct(&rows, &order, Some((C3, C4)));
        let is_settled = settled(&values, &next.values);
        values = next.values;
        solution = Some(next);
        if is_settled {
            break;
        }
    }
    Some(Fit { terms: terms(&solution?, ENGINE_TERMS), requests: legs, left_out })
}

/// Returns whether the times of prompts are fitted. On decode engines, a few prompts determine none of them.
pub(super) fn fits_prompts(engines: &[&Engine], until_us: u64) -> bool {
    let legs = || engines.iter().flat_map(|engine| &engine.legs);
    let computed = legs().filter(|leg| is_prompt(leg) && leg.is_fitted && leg.end_us <= until_us);
    legs().all(is_prompt) || computed.count() >= LEAST_LEGS
}

fn is_prompt(leg: &Leg) -> bool {
    leg.kv != PromptKv::Received
}

/// Gives decode engines the times of prompts of the prefill engines. A sequence that decodes is a new token
/// in each step, so the time of a sequence is less by as much.
pub(super) fn take_prompt_times(decode: &mut Fit, prefill: &Fit) {
    let of = |fit: &Fit, wanted: Term| fit.terms.iter().find(|fit| fit.term == wanted).copied();
    let before = of(decode, Term::C3).map_or(0.0, |fit| fit.value);
    for fit in &mut decode.terms {
        match fit.term {
            Term::C1 => {
                let token = of(prefill, Term::C3).map_or(0.0, |fit| fit.value);
                fit.value = (fit.value + before - token).max(0.0);
            }
            Term::C3 | Term::C4 => *fit = of(prefill, fit.term).unwrap_or(*fit),
            _ => {}
        }
    }
}

/// Solves the rows, leaving out the figures that the rows cannot distinguish from 0. `terms` are the columns
/// of a number and of its square. If the rows cannot distinguish these two, only the number is kept.
fn solve_distinct<const N: usize>(
    rows: &[Row<N>],
    order: &[usize],
    terms: Option<(usize, usize)>,
) -> Solution<N> {
    let mut order = order.to_vec();
    loop {
        let solution = solve(rows, &order);
        let uncertain = |column: usize| {
            let (value, error) = (solution.values.get(column)?, solution.errors.get(column)?.as_ref()?);
            let share = error / value.max(f64::MIN_POSITIVE);
            (*value > 0.0 && share > MOST_UNCERTAIN).then_some((share, column))
        };
        let of = |column: usize| solution.values.get(column).copied().unwrap_or_default();
        let squared = terms.filter(|(linear, squared)| {
            of(*squared) > 0.0 && (of(*linear) <= 0.0 || uncertain(*linear).is_some())
        });
        let worst = order.iter().filter_map(|column| uncertain(*column));
        let worst = worst.max_by(|left, right| left.0.total_cmp(&right.0)).map(|(_, column)| column);
        let Some(dropped) = squared.map(|(_, squared)| squared).or(worst) else { return solution };
        order.retain(|column| *column != dropped);
    }
}

/// Returns initial coefficients, which give a schedule close to the measured one.
fn start(engines: &[&Engine]) -> [f64; 6] {
    let median = |value: &dyn Fn(&Leg) -> Option<f64>| {
        let mut values: Vec<f64> = engines
            .iter()
            .flat_map(|engine| &engine.legs)
            .filter_map(value)
            .filter(|one| *one > 0.0)
            .collect();
        values.sort_by(f64::total_cmp);
        quantile(&values, 0.5)
    };
    let step = median(&|leg| leg.decode_ms.map(|time| time / f64::from(leg.osl.saturating_sub(1).max(1))));
    let prompt = median(&|leg| leg.ttft_ms.map(|time| (time - step) / f64::from(leg.isl.max(1))));
    let or = |value: f64, default: f64| if value.is_finite() && value > 0.0 { value } else { default };
    [1.0, or(step, 5.0), 0.0, 0.0, or(prompt, 0.01), 0.0]
}

/// Makes an equation of each time to first token, and of each time between the first and the last token. Also
/// returns the numbers of legs that were used and not used.
fn rows(
    engines: &[&Engine],
    limits: BatchLimits,
    start_us: u64,
    until_us: u64,
    with_prompts: bool,
    values: [f64; 6],
) -> (Vec<Row<6>>, usize, usize) {
    let (mut rows, mut used, mut unused) = (Vec::new(), 0, 0);
    for engine in engines {
        let legs: Vec<&Leg> = engine.legs.iter().filter(|leg| leg.at_us < until_us).collect();
        let arrivals: Vec<Arrival> = legs.iter().map(|leg| leg.arrival(start_us)).collect();
        for (leg, work) in legs.iter().zip(run(&arrivals, limits, values)) {
            let is_fitted = leg.is_fitted && leg.end_us <= until_us && (with_prompts || !is_prompt(leg));
            let Some(work) = work.filter(|_| is_fitted) else {
                unused += 1;
                continue;
            };
            used += 1;
            rows.extend(leg.ttft_ms.map(|time| row(work.ttft, time, &values)));
            rows.extend(leg.decode_ms.map(|time| row(work.decode, time, &values)));
        }
    }
    (rows, used, unused)
}

fn run(arrivals: &[Arrival], limits: BatchLimits, values: [f64; 6]) -> Vec<Option<Work>> {
    let [overhead, c0, c1, c2, c3, c4] = values;
    replay(arrivals, limits, overhead, [c0, c1, c2, c3, c4])
}

/// Times of every leg in the fitted model: to its first token, and from its first to its last token,
/// milliseconds.
struct Model(Vec<Vec<Option<(f64, f64)>>>);

impl Model {
    fn of(load: &Load, fits: &[(Role, Fit)], limits: BatchLimits) -> Self {
        let limits = BatchLimits { prefill_only: false, ..limits };
        let of_engine = |engine: &Engine| {
            let fit = fits.iter().find(|(role, _)| *role == engine.role);
            let Some((_, fit)) = fit else { return Vec::new() };
            let found = fit.coefficients();
            let [c0, c1, c2, c3, c4] = found.step;
            let values = [found.request_overhead, c0, c1, c2, c3, c4];
            let arrivals: Vec<Arrival> = engine.legs.iter().map(|leg| leg.arrival(load.start_us)).collect();
            let time = |features: [f64; 6]| -> f64 { features.iter().zip(values).map(|(a, b)| a * b).sum() };
            let works = run(&arrivals, limits, values).into_iter();
            works.map(|work| work.map(|work| (time(work.ttft), time(work.decode)))).collect()
        };
        Self(load.engines.iter().map(of_engine).collect())
    }

    fn leg(&self, (engine, leg): Place) -> Option<(f64, f64)> {
        self.0.get(engine)?.get(leg).copied().flatten()
    }
}

/// Fits the link to the part of the time from the end of a prefill to the first token that the decode
/// engine's model does not explain. Returns `None` when the log does not record the ends of prefills.
pub(super) fn fit_links(
    load: &Load,
    fits: &[(Role, Fit)],
    limits: BatchLimits,
    until_us: u64,
) -> Option<(Links, Vec<TermFit>)> {
    let model = Model::of(load, fits, limits);
    let (mut rows, mut pairs) = (Vec::new(), 0);
    for request in load.requests.iter().filter(|request| request.at_us < until_us) {
        let Some(decode) = request.decode else { continue };
        pairs += 1;
        let Some(handoff_ms) = request.handoff_ms else { continue };
        let Some((first_step, _)) = model.leg(decode) else { continue };
        let features = [1.0, f64::from(request.measured.isl)];
        rows.push(Row { features, value: handoff_ms - first_step, scale: handoff_ms.max(1.0) });
    }
    // If most requests have no end of their prefill, the recorded ends of the others mean something
    // different.
    if rows.is_empty() || rows.len() * 2 < pairs {
        return None;
    }
    let solution = solve_distinct(&rows, &[0, 1], None);
    let [latency_ms, per_token_ms] = solution.values;
    let bytes_per_token = Links::default().bytes_per_token;
    let gigabytes_per_second = gigabytes_per_second(bytes_per_token, per_token_ms);
    let links = Links { gigabytes_per_second, latency_ms, ..Links::default() };
    Some((links, terms(&solution, [Term::Latency, Term::TransferToken])))
}

/// Compares the model with the requests from `from_us` on. Returns `None` if there is no such request.
pub(super) fn held_out(
    load: &Load,
    fits: &[(Role, Fit)],
    links: &Links,
    has_links: bool,
    limits: BatchLimits,
    from_us: u64,
) -> Option<HeldOut> {
    let model = Model::of(load, fits, limits);
    let (mut measured, mut predicted): (Vec<Sample>, Vec<Option<Predicted>>) = (Vec::new(), Vec::new());
    for request in load.requests.iter().filter(|request| request.at_us >= from_us) {
        measured.push(request.measured);
        let of_request = || {
            let (mut ttft_ms, mut decode_ms) = model.leg(request.prompt)?;
            if let Some(decode) = request.decode {
                let (first_step, rest) = model.leg(decode)?;
                decode_ms = rest;
                if has_links {
                    ttft_ms += first_step + transfer_ms(links, request.measured.isl);
                }
            }
            let tokens = request.measured.osl;
            let itl_ms = (tokens > 1).then(|| decode_ms / f64::from(tokens - 1));
            let decode_ms = if tokens > 1 { decode_ms } else { 0.0 };
            Some(Predicted { ttft_ms, itl_ms, e2e_ms: ttft_ms + decode_ms })
        };
        predicted.push(of_request());
    }
    (!measured.is_empty()).then(|| HeldOut::of(&measured, &predicted))
}

#[expect(clippy::cast_precision_loss, reason = "bytes of a token stay far below 2^53")]
fn transfer_ms(links: &Links, tokens: u32) -> f64 {
    let bytes = links.bytes_per_token as f64 * f64::from(tokens);
    links.latency_ms + bytes / links.gigabytes_per_second / 1e6
}
