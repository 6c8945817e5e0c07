//! Arrivals of the turns of a session: after the answers of the arm that serves them, or at the times of the
//! trace.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs, reason = "a test")]

use std::{collections::HashMap, time::Duration};

use pointsman_lab::{
    Arm, Ended, EngineGroup, Fleet, Outcome, RunOptions, RunResult, StepTimeSpec, Trace, TraceRequest,
    generate::{Shape, Workload, generate},
    run,
};
use pointsman_workers::Role;

/// Returns engines whose steps take this number of milliseconds.
fn fleet(engines: u32, step_ms: f64) -> Fleet {
    let step_time = StepTimeSpec::Linear { c0: step_ms, c1: 0.0, c2: 0.0, c3: 0.0, c4: 0.0 };
    let group =
        EngineGroup { step_time, blocks: Some(65_536), ..EngineGroup::new(Role::Aggregated, engines) };
    Fleet { block_tokens: 64, engines: vec![group], ..Fleet::default() }
}

fn turn(session: &str, at_s: u64, delay_s: Option<u64>) -> TraceRequest {
    TraceRequest {
        at: Duration::from_secs(at_s),
        input_tokens: 640,
        output_tokens: 10,
        session: Some(session.to_owned()),
        delay: delay_s.map(Duration::from_secs),
        ..TraceRequest::default()
    }
}

fn trace(requests: Vec<TraceRequest>) -> Trace {
    Trace { block_tokens: 64, requests, ..Trace::default() }
}

fn result(trace: &Trace, fleet: &Fleet, options: RunOptions) -> RunResult {
    run(&Arm::parse("kv").unwrap(), trace, fleet, options).unwrap()
}

fn fixed_schedule() -> RunOptions {
    RunOptions { fixed_schedule: true, ..RunOptions::default() }
}

fn end(outcome: &Outcome) -> Duration {
    outcome.at + outcome.e2e
}

#[test]
fn a_turn_arrives_later_in_a_slow_arm_by_what_the_answer_before_it_took_longer() {
    let trace = trace(vec![turn("a", 0, None), turn("a", 60, Some(3))]);
    let [fast, slow] = [5.0, 50.0].map(|step_ms| result(&trace, &fleet(1, step_ms), RunOptions::default()));
    for outcomes in [&fast.outcomes, &slow.outcomes] {
        assert_eq!(outcomes[1].at, end(&outcomes[0]) + Duration::from_secs(3));
    }
    let slower = slow.outcomes[0].e2e - fast.outcomes[0].e2e;
    // Ten tokens take one step each.
    assert_eq!(slower, Duration::from_millis(450));
    assert_eq!(slow.outcomes[1].at - fast.outcomes[1].at, slower);
}

#[test]
fn with_a_fixed_schedule_a_turn_arrives_at_its_time_or_its_delay_after_a_late_answer() {
    let trace = trace(vec![turn("a", 0, None), turn("a", 60, Some(3)), turn("a", 61, Some(3))]);
    for step_ms in [5.0, 50.0] {
        let outcomes = result(&trace, &fleet(1, step_ms), fixed_schedule()).outcomes;
        assert_eq!(outcomes[1].at, Duration::from_secs(60));
        assert_eq!(outcomes[2].at, end(&outcomes[1]) + Duration::from_secs(3));
    }
}

#[test]
fn a_trace_without_sessions_or_with_their_starts_as_times_runs_equally_in_both_loops() {
    let shapes =
        [Shape::Chat { turns: 5 }, Shape::SystemPrompts { prompts: 9 }, Shape::Documents { documents: 9 }];
    for shape in shapes {
        let trace = generate(&Workload { shape, requests: 100, rate: 4.0, burstiness: 2.0, seed: 2 });
        let [closed, open] = [RunOptions::default(), fixed_schedule()].map(|options| {
            result(&trace, &fleet(2, 20.0), RunOptions { jitter: Duration::from_millis(20), ..options })
        });
        assert_eq!(closed, open, "{shape:?}");
    }
}

#[test]
fn speed_moves_the_starts_of_sessions_and_leaves_the_pauses() {
    let trace = trace(vec![turn("a", 0, None), turn("b", 40, None), turn("b", 80, Some(3))]);
    let outcomes =
        result(&trace, &fleet(1, 5.0), RunOptions { speed: 4.0, ..RunOptions::default() }).outcomes;
    assert_eq!(outcomes[1].at, Duration::from_secs(10));
    assert_eq!(outcomes[2].at, end(&outcomes[1]) + Duration::from_secs(3));
}

#[test]
fn a_session_goes_on_after_a_refusal() {
    let mut fleet = fleet(1, 50.0);
    fleet.engines[0].max_concurrency = Some(1);
    let trace = trace(vec![turn("a", 0, None), turn("b", 0, None), turn("b", 0, Some(3))]);
    let outcomes = result(&trace, &fleet, RunOptions::default()).outcomes;
    let ended: Vec<Ended> = outcomes.iter().map(|outcome| outcome.ended).collect();
    assert_eq!(ended, [Ended::Complete, Ended::Shed, Ended::Complete]);
    assert_eq!(outcomes[2].at, Duration::from_secs(3));
}

#[test]
fn forks_start_when_their_parent_s_answer_ends_and_the_parent_waits_for_them() {
    let fork = |name: &str| TraceRequest { parent: Some("a".to_owned()), ..turn(name, 0, None) };
    let mut long = fork("c");
    long.output_tokens = 200;
    let join = TraceRequest { join: true, ..turn("a", 0, Some(2)) };
    let trace = trace(vec![turn("a", 0, None), fork("b"), long, turn("b", 0, Some(1)), join]);
    let outcomes = result(&trace, &fleet(2, 20.0), RunOptions::default()).outcomes;
    assert_eq!([outcomes[1].at, outcomes[2].at], [end(&outcomes[0]); 2]);
    let last = end(&outcomes[2]).max(end(&outcomes[3]));
    assert_eq!(outcomes[4].at, last + Duration::from_secs(2));
}

#[test]
fn agents_have_one_request_in_flight_and_equal_seeds_give_equal_runs() {
    let shape = Shape::Agents { groups: 4 };
    let trace = generate(&Workload { shape, requests: 300, rate: 0.5, burstiness: 1.0, seed: 3 });
    assert!(trace.requests.iter().any(|request| request.join));
    // The engines are faster than those of the trace, so a fixed schedule is later.
    let fleet = fleet(4, 10.0);
    let closed = result(&trace, &fleet, RunOptions::default());
    assert!(closed == result(&trace, &fleet, RunOptions::default()));
    assert!(closed.span < result(&trace, &fleet, fixed_schedule()).span);
    let mut ends: HashMap<&str, Duration> = HashMap::new();
    for (request, outcome) in trace.requests.iter().zip(&closed.outcomes) {
        assert_eq!(outcome.ended, Ended::Complete);
        let session = request.session.as_deref().unwrap();
        if let Some(parent) = request.parent.as_deref() {
            assert_eq!(outcome.at, ends[parent], "{session}");
        }
        if let Some(before) = ends.insert(session, end(outcome)) {
            let after = before + request.delay.unwrap();
            assert!(outcome.at >= after && (request.join || outcome.at == after), "{session}");
        }
    }
}
