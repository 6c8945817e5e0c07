//! Choice and order of legs: pins, sessions, topology, queues, previews, and engines that serve one leg only.

use std::time::Duration;

use pointsman_gateway::config::LegOrder;
use pointsman_sim::{Dialect, Fault, FaultKind, FaultLeg, Role, Sim, SimConfig};
use pointsman_tests::{CHAT, Client, TestCluster, TestClusterBuilder};
use serde_json::{Value, json};

pub(crate) const EXPLAIN: (&str, &str) = ("x-pointsman-decision", "1");

pub(crate) fn chat(more: Value) -> String {
    let mut body = json!({
        "model": "tiny", "max_tokens": 4, "ignore_eos": true,
        "messages": [{"role": "user", "content": "which way does this train go, and who says so? ".repeat(6)}],
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

fn recording(dialect: Dialect, role: Role) -> SimConfig {
    SimConfig { record: 20, ..SimConfig::instant(dialect, role) }
}

/// Returns the parts of the decision header, such as `prefill=1/0 kv-aware@1 policy`.
async fn decisions(cluster: &TestCluster, headers: &[(&str, &str)], body: String) -> Vec<String> {
    let all: Vec<(&str, &str)> = headers.iter().copied().chain([EXPLAIN]).collect();
    let reply = cluster.client.post(CHAT, &all, body).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    let header = reply.headers["x-pointsman-decision"].to_str().unwrap().to_owned();
    header.split(", ").map(str::to_owned).collect()
}

#[tokio::test]
async fn c3_a_hint_pins_prefill_then_a_live_session_then_the_policy_and_a_pin_is_booked() {
    let slow = |role| SimConfig { itl: Duration::from_millis(5), ..SimConfig::instant(Dialect::Vllm, role) };
    let cluster = TestClusterBuilder::new()
        .sim_with(slow(Role::Prefill), "")
        .sim_with(slow(Role::Prefill), "")
        .sim_with(slow(Role::Decode), "")
        .start()
        .await;
    let session = json!({"nvext": {"session_control": {"session_id": "s", "action": "bind"}}});
    let first = decisions(&cluster, &[], chat(session.clone())).await;
    // C3.3
    assert!(first[0].ends_with("policy"), "{first:?}");
    let bound = first[0].split(' ').next().unwrap().to_owned();
    for _ in 0..4 {
        let again = decisions(&cluster, &[], chat(session.clone())).await;
        // C3.2, F8.1
        assert!(again[0].starts_with(&bound) && again[0].ends_with("session"), "{again:?}");
        // F8.2
        assert!(again[1].ends_with("session"), "per leg: {again:?}");
    }
    let other = if bound.contains("=1/") { "2" } else { "1" };
    let pinned = decisions(&cluster, &[("x-prefill-instance-id", other)], chat(session.clone())).await;
    // C3.1: a hint before a session
    assert!(pinned[0].starts_with(&format!("prefill={other}/")) && pinned[0].ends_with("pin"), "{pinned:?}");

    let long = chat(json!({"stream": true, "max_tokens": 200}));
    let pins = [("x-prefill-instance-id", "1"), ("x-worker-instance-id", "3")];
    let mut stream = cluster.client.stream(CHAT, &pins, long).await.unwrap();
    stream.next().await.unwrap();
    let is_booked = |cluster: &TestCluster| cluster.booked() == 1;
    cluster.until("only the pinned decode worker is booked", is_booked).await.unwrap();
    drop(stream);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f8_a_binding_ends_when_its_worker_is_not_eligible_or_its_session_is_closed() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 2, 1).await.unwrap();
    let with =
        |action: &str| chat(json!({"nvext": {"session_control": {"session_id": "s", "action": action}}}));
    let first = decisions(&cluster, &[], with("open")).await;
    let bound = first[0].split(['=', '/']).nth(1).unwrap().to_owned();
    cluster.admin.post(&format!("/workers/{bound}/drain"), &[], "").await.unwrap();
    let moved = decisions(&cluster, &[], with("bind")).await;
    // F8.3
    assert!(moved[0].ends_with("policy") && !moved[0].starts_with(&format!("prefill={bound}/")), "{moved:?}");
    assert!(decisions(&cluster, &[], with("close")).await[0].ends_with("session"));
    assert!(decisions(&cluster, &[], with("open")).await[0].ends_with("policy"), "the session was closed");
}

#[tokio::test]
async fn c5_resolving_has_five_outcomes() {
    // With bootstrap, and without: both serve.
    for dialect in [Dialect::Sglang, Dialect::Vllm] {
        let cluster = TestCluster::disaggregated(dialect, 1, 1).await.unwrap();
        // C5.1, C5.2
        assert_eq!(decisions(&cluster, &[], chat(json!({}))).await.len(), 2);
    }
    // Disaggregation is not active (B1): a vLLM decode worker prefills locally.
    let alone = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Decode).start().await;
    // C5.4
    assert!(decisions(&alone, &[], chat(json!({}))).await[0].starts_with("aggregated="));
    // Backpressure fails at once, and never waits.
    let slow =
        SimConfig { overhead: Duration::from_secs(2), ..SimConfig::instant(Dialect::Vllm, Role::Prefill) };
    let busy = TestClusterBuilder::new()
        .sim_with(slow, ",max_concurrency=1")
        .sim(Dialect::Vllm, Role::Decode)
        .start()
        .await;
    let client = busy.client.clone();
    let tasks = tokio_util::task::TaskTracker::new();
    let holding = tasks.spawn(async move { client.post(CHAT, &[], chat(json!({}))).await });
    busy.until("prefill is busy", |cluster| cluster.booked() == 1).await.unwrap();
    let refused = busy.client.post(CHAT, &[], chat(json!({}))).await.unwrap();
    assert_eq!((refused.status.as_u16(), refused.code()), (529, "overloaded".to_owned()));
    // C5.5, F6.8: it did not wait for the request that keeps prefill busy for 2 s
    assert!(refused.headers.contains_key("retry-after") && !holding.is_finished());
    assert_eq!(holding.await.unwrap().unwrap().status, 200);
    // Nothing available.
    let none = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    let foreign = chat(json!({"nvext": {"required_taints": ["never"]}}));
    let reply = none.client.post(CHAT, &[], foreign).await.unwrap();
    // C5.3, F6.9
    assert_eq!((reply.status.as_u16(), reply.code()), (503, "no_worker".to_owned()));
}

#[tokio::test]
async fn c10_d1_the_decode_leg_gets_the_prefill_worker_s_rank_the_room_and_the_client_s_max_tokens() {
    let cluster = TestClusterBuilder::new()
        .sim_with(SimConfig { dp_size: 2, ..recording(Dialect::Sglang, Role::Prefill) }, ",dp_size=2")
        .sim_with(recording(Dialect::Sglang, Role::Decode), "")
        .start()
        .await;
    let pinned = [("x-prefill-instance-id", "1"), ("x-prefill-dp-rank", "1")];
    decisions(&cluster, &pinned, chat(json!({}))).await;
    let sent = |sim: usize| -> Value {
        let all = cluster.sims[sim].recorded();
        serde_json::from_str(&all.iter().find(|recorded| recorded.path == CHAT).unwrap().body).unwrap()
    };
    let (prefill, decode) = (sent(0), sent(1));
    // C10.1, D1.2
    assert_eq!((&prefill["routed_dp_rank"], &decode["disagg_prefill_dp_rank"]), (&json!(1), &json!(1)));
    for field in ["bootstrap_host", "bootstrap_port", "bootstrap_room"] {
        // D1.1
        assert!(!decode[field].is_null() && decode[field] == prefill[field], "{field}: {decode}");
    }
    assert_eq!(decode["bootstrap_room"].as_u64().unwrap() % 2, 1, "the room tells the rank");
    // C1.2, C1.3
    assert_eq!((&prefill["max_tokens"], &decode["max_tokens"]), (&json!(4), &json!(4)));
    // F3.8: the worker does not have this rank
    let wrong = [("x-prefill-instance-id", "1"), ("x-prefill-dp-rank", "9")];
    assert_eq!(cluster.client.post(CHAT, &wrong, chat(json!({}))).await.unwrap().status, 409);
}

#[tokio::test]
async fn p11_both_legs_get_the_bootstrap_address_of_an_ipv6_host_in_brackets() {
    for host in ["fd00::1", "[fd00::1]"] {
        let cluster = TestClusterBuilder::new()
            .config(|config| config.routing.retries = 0)
            .sim_with(recording(Dialect::Sglang, Role::Prefill), &format!(",bootstrap_host={host}"))
            .sim_with(recording(Dialect::Sglang, Role::Decode), "")
            .start()
            .await;
        // No prefill worker is at that address, so decode fails.
        cluster.client.post(CHAT, &[], chat(json!({}))).await.unwrap();
        for sim in &cluster.sims {
            let recorded = sim.recorded();
            let body = &recorded.iter().find(|recorded| recorded.path == CHAT).unwrap().body;
            let body: Value = serde_json::from_str(body).unwrap();
            // P11.5
            assert_eq!(body["bootstrap_host"], "[fd00::1]", "{body}");
        }
    }
}

#[tokio::test]
async fn d1_the_decode_leg_gets_the_prefill_result_and_the_original_max_tokens() {
    let cluster = TestClusterBuilder::new()
        .sim_with(recording(Dialect::Vllm, Role::Prefill), "")
        .sim_with(recording(Dialect::Vllm, Role::Decode), "")
        .start()
        .await;
    decisions(&cluster, &[], chat(json!({"max_tokens": 7}))).await;
    let body = |sim: usize| -> Value {
        let all = cluster.sims[sim].recorded();
        serde_json::from_str(&all.iter().find(|recorded| recorded.path == CHAT).unwrap().body).unwrap()
    };
    // C1.1, C1.3, D1.4
    assert_eq!((&body(0)["max_tokens"], &body(1)["max_tokens"]), (&json!(1), &json!(7)));
    // D1.1
    assert_eq!(body(1)["kv_transfer_params"]["do_remote_prefill"], true);
}

#[tokio::test]
async fn a5_a_p2p_nccl_pair_serves_and_its_addresses_reach_no_client() {
    // Plain engines in the roles of a pair: only the request id, which vLLM echoes, ties the legs.
    let flag = |role: &str, port: u16| format!(",role={role},transport=p2p_nccl,kv_addr=127.0.0.9:{port}");
    let cluster = TestClusterBuilder::new()
        .sim_with(recording(Dialect::Vllm, Role::Aggregated), &flag("prefill", 14_579))
        .sim_with(recording(Dialect::Vllm, Role::Aggregated), &flag("decode", 14_580))
        .start()
        .await;
    for stream in [false, true] {
        let reply = cluster.client.post(CHAT, &[EXPLAIN], chat(json!({"stream": stream}))).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
        let decided = reply.headers["x-pointsman-decision"].to_str().unwrap();
        assert!(decided.starts_with("prefill=1/") && decided.contains("decode=2/"), "{decided}");
        let text = String::from_utf8(reply.body.to_vec()).unwrap();
        // A5.2, A5.6
        assert!(!text.contains("addr") && !text.contains("127.0.0.9"), "{text}");
    }
    let ids = |sim: usize| -> Vec<String> {
        let generations = cluster.sims[sim].recorded().into_iter().filter(|recorded| recorded.path == CHAT);
        let id = |(name, value): (String, String)| (name == "x-request-id").then_some(value);
        generations.filter_map(|recorded| recorded.headers.into_iter().find_map(id)).collect()
    };
    assert_eq!(ids(0), ids(1));
    assert!(
        ids(0)[0].starts_with("___prefill_addr_127.0.0.9:14579___decode_addr_127.0.0.9:14580_"),
        "{:?}",
        ids(0)
    );
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d3_a_required_transfer_domain_is_kept_and_fails_closed_before_prefill_starts() {
    let cluster = TestClusterBuilder::new()
        .sim_with(recording(Dialect::Vllm, Role::Prefill), ",topology.rack=r1,kv_transfer=required:rack")
        .sim_with(recording(Dialect::Vllm, Role::Decode), ",topology.rack=r2")
        .sim_with(recording(Dialect::Vllm, Role::Decode), ",topology.rack=r1")
        .start()
        .await;
    for _ in 0..6 {
        let decided = decisions(&cluster, &[], chat(json!({}))).await;
        assert!(decided[1].starts_with("decode=3/"), "{decided:?}");
    }
    let prefills = cluster.sims[0].state().requests.values().sum::<u64>();
    cluster.admin.post("/workers/3/drain", &[], "").await.unwrap();
    let reply = cluster.client.post(CHAT, &[], chat(json!({}))).await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.code()), (503, "no_worker".to_owned()));
    assert_eq!(cluster.sims[0].state().requests.values().sum::<u64>(), prefills, "prefill was not started");
}

