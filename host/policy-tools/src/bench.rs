//! `pointsman policy bench`: measures the time per call of a compiled policy, and the time to load it.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use pointsman_policy_runtime::{LoadedPolicy, SampleCall};
use pointsman_routing::{Call, DecisionContext, Failure, Policy, Purpose, World};
use tokio::time::Instant;

use crate::{
    one_row,
    output::{escaped, print},
    policy_file::{LimitArgs, PolicyFile},
};

/// Budget for the median time of a call after warm-up: rows, microseconds.
const BUDGETS: [(u32, f64); 2] = [(64, 0.7), (1_024, 3.0)];

/// Calls before the first measured call.
const WARM_UP: usize = 1_000;

/// Largest number of measured calls per row count.
const MAX_CALLS: usize = 2_000_000;

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
The facts are generated, as for an ordinary request: without `explain` and without preferred taints. One \
thread makes one call after another. Times are wall-clock times in microseconds; use a release build of \
pointsman on an idle machine. The number of WebAssembly instructions comes from a separate run; it is the \
same on every machine.
Exit code: 0 when the policy was measured, within the budget or not; 1 when a call failed; 2 when the file is \
refused.")]
pub struct BenchArgs {
    /// The component, or core module with embedded WIT metadata; or the name of a built-in policy.
    file: PathBuf,
    /// Settings, as a JSON object.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    settings: String,
    /// Candidate rows per call, up to 65536; one measurement for each number.
    #[arg(long, value_delimiter = ',', default_value = "8,64,512,1024",
        value_parser = clap::value_parser!(u32).range(1..=65_536))]
    rows: Vec<u32>,
    /// Seconds to measure each number of rows; ends earlier after 2,000,000 calls.
    #[arg(long, default_value = "1", value_parser = seconds)]
    seconds: Duration,
    #[command(flatten)]
    limits: LimitArgs,
}

/// Times of the calls with one number of rows.
#[derive(Debug)]
struct Measured {
    rows: u32,
    /// Nanoseconds, sorted.
    times: Vec<u64>,
}

impl BenchArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        announce(&self.file);
        let begun = Instant::now();
        let file = PolicyFile::read_anew(&self.file, &self.limits)?;
        let policy = file.load(&self.settings).map_err(|refusal| file.refused(&refusal))?;
        let load = begun.elapsed();
        let info = policy.info();
        print(&format!(
            "file    {}, {} bytes\npolicy  {} {}, {}, reads {} request facts and {} worker facts\n\
             load    {:.1} ms from bytes to ready; compile {:.1} ms, a warm instance {:.3} ms\n\
             clock   {} ns per measurement, included in each time below\n\
             {:>6} {:>9} {:>9} {:>9} {:>9} {:>11}\n",
            self.file.display(),
            file.bytes.len(),
            info.name,
            info.version,
            info.world,
            info.wants.request.len(),
            info.wants.worker.len(),
            load.as_secs_f64() * 1e3,
            policy.cost().compile.as_secs_f64() * 1e3,
            policy.cost().instance.as_secs_f64() * 1e3,
            clock().quantile(0.5),
            "rows",
            "calls",
            "p50 us",
            "p99 us",
            "mean us",
            "wasm instr",
        ))?;
        let counting = file.counting(&self.settings)?;
        let mut measured = Vec::with_capacity(self.rows.len());
        for rows in &self.rows {
            let wants = &info.wants;
            let question = SampleCall::ordinary(wants, *rows);
            match measure(&policy, &question, self.seconds) {
                Ok(times) => {
                    let count = counting.instructions(&question).ok().flatten();
                    let count = count.map_or_else(|| "-".to_owned(), |count| count.to_string());
                    print(&format!("{} {count:>11}\n", times.line()))?;
                    measured.push(times);
                }
                Err(failure) => {
                    let hint = file.hint();
                    print(&escaped(&format!("{rows:>6} failed ({}): {failure}{hint}\n", failure.kind())))?;
                    return Ok(ExitCode::FAILURE);
                }
            }
        }
        print(&format!(
            "memory  {} bytes of linear memory in the largest instance now\n{}{}",
            policy.memory_bytes(),
            verdict(&measured),
            one_row::warning(&policy).unwrap_or_default()
        ))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Says that the policy is compiled, which nothing else does without a terminal.
