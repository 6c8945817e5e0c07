//! Logs of a gateway in front of engines with known times.

use pointsman_decision_log::{LoggedDecision, LoggedOutcome, LoggedRequest};
use pointsman_sim::core::{BatchLimits, PromptKv};
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};

use crate::calibrate::replay::{Arrival, replay};

pub(super) const PREFILL: [f64; 6] = [3.0, 8.0, 0.4, 0.0006, 0.05, 0.00002];
pub(super) const DECODE: [f64; 6] = [3.0, 10.0, 0.5, 0.0005, 0.0, 0.0];
/// Latency of the link, and its time for a token, milliseconds.
pub(super) const LINK: [f64; 2] = [5.0, 0.01];
const START_US: u64 = 1_700_000_000_000_000;
const LIMITS: BatchLimits = BatchLimits {
    max_num_seqs: 256,
    max_batched_tokens: 2_048,
    blocks: 8_192,
    block_size: 16,
    prefill_only: false,
};

/// Shape of the requests in a test.
#[derive(Clone, Copy)]
pub(super) struct Traffic {
    pub(super) count: usize,
    pub(super) mean_gap_ms: f64,
    pub(super) isl: (u32, u32),
    pub(super) osl: (u32, u32),
    pub(super) cached: bool,
}

pub(super) const TRAFFIC: Traffic =
    Traffic { count: 400, mean_gap_ms: 250.0, isl: (16, 1_500), osl: (2, 60), cached: true };

fn arrivals(traffic: Traffic, seed: u64) -> Vec<Arrival> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut at_ms = 0.0;
    let one = |_| {
        at_ms -= traffic.mean_gap_ms * (1.0 - rng.random::<f64>()).ln();
        let isl = rng.random_range(traffic.isl.0..=traffic.isl.1);
        let osl = rng.random_range(traffic.osl.0..=traffic.osl.1);
        let hit = traffic.cached && rng.random::<f64>() < 0.3;
        let kv = if hit { PromptKv::Cached(isl / 2) } else { PromptKv::Computed };
        Arrival { at_ms, isl, osl, kv }
    };
    (0..traffic.count).map(one).collect()
}

/// Returns the times from arrival to the first token and from there to the last, milliseconds, on an engine
/// with these coefficients.
fn served(arrivals: &[Arrival], values: [f64; 6]) -> Vec<(f64, f64)> {
    let [overhead, c0, c1, c2, c3, c4] = values;
    let time = |features: [f64; 6]| features.iter().zip(values).map(|(a, b)| a * b).sum();
    let works = replay(arrivals, LIMITS, overhead, [c0, c1, c2, c3, c4]);
    works.into_iter().map(|work| work.map(|work| (time(work.ttft), time(work.decode))).unwrap()).collect()
}

fn us(milliseconds: f64) -> u64 {
    START_US + (milliseconds * 1e3) as u64
}

fn decision(slot: &str, worker: u64, at_ms: f64) -> LoggedDecision {
    LoggedDecision {
        slot: slot.into(),
        worker: Some(worker),
        rank: Some(0),
        at_us: Some(us(at_ms)),
        ..LoggedDecision::default()
    }
}

fn logged(arrival: &Arrival, ttft_ms: f64, decode_ms: f64, decisions: Vec<LoggedDecision>) -> LoggedRequest {
    let cached = if let PromptKv::Cached(tokens) = arrival.kv { tokens } else { 0 };
    LoggedRequest {
        arrived_at_us: us(arrival.at_ms),
        model: "m".into(),
        input_tokens: arrival.isl,
        output_tokens: arrival.osl,
        decisions,
        outcome: LoggedOutcome {
            status: 200,
            code: "ok".into(),
            ttft_ms: Some(ttft_ms),
            itl_ms: (arrival.osl > 1).then(|| decode_ms / f64::from(arrival.osl - 1)),
            e2e_ms: ttft_ms + decode_ms,
            prompt_reported: None,
            cached_predicted: None,
            cached_reported: Some(cached),
        },
        ..LoggedRequest::default()
    }
}

