//! Facts that engines report of themselves: role, ranks, ports, block sizes, capacity (B5).

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_sim::{Dialect, Fault, Role, Sim, SimConfig, SimHandle};
use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{json as json_answer, status},
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};

async fn empty() -> TestCluster {
    TestClusterBuilder::new().config(|config| config.probe.timeout = Duration::from_millis(100)).start().await
}

/// Starts an engine and adds it with this description, which the engine's URL completes.
async fn join(cluster: &TestCluster, config: SimConfig, flag: &str) -> SimHandle {
    let sim = Sim::start(config).await.unwrap();
    let spec = WorkerSpec::parse_flag(&format!("{flag},url={}", sim.url())).unwrap();
    cluster.gateway.state().registry.upsert(spec);
    sim
}

async fn worker(cluster: &TestCluster, id: u64) -> Value {
    let list = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    list["workers"].as_array().unwrap().iter().find(|worker| worker["id"] == id).cloned().unwrap()
}

/// Waits for a worker to be as `condition` says, and returns it.
async fn until(cluster: &TestCluster, id: u64, what: &str, condition: impl Fn(&Value) -> bool) -> Value {
    for _ in 0..2_000 {
        let worker = worker(cluster, id).await;
        if condition(&worker) {
            return worker;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("waited 10 s in vain for: {what}: {}", worker(cluster, id).await)
}

fn eligible(worker: &Value) -> bool {
    worker["health"] == "healthy" && worker["ineligible"].is_null()
}

fn sglang(role: Role) -> SimConfig {
    SimConfig { block_size: 1, blocks: 4_096, ..SimConfig::instant(Dialect::Sglang, role) }
}

const UNLOADED: &str = r#"{"error":{"message":"The model `tiny` does not exist.","code":404}}"#;

#[tokio::test]
async fn b5_role_ranks_bootstrap_port_and_capacity_of_sglang_need_no_configuration() {
    let cluster = empty().await;
    let prefill =
        join(&cluster, SimConfig { dp_size: 2, ..sglang(Role::Prefill) }, "id=1,engine=sglang").await;
    let _decode = join(&cluster, sglang(Role::Decode), "id=2,engine=sglang").await;
    let one = until(&cluster, 1, "eligible as prefill", |worker| {
        eligible(worker) && worker["spec"]["role"] == "prefill"
    })
    .await;
    // B5.4
    assert_eq!(one["spec"]["dp_size"], 2, "{one}");
    assert_eq!(one["ranks"].as_array().unwrap().len(), 2);
    assert_eq!(one["spec"]["bootstrap"]["port"], prefill.bootstrap_port().unwrap());
    assert_eq!(one["facts"]["block_size"], 1);
    assert_eq!(
        (&one["facts"]["total_blocks"], &one["facts"]["max_running_requests"]),
        (&json!(4_096), &json!(256))
    );
    assert_eq!(one["unknown_facts"], json!([]));
    let two = until(&cluster, 2, "eligible as decode", |worker| {
        eligible(worker) && worker["spec"]["role"] == "decode"
    })
    .await;
    assert_eq!(two["spec"]["local_prefill"], false, "a stock decode worker cannot prefill: {two}");
    let body = json!({"model": "tiny", "prompt": "what is read need not be written", "max_tokens": 4});
    let reply = cluster.client.post("/v1/completions", &[], body.to_string()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(prefill.state().handoffs.pulled, 1);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b5_a_contradiction_refuses_the_worker_and_names_both_values() {
    let cluster = empty().await;
    let cases = [
        (sglang(Role::Decode), "engine=sglang,role=prefill", "role", "prefill", "decode"),
        (sglang(Role::Aggregated), "engine=sglang,role=aggregated,dp_size=2", "dp_size", "2", "1"),
        (sglang(Role::Aggregated), "engine=sglang,role=aggregated,block_size=16", "block_size", "16", "1"),
        (
            sglang(Role::Aggregated),
            "engine=sglang,role=aggregated,total_blocks=7",
            "total_blocks",
            "7",
            "4096",
        ),
        (SimConfig::instant(Dialect::Vllm, Role::Aggregated), "engine=sglang", "engine", "sglang", "vllm"),
        (
            SimConfig { block_size: 32, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) },
            "engine=vllm,role=aggregated,block_size=16",
            "block_size",
            "16",
            "32",
        ),
        (
            SimConfig::instant(Dialect::Vllm, Role::Decode),
            "engine=vllm,role=decode,transport=mooncake",
            "transport",
            "mooncake",
            "nixl",
        ),
    ];
    let mut sims = Vec::new();
    for (id, (config, flag, ..)) in (1..).zip(cases.clone()) {
        sims.push(join(&cluster, config, &format!("id={id},{flag}")).await);
    }
    for (id, (.., fact, configured, reported)) in (1..).zip(cases) {
        let worker =
            until(&cluster, id, "misconfigured", |worker| worker["ineligible"] == "misconfigured").await;
        let refused = &worker["contradiction"];
        // B5.5
        assert_eq!(
            (&refused["fact"], &refused["configured"], &refused["reported"]),
            (&json!(fact), &json!(configured), &json!(reported)),
            "{worker}"
        );
        let reason = worker["reason"].as_str().unwrap();
        assert!(reason.contains(configured) && reason.contains(reported), "{reason}");
        let metric = format!("pointsman_worker_misconfigured{{worker=\"{id}\",");
        let metrics = cluster.metrics_text().await.unwrap();
        assert!(metrics.lines().any(|line| line.starts_with(&metric) && line.ends_with(" 1")), "{metric}");
    }
    let body = json!({"model": "tiny", "prompt": "nobody", "max_tokens": 4});
    let reply = cluster.client.post("/v1/completions", &[], body.to_string()).await.unwrap();
    assert_eq!(reply.status, 503, "{reply:?}");
}

#[tokio::test]
async fn b5_an_engine_without_facts_serves_with_the_configured_values_and_says_what_is_unknown() {
    let cluster = empty().await;
    let _plain = join(
        &cluster,
        SimConfig::instant(Dialect::Openai, Role::Aggregated),
        "id=1,engine=openai,role=aggregated,block_size=16,total_blocks=100",
    )
    .await;
    // B5.6
    let plain = until(&cluster, 1, "eligible", eligible).await;
    assert_eq!((&plain["block_size"], &plain["total_blocks"]), (&json!(16), &json!(100)), "{plain}");
    assert_eq!(plain["unknown_facts"], json!(["block_size", "total_blocks"]));
    // An engine that hangs on the question is asked again with the probe.
    let hang: Fault = serde_json::from_value(json!({"kind": "hang-before-headers", "leg": "facts"})).unwrap();
    let config = SimConfig { faults: vec![hang], ..sglang(Role::Aggregated) };
    let slow = join(&cluster, config, "id=2,engine=sglang,role=aggregated").await;
    let unknown = until(&cluster, 2, "eligible without facts", eligible).await;
    let all = json!(["role", "dp_size", "block_size", "total_blocks", "max_running_requests"]);
    assert_eq!(unknown["unknown_facts"], all, "{unknown}");
    slow.set_faults(Vec::new());
    let known = until(&cluster, 2, "facts", |worker| worker["facts"]["block_size"] == 1).await;
    assert_eq!(known["unknown_facts"], json!([]));
    // Without its role, a worker cannot be used.
    let hang: Fault = serde_json::from_value(json!({"kind": "hang-before-headers", "leg": "facts"})).unwrap();
    let config = SimConfig { faults: vec![hang], ..sglang(Role::Aggregated) };
    let silent = join(&cluster, config, "id=3,engine=sglang").await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(worker(&cluster, 3).await["ineligible"], "not_ready");
    silent.set_faults(Vec::new());
    until(&cluster, 3, "eligible with its role", eligible).await;
}

#[tokio::test]
async fn b5_an_engine_that_restarts_with_another_page_size_or_role_is_read_again() {
    let cluster = empty().await;
    let sim = join(&cluster, sglang(Role::Aggregated), "id=1,engine=sglang").await;
    until(&cluster, 1, "eligible", |worker| eligible(worker) && worker["block_size"] == 1).await;
    let listen = sim.addr();
    sim.kill().await;
    until(&cluster, 1, "unhealthy", |worker| worker["health"] == "unhealthy").await;
    let config = SimConfig { listen, block_size: 16, dp_size: 2, ..sglang(Role::Prefill) };
    let _again = Sim::start(config).await.unwrap();
    // B5.7
    let worker = until(&cluster, 1, "eligible as prefill", |worker| {
        eligible(worker) && worker["spec"]["role"] == "prefill"
    })
    .await;
    assert_eq!((&worker["block_size"], &worker["spec"]["dp_size"]), (&json!(16), &json!(2)), "{worker}");
}

#[tokio::test]
async fn b5_the_kv_events_of_sglang_need_no_configuration() {
    let cluster = empty().await;
    let events = SimConfig { kv_events: true, ..sglang(Role::Aggregated) };
    let sim = join(&cluster, events.clone(), "id=1,engine=sglang").await;
    let endpoint = format!("tcp://127.0.0.1:{}", sim.kv_events_port().unwrap());
    // B5.12
    until(&cluster, 1, "its events are known", |worker| worker["spec"]["kv_events"] == endpoint).await;
    let live =
        || async { cluster.metrics_text().await.unwrap().contains("pointsman_kv_feed_live{worker=\"1\"") };
    for _ in 0..400 {
        if live().await {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(live().await, "the feed runs: {}", cluster.metrics_text().await.unwrap());
    // A configured address wins over a reported one, and an engine without events has no address.
    let other = join(&cluster, events, "id=2,engine=sglang,kv_events=tcp://127.0.0.1:9").await;
    let silent = join(&cluster, sglang(Role::Aggregated), "id=3,engine=sglang").await;
    let two = until(&cluster, 2, "eligible", eligible).await;
    let three = until(&cluster, 3, "eligible", eligible).await;
    assert_eq!(
        (&two["spec"]["kv_events"], &three["spec"]["kv_events"]),
        (&json!("tcp://127.0.0.1:9"), &json!(null))
    );
    drop((other, silent));
}

#[tokio::test]
async fn b5_an_engine_that_switches_its_role_while_it_runs_serves_the_other_leg() {
    let cluster = empty().await;
    let may = |role| SimConfig { role_switch: true, ..sglang(role) };
    let one = join(&cluster, may(Role::Prefill), "id=1,engine=sglang").await;
    let two = join(&cluster, may(Role::Decode), "id=2,engine=sglang").await;
    let serves =
        |role: &'static str| move |worker: &Value| eligible(worker) && worker["spec"]["role"] == role;
    let body = json!({"model": "tiny", "prompt": "points that move while trains run", "max_tokens": 4});
    for (roles, first, second) in [
        ((Role::Prefill, Role::Decode), "prefill", "decode"),
        ((Role::Decode, Role::Prefill), "decode", "prefill"),
    ] {
        one.switch_role(roles.0);
        two.switch_role(roles.1);
        // B5.13
        until(&cluster, 1, first, serves(first)).await;
        until(&cluster, 2, second, serves(second)).await;
        let reply = cluster.client.post("/v1/completions", &[], body.to_string()).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
        cluster.at_rest().await.unwrap();
    }
    // A configured role is not changed: the worker is left out until both agree.
    let fixed = join(&cluster, may(Role::Decode), "id=3,engine=sglang,role=decode").await;
    until(&cluster, 3, "eligible", eligible).await;
    fixed.switch_role(Role::Prefill);
    let refused = until(&cluster, 3, "misconfigured", |worker| worker["ineligible"] == "misconfigured").await;
    assert_eq!(refused["contradiction"]["fact"], "role", "{refused}");
    fixed.switch_role(Role::Decode);
    until(&cluster, 3, "eligible again", eligible).await;
}

#[tokio::test]
async fn b5_facts_are_read_again_after_ten_checks_a_failure_and_a_404() {
    /// Numbers of health checks, and of those before each reading of the facts.
    #[derive(Default)]
    struct Asked {
        checks: usize,
        readings: Vec<usize>,
    }
    for interval in [Duration::from_millis(10), Duration::from_secs(600)] {
        let asked = Arc::new(Mutex::new(Asked::default()));
        let script = {
            let asked = asked.clone();
            move |request: &RawRequest| {
                let mut asked = asked.lock();
                match request.line.as_str() {
                    "GET /health" => {
                        asked.checks += 1;
                        vec![Act::Send(json_answer("{}"))]
                    }
                    "GET /v1/models" => {
                        let checks = asked.checks;
                        asked.readings.push(checks);
                        vec![Act::Send(json_answer(r#"{"data":[{"id":"tiny"}]}"#))]
                    }
                    line if line.starts_with("GET") => vec![Act::Send(json_answer("{}"))],
                    _ if request.body.contains("reset") => vec![Act::Reset],
                    _ if request.body.contains("unloaded") => {
                        vec![Act::Send(status("404 Not Found", UNLOADED))]
                    }
                    _ => vec![Act::Send(status("404 Not Found", r#"{"detail":"Not Found"}"#))],
                }
            }
        };
        let engine = RawEngine::start(script).await;
        let builder = TestClusterBuilder::new().config(|config| {
            (config.probe.interval, config.routing.retries) = (interval, 0);
            config.workers.push(engine.worker("id=1,engine=openai,role=aggregated"));
        });
        let cluster = builder.start().await;
        let readings = || asked.lock().readings.len();
        if interval < Duration::from_secs(1) {
            cluster.until("the facts are read again and again", |_| readings() >= 5).await.unwrap();
            let asked = asked.lock();
            let steps: Vec<usize> = asked.readings.windows(2).map(|two| two[1] - two[0]).skip(1).collect();
            // B5.7: after ten checks; on a busy machine one of them fails, and the facts are read before
            assert!(steps.iter().all(|checks| (1..=10).contains(checks)), "{:?}", asked.readings);
            continue;
        }
        let ask = async |prompt: &str| {
            let body = json!({"model": "tiny", "prompt": prompt}).to_string();
            cluster.client.post("/v1/completions", &[], body).await.unwrap().status.as_u16()
        };
        let before = readings();
        assert_eq!(ask("no such path").await, 404);
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        // B5.7: a 404 about something else says nothing about the worker
        assert_eq!(readings(), before);
        for (prompt, status) in [("reset", 502), ("unloaded", 404)] {
            let before = readings();
            assert_eq!(ask(prompt).await, status, "{prompt}");
            // B5.7: after a failure, and after a 404
            cluster.until("the facts are read again", |_| readings() > before).await.unwrap();
        }
    }
}

/// Starts an engine whose address answers 404 to everything when `lost` is set, as a proxy without its route
/// does. The engine lacks the `absent` paths.
async fn behind_a_proxy(absent: &'static [&'static str], lost: &Arc<AtomicBool>) -> RawEngine {
    let lost = lost.clone();
    RawEngine::start(move |request: &RawRequest| {
        let path = request.line.split(' ').nth(1).unwrap_or_default();
        let is_absent = absent.contains(&path) || lost.load(Ordering::SeqCst);
        vec![Act::Send(match path {
            _ if is_absent => status("404 Not Found", "<html>404 Not Found</html>"),
            "/v1/models" => json_answer(r#"{"data":[{"id":"m"}]}"#),
            "/ready" | "/health" => json_answer("{}"),
            _ => status("404 Not Found", "{}"),
        })]
    })
    .await
}

#[tokio::test]
async fn b5_a_worker_whose_address_answers_404_to_health_and_models_is_not_healthy() {
    let (never, lost) = (Arc::default(), Arc::new(AtomicBool::new(false)));
    let wrong: Arc<AtomicBool> = Arc::new(AtomicBool::new(true));
    let cluster = empty().await;
    let mut engines = Vec::new();
    for (id, absent, lost, flag) in [
        (1, &[][..], &lost, "engine=vllm"),
        (2, &[], &lost, "engine=sglang"),
        (3, &["/health"], &lost, "engine=trtllm"),
        (4, &[], &wrong, "engine=vllm,model=m"),
        // Engines that lack one of both, or that need neither.
        (5, &["/health"], &never, "engine=vllm"),
        (6, &["/v1/models"], &never, "engine=vllm,model=m"),
        (7, &["/ready", "/health"], &never, "engine=sglang"),
        (8, &[], &wrong, "engine=openai,model=m"),
    ] {
        let engine = behind_a_proxy(absent, lost).await;
        cluster.gateway.state().registry.upsert(engine.worker(&format!("id={id},role=aggregated,{flag}")));
        engines.push(engine);
    }
    for id in [1, 2, 3, 5, 6, 7, 8] {
        until(&cluster, id, "it is healthy", eligible).await;
    }
    lost.store(true, Ordering::SeqCst);
    let unhealthy = |worker: &Value| worker["health"] == "unhealthy";
    for id in 1..=4 {
        let worker = until(&cluster, id, "it is unhealthy", unhealthy).await;
        let url = worker["spec"]["url"].as_str().unwrap();
        // B5.22
        assert_eq!(
            worker["reason"],
            format!("{url} answers 404 to /health and /v1/models: check the url and its base path")
        );
    }
    for id in 5..=8 {
        // B5.22
        assert!(eligible(&worker(&cluster, id).await), "{id}");
    }
    lost.store(false, Ordering::SeqCst);
    for id in 1..=3 {
        until(&cluster, id, "it is healthy again", eligible).await;
    }
}

#[tokio::test]
async fn b5_a_worker_that_does_not_list_its_models_any_more_is_not_healthy() {
    let lost = Arc::new(AtomicBool::new(false));
    let no_list = lost.clone();
    let engine = RawEngine::start(move |request: &RawRequest| {
        vec![Act::Send(match request.line.as_str() {
            "GET /health" => json_answer("{}"),
            "GET /v1/models" if !no_list.load(Ordering::SeqCst) => json_answer(r#"{"data":[{"id":"m"}]}"#),
            _ => status("404 Not Found", "{}"),
        })]
    })
    .await;
    let cluster = TestClusterBuilder::new()
        .config(|config| config.probe.interval = Duration::from_millis(100))
        .start()
        .await;
    cluster.gateway.state().registry.upsert(engine.worker("id=1,role=aggregated,engine=vllm,model=m"));
    until(&cluster, 1, "it is healthy", eligible).await;
    lost.store(true, Ordering::SeqCst);
    let worker = until(&cluster, 1, "it is unhealthy", |worker| worker["health"] == "unhealthy").await;
    let problem = format!(
        "http://{} answers 404 to /v1/models, where it listed its models before: \
         check the url and its base path",
        engine.address
    );
    // B5.22
    assert_eq!(worker["reason"], problem);
}
