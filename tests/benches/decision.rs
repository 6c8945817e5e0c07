//! A whole routing decision as shipped, and its parts: an 8k-token prompt, the default policy in Wasm, the
//! index with every fourth worker holding some of the prompt, booking and recording included. Hashing is
//! apart: it is done once a request.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "a bench; criterion's macros write undocumented items"
)]

use std::{hint::black_box, sync::Arc};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pointsman_embedded_policies::KV_AWARE;
use pointsman_policy_runtime::{Capacity, Limits, PolicyEngine, load};
use pointsman_routing::{
    Decider, Decisions, NativeMode, Normalize, OnFailure, Origin, Picker, Program, Query, Routed, Router,
    RouterConfig, RouterConfigOverride, RoutingRequest, Slot, SlotSet, Slots, WeightedScorer, facts::Wants,
};
use pointsman_workers::{DpRank, Health, Leg, ModelName, Registry, WorkerId, WorkerSpec};
use prefix_index::{
    IndexConfig, Overlaps, Prefix, PrefixIndex, Salt,
    events::{Batch, KvEvent, Stored},
};

const BLOCK: usize = 16;
const SIZES: [u64; 6] = [8, 64, 512, 1_024, 4_096, 10_000];

fn tokens() -> Vec<u32> {
    (0..8_192_u32).map(|place| place.wrapping_mul(2_654_435_761) % 50_000).collect()
}

fn subject(prefix: Prefix) -> RoutingRequest {
    RoutingRequest {
        prompt_tokens: 8_192,
        block_size: 16,
        prefix,
        n: 1,
        max_tokens: Some(128),
        ..RoutingRequest::default()
    }
}

fn fleet(workers: u64) -> Registry {
    let registry = Registry::default();
    for id in 1..=workers {
        let flag = format!("id={id},role=aggregated,engine=vllm,url=http://a:{id},model=m");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap()).set_health(Health::Healthy);
    }
    registry
}

/// Every fourth worker holds some of the prompt, to different depths; all speak for their caches themselves,
/// so that no decision changes what the next one finds.
fn index(workers: u64, tokens: &[u32]) -> Arc<PrefixIndex> {
    let index = PrefixIndex::new(IndexConfig { byte_budget: 1 << 30, ..IndexConfig::default() }).unwrap();
    for id in 1..=workers {
        let depth = if id % 4 == 1 { 1 + (id as usize * 37) % (tokens.len() / BLOCK) } else { 1 };
        let first = if id % 4 == 1 { 0 } else { 1 };
        let stored = Stored {
            hashes: (0..depth as u64).map(|block| id << 32 | block).collect(),
            token_ids: tokens[first..first + depth * BLOCK].to_vec(),
            block_size: BLOCK as u32,
            ..Stored::default()
        };
        index.set_live(WorkerId(id), DpRank(0), true);
        let mut batch = Batch { ts: 0.0, dp_rank: None, events: vec![KvEvent::Stored(stored)] };
        while let Err(again) = index.events(WorkerId(id), DpRank(0), batch) {
            batch = again;
            std::thread::yield_now();
        }
    }
    index.flush();
    Arc::new(index)
}

fn router(index: Arc<PrefixIndex>, program: &Program) -> Router {
    let (events, _) = tokio::sync::mpsc::unbounded_channel();
    let slots = SlotSet::build(|kind| Slot::new(kind, None, program.clone(), events.clone()));
    let router = Router::new(Slots::new(slots, []), index, RouterConfig::default(), OnFailure::Fallback);
    router.recording(Decisions::new(10_000, 32 << 20, Wants::default()))
}

/// A policy that fails is served for by the native fallback, which would be measured in its stead.
fn assert_decided(by: &str, routed: &Routed) {
    let by_policy = routed.receipt.decider == Decider::Policy;
    assert_eq!(by_policy, by.ends_with("Wasm"), "{by}: {:?}", routed.receipt.decider);
}

fn bench(c: &mut Criterion) {
    let engine = PolicyEngine::new(Limits::default(), Capacity::detect()).unwrap();
    let policy = Arc::new(load(&engine, KV_AWARE, Origin::Embedded, "{}").unwrap());
    // As `[slots]` has it when nothing is configured.
    let scorers = vec![WeightedScorer { policy, weight: 1.0, normalize: Normalize::None }];
    let wasm = Program::Scorers { filters: vec![], scorers, picker: Picker::default() };
    let tokens = tokens();
    let mut group = c.benchmark_group("decision");
    group.bench_function("hashing 8,192 tokens", |b| {
        b.iter(|| Prefix::of_tokens(black_box(&tokens), BLOCK, &Salt::default(), &[]));
    });
    let prefix = Prefix::of_tokens(&tokens, BLOCK, &Salt::default(), &[]);
    let subject = subject(prefix.clone());
    for workers in SIZES {
        let registry = fleet(workers);
        let (snapshot, model, index) = (registry.snapshot(), ModelName::new("m"), index(workers, &tokens));
        let query = Query {
            seed: 1,
            request_id: Some("0123456789abcdef0123456789abcdef"),
            ..Query::new(&snapshot, &model, Leg::Aggregated, &subject)
        };
        let mut found = Overlaps::default();
        group.bench_function(BenchmarkId::new("index lookup", workers), |b| {
            b.iter(|| index.matches(black_box(prefix.hashes()), &mut found));
        });
        let programs = [("whole, Wasm", wasm.clone()), ("whole, native kv", Program::Native(NativeMode::Kv))];
        for (name, program) in programs {
            let router = router(index.clone(), &program);
            let over = RouterConfigOverride::default();
            assert_decided(name, &router.route(&query, &over).unwrap());
            group.bench_function(BenchmarkId::new(name, workers), |b| {
                b.iter(|| black_box(router.route(&query, &over).unwrap()).record.keep());
            });
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