/// Returns the log of a gateway in front of one engine.
pub(super) fn aggregated(traffic: Traffic, worker: u64) -> Vec<LoggedRequest> {
    let arrivals = arrivals(traffic, worker);
    let times = served(&arrivals, PREFILL);
    let one = |(arrival, (ttft, decode)): (&Arrival, (f64, f64))| {
        logged(arrival, ttft, decode, vec![decision("aggregated", worker, arrival.at_ms)])
    };
    arrivals.iter().zip(times).map(one).collect()
}

/// Returns the log of a gateway in front of one engine, on which every third request has a second sequence,
/// whose prompt is cached if it is that of the first.
pub(super) fn with_second_sequences(traffic: Traffic, has_one_prompt: bool) -> Vec<LoggedRequest> {
    let mut all = Vec::new();
    for (number, first) in arrivals(traffic, 1).into_iter().enumerate() {
        let kv = if has_one_prompt { PromptKv::Cached(first.isl - 1) } else { first.kv };
        all.extend(
            [(first, false), (Arrival { kv, ..first }, true)]
                .into_iter()
                .take(1 + usize::from(number % 3 == 0)),
        );
    }
    let (arrivals, are_second): (Vec<Arrival>, Vec<bool>) = all.into_iter().unzip();
    let mut requests: Vec<LoggedRequest> = Vec::new();
    for ((arrival, (ttft, decode)), is_second) in
        arrivals.iter().zip(served(&arrivals, PREFILL)).zip(are_second)
    {
        let logged = logged(arrival, ttft, decode, vec![decision("aggregated", 1, arrival.at_ms)]);
        let Some(first) = requests.last_mut().filter(|_| is_second) else {
            requests.push(logged);
            continue;
        };
        first.output_tokens *= 2;
        first.outcome.e2e_ms = first.outcome.e2e_ms.max(logged.outcome.e2e_ms);
        if has_one_prompt {
            first.choices = Some(2);
        } else {
            (first.prompts, first.input_tokens) = (Some(2), 2 * first.input_tokens);
        }
    }
    requests
}

/// Returns the log of a gateway in front of a pair. `timed`: whether the decode decision follows the prefill.
pub(super) fn pairs(traffic: Traffic, timed: bool) -> Vec<LoggedRequest> {
    pairs_and_local(traffic, timed, |_| false, DECODE)
}

/// Like [`pairs`]; the decode engine prefills the prompts of some requests itself.
pub(super) fn pairs_and_local(
    traffic: Traffic,
    timed: bool,
    is_local: fn(usize) -> bool,
    decode: [f64; 6],
) -> Vec<LoggedRequest> {
    let arrivals = arrivals(traffic, 7);
    let remote: Vec<usize> = (0..arrivals.len()).filter(|place| !is_local(*place)).collect();
    let prompts: Vec<Arrival> = remote.iter().map(|place| Arrival { osl: 1, ..arrivals[*place] }).collect();
    let mut prefills = vec![0.0; arrivals.len()];
    for (place, (ttft, _)) in remote.iter().zip(served(&prompts, PREFILL)) {
        prefills[*place] = ttft;
    }
    let mut handed: Vec<(usize, Arrival)> = arrivals.iter().copied().enumerate().collect();
    for (place, one) in handed.iter_mut().filter(|(place, _)| !is_local(*place)) {
        one.at_ms += prefills[*place] + LINK[0] + LINK[1] * f64::from(one.isl);
        one.kv = PromptKv::Received;
    }
    handed.sort_by(|left, right| left.1.at_ms.total_cmp(&right.1.at_ms));
    let on_decode: Vec<Arrival> = handed.iter().map(|(_, one)| *one).collect();
    let one = |((place, began), (first, decode)): (&(usize, Arrival), (f64, f64))| {
        let arrival = &arrivals[*place];
        let decided = arrival.at_ms + if timed { prefills[*place] } else { 0.1 };
        let decisions = if is_local(*place) {
            vec![decision("aggregated", 2, arrival.at_ms)]
        } else {
            vec![decision("prefill", 1, arrival.at_ms), decision("decode", 2, decided)]
        };
        logged(arrival, began.at_ms - arrival.at_ms + first, decode, decisions)
    };
    handed.iter().zip(served(&on_decode, decode)).map(one).collect()
}
