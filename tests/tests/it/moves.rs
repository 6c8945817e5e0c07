//! I15: the running streams of a worker that drains with `move` continue on another worker, and their clients
//! read what they would have read.

use std::time::Duration;

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, Sim, SimConfig, SimHandle};
use pointsman_tests::{
    CHAT, COMPLETIONS, TestCluster,
    client::{Stream, text_of},
    raw::{connect_small, until_closed},
};
use pointsman_workers::WorkerId;
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, time::Instant};
use tokio_util::task::TaskTracker;

use crate::continuation::{AGGREGATED, PAIRS, body, cluster, normal, stream};

const THREE: &[Role] = &[Role::Aggregated, Role::Aggregated, Role::Aggregated];
const TWO_PAIRS: &[Role] = &[Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];

fn no_change(_: &mut Config) {}

fn long() -> Value {
    json!({ "max_tokens": 120 })
}

/// A stream that began.
struct Begun {
    stream: Stream,
    events: Vec<String>,
}

impl Begun {
    async fn of(cluster: &TestCluster, path: &str, headers: &[(&str, &str)], more: Value) -> Self {
        let stream = cluster.client.stream(path, headers, body(path, more)).await.unwrap();
        let mut begun = Self { stream, events: Vec::new() };
        begun.read(5).await;
        begun
    }

    async fn read(&mut self, events: usize) {
        for _ in 0..events {
            self.events.push(self.stream.next().await.unwrap().unwrap());
        }
    }

    async fn all(mut self) -> Vec<String> {
        let rest = tokio::time::timeout(Duration::from_secs(30), self.stream.all()).await;
        self.events.extend(rest.expect("the stream hung").unwrap());
        self.events
    }
}

/// The workers that answer requests now.
fn serving(cluster: &TestCluster) -> Vec<u64> {
    let snapshot = cluster.gateway.state().registry.snapshot();
    let busy =
        snapshot.workers().iter().filter(|worker| worker.spec().role != pointsman_workers::Role::Prefill);
    busy.filter(|worker| worker.own_requests() > 0).map(|worker| worker.id().0).collect()
}

/// The worker that alone answers a request.
fn only(cluster: &TestCluster) -> u64 {
    let serving = serving(cluster);
    assert_eq!(serving.len(), 1, "{serving:?}");
    serving[0]
}

async fn drain(cluster: &TestCluster, id: u64) {
    let reply = cluster.admin.post(&format!("/workers/{id}/drain?move=true"), &[], "").await.unwrap();
    assert_eq!(reply.json().unwrap()["move"], true);
}

async fn undrain(cluster: &TestCluster, id: u64) {
    cluster.admin.delete(&format!("/workers/{id}/drain")).await.unwrap();
}

/// What `GET /workers/{id}` says of the worker's streams.
async fn moves(cluster: &TestCluster, id: u64) -> Value {
    cluster.admin.get(&format!("/workers/{id}")).await.unwrap().json().unwrap()["worker"]["moves"].take()
}

async fn until_empty(cluster: &TestCluster, id: u64) {
    let is_empty = |cluster: &TestCluster| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        let worker = snapshot.get(WorkerId(id)).unwrap();
        worker.own_requests() == 0 && worker.move_counts().is_none_or(|counts| counts.moving == 0)
    };
    cluster.until("the worker is empty", is_empty).await.unwrap();
}

async fn counted(cluster: &TestCluster, reason: &str) -> f64 {
    let start = format!("pointsman_continuations_total{{reason=\"{reason}\",cause=\"drain\"}}");
    cluster.metric(&start).await.unwrap().iter().sum()
}

/// Legs that failed, of all workers.
async fn failed_legs(cluster: &TestCluster) -> f64 {
    let all: f64 = cluster.metric("pointsman_legs_total{").await.unwrap().iter().sum();
    let mut good = 0.0;
    for outcome in ["ok", "cancelled"] {
        let text = cluster.metrics_text().await.unwrap();
        let lines = text.lines().filter(|line| line.starts_with("pointsman_legs_total{"));
        let lines = lines.filter(|line| line.contains(&format!("outcome=\"{outcome}\"")));
        good += lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>();
    }
    all - good
}

