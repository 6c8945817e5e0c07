//! The highest load at which an arm keeps the SLO.

use std::time::Duration;

use serde::Serialize;

use crate::{
    arrivals::{ArrivalUnit, Arrivals},
    ceiling::Waits,
    jobs::run_jobs,
    monitor::Monitor,
    prepared::prepare,
    report::{Figure, Plan, Slo, requests_per_s, slo_share, worse_percent},
    run::{RunError, RunOptions, RunResult, run_prepared},
    stats::mean,
};

/// Maximum number of times that the load is doubled or halved until the SLO is missed or met.
const MAX_DOUBLINGS: u32 = 6;
/// Number of times that the interval is then halved. Its ends are 2.2 % apart in the end.
const BISECTIONS: u32 = 5;
/// Maximum number of runs in one search.
pub(crate) const MAX_RUNS: u32 = 1 + MAX_DOUBLINGS + BISECTIONS;

/// The highest loads of all arms.
#[derive(Clone, Debug, Serialize)]
pub struct MaxLoad {
    /// Name of the fleet.
    pub fleet: String,
    /// Formula of the step time.
    pub step_time: String,
    /// The latency limits.
    pub slo: Slo,
    /// Share of all requests that must keep both limits.
    pub slo_share: f64,
    /// Number of arrivals in a run whose rate the search changes.
    pub offered: usize,
    /// One result for each arm.
    pub arms: Vec<ArmMaxLoad>,
}

/// The highest load of one arm.
#[derive(Clone, Debug, Serialize)]
pub struct ArmMaxLoad {
    /// Name of the arm.
    pub label: String,
    /// Mean rate of arrivals at the highest load, a second. A bound enters the mean as its value.
    pub per_s: Figure,
    /// What `per_s` counts.
    pub unit: ArrivalUnit,
    /// Requests a second of the run at that load, from the first arrival to the last token.
    pub requests_per_s: Figure,
    /// Seeds in whose run at that load the sessions start within the time that one takes: their number bounds
    /// the load, and a higher rate of starts hardly changes the run.
    pub bounded: u32,
    /// Seeds whose SLO was met even at the highest load that was tried: their value is a lower bound.
    pub at_least: u32,
    /// Seeds whose SLO was missed even at the lowest load that was tried: their value is an upper bound.
    pub below: u32,
}

/// Result of one search.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Found {
    Within(f64),
    AtLeast(f64),
    Below(f64),
}

/// Result of one search, with the run at that load.
#[derive(Clone, Copy, Debug)]
struct SeedLoad {
    found: Found,
    requests_per_s: f64,
    is_bounded: bool,
}

impl Found {
    fn speed(self) -> f64 {
        match self {
            Self::Within(speed) | Self::AtLeast(speed) | Self::Below(speed) => speed,
        }
    }
}

/// Searches for every arm and seed. The search begins at the plan's speed.
///
/// # Errors
/// Those of [`compare`](crate::compare). An interrupted search returns an error.
pub fn max_load(plan: &Plan<'_>, share: f64, monitor: &Monitor) -> Result<MaxLoad, RunError> {
    let prepared = prepare(plan.trace, plan.fleet.block_tokens);
    let seeds = usize::try_from(plan.seeds.max(1)).unwrap_or(usize::MAX);
    let (arrivals, waits) = (plan.trace.arrivals(plan.options.fixed_schedule), Waits::of(plan.trace));
    let mut found = vec![vec![None; seeds]; plan.arms.len()];
    let work = |job: usize| {
        let Some(arm) = plan.arms.get(job / seeds) else { return Err(RunError::Interrupted) };
        let seed = plan.options.seed + (job % seeds) as u64;
        let mut runs = Vec::new();
        let found = search(plan.options.speed, |speed| {
            let options = RunOptions { seed, speed, ..plan.options };
            let result = run_prepared(arm, plan.trace, &prepared, plan.fleet, options, monitor)?;
            let found = Found::Within(speed);
            let (requests_per_s, is_bounded) =
                (requests_per_s(&result), is_bounded(&result, &arrivals, speed, &waits));
            runs.push(SeedLoad { found, requests_per_s, is_bounded });
            Ok::<_, RunError>(slo_share(&result, plan.slo) >= share)
        })?;
        monitor.add((MAX_RUNS as usize - runs.len()) as u64 * plan.trace.requests.len() as u64);
        let run = runs.into_iter().find(|run| run.found.speed().total_cmp(&found.speed()).is_eq());
        Ok(run.map(|run| SeedLoad { found, ..run }))
    };
    let done = |job: usize, load: Option<SeedLoad>| {
        if let Some(place) = found.get_mut(job / seeds).and_then(|arm| arm.get_mut(job % seeds)) {
            *place = load;
        }
    };
    run_jobs(plan.arms.len().saturating_mul(seeds), plan.threads, work, done)?;
    let arms = plan.arms.iter().zip(&found).map(|(arm, found)| {
        let loads: Vec<SeedLoad> = found.iter().flatten().copied().collect();
        ArmMaxLoad::of(&arm.label, &loads, &arrivals)
    });
    Ok(MaxLoad {
        fleet: plan.fleet_name.to_owned(),
        step_time: plan.fleet.step_times(),
        slo: plan.slo,
        slo_share: share,
        offered: arrivals.count,
        arms: arms.collect(),
    })
}

