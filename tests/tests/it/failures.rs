//! Failure paths: engines that refuse, break, stall or send wrong data, and clients that disconnect. No
//! booking leaks, no handoff is stranded, no answer is repeated.

use std::time::Duration;

use pointsman_sim::{Dialect, Fault, FaultKind, FaultLeg, Role, SimConfig};
use pointsman_tests::{CHAT, TestCluster, TestClusterBuilder};
use pointsman_workers::WorkerId;
use serde_json::{Value, json};

fn chat(stream: bool, tokens: u32) -> String {
    json!({
        "model": "tiny", "stream": stream, "max_tokens": tokens, "ignore_eos": true,
        "messages": [{"role": "user", "content": "failure is an option here ".repeat(10)}],
    })
    .to_string()
}

fn status(status: u16) -> FaultKind {
    FaultKind::Status { status, retry_after: None }
}

fn once(kind: FaultKind) -> Vec<Fault> {
    vec![Fault { times: Some(1), ..Fault::always(kind) }]
}

fn paced(role: Role) -> SimConfig {
    SimConfig { itl: Duration::from_millis(10), ..SimConfig::instant(Dialect::Vllm, role) }
}

async fn reply(cluster: &TestCluster, stream: bool) -> (u16, String) {
    let reply = cluster.client.post(CHAT, &[], chat(stream, 5)).await.unwrap();
    (reply.status.as_u16(), reply.code())
}

/// Returns the error code in the last event of a broken stream. Every event must be valid JSON.
async fn broken(cluster: &TestCluster) -> String {
    let events = cluster.client.stream(CHAT, &[], chat(true, 20)).await.unwrap().all().await.unwrap();
    for event in events.iter().filter(|event| *event != "[DONE]") {
        serde_json::from_str::<Value>(event).unwrap_or_else(|error| panic!("{error}: {event}"));
    }
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    last["error"]["code"].as_str().unwrap_or("none").to_owned()
}

#[tokio::test]
async fn a_failed_leg_is_tried_elsewhere_before_the_first_byte() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = TestCluster::disaggregated(dialect, 2, 2).await.unwrap();
        for (place, kind) in
            [(0, status(500)), (1, FaultKind::Refuse), (2, status(503)), (3, FaultKind::Refuse)]
        {
            // The worker that is asked first fails once.
            let pair = if place < 2 { [0, 1] } else { [2, 3] };
            for sim in pair {
                cluster.sims[sim].set_faults(vec![]);
            }
            // One that answered 503 is left alone for a moment.
            cluster
                .until("no worker is paused", |cluster| {
                    let snapshot = cluster.gateway.state().registry.snapshot();
                    snapshot.workers().iter().all(|worker| worker.pause().is_none())
                })
                .await
                .unwrap();
            let fired = cluster.sims[place].state().faults_fired.values().sum::<u64>();
            cluster.sims[place].set_faults(once(kind.clone()));
            // Prompts differ, so that the policy sends some of them to the worker that fails.
            for turn in 0..40 {
                let body = chat(false, 5).replacen("failure", &format!("{turn} {place} failure"), 1);
                let reply = cluster.client.post(CHAT, &[], body).await.unwrap();
                // I2.1
                assert_eq!(reply.status, 200, "{dialect:?} worker {place} {kind:?}: {reply:?}");
                if cluster.sims[place].state().faults_fired.values().sum::<u64>() > fired {
                    break;
                }
            }
            let hits = cluster.sims[place].state().faults_fired.values().sum::<u64>() - fired;
            assert_eq!(hits, 1, "{dialect:?} worker {place} {kind:?} was never asked");
        }
        cluster.at_rest().await.unwrap();
    }
}

/// Two engines, the first of which is always tried first.
async fn in_order() -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        let by_turn = "[aggregated]\nbuiltin = 'formula'\nsettings = { cost = \"label_number('turn')\" }";
        config.policies.slots = toml::from_str(by_turn).unwrap();
    });
    let builder = [0, 1].iter().fold(builder, |builder, turn| {
        builder.sim_with(paced(Role::Aggregated), &format!(",label.turn={turn}"))
    });
    builder.start().await
}

