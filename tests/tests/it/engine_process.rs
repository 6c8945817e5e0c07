//! Other reports of engines, beside their facts: slow health checks, sleep, a new process, versions
//! that do not pair, and which leg knows the cached tokens (B8).

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use pointsman_rig::fleet::free_port;
use pointsman_sim::{Dialect, Role, Sim, SimConfig};
use pointsman_tests::{
    Act, COMPLETIONS, Client, RawEngine, TestCluster, TestClusterBuilder,
    raw_engine::{chunk, json as json_answer, status, stream_head},
};
use pointsman_workers::{Ineligible, WorkerSpec};
use serde_json::{Value, json};
use tokio::time::Instant;

fn ineligible(cluster: &TestCluster) -> Vec<Option<Ineligible>> {
    let snapshot = cluster.gateway.state().registry.snapshot();
    snapshot.workers().iter().map(|worker| worker.ineligible()).collect()
}

fn body() -> String {
    json!({"model": "tiny", "prompt": "one two three four ".repeat(20), "max_tokens": 2}).to_string()
}

async fn status_of(cluster: &TestCluster) -> u16 {
    cluster.client.post(COMPLETIONS, &[], body()).await.unwrap().status.as_u16()
}

/// Returns the cached tokens of the last request, as predicted and as reported.
async fn cached(cluster: &TestCluster) -> (Value, Value) {
    cluster.at_rest().await.unwrap();
    let list = cluster.admin.get("/decisions?limit=1").await.unwrap().json().unwrap();
    let cached = &list["decisions"][0]["outcome"]["cached_tokens"];
    (cached["predicted"].clone(), cached["reported"].clone())
}

#[tokio::test]
async fn b8_a_sglang_engine_whose_health_check_takes_a_second_serves_at_default_settings() {
    let engine = |ready| SimConfig { ready, ..SimConfig::instant(Dialect::Sglang, Role::Aggregated) };
    let cluster =
        TestClusterBuilder::new().sim_with(engine(false), "").sim_with(engine(true), "").start().await;
    // B8.6, B8.7: several checks of a second each
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        assert_eq!(ineligible(&cluster), [None, None]);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(status_of(&cluster).await, 200);
}