/// Whether the sessions of a run start within the time that one of them takes on average.
fn is_bounded(result: &RunResult, arrivals: &Arrivals, speed: f64, waits: &Waits) -> bool {
    if arrivals.unit != ArrivalUnit::SessionStarts {
        return false;
    }
    let mut ends = vec![Duration::ZERO; result.outcomes.len()];
    for (number, outcome) in result.outcomes.iter().enumerate() {
        if let Some(end) = ends.get_mut(waits.root(number)) {
            *end = (*end).max(outcome.at + outcome.e2e);
        }
    }
    let sessions = result.outcomes.iter().zip(ends).enumerate().filter(|(number, _)| !waits.waits(*number));
    let took = sessions.map(|(_, (first, end))| end.saturating_sub(first.at).as_secs_f64());
    arrivals.seconds / speed < mean(&took.collect::<Vec<_>>())
}

impl MaxLoad {
    /// Returns the results as a sentence, the highest load first.
    #[must_use]
    pub fn sentence(&self) -> String {
        let mut arms: Vec<&ArmMaxLoad> = self.arms.iter().collect();
        arms.sort_by(|a, b| b.per_s.mean.total_cmp(&a.per_s.mean));
        let best = arms.first().copied();
        let bounded = arms.iter().filter(|arm| arm.bounded > 0).map(|arm| arm.label.as_str());
        let bounded = match bounded.collect::<Vec<_>>().join(", ") {
            labels if labels.is_empty() => labels,
            labels => format!(
                " The trace's {} sessions bound the load of {labels}: they start within the time that one takes, so that \
                 a higher rate of starts hardly adds load.",
                self.offered
            ),
        };
        let arms: Vec<String> = arms.iter().map(|arm| arm.carries(best)).collect();
        format!(
            "Highest load within the SLO (TTFT of at most {} ms and ITL of at most {} ms for {:.0} % of the requests) on \
             {} with step time {}: {}.{bounded}",
            self.slo.ttft_ms,
            self.slo.itl_ms,
            self.slo_share * 100.0,
            self.fleet,
            self.step_time,
            arms.join("; ")
        )
    }
}

impl ArmMaxLoad {
    /// States the highest load of the arm and compares it with that of the `best` arm.
    fn carries(&self, best: Option<&Self>) -> String {
        let seeds = self.per_s.values.len();
        let what = if self.at_least as usize == seeds {
            format!("{} keeps it at every load that was tried, up to {}", self.label, self.value())
        } else if self.below as usize == seeds {
            format!("{} keeps it at no load that was tried, down to {}", self.label, self.value())
        } else {
            format!("{} carries {}", self.label, self.shown())
        };
        let Some(best) = best.filter(|best| best.label != self.label && !self.is_bound() && !best.is_bound())
        else {
            return what;
        };
        let less = worse_percent(&self.per_s.values, &best.per_s.values, true);
        match less.interval() {
            None => format!("{what}, {:.1} % less than {} (one seed: not tested)", less.mean, best.label),
            Some(_) if less.excludes_zero().is_none() => {
                format!("{what}, {:.1} % less than {} with each of {seeds} seeds", less.mean, best.label)
            }
            Some((low, high)) if less.excludes_zero() == Some(true) => {
                format!(
                    "{what}, {:.1} % less than {} (95 % interval {low:.1} to {high:.1} %)",
                    less.mean, best.label
                )
            }
            Some(_) => format!("{what}: no difference to {} found", best.label),
        }
    }

