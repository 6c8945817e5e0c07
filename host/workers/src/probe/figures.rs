//! Load, progress and state of an engine, as its metrics report them. No I/O.
//!
//! `docs/engine-metrics.md` lists the names by engine and version.

use std::collections::BTreeMap;

use super::exposition::{Sample, samples};
use crate::activity::{EngineProgress, EngineSigns};

/// Names of the gauges, the preferred ones first: engines renamed some, and a version may have both. A colon
/// stands for a colon or an underscore, and Ray puts `ray_` in front.
const RUNNING: [&str; 3] =
    ["vllm:num_requests_running", "sglang:num_running_reqs", "trtllm:num_requests_running"];
const WAITING: [&str; 3] =
    ["vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm:num_requests_waiting"];
/// The same of queues beside it, in SGLang's pairs: prefill waits for a partner, decode waits for memory and
/// then for the KV blocks. Requests in the queue `prefill_inflight` have been prefilled.
const PAIR_QUEUES: [&[&str]; 3] = [
    &["sglang:num_prefill_bootstrap_queue_reqs", "sglang:num_prefill_prealloc_queue_reqs"],
    &["sglang:num_decode_prealloc_queue_reqs"],
    &["sglang:num_decode_transfer_queue_reqs"],
];
const KV_USAGE: [&str; 4] = [
    "vllm:kv_cache_usage_perc",
    "sglang:token_usage",
    "trtllm:kv_cache_utilization",
    "vllm:gpu_cache_usage_perc",
];
/// Largest number of tokens in an engine's KV cache that is believed: integers are exact up to it.
const MAX_TOKENS: f64 = (1_u64 << 53) as f64;
/// SGLang rounds its share to hundredths.
const KV_TOKENS: [&str; 1] = ["sglang:num_used_tokens"];
/// Names of the counters.
const PROMPT_TOKENS: [&str; 3] =
    ["vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "trtllm:prompt_tokens_total"];
const GENERATION_TOKENS: [&str; 3] =
    ["vllm:generation_tokens_total", "sglang:generation_tokens_total", "trtllm:generation_tokens_total"];
const FINISHED: [&str; 3] =
    ["vllm:request_success_total", "sglang:num_requests_total", "trtllm:request_success_total"];
/// SGLang counts the tokens above when a request ends, and these at each step that it logs.
const STEP_TOKENS: [&str; 1] = ["sglang:realtime_tokens_total"];
/// When counters were created. It stands for the start of a process that does not report its own.
const CREATED: [&str; 3] =
    ["vllm:prompt_tokens_created", "sglang:prompt_tokens_created", "trtllm:prompt_tokens_created"];
const SLEEP_STATE: [&str; 1] = ["vllm:engine_sleep_state"];

/// Figures of an engine's metrics; `None` for those that are missing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Figures {
    pub(super) running: Option<u32>,
    pub(super) waiting: Option<u32>,
    pub(super) kv_usage: Option<f32>,
    pub(super) kv_tokens: Option<u64>,
    /// Whether the engine sleeps.
    pub(super) asleep: Option<bool>,
    pub(super) progress: EngineProgress,
    /// When the process started, seconds since 1970.
    pub(super) started: Option<f64>,
    /// When the first of its counters was created.
    pub(super) created: Option<f64>,
}

impl Figures {
    /// Returns whether any load figure is known.
    pub(super) fn has_load(&self) -> bool {
        self.running.is_some() || self.waiting.is_some() || self.kv_usage.is_some()
    }

    /// Returns the figures that move while the engine works; `None` if it reports none.
    pub(super) fn signs(&self) -> Option<EngineSigns> {
        let Self { progress, kv_usage, kv_tokens, .. } = *self;
        let is_running = self.running.is_some_and(|running| running > 0);
        let signs = EngineSigns { progress, kv_usage, kv_tokens, is_running };
        (progress.is_known() || self.has_load()).then_some(signs)
    }

    /// Returns whether these are figures of another process than the `earlier` ones: it started or made its
    /// counters at another time, or its counters have begun again.
    pub(super) fn of_another_process(&self, earlier: &Self) -> bool {
        let times = [(self.started, earlier.started), (self.created, earlier.created)];
        let told = times.into_iter().find_map(|(now, before)| now.zip(before));
        match told {
            #[expect(clippy::float_cmp, reason = "a process repeats the digits that it once computed")]
            Some((now, before)) => now != before,
            None => self.progress.is_behind(&earlier.progress),
        }
    }
}

