//! Many requests share one long prompt, on engines that are not busy.

#![allow(clippy::unwrap_used, missing_docs, reason = "a test")]

use std::{collections::BTreeMap, time::Duration};

use pointsman_lab::{Arm, EngineGroup, Fleet, RunOptions, RunResult, StepTimeSpec, Trace, TraceRequest, run};
use pointsman_workers::Role;

/// Tokens of the prompt that all requests share.
const SHARED: u32 = 8_192;

fn fleet() -> Fleet {
    let step_time = StepTimeSpec::Linear { c0: 6.0, c1: 0.02, c2: 0.000_05, c3: 0.02, c4: 0.0 };
    let group = EngineGroup { step_time, blocks: Some(4_096), ..EngineGroup::new(Role::Aggregated, 4) };
    Fleet { block_tokens: 64, engines: vec![group], ..Fleet::default() }
}

/// Four requests a second, each with 60 tokens of its own behind the prompt.
fn trace() -> Trace {
    let request = |number: u32| TraceRequest {
        at: Duration::from_millis(250) * number,
        input_tokens: SHARED + 60,
        output_tokens: 100 + number * 37 % 300,
        blocks: (0..u64::from(SHARED / 64)).chain([1_000_000 + u64::from(number)]).collect(),
        ..TraceRequest::default()
    };
    Trace { block_tokens: 64, requests: (0..200).map(request).collect(), ..Trace::default() }
}

fn result(arm: &str) -> RunResult {
    run(&Arm::parse(arm).unwrap(), &trace(), &fleet(), RunOptions::default()).unwrap()
}

fn mean_e2e(result: &RunResult) -> f64 {
    let all: Duration = result.outcomes.iter().map(|outcome| outcome.e2e).sum();
    all.as_secs_f64() / f64::from(u32::try_from(result.outcomes.len()).unwrap())
}

#[test]
fn g4_a_prompt_that_all_requests_share_is_computed_on_idle_workers_too() {
    let [default, spread] = ["default", "least-loaded"].map(result);
    let mut served: BTreeMap<u32, u32> = BTreeMap::new();
    for outcome in &default.outcomes {
        *served.entry(outcome.decode_engine).or_default() += 1;
    }
    // G4.4
    assert!(served.len() > 2 && served.values().all(|requests| *requests < 130), "{served:?}");
    let ratio = mean_e2e(&default) / mean_e2e(&spread);
    // G4.4
    assert!(ratio < 1.1, "{ratio} times the time of requests that are spread evenly");
}