#[tokio::test]
async fn i15_a_stream_goes_on_elsewhere_as_if_nothing_had_happened() {
    let cases = [
        json!({}),
        json!({"min_tokens": 100, "stop": ["@@"], "temperature": 0.5}),
        json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}}),
    ];
    for (dialect, roles) in [Dialect::Vllm, Dialect::Sglang]
        .into_iter()
        .flat_map(|dialect| [(dialect, AGGREGATED), (dialect, PAIRS), (dialect, TWO_PAIRS)])
    {
        let cluster = cluster(dialect, roles, no_change).await;
        let mut count = 0.0;
        for path in [CHAT, COMPLETIONS] {
            for more in &cases {
                let mut more = more.clone();
                more["max_tokens"] = json!(120);
                let undisturbed = normal(&stream(&cluster, path, more.clone()).await);
                let begun = Begun::of(&cluster, path, &[], more.clone()).await;
                let left = only(&cluster);
                drain(&cluster, left).await;
                until_empty(&cluster, left).await;
                let old = &cluster.sims[left as usize - 1];
                cluster.until("the old engine is free", |_| old.state().running == 0).await.unwrap();
                // I15.2: its engine was told to stop
                assert!(serving(&cluster).iter().all(|id| *id != left));
                // I15.1
                assert_eq!(normal(&begun.all().await), undisturbed, "{dialect:?} {roles:?} {path} {more}");
                count += 1.0;
                let expected = json!({ "moved": 1, "moving": 0, "failed": 0, "stayed": {} });
                // I15.9
                assert_eq!(moves(&cluster, left).await, expected);
                undrain(&cluster, left).await;
                assert_eq!(moves(&cluster, left).await, Value::Null);
            }
        }
        // I15.4
        assert_eq!(counted(&cluster, "moved").await, count);
        // I15.5
        assert_eq!(failed_legs(&cluster).await, 0.0);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i15_the_decisions_of_a_stream_that_moved_name_both_workers() {
    let cluster = cluster(Dialect::Vllm, AGGREGATED, no_change).await;
    let begun = Begun::of(&cluster, CHAT, &[], long()).await;
    let left = only(&cluster);
    drain(&cluster, left).await;
    begun.all().await;
    cluster.at_rest().await.unwrap();
    let listed = cluster.admin.get("/decisions").await.unwrap().json().unwrap();
    let outcomes: Vec<(u64, bool, bool)> = listed["decisions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            let (choice, outcome) = (&one["choice"], &one["outcome"]);
            let flag = |key: &str| outcome[key].as_bool().unwrap();
            (choice["worker"].as_u64().unwrap(), flag("moved"), flag("retried"))
        })
        .collect();
    // I15.9: the newest comes first
    assert_eq!(outcomes, [(3 - left, false, false), (left, true, false)]);
}

#[tokio::test]
async fn i15_no_leg_of_a_stream_that_moved_counts_as_retried() {
    let cluster = cluster(Dialect::Vllm, TWO_PAIRS, no_change).await;
    let begun = Begun::of(&cluster, CHAT, &[], long()).await;
    drain(&cluster, only(&cluster)).await;
    begun.all().await;
    cluster.at_rest().await.unwrap();
    let listed = cluster.admin.get("/decisions").await.unwrap().json().unwrap();
    // Without the decode override's.
    let all = listed["decisions"].as_array().unwrap().iter();
    let decisions: Vec<&Value> = all.filter(|one| one["plan"].is_null()).collect();
    let flags = |key: &str| decisions.iter().filter(|one| one["outcome"][key] == json!(true)).count();
    // I15.9
    assert_eq!((decisions.len(), flags("retried"), flags("moved")), (4, 0, 1), "{listed}");
}

