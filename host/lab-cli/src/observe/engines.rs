//! Reads the metrics of the engines, at a bounded rate and with a deadline. Nothing is ever posted.

use std::sync::Arc;

use parking_lot::Mutex;
use pointsman_http_client::{BodyError, Roots, Setup, whole};
use pointsman_lab::Window;
use pointsman_rig::metrics_text::{by_label, samples, sum};
use pointsman_workers::{EngineFacts, probe};
use reqwest::Client;
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Duration, Instant, MissedTickBehavior, interval, timeout},
};
use tokio_util::sync::CancellationToken;

use super::writer::Reported;

/// Interval between two readings of an engine.
pub(super) const READ_INTERVAL: Duration = Duration::from_secs(1);
/// How long a reading may take.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// Largest answer of `/metrics`, bytes.
pub(super) const MAX_METRICS: usize = 4 * 1024 * 1024;
/// Windows that are kept of an engine. Beyond it, pairs of neighbours are joined.
const MAX_WINDOWS: usize = 7_200;
/// Windows that are summed before engines are fitted whose counters move late.
const LATE_WINDOWS: usize = 60;
/// Names of models that are kept, and the length of a name.
const MAX_MODELS: usize = 64;
const MAX_MODEL_NAME: usize = 256;

/// What the metrics of an engine said.
#[derive(Debug, Default)]
pub(super) struct EngineLog {
    pub(super) url: String,
    /// What the engine did between readings, with the time of the later one from the start.
    pub(super) windows: Vec<(Duration, Window)>,
    pub(super) facts: EngineFacts,
    pub(super) readings: u64,
    pub(super) failures: u64,
    /// Those that failed because the answer was too large.
    pub(super) too_large: u64,
    /// Whether the counters of tokens move at the ends of requests (SGLang), not in each step.
    pub(super) has_late_counters: bool,
    /// Whether the engine has histograms of latencies.
    pub(super) has_latencies: bool,
}

/// Values of counters, and of the queue's length.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Reading {
    first_tokens: f64,
    ttft_s: f64,
    intervals: f64,
    itl_s: f64,
    prompt_tokens: f64,
    generated_tokens: f64,
    queried_tokens: f64,
    cached_tokens: f64,
    waiting: f64,
}

impl EngineLog {
    /// Reads an engine until `stop`. `start` is the start of the observation. `first` gets the URL and the
    /// problem of the first reading.
    pub(super) async fn follow(
        url: String,
        start: Instant,
        reported: Arc<Mutex<Reported>>,
        first: mpsc::Sender<(String, Option<ReadError>)>,
        stop: CancellationToken,
    ) -> anyhow::Result<Self> {
        let mut setup = Setup { connect_timeout: READ_TIMEOUT, ..Setup::default() };
        if url.starts_with("http://") {
            setup.roots = Roots::None;
        }
        let http = setup.build()?;
        let mut log = Self { url: url.clone(), ..Self::default() };
        let (mut last, mut first) = (None::<(Duration, Reading)>, Some(first));
        let mut ticks = interval(READ_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_over = stop.run_until_cancelled(ticks.tick()).await.is_none();
            // The last reading completes the last window.
            let read = timeout(READ_TIMEOUT, read(&http, &url)).await;
            log.readings += 1;
            let read = read.unwrap_or(Err(ReadError::Failed));
            if let Some(first) = first.take() {
                // The receiver waits for every engine.
                let _ = first.send((url.clone(), read.as_ref().err().copied())).await;
            }
            match read {
                Ok(text) => {
                    let (now, reading) = (start.elapsed(), Reading::of(&text));
                    log.learn(&text, &reported);
                    if let Some((before, earlier)) = last {
                        log.add(now, reading.since(&earlier, now - before), &reported);
                    }
                    last = Some((now, reading));
                }
                Err(error) => {
                    log.failures += 1;
                    log.too_large += u64::from(error == ReadError::TooLarge);
                }
            }
            if is_over {
                return Ok(log);
            }
        }
    }

