//! Runs the phases one after another, until all have ended, the time is used up, or the user presses Ctrl-C.

use std::{
    cell::{Cell, RefCell},
    io::Write as _,
};

use futures_util::future::try_join_all;
use indicatif::{ProgressBar, ProgressStyle};
use pointsman_lab::calibrate::{Burst, EngineMeasurements, Experiment, Measurements, Sample};
use pointsman_workers::Role;
use tokio::time::{Duration, Instant};

use super::{
    plan::{Kind, Phase, WARM_UP},
    send::Run,
    target::{Target, TargetError},
};

/// Share of the time after which no burst begins, to leave time for the mix.
const BURST_SHARE: f64 = 0.6;
/// Counter of the bytes that a vLLM engine received over NIXL.
const TRANSFERRED: &str = "vllm:nixl_bytes_transferred_sum";

/// Measurements so far. An interruption keeps them.
#[derive(Default)]
struct Collected {
    /// Experiments of each phase, for each engine.
    engines: Vec<RefCell<Vec<Experiment>>>,
    pair: RefCell<Vec<Experiment>>,
    bytes_per_token: RefCell<Option<u64>>,
    mix: RefCell<Vec<Sample>>,
}

/// Sends all planned requests, for at most `limit`.
pub(super) async fn measure(
    phases: &[Phase],
    model: String,
    seed: u64,
    limit: Duration,
) -> anyhow::Result<Measurements> {
    let requests = phases.iter().map(|phase| u64::from(phase.design.totals().0 + phase.kind.warm_up())).sum();
    let run = Run::new(model, seed, progress_bar(requests));
    let engines = phases.iter().map(|_| RefCell::default()).collect();
    let collected = Collected { engines, ..Collected::default() };
    let ended = tokio::select! {
        ended = tokio::time::timeout(limit, all(phases, &run, limit, &collected)) => ended.ok(),
        _ = tokio::signal::ctrl_c() => None,
    };
    run.bar.finish_and_clear();
    match ended {
        Some(result) => result?,
        None => {
            let done = run.bar.position();
            let told =
                format!("warning: stopped after {done} requests by Ctrl-C or --max-seconds; these are used");
            let _ = writeln!(std::io::stderr(), "{told}");
        }
    }
    Ok(collected.into_measurements(phases))
}

async fn all(phases: &[Phase], run: &Run, limit: Duration, out: &Collected) -> Result<(), TargetError> {
    let bursts_end = Instant::now() + limit.mul_f64(BURST_SHARE);
    let is_together = |phase: &Phase| matches!(phase.kind, Kind::Together(..));
    // Number of phases with bursts that have not begun. Phases that run together count once.
    let mut to_come =
        phases.iter().filter(|phase| !matches!(phase.kind, Kind::Mix) && !is_together(phase)).count();
    to_come += usize::from(phases.iter().any(is_together));
    let mut all = phases.iter().zip(&out.engines).peekable();
    while let Some((phase, experiments)) = all.next() {
        if matches!(phase.kind, Kind::Mix) {
            run.mix(&phase.target, &phase.design, typical(&out.engines), &out.mix).await?;
            continue;
        }
        // The remaining time is divided evenly among the remaining phases.
        let left = bursts_end.saturating_duration_since(Instant::now());
        let until = Instant::now() + left / u32::try_from(to_come.max(1)).unwrap_or(u32::MAX);
        to_come = to_come.saturating_sub(1);
        if is_together(phase) {
            let mut both = vec![(phase, experiments)];
            both.extend(std::iter::from_fn(|| all.next_if(|(phase, _)| is_together(phase))));
            together(run, &both, until).await?;
            continue;
        }
        let bursts = &phase.design.bursts;
        let is_over = || Instant::now() >= until;
        warm_up(run, &phase.target, bursts, &is_over).await?;
        match &phase.kind {
            Kind::Pair(decode) => {
                let before = transferred(decode).await;
                run.bursts(&phase.target, bursts, &is_over, &out.pair).await?;
                let after = transferred(decode).await;
                *out.bytes_per_token.borrow_mut() = bytes_per_token(before, after, &out.pair.borrow());
            }
            Kind::Engine(..) | Kind::Alone(_) | Kind::Together(..) | Kind::Mix => {
                run.bursts(&phase.target, bursts, &is_over, experiments).await?;
            }
        }
    }
    Ok(())
}