fn announce(file: &Path) {
    let line = format!(
        "compiling {}, and again to count instructions; in Python or JavaScript this takes a minute\n",
        file.display()
    );
    // A closed stderr does not end the measurement.
    let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("\"{text}\" is not a number of seconds"))?;
    if !(0.001..=3_600.0).contains(&seconds) {
        return Err(format!("{text} is not within 0.001 to 3600 seconds"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Calls the policy for the given time, each time with another seed.
fn measure(policy: &LoadedPolicy, question: &SampleCall, long: Duration) -> Result<Measured, Failure> {
    let facts = question.facts();
    let (mut kept, mut costs) = (Vec::new(), Vec::new());
    let mut one = |seed: u64| {
        let call = Call { seed, ..question.call };
        let context = &mut DecisionContext::new(Purpose::Route);
        match policy.info().world {
            World::Filter => policy.keep(context, &call, &facts, &mut kept),
            World::Scorer => policy.score(context, &call, &facts, &mut costs),
            World::Selector => policy.select(context, &call, &facts).map(drop),
            World::DecodeOverride => policy
                .decide(context, &call, &question.request, &question.decode, &question.candidates)
                .map(drop),
        }
    };
    let end = Instant::now() + long;
    for seed in (0..).take(WARM_UP) {
        one(seed)?;
        if Instant::now() >= end {
            break;
        }
    }
    let mut times = Vec::new();
    let mut now = Instant::now();
    let end = now + long;
    for seed in (0..).take(MAX_CALLS) {
        let begun = Instant::now();
        one(seed)?;
        now = Instant::now();
        times.push(nanoseconds(now - begun));
        if now >= end {
            break;
        }
    }
    times.sort_unstable();
    Ok(Measured { rows: question.call.rows, times })
}

/// Measures the time between two reads of the clock.
fn clock() -> Measured {
    let mut times: Vec<u64> = (0..10_000)
        .map(|_| {
            let begun = Instant::now();
            nanoseconds(begun.elapsed())
        })
        .collect();
    times.sort_unstable();
    Measured { rows: 0, times }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Compares the medians with the budget.
fn verdict(measured: &[Measured]) -> String {
    let mut text = String::new();
    for (rows, budget) in BUDGETS {
        let _ = match measured.iter().find(|measured| measured.rows == rows) {
            Some(measured) => {
                let p50 = microseconds(measured.quantile(0.5));
                let relation = if p50 <= budget { "within" } else { "OVER" };
                writeln!(text, "budget  {rows} rows: p50 {p50:.3} us, {relation} the budget of {budget} us")
            }
            None => writeln!(text, "budget  {rows} rows: not measured"),
        };
    }
    if cfg!(debug_assertions) {
        text.push_str(
            "note    this is a debug build of pointsman; calls are much slower than in a release build\n",
        );
    }
    text
}

impl Measured {
    /// Returns the quantile by nearest rank, nanoseconds; 0 without calls.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a rank among at most two million"
    )]
    fn quantile(&self, share: f64) -> u64 {
        let rank = (self.times.len() as f64 * share).ceil() as usize;
        self.times.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }

    #[expect(clippy::cast_precision_loss, reason = "sums of nanoseconds stay below 2^53")]
    fn mean(&self) -> f64 {
        let sum: u64 = self.times.iter().sum();
        sum as f64 / 1e3 / self.times.len().max(1) as f64
    }

    fn line(&self) -> String {
        format!(
            "{:>6} {:>9} {:>9.3} {:>9.3} {:>9.3}",
            self.rows,
            self.times.len(),
            microseconds(self.quantile(0.5)),
            microseconds(self.quantile(0.99)),
            self.mean(),
        )
    }
}

#[expect(clippy::cast_precision_loss, reason = "nanoseconds of one call stay below 2^53")]
fn microseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let measured = Measured { rows: 64, times: (1..=200).collect() };
        assert_eq!((measured.quantile(0.5), measured.quantile(0.99)), (100, 198));
        assert!((measured.mean() - 0.1005).abs() < 1e-9);
        assert_eq!(Measured { rows: 1, times: Vec::new() }.quantile(0.5), 0);
    }

    #[test]
    fn the_verdict_compares_measured_row_counts_with_the_budget() {
        let text = verdict(&[Measured { rows: 64, times: vec![700] }]);
        assert!(text.contains("64 rows: p50 0.700 us, within the budget of 0.7 us"), "{text}");
        assert!(text.contains("1024 rows: not measured"), "{text}");
        let text = verdict(&[Measured { rows: 1_024, times: vec![3_001] }]);
        assert!(text.contains("1024 rows: p50 3.001 us, OVER the budget of 3 us"), "{text}");
    }

    #[test]
    fn seconds_are_bounded() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "NaN", "inf", "soon"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
