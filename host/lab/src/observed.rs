//! An observed router: fits engines to what their metrics say, and runs the assignment of requests to engines
//! that was observed.

use serde::Serialize;

use crate::{
    calibrate::least_squares::{Row, solve},
    fleet::{Fleet, StepTimeSpec},
    monitor::Monitor,
    outcome::Place,
    prepared::prepare,
    run::{RunError, RunOptions, RunResult, run_assigned},
    trace::Trace,
};

/// Order in which the coefficients are determined: step, new token, request, sequence.
const ORDER: [usize; 4] = [1, 3, 0, 2];
/// Minimum number of token intervals in a window that is fitted.
const LEAST_INTERVALS: f64 = 4.0;
/// Number of equations below which nothing is fitted.
const LEAST_ROWS: usize = 6;

/// What an engine did between two readings of its metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Window {
    /// Time between the readings, seconds.
    pub seconds: f64,
    /// Number of first tokens.
    pub first_tokens: f64,
    /// Sum of their times to first token, seconds.
    pub ttft_s: f64,
    /// Number of intervals between two tokens of a request.
    pub intervals: f64,
    /// Sum of these intervals, seconds.
    pub itl_s: f64,
    /// Prompt tokens, cached ones included.
    pub prompt_tokens: f64,
    /// Generated tokens.
    pub generated_tokens: f64,
    /// Prompt tokens that were looked up in the prefix cache.
    pub queried_tokens: f64,
    /// Prompt tokens that were found there.
    pub cached_tokens: f64,
    /// Requests that waited at either reading.
    pub waiting: f64,
}

impl Window {
    /// Adds what the engine did in the window that follows.
    pub fn add(&mut self, next: &Self) {
        self.seconds += next.seconds;
        self.first_tokens += next.first_tokens;
        self.ttft_s += next.ttft_s;
        self.intervals += next.intervals;
        self.itl_s += next.itl_s;
        self.prompt_tokens += next.prompt_tokens;
        self.generated_tokens += next.generated_tokens;
        self.queried_tokens += next.queried_tokens;
        self.cached_tokens += next.cached_tokens;
        self.waiting = self.waiting.max(next.waiting);
    }

    /// Returns the prompt tokens that were computed.
    #[must_use]
    pub(crate) fn computed_tokens(&self) -> f64 {
        (self.prompt_tokens - self.cached_tokens).max(0.0)
    }

    /// Returns the mean number of sequences that decode (Little's law), at least 1.
    fn sequences(&self) -> f64 {
        (self.itl_s / self.seconds.max(1e-3)).max(1.0)
    }

    /// Returns the mean number of prompt tokens in a step.
    fn new_tokens(&self) -> f64 {
        let steps = self.intervals / self.sequences();
        if steps >= 1.0 { self.computed_tokens() / steps } else { 0.0 }
    }

    /// A token interval is a step: `c0 + c1*B + c3*n`.
    fn interval(&self) -> Option<Row<4>> {
        let mean_ms = 1e3 * self.itl_s / self.intervals;
        (self.intervals >= LEAST_INTERVALS && mean_ms > 0.0).then(|| Row {
            features: [0.0, 1.0, self.sequences(), self.new_tokens()],
            value: mean_ms,
            scale: mean_ms,
        })
    }

    /// The time to first token of a request that did not wait is its overhead, the rest of a running step,
    /// and the steps of its own prompt.
    fn first_token(&self, max_batched_tokens: f64) -> Option<Row<4>> {
        let mean_ms = 1e3 * self.ttft_s / self.first_tokens;
        let own = self.computed_tokens() / self.first_tokens;
        let busy = (self.itl_s / self.seconds.max(1e-3)).min(1.0);
        let (steps, sequences) = ((own / max_batched_tokens).ceil().max(1.0), self.sequences());
        (self.first_tokens >= 1.0 && mean_ms > 0.0 && self.waiting < 1.0).then(|| Row {
            features: [
                1.0,
                steps + busy / 2.0,
                steps + sequences * busy / 2.0,
                own + self.new_tokens() * busy / 2.0,
            ],
            value: mean_ms,
            scale: mean_ms,
        })
    }
}

