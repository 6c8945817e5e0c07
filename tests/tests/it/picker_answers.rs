//! Answers of which the endpoint picker sees a part only: coded ones, hidden ones, and those that are cut.

use std::{
    io::Write as _,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use pointsman_sim::{Dialect, Role};
use pointsman_tests::{
    CHAT, TestCluster, TestClusterBuilder,
    picker::{Carried, PickerClient},
    raw_engine::{Act, RawEngine, RawRequest, json as json_answer},
};
use pointsman_workers::Worker;
use serde_json::{Value, json};
use tokio::time::Instant;

const FIRST: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
const REST: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
                    data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1}}\n\n\
                    data: [DONE]\n\n";
const EVENTS: (&str, &str) = ("content-type", "text/event-stream");

fn chat() -> String {
    json!({ "model": "tiny", "stream": true, "messages": [{"role": "user", "content": "hi"}] }).to_string()
}

async fn started() -> (TestCluster, PickerClient) {
    started_with(TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated)).await
}

async fn started_with(builder: TestClusterBuilder) -> (TestCluster, PickerClient) {
    let builder = builder.config(|config| {
        config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap());
        config.probe.interval = Duration::from_secs(300);
    });
    let cluster = builder.start().await;
    let picker = PickerClient::connect(cluster.gateway.ext_proc.unwrap()).await.unwrap();
    (cluster, picker)
}

fn worker(cluster: &TestCluster) -> Arc<Worker> {
    cluster.gateway.state().registry.snapshot().workers()[0].clone()
}

/// Reads what the picker still says.
async fn drained(mut carried: Carried) {
    carried.close();
    while carried.next().await.unwrap().is_some() {}
}

fn parts(outcome: &Value) -> (Option<u64>, Option<&str>, Option<u64>) {
    (outcome["status"].as_u64(), outcome["code"].as_str(), outcome["output_tokens"].as_u64())
}

#[tokio::test]
async fn r1_engines_are_not_asked_for_a_content_coding() {
    let (_cluster, picker) = started().await;
    let (picked, _carried) = picker.ask(CHAT, &[("accept-encoding", "gzip, br")], &chat()).await.unwrap();
    // R1.9
    assert!(picked.removed.iter().any(|name| name == "accept-encoding"), "{:?}", picked.removed);
}