#[tokio::test]
async fn d3_a_preferred_transfer_domain_weighs_and_wins_over_the_client_on_the_same_taint() {
    let cluster = TestClusterBuilder::new()
        .sim_with(recording(Dialect::Vllm, Role::Prefill), ",topology.rack=r1,kv_transfer=preferred:rack:3")
        .sim_with(recording(Dialect::Vllm, Role::Decode), ",topology.rack=r2")
        .sim_with(recording(Dialect::Vllm, Role::Decode), ",topology.rack=r1")
        .start()
        .await;
    let against = json!({"nvext": {"preferred_taints": {"dynamo.topology/rack=r1": -9.0}}});
    for _ in 0..6 {
        let decided = decisions(&cluster, &[], chat(against.clone())).await;
        // D3.1, D3.3
        assert!(decided[1].starts_with("decode=3/"), "{decided:?}");
    }
}

#[tokio::test]
async fn d5_decode_first_serves_both_handoffs_and_judges_topology_between_the_two() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = TestClusterBuilder::new()
            .config(|config| config.routing.order = LegOrder::DecodeFirst)
            .sim_with(recording(dialect, Role::Prefill), ",topology.rack=r1,kv_transfer=required:rack")
            .sim_with(recording(dialect, Role::Prefill), ",topology.rack=r2,kv_transfer=required:rack")
            .sim_with(recording(dialect, Role::Decode), ",topology.rack=r2")
            .start()
            .await;
        for _ in 0..4 {
            let decided = decisions(&cluster, &[], chat(json!({}))).await;
            // D5.1, D5.3
            assert!(
                decided[0].starts_with("decode=3/") && decided[1].starts_with("prefill=2/"),
                "{decided:?}"
            );
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn e2_a_client_that_leaves_stops_upstream_work_within_100_ms() {
    let paced =
        |role| SimConfig { itl: Duration::from_millis(10), ..SimConfig::instant(Dialect::Vllm, role) };
    let cluster = TestClusterBuilder::new()
        .sim_with(paced(Role::Prefill), "")
        .sim_with(paced(Role::Decode), "")
        .start()
        .await;
    // The same without a gateway shows how late this machine is.
    let engine = Sim::start(paced(Role::Aggregated)).await.unwrap();
    let direct = Client::new(engine.addr());
    let leave = async |client: &Client, idle: &dyn Fn() -> bool| {
        let body = chat(json!({"stream": true, "max_tokens": 5_000}));
        let mut stream = client.stream(CHAT, &[], body).await.unwrap();
        for _ in 0..4 {
            stream.next().await.unwrap();
        }
        drop(stream);
        let left = tokio::time::Instant::now();
        while !idle() {
            assert!(left.elapsed() < Duration::from_secs(10), "the engine still works");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        left.elapsed()
    };
    let (mut took, mut usual) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        usual.push(leave(&direct, &|| engine.state().running == 0).await);
        took.push(leave(&cluster.client, &|| cluster.sims[1].state().running == 0).await);
    }
    took.sort();
    usual.sort();
    // The medians of 20: one pause of a busy machine decides nothing. A whole answer takes 50 s.
    // E2.1, E2.4
    assert!(took[10] < usual[10] + Duration::from_millis(250), "{took:?}, without a gateway {usual:?}");
    // E2.2
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f2_a_preview_changes_nothing() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 2, 2).await.unwrap();
    let reply = cluster
        .client
        .post("/v1/route", &[], chat(json!({"nvext": {"token_data": [1, 2, 3]}})))
        .await
        .unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    let preview = reply.json().unwrap();
    // F2.2, F2.3
    assert!(
        preview["worker_id"]["prefill_worker_id"].is_u64() && preview["worker_id"]["decode_dp_rank"].is_u64(),
        "{preview}"
    );
    // F2.3
    assert_eq!(preview["token_ids"], json!([1, 2, 3]));
    let costs = preview["legs"][0]["receipt"]["costs"].as_array().unwrap();
    // F2.4
    assert_eq!(costs.len(), 2, "a cost for each candidate: {preview}");
    for stream in [false, true] {
        // The ids of the engine, not those that routing hashes.
        let multimodal = json!({"routing_token_ids": [7, 8]});
        let nvext = json!({
            "annotations": ["query_instance_id:"], "token_data": [1, 2, 3], "mm_routing_info": multimodal,
        });
        let annotated = chat(json!({"stream": stream, "nvext": nvext}));
        let asked = if stream {
            let events = cluster.client.stream(CHAT, &[], annotated).await.unwrap().all().await.unwrap();
            // F2.6
            assert_eq!((events.len(), events[1].as_str()), (2, "[DONE]"));
            serde_json::from_str(&events[0]).unwrap()
        } else {
            cluster.client.post(CHAT, &[], annotated).await.unwrap().json().unwrap()
        };
        // F2.1
        assert!(asked["worker_id"]["decode_worker_id"].is_u64(), "{asked}");
        // F2.3
        assert_eq!((&asked["token_ids"], &asked["prompt_tokens"]), (&json!([1, 2, 3]), &json!(2)), "{asked}");
    }
    let text = chat(json!({"nvext": {"annotations": ["query_instance_id:"]}}));
    let text = cluster.client.post(CHAT, &[], text).await.unwrap().json().unwrap();
    // F2.3: the ids of a text are not known without a tokenizer, and are not none
    assert_eq!(
        (&text["token_ids"], text["prompt_tokens"].as_u64() > Some(0)),
        (&Value::Null, true),
        "{text}"
    );
    assert_eq!(cluster.booked(), 0);
    let engines: u64 = cluster.sims.iter().map(|sim| sim.state().requests.values().sum::<u64>()).sum();
    cluster.gateway.state().router.index().flush();
    // F2.5, F5.3
    assert_eq!((engines, cluster.gateway.state().router.index().stats().records), (0, 0));
}

