//! Load, progress and state of an engine, as its metrics report them. No I/O.
//!
//! `docs/engine-metrics.md` lists the names by engine and version.

use std::collections::BTreeMap;

use super::{
    exposition::samples,
    gauges::{Gauge, Gauges},
    load_figures::{LoadFigures, is, is_part, rank_label},
};
use crate::activity::{EngineProgress, EngineSigns};

/// A counter of progress: its names, and where its total is kept. SGLang counts prompt and generated tokens
/// when a request ends, and `realtime_tokens_total` at each step that it logs.
type Counter = (&'static [&'static str], fn(&mut EngineProgress) -> &mut Option<u64>);
const COUNTERS: [Counter; 4] = [
    (&["vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "trtllm:prompt_tokens_total"], |progress| {
        &mut progress.prompt_tokens
    }),
    (
        &["vllm:generation_tokens_total", "sglang:generation_tokens_total", "trtllm:generation_tokens_total"],
        |progress| &mut progress.generation_tokens,
    ),
    (
        &["vllm:request_success_total", "sglang:num_requests_total", "trtllm:request_success_total"],
        |progress| &mut progress.finished_requests,
    ),
    (&["sglang:realtime_tokens_total"], |progress| &mut progress.step_tokens),
];
/// When counters were created. It stands for the start of a process that does not report its own.
const CREATED: [&str; 3] =
    ["vllm:prompt_tokens_created", "sglang:prompt_tokens_created", "trtllm:prompt_tokens_created"];
const SLEEP_STATE: [&str; 1] = ["vllm:engine_sleep_state"];

/// Figures of an engine's metrics; `None` for those that are missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Figures {
    /// Those of all ranks together.
    pub(super) whole: LoadFigures,
    /// Those of each rank, by its label; empty if no gauge has such a label.
    pub(super) ranks: BTreeMap<u32, LoadFigures>,
    /// Whether the engine sleeps.
    pub(super) asleep: Option<bool>,
    /// When the process started, seconds since 1970.
    pub(super) started: Option<f64>,
    /// When the first of its counters was created.
    pub(super) created: Option<f64>,
}

impl Figures {
    /// Returns the figures of a rank, the label of whose worker's first rank is `first`. If no gauge has such
    /// labels, the figures of all ranks together stand for those of each.
    pub(super) fn of_rank(&self, rank: u32, first: u32) -> LoadFigures {
        if self.ranks.is_empty() {
            return self.whole;
        }
        self.ranks.get(&first.saturating_add(rank)).copied().unwrap_or_default()
    }

    /// Returns the figures that move while the engine works; `None` if it reports none.
    pub(super) fn signs(&self) -> Option<EngineSigns> {
        let LoadFigures { progress, kv_usage, kv_tokens, running, .. } = self.whole;
        let is_running = running.is_some_and(|running| running > 0);
        let signs = EngineSigns { progress, kv_usage, kv_tokens, is_running };
        (progress.is_known() || self.whole.has_load()).then_some(signs)
    }

    /// Returns whether these are figures of another process than the `earlier` ones: it started or made its
    /// counters at another time, or its counters have begun again.
    pub(super) fn of_another_process(&self, earlier: &Self) -> bool {
        let times = [(self.started, earlier.started), (self.created, earlier.created)];
        let told = times.into_iter().find_map(|(now, before)| now.zip(before));
        match told {
            #[expect(clippy::float_cmp, reason = "a process repeats the digits that it once computed")]
            Some((now, before)) => now != before,
            None => self.whole.progress.is_behind(&earlier.whole.progress),
        }
    }
}

/// Reads the figures of an engine and of each of its data-parallel ranks. If one rank has several series (of
/// its tensor-parallel ranks, for example), the highest counts. In the figures of the whole engine, requests
/// and tokens of its ranks are added, and of their cache usage the highest counts.
pub(super) fn figures(metrics: &[u8]) -> Figures {
    let (mut figures, mut gauges) = (Figures::default(), Gauges::new());
    let mut progress: BTreeMap<&str, EngineProgress> = BTreeMap::new();
    for sample in samples(metrics).filter(|sample| sample.value.is_finite() && sample.value >= 0.0) {
        gauges.all().for_each(|gauge| gauge.add(&sample));
        if let Some(total) = counter(sample.name).filter(|_| !is_part(&sample)) {
            let of_rank = progress.entry(rank_label(&sample)).or_default();
            for progress in [of_rank, &mut figures.whole.progress] {
                add(total(progress), sample.value);
            }
        } else if is_one_of(sample.name, &SLEEP_STATE) {
            let sleeps = sample.label("sleep_state") == Some("awake") && sample.value == 0.0;
            figures.asleep = Some(sleeps || figures.asleep == Some(true));
        } else if sample.name == "process_start_time_seconds" {
            figures.started = Some(figures.started.map_or(sample.value, |other| other.max(sample.value)));
        } else if is_one_of(sample.name, &CREATED) {
            // Further series of a counter are created later.
            figures.created = Some(figures.created.map_or(sample.value, |other| other.min(sample.value)));
        }
    }
    let whole = gauges.load(Gauge::total, Gauge::highest);
    figures.whole = LoadFigures { progress: figures.whole.progress, ..whole };
    let of_rank = |label: u32| {
        let own = progress.iter().find(|(rank, _)| rank.parse() == Ok(label));
        let progress = own.map(|(_, own)| *own).or_else(|| progress.get("").copied());
        let own = |gauge: &Gauge<'_>| gauge.of(label);
        (label, LoadFigures { progress: progress.unwrap_or_default(), ..gauges.load(own, own) })
    };
    figures.ranks = gauges.labels().map(of_rank).collect();
    figures
}