    /// Whether the value of a seed is only a bound.
    fn is_bound(&self) -> bool {
        self.at_least + self.below > 0
    }

    fn value(&self) -> String {
        let half = self.per_s.plus_minus.map_or_else(String::new, |half| format!(" ± {half:.2}"));
        let measured = match self.unit {
            ArrivalUnit::Requests => String::new(),
            _ => format!(" (measured: {:.2} requests/s)", self.requests_per_s.mean),
        };
        format!("{:.2}{half} {}/s{measured}", self.per_s.mean, self.unit.name())
    }

    fn of(label: &str, loads: &[SeedLoad], arrivals: &Arrivals) -> Self {
        let count =
            |which: fn(&&SeedLoad) -> bool| u32::try_from(loads.iter().filter(which).count()).unwrap_or(0);
        Self {
            label: label.to_owned(),
            per_s: Figure::of(loads.iter().map(|load| arrivals.per_s(load.found.speed())).collect()),
            unit: arrivals.unit,
            requests_per_s: Figure::of(loads.iter().map(|load| load.requests_per_s).collect()),
            bounded: count(|load| load.is_bounded),
            at_least: count(|load| matches!(load.found, Found::AtLeast(_))),
            below: count(|load| matches!(load.found, Found::Below(_))),
        }
    }

    /// Returns the result as text, with its unit.
    #[must_use]
    pub fn shown(&self) -> String {
        let seeds = self.per_s.values.len();
        let value = self.value();
        match (self.at_least as usize, self.below as usize) {
            (0, 0) => value,
            (met, _) if met == seeds => format!("at least {value}: met even at the highest load tried"),
            (_, missed) if missed == seeds => format!("below {value}: missed even at the lowest load tried"),
            (met, missed) => {
                format!("{value} (a bound only: {met} seeds met it at every load, {missed} at none)")
            }
        }
    }
}

