//! Measures how `max_rows` of a slot changes choices: `cargo run --release -p pointsman-routing --example
//! short_list`.
//!
//! A fleet in which every worker has four requests on average routes conversations that share system
//! prompts. For every twentieth request, the choice among all candidates is compared with that among short
//! lists, by the native cost (that of kv-aware) of both at the same moment. All randomness has a fixed seed.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a program for developers"
)]

use std::{collections::VecDeque, sync::Arc};

use pointsman_routing::{
    Call, CandidateId, CostTerms, DecisionContext, Failure, OnFailure, Policy, PolicyInfo, Program, Query,
    Router, RouterConfig, RouterConfigOverride, RoutingRequest, Slot, SlotSet, Slots, cost,
};
use pointsman_workers::{Health, Leg, ModelName, Registry, Snapshot, WorkerSpec};
use prefix_index::{IndexConfig, Prefix, PrefixIndex, Salt};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use tokio::time::Instant;

#[path = "../benches/common/scorer.rs"]
mod scorer;

const BLOCK: u32 = 16;
const FLEETS: [u64; 2] = [1_000, 10_000];
const LISTS: [u32; 4] = [16, 32, 64, 128];
/// Requests in flight for each worker.
const IN_FLIGHT: usize = 4;
const SYSTEM_PROMPTS: u32 = 50;
const SYSTEM_BLOCKS: u32 = 64;
const TURN_BLOCKS: u32 = 12;
const SAMPLES: usize = 1_000;
const DECISIONS_BETWEEN: usize = 20;

/// The native cost as a policy.
#[derive(Debug)]
struct NativeCost(PolicyInfo);

impl Policy for NativeCost {
    fn info(&self) -> &PolicyInfo {
        &self.0
    }

    fn score(
        &self,
        _: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
        costs: &mut Vec<f32>,
    ) -> Result<(), Failure> {
        let fact = |place: usize| facts.get(place).copied().unwrap_or_default();
        let column = |number: usize, row: usize| {
            fact(self.0.wants.request_width() + number * call.rows as usize + row)
        };
        let config = RouterConfig::default();
        costs.clear();
        costs.extend((0..call.rows as usize).map(|row| {
            let terms = CostTerms {
                prompt_tokens: fact(0),
                block_size: fact(1),
                active_prefill_tokens: column(0, row),
                decode_blocks: column(1, row),
                active_requests: column(2, row),
                cached: [column(3, row), column(4, row), column(5, row)],
                taint_preference: 0.0,
            };
            cost(&terms, &config)
        }));
        Ok(())
    }
}

fn program() -> Program {
    scorer::program(NativeCost(scorer::info("native-cost", &["prompt-tokens", "block-size"])))
}

fn router(index: &Arc<PrefixIndex>, model: &ModelName, max_rows: Option<u32>) -> Router {
    let (events, _) = tokio::sync::mpsc::unbounded_channel();
    let slots = SlotSet::build(|kind| Slot::new(kind, None, program(), events.clone()));
    let slots = Slots::new(slots, []);
    slots.get(model, pointsman_routing::SlotKind::Aggregated).set_max_rows(max_rows);
    Router::new(slots, index.clone(), RouterConfig::default(), OnFailure::Fallback)
}

fn fleet(workers: u64) -> Arc<Snapshot> {
    let registry = Registry::default();
    let spec = |id: u64| {
        WorkerSpec::parse_flag(&format!("id={id},role=aggregated,engine=vllm,url=http://a:{id},model=m"))
            .unwrap()
    };
    registry.apply((1..=workers).map(spec).collect(), &[]);
    let snapshot = registry.snapshot();
    for worker in snapshot.workers() {
        worker.set_health(Health::Healthy);
    }
    snapshot
}

/// A turn of a conversation: a system prompt and what was said so far.
fn request(random: &mut SmallRng, conversations: u32) -> RoutingRequest {
    let (conversation, turns) = (random.random_range(0..conversations), random.random_range(1..8));
    let system = conversation % SYSTEM_PROMPTS;
    let blocks = SYSTEM_BLOCKS + turns * TURN_BLOCKS;
    let token = |place: u32| {
        let of = if place < SYSTEM_BLOCKS * BLOCK { system } else { 1_000 + conversation };
        of.wrapping_mul(2_654_435_761) ^ place
    };
    let tokens: Vec<u32> = (0..blocks * BLOCK).map(token).collect();
    RoutingRequest {
        prompt_tokens: blocks * BLOCK,
        block_size: BLOCK,
        prefix: Prefix::of_tokens(&tokens, BLOCK as usize, &Salt::default(), &[]),
        n: 1,
        ..RoutingRequest::default()
    }
}