#[tokio::test]
async fn r2_a_coded_answer_is_no_failure() {
    let (cluster, picker) = started().await;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(format!("{FIRST}{REST}").as_bytes()).unwrap();
    let coded = encoder.finish().unwrap();
    for headers in [
        [EVENTS, ("content-encoding", "gzip")],
        [("content-type", "application/json"), ("content-encoding", "gzip")],
        [EVENTS, ("content-encoding", "something-else")],
    ] {
        let (_, carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
        carried.answer_head_with(&headers).unwrap();
        carried.answer_body(&coded, true).unwrap();
        drained(carried).await;
        // R2.11
        assert_eq!(
            parts(&cluster.newest_outcome().await.unwrap()),
            (Some(200), Some("ok"), Some(0)),
            "{headers:?}"
        );
    }
    let failed = "pointsman_legs_total{leg=\"aggregated\",engine=\"vllm\",outcome=\"broken\"";
    // R2.11
    assert_eq!(cluster.metric(failed).await.unwrap().iter().sum::<f64>(), 0.0);
    let (_, carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    carried.answer_head_with(&[EVENTS, ("content-encoding", "identity")]).unwrap();
    carried.answer_body(format!("{FIRST}{REST}").as_bytes(), true).unwrap();
    drained(carried).await;
    // R2.11: `identity` is no content coding
    assert_eq!(parts(&cluster.newest_outcome().await.unwrap()), (Some(200), Some("ok"), Some(1)));
}

#[tokio::test]
async fn r2_an_answer_whose_body_does_not_pass_has_the_outcome_of_its_head() {
    let (cluster, picker) = started().await;
    for (status, code) in [(200, "ok"), (400, "engine_error")] {
        let mut carried = picker.open().await.unwrap();
        carried.head_hiding_answer(CHAT).unwrap();
        carried.body(chat().as_bytes(), true).unwrap();
        carried.picked().await.unwrap();
        carried.answer_head(status, EVENTS.1, None).unwrap();
        // R2.12: the proxy keeps the stream open
        cluster.until("the booking ends with the head", |cluster| cluster.booked() == 0).await.unwrap();
        drained(carried).await;
        let outcome = cluster.newest_outcome().await.unwrap();
        // R2.12
        assert_eq!(outcome["status"].as_u64(), Some(u64::from(status)), "{outcome}");
        assert_eq!(outcome["code"] == "ok", code == "ok", "{outcome}");
    }
}

#[tokio::test]
async fn r2_an_answer_that_the_proxy_cuts_blames_neither_the_client_nor_the_engine() {
    let checks = Arc::new(AtomicUsize::new(0));
    let counter = checks.clone();
    let engine = RawEngine::start(move |request: &RawRequest| {
        counter.fetch_add(usize::from(request.line == "GET /health"), Ordering::SeqCst);
        let models = r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"#;
        vec![Act::Send(json_answer(if request.line == "GET /v1/models" { models } else { "{}" }))]
    });
    let engine = engine.await;
    let builder = TestClusterBuilder::new()
        .config(|config| config.workers.push(engine.worker("engine=vllm,role=aggregated")));
    let (cluster, picker) = started_with(builder).await;
    let (before, begun) = (checks.load(Ordering::SeqCst), Instant::now());
    for _ in 0..20 {
        let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
        carried.answer_head(200, EVENTS.1, None).unwrap();
        carried.answer_body(FIRST.as_bytes(), false).unwrap();
        carried.next().await.unwrap();
        carried.next().await.unwrap();
        drained(carried).await;
        let outcome = cluster.newest_outcome().await.unwrap();
        // R2.13
        assert_eq!(parts(&outcome), (Some(499), Some("answer_cut"), Some(1)), "{outcome}");
    }
    let made = || checks.load(Ordering::SeqCst) - before;
    cluster.until("the health is checked at once", |_| made() > 0).await.unwrap();
    tokio::time::sleep(Duration::from_millis(700)).await;
    // R2.13: clients that leave cause few checks, and the engine stays
    let most = 1 + begun.elapsed().as_secs() / 5;
    assert!(made() as u64 <= most, "{} checks in {:?}", made(), begun.elapsed());
    assert!(worker(&cluster).ineligible().is_none() && !worker(&cluster).is_failing());
    let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    carried.answer_head(200, EVENTS.1, None).unwrap();
    carried.answer_body(format!("{FIRST}{REST}").as_bytes(), false).unwrap();
    carried.next().await.unwrap();
    carried.next().await.unwrap();
    drained(carried).await;
    // R2.13: clients may leave after the last event
    assert_eq!(parts(&cluster.newest_outcome().await.unwrap()), (Some(200), Some("ok"), Some(1)));
}

#[tokio::test]
async fn r2_the_health_of_an_engine_that_died_within_an_answer_is_checked_at_once() {
    let (mut cluster, picker) = started().await;
    let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    carried.answer_head(200, EVENTS.1, None).unwrap();
    carried.answer_body(FIRST.as_bytes(), false).unwrap();
    carried.next().await.unwrap();
    carried.next().await.unwrap();
    cluster.sims.remove(0).kill().await;
    drained(carried).await;
    // R2.13: the next regular check is minutes away
    cluster.until("it is unhealthy", |cluster| worker(cluster).ineligible().is_some()).await.unwrap();
}

fn whole_chat() -> String {
    json!({ "model": "tiny", "messages": [{"role": "user", "content": "hi"}] }).to_string()
}

const WHOLE: &str = r#"{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}"#;
const JSON: &str = "application/json";

#[tokio::test]
async fn r2_a_whole_answer_is_checked_as_in_gateway_mode() {
    let (cluster, picker) = started().await;
    let ask = async |path: &str, request: &str, (status, kind, body): (u16, &str, &[u8])| {
        let (_, carried) = picker.ask(path, &[], request).await.unwrap();
        carried.answer_head(status, kind, None).unwrap();
        carried.answer_body(body, true).unwrap();
        drained(carried).await;
        let outcome = cluster.newest_outcome().await.unwrap();
        (outcome["status"].as_u64().unwrap(), outcome["code"].as_str().unwrap().to_owned())
    };
    let ok = (200, "ok".to_owned());
    let mut failed = 0.0;
    for (status, kind, body) in [
        (200, JSON, ""),
        (200, "text/html", "<html></html>"),
        (204, JSON, ""),
        (200, JSON, &WHOLE[..40]),
        (200, JSON, "{}"),
    ] {
        for request in [whole_chat(), chat()] {
            failed += 1.0;
            // R2.14
            assert_eq!(
                ask(CHAT, &request, (status, kind, body.as_bytes())).await,
                (502, "bad_upstream".to_owned()),
                "{status} {kind} {body:?}"
            );
            let legs = "pointsman_legs_total{leg=\"aggregated\",engine=\"vllm\",outcome=\"protocol\"}";
            // R2.14: as a failure of the worker
            assert_eq!(cluster.metric(legs).await.unwrap(), [failed]);
            // R2.14, I3.12
            assert_eq!(ask(CHAT, &request, (200, JSON, WHOLE.as_bytes())).await, ok.clone());
        }
    }
    let embeddings = json!({ "model": "tiny", "input": "hi" }).to_string();
    let vectors = (200, "application/octet-stream", &[0_u8; 9][..]);
    // R2.14: vectors in binary
    assert_eq!(ask("/v1/embeddings", &embeddings, vectors).await, ok.clone());
    let speech = json!({ "model": "tiny", "input": "hi", "voice": "a" }).to_string();
    // R2.14: audio
    assert_eq!(ask("/v1/audio/speech", &speech, (200, "audio/wav", b"RIFF")).await, ok);
}

#[tokio::test]
async fn i3_a_stream_with_another_content_type_is_read_as_one() {
    let (cluster, picker) = started().await;
    for pieces in [vec![FIRST, REST], vec!["\n", "da", &FIRST[2..], REST]] {
        let (_, carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
        carried.answer_head(200, "text/plain", None).unwrap();
        pieces.iter().for_each(|piece| carried.answer_body(piece.as_bytes(), false).unwrap());
        carried.answer_body(b"", true).unwrap();
        drained(carried).await;
        // I3.13
        assert_eq!(parts(&cluster.newest_outcome().await.unwrap()), (Some(200), Some("ok"), Some(1)));
    }
}

#[tokio::test]
async fn r2_the_health_of_an_engine_that_died_before_its_answer_is_checked_at_once() {
    let (mut cluster, picker) = started().await;
    let (_, carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
    cluster.sims.remove(0).kill().await;
    drained(carried).await;
    // R2.15: the next regular check is minutes away
    cluster.until("it is unhealthy", |cluster| worker(cluster).ineligible().is_some()).await.unwrap();
    // R2.15
    assert_eq!(parts(&cluster.newest_outcome().await.unwrap()), (Some(499), Some("client_closed"), Some(0)));
}

#[tokio::test]
async fn i6_an_event_without_room_passes_and_its_usage_is_not_known() {
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).config(|config| {
        (config.limits.body_bytes_in_flight, config.server.max_body_bytes) = (1_000_000, 500_000);
    });
    let (cluster, picker) = started_with(builder).await;
    let used = |cluster: &TestCluster| cluster.gateway.state().body_bytes.used();
    for (length, fits) in [(300_000, true), (2_000_000, false)] {
        let (_, mut carried) = picker.ask(CHAT, &[], &chat()).await.unwrap();
        carried.answer_head(200, EVENTS.1, None).unwrap();
        let text = "x".repeat(length);
        let event =
            format!("{FIRST}data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n{REST}");
        let (last, mut most) = (event.len() - 1, 0);
        for piece in event.as_bytes()[..last].chunks(50_000) {
            carried.answer_body(piece, false).unwrap();
            carried.next().await.unwrap();
            most = most.max(used(&cluster));
        }
        carried.answer_body(&event.as_bytes()[last..], true).unwrap();
        drained(carried).await;
        // I6.22
        assert!(most > 100_000 && most <= 1_000_000, "{length}: {most}");
        let outcome = cluster.newest_outcome().await.unwrap();
        // I6.22
        assert_eq!(parts(&outcome), (Some(200), Some("ok"), Some(1)), "{outcome}");
        assert_eq!(outcome["output_tokens_source"] == "usage", fits, "{outcome}");
        cluster.until("nothing is held", |cluster| used(cluster) == 0).await.unwrap();
    }
    assert!(worker(&cluster).ineligible().is_none());
}