#[tokio::test]
async fn a_stream_that_was_retried_is_recorded_by_how_it_ended() {
    let cluster = in_order().await;
    cluster.sims[0].set_faults(once(status(500)));
    let events = cluster.client.stream(CHAT, &[], chat(true, 5)).await.unwrap().all().await.unwrap();
    assert_eq!(events.last().unwrap(), "[DONE]");
    assert_eq!(cluster.sims[0].state().faults_fired.values().sum::<u64>(), 1);
    cluster.at_rest().await.unwrap();
    let served =
        "pointsman_requests_total{endpoint=\"chat_completions\",model=\"tiny\",status=\"200\",code=\"ok\"}";
    // I2.10
    assert_eq!(cluster.metric(served).await.unwrap(), [1.0]);
    cluster.sims[0].set_faults(once(status(503)));
    cluster.sims[1].set_faults(once(FaultKind::Cut { after_tokens: 3 }));
    // I2.10: the second engine broke; that the first one was busy is not a reason to come back
    assert_eq!(broken(&cluster).await, "bad_upstream");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i_an_engine_s_4xx_passes_unchanged_and_is_not_retried() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    cluster.sims[0].set_faults(once(status(422)));
    let reply = cluster.client.post(CHAT, &[], chat(false, 5)).await.unwrap();
    assert_eq!(reply.status, 422);
    assert!(reply.json().unwrap()["error"]["message"].is_string());
    // I2.4
    assert_eq!(cluster.sims[0].state().requests.values().sum::<u64>(), 1);
}

#[tokio::test]
async fn c7a_incomplete_parameters_are_refused_and_the_decode_engine_lives() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    cluster.sims[0].set_faults(once(FaultKind::PartialParams { field: "remote_block_ids".into() }));
    let answer = cluster.client.post(CHAT, &[], chat(false, 5)).await.unwrap();
    // C7a.3
    assert_eq!((answer.status.as_u16(), answer.code()), (502, "bad_upstream".into()));
    assert!(String::from_utf8_lossy(&answer.body).contains("remote_block_ids"), "{answer:?}");
    // C7a.2
    assert!(!cluster.sims[1].state().dead);
    assert_eq!(reply(&cluster, false).await.0, 200);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c8_an_answer_that_ends_in_prefill_passes_unchanged() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::FirstTokenEos)]);
    let whole = cluster.client.post(CHAT, &[], chat(false, 5)).await.unwrap().json().unwrap();
    // C8.1
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let events = cluster.client.stream(CHAT, &[], chat(true, 5)).await.unwrap().all().await.unwrap();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let first: Value = serde_json::from_str(&events[0]).unwrap();
    // C8.3
    assert_eq!(
        (&first["object"], &first["choices"][0]["finish_reason"]),
        (&json!("chat.completion.chunk"), &json!("stop"))
    );
    // C8.2
    assert_eq!(cluster.sims[1].state().requests.values().sum::<u64>(), 0, "no decode was started");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i_a_stream_that_breaks_ends_with_one_valid_error_event() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = TestCluster::disaggregated(dialect, 1, 1).await.unwrap();
        for kind in [FaultKind::Cut { after_tokens: 3 }, FaultKind::Garbage { after_tokens: 3 }] {
            cluster.sims[1].set_faults(once(kind.clone()));
            let events = cluster.client.stream(CHAT, &[], chat(true, 20)).await.unwrap().all().await.unwrap();
            let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
            // I1.2
            assert_eq!(last["error"]["code"], "bad_upstream", "{dialect:?} {kind:?}: {events:?}");
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i_a_wrong_content_type_is_a_bad_upstream() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::WrongContentType)]);
    assert_eq!(reply(&cluster, true).await, (502, "bad_upstream".into()));
    assert_eq!(reply(&cluster, false).await, (502, "bad_upstream".into()));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i_bad_upstream_a_whole_answer_that_was_cut_is_never_passed_on() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.routing.retries = 0)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    for kind in [FaultKind::Garbage { after_tokens: 1 }, FaultKind::Cut { after_tokens: 1 }] {
        cluster.sims[0].set_faults(once(kind));
        assert_eq!(reply(&cluster, false).await, (502, "bad_upstream".into()));
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i_the_deadline_ends_hangs_and_stalls() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.timeouts.request = Duration::from_millis(300))
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    cluster.sims[0].set_faults(once(FaultKind::HangBeforeHeaders));
    assert_eq!(reply(&cluster, true).await, (504, "deadline".into()));
    cluster.sims[0].set_faults(once(FaultKind::Stall { after_tokens: 2 }));
    assert_eq!(broken(&cluster).await, "deadline");
    cluster.sims[0].set_faults(once(FaultKind::HangAfterHeaders));
    assert_eq!(broken(&cluster).await, "deadline");
    cluster.at_rest().await.unwrap();
    cluster.until("the engine is free", |cluster| cluster.sims[0].state().running == 0).await.unwrap();
}

