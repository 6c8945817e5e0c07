//! Success paths: one worker, two workers of each dialect, streamed and whole answers, and the bodies that
//! engines receive.

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{CHAT, TestCluster, TestClusterBuilder, client::text_of};
use serde_json::{Value, json};

fn chat(stream: bool) -> String {
    json!({
        "model": "tiny", "stream": stream, "max_tokens": 12, "ignore_eos": true, "temperature": 1.0,
        "stream_options": if stream { json!({"include_usage": true}) } else { Value::Null },
        "messages": [{"role": "user", "content": "a prompt that is long enough to fill a few blocks of the cache. ".repeat(8)}],
        "custom_field": {"kept": [1, 2]},
    })
    .to_string()
    .replace("\"stream_options\":null,", "")
}

async fn text(cluster: &TestCluster, stream: bool) -> String {
    if stream {
        let stream = cluster.client.stream(CHAT, &[], chat(true)).await.unwrap();
        assert_eq!(stream.status, 200);
        assert_eq!(
            stream.headers["content-type"].to_str().unwrap().split(';').next(),
            Some("text/event-stream")
        );
        let events = stream.all().await.unwrap();
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
        text_of(&events)
    } else {
        let reply = cluster.client.post(CHAT, &[], chat(false)).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json().unwrap()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn c7_c6_both_handoffs_answer_what_a_single_engine_answers() {
    let single = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    let expected = text(&single, false).await;
    assert!(!expected.is_empty());
    assert_eq!(text(&single, true).await, expected);
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = TestCluster::disaggregated(dialect, 2, 2).await.unwrap();
        for stream in [false, true] {
            assert_eq!(text(&cluster, stream).await, expected, "{dialect:?} stream {stream}");
        }
        let legs: u64 = cluster.sims.iter().map(|sim| sim.state().requests.values().sum::<u64>()).sum();
        assert_eq!(legs, 4, "two requests of two legs");
        let stranded: u64 = cluster.sims.iter().map(|sim| sim.state().stranded).sum();
        assert_eq!(stranded, 0);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn a5_engines_get_the_client_s_fields_but_nothing_of_the_handoff_and_clients_see_nothing_internal() {
    let record = |role| SimConfig { record: 10, ..SimConfig::instant(Dialect::Vllm, role) };
    let cluster = TestClusterBuilder::new()
        .sim_with(record(Role::Prefill), "")
        .sim_with(record(Role::Decode), "")
        .start()
        .await;
    let body = chat(false).replacen(
        '{',
        r#"{"kv_transfer_params":{"do_remote_prefill":true},"nvext":{"dp_rank":0},"#,
        1,
    );
    let reply = cluster.client.post(CHAT, &[("x-request-id", "client-7")], body).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.headers["x-request-id"], "client-7");
    let text = String::from_utf8(reply.body.to_vec()).unwrap();
    let port = cluster.sims[0].addr().port().to_string();
    // A5.2
    assert!(!text.contains(&format!(":{port}")) && !text.contains("127.0.0.1"), "{text}");
    assert!(reply.json().unwrap()["kv_transfer_params"].is_null());
    let sent =
        |sim: usize| cluster.sims[sim].recorded().into_iter().find(|recorded| recorded.path == CHAT).unwrap();
    let (prefill, decode) = (sent(0), sent(1));
    for recorded in [&prefill, &decode] {
        let body: Value = serde_json::from_str(&recorded.body).unwrap();
        assert_eq!(body["custom_field"], json!({"kept": [1, 2]}));
        assert!(body.get("nvext").is_none());
        assert!(recorded.body.contains("\"temperature\":1.0"), "numbers stay as they were spelt");
        let id = recorded
            .headers
            .iter()
            .find(|(name, _)| name == "x-request-id")
            .map(|(_, value)| value.clone())
            .unwrap();
        // A5.3
        assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()));
    }
    let ids: Vec<_> =
        [&prefill, &decode].map(|r| r.headers.iter().find(|(n, _)| n == "x-request-id").cloned()).into();
    assert_eq!(ids[0], ids[1], "both legs carry the same id");
    let body: Value = serde_json::from_str(&decode.body).unwrap();
    assert!(body["kv_transfer_params"]["remote_block_ids"].is_array());
    assert_eq!(body["max_tokens"], 12);
}

#[tokio::test]
async fn usage_reports_the_prefill_leg_s_cached_tokens() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    let mut cached = Vec::new();
    for _ in 0..2 {
        let events = cluster.client.stream(CHAT, &[], chat(true)).await.unwrap().all().await.unwrap();
        let usage = events
            .iter()
            .filter_map(|event| serde_json::from_str::<Value>(event).ok())
            .find(|e| e["usage"].is_object());
        cached.push(usage.unwrap()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
    }
    assert_eq!(cached[0], 0);
    // C7.4
    assert!(cached[1] > 0, "the second prompt was cached at the prefill worker: {cached:?}");
}

