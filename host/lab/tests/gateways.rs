//! Several gateways in front of the same engines.

#![allow(clippy::unwrap_used, missing_docs, reason = "a test")]

use std::time::Duration;

use pointsman_lab::{
    Arm, Ended, EngineGroup, Fleet, GatewayGroup, RunOptions, RunResult, Trace,
    generate::{Shape, Workload, generate},
    run,
};
use pointsman_workers::Role;

fn fleet(gateways: GatewayGroup) -> Fleet {
    // Load figures that are read rarely: bookings tell engines apart.
    let engines = vec![EngineGroup::new(Role::Aggregated, 16)];
    Fleet { block_tokens: 64, engines, scrape_interval_ms: 5_000.0, gateways, ..Fleet::default() }
}

fn trace() -> Trace {
    let shape = Shape::Documents { documents: 5_000 };
    generate(&Workload { shape, requests: 300, rate: 40.0, burstiness: 1.0, seed: 5 })
}

fn result(gateways: GatewayGroup) -> RunResult {
    let arm = Arm::parse("least-loaded").unwrap();
    run(&arm, &trace(), &fleet(gateways), RunOptions::default()).unwrap()
}

fn mean_ttft(result: &RunResult) -> Duration {
    let count = u32::try_from(result.outcomes.len()).unwrap();
    result.outcomes.iter().map(|outcome| outcome.ttft).sum::<Duration>() / count
}

#[test]
fn gateways_that_do_not_tell_their_bookings_route_worse_than_one_and_runs_repeat() {
    let alone = GatewayGroup { count: 8, ..GatewayGroup::default() };
    let [one, eight] = [GatewayGroup::default(), alone].map(result);
    for result in [&one, &eight] {
        assert!(result.outcomes.iter().all(|outcome| outcome.ended == Ended::Complete));
    }
    assert!(mean_ttft(&eight) > mean_ttft(&one), "{:?} {:?}", mean_ttft(&eight), mean_ttft(&one));
    assert_eq!(eight, result(alone));
}

#[test]
fn a_number_of_gateways_out_of_range_is_refused() {
    for count in [0, 65] {
        let error = fleet(GatewayGroup { count, ..GatewayGroup::default() }).check().unwrap_err();
        assert!(error.to_string().contains("gateways.count"), "{error}");
    }
}