/// Returns where the total of a counter of this name is kept.
fn counter(name: &str) -> Option<fn(&mut EngineProgress) -> &mut Option<u64>> {
    COUNTERS.iter().find(|(names, _)| is_one_of(name, names)).map(|(_, total)| *total)
}

/// Adds a counter's sample to its total.
fn add(total: &mut Option<u64>, sample: f64) {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
    let value = sample as u64;
    *total = Some(total.unwrap_or(0).saturating_add(value));
}

fn is_one_of(name: &str, names: &[&str]) -> bool {
    names.iter().any(|known| is(name, known))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> (Option<u32>, Option<u32>, Option<f32>) {
        let figures = figures(text.as_bytes()).whole;
        (figures.running, figures.waiting, figures.kv_usage)
    }

    #[test]
    fn figures_of_a_real_engine_are_read() {
        let read = figures(include_bytes!("../../../../tests/fixtures/engines/metrics.txt"));
        assert_eq!(
            (read.whole.running, read.whole.waiting, read.whole.kv_usage),
            (Some(0), Some(0), Some(0.0))
        );
        assert_eq!((read.whole.progress.prompt_tokens, read.asleep), (Some(1_306), Some(false)));
        assert_eq!((read.started, read.created), (Some(1.7952338661e9), Some(1.795233966858278e9)));
    }

    #[test]
    fn figures_of_a_real_sglang_and_of_a_real_pair_are_read() {
        let read =
            figures(include_bytes!("../../../../tests/fixtures/engines/sglang-0.5.23/plain-metrics.txt"));
        assert_eq!(
            (read.whole.running, read.whole.waiting, read.whole.kv_usage),
            (Some(0), Some(0), Some(0.0))
        );
        // It counts streamed and whole answers apart.
        assert_eq!((read.whole.progress.prompt_tokens, read.whole.kv_tokens), (Some(77), Some(0)));
        let read = figures(include_bytes!("../../../../tests/fixtures/engines/vllm-0.33/decode-metrics.txt"));
        assert_eq!((read.whole.running, read.whole.waiting, read.asleep), (Some(0), Some(0), Some(false)));
        assert!(read.whole.kv_usage.is_some() && read.started.is_some(), "{read:?}");
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
        let read = figures(vllm.as_bytes());
        let of_rank = |rank, first| {
            let figures = read.of_rank(rank, first);
            (figures.running, figures.waiting, figures.kv_usage)
        };
        assert_eq!([of_rank(0, 0), of_rank(1, 0)], [(Some(1), None, Some(0.25)), (Some(2), None, Some(0.5))]);
        assert_eq!([of_rank(0, 1), of_rank(1, 1)], [(Some(2), None, Some(0.5)), (None, None, None)]);
        let priorities = "sglang:num_queue_reqs{priority=\"\"} 3\nsglang:num_queue_reqs{priority=\"1\"} 3\n";
        assert_eq!(load(priorities).1, Some(3));
    }

    #[test]
    fn b8_a_rank_has_the_counts_of_its_label_or_those_of_the_engine() {
        let text = "vllm:num_requests_running{engine=\"0\"} 1\nvllm:num_requests_running{engine=\"1\"} 2\n\
                    vllm:prompt_tokens_total{engine=\"1\"} 3\nvllm:prompt_tokens_total{engine=\"0\"} 4\n\
                    vllm:num_requests_waiting 7\n";
        let read = figures(text.as_bytes());
        let tokens = |read: &Figures, rank| read.of_rank(rank, 0).progress.prompt_tokens;
        // B8.2
        assert_eq!([tokens(&read, 0), tokens(&read, 1)], [Some(4), Some(3)]);
        assert_eq!((read.whole.progress.prompt_tokens, read.of_rank(1, 0).waiting), (Some(7), Some(7)));
        let sglang = "sglang:num_running_reqs{dp_rank=\"1\"} 5\nsglang:prompt_tokens_total{a=\"b\"} 3\n";
        assert_eq!(tokens(&figures(sglang.as_bytes()), 1), Some(3));
        let one = figures(b"trtllm_num_requests_running 4\n");
        assert_eq!((one.of_rank(0, 0).running, one.of_rank(1, 0).running), (Some(4), Some(4)));
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
        assert_eq!(figures(b"sglang:num_used_tokens 1e300").whole.kv_tokens, None);
        assert!(!figures(b"# nothing\nother 1\n").whole.has_load());
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