#[tokio::test]
async fn i_every_client_error_names_its_cause() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.server.max_body_bytes = 2_000)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let post = async |body: &str| {
        let reply = cluster.client.post(CHAT, &[], body.to_owned()).await.unwrap();
        (reply.status.as_u16(), reply.code())
    };
    assert_eq!(post("{").await, (400, "invalid_request".into()));
    assert_eq!(post(r#"{"model":"nope","messages":[]}"#).await, (404, "model_not_found".into()));
    assert_eq!(
        post(&format!(r#"{{"model":"tiny","messages":"{}"}}"#, "x".repeat(3_000))).await,
        (413, "payload_too_large".into())
    );
    let pinned = cluster.client.post(CHAT, &[("x-worker-instance-id", "99")], chat(false)).await.unwrap();
    assert_eq!((pinned.status.as_u16(), pinned.code()), (404, "worker_not_found".into()));
    let rank = cluster
        .client
        .post(CHAT, &[("x-worker-instance-id", "1"), ("x-dp-rank", "4")], chat(false))
        .await
        .unwrap();
    assert_eq!((rank.status.as_u16(), rank.code()), (409, "worker_not_eligible".into()));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i_a_key_is_required_when_keys_are_configured() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.auth.keys = pointsman_tests::client_keys(&[("sk-right", "")]))
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let status = async |headers: &[(&str, &str)]| {
        cluster.client.post(CHAT, headers, chat(false)).await.unwrap().status.as_u16()
    };
    assert_eq!(status(&[]).await, 401);
    assert_eq!(status(&[("authorization", "Bearer sk-wrong")]).await, 401);
    assert_eq!(status(&[("authorization", "Bearer sk-right")]).await, 200);
}

#[tokio::test]
async fn b3_models_and_readiness_list_only_what_can_be_served() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.routing.enforce_disagg = true)
        .pair(Dialect::Vllm)
        .start()
        .await;
    let models = cluster.client.get("/v1/models").await.unwrap().json().unwrap();
    // B3.3
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(cluster.admin.get("/readyz").await.unwrap().status, 200);
    cluster.sims[0].set_faults(vec![pointsman_sim::Fault {
        leg: Some(pointsman_sim::FaultLeg::Health),
        ..pointsman_sim::Fault::always(pointsman_sim::FaultKind::Status { status: 500, retry_after: None })
    }]);
    cluster.until("unhealthy", |cluster| cluster.ineligible() > 0).await.unwrap();
    // B3.2, B3.3
    assert_eq!(cluster.client.get("/v1/models").await.unwrap().json().unwrap()["data"], json!([]));
    // B3.4
    assert_eq!(cluster.admin.get("/readyz").await.unwrap().status, 503);
    let reply = cluster.client.post(CHAT, &[], chat(false)).await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.code()), (503, "prefill_unavailable".into()));
    assert!(reply.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn b3_workers_that_cannot_hand_over_to_each_other_are_no_pair() {
    for enforce_disagg in [false, true] {
        let engine = |role| SimConfig::instant(Dialect::Vllm, role);
        let cluster = TestClusterBuilder::new()
            .config(move |config| config.routing.enforce_disagg = enforce_disagg)
            .sim_with(engine(Role::Prefill), ",kv_compatibility=0.32")
            .sim_with(engine(Role::Decode), ",kv_compatibility=0.33")
            .start()
            .await;
        let listed = cluster.client.get("/v1/models").await.unwrap().json().unwrap()["data"].clone();
        let reply = cluster.client.post(CHAT, &[], chat(false)).await.unwrap();
        if enforce_disagg {
            // B3.3, B3.4
            assert_eq!(listed, json!([]));
            assert_eq!(cluster.admin.get("/readyz").await.unwrap().status, 503);
            assert_eq!(reply.status, 503);
        } else {
            // B3.1: the decode worker can prefill
            assert_eq!((listed[0]["id"].as_str(), reply.status.as_u16()), (Some("tiny"), 200), "{reply:?}");
            assert_eq!(cluster.sims[0].state().requests.values().sum::<u64>(), 0);
        }
    }
}

#[tokio::test]
async fn b1_without_a_prefill_worker_a_decode_worker_prefills_locally_where_it_can() {
    let cluster = TestClusterBuilder::new()
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Aggregated), "")
        .start()
        .await;
    assert!(!text(&cluster, false).await.is_empty());
    // So does a vLLM decode worker, which has the fact `local_prefill`.
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 0, 1).await.unwrap();
    // B1.2, B1.3
    assert!(!text(&cluster, true).await.is_empty());
    assert_eq!(cluster.sims[0].state().requests.values().sum::<u64>(), 1);
    // Stock SGLang decode workers cannot, nor those with P2pNccl.
    for (dialect, flag) in
        [(Dialect::Sglang, ""), (Dialect::Vllm, ",transport=p2p_nccl,kv_addr=127.0.0.9:14580,role=decode")]
    {
        let role = if flag.is_empty() { Role::Decode } else { Role::Aggregated };
        let builder = TestClusterBuilder::new().sim_with(SimConfig::instant(dialect, role), flag);
        let cluster = builder.start().await;
        let reply = cluster.client.post(CHAT, &[], chat(false)).await.unwrap();
        // B1.4
        assert_eq!((reply.status.as_u16(), reply.code()), (503, "no_worker".into()), "{dialect:?}");
    }
}

