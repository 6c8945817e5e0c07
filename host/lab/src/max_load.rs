//! The highest load at which an arm keeps the SLO.

use serde::Serialize;

use crate::{
    arrivals::rate,
    jobs::run_jobs,
    monitor::Monitor,
    prepared::prepare,
    report::{Figure, Plan, Slo, slo_share, worse_percent},
    run::{RunError, RunOptions, run_prepared},
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
    /// One result for each arm.
    pub arms: Vec<ArmMaxLoad>,
}

/// The highest load of one arm.
#[derive(Clone, Debug, Serialize)]
pub struct ArmMaxLoad {
    /// Name of the arm.
    pub label: String,
    /// Mean arrivals at the highest load, requests a second. A bound enters the mean as its value.
    pub per_s: Figure,
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

/// Searches for every arm and seed. The search begins at the plan's speed.
///
/// # Errors
/// Those of [`compare`](crate::compare). An interrupted search returns an error.
pub fn max_load(plan: &Plan<'_>, share: f64, monitor: &Monitor) -> Result<MaxLoad, RunError> {
    let prepared = prepare(plan.trace, plan.fleet.block_tokens);
    let seeds = usize::try_from(plan.seeds.max(1)).unwrap_or(usize::MAX);
    let mut found = vec![vec![Found::Below(0.0); seeds]; plan.arms.len()];
    let work = |job: usize| {
        let Some(arm) = plan.arms.get(job / seeds) else { return Err(RunError::Interrupted) };
        let seed = plan.options.seed + (job % seeds) as u64;
        let mut runs = 0;
        let end = search(plan.options.speed, |speed| {
            runs += 1;
            let options = RunOptions { seed, speed, ..plan.options };
            let result = run_prepared(arm, plan.trace, &prepared, plan.fleet, options, monitor)?;
            Ok::<_, RunError>(slo_share(&result, plan.slo) >= share)
        })?;
        monitor.add(u64::from(MAX_RUNS - runs) * plan.trace.requests.len() as u64);
        Ok(end)
    };
    let done = |job: usize, end: Found| {
        if let Some(place) = found.get_mut(job / seeds).and_then(|arm| arm.get_mut(job % seeds)) {
            *place = end;
        }
    };
    run_jobs(plan.arms.len().saturating_mul(seeds), plan.threads, work, done)?;
    let unit = rate(plan.trace.requests.len(), plan.trace.arrivals_s(plan.options.fixed_schedule));
    let arms = plan.arms.iter().zip(&found).map(|(arm, found)| ArmMaxLoad::of(&arm.label, found, unit));
    Ok(MaxLoad {
        fleet: plan.fleet_name.to_owned(),
        step_time: plan.fleet.step_times(),
        slo: plan.slo,
        slo_share: share,
        arms: arms.collect(),
    })
}

impl MaxLoad {
    /// Returns the results as a sentence, the highest load first.
    #[must_use]
    pub fn sentence(&self) -> String {
        let mut arms: Vec<&ArmMaxLoad> = self.arms.iter().collect();
        arms.sort_by(|a, b| b.per_s.mean.total_cmp(&a.per_s.mean));
        let best = arms.first().copied();
        let arms: Vec<String> = arms.iter().map(|arm| arm.carries(best)).collect();
        format!(
            "Highest load within the SLO (TTFT of at most {} ms and ITL of at most {} ms for {:.0} % of the requests) on \
             {} with step time {}: {}.",
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
        format!("{:.2}{half} requests/s", self.per_s.mean)
    }

    fn of(label: &str, found: &[Found], unit: f64) -> Self {
        let speeds = found.iter().map(|found| match found {
            Found::Within(speed) | Found::AtLeast(speed) | Found::Below(speed) => speed * unit,
        });
        let count =
            |which: fn(&&Found) -> bool| u32::try_from(found.iter().filter(which).count()).unwrap_or(0);
        Self {
            label: label.to_owned(),
            per_s: Figure::of(speeds.collect()),
            at_least: count(|found| matches!(found, Found::AtLeast(_))),
            below: count(|found| matches!(found, Found::Below(_))),
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
        let arm = ArmMaxLoad::of("a", &[Found::AtLeast(64.0); 2], 2.0);
        assert_eq!(arm.shown(), "at least 128.00 ± 0.00 requests/s: met even at the highest load tried");
        let arm = ArmMaxLoad::of("a", &[Found::Below(0.5)], 2.0);
        assert_eq!(arm.shown(), "below 1.00 requests/s: missed even at the lowest load tried");
    }

    #[test]
    fn the_result_is_told_in_words_with_differences_only_where_they_were_tested() {
        use Found::{AtLeast, Below, Within};
        let sentence = |arms: &[(&str, [Found; 3])]| {
            let arms = arms.iter().map(|(label, found)| ArmMaxLoad::of(label, found, 1.0)).collect();
            let (fleet, step_time) = ("four".to_owned(), "dynamo".to_owned());
            MaxLoad { fleet, step_time, slo: Slo::default(), slo_share: 0.95, arms }.sentence()
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
