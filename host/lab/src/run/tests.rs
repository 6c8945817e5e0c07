use super::*;
use crate::{
    fleet::EngineGroup,
    generate::{Shape, Workload, generate},
    outcome::Ended,
    trace::{BlockIds, Targets, TraceRequest},
};
use pointsman_workers::Role;

fn fleet(groups: &[(Role, u32)]) -> Fleet {
    let engines = groups.iter().map(|(role, count)| EngineGroup::new(*role, *count)).collect();
    Fleet { block_tokens: 64, engines, ..Fleet::default() }
}

fn workload(requests: usize) -> Trace {
    // There are more different prompts than requests on each engine, so the sharing of engines matters.
    let shape = Shape::SystemPrompts { prompts: 60 };
    generate(&Workload { shape, requests, rate: 8.0, burstiness: 1.0, seed: 5 })
}

fn hits(result: &RunResult) -> f64 {
    let cached: u32 = result.outcomes.iter().map(|outcome| outcome.cached).sum();
    let all: u32 = result.outcomes.iter().map(|outcome| outcome.isl).sum();
    f64::from(cached) / f64::from(all)
}

#[test]
fn equal_seeds_give_equal_results_and_every_request_ends() {
    let (trace, fleet) = (workload(300), fleet(&[(Role::Aggregated, 4)]));
    for arm in ["kv-aware", "random", "round-robin"] {
        let arm = Arm::parse(arm).unwrap();
        let options = RunOptions::default();
        let first = run(&arm, &trace, &fleet, options).unwrap();
        assert_eq!(first, run(&arm, &trace, &fleet, options).unwrap(), "{}", arm.label);
        assert_eq!(first.outcomes.len(), 300);
        assert!(first.outcomes.iter().all(|outcome| outcome.ended == Ended::Complete));
    }
}

#[test]
fn a_kv_aware_policy_hits_more_than_round_robin_and_the_native_mode_decides_as_it_does() {
    let (trace, fleet) = (workload(300), fleet(&[(Role::Aggregated, 4)]));
    let [policy, native, round_robin] = ["kv-aware", "kv", "round-robin"]
        .map(|arm| run(&Arm::parse(arm).unwrap(), &trace, &fleet, RunOptions::default()).unwrap());
    assert!(hits(&policy) > hits(&round_robin) + 0.05, "{} {}", hits(&policy), hits(&round_robin));
    let engines = |result: &RunResult| -> Vec<u32> {
        result.outcomes.iter().map(|outcome| outcome.prefill_engine).collect()
    };
    let same = engines(&policy).iter().zip(engines(&native)).filter(|(a, b)| **a == *b).count();
    assert!(same >= 290, "{same} of 300 decisions are equal");
    assert_eq!(policy.outcomes.iter().filter(|outcome| outcome.fell_back).count(), 0);
}

#[test]
fn a_pair_computes_the_prompt_on_one_engine_and_the_answer_on_another() {
    let trace = workload(100);
    let fleet = fleet(&[(Role::Prefill, 2), (Role::Decode, 2)]);
    let result = run(&Arm::parse("kv").unwrap(), &trace, &fleet, RunOptions::default()).unwrap();
    assert_eq!(result.outcomes.len(), 100);
    for outcome in &result.outcomes {
        assert_eq!(outcome.ended, Ended::Complete);
        assert!(outcome.prefill_engine < 2 && (2..4).contains(&outcome.decode_engine), "{outcome:?}");
        let transfer = fleet.links.transfer(outcome.isl);
        assert!(outcome.ttft > transfer, "{outcome:?} is faster than its transfer");
    }
}

#[test]
fn one_request_on_an_idle_engine_takes_what_the_formulas_say() {
    // 1,000 new tokens take one step, which also emits a token: a prefill and a decode part. Then 4 decode
    // steps follow.
    let request = TraceRequest { input_tokens: 1_000, output_tokens: 5, ..TraceRequest::default() };
    let trace = Trace { block_tokens: 64, requests: vec![request], ..Trace::default() };
    let fleet = fleet(&[(Role::Aggregated, 1)]);
    let result = run(&Arm::parse("kv").unwrap(), &trace, &fleet, RunOptions::default()).unwrap();
    let outcome = result.outcomes.first().unwrap();
    let decode = |context: f64| {
        let p = context / (2_048.0 * 64.0);
        -25.74 * p * p + 54.01 * p + 5.74
    };
    let ttft = 0.420_998_9 + 15.183_44 + 16.501_42 + decode(1_000.0);
    assert!((outcome.ttft.as_secs_f64() * 1e3 - ttft).abs() < 1e-3, "{:?} {ttft}", outcome.ttft);
    let rest: f64 = (1_001..1_005).map(|context| decode(f64::from(context))).sum();
    let e2e = ttft + rest;
    assert!((outcome.e2e.as_secs_f64() * 1e3 - e2e).abs() < 1e-3, "{:?} {e2e}", outcome.e2e);
    assert_eq!(result.steps, 5);
}