/// Reads the figures of an engine. If one data-parallel rank has several series (of its tensor-parallel
/// ranks, for example), the highest counts. Running and waiting requests of data-parallel ranks are added,
/// and of their cache usage the highest counts.
pub(super) fn figures(metrics: &[u8]) -> Figures {
    let mut figures = Figures::default();
    let [mut running, mut waiting, mut usage, mut tokens] =
        [Gauge::new(&RUNNING), Gauge::new(&WAITING), Gauge::new(&KV_USAGE), Gauge::new(&KV_TOKENS)];
    let mut queues = PAIR_QUEUES.map(Gauge::new);
    for sample in samples(metrics).filter(|sample| sample.value.is_finite() && sample.value >= 0.0) {
        for gauge in [&mut running, &mut waiting, &mut usage, &mut tokens].into_iter().chain(&mut queues) {
            gauge.add(&sample);
        }
        let progress = &mut figures.progress;
        add(&PROMPT_TOKENS, &sample, &mut progress.prompt_tokens);
        add(&GENERATION_TOKENS, &sample, &mut progress.generation_tokens);
        add(&FINISHED, &sample, &mut progress.finished_requests);
        add(&STEP_TOKENS, &sample, &mut progress.step_tokens);
        if is_one_of(sample.name, &SLEEP_STATE) {
            let sleeps = sample.label("sleep_state") == Some("awake") && sample.value == 0.0;
            figures.asleep = Some(sleeps || figures.asleep == Some(true));
        } else if sample.name == "process_start_time_seconds" {
            figures.started = Some(figures.started.map_or(sample.value, |other| other.max(sample.value)));
        } else if is_one_of(sample.name, &CREATED) {
            // Further series of a counter are created later.
            figures.created = Some(figures.created.map_or(sample.value, |other| other.min(sample.value)));
        }
    }
    let in_queues: f64 = queues.iter().filter_map(Gauge::total).sum();
    figures.running = running.total().and_then(count);
    figures.waiting = waiting.total().and_then(|waiting| count(waiting + in_queues));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the range")]
    let whole = |tokens: f64| (tokens <= MAX_TOKENS).then_some(tokens as u64);
    figures.kv_tokens = tokens.total().and_then(whole);
    #[expect(clippy::cast_possible_truncation, reason = "a share needs no more precision")]
    let share = |usage: f64| usage as f32;
    figures.kv_usage = usage.highest().filter(|usage| *usage <= 1.0).map(share);
    figures
}

/// The series of a gauge, by data-parallel rank: those of the preferred name that is there.
struct Gauge<'a> {
    names: &'static [&'static str],
    name: usize,
    ranks: BTreeMap<&'a str, f64>,
}

impl<'a> Gauge<'a> {
    fn new(names: &'static [&'static str]) -> Self {
        Self { names, name: names.len(), ranks: BTreeMap::new() }
    }

    fn add(&mut self, sample: &Sample<'a>) {
        let Some(name) = self.names.iter().position(|name| is(sample.name, name)) else { return };
        if name > self.name || is_part(sample) {
            return;
        }
        if name < self.name {
            (self.name, self.ranks) = (name, BTreeMap::new());
        }
        let rank = sample.label("dp_rank").or_else(|| sample.label("engine")).unwrap_or_default();
        let of_rank = self.ranks.entry(rank).or_insert(sample.value);
        *of_rank = of_rank.max(sample.value);
    }

    fn total(&self) -> Option<f64> {
        (!self.ranks.is_empty()).then(|| self.ranks.values().sum())
    }

    fn highest(&self) -> Option<f64> {
        self.ranks.values().copied().reduce(f64::max)
    }
}

/// Adds a sample of a counter to its total.
fn add(names: &[&str], sample: &Sample<'_>, total: &mut Option<u64>) {
    if is_one_of(sample.name, names) && !is_part(sample) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
        let value = sample.value as u64;
        *total = Some(total.unwrap_or(0).saturating_add(value));
    }
}

/// Returns whether the series counts requests of one priority only, which are in the total, too (SGLang).
fn is_part(sample: &Sample<'_>) -> bool {
    sample.label("priority").is_some_and(|priority| !priority.is_empty())
}

