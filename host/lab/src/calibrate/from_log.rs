//! Calibration from a decision log: requests that overlapped on an engine ran together there. The last part
//! of the log is not fitted; it gives the errors.

use std::{
    collections::{BTreeMap, VecDeque},
    path::{Path, PathBuf},
};

use clap::Args;
use pointsman_decision_log::{FileHeader, LoggedBlocks, LoggedRequest};
use pointsman_workers::Role;

use self::{
    fit_legs::{fit_links, fit_role, fits_prompts, held_out, take_prompt_times},
    legs::{Engine, Load},
};
use super::{
    CalibrateError, Calibration, Capacity, Fit, HeldOut, KnownCapacity,
    report::{check_step_time, term_warnings},
};
use crate::{
    decision_log::{
        reader::{ReadStats, files, read},
        time::moment,
    },
    fleet::{EngineGroup, Fleet},
};

mod fit_legs;
mod legs;
#[cfg(test)]
mod tests;

/// Default number of requests that are used, the last ones of the log.
const DEFAULT_REQUESTS: usize = 5_000;
/// Share of the requests that is fitted; the last requests check the result.
const FITTED_SHARE: f64 = 0.75;
/// Median error of the check, percent, above which the model is of no use.
const POOR: f64 = 30.0;
/// Minimum number of legs to which an engine's coefficients are fitted.
const LEAST_LEGS: usize = 20;

/// The part of a decision log to fit.
#[derive(Clone, Debug, Default, Args)]
pub struct LogArgs {
    /// Fit the decision log of a gateway (`decisions.log_dir`, or one of its files) instead of measuring.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["url", "from", "dry_run", "prefill", "decode"])]
    pub log: Option<PathBuf>,
    /// Use only requests that arrived at this time or later: 2026-01-31T12:00:00Z, or an age such as 2h.
    #[arg(long, requires = "log", value_parser = moment)]
    pub since: Option<u64>,
    /// Use only requests that arrived before this time.
    #[arg(long, requires = "log", value_parser = moment)]
    pub until: Option<u64>,
    /// Skip malformed lines of the log, and count them.
    #[arg(long, requires = "log")]
    pub skip_bad: bool,
}

/// The fit of the engines of each role.
type Fits = Vec<(Role, Fit)>;

/// Requests of a log that may be fitted.
struct Logged {
    requests: Vec<LoggedRequest>,
    block_tokens: u32,
    warnings: Vec<String>,
}

/// Fits a fleet to the decision log at `path`, and checks it on the log's last part.
///
/// # Errors
/// A file cannot be read, a line is malformed, or the log has too few requests of one model.
pub fn calibrate_log(
    path: &Path,
    args: &LogArgs,
    model: Option<&str>,
    max_requests: Option<u32>,
    capacity: KnownCapacity,
) -> anyhow::Result<Calibration> {
    let max = max_requests.map_or(DEFAULT_REQUESTS, |max| max as usize);
    let logged = read_log(path, args, max)?;
    let requests = of_model(path, logged.requests, model)?;
    let mut warnings = logged.warnings;
    let known =
        KnownCapacity { block_tokens: capacity.block_tokens.or(Some(logged.block_tokens)), ..capacity };
    let capacity = known.or_assumed(&mut |flag, value| {
        warnings.push(format!("the log does not contain {flag} of the engines; {value} is assumed"));
    });
    let mut calibration = calibrate_requests(&requests, capacity)?;
    warnings.append(&mut calibration.warnings);
    Ok(Calibration { warnings, ..calibration })
}