fn query<'a>(
    snapshot: &'a Snapshot,
    model: &'a ModelName,
    request: &'a RoutingRequest,
    seed: u64,
) -> Query<'a> {
    Query { explain: true, seed, ..Query::new(snapshot, model, Leg::Aggregated, request) }
}

#[derive(Default)]
struct Compared {
    same: usize,
    as_cheap: usize,
    excess: Vec<f64>,
    least: f64,
    micros: Vec<f64>,
}

fn cost_of(terms: &[(CandidateId, CostTerms)], wanted: CandidateId) -> f64 {
    let (_, terms) = terms.iter().find(|(candidate, _)| *candidate == wanted).unwrap();
    f64::from(cost(terms, &RouterConfig::default()))
}

fn measure(workers: u64) {
    let (model, over) = (ModelName::new("m"), RouterConfigOverride::default());
    let config = IndexConfig { byte_budget: 1 << 30, block_size: BLOCK as usize, ..IndexConfig::default() };
    let (snapshot, index) = (fleet(workers), Arc::new(PrefixIndex::synchronous(config)));
    let all = router(&index, &model, None);
    let routers: Vec<Router> = LISTS.iter().map(|rows| router(&index, &model, Some(*rows))).collect();
    let (mut random, mut live) = (SmallRng::seed_from_u64(11), VecDeque::new());
    let conversations = u32::try_from(workers).unwrap() * 8;
    let mut compared: Vec<Compared> =
        std::iter::repeat_with(Compared::default).take(LISTS.len() + 1).collect();
    let in_flight = workers as usize * IN_FLIGHT;
    for number in 0..in_flight * 2 + SAMPLES * DECISIONS_BETWEEN {
        let request = request(&mut random, conversations);
        let query = query(&snapshot, &model, &request, random.random());
        if number >= in_flight * 2 && number % DECISIONS_BETWEEN == 0 {
            let whole = all.preview(&query, &over).unwrap();
            let best = cost_of(&whole.terms, (whole.receipt.worker, whole.receipt.rank));
            let quiet = Query { explain: false, ..query };
            for (router, compared) in std::iter::once(&all).chain(&routers).zip(&mut compared) {
                let started = Instant::now();
                let chosen = router.preview(&quiet, &over).unwrap().receipt;
                compared.micros.push(started.elapsed().as_secs_f64() * 1e6);
                let cost = cost_of(&whole.terms, (chosen.worker, chosen.rank));
                compared.same += usize::from(chosen.worker == whole.receipt.worker);
                compared.as_cheap += usize::from(cost <= best);
                compared.excess.push(cost - best);
                compared.least += best;
            }
        }
        let mut routed = all.route(&Query { explain: false, ..query }, &over).unwrap();
        routed.record.keep();
        live.push_back(routed.booking);
        // A third of the requests in flight still computes its prompt.
        let computed = live.len().saturating_sub(in_flight / 3);
        live.get_mut(computed.saturating_sub(1)).unwrap().prefill_done();
        if live.len() > in_flight {
            live.pop_front();
        }
    }
    let names = std::iter::once("all".to_owned()).chain(LISTS.map(|rows| rows.to_string()));
    for (rows, mut compared) in names.zip(compared) {
        compared.excess.sort_by(f64::total_cmp);
        compared.micros.sort_by(f64::total_cmp);
        let share = |count: usize| 100.0 * count as f64 / compared.excess.len() as f64;
        let mean = compared.excess.iter().sum::<f64>() / compared.excess.len() as f64;
        let p99 = compared.excess.get(compared.excess.len() * 99 / 100).unwrap();
        println!(
            "| {workers} | {rows} | {:.1} | {:.1} | {mean:.2} ({:.2} %) | {p99:.1} | {:.1} |",
            share(compared.same),
            share(compared.as_cheap),
            100.0 * compared.excess.iter().sum::<f64>() / compared.least,
            compared.micros.get(compared.micros.len() / 2).unwrap(),
        );
    }
}

fn main() {
    println!(
        "| candidates | max_rows | same choice, % | as cheap, % | excess, blocks | p99 | decision p50, µs |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    FLEETS.into_iter().for_each(measure);
}
