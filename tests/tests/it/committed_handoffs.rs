//! Prefill runs only for a request that decode will take, and its result is consumed whatever happens (E6).

use std::time::Duration;

use pointsman_gateway::config::{Config, LegOrder};
use pointsman_routing::{BusyByLeg, BusyThresholds};
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder, client::Reply};
use pointsman_workers::{Leg, WorkerId};
use serde_json::{Value, json};
use tokio::{task::JoinSet, time::Instant};

const MS: Duration = Duration::from_millis(1);
const ORDERS: [LegOrder; 2] = [LegOrder::PrefillFirst, LegOrder::DecodeFirst];

fn body(word: &str, more: &Value) -> String {
    let mut body = json!({
        "model": "tiny", "max_tokens": 3, "ignore_eos": true, "prompt": format!("{word} ").repeat(200),
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

async fn ask(cluster: &TestCluster, headers: &[(&str, &str)], word: &str) -> Reply {
    cluster.client.post(COMPLETIONS, headers, body(word, &json!({}))).await.unwrap()
}

fn told(reply: &Reply) -> (u16, String) {
    (reply.status.as_u16(), reply.code())
}

/// An engine whose prefill takes this long.
fn slow(dialect: Dialect, took: Duration) -> SimConfig {
    SimConfig { overhead: took, ..SimConfig::instant(dialect, Role::Prefill) }
}

fn decode(dialect: Dialect, itl: Duration) -> SimConfig {
    SimConfig { itl, ..SimConfig::instant(dialect, Role::Decode) }
}

/// Requests that engines in these places took.
fn taken(cluster: &TestCluster, places: std::ops::Range<usize>) -> u64 {
    cluster.sims[places].iter().map(|sim| sim.state().requests.values().sum::<u64>()).sum()
}

fn pulled(cluster: &TestCluster, place: usize) -> u64 {
    cluster.sims[place].state().handoffs.pulled
}

/// Waits until nothing is booked or reserved, and no engine holds the blocks of a handoff.
async fn nothing_is_left(cluster: &TestCluster) {
    cluster.at_rest().await.unwrap();
    let held = |cluster: &TestCluster| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        let reserved: u32 = snapshot.workers().iter().map(|worker| worker.reserved()).sum();
        let pinned: u32 = cluster.sims.iter().map(|sim| sim.state().pinned_blocks).sum();
        (reserved, pinned)
    };
    let free = cluster.until("no place and no block is held", |cluster| held(cluster) == (0, 0)).await;
    assert!(free.is_ok(), "(reserved, pinned) = {:?}", held(cluster));
    assert_eq!(cluster.sims.iter().map(|sim| sim.state().stranded).sum::<u64>(), 0);
}

#[tokio::test]
async fn e6_a_full_decode_pool_refuses_requests_before_their_prefill() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        for order in ORDERS {
            let cluster = TestClusterBuilder::new()
                .config(|config| config.routing.order = order)
                .sim_with(slow(dialect, 20 * MS), "")
                .sim_with(decode(dialect, 20 * MS), ",max_concurrency=2")
                .start()
                .await;
            let mut clients = JoinSet::new();
            for turn in 0..12 {
                let client = cluster.client.clone();
                let body = body(&format!("question{turn}"), &json!({}));
                clients.spawn(async move { client.post(COMPLETIONS, &[], body).await.unwrap() });
            }
            let replies = clients.join_all().await;
            let served = replies.iter().filter(|reply| reply.status == 200).count();
            let refused = replies.iter().filter(|reply| told(reply) == (529, "overloaded".into())).count();
            assert!(served >= 2 && refused > 0 && served + refused == 12, "{served} {refused} {replies:?}");
            // E6.1, E6.2
            assert_eq!(taken(&cluster, 0..1), served as u64, "{dialect:?} {order:?}");
            nothing_is_left(&cluster).await;
        }
    }
}

