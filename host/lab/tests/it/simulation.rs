//! The gateway's functions besides routing, in a simulation: the queue, sessions, retries, outages of
//! engines, handoffs of every kind, learning, and failing policies.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs, reason = "a test")]

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use pointsman_lab::{
    Arm, Ended, EngineGroup, Fleet, Links, Outage, Outcome, RunOptions, RunResult, StepTimeSpec, Targets,
    Trace, TraceRequest,
    generate::{Shape, Workload, generate},
    run,
};
use pointsman_orchestration::{HandoffKind, LegOrder};
use pointsman_routing::SlotKind;
use pointsman_workers::Role;

fn fleet(groups: &[(Role, u32)]) -> Fleet {
    let engines = groups.iter().map(|(role, count)| EngineGroup::new(*role, *count)).collect();
    Fleet { block_tokens: 64, engines, ..Fleet::default() }
}

const PAIRS: [(Role, u32); 2] = [(Role::Prefill, 2), (Role::Decode, 2)];

fn prompts(requests: usize) -> Trace {
    let shape = Shape::SystemPrompts { prompts: 60 };
    generate(&Workload { shape, requests, rate: 8.0, burstiness: 1.0, seed: 5 })
}

fn chat(requests: usize) -> Trace {
    let shape = Shape::Chat { turns: 5 };
    generate(&Workload { shape, requests, rate: 4.0, burstiness: 1.0, seed: 2 })
}

/// Returns `count` equal requests that arrive together.
fn burst(count: usize) -> Trace {
    let request = TraceRequest { input_tokens: 2_000, output_tokens: 20, ..TraceRequest::default() };
    Trace { block_tokens: 64, requests: vec![request; count], ..Trace::default() }
}

fn result(arm: &str, trace: &Trace, fleet: &Fleet) -> RunResult {
    run(&Arm::parse(arm).unwrap(), trace, fleet, RunOptions::default()).unwrap()
}

fn ended(result: &RunResult, how: Ended) -> usize {
    result.outcomes.iter().filter(|outcome| outcome.ended == how).count()
}

fn mean(result: &RunResult, of: impl Fn(&Outcome) -> Duration) -> Duration {
    let count = u32::try_from(result.outcomes.len()).unwrap();
    result.outcomes.iter().map(of).sum::<Duration>() / count
}

fn parse(text: &str) -> Fleet {
    let fleet: Fleet = toml::from_str(text).unwrap();
    fleet.check().unwrap();
    fleet
}

#[test]
fn a_request_waits_in_the_queue_while_every_worker_is_busy_and_the_first_in_is_the_first_out() {
    let mut fleet = fleet(&[(Role::Aggregated, 1)]);
    fleet.engines.iter_mut().for_each(|group| group.max_concurrency = Some(1));
    let refused = result("kv", &burst(10), &fleet);
    assert_eq!((ended(&refused, Ended::Complete), ended(&refused, Ended::Shed)), (1, 9));
    fleet.queue.limit = 6;
    let queued = result("kv", &burst(10), &fleet);
    assert_eq!((ended(&queued, Ended::Complete), ended(&queued, Ended::Shed)), (7, 3));
    let waits: Vec<Duration> = queued.outcomes.iter().take(7).map(|outcome| outcome.queued).collect();
    assert!(waits.is_sorted() && waits[0].is_zero() && waits[6] > waits[1], "{waits:?}");
    let first = queued.outcomes[0];
    // The place becomes free at the moment at which the previous request ends.
    assert!(waits[1] >= first.e2e && waits[1] < first.e2e + Duration::from_millis(1), "{waits:?} {first:?}");
    assert_eq!(queued, result("kv", &burst(10), &fleet));
}

#[test]
fn a_queued_request_is_refused_when_its_timeout_is_over() {
    let mut fleet = fleet(&[(Role::Aggregated, 1)]);
    fleet.engines.iter_mut().for_each(|group| group.max_concurrency = Some(1));
    (fleet.queue.limit, fleet.queue.timeout) = (100, Duration::from_millis(400));
    let result = result("kv", &burst(10), &fleet);
    let shed: Vec<&Outcome> = result.outcomes.iter().filter(|one| one.ended == Ended::Shed).collect();
    assert!(!shed.is_empty() && shed.len() < 9);
    for outcome in shed {
        assert!(outcome.e2e >= Duration::from_millis(400), "{outcome:?}");
        assert!(outcome.e2e <= Duration::from_millis(700), "{outcome:?}");
    }
}