/// Sends the bursts of several engines at the same time. It ends for all engines when the first one has no
/// burst left, because later measurements would not be under joint load.
async fn together(
    run: &Run,
    phases: &[(&Phase, &RefCell<Vec<Experiment>>)],
    until: Instant,
) -> Result<(), TargetError> {
    let first_is_over = Cell::new(false);
    let is_over = || first_is_over.get() || Instant::now() >= until;
    let each = phases.iter().map(|(phase, out)| async {
        let ended = run.bursts(&phase.target, &phase.design.bursts, &is_over, out).await;
        first_is_over.set(true);
        ended
    });
    // A failure at one engine ends the measurement of all engines at once.
    try_join_all(each).await.map(|_| ())
}

async fn warm_up(
    run: &Run,
    target: &Target,
    bursts: &[Burst],
    is_over: &dyn Fn() -> bool,
) -> Result<(), TargetError> {
    let Some(longest) = bursts.iter().map(|burst| burst.isl).max() else { return Ok(()) };
    let first = Burst { requests: 1, isl: longest, osl: 2 };
    let warm_up = vec![first; WARM_UP as usize];
    run.bursts(target, &warm_up, is_over, &RefCell::default()).await
}

/// Returns the median time of a lone request.
fn typical(engines: &[RefCell<Vec<Experiment>>]) -> Option<Duration> {
    let mut times = Vec::new();
    for experiments in engines {
        let experiments = experiments.borrow();
        let lone = experiments.iter().filter(|one| one.samples.len() == 1);
        times.extend(lone.flat_map(|one| one.samples.iter().map(|sample| sample.e2e_ms)));
    }
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).map(|milliseconds| Duration::from_secs_f64(milliseconds / 1e3))
}

/// Reads the engine's counter of transferred bytes.
async fn transferred(decode: &Target) -> Option<f64> {
    let body = decode.get("/metrics").await.ok().flatten()?;
    let text = std::str::from_utf8(&body).ok()?;
    let lines = text.lines().filter(|line| line.starts_with(TRANSFERRED));
    let values: Vec<f64> = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse().ok()).collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive and finite")]
fn bytes_per_token(before: Option<f64>, after: Option<f64>, pair: &[Experiment]) -> Option<u64> {
    let tokens: f64 = pair.iter().flat_map(|one| &one.samples).map(|sample| f64::from(sample.isl)).sum();
    // The counter is absent until it has its first value.
    let bytes = (after? - before.unwrap_or(0.0)) / tokens;
    (bytes.is_finite() && bytes >= 1.0).then(|| bytes.round() as u64)
}

impl Collected {
    fn into_measurements(self, phases: &[Phase]) -> Measurements {
        let measured: Vec<Vec<Experiment>> = self.engines.into_iter().map(RefCell::into_inner).collect();
        let of = |role: Role| {
            let alone = |phase: &Phase| matches!(phase.kind, Kind::Alone(other) if other == role);
            let found = phases.iter().position(alone).and_then(|place| measured.get(place));
            found.cloned().unwrap_or_default()
        };
        let engines = phases.iter().zip(&measured).filter_map(|(phase, experiments)| match phase.kind {
            Kind::Engine(role, capacity) | Kind::Together(role, capacity) => {
                Some(EngineMeasurements { role, capacity, experiments: experiments.clone(), alone: of(role) })
            }
            Kind::Alone(_) | Kind::Pair(_) | Kind::Mix => None,
        });
        let mut mix = self.mix.into_inner();
        mix.sort_by(|left, right| left.at_ms.total_cmp(&right.at_ms));
        Measurements {
            engines: engines.collect(),
            pair: self.pair.into_inner().into_iter().flat_map(|one| one.samples).collect(),
            bytes_per_token: self.bytes_per_token.into_inner(),
            mix,
        }
    }
}

/// Shows progress on standard error. Shows nothing when standard error is not a terminal.
fn progress_bar(requests: u64) -> ProgressBar {
    let style =
        ProgressStyle::with_template("measuring [{bar:40}] {pos} of {len} requests ({elapsed}, {eta} left)");
    let bar = ProgressBar::new(requests);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