#[tokio::test]
async fn e6_requests_wait_in_the_queue_for_a_place_of_decode_before_their_prefill() {
    for order in ORDERS {
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                config.routing.order = order;
                config.queue.limit = 100;
            })
            .sim_with(slow(Dialect::Vllm, 20 * MS), "")
            .sim_with(decode(Dialect::Vllm, 10 * MS), ",max_concurrency=2")
            .start()
            .await;
        let mut clients = JoinSet::new();
        for turn in 0..16 {
            let client = cluster.client.clone();
            let body = body(&format!("question{turn}"), &json!({}));
            clients.spawn(async move { client.post(COMPLETIONS, &[], body).await.unwrap().status });
        }
        // E6.2
        assert!(clients.join_all().await.iter().all(|status| *status == 200), "{order:?}");
        nothing_is_left(&cluster).await;
    }
}

#[tokio::test]
async fn e6_a_decode_worker_that_does_not_exist_is_refused_before_prefill() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        for order in ORDERS {
            let cluster = TestClusterBuilder::new()
                .config(|config| config.routing.order = order)
                .sim(dialect, Role::Prefill)
                .sim(dialect, Role::Decode)
                .sim(dialect, Role::Decode)
                .start()
                .await;
            let unknown = ask(&cluster, &[("x-worker-instance-id", "99")], "a").await;
            assert_eq!(told(&unknown), (404, "worker_not_found".into()));
            let prefill = ask(&cluster, &[("x-worker-instance-id", "1")], "a").await;
            assert_eq!(told(&prefill), (409, "worker_not_eligible".into()));
            cluster.admin.post("/workers/2/drain", &[], "").await.unwrap();
            let draining = ask(&cluster, &[("x-worker-instance-id", "2")], "a").await;
            assert_eq!(told(&draining), (409, "worker_not_eligible".into()));
            // E6.3
            assert_eq!(taken(&cluster, 0..3), 0, "{dialect:?} {order:?}");
            nothing_is_left(&cluster).await;
        }
    }
}

#[tokio::test]
async fn e6_only_prefill_workers_that_may_transfer_to_the_pinned_decode_worker_are_chosen() {
    let rack = |rack: &str| format!(",topology.rack={rack},kv_transfer=required:rack");
    for order in ORDERS {
        let cluster = TestClusterBuilder::new()
            .config(|config| config.routing.order = order)
            .sim_with(SimConfig::instant(Dialect::Vllm, Role::Prefill), &rack("r1"))
            .sim_with(SimConfig::instant(Dialect::Vllm, Role::Prefill), &rack("r2"))
            .sim_with(decode(Dialect::Vllm, Duration::ZERO), ",topology.rack=r1")
            .sim_with(decode(Dialect::Vllm, Duration::ZERO), ",topology.rack=r2")
            .sim_with(decode(Dialect::Vllm, Duration::ZERO), "")
            .start()
            .await;
        for turn in 0..12 {
            let pin = [("x-worker-instance-id", if turn % 2 == 0 { "3" } else { "4" })];
            let reply = ask(&cluster, &pin, &format!("question{turn}")).await;
            // E6.4
            assert_eq!(reply.status, 200, "{order:?} {reply:?}");
        }
        assert_eq!((taken(&cluster, 0..1), taken(&cluster, 1..2)), (6, 6));
        for turn in 0..6 {
            let pin = [("x-prefill-instance-id", "2")];
            let reply = ask(&cluster, &pin, &format!("other{turn}")).await;
            assert_eq!(reply.status, 200, "{order:?} {reply:?}");
        }
        assert_eq!((taken(&cluster, 1..2), taken(&cluster, 3..4)), (12, 12));
        let outside = ask(&cluster, &[("x-worker-instance-id", "5")], "a").await;
        assert_eq!(told(&outside), (409, "worker_not_eligible".into()), "{outside:?}");
        assert_eq!(taken(&cluster, 0..2), 18, "a prefill ran in vain");
        nothing_is_left(&cluster).await;
    }
}