/// Finds the highest speed that `meets` accepts: doubles or halves from `start`, and then bisects.
fn search<E>(start: f64, mut meets: impl FnMut(f64) -> Result<bool, E>) -> Result<Found, E> {
    let up = meets(start)?;
    let (mut speed, mut bracket) = (start, None);
    for _ in 0..MAX_DOUBLINGS {
        let next = if up { speed * 2.0 } else { speed / 2.0 };
        if meets(next)? != up {
            bracket = Some((speed.min(next), speed.max(next)));
            break;
        }
        speed = next;
    }
    let Some((mut low, mut high)) = bracket else {
        return Ok(if up { Found::AtLeast(speed) } else { Found::Below(speed) });
    };
    for _ in 0..BISECTIONS {
        let middle = (low * high).sqrt();
        if meets(middle)? { low = middle } else { high = middle }
    }
    Ok(Found::Within(low))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns arrivals within a second.
    fn arrivals(unit: ArrivalUnit, count: usize) -> Arrivals {
        Arrivals { unit, count, seconds: 1.0 }
    }

    fn loads(found: &[Found]) -> Vec<SeedLoad> {
        let load = |found: &Found| SeedLoad { found: *found, requests_per_s: 0.625, is_bounded: false };
        found.iter().map(load).collect()
    }

    fn told(arms: Vec<ArmMaxLoad>, offered: usize) -> String {
        let (fleet, step_time) = ("four".to_owned(), "dynamo".to_owned());
        MaxLoad { fleet, step_time, slo: Slo::default(), slo_share: 0.95, offered, arms }.sentence()
    }

    #[test]
    fn a_load_of_sessions_counts_their_starts_beside_the_requests_that_were_measured() {
        let arrivals = arrivals(ArrivalUnit::SessionStarts, 6);
        let arm = |label: &str, is_bounded: bool| {
            let loads = loads(&[Found::AtLeast(64.0); 2]).into_iter();
            let loads: Vec<SeedLoad> = loads.map(|load| SeedLoad { is_bounded, ..load }).collect();
            ArmMaxLoad::of(label, &loads, &arrivals)
        };
        let (bound, free) = (arm("kv", true), arm("rr", false));
        assert_eq!((bound.bounded, free.bounded), (2, 0));
        let value = "384.00 ± 0.00 session starts/s (measured: 0.62 requests/s)";
        assert_eq!(free.shown(), format!("at least {value}: met even at the highest load tried"));
        let told = told(vec![bound, free], 6);
        let end = format!(
            "kv keeps it at every load that was tried, up to {value}; rr keeps it at every load that was tried, up to \
             {value}. The trace's 6 sessions bound the load of kv: they start within the time that one takes, so that a \
             higher rate of starts hardly adds load."
        );
        assert!(told.ends_with(&end), "{told}");
    }

    #[test]
    fn the_search_ends_near_the_limit_or_tells_that_it_lies_outside() {
        let found = |limit: f64| {
            let mut runs = 0;
            let found = search(1.0, |speed| {
                runs += 1;
                Ok::<_, ()>(speed <= limit)
            });
            assert!(runs <= MAX_RUNS, "{runs}");
            found.unwrap()
        };
        for limit in [0.05, 0.9, 1.0, 3.3, 60.0] {
            let Found::Within(speed) = found(limit) else { panic!("{limit}") };
            assert!(speed <= limit && speed > limit / 1.03, "{speed} {limit}");
        }
        assert_eq!(found(1e9), Found::AtLeast(64.0));
        assert_eq!(found(1e-9), Found::Below(1.0 / 64.0));
        let of = |found: &[Found]| ArmMaxLoad::of("a", &loads(found), &arrivals(ArrivalUnit::Requests, 2));
        let arm = of(&[Found::AtLeast(64.0); 2]);
        assert_eq!(arm.shown(), "at least 128.00 ± 0.00 requests/s: met even at the highest load tried");
        let arm = of(&[Found::Below(0.5)]);
        assert_eq!(arm.shown(), "below 1.00 requests/s: missed even at the lowest load tried");
    }

    #[test]
    fn the_result_is_told_in_words_with_differences_only_where_they_were_tested() {
        use Found::{AtLeast, Below, Within};
        let sentence = |arms: &[(&str, [Found; 3])]| {
            let arrivals = arrivals(ArrivalUnit::Requests, 1);
            let of = |(label, found): &(&str, [Found; 3])| ArmMaxLoad::of(label, &loads(found), &arrivals);
            told(arms.iter().map(of).collect(), 1)
        };
        let told = sentence(&[
            ("rr", [Within(5.0), Within(5.1), Within(5.2)]),
            ("kv", [Within(10.0), Within(10.2), Within(10.4)]),
            ("kv2", [Within(10.1), Within(10.0), Within(10.4)]),
        ]);
        assert_eq!(
            told,
            "Highest load within the SLO (TTFT of at most 2000 ms and ITL of at most 50 ms for 95 % of the requests) on \
             four with step time dynamo: kv carries 10.20 ± 0.50 requests/s; kv2 carries 10.17 ± 0.52 requests/s: no \
             difference to kv found; rr carries 5.10 ± 0.25 requests/s, 50.0 % less than kv with each of 3 seeds."
        );
        let told = sentence(&[("a", [AtLeast(64.0); 3]), ("b", [Below(0.5); 3]), ("c", [Within(2.0); 3])]);
        assert!(
            told.ends_with(
                ": a keeps it at every load that was tried, up to 64.00 ± 0.00 requests/s; c carries 2.00 ± 0.00 \
                 requests/s; b keeps it at no load that was tried, down to 0.50 ± 0.00 requests/s."
            ),
            "{told}"
        );
    }
}
