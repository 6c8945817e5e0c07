//! Engines that hang, die, restart and lie: requests end in time, and one engine does not hurt the others.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Fault, FaultKind, FaultLeg, Role, Sim, SimConfig};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{MODELS, json, status},
};
use pointsman_workers::WorkerId;
use serde_json::Value;
use tokio::time::Instant;

const MS: Duration = Duration::from_millis(1);

fn prompt(text: &str, stream: bool) -> String {
    format!(r#"{{"model":"tiny","prompt":"{text}","stream":{stream},"max_tokens":4,"ignore_eos":true}}"#)
}

fn short(config: &mut Config) {
    config.timeouts.head = 1_000 * MS;
    config.timeouts.prefill_head = 1_000 * MS;
    config.timeouts.whole_head = 1_000 * MS;
    config.timeouts.event_idle = 1_000 * MS;
    config.timeouts.request = Duration::from_secs(5);
}

/// Answers probes, and generation requests with `acts`.
fn answering(
    acts: impl Fn(&RawRequest) -> Vec<Act> + Send + Sync + 'static,
) -> impl Fn(&RawRequest) -> Vec<Act> {
    move |request| match request.line.as_str() {
        "GET /health" => vec![Act::Send(json("{}"))],
        "GET /v1/models" => vec![Act::Send(json(MODELS))],
        line if line.starts_with("POST") => acts(request),
        _ => vec![Act::Send(status("404 Not Found", "{}"))],
    }
}

fn raw_worker(config: &mut Config, id: u64, engine: &RawEngine) {
    config.workers.push(engine.worker(&format!("id={id},role=aggregated,engine=openai")));
}

/// The status of an answer, or the code of the error event that ended a stream.
async fn outcome(cluster: &TestCluster, body: String) -> String {
    let stream = body.contains("\"stream\":true");
    let answer = cluster.client.stream(COMPLETIONS, &[], body).await.unwrap();
    let status = answer.status.as_u16();
    if status != 200 || !stream {
        return status.to_string();
    }
    let events = answer.all().await.unwrap();
    let last = events.last().unwrap();
    if last == "[DONE]" {
        return "200".to_owned();
    }
    let last: Value = serde_json::from_str(last).unwrap();
    last["error"]["code"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_worker_that_accepts_and_never_answers_costs_no_request_and_is_left_out() {
    let mute = RawEngine::start(answering(|_| vec![Act::Hang])).await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            short(config);
            raw_worker(config, 9, &mute);
        })
        .sim_with(SimConfig::instant(Dialect::Openai, Role::Aggregated), ",model=tiny")
        .start()
        .await;
    for turn in 0..40 {
        let body = prompt(&format!("turn {turn}"), turn % 2 == 0);
        assert_eq!(outcome(&cluster, body).await, "200", "turn {turn}");
    }
    let asked = mute.requests().len();
    assert!((1..10).contains(&asked), "{asked} of 40 requests were sent to it");
    let worker = cluster.gateway.state().registry.snapshot().get(WorkerId(9)).unwrap().clone();
    assert!(worker.is_failing());
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_prefill_or_decode_worker_that_hangs_is_replaced() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        for place in [0, 2] {
            let mut builder = TestClusterBuilder::new().config(short);
            for role in [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode] {
                builder = builder.sim(dialect, role);
            }
            let cluster = builder.start().await;
            cluster.sims[place].set_faults(vec![Fault::always(FaultKind::HangBeforeHeaders)]);
            // Equal workers are chosen by chance.
            let unseen = || cluster.faults_fired("hang-before-headers") == 0;
            for turn in (0..64).take_while(|turn| *turn < 12 || unseen()) {
                let streams = turn % 2 == 0;
                let seen = outcome(&cluster, prompt(&format!("turn {turn}"), streams)).await;
                assert_eq!(seen, "200", "{dialect:?} worker {place} turn {turn}");
            }
            assert!(!unseen(), "{dialect:?} worker {place}");
            cluster.at_rest().await.unwrap();
        }
    }
}

