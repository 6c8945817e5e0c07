//! Cost of a candidate according to the oracle's default selector (G).
//!
//! The selector returns its choice but not the costs. So the cost is measured with a second candidate of
//! known cost: `decode blocks * exp(-tanh(w))`, with a taint that only this candidate has. Bisection finds
//! the `w` at which the selector changes its choice.

use std::collections::{HashMap, HashSet};

use anyhow::Context as _;
use dynamo_kv_router::{
    DefaultWorkerSelector, KvRouterConfig, SchedulingRequest, WorkerLoadProjection, WorkerSelectionInput,
    WorkerSelector as _,
    protocols::{RoutingConstraints, WorkerConfigLike, WorkerWithDpRank},
    scheduling::{OverlapSignals, ScheduleMode},
};
use serde::{Deserialize, Serialize};

use crate::mix::mix;

/// Router configuration and request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Weights {
    /// Credits of a block on device, host and disk.
    pub credits: [f64; 3],
    /// Weight of the prefill term.
    pub load_scale: f64,
    /// Cost per active request.
    pub request_weight: f64,
    /// Whether prefill tokens count as load.
    pub track: bool,
    /// Number of prompt tokens.
    pub prompt_tokens: u32,
    /// Tokens per block.
    pub block_size: u32,
}

/// A candidate: prefill tokens, decode blocks, requests, cached blocks on device, host, disk; sum of taint
/// weights.
pub type Row = (u32, u32, u32, [u32; 3], f32);

/// A case of the table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Values that all candidates share.
    pub weights: Weights,
    /// The candidates.
    pub rows: Vec<Row>,
    /// Cost of each candidate, in blocks.
    pub costs: Vec<f64>,
    /// Row that is chosen at temperature 0.
    pub chosen: usize,
}

/// Taint of the candidate with known cost.
const SCALES: &str = "scales";

#[derive(Default)]
struct Worker(HashSet<String>);

impl WorkerConfigLike for Worker {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }

    fn data_parallel_size(&self) -> u32 {
        1
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        None
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        None
    }

    fn taints(&self) -> &HashSet<String> {
        &self.0
    }
}

/// A request with candidates for the oracle.
pub struct Question {
    workers: HashMap<u64, Worker>,
    request: SchedulingRequest,
    selector: DefaultWorkerSelector,
    block_size: u32,
}

impl Question {
    /// Creates a request with the candidates `rows`, which become workers 0, 1, 2 …
    #[must_use]
    pub fn new(weights: &Weights, rows: &[Row], temperature: f64, seed: u64) -> Self {
        let config = KvRouterConfig {
            overlap_score_credit: weights.credits[0],
            host_cache_hit_weight: weights.credits[1],
            disk_cache_hit_weight: weights.credits[2],
            prefill_load_scale: weights.load_scale,
            decode_active_request_weight: weights.request_weight,
            router_temperature: temperature,
            router_track_prefill_tokens: weights.track,
            ..KvRouterConfig::default()
        };
        // The oracle subtracts credit from decode blocks on decode workers only, Pointsman whenever prefill
        // is not tracked.
        let kind = if weights.track { "prefill" } else { "decode" };
        let mut question = Self {
            workers: HashMap::new(),
            request: request(weights),
            selector: DefaultWorkerSelector::new_seeded(Some(config), kind, seed),
            block_size: weights.block_size,
        };
        (0..).zip(rows).for_each(|(id, row)| question.add(id, row));
        question
    }

    fn add(&mut self, id: u64, (prefill, decode, requests, cached, preference): &Row) {
        let worker = WorkerWithDpRank::from_worker_id(id);
        let load = WorkerLoadProjection {
            active_prefill_tokens: *prefill as usize,
            active_decode_blocks: *decode as usize,
            active_requests: *requests as usize,
            ..WorkerLoadProjection::default()
        };
        self.request.worker_loads.insert(worker, load);
        let tiers = &mut self.request.overlap.tier_overlap_blocks;
        for (tier, blocks) in
            [&mut tiers.device, &mut tiers.host_pinned, &mut tiers.disk].into_iter().zip(cached)
        {
            tier.insert(worker, *blocks as usize);
        }
        let mut taints = HashSet::new();
        if *preference != 0.0 {
            self.request.routing_constraints.preferred_taints.insert(format!("taint-{id}"), *preference);
            taints.insert(format!("taint-{id}"));
        }
        self.workers.insert(id, Worker(taints));
    }

    /// Returns the worker that the oracle chooses.
    ///
    /// # Errors
    /// The oracle chooses no worker.
    pub fn choose(&self) -> anyhow::Result<u64> {
        let input = WorkerSelectionInput::configured(
            &self.workers,
            &self.request,
            self.request.eligibility(),
            self.block_size,
        );
        Ok(self.selector.select_worker(input)?.worker.worker_id)
    }

    /// Returns whether worker 0 is chosen rather than one of this cost.
    fn beats(&mut self, decode: u32, weight: f32) -> anyhow::Result<bool> {
        // Everything is cached, so there is no prefill cost. If prefill is not tracked, there is none anyway.
        let disk = if self.request.track_prefill_tokens { 1_000_000_000 } else { 0 };
        self.add(1, &(0, decode, 0, [0, 0, disk], 0.0));
        self.request.routing_constraints.preferred_taints.insert(SCALES.to_owned(), weight);
        self.workers.insert(1, Worker(HashSet::from([SCALES.to_owned()])));
        Ok(self.choose()? == 0)
    }
}

