//! Unit costs of docs/scale.md: a native decision among up to 10,000 candidates, and the memory that a worker
//! takes in the registry.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    missing_docs,
    reason = "a bench; criterion's macros write undocumented items"
)]

use std::{hint::black_box, sync::Arc};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pointsman_routing::{
    Decisions, NativeMode, OnFailure, Program, Query, Router, RouterConfig, RouterConfigOverride,
    RoutingRequest, Slot, SlotSet, Slots, facts::Wants,
};
use pointsman_workers::{DpRank, Health, Leg, ModelName, Registry, WorkerId, WorkerSpec};
use prefix_index::{
    IndexConfig, Overlaps, Prefix, PrefixIndex, Salt,
    events::{Batch, KvEvent, Stored},
};

const BLOCK: usize = 16;
const LARGEST: u64 = 10_000;
const SIZES: [u64; 5] = [64, 1_024, 4_096, 8_000, LARGEST];

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1_024
}

fn fleet(workers: u64) -> Registry {
    let registry = Registry::default();
    let spec = |id: u64| {
        WorkerSpec::parse_flag(&format!("id={id},role=aggregated,engine=vllm,url=http://a:{id},model=m"))
            .unwrap()
    };
    for id in 1..=workers {
        registry.upsert(spec(id)).set_health(Health::Healthy);
    }
    registry
}

/// Every fourth worker holds some of the prompt, as in the bench `decision`.
fn index(workers: u64, tokens: &[u32]) -> Arc<PrefixIndex> {
    let index = PrefixIndex::synchronous(IndexConfig { byte_budget: 1 << 30, ..IndexConfig::default() });
    for id in 1..=workers {
        let depth = if id % 4 == 1 { 1 + (id as usize * 37) % (tokens.len() / BLOCK) } else { 1 };
        let first = usize::from(id % 4 != 1);
        let stored = Stored {
            hashes: (0..depth as u64).map(|block| id << 32 | block).collect(),
            token_ids: tokens.iter().skip(first).take(depth * BLOCK).copied().collect(),
            block_size: BLOCK as u32,
            ..Stored::default()
        };
        index.set_live(WorkerId(id), DpRank(0), true);
        let batch = Batch { ts: 0.0, dp_rank: None, events: vec![KvEvent::Stored(stored)] };
        assert!(index.events(WorkerId(id), DpRank(0), batch).is_ok());
    }
    Arc::new(index)
}

fn bench(c: &mut Criterion) {
    let tokens: Vec<u32> = (0..8_192_u32).map(|place| place.wrapping_mul(2_654_435_761) % 50_000).collect();
    let prefix = Prefix::of_tokens(&tokens, BLOCK, &Salt::default(), &[]);
    let request = RoutingRequest {
        prompt_tokens: 8_192,
        block_size: BLOCK as u32,
        prefix,
        n: 1,
        max_tokens: Some(128),
        ..RoutingRequest::default()
    };
    let mut group = c.benchmark_group("scale");
    group.sample_size(30);
    // Measured before the benchmarks, since these reuse freed memory.
    let before = resident_bytes();
    let registry = fleet(LARGEST);
    println!("registry: {} bytes for each worker", resident_bytes().saturating_sub(before) / LARGEST);
    drop(registry);
    for workers in SIZES {
        let registry = fleet(workers);
        let (snapshot, model, index) = (registry.snapshot(), ModelName::new("m"), index(workers, &tokens));
        let (events, _) = tokio::sync::mpsc::unbounded_channel();
        let program = Program::Native(NativeMode::Kv);
        let slots = SlotSet::build(|kind| Slot::new(kind, None, program.clone(), events.clone()));
        let router =
            Router::new(Slots::new(slots, []), index.clone(), RouterConfig::default(), OnFailure::Fallback)
                .recording(Decisions::new(10_000, 32 << 20, Wants::default()));
        let query = Query {
            seed: 1,
            request_id: Some("0123456789abcdef0123456789abcdef"),
            ..Query::new(&snapshot, &model, Leg::Aggregated, &request)
        };
        let mut found = Overlaps::default();
        group.bench_function(BenchmarkId::new("index lookup", workers), |b| {
            b.iter(|| index.matches(black_box(request.prefix.hashes()), &mut found));
        });
        let over = RouterConfigOverride::default();
        group.bench_function(BenchmarkId::new("native decision", workers), |b| {
            b.iter(|| black_box(router.route(&query, &over).unwrap()).record.keep());
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
