//! The end of an observation: completes the trace, fits the fleet, and runs the comparison.

use std::{
    fs::{File, OpenOptions, Permissions},
    io::{BufWriter, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use pointsman_lab::{
    Arm, ArmReport, Comparison, EngineGroup, Fleet, Monitor, Plan, RankBy, RunOptions, RunResult, Slo,
    StepTimeSpec, Study, Trace, Window, calibrate::fleet_text, compare, fit_windows, run, run_observed,
};
use pointsman_workers::Role;

use super::{
    ObserveArgs,
    assign::Assigned,
    engines::EngineLog,
    writer::{Written, output_tokens},
};

/// Policies that are compared, besides those of `--arm`.
pub(super) const ARMS: [&str; 7] = [
    "kv-aware",
    "queue-kv-prefix",
    "cache-aware",
    "longest-prefix",
    "predicted-latency",
    "least-loaded",
    "round-robin",
];
/// Blocks and scheduler limits of an engine that does not report them.
const DEFAULT_BLOCKS: u32 = 8_192;
const DEFAULT_BLOCK_TOKENS: u32 = 16;
/// Space for the fleet and the page, bytes.
const RESERVE_BYTES: usize = 2 * 1024 * 1024;

/// Forecasts.
pub(super) struct Forecast {
    /// The observed engine of each request, simulated.
    pub(super) observed: RunResult,
    pub(super) study: Study,
    /// Number of equations of the fitted step time; `None` when it could not be fitted.
    pub(super) equations: Option<usize>,
    /// Whether a prompt token takes time.
    pub(super) has_prompt_cost: bool,
    /// A run of the policy with the lowest mean TTFT; `None` when each left requests without an answer.
    pub(super) best: Option<RunResult>,
}

impl Forecast {
    pub(super) fn comparison(&self) -> Option<&Comparison> {
        self.study.comparisons.first()
    }
}

/// Leaves the requests out of the trace whose answers were errors, gives the others their output lengths, and
/// writes it again. `served` and `told` are about those others. The lengths that no answer told have the mean
/// that is left of what the engines generated. Returns a warning when the trace could not be written: the
/// file then has all requests, with the lengths that were assumed at first.
pub(super) fn complete(
    path: &Path,
    block_tokens: u32,
    has_failed: &[bool],
    (served, told): (&[Written], &[Option<u32>]),
    total: &Window,
) -> anyhow::Result<(Trace, Option<String>)> {
    let mut trace = Trace::read(path, None, Some(block_tokens), false)?;
    let mut failures = has_failed.iter();
    trace.requests.retain(|_| !failures.next().copied().unwrap_or_default());
    let untold: Vec<Written> =
        served.iter().zip(told).filter(|(_, told)| told.is_none()).map(|(request, _)| *request).collect();
    let told_of = served.iter().zip(told).filter_map(|(request, told)| Some((request, (*told)?)));
    let (count, tokens) = told_of.fold((0.0, 0.0), |sum, (request, told)| {
        (sum.0 + f64::from(request.sequences), sum.1 + f64::from(told))
    });
    let mean = (total.generated_tokens - tokens) / (total.first_tokens - count);
    let mean = (mean >= 1.0 && mean.is_finite()).then(|| limit_of_mean(&untold, mean));
    for ((request, written), told) in trace.requests.iter_mut().zip(served).zip(told) {
        // An answer tells the tokens of all its choices.
        let told = told.map(|tokens| tokens.div_ceil(written.sequences).max(1));
        request.output_tokens = told.unwrap_or_else(|| output_tokens(written.max_tokens, mean));
    }
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::new(create_private(partial.as_ref())?);
        trace.write_mooncake(&mut out)?;
        out.flush()?;
        std::fs::rename(&partial, path)
    };
    let warning = write().err().map(|error| {
        let _ = std::fs::remove_file(&partial);
        let file = path.display();
        format!(
            "cannot write {file} again ({error}): it has the failed requests, too, and its output lengths are those \
             that were assumed at first"
        )
    });
    Ok((trace, warning))
}

/// Disk space that is taken at the start, so that a disk that fills up later has space for the page.
pub(super) struct Reserve(PathBuf);

impl Reserve {
    pub(super) fn take(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join("reserve");
        let written = create_private(&path).and_then(|mut file| file.write_all(&vec![0; RESERVE_BYTES]));
        written.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Returns the output length with which the shorter of it and the clients' limits have this mean.
fn limit_of_mean(written: &[Written], mean: f64) -> f64 {
    let limits: Vec<f64> =
        written.iter().map(|request| request.max_tokens.map_or(f64::INFINITY, f64::from)).collect();
    let count = f64::from(u32::try_from(limits.len()).unwrap_or(u32::MAX)).max(1.0);
    let (mut low, mut high) = (mean, mean * 1_000.0);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        let reached = limits.iter().map(|limit| limit.min(middle)).sum::<f64>() / count;
        if reached < mean { low = middle } else { high = middle }
    }
    // Where the limits are below the mean, clients' limits are all that is known.
    high
}

/// Returns the fleet with as many equal engines as were observed, one for each data-parallel rank, and the
/// number of equations of its step time.
pub(super) fn fleet(args: &ObserveArgs, logs: &[EngineLog]) -> (Fleet, Option<usize>) {
    let mut group = EngineGroup::new(Role::Aggregated, logs.iter().map(EngineLog::ranks).sum());
    let reported = |value: fn(&EngineLog) -> Option<u32>| logs.iter().find_map(value);
    group.blocks = reported(|log| log.facts.total_blocks).or(Some(DEFAULT_BLOCKS));
    group.max_num_seqs = args.max_num_seqs;
    group.max_batched_tokens = args.max_batched_tokens;
    let windows: Vec<Window> = logs.iter().flat_map(EngineLog::fitted_windows).collect();
    let fitted = fit_windows(windows.iter(), args.max_batched_tokens);
    if let Some(fitted) = fitted {
        group.step_time = fitted.step_time;
        group.request_overhead_ms = fitted.request_overhead_ms;
    }
    let block_tokens = reported(|log| log.facts.block_size).unwrap_or(DEFAULT_BLOCK_TOKENS);
    let fleet = Fleet { block_tokens, engines: vec![group], ..Fleet::default() };
    (fleet, fitted.map(|fitted| fitted.equations))
}

/// Writes the fleet as `compare` reads it.
pub(super) fn write_fleet(path: &Path, fleet: &Fleet, equations: Option<usize>) -> anyhow::Result<()> {
    let step_time = match equations {
        Some(count) => format!("step time fitted to {count} readings of metrics"),
        None => "step time is a default: the metrics did not say enough".to_owned(),
    };
    let text = fleet_text(fleet, &[format!("Written by `pointsman observe`: {step_time}.")]);
    write_private(path, &text)
}

/// Writes a file that only its owner may read.
pub(super) fn write_private(path: &Path, text: &str) -> anyhow::Result<()> {
    let written = create_private(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// Opens an empty file that only its owner may read, also when it exists with other rights.
fn create_private(path: &Path) -> std::io::Result<File> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    Ok(file)
}

/// Returns the position in the fleet of the rank that serves each request, for requests by the position of
/// their engine. The ranks of an engine take turns: which one served is not known.
fn ranks_of(engines: impl Iterator<Item = u32>, ranks: &[u32]) -> Vec<u32> {
    let mut turns = vec![0; ranks.len()];
    let rank = |engine: u32| {
        let place = engine as usize;
        let (before, count) = (ranks.iter().take(place).sum::<u32>(), ranks.get(place).copied().unwrap_or(1));
        let turn = turns.get_mut(place).map_or(0, |turn| std::mem::replace(turn, (*turn + 1) % count.max(1)));
        before + turn
    };
    engines.map(rank).collect()
}

/// Returns the policies to compare.
pub(super) fn arms(args: &ObserveArgs) -> anyhow::Result<Vec<Arm>> {
    let names = ARMS.iter().copied().chain(args.arm.iter().map(String::as_str));
    Ok(Arm::parse_all(names)?)
}

/// Simulates what was observed and what each policy would have done.
pub(super) fn forecast(
    args: &ObserveArgs,
    arms: &[Arm],
    trace: &Trace,
    (assigned, logs): (&[Assigned], &[EngineLog]),
    (fleet, equations): (Fleet, Option<usize>),
) -> anyhow::Result<Forecast> {
    let ranks: Vec<u32> = logs.iter().map(EngineLog::ranks).collect();
    let engines: Vec<u32> = ranks_of(assigned.iter().map(|assigned| assigned.engine), &ranks);
    let observed = run_observed(&engines, trace, &fleet)?;
    let plan = Plan {
        arms,
        trace,
        fleet: &fleet,
        fleet_name: "observed engines",
        seeds: args.seeds,
        options: RunOptions { fixed_schedule: true, ..RunOptions::default() },
        slo: Slo::default(),
        rank_by: RankBy::default(),
        clairvoyant: 0,
        threads: usize::from(args.threads),
    };
    let comparison = compare(&plan, &Monitor::default())?;
    let best = best(&comparison.arms).and_then(|best| arms.iter().find(|arm| arm.label == best.label));
    let best = best.map(|arm| run(arm, trace, &fleet, plan.options)).transpose()?;
    let study = Study::new(vec![comparison], Vec::new(), RankBy::default());
    let is_free = |group: &EngineGroup| match group.step_time {
        StepTimeSpec::Linear { c3, c4, .. } => c3 <= 0.0 && c4 <= 0.0,
        _ => false,
    };
    let has_prompt_cost = !fleet.engines.iter().any(is_free);
    Ok(Forecast { observed, study, equations, has_prompt_cost, best })
}

/// Returns the arm with the lowest mean TTFT among those that answered each request.
pub(super) fn best(arms: &[ArmReport]) -> Option<&ArmReport> {
    by_ttft(arms).into_iter().find(|arm| RankBy::TtftMean.of(&arm.figures).is_some())
}

/// Returns the arms by their mean TTFT. Those that left requests without an answer come last.
pub(super) fn by_ttft(arms: &[ArmReport]) -> Vec<&ArmReport> {
    let mean =
        |arm: &ArmReport| RankBy::TtftMean.of(&arm.figures).map_or(f64::INFINITY, |figure| figure.mean);
    let mut sorted: Vec<&ArmReport> = arms.iter().collect();
    sorted.sort_by(|left, right| mean(left).total_cmp(&mean(right)));
    sorted
}

#[cfg(test)]
mod tests {
    use tokio::time::Duration;

    use super::*;

    #[test]
    fn the_ranks_of_an_engine_take_turns() {
        // S5.17
        assert_eq!(ranks_of([0, 1, 1, 0, 1, 2].into_iter(), &[1, 2, 1]), [0, 1, 2, 0, 1, 3]);
    }

    #[test]
    fn the_lengths_of_answers_keep_the_limits_and_have_the_measured_mean() {
        let of = |max_tokens: Option<u32>| Written {
            number: 0,
            at: Duration::ZERO,
            input_tokens: 1,
            max_tokens,
            sequences: 1,
            is_estimated: false,
        };
        let written = [of(Some(10)), of(Some(100)), of(None), of(None)];
        let limit = limit_of_mean(&written, 80.0);
        let lengths: Vec<u32> =
            written.iter().map(|request| output_tokens(request.max_tokens, Some(limit))).collect();
        assert_eq!(lengths, [10, 100, 105, 105]);
    }
}
