//! A decision among 8 to 10,000 candidates, and its parts: `cargo bench -p pointsman-routing --bench fleet
//! [-- SIZE…]`.
//!
//! Workers hold 0 to 16 bookings, each of a prompt of its own, and sixteen workers hold a part of the prompt
//! in their caches. A part is the difference between two whole decisions, so that the same bench measures
//! any version of the router. Prints microseconds.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a bench")]

use std::{hint::black_box, sync::Arc, time::Duration};

use pointsman_routing::{
    Call, DecisionContext, Decisions, Failure, NativeMode, OnFailure, Policy, PolicyInfo, Program, Query,
    Router, RouterConfig, RouterConfigOverride, RoutingRequest, Slot, SlotSet, Slots, facts::Wants,
};
use pointsman_workers::{
    Booking, BookingRequest, DpRank, Health, Leg, ModelName, Registry, Snapshot, WorkerId, WorkerSpec,
};
use prefix_index::{
    IndexConfig, Overlaps, Prefix, PrefixIndex, Salt,
    events::{Batch, KvEvent, Stored},
};
use tokio::time::Instant;

#[path = "common/scorer.rs"]
mod scorer;

const BLOCK: usize = 16;
const SIZES: [u64; 6] = [8, 64, 512, 1_024, 4_096, 10_000];
/// Workers that hold a part of the prompt.
const HOLDERS: u64 = 16;
/// Requests booked on a worker, at most.
const BOOKED: u32 = 16;
/// Blocks of a booked prompt.
const BOOKED_BLOCKS: usize = 32;
const TURNS: usize = 41;
const TURN: Duration = Duration::from_millis(6);

/// Wants what `kv-aware` wants, and scores by two columns.
#[derive(Debug)]
struct Scorer(PolicyInfo);

impl Policy for Scorer {
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
        let workers = facts.get(self.0.wants.request_width()..).unwrap_or_default();
        let rows = call.rows as usize;
        let (tokens, rest) = workers.split_at_checked(rows).unwrap_or_default();
        costs.clear();
        costs.extend(tokens.iter().zip(rest).map(|(tokens, blocks)| *tokens as f32 / 16.0 + *blocks as f32));
        Ok(())
    }
}

fn program() -> Program {
    let request = ["prompt-tokens", "block-size", "overlap-score-credit", "prefill-load-scale"];
    scorer::program(Scorer(scorer::info("bench", &request)))
}

fn tokens(seed: u32, count: usize) -> Vec<u32> {
    (0..).map(|place: u32| (place ^ seed).wrapping_mul(2_654_435_761) % 50_000).take(count).collect()
}

/// The workers, and the bookings that each of them holds.
fn fleet(workers: u64) -> (Registry, Vec<Booking>) {
    let registry = Registry::default();
    let spec = |id: u64| {
        WorkerSpec::parse_flag(&format!(
            "id={id},role=aggregated,engine=vllm,url=http://a:{id},model=m,taint=a"
        ))
        .unwrap()
    };
    registry.apply((1..=workers).map(spec).collect(), &[]);
    let mut bookings = Vec::new();
    for worker in registry.snapshot().workers() {
        worker.set_health(Health::Healthy);
        let id = worker.id().0 as u32;
        for number in 0..id.wrapping_mul(2_654_435_761) % (BOOKED + 1) {
            let seed = (id * BOOKED + number).wrapping_mul(40_503) | 1;
            let tokens = tokens(seed, BOOKED_BLOCKS * BLOCK);
            let prefix = Prefix::of_tokens(&tokens, BLOCK, &Salt::default(), &[]);
            bookings.extend(worker.candidates().first().map(|candidate| {
                candidate.book(&BookingRequest::new(
                    Leg::Aggregated,
                    prefix,
                    tokens.len() as u32,
                    BLOCK as u32,
                ))
            }));
        }
    }
    (registry, bookings)
}

/// Every worker reports its cache; sixteen hold some of the prompt.
fn index(workers: u64, tokens: &[u32]) -> Arc<PrefixIndex> {
    let index = PrefixIndex::synchronous(IndexConfig { byte_budget: 1 << 30, ..IndexConfig::default() });
    let step = workers.div_ceil(HOLDERS).max(1);
    for id in 1..=workers {
        let holds = id % step == 0;
        let depth = if holds { 1 + (id as usize * 37) % (tokens.len() / BLOCK) } else { 1 };
        let stored = Stored {
            hashes: (0..depth as u64).map(|block| id << 32 | block).collect(),
            token_ids: tokens.iter().skip(usize::from(!holds)).take(depth * BLOCK).copied().collect(),
            block_size: BLOCK as u32,
            ..Stored::default()
        };
        index.set_live(WorkerId(id), DpRank(0), true);
        let batch = Batch { ts: 0.0, dp_rank: None, events: vec![KvEvent::Stored(stored)] };
        assert!(index.events(WorkerId(id), DpRank(0), batch).is_ok());
    }
    Arc::new(index)
}

