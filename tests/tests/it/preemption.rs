//! L5: with `queue.preempt`, a running stream of the lowest class pauses while a request of a higher one
//! waits.

use std::time::Duration;

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{CHAT, COMPLETIONS, TestCluster, TestClusterBuilder, client::Stream};
use serde_json::{Value, json};
use tokio::{task::JoinSet, time::Instant};

use crate::continuation::{body, normal, stream};

const HIGH: &[(&str, &str)] = &[("x-dynamo-request-strict-priority", "3")];
const LOW: &[(&str, &str)] = &[];
/// The time within which a request of a high class gets its first token. The other stream runs for longer.
const SOON: Duration = Duration::from_secs(2);
const ONE: &[Role] = &[Role::Aggregated];
const TWO: &[Role] = &[Role::Aggregated, Role::Aggregated];
const PAIR: &[Role] = &[Role::Prefill, Role::Decode];

fn tokens(count: u32) -> Value {
    json!({ "max_tokens": count })
}

/// A cluster whose answering workers serve `at_once` requests at a time, and whose queue preempts.
async fn full(
    dialect: Dialect,
    roles: &[Role],
    at_once: usize,
    change: impl FnOnce(&mut Config),
) -> TestCluster {
    let sim = |role| SimConfig { itl: Duration::from_millis(3), ..SimConfig::instant(dialect, role) };
    let builder = TestClusterBuilder::new().config(|config| {
        (config.queue.limit, config.queue.preempt) = (100, true);
        change(config);
    });
    let bound = format!(",max_concurrency={at_once}");
    let builder = roles.iter().fold(builder, |builder, role| match role {
        Role::Prefill => builder.sim_with(sim(*role), ""),
        _ => builder.sim_with(sim(*role), &bound),
    });
    builder.start().await
}

/// A stream whose first events arrived, and how long the first one took.
struct Begun(Stream, Vec<String>, Duration);

impl Begun {
    async fn of(cluster: &TestCluster, path: &str, headers: &[(&str, &str)], more: Value) -> Self {
        let asked = Instant::now();
        let mut stream = cluster.client.stream(path, headers, body(path, more)).await.unwrap();
        assert_eq!(stream.status, 200);
        let mut events = vec![stream.next().await.unwrap().unwrap()];
        let took = asked.elapsed();
        for _ in 0..4 {
            events.push(stream.next().await.unwrap().unwrap());
        }
        Self(stream, events, took)
    }

    async fn all(self) -> Vec<String> {
        let Self(stream, mut events, _) = self;
        let rest = tokio::time::timeout(Duration::from_secs(60), stream.all()).await;
        events.extend(rest.expect("the stream hung").unwrap());
        events
    }
}

/// The events that are not keep-alives.
fn without_comments(events: Vec<String>) -> Vec<String> {
    events.into_iter().filter(|event| event != " ").collect()
}

fn paused(cluster: &TestCluster) -> usize {
    cluster.gateway.state().queue.paused()
}

fn waiting(cluster: &TestCluster) -> usize {
    cluster.gateway.state().queue.waiting()
}

async fn counted(cluster: &TestCluster, reason: &str) -> f64 {
    let start = format!("pointsman_continuations_total{{reason=\"{reason}\",cause=\"preempt\"}}");
    cluster.metric(&start).await.unwrap().iter().sum()
}

