use std::sync::Arc;

use pointsman_workers::{
    Booking, BookingRequest, DpRank, EngineLoad, Health, ModelName, Registry, Snapshot, WorkerId, WorkerSpec,
};
use prefix_index::{IndexConfig, Overlaps, Prefix, PrefixIndex, Salt};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use tokio::time::{Duration, Instant};

use super::*;
use crate::{AgentProgram, RoutingRequest, config::RouterConfigOverride, inputs::Needs};

const MODEL: &str = "m";
const BLOCK: u32 = 4;
const PROMPTS: u32 = 3;

fn prefix(prompt: u32, tokens: u32) -> Prefix {
    let tokens: Vec<u32> = (0..tokens).map(|place| prompt * 1_000 + place).collect();
    Prefix::of_tokens(&tokens, BLOCK as usize, &Salt::default(), &[])
}

/// Workers that differ in everything that a fact says.
fn fleet(random: &mut SmallRng) -> Registry {
    let registry = Registry::default();
    // Then there are more groups of descriptions than are kept apart.
    let all_differ = random.random_bool(0.2);
    for id in 1..=random.random_range(1..90_u64) {
        let mut flag = format!("id={id},role=decode,engine=vllm,url=http://a:{id},model={MODEL}");
        let mut add = |chance: f64, text: &str| {
            if random.random_bool(chance) {
                flag.push_str(text);
            }
        };
        add(0.2, ",dp_size=3");
        add(0.3, ",max_concurrency=40");
        add(0.5, ",total_blocks=500,block_size=8");
        add(0.3, ",label.zone=b,label.speed=1.5");
        add(f64::from(all_differ), &format!(",label.host={id}"));
        add(0.3, ",taint=gold");
        add(0.3, ",lora=writer");
        add(0.3, ",local_prefill=true");
        let worker = registry.upsert(WorkerSpec::parse_flag(&flag).unwrap());
        worker.set_health(Health::Healthy);
        if random.random_bool(0.5) {
            let load = EngineLoad {
                running: Some(3),
                waiting: random.random_bool(0.5).then_some(1),
                kv_usage: Some(0.5),
                read_at: Instant::now(),
            };
            worker.set_engine_load(Some(load));
        }
    }
    registry
}

fn book(random: &mut SmallRng, pool: &Pool) -> Vec<Booking> {
    let mut bookings = Vec::new();
    for candidate in pool {
        for _ in 0..random.random_range(0..4) {
            let tokens = random.random_range(1..60);
            let prefix = prefix(random.random_range(0..PROMPTS * 4), tokens);
            let mut booking = candidate.book(&BookingRequest {
                assume_kv_reuse: random.random_bool(0.8),
                ..BookingRequest::new(Leg::Decode, prefix, tokens, BLOCK)
            });
            booking.output_tokens(random.random_range(0..30));
            if random.random_bool(0.4) {
                booking.first_token(Duration::from_millis(random.random_range(1..9)), true);
                booking.load().observe_itl(Duration::from_micros(random.random_range(1..900)));
                booking.load().observe_outcome(random.random_bool(0.5));
            }
            bookings.push(booking);
        }
    }
    bookings
}

fn request(prompt: u32) -> RoutingRequest {
    RoutingRequest {
        prompt_tokens: 50,
        block_size: BLOCK,
        prefix: prefix(prompt, 50),
        n: 1,
        lora: Some("writer".into()),
        preferred_taints: vec![("gold".into(), 0.5)],
        program: Some(Box::new(AgentProgram {
            held: vec![((WorkerId(3), DpRank(0)), 700), ((WorkerId(5), DpRank(0)), 40)],
            ..AgentProgram::default()
        })),
        ..RoutingRequest::default()
    }
}

fn query<'a>(snapshot: &'a Snapshot, model: &'a ModelName, request: &'a RoutingRequest) -> Query<'a> {
    Query {
        session: Some((WorkerId(3), DpRank(0))),
        seed: 1,
        ..Query::new(snapshot, model, Leg::Decode, request)
    }
}

/// Returns the most blocks of the prompt that a worker has cached.
fn most_cached(query: &Query<'_>, overlaps: &Overlaps) -> u32 {
    let cached = |candidate: &Candidate| {
        let held = overlaps.get(candidate.worker_id(), candidate.rank);
        let device = held.device - held.device % candidate.worker.blocks_at_once(BLOCK);
        device + held.host + held.disk
    };
    query.snapshot.pool(query.model, query.leg).iter().map(cached).max().unwrap_or(0)
}