/// Returns a candidate's cost according to the oracle.
///
/// # Errors
/// The oracle chooses no worker, or the cost is below 1 or above 2^30.
pub fn cost(weights: &Weights, row: &Row) -> anyhow::Result<f64> {
    let mut question = Question::new(weights, std::slice::from_ref(row), 0.0, 1);
    let mut above = None;
    for power in 0..30 {
        if question.beats(1 << power, 0.0)? {
            above = Some(1_u32 << power);
            break;
        }
    }
    // The cost is at most `decode`, and at least half of it.
    let decode = above.filter(|decode| *decode > 1).context("a cost below 1 or beyond 2^30")?;
    let (mut heavier, mut lighter) = (0.0_f32, 1.0_f32);
    while heavier.midpoint(lighter) > heavier && heavier.midpoint(lighter) < lighter {
        let weight = heavier.midpoint(lighter);
        *(if question.beats(decode, weight)? { &mut heavier } else { &mut lighter }) = weight;
    }
    Ok(f64::from(decode) * (-f64::from(heavier).tanh()).exp())
}

/// Returns the table, which is the same in every run.
///
/// # Errors
/// The oracle chooses no worker.
pub fn table(cases: usize) -> anyhow::Result<Vec<Case>> {
    let mut dice = Dice(1);
    let mut table = Vec::new();
    while table.len() < cases {
        let weights = weights(&mut dice);
        let rows: Vec<Row> = (0..2 + dice.roll(5)).map(|_| row(&mut dice, &weights)).collect();
        let costs: Vec<f64> = rows.iter().map(|row| cost(&weights, row)).collect::<Result<_, _>>()?;
        let chosen = usize::try_from(Question::new(&weights, &rows, 0.0, 1).choose()?)?;
        // Our cost has single precision, so skip cases with smaller differences.
        let clear = |(row, cost): (usize, &f64)| row == chosen || *cost > costs[chosen] * 1.0001;
        if costs.iter().enumerate().all(clear) {
            let costs = costs.iter().map(|cost| (cost * 1e4).round() / 1e4).collect();
            table.push(Case { weights, rows, costs, chosen });
        }
    }
    Ok(table)
}

/// Random numbers that do not depend on the version of a library.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u32 {
        self.0 += 1;
        (mix(self.0) % sides) as u32
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.roll(all.len() as u64) as usize]
    }
}

fn weights(dice: &mut Dice) -> Weights {
    Weights {
        credits: [
            dice.of(&[0.0, 0.5, 1.0, 1.0, 1.5]),
            dice.of(&[0.0, 0.75, 0.75]),
            dice.of(&[0.25, 0.25, 0.5]),
        ],
        load_scale: dice.of(&[0.5, 1.0, 1.0, 2.0]),
        request_weight: dice.of(&[0.0, 0.0, 1.5, 4.0]),
        track: dice.roll(4) > 0,
        prompt_tokens: 1 + dice.roll(8_000),
        block_size: dice.of(&[16, 16, 32, 64]),
    }
}

/// Returns a candidate with at least four decode blocks and small preference, so that its cost is not below
/// 1. Nothing is cached if credit would exceed the cost.
fn row(dice: &mut Dice, weights: &Weights) -> Row {
    let blocks = u64::from(weights.prompt_tokens / weights.block_size) + 1;
    let decode = 4 + dice.roll(600);
    let most = if weights.track || weights.credits[0] == 0.0 { blocks } else { u64::from(decode / 4) };
    let device = dice.roll(most);
    let below = |dice: &mut Dice| if dice.roll(3) == 0 { dice.roll(most.div_ceil(4)) } else { 0 };
    let cached = [device, below(dice), below(dice)];
    let preference = if dice.roll(4) == 0 { dice.of(&[-0.75_f32, -0.25, 0.5, 1.0]) } else { 0.0 };
    (dice.roll(2) * dice.roll(20_000), decode, dice.roll(40), cached, preference)
}

fn request(weights: &Weights) -> SchedulingRequest {
    SchedulingRequest {
        mode: ScheduleMode::QueryOnly { request_id: None },
        token_seq: None,
        isl_tokens: weights.prompt_tokens as usize,
        lora_name: None,
        expected_output_tokens: None,
        affinity_target: None,
        pinned_worker: None,
        allowed_worker_ids: None,
        routing_constraints: RoutingConstraints::default(),
        router_config_override: None,
        track_prefill_tokens: weights.track,
        priority_jump: 0.0,
        strict_priority: 0,
        policy_class: None,
        session_context: None,
        overlap: OverlapSignals {
            tier_overlap_blocks: Default::default(),
            effective_overlap_blocks: Default::default(),
            effective_cached_tokens: Default::default(),
        },
        kv_transfer_candidates: None,
        retain_kv_transfer_chain: false,
        shared_cache_hits: None,
        worker_loads: Default::default(),
        resp_tx: None,
    }
}
