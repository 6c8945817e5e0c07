//! Makes a fleet, with its errors, from measurements.

use std::fmt::Write as _;

use pointsman_workers::Role;
use serde::{Deserialize, Serialize};

use super::{
    Experiment, Sample,
    errors::{Errors, HeldOut},
    fit::{Fit, Term, TermFit, fit_engine, fit_links},
    predict::check,
};
use crate::{
    fleet::{EngineGroup, Fleet, Links},
    run::RunError,
};

/// Limits of an engine's scheduler and cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// Number of KV blocks.
    pub blocks: u32,
    /// Maximum number of sequences that run at once.
    pub max_num_seqs: u32,
    /// Maximum number of tokens in one step.
    pub max_batched_tokens: u32,
}

/// Measurements of one engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineMeasurements {
    /// Its role in the fleet.
    pub role: Role,
    /// Its limits.
    pub capacity: Capacity,
    /// Requests to one engine, alone or during load on the other engine of the pair.
    pub experiments: Vec<Experiment>,
    /// Lone requests that ran while the other engine of the pair was idle, if `experiments` ran during load
    /// on it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alone: Vec<Experiment>,
}

impl EngineMeasurements {
    /// Returns the experiments that are fitted, with and without load on the other engine, because in traffic
    /// both occur.
    fn all(&self) -> Vec<Experiment> {
        self.experiments.iter().chain(&self.alone).cloned().collect()
    }
}

/// Everything that was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Measurements {
    /// One aggregated engine, or a prefill and a decode engine.
    pub engines: Vec<EngineMeasurements>,
    /// Lone requests that went through the pair.
    pub pair: Vec<Sample>,
    /// KV bytes of a token, from the engine's counter of transferred bytes.
    pub bytes_per_token: Option<u64>,
    /// Requests that check the result; their times count from the start of the mix.
    pub mix: Vec<Sample>,
}

/// A calibrated fleet, with its errors.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Calibration {
    /// The fleet: one engine of each role.
    pub fleet: Fleet,
    /// The fit of each engine.
    pub engines: Vec<(Role, Fit)>,
    /// The fit of the link.
    pub links: Option<Vec<TermFit>>,
    /// Errors on the mix; `None` if there was no mix.
    pub held_out: Option<HeldOut>,
    /// Warnings about the figures.
    pub warnings: Vec<String>,
}

/// Ratio of a step's time with load on the other engine to its time without load, above which the report
/// mentions it.
const SLOWED: f64 = 1.1;

/// Reason for which nothing can be fitted.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    /// No measurement of this engine can be used.
    #[error("{0} engine: no measured request can be used for the fit")]
    NoSamples(&'static str),
    /// No request of a log can be used, for these reasons.
    #[error("fitting the log: none of its requests can be used: {0}; log streamed requests that end well")]
    NoneOfLog(String),
    /// The engines of a pair have blocks of different sizes.
    #[error(
        "the prefill engine has blocks of {0} tokens and the decode engine of {1}: the lab simulates one size"
    )]
    BlockSizes(u32, u32),
    /// A step of the fitted engine takes no time.
    #[error(
        "{role} engines: the times of {requests} requests do not determine how long a step takes (c0 to c4 are 0), so \
         nothing can be simulated; use prompts of different lengths at moderate load: another time of the log \
         (--since, --until), or probes of an engine without other traffic (--url)"
    )]
    NoStepTime {
        /// The role.
        role: &'static str,
        /// Number of requests that were fitted.
        requests: usize,
    },
    /// The log has too few requests of a role.
    #[error(
        "{role} engines: the log has {found} requests that can be fitted and {least} are needed{}; log streamed \
         requests over a longer time",
        in_brackets(left_out)
    )]
    TooFew {
        /// The role.
        role: &'static str,
        /// Number of legs that can be fitted.
        found: usize,
        /// Minimum number of legs.
        least: usize,
        /// Why other requests of the log are not fitted.
        left_out: Vec<String>,
    },
    /// The fitted fleet cannot be simulated.
    #[error("the fitted fleet cannot be simulated: {0}")]
    Run(#[from] RunError),
}

fn in_brackets(reasons: &[String]) -> String {
    if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join("; ")) }
}

