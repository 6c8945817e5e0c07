//! Every row of table I over real connections: status, code, shape and `Retry-After`.

use std::time::Duration;

use pointsman_gateway::config::{Config, SlotEntry};
use pointsman_routing::{NativeMode, SlotKind};
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{
    Act, CHAT, RESPONSES, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::{Client, Reply},
    raw_engine,
};
use serde_json::{Value, json};

fn chat(tokens: u32) -> String {
    json!({
        "model": "tiny", "max_tokens": tokens, "ignore_eos": true,
        "messages": [{"role": "user", "content": "one row of a table after the other"}],
    })
    .to_string()
}

async fn single(change: impl FnOnce(&mut Config)) -> TestCluster {
    TestClusterBuilder::new().config(change).sim(Dialect::Vllm, Role::Aggregated).start().await
}

fn check(reply: &Reply, status: u16, code: &str) {
    assert_eq!((reply.status.as_u16(), reply.code()), (status, code.to_owned()), "{reply:?}");
    let body = reply.json().unwrap();
    // I1.1
    assert!(!body["error"]["message"].as_str().unwrap().is_empty());
    let id = body["error"]["request_id"].as_str().unwrap();
    assert!(!id.is_empty());
    // A5.5
    assert_eq!(reply.headers.get("x-request-id").map(|value| value.to_str().unwrap()), Some(id), "{code}");
    let retry = matches!(status, 429 | 503 | 529);
    assert_eq!(reply.headers.contains_key("retry-after"), retry, "{code}");
}

