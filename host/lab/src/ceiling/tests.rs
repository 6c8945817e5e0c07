use std::{sync::LazyLock, time::Duration};

use pointsman_workers::Role;
use proptest::prelude::*;

use super::{Relaxation, Scene, Waits, replay::World, search};
use crate::{
    arm::Arm,
    fleet::{EngineGroup, Fleet, StepTimeSpec},
    generate::{Shape, Workload, generate},
    monitor::Monitor,
    outcome::{Ended, Outcome, Place},
    prepared::{Prepared, prepare},
    run::{RunOptions, RunResult, run_assigned, run_prepared},
    trace::{Trace, TraceRequest},
};

const BLOCK: u32 = 16;

static ARMS: LazyLock<Vec<Arm>> = LazyLock::new(|| {
    let names = [
        "round-robin",
        "random",
        "least-loaded",
        "kv",
        "oracle",
        "kv-aware+conditional-disagg",
        "predicted-latency",
        "longest-prefix",
    ];
    names.iter().map(|name| Arm::parse(name).unwrap()).collect()
});

fn step_time() -> impl Strategy<Value = StepTimeSpec> {
    let coefficients = (0.1_f64..20.0, 0.0_f64..0.5, 0.0_f64..2e-4, 0.0_f64..0.1, 0.0_f64..1e-4);
    prop_oneof![
        Just(StepTimeSpec::Dynamo),
        Just(StepTimeSpec::DistServeOpt13bA100),
        Just(StepTimeSpec::BlisLlama8bH100),
        coefficients.prop_map(|(c0, c1, c2, c3, c4)| StepTimeSpec::Linear { c0, c1, c2, c3, c4 }),
    ]
}

/// Unequal engines of one role, some with few blocks and small steps.
fn group(role: Role) -> impl Strategy<Value = EngineGroup> {
    (1_u32..3, step_time(), prop_oneof![Just(0.0), 0.0_f64..30.0], 90_u32..400, 100_u32..1_200).prop_map(
        move |(count, step_time, request_overhead_ms, blocks, max_batched_tokens)| EngineGroup {
            step_time,
            request_overhead_ms,
            blocks: Some(blocks),
            max_batched_tokens,
            ..EngineGroup::new(role, count)
        },
    )
}

fn fleet() -> impl Strategy<Value = Fleet> {
    let aggregated = || proptest::collection::vec(group(Role::Aggregated), 1..3);
    let pairs = (group(Role::Prefill), group(Role::Decode), proptest::option::of(group(Role::Aggregated)));
    let pairs = pairs.prop_map(|(prefill, decode, more)| [prefill, decode].into_iter().chain(more).collect());
    let engines = prop_oneof![aggregated(), pairs];
    (engines, any::<bool>(), 0_u32..3).prop_map(|(engines, enforce_disagg, wait)| {
        let mut fleet = Fleet { block_tokens: BLOCK, engines, ..Fleet::default() };
        fleet.routing.enforce_disagg = enforce_disagg;
        // Some generated fleets refuse requests.
        if wait == 0 {
            fleet.engines.iter_mut().for_each(|group| group.max_concurrency = Some(4));
            fleet.queue.limit = 5;
        }
        fleet
    })
}

/// Generates prompts that share prefixes, in sessions or without, in bursts or with pauses.
fn trace() -> impl Strategy<Value = Trace> {
    let request = (0_u64..400, 1_u32..1_300, 1_u32..60, 0_u64..5, 0_u32..5, proptest::option::of(0_u64..200));
    (proptest::collection::vec(request, 2..40), any::<bool>(), 0_u64..4).prop_map(|(all, closed, gap)| {
        let mut at = 0;
        let requests = all.into_iter().enumerate();
        let requests = requests.map(|(number, (pause, isl, osl, family, session, delay))| {
            at += pause * gap / 3;
            let shared = u64::from(isl / BLOCK / 2);
            let own = |block: u64| if block < shared { family * 1_000 + block } else { 1_000_000 + block };
            let blocks = (0..u64::from(isl.div_ceil(BLOCK)))
                .map(|block| own(block) + if block < shared { 0 } else { number as u64 * 1_000 });
            TraceRequest {
                at: Duration::from_millis(at),
                input_tokens: isl,
                output_tokens: osl,
                blocks: blocks.collect(),
                session: (session > 0).then(|| session.to_string()),
                delay: delay.filter(|_| closed).map(Duration::from_millis),
                ..TraceRequest::default()
            }
        });
        Trace { name: "t".to_owned(), block_tokens: BLOCK, requests: requests.collect(), ..Trace::default() }
    })
}