#[tokio::test]
async fn i15_a_stream_that_moved_twice_stays_and_still_survives_its_engine() {
    let mut cluster = cluster(Dialect::Vllm, THREE, no_change).await;
    let more = || json!({ "max_tokens": 1_000 });
    let undisturbed = normal(&stream(&cluster, CHAT, more()).await);
    let mut begun = Begun::of(&cluster, CHAT, &[], more()).await;
    let mut last;
    for _ in 0..2 {
        last = only(&cluster);
        drain(&cluster, last).await;
        until_empty(&cluster, last).await;
        begun.read(30).await;
        undrain(&cluster, last).await;
    }
    last = only(&cluster);
    drain(&cluster, last).await;
    begun.read(30).await;
    // I15.5
    assert_eq!(moves(&cluster, last).await["stayed"], json!({ "moved_twice": 1 }));
    assert_eq!(serving(&cluster), [last]);
    cluster.sims.remove(last as usize - 1).kill().await;
    // I15.5: the one continuation of the request is left
    assert_eq!(normal(&begun.all().await), undisturbed);
    let continued =
        cluster.metric("pointsman_continuations_total{reason=\"continued\",cause=\"failure\"}").await;
    assert_eq!(continued.unwrap(), [1.0]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i15_what_cannot_move_stays_until_its_end() {
    let pinned: &[(&str, &str)] = &[("x-worker-instance-id", "1")];
    for (more, headers, continuations, reason) in [
        (json!({"frequency_penalty": 0.5}), &[][..], 1, "penalties"),
        (json!({"seed": 7, "temperature": 0.5}), &[], 1, "seed"),
        (json!({}), pinned, 1, "pinned"),
        (json!({}), &[], 0, "off"),
    ] {
        let cluster = cluster(Dialect::Vllm, AGGREGATED, |config| {
            config.routing.continuations = continuations;
        })
        .await;
        let mut more = more;
        more["max_tokens"] = json!(120);
        let undisturbed = normal(&stream(&cluster, CHAT, more.clone()).await);
        let begun = Begun::of(&cluster, CHAT, headers, more).await;
        let id = only(&cluster);
        drain(&cluster, id).await;
        let events = begun.all().await;
        // I15.4
        assert_eq!(normal(&events), undisturbed, "{reason}");
        assert_eq!(moves(&cluster, id).await["stayed"], json!({ reason: 1 }));
        assert_eq!((counted(&cluster, reason).await, counted(&cluster, "moved").await), (1.0, 0.0));
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i15_a_whole_answer_stays_until_its_end() {
    let cluster = cluster(Dialect::Vllm, AGGREGATED, no_change).await;
    let client = cluster.client.clone();
    let tasks = TaskTracker::new();
    let whole = tasks.spawn(async move {
        let whole = body(CHAT, json!({"stream": false, "stream_options": null, "max_tokens": 120}));
        client.post(CHAT, &[], whole).await.unwrap()
    });
    cluster.until("it runs", |cluster| serving(cluster).len() == 1).await.unwrap();
    let id = only(&cluster);
    drain(&cluster, id).await;
    for query in ["mov=true", "move=yes"] {
        let refused = cluster.admin.post(&format!("/workers/{id}/drain?{query}"), &[], "").await.unwrap();
        // O1.15
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (400, "invalid_request"));
    }
    assert_eq!(whole.await.unwrap().status, 200);
    // I15.4
    assert_eq!(moves(&cluster, id).await["stayed"], json!({ "not_streamed": 1 }));
    cluster.at_rest().await.unwrap();
}

/// A cluster whose workers take one request at a time.
async fn narrow(roles: &[Role], change: impl FnOnce(&mut Config)) -> TestCluster {
    let sim = |role| SimConfig { itl: Duration::from_millis(3), ..SimConfig::instant(Dialect::Vllm, role) };
    let builder = pointsman_tests::TestClusterBuilder::new().config(change);
    let builder = roles.iter().fold(builder, |builder, role| match role {
        Role::Prefill => builder.sim_with(sim(*role), ""),
        _ => builder.sim_with(sim(*role), ",max_concurrency=1"),
    });
    builder.start().await
}

#[tokio::test]
async fn i15_a_stream_stays_while_no_other_worker_is_free_and_leaves_when_one_is() {
    for roles in [AGGREGATED, PAIRS] {
        let cluster = narrow(roles, no_change).await;
        let more = || json!({ "max_tokens": 2_000 });
        let undisturbed = normal(&stream(&cluster, CHAT, more()).await);
        let mut begun = Begun::of(&cluster, CHAT, &[], more()).await;
        let left = only(&cluster);
        let other = Begun::of(&cluster, CHAT, &[], json!({ "max_tokens": 3_000 })).await;
        assert_eq!(serving(&cluster).len(), 2);
        let decisions =
            async || cluster.metric("pointsman_decisions_total{").await.unwrap().iter().sum::<f64>();
        let before = decisions().await;
        drain(&cluster, left).await;
        begun.read(60).await;
        // I15.3: nothing was decided, and the engine continues
        assert_eq!((serving(&cluster).len(), decisions().await), (2, before));
        assert_eq!(moves(&cluster, left).await["moved"], 0);
        drop(other);
        until_empty(&cluster, left).await;
        // I15.3
        assert_eq!(normal(&begun.all().await), undisturbed);
        assert_eq!(moves(&cluster, left).await["moved"], 1);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i15_a_stream_does_not_pass_requests_that_wait_for_workers() {
    let cluster = narrow(AGGREGATED, |config| {
        config.queue.limit = 10;
        config.queue.timeout = Duration::from_secs(20);
    })
    .await;
    let begun = Begun::of(&cluster, CHAT, &[], json!({ "max_tokens": 4_000 })).await;
    let left = only(&cluster);
    let tasks = TaskTracker::new();
    let reader = tasks.spawn(begun.all());
    let other = Begun::of(&cluster, CHAT, &[], json!({ "max_tokens": 3_000 })).await;
    let client = cluster.client.clone();
    let queued = tasks.spawn(async move {
        let stream = client.stream(CHAT, &[], body(CHAT, json!({ "max_tokens": 100 }))).await.unwrap();
        stream.all().await.unwrap()
    });
    cluster.until("one waits", |cluster| cluster.gateway.state().queue.waiting() == 1).await.unwrap();
    drain(&cluster, left).await;
    drop(other);
    cluster.until("none waits", |cluster| cluster.gateway.state().queue.waiting() == 0).await.unwrap();
    // I15.3
    assert_eq!(moves(&cluster, left).await["moved"], 0);
    assert_eq!(queued.await.unwrap().last().unwrap(), "[DONE]");
    until_empty(&cluster, left).await;
    assert_eq!(moves(&cluster, left).await["moved"], 1);
    assert_eq!(reader.await.unwrap().last().unwrap(), "[DONE]");
    cluster.at_rest().await.unwrap();
}

/// A fault of requests for a rest.
fn of_rests(kind: FaultKind, times: u64) -> Fault {
    let prompt = Some("continue_final_message".to_owned());
    Fault { prompt, times: Some(times), ..Fault::always(kind) }
}

#[tokio::test]
async fn i15_the_end_of_the_drain_ends_further_moves_and_those_that_run_end_well() {
    let cluster = cluster(Dialect::Vllm, AGGREGATED, |config| {
        config.timeouts.head = Duration::from_secs(5);
    })
    .await;
    let more = || json!({ "max_tokens": 900 });
    let undisturbed = normal(&stream(&cluster, CHAT, more()).await);
    // All streams begin on one worker.
    cluster.admin.post("/workers/2/drain", &[], "").await.unwrap();
    let mut all = Vec::new();
    for _ in 0..12 {
        all.push(Begun::of(&cluster, CHAT, &[], more()).await);
    }
    undrain(&cluster, 2).await;
    cluster.sims[1].set_faults(vec![of_rests(FaultKind::HangBeforeHeaders, 8)]);
    let mut readers = tokio::task::JoinSet::new();
    all.into_iter().for_each(|begun| drop(readers.spawn(begun.all())));
    drain(&cluster, 1).await;
    cluster.until("eight move", |cluster| cluster.faults_fired("hang-before-headers") == 8).await.unwrap();
    tokio::time::sleep(Duration::from_millis(150)).await;
    // I15.6
    assert_eq!(moves(&cluster, 1).await, json!({ "moved": 0, "moving": 8, "failed": 0, "stayed": {} }));
    undrain(&cluster, 1).await;
    while let Some(events) = readers.join_next().await {
        // I15.8: the engine that hangs is left, for the one that they came from
        assert_eq!(normal(&events.unwrap()), undisturbed);
    }
    // I15.7
    assert_eq!(counted(&cluster, "moved").await, 8.0);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i15_a_worker_that_fails_during_a_move_is_left_for_another_one() {
    for kind in [
        FaultKind::Refuse,
        FaultKind::Status { status: 500, retry_after: None },
        FaultKind::Cut { after_tokens: 0 },
        FaultKind::HangAfterHeaders,
    ] {
        let cluster = cluster(Dialect::Vllm, THREE, |config| {
            config.timeouts.head = Duration::from_millis(500);
            config.timeouts.event_idle = Duration::from_millis(500);
        })
        .await;
        let undisturbed = normal(&stream(&cluster, CHAT, long()).await);
        let mut fired = 0;
        for _ in 0..40 {
            let begun = Begun::of(&cluster, CHAT, &[], long()).await;
            let left = only(&cluster);
            let other = &cluster.sims[left as usize % 3];
            other.set_faults(vec![of_rests(kind.clone(), 1)]);
            drain(&cluster, left).await;
            // I15.8
            assert_eq!(normal(&begun.all().await), undisturbed, "{kind:?}");
            undrain(&cluster, left).await;
            fired = other.state().faults_fired.values().sum();
            other.set_faults(Vec::new());
            if fired > 0 {
                break;
            }
        }
        assert!(fired > 0, "no move met {kind:?}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i15_a_rest_that_no_worker_generates_ends_the_stream_with_one_error() {
    let cluster = cluster(Dialect::Vllm, AGGREGATED, no_change).await;
    cluster.admin.post("/workers/2/drain", &[], "").await.unwrap();
    let begun = Begun::of(&cluster, CHAT, &[], long()).await;
    undrain(&cluster, 2).await;
    cluster.sims[1].set_faults(vec![of_rests(FaultKind::Status { status: 500, retry_after: None }, 9)]);
    drain(&cluster, 1).await;
    let events = begun.all().await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    let message = last["error"]["message"].as_str().unwrap();
    // I15.8
    assert!(
        message.contains("output tokens were delivered") && message.contains("its worker drains"),
        "{message}"
    );
    assert_eq!(events.iter().filter(|event| event.contains("\"error\"")).count(), 1);
    let delivered = text_of(&events).len() / 4;
    assert!(message.contains(&format!("{delivered} output tokens")), "{delivered}: {message}");
    assert_eq!(
        (moves(&cluster, 1).await["failed"].clone(), counted(&cluster, "failed").await),
        (json!(1), 1.0)
    );
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i15_a_client_that_does_not_read_holds_up_no_other_stream() {
    let cluster = cluster(Dialect::Vllm, AGGREGATED, |config| {
        config.timeouts.client_write = Duration::from_secs(4);
    })
    .await;
    cluster.admin.post("/workers/2/drain", &[], "").await.unwrap();
    let mut unread = Vec::new();
    for _ in 0..10 {
        let mut stream = connect_small(cluster.gateway.address).await.unwrap();
        let body = body(CHAT, json!({ "max_tokens": 100_000 }));
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).await.unwrap();
        unread.push(stream);
    }
    let relayed = || cluster.gateway.state().metrics.relayed_bytes.get();
    let mut before = 0;
    // Until no byte is relayed to them any more.
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let now = relayed();
        if now > 0 && now == before {
            break;
        }
        before = now;
    }
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..10 {
        readers.spawn(Begun::of(&cluster, CHAT, &[], json!({ "max_tokens": 900 })).await.all());
    }
    undrain(&cluster, 2).await;
    drain(&cluster, 1).await;
    cluster
        .until("the others have moved", |cluster| {
            let snapshot = cluster.gateway.state().registry.snapshot();
            snapshot.get(WorkerId(1)).unwrap().move_counts().unwrap().moved == 10
        })
        .await
        .unwrap();
    // I15.6
    assert_eq!(moves(&cluster, 1).await["moving"], 0);
    while let Some(events) = readers.join_next().await {
        assert_eq!(events.unwrap().last().unwrap(), "[DONE]");
    }
    // Their clients are ended as always, and the worker is empty.
    until_empty(&cluster, 1).await;
    for mut stream in unread {
        until_closed(&mut stream).await;
    }
    cluster.at_rest().await.unwrap();
}

/// Registers an engine.
async fn register(cluster: &TestCluster, id: u64, sim: &SimHandle) {
    let worker = json!({ "url": sim.url(), "role": "aggregated", "engine": "vllm" });
    let reply = cluster.admin.put(&format!("/workers/{id}?ttl=60"), &[], worker.to_string()).await.unwrap();
    assert_eq!(reply.status, 200);
    let eligible = |cluster: &TestCluster| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        snapshot.get(WorkerId(id)).is_some_and(|worker| worker.ineligible().is_none())
    };
    cluster.until("the worker is eligible", eligible).await.unwrap();
}

async fn engine(itl: Duration) -> SimHandle {
    Sim::start(SimConfig { itl, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) }).await.unwrap()
}

#[tokio::test]
async fn p1_streams_of_a_worker_that_discovery_removes_go_on_elsewhere() {
    let cluster = cluster(Dialect::Vllm, &[Role::Aggregated], |config| config.discovery.r#move = true).await;
    let undisturbed = normal(&stream(&cluster, CHAT, long()).await);
    let leased = engine(Duration::from_millis(3)).await;
    register(&cluster, 7, &leased).await;
    cluster.admin.post("/workers/1/drain", &[], "").await.unwrap();
    let begun = Begun::of(&cluster, CHAT, &[], long()).await;
    undrain(&cluster, 1).await;
    cluster.admin.delete("/workers/7").await.unwrap();
    let gone = |cluster: &TestCluster| cluster.gateway.state().registry.snapshot().get(WorkerId(7)).is_none();
    cluster.until("the worker is gone", gone).await.unwrap();
    // P1.5
    assert_eq!((serving(&cluster), leased.state().running), (vec![1], 0));
    assert_eq!(normal(&begun.all().await), undisturbed);
    cluster.at_rest().await.unwrap();
}

/// Number of workers of the rolling upgrade.
const WORKERS: u64 = 20;
/// Streams that run at a time: each of 300 tokens, 20 ms a token.
const CLIENTS: usize = 30;

/// Each of 20 workers is drained and replaced, while 30 clients read streams of 6 s each, one after another.
#[tokio::test]
async fn i15_a_rolling_upgrade_of_20_workers_takes_seconds_and_no_client_notices() {
    let cluster = cluster(Dialect::Vllm, &[Role::Aggregated], no_change).await;
    let itl = Duration::from_millis(20);
    let mut engines = Vec::new();
    for id in 0..WORKERS {
        engines.push(engine(itl).await);
        register(&cluster, 100 + id, &engines[id as usize]).await;
    }
    let more = || json!({ "max_tokens": 300 });
    let undisturbed = normal(&stream(&cluster, CHAT, more()).await);
    cluster.admin.post("/workers/1/drain", &[], "").await.unwrap();
    let stop = tokio_util::sync::CancellationToken::new();
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let (client, stop, undisturbed) = (cluster.client.clone(), stop.clone(), undisturbed.clone());
        readers.spawn(async move {
            let mut served = 0;
            while !stop.is_cancelled() {
                let stream = client.stream(CHAT, &[], body(CHAT, more())).await.unwrap();
                assert_eq!(stream.status, 200);
                assert_eq!(normal(&stream.all().await.unwrap()), undisturbed);
                served += 1;
            }
            served
        });
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (begun, mut slowest, mut replaced) = (Instant::now(), Duration::ZERO, Vec::new());
    for (id, old) in (0..WORKERS).zip(engines) {
        let drained = Instant::now();
        drain(&cluster, 100 + id).await;
        until_empty(&cluster, 100 + id).await;
        slowest = slowest.max(drained.elapsed());
        cluster.admin.delete(&format!("/workers/{}", 100 + id)).await.unwrap();
        old.kill().await;
        let new = engine(itl).await;
        register(&cluster, 200 + id, &new).await;
        replaced.push(new);
    }
    let took = begun.elapsed();
    stop.cancel();
    let mut served = 0;
    while let Some(streams) = readers.join_next().await {
        served += streams.expect("a client was disturbed");
    }
    let moved = counted(&cluster, "moved").await;
    eprintln!(
        "{WORKERS} workers replaced in {took:.1?}, the slowest drain {slowest:.2?}: {moved} streams moved"
    );
    // I15.1, I15.5
    assert!(moved >= WORKERS as f64 && served >= CLIENTS, "{moved} moved, {served} served");
    assert_eq!((counted(&cluster, "failed").await, failed_legs(&cluster).await), (0.0, 0.0));
    cluster.at_rest().await.unwrap();
    // Each stream takes 6 s: waiting for their ends would take two minutes.
    assert!(took < Duration::from_secs(60), "{took:?}");
}
