//! Networks that drop packets without an error, between the gateway and engines, NATS and etcd. These tests
//! need root, iproute2 and nftables; without them they say so and pass.

use std::{process::Command, time::Duration};

use pointsman_gateway::config::{Config, DiscoveryEtcd, Probe, Replicas, Timeouts};
use pointsman_tests::{
    CHAT, TestCluster, TestClusterBuilder,
    client::text_of,
    etcd::Etcd,
    nats::Nats,
    network::{Host, serve_engine},
    own_network,
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

const LIMIT: Duration = Duration::from_secs(60);
const TOKENS: u32 = 60;

/// The engine of a host runs this as a process. It is not a test.
#[test]
fn an_engine() {
    serve_engine().unwrap();
}

fn body(tokens: u32) -> String {
    json!({
        "model": "tiny", "stream": true, "max_tokens": tokens, "ignore_eos": true, "temperature": 0,
        "messages": [{ "role": "user", "content": "tell me about the points of a railway" }],
    })
    .to_string()
}

fn worker(flag: &str) -> WorkerSpec {
    WorkerSpec::parse_flag(flag).unwrap()
}

/// A gateway whose workers are chosen in turn, and whose health checks notice nothing: the path of the
/// requests has to.
async fn gateway(flags: &[String], change: impl FnOnce(&mut Config)) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        config.policies.slots =
            toml::from_str("[aggregated]\nnative = \"round-robin\"\n[prefill]\nnative = \"round-robin\"")
                .unwrap();
        config.probe.interval = Duration::from_secs(300);
        config.timeouts.connect = Duration::from_secs(1);
        config.workers.extend(flags.iter().map(|flag| worker(flag)));
        change(config);
    });
    builder.start().await
}

/// Streams an answer, and returns its events and how long it took.
async fn streamed(cluster: &TestCluster, tokens: u32) -> (Vec<String>, Duration) {
    let begun = Instant::now();
    let events = async {
        let stream = cluster.client.stream(CHAT, &[], body(tokens)).await.unwrap();
        assert_eq!(stream.status, 200);
        stream.all().await.unwrap()
    };
    (timeout(LIMIT, events).await.expect("the stream hung"), begun.elapsed())
}

fn is_whole(events: &[String]) -> bool {
    events.last().is_some_and(|event| event == "[DONE]")
        && !events.iter().any(|event| event.contains("\"error\""))
}

async fn get(cluster: &TestCluster, path: &str) -> Value {
    cluster.admin.get(path).await.unwrap().json().unwrap()
}