/// Reads the last `max` requests of the log.
fn read_log(path: &Path, args: &LogArgs, max: usize) -> anyhow::Result<Logged> {
    let (mut stats, mut kept, mut older) = (ReadStats::default(), VecDeque::new(), 0_u64);
    let mut block_tokens = 0;
    for file in files(path)? {
        read(&file, args.skip_bad, &mut stats, |header: &FileHeader, mut request| {
            let arrived = request.arrived_at_us;
            if args.since.is_some_and(|since| arrived < since)
                || args.until.is_some_and(|until| arrived >= until)
            {
                return;
            }
            block_tokens = header.block_tokens;
            // The shared parts of prompts are not needed, because the log contains the numbers of cached
            // tokens.
            request.blocks = LoggedBlocks::default();
            kept.push_back(request);
            if kept.len() > max {
                kept.pop_front();
                older += 1;
            }
        })?;
    }
    let log = path.display();
    anyhow::ensure!(
        !kept.is_empty(),
        "{log}: {} files contain no request of that time; log some traffic first (decisions.log_dir)",
        stats.files
    );
    let mut warnings = Vec::new();
    if older > 0 {
        warnings
            .push(format!("{older} older requests of the log are not used; --max-requests raises the limit"));
    }
    if stats.cut_files > 0 {
        warnings.push(format!("{} files end within a frame and were read up to it", stats.cut_files));
    }
    warnings.append(&mut stats.damaged);
    if stats.skipped > 0 {
        warnings.push(format!("{} malformed lines were left out", stats.skipped));
    }
    Ok(Logged { requests: kept.into(), block_tokens, warnings })
}

/// Returns all requests to the engines that serve the model, also those for other models, because they ran
/// together.
fn of_model(
    path: &Path,
    requests: Vec<LoggedRequest>,
    model: Option<&str>,
) -> anyhow::Result<Vec<LoggedRequest>> {
    let chosen = |request: &LoggedRequest| request.decisions.iter().any(|one| one.worker.is_some());
    let mut models: BTreeMap<String, usize> = BTreeMap::new();
    for request in requests.iter().filter(|request| chosen(request)) {
        *models.entry(request.model.clone()).or_default() += 1;
    }
    let names: Vec<String> =
        models.iter().map(|(name, count)| format!("{name} ({count} requests)")).collect();
    let (names, log) = (names.join(", "), path.display());
    let model = match (model, models.len()) {
        (_, 0) => anyhow::bail!("{log}: no request of the log was served by an engine"),
        (Some(model), _) => {
            anyhow::ensure!(models.contains_key(model), "--model {model}: {log} has {names}");
            model.to_owned()
        }
        (None, 1) => models.into_keys().next().unwrap_or_default(),
        (None, _) => anyhow::bail!("{log}: has the models {names}; choose one with --model"),
    };
    let engines: std::collections::HashSet<u64> = requests
        .iter()
        .filter(|request| request.model == model)
        .flat_map(|request| request.decisions.iter().filter_map(|one| one.worker))
        .collect();
    let runs_there = |request: &LoggedRequest| {
        request.decisions.iter().filter_map(|one| one.worker).any(|worker| engines.contains(&worker))
    };
    Ok(requests.into_iter().filter(runs_there).collect())
}

/// Fits a fleet to requests in the order in which they ended.
fn calibrate_requests(requests: &[LoggedRequest], capacity: Capacity) -> Result<Calibration, CalibrateError> {
    let load = Load::of(requests);
    let boundary_us = load.boundary_us(FITTED_SHARE);
    let mut warnings = Vec::new();
    let (fleet, fits) = fit_engines(&load, capacity, boundary_us, &mut warnings)?;
    let mut fleet = Fleet { block_tokens: capacity.block_tokens, engines: fleet, ..Fleet::default() };
    let limits = capacity.group(Role::Aggregated).limits(capacity.block_tokens);
    let is_pair = fits.iter().any(|(role, _)| *role == Role::Prefill);
    let links = if is_pair { fit_links(&load, &fits, limits, boundary_us) } else { None };
    if let Some((found, _)) = &links {
        fleet.links = *found;
    }
    let held_out = held_out(&load, &fits, &fleet.links, links.is_some(), limits, boundary_us);
    let links = links.map(|(_, terms)| terms);
    warnings.extend(term_warnings(&fits, links.as_deref()));
    warnings.extend(load.left_out.warnings());
    if is_pair {
        warnings.push(link_warning(links.is_some()).to_owned());
    }
    warnings.extend(check_warning(held_out.as_ref()));
    Ok(Calibration { fleet, engines: fits, links, held_out, warnings })
}

