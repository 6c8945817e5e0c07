//! Against a double of the API server.

use std::sync::Arc;

use pointsman_test_api_server::ApiServer;
use pointsman_workers::{Engine, Registry, Resolver, Role, Worker};
use serde_json::{Value, json};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use super::*;
use crate::{
    fleet::{Fleet, FleetRules, SourceState, SourceStatus},
    guard::GuardRules,
    source::start,
};

struct Running {
    fleet: Arc<Fleet>,
    registry: Arc<Registry>,
    _stop: DropGuard,
}

fn config(api: &ApiServer, resource: Resource) -> KubernetesSourceConfig {
    let defaults =
        [("engine", "vllm"), ("role", "decode")].map(|(key, value)| (key.to_owned(), value.to_owned()));
    KubernetesSourceConfig {
        api: api.url(),
        namespace: "default".to_owned(),
        resource,
        selector: "app=vllm".to_owned(),
        ports: vec![PortOfWorker::Name("http".to_owned())],
        scheme: Scheme::Http,
        defaults: defaults.into(),
        token_file: None,
        tls: TlsFiles::default(),
        timeout: Duration::from_secs(2),
        watch: Duration::from_secs(30),
    }
}

fn run(config: KubernetesSourceConfig) -> Running {
    run_source(KubernetesSource::new(config))
}

fn run_source(source: KubernetesSource) -> Running {
    let guard = GuardRules { share: 0.5, min_workers: 3, confirm_after: Duration::from_secs(1) };
    let rules = FleetRules { max_workers: 2_000, drain: Duration::from_secs(30), moves: false, guard };
    let registry = Arc::new(Registry::default());
    let fleet = Fleet::new(registry.clone(), Resolver::default(), rules);
    let (tracker, stop) = (TaskTracker::new(), CancellationToken::new());
    start(source, fleet.add_source("kubernetes:a"), &tracker, stop.clone());
    tracker.spawn(fleet.clone().run(stop.clone()));
    Running { fleet, registry, _stop: stop.drop_guard() }
}

impl Running {
    fn hosts(&self) -> Vec<String> {
        let snapshot = self.registry.snapshot();
        let mut hosts: Vec<String> =
            snapshot.workers().iter().map(|worker| worker.spec().host().to_owned()).collect();
        hosts.sort_unstable();
        hosts
    }

    fn worker(&self, host: &str) -> Arc<Worker> {
        self.registry.snapshot().workers().iter().find(|worker| worker.spec().host() == host).unwrap().clone()
    }

    fn status(&self) -> SourceStatus {
        self.fleet.status().sources[2].clone()
    }

