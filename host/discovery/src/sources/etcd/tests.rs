//! Against the real server; without `etcd` in the PATH these tests say so and pass.

#![allow(clippy::print_stderr, reason = "a test says that it was skipped")]

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
};

use pointsman_rig::fleet::free_port;
use pointsman_test_stopping_proxy::StoppingProxy;
use pointsman_workers::{Registry, Resolver, Role};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use super::*;
use crate::{
    fleet::{Fleet, FleetRules, SourceState},
    guard::GuardRules,
    source::start,
};

struct Etcd {
    process: Child,
    data: tempfile::TempDir,
    ports: [u16; 2],
    client: Client,
}

impl Etcd {
    async fn start() -> Option<Self> {
        let (ports, data) = ([(); 2].map(|()| free_port().unwrap()), tempfile::tempdir().unwrap());
        let process = spawn(data.path(), ports)?;
        let client = http::client(&TlsFiles::default(), "http://127.0.0.1").unwrap();
        let etcd = Self { process, data, ports, client };
        etcd.ready().await;
        Some(etcd)
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports[0])
    }

    async fn call(&self, path: &str, body: Value) -> Option<Value> {
        let (url, timeout) = (self.url(), Duration::from_secs(5));
        let member = Member { client: &self.client, endpoint: &url, token: None, timeout };
        member.call(path, &body).await.ok()
    }

    async fn ready(&self) {
        for _ in 0..300 {
            if self.call("/v3/kv/range", json!({ "key": BASE64.encode("a") })).await.is_some() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("etcd does not answer");
    }

    async fn put(&self, key: &str, value: &str, lease: u64) {
        let body =
            json!({ "key": BASE64.encode(key), "value": BASE64.encode(value), "lease": lease.to_string() });
        self.call("/v3/kv/put", body).await.unwrap();
    }

    async fn worker(&self, id: u64, lease: u64) {
        let value = json!({ "id": id, "url": format!("http://a:{id}"), "role": "decode", "engine": "vllm" });
        self.put(&format!("/w/{id}"), &value.to_string(), lease).await;
    }

    async fn delete(&self, id: u64) {
        self.call("/v3/kv/deleterange", json!({ "key": BASE64.encode(format!("/w/{id}")) })).await.unwrap();
    }

    async fn compact(&self) {
        let all = self.call("/v3/kv/range", json!({ "key": BASE64.encode("a") })).await.unwrap();
        let revision = all["header"]["revision"].as_str().unwrap().to_owned();
        self.call("/v3/kv/compaction", json!({ "revision": revision, "physical": true })).await.unwrap();
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    async fn restart(&mut self) {
        self.process = spawn(self.data.path(), self.ports).unwrap();
        self.ready().await;
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn spawn(data: &Path, [client, peer]: [u16; 2]) -> Option<Child> {
    let (client, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
    let spawned = Command::new("etcd")
        .args(["--name", "a", "--data-dir"])
        .arg(data)
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("a={peer}")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    if spawned.is_err() {
        eprintln!("skipped: etcd is not installed (Debian: etcd-server)");
    }
    spawned.ok()
}

struct Running {
    fleet: Arc<Fleet>,
    registry: Arc<Registry>,
    _stop: DropGuard,
}

fn run(endpoints: Vec<String>) -> Running {
    run_with(endpoints, Duration::from_secs(2))
}

fn run_with(endpoints: Vec<String>, timeout: Duration) -> Running {
    let guard = GuardRules { share: 0.5, min_workers: 3, confirm_after: Duration::from_secs(1) };
    let rules = FleetRules { max_workers: 100, drain: Duration::from_secs(30), moves: false, guard };
    let registry = Arc::new(Registry::default());
    let fleet = Fleet::new(registry.clone(), Resolver::default(), rules);
    let (tracker, stop) = (TaskTracker::new(), CancellationToken::new());
    let config = EtcdSourceConfig {
        endpoints,
        prefix: "/w/".to_owned(),
        timeout,
        resync: Duration::from_secs(300),
        tls: TlsFiles::default(),
        user: None,
    };
    start(EtcdSource::new(config), fleet.add_source("etcd:a"), &tracker, stop.clone());
    tracker.spawn(fleet.clone().run(stop.clone()));
    Running { fleet, registry, _stop: stop.drop_guard() }
}

impl Running {
    fn ids(&self) -> Vec<u64> {
        let mut ids: Vec<u64> =
            self.registry.snapshot().workers().iter().map(|worker| worker.id().0).collect();
        ids.sort_unstable();
        ids
    }

    async fn until(&self, what: &str, check: impl Fn(&Self) -> bool) {
        for _ in 0..6_000 {
            if check(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{what}: {:?} {:?}", self.ids(), self.fleet.status());
    }

    async fn until_ids(&self, what: &str, ids: impl IntoIterator<Item = u64>) {
        let ids: Vec<u64> = ids.into_iter().collect();
        self.until(what, |running| running.ids() == ids).await;
    }
}

#[tokio::test]
async fn p8_an_etcd_that_lost_its_data_keeps_its_workers_until_it_is_read_again() {
    let Some(mut etcd) = Etcd::start().await else { return };
    for id in 1..=2 {
        etcd.worker(id, 0).await;
    }
    let running = run(vec![etcd.url()]);
    running.until_ids("the keys are read", 1..=2).await;
    etcd.kill();
    etcd.data = tempfile::tempdir().unwrap();
    etcd.restart().await;
    // P8.9: fewer than `removal_min`
    running.until("the removal waits", |running| running.fleet.status().sources[2].held == 2).await;
    assert_eq!(running.ids(), [1, 2]);
    etcd.worker(1, 0).await;
    running.until("one is back", |running| running.fleet.status().sources[2].held == 1).await;
    running.until_ids("the other one is gone", [1]).await;
}

#[tokio::test]
async fn p8_keys_that_end_together_down_to_the_last_one_wait_for_a_whole_reading() {
    let Some(etcd) = Etcd::start().await else { return };
    etcd.worker(1, 0).await;
    let running = run(vec![etcd.url()]);
    running.until_ids("one", [1]).await;
    etcd.delete(1).await;
    // P8.2: a single one does not wait
    running.until_ids("none", []).await;
    let granted = etcd.call("/v3/lease/grant", json!({ "TTL": "60" })).await.unwrap();
    let lease: u64 = granted["ID"].as_str().unwrap().parse().unwrap();
    etcd.worker(1, lease).await;
    etcd.worker(2, lease).await;
    running.until_ids("two", [1, 2]).await;
    etcd.call("/v3/kv/lease/revoke", json!({ "ID": lease.to_string() })).await.unwrap();
    let held = |running: &Running| running.fleet.status().sources[2].held == 2;
    running.until("they wait", held).await;
    // P8.9
    assert_eq!(running.ids(), [1, 2]);
    // P8.9: the second reading confirms it
    running.until_ids("none again", []).await;
}

#[tokio::test]
async fn p8_an_engine_that_registers_under_another_key_is_what_that_one_says() {
    let Some(etcd) = Etcd::start().await else { return };
    let running = run(vec![etcd.url()]);
    let describe = |role: &str| json!({ "url": "http://a:1", "role": role, "engine": "vllm" }).to_string();
    etcd.put("/w/1", &describe("prefill"), 0).await;
    etcd.put("/w/2", &describe("aggregated"), 0).await;
    let role = |running: &Running| {
        running.registry.snapshot().workers().iter().map(|worker| worker.spec().role).collect::<Vec<_>>()
    };
    // P8.10
    running.until("the later key", |running| role(running) == [Role::Aggregated]).await;
    let refused = |running: &Running| -> Vec<String> {
        let status = running.fleet.status().sources[2].clone();
        status.refused.iter().map(|refusal| refusal.entry.clone()).collect()
    };
    etcd.put("/w/1", &describe("decode"), 0).await;
    etcd.worker(3, 0).await;
    running.until("a key after it", |running| running.ids().len() == 2).await;
    // P8.10: a key that is written again is not a later one
    assert!(role(&running).contains(&Role::Aggregated), "{:?}", role(&running));
    assert_eq!(refused(&running), ["/w/1"]);
    etcd.delete(3).await;
    etcd.delete(1).await;
    running.until("only the later key", |running| running.ids().len() == 1).await;
    etcd.put("/w/1", &describe("decode"), 0).await;
    // P8.10
    running.until("the first key, created again", |running| role(running) == [Role::Decode]).await;
    assert_eq!(refused(&running), ["/w/2"]);
}

#[tokio::test]
async fn p8_keys_are_followed_over_changes_leases_compaction_and_restarts() {
    let Some(mut etcd) = Etcd::start().await else { return };
    for id in 1..=4 {
        etcd.worker(id, 0).await;
    }
    // The first member does not answer.
    let running = run(vec!["http://127.0.0.1:1".to_owned(), etcd.url()]);
    // P8.1
    running.until_ids("the keys are read", 1..=4).await;
    etcd.worker(5, 0).await;
    running.until_ids("a new key is followed", 1..=5).await;
    etcd.delete(5).await;
    running.until_ids("a removed key is followed", 1..=4).await;
    let lease = etcd.call("/v3/lease/grant", json!({ "TTL": "2", "ID": "77" })).await.unwrap();
    assert_eq!(lease["ID"], "77", "{lease}");
    etcd.worker(6, 77).await;
    running.until_ids("a leased key is there", [1, 2, 3, 4, 6]).await;
    // P8.2
    running.until_ids("its lease ended", 1..=4).await;
    etcd.put("/w/1", "garbage", 0).await;
    running.until("garbage is refused", |running| running.fleet.status().sources[2].refused_count == 1).await;
    // P2.5: over a watch
    assert_eq!(running.ids(), [1, 2, 3, 4]);
    etcd.worker(1, 0).await;
    etcd.kill();
    running.until("it is away", |running| running.fleet.status().sources[2].state == SourceState::Away).await;
    // P8.3
    assert_eq!(running.ids(), [1, 2, 3, 4]);
    etcd.restart().await;
    etcd.delete(4).await;
    etcd.worker(7, 0).await;
    etcd.compact().await;
    // P8.4
    running.until_ids("changes while it was away are read", [1, 2, 3, 7]).await;
    etcd.worker(8, 0).await;
    running.until_ids("the watch goes on", [1, 2, 3, 7, 8]).await;
    for id in [1, 2, 3, 7] {
        etcd.delete(id).await;
    }
    running.until("the removal waits", |running| running.fleet.status().sources[2].held > 0).await;
    // P4.2: the source reads everything again
    running.until_ids("and is confirmed", [8]).await;
}

#[tokio::test]
async fn p8_a_watch_from_a_compacted_revision_reads_everything_again() {
    let Some(etcd) = Etcd::start().await else { return };
    for id in 1..=3 {
        etcd.worker(id, 0).await;
    }
    etcd.compact().await;
    let body = json!({ "create_request": { "key": BASE64.encode("/w/"), "start_revision": "1" } });
    let url = etcd.url();
    let timeout = Duration::from_secs(5);
    let member = Member { client: &etcd.client, endpoint: &url, token: None, timeout };
    let response = http::send(member.request("/v3/watch", &body), timeout).await.unwrap();
    let fleet = Fleet::new(
        Arc::new(Registry::default()),
        Resolver::default(),
        FleetRules {
            max_workers: 9,
            drain: timeout,
            moves: false,
            guard: GuardRules { share: 0.5, min_workers: 3, confirm_after: timeout },
        },
    );
    let reporter = fleet.add_source("etcd:a");
    let config = EtcdSourceConfig {
        endpoints: vec![url.clone()],
        prefix: "/w/".to_owned(),
        timeout,
        resync: timeout * 10,
        tls: TlsFiles::default(),
        user: None,
    };
    let (mut source, mut pauses) = (EtcdSource::new(config), Pauses::default());
    let watched = source.watch(&member, Lines::new(response, MAX_MESSAGE), &reporter, &mut pauses);
    // P8.4: a watch that was compacted ends, and everything is read again
    assert!(tokio::time::timeout(timeout, watched).await.unwrap().is_ok());
}

#[tokio::test]
async fn p8_a_member_that_hangs_while_it_is_watched_is_noticed_and_the_next_one_is_read() {
    let Some(etcd) = Etcd::start().await else { return };
    etcd.worker(1, 0).await;
    let hanging = StoppingProxy::start(etcd.ports[0]).await.unwrap();
    let endpoints = vec![format!("http://{}", hanging.address), etcd.url()];
    let running = run_with(endpoints, Duration::from_secs(10));
    running.until_ids("the key is read", [1]).await;
    let age = |running: &Running| running.fleet.status().sources[2].age_ms.unwrap();
    let read = Instant::now();
    running.until("it is asked", |running| read.elapsed() > CHECK_INTERVAL && age(running) < 1_000).await;
    let times_away = |running: &Running| running.fleet.status().sources[2].times_away;
    // P8.8
    assert_eq!(times_away(&running), 0);
    hanging.stop(true);
    let stopped = Instant::now();
    etcd.worker(2, 0).await;
    running.until_ids("the other member is read", [1, 2]).await;
    // P8.8
    assert!(stopped.elapsed() < Duration::from_secs(60) && times_away(&running) >= 1);
}

#[test]
fn a_prefix_is_a_range_of_keys() {
    let decoded = |text: &str| BASE64.decode(text).unwrap();
    let (key, end) = range("/w/");
    assert_eq!((decoded(&key), decoded(&end)), (b"/w/".to_vec(), b"/w0".to_vec()));
    let (key, end) = range("");
    assert_eq!((decoded(&key), decoded(&end)), (vec![0], vec![0]));
}
