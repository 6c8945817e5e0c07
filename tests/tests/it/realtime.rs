//! `/v1/realtime`: WebSockets through the gateway, with an independent client and server of the protocol.

use std::time::Duration;

use pointsman_gateway::config::{Config, TenantEntry};
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{
    Act, Collector, RawEngine, RawRequest, TestCluster, TestClusterBuilder, raw_engine::json as raw_answer,
};
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{self, Message, client::IntoClientRequest as _, protocol::frame::coding::CloseCode},
};

type Socket = WebSocketStream<TcpStream>;

async fn cluster(workers: usize, change: impl FnOnce(&mut Config)) -> TestCluster {
    let mut builder = TestClusterBuilder::new().config(change);
    for _ in 0..workers {
        let sim = SimConfig { record: 100, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
        builder = builder.sim_with(sim, "");
    }
    builder.start().await
}

async fn connect(
    cluster: &TestCluster,
    query: &str,
    headers: &[(&'static str, &str)],
) -> Result<Socket, tungstenite::Error> {
    let address = cluster.gateway.address;
    let mut request = format!("ws://{address}/v1/realtime{query}").into_client_request()?;
    for (name, value) in headers {
        request.headers_mut().insert(*name, value.parse().unwrap());
    }
    let stream = TcpStream::connect(address).await.unwrap();
    tokio_tungstenite::client_async(request, stream).await.map(|(socket, _)| socket)
}

async fn next(socket: &mut Socket) -> Message {
    use futures_util::StreamExt as _;
    timeout(Duration::from_secs(5), socket.next()).await.unwrap().unwrap().unwrap()
}

async fn event(socket: &mut Socket) -> Value {
    serde_json::from_str(next(socket).await.to_text().unwrap()).unwrap()
}

async fn send(socket: &mut Socket, message: Message) {
    use futures_util::SinkExt as _;
    socket.send(message).await.unwrap();
}

fn refusal(error: tungstenite::Error) -> (u16, Value) {
    let tungstenite::Error::Http(response) = error else { panic!("another error: {error}") };
    let body = response.body().as_deref().unwrap_or_default();
    (response.status().as_u16(), serde_json::from_slice(body).unwrap_or_default())
}

#[tokio::test]
async fn b12_a_realtime_session_is_relayed_in_both_directions() {
    let cluster = cluster(1, |_| {}).await;
    let mut socket = connect(&cluster, "?model=tiny", &[("authorization", "Bearer secret")]).await.unwrap();
    assert_eq!(event(&mut socket).await["type"], "session.created");
    assert_eq!(cluster.booked(), 1, "the session is booked while it lasts");
    let large = vec![7; 200_000];
    send(&mut socket, Message::Binary(large.clone().into())).await;
    // I8.1
    assert_eq!(next(&mut socket).await.into_data(), large);
    send(&mut socket, Message::text(r#"{"type":"input_audio_buffer.commit","final":true}"#)).await;
    let kinds = [event(&mut socket).await, event(&mut socket).await, event(&mut socket).await];
    assert_eq!(kinds.map(|event| event["type"].clone()).last(), Some(&json!("transcription.done")));
    send(&mut socket, Message::Ping(vec![1].into())).await;
    assert!(next(&mut socket).await.is_pong());
    socket.close(None).await.unwrap();
    cluster.at_rest().await.unwrap();
    let seen = cluster.sims[0].recorded();
    assert_eq!(seen[0].path, "/v1/realtime?model=tiny");
    assert!(!seen[0].headers.iter().any(|(name, _)| name == "authorization"), "the client's key stays here");
    let metrics = cluster.metrics_text().await.unwrap();
    assert!(metrics.contains(r#"endpoint="realtime",model="tiny",status="101",code="ok""#), "{metrics}");
}

#[tokio::test]
async fn b12_a_realtime_session_that_cannot_be_opened_says_why() {
    let cluster = cluster(1, |config| {
        config.limits.realtime_connections = 1;
        config.auth.keys = pointsman_tests::client_keys(&[("alpha", "")]);
    })
    .await;
    let key = [("authorization", "Bearer alpha")];
    let why = async |query: &str, headers: &[(&'static str, &str)]| {
        let (status, body) = refusal(connect(&cluster, query, headers).await.unwrap_err());
        (status, body["error"]["code"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(why("?model=none", &key).await, (404, "model_not_found".to_owned()));
    assert_eq!(why("?model=tiny", &[]).await, (401, "unauthorized".to_owned()));
    let plain = cluster.client.get_with("/v1/realtime?model=tiny", &key).await.unwrap();
    // I_upgrade_required
    assert_eq!((plain.status.as_u16(), plain.code().as_str()), (426, "upgrade_required"));
    assert_eq!(plain.headers["upgrade"], "websocket");
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::Status { status: 400, retry_after: None })]);
    let (status, body) = refusal(connect(&cluster, "?model=tiny", &key).await.unwrap_err());
    assert_eq!((status, &body["error"]["message"]), (400, &json!("injected fault: status 400")));
    cluster.sims[0].set_faults(Vec::new());
    let first = connect(&cluster, "?model=tiny", &key).await.unwrap();
    // I8.5
    assert_eq!(why("?model=tiny", &key).await, (503, "too_many_connections".to_owned()));
    drop(first);
    cluster.at_rest().await.unwrap();
    // I8.9
    let other = [key[0], ("upgrade", "h2c, websockets")];
    assert_eq!(why("?model=tiny", &other).await, (426, "upgrade_required".to_owned()));
    let mut socket =
        connect(&cluster, "?model=tiny", &[key[0], ("upgrade", "h2c, WebSocket")]).await.unwrap();
    assert_eq!(event(&mut socket).await["type"], "session.created");
}

#[tokio::test]
async fn i8_a_session_without_a_model_is_for_the_only_one() {
    let cluster = cluster(1, |_| {}).await;
    let queries = ["", "?intent=transcription"];
    for query in queries {
        let mut socket = connect(&cluster, query, &[]).await.unwrap();
        assert_eq!(event(&mut socket).await["type"], "session.created");
    }
    cluster.at_rest().await.unwrap();
    let paths = cluster.sims[0].recorded().into_iter().map(|seen| seen.path);
    // A1.9
    assert!(paths.eq(queries.map(|query| format!("/v1/realtime{query}"))), "the query passes as it is");
    let mut builder = TestClusterBuilder::new();
    for model in ["tiny", "other"] {
        let sim =
            SimConfig { model: model.to_owned(), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
        builder = builder.sim_with(sim, "");
    }
    let cluster = builder.start().await;
    let (status, body) = refusal(connect(&cluster, "?intent=transcription", &[]).await.unwrap_err());
    let message = body["error"]["message"].as_str().unwrap();
    assert_eq!((status, &body["error"]["code"]), (400, &json!("invalid_request")));
    assert!(message.contains("other") && message.contains("tiny"), "{message}");
}

#[tokio::test]
async fn i8_a_browser_sends_its_key_as_a_subprotocol() {
    let cluster = cluster(1, |config| {
        config.auth.keys = pointsman_tests::client_keys(&[("alpha", "")]);
    })
    .await;
    let open = async |protocols: &str| {
        connect(&cluster, "?model=tiny", &[("sec-websocket-protocol", protocols)]).await
    };
    // The client refuses an answer without one of the subprotocols that it offers, as browsers do.
    for offered in [
        "realtime, openai-insecure-api-key.alpha, openai-beta.realtime-v1",
        "openai-insecure-api-key.alpha,realtime, openai-beta.realtime-v1",
    ] {
        // I8.8
        let mut socket = open(offered).await.unwrap();
        assert_eq!(event(&mut socket).await["type"], "session.created");
    }
    assert_eq!(refusal(open("realtime, openai-insecure-api-key.beta").await.unwrap_err()).0, 401);
    assert_eq!(refusal(open("realtime").await.unwrap_err()).0, 401);
    let twice = "realtime, openai-insecure-api-key.alpha, openai-insecure-api-key.alpha";
    assert_eq!(refusal(open(twice).await.unwrap_err()).0, 400, "which one counts would be a guess");
    cluster.at_rest().await.unwrap();
    let seen = cluster.sims[0].recorded();
    assert_eq!(seen.len(), 2);
    for (name, value) in seen.iter().flat_map(|seen| &seen.headers) {
        assert!(!value.contains("alpha"), "{name}: {value}");
        assert!(name != "sec-websocket-protocol" || value == "realtime, openai-beta.realtime-v1", "{value}");
    }
}

#[tokio::test]
async fn i7_a_page_of_another_site_opens_no_session_without_a_key() {
    let page = ("origin", "http://evil.example");
    let invented = ("sec-websocket-protocol", "realtime, openai-insecure-api-key.x");
    let open = cluster(1, |_| {}).await;
    for headers in [&[page][..], &[page, invented]] {
        // I7.10
        assert_eq!(refusal(connect(&open, "?model=tiny", headers).await.unwrap_err()).0, 403, "{headers:?}");
    }
    let own = format!("http://{}", open.gateway.address);
    for headers in [&[("origin", own.as_str())][..], &[page, ("authorization", "Bearer x")]] {
        assert_eq!(
            event(&mut connect(&open, "?model=tiny", headers).await.unwrap()).await["type"],
            "session.created"
        );
    }
    let keys = cluster(1, |config| config.auth.keys = pointsman_tests::client_keys(&[("alpha", "")])).await;
    let known = ("sec-websocket-protocol", "realtime, openai-insecure-api-key.alpha");
    let mut socket = connect(&keys, "?model=tiny", &[page, known]).await.unwrap();
    assert_eq!(event(&mut socket).await["type"], "session.created");
}

#[tokio::test]
async fn b12_a_realtime_session_tries_another_worker_and_then_stays_on_it() {
    let cluster = cluster(2, |config| config.routing.session_affinity = Duration::from_secs(60)).await;
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::Status { status: 500, retry_after: None })]);
    for _ in 0..4 {
        let mut socket = connect(&cluster, "?model=tiny&session_id=s1", &[]).await.unwrap();
        assert_eq!(event(&mut socket).await["type"], "session.created");
    }
    assert!(cluster.sims[0].recorded().len() <= 1, "the session is bound to the worker that answered");
    // I8.2, I8.3
    assert_eq!(cluster.sims[1].recorded().len(), 4);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b12_a_silent_realtime_session_ends_after_its_idle_time() {
    let cluster = cluster(1, |config| config.timeouts.realtime_idle = Duration::from_millis(300)).await;
    let mut socket = connect(&cluster, "?model=tiny", &[]).await.unwrap();
    assert_eq!(event(&mut socket).await["type"], "session.created");
    let Message::Close(Some(close)) = next(&mut socket).await else { panic!("not closed") };
    // I8.4
    assert_eq!(close.code, CloseCode::Away);
    cluster.at_rest().await.unwrap();
    assert!(cluster.metrics_text().await.unwrap().contains(r#"code="realtime_idle""#));
}

#[tokio::test]
async fn b12_a_realtime_session_ends_when_either_end_leaves() {
    let cluster = cluster(1, |_| {}).await;
    let mut socket = connect(&cluster, "?model=tiny", &[]).await.unwrap();
    event(&mut socket).await;
    drop(socket);
    cluster.at_rest().await.unwrap();
    let mut socket = connect(&cluster, "?model=tiny", &[]).await.unwrap();
    event(&mut socket).await;
    let TestCluster { mut sims, gateway, .. } = cluster;
    sims.remove(0).kill().await;
    use futures_util::StreamExt as _;
    let ended = timeout(Duration::from_secs(5), socket.next()).await.unwrap();
    assert!(!matches!(ended, Some(Ok(Message::Text(_) | Message::Binary(_)))), "{ended:?}");
    for _ in 0..500 {
        if gateway.state().metrics.inflight.get() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the session is still in flight");
}

#[tokio::test]
async fn b12_a_drain_closes_realtime_sessions_before_it_ends() {
    let cluster = cluster(1, |config| config.timeouts.drain = Duration::from_millis(2_300)).await;
    let mut socket = connect(&cluster, "?model=tiny", &[]).await.unwrap();
    event(&mut socket).await;
    let TestCluster { gateway, sims, .. } = cluster;
    let closed = async {
        let Message::Close(Some(close)) = next(&mut socket).await else { panic!("not closed") };
        assert_eq!(close.code, CloseCode::Away);
        // The client is in no hurry to close its end.
    };
    tokio::join!(gateway.drain(), closed);
    drop(sims);
}

#[tokio::test]
async fn l1_a_realtime_session_counts_as_a_request_in_flight_of_its_tenant() {
    let cluster = cluster(1, |config| {
        let everyone = TenantEntry { concurrency: Some(1), ..TenantEntry::default() };
        config.tenants = [("*".to_owned(), everyone)].into();
    })
    .await;
    let mut first = connect(&cluster, "?model=tiny", &[]).await.unwrap();
    assert_eq!(event(&mut first).await["type"], "session.created");
    let (status, body) = refusal(connect(&cluster, "?model=tiny", &[]).await.unwrap_err());
    assert_eq!((status, &body["error"]["code"]), (429, &json!("rate_limit_exceeded")));
    // A completion of the same tenant is beyond the limit, too.
    let body = json!({ "model": "tiny", "prompt": "hi", "max_tokens": 1 }).to_string();
    let answer = cluster.client.post("/v1/completions", &[], body).await.unwrap();
    // L1.9
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (429, "rate_limit_exceeded"));
    first.close(None).await.unwrap();
    cluster.at_rest().await.unwrap();
    let second = connect(&cluster, "?model=tiny", &[]).await;
    // L1.9
    assert!(second.is_ok(), "the first session ended: {second:?}");
}

#[tokio::test]
async fn m1_a_realtime_session_is_in_the_trace_as_any_request() {
    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let collector = Collector::accepting().await.unwrap();
    let sent = async |parent: &str, change: fn(&mut Config)| {
        let cluster = cluster(1, |config| {
            config.traces.endpoint = Some(collector.endpoint());
            config.traces.sample_ratio = 0.0;
            config.traces.interval = Duration::from_millis(20);
            change(config);
        })
        .await;
        let mut socket = connect(&cluster, "?model=tiny", &[("traceparent", parent)]).await.unwrap();
        assert_eq!(event(&mut socket).await["type"], "session.created");
        socket.close(None).await.unwrap();
        cluster.at_rest().await.unwrap();
        let headers = cluster.sims[0].recorded().last().unwrap().headers.clone();
        let parent = headers.iter().find(|(name, _)| name.as_str() == "traceparent").unwrap().1.clone();
        parent.split('-').map(str::to_owned).collect::<Vec<_>>()
    };
    let recorded = sent(PARENT, |_| {}).await;
    // A3.11, M1.8
    assert!(PARENT.contains(&recorded[1]) && !PARENT.contains(&recorded[2]) && recorded[3] == "01");
    let spans = collector.traces(1).await.unwrap();
    let leg = spans.iter().find(|span| span.name == "aggregated").unwrap();
    let root = spans.iter().find(|span| span.kind == 2).unwrap();
    // M1.1
    assert_eq!((&leg.id, &leg.parent, root.name.as_str()), (&recorded[2], &root.id, "GET /v1/realtime"));
    // M1.2: the client's flag does not decide, or is not set
    let without = sent(PARENT, |config| config.traces.parent_based = false).await;
    assert!(PARENT.contains(&without[1]) && without[3] == "00", "{without:?}");
    assert_eq!(sent(&PARENT.replace("-01", "-00"), |_| {}).await[3], "00");
    // M1.3
    let distrusted = sent(PARENT, |config| config.server.trust_hints = false).await;
    assert!(!PARENT.contains(&distrusted[1]) && distrusted[3] == "00", "{distrusted:?}");
    assert_eq!(collector.spans().unwrap().iter().filter(|span| span.kind == 2).count(), 1);
}

#[tokio::test]
async fn f4_a_realtime_session_s_leg_has_its_duration() {
    let cluster = cluster(1, |config| config.routing.retries = 0).await;
    cluster.sims[0].set_faults(vec![Fault {
        times: Some(1),
        ..Fault::always(FaultKind::Status { status: 500, retry_after: None })
    }]);
    refusal(connect(&cluster, "?model=tiny", &[]).await.unwrap_err());
    let mut socket = connect(&cluster, "?model=tiny", &[]).await.unwrap();
    assert_eq!(event(&mut socket).await["type"], "session.created");
    tokio::time::sleep(Duration::from_millis(100)).await;
    socket.close(None).await.unwrap();
    cluster.at_rest().await.unwrap();
    let labels = |outcome: &str| format!("{{leg=\"aggregated\",engine=\"vllm\",outcome=\"{outcome}\"}}");
    for (outcome, count) in [("ok", vec![1.0]), ("status_5xx", vec![1.0]), ("cancelled", vec![])] {
        for metric in ["pointsman_legs_total", "pointsman_leg_seconds_count"] {
            let found = cluster.metric(&format!("{metric}{}", labels(outcome))).await.unwrap();
            // F4.16
            assert_eq!(found, count, "{metric} {outcome}");
        }
    }
    let took = cluster.metric(&format!("pointsman_leg_seconds_sum{}", labels("ok"))).await.unwrap();
    assert!(took[0] >= 0.1, "{took:?}");
}

#[tokio::test]
async fn f4_a_session_whose_engine_does_not_read_is_counted_once() {
    use tokio::io::AsyncWriteExt as _;
    let script = |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(raw_answer(r#"{"data":[{"id":"tiny"}]}"#))],
        line if line.starts_with("GET /v1/realtime") => {
            let head =
                "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
            vec![Act::Send(head.into()), Act::Pause(Duration::from_secs(60))]
        }
        _ => vec![Act::Send(raw_answer("{}"))],
    };
    let engine = RawEngine::start(script).await;
    let builder = TestClusterBuilder::new().config(|config| {
        config.timeouts.client_write = Duration::from_millis(300);
        config.workers.push(engine.worker("id=1,engine=vllm,role=aggregated"));
    });
    let cluster = builder.start().await;
    let mut client = TcpStream::connect(cluster.gateway.address).await.unwrap();
    let head = "GET /v1/realtime?model=tiny HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    // The gateway ends the connection once nothing more fits into the engine's.
    while client.write_all(&[0; 65536]).await.is_ok() {}
    cluster.at_rest().await.unwrap();
    let count = async |metric: &str| cluster.metric(metric).await.unwrap().iter().sum::<f64>();
    // F4.16: by its end
    assert_eq!(count("pointsman_legs_total{leg=\"aggregated\",engine=\"vllm\",outcome=\"ok\"}").await, 0.0);
    assert_eq!(
        count("pointsman_legs_total{leg=\"aggregated\",engine=\"vllm\",outcome=\"timeout\"}").await,
        1.0
    );
    let worker = cluster.gateway.state().registry.snapshot().workers()[0].clone();
    assert!(worker.candidates()[0].load().view().error_ppm() > 0, "the worker is to blame");
}

#[tokio::test]
async fn i8_realtime_sessions_report_their_outcomes_as_other_requests_do() {
    let cluster = cluster(1, |config| config.routing.retries = 0).await;
    let errors = || {
        let worker = cluster.gateway.state().registry.snapshot().workers()[0].clone();
        worker.candidates()[0].load().view().error_ppm()
    };
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::Status { status: 500, retry_after: None })]);
    refusal(connect(&cluster, "?model=tiny", &[]).await.unwrap_err());
    let failed = errors();
    assert!(failed > 0);
    cluster.sims[0].set_faults(Vec::new());
    for _ in 0..3 {
        let mut socket = connect(&cluster, "?model=tiny", &[]).await.unwrap();
        assert_eq!(event(&mut socket).await["type"], "session.created");
        socket.close(None).await.unwrap();
    }
    // I8.6
    assert!(errors() < failed, "{} after {failed}", errors());
    cluster.at_rest().await.unwrap();
    let decisions = cluster.admin.get("/decisions").await.unwrap().json().unwrap();
    let text = decisions.to_string();
    // I8.6: with the decisions, too
    assert!(text.contains("\"status\":101") && text.contains("\"code\":\"ok\""), "{text}");
}

#[tokio::test]
async fn i8_a_realtime_session_waits_in_the_queue_and_may_ask_for_the_decisions() {
    let builder = TestClusterBuilder::new()
        .config(|config| config.queue.limit = 4)
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Aggregated), ",max_concurrency=1");
    let cluster = builder.start().await;
    let mut first = connect(&cluster, "?model=tiny", &[]).await.unwrap();
    assert_eq!(event(&mut first).await["type"], "session.created");
    let waits = async {
        let address = cluster.gateway.address;
        let mut request = format!("ws://{address}/v1/realtime?model=tiny").into_client_request().unwrap();
        request.headers_mut().insert("x-pointsman-decision", "1".parse().unwrap());
        let stream = TcpStream::connect(address).await.unwrap();
        tokio_tungstenite::client_async(request, stream).await
    };
    let ends = async {
        let waits = |cluster: &TestCluster| cluster.gateway.state().queue.waiting() == 1;
        cluster.until("the second one waits", waits).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        first.close(None).await.unwrap();
    };
    let (second, ()) = tokio::join!(waits, ends);
    // I8.7
    let (socket, head) = second.unwrap();
    assert!(head.headers()["x-pointsman-decision"].to_str().unwrap().contains("aggregated=1/0"));
    drop(socket);
    cluster.at_rest().await.unwrap();
    let list = cluster.admin.get("/decisions?limit=1").await.unwrap().json().unwrap();
    // I8.7
    assert!(list["decisions"][0]["outcome"]["times_ms"]["queued"].as_f64().unwrap() >= 50.0, "{list}");
}

#[tokio::test]
async fn i8_a_realtime_session_that_breaks_engines_does_not_visit_each_of_them() {
    let cluster = cluster(4, |config| config.routing.retries = 3).await;
    for sim in &cluster.sims {
        sim.set_faults(vec![Fault::always(FaultKind::Status { status: 500, retry_after: None })]);
    }
    let (status, _) = refusal(connect(&cluster, "?model=tiny", &[]).await.unwrap_err());
    let asked: usize = cluster.sims.iter().map(|sim| sim.recorded().len()).sum();
    // I4.1
    assert_eq!((status, asked), (502, 2));
    assert_eq!(cluster.metric("pointsman_retries_total{leg=\"aggregated\"}").await.unwrap(), [1.0]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i8_a_realtime_session_has_the_deadline_of_a_request_until_it_is_open() {
    let script = |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(raw_answer(r#"{"data":[{"id":"tiny"}]}"#))],
        line if line.starts_with("GET /v1/realtime") => vec![Act::Pause(Duration::from_secs(60))],
        _ => vec![Act::Send(raw_answer("{}"))],
    };
    let engine = RawEngine::start(script).await;
    let builder = TestClusterBuilder::new().config(|config| {
        config.timeouts.request = Duration::from_millis(300);
        config.workers.push(engine.worker("id=1,engine=vllm,role=aggregated"));
    });
    let cluster = builder.start().await;
    let answer = timeout(Duration::from_secs(5), connect(&cluster, "?model=tiny", &[])).await.unwrap();
    let (status, body) = refusal(answer.unwrap_err());
    // I8.7
    assert_eq!((status, &body["error"]["code"]), (504, &json!("deadline")));
    cluster.at_rest().await.unwrap();
}