#[test]
fn a_session_stays_with_its_workers() {
    let mut fleet = fleet(&[(Role::Aggregated, 4)]);
    let moves = |result: &RunResult, trace: &Trace| {
        let mut last = HashMap::new();
        let pairs = trace.requests.iter().zip(&result.outcomes);
        pairs
            .filter(|(request, outcome)| {
                let before = last.insert(request.session.clone(), outcome.decode_engine);
                before.is_some_and(|before| before != outcome.decode_engine)
            })
            .count()
    };
    let trace = chat(100);
    assert!(moves(&result("random", &trace, &fleet), &trace) > 30);
    fleet.routing.session_affinity = Duration::from_secs(3_600);
    assert_eq!(moves(&result("random", &trace, &fleet), &trace), 0);
}

#[test]
fn requests_of_an_engine_that_goes_away_are_tried_on_another_one() {
    let mut fleet = fleet(&[(Role::Aggregated, 3)]);
    fleet.outages = vec![Outage { engine: 0, from_s: 5.0, for_s: 10.0 }];
    let trace = prompts(300);
    let retried = result("kv", &trace, &fleet);
    assert!(retried.retries > 0, "{}", retried.retries);
    let again: Vec<&Outcome> = retried.outcomes.iter().filter(|outcome| outcome.attempts > 1).collect();
    assert!(!again.is_empty() && again.iter().all(|outcome| outcome.ended != Ended::NoWorker));
    // Requests whose first token had been sent cannot be retried.
    let failed = ended(&retried, Ended::Failed);
    assert_eq!(ended(&retried, Ended::Complete) + failed, 300);
    // Routing notices the outage: while the engine is away, no request starts there.
    let away = |outcome: &&Outcome| {
        (Duration::from_secs(6)..Duration::from_secs(15)).contains(&outcome.at) && outcome.decode_engine == 0
    };
    assert_eq!(retried.outcomes.iter().filter(away).count(), 0);
    let back = |outcome: &&Outcome| outcome.at > Duration::from_secs(18) && outcome.decode_engine == 0;
    assert!(retried.outcomes.iter().filter(back).count() > 0, "it serves again");
    fleet.routing.retries = 0;
    let not_retried = result("kv", &trace, &fleet);
    assert!(ended(&not_retried, Ended::Failed) > failed);
    assert_eq!(not_retried.retries, 0);
    assert_eq!(retried, result("kv", &trace, &Fleet { routing: Default::default(), ..fleet }));
}

#[test]
fn with_every_engine_away_no_worker_is_left_until_one_is_back() {
    let mut fleet = fleet(&[(Role::Aggregated, 2)]);
    fleet.outages = (0..2).map(|engine| Outage { engine, from_s: 2.0, for_s: 5.0 }).collect();
    let result = result("least-loaded", &prompts(200), &fleet);
    assert!(ended(&result, Ended::NoWorker) > 10);
    let late = |outcome: &&Outcome| outcome.at > Duration::from_secs(10);
    assert!(result.outcomes.iter().filter(late).all(|outcome| outcome.ended == Ended::Complete));
}

#[test]
fn every_kind_of_handoff_and_both_orders_serve_a_pair() {
    let trace = prompts(60);
    for handoff in [HandoffKind::Completed, HandoffKind::Bootstrap, HandoffKind::Addressed] {
        for order in [LegOrder::PrefillFirst, LegOrder::DecodeFirst] {
            let mut fleet = fleet(&PAIRS);
            (fleet.routing.handoff, fleet.routing.order) = (handoff, order);
            let result = result("kv", &trace, &fleet);
            assert_eq!(ended(&result, Ended::Complete), 60, "{handoff:?} {order:?}");
            let split = |one: &Outcome| one.prefill_engine < 2 && (2..4).contains(&one.decode_engine);
            assert!(result.outcomes.iter().all(split));
            assert_eq!((result.stranded, result.retries), (0, 0), "{handoff:?} {order:?}");
        }
    }
}

