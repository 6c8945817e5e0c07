//! Gauges of load in an engine's metrics, by data-parallel rank. No I/O.

use std::collections::BTreeMap;

use super::{
    exposition::Sample,
    load_figures::{LoadFigures, is, is_part, rank_label},
};
use crate::activity::EngineProgress;

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

/// The gauges of load.
pub(super) struct Gauges<'a> {
    running: Gauge<'a>,
    waiting: Gauge<'a>,
    kv_usage: Gauge<'a>,
    kv_tokens: Gauge<'a>,
    queues: [Gauge<'a>; 3],
}

impl<'a> Gauges<'a> {
    pub(super) fn new() -> Self {
        Self {
            running: Gauge::new(&RUNNING),
            waiting: Gauge::new(&WAITING),
            kv_usage: Gauge::new(&KV_USAGE),
            kv_tokens: Gauge::new(&KV_TOKENS),
            queues: PAIR_QUEUES.map(Gauge::new),
        }
    }

    pub(super) fn all(&mut self) -> impl Iterator<Item = &mut Gauge<'a>> {
        let Self { running, waiting, kv_usage, kv_tokens, queues } = self;
        [running, waiting, kv_usage, kv_tokens].into_iter().chain(queues)
    }

    /// Returns the labels of the ranks that have load figures. A label that is no number names no rank.
    pub(super) fn labels(&self) -> impl Iterator<Item = u32> {
        let gauges = [&self.running, &self.waiting, &self.kv_usage];
        gauges.into_iter().flat_map(|gauge| gauge.ranks.keys().filter_map(|label| label.parse().ok()))
    }

    /// Returns the load by what is read of the gauges of requests and tokens, and of that of cache usage.
    pub(super) fn load(
        &self,
        number: impl Fn(&Gauge<'a>) -> Option<f64>,
        usage: impl Fn(&Gauge<'a>) -> Option<f64>,
    ) -> LoadFigures {
        let in_queues: f64 = self.queues.iter().filter_map(&number).sum();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the range")]
        let whole = |tokens: f64| (tokens <= MAX_TOKENS).then_some(tokens as u64);
        #[expect(clippy::cast_possible_truncation, reason = "a share needs no more precision")]
        let share = |usage: f64| usage as f32;
        LoadFigures {
            running: number(&self.running).and_then(count),
            waiting: number(&self.waiting).and_then(|waiting| count(waiting + in_queues)),
            kv_usage: usage(&self.kv_usage).filter(|usage| *usage <= 1.0).map(share),
            kv_tokens: number(&self.kv_tokens).and_then(whole),
            progress: EngineProgress::default(),
        }
    }
}

/// The series of a gauge, by data-parallel rank: those of the preferred name that is there.
pub(super) struct Gauge<'a> {
    names: &'static [&'static str],
    name: usize,
    ranks: BTreeMap<&'a str, f64>,
}

impl<'a> Gauge<'a> {
    fn new(names: &'static [&'static str]) -> Self {
        Self { names, name: names.len(), ranks: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, sample: &Sample<'a>) {
        let Some(name) = self.names.iter().position(|name| is(sample.name, name)) else { return };
        if name > self.name || is_part(sample) {
            return;
        }
        if name < self.name {
            (self.name, self.ranks) = (name, BTreeMap::new());
        }
        let of_rank = self.ranks.entry(rank_label(sample)).or_insert(sample.value);
        *of_rank = of_rank.max(sample.value);
    }

    pub(super) fn total(&self) -> Option<f64> {
        (!self.ranks.is_empty()).then(|| self.ranks.values().sum())
    }

    pub(super) fn highest(&self) -> Option<f64> {
        self.ranks.values().copied().reduce(f64::max)
    }

    /// Returns the figure of a rank: its own, or that of the engine if no series has the label of a rank.
    pub(super) fn of(&self, rank: u32) -> Option<f64> {
        let mut labelled = self
            .ranks
            .iter()
            .filter_map(|(label, value)| Some((label.parse::<u32>().ok()?, *value)))
            .peekable();
        if labelled.peek().is_none() {
            return self.total();
        }
        labelled.find(|(label, _)| *label == rank).map(|(_, value)| value)
    }
}

/// Returns a number of requests; `None` if no engine can have as many.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the range")]
fn count(value: f64) -> Option<u32> {
    (value <= f64::from(u32::MAX)).then_some(value as u32)
}