/// A cluster whose prefill takes 3 s, with a request on its way.
async fn in_prefill(
    config: impl FnOnce(&mut Config),
    decode_workers: &[&str],
    headers: &'static [(&str, &str)],
    more: Value,
) -> (TestCluster, tokio::task::JoinHandle<Reply>) {
    let mut builder = TestClusterBuilder::new().config(config).sim_with(slow(Dialect::Vllm, 3_000 * MS), "");
    for flag in decode_workers {
        builder = builder.sim_with(decode(Dialect::Vllm, Duration::ZERO), flag);
    }
    let cluster = builder.start().await;
    let client = cluster.client.clone();
    let tasks = tokio_util::task::TaskTracker::new();
    let request =
        tasks.spawn(async move { client.post(COMPLETIONS, headers, body("a", &more)).await.unwrap() });
    cluster.until("prefill runs", |cluster| cluster.sims[0].state().running == 1).await.unwrap();
    (cluster, request)
}

#[tokio::test]
async fn e6_a_decode_pool_that_drains_while_prefill_runs_takes_the_handoff() {
    let (cluster, request) = in_prefill(|_| {}, &[""], &[], json!({})).await;
    cluster.admin.post("/workers/2/drain", &[], "").await.unwrap();
    let reply = request.await.unwrap();
    // E6.5
    assert_eq!((reply.status.as_u16(), pulled(&cluster, 1)), (200, 1), "{reply:?}");
    nothing_is_left(&cluster).await;
}

#[tokio::test]
async fn e6_the_handoff_of_a_pinned_decode_worker_that_dies_is_consumed_by_another_one() {
    let pin = &[("x-worker-instance-id", "2")];
    let (mut cluster, request) =
        in_prefill(|config| config.routing.retries = 0, &["", ""], pin, json!({})).await;
    cluster.sims.remove(1).kill().await;
    let reply = request.await.unwrap();
    assert!(!reply.status.is_success(), "{reply:?}");
    // E6.6
    cluster.until("the other worker consumed it", |cluster| pulled(cluster, 1) == 1).await.unwrap();
    nothing_is_left(&cluster).await;
    assert_eq!(cluster.handoffs("lost_no_decode_worker").await.unwrap(), 0.0);
}

#[tokio::test]
async fn e6_a_handoff_without_a_live_decode_worker_is_counted_with_an_error_of_its_own() {
    let (mut cluster, request) = in_prefill(|config| config.routing.retries = 0, &[""], &[], json!({})).await;
    cluster.sims.remove(1).kill().await;
    let reply = request.await.unwrap();
    // E6.7, I_handoff_lost
    assert_eq!(told(&reply), (503, "handoff_lost".into()), "{reply:?}");
    cluster.at_rest().await.unwrap();
    assert_eq!(cluster.handoffs("lost_no_decode_worker").await.unwrap(), 1.0);
}

#[tokio::test]
async fn e6_busy_decode_workers_hold_a_handoff_up_for_a_quarter_of_its_lease() {
    let share = BusyThresholds { kv_usage: Some(0.02), ..BusyThresholds::default() };
    let decode = SimConfig { blocks: 400, ..decode(Dialect::Vllm, 100 * MS) };
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.routing.busy = BusyByLeg::from([(Leg::Decode, share)]);
            config.probe.load_interval = 50 * MS;
        })
        .sim_with(slow(Dialect::Vllm, 200 * MS), "")
        .sim_with(slow(Dialect::Vllm, 1_000 * MS), ",handoff_lease_s=4")
        .sim_with(decode, "")
        .start()
        .await;
    let long = |word: &str| body(word, &json!({"stream": true, "max_tokens": 400}));
    let ask = async |prefill: &str, word: &str| {
        let pin = [("x-prefill-instance-id", prefill)];
        let mut stream = cluster.client.stream(COMPLETIONS, &pin, long(word)).await.unwrap();
        assert_eq!(stream.status, 200);
        stream.next().await.unwrap().unwrap();
        (stream, Instant::now())
    };
    // Both are admitted by an idle decode worker, which the first one makes busy.
    let ((one, first), (two, second)) = tokio::join!(ask("1", "one"), ask("2", "two"));
    let waited = second - first;
    // E6.5: a quarter of the lease after its prefill, and not at the end of the first one, in 40 s
    assert!(waited > 1_200 * MS && waited < 20_000 * MS, "{waited:?}");
    drop((one, two));
    nothing_is_left(&cluster).await;
}