/// The prefill engine of a pair waits for the decode engine, so that neither answers when one hangs.
#[tokio::test]
async fn a_pair_with_a_hanging_worker_is_retried_with_the_only_worker_of_the_other_leg() {
    for hanging in [Role::Prefill, Role::Decode] {
        let mut builder = TestClusterBuilder::new().config(short).sim(Dialect::Sglang, hanging);
        for role in [Role::Prefill, Role::Decode] {
            builder = builder.sim(Dialect::Sglang, role);
        }
        let cluster = builder.start().await;
        cluster.sims[0].set_faults(vec![Fault::always(FaultKind::HangBeforeHeaders)]);
        // Equal workers are chosen by chance.
        let unseen = || cluster.faults_fired("hang-before-headers") == 0;
        for turn in (0..64).take_while(|turn| *turn < 8 || unseen()) {
            let body = prompt(&format!("turn {turn}"), turn % 2 == 0);
            assert_eq!(outcome(&cluster, body).await, "200", "{hanging:?} turn {turn}");
        }
        assert!(!unseen(), "{hanging:?}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn a_stream_that_falls_silent_ends_with_an_error_event_and_counts_as_a_fault() {
    let cluster = TestClusterBuilder::new().config(short).sim(Dialect::Vllm, Role::Aggregated).start().await;
    for kind in [FaultKind::Stall { after_tokens: 2 }, FaultKind::HangAfterHeaders] {
        cluster.sims[0].set_faults(vec![Fault { times: Some(1), ..Fault::always(kind.clone()) }]);
        // I_engine_timeout
        assert_eq!(outcome(&cluster, prompt("silent", true)).await, "engine_timeout", "{kind:?}");
    }
    let worker = cluster.gateway.state().registry.snapshot().get(WorkerId(1)).unwrap().clone();
    assert!(worker.is_failing());
    // A whole answer whose body never comes.
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::HangAfterHeaders)]);
    assert_eq!(outcome(&cluster, prompt("silent", false)).await, "504");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn requests_that_wait_for_a_stopped_engine_are_sent_to_another_when_its_health_checks_fail() {
    let stopped = Arc::new(AtomicBool::new(false));
    let switch = stopped.clone();
    // A stopped process: the kernel accepts, and nothing is ever answered.
    let generate = answering(|_| vec![Act::Hang]);
    let engine =
        RawEngine::start(
            move |request| {
                if switch.load(Ordering::SeqCst) { vec![Act::Hang] } else { generate(request) }
            },
        )
        .await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            (config.probe.timeout, config.probe.health_timeout) = (100 * MS, 100 * MS);
            raw_worker(config, 9, &engine);
        })
        .sim_with(SimConfig::instant(Dialect::Openai, Role::Aggregated), ",model=tiny")
        .start()
        .await;
    let mut waiting = tokio::task::JoinSet::new();
    for turn in 0..10 {
        let client = cluster.client.clone();
        let body = prompt(&format!("turn {turn}"), turn % 2 == 0);
        waiting.spawn(async move { client.post(COMPLETIONS, &[], body).await.unwrap() });
    }
    cluster.until("the engine has requests", |_| !engine.requests().is_empty()).await.unwrap();
    stopped.store(true, Ordering::SeqCst);
    let all = tokio::time::timeout(Duration::from_secs(60), waiting.join_all()).await;
    for reply in all.expect("requests still wait for a stopped engine") {
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    cluster.at_rest().await.unwrap();
}

async fn models(cluster: &TestCluster) -> Vec<String> {
    let list = cluster.client.get("/v1/models").await.unwrap().json().unwrap();
    list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect()
}

async fn until_models(cluster: &TestCluster, expected: &[&str]) {
    let started = Instant::now();
    while models(cluster).await != expected {
        assert!(started.elapsed() < Duration::from_secs(30), "{:?}, not {expected:?}", models(cluster).await);
        tokio::time::sleep(20 * MS).await;
    }
}