/// Fits a fleet to measurements, and checks it on the mix.
///
/// # Errors
/// [`CalibrateError`].
pub fn calibrate(measured: &Measurements) -> Result<Calibration, CalibrateError> {
    let sizes: Vec<u32> = measured.engines.iter().map(|engine| engine.capacity.block_tokens).collect();
    let block_tokens = sizes.first().copied().ok_or(CalibrateError::NoSamples("any"))?;
    if let Some(other) = sizes.iter().find(|size| **size != block_tokens) {
        return Err(CalibrateError::BlockSizes(block_tokens, *other));
    }
    let (mut groups, mut fits) = (Vec::new(), Vec::new());
    for engine in &measured.engines {
        let mut group = engine.capacity.group(engine.role);
        let fit = fit_engine(&engine.all(), &group, block_tokens);
        let fit = fit.ok_or(CalibrateError::NoSamples(engine.role.as_str()))?;
        check_step_time(&fit, engine.role)?;
        fit.apply(&mut group);
        groups.push(group);
        fits.push((engine.role, fit));
    }
    let mut fleet = Fleet { block_tokens, engines: groups, ..Fleet::default() };
    let bytes = measured.bytes_per_token.unwrap_or(Links::default().bytes_per_token);
    let (alone, slowed) = alone(measured, &fleet, &fits);
    let links = fit_links(&measured.pair, &alone, bytes, &measured.prefill_alone());
    if let Some((links, _)) = links {
        fleet.links = links;
    }
    let links = links.map(|(_, terms)| terms);
    let held_out = if measured.mix.is_empty() { None } else { Some(check(&fleet, &measured.mix)?) };
    let mut calibration = Calibration { fleet, engines: fits, links, held_out, warnings: Vec::new() };
    calibration.warnings = warnings(measured, &calibration);
    calibration.warnings.extend(slowed);
    Ok(calibration)
}

/// Returns an error if a step of the fitted engine takes no time.
pub(super) fn check_step_time(fit: &Fit, role: Role) -> Result<(), CalibrateError> {
    let error = || CalibrateError::NoStepTime { role: role.as_str(), requests: fit.requests };
    fit.takes_time().then_some(()).ok_or_else(error)
}

/// Returns the fleet whose engines run one at a time, as they do for a lone request through a pair, and a
/// warning about the difference.
fn alone(measured: &Measurements, fleet: &Fleet, fits: &[(Role, Fit)]) -> (Fleet, Vec<String>) {
    let (mut alone, mut slowed) = (fleet.clone(), Vec::new());
    let groups = alone.engines.iter_mut().zip(&measured.engines).zip(fits);
    for ((group, engine), (role, together)) in groups {
        let Some(fit) = fit_engine(&engine.alone, group, fleet.block_tokens) else { continue };
        fit.apply(group);
        let (both, one) = (decode_step_ms(together), decode_step_ms(&fit));
        if one > 0.0 && both / one > SLOWED {
            slowed.push(format!(
                "{} engine: a decode step of one sequence takes {both:.1} ms under the load of the other engine \
                 and {one:.1} ms without it; the file has a value between the two",
                role.as_str()
            ));
        }
    }
    (alone, slowed)
}

/// Returns the time of a step that gives one token to one sequence, milliseconds.
fn decode_step_ms(fit: &Fit) -> f64 {
    let [c0, c1, _, c3, c4] = fit.coefficients().step;
    c0 + c1 + c3 + c4
}

impl Measurements {
    /// Returns the lone requests to the prefill engine while the decode engine was idle.
    fn prefill_alone(&self) -> Vec<Sample> {
        let engine = self.engines.iter().find(|engine| engine.role == Role::Prefill);
        let Some(engine) = engine else { return Vec::new() };
        let all = if engine.alone.is_empty() { &engine.experiments } else { &engine.alone };
        let lone = all.iter().filter(|one| one.samples.len() == 1).flat_map(|one| &one.samples);
        lone.filter(|sample| sample.cached == 0).copied().collect()
    }
}

/// The known limits of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KnownCapacity {
    /// Tokens of a KV block.
    pub block_tokens: Option<u32>,
    /// Number of KV blocks.
    pub blocks: Option<u32>,
    /// Maximum number of sequences that run at once.
    pub max_num_seqs: Option<u32>,
    /// Maximum number of tokens in one step.
    pub max_batched_tokens: Option<u32>,
}

impl KnownCapacity {
    /// Fills in default values for unknown limits, and reports each of them with its flag.
    pub fn or_assumed(self, tell: &mut dyn FnMut(&str, u32)) -> Capacity {
        let mut choose = |flag: &str, known: Option<u32>, assumed: u32| {
            known.unwrap_or_else(|| {
                tell(flag, assumed);
                assumed
            })
        };
        Capacity {
            block_tokens: choose("--block-tokens", self.block_tokens, 16),
            blocks: choose("--blocks", self.blocks, 8_192),
            max_num_seqs: choose("--max-num-seqs", self.max_num_seqs, 256),
            max_batched_tokens: choose("--max-batched-tokens", self.max_batched_tokens, 2_048),
        }
    }
}

impl Capacity {
    /// Returns one engine with these limits.
    #[must_use]
    pub fn group(&self, role: Role) -> EngineGroup {
        EngineGroup {
            blocks: Some(self.blocks),
            max_num_seqs: self.max_num_seqs,
            max_batched_tokens: self.max_batched_tokens,
            ..EngineGroup::new(role, 1)
        }
    }
}

