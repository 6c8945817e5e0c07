//! Engines that have too much to do: they answer 503 or 429, are paused, and are not failing (I13).

use std::time::Duration;

use pointsman_gateway::config::{Config, SlotEntry};
use pointsman_routing::{NativeMode, SlotKind};
use pointsman_sim::{Dialect, Fault, FaultKind, FaultLeg, Role, SimConfig};
use pointsman_tests::{
    Act, CHAT, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{json as json_answer, status},
};
use pointsman_workers::WorkerId;
use serde_json::{Value, json};
use tokio::time::Instant;

fn chat(stream: bool) -> String {
    json!({
        "model": "tiny", "max_tokens": 3, "stream": stream,
        "messages": [{"role": "user", "content": "too many at once"}],
    })
    .to_string()
}

fn refuses(status: u16, retry_after: Option<u32>) -> Vec<Fault> {
    vec![Fault::always(FaultKind::Status { status, retry_after })]
}

async fn ask(cluster: &TestCluster, stream: bool) -> Reply {
    cluster.client.post(CHAT, &[], chat(stream)).await.unwrap()
}

fn seen(reply: &Reply) -> (u16, Option<&str>) {
    (reply.status.as_u16(), reply.headers.get("retry-after").map(|value| value.to_str().unwrap()))
}

async fn two(change: impl FnOnce(&mut Config)) -> TestCluster {
    let builder = TestClusterBuilder::new().config(change);
    let builder = builder.sim(Dialect::Vllm, Role::Aggregated).sim(Dialect::Vllm, Role::Aggregated);
    builder.start().await
}

async fn workers(cluster: &TestCluster) -> Vec<Value> {
    let list = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    list["workers"].as_array().unwrap().clone()
}

#[tokio::test]
async fn i13_when_all_engines_have_too_much_to_do_the_answer_is_503_with_the_soonest_time() {
    for stream in [false, true] {
        let cluster = two(|_| {}).await;
        for (sim, after) in cluster.sims.iter().zip([7, 2]) {
            sim.set_faults(refuses(503, Some(after)));
        }
        let reply = ask(&cluster, stream).await;
        // I13.1, I13.4
        assert_eq!((seen(&reply), reply.code()), ((503, Some("2")), "overloaded".to_owned()), "{reply:?}");
        let text = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
        assert!(text.contains("injected fault: status 503"), "it quotes the engine: {text}");
        for _ in 0..4 {
            let reply = ask(&cluster, stream).await;
            assert_eq!((reply.status.as_u16(), reply.code()), (503, "overloaded".to_owned()), "{reply:?}");
            assert!(matches!(seen(&reply).1, Some("1" | "2")), "{reply:?}");
        }
        // I13.2
        assert_eq!(cluster.faults_fired("status-503"), 2, "nobody is asked during a pause");
        for worker in workers(&cluster).await {
            let paused = worker["paused_ms"].as_u64().unwrap();
            // I13.3
            assert_eq!((&worker["ineligible"], &worker["paused"]), (&Value::Null, &json!(true)), "{worker}");
            assert!((1..=7_000).contains(&paused), "{worker}");
        }
        let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
        let why = "worker 1 gets no request: paused: its engine refused a request: it has too much to do \
                   (503 or 529)";
        // I13.3
        assert!(status["reasons"].as_array().unwrap().contains(&json!(why)), "{}", status["reasons"]);
        cluster.sims.iter().for_each(|sim| sim.set_faults(vec![]));
        cluster
            .until("a pause is over", |cluster| {
                let snapshot = cluster.gateway.state().registry.snapshot();
                snapshot.workers().iter().any(|worker| worker.pause().is_none())
            })
            .await
            .unwrap();
        assert_eq!(ask(&cluster, stream).await.status, 200);
        cluster.at_rest().await.unwrap();
    }
}