#[tokio::test]
async fn i_invalid_request_bad_json_and_bad_fields_are_400_and_named() {
    let cluster = single(|_| {}).await;
    for (body, names) in [
        ("{", "body: "),
        ("[]", "body: the body is not a JSON object"),
        (r#"{"messages":[],"model":3}"#, "model: `3`"),
        (r#"{"model":"tiny"}"#, "messages: is missing"),
        (r#"{"model":"tiny","messages":[],"max_tokens":-1}"#, "max_tokens: `-1`"),
        (r#"{"model":"tiny","messages":[],"max_tokens":1.5}"#, "max_tokens: `1.5`"),
        (r#"{"model":"tiny","messages":[],"stream":"maybe"}"#, "stream: `\"maybe\"`"),
        (r#"{"model":"tiny","messages":[],"nvext":{"dp_rank":"x"}}"#, "nvext: `{\"dp_rank\":\"x\"}`"),
    ] {
        let reply = cluster.client.post(CHAT, &[], body).await.unwrap();
        // I_invalid_request
        check(&reply, 400, "invalid_request");
        let message = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(names), "{body}: {message}");
    }
}

#[tokio::test]
async fn a5_what_engines_take_passes_as_it_is() {
    let engine = RawEngine::start(|request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(raw_engine::json(r#"{"data":[{"id":"tiny"}]}"#))],
        _ if request.body.contains("\"stream\":true") => {
            let end = "data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
            let body = [raw_engine::chunk(end.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
            vec![Act::Send([raw_engine::stream_head(), body].concat())]
        }
        _ => vec![Act::Send(raw_engine::json(r#"{"choices":[],"output":[]}"#))],
    })
    .await;
    let change =
        |config: &mut Config| config.workers.push(engine.worker("id=1,role=aggregated,engine=openai"));
    let cluster = TestClusterBuilder::new().config(change).start().await;
    for fields in [
        r#""max_tokens":2.0"#,
        r#""max_tokens":2e0,"n":1.0"#,
        r#""max_completion_tokens":2.0,"max_tokens":99999999999999999999"#,
        r#""max_tokens":2,"stream":true,"stream_options":{"include_usage":null}"#,
        r#""max_tokens":"2","n":"1","stream":"off""#,
        r#""max_tokens":true,"n":true,"stream":0,"stream_options":null"#,
    ] {
        let body = format!(r#"{{"model":"tiny","messages":[{{"role":"user","content":"hi"}}],{fields}}}"#);
        for sent in [body.clone(), format!("\u{feff}{body}")] {
            let reply = cluster.client.post(CHAT, &[], sent.clone()).await.unwrap();
            // A5.18
            assert_eq!(reply.status.as_u16(), 200, "{sent}: {reply:?}");
            assert_eq!(engine.requests().last().unwrap().body, body);
        }
    }
    for (path, key) in
        [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (RESPONSES, "max_output_tokens")]
    {
        for (limit, status) in [(-1, 200), (-2, 400)] {
            let mut body = json!({"model": "tiny", "messages": [], "input": "hi"});
            body[key] = limit.into();
            let body = body.to_string();
            let reply = cluster.client.post(path, &[], body.clone()).await.unwrap();
            // A5.19
            assert_eq!(reply.status.as_u16(), status, "{key} {limit}: {reply:?}");
            assert_eq!(engine.requests().last().unwrap().body == body, status == 200);
        }
    }
}

#[tokio::test]
async fn a5_a_switch_that_is_a_text_streams() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = TestClusterBuilder::new().sim(dialect, Role::Aggregated).start().await;
        let body = chat(2).replace("\"ignore_eos\":true", r#""ignore_eos":1,"stream":"yes""#);
        let events = cluster.client.stream(CHAT, &[], body).await.unwrap().all().await.unwrap();
        // A5.18
        assert_eq!(events.last().unwrap(), "[DONE]", "{dialect:?}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i_invalid_request_a_context_too_long_is_the_engine_s_own_400() {
    let config = SimConfig { max_model_len: 64, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new().sim_with(config, "").start().await;
    let body = chat(5).replace("one row", &"word ".repeat(500));
    let reply = cluster.client.post(CHAT, &[], body.clone()).await.unwrap();
    let engine = Client::new(cluster.sims[0].addr());
    let own = engine.post(CHAT, &[], body).await.unwrap();
    // I_invalid_request, I1.3
    assert_eq!((reply.status.as_u16(), &reply.body), (400, &own.body));
    assert!(String::from_utf8_lossy(&own.body).contains("maximum context length"), "{own:?}");
}

#[tokio::test]
async fn i_unauthorized_no_key_is_401() {
    let cluster = single(|config| config.auth.keys = pointsman_tests::client_keys(&[("sk-1", "")])).await;
    // I_unauthorized
    check(&cluster.client.post(CHAT, &[], chat(1)).await.unwrap(), 401, "unauthorized");
}

#[tokio::test]
async fn i_unauthorized_an_unknown_key_is_401_and_the_scheme_has_any_case() {
    let cluster = single(|config| config.auth.keys = pointsman_tests::client_keys(&[("sk-1", "")])).await;
    let wrong = [("authorization", "Bearer sk-2")];
    let reply = cluster.client.post(CHAT, &wrong, chat(1)).await.unwrap();
    // I_unauthorized
    check(&reply, 401, "unauthorized");
    assert_eq!(reply.headers["www-authenticate"], "Bearer");
    for scheme in ["Bearer", "bearer", "BEARER", "bEARER "] {
        let right = format!("{scheme} sk-1");
        let reply = cluster.client.post(CHAT, &[("authorization", &right)], chat(1)).await.unwrap();
        // K1.7
        assert_eq!(reply.status, 200, "{scheme}: {reply:?}");
    }
}

#[tokio::test]
async fn i_forbidden_a_page_of_another_site_may_not_change_the_gateway() {
    let cluster = single(|_| {}).await;
    let foreign = [("origin", "http://other.example")];
    // I_forbidden
    check(&cluster.admin.post("/policies/reload", &foreign, "").await.unwrap(), 403, "forbidden");
}

#[tokio::test]
async fn i_unknown_url_a_wrong_base_url_is_answered_with_the_path_that_is_meant() {
    let cluster = single(|_| {}).await;
    for (path, meant) in [
        ("/chat/completions", Some("the path is /v1/chat/completions")),
        ("/v1/v1/chat/completions", Some("the path is /v1/chat/completions")),
        ("/v1/chat/completions/chat/completions", Some("the path is /v1/chat/completions")),
        ("/v1/v1/messages", Some("the path is /v1/messages")),
        ("/v1/nothing", None),
    ] {
        let reply = cluster.client.post(path, &[], chat(1)).await.unwrap();
        check(&reply, 404, "unknown_url");
        let message = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
        // I7.4
        assert!(message.contains(meant.unwrap_or("GET /openapi.json lists")), "{path}: {message}");
    }
}

#[tokio::test]
async fn i_while_no_worker_is_registered_every_model_is_503() {
    let cluster = TestClusterBuilder::new().start().await;
    for path in [CHAT, "/v1/completions", "/v1/embeddings", "/v1/route", "/v1/models/tiny"] {
        let reply = if path.starts_with("/v1/models") {
            cluster.client.get(path).await.unwrap()
        } else {
            let body = json!({"model": "tiny", "prompt": "a", "input": "a", "messages": []}).to_string();
            cluster.client.post(path, &[], body).await.unwrap()
        };
        // I1.6
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (503, "no_worker"), "{path}: {reply:?}");
        assert!(reply.headers.contains_key("retry-after"), "{path}");
        let message = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("no worker is registered"), "{path}: {message}");
    }
}

#[tokio::test]
async fn i_model_not_found_an_unknown_model_is_404() {
    let cluster = single(|_| {}).await;
    let reply = cluster.client.post(CHAT, &[], chat(1).replace("tiny", "nope")).await.unwrap();
    // I_model_not_found
    check(&reply, 404, "model_not_found");
}

#[tokio::test]
async fn i_worker_not_found_an_unknown_pin_is_404() {
    let cluster = single(|_| {}).await;
    let pin = [("x-worker-instance-id", "77")];
    // F3.7, I_worker_not_found
    check(&cluster.client.post(CHAT, &pin, chat(1)).await.unwrap(), 404, "worker_not_found");
}

#[tokio::test]
async fn i_worker_not_eligible_a_draining_pin_is_409_with_the_reason() {
    let cluster = single(|_| {}).await;
    cluster.admin.post("/workers/1/drain", &[], "").await.unwrap();
    let pin = [("x-worker-instance-id", "1")];
    let reply = cluster.client.post(CHAT, &pin, chat(1)).await.unwrap();
    // I_worker_not_eligible
    check(&reply, 409, "worker_not_eligible");
    // F3.8
    assert!(reply.json().unwrap()["error"]["message"].as_str().unwrap().contains("draining"));
}

#[tokio::test]
async fn i_payload_too_large_is_413() {
    let cluster = single(|config| config.server.max_body_bytes = 1_000).await;
    let reply = cluster.client.post(CHAT, &[], chat(1).replace("one row", &"x".repeat(2_000))).await.unwrap();
    // I_payload_too_large
    check(&reply, 413, "payload_too_large");
}

#[tokio::test]
async fn i_shed_a_policy_s_refusal_is_its_status_and_reason() {
    let cluster = single(|config| {
        let mut entry = SlotEntry::default();
        entry.settings.insert("mode".to_owned(), "refuse".into());
        config.policies.slots.insert(SlotKind::Aggregated, entry);
    })
    .await;
    cluster.drop_policy("aggregated.wasm", pointsman_test_guests::HOSTILE).unwrap();
    let dropped = tokio::time::Instant::now();
    while dropped.elapsed() < Duration::from_mins(1) {
        let reply = cluster.client.post(CHAT, &[], chat(1)).await.unwrap();
        if reply.status != 200 {
            // I_shed
            check(&reply, 429, "shed");
            assert_eq!(reply.json().unwrap()["error"]["message"], "the quota is used up");
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let policies = cluster.admin.get("/policies").await.unwrap().json().unwrap();
    assert_eq!(policies, Value::Null, "it never shed");
}

#[tokio::test]
async fn i_rate_limited_is_429_for_each_key_alone() {
    let cluster = single(|config| {
        config.server.requests_per_second = 2;
        config.auth.keys = pointsman_tests::client_keys(&[("sk-1", ""), ("sk-2", "")]);
    })
    .await;
    let ask = async |key: &str| cluster.client.post(CHAT, &[("authorization", key)], chat(1)).await.unwrap();
    let mut limited = None;
    for _ in 0..10 {
        let reply = ask("Bearer sk-1").await;
        if reply.status == 429 {
            limited = Some(reply);
            break;
        }
    }
    // I_rate_limited
    check(&limited.unwrap(), 429, "rate_limited");
    assert_eq!(ask("Bearer sk-2").await.status, 200);
}

#[tokio::test]
async fn i_client_closed_is_499_in_the_metrics() {
    let slow =
        SimConfig { overhead: Duration::from_secs(2), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new().sim_with(slow, "").start().await;
    tokio::select! {
        reply = cluster.client.post(CHAT, &[], chat(5)) => panic!("the client left before its answer: {reply:?}"),
        booked = cluster.until("it is routed", |cluster| cluster.booked() == 1) => booked.unwrap(),
    }
    cluster.at_rest().await.unwrap();
    let metrics = cluster.metrics_text().await.unwrap();
    let line = r#"status="499",code="client_closed"} 1"#;
    // I_client_closed
    assert!(metrics.contains(line), "{metrics}");
}

#[tokio::test]
async fn i7_a_client_that_closes_its_sending_side_has_left() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let slow = SimConfig {
        overhead: Duration::from_secs(60),
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    let cluster = TestClusterBuilder::new().sim_with(slow, "").start().await;
    let at_engine = |cluster: &TestCluster| {
        let engine = cluster.sims[0].state();
        engine.running + engine.waiting
    };
    let body = chat(5);
    for version in ["HTTP/1.1", "HTTP/1.1\r\nconnection: close", "HTTP/1.0"] {
        let mut socket = tokio::net::TcpStream::connect(cluster.gateway.address).await.unwrap();
        let head = format!("POST {CHAT} {version}\r\nhost: a\r\ncontent-length: {}\r\n\r\n", body.len());
        socket.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        cluster.until("it runs", |cluster| at_engine(cluster) == 1).await.unwrap();
        socket.shutdown().await.unwrap();
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).await.unwrap();
        // I7.6
        assert!(answer.is_empty(), "{version}: {}", String::from_utf8_lossy(&answer));
        cluster.until("the engine is free", |cluster| at_engine(cluster) == 0).await.unwrap();
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i_bad_upstream_an_engine_that_breaks_its_protocol_is_502_with_its_own_text() {
    let cluster = single(|config| config.routing.retries = 0).await;
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::Status { status: 500, retry_after: None })]);
    let reply = cluster.client.post(CHAT, &[], chat(1)).await.unwrap();
    // I_bad_upstream
    check(&reply, 502, "bad_upstream");
    let text = String::from_utf8(reply.body.to_vec()).unwrap();
    // I1.1: it quotes the worker's own text
    assert!(text.contains("injected fault: status 500") && !text.contains("127.0.0.1"), "{text}");
}

#[tokio::test]
async fn i_no_worker_nothing_eligible_is_503() {
    let cluster = single(|_| {}).await;
    cluster.admin.post("/workers/1/drain", &[], "").await.unwrap();
    let reply = cluster.client.post(CHAT, &[("x-pointsman-decision", "1")], chat(1)).await.unwrap();
    // I_no_worker
    check(&reply, 503, "no_worker");
    // T2.2
    assert!(!reply.headers.contains_key("x-pointsman-decision"), "{reply:?}");
}

#[tokio::test]
async fn i_prefill_unavailable_when_disaggregation_is_enforced_is_503() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.routing.enforce_disagg = true)
        .sim(Dialect::Vllm, Role::Decode)
        .start()
        .await;
    // B1.1, I_prefill_unavailable
    check(&cluster.client.post(CHAT, &[], chat(1)).await.unwrap(), 503, "prefill_unavailable");
}

#[tokio::test]
async fn i_draining_a_gateway_that_shuts_down_is_503() {
    let cluster = single(|_| {}).await;
    cluster.gateway.state().draining.cancel();
    // I_draining
    check(&cluster.client.post(CHAT, &[], chat(1)).await.unwrap(), 503, "draining");
}

#[tokio::test]
async fn i_deadline_is_504() {
    let cluster = single(|config| config.timeouts.request = Duration::from_millis(150)).await;
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::HangBeforeHeaders)]);
    let reply = cluster.client.post(CHAT, &[], chat(1)).await.unwrap();
    // I_deadline
    check(&reply, 504, "deadline");
    // I1.12
    assert_eq!(reply.headers["x-should-retry"], "false");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i_overloaded_all_busy_is_529_or_the_configured_status() {
    for (status, change) in [(529, 529), (503, 503)] {
        let slow = SimConfig {
            itl: Duration::from_millis(10),
            ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
        };
        let cluster = TestClusterBuilder::new()
            .config(|config| config.routing.busy_status = change)
            .sim_with(slow, ",max_concurrency=1")
            .start()
            .await;
        let body = chat(500).replacen('{', r#"{"stream":true,"#, 1);
        let mut first = cluster.client.stream(CHAT, &[], body).await.unwrap();
        first.next().await.unwrap();
        let busy = cluster.client.post(CHAT, &[], chat(1)).await.unwrap();
        // I_overloaded
        check(&busy, status, "overloaded");
        let text = String::from_utf8_lossy(&busy.body);
        // F7.6
        assert!(
            text.contains("every aggregated worker is busy: no request may wait (queue.limit is 0)"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn c4_direct_mode_names_what_is_missing() {
    let direct = |config: &mut Config| {
        for kind in [SlotKind::Prefill, SlotKind::Decode, SlotKind::Aggregated] {
            let entry = SlotEntry { native: Some(NativeMode::Direct), ..SlotEntry::default() };
            config.policies.slots.insert(kind, entry);
        }
    };
    let cluster = TestClusterBuilder::new().config(direct).pair(Dialect::Vllm).start().await;
    let message = |reply: &Reply| -> String {
        let json: Value = reply.json().unwrap();
        json["error"]["message"].as_str().unwrap().to_owned()
    };
    let none = cluster.client.post(CHAT, &[], chat(2)).await.unwrap();
    check(&none, 400, "invalid_request");
    // C4.1
    assert!(message(&none).contains("x-prefill-instance-id"), "{none:?}");
    let prefill = [("x-prefill-instance-id", "1")];
    let half = cluster.client.post(CHAT, &prefill, chat(2)).await.unwrap();
    check(&half, 400, "invalid_request");
    // F3.6
    assert!(
        message(&half).contains("decode_worker_id") && message(&half).contains("backend_instance_id"),
        "F3: both are named: {half:?}"
    );
    let both = [("x-prefill-instance-id", "1"), ("x-worker-instance-id", "2")];
    assert_eq!(cluster.client.post(CHAT, &both, chat(2)).await.unwrap().status, 200);
    cluster.at_rest().await.unwrap();
}

/// The id of a request in the header of its answer, and in the body of an error.
fn ids(reply: &Reply) -> (String, Option<String>) {
    let header = reply.headers.get("x-request-id").map(|value| value.to_str().unwrap().to_owned());
    let body = reply.json().ok().and_then(|body| body["error"]["request_id"].as_str().map(str::to_owned));
    (header.unwrap_or_default(), body)
}

/// Method, path, headers and body of a request, and the status of its answer.
type Case<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], &'a str, u16);

#[tokio::test]
async fn a5_every_answer_names_the_request_in_a_header() {
    let cluster = single(|config| {
        config.server.max_body_bytes = 10_000;
        config.auth.keys = pointsman_tests::client_keys(&[("sk-1", "")]);
        config.server.cors_origins = vec!["https://page.example".to_owned()];
    })
    .await;
    let large = "x".repeat(20_000);
    let preview = chat(1).replacen('{', r#"{"nvext":{"annotations":["query_instance_id:"]},"#, 1);
    let key = ("authorization", "Bearer sk-1");
    let (brotli, ours) = (("content-encoding", "compress"), ("x-request-id", "client-7"));
    let cases: &[Case<'_>] = &[
        ("POST", CHAT, &[], "{}", 401),
        ("POST", CHAT, &[("authorization", "Bearer sk-2")], "{}", 401),
        ("POST", "/v1/route", &[], "{}", 401),
        ("GET", "/v1/models", &[], "", 401),
        ("GET", "/v1/realtime?model=tiny", &[], "", 401),
        ("GET", "/v1/responses/resp_1", &[], "", 401),
        ("POST", CHAT, &[key], "{", 400),
        ("POST", "/v1/route", &[key], "{", 400),
        ("GET", "/nothing", &[], "", 404),
        ("POST", "/v1/responses/compact", &[], "{}", 404),
        ("POST", "/v1/responses/input_tokens", &[], "{}", 404),
        ("POST", CHAT, &[key], r#"{"model":"other","messages":[]}"#, 404),
        ("GET", "/v1/models/other", &[key], "", 404),
        ("GET", "/v1/responses/resp_1", &[key], "", 404),
        ("GET", CHAT, &[key], "", 405),
        ("POST", CHAT, &[key], &large, 413),
        ("POST", CHAT, &[key, brotli], "{}", 415),
        ("POST", "/v1/route", &[key, brotli], "{}", 415),
        ("GET", "/v1/realtime?model=tiny", &[key], "", 426),
        ("GET", "/v1/models", &[key], "", 200),
        ("GET", "/v1/models/tiny", &[key], "", 200),
        ("GET", "/version", &[], "", 200),
        ("GET", "/health", &[], "", 200),
        ("GET", "/openapi.json", &[], "", 200),
        ("POST", "/v1/route", &[key], &chat(1), 200),
        ("POST", CHAT, &[key], &preview, 200),
        ("POST", CHAT, &[key], &chat(1), 200),
        (
            "OPTIONS",
            CHAT,
            &[("origin", "https://page.example"), ("access-control-request-method", "POST")],
            "",
            200,
        ),
    ];
    for (method, path, headers, body, status) in cases {
        for given in [None, Some(ours)] {
            let headers: Vec<_> = headers.iter().copied().chain(given).collect();
            let reply = match *method {
                "POST" => cluster.client.post(path, &headers, (*body).to_owned()).await.unwrap(),
                _ => cluster.client.send(method, path, &headers).await.unwrap(),
            };
            assert_eq!(reply.status.as_u16(), *status, "{method} {path}: {reply:?}");
            let (header, body) = ids(&reply);
            // A5.5
            assert!(
                if given.is_some() { header == ours.1 } else { header.len() == 32 },
                "{method} {path}: {reply:?}"
            );
            // The body of an engine's own 404 is passed on.
            let is_ours = *status >= 400 && !(path.starts_with("/v1/responses/resp_") && *status == 404);
            assert_eq!(body.is_some(), is_ours, "{method} {path}: {reply:?}");
            assert!(body.is_none_or(|body| body == header), "{method} {path}: {reply:?}");
        }
    }
}

#[tokio::test]
async fn a5_a_refused_connection_names_its_refusal_in_a_header() {
    let cluster = single(|config| config.limits.connections = 1).await;
    let _held = tokio::net::TcpStream::connect(cluster.gateway.address).await.unwrap();
    let mut refused = None;
    for _ in 0..200 {
        let mut stream = pointsman_tests::raw::send(cluster.gateway.address, "GET /version HTTP/1.1\r\n\r\n")
            .await
            .unwrap();
        let answer = pointsman_tests::raw::until_closed(&mut stream).await;
        if answer.starts_with("HTTP/1.1 503") {
            refused = Some(answer);
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let answer = refused.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let id = head.lines().find_map(|line| line.strip_prefix("x-request-id: ")).unwrap();
    let body: Value = serde_json::from_str(body).unwrap();
    // A5.5, I1.1
    assert!(id.len() == 32 && body["error"]["request_id"] == id, "{answer}");
}
