//! Cost of recording a decision: whole decisions with the ring on and off in turn, compared by their tenth
//! percentiles because the machine may be busy; and the same while another thread reads all the time.

#![allow(clippy::unwrap_used, missing_docs, reason = "a bench; criterion's macros write undocumented items")]

use std::{
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pointsman_routing::{
    Call, DecisionContext, Decisions, Failure, OnFailure, Policy, PolicyInfo, Program, Query, Router,
    RouterConfig, RouterConfigOverride, RoutingRequest, Slot, SlotSet, Slots, facts::Wants,
};
use pointsman_workers::{BlockHash, Health, Leg, ModelName, Registry, WorkerSpec};
use prefix_index::{IndexConfig, PrefixIndex};
use tokio::time::{Duration, Instant};

#[path = "common/scorer.rs"]
mod scorer;

/// Decisions of one turn.
const CHUNK: u64 = 10;

/// Scores by the first column, and wants what `kv-aware` wants.
#[derive(Debug)]
struct Fake(PolicyInfo);

impl Policy for Fake {
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
        costs.clear();
        let column = facts.iter().skip(self.0.wants.request_width()).take(call.rows as usize);
        costs.extend(column.map(|value| *value as f32));
        Ok(())
    }
}

fn program() -> Program {
    let request = [
        "prompt-tokens",
        "block-size",
        "overlap-score-credit",
        "host-cache-credit",
        "disk-cache-credit",
        "prefill-load-scale",
        "active-request-weight",
        "track-prefill-tokens",
    ];
    scorer::program(Fake(scorer::info("fake", &request)))
}

fn router(decisions: Decisions) -> Router {
    let (events, _) = tokio::sync::mpsc::unbounded_channel();
    let slots = SlotSet::build(|kind| Slot::new(kind, None, program(), events.clone()));
    let index = Arc::new(PrefixIndex::new(IndexConfig::default()).unwrap());
    Router::new(Slots::new(slots, []), index, RouterConfig::default(), OnFailure::Fallback)
        .recording(decisions)
}

fn request() -> RoutingRequest {
    RoutingRequest {
        prompt_tokens: 64,
        block_size: 16,
        prefix: [1, 2, 3, 4].map(|id: u64| BlockHash(id << 40)).to_vec().into(),
        n: 1,
        ..RoutingRequest::default()
    }
}

fn undisturbed(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 10).copied().unwrap_or_default()
}

fn fleet(workers: u32) -> Registry {
    let registry = Registry::default();
    for id in 1..=workers {
        let flag = format!("id={id},role=aggregated,engine=vllm,url=http://a:{id},model=m");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap()).set_health(Health::Healthy);
    }
    registry
}

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("record");
    for rows in [64_u32, 1_024] {
        let registry = fleet(rows);
        let (snapshot, model, request) = (registry.snapshot(), ModelName::new("m"), request());
        let query = Query {
            seed: 1,
            request_id: Some("0123456789abcdef0123456789abcdef"),
            ..Query::new(&snapshot, &model, Leg::Aggregated, &request)
        };
        let over = RouterConfigOverride::default();
        let off = router(Decisions::off());
        for (name, read) in [("recording", false), ("recording, read all the time", true)] {
            let on = router(Decisions::new(10_000, 64 << 20, Wants::default()));
            let run = |router: &Router| {
                let begun = Instant::now();
                (0..CHUNK).for_each(|_| black_box(router.route(&query, &over).unwrap()).record.keep());
                begun.elapsed()
            };
            // Warms up the ring: the kernel assigns a page at its first use.
            (0..20_000 / CHUNK).for_each(|_| _ = run(&on));
            let stop = AtomicBool::new(!read);
            std::thread::scope(|scope| {
                let (reader, stopped) = (on.decisions().clone(), &stop);
                scope.spawn(move || {
                    while !stopped.load(Ordering::Relaxed) {
                        reader.ids().into_iter().for_each(|id| drop(reader.get(id, |_, _| true)));
                    }
                });
                group.bench_function(BenchmarkId::new(name, rows), |b| {
                    b.iter_custom(|iterations| {
                        let turns = 0..iterations.div_ceil(CHUNK).max(40);
                        let (without, with): (Vec<_>, Vec<_>) = turns.map(|_| (run(&off), run(&on))).unzip();
                        let more = undisturbed(with).saturating_sub(undisturbed(without));
                        // Criterion does not accept a time of 0.
                        more.mul_f64(iterations as f64 / CHUNK as f64).max(Duration::from_nanos(1))
                    });
                });
                stop.store(true, Ordering::Relaxed);
            });
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