/// Refuses a request when the pause is over that its body names, with the `Retry-After` that it names.
fn refuse(request: &RawRequest) -> Vec<Act> {
    let after = |mark: &str| {
        let digits = request.body.split(mark).nth(1)?.split(';').next()?;
        digits.parse::<u64>().ok()
    };
    let head = match after("retry ") {
        Some(seconds) => format!("503 Service Unavailable\r\nretry-after: {seconds}"),
        None => "503 Service Unavailable".to_owned(),
    };
    let pause = Duration::from_millis(after("late ").unwrap_or_default());
    vec![Act::Pause(pause), Act::Send(status(&head, r#"{"error":{"message":"full"}}"#))]
}

#[tokio::test]
async fn i13_a_late_refusal_of_what_was_sent_before_the_pause_changes_nothing() {
    let engine = RawEngine::start(|request| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json_answer(r#"{"data":[{"id":"tiny"}]}"#))],
        line if line.starts_with("POST") => refuse(request),
        _ => vec![Act::Send(json_answer("{}"))],
    })
    .await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.routing.retries = 0;
            config.workers.push(engine.worker("id=1,role=aggregated,engine=openai"));
        })
        .start()
        .await;
    let worker = cluster.gateway.state().registry.snapshot().get(WorkerId(1)).unwrap().clone();
    let ask = async |mark: &str| {
        let body = json!({"model": "tiny", "messages": [{"role": "user", "content": mark}]}).to_string();
        cluster.client.post(CHAT, &[], body).await.unwrap()
    };
    // The first refusal begins a pause of half a second. The others were sent before it.
    let both = async |late: &str| {
        let before = engine.requests().len();
        let first = async {
            cluster.until("the late one was sent", |_| engine.requests().len() > before).await.unwrap();
            ask("late 0;").await
        };
        let (late, first) = tokio::join!(ask(late), first);
        assert_eq!((late.status.as_u16(), first.status.as_u16()), (503, 503), "{late:?} {first:?}");
        worker.pause().map(|pause| pause.left)
    };
    // I13.2: during the pause
    let left = both("late 200;retry 20;").await;
    assert!(left.is_none_or(|left| left <= Duration::from_millis(500)), "{left:?}");
    cluster.until("the pause is over", |_| worker.pause().is_none()).await.unwrap();
    // I13.2: the pause of the second round, a second, is over when the refusal comes
    assert_eq!(both("late 4000;").await, None);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i13_an_engine_s_429_stays_429_when_every_engine_says_it() {
    let cluster = two(|_| {}).await;
    for (sim, after) in cluster.sims.iter().zip([7, 3]) {
        sim.set_faults(refuses(429, Some(after)));
    }
    let reply = ask(&cluster, false).await;
    // I13.4
    assert_eq!(seen(&reply), (429, Some("3")), "{reply:?}");
    // I1.3
    assert_eq!(reply.json().unwrap()["error"]["message"], "injected fault: status 429");
    let paused = ask(&cluster, false).await;
    assert_eq!((paused.status.as_u16(), paused.code()), (429, "overloaded".to_owned()), "{paused:?}");
    assert_eq!(cluster.faults_fired("status-429"), 2);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i13_an_engine_s_429_without_a_time_says_when_its_pause_ends() {
    for stream in [false, true] {
        let cluster = two(|_| {}).await;
        cluster.sims.iter().for_each(|sim| sim.set_faults(refuses(429, None)));
        let reply = ask(&cluster, stream).await;
        // I13.4: its first pause is half a second.
        assert_eq!(seen(&reply), (429, Some("1")), "{reply:?}");
        assert_eq!(reply.json().unwrap()["error"]["message"], "injected fault: status 429");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i13_an_engine_s_429_that_forbids_a_retry_reaches_the_client_as_it_is() {
    let engine = RawEngine::start(|request| match request.line.as_str() {
        "GET /v1/models" => vec![Act::Send(json_answer(r#"{"data":[{"id":"tiny"}]}"#))],
        line if line.starts_with("GET") => vec![Act::Send(json_answer("{}"))],
        _ => {
            let head = "429 Too Many Requests\r\nx-should-retry: false";
            vec![Act::Send(status(head, r#"{"error":{"message":"quota","code":429}}"#))]
        }
    })
    .await;
    let worker = engine.worker("id=1,role=aggregated,engine=openai");
    let cluster = TestClusterBuilder::new().config(|config| config.workers.push(worker)).start().await;
    let reply = ask(&cluster, false).await;
    // I13.4
    assert_eq!(seen(&reply), (429, None), "{reply:?}");
    // I1.12
    assert_eq!(reply.headers["x-should-retry"], "false");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i13_engines_with_too_much_to_do_are_an_overload_of_anthropic_s_api() {
    let cluster = two(|_| {}).await;
    cluster.sims.iter().for_each(|sim| sim.set_faults(refuses(503, Some(7))));
    let body = json!({
        "model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "too many at once"}],
    });
    // The second one finds all workers paused.
    for turn in 0..2 {
        let reply = cluster.client.post("/v1/messages", &[], body.to_string()).await.unwrap();
        let error = reply.json().unwrap()["error"].clone();
        let known = [&error["type"], &error["code"]].map(|value| value.as_str().unwrap());
        // I6.23
        assert_eq!((reply.status.as_u16(), known), (529, ["overloaded_error", "overloaded"]), "{turn}");
        assert!(seen(&reply).1.is_some(), "{reply:?}");
    }
    // I6.23: and on other endpoints
    assert_eq!(ask(&cluster, false).await.status, 503);
    let of_messages = r#"pointsman_requests_total{endpoint="messages",model="tiny",status="529""#;
    assert_eq!(cluster.metric(of_messages).await.unwrap(), [2.0]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i13_a_worker_that_always_refuses_does_not_draw_the_traffic() {
    for (native, status, retry_after) in [
        (Some(NativeMode::LeastLoaded), 503, None),
        (Some(NativeMode::LeastLoaded), 503, Some(0)),
        (Some(NativeMode::LeastLoaded), 429, None),
        (None, 503, None),
    ] {
        let cluster = two(|config| {
            let entry = native.map(|native| SlotEntry { native: Some(native), ..SlotEntry::default() });
            config.policies.slots.extend(entry.map(|entry| (SlotKind::Aggregated, entry)));
        })
        .await;
        cluster.sims[0].set_faults(refuses(status, retry_after));
        let mut clients = tokio::task::JoinSet::new();
        let begun = Instant::now();
        for _ in 0..4 {
            let client = cluster.client.clone();
            clients.spawn(async move {
                for turn in 0..150 {
                    let body = chat(false).replace("too many", &format!("{turn} too many"));
                    let reply = client.post(CHAT, &[], body).await.unwrap();
                    // I2.1, I2.4
                    assert_eq!(reply.status, 200, "{reply:?}");
                }
            });
        }
        clients.join_all().await;
        let asked = cluster.faults_fired(&format!("status-{status}"));
        println!("{native:?} {status} {retry_after:?}: {asked} of 600 requests were refused once");
        // I13.2: under 2 %, and one more after each longest pause
        let most = 12 + begun.elapsed().as_secs() / 10;
        assert!((1..most).contains(&asked), "{native:?} {status} {retry_after:?}: {asked} of 600");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i13_a_worker_that_also_serves_is_not_failing() {
    let cluster = two(|_| {}).await;
    for sim in &cluster.sims {
        let fault = Fault::always(FaultKind::Status { status: 503, retry_after: Some(1) });
        sim.set_faults(vec![Fault { share: 0.5, ..fault }]);
    }
    let served = async {
        let mut served = 0;
        while served < 20 {
            served += u32::from(ask(&cluster, false).await.status == 200);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), served).await.unwrap();
    assert!(cluster.faults_fired("status-503") > 0);
    for id in [1, 2] {
        let worker = cluster.gateway.state().registry.snapshot().get(WorkerId(id)).unwrap().clone();
        // I13.5
        assert!(!worker.is_failing());
        assert_eq!(worker.candidates()[0].load().view().error_ppm(), 0);
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i13_rare_refusals_refuse_no_requests() {
    for roles in [vec![Role::Aggregated], vec![Role::Prefill, Role::Decode]] {
        let two_each = roles.iter().chain(&roles);
        let builder = TestClusterBuilder::new();
        let builder = two_each.fold(builder, |builder, role| builder.sim(Dialect::Vllm, *role));
        let cluster = builder.start().await;
        for (status, sim) in [503, 429].into_iter().cycle().zip(&cluster.sims) {
            let fault = Fault::always(FaultKind::Status { status, retry_after: None });
            sim.set_faults(vec![Fault { share: 0.02, ..fault }]);
        }
        let mut clients = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let client = cluster.client.clone();
            clients.spawn(async move {
                let mut served = 0;
                for turn in 0..100 {
                    let body = chat(turn % 2 == 0).replace("too many", &format!("{turn} too many"));
                    served += u32::from(client.post(CHAT, &[], body).await.unwrap().status == 200);
                }
                served
            });
        }
        let served: u32 = clients.join_all().await.into_iter().sum();
        let refused = cluster.faults_fired("status-503") + cluster.faults_fired("status-429");
        println!("{served} of 800 served, {refused} legs refused");
        // I13.8
        assert!(refused > 0 && served >= 784, "{served} of 800 served, {refused} legs refused");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i13_a_worker_that_is_tried_in_its_pause_gets_no_more_than_its_limit() {
    let cluster = TestClusterBuilder::new()
        .sim_with(
            SimConfig {
                itl: Duration::from_millis(20),
                ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
            },
            ",max_concurrency=2",
        )
        .start()
        .await;
    let fault = Fault::always(FaultKind::Status { status: 503, retry_after: None });
    cluster.sims[0].set_faults(vec![Fault { share: 0.1, ..fault }]);
    let most = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..12 {
        let (client, most) = (cluster.client.clone(), most.clone());
        let registry = cluster.gateway.state().registry.clone();
        clients.spawn(async move {
            for turn in 0..40 {
                let asked = client.post(CHAT, &[], chat(turn % 2 == 0));
                let running = registry.snapshot().get(WorkerId(1)).unwrap().active_requests();
                most.fetch_max(running.into(), std::sync::atomic::Ordering::Relaxed);
                asked.await.unwrap();
            }
        });
    }
    clients.join_all().await;
    assert!(cluster.faults_fired("status-503") > 0);
    // I13.8
    assert!(most.load(std::sync::atomic::Ordering::Relaxed) <= 2, "{most:?}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i13_a_handoff_that_a_decode_worker_refuses_is_taken_by_another() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 2).await.unwrap();
    for turn in 0..64 {
        cluster.sims[1 + turn % 2].set_faults(vec![]);
        cluster.sims[2 - turn % 2].set_faults(vec![Fault {
            leg: Some(FaultLeg::Decode),
            ..Fault::always(FaultKind::Status { status: 503, retry_after: None })
        }]);
        cluster
            .until("no worker is paused", |cluster| {
                let snapshot = cluster.gateway.state().registry.snapshot();
                snapshot.workers().iter().all(|worker| worker.pause().is_none())
            })
            .await
            .unwrap();
        let reply = ask(&cluster, turn % 3 == 0).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        if cluster.faults_fired("status-503") >= 2 {
            break;
        }
    }
    assert!(cluster.faults_fired("status-503") > 0, "no decode worker was asked that refuses");
    let prefill = cluster.sims[0].state();
    let served: u64 = cluster.sims[1..].iter().map(|sim| sim.state().handoffs.pulled).sum();
    // E5.2, I13.6
    assert_eq!(
        (prefill.requests.values().sum::<u64>(), prefill.stranded),
        (served, 0),
        "each prefill ran once"
    );
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i13_a_handoff_that_all_decode_workers_refuse_is_refused_with_their_time_and_consumed() {
    for (status, seen_status) in [(503, 503), (429, 429), (529, 503)] {
        for stream in [false, true] {
            let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
            let refuses = Fault::always(FaultKind::Status { status, retry_after: Some(9) });
            cluster.sims[1].set_faults(vec![Fault { leg: Some(FaultLeg::Decode), ..refuses }]);
            let reply = ask(&cluster, stream).await;
            // E6.9, I13.4: beyond a quarter of the lease
            assert_eq!(seen(&reply), (seen_status, Some("9")), "{reply:?}");
            assert_eq!(cluster.faults_fired(&format!("status-{status}")), 1, "it is asked when it said");
            let prefill = cluster.sims[0].state();
            assert_eq!(prefill.requests.values().sum::<u64>(), 1, "it ran once");
        }
    }
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    for (turn, after) in (1..).zip([Some(1), None]) {
        let refuses = Fault::always(FaultKind::Status { status: 503, retry_after: after });
        let refuses = Fault { leg: Some(FaultLeg::Decode), times: Some(1), ..refuses };
        cluster.sims[1].set_faults(vec![refuses]);
        // E6.9: a handoff waits for a short pause
        assert_eq!(ask(&cluster, false).await.status, 200);
        assert_eq!(cluster.sims[0].state().requests.values().sum::<u64>(), turn, "each prefill ran once");
    }
    cluster.at_rest().await.unwrap();
    assert_eq!(cluster.sims[0].state().stranded, 0);
}

#[tokio::test]
async fn i13_a_refused_handoff_is_consumed_when_the_engine_takes_requests_again() {
    let cluster = TestClusterBuilder::new().pair(Dialect::Vllm).start().await;
    let refuses = Fault::always(FaultKind::Status { status: 503, retry_after: Some(8) });
    let refuses = Fault { leg: Some(FaultLeg::Decode), times: Some(1), ..refuses };
    cluster.sims[1].set_faults(vec![refuses]);
    let reply = ask(&cluster, false).await;
    assert_eq!(seen(&reply), (503, Some("8")), "{reply:?}");
    assert!(cluster.sims[0].state().pinned_blocks > 0);
    // E6.9
    let freed = |cluster: &TestCluster| cluster.sims[1].state().handoffs.pulled == 1;
    cluster.until("the handoff is consumed", freed).await.unwrap();
    cluster.at_rest().await.unwrap();
    let prefill = cluster.sims[0].state();
    assert_eq!((prefill.pinned_blocks, prefill.stranded), (0, 0));
}

#[tokio::test]
async fn e6_a_refused_handoff_of_a_client_that_left_is_offered_again() {
    let slow =
        SimConfig { overhead: Duration::from_secs(2), ..SimConfig::instant(Dialect::Vllm, Role::Prefill) };
    let cluster = TestClusterBuilder::new()
        .sim_with(slow, ",handoff_lease_s=12")
        .sim(Dialect::Vllm, Role::Decode)
        .start()
        .await;
    // Later than a quarter of the lease.
    let refuses = Fault::always(FaultKind::Status { status: 503, retry_after: Some(4) });
    cluster.sims[1].set_faults(vec![Fault { leg: Some(FaultLeg::Decode), times: Some(1), ..refuses }]);
    let runs = |cluster: &TestCluster| cluster.sims[0].state().running == 1;
    tokio::select! {
        reply = ask(&cluster, false) => panic!("the prefill was over: {reply:?}"),
        runs = cluster.until("the prefill runs", runs) => runs.unwrap(),
    }
    // The client leaves.
    // E6.6, E6.9
    let consumed = |cluster: &TestCluster| cluster.sims[1].state().handoffs.pulled == 1;
    cluster.until("the handoff is consumed", consumed).await.unwrap();
    assert_eq!(cluster.faults_fired("status-503"), 1);
    cluster.at_rest().await.unwrap();
    assert_eq!(cluster.sims[0].state().pinned_blocks, 0);
}

#[tokio::test]
async fn i13_a_prefill_engine_that_refuses_is_left_for_another_one() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let cluster = TestCluster::disaggregated(dialect, 2, 1).await.unwrap();
        cluster.sims[0].set_faults(refuses(429, Some(5)));
        // Equal workers are chosen by chance.
        for _ in (0..64).take_while(|turn| *turn < 10 || cluster.faults_fired("status-429") == 0) {
            // I13.1
            assert_eq!(ask(&cluster, false).await.status, 200);
        }
        assert!(cluster.faults_fired("status-429") > 0, "{dialect:?}: the first was not asked");
        cluster.sims[1].set_faults(refuses(503, Some(5)));
        let reply = ask(&cluster, false).await;
        // I13.4
        assert_eq!(
            (reply.status.as_u16(), reply.code()),
            (503, "overloaded".to_owned()),
            "{dialect:?} {reply:?}"
        );
        assert!(reply.headers.contains_key("retry-after"));
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i13_a_request_that_finds_only_paused_workers_waits_in_the_queue() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.queue.limit = 10)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    cluster.sims[0].set_faults(vec![Fault { times: Some(1), ..refuses(503, Some(1)).remove(0) }]);
    let refused = ask(&cluster, false).await;
    assert_eq!(seen(&refused), (503, Some("1")), "{refused:?}");
    // I13.7
    assert_eq!(ask(&cluster, false).await.status, 200, "it waited for the end of the pause");
    cluster.at_rest().await.unwrap();
}

/// Share of requests that are served when they come at about twice the rate that an engine of four places
/// serves.
async fn share_at_twice_the_rate(change: impl FnOnce(&mut Config)) -> f64 {
    const REQUESTS: u32 = 200;
    let engine = SimConfig {
        max_num_seqs: 4,
        max_waiting: 0,
        itl: Duration::from_millis(66),
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    let cluster = TestClusterBuilder::new().config(change).sim_with(engine, "").start().await;
    let mut clients = tokio::task::JoinSet::new();
    for turn in 0..REQUESTS {
        let client = cluster.client.clone();
        let body = chat(turn % 2 == 0).replace("too many", &format!("{turn} too many"));
        clients.spawn(async move { client.post(CHAT, &[], body).await.unwrap().status == 200 });
        // Four places of 200 ms serve 20 requests a second.
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    let served = clients.join_all().await.into_iter().filter(|served| *served).count();
    cluster.at_rest().await.unwrap();
    served as f64 / f64::from(REQUESTS)
}

#[tokio::test]
async fn i13_with_a_queue_requests_at_twice_the_rate_wait_for_their_place_and_are_served() {
    let share = share_at_twice_the_rate(|config| config.queue.limit = 1_000).await;
    // I13.9
    assert!(share > 0.9, "{share}");
}

#[tokio::test]
async fn i13_after_a_pause_a_request_waits_for_a_place_with_a_queue_and_asks_the_engine_without() {
    for queue in [0, 10] {
        let engine = SimConfig {
            max_num_seqs: 4,
            max_waiting: 0,
            itl: Duration::from_millis(20),
            ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
        };
        let builder = TestClusterBuilder::new().config(|config| config.queue.limit = queue);
        let cluster = builder.sim_with(engine, "").start().await;
        let mut held = Vec::new();
        for turn in 0..4 {
            let body = chat(true).replace("too many", &format!("{turn} too many"));
            let body = body.replace("\"max_tokens\":3", "\"max_tokens\":6000,\"ignore_eos\":true");
            let mut stream = cluster.client.stream(CHAT, &[], body).await.unwrap();
            stream.next().await.unwrap().unwrap();
            held.push(stream);
        }
        let refused = || cluster.sims[0].state().requests.get("aggregated/refused").copied().unwrap_or(0);
        assert_eq!((ask(&cluster, false).await.status.as_u16(), refused()), (503, 1));
        let worker = cluster.gateway.state().registry.snapshot().get(WorkerId(1)).unwrap().clone();
        cluster.until("the pause is over", |_| worker.pause().is_none()).await.unwrap();
        let waiting = ask(&cluster, false);
        tokio::pin!(waiting);
        let limit = Duration::from_secs(if queue == 0 { 30 } else { 1 });
        let soon = tokio::time::timeout(limit, &mut waiting).await;
        let asked = if queue == 0 { 2 } else { 1 };
        // I13.9
        assert_eq!((soon.is_ok(), refused()), (queue == 0, asked));
        held.pop();
        if soon.is_err() {
            assert_eq!(waiting.await.status, 200, "it gets the place of the client that left");
        }
        assert_eq!(refused(), asked);
    }
}

#[tokio::test]
async fn i13_a_worker_that_fails_beside_a_paused_one_leaves_a_time_to_come_back() {
    let cluster = two(|_| {}).await;
    cluster.sims[0].set_faults(refuses(503, Some(20)));
    cluster.sims[1].set_faults(vec![Fault::always(FaultKind::Refuse)]);
    for _ in 0..3 {
        let reply = ask(&cluster, false).await;
        // I13.4
        assert_eq!((reply.status.as_u16(), reply.code()), (503, "overloaded".to_owned()), "{reply:?}");
        assert!(reply.headers.contains_key("retry-after"));
    }
    assert_eq!(cluster.faults_fired("status-503"), 1);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i13_a_429_for_the_key_of_a_client_keeps_no_other_client_out() {
    const SPENT: &str = r#"{"error":{"message":"rate limit of this key","code":429}}"#;
    for (forwards, worker_key, is_of_client) in
        [(true, "", true), (true, ",api_key=sk", false), (false, "", false)]
    {
        let engine = RawEngine::serving(|request: &RawRequest| {
            if !request.body.contains("spent") {
                return vec![Act::Send(json_answer(
                    r#"{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}"#,
                ))];
            }
            let answer = String::from_utf8(status("429 Too Many Requests", SPENT)).unwrap();
            vec![Act::Send(answer.replacen("\r\n", "\r\nretry-after: 30\r\n", 1).into_bytes())]
        });
        let engines = [engine.await];
        let builder = TestClusterBuilder::new().config(|config| {
            config.upstream.forward_authorization = forwards;
            for engine in &engines {
                config.workers.push(engine.worker(&format!("role=aggregated,engine=vllm{worker_key}")));
            }
        });
        let cluster = builder.start().await;
        let ask = async |key: &str, prompt: &str| {
            let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 1}).to_string();
            let header = ("authorization", &*format!("Bearer {key}"));
            cluster.client.post("/v1/completions", &[header], body).await.unwrap()
        };
        for _ in 0..3 {
            let spent = ask("one", "spent").await;
            // I13.10
            assert_eq!(seen(&spent).0, 429, "{spent:?}");
            if is_of_client {
                // I13.10: the engine's own answer
                assert_eq!((&*spent.body, seen(&spent).1), (SPENT.as_bytes(), Some("30")));
            }
        }
        let other = ask("two", "hello").await;
        // I13.10, I13.2
        assert_eq!(
            other.status.as_u16(),
            if is_of_client { 200 } else { 429 },
            "{forwards} {worker_key}: {other:?}"
        );
        let paused = workers(&cluster).await[0]["paused"].clone();
        assert_eq!(paused.as_bool().unwrap_or_default(), !is_of_client, "{forwards} {worker_key}");
        cluster.at_rest().await.unwrap();
    }
}