#[tokio::test]
async fn b8_health_decides_where_ready_says_no() {
    let passed = AtomicBool::new(false);
    let engine = RawEngine::start(move |request| {
        let answer = match request.line.as_str() {
            "GET /v1/models" => json_answer(r#"{"data":[{"id":"m","owned_by":"sglang"}]}"#),
            "GET /server_info" => json_answer(r#"{"disaggregation_mode":"null"}"#),
            // A check that passes ends the state in which one that failed leaves the engine.
            "GET /ready" if !passed.load(Ordering::SeqCst) => status("503 Service Unavailable", "{}"),
            "GET /ready" => json_answer("{}"),
            "GET /health" => {
                passed.store(true, Ordering::SeqCst);
                json_answer("{}")
            }
            _ => status("404 Not Found", "{}"),
        };
        vec![Act::Send(answer)]
    })
    .await;
    let spec = engine.worker("engine=sglang");
    // B8.7
    TestClusterBuilder::new().config(|config| config.workers.push(spec)).start().await;
}

#[tokio::test]
async fn b8_a_sleeping_engine_gets_no_request_until_it_is_woken() {
    let cluster = TestClusterBuilder::new()
        .sim(Dialect::Vllm, Role::Aggregated)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let engine = |place: usize| Client::new(cluster.sims[place].addr());
    engine(0).post("/sleep", &[], "").await.unwrap();
    let asleep = [Some(Ineligible::Asleep), None];
    cluster.until("the first is asleep", |cluster| ineligible(cluster) == asleep).await.unwrap();
    for _ in 0..8 {
        // B8.10
        assert_eq!(status_of(&cluster).await, 200);
    }
    assert_eq!(cluster.sims[1].state().requests["aggregated/ok"], 8);
    let list = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    assert_eq!(
        (&list["workers"][0]["ineligible"], &list["workers"][0]["health"]),
        (&json!("asleep"), &json!("healthy"))
    );
    engine(1).post("/sleep", &[], "").await.unwrap();
    cluster.until("both are asleep", |cluster| !ineligible(cluster).contains(&None)).await.unwrap();
    let refused = cluster.client.post(COMPLETIONS, &[], body()).await.unwrap();
    assert_eq!(refused.status.as_u16(), 503);
    assert!(String::from_utf8_lossy(&refused.body).contains("are asleep"), "{refused:?}");
    engine(0).post("/wake_up", &[], "").await.unwrap();
    cluster.until("the first is awake", |cluster| ineligible(cluster).contains(&None)).await.unwrap();
    assert_eq!(status_of(&cluster).await, 200);
}

#[tokio::test]
async fn b8_what_was_predicted_of_a_process_ends_with_it() {
    let listen = SocketAddr::from(([127, 0, 0, 1], free_port().unwrap()));
    let engine = || SimConfig { listen, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let mut cluster = TestClusterBuilder::new().sim_with(engine(), "").start().await;
    assert_eq!(status_of(&cluster).await, 200);
    assert_eq!(cached(&cluster).await.0, 0);
    let mut predicted = json!(0);
    for _ in 0..400 {
        assert_eq!(status_of(&cluster).await, 200);
        predicted = cached(&cluster).await.0;
        if predicted != 0 {
            break;
        }
    }
    assert_ne!(predicted, 0, "the index learns from decisions");
    cluster.sims.remove(0).kill().await;
    cluster.until("the engine is gone", |cluster| !ineligible(cluster).contains(&None)).await.unwrap();
    let _engine = Sim::start(engine()).await.unwrap();
    cluster.until("another engine is there", |cluster| ineligible(cluster) == [None]).await.unwrap();
    assert_eq!(status_of(&cluster).await, 200);
    // B8.9
    assert_eq!(cached(&cluster).await.0, 0);
}

#[tokio::test]
async fn f5_an_engine_without_a_prefix_cache_attracts_no_prompt_until_it_restarts_with_one() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let listen = SocketAddr::from(([127, 0, 0, 1], free_port().unwrap()));
        let engine = |prefix_caching| SimConfig {
            listen,
            prefix_caching,
            ..SimConfig::instant(dialect, Role::Aggregated)
        };
        let builder = TestClusterBuilder::new().sim_with(engine(false), "");
        let mut cluster = builder.sim(dialect, Role::Aggregated).start().await;
        let list = cluster.admin.get("/workers").await.unwrap().json().unwrap();
        let shown = [0, 1].map(|place: usize| list["workers"][place]["facts"]["prefix_cache"].clone());
        assert_eq!(shown, [json!(false), json!(true)], "{dialect:?}");
        let pinned = async |cluster: &TestCluster, worker: &str| {
            let pin = [("x-worker-instance-id", worker)];
            assert_eq!(cluster.client.post(COMPLETIONS, &pin, body()).await.unwrap().status, 200);
            let cached = cached(cluster).await;
            cluster.gateway.state().router.index().flush();
            cached
        };
        for worker in ["1", "2", "1"] {
            // F5.5
            assert_eq!(pinned(&cluster, worker).await.0, json!(0), "{dialect:?} {worker}");
        }
        assert_eq!(cluster.sims[0].state().prefix_hits, 0);
        for _ in 0..12 {
            assert_eq!(status_of(&cluster).await, 200);
            assert_ne!(cached(&cluster).await.0, json!(0), "{dialect:?}: the other engine has it cached");
        }
        cluster.sims.remove(0).kill().await;
        cluster.until("the engine is gone", |cluster| ineligible(cluster) != [None, None]).await.unwrap();
        let _again = Sim::start(engine(true)).await.unwrap();
        cluster.until("it is back", |cluster| ineligible(cluster) == [None, None]).await.unwrap();
        pinned(&cluster, "1").await;
        assert_ne!(pinned(&cluster, "1").await.0, json!(0), "{dialect:?}: it has a cache now");
    }
}

#[tokio::test]
async fn b8_a_rolling_upgrade_pairs_engines_of_one_version() {
    let engine = |role, version: &str| SimConfig {
        version: Some(version.to_owned()),
        ..SimConfig::instant(Dialect::Vllm, role)
    };
    let cluster = TestClusterBuilder::new()
        .sim_with(engine(Role::Prefill, "0.32.0"), "")
        .sim_with(engine(Role::Prefill, "0.33.0"), "")
        .sim_with(engine(Role::Decode, "0.32.0"), "")
        .sim_with(engine(Role::Decode, "0.33.0"), "")
        .start()
        .await;
    for number in 0..24 {
        // No worker has any of it cached.
        let body = json!({"model": "tiny", "prompt": format!("{number} ").repeat(80), "max_tokens": 2});
        assert_eq!(cluster.client.post(COMPLETIONS, &[], body.to_string()).await.unwrap().status, 200);
    }
    cluster.at_rest().await.unwrap();
    let handoffs = |place: usize| cluster.sims[place].state().handoffs;
    for place in 0..4 {
        // B8.8
        assert!(handoffs(place).pulled > 0 && handoffs(place).failed == 0, "{place}: {:?}", handoffs(place));
    }
    assert_eq!((handoffs(0).pulled, handoffs(1).pulled), (handoffs(2).pulled, handoffs(3).pulled));
}

/// One leg of a pair of engines that says that so many tokens were cached. It takes `pause` to answer.
async fn leg(is_decode: bool, pause: Duration) -> RawEngine {
    let cached = if is_decode { 612 } else { 48 };
    RawEngine::start(move |request| {
        let usage = format!(
            r#"{{"prompt_tokens":612,"completion_tokens":1,"total_tokens":613,"prompt_tokens_details":{{"cached_tokens":{cached}}}}}"#
        );
        // vLLM ignores what TensorRT-LLM hands over.
        let choice = r#"{"index":0,"text":"a","finish_reason":"length","disaggregated_params":{"ctx_request_id":1}}"#;
        let rest = r#""id":"x","object":"text_completion","model":"m""#;
        let answer = format!(r#"{{{rest},"choices":[{choice}],"prompt_token_ids":[1],"usage":{usage}}}"#);
        let answer = match request.line.as_str() {
            "GET /v1/models" => json_answer(r#"{"data":[{"id":"m"}]}"#),
            "GET /query" => json_answer(r#"{"0":{"engine_id":"e"}}"#),
            "GET /metrics" => json_answer("vllm:mooncake_num_failed_recvs_total 0.0\n"),
            "GET /health" => json_answer("{}"),
            "POST /v1/completions" if request.body.contains("\"stream\":true") => {
                let events = format!("data: {answer}\n\ndata: [DONE]\n\n");
                [stream_head(), chunk(events.as_bytes()), chunk(b"")].concat()
            }
            "POST /v1/completions" => json_answer(&answer),
            _ => status("404 Not Found", "{}"),
        };
        let pause = if request.line.starts_with("POST") { pause } else { Duration::ZERO };
        vec![Act::Pause(pause), Act::Send(answer)]
    })
    .await
}

/// Checks that client and record get the cached tokens of the prefill leg. Returns what decode was asked.
async fn prefill_says_how_much_was_cached(engine: &str, [prefill, decode]: [Duration; 2]) -> String {
    let (prefill, decode) = (leg(false, prefill).await, leg(true, decode).await);
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            let port = prefill.address.port();
            for flag in [
                format!("role=prefill,bootstrap_port={port},url=http://{}", prefill.address),
                format!("role=decode,url=http://{}", decode.address),
            ] {
                config.workers.push(WorkerSpec::parse_flag(&format!("engine={engine},{flag}")).unwrap());
            }
        })
        .start()
        .await;
    for stream in [false, true] {
        let body = json!({"model": "m", "prompt": "a ".repeat(612), "stream": stream, "max_tokens": 1,
            "stream_options": stream.then(|| json!({"include_usage": true}))});
        let reply = cluster.client.post(COMPLETIONS, &[], body.to_string()).await.unwrap();
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        assert!(
            reply.status == 200 && text.contains("\"cached_tokens\":48") && !text.contains("612}"),
            "{engine} {stream}: {text}"
        );
        assert_eq!(cached(&cluster).await.1, 48, "{engine} {stream}");
    }
    decode.requests()[0].body.clone()
}

#[tokio::test]
async fn b8_the_prefill_leg_of_mooncake_says_how_much_was_cached() {
    let (at_once, later) = (Duration::ZERO, Duration::from_millis(100));
    // The connector is known by the engine's metrics.
    for pauses in [[at_once, later], [later, at_once]] {
        // B8.11, C11.8
        let asked = prefill_says_how_much_was_cached("vllm", pauses).await;
        assert!(asked.contains("\"remote_engine_id\":\"e\""), "{asked}");
    }
}

#[tokio::test]
async fn c7_the_context_leg_of_trtllm_says_how_much_was_cached() {
    // C7.6
    let asked = prefill_says_how_much_was_cached("trtllm", [Duration::ZERO; 2]).await;
    assert!(asked.contains("generation_only"), "{asked}");
}

/// An engine that says whether it sleeps, and whose metrics are these.
async fn engine_that_may_sleep(
    sleeps: &Arc<AtomicBool>,
    metrics: impl Fn() -> String + Send + Sync + 'static,
) -> RawEngine {
    let asked = sleeps.clone();
    let engine = RawEngine::start(move |request| {
        let answer = match request.line.as_str() {
            "GET /v1/models" => json_answer(r#"{"data":[{"id":"m","owned_by":"vllm"}]}"#),
            "GET /health" => json_answer("{}"),
            "GET /metrics" => status("200 OK", &metrics()),
            "GET /is_sleeping" => {
                json_answer(&json!({ "is_sleeping": asked.load(Ordering::SeqCst) }).to_string())
            }
            _ => status("404 Not Found", "{}"),
        };
        vec![Act::Send(answer)]
    });
    engine.await
}

#[tokio::test]
async fn b8_a_sleeping_engine_without_metrics_of_its_sleep_is_asked() {
    let sleeps = Arc::new(AtomicBool::new(false));
    let engine = engine_that_may_sleep(&sleeps, || "vllm:num_requests_running 0\n".to_owned()).await;
    let spec = engine.worker("role=aggregated,engine=vllm");
    let cluster = TestClusterBuilder::new().config(|config| config.workers.push(spec)).start().await;
    sleeps.store(true, Ordering::SeqCst);
    let asleep = |cluster: &TestCluster| ineligible(cluster) == [Some(Ineligible::Asleep)];
    // B8.10
    cluster.until("it is asleep", asleep).await.unwrap();
    sleeps.store(false, Ordering::SeqCst);
    cluster.until("it is awake", |cluster| ineligible(cluster) == [None]).await.unwrap();
}

#[tokio::test]
async fn b8_an_engine_that_was_woken_in_part_gets_no_request() {
    for is_woken_before in [false, true] {
        let (sleeps, awake) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(is_woken_before)));
        let metrics = awake.clone();
        let engine = engine_that_may_sleep(&sleeps, move || {
            let awake = u8::from(metrics.load(Ordering::SeqCst));
            format!("vllm:engine_sleep_state{{sleep_state=\"awake\"}} {awake}\n")
        })
        .await;
        let builder = TestClusterBuilder::new().config(|config| {
            (config.probe.interval, config.probe.load_interval) =
                (Duration::from_millis(100), Duration::from_millis(100))
        });
        let cluster = builder.start().await;
        cluster.gateway.state().registry.upsert(engine.worker("role=aggregated,engine=vllm"));
        let asleep = [Some(Ineligible::Asleep)];
        let falls_asleep = |cluster: &TestCluster| {
            let now = ineligible(cluster);
            assert_ne!(now, [None], "woken before: {is_woken_before}");
            now == asleep
        };
        cluster.until("it is asleep", falls_asleep).await.unwrap();
        // As after `/wake_up?tags=weights`.
        awake.store(true, Ordering::SeqCst);
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            // B8.16
            assert_eq!(ineligible(&cluster), asleep);
        }
        sleeps.store(false, Ordering::SeqCst);
        cluster.until("it is awake", |cluster| ineligible(cluster) == [None]).await.unwrap();
    }
}