/// Waits until a document fits, and returns how long that took.
async fn until(cluster: &TestCluster, path: &str, what: &str, fits: impl Fn(&Value) -> bool) -> Duration {
    let begun = Instant::now();
    while begun.elapsed() < LIMIT {
        if fits(&get(cluster, path).await) {
            return begun.elapsed();
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: {}", get(cluster, path).await);
}

/// The one of the hosts whose engine has the request.
async fn busy(cluster: &TestCluster, hosts: &[Host]) -> usize {
    for _ in 0..1_000 {
        let snapshot = cluster.gateway.state().registry.snapshot();
        let busy = snapshot.workers().iter().filter(|worker| worker.active_requests() > 0);
        let at = |address: String| busy.clone().any(|worker| worker.spec().url.contains(&address));
        if let Some(place) = hosts.iter().position(|host| at(host.place.address.to_string())) {
            return place;
        }
        sleep(Duration::from_millis(2)).await;
    }
    panic!("no engine has the request");
}

/// Streams an answer, and cuts the host off that has the request of the last leg after a while. Returns the
/// events, the time from the cut to the end, and the host.
async fn cut_in_the_middle(cluster: &TestCluster, hosts: &[Host]) -> (Vec<String>, Duration, usize) {
    let cut = async {
        let place = busy(cluster, hosts).await;
        sleep(Duration::from_millis(400)).await;
        hosts[place].cut().unwrap();
        (place, Instant::now())
    };
    let ((events, _), (place, since)) = tokio::join!(streamed(cluster, TOKENS), cut);
    (events, since.elapsed(), place)
}

#[tokio::test]
async fn i16_a_stream_whose_engine_is_cut_off_goes_on_elsewhere_or_ends_in_time() {
    own_network!();
    for pair in [false, true] {
        let mut hosts = [Host::new(1).unwrap(), Host::new(2).unwrap(), Host::new(3).unwrap()];
        let role = if pair { "decode" } else { "aggregated" };
        let mut flags = vec![hosts[0].engine(role, 20).unwrap(), hosts[1].engine(role, 20).unwrap()];
        if pair {
            flags.push(hosts[2].engine("prefill", 1).unwrap());
        }
        for continuations in [1, 0] {
            let cluster = gateway(&flags, |config| {
                config.routing.continuations = continuations;
                config.timeouts.event_idle = Duration::from_secs(1);
                config.timeouts.stream_comment = Duration::ZERO;
            })
            .await;
            let (undisturbed, _) = streamed(&cluster, TOKENS).await;
            assert!(is_whole(&undisturbed));
            let (events, took, place) = cut_in_the_middle(&cluster, &hosts[..2]).await;
            if continuations == 1 {
                // I16.1
                assert!(is_whole(&events), "{events:?}");
                assert_eq!(text_of(&events), text_of(&undisturbed));
            } else {
                // I16.1
                assert!(events.iter().any(|event| event.contains("engine_timeout")), "{events:?}");
            }
            // I16.1
            assert!(took < Duration::from_secs(5), "{took:?}");
            cluster.at_rest().await.unwrap();
            hosts[place].heal().unwrap();
        }
    }
}

#[tokio::test]
async fn i16_a_silent_stream_of_a_worker_that_fails_its_health_checks_is_not_waited_for() {
    own_network!();
    let mut hosts = [Host::new(1).unwrap(), Host::new(2).unwrap()];
    let flags = [hosts[0].engine("aggregated", 20).unwrap(), hosts[1].engine("aggregated", 20).unwrap()];
    let cluster = gateway(&flags, |config| {
        config.probe = Probe::default();
        config.timeouts = Timeouts { event_idle: Duration::from_secs(30), ..Timeouts::default() };
    })
    .await;
    let (undisturbed, _) = streamed(&cluster, TOKENS).await;
    let (events, took, place) = cut_in_the_middle(&cluster, &hosts).await;
    // I16.5
    assert!(is_whole(&events), "{took:?} {events:?}");
    assert_eq!(text_of(&events), text_of(&undisturbed));
    // I16.5: after 15 s, and the time of the rest.
    assert!(took < Duration::from_secs(22), "{took:?}");
    for _ in 0..6 {
        let (events, took) = streamed(&cluster, 4).await;
        // I16.5: it is left out.
        assert!(is_whole(&events) && took < Duration::from_secs(1), "{took:?} {events:?}");
    }
    hosts[place].heal().unwrap();
    let healed = until_eligible(&cluster).await;
    // I16.5
    assert!(healed < Duration::from_secs(10), "{healed:?}");
    cluster.at_rest().await.unwrap();
}

/// Waits until every worker gets requests.
async fn until_eligible(cluster: &TestCluster) -> Duration {
    until(cluster, "/workers", "all are eligible", |workers| {
        workers["workers"].as_array().unwrap().iter().all(|worker| worker["ineligible"].is_null())
    })
    .await
}

#[tokio::test]
async fn i16_a_prefill_engine_that_is_cut_off_is_left_within_its_deadline() {
    own_network!();
    let mut hosts = [Host::new(1).unwrap(), Host::new(2).unwrap(), Host::new(3).unwrap()];
    let flags = [
        hosts[0].engine("prefill", 1).unwrap(),
        hosts[1].engine("prefill", 1).unwrap(),
        hosts[2].engine("decode", 1).unwrap(),
    ];
    let cluster = gateway(&flags, |config| {
        config.timeouts.prefill_head = Duration::from_secs(1);
        config.timeouts.head = Duration::from_secs(1);
    })
    .await;
    for _ in 0..4 {
        assert!(is_whole(&streamed(&cluster, 4).await.0));
    }
    hosts[0].cut().unwrap();
    let mut slow = 0;
    for _ in 0..12 {
        let (events, took) = streamed(&cluster, 4).await;
        // I16.2: the other prefill engine takes the request.
        assert!(is_whole(&events), "{events:?}");
        assert!(took < Duration::from_secs(4), "{took:?}");
        slow += u32::from(took > Duration::from_millis(700));
    }
    // I16.2: the engine is not asked again and again.
    assert!(slow <= 3, "{slow} of 12 waited for the engine that is cut off");
    cluster.at_rest().await.unwrap();
    hosts[0].heal().unwrap();
}

#[tokio::test]
async fn i16_connecting_to_an_engine_that_is_cut_off_delays_no_other_request() {
    own_network!();
    let mut hosts = [Host::new(1).unwrap(), Host::new(2).unwrap()];
    let flags = [hosts[0].engine("aggregated", 1).unwrap(), hosts[1].engine("aggregated", 1).unwrap()];
    let cluster = gateway(&flags, |config| {
        config.server.threads = 1;
        // Each request connects.
        config.upstream.idle_connections = 0;
    })
    .await;
    hosts[0].cut().unwrap();
    let all = futures_util::future::join_all((0..60).map(|number| {
        let cluster = &cluster;
        async move {
            sleep(Duration::from_millis(50 * number)).await;
            let (events, took) = streamed(cluster, 4).await;
            // I16.3
            assert!(is_whole(&events), "{events:?}");
            took
        }
    }))
    .await;
    let quick = |times: &[Duration]| times.iter().filter(|took| **took < Duration::from_millis(700)).count();
    // I16.3: in the first second, until a connection was given up, every other request meets the engine.
    assert!(quick(&all[..20]) >= 8, "those that wait delay others: {all:?}");
    // I16.3
    assert!(quick(&all[40..]) >= 19, "the worker is not left out: {all:?}");
    assert!(all.iter().all(|took| *took < Duration::from_secs(4)), "{all:?}");
    hosts[0].heal().unwrap();
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i16_streams_are_whole_over_a_network_that_loses_packets() {
    own_network!();
    let mut hosts = [Host::new(1).unwrap(), Host::new(2).unwrap()];
    let flags = [hosts[0].engine("prefill", 2).unwrap(), hosts[1].engine("decode", 2).unwrap()];
    // TCP doubles its wait with each loss in a row. With one packet in ten lost in each direction, a segment
    // in millions meets the nine in a row that take a minute; with one in five, a segment in ten thousand.
    let cluster = gateway(&flags, |config| config.timeouts.connect = Duration::from_secs(20)).await;
    let undisturbed = text_of(&streamed(&cluster, TOKENS).await.0);
    for percent in [5, 10] {
        for host in &hosts {
            host.lose(percent).unwrap();
        }
        let all = futures_util::future::join_all((0..20).map(|_| streamed(&cluster, TOKENS))).await;
        for (events, took) in all {
            // I16.4
            assert!(is_whole(&events) && text_of(&events) == undisturbed, "{percent} %: {took:?} {events:?}");
        }
        for host in &hosts {
            host.heal().unwrap();
        }
    }
    if hosts.iter().all(Host::delay) {
        for _ in 0..10 {
            // I16.4
            assert_eq!(text_of(&streamed(&cluster, TOKENS).await.0), undisturbed);
        }
    }
    cluster.at_rest().await.unwrap();
}

/// Returns whether a server is installed. If not, says that the test is skipped.
fn is_installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: {program} is not in the PATH");
    }
    found
}

#[tokio::test]
async fn q3_requests_do_not_notice_that_nats_is_cut_off() {
    own_network!();
    if !is_installed("nats-server") {
        return;
    }
    let host = Host::new(1).unwrap();
    let nats = Nats::start_at(host.place, "jetstream: enabled").await.unwrap();
    let mut engine = Host::new(2).unwrap();
    let flags = [engine.engine("aggregated", 1).unwrap()];
    let one = gateway(&flags, |config| config.replicas = sharing("one", &nats)).await;
    let two = gateway(&flags, |config| config.replicas = sharing("two", &nats)).await;
    until_it_knows(&one, 1).await;
    let times = async || {
        let mut times = Vec::new();
        for _ in 0..40 {
            let (events, took) = streamed(&one, 4).await;
            assert!(is_whole(&events));
            times.push(took);
        }
        times.sort_unstable();
        times
    };
    let before = times().await;
    host.cut().unwrap();
    let (during, noticed) = tokio::join!(
        times(),
        until(&one, "/readyz", "it is alone", |ready| {
            ready["replicas"]["alone"] == true && ready["replicas"]["connected"] == false
        })
    );
    // Q3.1
    assert!(noticed < Duration::from_secs(4), "{noticed:?}");
    assert!(during[38] < before[38] + Duration::from_millis(200), "{before:?} {during:?}");
    let alone = times().await;
    assert!(alone[38] < before[38] + Duration::from_millis(200), "{before:?} {alone:?}");
    assert!(get(&two, "/replicas").await["problem"].is_string());
    host.heal().unwrap();
    let healed = until_it_knows(&one, 1).await;
    // Q3.2
    assert!(healed < Duration::from_secs(12), "{healed:?}");
}

/// Settings of a gateway that shares its load over a server.
fn sharing(name: &str, nats: &Nats) -> Replicas {
    Replicas {
        servers: vec![nats.url()],
        name: name.to_owned(),
        lease: Duration::from_millis(800),
        ..Replicas::default()
    }
}

/// Waits until a gateway knows this number of others.
async fn until_it_knows(cluster: &TestCluster, count: usize) -> Duration {
    until(cluster, "/readyz", &format!("it knows {count} others"), |ready| {
        ready["replicas"]["peers"] == count
    })
    .await
}

#[tokio::test]
async fn q3_each_part_of_a_nats_cluster_that_is_split_counts_alone_until_it_is_whole() {
    own_network!();
    if !is_installed("nats-server") {
        return;
    }
    let hosts = [Host::new(1).unwrap(), Host::new(2).unwrap()];
    let listen = |place: usize| format!("name: nats, listen: \"{}:6222\"", hosts[place].place.address);
    let first = format!("cluster {{ {} }}", listen(0));
    let route = format!("routes: [\"nats://{}:6222\"]", hosts[0].place.address);
    let second = format!("cluster {{ {}, {route} }}", listen(1));
    let servers = [
        Nats::start_at(hosts[0].place, &first).await.unwrap(),
        Nats::start_at(hosts[1].place, &second).await.unwrap(),
    ];
    let mut engine = Host::new(3).unwrap();
    let flags = [engine.engine("aggregated", 20).unwrap()];
    let one = gateway(&flags, |config| config.replicas = sharing("one", &servers[0])).await;
    let two = gateway(&flags, |config| config.replicas = sharing("two", &servers[0])).await;
    let far = gateway(&flags, |config| config.replicas = sharing("far", &servers[1])).await;
    for cluster in [&one, &two, &far] {
        until_it_knows(cluster, 2).await;
    }
    let remote = |count: u64| {
        move |workers: &Value| workers["workers"][0]["ranks"][0]["remote"]["active_requests"] == count
    };
    let long = streamed(&far, 900);
    let split = async {
        until(&one, "/workers", "the far request is booked here", remote(1)).await;
        hosts[0].cut_from(&hosts[1]).unwrap();
        // Q3.4: the servers still answer both sides, so nothing but the silence of the others tells.
        let noticed = tokio::join!(until_it_knows(&one, 1), until_it_knows(&two, 1), until_it_knows(&far, 0));
        assert!(noticed.0.max(noticed.1).max(noticed.2) < Duration::from_secs(4), "{noticed:?}");
        // Q3.4
        until(&one, "/workers", "the far request is forgotten", remote(0)).await;
        let ready = get(&far, "/readyz").await;
        assert!(ready["ready"] == true && ready["replicas"]["alone"] == true, "{ready}");
        assert_eq!(get(&one, "/readyz").await["replicas"]["alone"], false);
        for cluster in [&one, &two, &far] {
            let (events, took) = streamed(cluster, 4).await;
            assert!(is_whole(&events) && took < Duration::from_secs(1), "{took:?}");
        }
        hosts[0].heal().unwrap();
        let healed = tokio::join!(until_it_knows(&one, 2), until_it_knows(&two, 2), until_it_knows(&far, 2));
        // Q3.5
        assert!(healed.0.max(healed.1).max(healed.2) < Duration::from_secs(8), "{healed:?}");
        until(&one, "/workers", "the far request is booked again", remote(1)).await;
    };
    let ((events, _), ()) = tokio::join!(long, split);
    assert!(is_whole(&events));
    // Q3.5
    until(&one, "/workers", "nothing is left of it", remote(0)).await;
}

#[tokio::test]
async fn p8_an_etcd_that_is_cut_off_keeps_its_workers_and_is_read_again() {
    own_network!();
    if !is_installed("etcd") {
        return;
    }
    let host = Host::new(1).unwrap();
    let etcd = Etcd::start_at(host.place).await.unwrap();
    let mut engine = Host::new(2).unwrap();
    let flag = engine.engine("aggregated", 1).unwrap();
    let url = flag.rsplit("url=").next().unwrap().to_owned();
    etcd.put("/w/1", &json!({ "url": url, "role": "aggregated", "engine": "vllm" })).await.unwrap();
    let cluster = gateway(&[], |config| {
        config.discovery.etcd = vec![DiscoveryEtcd {
            name: "a".to_owned(),
            endpoints: vec![format!("http://{}:{}", host.place.address, etcd.port())],
            prefix: "/w/".to_owned(),
            timeout: Duration::from_secs(1),
            resync: Duration::from_secs(2),
            ..DiscoveryEtcd::default()
        }];
    })
    .await;
    let source = |fits: fn(&Value) -> bool| {
        move |status: &Value| {
            let sources = status["sources"].as_array().unwrap();
            sources.iter().any(|source| source["name"] == "etcd:a" && fits(source))
        }
    };
    until(&cluster, "/discovery", "the key is read", source(|source| source["workers"] == 1)).await;
    until(&cluster, "/readyz", "it is ready", |ready| ready["ready"] == true).await;
    assert!(is_whole(&streamed(&cluster, 4).await.0));
    // The lease of this key ends while the gateway cannot reach etcd.
    etcd.call("/v3/lease/grant", json!({ "TTL": "6", "ID": "77" })).await.unwrap();
    etcd.put_leased(
        "/w/2",
        &json!({ "url": "http://10.77.2.2:9", "role": "aggregated", "engine": "vllm" }),
        77,
    )
    .await
    .unwrap();
    until(&cluster, "/discovery", "the leased key is read", source(|source| source["workers"] == 2)).await;
    host.cut().unwrap();
    let noticed =
        until(&cluster, "/discovery", "it is away", source(|source| source["state"] == "away")).await;
    // P3.2
    assert!(noticed < Duration::from_secs(6), "{noticed:?}");
    sleep(Duration::from_secs(8)).await;
    let status = get(&cluster, "/discovery").await;
    // P8.3
    assert!(source(|source| source["workers"] == 2)(&status), "{status}");
    assert!(is_whole(&streamed(&cluster, 4).await.0));
    host.heal().unwrap();
    // P8.4
    let healed =
        until(&cluster, "/discovery", "it is read again", source(|source| source["workers"] == 1)).await;
    assert!(healed < Duration::from_secs(15), "{healed:?}");
}
