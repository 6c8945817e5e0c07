//! Data of a request besides its prompt: its trace, its agent, canaries of health checks, and keys
//! that have no effect here.

use std::collections::BTreeMap;

use pointsman_sim::{Dialect, Role, SimConfig, SimHandle};
use pointsman_tests::{TestCluster, TestClusterBuilder};
use serde_json::{Value, json};

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

async fn pair(dialect: Dialect) -> TestCluster {
    let sim = |role| SimConfig { record: 100, ..SimConfig::instant(dialect, role) };
    let builder = TestClusterBuilder::new().sim_with(sim(Role::Prefill), "").sim_with(sim(Role::Decode), "");
    builder.start().await
}

fn chat(nvext: Value) -> String {
    let messages = json!([{ "role": "user", "content": "hello" }]);
    json!({ "model": "tiny", "messages": messages, "max_tokens": 2, "nvext": nvext }).to_string()
}

/// The trace headers of the last request of an engine.
fn traced(sim: &SimHandle) -> BTreeMap<String, String> {
    let headers = sim.recorded().last().unwrap().headers.clone();
    headers.into_iter().filter(|(name, _)| name.starts_with("trace")).collect()
}

#[tokio::test]
async fn a3_each_leg_gets_a_span_of_the_client_s_trace_and_decode_names_its_prefill() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = pair(dialect).await;
        let headers = [("traceparent", PARENT), ("tracestate", "vendor=1")];
        let reply = cluster.client.post("/v1/chat/completions", &headers, chat(json!({}))).await.unwrap();
        assert_eq!(reply.status.as_u16(), 200);
        let (prefill, decode) = (traced(&cluster.sims[0]), traced(&cluster.sims[1]));
        let spans: Vec<Vec<&str>> =
            [&prefill, &decode].iter().map(|leg| leg["traceparent"].split('-').collect()).collect();
        // A3.11
        assert!(spans.iter().all(|span| span[1] == TRACE && span[3] == "01"), "{spans:?}");
        assert!(spans[0][2] != spans[1][2] && !PARENT.contains(spans[0][2]), "{spans:?}");
        assert_eq!(prefill["tracestate"], "vendor=1");
        // D1.3, A3.12
        assert_eq!(decode["tracestate"], format!("pointsman=prefill:{},vendor=1", spans[0][2]));
        // A request without a trace begins one, and both legs belong to it.
        cluster
            .client
            .post("/v1/chat/completions", &[("traceparent", "none")], chat(json!({})))
            .await
            .unwrap();
        let ids =
            [0, 1].map(|sim| traced(&cluster.sims[sim])["traceparent"].split('-').nth(1).unwrap().to_owned());
        assert!(ids[0] == ids[1] && ids[0] != TRACE && ids[0].len() == 32, "{ids:?}");
    }
}