/// What was fitted to the metrics of equal engines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WindowFit {
    /// Duration of a step.
    pub step_time: StepTimeSpec,
    /// Time of a request outside of steps, milliseconds.
    pub request_overhead_ms: f64,
    /// Number of equations.
    pub equations: usize,
}

/// Fits equal engines to what their metrics say. Returns `None` when there are too few readings, or the
/// engines have no such metrics.
#[must_use]
pub fn fit_windows<'a>(
    windows: impl Iterator<Item = &'a Window>,
    max_batched_tokens: u32,
) -> Option<WindowFit> {
    let limit = f64::from(max_batched_tokens.max(1));
    let rows: Vec<Row<4>> =
        windows.flat_map(|window| window.interval().into_iter().chain(window.first_token(limit))).collect();
    if rows.len() < LEAST_ROWS {
        return None;
    }
    let [request_overhead_ms, c0, c1, c3] = solve(&rows, &ORDER).values;
    let step_time = StepTimeSpec::Linear { c0, c1, c2: 0.0, c3, c4: 0.0 };
    (c0 + c1 + c3 > 0.0).then_some(WindowFit { step_time, request_overhead_ms, equations: rows.len() })
}

/// Runs a trace with the engine that was observed for each request, by its position in the fleet. Each
/// request arrives at its time.
///
/// # Errors
/// [`RunError`] when the fleet is not valid.
pub fn run_observed(engines: &[u32], trace: &Trace, fleet: &Fleet) -> Result<RunResult, RunError> {
    let places: Vec<Place> = engines.iter().map(|engine| Place::whole(*engine)).collect();
    let options = RunOptions { fixed_schedule: true, ..RunOptions::default() };
    run_assigned(&places, trace, &prepare(trace, fleet.block_tokens), fleet, options, &Monitor::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A window of an engine whose requests take 5 ms, and whose steps take `10 + 0.5*B + 0.02*n` ms:
    /// `sequences` decode, and `arrivals` prompts of `length` tokens come in a second.
    fn window(sequences: f64, arrivals: f64, length: f64) -> Window {
        // In each second, `arrivals * length` tokens are computed in steps of equal length.
        let step_ms = (10.0 + 0.5 * sequences) / (1.0 - 0.02 * arrivals * length / 1e3);
        let steps = 1e3 / step_ms;
        let own = 5.0 + 10.0 + 0.5 + 0.02 * length;
        let rest = 10.0 + 0.5 * sequences + 0.02 * arrivals * length / steps;
        Window {
            seconds: 1.0,
            first_tokens: arrivals,
            ttft_s: arrivals * (own + rest / 2.0) / 1e3,
            intervals: steps * sequences,
            itl_s: sequences,
            prompt_tokens: arrivals * length,
            queried_tokens: arrivals * length,
            ..Window::default()
        }
    }

    #[test]
    fn the_step_time_is_found_from_rates_and_means() {
        let windows: Vec<Window> = (1..40)
            .map(|at| window(f64::from(at % 7 + 1), f64::from(at % 3 + 1), f64::from(200 + 100 * (at % 5))))
            .collect();
        let found = fit_windows(windows.iter(), 8_192).unwrap();
        let StepTimeSpec::Linear { c0, c1, c3, .. } = found.step_time else { panic!("{found:?}") };
        assert!((found.request_overhead_ms - 5.0).abs() < 0.2, "{found:?}");
        assert!((c0 - 10.0).abs() < 0.2 && (c1 - 0.5).abs() < 0.05 && (c3 - 0.02).abs() < 0.001, "{found:?}");
        assert_eq!(found.equations, 78);
        assert_eq!(fit_windows(windows.iter().take(2), 8_192), None);
        assert_eq!(fit_windows([Window::default(); 9].iter(), 8_192), None);
    }
}
