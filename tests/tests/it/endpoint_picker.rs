//! The endpoint picker, called by a client that sends Envoy's messages.

use std::time::Duration;

use envoy_types::pb::envoy::{
    extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode,
    service::ext_proc::v3::processing_response::Response,
};
use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    CHAT, TestCluster, TestClusterBuilder,
    picker::{Carried, Picked, PickerClient},
};
use pointsman_workers::{Refusal, StuckBy};
use serde_json::{Value, json};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use tonic::Code;

const EVENTS: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n\
                      data: {\"choices\":[{\"delta\":{\"content\":\"b\"},\"finish_reason\":\"stop\"}]}\n\n\
                      data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2}}\n\n\
                      data: [DONE]\n\n";

fn chat() -> String {
    json!({
        "model": "tiny", "stream": true, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}],
    })
    .to_string()
}

fn builder(workers: usize) -> TestClusterBuilder {
    let builder = TestClusterBuilder::new()
        .config(|config| config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap()));
    (0..workers).fold(builder, |builder, _| builder.sim(Dialect::Vllm, Role::Aggregated))
}

async fn started(builder: TestClusterBuilder) -> (TestCluster, PickerClient) {
    let cluster = builder.start().await;
    let picker = PickerClient::connect(cluster.gateway.ext_proc.unwrap()).await.unwrap();
    (cluster, picker)
}

async fn cluster(workers: usize) -> (TestCluster, PickerClient) {
    started(builder(workers)).await
}

fn address(cluster: &TestCluster, place: usize) -> String {
    cluster.sims[place].url().trim_start_matches("http://").to_owned()
}

/// Lets the engine's answer pass, and ends the exchange.
async fn answer(carried: &mut Carried, body: &str) {
    carried.answer_head(200, "text/event-stream", None).unwrap();
    carried.answer_body(body.as_bytes(), true).unwrap();
    carried.close();
    while carried.next().await.unwrap().is_some() {}
}

fn pair() -> TestClusterBuilder {
    builder(0).pair(Dialect::Vllm)
}

/// The engine of a worker said that it has too much to do.
fn pause(cluster: &TestCluster, id: u64) {
    let refusal = Refusal { retry_after: Some(Duration::from_secs(20)), is_too_many: false };
    cluster.worker(id).note_refusal(refusal, Instant::now(), 0);
}