#[tokio::test]
async fn e6_a_handoff_whose_prefill_engine_died_is_counted_with_an_error_of_its_own() {
    let share = BusyThresholds { kv_usage: Some(0.02), ..BusyThresholds::default() };
    let decode = SimConfig { blocks: 400, ..decode(Dialect::Vllm, 100 * MS) };
    let mut cluster = TestClusterBuilder::new()
        .config(|config| {
            config.routing.busy = BusyByLeg::from([(Leg::Decode, share)]);
            (config.routing.retries, config.probe.load_interval) = (0, 50 * MS);
        })
        .sim_with(slow(Dialect::Vllm, 200 * MS), "")
        // Long enough that the gateway knows of the busy decode worker before this prefill ends.
        .sim_with(slow(Dialect::Vllm, 6_000 * MS), ",handoff_lease_s=600")
        .sim_with(decode, "")
        .start()
        .await;
    let pinned = |prefill: &'static str| [("x-prefill-instance-id", prefill)];
    let client = cluster.client.clone();
    let long = body("question1", &json!({"max_tokens": 900, "stream": true}));
    let tasks = tokio_util::task::TaskTracker::new();
    let second = tasks.spawn(async move {
        client.post(COMPLETIONS, &pinned("2"), body("question2", &json!({}))).await.unwrap()
    });
    let mut first = cluster.client.stream(COMPLETIONS, &pinned("1"), long).await.unwrap();
    first.next().await.unwrap().unwrap();
    // The handoff waits: the first request made the decode worker busy.
    let waits = |cluster: &TestCluster| cluster.sims[1].state().pinned_blocks > 0;
    cluster.until("the second handoff exists", waits).await.unwrap();
    cluster.sims.remove(1).kill().await;
    let reply = second.await.unwrap();
    // E6.7
    assert_eq!(told(&reply), (503, "handoff_lost".into()), "{reply:?}");
    drop(first);
    cluster.at_rest().await.unwrap();
    assert_eq!(cluster.handoffs("lost_prefill_died").await.unwrap(), 1.0);
    assert_eq!(cluster.handoffs("lost_no_decode_worker").await.unwrap(), 0.0);
}

#[tokio::test]
async fn e6_a_request_that_decode_refuses_does_not_hold_blocks() {
    for stream in [false, true] {
        let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 2).await.unwrap();
        let refuses = Fault::always(FaultKind::Status { status: 400, retry_after: None });
        for sim in &cluster.sims[1..] {
            sim.set_faults(vec![Fault { times: Some(1), ..refuses.clone() }]);
        }
        let body = body("a", &json!({"stream": stream}));
        let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
        assert_eq!(reply.status, 400, "{reply:?}");
        cluster
            .until("the handoff is consumed", |cluster| pulled(cluster, 1) + pulled(cluster, 2) == 1)
            .await
            .unwrap();
        // E6.6
        nothing_is_left(&cluster).await;
    }
}

#[tokio::test]
async fn e6_a_decode_engine_that_refuses_even_one_token_leaves_the_handoff_to_another_one() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 2).await.unwrap();
    let refuses = Fault::always(FaultKind::Status { status: 400, retry_after: None });
    cluster.sims[1].set_faults(vec![refuses]);
    for turn in 1..=4 {
        let pin = [("x-worker-instance-id", "2")];
        let reply = ask(&cluster, &pin, &format!("question{turn}")).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        // E6.6
        let consumed = cluster.until("it is consumed", |cluster| pulled(cluster, 2) == turn).await;
        consumed.unwrap();
    }
    nothing_is_left(&cluster).await;
    assert_eq!(cluster.handoffs("lost_no_decode_worker").await.unwrap(), 0.0);
}

#[tokio::test]
async fn e6_a_decode_engine_that_refuses_even_one_token_is_asked_for_it_once() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    cluster.sims[1].set_faults(vec![Fault::always(FaultKind::Status { status: 400, retry_after: None })]);
    let before = taken(&cluster, 1..2);
    assert_eq!(ask(&cluster, &[], "a").await.status, 400);
    cluster.at_rest().await.unwrap();
    // E6.6, E6.7: once with the client's body, and once for one token
    assert_eq!(
        (taken(&cluster, 1..2) - before, cluster.handoffs("lost_no_decode_worker").await.unwrap()),
        (2, 1.0)
    );
}

