//! Allocations of one routing decision: a small number that does not grow with the number of workers. The
//! test has a file of its own because its allocator counts everything in the process.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs, reason = "tests")]

use std::sync::Arc;

use pointsman_embedded_policies::KV_AWARE;
use pointsman_policy_runtime::{Capacity, Limits, PolicyEngine, load};
use pointsman_routing::{
    Decider, Decisions, NativeMode, Normalize, OnFailure, Origin, Picker, Program, Query, Router,
    RouterConfig, RouterConfigOverride, RoutingRequest, Slot, SlotSet, Slots, WeightedScorer, facts::Wants,
};
use pointsman_workers::{Health, Leg, ModelName, Registry, WorkerSpec};
use prefix_index::{IndexConfig, Prefix, PrefixIndex, Salt};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

/// Decisions before the count begins: buffers find their size.
const WARM: u64 = 200;
/// Decisions counted.
const COUNTED: u64 = 1_000;
/// Largest mean number of allocations of a decision. One with a component makes one and a native one none;
/// the index's thread adds a few now and then.
const MAX_PER_DECISION: f64 = 1.5;

fn router(index: Arc<PrefixIndex>, program: &Program) -> Router {
    let (events, _) = tokio::sync::mpsc::unbounded_channel();
    let slots = SlotSet::build(|kind| Slot::new(kind, None, program.clone(), events.clone()));
    let router = Router::new(Slots::new(slots, []), index, RouterConfig::default(), OnFailure::Fallback);
    router.recording(Decisions::new(10_000, 32 << 20, Wants::default()))
}

fn request(prefix: Prefix) -> RoutingRequest {
    RoutingRequest {
        prompt_tokens: 1_024,
        block_size: 16,
        prefix,
        n: 1,
        max_tokens: Some(128),
        ..RoutingRequest::default()
    }
}

/// Returns the mean number of allocations of a decision over `workers` workers.
fn allocations(program: &Program, workers: u64, by_policy: bool) -> f64 {
    let registry = Registry::default();
    for id in 1..=workers {
        let flag = format!("id={id},role=aggregated,engine=vllm,url=http://a:{id},model=m");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap()).set_health(Health::Healthy);
    }
    let index = Arc::new(PrefixIndex::new(IndexConfig::default()).unwrap());
    let (router, snapshot, model) =
        (router(index.clone(), program), registry.snapshot(), ModelName::new("m"));
    let tokens: Vec<u32> = (0..1_024).collect();
    let request = request(Prefix::of_tokens(&tokens, 16, &Salt::default(), &[]));
    let query = Query {
        seed: 1,
        request_id: Some("0123456789abcdef0123456789abcdef"),
        ..Query::new(&snapshot, &model, Leg::Aggregated, &request)
    };
    let over = RouterConfigOverride::default();
    let decide = || {
        let mut routed = router.route(&query, &over).unwrap();
        assert_eq!(routed.receipt.decider == Decider::Policy, by_policy, "{:?}", routed.receipt.decider);
        routed.record.keep();
    };
    (0..WARM).for_each(|_| decide());
    index.flush();
    let before = dhat::HeapStats::get().total_blocks;
    (0..COUNTED).for_each(|_| decide());
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    let mean = (dhat::HeapStats::get().total_blocks - before) as f64 / COUNTED as f64;
    mean
}

#[test]
fn the_allocations_of_a_decision_are_few_and_do_not_grow_with_the_workers() {
    let _profiler = dhat::Profiler::builder().testing().build();
    let engine = PolicyEngine::new(Limits::default(), Capacity::detect()).unwrap();
    let policy = Arc::new(load(&engine, KV_AWARE, Origin::Embedded, "{}").unwrap());
    let scorers = vec![WeightedScorer { policy, weight: 1.0, normalize: Normalize::None }];
    let component = Program::Scorers { filters: vec![], scorers, picker: Picker::default() };
    let native = Program::Native(NativeMode::Kv);
    assert!(dhat::HeapStats::get().total_blocks > 0, "allocations are counted at all");
    for (name, program, by_policy) in [("component", component, true), ("native", native, false)] {
        let [few, many] = [8, 512].map(|workers| allocations(&program, workers, by_policy));
        println!("{name}: {few} allocations with 8 workers, {many} with 512");
        assert!(many <= MAX_PER_DECISION, "{name}: {many} allocations");
        assert!(many <= few + 0.5, "{name}: {few} allocations with 8 workers, {many} with 512");
    }
}