async fn refused(
    builder: TestClusterBuilder,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> (i32, Value) {
    let (cluster, picker) = started(builder).await;
    let refusal = picker.ask(path, headers, body).await.unwrap().0.refusal();
    cluster.at_rest().await.unwrap();
    (refusal.0, serde_json::from_str(&refusal.1).unwrap())
}

#[tokio::test]
async fn f4_the_booking_of_a_request_that_never_comes_expires_and_is_counted() {
    let builder = builder(1).config(|config| config.timeouts.booking = Duration::from_millis(500));
    let (cluster, picker) = started(builder).await;
    let (picked, carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    assert_eq!((picked.endpoint(), cluster.booked()), (Some(&*address(&cluster, 0)), 1));
    cluster.until("the booking expired", |cluster| cluster.booked() == 0).await.unwrap();
    // F4.9
    assert_eq!(cluster.gateway.state().metrics.expired_bookings.get(), 1);
    drop(carried);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn r1_the_endpoint_is_named_and_the_body_comes_back() {
    let (cluster, picker) = cluster(1).await;
    let body = chat();
    let (picked, mut carried) = picker.ask(CHAT, &[], &body).await.unwrap();
    let engine = address(&cluster, 0);
    // R1.1
    assert_eq!((picked.endpoint(), picked.metadata.as_deref()), (Some(&*engine), Some(&*engine)));
    // R1.2
    assert_eq!(picked.body(), body);
    answer(&mut carried, EVENTS).await;
    let long = json!({ "model": "tiny", "max_tokens": 1, "prompt": "x".repeat(200_000) }).to_string();
    let mut carried = picker.open().await.unwrap();
    carried.head("POST", "/v1/completions", &[], false).unwrap();
    let chunks: Vec<&[u8]> = long.as_bytes().chunks(30_000).collect();
    for (place, chunk) in chunks.iter().enumerate() {
        carried.body(chunk, place + 1 == chunks.len()).unwrap();
    }
    let picked = carried.picked().await.unwrap();
    // R1.2
    assert!(picked.body() == long && picked.chunks.iter().all(|chunk| chunk.len() <= 65_536));
    assert_eq!(picked.chunks.len(), 4);
    drop(carried);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn r1_reserved_fields_and_headers_do_not_pass() {
    let (_cluster, picker) = cluster(1).await;
    let body = r#"{"model":"tiny","prompt":"a","max_tokens":1,"kv_transfer_params":{"remote_host":"x"}}"#;
    let headers = [("x-prefiller-host-port", "10.0.0.1:80"), ("authorization", "Bearer secret")];
    let (picked, _carried) = picker.ask("/v1/completions", &headers, body).await.unwrap();
    // R1.3
    assert_eq!(picked.body(), r#"{"model":"tiny","prompt":"a","max_tokens":1}"#);
    for name in
        ["x-prefiller-host-port", "x-prefiller-url", "x-data-parallel-rank", "authorization", "x-api-key"]
    {
        // R1.3
        assert!(picked.removed.iter().any(|removed| removed == name), "{name} is not removed");
    }
}

#[tokio::test]
async fn r1_a_buffered_body_is_taken_and_other_modes_are_refused() {
    let (cluster, picker) = cluster(1).await;
    let mut carried = picker.open().await.unwrap();
    carried.head_with(BodySendMode::Buffered, None, "POST", CHAT, &[], false).unwrap();
    let first = carried.next().await.unwrap().unwrap();
    assert!(matches!(first.response, Some(Response::RequestHeaders(_))) && first.dynamic_metadata.is_none());
    carried.body(chat().as_bytes(), true).unwrap();
    let answer = carried.next().await.unwrap().unwrap();
    let Some(Response::RequestBody(body)) = answer.response else { panic!("{answer:?}") };
    let common = body.response.unwrap();
    let endpoint = common.header_mutation.unwrap().set_headers.pop().unwrap().header.unwrap();
    // R1.4
    assert_eq!(endpoint.raw_value, address(&cluster, 0).into_bytes());
    // R1.4
    assert!(common.body_mutation.is_none() && answer.dynamic_metadata.is_some());
    drop(carried);
    for mode in [BodySendMode::None, BodySendMode::Streamed, BodySendMode::BufferedPartial] {
        let mut carried = picker.open().await.unwrap();
        carried.head_with(mode, None, "POST", CHAT, &[], false).unwrap();
        let (status, text) = carried.picked().await.unwrap().refusal();
        // R1.5
        assert!(status == 500 && text.contains("request_body_mode"), "{status} {text}");
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn r1_a_repeated_end_is_ignored_and_more_ends_the_stream() {
    let (cluster, picker) = cluster(1).await;
    let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    carried.body(b"", true).unwrap();
    carried.answer_head(200, "text/event-stream", None).unwrap();
    // R1.6
    assert!(matches!(carried.next().await.unwrap().unwrap().response, Some(Response::ResponseHeaders(_))));
    carried.body(b"more", true).unwrap();
    // R1.6
    assert_eq!(carried.next().await.unwrap_err().code(), Code::InvalidArgument);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn r1_what_no_engine_answers_the_gateway_answers() {
    let (cluster, picker) = cluster(1).await;
    for (path, expected) in [("/v1/models", (200, "tiny")), ("/flush_cache", (404, "unknown_url"))] {
        let mut carried = picker.open().await.unwrap();
        carried.head("GET", path, &[], true).unwrap();
        let (status, text) = carried.picked().await.unwrap().refusal();
        // R1.7
        assert!(status == expected.0 && text.contains(expected.1), "{path}: {status} {text}");
    }
    let (picked, _) = picker.ask("/v1/route", &[], &chat()).await.unwrap();
    // R1.7
    assert!(picked.refusal().1.contains("worker_id"), "{:?}", picked.refusal());
    assert!(cluster.sims[0].state().requests.is_empty());
}

#[tokio::test]
async fn r2_a_decision_is_recorded_with_the_outcome_that_passed() {
    let (cluster, picker) = cluster(2).await;
    let (picked, mut carried) = picker.ask(CHAT, &[("x-pointsman-decision", "1")], &chat()).await.unwrap();
    // R2.3
    assert_eq!(cluster.booked(), 1);
    carried.answer_head(200, "text/event-stream", picked.endpoint()).unwrap();
    let head = carried.next().await.unwrap().unwrap();
    let Some(Response::ResponseHeaders(head)) = head.response else { panic!("{head:?}") };
    let added = head.response.unwrap().header_mutation.unwrap().set_headers;
    let decision =
        added.iter().find_map(|one| one.header.as_ref().filter(|one| one.key == "x-pointsman-decision"));
    // R2.1
    assert!(String::from_utf8_lossy(&decision.unwrap().raw_value).contains("aggregated="));
    for byte in EVENTS.as_bytes().chunks(7) {
        carried.answer_body(byte, false).unwrap();
    }
    carried.answer_body(b"", true).unwrap();
    carried.close();
    let mut passed = Vec::new();
    while let Some(answer) = carried.next().await.unwrap() {
        let Some(Response::ResponseBody(body)) = answer.response else { panic!("{answer:?}") };
        let mutation = body.response.unwrap().body_mutation.unwrap().mutation.unwrap();
        let envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation::StreamedResponse(chunk) =
            mutation
        else {
            panic!("not a chunk")
        };
        passed.extend(chunk.body);
    }
    // R2.2
    assert_eq!(String::from_utf8(passed).unwrap(), EVENTS);
    cluster.at_rest().await.unwrap();
    let decisions = cluster.admin.get("/decisions?limit=10").await.unwrap().json().unwrap();
    let text = decisions.to_string();
    // R2.1
    assert!(text.contains("\"output_tokens\":2") && text.contains("\"status\":200"), "{text}");
    // R2.5
    assert_eq!(cluster.metric("pointsman_ext_proc_served_total{endpoint=\"picked\"").await.unwrap(), [1.0]);
    // R2.1
    assert_eq!(cluster.metric("pointsman_output_tokens_total").await.unwrap(), [2.0]);
}

#[tokio::test]
async fn r2_events_of_audio_and_images_end_with_the_body() {
    let (cluster, picker) = cluster(1).await;
    let speech = json!({"model": "tiny", "input": "hi", "voice": "a", "stream_format": "sse"});
    let image = json!({"model": "tiny", "prompt": "x", "stream": true});
    for (path, body, kind) in [
        ("/v1/audio/speech", speech, "speech.audio.done"),
        ("/v1/images/generations", image, "image_generation.completed"),
    ] {
        let (_, mut carried) = picker.ask(path, &[], &body.to_string()).await.unwrap();
        answer(&mut carried, &format!("data: {{\"type\":\"{kind}\"}}\n\n")).await;
        cluster.at_rest().await.unwrap();
        // R2.10
        assert_eq!(cluster.newest_outcome().await.unwrap()["code"], "ok", "{path}");
    }
    let failed =
        cluster.metric("pointsman_legs_total{leg=\"aggregated\",engine=\"vllm\",outcome=\"broken\"").await;
    // R2.10
    assert_eq!(failed.unwrap().iter().sum::<f64>(), 0.0);
}

#[tokio::test]
async fn r2_the_answer_of_another_endpoint_is_not_credited_to_the_picked_worker() {
    let (cluster, picker) = cluster(1).await;
    for status in [500, 500, 500, 500, 500, 500, 200] {
        let (_, mut carried) = picker.ask(CHAT, &[("x-session-id", "s1")], &chat()).await.unwrap();
        carried.answer_head(status, "text/event-stream", Some("127.0.0.9:9")).unwrap();
        carried.answer_body(EVENTS.as_bytes(), true).unwrap();
        carried.close();
        while carried.next().await.unwrap().is_some() {}
    }
    cluster.at_rest().await.unwrap();
    // R2.8
    assert!(!cluster.worker(1).is_failing(), "it answered none of them");
    let statuses = [
        cluster
            .metric("pointsman_requests_total{endpoint=\"chat_completions\",model=\"tiny\",status=\"500\"")
            .await,
        cluster
            .metric("pointsman_requests_total{endpoint=\"chat_completions\",model=\"tiny\",status=\"200\"")
            .await,
    ];
    // R2.8
    assert_eq!(statuses.map(Result::unwrap), [[6.0], [1.0]]);
    // R2.5
    assert_eq!(cluster.metric("pointsman_ext_proc_served_total{endpoint=\"other\"").await.unwrap(), [7.0]);
}

#[tokio::test]
async fn r2_an_engine_that_envoy_cannot_reach_has_failed() {
    let (cluster, picker) = cluster(1).await;
    let reset = |reason| format!("upstream_reset_before_response_started{{{reason}}}");
    for (details, outcome) in [
        (reset("remote_connection_failure|delayed_connect_error:_Connection_refused"), "connect"),
        (reset("connection_termination"), "broken"),
        ("via_upstream".to_owned(), "overloaded"),
    ] {
        let is_up = |cluster: &TestCluster| {
            cluster.gateway.state().registry.snapshot().workers()[0].ineligible().is_none()
        };
        cluster.until("a probe finds the worker that refused a connection", is_up).await.unwrap();
        let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
        carried.answer_head_of(503, "text/plain", None, Some(&details)).unwrap();
        carried.answer_body(b"upstream connect error", true).unwrap();
        carried.close();
        while carried.next().await.unwrap().is_some() {}
        cluster.at_rest().await.unwrap();
        let legs =
            format!("pointsman_legs_total{{leg=\"aggregated\",engine=\"vllm\",outcome=\"{outcome}\"}}");
        // R2.9
        assert_eq!(cluster.metric(&legs).await.unwrap(), [1.0], "{details}");
    }
    let answered = "pointsman_requests_total{endpoint=\"chat_completions\",model=\"tiny\",status=\"503\"";
    // R2.9: the client has Envoy's answer.
    assert_eq!(cluster.metric(answered).await.unwrap().iter().sum::<f64>(), 3.0);
}

#[tokio::test]
async fn r2_bookings_end_with_the_stream_however_it_ends() {
    let (cluster, picker) = cluster(1).await;
    let (_, carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    assert_eq!(cluster.booked(), 1);
    drop(carried);
    // R2.3
    cluster.at_rest().await.unwrap();
    let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    carried.answer_head(500, "application/json", None).unwrap();
    carried.next().await.unwrap();
    // R2.3
    cluster.until("a failed answer releases", |cluster| cluster.booked() == 0).await.unwrap();
    carried.answer_body(b"{}", true).unwrap();
    carried.close();
    while carried.next().await.unwrap().is_some() {}
    let ended = |status: &str| {
        format!("pointsman_requests_total{{endpoint=\"chat_completions\",model=\"tiny\",status=\"{status}\"")
    };
    // R2.4
    assert_eq!(cluster.metric(&ended("499")).await.unwrap(), [1.0]);
    // R2.4
    assert_eq!(cluster.metric(&ended("500")).await.unwrap(), [1.0]);
    let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    answer(&mut carried, &EVENTS[..60]).await;
    // R2.4: the stream ended before its last event.
    assert_eq!(cluster.metric(&ended("502")).await.unwrap(), [1.0]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn r3_refusals_have_the_status_of_the_protocol_and_our_bodies() {
    let code = |body: &Value| body["error"]["code"].as_str().unwrap_or_default().to_owned();
    let (status, body) = refused(builder(1), CHAT, &[], "{").await;
    // R3.1
    assert_eq!((status, code(&body).as_str()), (400, "invalid_request"));
    let other = chat().replace("tiny", "huge");
    let (status, body) = refused(builder(1), CHAT, &[], &other).await;
    // R3.1
    assert_eq!((status, code(&body).as_str()), (404, "model_not_found"));
    let small = builder(1).config(|config| config.server.max_body_bytes = 16);
    let (status, body) = refused(small, CHAT, &[], &chat()).await;
    // R3.1
    assert_eq!((status, code(&body).as_str()), (413, "payload_too_large"));
    let keys = builder(1).config(|config| config.auth.keys = pointsman_tests::client_keys(&[("sk-a", "")]));
    let (status, body) = refused(keys, CHAT, &[], &chat()).await;
    // R3.2
    assert_eq!((status, code(&body).as_str()), (401, "unauthorized"));
    let (cluster, picker) = cluster(1).await;
    let worker = cluster.gateway.state().registry.snapshot().workers()[0].clone();
    worker.set_draining(true);
    let (status, text) = picker.ask(CHAT, &[], &chat()).await.unwrap().0.refusal();
    // R3.3
    assert!(status == 503 && text.contains("no_worker"), "{status} {text}");
}

#[tokio::test]
async fn r3_busy_workers_are_429_and_too_many_requests_503() {
    let builder = TestClusterBuilder::new()
        .config(|config: &mut Config| {
            config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap());
            config.ext_proc.max_streams = 2;
        })
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Aggregated), ",max_concurrency=1");
    let (cluster, picker) = started(builder).await;
    let (first, _held) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    assert!(first.endpoint().is_some());
    let (status, text) = picker.ask(CHAT, &[], &chat()).await.unwrap().0.refusal();
    // R3.4
    assert!(status == 429 && text.contains("overloaded"), "{status} {text}");
    let waiting = picker.open().await.unwrap();
    waiting.head("POST", CHAT, &[], false).unwrap();
    while cluster.metric("pointsman_ext_proc_streams ").await.unwrap() != [2.0] {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (status, text) = picker.ask(CHAT, &[], &chat()).await.unwrap().0.refusal();
    // R3.5
    assert!(status == 503 && text.contains("max_streams"), "{status} {text}");
}

#[tokio::test]
async fn r3_a_subset_is_obeyed_and_an_empty_one_is_503() {
    let (cluster, picker) = cluster(3).await;
    let ask = async |subset: &[&str]| -> Picked {
        let mut carried = picker.open().await.unwrap();
        let mode = BodySendMode::FullDuplexStreamed;
        carried.head_with(mode, Some(subset), "POST", CHAT, &[], false).unwrap();
        carried.body(chat().as_bytes(), true).unwrap();
        carried.picked().await.unwrap()
    };
    let only = address(&cluster, 2);
    for _ in 0..6 {
        // R3.6
        assert_eq!(ask(&[&only, "10.0.0.1:80"]).await.endpoint(), Some(&*only));
    }
    // R3.6
    assert_eq!((ask(&[]).await.refusal().0, ask(&["10.0.0.1:80"]).await.refusal().0), (503, 503));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn r4_a_pair_is_booked_and_the_sidecar_is_told_who_prefills() {
    let (cluster, picker) = started(pair()).await;
    let prefiller = cluster.worker(1);
    (0..5).for_each(|_| prefiller.note_outcome(false));
    let (picked, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    let (prefill, decode) = (address(&cluster, 0), address(&cluster, 1));
    // R4.1
    assert_eq!(picked.endpoint(), Some(&*decode));
    // R4.1
    assert_eq!(picked.headers.get("x-prefiller-host-port"), Some(&prefill));
    // R4.2
    assert_eq!(cluster.booked(), 2);
    carried.answer_head(200, "text/event-stream", None).unwrap();
    carried.next().await.unwrap();
    // R4.2
    cluster.until("prefill is released", |cluster| cluster.booked() == 1).await.unwrap();
    // E6.14: decode may still have to pull its blocks
    assert_eq!(prefiller.open_handoffs(), 1);
    // R2.6
    assert!(!prefiller.is_failing(), "it served");
    carried.answer_body(EVENTS.as_bytes(), true).unwrap();
    carried.close();
    while carried.next().await.unwrap().is_some() {}
    cluster.at_rest().await.unwrap();
    assert_eq!(prefiller.open_handoffs(), 0);
    let slots = cluster.admin.get("/decisions?limit=10").await.unwrap().json().unwrap().to_string();
    // R4.2
    assert!(slots.contains("\"prefill\"") && slots.contains("\"decode\""), "{slots}");
}

#[tokio::test]
async fn r5_health_follows_readiness_and_the_drain_lets_open_requests_end() {
    let (cluster, picker) = cluster(1).await;
    for service in ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"] {
        // R5.1
        assert!(picker.is_serving(service).await.unwrap(), "{service}");
    }
    // R5.1
    assert_eq!(picker.is_serving("other").await.unwrap_err().code(), Code::NotFound);
    let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    let TestCluster { gateway, sims: _sims, .. } = cluster;
    let mut late = picker.open().await.unwrap();
    let (draining, address) = (gateway.state().draining.clone(), gateway.ext_proc.unwrap());
    let finish = async {
        draining.cancelled().await;
        late.head("POST", CHAT, &[], false).unwrap();
        late.body(chat().as_bytes(), true).unwrap();
        // R5.2: it was on its way
        assert!(late.picked().await.unwrap().endpoint().is_some());
        let closed = async {
            while TcpStream::connect(address).await.is_ok() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        // R5.2: Envoy asks another gateway
        timeout(Duration::from_secs(10), closed).await.expect("new connections are refused");
        for carried in [&mut carried, &mut late] {
            answer(carried, EVENTS).await;
        }
    };
    timeout(Duration::from_secs(20), async { tokio::join!(gateway.drain(), finish) }).await.unwrap();
}

#[tokio::test]
async fn r5_requests_that_outlast_the_drain_are_ended_and_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let builder = builder(1).config(|config| {
        config.timeouts.drain = Duration::from_secs(1);
        config.decisions.log_dir = Some(dir.path().to_owned());
    });
    let (cluster, picker) = started(builder).await;
    let (_, mut silent) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    let (_, mut begun) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    begun.answer_head(200, "text/event-stream", None).unwrap();
    begun.next().await.unwrap();
    let mut upload = picker.open().await.unwrap();
    upload.head("POST", CHAT, &[], false).unwrap();
    cluster.until("all are open", |it| it.gateway.state().metrics.inflight.get() == 3).await.unwrap();
    let TestCluster { gateway, sims: _sims, .. } = cluster;
    let ended = async {
        for carried in [&mut silent, &mut begun, &mut upload] {
            // R5.3
            let (status, text) = carried.picked().await.unwrap().refusal();
            assert!(status == 503 && text.contains(r#""code":"draining""#), "{status} {text}");
        }
    };
    timeout(Duration::from_secs(20), async { tokio::join!(gateway.drain(), ended) }).await.unwrap();
    // R5.3
    let recorded = crate::drain::outcomes(dir.path());
    assert!(recorded.len() == 2 && recorded.iter().all(|(code, _)| code == "draining"), "{recorded:?}");
}

#[tokio::test]
async fn r5_without_workers_only_liveness_is_serving() {
    let (_cluster, picker) = cluster(0).await;
    // R5.1
    assert!(picker.is_serving("liveness").await.unwrap());
    // R5.1
    assert!(!picker.is_serving("readiness").await.unwrap());
}

#[tokio::test]
async fn r2_the_receipt_of_a_picked_request_says_how_long_it_waited() {
    let builder = TestClusterBuilder::new()
        .config(|config: &mut Config| {
            config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap());
            config.queue.limit = 4;
        })
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Aggregated), ",max_concurrency=1");
    let (cluster, picker) = started(builder).await;
    let (_, mut first) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    let waits = async {
        let (picked, mut second) = picker.ask(CHAT, &[], &chat()).await.unwrap();
        assert!(picked.endpoint().is_some());
        answer(&mut second, EVENTS).await;
    };
    let ends = async {
        let waits = |cluster: &TestCluster| cluster.gateway.state().queue.waiting() == 1;
        cluster.until("the second one waits", waits).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        answer(&mut first, EVENTS).await;
    };
    tokio::join!(waits, ends);
    let outcome = cluster.newest_outcome().await.unwrap();
    // R2.7
    assert!(outcome["times_ms"]["queued"].as_f64().unwrap() >= 50.0, "{outcome}");
}

#[tokio::test]
async fn r2_both_legs_of_a_picked_pair_are_timed_and_counted_also_when_they_fail() {
    let (cluster, picker) = started(pair()).await;
    let count = async |leg: &str, outcome: &str| {
        let mut counts = Vec::new();
        for metric in ["pointsman_legs_total", "pointsman_leg_seconds_count"] {
            let labels = format!("{{leg=\"{leg}\",engine=\"vllm\",outcome=\"{outcome}\"}}");
            counts.push(cluster.metric(&format!("{metric}{labels}")).await.unwrap().iter().sum::<f64>());
        }
        counts
    };
    let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(30)).await;
    answer(&mut carried, EVENTS).await;
    let times = cluster.newest_outcome().await.unwrap()["times_ms"].clone();
    let at = |times: &Value, what: &str| times[what].as_f64().unwrap_or(-1.0);
    // R2.7
    assert!(at(&times, "prefill_sent") >= 0.0 && at(&times, "answer_sent") >= 0.0, "{times}");
    assert!(at(&times, "prefill_ended") >= at(&times, "prefill_sent") + 30.0, "{times}");
    // F4.16
    assert_eq!((count("prefill", "ok").await, count("decode", "ok").await), (vec![1.0; 2], vec![1.0; 2]));
    let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(30)).await;
    carried.answer_head(500, "application/json", None).unwrap();
    carried.answer_body(b"{}", true).unwrap();
    carried.close();
    while carried.next().await.unwrap().is_some() {}
    let times = cluster.newest_outcome().await.unwrap()["times_ms"].clone();
    // R2.7
    assert!(at(&times, "prefill_ended") >= at(&times, "prefill_sent") + 30.0, "{times}");
    // F4.16: the answer does not say which of the two failed
    assert_eq!(count("prefill", "cancelled").await, [1.0; 2]);
    // F4.16
    assert_eq!(count("decode", "status_5xx").await, [1.0; 2]);
}

#[tokio::test]
async fn r4_a_pair_whose_prefill_workers_refuse_work_is_prefilled_by_the_decode_worker() {
    let (cluster, picker) = started(pair().config(|config| config.routing.local_fallback = true)).await;
    pause(&cluster, 1);
    let (picked, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    // R4.3
    assert_eq!(picked.endpoint(), Some(&*address(&cluster, 1)), "{:?}", picked.immediate);
    assert_eq!(picked.headers.get("x-prefiller-host-port"), None);
    assert_eq!(cluster.booked(), 1);
    answer(&mut carried, EVENTS).await;
    cluster.at_rest().await.unwrap();
    assert_eq!(cluster.metric("pointsman_handoffs_total{result=\"local_fallback\"}").await.unwrap(), [1.0]);
}

#[tokio::test]
async fn r2_an_error_of_a_picked_decode_engine_is_the_answer_also_where_local_prefill_is_allowed() {
    let (cluster, picker) = started(pair().config(|config| config.routing.local_fallback = true)).await;
    let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    carried.answer_head(500, "application/json", None).unwrap();
    carried.answer_body(b"{}", true).unwrap();
    carried.close();
    while carried.next().await.unwrap().is_some() {}
    cluster.at_rest().await.unwrap();
    let answered = "pointsman_requests_total{endpoint=\"chat_completions\",model=\"tiny\",status=\"500\"";
    // R2.4
    assert_eq!(cluster.metric(answered).await.unwrap(), [1.0]);
    // E6.13: it is for requests that the gateway sends.
    assert_eq!(
        cluster
            .metric("pointsman_handoffs_total{result=\"local_fallback\"}")
            .await
            .unwrap()
            .iter()
            .sum::<f64>(),
        0.0
    );
}

#[tokio::test]
async fn r2_the_cached_tokens_that_a_decode_engine_counts_wrong_are_not_recorded() {
    let (cluster, picker) = started(pair()).await;
    let usage = "\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":9}";
    let events = EVENTS.replace("\"completion_tokens\":2", usage);
    let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    answer(&mut carried, &events).await;
    let recorded = cluster.newest_outcome().await.unwrap();
    // B8.11
    assert_eq!(
        (&recorded["cached_tokens"]["reported"], &recorded["output_tokens"]),
        (&Value::Null, &json!(2))
    );
}

#[tokio::test]
async fn r2_a_worker_is_told_of_deadlines_and_of_handoffs_of_picked_requests() {
    let builder = pair().config(|config| config.timeouts.request = Duration::from_secs(1));
    let (cluster, picker) = started(builder).await;
    for _ in 0..3 {
        let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
        while carried.next().await.unwrap().is_some() {}
    }
    let stuck = |id: u64| cluster.worker(id).stuck().map(|stuck| stuck.by);
    cluster.until("the pair is stuck", |_| stuck(1) == Some(StuckBy::Handoffs)).await.unwrap();
    let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    answer(&mut carried, EVENTS).await;
    // B7.7
    assert_eq!(stuck(1), None, "a handoff finished");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn r3_the_refusal_of_a_pinned_request_names_its_worker() {
    let (cluster, picker) = cluster(2).await;
    pause(&cluster, 2);
    let (status, text) =
        picker.ask(CHAT, &[("x-worker-instance-id", "2")], &chat()).await.unwrap().0.refusal();
    // I2.8
    assert!(status == 503 && text.contains("pins its aggregated leg to worker 2"), "{status} {text}");
}

#[tokio::test]
async fn f5_a_prompt_is_expected_at_the_picked_worker_if_that_one_took_it() {
    let (cluster, picker) = cluster(1).await;
    let prompt = |text: &str| json!({"model": "tiny", "stream": true, "prompt": text.repeat(50)}).to_string();
    let state = cluster.gateway.state();
    let index = state.router.index();
    let blocks = || {
        index.flush();
        index.stats().blocks
    };
    let ask = async |text: &str, status: u16, served: Option<&str>| {
        let (_, mut carried) = picker.ask("/v1/completions", &[], &prompt(text)).await.unwrap();
        assert!(blocks() > 10, "a burst of it goes to one worker");
        carried.answer_head(status, "text/event-stream", served).unwrap();
        carried.answer_body(EVENTS.as_bytes(), true).unwrap();
        carried.close();
        while carried.next().await.unwrap().is_some() {}
        cluster.at_rest().await.unwrap();
    };
    ask("too long for it. ", 400, None).await;
    // F5.4
    assert_eq!(blocks(), 0);
    ask("another one takes it. ", 200, Some("127.0.0.1:1")).await;
    assert_eq!(blocks(), 0);
    ask("it takes this one. ", 200, None).await;
    assert!(blocks() > 10);
}
