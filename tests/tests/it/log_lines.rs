//! Tests of the log: a source of KV events cannot flood it, a routing decision writes one debug
//! line, and a failed remote prefill one error line.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::{io, time::Duration};

use pointsman_gateway::config::{Config, DiscoveryFile, DiscoveryFileFormat};
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_test_guests::{ROGUE_PLANNER, scripted};
use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    log::Log,
    own_process,
    raw_engine::{json, status},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_util::task::TaskTracker;

#[tokio::test]
async fn m3_the_log_says_why_spans_were_not_exported() {
    own_process!();
    let log = Log::start();
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).config(|config| {
        config.traces.endpoint = Some("http://127.0.0.1:9/SECRET".to_owned());
        (config.traces.sample_ratio, config.traces.interval) = (1.0, Duration::from_millis(20));
        config.traces.timeout = Duration::from_millis(100);
    });
    let cluster = builder.start().await;
    let body = r#"{"model":"tiny","max_tokens":2,"messages":[]}"#;
    cluster.client.post("/v1/chat/completions", &[], body).await.unwrap();
    let mut text = String::new();
    for _ in 0..500 {
        text = log.text();
        if text.contains("spans not exported") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let line = text.lines().find(|line| line.contains("spans not exported")).unwrap();
    // M3.5
    assert!(line.contains("reason=\"connect\"") && line.contains("Connection refused"), "{line}");
    // M3.5
    assert!(!line.contains("SECRET"), "{line}");
}