#[tokio::test]
async fn e5_a_decode_engine_that_has_too_much_to_do_leaves_the_handoff_to_another_one() {
    for status in [503, 429] {
        let cluster = TestClusterBuilder::new()
            .config(|config| config.routing.retries = 0)
            .pair(Dialect::Vllm)
            .sim(Dialect::Vllm, Role::Decode)
            .start()
            .await;
        let busy = Fault::always(FaultKind::Status { status, retry_after: None });
        cluster.sims[1].set_faults(vec![busy]);
        for turn in 0..6 {
            let reply = ask(&cluster, &[], &format!("question{turn}")).await;
            // E5.2
            assert_eq!(reply.status, 200, "{status}: {reply:?}");
        }
        assert_eq!((taken(&cluster, 0..1), pulled(&cluster, 2)), (6, 6), "{status}");
        nothing_is_left(&cluster).await;
    }
}

#[tokio::test]
async fn e4_the_deadline_lets_a_prefill_end_and_its_handoff_be_consumed() {
    for stream in [false, true] {
        let short = |config: &mut Config| config.timeouts.request = 1_000 * MS;
        let (cluster, early) = in_prefill(short, &[""], &[], json!({"stream": stream})).await;
        // E4.2
        assert_eq!(told(&early.await.unwrap()), (504, "deadline".into()), "{stream}");
        cluster.until("the handoff is consumed", |cluster| pulled(cluster, 1) == 1).await.unwrap();
        nothing_is_left(&cluster).await;
        let ended = cluster.metric("pointsman_legs_total{leg=\"prefill\",engine=\"vllm\",outcome=\"ok\"}");
        assert_eq!(ended.await.unwrap(), [1.0]);
    }
}

#[tokio::test]
async fn e4_a_stream_ends_at_its_deadline_although_its_decode_leg_goes_on() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.timeouts.request = 1_000 * MS)
        .sim_with(slow(Dialect::Vllm, Duration::ZERO), ",handoff_lease_s=5")
        .sim(Dialect::Vllm, Role::Decode)
        .start()
        .await;
    cluster.sims[1].set_faults(vec![Fault::always(FaultKind::HangAfterHeaders)]);
    let started = Instant::now();
    let body = body("a", &json!({"stream": true}));
    let events = cluster.client.stream(COMPLETIONS, &[], body).await.unwrap().all().await.unwrap();
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    // E4.2: the client does not wait for what the engines need
    assert!((&last["error"]["code"], events.len()) == (&json!("deadline"), 1), "{events:?}");
    assert_eq!(cluster.booked(), 1, "the leg goes on behind the answer");
    cluster.at_rest().await.unwrap();
    // E4.3
    assert!(started.elapsed() >= 5_000 * MS, "{:?}", started.elapsed());
}

#[tokio::test]
async fn e4_the_deadline_closes_a_prefill_that_may_be_cancelled() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.timeouts.request = 1_000 * MS)
        .sim_with(slow(Dialect::Vllm, 20_000 * MS), ",prefill_cancellable=true")
        .sim(Dialect::Vllm, Role::Decode)
        .start()
        .await;
    let started = Instant::now();
    assert_eq!(told(&ask(&cluster, &[], "a").await), (504, "deadline".into()));
    nothing_is_left(&cluster).await;
    // E4.1
    assert!(started.elapsed() < 10_000 * MS, "{:?}", started.elapsed());
}