    /// Learns what does not change, or rarely.
    fn learn(&mut self, text: &str, reported: &Mutex<Reported>) {
        self.has_latencies |= ["vllm", "sglang"]
            .iter()
            .any(|prefix| !samples(text, &format!("{prefix}:time_to_first_token_seconds_count")).is_empty());
        self.has_late_counters |= !samples(text, "sglang:prompt_tokens_total").is_empty();
        self.facts = probe::facts_of_vllm_metrics(text.as_bytes()).or(&self.facts);
        let names = ["vllm:num_requests_running", "sglang:num_running_reqs"];
        let models = names.iter().flat_map(|name| by_label(text, name, "model_name")).map(|(model, _)| model);
        let mut reported = reported.lock();
        for model in models.filter(|model| model.len() <= MAX_MODEL_NAME) {
            if reported.models.len() < MAX_MODELS {
                reported.models.insert(model);
            }
        }
    }

    /// Adds a window; `None` when the engine was restarted within it.
    fn add(&mut self, now: Duration, window: Option<Window>, reported: &Mutex<Reported>) {
        let Some(window) = window else { return };
        reported.lock().outputs(window.generated_tokens, window.first_tokens);
        self.windows.push((now, window));
        if self.windows.len() > MAX_WINDOWS {
            let pairs = self.windows.chunks(2).filter_map(|pair| {
                let (first, rest) = pair.split_first()?;
                let mut joined = *first;
                for (at, window) in rest {
                    joined.0 = *at;
                    joined.1.add(window);
                }
                Some(joined)
            });
            self.windows = pairs.collect();
        }
    }

    /// Returns the sum of all windows.
    pub(super) fn total(&self) -> Window {
        sum_of(&self.windows)
    }

    /// Returns the windows to which the engine's model can be fitted. Tokens that are counted at the end of a
    /// request belong to earlier seconds: sums over a minute have most of them in the right place.
    ///
    /// What several ranks did in a time is what one of them does in as many times of this length.
    pub(super) fn fitted_windows(&self) -> impl Iterator<Item = Window> {
        let size = if self.has_late_counters { LATE_WINDOWS } else { 1 };
        let sums = self.windows.chunks_exact(size).map(sum_of);
        let ranks = f64::from(self.ranks());
        sums.map(move |window| Window { seconds: window.seconds * ranks, ..window })
    }

    /// Returns the number of data-parallel ranks, each of which has a cache and a scheduler of its own.
    pub(super) fn ranks(&self) -> u32 {
        self.facts.dp_size.unwrap_or(1).max(1)
    }
}

/// Tasks that read the engines, each with its engine's position.
pub(super) type Following = JoinSet<(usize, anyhow::Result<EngineLog>)>;

/// Returns what the tasks read, in the order of the engines.
pub(super) async fn in_order(following: Following) -> anyhow::Result<Vec<EngineLog>> {
    let mut logs = following.join_all().await;
    logs.sort_by_key(|(place, _)| *place);
    logs.into_iter().map(|(_, log)| log).collect()
}

fn sum_of(windows: &[(Duration, Window)]) -> Window {
    windows.iter().fold(Window::default(), |mut sum, (_, window)| {
        sum.add(window);
        sum
    })
}

/// Why an engine could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ReadError {
    #[error("has more than {} MiB", MAX_METRICS >> 20)]
    TooLarge,
    #[error("does not answer with 200")]
    Failed,
    #[error("has no metrics of vLLM or SGLang")]
    OfNoEngine,
}

async fn read(http: &Client, url: &str) -> Result<String, ReadError> {
    let failed = |_| ReadError::Failed;
    let response = http.get(format!("{url}/metrics")).send().await.map_err(failed)?;
    let response = response.error_for_status().map_err(failed)?;
    let body = whole(response, MAX_METRICS).await.map_err(|error| match error {
        BodyError::TooLarge(_) => ReadError::TooLarge,
        BodyError::Broken(_) => ReadError::Failed,
    })?;
    let text = with_own_names(String::from_utf8(body).map_err(|_| ReadError::Failed)?);
    if text.contains("vllm:") || text.contains("sglang:") { Ok(text) } else { Err(ReadError::OfNoEngine) }
}

