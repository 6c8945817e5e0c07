use std::{path::Path, sync::Arc};

use pointsman_workers::{Registry, Resolver};
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
    let fleet = Fleet::new(registry.clone(), Resolver::default(), rules);
    let (tracker, stop) = (TaskTracker::new(), CancellationToken::new());
    let config = FileSourceConfig {
        path: path.to_owned(),
        format: FileFormat::Workers,
        interval: Duration::from_millis(5),
        scheme: Scheme::Http,
        defaults: BTreeMap::new(),
    };
    start(FileSource::new(config), fleet.add_source("file:a"), &tracker, stop.clone());
    tracker.spawn(fleet.clone().run(stop.clone()));
    Running { fleet, registry, _stop: stop.drop_guard() }
}

impl Running {
    async fn until(&self, what: &str, check: impl Fn(&Self) -> bool) {
        for _ in 0..12_000 {
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
        // A file that is being written may be empty for a while.
        ("", "it is empty"),
        ("x = 1", "line 1: unknown field `x`, expected `workers`"),
        ("[[workers", "line 1: "),
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

fn worker(port: u16, more: &str) -> String {
    format!(
        "# generated {more}\n[[workers]]\nurl = \"http://a:{port}\"\nrole = \"decode\"\nengine = \"vllm\"\n"
    )
}

/// Replaces a file with another one for each reading: `text` gives the content of a number.
#[expect(clippy::disallowed_methods, reason = "the tests abort it")]
fn replaced(path: &Path, text: impl Fn(u32) -> String + Send + 'static) -> tokio::task::JoinHandle<()> {
    let (path, new) = (path.to_owned(), path.with_extension("new"));
    tokio::spawn(async move {
        for number in 0.. {
            std::fs::write(&new, text(number)).unwrap();
            std::fs::rename(&new, &path).unwrap();
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    })
}

#[tokio::test]
async fn p5_a_file_that_is_written_as_often_as_it_is_read_is_applied_or_away() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.toml");
    std::fs::write(&path, worker(1, "")).unwrap();
    let running = run(&path);
    running.until("it is read", |running| running.urls() == ["http://a:1"]).await;
    let writer = replaced(&path, |number| worker(2, &number.to_string()));
    // P5.8
    running.until("the change is applied", |running| running.urls() == ["http://a:2"]).await;
    assert_eq!(running.state(), SourceState::Present);
    writer.abort();
    let writer = replaced(&path, |number| worker(100 + u16::try_from(number % 60_000).unwrap(), ""));
    // P5.8
    running.until("it is away", |running| running.problem().contains("its workers differ in each of")).await;
    writer.abort();
    running.until("it is present", |running| running.state() == SourceState::Present).await;
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn p3_a_pipe_in_the_place_of_the_file_is_away_and_does_not_stop_the_source() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.toml");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let running = run(&path);
    // P3.6
    running.until("it is away", |running| running.problem().contains("it is not a regular file")).await;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, worker(1, "")).unwrap();
    // P3.6
    running.until("it is present", |running| running.urls() == ["http://a:1"]).await;
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

fn of(path: &str, text: &str) -> Result<Vec<String>, String> {
    let file: WorkersFile = parse(Path::new(path), text.as_bytes())?;
    Ok(file.workers.iter().map(|spec| format!("{} {}", spec.url, spec.role)).collect())
}

#[test]
fn p5_files_are_read_as_editors_and_generators_write_them() {
    let merged = "x-all: &all\n  engine: vllm\n  role: decode\nworkers:\n  - <<: *all\n    url: http://a:1\n  - <<: \
                  [{ role: prefill }, *all]\n    url: http://b:1\n";
    let first = "- &one { url: http://a:1, role: decode, engine: vllm }\n- { <<: *one, url: http://b:1, role: \
                 prefill }\n";
    let json = r#"[{"url": "http://a:1", "role": "decode", "engine": "vllm", "models": null, "labels": null,
        "taints": null, "topology": null, "loras": null, "prefill_cancellable": null, "api_key": null, "id": null},
        {"url": "http://b:1", "role": "prefill", "engine": "vllm"}]"#;
    let yaml = "workers:\r\n  - url: http://a:1\r\n    role: decode\r\n    engine: vllm\r\n    models:\r\n    \
                labels:\r\n  - {url: 'http://b:1', role: prefill, engine: vllm}\r\n";
    let toml = "[[workers]]\r\nurl = \"http://a:1\"\r\nrole = \"decode\"\r\nengine = \"vllm\"\r\n\
                [[workers]]\r\nurl=\"http://b:1\"\r\nrole=\"prefill\"\r\nengine=\"vllm\"\r\n";
    for (path, text) in
        [("a.yaml", merged), ("a.yml", first), ("a.json", json), ("a.yaml", yaml), ("a.toml", toml)]
    {
        for mark in ["", "\u{feff}"] {
            // P5.1, P5.4
            let read = of(path, &format!("{mark}{text}"));
            assert_eq!(read.unwrap(), ["http://a:1 decode", "http://b:1 prefill"], "{path}: {text}");
        }
    }
    assert!(of("a.yaml", "workers: []").unwrap().is_empty() && of("a.json", "[]").unwrap().is_empty());
}

#[test]
fn p5_a_refused_file_says_where_and_what_to_write() {
    let worker = r#""url": "http://u:geheim@a:1", "role": "decode", "engine": "vllm""#;
    let tabs = "workers:\n\t- url: http://a:1\n";
    let commented = "{\n  // the first rack\n  \"workers\": []\n}";
    let hashed = "{\n  \"workers\": [] # none\n}";
    let key = "[[workers]]\nurl = \"http://a:1\"\napi_key = 4711\n";
    let bad = "workers = [{ url = \"http://a:1\", api_key = \"geheim\", rolle = \"x\" }]";
    for (path, text, expected) in [
        ("a.yaml", tabs, "line 2 column 1"),
        ("a.yaml", tabs, "YAML is indented with blanks, not with tabs"),
        ("a.json", commented, "line 2: JSON has no comments"),
        ("a.json", hashed, "line 2: JSON has no comments"),
        ("a.yaml", "workers:\n", "the list is null: write [] for an empty list"),
        ("a.yaml", "# none\n", "`workers` with a list of workers, which may be empty"),
        ("a.yaml", " \r\n", "it is empty"),
        ("a.json", "{\"workers\": [], \"workers\": []}", "duplicate field `workers`"),
        ("a.json", &format!("[{{{worker}}}]"), "http://[secret]@a:1"),
        ("a.toml", key, "line 3: invalid type: a number, expected text in quotation marks"),
        ("a.toml", bad, "line 1: unknown field `rolle`"),
        ("a.json", "{\"workers\": \"none\"}", "expected a sequence at line 1"),
        ("a.toml", "workers = 3", "line 1: invalid type: integer `3`, expected a sequence"),
    ] {
        let problem = of(path, text).unwrap_err();
        // P5.2, P5.5
        assert!(problem.contains(expected), "{text}: {problem}");
        assert!(!problem.contains("geheim") && !problem.contains("4711"), "{problem}");
    }
    let latin: Result<WorkersFile, String> = parse(Path::new("a.yaml"), b"workers: [] # caf\xe9");
    assert!(latin.err().unwrap().contains("it is not UTF-8"));
    // Aliases that grow without end.
    let bomb = "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n\
                d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: {<<: {z: *e}}\n";
    of("a.yaml", &bomb.replace("z:", "z: *e, y: *e, x:")).unwrap_err();
}

#[tokio::test]
async fn p5_a_worker_that_is_listed_twice_is_refused_with_both_places() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.yaml");
    let line = |more: &str| format!("  - {{ role: decode, engine: vllm, {more} }}\n");
    let lines =
        ["url: http://a:1", "url: http://b:1, id: 7", "url: HTTP://a:1/", "url: http://c:1, id: 7"].map(line);
    std::fs::write(&path, format!("workers:\n{}", lines.concat())).unwrap();
    let running = run(&path);
    running.until("they joined", |running| running.urls().len() == 2).await;
    let status = running.fleet.status();
    let refused: Vec<&str> =
        status.sources[2].refused.iter().map(|refusal| refusal.problem.as_str()).collect();
    // P5.6
    assert_eq!(
        refused,
        [
            "worker 3 of the file has the URL of worker 1: remove one of them",
            "worker 4 of the file has the id of worker 2: remove one of them",
        ]
    );
}