#[tokio::test]
async fn b5_an_engine_that_restarts_with_another_model_between_two_checks_is_noticed_without_a_request() {
    for dialect in [Dialect::Vllm, Dialect::Sglang, Dialect::Openai] {
        let listen = SocketAddr::from(([127, 0, 0, 1], free_port().unwrap()));
        let engine = SimConfig { listen, ..SimConfig::instant(dialect, Role::Aggregated) };
        let builder = TestClusterBuilder::new().config(|config| {
            (config.probe.interval, config.probe.load_interval) =
                (Duration::from_secs(2), Duration::from_secs(60));
        });
        let mut cluster = builder.sim_with(engine.clone(), "").start().await;
        // The first checks: an engine that keeps no connection says nothing by closing it.
        tokio::time::sleep(Duration::from_secs(5)).await;
        cluster.sims.remove(0).kill().await;
        let _again = Sim::start(SimConfig { model: "other".to_owned(), ..engine }).await.unwrap();
        let began = Instant::now();
        while !String::from_utf8_lossy(&cluster.client.get("/v1/models").await.unwrap().body)
            .contains("other")
        {
            // B5.14: an interval of 2 s and a tenth, not that of the load
            assert!(began.elapsed() < Duration::from_secs(30), "{dialect:?}: another model is not noticed");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(status_of(&cluster).await, 404, "the model of before is gone");
    }
}