/// Gives metrics the names that vLLM and SGLang write. Ray puts `ray_` in front of them, and an underscore
/// may stand for the colon.
fn with_own_names(text: String) -> String {
    if !["ray_", "vllm_", "sglang_"].iter().any(|other| text.contains(other)) {
        return text;
    }
    let renamed = |line: &str| {
        let name = line.strip_prefix("ray_").unwrap_or(line);
        let of = |engine: &str| {
            let name = name.strip_prefix(engine)?.strip_prefix([':', '_'])?;
            Some(format!("{engine}:{name}\n"))
        };
        of("vllm").or_else(|| of("sglang")).unwrap_or_else(|| format!("{line}\n"))
    };
    text.lines().map(renamed).collect()
}

impl Reading {
    fn of(text: &str) -> Self {
        // An engine has the metrics of one of the two.
        let value = |vllm: &str, sglang: &str| {
            let of = |prefix: &str, name: &str| sum(text, &format!("{prefix}:{name}"));
            let sglang = if sglang.is_empty() { 0.0 } else { of("sglang", sglang) };
            of("vllm", vllm) + sglang
        };
        let both = |name: &str| value(name, name);
        // vLLM before 0.11 has the older name.
        let older = |name: &str| sum(text, &format!("vllm:time_per_output_token_seconds_{name}"));
        let intervals = both("inter_token_latency_seconds_count");
        let is_older = intervals == 0.0;
        Self {
            first_tokens: both("time_to_first_token_seconds_count"),
            ttft_s: both("time_to_first_token_seconds_sum"),
            intervals: if is_older { older("count") } else { intervals },
            itl_s: if is_older { older("sum") } else { both("inter_token_latency_seconds_sum") },
            prompt_tokens: both("prompt_tokens_total"),
            generated_tokens: both("generation_tokens_total"),
            queried_tokens: value("prefix_cache_queries_total", "prompt_tokens_total"),
            cached_tokens: value("prefix_cache_hits_total", "cached_tokens_total"),
            waiting: value("num_requests_waiting", "num_queue_reqs"),
        }
    }