#[tokio::test]
async fn e6_a_client_that_leaves_while_decode_is_full_holds_no_place() {
    let cluster = TestClusterBuilder::new()
        .sim_with(slow(Dialect::Vllm, 200 * MS), "")
        .sim_with(decode(Dialect::Vllm, Duration::ZERO), ",max_concurrency=1")
        .start()
        .await;
    let worker = cluster.gateway.state().registry.snapshot().get(WorkerId(2)).unwrap().clone();
    let client = cluster.client.clone();
    let tasks = tokio_util::task::TaskTracker::new();
    let leaving = tasks.spawn(async move { client.post(COMPLETIONS, &[], body("a", &json!({}))).await });
    // E6.2: while prefill runs
    assert!(cluster.until("a place is reserved", |_| worker.reserved() == 1).await.is_ok());
    leaving.abort();
    nothing_is_left(&cluster).await;
    assert_eq!((worker.reserved(), ask(&cluster, &[], "b").await.status.as_u16()), (0, 200));
}

/// Requests and open handoffs of the prefill worker.
fn work_of_prefill(cluster: &TestCluster) -> (u32, u32) {
    let snapshot = cluster.gateway.state().registry.snapshot();
    let worker = snapshot.get(WorkerId(1)).unwrap();
    (worker.own_requests(), worker.open_handoffs())
}

#[tokio::test]
async fn e6_a_prefill_worker_is_not_idle_while_decode_has_to_pull_its_blocks() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        // Decode takes 4 s to pull, and 10 s to answer.
        let pulls = |config| SimConfig { transfer_per_token: 20 * MS, ..config };
        let cluster = TestClusterBuilder::new()
            .sim_with(pulls(slow(dialect, 300 * MS)), "")
            .sim_with(pulls(decode(dialect, 100 * MS)), "")
            .start()
            .await;
        for leaves in [false, true] {
            let (client, tasks) = (cluster.client.clone(), tokio_util::task::TaskTracker::new());
            let body = body(if leaves { "b" } else { "a" }, &json!({ "max_tokens": 100, "stream": true }));
            let request = tasks.spawn(async move {
                let stream = client.stream(COMPLETIONS, &[], body).await.unwrap();
                stream.all().await
            });
            cluster.until("prefill runs", |cluster| work_of_prefill(cluster).0 == 1).await.unwrap();
            let is_pulling = |cluster: &TestCluster| cluster.sims[0].state().pinned_blocks > 0;
            cluster.until("decode pulls", is_pulling).await.unwrap();
            if dialect == Dialect::Vllm {
                cluster.until("prefill ended", |cluster| work_of_prefill(cluster) == (0, 1)).await.unwrap();
                let shown = cluster.admin.get("/workers/1").await.unwrap().json().unwrap();
                // E6.14: what a drain waits for
                assert_eq!(shown["worker"]["open_handoffs"], 1);
            }
            if leaves {
                request.abort();
            }
            let is_idle = |cluster: &TestCluster| work_of_prefill(cluster) == (0, 0);
            cluster.until("the prefill worker is idle", is_idle).await.unwrap();
            // E6.14: a client that leaves changes nothing, except that SGLang aborts both legs
            if dialect == Dialect::Vllm || !leaves {
                assert_eq!(cluster.sims[0].state().pinned_blocks, 0, "{dialect:?} {leaves}");
            }
            if !leaves {
                // E6.14: the answer goes on
                assert_eq!(cluster.booked(), 1, "{dialect:?}");
                request.abort();
            }
            nothing_is_left(&cluster).await;
        }
    }
}

#[tokio::test]
async fn e6_an_open_handoff_ends_with_the_request_that_lost_it() {
    let mut cluster = TestClusterBuilder::new()
        .config(|config| config.routing.retries = 0)
        .sim_with(slow(Dialect::Vllm, Duration::ZERO), "")
        .sim_with(SimConfig { transfer_per_token: 1_000 * MS, ..decode(Dialect::Vllm, Duration::ZERO) }, "")
        .start()
        .await;
    let (client, tasks) = (cluster.client.clone(), tokio_util::task::TaskTracker::new());
    let request =
        tasks.spawn(async move { client.post(COMPLETIONS, &[], body("a", &json!({}))).await.unwrap() });
    cluster.until("decode pulls", |cluster| work_of_prefill(cluster) == (0, 1)).await.unwrap();
    cluster.sims.remove(1).kill().await;
    assert!(!request.await.unwrap().status.is_success());
    // E6.14
    cluster.until("it is given up", |cluster| work_of_prefill(cluster) == (0, 0)).await.unwrap();
}