#[tokio::test]
async fn f3_a_pinned_request_goes_where_it_is_pinned() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 2, 2).await.unwrap();
    for _ in 0..4 {
        let headers =
            [("x-prefill-instance-id", "2"), ("x-worker-instance-id", "4"), ("x-pointsman-decision", "1")];
        let reply = cluster.client.post(CHAT, &headers, chat(false)).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
        let decision = reply.headers["x-pointsman-decision"].to_str().unwrap();
        assert!(
            decision.contains("prefill=2/0") && decision.contains("decode=4/0") && decision.contains("pin"),
            "{decision}"
        );
    }
    assert_eq!(cluster.sims[0].state().requests.values().sum::<u64>(), 0);
    // F3.5
    assert_eq!(cluster.sims[3].state().requests.values().sum::<u64>(), 4);
}

#[tokio::test]
async fn requests_with_several_consumers_run_on_one_worker() {
    let cluster = TestClusterBuilder::new()
        .pair(Dialect::Vllm)
        .sim(Dialect::Vllm, Role::Aggregated)
        .config(|config| config.routing.retries = 0)
        .start()
        .await;
    let body = chat(false).replacen('{', r#"{"n":2,"#, 1);
    // A vLLM decode worker may serve it as well: both are in the aggregated pool. The simulated one insists
    // on its role.
    let reply = cluster.client.post(CHAT, &[("x-worker-instance-id", "3")], body).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.json().unwrap()["choices"].as_array().unwrap().len(), 2);
    assert_eq!(cluster.sims[0].state().requests.values().sum::<u64>(), 0, "no prefill leg");
}

#[tokio::test]
async fn the_admin_port_lists_workers_policies_and_metrics() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    text(&cluster, true).await;
    cluster.at_rest().await.unwrap();
    let workers = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    assert_eq!(
        (&workers["workers"][0]["health"], &workers["workers"][0]["models"]),
        (&json!("healthy"), &json!(["tiny"]))
    );
    let policies = cluster.admin.get("/policies").await.unwrap().json().unwrap();
    assert_eq!(
        (&policies["slots"][0]["slot"], &policies["slots"][0]["policy"]),
        (&json!("prefill"), &json!("kv-aware"))
    );
    let metrics = cluster.metrics_text().await.unwrap();
    for line in [
        "pointsman_requests_total{endpoint=\"chat_completions\",model=\"tiny\",status=\"200\",code=\"ok\"} 1",
        "pointsman_decisions_total{slot=\"prefill\",policy=\"kv-aware\",lane=\"active\",decider=\"policy\"} 1",
        "pointsman_handoffs_total{result=\"complete\"} 1",
        "pointsman_output_tokens_total 12",
        "pointsman_inflight_requests 0",
        "pointsman_policy_generation{slot=\"decode\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is not in\n{metrics}");
    }
    assert_eq!(cluster.admin.post("/workers/1/drain", &[], "").await.unwrap().status, 200);
    let workers = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    assert_eq!(workers["workers"][0]["ineligible"], "draining");
    assert_eq!(cluster.admin.post("/workers/9/drain", &[], "").await.unwrap().status, 404);
}

#[tokio::test]
async fn a_drain_finishes_requests_in_flight_and_refuses_new_ones() {
    let slow = SimConfig {
        itl: std::time::Duration::from_millis(20),
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    let cluster = TestClusterBuilder::new().sim_with(slow, "").start().await;
    let mut stream = cluster.client.stream(CHAT, &[], chat(true)).await.unwrap();
    stream.next().await.unwrap();
    let TestCluster { gateway, client, .. } = cluster;
    let draining = gateway.state().draining.clone();
    let drained = tokio::time::timeout(std::time::Duration::from_secs(10), async {
        tokio::join!(gateway.drain(), async {
            draining.cancelled().await;
            let refused = client.post(CHAT, &[], chat(false)).await.unwrap();
            assert_eq!((refused.status.as_u16(), refused.code()), (503, "draining".into()));
            stream.all().await.unwrap()
        })
    });
    let ((), events) = drained.await.unwrap();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
}