#[tokio::test]
async fn f7_a_request_waits_when_all_are_busy_and_is_served_when_one_is_free() {
    let slow =
        SimConfig { itl: Duration::from_millis(10), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new()
        .config(|config| (config.queue.limit, config.queue.timeout) = (2, Duration::from_secs(5)))
        .sim_with(slow, ",max_concurrency=1")
        .start()
        .await;
    let long = chat(json!({"stream": true, "max_tokens": 2_000}));
    let mut first = cluster.client.stream(CHAT, &[], long).await.unwrap();
    first.next().await.unwrap();
    let tasks = tokio_util::task::TaskTracker::new();
    let ask = |client: pointsman_tests::client::Client| {
        tasks.spawn(async move { client.post(CHAT, &[], chat(json!({}))).await })
    };
    let (one, two) = (ask(cluster.client.clone()), ask(cluster.client.clone()));
    // F7.1
    cluster.until("two wait", |cluster| cluster.gateway.state().queue.waiting() == 2).await.unwrap();
    let third = cluster.client.post(CHAT, &[], chat(json!({}))).await.unwrap();
    // F7.3
    assert_eq!(third.status.as_u16(), 529, "the queue is bounded");
    // A queued request leaves the queue when its client disconnects.
    two.abort();
    // E1.1, F7.4
    cluster.until("one waits", |cluster| cluster.gateway.state().queue.waiting() == 1).await.unwrap();
    drop(first);
    assert_eq!(one.await.unwrap().unwrap().status, 200);
    cluster.at_rest().await.unwrap();
    assert_eq!(cluster.gateway.state().queue.waiting(), 0);
}

#[tokio::test]
async fn f4_the_booking_of_a_stream_stays_while_its_engine_is_silent() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.timeouts.booking = Duration::from_millis(200);
            config.timeouts.event_idle = Duration::from_secs(2);
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::Stall { after_tokens: 1 })]);
    let mut stream =
        cluster.client.stream(CHAT, &[], chat(json!({"stream": true, "max_tokens": 50}))).await.unwrap();
    stream.next().await.unwrap();
    let reading = tokio_util::task::TaskTracker::new().spawn(async move { stream.all().await });
    tokio::time::sleep(Duration::from_millis(800)).await;
    // F4.18
    assert_eq!(cluster.booked(), 1);
    // The limit of a silent stream ends it.
    let events = reading.await.unwrap().unwrap();
    assert!(events.last().is_some_and(|last| last.contains("timeouts.event_idle")), "{events:?}");
    assert_eq!(cluster.gateway.state().metrics.expired_bookings.get(), 0);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f4_a_booking_behind_a_long_wait_in_the_queue_lives_as_long_as_any() {
    let sim = SimConfig {
        itl: Duration::from_millis(10),
        overhead: Duration::from_millis(300),
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.timeouts.booking = Duration::from_secs(1);
            config.queue.limit = 1;
        })
        .sim_with(sim, ",max_concurrency=1")
        .start()
        .await;
    let body = |tokens: u32| chat(json!({"stream": true, "max_tokens": tokens, "ignore_eos": true}));
    let mut first = cluster.client.stream(CHAT, &[], body(150)).await.unwrap();
    first.next().await.unwrap();
    // It waits for 1.5 s, and its first token takes 300 ms from then on.
    let second = cluster.client.stream(CHAT, &[], body(5));
    let (first, second) = tokio::join!(first.all(), second);
    assert_eq!(first.unwrap().last().unwrap(), "[DONE]");
    assert_eq!(second.unwrap().all().await.unwrap().last().unwrap(), "[DONE]");
    // F4.9
    assert_eq!(cluster.gateway.state().metrics.expired_bookings.get(), 0);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a1_a_probe_runs_on_its_worker_alone_in_any_role() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    for worker in ["1", "2"] {
        let body = chat(json!({"_HEALTH_CHECK": true, "max_tokens": 1}));
        let decided = decisions(&cluster, &[("x-worker-instance-id", worker)], body).await;
        assert_eq!(decided.len(), 1, "{decided:?}");
        assert!(decided[0].contains(&format!("={worker}/")) && decided[0].ends_with("pin"), "{decided:?}");
    }
    let legs: Vec<u64> = cluster.sims.iter().map(|sim| sim.state().requests.values().sum()).collect();
    // A1.6: each worker ran one leg
    assert_eq!(legs, [1, 1]);
}