    async fn until(&self, what: &str, check: impl Fn(&Self) -> bool) {
        for _ in 0..6_000 {
            if check(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{what}: {:?} {:?}", self.hosts(), self.fleet.status());
    }

    async fn until_hosts(&self, what: &str, hosts: &[&str]) {
        self.until(what, |running| running.hosts() == hosts).await;
    }
}

fn pod(name: &str, ip: &str, ready: bool) -> Value {
    json!({
        "metadata": { "name": name, "labels": { "app": "vllm" }, "annotations": {} },
        "spec": { "containers": [{ "ports": [{ "name": "http", "containerPort": 8000 }] }] },
        "status": {
            "podIP": ip,
            "conditions": [{ "type": "Ready", "status": if ready { "True" } else { "False" } }],
        },
    })
}

#[tokio::test]
async fn p9_pods_become_workers_by_labels_annotations_and_readiness() {
    let api = ApiServer::start().await.unwrap();
    let mut prefill = pod("p", "10.0.0.1", true);
    prefill["metadata"]["labels"]["llm-d.ai/role"] = json!("prefill");
    prefill["metadata"]["annotations"] = json!({
        "pointsman.dev/engine": "sglang",
        "pointsman.dev/port": "30000",
        "pointsman.dev/model": "a, b",
    });
    api.put("pods", prefill.clone());
    api.put("pods", pod("d", "10.0.0.2", true));
    api.put("pods", pod("starting", "10.0.0.3", false));
    let running = run(config(&api, Resource::Pods));
    // P9.2
    running.until_hosts("those that are ready join", &["10.0.0.1", "10.0.0.2"]).await;
    let (first, second) = (running.worker("10.0.0.1"), running.worker("10.0.0.2"));
    let models: Vec<_> = first.spec().models.iter().map(ToString::to_string).collect();
    // P9.1
    assert_eq!((&*first.spec().url, first.spec().role), ("http://10.0.0.1:30000", Role::Prefill));
    assert_eq!((first.spec().engine, models), (Engine::Sglang, vec!["a".to_owned(), "b".to_owned()]));
    assert_eq!((&*second.spec().url, second.spec().role), ("http://10.0.0.2:8000", Role::Decode));
    api.put("pods", pod("starting", "10.0.0.3", true));
    running.until_hosts("it became ready", &["10.0.0.1", "10.0.0.2", "10.0.0.3"]).await;
    let mut ending = pod("d", "10.0.0.2", true);
    ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    api.put("pods", ending);
    // P9.3
    running.until("it drains", |_| second.leaving()).await;
    api.delete("pods", "d");
    running.until_hosts("it is gone", &["10.0.0.1", "10.0.0.3"]).await;
    prefill["metadata"]["annotations"]["pointsman.dev/role"] = json!("cook");
    api.put("pods", prefill);
    running.until("it is refused", |running| running.status().refused_count == 1).await;
    assert!(running.status().refused[0].problem.contains("unknown role `cook`"));
    assert_eq!(running.hosts(), ["10.0.0.1", "10.0.0.3"]);
}

#[tokio::test]
async fn p10_pods_may_have_tls_and_their_url_is_not_read() {
    let api = ApiServer::start().await.unwrap();
    for (name, ip, key, value) in [
        ("a", "10.0.0.1", "tls_server_name", "engine.svc"),
        ("b", "10.0.0.2", "scheme", "http"),
        ("c", "10.0.0.3", "scheme", "ftp"),
        ("d", "10.0.0.4", "url", "https://10.0.0.9:8000"),
    ] {
        let mut pod = pod(name, ip, true);
        pod["metadata"]["annotations"][format!("pointsman.dev/{key}")] = json!(value);
        api.put("pods", pod);
    }
    let running = run(KubernetesSourceConfig { scheme: Scheme::Https, ..config(&api, Resource::Pods) });
    running.until_hosts("two are described", &["10.0.0.1", "10.0.0.2"]).await;
    let url = |host: &str| running.worker(host).spec().url.to_string();
    // P10.4
    assert_eq!(
        (url("10.0.0.1"), url("10.0.0.2")),
        ("https://10.0.0.1:8000".into(), "http://10.0.0.2:8000".into())
    );
    assert_eq!(running.worker("10.0.0.1").spec().tls_server_name.as_deref(), Some("engine.svc"));
    let mut refused: Vec<_> = running.status().refused.into_iter().map(|one| one.problem).collect();
    refused.sort_unstable();
    let expected = [
        "pointsman.dev/scheme: `ftp`: expected http or https",
        "pointsman.dev/url: the URL is that of the pod: give pointsman.dev/scheme and pointsman.dev/port instead",
    ];
    assert_eq!(refused, expected);
}

#[tokio::test]
async fn p9_pods_that_are_not_ready_any_more_get_no_requests_unless_they_are_many() {
    let api = ApiServer::start().await.unwrap();
    let ips = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"];
    let put = |ip: &str, ready: bool| api.put("pods", pod(ip, ip, ready));
    ips.iter().for_each(|ip| put(ip, true));
    let running = run(config(&api, Resource::Pods));
    running.until_hosts("they join", &ips).await;
    let leaving = |running: &Running| ips.iter().filter(|ip| running.worker(ip).leaving()).count();
    put(ips[0], false);
    // P9.15, P4.7
    running.until("one gets no requests", |running| running.worker(ips[0]).leaving()).await;
    assert_eq!((leaving(&running), running.status().unready, running.hosts().len()), (1, 1, 4));
    ips.iter().for_each(|ip| put(ip, false));
    // P4.7
    running.until("health checks decide", |running| running.status().unready == 4).await;
    assert_eq!((leaving(&running), running.hosts().len()), (0, 4));
    api.put("pods", pod("starting", "10.0.0.5", false));
    running.until("another one starts", |running| running.status().unready == 5).await;
    put(ips[3], true);
    running.until("one is ready", |running| running.status().unready == 4).await;
    // P9.15: never ready
    assert_eq!(running.hosts(), ips);
    let [mut ended, mut replaced] = [ips[0], ips[1]].map(|ip| pod(ip, ip, false));
    ended["status"]["phase"] = json!("Failed");
    replaced["metadata"]["uid"] = json!("another pod at the address");
    [ended, replaced].into_iter().for_each(|pod| api.put("pods", pod));
    // P9.15
    running.until_hosts("both are gone", &ips[2..]).await;
}

#[tokio::test]
async fn p9_pods_that_were_never_ready_are_counted() {
    let api = ApiServer::start().await.unwrap();
    for ip in ["10.0.0.1", "10.0.0.2"] {
        api.put("pods", pod(ip, ip, false));
    }
    let running = run(config(&api, Resource::Pods));
    // P9.15
    running.until("they are counted", |running| running.status().unready == 2).await;
    assert_eq!((running.status().workers, running.fleet.never_ready()), (0, 2));
    api.put("pods", pod("10.0.0.1", "10.0.0.1", true));
    // P9.15
    running.until("one joins", |running| running.status().unready == 1).await;
    assert_eq!(running.status().workers, 1);
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn p3_a_pipe_in_the_place_of_a_token_or_certificate_is_away() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let api = ApiServer::start().await.unwrap();
    let token = KubernetesSourceConfig { token_file: Some(pipe.clone()), ..config(&api, Resource::Pods) };
    let tls = TlsFiles { ca: Some(pipe), client: None };
    for config in [token, KubernetesSourceConfig { tls, ..config(&api, Resource::Pods) }] {
        let running = run(config);
        let problem = |running: &Running| running.status().problem.unwrap_or_default();
        // P3.6
        running.until("it is away", |it| problem(it).contains("it is not a regular file")).await;
    }
}

#[tokio::test]
async fn p9_the_label_of_llm_d_means_in_pods_what_it_means_in_its_file() {
    let api = ApiServer::start().await.unwrap();
    let labelled = |name: &str, ip: &str, label: &str| {
        let mut pod = pod(name, ip, true);
        pod["metadata"]["labels"]["llm-d.ai/role"] = json!(label);
        pod
    };
    let of_pointsman = |mut pod: Value, role: &str| {
        pod["metadata"]["labels"]["pointsman.dev/role"] = json!(role);
        pod
    };
    api.put("pods", labelled("a", "10.0.0.1", "encode-prefill"));
    api.put("pods", labelled("b", "10.0.0.2", "encode-prefill-decode"));
    api.put("pods", labelled("c", "10.0.0.3", "both"));
    api.put("pods", labelled("d", "10.0.0.4", "encode"));
    api.put("pods", of_pointsman(labelled("e", "10.0.0.5", "encode"), "prefill"));
    let running = run(config(&api, Resource::Pods));
    let hosts = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.5"];
    // P9.13
    running.until_hosts("the encoder is refused", &hosts).await;
    let roles = hosts.map(|host| running.worker(host).spec().role);
    assert_eq!(roles, [Role::Prefill, Role::Aggregated, Role::Aggregated, Role::Prefill]);
    let refused = running.status().refused;
    assert!(refused[0].entry == "d" && refused[0].problem.contains("an encoder serves"), "{refused:?}");
}

#[tokio::test]
async fn p9_a_pod_without_its_role_label_drains_and_takes_no_role_of_the_defaults() {
    let api = ApiServer::start().await.unwrap();
    let labelled = |uid: &str, role: Option<&str>, own: Option<&str>| {
        let mut pod = pod("a", "10.0.0.1", true);
        pod["metadata"]["uid"] = json!(uid);
        role.inspect(|role| pod["metadata"]["labels"]["llm-d.ai/role"] = json!(role));
        own.inspect(|role| pod["metadata"]["annotations"]["pointsman.dev/role"] = json!(role));
        pod
    };
    let role = |running: &Running| running.worker("10.0.0.1").spec().role;
    api.put("pods", labelled("1", Some("prefill"), None));
    api.put("pods", pod("b", "10.0.0.2", true));
    let running = run(config(&api, Resource::Pods));
    running.until_hosts("both join", &["10.0.0.1", "10.0.0.2"]).await;
    assert_eq!((role(&running), running.worker("10.0.0.2").spec().role), (Role::Prefill, Role::Decode));
    let worker = running.worker("10.0.0.1");
    let handoff = pointsman_workers::OpenHandoff::new(worker.clone());
    api.put("pods", labelled("1", None, None));
    // P9.16: the defaults have the role decode. It is gone when nothing of it is open.
    running.until("it drains", |_| worker.leaving()).await;
    assert_eq!(running.hosts().len(), 2);
    drop(handoff);
    running.until_hosts("it is gone", &["10.0.0.2"]).await;
    let refused = running.status().refused;
    assert!(refused[0].entry == "a" && refused[0].problem.contains("was removed"), "{refused:?}");
    // P9.16: lists know it, too
    api.compact();
    api.put("pods", labelled("1", None, None));
    running.until("it is listed again", |_| api.counts().lists > 1).await;
    running.until_hosts("it has no role", &["10.0.0.2"]).await;
    api.put("pods", labelled("1", Some("decode"), None));
    running.until_hosts("it has another role", &["10.0.0.1", "10.0.0.2"]).await;
    api.put("pods", labelled("1", Some("encode"), None));
    // P9.16: an encoder, as in an endpoints file (P5.7)
    running.until_hosts("it encodes", &["10.0.0.2"]).await;
    api.put("pods", labelled("1", None, Some("prefill")));
    running.until_hosts("our own key gives the role", &["10.0.0.1", "10.0.0.2"]).await;
    api.put("pods", labelled("1", None, None));
    running.until_hosts("it has no role again", &["10.0.0.2"]).await;
    api.put("pods", labelled("2", None, None));
    // P9.16: another pod with the name never had the label
    running.until_hosts("another pod", &["10.0.0.1", "10.0.0.2"]).await;
    assert_eq!(role(&running), Role::Decode);
}

#[tokio::test]
async fn p9_a_watch_that_brings_nothing_is_followed_by_a_list() {
    let api = ApiServer::start().await.unwrap();
    for (name, ip) in [("a", "10.0.0.1"), ("b", "10.0.0.2")] {
        api.put("pods", pod(name, ip, true));
    }
    let watch = Duration::from_secs(2);
    let running = run(KubernetesSourceConfig { watch, ..config(&api, Resource::Pods) });
    running.until("several watches", |_| api.counts().watches >= 3).await;
    // P9.17: bookmarks came
    assert_eq!(api.counts().lists, 1);
    api.withhold(true, true);
    api.delete("pods", "a");
    // P9.17
    running.until_hosts("the change is listed", &["10.0.0.2"]).await;
    assert_eq!(running.status().times_away, 0);
}

#[tokio::test]
async fn p9_a_watch_that_hangs_is_given_up_after_its_time() {
    let api = ApiServer::start().await.unwrap();
    for (name, ip) in [("a", "10.0.0.1"), ("b", "10.0.0.2")] {
        api.put("pods", pod(name, ip, true));
    }
    let watch = Duration::from_secs(1);
    let running = run(KubernetesSourceConfig { watch, ..config(&api, Resource::Pods) });
    running.until("it watches", |_| api.counts().watches >= 1).await;
    api.hang();
    api.delete("pods", "a");
    let begun = Instant::now();
    // P9.17
    running.until_hosts("the change is read", &["10.0.0.2"]).await;
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn p9_everything_is_listed_again_from_time_to_time() {
    let api = ApiServer::start().await.unwrap();
    for (name, ip) in [("a", "10.0.0.1"), ("b", "10.0.0.2")] {
        api.put("pods", pod(name, ip, true));
    }
    let relist = Duration::from_secs(4);
    let running =
        run_source(KubernetesSource { relist, ..KubernetesSource::new(config(&api, Resource::Pods)) });
    running.until_hosts("both join", &["10.0.0.1", "10.0.0.2"]).await;
    api.withhold(true, false);
    api.delete("pods", "a");
    // P9.17: bookmarks come, and the change does not
    running.until_hosts("the change is listed", &["10.0.0.2"]).await;
    api.withhold(false, false);
    api.grant_only(&[("pods", "watch")]);
    let watches = api.counts().watches;
    running.until("lists are refused", |_| api.counts().watches >= watches + 2).await;
    api.put("pods", pod("c", "10.0.0.3", true));
    // P9.17: a list that fails does not end what the watch brings
    running.until_hosts("the watch goes on", &["10.0.0.2", "10.0.0.3"]).await;
    assert_eq!((running.status().times_away, RELIST), (0, Duration::from_mins(10)));
}

#[tokio::test]
async fn p9_a_pod_with_an_invalid_description_drains_when_it_ends_and_leaves_when_another_has_its_name() {
    let api = ApiServer::start().await.unwrap();
    let of = |name: &str, ip: &str, uid: &str| {
        let mut pod = pod(name, ip, true);
        pod["metadata"]["uid"] = json!(uid);
        pod
    };
    let invalid = |mut pod: Value| {
        pod["metadata"]["annotations"]["pointsman.dev/engine"] = json!("vlm");
        pod
    };
    for (name, ip) in [("a", "10.0.0.1"), ("b", "10.0.0.2")] {
        api.put("pods", of(name, ip, name));
    }
    let running = run(config(&api, Resource::Pods));
    running.until_hosts("both join", &["10.0.0.1", "10.0.0.2"]).await;
    let ends = running.worker("10.0.0.1");
    for (name, ip) in [("a", "10.0.0.1"), ("b", "10.0.0.2")] {
        api.put("pods", invalid(of(name, ip, name)));
    }
    running.until("both are refused", |running| running.status().refused_count == 2).await;
    assert!(!ends.leaving() && running.hosts().len() == 2, "an invalid description alone changes nothing");
    let mut ending = invalid(of("a", "10.0.0.1", "a"));
    ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    api.put("pods", ending);
    // P9.14: it drains, and another pod has the name
    running.until("it drains", |_| ends.leaving()).await;
    api.put("pods", invalid(of("b", "10.0.0.2", "new")));
    running.until_hosts("the pod before it is gone", &["10.0.0.1"]).await;
}

#[tokio::test]
async fn p9_endpoints_of_slices_become_workers_by_their_conditions() {
    let api = ApiServer::start().await.unwrap();
    let slice = |conditions: Value| {
        json!({
            "metadata": { "name": "s", "labels": { "pointsman.dev/role": "prefill" } },
            "ports": [{ "name": "http", "port": 8000 }],
            "endpoints": [
                { "addresses": ["10.0.0.1"], "conditions": {} },
                { "addresses": ["fd00::2"], "conditions": conditions },
                { "addresses": ["10.0.0.3"], "conditions": { "ready": false } },
            ],
        })
    };
    let leaves = |running: &Running| running.worker("[fd00::2]").leaving();
    api.put("endpointslices", slice(json!({ "ready": true })));
    let running = run(config(&api, Resource::EndpointSlices));
    // P9.2: slices
    running.until_hosts("those that are ready join", &["10.0.0.1", "[fd00::2]"]).await;
    let worker = running.worker("[fd00::2]");
    assert_eq!(worker.spec().role, Role::Prefill);
    api.put("endpointslices", slice(json!({ "ready": false, "serving": false })));
    // P9.15: slices
    running.until("it gets no requests", leaves).await;
    api.put("endpointslices", slice(json!({ "ready": true })));
    running.until("it is back", |running| !leaves(running)).await;
    api.put("endpointslices", slice(json!({ "ready": false, "serving": true, "terminating": true })));
    // P9.3: slices
    running.until("it drains", |_| worker.leaving()).await;
}

#[tokio::test]
async fn p9_a_pod_that_is_listed_several_times_is_one_worker() {
    let api = ApiServer::start().await.unwrap();
    let slice = |name: &str, port: u16, endpoints: &[(&str, &str)]| {
        let endpoints = endpoints.iter().map(|(address, uid)| {
            json!({ "addresses": [address], "conditions": {}, "targetRef": { "kind": "Pod", "uid": uid } })
        });
        json!({
            "metadata": { "name": name },
            "ports": [{ "name": "http", "port": port }],
            "endpoints": endpoints.collect::<Vec<_>>(),
        })
    };
    // A service of both families, and another service at another port of the first pod.
    api.put(
        "endpointslices",
        slice("a-v6", 8000, &[("fd00::1", "p1"), ("fd00::2", "p2"), ("fd00::3", "p3")]),
    );
    api.put("endpointslices", slice("b-v4", 8000, &[("10.0.0.1", "p1"), ("10.0.0.2", "p2")]));
    api.put("endpointslices", slice("c-v4", 9000, &[("10.0.0.1", "p1")]));
    let running = run(config(&api, Resource::EndpointSlices));
    // P9.8
    running.until_hosts("each pod once", &["10.0.0.1", "10.0.0.2", "[fd00::3]"]).await;
    assert_eq!(&*running.worker("10.0.0.1").spec().url, "http://10.0.0.1:8000");
    // The pod stays while one of its services lists it.
    api.put("endpointslices", slice("b-v4", 8000, &[("10.0.0.2", "p2")]));
    let urls = |running: &Running| {
        let snapshot = running.registry.snapshot();
        let urls = snapshot.workers().iter().filter(|worker| !worker.leaving());
        urls.map(|worker| worker.spec().url.to_string()).collect::<Vec<_>>()
    };
    let other_port = |running: &Running| {
        let urls = urls(running);
        urls.len() == 3 && urls.iter().any(|url| url == "http://10.0.0.1:9000")
    };
    running.until("another port", other_port).await;
    api.delete("endpointslices", "c-v4");
    running.until_hosts("another family", &["10.0.0.2", "[fd00::1]", "[fd00::3]"]).await;
}

#[tokio::test]
async fn p9_a_pod_with_several_serving_ports_is_several_workers() {
    let api = ApiServer::start().await.unwrap();
    let mut one = pod("d", "fd00::2", true);
    one["metadata"]["uid"] = json!("p1");
    one["status"]["podIPs"] = json!([{ "ip": "fd00::2" }, { "ip": "10.0.0.2" }]);
    api.put("pods", one.clone());
    let mut config = config(&api, Resource::Pods);
    config.ports = PortOfWorker::parse_list("8000, 8001").unwrap();
    config.defaults.insert("kv_events".to_owned(), "tcp://{host}:{5557+rank}".to_owned());
    let running = run(config);
    let seen = |running: &Running| {
        let snapshot = running.registry.snapshot();
        let spec = |worker: &Arc<Worker>| (worker.spec().url.to_string(), worker.spec().kv_events.clone());
        let mut seen: Vec<_> = snapshot.workers().iter().map(spec).collect();
        seen.sort_unstable();
        seen
    };
    let worker = |port: u16, events: u16| {
        (format!("http://10.0.0.2:{port}"), Some(format!("tcp://10.0.0.2:{events}")))
    };
    // P9.9, P11.1
    running.until("two workers", |running| seen(running) == [worker(8000, 5557), worker(8001, 5558)]).await;
    one["metadata"]["annotations"]["pointsman.dev/port"] = json!("http,9000,9001");
    api.put("pods", one.clone());
    let three = [worker(8000, 5557), worker(9000, 5558), worker(9001, 5559)];
    running.until("three workers", |running| seen(running) == three).await;
    one["metadata"]["annotations"]["pointsman.dev/kv_events"] = json!("tcp://{ip}:5557");
    api.put("pods", one.clone());
    running.until("it is refused", |running| running.status().refused_count == 1).await;
    // P11.2
    assert!(running.status().refused[0].problem.contains("expected {host}"), "{:?}", running.status());
    for (ports, expected) in [
        ("8000,8000", "names a port twice"),
        ("8000,", "`` is not a port"),
        ("0", "`0` is not a port"),
        ("70000", "`70000` is not a port"),
        ("a_b", "`a_b` is not a port"),
    ] {
        let problem = PortOfWorker::parse_list(ports).unwrap_err();
        assert!(problem.contains(expected), "{ports}: {problem}");
    }
}

#[tokio::test]
async fn p9_the_watch_survives_disconnects_gone_and_an_api_server_that_is_away() {
    let api = ApiServer::start().await.unwrap();
    // More than one page.
    for number in 0..1_200 {
        let ip = format!("10.1.{}.{}", number / 250, number % 250);
        api.put("pods", pod(&format!("pod-{number}"), &ip, true));
    }
    let running = run(config(&api, Resource::Pods));
    running.until("all pages are read", |running| running.hosts().len() == 1_200).await;
    let lists = api.counts().lists;
    assert_eq!(lists, 3);
    running.until("it watches", |_| api.counts().watches == 1).await;
    api.disconnect();
    api.delete("pods", "pod-0");
    running.until("changes during the disconnect", |running| running.hosts().len() == 1_199).await;
    // P9.4: the watch continues from its version
    assert_eq!(api.counts().lists, lists);
    api.compact();
    api.delete("pods", "pod-1");
    // P9.5
    running.until("listed again after 410", |running| running.hosts().len() == 1_198).await;
    assert!(api.counts().gone > 0 && api.counts().lists > lists);
    api.fail_with(Some(503));
    api.disconnect();
    running.until("it is away", |running| running.status().state == SourceState::Away).await;
    // P9.6
    assert_eq!(running.hosts().len(), 1_198);
    api.delete("pods", "pod-2");
    api.fail_with(None);
    running.until("it is back", |running| running.hosts().len() == 1_197).await;
    assert_eq!(running.status().state, SourceState::Present);
}

#[tokio::test]
async fn p9_the_token_is_read_again_and_a_refusal_says_so() {
    let api = ApiServer::start().await.unwrap();
    api.put("pods", pod("d", "10.0.0.2", true));
    api.need_token("new");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "old\n").unwrap();
    let running = run(KubernetesSourceConfig {
        token_file: Some(file.path().to_owned()),
        ..config(&api, Resource::Pods)
    });
    running.until("it is refused", |running| running.status().state == SourceState::Away).await;
    let problem = running.status().problem.unwrap();
    assert!(problem.contains("status 401; check the credentials"), "{problem}");
    std::fs::write(file.path(), "new\n").unwrap();
    // P9.7
    running.until_hosts("the new token serves", &["10.0.0.2"]).await;
}

#[tokio::test]
async fn p9_nulls_of_the_api_server_are_empty_and_an_unreadable_object_keeps_its_workers() {
    let api = ApiServer::start().await.unwrap();
    let running = run(config(&api, Resource::EndpointSlices));
    let mut slice = json!({
        "metadata": { "name": "s", "labels": { "app": "vllm" }, "annotations": null },
        "ports": [{ "name": "http", "port": 8000 }],
        "endpoints": [{ "addresses": ["10.0.0.1"], "conditions": { "ready": true }, "targetRef": null }],
    });
    api.put("endpointslices", slice.clone());
    running.until_hosts("its endpoint joins", &["10.0.0.1"]).await;
    slice["endpoints"] = json!("not a list");
    api.put("endpointslices", slice.clone());
    running.until("the object is refused", |running| running.status().refused_count == 1).await;
    // P2.5
    assert_eq!(running.hosts(), ["10.0.0.1"]);
    // So the API server writes a slice whose service has no pods.
    (slice["endpoints"], slice["ports"]) = (Value::Null, Value::Null);
    api.put("endpointslices", slice);
    // P9.10
    running.until_hosts("the service has no pods", &[]).await;

    let api = ApiServer::start().await.unwrap();
    let running = run(config(&api, Resource::Pods));
    api.put("pods", pod("evicted", "10.0.0.2", true));
    running.until_hosts("it joins", &["10.0.0.2"]).await;
    let mut evicted = pod("evicted", "", true);
    (evicted["status"]["podIP"], evicted["status"]["podIPs"]) = (Value::Null, Value::Null);
    api.put("pods", evicted);
    // P9.10
    running.until_hosts("a pod without an address", &[]).await;
}

#[test]
fn p9_a_list_without_objects_may_be_null() {
    for items in ["", r#","items":null"#, r#","items":[]"#] {
        let page = format!(r#"{{"metadata":{{"resourceVersion":"7"}}{items}}}"#);
        let page: List = serde_json::from_str(&page).unwrap();
        // P9.10
        assert_eq!(page.items.iter().flatten().count(), 0);
    }
}

#[tokio::test]
async fn p9_a_port_of_a_sidecar_has_a_name_too() {
    let api = ApiServer::start().await.unwrap();
    let running = run(config(&api, Resource::Pods));
    let port = |port: u16| json!([{ "name": "http", "containerPort": port }]);
    let mut proxied = pod("proxied", "10.0.0.1", true);
    proxied["spec"] = json!({
        "containers": [{ "ports": null }],
        "initContainers": [{ "ports": port(1) }, { "restartPolicy": "Always", "ports": port(8001) }],
    });
    api.put("pods", proxied);
    running.until_hosts("it joins", &["10.0.0.1"]).await;
    // P9.11
    assert_eq!(&*running.worker("10.0.0.1").spec().url, "http://10.0.0.1:8001");
}

#[tokio::test]
async fn p3_watches_that_are_refused_are_not_followed_by_lists_all_the_time() {
    let api = ApiServer::start().await.unwrap();
    api.put("pods", pod("d", "10.0.0.2", true));
    api.grant_only(&[("pods", "list")]);
    let running = run(config(&api, Resource::Pods));
    running.until_hosts("the list is used", &["10.0.0.2"]).await;
    running.until("it is away", |running| running.status().state == SourceState::Away).await;
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        // P3.4
        assert_eq!((running.status().state, running.status().times_away), (SourceState::Away, 1));
    }
    assert!(api.counts().lists <= 6, "{:?}", api.counts());
    api.put("pods", pod("e", "10.0.0.3", true));
    api.grant_only(&[("pods", "list"), ("pods", "watch")]);
    running.until_hosts("the watch stands", &["10.0.0.2", "10.0.0.3"]).await;
    assert_eq!(running.status().state, SourceState::Present);
}