#[tokio::test]
async fn a3_a_listener_that_takes_no_hints_begins_its_own_trace() {
    let sim = SimConfig { record: 9, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new()
        .config(|config| config.server.trust_hints = false)
        .sim_with(sim, "")
        .start()
        .await;
    cluster.client.post("/v1/chat/completions", &[("traceparent", PARENT)], chat(json!({}))).await.unwrap();
    let seen = traced(&cluster.sims[0]);
    assert!(!seen["traceparent"].contains(TRACE), "{seen:?}");
}

#[tokio::test]
async fn a2_keys_of_nvext_that_have_no_effect_are_named_in_a_header() {
    let cluster = pair(Dialect::Vllm).await;
    let nvext =
        json!({ "extra_fields": ["timing"], "agent_hints": { "osl": 9, "speculative_prefill": true } });
    let reply = cluster.client.post("/v1/chat/completions", &[], chat(nvext)).await.unwrap();
    // A3.10
    assert_eq!(
        reply.headers["x-pointsman-warning"],
        "ignored, not known or not supported: nvext.extra_fields, nvext.agent_hints.speculative_prefill"
    );
    let unknown = json!({ "extra_fields": ["timing"], "annotations": ["token_ids", "query_instance_id:"] });
    for path in ["/v1/chat/completions", "/v1/route"] {
        let told = cluster.client.post(path, &[], chat(unknown.clone())).await.unwrap();
        // A3.10: without running it, too
        let warning = told.headers["x-pointsman-warning"].to_str().unwrap();
        assert!(warning.contains("nvext.extra_fields") && warning.contains("token_ids"), "{path}: {warning}");
        let known = json!({ "agent_hints": { "osl": 9 }, "annotations": ["query_instance_id:"] });
        let quiet = cluster.client.post(path, &[], chat(known)).await.unwrap();
        assert!(!quiet.headers.contains_key("x-pointsman-warning"), "{path}: {:?}", quiet.headers);
        // F2.4
        assert_eq!(quiet.headers["content-type"], "application/json", "{path}");
    }
    let streamed = chat(json!({})).replacen('{', r#"{"stream":true,"#, 1);
    let reply = cluster.client.post("/v1/route", &[], streamed).await.unwrap();
    assert!(reply.headers["content-type"] == "application/json" && reply.json().is_ok(), "{reply:?}");
    let quiet = json!({ "agent_hints": { "osl": 9 }, "router": { "ttft_target": 5.0 } });
    let reply = cluster.client.post("/v1/chat/completions", &[], chat(quiet)).await.unwrap();
    assert!(!reply.headers.contains_key("x-pointsman-warning"), "{:?}", reply.headers);
}

#[tokio::test]
async fn a2_routing_constraints_of_dynamo_s_bodies_choose_the_worker() {
    let sim = || SimConfig { record: 100, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new().sim_with(sim(), ",taint=gold").sim_with(sim(), "").start().await;
    for _ in 0..6 {
        let nvext = json!({ "routing_constraints": { "required_taints": ["gold"] } });
        let reply = cluster.client.post("/v1/chat/completions", &[], chat(nvext)).await.unwrap();
        assert_eq!(reply.status.as_u16(), 200, "{:?}", reply.body);
    }
    // A2.5
    assert_eq!(cluster.sims[1].recorded().len(), 0, "only one worker has the taint");
}

#[tokio::test]
async fn a2_open_begins_a_session_anew_and_bind_goes_on() {
    let mut builder = TestClusterBuilder::new();
    for _ in 0..8 {
        let sim = SimConfig { record: 100, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
        builder = builder.sim_with(sim, "");
    }
    let cluster = builder.start().await;
    let served = async |action: Value| {
        let before: Vec<usize> = cluster.sims.iter().map(|sim| sim.recorded().len()).collect();
        let control = json!({ "session_control": { "session_id": "s", "action": action } });
        let reply = cluster.client.post("/v1/chat/completions", &[], chat(control)).await.unwrap();
        assert_eq!(reply.status.as_u16(), 200);
        let grown = |(sim, before): (&SimHandle, &usize)| sim.recorded().len() > *before;
        cluster.sims.iter().zip(&before).position(grown).unwrap()
    };
    let first = served(json!("bind")).await;
    for _ in 0..4 {
        // A2.3
        assert_eq!(served(json!("bind")).await, first);
    }
    let mut opened = Vec::new();
    for _ in 0..12 {
        opened.push(served(json!("open")).await);
    }
    // A2.4
    assert!(opened.iter().any(|worker| *worker != first), "each open is routed anew: {opened:?}");
    assert_eq!(served(json!(null)).await, opened[11], "and binds");
}

#[tokio::test]
async fn a1_a_canary_of_token_ids_is_answered_by_its_worker_alone() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = pair(dialect).await;
        for (worker, sim) in [("1", &cluster.sims[0]), ("2", &cluster.sims[1])] {
            let canary = json!({ "token_ids": [1], "_HEALTH_CHECK": true }).to_string();
            let target = [("x-worker-instance-id", worker)];
            let reply = cluster.client.post("/v1/completions", &target, canary).await.unwrap();
            // A1.2, A1.6, A1.8
            assert_eq!(reply.status.as_u16(), 200, "{dialect:?} {worker}: {:?}", reply.body);
            let seen: Value = serde_json::from_str(&sim.recorded().last().unwrap().body).unwrap();
            assert_eq!(
                (&seen["model"], &seen["prompt"], &seen["max_tokens"]),
                (&json!("tiny"), &json!([1]), &json!(1))
            );
            assert!(seen.get("_HEALTH_CHECK").is_none(), "{seen}");
            if dialect == Dialect::Sglang {
                assert_eq!(seen["bootstrap_host"], "2.2.2.2", "a worker of a pair needs a room");
                assert!(seen["bootstrap_room"].is_u64(), "{seen}");
            }
        }
        assert_eq!(cluster.sims.iter().map(|sim| sim.recorded().len()).sum::<usize>(), 2);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i9_every_refusal_of_the_admin_port_has_one_shape_and_large_ids_are_texts_too() {
    let big = 18_446_744_073_709_551_000_u64;
    let cluster = TestClusterBuilder::new()
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Aggregated), &format!(",id={big}"))
        .start()
        .await;
    let json_type = [("content-type", "application/json")];
    let refusals = [
        (cluster.admin.get("/nothing").await.unwrap(), 404, "unknown_url"),
        (cluster.admin.get("/workers/1/drain").await.unwrap(), 405, "method_not_allowed"),
        (cluster.admin.get("/decisions?limit=x").await.unwrap(), 400, "invalid_request"),
        (cluster.admin.get("/decisions/xyz").await.unwrap(), 400, "invalid_request"),
        (cluster.admin.get("/decisions/ffff").await.unwrap(), 404, "decision_not_found"),
        (cluster.admin.post("/workers", &json_type, "{}").await.unwrap(), 400, "invalid_request"),
        (cluster.admin.post("/workers/7/drain", &json_type, "").await.unwrap(), 404, "worker_not_found"),
        (cluster.admin.post("/workers/x/drain", &json_type, "").await.unwrap(), 400, "invalid_request"),
        (cluster.admin.delete("/workers/7").await.unwrap(), 404, "worker_not_found"),
    ];
    for (reply, status, code) in refusals {
        let body = reply.json().unwrap();
        // I9.1
        assert_eq!((reply.status.as_u16(), &body["error"]["code"]), (status, &json!(code)), "{body}");
        assert!(body["error"]["message"].is_string() && body["error"]["request_id"].is_string(), "{body}");
    }
    let workers = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    let worker = &workers["workers"][0];
    // I9.2
    assert_eq!((&worker["id"], &worker["id_text"]), (&json!(big), &json!(big.to_string())));
    cluster.client.post("/v1/chat/completions", &[], chat(json!({}))).await.unwrap();
    cluster.at_rest().await.unwrap();
    let decisions = cluster.admin.get("/decisions").await.unwrap();
    assert!(String::from_utf8_lossy(&decisions.body).contains(&format!("\"{big}\"")), "{:?}", decisions.body);
    let decision = &decisions.json().unwrap()["decisions"][0];
    // I9.2
    assert_eq!(decision["candidates_text"], json!([[big.to_string(), "0"]]), "{decision}");
    let preview = cluster.client.post("/v1/route", &[], chat(json!({}))).await.unwrap().json().unwrap();
    // I9.2
    assert_eq!(preview["worker_id"]["decode_worker_id_text"], json!(big.to_string()), "{preview}");
    assert_eq!(preview["legs"][0]["candidates"][0]["worker_text"], json!(big.to_string()), "{preview}");
}
