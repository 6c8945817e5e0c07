//! What a policy call costs, beside the same code native and a copy of the facts.

#![allow(clippy::unwrap_used, missing_docs, reason = "a bench; criterion's macros write undocumented items")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pointsman_policy_runtime::{Limits, LoadedPolicy, PolicyEngine, load};
use pointsman_policy_sdk::{Facts, Scorer, Selector, configure};
use pointsman_routing::{Call, Origin, Policy};
use pointsman_workers::Leg;
use policy_kv_aware::KvAware;
use policy_least_loaded::LeastLoaded;

const ROWS: [u32; 4] = [8, 64, 512, 1_024];

/// Facts that keep every branch of the policies busy.
fn facts(policy: &LoadedPolicy, rows: u32) -> Vec<u32> {
    let wants = &policy.info().wants;
    let request = (0..wants.request_width()).map(|place| if place < 2 { 16 } else { 1.0_f32.to_bits() });
    let columns = (0..wants.worker_width() as u32)
        .flat_map(|column| (0..rows).map(move |row| (row * 7 + column * 13) % 101));
    request.chain(columns).collect()
}

fn call(rows: u32) -> Call {
    Call { leg: Leg::Prefill, attempt: 0, rows, seed: 7, now_us: 1 }
}

fn bench(c: &mut Criterion) {
    let engine = PolicyEngine::new(Limits::default()).unwrap();
    let embedded = |bytes| load(&engine, bytes, Origin::Embedded, "{}").unwrap();
    let scorer = embedded(pointsman_embedded_policies::KV_AWARE);
    let selector = embedded(pointsman_embedded_policies::LEAST_LOADED);
    let (native_scorer, scorer_wants) = configure::<KvAware>("{}").unwrap();
    let (native_selector, selector_wants) = configure::<LeastLoaded>("{}").unwrap();
    let sdk = |rows| pointsman_policy_sdk::Call { rows, seed: 7, ..Default::default() };
    let mut group = c.benchmark_group("policy_call");
    for rows in ROWS {
        let words = facts(&scorer, rows);
        let mut costs = Vec::new();
        group.bench_with_input(BenchmarkId::new("kv-aware, wasm, 7 columns", rows), &rows, |b, rows| {
            b.iter(|| scorer.score(&call(*rows), black_box(&words), &mut costs).unwrap());
        });
        group.bench_with_input(BenchmarkId::new("kv-aware, native", rows), &rows, |b, rows| {
            let (request, columns) = words.split_at(scorer_wants.request_width());
            let view = Facts::new(request, columns, *rows as usize);
            b.iter(|| black_box(native_scorer.score(&sdk(*rows), black_box(&view)).unwrap()));
        });
        group.bench_with_input(BenchmarkId::new("copy of the facts, 7 columns", rows), &rows, |b, _| {
            let mut copy = Vec::with_capacity(words.len());
            b.iter(|| {
                copy.clear();
                copy.extend_from_slice(black_box(&words));
                black_box(&copy);
            });
        });
        let words = facts(&selector, rows);
        group.bench_with_input(BenchmarkId::new("least-loaded, wasm, 3 columns", rows), &rows, |b, rows| {
            b.iter(|| selector.select(&call(*rows), black_box(&words)).unwrap());
        });
        group.bench_with_input(BenchmarkId::new("least-loaded, native", rows), &rows, |b, rows| {
            let (request, columns) = words.split_at(selector_wants.request_width());
            let view = Facts::new(request, columns, *rows as usize);
            b.iter(|| black_box(native_selector.select(&sdk(*rows), black_box(&view)).unwrap()));
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