/// Fits the engines of each role.
fn fit_engines(
    load: &Load,
    capacity: Capacity,
    until_us: u64,
    warnings: &mut Vec<String>,
) -> Result<(Vec<EngineGroup>, Fits), CalibrateError> {
    let (mut groups, mut fits): (Vec<EngineGroup>, Fits) = (Vec::new(), Vec::new());
    for role in [Role::Prefill, Role::Decode, Role::Aggregated] {
        let engines = load.engines_of(role);
        let mut group = capacity.group(role);
        group.count = u32::try_from(engines.len()).unwrap_or(u32::MAX);
        if engines.is_empty() {
            continue;
        }
        let limits = group.limits(capacity.block_tokens);
        let fit = fit_role(&engines, limits, load.start_us, until_us);
        let found = fit.as_ref().map_or(0, |fit| fit.requests);
        if role == Role::Aggregated && found < LEAST_LEGS && !fits.is_empty() {
            warnings.push(format!(
                "aggregated engines: the log has {found} requests that can be fitted and {LEAST_LEGS} are needed; the \
                 fleet has only the engines of pairs"
            ));
            continue;
        }
        let fit = fit.filter(|_| found >= LEAST_LEGS);
        let mut fit = fit.ok_or_else(|| CalibrateError::TooFew {
            role: role.as_str(),
            found,
            least: LEAST_LEGS,
            left_out: left_out(load, &engines, until_us),
        })?;
        if role == Role::Decode
            && !fits_prompts(&engines, until_us)
            && let Some((_, prefill)) = fits.first()
        {
            take_prompt_times(&mut fit, prefill);
            warnings.push(format!(
                "decode engines: they computed fewer than {LEAST_LEGS} prompts that can be fitted; c3 and c4, the times \
                 of prompts, are those of the prefill engines"
            ));
        }
        check_step_time(&fit, role)?;
        fit.apply(&mut group);
        groups.push(group);
        fits.push((role, fit));
    }
    if fits.is_empty() {
        return Err(CalibrateError::NoneOfLog(load.left_out.reasons().join("; ")));
    }
    Ok((groups, fits))
}

/// Returns why requests of these engines are not fitted.
fn left_out(load: &Load, engines: &[&Engine], until_us: u64) -> Vec<String> {
    let legs = engines.iter().flat_map(|engine| &engine.legs);
    let had_not_ended = legs.filter(|leg| leg.is_fitted && leg.at_us < until_us && leg.end_us > until_us);
    let mut reasons = load.left_out.reasons();
    match had_not_ended.count() {
        0 => {}
        count => reasons.push(format!(
            "{count} requests had not ended when the last quarter began, which checks the fit"
        )),
    }
    reasons
}

/// Returns the warning about what the log does not say of the link.
fn link_warning(is_fitted: bool) -> &'static str {
    if is_fitted {
        "link: the log does not contain the KV bytes of a token; bytes_per_token is a default value, and the \
         bandwidth follows from it"
    } else {
        "link: the log does not separate the end of a prefill from the first token (bootstrap engines, or a gateway \
         before decision times were logged); the transfer is a part of the prefill engine's times, and the file's \
         link has default values"
    }
}

/// Returns a warning about the check, if it needs one.
fn check_warning(held_out: Option<&HeldOut>) -> Option<String> {
    let Some(found) = held_out else {
        return Some(
            "nothing was kept back: the errors of this fleet are not known; use a longer log".to_owned(),
        );
    };
    let (ttft, e2e) = (found.ttft.median_percent, found.e2e.median_percent);
    (ttft > POOR || e2e > POOR).then(|| {
        format!(
            "the model does not describe these engines: the median errors are {ttft:.0} % of TTFT and {e2e:.0} % of \
             E2E; choose a time without queues that grow (--since, --until), or probe an engine (--url)"
        )
    })
}