#[test]
fn a_pull_transfers_the_blocks_that_the_decode_engine_lacks_and_other_handoffs_the_whole_prompt() {
    // A step takes 1 ms, and so does the transfer of a token. Two turns of 640 and 704 tokens; then the
    // second one again. A sequence uses no cached block with the last token, so that block is transferred.
    let request = |second: u32, isl: u32| TraceRequest {
        at: Duration::from_secs(10) * second,
        input_tokens: isl,
        output_tokens: 2,
        blocks: (0..u64::from(isl / 64)).collect(),
        ..TraceRequest::default()
    };
    let requests = vec![request(0, 640), request(1, 704), request(2, 704)];
    let trace = Trace { block_tokens: 64, requests, ..Trace::default() };
    let mut fleet = fleet(&[(Role::Prefill, 1), (Role::Decode, 1)]);
    let step_time = StepTimeSpec::Linear { c0: 1.0, c1: 0.0, c2: 0.0, c3: 0.0, c4: 0.0 };
    fleet.engines.iter_mut().for_each(|group| group.step_time = step_time);
    let (bytes_per_token, gigabytes_per_second, latency_ms) = (1_000_000, 1.0, 0.0);
    fleet.links = Links { bytes_per_token, gigabytes_per_second, latency_ms, ..fleet.links };
    for (handoff, transferred) in [
        (HandoffKind::Completed, [640, 64, 64]),
        (HandoffKind::Bootstrap, [640, 704, 704]),
        (HandoffKind::Addressed, [640, 704, 704]),
    ] {
        fleet.routing.handoff = handoff;
        let result = result("kv", &trace, &fleet);
        let ttft: Vec<u128> = result.outcomes.iter().map(|outcome| outcome.ttft.as_millis()).collect();
        assert_eq!(ttft, transferred.map(|tokens| tokens + 2), "{handoff:?}");
    }
}

#[test]
fn requests_without_a_place_of_decode_are_refused_before_their_prefill() {
    for order in [LegOrder::PrefillFirst, LegOrder::DecodeFirst] {
        let mut fleet = fleet(&[(Role::Prefill, 1), (Role::Decode, 1)]);
        if let Some(decode) = fleet.engines.get_mut(1) {
            decode.max_concurrency = Some(1);
        }
        (fleet.routing.retries, fleet.routing.order) = (0, order);
        let result = result("kv", &prompts(200), &fleet);
        assert!(ended(&result, Ended::Shed) > 20, "{order:?} {}", ended(&result, Ended::Shed));
        assert_eq!(result.stranded, 0, "{order:?}");
    }
}

#[test]
fn handoffs_whose_only_decode_engine_goes_away_are_stranded() {
    let mut fleet = fleet(&[(Role::Prefill, 1), (Role::Decode, 1)]);
    fleet.outages = vec![Outage { engine: 1, from_s: 3.0, for_s: 5.0 }];
    fleet.routing.retries = 0;
    let result = result("kv", &prompts(200), &fleet);
    assert!(result.stranded > 0);
    assert!(ended(&result, Ended::Complete) > 0);
}

#[test]
fn a_prefill_engine_that_goes_away_costs_a_retry_or_a_local_prefill() {
    let mut fleet = fleet(&[(Role::Prefill, 1), (Role::Decode, 2), (Role::Aggregated, 1)]);
    fleet.outages = vec![Outage { engine: 0, from_s: 3.0, for_s: 5.0 }];
    (fleet.routing.retries, fleet.routing.local_fallback) = (0, true);
    let result = result("kv", &prompts(200), &fleet);
    assert!(result.local_fallbacks > 0);
    assert_eq!(ended(&result, Ended::Complete) + ended(&result, Ended::Failed), 200);
}

#[test]
fn d4_requests_of_a_planned_engine_that_goes_away_run_over_a_pair() {
    let arm = "local=kv-aware+conditional-disagg@{\"enabled\": true, \"local-prompt-tokens\": 1000000}";
    for handoff in [HandoffKind::Completed, HandoffKind::Bootstrap, HandoffKind::Addressed] {
        let mut fleet = fleet(&[(Role::Prefill, 1), (Role::Decode, 2)]);
        fleet.routing.handoff = handoff;
        fleet.outages = vec![Outage { engine: 1, from_s: 5.0, for_s: 10.0 }];
        let retried = result(arm, &prompts(200), &fleet);
        let again: Vec<&Outcome> = retried.outcomes.iter().filter(|outcome| outcome.attempts > 1).collect();
        assert!(!again.is_empty(), "{handoff:?}");
        // D4.9
        assert!(
            again.iter().all(|outcome| (outcome.prefill_engine, outcome.decode_engine) == (0, 2)),
            "{again:?}"
        );
        assert_eq!(ended(&retried, Ended::Complete) + ended(&retried, Ended::Failed), 200);
    }
}