/// The times of one call of each, microseconds: the lower quartile of many turns, because the machine may be
/// busy. Every turn calls all of them, so that they find the same machine.
fn times<const N: usize>(mut calls: [&mut dyn FnMut(); N]) -> [f64; N] {
    let mut turns: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
    for _ in 0..TURNS {
        for (call, turns) in calls.iter_mut().zip(&mut turns) {
            let (started, mut count) = (Instant::now(), 0_u32);
            while started.elapsed() < TURN {
                (0..8).for_each(|_| call());
                count += 8;
            }
            turns.push(started.elapsed().as_secs_f64() * 1e6 / f64::from(count));
        }
    }
    turns.map(|mut turns| {
        turns.sort_by(f64::total_cmp);
        turns.get(TURNS / 4).copied().unwrap()
    })
}

fn router(index: &Arc<PrefixIndex>, program: &Program, recorded: bool) -> Router {
    let (events, _) = tokio::sync::mpsc::unbounded_channel();
    let slots = SlotSet::build(|kind| Slot::new(kind, None, program.clone(), events.clone()));
    let router =
        Router::new(Slots::new(slots, []), index.clone(), RouterConfig::default(), OnFailure::Fallback);
    if recorded { router.recording(Decisions::new(10_000, 32 << 20, Wants::default())) } else { router }
}

fn query<'a>(snapshot: &'a Snapshot, model: &'a ModelName, request: &'a RoutingRequest) -> Query<'a> {
    Query {
        seed: 1,
        request_id: Some("0123456789abcdef0123456789abcdef"),
        ..Query::new(snapshot, model, Leg::Aggregated, request)
    }
}

fn measure(workers: u64) {
    let prompt = tokens(0, 8_192);
    let request = |prefix| RoutingRequest {
        prompt_tokens: 8_192,
        block_size: BLOCK as u32,
        prefix,
        n: 1,
        max_tokens: Some(128),
        ..RoutingRequest::default()
    };
    let prefix = Prefix::of_tokens(&prompt, BLOCK, &Salt::default(), &[]);
    let (without, with) = (request(Prefix::default()), request(prefix.clone()));
    let tainted = RoutingRequest { required_taints: vec!["a".to_owned()], ..without.clone() };
    let (registry, _bookings) = fleet(workers);
    let (snapshot, model, index) = (registry.snapshot(), ModelName::new("m"), index(workers, &prompt));
    let over = RouterConfigOverride::default();
    let decide = |program: Program, request, recorded| {
        let router = router(&index, &program, recorded);
        let (query, over) = (query(&snapshot, &model, request), &over);
        move || black_box(router.route(&query, over).unwrap()).record.keep()
    };
    let mut found = Overlaps::default();
    let round_robin = Program::Native(NativeMode::RoundRobin);
    let [lookup, rows, asking, booking, loads, cached, recorded, native] = times([
        &mut || index.matches(black_box(prefix.hashes()), &mut found),
        &mut decide(round_robin.clone(), &without, false),
        &mut decide(round_robin.clone(), &tainted, false),
        &mut decide(round_robin, &with, false),
        &mut decide(program(), &without, false),
        &mut decide(program(), &with, false),
        &mut decide(program(), &with, true),
        &mut decide(Program::Native(NativeMode::Kv), &with, true),
    ]);
    println!(
        "| {workers} | {recorded:.2} | {native:.2} | {rows:.2} | {asking:.2} | {:.2} | {:.2} | {:.2} | {lookup:.2} |",
        loads - rows,
        cached - loads - (booking - rows),
        recorded - cached,
    );
}

fn main() {
    println!(
        "| candidates | whole, scorer | whole, native kv | rows | rows with a taint | loads, score, pick | prefix | record | lookup |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let asked: Vec<u64> = std::env::args().filter_map(|size| size.parse().ok()).collect();
    SIZES.into_iter().filter(|size| asked.is_empty() || asked.contains(size)).for_each(measure);
}
