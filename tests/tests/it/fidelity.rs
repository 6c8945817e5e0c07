//! The gateway and the lab decide alike: the same requests, engines of the same model and the same draws give
//! the same choices and the same cache hits.

#![allow(clippy::disallowed_methods, reason = "servers of tests end with them")]

use std::{sync::Arc, time::Duration};

use pointsman_lab::{Arm, Draws, EngineGroup, Fleet, Outcome, RunOptions, StepTimeSpec, Trace, TraceRequest};
use pointsman_sim::{Dialect, Role, SimConfig, core::StepTime};
use pointsman_tests::{TestCluster, TestClusterBuilder};
use serde_json::{Value, json};
use tokio::time::Instant;

const BLOCK: u32 = 64;
const BLOCKS: u32 = 20;
const ENGINES: u32 = 3;
const ROUNDS: u64 = 6;
/// Requests of a round run at the same time.
const TALKS: u64 = 4;
/// A step takes this long, milliseconds: the requests of a round are routed before any of them has a token.
const STEP_MS: f64 = 1_000.0;

/// Conversations that grow by two blocks a turn, after a common first block. The caches are too small for
/// all.
fn trace() -> Trace {
    let request = |round: u64, place: u64| {
        let talk = (place + round) % TALKS;
        let own = (0..2 * (round + 1)).map(|block| 1_000 * (talk + 1) + block);
        let blocks: Vec<u64> = std::iter::once(7).chain(own).collect();
        TraceRequest {
            at: Duration::from_secs(round * 10) + Duration::from_millis(place),
            input_tokens: u32::try_from(blocks.len()).unwrap() * BLOCK,
            output_tokens: 2,
            blocks: blocks.into(),
            ..TraceRequest::default()
        }
    };
    let requests = (0..ROUNDS).flat_map(|round| (0..TALKS).map(move |place| request(round, place))).collect();
    Trace { block_tokens: BLOCK, requests, ..Trace::default() }
}

fn engine() -> SimConfig {
    SimConfig {
        block_size: BLOCK,
        blocks: BLOCKS,
        kv_events: true,
        step_time: Some(StepTime::Linear { c0: STEP_MS, c1: 0.0, c2: 0.0, c3: 0.0, c4: 0.0 }),
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    }
}

/// Outcome of a request for its client, and the seed of its decision.
#[derive(Debug, Default)]
struct Seen {
    worker: u64,
    seed: u64,
    cached: u64,
    took: Duration,
}

/// Sends the trace in rounds: the next one when the last one is over and the index knows what it cached.
async fn play(cluster: &Arc<TestCluster>, trace: &Trace) -> Vec<Seen> {
    let mut all = Vec::new();
    let per_round = usize::try_from(TALKS).unwrap();
    for round in 0..trace.requests.len() / per_round {
        let mut answers = Vec::new();
        for number in round * per_round..(round + 1) * per_round {
            let body = json!({
                "model": "tiny", "prompt": trace.prompt_token_ids(number), "ignore_eos": true,
                "max_tokens": trace.requests[number].output_tokens,
            });
            let asked = Arc::clone(cluster);
            answers.push(tokio::spawn(async move {
                let (id, started) = (format!("request-{number}"), Instant::now());
                let headers = [("x-request-id", id.as_str())];
                let reply = asked.client.post("/v1/completions", &headers, body.to_string()).await.unwrap();
                assert_eq!(reply.status, 200, "{reply:?}");
                (reply.json().unwrap(), started.elapsed())
            }));
            let routed = |cluster: &TestCluster| cluster.gateway.state().router.decisions().ids().len();
            cluster.until("it is routed", |cluster| routed(cluster) == number + 1).await.unwrap();
        }
        for answer in answers {
            let (answer, took) = answer.await.unwrap();
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            all.push(Seen { cached, took, ..Seen::default() });
        }
        cluster.at_rest().await.unwrap();
        cluster.kv_events_applied().await.unwrap();
    }
    let export = cluster.admin.get("/decisions/export").await.unwrap();
    for line in String::from_utf8(export.body.to_vec()).unwrap().lines() {
        let receipt: Value = serde_json::from_str(line).unwrap();
        let number = receipt["request_id"].as_str().unwrap().strip_prefix("request-").unwrap();
        let seen = &mut all[number.parse::<usize>().unwrap()];
        seen.worker = receipt["choice"]["worker"].as_u64().unwrap();
        seen.seed = receipt["call"]["seed"].as_u64().unwrap();
    }
    all
}

/// Runs the trace in the lab with the gateway's draws.
fn simulate(trace: Trace, draws: Draws) -> Vec<Outcome> {
    let step_time = StepTimeSpec::Linear { c0: STEP_MS, c1: 0.0, c2: 0.0, c3: 0.0, c4: 0.0 };
    let group = EngineGroup {
        blocks: Some(BLOCKS),
        step_time,
        ..EngineGroup::new(pointsman_workers::Role::Aggregated, ENGINES)
    };
    let fleet = Fleet { block_tokens: BLOCK, engines: vec![group], ..Fleet::default() };
    let arm = Arm::parse("kv").unwrap();
    // The lab brings its own runtime, with a clock that it moves.
    let run = move || pointsman_lab::run_with_draws(&arm, &trace, &fleet, RunOptions::default(), draws);
    std::thread::spawn(run).join().unwrap().unwrap().outcomes
}

#[tokio::test]
async fn the_lab_decides_as_the_gateway_does() {
    let mut builder = TestClusterBuilder::new().config(|config| {
        config.routing.block_size = BLOCK;
        let entry = toml::from_str("builtin = 'kv-aware'").unwrap();
        config.policies.slots.insert(pointsman_routing::SlotKind::Aggregated, entry);
    });
    for _ in 0..ENGINES {
        builder = builder.sim_with(engine(), "");
    }
    let cluster = Arc::new(builder.start().await);
    cluster.kv_events_live().await.unwrap();
    let trace = trace();
    let seen = play(&cluster, &trace).await;
    let draws = seen.iter().enumerate();
    let draws =
        draws.map(|(number, seen)| ((number, pointsman_workers::Leg::Aggregated), seen.seed)).collect();
    let outcomes = simulate(trace, draws);

    let real: Vec<(u64, u64)> = seen.iter().map(|seen| (seen.worker, seen.cached)).collect();
    let worker = |outcome: &Outcome| u64::from(outcome.prefill_engine) + 1;
    let lab: Vec<(u64, u64)> =
        outcomes.iter().map(|outcome| (worker(outcome), u64::from(outcome.cached))).collect();
    assert_eq!(real, lab, "chosen workers and cached tokens");
    assert!(
        real.iter().any(|(_, cached)| *cached > u64::from(2 * BLOCK)),
        "no conversation found its prefix"
    );
    let used = |worker| real.iter().any(|(chosen, _)| *chosen == worker);
    assert!((1..=u64::from(ENGINES)).all(used), "not every engine was chosen");
    let evicted: u64 = cluster.sims.iter().map(|sim| sim.state().evicted_blocks).sum();
    assert!(evicted > 0, "no cache was too small");

    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64()
    };
    let real = median(seen.iter().map(|seen| seen.took).collect());
    let virtual_ = median(outcomes.iter().map(|outcome| outcome.e2e).collect());
    // A busy machine is late and never early.
    assert!((0.95..2.0).contains(&(real / virtual_)), "{real} s in real time, {virtual_} s in the lab");
}