    /// Returns what happened since an earlier reading; `None` when a counter fell.
    fn since(&self, earlier: &Self, time: Duration) -> Option<Window> {
        let grown = |now: f64, before: f64| (now >= before).then_some(now - before);
        Some(Window {
            seconds: time.as_secs_f64(),
            first_tokens: grown(self.first_tokens, earlier.first_tokens)?,
            ttft_s: grown(self.ttft_s, earlier.ttft_s)?,
            intervals: grown(self.intervals, earlier.intervals)?,
            itl_s: grown(self.itl_s, earlier.itl_s)?,
            prompt_tokens: grown(self.prompt_tokens, earlier.prompt_tokens)?,
            generated_tokens: grown(self.generated_tokens, earlier.generated_tokens)?,
            queried_tokens: grown(self.queried_tokens, earlier.queried_tokens)?,
            cached_tokens: grown(self.cached_tokens, earlier.cached_tokens)?,
            waiting: self.waiting.max(earlier.waiting),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VLLM: &str = "vllm:num_requests_waiting{model_name=\"m\"} 2.0\n\
        vllm:time_to_first_token_seconds_bucket{le=\"0.1\",model_name=\"m\"} 9.0\n\
        vllm:time_to_first_token_seconds_sum{model_name=\"m\"} 1.5\n\
        vllm:time_to_first_token_seconds_count{model_name=\"m\"} 10.0\n\
        vllm:time_per_output_token_seconds_sum{model_name=\"m\"} 4.0\n\
        vllm:time_per_output_token_seconds_count{model_name=\"m\"} 200.0\n\
        vllm:prompt_tokens_total{model_name=\"m\"} 5000.0\n\
        vllm:prefix_cache_queries_total{model_name=\"m\"} 5000.0\n\
        vllm:prefix_cache_hits_total{model_name=\"m\"} 1000.0\n";

    #[test]
    fn counters_of_vllm_and_sglang_are_read() {
        let vllm = Reading::of(VLLM);
        assert_eq!((vllm.first_tokens, vllm.ttft_s, vllm.waiting), (10.0, 1.5, 2.0));
        assert_eq!((vllm.intervals, vllm.itl_s), (200.0, 4.0));
        assert_eq!((vllm.queried_tokens, vllm.cached_tokens), (5000.0, 1000.0));
        let sglang = "sglang:prompt_tokens_total{a=\"b\"} 70\nsglang:cached_tokens_total{a=\"b\"} 30\n\
                      sglang:inter_token_latency_seconds_count{a=\"b\"} 4\n";
        let sglang = Reading::of(sglang);
        assert_eq!((sglang.queried_tokens, sglang.cached_tokens, sglang.intervals), (70.0, 30.0, 4.0));
    }

    #[test]
    fn names_of_ray_are_those_of_the_engine() {
        // S5.16
        for name in ["ray_vllm:", "ray_vllm_", "vllm_"] {
            let text = with_own_names(VLLM.replace("vllm:", name));
            assert_eq!(text, VLLM, "{name}");
        }
        let sglang = "# TYPE ray_x gauge\nray_x{a=\"vllm_1\"} 1\nsglang:prompt_tokens_total{a=\"ray_\"} 70\n";
        assert_eq!(with_own_names(sglang.to_owned()), sglang);
    }

    #[test]
    fn the_ranks_of_an_engine_share_what_it_did() {
        let second = Window { seconds: 1.0, itl_s: 8.0, ..Window::default() };
        let mut log = EngineLog { windows: vec![(Duration::ZERO, second)], ..EngineLog::default() };
        log.learn(
            "vllm:num_requests_running{engine=\"0\"} 1\nvllm:num_requests_running{engine=\"1\"} 1\n",
            &Mutex::default(),
        );
        // S5.17
        assert_eq!(log.ranks(), 2);
        assert_eq!(log.fitted_windows().next(), Some(Window { seconds: 2.0, ..second }));
    }

    #[test]
    fn counters_that_move_at_the_ends_of_requests_are_summed_over_a_minute() {
        let vllm = EngineLog { windows: vec![Default::default(); 150], ..EngineLog::default() };
        assert_eq!(vllm.fitted_windows().count(), 150);
        let second = Window { seconds: 1.0, first_tokens: 2.0, ..Window::default() };
        let mut sglang = EngineLog { windows: vec![(Duration::ZERO, second); 150], ..EngineLog::default() };
        sglang.learn("sglang:prompt_tokens_total{a=\"b\"} 70\n", &Mutex::default());
        let sums: Vec<_> = sglang.fitted_windows().map(|sum| (sum.seconds, sum.first_tokens)).collect();
        assert_eq!(sums, [(60.0, 120.0), (60.0, 120.0)], "the rest of a minute has tokens of others");
    }

    #[test]
    fn a_restart_is_no_window_and_old_windows_are_joined() {
        let reading = Reading::of(VLLM);
        let second = Duration::from_secs(1);
        assert_eq!(Reading::default().since(&reading, second), None);
        let window = reading.since(&Reading::default(), second).unwrap();
        let (mut log, reported) = (EngineLog::default(), Mutex::default());
        for at in 0..=MAX_WINDOWS as u64 {
            log.add(Duration::from_secs(at), Some(window), &reported);
        }
        assert_eq!(log.windows.len(), MAX_WINDOWS / 2 + 1);
        assert_eq!(log.total().first_tokens, 10.0 * (MAX_WINDOWS + 1) as f64);
    }
}
