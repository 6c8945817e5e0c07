use std::sync::Arc;

use pointsman_workers::Registry;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::*;
use crate::{
    fleet::{Fleet, FleetRules, SourceState},
    guard::GuardRules,
    source::start,
};

struct Running {
    fleet: Arc<Fleet>,
    registry: Arc<Registry>,
    _stop: tokio_util::sync::DropGuard,
}

fn run(path: &Path) -> Running {
    let guard = GuardRules { share: 0.5, min_workers: 3, confirm_after: Duration::from_millis(50) };
    let rules = FleetRules { max_workers: 100, drain: Duration::from_secs(30), moves: false, guard };
    let registry = Arc::new(Registry::default());
    let fleet = Fleet::new(registry.clone(), rules);
    let (tracker, stop) = (TaskTracker::new(), CancellationToken::new());
    let config = FileSourceConfig {
        path: path.to_owned(),
        format: FileFormat::Workers,
        interval: Duration::from_millis(5),
        defaults: BTreeMap::new(),
    };
    start(FileSource::new(config), fleet.add_source("file:a"), &tracker, stop.clone());
    tracker.spawn(fleet.clone().run(stop.clone()));
    Running { fleet, registry, _stop: stop.drop_guard() }
}

impl Running {
    async fn until(&self, what: &str, check: impl Fn(&Self) -> bool) {
        for _ in 0..1_000 {
            if check(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("{what}: {:?}", self.fleet.status());
    }

    fn urls(&self) -> Vec<String> {
        self.registry.snapshot().workers().iter().map(|worker| worker.spec().url.to_string()).collect()
    }

    fn state(&self) -> SourceState {
        self.fleet.status().sources[2].state
    }

    fn problem(&self) -> String {
        self.fleet.status().sources[2].problem.clone().unwrap_or_default()
    }
}

#[tokio::test]
async fn p5_a_changed_file_is_applied_and_one_with_a_problem_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.toml");
    let running = run(&path);
    running.until("a missing file is away", |running| running.state() == SourceState::Away).await;
    let worker =
        |port: u16| format!("[[workers]]\nurl = \"http://a:{port}\"\nrole = \"decode\"\nengine = \"vllm\"\n");
    std::fs::write(&path, worker(1)).unwrap();
    // P5.1
    running.until("it appeared", |running| running.urls() == ["http://a:1"]).await;
    std::fs::write(&path, format!("{}{}", worker(1), worker(2))).unwrap();
    running.until("it changed", |running| running.urls().len() == 2).await;
    for (text, expected) in [
        ("[[workers]]\nurl = \"http://a:1\"\nrole = \"cook\"\nengine = \"vllm\"\n", "unknown role `cook`"),
        ("", "missing field `workers`"),
        ("[[workers", "TOML parse error"),
    ] {
        std::fs::write(&path, text).unwrap();
        running.until("the problem is told", |running| running.problem().contains(expected)).await;
        // P5.2
        assert_eq!(running.urls().len(), 2);
    }
    std::fs::remove_file(&path).unwrap();
    running.until("it is away", |running| running.problem().contains("No such file")).await;
    assert_eq!(running.urls().len(), 2);
    std::fs::write(&path, worker(2)).unwrap();
    running.until("it is back", |running| running.urls() == ["http://a:2"]).await;
}

#[tokio::test]
async fn p4_a_file_that_lists_no_worker_is_read_again_before_the_fleet_is_empty() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.json");
    let workers: Vec<_> = (1..=8)
        .map(|port| serde_json::json!({ "url": format!("http://a:{port}"), "role": "decode", "engine": "vllm" }))
        .collect();
    std::fs::write(&path, serde_json::json!({ "workers": workers }).to_string()).unwrap();
    let running = run(&path);
    running.until("they joined", |running| running.urls().len() == 8).await;
    std::fs::write(&path, "{ \"workers\": [] }").unwrap();
    running.until("the removal waits", |running| running.fleet.status().sources[2].held == 8).await;
    assert_eq!(running.urls().len(), 8);
    running.until("it is confirmed", |running| running.urls().is_empty()).await;
}

#[test]
fn the_extension_tells_the_syntax() {
    let parse = |path: &str, text: &str| parse::<WorkersFile>(Path::new(path), text.as_bytes());
    let yaml = "workers:\n  - { url: http://a:1, role: decode, engine: vllm }\n";
    // P5.1: the syntaxes
    assert_eq!(parse("a.yaml", yaml).unwrap().workers.len(), 1);
    assert_eq!(parse("a.yml", yaml).unwrap().workers.len(), 1);
    assert!(parse("a.json", "{ \"workers\": [] }").unwrap().workers.is_empty());
    assert!(parse("a.txt", yaml).err().unwrap().contains("expected the extension"));
}