#[test]
fn the_oracle_is_faster_than_a_random_choice_and_serves_pairs() {
    let trace = prompts(300);
    for groups in [&[(Role::Aggregated, 4)][..], &PAIRS] {
        let fleet = fleet(groups);
        let e2e = |arm: &str| {
            let result = result(arm, &trace, &fleet);
            assert_eq!(ended(&result, Ended::Complete), 300);
            assert_eq!(result.fallbacks.len(), 0);
            mean(&result, |outcome| outcome.e2e)
        };
        let (oracle, random, kv) = (e2e("oracle"), e2e("random"), e2e("kv"));
        assert!(oracle < random && oracle <= kv.mul_f64(1.01), "{oracle:?} {random:?} {kv:?}");
    }
}

#[test]
fn outcomes_reach_a_policy_that_learns() {
    let file = tempfile::Builder::new().suffix(".wasm").tempfile().unwrap();
    std::fs::write(file.path(), pointsman_test_guests::LEARNED_TTFT).unwrap();
    // One engine is four times as slow. The policy does not see load, so it has to learn this.
    let mut fleet = fleet(&[(Role::Aggregated, 2), (Role::Aggregated, 1)]);
    if let Some(slow) = fleet.engines.get_mut(1) {
        slow.request_overhead_ms = 4_000.0;
    }
    let trace = prompts(400);
    let share = |arm: &str| {
        let result = result(arm, &trace, &fleet);
        let late = result.outcomes.iter().skip(200);
        late.filter(|outcome| outcome.decode_engine == 2).count()
    };
    let (learned, random) = (share(file.path().to_str().unwrap()), share("random"));
    assert!(learned * 3 < random, "{learned} {random}");
}

/// Runs the hostile guest in a mode. Every request must be served, if necessary by the fallback.
fn hostile(mode: &str) -> RunResult {
    hostile_after(mode, 20, &prompts(150))
}

/// Runs the hostile guest, whose instances misbehave after so many calls.
fn hostile_after(mode: &str, after: u32, trace: &Trace) -> RunResult {
    let file = tempfile::Builder::new().suffix(".wasm").tempfile().unwrap();
    std::fs::write(file.path(), pointsman_test_guests::HOSTILE).unwrap();
    let arm = format!("bad={}@{{\"mode\":\"{mode}\",\"after\":{after}}}", file.path().display());
    result(&arm, trace, &fleet(&[(Role::Aggregated, 2)]))
}

#[test]
fn a_spent_instance_is_replaced_before_the_next_call_whatever_the_real_time() {
    let run = |mode, after, requests| hostile_after(mode, after, &prompts(requests));
    let trapping = run("trap", 25, 1_000);
    // The trial call of each new instance is one of the 25 before its trap.
    // O8.1
    assert_eq!(trapping.fallbacks, BTreeMap::from([("trap", 40)]));
    // O8.1
    assert!(trapping == run("trap", 25, 1_000), "two runs differ");
    // Its memory is full after a thousand calls, like that of a script, and a CPU has two instances.
    // O8.1
    assert_eq!(run("leak", 0, 4_500).fallbacks, BTreeMap::new());
}

#[test]
fn a_policy_that_traps_or_answers_nonsense_is_an_outcome_and_no_abort() {
    // An instance that trapped is replaced.
    for (mode, least) in [("trap", 7), ("row", 130), ("error", 130)] {
        let result = hostile(mode);
        assert_eq!(ended(&result, Ended::Complete), 150, "{mode}");
        let fell_back = result.outcomes.iter().filter(|outcome| outcome.fell_back).count();
        assert!(fell_back >= least, "{mode}: {fell_back}");
        assert_eq!(
            result.fallbacks.values().sum::<u64>(),
            fell_back as u64,
            "{mode}: {:?}",
            result.fallbacks
        );
        assert!(!result.withdrawn, "{mode}");
    }
    let refused = hostile("refuse");
    assert!(ended(&refused, Ended::Shed) > 50);
}