#[tokio::test]
async fn e3_a_failed_sglang_prefill_cancels_its_decode_at_once() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.routing.retries = 0)
        .pair(Dialect::Sglang)
        .start()
        .await;
    cluster.sims[0].set_faults(vec![Fault::always(status(500))]);
    let started = tokio::time::Instant::now();
    assert_eq!(reply(&cluster, false).await, (502, "bad_upstream".into()));
    // Decode alone would wait for timeouts.whole_head, 5 minutes.
    assert!(started.elapsed() < Duration::from_secs(20), "decode was waited for");
    cluster
        .until("decode is free", |cluster| {
            cluster.sims[1].state().running + cluster.sims[1].state().waiting == 0
        })
        .await
        .unwrap();
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn e1_e2_a_client_that_leaves_mid_stream_frees_the_engine_at_once() {
    let cluster = TestClusterBuilder::new()
        .sim_with(paced(Role::Prefill), "")
        .sim_with(paced(Role::Decode), "")
        .start()
        .await;
    let mut stream = cluster.client.stream(CHAT, &[], chat(true, 5_000)).await.unwrap();
    for _ in 0..5 {
        stream.next().await.unwrap();
    }
    drop(stream);
    let left = tokio::time::Instant::now();
    cluster.until("decode is free", |cluster| cluster.sims[1].state().running == 0).await.unwrap();
    println!("upstream work stopped {:?} after the client left", left.elapsed());
    // The whole answer takes 50 s.
    // E1.5
    assert!(left.elapsed() < Duration::from_secs(10), "{:?}", left.elapsed());
    cluster.at_rest().await.unwrap();
}

/// Sends a request, and leaves when the first engine has it.
async fn leave_while_prefill_runs(cluster: &TestCluster, stream: bool) {
    let has_it = |cluster: &TestCluster| {
        let prefill = cluster.sims[0].state();
        prefill.running + prefill.waiting == 1
    };
    tokio::select! {
        reply = cluster.client.post(CHAT, &[], chat(stream, 500)) => panic!("prefill has ended: {reply:?}"),
        seen = cluster.until("prefill runs", has_it) => seen.unwrap(),
    }
}

#[tokio::test]
async fn e1_a_client_that_leaves_in_prefill_strands_nothing() {
    let slow =
        SimConfig { overhead: Duration::from_secs(1), ..SimConfig::instant(Dialect::Vllm, Role::Prefill) };
    let cluster =
        TestClusterBuilder::new().sim_with(slow, "").sim_with(paced(Role::Decode), "").start().await;
    leave_while_prefill_runs(&cluster, true).await;
    cluster
        .until("the handoff was consumed", |cluster| cluster.sims[1].state().handoffs.pulled == 1)
        .await
        .unwrap();
    cluster.at_rest().await.unwrap();
    let (prefill, decode) = (cluster.sims[0].state(), cluster.sims[1].state());
    // E1.2, E1.3
    assert_eq!((prefill.pinned_blocks, prefill.stranded), (0, 0));
    assert!(decode.generated_tokens <= 2, "decode was asked for one token: {}", decode.generated_tokens);
}