async fn until_nothing_is_left(cluster: &TestCluster) {
    let is_empty = |cluster: &TestCluster| {
        (paused(cluster), waiting(cluster), cluster.gateway.state().queue.inflight()) == (0, 0, 0)
    };
    cluster.until("the queue is empty", is_empty).await.unwrap();
    let is_free = |cluster: &TestCluster| cluster.sims.iter().all(|sim| sim.state().running == 0);
    cluster.until("all engines are free", is_free).await.unwrap();
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn l5_a_request_of_a_higher_class_is_served_at_once_and_the_paused_stream_misses_nothing() {
    for (dialect, roles, path, in_flight) in [
        (Dialect::Vllm, ONE, CHAT, 0),
        (Dialect::Vllm, ONE, COMPLETIONS, 1),
        (Dialect::Vllm, PAIR, CHAT, 0),
        (Dialect::Vllm, PAIR, COMPLETIONS, 1),
        (Dialect::Sglang, ONE, CHAT, 0),
        (Dialect::Sglang, PAIR, CHAT, 0),
        (Dialect::Sglang, PAIR, COMPLETIONS, 1),
    ] {
        let cluster = full(dialect, roles, if in_flight == 0 { 1 } else { 100 }, |config| {
            config.queue.max_inflight = in_flight;
            config.queue.timeout = Duration::from_secs(1);
            config.timeouts.stream_comment = Duration::from_millis(500);
            config.timeouts.booking = Duration::from_secs(1);
        })
        .await;
        let undisturbed = normal(&without_comments(stream(&cluster, path, tokens(1_000)).await));
        let low = Begun::of(&cluster, path, LOW, tokens(1_000)).await;
        let high = Begun::of(&cluster, CHAT, HIGH, tokens(1_000)).await;
        // L5.1
        assert!(high.2 < SOON, "{dialect:?} {roles:?}: {:?}", high.2);
        assert_eq!(paused(&cluster), 1);
        // L5.5: only the other request is booked, by the leg that answers
        cluster.until("the rest books nothing", |cluster| cluster.booked() == 1).await.unwrap();
        let begun = Instant::now();
        assert_eq!(high.all().await.last().unwrap(), "[DONE]");
        // L5.5: the rest waits for longer than the queue's timeout
        assert!(begun.elapsed() > Duration::from_secs(1), "{:?}", begun.elapsed());
        let (comments, events): (Vec<String>, Vec<String>) =
            low.all().await.into_iter().partition(|event| event == " ");
        // L5.2
        assert_eq!(normal(&events), undisturbed, "{dialect:?} {roles:?} {path}");
        assert!(!comments.is_empty());
        until_nothing_is_left(&cluster).await;
        // L5.6
        assert_eq!(counted(&cluster, "continued").await, 1.0);
        // F4.9: the rest is booked again
        assert_eq!(cluster.metric("pointsman_expired_bookings_total").await.unwrap(), [0.0]);
        let listed = cluster.admin.get("/decisions").await.unwrap().json().unwrap();
        let decisions = listed["decisions"].as_array().unwrap();
        let flags = |key: &str| decisions.iter().filter(|one| one["outcome"][key] == json!(true)).count();
        // L5.6
        assert_eq!((flags("moved"), flags("retried")), (1, 0), "{listed}");
        let left = &decisions.iter().find(|one| one["outcome"]["moved"] == json!(true)).unwrap()["outcome"];
        let number = |key: &str| left[key].as_f64().unwrap();
        // L5.6: the pause of more than a second is not between tokens
        assert!(number("itl_ms") * number("output_tokens") + 1e3 < number("duration_ms"), "{left}");
        let failed = cluster.metric("pointsman_continuations_total{reason=\"continued\",cause=\"failure\"}");
        assert!(failed.await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn l5_no_stream_pauses_by_default_for_its_own_class_or_if_it_cannot_be_continued() {
    let clamped: Config = toml::from_str("[tenants.'*']\nmax_priority = 0.0").unwrap();
    let some = json!({ "nvext": { "allowed_worker_ids": [1] } });
    for (preempt, max_priority, headers, more_of_high, more) in [
        (false, false, HIGH, json!({}), json!({})),
        (true, false, LOW, json!({}), json!({})),
        // Only some workers may serve it.
        (true, false, HIGH, some, json!({})),
        // Its tenant may not raise the priority (L3.7).
        (true, true, HIGH, json!({}), json!({})),
        (true, false, HIGH, json!({}), json!({ "frequency_penalty": 0.5 })),
        (true, false, HIGH, json!({}), json!({ "seed": 7, "temperature": 0.5 })),
    ] {
        let cluster = full(Dialect::Vllm, ONE, 1, |config| {
            config.queue.preempt = preempt;
            if max_priority {
                config.tenants.clone_from(&clamped.tenants);
            }
        })
        .await;
        let mut more = more;
        more["max_tokens"] = json!(500);
        let undisturbed = normal(&stream(&cluster, CHAT, more.clone()).await);
        let low = Begun::of(&cluster, CHAT, LOW, more.clone()).await;
        let high = Begun::of(&cluster, CHAT, headers, more_of_high.clone());
        let (low, high) = tokio::join!(low.all(), high);
        // L5.1, L5.3
        assert!(high.2 > Duration::from_secs(1), "{preempt} {more_of_high} {more}: {:?}", high.2);
        assert_eq!(normal(&low), undisturbed);
        high.all().await;
        let all = cluster.metric("pointsman_continuations_total{").await.unwrap();
        assert!(all.is_empty(), "{all:?}");
        until_nothing_is_left(&cluster).await;
    }
}

#[tokio::test]
async fn l5_a_flood_of_a_higher_class_pauses_at_most_a_quarter_of_the_streams() {
    let cluster = full(Dialect::Vllm, ONE, 8, |_| {}).await;
    let undisturbed = normal(&stream(&cluster, CHAT, tokens(1_500)).await);
    let mut lows = Vec::new();
    for _ in 0..8 {
        lows.push(Begun::of(&cluster, CHAT, LOW, tokens(1_500)).await);
    }
    let (mut readers, mut highs) = (JoinSet::new(), JoinSet::new());
    lows.into_iter().for_each(|low| drop(readers.spawn(low.all())));
    for _ in 0..24 {
        let client = cluster.client.clone();
        highs.spawn(async move {
            let stream = client.stream(CHAT, HIGH, body(CHAT, tokens(200))).await.unwrap();
            stream.all().await.unwrap()
        });
    }
    let mut most = 0;
    while !highs.is_empty() {
        most = most.max(paused(&cluster));
        if let Ok(Some(events)) = tokio::time::timeout(Duration::from_millis(1), highs.join_next()).await {
            assert_eq!(events.unwrap().last().unwrap(), "[DONE]");
        }
    }
    // L5.4
    assert_eq!(most, 2);
    while let Some(events) = readers.join_next().await {
        // L5.2
        assert_eq!(normal(&without_comments(events.unwrap())), undisturbed);
    }
    until_nothing_is_left(&cluster).await;
}

#[tokio::test]
async fn l5_a_stream_pauses_twice_at_most_and_the_newest_one_first() {
    let cluster = full(Dialect::Vllm, ONE, 2, |_| {}).await;
    let undisturbed = normal(&stream(&cluster, CHAT, tokens(4_000)).await);
    let old = Begun::of(&cluster, CHAT, LOW, tokens(4_000)).await;
    // A stream whose client does not read would be held back.
    let old = tokio_util::task::TaskTracker::new().spawn(old.all());
    let mut newest = Begun::of(&cluster, CHAT, LOW, tokens(4_000)).await;
    for round in 1..=2 {
        let high = Begun::of(&cluster, CHAT, HIGH, tokens(400)).await;
        assert_eq!(paused(&cluster), 1);
        high.all().await;
        // L5.3: events of it arrived only before the pause and after it
        for _ in 0..300 {
            newest.1.push(newest.0.next().await.unwrap().unwrap());
        }
        assert_eq!((paused(&cluster), counted(&cluster, "continued").await), (0, f64::from(round)));
    }
    let high = Begun::of(&cluster, CHAT, HIGH, tokens(1_000)).await;
    for _ in 0..60 {
        newest.1.push(newest.0.next().await.unwrap().unwrap());
    }
    // L5.4: now the other one makes room
    assert_eq!(paused(&cluster), 1);
    high.all().await;
    let (old, newest) = (old.await.unwrap(), newest.all().await);
    assert_eq!((normal(&old), normal(&newest)), (undisturbed.clone(), undisturbed));
    assert_eq!((counted(&cluster, "continued").await, counted(&cluster, "paused_twice").await), (3.0, 1.0));
    until_nothing_is_left(&cluster).await;
}

#[tokio::test]
async fn l5_nothing_stays_of_a_paused_stream_whose_client_leaves() {
    for (dialect, roles) in [(Dialect::Vllm, ONE), (Dialect::Vllm, PAIR), (Dialect::Sglang, PAIR)] {
        let cluster = full(dialect, roles, 1, |_| {}).await;
        let low = Begun::of(&cluster, CHAT, LOW, tokens(3_000)).await;
        let high = Begun::of(&cluster, CHAT, HIGH, tokens(600)).await;
        assert_eq!(paused(&cluster), 1);
        drop(low);
        let is_gone = |cluster: &TestCluster| (paused(cluster), waiting(cluster)) == (0, 0);
        // L5.7
        cluster.until("its place is free", is_gone).await.unwrap();
        assert_eq!(high.all().await.last().unwrap(), "[DONE]");
        until_nothing_is_left(&cluster).await;
    }
}

#[tokio::test]
async fn l5_the_deadline_of_a_paused_stream_ends_it_with_one_error() {
    let cluster = full(Dialect::Vllm, PAIR, 1, |config| {
        config.timeouts.request = Duration::from_secs(3);
    })
    .await;
    let low = Begun::of(&cluster, CHAT, LOW, tokens(100_000)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let high = Begun::of(&cluster, CHAT, HIGH, tokens(100_000)).await;
    assert_eq!(paused(&cluster), 1);
    let events = low.all().await;
    let errors: Vec<&String> = events.iter().filter(|event| event.contains("\"error\"")).collect();
    assert_eq!(errors.len(), 1, "{errors:?}");
    // L5.5
    assert!(
        errors[0].contains("deadline") && errors[0].contains("output tokens were delivered"),
        "{errors:?}"
    );
    assert_eq!((paused(&cluster), counted(&cluster, "failed").await), (0, 1.0));
    drop(high);
    until_nothing_is_left(&cluster).await;
}

#[tokio::test]
async fn l5_a_paused_stream_takes_no_place_in_the_queue_from_others() {
    let cluster = full(Dialect::Vllm, ONE, 1, |config| config.queue.limit = 1).await;
    let undisturbed = normal(&stream(&cluster, CHAT, tokens(1_000)).await);
    let low = Begun::of(&cluster, CHAT, LOW, tokens(1_000)).await;
    let high = Begun::of(&cluster, CHAT, HIGH, tokens(600)).await;
    assert_eq!((paused(&cluster), waiting(&cluster)), (1, 1));
    let (client, mut others) = (cluster.client.clone(), JoinSet::new());
    others.spawn(async move {
        client.post(CHAT, LOW, body(CHAT, json!({ "stream": false, "stream_options": null }))).await
    });
    cluster.until("another request waits", |cluster| waiting(cluster) == 2).await.unwrap();
    // L3.1, L5.5
    let refused = cluster.client.post(CHAT, LOW, body(CHAT, tokens(5))).await.unwrap();
    assert_eq!(refused.status.as_u16(), 529);
    assert_eq!(high.all().await.last().unwrap(), "[DONE]");
    assert_eq!(normal(&without_comments(low.all().await)), undisturbed);
    assert_eq!(others.join_next().await.unwrap().unwrap().unwrap().status, 200);
    until_nothing_is_left(&cluster).await;
}

#[tokio::test]
async fn l5_a_paused_stream_goes_on_with_another_worker_when_its_own_drains_or_dies() {
    for dies in [false, true] {
        let mut cluster = full(Dialect::Vllm, TWO, 1, |_| {}).await;
        let undisturbed = normal(&stream(&cluster, CHAT, tokens(1_500)).await);
        let short = normal(&stream(&cluster, CHAT, tokens(300)).await);
        let mut lows = JoinSet::new();
        for _ in 0..2 {
            lows.spawn(Begun::of(&cluster, CHAT, LOW, tokens(1_500)).await.all());
        }
        let high = Begun::of(&cluster, CHAT, HIGH, tokens(300)).await;
        assert_eq!(paused(&cluster), 1);
        let listed = cluster.admin.get("/decisions").await.unwrap().json().unwrap();
        // The newest decision is that of the request of the high class.
        let left = listed["decisions"][0]["choice"]["worker"].as_u64().unwrap();
        if dies {
            cluster.sims.remove(left as usize - 1).kill().await;
        } else {
            cluster.admin.post(&format!("/workers/{left}/drain?move=true"), &[], "").await.unwrap();
        }
        assert_eq!(normal(&without_comments(high.all().await)), short);
        while let Some(events) = lows.join_next().await {
            // L5.2
            assert_eq!(normal(&without_comments(events.unwrap())), undisturbed, "{dies}");
        }
        until_nothing_is_left(&cluster).await;
    }
}

#[tokio::test]
async fn l5_a_paused_stream_goes_on_while_the_gateway_drains() {
    let cluster = full(Dialect::Vllm, PAIR, 1, |config| {
        config.timeouts.drain = Duration::from_secs(30);
    })
    .await;
    let undisturbed = normal(&stream(&cluster, CHAT, tokens(600)).await);
    let low = Begun::of(&cluster, CHAT, LOW, tokens(600)).await;
    let high = Begun::of(&cluster, CHAT, HIGH, tokens(300)).await;
    assert_eq!(paused(&cluster), 1);
    let TestCluster { gateway, sims, .. } = cluster;
    let ((), high, low) = tokio::join!(gateway.drain(), high.all(), low.all());
    // L5.2
    assert_eq!(normal(&without_comments(low)), undisturbed);
    assert_eq!(high.last().unwrap(), "[DONE]");
    assert!(sims.iter().all(|sim| sim.state().running == 0));
}

#[tokio::test]
async fn l5_a_rest_that_no_pair_can_ever_serve_ends_with_an_error_at_once() {
    let sim = |role| SimConfig { itl: Duration::from_millis(3), ..SimConfig::instant(Dialect::Sglang, role) };
    let mut builder = TestClusterBuilder::new().config(|config| {
        (config.queue.limit, config.queue.max_inflight, config.queue.preempt) = (100, 1, true);
        config.routing.retries = 3;
        let by_turn = "[prefill]\nbuiltin = 'formula'\nsettings = { cost = \"label_number('turn')\" }";
        config.policies.slots = toml::from_str(by_turn).unwrap();
    });
    for turn in 0..3 {
        let rack = format!(",topology.rack=r{turn}");
        builder = builder
            .sim_with(sim(Role::Prefill), &format!("{rack},kv_transfer=required:rack,label.turn={turn}"))
            .sim_with(sim(Role::Decode), &rack);
    }
    let cluster = builder.start().await;
    let refuses = || vec![Fault::always(FaultKind::Status { status: 503, retry_after: Some(1) })];
    // The stream tries the prefill worker of the first pair and the decode worker of the second one.
    cluster.sims[0].set_faults(refuses());
    cluster.sims[3].set_faults(refuses());
    let low = Begun::of(&cluster, CHAT, LOW, tokens(3_000)).await;
    let high = Begun::of(&cluster, CHAT, HIGH, tokens(100)).await;
    assert_eq!(paused(&cluster), 1);
    for worker in [5, 6] {
        assert_eq!(cluster.admin.delete(&format!("/workers/{worker}")).await.unwrap().status, 200);
    }
    high.all().await;
    let events = tokio::time::timeout(Duration::from_secs(10), low.all()).await.expect("it waits");
    // L5.7, I14.10
    let error = events.last().unwrap();
    assert!(error.contains("no worker can serve") && error.contains("tokens were delivered"), "{error}");
    until_nothing_is_left(&cluster).await;
}

#[tokio::test]
async fn l5_a_tenant_is_charged_for_a_paused_stream_whose_client_leaves() {
    const TENANT: &str = "x-tenant";
    let cluster = full(Dialect::Vllm, ONE, 100, |config| {
        config.queue.max_inflight = 1;
        config.server.tenant_header = TENANT.to_owned();
        config.auth.trusted_proxies = vec!["127.0.0.0/8".to_owned()];
    })
    .await;
    let queued = async |tenant: &'static str, count: u32| {
        let (client, before, mut asked) = (cluster.client.clone(), waiting(&cluster), JoinSet::new());
        asked.spawn(async move {
            let stream = client.stream(CHAT, &[(TENANT, tenant)], body(CHAT, tokens(count))).await.unwrap();
            (tenant, stream)
        });
        cluster.until("it waits", |cluster| waiting(cluster) > before).await.unwrap();
        asked
    };
    let first = Begun::of(&cluster, CHAT, &[(TENANT, "first")], tokens(300)).await;
    let mut small = queued("small", 5).await;
    let mut large = queued("large", 2_000).await;
    // Shares are counted as long as a request waits.
    let last = queued("last", 5).await;
    first.all().await;
    small.join_next().await.unwrap().unwrap().1.all().await.unwrap();
    let (_, mut large) = large.join_next().await.unwrap().unwrap();
    for _ in 0..200 {
        large.next().await.unwrap().unwrap();
    }
    let high = Begun::of(&cluster, CHAT, HIGH, tokens(600)).await;
    assert_eq!(paused(&cluster), 1);
    drop(large);
    cluster.until("its place is free", |cluster| paused(cluster) == 0).await.unwrap();
    let mut order = JoinSet::new();
    for mut asked in [last, queued("large", 5).await, queued("small", 5).await] {
        order.spawn(async move {
            let (tenant, stream) = asked.join_next().await.unwrap().unwrap();
            stream.all().await.unwrap();
            tenant
        });
    }
    high.all().await;
    let mut served = Vec::new();
    while let Some(tenant) = order.join_next().await {
        served.push(tenant.unwrap());
    }
    // L5.7: the tenant of the stream has got more tokens than the other one
    assert_eq!(served, ["last", "small", "large"]);
    until_nothing_is_left(&cluster).await;
}