fn is_one_of(name: &str, names: &[&str]) -> bool {
    names.iter().any(|known| is(name, known))
}

/// Returns whether `name` is an engine's form of the name `known`.
fn is(name: &str, known: &str) -> bool {
    let name = name.strip_prefix("ray_").unwrap_or(name);
    let Some((engine, figure)) = known.split_once(':') else { return false };
    let Some(rest) = name.strip_prefix(engine) else { return false };
    rest.strip_prefix([':', '_']) == Some(figure)
}

/// Returns a number of requests; `None` if no engine can have as many.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the range")]
fn count(value: f64) -> Option<u32> {
    (value <= f64::from(u32::MAX)).then_some(value as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> (Option<u32>, Option<u32>, Option<f32>) {
        let figures = figures(text.as_bytes());
        (figures.running, figures.waiting, figures.kv_usage)
    }

    #[test]
    fn figures_of_a_real_engine_are_read() {
        let read = figures(include_bytes!("../../../../tests/fixtures/engines/metrics.txt"));
        assert_eq!((read.running, read.waiting, read.kv_usage), (Some(0), Some(0), Some(0.0)));
        assert_eq!((read.progress.prompt_tokens, read.asleep), (Some(1_306), Some(false)));
        assert_eq!((read.started, read.created), (Some(1.7952338661e9), Some(1.795233966858278e9)));
    }

    #[test]
    fn figures_of_a_real_sglang_and_of_a_real_pair_are_read() {
        let read =
            figures(include_bytes!("../../../../tests/fixtures/engines/sglang-0.5.23/plain-metrics.txt"));
        assert_eq!((read.running, read.waiting, read.kv_usage), (Some(0), Some(0), Some(0.0)));
        // It counts streamed and whole answers apart.
        assert_eq!((read.progress.prompt_tokens, read.kv_tokens), (Some(77), Some(0)));
        let read = figures(include_bytes!("../../../../tests/fixtures/engines/vllm-0.33/decode-metrics.txt"));
        assert_eq!((read.running, read.waiting, read.asleep), (Some(0), Some(0), Some(false)));
        assert!(read.kv_usage.is_some() && read.started.is_some(), "{read:?}");
    }

    #[test]
    fn b8_series_of_one_data_parallel_rank_are_not_added() {
        let ranks = |labels: fn(u32) -> String, value: u32| -> String {
            (0..8).map(|rank| format!("sglang:num_running_reqs{{{}}} {value}\n", labels(rank))).collect()
        };
        // B8.2
        assert_eq!(load(&ranks(|rank| format!("dp_rank=\"0\",tp_rank=\"{rank}\""), 10)).0, Some(10));
        assert_eq!(load(&ranks(|rank| format!("pp_rank=\"{rank}\",tp_rank=\"{rank}\""), 10)).0, Some(10));
        assert_eq!(load(&ranks(|rank| format!("dp_rank=\"{rank}\",tp_rank=\"{rank}\""), 10)).0, Some(80));
        let vllm = "vllm:num_requests_running{engine=\"0\"} 1\nvllm:num_requests_running{engine=\"1\"} 2\n\
                    vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n";
        assert_eq!(load(vllm), (Some(3), None, Some(0.5)));
        let priorities = "sglang:num_queue_reqs{priority=\"\"} 3\nsglang:num_queue_reqs{priority=\"1\"} 3\n";
        assert_eq!(load(priorities).1, Some(3));
    }

    #[test]
    fn b8_names_of_every_engine_and_version_are_known() {
        // B8.3
        let old = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\nvllm:gpu_cache_usage_perc 0.5\n";
        assert_eq!(load(old), (Some(1), Some(2), Some(0.5)));
        let both =
            "vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.5\nvllm:gpu_cache_usage_perc 1\n";
        assert_eq!(load(both).2, Some(0.5), "the newer name counts");
        let ray = "ray_vllm_num_requests_running 1\nray_vllm_num_requests_waiting 2\n";
        assert_eq!(load(ray), (Some(1), Some(2), None));
        let sglang = "sglang_num_running_reqs 1\nsglang_num_queue_reqs 2\nsglang_token_usage 0.5\n";
        assert_eq!(load(sglang), (Some(1), Some(2), Some(0.5)));
        let trtllm = "trtllm_num_requests_running 1\ntrtllm_num_requests_waiting 2\n\
                      trtllm_kv_cache_utilization 0.5\ntrtllm_kv_cache_host_utilization 0.9\n";
        assert_eq!(load(trtllm), (Some(1), Some(2), Some(0.5)));
        let others = "vllm:num_requests_waiting_by_reason 9\nmyvllm:num_requests_running 9\n\
                      vllm:num_requests_runnings 9\nvllmxnum_requests_running 9\n";
        assert_eq!(load(others), (None, None, None));
    }

    #[test]
    fn b8_requests_that_wait_in_queues_of_a_pair_are_waiting() {
        let of_ranks = |name: &str, value: u32| {
            format!(
                "sglang:{name}{{dp_rank=\"0\",tp_rank=\"0\"}} {value}\nsglang:{name}{{dp_rank=\"0\",tp_rank=\"1\"}} {value}\n"
            )
        };
        let decode = of_ranks("num_queue_reqs", 1)
            + &of_ranks("num_decode_prealloc_queue_reqs", 120)
            + &of_ranks("num_decode_transfer_queue_reqs", 30);
        // B8.3
        assert_eq!(load(&decode).1, Some(151));
        // Requests in flight have been prefilled, and retracted ones are counted since the last report.
        let prefill = of_ranks("num_queue_reqs", 1)
            + &of_ranks("num_prefill_bootstrap_queue_reqs", 7)
            + &of_ranks("num_prefill_inflight_queue_reqs", 9)
            + &of_ranks("num_retracted_reqs", 9);
        assert_eq!(load(&prefill).1, Some(8));
        let older = of_ranks("num_queue_reqs", 1) + &of_ranks("num_prefill_prealloc_queue_reqs", 7);
        assert_eq!(load(&older).1, Some(8));
        assert_eq!(load(&of_ranks("num_decode_transfer_queue_reqs", 3)).1, None);
    }

    #[test]
    fn b8_a_figure_that_is_no_number_is_unknown() {
        let text = "vllm:num_requests_running NaN\nvllm:num_requests_waiting 1e1 1700000000000\n\
                    vllm:kv_cache_usage_perc +Inf\n";
        // B8.1
        assert_eq!(load(text), (None, Some(10), None));
        assert_eq!(load("vllm:num_requests_running -1\nvllm:kv_cache_usage_perc 1e300").2, None);
        // A share in percent, and a count that no engine has.
        assert_eq!(
            load("vllm:kv_cache_usage_perc 47.5\nvllm:num_requests_waiting 1e300"),
            (None, None, None)
        );
        assert_eq!(load("vllm:kv_cache_usage_perc 1\nvllm:num_requests_running 4294967295").2, Some(1.0));
        assert_eq!(figures(b"sglang:num_used_tokens 1e300").kv_tokens, None);
        assert!(!figures(b"# nothing\nother 1\n").has_load());
    }

    #[test]
    fn a_sleeping_engine_is_recognised() {
        let state = |awake: u8| {
            let of = |name, value| {
                format!("vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"{name}\"}} {value}\n")
            };
            figures((of("awake", awake) + &of("discard_all", 0)).as_bytes()).asleep
        };
        assert_eq!((state(1), state(0)), (Some(false), Some(true)));
        assert_eq!(figures(b"vllm:num_requests_running 1\n").asleep, None);
    }

    #[test]
    fn another_process_has_another_start_or_begins_to_count_again() {
        let read = |text: &str| figures(text.as_bytes());
        let process = |start: &str, tokens: u32| {
            read(&format!("process_start_time_seconds {start}\nvllm:prompt_tokens_total {tokens}\n"))
        };
        let first = process("1.7952338661e+09", 9);
        assert!(!process("1.7952338661e+09", 12).of_another_process(&first));
        assert!(process("1.7952338662e+09", 12).of_another_process(&first));
        let created = |at: u32| {
            read(&format!("vllm:prompt_tokens_created{{a=\"1\"}} {at}\nvllm:prompt_tokens_created 9\n"))
        };
        assert!(!created(8).of_another_process(&created(8)) && created(8).of_another_process(&created(9)));
        let counted =
            |tokens: u32| read(&format!("sglang:prompt_tokens_total{{is_streaming=\"True\"}} {tokens}\n"));
        assert!(!counted(9).of_another_process(&counted(9)) && counted(8).of_another_process(&counted(9)));
        assert!(!read("").of_another_process(&first) && !first.of_another_process(&read("")));
    }
}