/// A pair whose decode engine generates for 50 s.
async fn leave_whole_answer(dialect: Dialect, path: &str) -> TestCluster {
    let sim = |role| SimConfig { dialect, ..paced(role) };
    let cluster = TestClusterBuilder::new()
        .sim_with(sim(Role::Prefill), "")
        .sim_with(sim(Role::Decode), "")
        .start()
        .await;
    let body = json!({"model": "tiny", "max_tokens": 5_000, "ignore_eos": true,
        "prompt": "failure is an option here ".repeat(10),
        "messages": [{"role": "user", "content": "failure is an option here ".repeat(10)}]});
    tokio::select! {
        reply = cluster.client.post(path, &[], body.to_string()) => panic!("it was answered: {reply:?}"),
        seen = cluster.until("decode generates", |cluster| cluster.sims[1].state().generated_tokens > 3) => {
            seen.unwrap();
        }
    }
    cluster
}

#[tokio::test]
async fn e1_a_client_that_leaves_a_whole_answer_of_a_pair_frees_decode_once_the_handoff_is_consumed() {
    for (dialect, path) in
        [(Dialect::Vllm, CHAT), (Dialect::Vllm, "/v1/completions"), (Dialect::Sglang, CHAT)]
    {
        let cluster = leave_whole_answer(dialect, path).await;
        let left = tokio::time::Instant::now();
        cluster.until("decode is free", |cluster| cluster.sims[1].state().running == 0).await.unwrap();
        // E1.6: the whole answer takes 50 s
        assert!(left.elapsed() < Duration::from_secs(20), "{dialect:?}: {:?}", left.elapsed());
        cluster.at_rest().await.unwrap();
        let (prefill, decode) = (cluster.sims[0].state(), cluster.sims[1].state());
        assert_eq!((prefill.pinned_blocks, prefill.stranded, cluster.booked()), (0, 0, 0), "{dialect:?}");
        assert!(decode.generated_tokens < 2_500, "{dialect:?}: {}", decode.generated_tokens);
        if dialect == Dialect::Vllm {
            assert_eq!(decode.handoffs.pulled, 1);
        }
    }
}

#[tokio::test]
async fn e1_a_client_that_leaves_a_whole_answer_whose_handoff_is_still_pulled_strands_nothing() {
    let slow = SimConfig { transfer_per_token: Duration::from_millis(6), ..paced(Role::Decode) };
    let cluster =
        TestClusterBuilder::new().sim_with(paced(Role::Prefill), "").sim_with(slow, "").start().await;
    let has_it = |cluster: &TestCluster| {
        let decode = cluster.sims[1].state();
        decode.running + decode.waiting == 1
    };
    tokio::select! {
        reply = cluster.client.post(CHAT, &[], chat(false, 5_000)) => panic!("it was answered: {reply:?}"),
        seen = cluster.until("decode has it", has_it) => seen.unwrap(),
    }
    cluster.at_rest().await.unwrap();
    cluster.until("decode is free", |cluster| cluster.sims[1].state().running == 0).await.unwrap();
    let (prefill, decode) = (cluster.sims[0].state(), cluster.sims[1].state());
    // E1.6
    assert_eq!((prefill.pinned_blocks, prefill.stranded, decode.handoffs.pulled), (0, 0, 1));
}

