//! Limits of tenants as clients see them, and the bounds of requests in flight.

use std::time::Duration;

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{RawRequest, chunk, stream_head},
};
use serde_json::{Value, json};

const HEADER: &str = "x-tenant";

/// A gateway that believes clients about their tenant, with `sections` in its configuration.
async fn cluster(sections: &str, sim: SimConfig) -> TestCluster {
    let from: Config = toml::from_str(sections).unwrap();
    TestClusterBuilder::new()
        .config(|config| {
            config.server.tenant_header = HEADER.to_owned();
            config.auth.trusted_proxies = vec!["127.0.0.0/8".to_owned()];
            (config.queue, config.tenants) = (from.queue, from.tenants);
        })
        .sim_with(sim, "")
        .start()
        .await
}

fn instant() -> SimConfig {
    SimConfig::instant(Dialect::Vllm, Role::Aggregated)
}

/// A request with ten prompt tokens.
fn body(more: Value) -> String {
    let mut body = json!({"model": "tiny", "prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "max_tokens": 4});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

async fn ask(cluster: &TestCluster, tenant: &str, more: Value) -> Reply {
    cluster.client.post(COMPLETIONS, &[(HEADER, tenant)], body(more)).await.unwrap()
}

fn header<'a>(reply: &'a Reply, name: &str) -> &'a str {
    reply.headers.get(name).map_or("", |value| value.to_str().unwrap())
}

#[tokio::test]
async fn l2_a_client_reads_its_limits_in_headers_and_errors_of_openai() {
    let sections = "[tenants.'*']\nrequests_per_minute = 2\ninput_tokens_per_minute = 1000\n\
                    output_tokens_per_minute = 600";
    let cluster = cluster(sections, instant()).await;
    let first = ask(&cluster, "a", json!({})).await;
    assert_eq!(first.status, 200, "{:?}", first.json());
    // L2.1
    assert_eq!(header(&first, "x-ratelimit-limit-requests"), "2");
    assert_eq!(header(&first, "x-ratelimit-remaining-requests"), "1");
    let reset = header(&first, "x-ratelimit-reset-requests");
    assert!(["28.", "29.", "30s"].iter().any(|time| reset.starts_with(time)), "{reset}");
    // Four of 600 output tokens are a smaller share than ten of 1,000 input tokens.
    assert_eq!(header(&first, "x-ratelimit-limit-tokens"), "1000");
    let left: u64 = header(&first, "x-ratelimit-remaining-tokens").parse().unwrap();
    assert!((990..1_000).contains(&left), "{left}");
    assert_eq!(ask(&cluster, "a", json!({})).await.status, 200);
    let third = ask(&cluster, "a", json!({})).await;
    // L1.1, L2.2
    assert_eq!(third.status, 429);
    let error = &third.json().unwrap()["error"];
    assert_eq!((&error["code"], &error["type"]), (&json!("rate_limit_exceeded"), &json!("requests")));
    assert!(["28", "29", "30"].contains(&header(&third, "retry-after")), "{:?}", third.headers);
    let millis: u64 = header(&third, "retry-after-ms").parse().unwrap();
    assert!((27_000..=30_000).contains(&millis), "{millis}");
    assert_eq!(header(&third, "x-ratelimit-remaining-requests"), "0");
    let other = ask(&cluster, "b", json!({"prompt": vec![7; 1_001]})).await;
    let error = &other.json().unwrap()["error"];
    assert_eq!((other.status.as_u16(), &error["type"]), (429, &json!("tokens")), "{error}");
    assert!(error["message"].as_str().unwrap().starts_with("Request too large"), "{error}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn l2_without_limits_no_header_tells_any() {
    let cluster = cluster("[tenants.a]\nrequests_per_minute = 2", instant()).await;
    let reply = ask(&cluster, "b", json!({})).await;
    // L2.4
    assert!(
        !reply.headers.keys().any(|name| name.as_str().starts_with("x-ratelimit")),
        "{:?}",
        reply.headers
    );
    cluster.at_rest().await.unwrap();
}

/// Output tokens that a tenant has left of 1,000, by the headers of a request that reserves none.
async fn left(cluster: &TestCluster, tenant: &str) -> u64 {
    let reply = ask(cluster, tenant, json!({"max_tokens": 1})).await;
    assert_eq!(reply.status, 200, "{:?}", reply.json());
    header(&reply, "x-ratelimit-remaining-tokens").parse().unwrap()
}

#[tokio::test]
async fn l1_the_reservation_is_settled_however_a_request_ends() {
    let slow = SimConfig { itl: Duration::from_millis(20), natural_len: 50, ..instant() };
    let cluster = cluster("[tenants.'*']\noutput_tokens_per_minute = 1000", slow).await;
    // The engine stops after 50 tokens.
    assert_eq!(ask(&cluster, "a", json!({"max_tokens": 900})).await.status, 200);
    // L1.4
    assert!((940..=999).contains(&left(&cluster, "a").await));
    // The engine fails: nothing was made.
    cluster.sims[0].set_faults(vec![pointsman_sim::Fault::always(pointsman_sim::FaultKind::Status {
        status: 400,
        retry_after: None,
    })]);
    assert_eq!(ask(&cluster, "b", json!({"max_tokens": 900})).await.status, 400);
    cluster.sims[0].set_faults(Vec::new());
    // L1.5
    assert!(left(&cluster, "b").await >= 998);
    // The client leaves while tokens come.
    let long = body(json!({"max_tokens": 900, "stream": true}));
    let mut stream = cluster.client.stream(COMPLETIONS, &[(HEADER, "c")], long).await.unwrap();
    stream.next().await.unwrap();
    assert_eq!(ask(&cluster, "c", json!({"max_tokens": 900})).await.status, 429, "it is still reserved");
    drop(stream);
    cluster.at_rest().await.unwrap();
    // L1.5
    assert!((940..=999).contains(&left(&cluster, "c").await));
}

/// Input tokens that a tenant has left of 1,000, by the headers of a request with one prompt token.
async fn input_left(cluster: &TestCluster, tenant: &str) -> u64 {
    let reply = ask(cluster, tenant, json!({"prompt": [1], "max_tokens": 1})).await;
    assert_eq!(reply.status, 200, "{:?}", reply.json());
    header(&reply, "x-ratelimit-remaining-tokens").parse().unwrap()
}

/// A prompt of 400 tokens.
fn long_prompt() -> Value {
    json!({"prompt": vec![7; 400]})
}

/// Tokens of all tenants: `prompt` or `output`.
async fn charged(cluster: &TestCluster, what: &str) -> f64 {
    cluster.at_rest().await.unwrap();
    let values = cluster.metric(&format!("pointsman_tenant_{what}_tokens_total")).await.unwrap();
    values.iter().sum()
}

#[tokio::test]
async fn l1_a_prompt_that_no_model_ran_is_not_charged() {
    let limit = "[tenants.'*']\ninput_tokens_per_minute = 1000";
    for status in [400, 503] {
        let cluster = cluster(limit, instant()).await;
        let fault = pointsman_sim::FaultKind::Status { status, retry_after: Some(0) };
        cluster.sims[0].set_faults(vec![pointsman_sim::Fault::always(fault)]);
        for _ in 0..6 {
            let reply = ask(&cluster, "a", long_prompt()).await;
            // L1.5
            assert_eq!(reply.status, status, "{:?}", reply.json());
        }
        // L1.5
        assert!(charged(&cluster, "prompt").await < 1.0);
    }
    let cluster = cluster(limit, instant()).await;
    let words = "word ".repeat(1_500);
    for (path, body) in [
        ("/tokenize", json!({"model": "tiny", "prompt": words})),
        (
            "/v1/messages/count_tokens",
            json!({"model": "tiny", "messages": [{"role": "user", "content": words}]}),
        ),
    ] {
        let reply = cluster.client.post(path, &[(HEADER, "counts")], body.to_string()).await.unwrap();
        // L1.3
        assert_eq!(reply.status, 200, "{path}: {:?}", reply.json());
    }
    // L1.5
    assert!(input_left(&cluster, "counts").await >= 998);
    assert_eq!(ask(&cluster, "pays", long_prompt()).await.status, 200);
    // L1.4
    assert!((590..=700).contains(&input_left(&cluster, "pays").await));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn l1_a_client_that_leaves_while_an_engine_runs_pays_for_its_prompt_and_a_whole_answer() {
    let slow = SimConfig { itl: Duration::from_millis(20), ..instant() };
    let cluster = cluster("[tenants.a]\ninput_tokens_per_minute = 1000", slow).await;
    let mut body = long_prompt();
    body["max_tokens"] = 200.into();
    let asked = ask(&cluster, "a", body);
    tokio::time::timeout(Duration::from_millis(1_500), asked).await.unwrap_err();
    cluster.at_rest().await.unwrap();
    // L1.5
    assert!(input_left(&cluster, "a").await < 900);
    // L1.5: and one prompt token of the request that asks what is left
    assert_eq!(charged(&cluster, "prompt").await, 401.0);
    let output = charged(&cluster, "output").await;
    // L1.5: about 100 tokens, each after 15 ms (F4.10)
    assert!((20.0..=201.0).contains(&output), "{output}");
}

/// An engine that puts ten tokens into each of two events, and reports usage if it is asked.
async fn engine_of_large_events() -> RawEngine {
    let script = |request: &RawRequest| {
        let body: Value = serde_json::from_str(&request.body).unwrap();
        let event = |fields: Value| {
            let mut event = json!({ "id": "x", "object": "text_completion", "created": 1, "model": "tiny" });
            event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            format!("data: {event}\n\n")
        };
        let text =
            |end: Value| json!({ "choices": [{ "index": 0, "text": "ten words", "finish_reason": end }] });
        let mut events = event(text(Value::Null)) + &event(text("stop".into()));
        if body["stream_options"]["include_usage"] == true {
            let usage = json!({ "prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30 });
            events += &event(json!({ "choices": [], "usage": usage }));
        }
        let answer = [stream_head(), chunk((events + "data: [DONE]\n\n").as_bytes()), chunk(b"")];
        vec![Act::Send(answer.concat())]
    };
    RawEngine::serving(script).await
}

#[tokio::test]
async fn l1_the_tokens_of_a_stream_count_although_its_client_asks_for_no_usage() {
    let engine = engine_of_large_events().await;
    let from: Config = toml::from_str("[tenants.a]\noutput_tokens_per_minute = 1000").unwrap();
    let builder = TestClusterBuilder::new().config(|config| {
        config.server.tenant_header = HEADER.to_owned();
        config.auth.trusted_proxies = vec!["127.0.0.0/8".to_owned()];
        config.tenants = from.tenants;
        config.workers.push(engine.worker("role=aggregated,engine=vllm"));
    });
    let cluster = builder.start().await;
    let usage = json!({ "stream": true, "stream_options": { "include_usage": true } });
    for (tenant, more, is_told) in
        [("a", json!({ "stream": true }), false), ("b", json!({ "stream": true }), false), ("a", usage, true)]
    {
        let reply = ask(&cluster, tenant, more).await;
        let text = String::from_utf8(reply.body.to_vec()).unwrap();
        // L1.10
        assert_eq!((text.contains("usage"), text.matches("ten words").count()), (is_told, 2), "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    }
    let asked = engine.requests().iter().map(|seen| seen.body.contains("include_usage")).collect::<Vec<_>>();
    assert_eq!(asked, [true, false, true], "only where a limit counts tokens");
    cluster.at_rest().await.unwrap();
    // L1.4
    assert_eq!(cluster.metric("pointsman_output_tokens_total").await.unwrap(), [42.0]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn l1_the_prompt_of_an_sglang_chat_with_token_ids_is_those_ids() {
    let long = "word ".repeat(2_000);
    for (dialect, ids, text, tokens) in [
        (Dialect::Sglang, json!(vec![7; 1_001]), "hi", 1_001),
        (Dialect::Sglang, json!([7]), &long, 2_508),
        (Dialect::Sglang, Value::Null, "hi", 8),
        (Dialect::Vllm, json!(vec![7; 1_001]), "hi", 8),
    ] {
        let sim = SimConfig::instant(dialect, Role::Aggregated);
        let cluster = cluster("[tenants.'*']\ninput_tokens_per_minute = 1000", sim).await;
        let body = json!({ "model": "tiny", "max_tokens": 4, "input_ids": ids,
            "messages": [{ "role": "user", "content": text }] });
        let route = cluster.client.post("/v1/route", &[], body.to_string()).await.unwrap().json().unwrap();
        // L1.11
        let measured = &route["legs"][0]["candidates"][0]["terms"]["prompt_tokens"];
        assert_eq!(*measured, json!(tokens), "{dialect:?} {route}");
        let reply = cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap();
        let expected = if tokens > 1_000 { (429, "rate_limit_exceeded") } else { (200, "") };
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), expected, "{dialect:?} {reply:?}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn l1_token_ids_are_the_prompt_where_another_engine_serves_the_model_besides() {
    let change = |config: &mut Config| {
        config.tenants = toml::from_str("'*' = { input_tokens_per_minute = 1000 }").unwrap();
    };
    let instant = |dialect| SimConfig::instant(dialect, Role::Aggregated);
    let builder = TestClusterBuilder::new().sim_with(instant(Dialect::Sglang), "");
    let cluster = builder.sim_with(instant(Dialect::Vllm), "").config(change).start().await;
    let body = json!({ "model": "tiny", "max_tokens": 4, "input_ids": vec![7; 1_001],
        "messages": [{ "role": "user", "content": "hi" }] });
    let route = cluster.client.post("/v1/route", &[], body.to_string()).await.unwrap().json().unwrap();
    // L1.11
    assert_eq!(route["legs"][0]["candidates"][0]["terms"]["prompt_tokens"], 1_001, "{route}");
    let reply = cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (429, "rate_limit_exceeded"), "{reply:?}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn l1_a_client_that_lies_about_its_tokens_gains_nothing() {
    let cluster = cluster("[tenants.'*']\noutput_tokens_per_minute = 1000", instant()).await;
    for most in [json!(9_223_372_036_854_775_808_u64), json!(-1), json!(0), json!(4_294_967_295_u64)] {
        let reply = ask(&cluster, "liar", json!({"max_tokens": most})).await;
        assert!(reply.status == 200 || reply.status == 400, "{most}: {:?}", reply.json());
    }
    assert_eq!(cluster.gateway.state().queue.inflight(), 0);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn l3_requests_wait_at_max_inflight_and_are_refused_with_the_measured_time() {
    let slow = SimConfig { itl: Duration::from_millis(10), ..instant() };
    let cluster = cluster("queue = { limit = 1, max_inflight = 1, timeout = '5s' }", slow).await;
    let long = body(json!({"max_tokens": 2_000, "stream": true}));
    let mut first = cluster.client.stream(COMPLETIONS, &[], long).await.unwrap();
    first.next().await.unwrap();
    let client = cluster.client.clone();
    let tasks = tokio_util::task::TaskTracker::new();
    let second = tasks.spawn(async move { client.post(COMPLETIONS, &[], body(json!({}))).await });
    // L3.2
    cluster.until("one waits", |cluster| cluster.gateway.state().queue.waiting() == 1).await.unwrap();
    assert_eq!(cluster.metric("pointsman_queued_requests ").await.unwrap(), [1.0]);
    let third = ask(&cluster, "a", json!({})).await;
    assert_eq!((third.status.as_u16(), third.code().as_str()), (529, "overloaded"));
    // L3.9
    assert!(header(&third, "retry-after").parse::<u64>().unwrap() >= 1);
    drop(first);
    assert_eq!(second.await.unwrap().unwrap().status, 200);
    cluster.at_rest().await.unwrap();
    assert_eq!((cluster.gateway.state().queue.waiting(), cluster.gateway.state().queue.inflight()), (0, 0));
}

/// Opens a connection from an address; returns it with the status of its first answer.
async fn health_from(gateway: std::net::SocketAddr, ip: &str) -> (tokio::net::TcpStream, String) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(format!("{ip}:0").parse().unwrap()).unwrap();
    let mut stream = socket.connect(gateway).await.unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut head = [0; 12];
    stream.read_exact(&mut head).await.unwrap();
    (stream, String::from_utf8(head[9..].to_vec()).unwrap())
}

#[tokio::test]
async fn l4_an_address_opens_so_many_connections_and_others_are_served() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.limits.connections_per_address = 2)
        .sim_with(instant(), "")
        .start()
        .await;
    let address = cluster.gateway.address;
    let from = async |ip: &str| health_from(address, ip).await;
    let (one, two) = (from("127.0.0.2").await, from("127.0.0.2").await);
    let (three, other) = (from("127.0.0.2").await, from("127.0.0.3").await);
    // L4.1
    assert_eq!([&one.1, &two.1, &three.1, &other.1], ["200", "200", "503", "200"]);
    drop((one, three));
    let mut again = from("127.0.0.2").await.1;
    for _ in 0..100 {
        if again == "200" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        again = from("127.0.0.2").await.1;
    }
    assert_eq!(again, "200", "a closed connection makes room");
}

#[tokio::test]
async fn i9_one_address_does_not_fill_the_listener_of_operators() {
    let cluster = TestClusterBuilder::new().sim_with(instant(), "").start().await;
    let admin = cluster.gateway.admin;
    let mut served = Vec::new();
    for _ in 0..64 {
        served.push(health_from(admin, "127.0.0.77").await);
    }
    let (further, probe) =
        (health_from(admin, "127.0.0.77").await.1, health_from(admin, "127.0.0.1").await.1);
    // I9.5
    assert!(further == "503" && probe != "503", "{further} {probe}");
}

#[tokio::test]
async fn i9_connections_without_a_request_do_not_keep_probes_out() {
    use tokio::io::AsyncReadExt as _;
    let cluster = TestClusterBuilder::new().sim_with(instant(), "").start().await;
    let admin = cluster.gateway.admin;
    let mut held = Vec::new();
    for ip in 1..=5 {
        for _ in 0..64 {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(format!("127.0.0.{ip}:0").parse().unwrap()).unwrap();
            held.push(socket.connect(admin).await.unwrap());
        }
    }
    for _ in 0..100 {
        // I9.5
        assert_ne!(health_from(admin, "127.0.0.1").await.1, "503");
        // I9.5
        assert_ne!(health_from(admin, "127.0.0.99").await.1, "503");
    }
    // I9.5: the oldest one gave way.
    assert_eq!(held[0].read(&mut [0]).await.unwrap_or_default(), 0);
    let are_few = |cluster: &TestCluster| cluster.gateway.state().metrics.connections.get() <= 256;
    cluster.until("those that gave way are closed", are_few).await.unwrap();
}

#[tokio::test]
async fn l4_a_trusted_proxy_opens_connections_for_many_clients() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.limits.connections_per_address = 2;
            config.auth.trusted_proxies = vec!["127.0.0.2".into()];
        })
        .sim_with(instant(), "")
        .start()
        .await;
    let address = cluster.gateway.address;
    let mut of_proxy = Vec::new();
    for _ in 0..20 {
        of_proxy.push(health_from(address, "127.0.0.2").await);
    }
    let of_other = [health_from(address, "127.0.0.3").await, health_from(address, "127.0.0.3").await];
    let third = health_from(address, "127.0.0.3").await;
    // L4.2
    assert!(of_proxy.iter().chain(&of_other).all(|(_, status)| status == "200") && third.1 == "503");
}

#[tokio::test]
async fn l1_a_request_that_only_asks_where_it_would_run_counts_as_a_request() {
    let sections = "[tenants.'*']\nrequests_per_minute = 2\ninput_tokens_per_minute = 5";
    let cluster = cluster(sections, instant()).await;
    let preview = || json!({"nvext": {"annotations": ["query_instance_id:"]}});
    let route = async |tenant| cluster.client.post("/v1/route", &[(HEADER, tenant)], body(json!({}))).await;
    for tenant in ["a", "b"] {
        let first =
            if tenant == "a" { ask(&cluster, tenant, preview()).await } else { route(tenant).await.unwrap() };
        // L1.15: no tokens are reserved.
        assert_eq!(first.status, 200, "{tenant}: {first:?}");
        assert_eq!(route(tenant).await.unwrap().status, 200, "{tenant}");
        for refused in [ask(&cluster, tenant, preview()).await, route(tenant).await.unwrap()] {
            // L1.15
            assert_eq!((refused.status.as_u16(), refused.code().as_str()), (429, "rate_limit_exceeded"));
            assert_eq!(header(&refused, "x-ratelimit-limit-requests"), "2", "{tenant}");
        }
    }
    // L1.15: none of them is in flight any more.
    cluster.at_rest().await.unwrap();
}
