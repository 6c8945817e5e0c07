//! Several gateways in front of the same engines.

#![allow(clippy::unwrap_used, missing_docs, reason = "a test")]

use std::time::Duration;

use pointsman_lab::{
    Arm, Ended, EngineGroup, ExchangedMessages, Fleet, GatewayGroup, RunOptions, RunResult, Trace,
    generate::{Shape, Workload, generate},
    run,
};
use pointsman_workers::Role;

fn fleet(gateways: GatewayGroup) -> Fleet {
    // Load figures are read rarely, so only bookings show differences between engines.
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
    let told = GatewayGroup { count: 8, ..GatewayGroup::default() };
    let alone = GatewayGroup { exchange: false, ..told };
    let [one, eight, informed] = [GatewayGroup::default(), alone, told].map(result);
    for result in [&one, &eight, &informed] {
        assert!(result.outcomes.iter().all(|outcome| outcome.ended == Ended::Complete));
    }
    assert!(mean_ttft(&eight) > mean_ttft(&one), "{:?} {:?}", mean_ttft(&eight), mean_ttft(&one));
    assert!(mean_ttft(&eight) > mean_ttft(&informed), "{:?} {:?}", mean_ttft(&eight), mean_ttft(&informed));
    assert_eq!(informed, result(told));
    // A booking changes three times: it begins, its prefill completes, and it ends.
    let requests = informed.outcomes.len() as u64;
    assert!(
        informed.exchanged.messages > requests && informed.exchanged.bytes > 50 * requests,
        "{:?}",
        informed.exchanged
    );
    assert_eq!(
        (one.exchanged, eight.exchanged),
        (ExchangedMessages::default(), ExchangedMessages::default())
    );
}

#[test]
fn gateways_that_hear_of_each_booking_at_once_share_one_view_of_the_load() {
    let at_once = GatewayGroup { count: 8, interval: Duration::ZERO, ..GatewayGroup::default() };
    let late = GatewayGroup { delay: Duration::from_secs(2), ..at_once };
    let [one, at_once, late] = [GatewayGroup::default(), at_once, late].map(result);
    assert!(mean_ttft(&at_once).as_secs_f64() < mean_ttft(&one).as_secs_f64() * 1.02);
    assert!(mean_ttft(&late) > mean_ttft(&at_once));
}

#[test]
fn a_number_of_gateways_out_of_range_is_refused() {
    for count in [0, 65] {
        let error = fleet(GatewayGroup { count, ..GatewayGroup::default() }).check().unwrap_err();
        assert!(error.to_string().contains("gateways.count"), "{error}");
    }
}
