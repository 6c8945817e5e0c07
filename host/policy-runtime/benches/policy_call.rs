//! Cost of a call of every shipped policy as a component, beside the same code linked natively: the same
//! facts, those of an ordinary request, as `pointsman policy bench` asks.

#![allow(clippy::unwrap_used, missing_docs, reason = "a bench; criterion's macros write undocumented items")]

use std::{hint::black_box, path::Path, time::Duration};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pointsman_embedded_policies::{FORMULA, FORMULA_FILTER};
use pointsman_guest_build::GuestBuild;
use pointsman_policy_runtime::{Access, Capacity, Limits, LoadedPolicy, PolicyEngine, SampleCall, compile};
use pointsman_policy_sdk::{Call, DecodeOverride, Facts, Filter, Scorer, Selector, configure};
use pointsman_routing::{DecisionContext, Origin, Policy, Purpose, World};

const ROWS: [u32; 3] = [8, 64, 1_024];

/// The policy as a part of this binary.
type Native = Box<dyn Fn(&Call, &SampleCall)>;

fn facts(question: &SampleCall) -> Facts<'_> {
    Facts::new(&question.request, &question.candidates, question.call.rows as usize)
}

fn filter<P: Filter + 'static>() -> Native {
    let (policy, _) = configure::<P>("{}").unwrap();
    Box::new(move |call, question| drop(black_box(policy.keep(call, &facts(question)).unwrap())))
}

fn scorer<P: Scorer + 'static>() -> Native {
    let (policy, _) = configure::<P>("{}").unwrap();
    Box::new(move |call, question| drop(black_box(policy.score(call, &facts(question)).unwrap())))
}

fn selector<P: Selector + 'static>() -> Native {
    let (policy, _) = configure::<P>("{}").unwrap();
    Box::new(move |call, question| drop(black_box(policy.select(call, &facts(question)).unwrap())))
}

/// The formulas of docs/formulas.md, and one with as many operations as are allowed.
const QUEUE_AND_PREFIX: &str = r#"{"cost": "2 * ratio(engine_queue, max(engine_queue)) + ratio(request_blocks - cached_blocks_device, request_blocks)"}"#;
const KEEP: &str = r#"{"keep": "(!known(kv_usage) || kv_usage < 0.95) && (tenant != 'batch' || taint('spot'))", "names": {"batch": 7}}"#;

fn largest() -> String {
    format!("{{\"cost\": \"{}1\"}}", "active_requests * 2 + ".repeat(85))
}

/// Formulas: what a call costs, as a component and natively.
fn bench_formulas(c: &mut Criterion) {
    let engine = PolicyEngine::new(Limits::default(), Capacity::detect()).unwrap();
    let mut group = c.benchmark_group("formula_call");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1)).sample_size(50);
    let largest = largest();
    let cases = [
        ("queue and prefix", FORMULA, QUEUE_AND_PREFIX),
        ("keep", FORMULA_FILTER, KEEP),
        ("256 operations", FORMULA, largest.as_str()),
    ];
    for (name, bytes, settings) in cases {
        let compiled = compile(&engine, bytes, &Access::default()).unwrap();
        let policy = compiled.configure(Origin::Embedded, settings).unwrap();
        for rows in [64, 1_024] {
            let question = SampleCall::ordinary(&policy.info().wants, rows);
            let pointsman_routing::Call { seed, now_us, .. } = question.call;
            let call = Call { rows, seed, now_us, ..Default::default() };
            let words = question.facts();
            let (mut kept, mut costs) = (Vec::new(), Vec::new());
            group.bench_function(BenchmarkId::new(format!("{name}, wasm"), rows), |b| {
                b.iter(|| ask(&policy, black_box(&question), &words, &mut kept, &mut costs));
            });
            if bytes == FORMULA {
                let (native, _) = configure::<policy_formula::Rank>(settings).unwrap();
                group.bench_function(BenchmarkId::new(format!("{name}, native"), rows), |b| {
                    b.iter(|| black_box(native.select(&call, &facts(black_box(&question))).unwrap()));
                });
            }
        }
    }
    group.finish();
}

fn decode_override<P: DecodeOverride + 'static>() -> Native {
    let (policy, _) = configure::<P>("{}").unwrap();
    Box::new(move |call, question| {
        let decode = Facts::new(&question.request, &question.decode, 1);
        drop(black_box(policy.decide(call, &decode, &facts(question)).unwrap()));
    })
}

fn shipped() -> Vec<(&'static str, Native)> {
    vec![
        ("cache-aware", selector::<policy_cache_aware::CacheAware>()),
        ("conditional-disagg", decode_override::<policy_conditional_disagg::ConditionalDisagg>()),
        ("kv-aware", scorer::<policy_kv_aware::KvAware>()),
        ("kv-utilization", scorer::<policy_kv_utilization::KvUtilization>()),
        ("least-loaded", selector::<policy_least_loaded::LeastLoaded>()),
        ("low-queue", filter::<policy_low_queue::LowQueue>()),
        ("power-of-two", selector::<policy_power_of_two::PowerOfTwo>()),
        ("queue-kv-prefix", scorer::<policy_queue_kv_prefix::QueueKvPrefix>()),
        ("session-affinity", selector::<policy_session_affinity::SessionAffinity>()),
        ("tenant-limit", selector::<policy_tenant_limit::TenantLimit>()),
        ("weighted-random", selector::<policy_weighted_random::WeightedRandom>()),
    ]
}

/// The policy as the daemon loads it.
fn component(engine: &PolicyEngine, name: &str) -> LoadedPolicy {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let bytes = GuestBuild::new(&root, &format!("policy-{name}")).build().unwrap();
    let compiled = compile(engine, &bytes, &Access::new(&Access::ALL)).unwrap();
    compiled.configure(Origin::Embedded, "{}").unwrap()
}

fn ask(
    policy: &LoadedPolicy,
    question: &SampleCall,
    facts: &[u32],
    kept: &mut Vec<u32>,
    costs: &mut Vec<f32>,
) {
    let (context, call) = (&mut DecisionContext::new(Purpose::Route), &question.call);
    match policy.info().world {
        World::Filter => policy.keep(context, call, facts, kept).unwrap(),
        World::Scorer => policy.score(context, call, facts, costs).unwrap(),
        World::Selector => drop(black_box(policy.select(context, call, facts).unwrap())),
        World::DecodeOverride => {
            let SampleCall { request, decode, candidates, .. } = question;
            drop(black_box(policy.decide(context, call, request, decode, candidates).unwrap()));
        }
    }
}

fn bench(c: &mut Criterion) {
    let engine = PolicyEngine::new(Limits::default(), Capacity::detect()).unwrap();
    let mut group = c.benchmark_group("policy_call");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1)).sample_size(50);
    for (name, native) in shipped() {
        let policy = component(&engine, name);
        for rows in ROWS {
            let question = SampleCall::ordinary(&policy.info().wants, rows);
            let pointsman_routing::Call { seed, now_us, .. } = question.call;
            let call = Call { rows, seed, now_us, ..Default::default() };
            let words = question.facts();
            let (mut kept, mut costs) = (Vec::new(), Vec::new());
            group.bench_function(BenchmarkId::new(format!("{name}, wasm"), rows), |b| {
                b.iter(|| ask(&policy, black_box(&question), &words, &mut kept, &mut costs));
            });
            group.bench_function(BenchmarkId::new(format!("{name}, native"), rows), |b| {
                b.iter(|| native(&call, black_box(&question)));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, bench, bench_formulas);
criterion_main!(benches);
