use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use prefix_index::{
    IndexConfig, Overlaps, Prefix, Salt, block_hashes,
    events::{Batch, KvEvent, Stored},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::watch,
};

use super::*;
use crate::{
    Leg, ModelName, WorkerId,
    id::{BlockHash, DpRank},
    spec::WorkerSpec,
    worker::{Health, Ineligible},
};

mod tls_question;

/// A worker that answers probes; its health follows the switch.
/// The process of the worker started at the time in `started`.
async fn engine(
    owner: &'static str,
    healthy: watch::Receiver<bool>,
    (started, asleep, uncached): (Arc<AtomicUsize>, Arc<AtomicBool>, Arc<AtomicBool>),
    tasks: &TaskTracker,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let inner = tasks.clone();
    tasks.spawn(async move {
        loop {
            let Ok((mut stream, _)) = listener.accept().await else { return };
            let (healthy, started) = (healthy.clone(), started.clone());
            let (asleep, uncached) = (asleep.clone(), uncached.clone());
            inner.spawn(async move {
                let mut buffer = vec![0; 4096];
                while let Ok(read) = stream.read(&mut buffer).await {
                    if read == 0 {
                        return;
                    }
                    let text = String::from_utf8_lossy(&buffer[..read]).into_owned();
                    let path = text.split(' ').nth(1).unwrap_or_default();
                    let (status, body) = match path {
                        "/health" if *healthy.borrow() => ("200 OK", String::new()),
                        "/health" => ("503 Service Unavailable", String::new()),
                        "/v1/models" => {
                            ("200 OK", format!(r#"{{"data":[{{"id":"tiny","owned_by":"{owner}"}}]}}"#))
                        }
                        "/metrics" => {
                            let (started, awake) = (started.load(Relaxed), u8::from(!asleep.load(Relaxed)));
                            let caches = if uncached.load(Relaxed) { "False" } else { "True" };
                            let labels = format!("num_gpu_blocks=\"77\",enable_prefix_caching=\"{caches}\"");
                            let text = format!(
                                "vllm:num_requests_running 3.0\nvllm:cache_config_info{{{labels}}} 1"
                            );
                            let state = format!("vllm:engine_sleep_state{{sleep_state=\"awake\"}} {awake}");
                            ("200 OK", format!("{text}\n{state}\nprocess_start_time_seconds {started}\n"))
                        }
                        _ => ("404 Not Found", String::new()),
                    };
                    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                    if stream.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    url
}

fn tls_and_names() -> (Arc<EngineTls>, Resolver) {
    <_>::default()
}

fn index() -> Arc<PrefixIndex> {
    Arc::new(PrefixIndex::synchronous(IndexConfig::default()))
}

struct TestWorker {
    registry: Arc<Registry>,
    worker: Arc<Worker>,
    index: Arc<PrefixIndex>,
    healthy: watch::Sender<bool>,
    started: Arc<AtomicUsize>,
    asleep: Arc<AtomicBool>,
    uncached: Arc<AtomicBool>,
    stop: CancellationToken,
}

impl TestWorker {
    /// Returns how many blocks of the prefix the index has of the worker.
    fn held(&self, prefix: &Prefix) -> u32 {
        let mut overlaps = Overlaps::default();
        self.index.matches(prefix.hashes(), &mut overlaps);
        overlaps.get(self.worker.id(), DpRank(0)).device
    }
}

async fn test_worker(owner: &'static str) -> TestWorker {
    let (healthy, receiver) = watch::channel(true);
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let started = Arc::new(AtomicUsize::new(1_795_233_866));
    let (asleep, uncached) = <(Arc<AtomicBool>, Arc<AtomicBool>)>::default();
    let url = engine(owner, receiver, (started.clone(), asleep.clone(), uncached.clone()), &tasks).await;
    let index = index();
    let registry = Arc::new(Registry::default());
    let worker =
        registry.upsert(WorkerSpec::parse_flag(&format!("role=decode,engine=vllm,url={url}")).unwrap());
    let config = ProbeConfig {
        load_interval: Duration::from_millis(10),
        ..probes(Duration::from_millis(10), Duration::from_millis(500))
    };
    let receiver = watch::channel(config).1;
    Prober::start(registry.clone(), index.clone(), receiver, tls_and_names(), tasks, stop.clone());
    TestWorker { registry, worker, index, healthy, started, asleep, uncached, stop }
}

/// Probes at this interval, all of which may take this time, without figures of load.
pub(super) fn probes(interval: Duration, timeout: Duration) -> ProbeConfig {
    ProbeConfig {
        interval,
        timeout,
        health_timeout: timeout,
        load_interval: Duration::ZERO,
        max_per_second: 1_500,
        stuck_after: Duration::ZERO,
        look_interval: Duration::from_secs(1),
    }
}

fn start(registry: &Arc<Registry>, config: ProbeConfig, tasks: &TaskTracker, stop: &CancellationToken) {
    let config = watch::channel(config).1;
    Prober::start(registry.clone(), index(), config, tls_and_names(), tasks.clone(), stop.clone());
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..12_000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never: {what}");
}

#[tokio::test]
async fn b5_facts_are_read_before_a_worker_is_eligible() {
    let test = test_worker("vllm").await;
    // B5.1
    assert_eq!(test.worker.ineligible(), Some(Ineligible::NotReady));
    until("eligible", || test.worker.ineligible().is_none()).await;
    assert_eq!(test.worker.total_blocks(), Some(77));
    assert_eq!(test.registry.snapshot().pool(&ModelName::new("tiny"), Leg::Decode).len(), 1);
    until("load", || test.worker.engine_load().is_some_and(|load| load.running == Some(3))).await;
    test.stop.cancel();
}

#[tokio::test]
async fn b2_health_comes_and_goes_with_the_worker() {
    let test = test_worker("vllm").await;
    until("healthy", || test.worker.health() == Health::Healthy).await;
    test.healthy.send_replace(false);
    until("unhealthy", || test.worker.health() == Health::Unhealthy).await;
    test.healthy.send_replace(true);
    until("healthy again", || test.worker.health() == Health::Healthy).await;
    test.worker.note_connect_failed();
    assert_eq!(test.worker.health(), Health::Unhealthy);
    until("back after a nudge", || test.worker.health() == Health::Healthy).await;
    until("no problem", || test.worker.problem().is_none()).await;
    test.healthy.send_replace(false);
    test.worker.note_connect_failed();
    // B8.12
    until("the problem", || test.worker.problem().is_some()).await;
    test.stop.cancel();
}

#[tokio::test]
async fn b8_predictions_end_with_a_process_that_was_replaced_unseen() {
    let test = test_worker("vllm").await;
    until("load", || test.worker.engine_load().is_some()).await;
    let prefix = Prefix::from(vec![BlockHash(1), BlockHash(2)]);
    test.index.record(test.worker.id(), DpRank(0), &prefix, Instant::now());
    assert_eq!(test.held(&prefix), 2);
    test.started.fetch_add(1, Relaxed);
    // B8.9
    until("forgotten", || test.held(&prefix) == 0).await;
    test.stop.cancel();
}

#[tokio::test]
async fn f5_predictions_end_when_an_engine_says_that_it_has_no_prefix_cache() {
    let test = test_worker("vllm").await;
    until("load", || test.worker.engine_load().is_some()).await;
    let prefix = Prefix::from(vec![BlockHash(1), BlockHash(2)]);
    test.index.record(test.worker.id(), DpRank(0), &prefix, Instant::now());
    assert_eq!((test.held(&prefix), test.worker.caches_prefixes()), (2, true));
    test.uncached.store(true, Relaxed);
    // F5.5
    until("forgotten", || test.held(&prefix) == 0 && !test.worker.caches_prefixes()).await;
    test.uncached.store(false, Relaxed);
    until("predicted again", || test.worker.caches_prefixes()).await;
    test.stop.cancel();
}

#[tokio::test]
async fn b8_blocks_end_when_their_engine_falls_asleep() {
    let test = test_worker("vllm").await;
    until("load", || test.worker.engine_load().is_some()).await;
    let (worker, rank) = (test.worker.id(), DpRank(0));
    let (tokens, size) = ((0..32).collect::<Vec<u32>>(), IndexConfig::default().block_size);
    let block_size = u32::try_from(size).unwrap();
    let stored =
        Stored { hashes: vec![1], token_ids: tokens[..size].to_vec(), block_size, ..Stored::default() };
    test.index.set_live(worker, rank, true);
    let batch = Batch { ts: 0.0, dp_rank: None, events: vec![KvEvent::Stored(stored)] };
    test.index.events(worker, rank, batch).unwrap();
    let held = || {
        let mut overlaps = Overlaps::default();
        test.index.matches(&block_hashes(&tokens, size, &Salt::default()), &mut overlaps);
        overlaps.get(worker, rank).device
    };
    assert_eq!((held(), test.worker.may_sleep()), (1, false));
    test.asleep.store(true, Relaxed);
    until("asleep", || test.worker.ineligible() == Some(Ineligible::Asleep)).await;
    // B8.19
    assert!(test.worker.may_sleep());
    // B8.13
    until("forgotten", || held() == 0).await;
    test.stop.cancel();
}

#[tokio::test]
async fn a_worker_of_another_engine_stays_out() {
    let test = test_worker("sglang").await;
    until("refused", || test.worker.ineligible() == Some(Ineligible::Misconfigured)).await;
    // It stays so while more probes succeed.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(test.worker.ineligible(), Some(Ineligible::Misconfigured));
    test.stop.cancel();
}

#[tokio::test]
async fn b4_a_removed_worker_s_task_ends() {
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let registry = Arc::new(Registry::default());
    registry.upsert(WorkerSpec::parse_flag("id=1,role=decode,engine=vllm,url=http://127.0.0.1:9").unwrap());
    start(&registry, probes(Duration::from_millis(5), Duration::from_millis(100)), &tasks, &stop);
    // The prober has two tasks of its own.
    until("three tasks", || tasks.len() == 3).await;
    registry.remove(WorkerId(1));
    // B4.1
    until("two tasks", || tasks.len() == 2).await;
    stop.cancel();
    tasks.close();
    tasks.wait().await;
}

#[tokio::test]
async fn b5_workers_that_join_together_are_not_asked_all_at_once() {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let (open, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (server, counts) = (tasks.clone(), (open.clone(), most.clone()));
    tasks.spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (open, most) = counts.clone();
            server.spawn(async move {
                let mut buffer = vec![0; 4096];
                while stream.read(&mut buffer).await.is_ok_and(|read| read > 0) {
                    most.fetch_max(open.fetch_add(1, Relaxed) + 1, Relaxed);
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    open.fetch_sub(1, Relaxed);
                    let body = r#"{"data":[{"id":"tiny"}]}"#;
                    let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                    if stream.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    let registry = Arc::new(Registry::default());
    for number in 1..=400 {
        let address = format!("127.0.{}.{}:{port}", 1 + number / 200, 1 + number % 200);
        let flag = format!("id={number},role=aggregated,engine=openai,url=http://{address}");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap());
    }
    let config = ProbeConfig {
        max_per_second: u32::MAX,
        ..probes(Duration::from_millis(10), Duration::from_secs(10))
    };
    start(&registry, config, &tasks, &stop);
    let all = || registry.snapshot().workers().iter().all(|worker| worker.health() == Health::Healthy);
    until("all were asked", all).await;
    // B5.9
    let most = most.load(Relaxed);
    assert!((200..=256).contains(&most), "{most}");
    stop.cancel();
}

#[tokio::test]
async fn b5_many_engines_that_never_answered_are_asked_less_often() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    tasks.spawn(async move {
        // Each is closed at once.
        while listener.accept().await.is_ok() {
            count.fetch_add(1, Relaxed);
        }
    });
    let registry = Arc::new(Registry::default());
    let spec = |number| {
        let flag = format!("id={number},role=aggregated,engine=openai,url=http://127.0.0.1:{port}/{number}");
        WorkerSpec::parse_flag(&flag).unwrap()
    };
    registry.apply((1..=200).map(spec).collect(), &[]);
    let config =
        ProbeConfig { max_per_second: 100, ..probes(Duration::from_millis(10), Duration::from_secs(10)) };
    start(&registry, config, &tasks, &stop);
    until("all were asked", || connections.load(Relaxed) >= 200).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    // B5.10: 50 a second, after the questions of the first moment, when few had failed. Every 10 ms would be
    // 40,000.
    let connections = connections.load(Relaxed);
    assert!((200..1_000).contains(&connections), "{connections}");
    stop.cancel();
}

#[tokio::test]
async fn i18_1_probes_connect_to_the_last_addresses_of_a_name() {
    let (_healthy, receiver) = watch::channel(true);
    let url = engine("tiny", receiver, Default::default(), &TaskTracker::new()).await;
    let port = url.rsplit_once(':').unwrap().1;
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let resolver = Resolver::new(move |name| match (name, count.fetch_add(1, Relaxed)) {
        ("engine", 0) => Ok(vec!["127.0.0.1:0".parse().unwrap()]),
        _ => Err(std::io::Error::other("no server answers")),
    });
    let get = async |host: &str| {
        // A client of its own has no connection yet.
        let clients = Clients::new(Arc::default(), resolver.clone());
        let url = format!("http://{host}:{port}");
        let spec = WorkerSpec::parse_flag(&format!("role=decode,engine=vllm,url={url}")).unwrap();
        let limit = Duration::from_secs(5);
        clients.of(&spec).get(&format!("{url}/health"), None, MAX_BODY, limit).await.0
    };
    assert!(matches!(get("engine").await, Response::Ok(_)));
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    // I18.1
    assert!(matches!(get("engine").await, Response::Ok(_)));
    assert_eq!(asked.load(Relaxed), 2);
    // I18.4
    let Response::Failed(problem) = get("other").await else { panic!("it has no address") };
    assert!(
        problem.ends_with("/health: the name `other` cannot be resolved: no server answers"),
        "{problem}"
    );
}