#[tokio::test]
async fn e1_a_client_that_leaves_while_its_request_waits_in_decode_strands_nothing() {
    let one = SimConfig { max_num_seqs: 1, ..paced(Role::Decode) };
    let cluster =
        TestClusterBuilder::new().sim_with(paced(Role::Prefill), "").sim_with(one, "").start().await;
    let leaves = async {
        let waits = |cluster: &TestCluster| cluster.sims[1].state().waiting == 1;
        cluster
            .until("decode runs the first one", |cluster| cluster.sims[1].state().running == 1)
            .await
            .unwrap();
        tokio::select! {
            reply = cluster.client.post(CHAT, &[], chat(false, 5_000)) => panic!("it was answered: {reply:?}"),
            seen = cluster.until("the second one waits", waits) => seen.unwrap(),
        }
    };
    // The first one takes 4 s.
    let (first, ()) = tokio::join!(cluster.client.post(CHAT, &[], chat(false, 400)), leaves);
    assert_eq!(first.unwrap().status, 200);
    cluster.until("decode is free", |cluster| cluster.sims[1].state().running == 0).await.unwrap();
    cluster.at_rest().await.unwrap();
    let (prefill, decode) = (cluster.sims[0].state(), cluster.sims[1].state());
    // E1.6
    assert_eq!((prefill.pinned_blocks, prefill.stranded, decode.handoffs.pulled), (0, 0, 2));
}