#[test]
fn the_overhead_of_a_request_delays_each_leg_and_occupies_no_step() {
    let trace = workload(1);
    let arm = Arm::parse("kv").unwrap();
    let ttft_and_itl = |overhead: f64| {
        let mut fleet = fleet(&[(Role::Prefill, 1), (Role::Decode, 1)]);
        fleet.engines.iter_mut().for_each(|group| group.request_overhead_ms = overhead);
        let result = run(&arm, &trace, &fleet, RunOptions::default()).unwrap();
        let outcome = result.outcomes.first().copied().unwrap();
        (outcome.ttft, outcome.itl(), result.steps)
    };
    let (without, with) = (ttft_and_itl(0.0), ttft_and_itl(7.0));
    assert_eq!(with.0, without.0 + Duration::from_millis(14));
    assert_eq!((with.1, with.2), (without.1, without.2));
}

#[test]
fn a_turn_of_a_session_waits_for_the_turn_before_it() {
    let trace = generate(&Workload {
        shape: Shape::Chat { turns: 5 },
        requests: 50,
        rate: 2.0,
        burstiness: 1.0,
        seed: 2,
    });
    let result =
        run(&Arm::parse("kv").unwrap(), &trace, &fleet(&[(Role::Aggregated, 2)]), RunOptions::default());
    let outcomes = result.unwrap().outcomes;
    let mut ends: HashMap<&str, Duration> = HashMap::new();
    for (request, outcome) in trace.requests.iter().zip(&outcomes) {
        let session = request.session.as_deref().unwrap();
        if let (Some(end), Some(delay)) = (ends.get(session), request.delay) {
            assert!(outcome.at >= *end + delay, "{session}");
        }
        ends.insert(session, outcome.at + outcome.e2e);
    }
}

#[test]
fn a_request_that_fits_into_no_engine_is_told_and_the_others_go_on() {
    let mut trace = workload(20);
    if let Some(request) = trace.requests.get_mut(3) {
        (request.input_tokens, request.blocks) = (2_048 * 64 + 1, BlockIds::default());
    }
    let result =
        run(&Arm::parse("kv").unwrap(), &trace, &fleet(&[(Role::Aggregated, 1)]), RunOptions::default());
    let ended: Vec<Ended> = result.unwrap().outcomes.iter().map(|outcome| outcome.ended).collect();
    assert_eq!(ended.iter().filter(|ended| **ended == Ended::Complete).count(), 19);
    assert_eq!(ended.get(3), Some(&Ended::TooLarge));
}

#[test]
fn o8_a_request_goes_to_the_engines_that_can_hold_it() {
    const LONG: u32 = 64 * 200;
    let long = |request: &mut TraceRequest| {
        (request.input_tokens, request.blocks) = (LONG, BlockIds::default());
    };
    let mut trace = workload(60);
    trace.requests.iter_mut().step_by(4).for_each(long);
    let aggregated = [(Role::Aggregated, 1), (Role::Aggregated, 2)];
    let pairs = [(Role::Prefill, 1), (Role::Decode, 1), (Role::Prefill, 1), (Role::Decode, 2)];
    let small_pair = [(Role::Prefill, 1), (Role::Decode, 1), (Role::Aggregated, 2)];
    for (groups, small) in [(&aggregated[..], 1), (&pairs[..], 2), (&small_pair[..], 2)] {
        let mut fleet = fleet(groups);
        fleet.engines.iter_mut().take(small).for_each(|group| group.blocks = Some(128));
        for arm in ["kv-aware", "round-robin", "oracle", "default"] {
            let result = run(&Arm::parse(arm).unwrap(), &trace, &fleet, RunOptions::default()).unwrap();
            // O8.7
            assert!(result.outcomes.iter().all(|outcome| outcome.ended == Ended::Complete), "{arm}");
            let is_small = |engine: u32| (engine as usize) < small;
            let on_small =
                |outcome: &&Outcome| is_small(outcome.prefill_engine) || is_small(outcome.decode_engine);
            let (long, short): (Vec<&Outcome>, Vec<&Outcome>) =
                result.outcomes.iter().partition(|outcome| outcome.isl == LONG);
            assert!(!long.iter().any(on_small) && short.iter().any(on_small), "{arm}");
        }
    }
}

#[test]
fn a_limit_of_concurrency_refuses_what_exceeds_it() {
    let mut fleet = fleet(&[(Role::Aggregated, 1)]);
    fleet.engines.iter_mut().for_each(|group| group.max_concurrency = Some(1));
    let result = run(&Arm::parse("kv").unwrap(), &workload(50), &fleet, RunOptions::default()).unwrap();
    let shed = result.outcomes.iter().filter(|outcome| outcome.ended == Ended::Shed).count();
    assert!(shed > 0 && shed < 50, "{shed}");
}

