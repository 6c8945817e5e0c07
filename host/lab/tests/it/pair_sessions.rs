//! Sessions whose prompts grow, on prefill and decode engines with slow links between them.

#![allow(clippy::unwrap_used, missing_docs, reason = "a test")]

use std::time::Duration;

use pointsman_lab::{
    Arm, EngineGroup, Fleet, Links, RunOptions, RunResult, StepTimeSpec, Trace, TraceRequest, run,
};
use pointsman_workers::Role;

const SESSIONS: u32 = 24;
const TURNS: u32 = 8;
/// Tokens that each turn adds to the prompt.
const NEW: u32 = 1_024;

/// Two prefill and four decode engines. A token's KV of 128 KiB takes 26 µs on its way.
fn fleet() -> Fleet {
    let step_time = StepTimeSpec::Linear { c0: 6.0, c1: 0.02, c2: 0.000_05, c3: 0.02, c4: 0.0 };
    let group = |role, count| EngineGroup { step_time, blocks: Some(8_192), ..EngineGroup::new(role, count) };
    let engines = vec![group(Role::Prefill, 2), group(Role::Decode, 4)];
    let links =
        Links { bytes_per_token: 131_072, gigabytes_per_second: 5.0, latency_ms: 5.0, ..Links::default() };
    Fleet { block_tokens: 64, engines, links, ..Fleet::default() }
}

/// Every session has a turn in each ten seconds, in another order each time.
fn trace() -> Trace {
    let request = |turn: u32, place: u32| {
        let session = u64::from((place * 7 + turn * 5) % SESSIONS);
        let input_tokens = NEW * (turn + 1);
        TraceRequest {
            at: Duration::from_secs(10) * turn + Duration::from_millis(400) * place,
            input_tokens,
            output_tokens: 60,
            blocks: (0..u64::from(input_tokens / 64)).map(|block| session * 10_000 + block).collect(),
            ..TraceRequest::default()
        }
    };
    let requests = (0..TURNS).flat_map(|turn| (0..SESSIONS).map(move |place| request(turn, place))).collect();
    Trace { block_tokens: 64, requests, ..Trace::default() }
}

fn mean_ttft(arm: &str) -> Duration {
    let result: RunResult =
        run(&Arm::parse(arm).unwrap(), &trace(), &fleet(), RunOptions::default()).unwrap();
    let all: Duration = result.outcomes.iter().map(|outcome| outcome.ttft).sum();
    all / (SESSIONS * TURNS)
}

#[test]
fn g4_the_next_turn_of_a_session_decodes_where_its_kv_is() {
    let [default, anywhere] = ["default", "anywhere=kv-aware+predicted-disagg"].map(mean_ttft);
    // G4.5
    assert!(default * 4 < anywhere * 3, "mean TTFT: {default:?}, and {anywhere:?} where load alone counts");
}