#[test]
fn an_arm_that_sends_everything_to_one_engine_is_told() {
    // F10.3
    assert_eq!(hostile("good").one_sided, BTreeMap::from([(SlotKind::Aggregated, 149)]));
    let even = result("least-loaded", &prompts(150), &fleet(&[(Role::Aggregated, 2)]));
    // F10.3
    assert_eq!(even.one_sided, BTreeMap::new());
}

#[test]
fn a_policy_that_loops_is_an_outcome_and_the_run_ends() {
    let result = hostile("spin");
    assert_eq!(ended(&result, Ended::Complete), 150);
    assert!(result.fallbacks.contains_key("timeout"), "{:?}", result.fallbacks);
}

#[test]
fn a_fleet_file_has_the_words_of_the_daemon() {
    let fleet = parse(
        "block_tokens = 64\n[[engines]]\ncount = 2\n[[outages]]\nengine = 1\nfrom_s = 1\nfor_s = 2.5\n\
         [routing]\nhandoff = \"bootstrap\"\norder = \"decode-first\"\nretries = 1\nlocal_fallback = true\n\
         session_affinity = \"5m\"\nbusy = { decode = { kv_usage = 0.9 } }\n\
         [queue]\nlimit = 10\ntimeout = \"2s\"\n[probe]\ninterval = \"500ms\"\n",
    );
    assert_eq!(fleet.routing.handoff, HandoffKind::Bootstrap);
    assert_eq!(fleet.routing.session_affinity, Duration::from_secs(300));
    assert_eq!((fleet.queue.limit, fleet.queue.timeout), (10, Duration::from_secs(2)));
    let table = [
        ("[routing]\nbusy = { decode = { kv_usage = 1.5 } }", "routing.busy.decode.kv_usage"),
        ("[routing]\nsession_affinity = \"800d\"", "routing.session_affinity"),
        ("[queue]\ntimeout = \"800d\"", "queue.timeout"),
        ("[probe]\ninterval = \"1ms\"", "probe.interval: 1ms is not within 10ms to 1h"),
        ("[[outages]]\nengine = 2\nfrom_s = 0\nfor_s = 1", "outages[0].engine: 2 is not within 0 to 1"),
        ("[[outages]]\nengine = 1\nfrom_s = -1\nfor_s = 1", "outages[0].from_s"),
    ];
    for (text, message) in table {
        let fleet: Fleet = toml::from_str(&format!("{text}\n[[engines]]\ncount = 2\n")).unwrap();
        let error = fleet.check().unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    let error = toml::from_str::<Fleet>("[routing]\nhandoff = \"pull\"\n").unwrap_err().to_string();
    assert!(error.contains("handoff"), "{error}");
}

#[test]
fn under_overload_the_gateway_s_order_meets_more_targets_than_edf_and_fifo() {
    let mut fleet = fleet(&[(Role::Aggregated, 1)]);
    fleet.engines.iter_mut().for_each(|group| group.max_concurrency = Some(1));
    fleet.queue.limit = 1_000;
    let request = |number: u32| TraceRequest {
        at: Duration::from_millis(120) * number,
        input_tokens: 2_000,
        output_tokens: 20,
        targets: Targets { ttft: Some(Duration::from_secs([1, 3, 9][number as usize % 3])), itl: None },
        ..TraceRequest::default()
    };
    let requests = (0..1_000).map(request).collect();
    let trace = Trace { block_tokens: 64, requests, ..Trace::default() };
    let [gateway, edf, fifo] = ["kv", "kv+edf", "kv+fifo"].map(|arm| result(arm, &trace, &fleet));
    let good = |result: &RunResult| {
        let meets = |outcome: &&Outcome| outcome.targets.ttft.is_some_and(|target| outcome.ttft <= target);
        let complete = result.outcomes.iter().filter(|outcome| outcome.ended == Ended::Complete);
        complete.filter(meets).count()
    };
    // The engine serves as many requests in each order.
    let possible = ended(&fifo, Ended::Complete);
    assert!(possible < 900, "no overload: {possible} were served");
    let good = [&gateway, &edf, &fifo].map(good);
    assert!(good[0] * 10 > possible * 8 && good[0] > 2 * good[1].max(good[2]), "{good:?} of {possible}");
}