#[test]
fn an_arm_serves_the_queue_by_target_with_late_requests_last_by_deadline_or_by_arrival() {
    let request = TraceRequest { input_tokens: 100, output_tokens: 20, ..TraceRequest::default() };
    let with_target = |milliseconds| TraceRequest {
        targets: Targets { ttft: Some(Duration::from_millis(milliseconds)), itl: None },
        ..request.clone()
    };
    // Request 4 is late when the first one ends.
    let requests =
        vec![request.clone(), request.clone(), with_target(9_000), with_target(5_000), with_target(1)];
    let trace = Trace { block_tokens: 64, requests, ..Trace::default() };
    for (arm, order) in [("kv", [0, 3, 2, 1, 4]), ("kv+edf", [0, 4, 3, 2, 1]), ("kv+fifo", [0, 1, 2, 3, 4])] {
        let mut fleet = fleet(&[(Role::Aggregated, 1)]);
        fleet.engines.iter_mut().for_each(|group| group.max_concurrency = Some(1));
        fleet.queue.limit = 9;
        let result = run(&Arm::parse(arm).unwrap(), &trace, &fleet, RunOptions::default()).unwrap();
        let mut ended: Vec<usize> = (0..5).collect();
        ended.sort_by_key(|number| result.outcomes.get(*number).map(|outcome| outcome.at + outcome.e2e));
        assert_eq!(ended, order, "{arm}");
    }
}

#[test]
fn a_year_without_requests_takes_no_longer_than_a_second() {
    let request = TraceRequest { input_tokens: 10, output_tokens: 1, ..TraceRequest::default() };
    let last = TraceRequest { at: Duration::from_secs(366 * 86_400), ..request.clone() };
    let trace = Trace { block_tokens: 64, requests: vec![request, last], ..Trace::default() };
    let mut fleet = fleet(&[(Role::Aggregated, 8)]);
    fleet.scrape_interval_ms = 1.0;
    let result = run(&Arm::parse("kv").unwrap(), &trace, &fleet, RunOptions::default()).unwrap();
    assert!(result.outcomes.iter().all(|outcome| outcome.ended == Ended::Complete));
    assert!(result.span >= Duration::from_secs(366 * 86_400), "{:?}", result.span);
}

#[test]
fn absurd_step_times_end_as_times() {
    let mut fleet = fleet(&[(Role::Prefill, 1), (Role::Decode, 1)]);
    let most = f64::MAX / 1e30;
    let step_time = crate::fleet::StepTimeSpec::Linear { c0: most, c1: most, c2: most, c3: most, c4: most };
    fleet.engines.iter_mut().for_each(|group| group.step_time = step_time);
    fleet.links.bytes_per_token = u64::MAX;
    // A step takes a day. With one reading a second, the test would read load figures a million times.
    fleet.scrape_interval_ms = 1e6;
    let result = run(&Arm::parse("kv").unwrap(), &workload(3), &fleet, RunOptions::default()).unwrap();
    assert!(result.outcomes.iter().all(|outcome| outcome.ttft >= Duration::from_secs(2 * 86_400)));
}

#[test]
fn a_request_that_nothing_will_end_is_an_error_and_no_endless_loop() {
    let (trace, fleet) = (workload(2), fleet(&[(Role::Aggregated, 1)]));
    let prepared = prepare(&trace, 64);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let error = runtime.unwrap().block_on(async {
        let arm = Arm::parse("kv").unwrap();
        let (options, monitor) = (RunOptions::default(), Monitor::default());
        let mut lab = Lab::new(&arm, &trace, &prepared, &fleet, options, &monitor).unwrap();
        lab.events.clear();
        lab.resume_scraping();
        lab.run_events().await.unwrap_err().to_string()
    });
    assert_eq!(error, "the simulation cannot continue: 2 requests are open and no event is left");
}

#[test]
fn a_policy_with_state_begins_each_run_with_an_empty_state() {
    // The component of `round-robin` counts its decisions in the state. 301 decisions end in the middle of a
    // round.
    let workspace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let bytes = pointsman_guest_build::GuestBuild::new(&workspace, "policy-round-robin").build().unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let arm = Arm::parse(file.path().to_str().unwrap()).unwrap();
    let (trace, fleet) = (workload(301), fleet(&[(Role::Aggregated, 4)]));
    let engines = |arm: &Arm| -> Vec<u32> {
        let result = run(arm, &trace, &fleet, RunOptions::default()).unwrap();
        assert!(result.outcomes.iter().all(|outcome| !outcome.fell_back));
        result.outcomes.iter().map(|outcome| outcome.prefill_engine).collect()
    };
    let first = engines(&arm);
    assert_eq!(first, engines(&arm));
    assert_eq!(first, engines(&Arm::parse("round-robin").unwrap()), "as the native mode decides");
}