#[tokio::test]
async fn an_engine_that_restarts_with_another_model_is_read_again() {
    let mut cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    assert_eq!(models(&cluster).await, ["tiny"]);
    let sim = cluster.sims.remove(0);
    let listen = sim.addr();
    sim.kill().await;
    tokio::time::sleep(200 * MS).await;
    let other =
        SimConfig { listen, model: "big".to_owned(), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    cluster.sims.push(Sim::start(other).await.unwrap());
    until_models(&cluster, &["big"]).await;
    let body = prompt("x", false).replace("tiny", "big");
    assert_eq!(outcome(&cluster, body).await, "200");
    assert_eq!(outcome(&cluster, prompt("x", false)).await, "404");
}

#[tokio::test]
async fn a_model_that_the_engine_does_not_know_any_more_is_forgotten() {
    let swapped = Arc::new(AtomicBool::new(false));
    let switch = swapped.clone();
    // The engine was replaced between two health checks.
    let engine = RawEngine::start(move |request| {
        let other = switch.load(Ordering::SeqCst);
        match request.line.as_str() {
            "GET /v1/models" if other => vec![Act::Send(json(&MODELS.replace("tiny", "big")))],
            "GET /v1/models" => vec![Act::Send(json(MODELS))],
            "GET /health" => vec![Act::Send(json("{}"))],
            _ => vec![Act::Send(status(
                "404 Not Found",
                r#"{"error":{"message":"no such model","code":404}}"#,
            ))],
        }
    })
    .await;
    let cluster = TestClusterBuilder::new().config(|config| raw_worker(config, 9, &engine)).start().await;
    swapped.store(true, Ordering::SeqCst);
    assert_eq!(outcome(&cluster, prompt("x", false)).await, "404");
    until_models(&cluster, &["big"]).await;
    // Without any request it is noticed some checks later.
    swapped.store(false, Ordering::SeqCst);
    until_models(&cluster, &["tiny"]).await;
}

/// So many engines; those that get a prompt with `poison` break in the way of `kind`.
async fn poisoned(number: u32, kind: FaultKind, quarantine: Duration) -> TestCluster {
    let mut builder = TestClusterBuilder::new().config(|config| {
        config.routing.retries = 4;
        config.routing.quarantine = quarantine;
        // The end of a kept connection proves less (I2.11).
        config.upstream.idle_connections = 0;
    });
    for _ in 0..number {
        let fault = Fault { prompt: Some("poison".to_owned()), ..Fault::always(kind.clone()) };
        let config = SimConfig { faults: vec![fault], ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
        builder = builder.sim_with(config, "");
    }
    builder.start().await
}

#[tokio::test]
async fn a_request_that_kills_its_engine_visits_two_of_five_and_is_then_refused() {
    let kinds = [FaultKind::Die, FaultKind::Refuse, FaultKind::Status { status: 500, retry_after: None }];
    for kind in kinds {
        let cluster = poisoned(5, kind.clone(), 700 * MS).await;
        let hits = |cluster: &TestCluster| {
            cluster.sims.iter().map(|sim| sim.state().faults_fired.values().sum::<u64>()).sum::<u64>()
        };
        let reply = cluster.client.post(COMPLETIONS, &[], prompt("poison", false)).await.unwrap();
        // I_poison_request
        assert_eq!(
            (reply.status.as_u16(), reply.code().as_str()),
            (502, "poison_request"),
            "{kind:?} {reply:?}"
        );
        // I4.1
        assert_eq!(hits(&cluster), 2, "{kind:?}");
        // The same body is refused at once, and another one is served.
        let again = cluster.client.post(COMPLETIONS, &[], prompt("poison", false)).await.unwrap();
        // I4.2
        assert_eq!((again.status.as_u16(), again.code().as_str()), (502, "poison_request"), "{kind:?}");
        assert!(String::from_utf8_lossy(&again.body).contains("routing.quarantine"), "{again:?}");
        assert_eq!(hits(&cluster), 2, "{kind:?}");
        if matches!(kind, FaultKind::Die) {
            // While an engine dies, its listener still takes connections and resets them: a request that
            // meets both of them then is not sent to a third.
            cluster
                .until("the dead engines are left out", |cluster| cluster.ineligible() == 2)
                .await
                .unwrap();
        }
        for turn in 0..10 {
            assert_eq!(
                outcome(&cluster, prompt(&format!("turn {turn}"), turn % 2 == 0)).await,
                "200",
                "{kind:?}"
            );
        }
        let metrics = cluster.metrics_text().await.unwrap();
        for line in [
            r#"pointsman_poison_requests_total{result="quarantined"} 1"#,
            r#"pointsman_poison_requests_total{result="refused"} 1"#,
        ] {
            // I4.5
            assert!(metrics.contains(line), "{line}");
        }
        tokio::time::sleep(800 * MS).await;
        outcome(&cluster, prompt("poison", false)).await;
        assert!(hits(&cluster) > 2, "{kind:?}: the quarantine ends");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn failures_of_a_poison_request_do_not_mark_the_second_worker_as_failing() {
    // On a busy machine the retry may come late.
    let cluster = poisoned(5, FaultKind::Refuse, 60_000 * MS).await;
    let snapshot = cluster.gateway.state().registry.snapshot();
    let workers = snapshot.workers();
    let errors = || workers.iter().map(|worker| worker.candidates()[0].load().view().error_ppm());
    for turn in 0..20 {
        let before: Vec<_> = errors().collect();
        let reply =
            cluster.client.post(COMPLETIONS, &[], prompt(&format!("poison {turn}"), false)).await.unwrap();
        assert_eq!(reply.code(), "poison_request", "{turn}");
        let marked = errors().zip(&before).zip(workers).filter(|((now, before), _)| now > before);
        let marked: Vec<_> = marked.map(|(_, worker)| worker.id().to_string()).collect();
        // I4.3
        assert_eq!(marked.len(), 1, "{turn}: {marked:?}");
        // Five failures in a row, or half of all, would open the breaker of the first one, which then proves
        // nothing.
        let pin = [("x-worker-instance-id", marked[0].as_str())];
        for number in 0..2 {
            let text = format!("turn {turn} {number}");
            let served = cluster.client.post(COMPLETIONS, &pin, prompt(&text, false)).await;
            assert_eq!(served.unwrap().status, 200, "{turn}");
        }
    }
    // I4.3
    assert!(workers.iter().all(|worker| !worker.is_failing()), "a worker is marked as failing");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i4_prompts_that_break_every_engine_leave_no_worker_failing_that_serves_others() {
    let cluster = poisoned(2, FaultKind::Status { status: 500, retry_after: None }, 60_000 * MS).await;
    let snapshot = cluster.gateway.state().registry.snapshot();
    for round in 0..5 {
        // One of both is the first one for at least five, without a success in between.
        for turn in 0..9 {
            let body = prompt(&format!("poison {round} {turn}"), turn % 2 == 0);
            let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
            // I4.2
            assert_eq!(reply.code(), "poison_request", "{reply:?}");
            // I4.3
            assert!(snapshot.workers().iter().all(|worker| !worker.is_failing()), "{round} {turn}");
        }
        // More than half of all, so that the rate ejects no worker.
        for (worker, turn) in
            snapshot.workers().iter().flat_map(|worker| (0..11).map(move |turn| (worker, turn)))
        {
            let pin = [("x-worker-instance-id", &*worker.id().to_string())];
            let body = prompt(&format!("turn {round} {turn}"), false);
            assert_eq!(cluster.client.post(COMPLETIONS, &pin, body).await.unwrap().status, 200);
        }
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_pair_is_not_sent_to_a_third_worker_by_a_request_that_breaks_its_prefill() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let mut builder = TestClusterBuilder::new().config(|config| {
            config.routing.retries = 4;
            config.routing.local_fallback = true;
        });
        for _ in 0..4 {
            builder = builder.sim(dialect, Role::Prefill).sim(dialect, Role::Decode);
        }
        let cluster = builder.start().await;
        for sim in &cluster.sims {
            let leg = Some(FaultLeg::Prefill);
            sim.set_faults(vec![Fault {
                leg,
                prompt: Some("poison".to_owned()),
                ..Fault::always(FaultKind::Refuse)
            }]);
        }
        let reply = cluster.client.post(COMPLETIONS, &[], prompt("poison", false)).await.unwrap();
        assert_eq!(reply.code(), "poison_request", "{dialect:?} {reply:?}");
        assert_eq!(cluster.faults_fired("refuse"), 2, "{dialect:?}");
        cluster.at_rest().await.unwrap();
    }
}