fn warnings(measured: &Measurements, calibration: &Calibration) -> Vec<String> {
    let mut warnings = Vec::new();
    for (role, fit) in &calibration.engines {
        let role = role.as_str();
        if fit.left_out > 0 {
            warnings.push(format!(
                "{role} engine: {} requests hit the prefix cache or exceed the KV cache; the fit leaves out \
                 their bursts",
                fit.left_out
            ));
        }
    }
    warnings.extend(term_warnings(&calibration.engines, calibration.links.as_deref()));
    let pair = calibration.engines.iter().any(|(role, _)| *role == Role::Decode);
    if pair && calibration.links.is_none() {
        let values = "the file has default values: set [links] in it";
        warnings.push(format!("link: no request through the pair was measured; {values}"));
    }
    if pair && measured.bytes_per_token.is_none() {
        warnings.push(
            "link: the engines do not count transferred bytes; bytes_per_token is a default value, and the \
             bandwidth follows from it: set both in [links] of the file if you know them"
                .to_owned(),
        );
    }
    if calibration.held_out.is_none() {
        let advice = "the errors of this fleet are not known; measure more (--max-requests, --max-seconds)";
        warnings.push(format!("nothing was kept back: {advice}"));
    }
    warnings.extend(calibration.held_out.iter().flat_map(HeldOut::bias_warnings));
    let cached = measured.mix.iter().filter(|sample| sample.cached > 0).count();
    if cached > 0 {
        let advice = "the model does not know it; give another --seed";
        warnings.push(format!("{cached} requests of the mix hit the prefix cache; {advice}"));
    }
    warnings
}

/// Returns warnings that name the figures that are 0, and the reasons.
pub(super) fn term_warnings(engines: &[(Role, Fit)], links: Option<&[TermFit]>) -> Vec<String> {
    let of_engine = |(role, fit): &(Role, Fit)| {
        let part = format!("{} engine", role.as_str());
        fit.terms.iter().filter_map(|fit| why_zero(&part, fit)).collect::<Vec<_>>()
    };
    let links = links.unwrap_or_default().iter().filter_map(|fit| why_zero("link", fit));
    engines.iter().flat_map(of_engine).chain(links).collect()
}

/// Explains why a term is 0.
fn why_zero(part: &str, fit: &TermFit) -> Option<String> {
    let name = fit.term.name();
    if !fit.identified {
        Some(format!("{part}: the requests do not vary {name} apart from the other terms; it is fixed at 0"))
    } else if fit.value <= 0.0 {
        Some(format!("{part}: {name} fits best at 0 or below; it is 0"))
    } else {
        None
    }
}

impl Term {
    /// Returns its name in the fleet file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RequestOverhead => "request_overhead_ms",
            Self::C0 => "c0",
            Self::C1 => "c1",
            Self::C2 => "c2",
            Self::C3 => "c3",
            Self::C4 => "c4",
            Self::Latency => "latency_ms",
            Self::TransferToken => "ms per token",
        }
    }
}

impl Calibration {
    /// Returns the fitted figures, the errors and the warnings as text.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::new();
        for (role, fit) in &self.engines {
            let _ = writeln!(text, "{} engine, fitted to {} requests, ms:", role.as_str(), fit.requests);
            fit.terms.iter().for_each(|fit| line(&mut text, fit));
        }
        if let Some(terms) = &self.links {
            text.push_str("link, ms:\n");
            terms.iter().for_each(|fit| line(&mut text, fit));
        }
        if let Some(held_out) = &self.held_out {
            let _ = writeln!(
                text,
                "\n{:<8} {:>8} {:>12} {:>12} {:>9} {:>9} {:>8} {:>9}",
                "held out",
                "requests",
                "measured p50",
                "model p50",
                "median %",
                "p90 %",
                "bias %",
                "Pearson r",
            );
            for (name, errors) in [("TTFT", held_out.ttft), ("ITL", held_out.itl), ("E2E", held_out.e2e)] {
                errors_line(&mut text, name, &errors);
            }
        }
        if !self.warnings.is_empty() {
            text.push('\n');
        }
        for warning in &self.warnings {
            let _ = writeln!(text, "warning: {warning}");
        }
        text
    }
}

fn line(text: &mut String, fit: &TermFit) {
    let _ = write!(text, "  {:<20} {:>14.6}", fit.term.name(), fit.value);
    let _ = match fit.standard_error {
        Some(error) => writeln!(text, "  ± {error:.6}"),
        None => writeln!(text),
    };
}

fn errors_line(text: &mut String, name: &str, errors: &Errors) {
    let pearson = errors.pearson_r.map_or_else(|| "-".to_owned(), |r| format!("{r:.3}"));
    let _ = writeln!(
        text,
        "{name:<8} {:>8} {:>12.1} {:>12.1} {:>9.1} {:>9.1} {:>+8.1} {pearson:>9}",
        errors.requests,
        errors.measured_p50_ms,
        errors.predicted_p50_ms,
        errors.median_percent,
        errors.p90_percent,
        errors.bias_percent,
    );
}