#[tokio::test]
async fn a1_embeddings_and_tokenize_run_on_one_worker() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    let body = r#"{"model":"tiny","input":[[1,2],[3]],"dimensions":4}"#;
    let reply = cluster.client.post("/v1/embeddings", &[EXPLAIN], body).await.unwrap();
    assert_eq!(reply.json().unwrap()["data"].as_array().unwrap().len(), 2, "{reply:?}");
    // A1.7
    assert!(reply.headers["x-pointsman-decision"].to_str().unwrap().starts_with("aggregated=2/"));
    let tokens =
        cluster.client.post("/tokenize", &[], r#"{"model":"tiny","prompt":"a train"}"#).await.unwrap();
    assert!(tokens.json().unwrap()["tokens"].is_array(), "{tokens:?}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn e2_lists_of_inputs_run_on_sglang() {
    let sim = SimConfig::instant(Dialect::Sglang, Role::Aggregated);
    let cluster = TestClusterBuilder::new().sim_with(sim, "").start().await;
    for input in [r#""a""#, "[1,2]", r#"["a"]"#, "[[1,2]]", r#"["a","b"]"#, "[[1,2],[3]]"] {
        for path in ["/v1/embeddings", "/v1/classify", "/classify"] {
            let body = format!(r#"{{"model":"tiny","input":{input}}}"#);
            let reply = cluster.client.post(path, &[], body).await.unwrap();
            // E2.9
            assert_eq!(reply.status, 200, "{path} {input}: {:?}", reply.body);
        }
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b6_a_failed_remote_prefill_falls_back_to_local_only_when_the_operator_allows_it() {
    for (allowed, status) in [(true, 200), (false, 502)] {
        let cluster = TestClusterBuilder::new()
            .config(|config| (config.routing.local_fallback, config.routing.retries) = (allowed, 0))
            .pair(Dialect::Vllm)
            .start()
            .await;
        cluster.sims[0].set_faults(vec![Fault::always(FaultKind::Status { status: 500, retry_after: None })]);
        let reply = cluster.client.post(CHAT, &[EXPLAIN], chat(json!({}))).await.unwrap();
        // B6.1, B6.2
        assert_eq!(reply.status.as_u16(), status, "{reply:?}");
        if allowed {
            let decided = reply.headers["x-pointsman-decision"].to_str().unwrap();
            // B6.3
            assert!(decided.contains("prefill=1/") && decided.contains("aggregated=2/"), "{decided}");
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn b4_a_model_that_is_dropped_leaves_no_task_and_no_block_behind() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    decisions(&cluster, &[], chat(json!({}))).await;
    cluster.gateway.state().router.index().flush();
    assert!(cluster.gateway.state().router.index().stats().blocks > 0);
    let before = cluster.gateway.state().tracker.len();
    for id in ["1", "2"] {
        let left = cluster.admin.delete(&format!("/workers/{id}")).await.unwrap();
        assert_eq!(left.status, 200);
    }
    cluster
        .until("their tasks ended", |cluster| cluster.gateway.state().tracker.len() + 2 <= before)
        .await
        .unwrap();
    cluster
        .until("their blocks are gone", |cluster| {
            cluster.gateway.state().router.index().flush();
            cluster.gateway.state().router.index().stats().blocks == 0
        })
        .await
        .unwrap();
    let gone = cluster.client.post(CHAT, &[], chat(json!({}))).await.unwrap();
    assert_eq!(gone.code(), "no_worker");
    // B2: the same engine under another id is found.
    let spec = json!({"role": "decode", "engine": "vllm", "url": cluster.sims[1].url(), "id": 9}).to_string();
    assert_eq!(cluster.admin.post("/workers", &[], spec).await.unwrap().status, 200);
    cluster.until("it is ready", |cluster| cluster.ineligible() == 0).await.unwrap();
    // B2.4
    assert!(decisions(&cluster, &[], chat(json!({}))).await[0].starts_with("aggregated=9/"));
}

fn ask_engines(config: &mut pointsman_gateway::config::Config) {
    let model = pointsman_gateway::config::Model {
        tokenizer: Some(pointsman_gateway::config::TokenSource::Engine),
        tokenizer_timeout: Duration::from_millis(200),
        tokenizer_cache_bytes: 1 << 20,
        ..pointsman_gateway::config::Model::default()
    };
    config.models.insert("tiny".to_owned(), model);
}

#[tokio::test]
async fn h1_an_engine_s_own_tokens_are_exact_and_asked_for_once() {
    let builder = TestClusterBuilder::new().config(ask_engines).sim(Dialect::Vllm, Role::Aggregated);
    let cluster = builder.start().await;
    let route =
        async || cluster.client.post("/v1/route", &[], chat(json!({}))).await.unwrap().json().unwrap();
    let first = route().await;
    assert_eq!(first["prompt_tokens_estimated"], false, "{first}");
    let sent: Value = serde_json::from_str(&chat(json!({}))).unwrap();
    let asked = json!({"model": "tiny", "messages": sent["messages"]}).to_string();
    let engine = cluster.client.post("/tokenize", &[], asked).await.unwrap().json().unwrap();
    assert_eq!(first["prompt_tokens"], engine["count"]);
    // Earlier answers are cached, even when the engine is gone.
    cluster.sims[0].set_faults(vec![Fault {
        leg: Some(FaultLeg::Tokenize),
        ..Fault::always(FaultKind::HangBeforeHeaders)
    }]);
    assert_eq!(route().await["prompt_tokens_estimated"], false);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn h1_an_engine_that_is_slow_or_fails_to_tokenize_costs_the_tokens_only() {
    for (kind, reason) in [
        (FaultKind::HangBeforeHeaders, "engine_slow"),
        (FaultKind::Status { status: 500, retry_after: None }, "engine_failed"),
    ] {
        let builder = TestClusterBuilder::new().config(ask_engines).sim(Dialect::Vllm, Role::Aggregated);
        let cluster = builder.start().await;
        cluster.sims[0].set_faults(vec![Fault { leg: Some(FaultLeg::Tokenize), ..Fault::always(kind) }]);
        let began = tokio::time::Instant::now();
        for _ in 0..3 {
            let reply = cluster.client.post(CHAT, &[], chat(json!({}))).await.unwrap();
            assert_eq!(reply.status.as_u16(), 200, "{reply:?}");
        }
        // The engine never answers: without the limit there would be no end.
        assert!(began.elapsed() < Duration::from_secs(30));
        cluster.at_rest().await.unwrap();
        let metrics = cluster.metrics_text().await.unwrap();
        for reason in [reason, "engine_paused"] {
            let line = format!("pointsman_not_tokenized_total{{reason=\"{reason}\"}}");
            assert!(metrics.contains(&line), "{line}");
        }
    }
}