#[tokio::test]
async fn p10_the_log_names_each_entry_that_a_source_refuses_once() {
    own_process!();
    let (log, dir) = (Log::start(), tempfile::tempdir().unwrap());
    let path = dir.path().join("endpoints.json");
    let write = |names: &[&str]| {
        let endpoint = |name: &&str| {
            let labels = serde_json::json!({ "llm-d.ai/role": "encode" });
            serde_json::json!({ "name": name, "address": "127.0.0.1", "port": "1", "labels": labels })
        };
        let endpoints: Vec<_> = names.iter().map(endpoint).collect();
        std::fs::write(&path, serde_json::json!({ "endpoints": endpoints }).to_string()).unwrap();
    };
    write(&["one"]);
    let file = DiscoveryFile {
        name: "a".to_owned(),
        path: path.clone(),
        format: DiscoveryFileFormat::LlmD,
        interval: Duration::from_millis(10),
        defaults: [("engine".to_owned(), "vllm".to_owned())].into(),
        ..DiscoveryFile::default()
    };
    let builder = TestClusterBuilder::new().config(|config| config.discovery.files = vec![file]);
    let cluster = builder.start().await;
    let refused = |_: &_| {
        let text = log.text();
        let lines = text.lines().filter(|line| line.contains("discovered worker is refused"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    cluster.until("the first one is named", |cluster| refused(cluster).len() == 1).await.unwrap();
    write(&["one", "two"]);
    cluster.until("so is the second one", |cluster| refused(cluster).len() == 2).await.unwrap();
    for (line, entry) in refused(&cluster).iter().zip(["one", "two"]) {
        let says = [format!("entry=\"{entry}\""), "source=\"file:a\"".to_owned(), "`encode`".to_owned()];
        // P10.3
        assert!(says.iter().all(|text| line.contains(text.as_str())), "{line}");
    }
}

#[tokio::test]
async fn t2_the_access_log_names_the_decode_override_that_refused_a_request() {
    own_process!();
    let log = Log::start();
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    cluster.drop_policy("decode-override.wasm", &scripted(ROGUE_PLANNER, "shed-429 0")).unwrap();
    assert_eq!(cluster.admin.post("/policies/reload", &[], "").await.unwrap().status, 200);
    let body = r#"{"model":"tiny","max_tokens":2,"messages":[]}"#;
    let headers = [("x-pointsman-decision", "1")];
    let reply = cluster.client.post("/v1/chat/completions", &headers, body).await.unwrap();
    assert_eq!(reply.status, 429, "{reply:?}");
    let header = reply.headers.get("x-pointsman-decision").map(|told| told.to_str().unwrap());
    let header = header.unwrap_or_default().to_owned();
    // T2.2
    let is_named = header.starts_with("decode-override=- id=") && header.ends_with(" rogue@2 shed");
    assert!(is_named, "{header}: {reply:?}");
    let line = |_: &_| {
        let text = log.text();
        text.lines().find(|line| line.contains("code=\"shed\"")).map(str::to_owned)
    };
    cluster.until("the request is logged", |cluster| line(cluster).is_some()).await.unwrap();
    let line = line(&cluster).unwrap();
    // T2.2
    assert!(line.contains("decisions=\"decode-override=- id=") && line.contains(" rogue@2 shed\""), "{line}");
}

/// Messages that the publisher sends, each with a gap before it.
const MESSAGES: u64 = 20_000;

/// Publishes messages whose sequence numbers jump (ZMTP 3.0, PUB).
async fn publish(mut stream: TcpStream) -> io::Result<()> {
    let mut greeting = [0_u8; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).await?;
    stream.read_exact(&mut [0; 64]).await?;
    let ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB";
    stream.write_all(&[4, ready.len() as u8]).await?;
    stream.write_all(ready).await?;
    // The peer's READY and its subscription.
    let mut answer = [0; 256];
    assert!(stream.read(&mut answer).await? > 0);
    tokio::time::sleep(Duration::from_millis(100)).await;
    // An empty batch: [ts, []].
    let payload = [0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x90];
    let mut bytes = Vec::new();
    for number in 0..MESSAGES {
        bytes.extend_from_slice(&[1, 0, 1, 8]);
        bytes.extend_from_slice(&(number * 1_000).to_be_bytes());
        bytes.extend_from_slice(&[0, payload.len() as u8]);
        bytes.extend_from_slice(&payload);
    }
    stream.write_all(&bytes).await?;
    tokio::time::sleep(Duration::from_secs(60)).await;
    Ok(())
}

#[tokio::test]
async fn jumping_sequence_numbers_of_kv_events_write_a_line_a_second_and_are_counted() {
    own_process!();
    let log = Log::start();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!(",kv_events=tcp://{}", listener.local_addr().unwrap());
    let tasks = TaskTracker::new();
    let connections = tasks.clone();
    tasks.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            connections.spawn(publish(stream));
        }
    });
    let config = SimConfig::instant(Dialect::Vllm, Role::Aggregated);
    let cluster = TestClusterBuilder::new().sim_with(config, &endpoint).start().await;
    let mut forgotten = 0;
    for _ in 0..400 {
        let text = cluster.metrics_text().await.unwrap();
        let line = text.lines().find(|line| line.starts_with("pointsman_kv_feed_forgets_total"));
        forgotten = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0) as u64;
        if forgotten > MESSAGES / 2 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(forgotten > MESSAGES / 2, "{forgotten}");
    let text = log.text();
    let lines = text.lines().filter(|line| line.contains("kv events forgotten")).count();
    println!("{forgotten} forgets, {lines} lines");
    assert!((1..60).contains(&lines), "{lines} lines for {forgotten} forgets");
    let body = r#"{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"SECRET"}]}"#;
    let id = [("x-request-id", "req-7")];
    assert_eq!(cluster.client.post("/v1/chat/completions", &id, body).await.unwrap().status, 200);
    let text = log.text();
    let decisions: Vec<&str> = text.lines().filter(|line| line.contains("leg routed")).collect();
    assert_eq!(decisions.len(), 1, "{decisions:?}");
    for part in ["DEBUG", "request=\"req-7\"", "leg=\"aggregated\"", "worker=1", "generation=", "decider="] {
        assert!(decisions[0].contains(part), "`{part}` is not in {}", decisions[0]);
    }
    assert!(!text.contains("SECRET"), "{text}");
}

#[tokio::test]
async fn i3_a_whole_answer_that_is_given_up_has_a_line_with_its_request_and_limit() {
    own_process!();
    let log = Log::start();
    for (limit, stream) in [("whole_head", false), ("request", false), ("request", true)] {
        let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).config(|config| {
            let timeouts = &mut config.timeouts;
            *if limit == "request" { &mut timeouts.request } else { &mut timeouts.whole_head } =
                Duration::from_millis(300);
            config.routing.retries = 0;
        });
        let cluster = builder.start().await;
        cluster.sims[0].set_faults(vec![Fault::always(FaultKind::HangBeforeHeaders)]);
        let body = format!(r#"{{"model":"tiny","max_tokens":2,"messages":[],"stream":{stream}}}"#);
        let id = [("x-request-id", format!("req-{limit}-{stream}"))];
        let id = id.each_ref().map(|(name, value)| (*name, value.as_str()));
        assert_eq!(cluster.client.post("/v1/chat/completions", &id, body).await.unwrap().status, 504);
    }
    let text = log.text();
    let lines =
        text.lines().filter(|line| line.contains("answer that is not streamed was not complete in time"));
    let lines: Vec<&str> = lines.collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    for (line, limit) in lines.iter().zip(["whole_head", "request"]) {
        let (request, limit) = (format!("request=\"req-{limit}-false\""), format!("limit=timeouts.{limit}"));
        // I3.23
        assert!(["WARN", "worker=1", &request, &limit].iter().all(|part| line.contains(part)), "{line}");
    }
}