fn mean_ms(result: &RunResult) -> f64 {
    let ended: Vec<&Outcome> = result.outcomes.iter().filter(|one| one.ended == Ended::Complete).collect();
    ended.iter().map(|one| one.ttft.as_secs_f64() * 1e3).sum::<f64>() / ended.len().max(1) as f64
}

fn bound_of(trace: &Trace, prepared: &[Prepared], fleet: &Fleet, result: &RunResult) -> f64 {
    let bounds = Relaxation::of(trace, prepared, fleet, &result.outcomes, &Waits::of(trace));
    bounds.mean_ms(|number| result.outcomes[number].ended == Ended::Complete)
}

fn run(arm: &Arm, trace: &Trace, prepared: &[Prepared], fleet: &Fleet, options: RunOptions) -> RunResult {
    run_prepared(arm, trace, prepared, fleet, options, &Monitor::default()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn no_arm_beats_the_relaxation(fleet in fleet(), trace in trace(), jitter in 0_u64..200) {
        let prepared = prepare(&trace, BLOCK);
        let options = RunOptions { jitter: Duration::from_millis(jitter), ..RunOptions::default() };
        for arm in ARMS.iter() {
            let result = run(arm, &trace, &prepared, &fleet, options);
            let (bound, mean) = (bound_of(&trace, &prepared, &fleet, &result), mean_ms(&result));
            prop_assert!(bound <= mean, "{}: {mean} ms, bound {bound} ms", arm.label);
        }
    }

    #[test]
    fn a_replay_takes_as_long_as_the_run_that_it_repeats(fleet in fleet(), trace in trace()) {
        let prepared = prepare(&trace, BLOCK);
        let waits = Waits::of(&trace);
        for arm in ARMS.iter().take(5) {
            let result = run(arm, &trace, &prepared, &fleet, RunOptions::default());
            let is_whole = |one: &Outcome| {
                one.ended == Ended::Complete && one.attempts == 1 && one.queued.is_zero()
            };
            if !result.outcomes.iter().all(is_whole) {
                continue;
            }
            let arrivals: Vec<Duration> = result.outcomes.iter().map(|one| one.at).collect();
            let scene = Scene::of(&trace, &prepared, &fleet, RunOptions::default(), &arrivals, &waits);
            let places: Vec<Place> = result.outcomes.iter().map(Place::of).collect();
            let mut world = World::new(&scene);
            prop_assert!(world.run_counted(&scene, &places, Duration::MAX));
            let ttft: Duration = result.outcomes.iter().map(|one| one.ttft).sum();
            prop_assert_eq!(world.ttft, ttft, "{}", arm.label);
            let options = RunOptions::default();
            let again = run_assigned(&places, &trace, &prepared, &fleet, options, &Monitor::default());
            let again = again.unwrap();
            prop_assert_eq!(again.outcomes.iter().map(|one| one.ttft).sum::<Duration>(), ttft, "{}", arm.label);
        }
    }
}

/// Returns the bound and the mean of an arm.
fn bound_and_mean(arm: &str, trace: &Trace, fleet: &Fleet) -> (f64, f64) {
    let prepared = prepare(trace, fleet.block_tokens);
    let result = run(&Arm::parse(arm).unwrap(), trace, &prepared, fleet, RunOptions::default());
    (bound_of(trace, &prepared, fleet, &result), mean_ms(&result))
}

fn fleet_of(groups: &[(Role, u32)]) -> Fleet {
    let engines = groups.iter().map(|(role, count)| EngineGroup::new(*role, *count)).collect();
    Fleet { block_tokens: 64, engines, ..Fleet::default() }
}

fn lone(isl: u32, at: u64) -> TraceRequest {
    TraceRequest {
        at: Duration::from_secs(at),
        input_tokens: isl,
        output_tokens: 10,
        ..TraceRequest::default()
    }
}

#[test]
fn lone_requests_reach_the_relaxation() {
    let requests = (0..20).map(|number| lone(100 + 70 * number as u32, number * 60)).collect();
    let trace = Trace { block_tokens: 64, requests, ..Trace::default() };
    let pairs = |enforce_disagg: bool| {
        let mut fleet = fleet_of(&[(Role::Prefill, 2), (Role::Decode, 2)]);
        fleet.routing.enforce_disagg = enforce_disagg;
        fleet
    };
    for name in StepTimeSpec::NAMES {
        let step_time = StepTimeSpec::by_name(name).unwrap();
        for (fleet, least) in
            [(fleet_of(&[(Role::Aggregated, 2)]), 0.999), (pairs(true), 0.93), (pairs(false), 0.7)]
        {
            let (bound, mean) = bound_and_mean("kv", &trace, &fleet.with_step_time(step_time));
            assert!(bound <= mean && bound > mean * least, "{name}: {bound} {mean}");
        }
    }
}

#[test]
fn the_relaxation_of_a_long_trace_is_that_of_its_bursts() {
    // Ten bursts of twenty requests, a minute apart.
    let requests = (0..200).map(|number| lone(900 + 13 * (number % 40) as u32, number / 20 * 60)).collect();
    let trace = Trace { block_tokens: 64, requests, ..Trace::default() };
    let prepared = prepare(&trace, 64);
    for engines in [1, 64] {
        let fleet = fleet_of(&[(Role::Aggregated, engines)]);
        let result =
            run(&Arm::parse("least-loaded").unwrap(), &trace, &prepared, &fleet, RunOptions::default());
        let (bound, mean) = (bound_of(&trace, &prepared, &fleet, &result), mean_ms(&result));
        assert!(bound <= mean, "{engines}: {bound} {mean}");
        let day = Duration::from_secs(86_400);
        for (first, between) in [(30 * day, Duration::ZERO), (Duration::ZERO, 36 * day)] {
            let mut moved = result.clone();
            for (number, outcome) in (0_u32..).zip(&mut moved.outcomes) {
                outcome.at += first + between * (number / 20);
            }
            let long = bound_of(&trace, &prepared, &fleet, &moved);
            assert!((long / bound - 1.0).abs() < 1e-6, "{engines} {first:?} {between:?}: {long} {bound}");
        }
    }
}

#[test]
fn requests_that_arrive_together_wait_in_the_relaxation() {
    let requests = vec![lone(4_000, 0); 200];
    let trace = Trace { block_tokens: 64, requests, ..Trace::default() };
    for name in StepTimeSpec::NAMES {
        let fleet = fleet_of(&[(Role::Aggregated, 4)]).with_step_time(StepTimeSpec::by_name(name).unwrap());
        let (bound, mean) = bound_and_mean("least-loaded", &trace, &fleet);
        assert!(bound <= mean && bound > mean * 0.7, "{name}: {bound} {mean}");
    }
}

#[test]
fn the_relaxation_is_most_of_what_a_good_policy_takes_under_load() {
    let shape = Shape::SystemPrompts { prompts: 60 };
    let fleet = fleet_of(&[(Role::Aggregated, 4)]);
    for (rate, least) in [(4.0, 0.75), (20.0, 0.5), (60.0, 0.3)] {
        let trace = generate(&Workload { shape, requests: 600, rate, burstiness: 1.0, seed: 5 });
        let best = ["kv", "oracle", "predicted-latency"]
            .map(|arm| bound_and_mean(arm, &trace, &fleet))
            .into_iter()
            .min_by(|a, b| a.1.total_cmp(&b.1));
        let (bound, mean) = best.unwrap();
        assert!(bound <= mean && bound > mean * least, "{rate}: {bound} {mean}");
    }
}

#[test]
fn the_search_beats_every_arm_within_its_budget_and_finds_the_same_again() {
    let chat =
        Workload { shape: Shape::Chat { turns: 5 }, requests: 80, rate: 12.0, burstiness: 2.0, seed: 3 };
    let documents = Workload { shape: Shape::Documents { documents: 40 }, ..chat };
    let fleets = [fleet_of(&[(Role::Aggregated, 4)]), fleet_of(&[(Role::Prefill, 3), (Role::Decode, 2)])];
    for (workload, fleet) in [(chat, &fleets[0]), (documents, &fleets[0]), (documents, &fleets[1])] {
        let trace = generate(&workload);
        let prepared = prepare(&trace, 64);
        let waits = Waits::of(&trace);
        let options = RunOptions::default();
        let mut arms: Vec<RunResult> =
            ARMS.iter().map(|arm| run(arm, &trace, &prepared, fleet, options)).collect();
        arms.sort_by(|a, b| mean_ms(a).total_cmp(&mean_ms(b)));
        let arrivals: Vec<Duration> = arms[0].outcomes.iter().map(|one| one.at).collect();
        let scene = Scene::of(&trace, &prepared, fleet, options, &arrivals, &waits);
        let starts: Vec<Vec<Place>> =
            arms.iter().map(|result| result.outcomes.iter().map(Place::of).collect()).collect();
        let monitor = Monitor::default();
        let places = search(&scene, &starts, 40, &monitor).unwrap();
        let found = run_assigned(&places, &trace, &prepared, fleet, options, &monitor).unwrap();
        let bound = bound_of(&trace, &prepared, fleet, &found);
        let (found, best) = (mean_ms(&found), mean_ms(&arms[0]));
        assert!(found < best && found >= bound, "{workload:?}: {found} {best} {bound}");
        let again = search(&scene, &starts, 3, &monitor).unwrap();
        assert_eq!(again, search(&scene, &starts, 3, &monitor).unwrap());
    }
}