#[tokio::test]
async fn e1_a_request_without_a_client_leaves_decode_at_the_end_of_the_lease_although_it_waits_there() {
    let one = SimConfig { max_num_seqs: 1, ..paced(Role::Decode) };
    let cluster = TestClusterBuilder::new()
        .sim_with(paced(Role::Prefill), ",handoff_lease_s=4")
        .sim_with(one, "")
        .start()
        .await;
    let waiting = |count| move |cluster: &TestCluster| cluster.sims[1].state().waiting == count;
    let leaves = async {
        let runs = |cluster: &TestCluster| cluster.sims[1].state().running == 1;
        cluster.until("decode runs the first one", runs).await.unwrap();
        let begun = tokio::time::Instant::now();
        tokio::select! {
            reply = cluster.client.post(CHAT, &[], chat(false, 5_000)) => panic!("it was answered: {reply:?}"),
            seen = cluster.until("the second one waits", waiting(1)) => seen.unwrap(),
        }
        cluster.until("the second one left decode", waiting(0)).await.unwrap();
        (begun.elapsed(), cluster.sims[1].state())
    };
    // The first one takes 30 s.
    let first = cluster.client.post(CHAT, &[], chat(false, 3_000));
    let (took, decode) = tokio::select! {
        reply = first => panic!("the second one waited for it: {reply:?}"),
        left = leaves => left,
    };
    // E1.6
    assert!(took >= Duration::from_secs(4), "it was not consumed before the end of the lease: {took:?}");
    assert_eq!((decode.running, decode.handoffs.pulled), (1, 1), "the first one has its turn");
    cluster.until("decode is free", |cluster| cluster.sims[1].state().running == 0).await.unwrap();
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn e1_an_sglang_pair_whose_client_left_is_aborted() {
    let slow = |role| SimConfig {
        overhead: Duration::from_secs(1),
        itl: Duration::from_millis(20),
        ..SimConfig::instant(Dialect::Sglang, role)
    };
    let cluster = TestClusterBuilder::new()
        .sim_with(slow(Role::Prefill), "")
        .sim_with(slow(Role::Decode), "")
        .start()
        .await;
    leave_while_prefill_runs(&cluster, false).await;
    cluster
        .until("both legs are free", |cluster| {
            cluster.sims.iter().all(|sim| sim.state().running + sim.state().waiting == 0)
        })
        .await
        .unwrap();
    cluster.at_rest().await.unwrap();
    // A leg may fail because the other one was aborted, before its own abort arrives.
    assert!(cluster.sims.iter().map(|sim| sim.state().aborted).sum::<u64>() >= 1);
}

#[tokio::test]
async fn b2_a_killed_worker_is_excluded_and_the_others_serve() {
    let mut cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 2).await.unwrap();
    cluster.sims.remove(1).kill().await;
    for _ in 0..10 {
        assert_eq!(reply(&cluster, false).await, (200, String::new()));
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f6_all_busy_is_overloaded() {
    let cluster =
        TestClusterBuilder::new().sim_with(paced(Role::Aggregated), ",max_concurrency=1").start().await;
    let mut first = cluster.client.stream(CHAT, &[], chat(true, 500)).await.unwrap();
    first.next().await.unwrap();
    let busy = cluster.client.post(CHAT, &[], chat(false, 5)).await.unwrap();
    // F6.7, F6.8
    assert_eq!((busy.status.as_u16(), busy.code()), (529, "overloaded".into()));
    assert!(busy.headers.contains_key("retry-after"));
    drop(first);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f6_a_busy_engine_stays_eligible_and_a_failing_one_is_excluded() {
    for (code, aside) in [(429, false), (500, true)] {
        let cluster = TestClusterBuilder::new()
            .pair(Dialect::Vllm)
            .sim(Dialect::Vllm, Role::Decode)
            // The default keeps to the decode worker that has the prompt.
            .config(|config| {
                let least_loaded = toml::from_str("builtin = \"least-loaded\"").unwrap();
                config.policies.slots.insert(pointsman_routing::SlotKind::Decode, least_loaded);
            })
            .start()
            .await;
        cluster.sims[1].set_faults(vec![Fault::always(status(code))]);
        for _ in 0..30 {
            assert_eq!(cluster.client.post(CHAT, &[], chat(false, 2)).await.unwrap().status, 200);
        }
        let worker = cluster.gateway.state().registry.snapshot().get(WorkerId(2)).unwrap().clone();
        // The pause of the breaker may just be over.
        assert_eq!(worker.is_failing(), aside, "{code}: {:?}", worker.ineligible());
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "a table of faults")]
async fn faults_of_every_kind_leak_no_booking_and_strand_no_handoff() {
    let kinds = [
        status(500),
        status(429),
        FaultKind::Refuse,
        FaultKind::Cut { after_tokens: 2 },
        FaultKind::Garbage { after_tokens: 1 },
        FaultKind::WrongContentType,
        FaultKind::FirstTokenEos,
        FaultKind::TransferFail,
    ];
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = TestCluster::disaggregated(dialect, 2, 2).await.unwrap();
        for (place, sim) in cluster.sims.iter().enumerate() {
            let share = 0.02;
            let leg = Some(if place < 2 { FaultLeg::Prefill } else { FaultLeg::Decode });
            sim.set_faults(
                kinds.iter().map(|kind| Fault { share, leg, ..Fault::always(kind.clone()) }).collect(),
            );
        }
        let mut clients = tokio::task::JoinSet::new();
        for place in 0..8 {
            let client = cluster.client.clone();
            clients.spawn(async move {
                let mut failed = 0;
                for turn in 0..40 {
                    let stream = (place + turn) % 2 == 0;
                    let limit = Duration::from_secs(20);
                    let answer = tokio::time::timeout(limit, client.stream(CHAT, &[], chat(stream, 6)));
                    let answer = answer.await.expect("a request hung").unwrap();
                    let ok = answer.status.is_success();
                    if stream && ok {
                        let events = answer.all().await.unwrap();
                        let end = events.last().unwrap();
                        let error = end != "[DONE]";
                        assert!(!error || end.contains("\"error\""), "{events:?}");
                        failed += u32::from(error);
                    } else {
                        failed += u32::from(!ok);
                    }
                }
                failed
            });
        }
        let failed: u32 = clients.join_all().await.into_iter().sum();
        println!("{dialect:?}: {failed} of 320 requests failed, each with one valid error");
        cluster.at_rest().await.unwrap();
        for kind in [
            "status-500",
            "status-429",
            "refuse",
            "cut",
            "garbage",
            "wrong-content-type",
            "first-token-eos",
            "transfer-fail",
        ] {
            assert!(cluster.faults_fired(kind) > 0, "{dialect:?}: no request met the fault {kind}");
        }
        let dead = cluster.sims.iter().filter(|sim| sim.state().dead).count();
        assert_eq!(dead, 0, "an engine was killed by a bad handoff");
    }
}