/// Returns a fact's value for one candidate, without the columns.
fn expected(fact: WorkerFact, query: &Query<'_>, candidate: &Candidate, overlaps: &Overlaps) -> u32 {
    use WorkerFact as F;
    let (request, worker, load) = (query.request, &candidate.worker, candidate.load());
    let (spec, engine) = (worker.spec(), worker.engine_load());
    let held = overlaps.get(candidate.worker_id(), candidate.rank);
    match fact {
        F::WorkerId => 0,
        F::DpRank => candidate.rank.0,
        F::ActiveRequests => load.active_requests(),
        F::ActivePrefillTokens => load.active_prefill_tokens(),
        F::DecodeBlocks => load.blocks_after_admission(&request.prefix, request.request_blocks(), true),
        F::TotalBlocks => worker.capacity_in_blocks(BLOCK).unwrap_or(0),
        F::CachedBlocksDevice => held.device - held.device % worker.blocks_at_once(BLOCK),
        F::CachedBlocksHost => held.host,
        F::CachedBlocksDisk => held.disk,
        F::EngineRunning => engine.map_or(0, |_| 3),
        F::EngineQueue => engine.and_then(|load| load.waiting).unwrap_or(0),
        F::KvUsage => engine.map_or(0.0, |_| 0.5_f32).to_bits(),
        F::EngineRunningKnown | F::KvUsageKnown => engine.is_some().into(),
        F::EngineQueueKnown => engine.is_some_and(|load| load.waiting.is_some()).into(),
        F::LoadAgeMs => engine.map_or(u32::MAX, |load| load.read_at.elapsed().as_millis() as u32),
        // The sum of an empty list of weights is -0.0.
        F::TaintPreference => (if spec.taints.contains("gold") { 0.5_f32 } else { -0.0 }).to_bits(),
        F::TopologyDistance => 0,
        F::SessionBound => u32::from(query.session == Some((candidate.worker_id(), candidate.rank))),
        F::LoraLoaded => u32::from(spec.loras.iter().any(|lora| lora == "writer")),
        F::TtftEwmaUs => load.view().ttft_ewma_us(),
        F::ItlEwmaUs => load.view().itl_ewma_us(),
        F::ErrorPpm => load.view().error_ppm(),
        F::LocalPrefill => u32::from(spec.local_prefill),
        F::MaxConcurrency => spec.max_concurrency.unwrap_or(0),
        F::PrefillUsPerKtoken => load.view().prefill_us_per_ktoken(),
        F::ProgramTokens => match (candidate.worker_id(), candidate.rank) {
            (WorkerId(3), DpRank(0)) => 700,
            (WorkerId(5), DpRank(0)) => 40,
            _ => 0,
        },
        F::RunningProgramTokens => load.view().program_tokens(),
        F::PrefixRequests => match most_cached(query, overlaps) {
            0 => 0,
            blocks => load.requests_like(&request.prefix, blocks as usize - 1),
        },
    }
}

fn check(random: &mut SmallRng, pool: &Pool, query: &Query<'_>, index: &PrefixIndex, inputs: &mut Inputs) {
    let config = RouterConfig::default().with(&RouterConfigOverride::default());
    let mut overlaps = Overlaps::default();
    index.matches(query.request.prefix.hashes(), &mut overlaps);
    let all: Vec<u32> = (0..pool.len() as u32).collect();
    let some: Vec<u32> = all.iter().copied().filter(|_| random.random_bool(0.4)).collect();
    for rows in [all, some] {
        inputs.compute(Needs { like: true, ..Needs::COST }, query, &config, pool, &rows, index);
        let facts = DecisionFacts::new(query, config, pool, inputs);
        for fact in WorkerFact::ALL.iter().filter(|fact| **fact != WorkerFact::WorkerId) {
            let mut out = Vec::new();
            let wants = Wants { request: vec![], worker: vec![WorkerColumn::Fact(*fact)] };
            facts.write_workers(&wants, &rows, &mut out);
            let of = |row: &u32| expected(*fact, query, &pool[*row as usize], &overlaps);
            // G3.4
            assert_eq!(out, rows.iter().map(of).collect::<Vec<_>>(), "{}", fact.name());
        }
        let labels = [
            WorkerColumn::LabelIs { key: "zone".into(), value: "b".into() },
            WorkerColumn::LabelNumber { key: "speed".into() },
        ];
        let mut out = Vec::new();
        facts.write_workers(&Wants { request: vec![], worker: labels.into() }, &rows, &mut out);
        let has = |row: &u32| pool[*row as usize].worker.spec().labels.contains_key("zone");
        let zones = rows.iter().map(|row| u32::from(has(row)));
        let speeds = rows.iter().map(|row| if has(row) { 1.5_f32.to_bits() } else { 0 });
        assert_eq!(out, zones.chain(speeds).collect::<Vec<_>>());
        let mut ids = Vec::new();
        let wants = Wants { request: vec![], worker: vec![WorkerColumn::Fact(WorkerFact::WorkerId)] };
        facts.write_workers(&wants, &rows, &mut ids);
        let (low, high) = ids.split_at(rows.len());
        for ((row, low), high) in rows.iter().zip(low).zip(high) {
            assert_eq!(pool[*row as usize].worker_id().0, u64::from(*high) << 32 | u64::from(*low));
            let (terms, load) = (facts.terms(*row), pool[*row as usize].load());
            assert_eq!(terms.active_requests, load.active_requests());
            assert_eq!(terms.active_prefill_tokens, load.active_prefill_tokens());
        }
    }
}

#[test]
fn every_fact_is_what_the_candidate_says_for_all_rows_and_for_some() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    let _guard = runtime.enter();
    let (model, mut inputs) = (ModelName::new(MODEL), Inputs::default());
    for seed in 0..40 {
        let mut random = SmallRng::seed_from_u64(seed);
        let registry = fleet(&mut random);
        let snapshot = registry.snapshot();
        let pool = snapshot.pool(&model, Leg::Decode);
        let config = IndexConfig { block_size: BLOCK as usize, ..IndexConfig::default() };
        let index = Arc::new(PrefixIndex::synchronous(config));
        let _bookings = book(&mut random, pool);
        for candidate in pool.iter().filter(|_| random.random_bool(0.3)).cloned().collect::<Vec<_>>() {
            let held = prefix(random.random_range(0..PROMPTS), random.random_range(1..50));
            index.record(candidate.worker_id(), candidate.rank, &held, Instant::now());
        }
        for prompt in 0..PROMPTS {
            let request = request(prompt);
            check(&mut random, pool, &query(&snapshot, &model, &request), &index, &mut inputs);
        }
    }
}