#[tokio::test]
async fn p11_workers_with_one_address_for_kv_events_are_told() {
    own_process!();
    let log = Log::start();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!(",kv_events=tcp://{}", listener.local_addr().unwrap());
    let config = || SimConfig::instant(Dialect::Vllm, Role::Aggregated);
    let cluster =
        TestClusterBuilder::new().sim_with(config(), &endpoint).sim_with(config(), &endpoint).start().await;
    let told = |_: &pointsman_tests::TestCluster| {
        let text = log.text();
        let mut lines =
            text.lines().filter(|line| line.contains("two workers have one address for kv events"));
        // P11.3
        lines.any(|line| {
            ["worker=1", "worker=2"].iter().any(|part| line.contains(part))
                && ["other=1", "other=2"].iter().any(|part| line.contains(part))
        })
    };
    cluster.until("the log names both workers", told).await.unwrap();
}

#[tokio::test]
async fn p11_workers_with_one_address_for_replays_or_handoffs_are_told() {
    own_process!();
    let log = Log::start();
    let sglang = || SimConfig::instant(Dialect::Sglang, Role::Prefill);
    let vllm = || SimConfig::instant(Dialect::Vllm, Role::Aggregated);
    let events = |port: u16| format!(",kv_events=tcp://127.0.0.1:{port},kv_replay=tcp://127.0.0.1:9");
    let p2p = ",role=decode,transport=p2p_nccl,kv_addr=127.0.0.1:14579";
    let cluster = TestClusterBuilder::new()
        .sim_with(vllm(), &events(7))
        .sim_with(vllm(), &events(8))
        .sim_with(sglang(), ",bootstrap_host=127.0.0.2")
        .sim_with(sglang(), ",bootstrap_host=127.0.0.2")
        .sim_with(vllm(), p2p)
        .sim_with(vllm(), p2p)
        .start()
        .await;
    let lines = || {
        let text = log.text();
        let lines = text.lines().filter(|line| line.contains("two workers have one address for"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    for (what, key, address, workers) in [
        ("for kv events", "kv_replay", "tcp://127.0.0.1:9", ["=1 ", "=2 "]),
        ("for handoffs", "kv_addr", "127.0.0.1:14579", ["=5 ", "=6 "]),
    ] {
        // P11.3
        let names = |line: &String| {
            let parts = [what, key, address, "WARN"].into_iter().chain(workers);
            parts.into_iter().all(|part| line.contains(part))
        };
        cluster.until(key, |_| lines().iter().any(names)).await.unwrap();
    }
    // Each engine of SGLang has its own port, and a decode worker gets the address of its partner.
    assert_eq!(lines().len(), 2, "{:?}", lines());
}

#[tokio::test]
async fn e2_an_abort_that_an_engine_does_not_allow_is_told_once_for_each_worker() {
    own_process!();
    let log = Log::start();
    let answer = |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json(r#"{"data":[{"id":"tiny"}]}"#))],
        "POST /abort_request" => vec![Act::Send(status("401 Unauthorized", r#"{"error":"Unauthorized"}"#))],
        line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
        _ => vec![Act::Hang],
    };
    let (prefill, decode) = (RawEngine::start(answer).await, RawEngine::start(answer).await);
    let change = |config: &mut Config| {
        config.timeouts.request = Duration::from_secs(2);
        for (role, id, engine) in [("prefill", 1, &prefill), ("decode", 2, &decode)] {
            config.workers.push(engine.worker(&format!("id={id},role={role},engine=sglang")));
        }
    };
    let cluster = TestClusterBuilder::new().config(change).start().await;
    let body = r#"{"model":"tiny","max_tokens":2,"messages":[]}"#;
    for _ in 0..3 {
        let leaving = cluster.client.post("/v1/chat/completions", &[], body);
        assert!(tokio::time::timeout(Duration::from_millis(100), leaving).await.is_err(), "never answered");
    }
    cluster.at_rest().await.unwrap();
    let text = log.text();
    for worker in ["worker=1", "worker=2"] {
        let told = |line: &&str| line.contains("abort not allowed") && line.contains(worker);
        let lines: Vec<&str> = text.lines().filter(told).collect();
        // E2.6
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("WARN") && lines[0].contains("--admin-api-key"), "{}", lines[0]);
    }
}

#[tokio::test]
async fn h6_kv_events_of_a_healthy_worker_that_never_arrive_are_told() {
    own_process!();
    let log = Log::start();
    // Nothing listens at port 9.
    let config = SimConfig::instant(Dialect::Vllm, Role::Aggregated);
    let builder = TestClusterBuilder::new().sim_with(config, ",kv_events=tcp://127.0.0.1:9");
    let cluster = builder.start().await;
    let read = async |path| -> serde_json::Value {
        serde_json::from_slice(&cluster.admin.get(path).await.unwrap().body).unwrap()
    };
    let early = read("/workers").await;
    let feed = &early["workers"][0]["ranks"][0]["kv_feed"];
    // H6.22
    assert_eq!(*feed, serde_json::json!({ "endpoint": "tcp://127.0.0.1:9", "live": false, "reason": null }));
    let lines = || {
        let text = log.text();
        let told = text.lines().filter(|line| line.contains("kv events of a healthy worker do not arrive"));
        told.map(str::to_owned).collect::<Vec<_>>()
    };
    for _ in 0..600 {
        if !lines().is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // Two more attempts.
    tokio::time::sleep(Duration::from_secs(11)).await;
    let lines = lines();
    // H6.22
    assert_eq!(lines.len(), 1, "{lines:?}");
    for part in ["WARN", "worker=1", "rank=0", "endpoint=tcp://127.0.0.1:9", "reason=cannot connect"] {
        assert!(lines[0].contains(part), "`{part}` is not in {}", lines[0]);
    }
    let (status, workers) = (read("/status").await, read("/workers").await);
    let told = "no KV events of rank 0 from tcp://127.0.0.1:9: cannot connect";
    let begins = |text: &serde_json::Value, with: &str| text.as_str().unwrap_or_default().starts_with(with);
    assert!(begins(&status["reasons"][0], &format!("worker 1: {told}")), "{}", status["reasons"]);
    let worker = &workers["workers"][0];
    assert!(begins(&worker["reason"], told), "{}", worker["reason"]);
    assert!(begins(&worker["ranks"][0]["kv_feed"]["reason"], "cannot connect"), "{}", worker["ranks"]);
    assert_eq!(
        (&status["ready"], &worker["ineligible"]),
        (&serde_json::Value::Bool(true), &serde_json::Value::Null)
    );
}

#[tokio::test]
async fn b6_a_remote_prefill_that_fails_for_good_has_one_line_and_a_refused_one_none() {
    own_process!();
    let log = Log::start();
    for (local_fallback, status, expected) in
        [(false, 500, 1), (true, 500, 1), (false, 422, 0), (false, 503, 0)]
    {
        // With two that break on the request, there would be no local prefill.
        let prefill = if local_fallback { 1 } else { 2 };
        let mut builder =
            TestClusterBuilder::new().config(|config| config.routing.local_fallback = local_fallback);
        for place in 0..=prefill {
            builder = builder.sim(Dialect::Vllm, if place < prefill { Role::Prefill } else { Role::Decode });
        }
        let cluster = builder.start().await;
        for sim in &cluster.sims[..prefill] {
            sim.set_faults(vec![Fault::always(FaultKind::Status { status, retry_after: None })]);
        }
        let id = format!("prefill-{local_fallback}-{status}");
        let body = r#"{"model":"tiny","prompt":"hello","max_tokens":2}"#;
        let reply = cluster.client.post("/v1/completions", &[("x-request-id", &id)], body).await.unwrap();
        assert_eq!(reply.status == 200, local_fallback, "{reply:?}");
        cluster.at_rest().await.unwrap();
        let text = log.text();
        let of_request = text.lines().filter(|line| line.contains(&id) && line.contains("ERROR"));
        let lines: Vec<&str> = of_request.collect();
        // B6.4
        assert_eq!(lines.len(), expected, "{id}: {lines:?}");
        assert!(lines.iter().all(|line| line.contains("remote prefill failed")), "{lines:?}");
        assert!(lines.iter().all(|line| line.contains(&format!("local={local_fallback}"))), "{lines:?}");
    }
}
