//! `pointsman policy dev`, run as policy authors run it: against a real gateway, with real saves and keys.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests and their helpers may fail")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use serde_json::Value;

use self::rig::{Dev, Gateway, until};

mod promotion;
mod rig;

const BY_REQUESTS: &str = "cost = \"active_requests\"\n";

/// Arguments for a gateway.
struct Target {
    url: String,
    policies: String,
}

impl Target {
    fn of(gateway: &Gateway) -> Self {
        let url = format!("http://{}", gateway.admin);
        Self { url, policies: gateway.policies().display().to_string() }
    }

    fn arguments<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let own = ["--slot", "aggregated", "--policies", &self.policies, "--gateway", &self.url];
        own.iter().chain(more).copied().collect()
    }
}

/// A directory with one formula file.
fn formula(text: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rule.formula.toml");
    fs::write(&file, text).unwrap();
    (dir, file)
}

/// Saves a file as many editors do.
fn save(file: &Path, text: &str) {
    let staged = file.with_extension("tmp");
    fs::write(&staged, text).unwrap();
    fs::rename(staged, file).unwrap();
}

fn shadow(gateway: &Gateway) -> Value {
    gateway.slot()["shadow"].clone()
}

fn digest(text: &str) -> String {
    pointsman_policy_runtime::digest(text.as_bytes()).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saved_formula_is_the_shadow_a_broken_one_is_not_and_the_end_removes_it() {
    let gateway = Gateway::start().await;
    let _traffic = gateway.traffic(Arc::new(AtomicU32::new(2)));
    let (dir, file) = formula(BY_REQUESTS);
    let target = Target::of(&gateway);
    let mut dev = Dev::start(dir.path(), &target.arguments(&["."]));
    // O5.1
    let live = dev.until("shadow, generation ");
    assert!(live.contains(" s after the save (build 0.") && live.contains(", gateway "), "{live}");
    // O5.1
    dev.until("the first decision of generation ");
    // O5.1
    let agreement = dev.until("agrees in ");
    assert!(
        agreement.starts_with("now       shadow, generation ") && agreement.contains(" %), 0 failed"),
        "{agreement}"
    );
    // O5.3
    assert!(dev.output().contains(" would change\n"), "{}", dev.output());
    assert_eq!(shadow(&gateway)["digest"], digest(BY_REQUESTS));

    save(&file, "cost = \"active_requestz\"\n");
    let refused = dev.until("refused   ");
    // O5.2
    assert!(
        refused.contains("line 1, column 9") && refused.contains("did you mean `active_requests`?"),
        "{refused}"
    );
    // O5.2
    dev.until(" stays in the shadow lane");
    // O5.10: it is not installed
    let installed = fs::read_to_string(gateway.policies().join("aggregated.shadow.formula.toml")).unwrap();
    assert_eq!((installed.as_str(), gateway.slot()["refusals"].as_array().unwrap().len()), (BY_REQUESTS, 0));
    assert_eq!(shadow(&gateway)["digest"], digest(BY_REQUESTS));

    let other = "cost = \"active_requests * 2\"\n";
    save(&file, other);
    // O5.1
    dev.until("shadow, generation ");
    assert_eq!(shadow(&gateway)["digest"], digest(other));
    save(&file, other);
    dev.until("no change: generation ");
    let status = dev.terminate();
    assert_eq!(status.code(), Some(0), "{}", dev.output());
    // O5.4
    assert!(dev.output().contains("end       removed "), "{}", dev.output());
    assert!(gateway.files().is_empty(), "{:?}", gateway.files());
    until("the shadow ends", || shadow(&gateway).is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_make_it_canary_and_active_and_take_that_back() {
    if Command::new("script").arg("--version").output().is_err() {
        println!("skipped: `script` of util-linux is not installed");
        return;
    }
    let gateway = Gateway::start().await;
    let _traffic = gateway.traffic(Arc::new(AtomicU32::new(2)));
    let (dir, _) = formula("cost = \"0 - error_ppm\"\n");
    let target = Target::of(&gateway);
    let mut dev = Dev::in_terminal(dir.path(), &target.arguments(&[]));
    dev.until("keys      c canary, p promote");
    let before = gateway.slot()["policy"].clone();
    dev.until("live      shadow, generation ");
    dev.press('c');
    // O5.5
    dev.until("aggregated.canary.formula.toml now");
    dev.until("live      canary, generation ");
    assert_eq!(gateway.files(), ["aggregated.canary.formula.toml"]);
    dev.press('u');
    // O5.5
    dev.until("aggregated.shadow.formula.toml now");
    dev.until("live      shadow, generation ");
    dev.press('p');
    dev.until("serve all requests with generation ");
    dev.press('n');
    dev.until("promote   no");
    dev.press('p');
    dev.until("serve all requests with generation ");
    // O5.5: the first question was answered with no
    assert_eq!(gateway.slot()["policy"], before);
    dev.press('y');
    // O5.5
    dev.until("aggregated.formula.toml now, and stays");
    dev.until("live      active, generation ");
    // O5.5
    until("the promoted policy is the file's", || {
        gateway.files() == ["aggregated.formula.toml"] && gateway.slot()["source"] == "file"
    });
    dev.press('u');
    // O5.5
    dev.until("the active lane has the file that it had before");
    until("the default serves", || gateway.slot()["policy"] == before && gateway.files().is_empty());
    dev.press('q');
    let status = dev.wait();
    let output = dev.output();
    assert_eq!(status.code(), Some(0), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_goes_away_is_looked_for_until_it_is_back() {
    let mut gateway = Gateway::start().await;
    let (dir, file) = formula(BY_REQUESTS);
    let target = Target::of(&gateway);
    let mut dev = Dev::start(dir.path(), &target.arguments(&["rule.formula.toml"]));
    dev.until("live      shadow, generation ");
    gateway.kill();
    // O5.7
    dev.until("looking again every second");
    // A file that is saved meanwhile waits in the directory.
    let next = "cost = \"active_requests + 1\"\n";
    save(&file, next);
    let replay = dev.until("replay    ");
    assert!(replay.contains("Connection refused"), "{replay}");
    gateway.start_again();
    // O5.7
    dev.until("gateway   it answers again");
    dev.until("live      shadow, generation ");
    assert_eq!(shadow(&gateway)["digest"], digest(next));
    assert_eq!(dev.output().matches("looking again").count(), 1, "{}", dev.output());
    gateway.kill();
    assert_eq!(dev.terminate().code(), Some(0));
    // O5.4
    assert!(gateway.files().is_empty(), "{:?}", gateway.files());
}

#[tokio::test(flavor = "multi_thread")]
async fn one_pass_ends_with_a_code_for_scripts() {
    let gateway = Gateway::start().await;
    let target = Target::of(&gateway);
    let run = |dir: &Path, arguments: &[&str]| {
        let mut dev = Dev::start(dir, &[arguments, &["--once"]].concat());
        (dev.wait().code(), dev.output())
    };
    let (dir, file) = formula(BY_REQUESTS);
    let (code, text) = run(dir.path(), &target.arguments(&[]));
    // O5.9
    assert!(code == Some(0) && text.contains("live      shadow") && gateway.files().is_empty(), "{text}");
    let (code, text) = run(dir.path(), &target.arguments(&["--keep"]));
    // O5.4
    assert!(code == Some(0) && gateway.files() == ["aggregated.shadow.formula.toml"], "{text}");
    let (code, text) = run(dir.path(), &target.arguments(&[]));
    // O5.4: a file of another is not replaced
    assert!(code == Some(2) && text.contains("aggregated.shadow.formula.toml exists: remove it"), "{text}");
    fs::write(&file, "cost = \"active_requestz\"\n").unwrap();
    let (code, text) = run(dir.path(), &target.arguments(&["--replace"]));
    // O5.9
    assert!(code == Some(1) && text.contains("refused   "), "{text}");
    // O5.10: it did not replace the file that was there
    assert_eq!(gateway.files(), ["aggregated.shadow.formula.toml"], "{text}");
    // Without a gateway: build and cases.
    fs::write(&file, BY_REQUESTS).unwrap();
    let case = |row: u32| {
        format!(
            "[[case]]\nname = \"c\"\nrows = [{{ active-requests = 3 }}, {{}}]\nexpect = {{ row = {row} }}\n"
        )
    };
    for (row, expected, part) in
        [(1, 0, "1 passed, 0 failed\n"), (0, 1, "FAILED  c: expected row 0, got row 1")]
    {
        fs::write(dir.path().join("cases.toml"), case(row)).unwrap();
        let (code, text) = run(dir.path(), &[]);
        // O5.9
        assert!(code == Some(expected) && text.contains(part), "{text}");
    }
    fs::remove_file(dir.path().join("cases.toml")).unwrap();
    fs::write(&file, "cost = \"active_requestz\"\n").unwrap();
    let (code, text) = run(dir.path(), &[]);
    // O5.10: without cases and without a gateway
    assert!(
        code == Some(1) && text.contains("refused   rule.formula.toml (formula): line 1, column 9: cost: "),
        "{text}"
    );
    let (code, text) = run(dir.path(), &["--slot", "prefil"]);
    assert!(code == Some(2) && text.contains("expected prefill, decode"), "{text}");
    let empty = tempfile::tempdir().unwrap();
    let (code, text) = run(empty.path(), &[]);
    assert!(code == Some(2) && text.contains("has none of Cargo.toml"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn t1_a_formula_file_with_keep_alone_is_followed_in_the_shadow_lane() {
    let gateway = Gateway::start().await;
    let _traffic = gateway.traffic(Arc::new(AtomicU32::new(2)));
    let text = "keep = \"active_requests < 1000\"\n";
    let (dir, _) = formula(text);
    let target = Target::of(&gateway);
    let mut dev = Dev::start(dir.path(), &target.arguments(&["--timeout", "60"]));
    // T1.3
    dev.until("live      shadow, generation ");
    // T1.3
    dev.until("the first decision of generation ");
    assert_eq!(shadow(&gateway)["parts"][0]["digest"], digest(text));
    assert_eq!(dev.terminate().code(), Some(0));
    assert!(gateway.files().is_empty(), "{:?}", gateway.files());
}

/// A Rust project, from a new one to a policy that misbehaves only in the gateway.
#[tokio::test(flavor = "multi_thread")]
async fn a_rust_policy_is_built_again_after_each_save_and_its_failures_are_shown() {
    let gateway = Gateway::start().await;
    let tokens = Arc::new(AtomicU32::new(2));
    let _traffic = gateway.traffic(tokens.clone());
    let dir = tempfile::tempdir().unwrap();
    let project = dir.path().join("shortest");
    let mut new = Command::new(crate::programs::pointsman());
    new.current_dir(dir.path()).args(["policy", "new", "shortest", "--world", "selector"]);
    assert!(new.output().unwrap().status.success());
    // The lock file of the workspace keeps the build off the network.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    fs::copy(root.join("Cargo.lock"), project.join("Cargo.lock")).unwrap();
    let source = project.join("src/lib.rs");
    let good = fs::read_to_string(&source).unwrap();

    let target = Target::of(&gateway);
    let mut dev = Dev::start(dir.path(), &target.arguments(&["shortest"]));
    dev.until("cases     3 passed, 0 failed");
    dev.until("live      shadow, generation ");
    dev.until("the first decision of generation ");
    let first = shadow(&gateway)["digest"].clone();

    // A mistake is shown with its place.
    save(&source, &good.replace("least(&costs,", "leest(&costs,"));
    // O5.2
    dev.until("--> src/lib.rs:");
    dev.until(" stays in the shadow lane");
    // So is a case that fails.
    save(&source, &good.replace("let row = row.filter", "let row = Some(0).filter"));
    // O5.2
    dev.until("cases     FAILED  the worker with the fewest requests is chosen: expected row 1, got row 0");
    dev.until(" stays in the shadow lane");
    assert_eq!(shadow(&gateway)["digest"], first);

    // One that fails in the gateway only: its message must not reach the terminal as it is.
    let wants = "requests: wants.worker(facts::ACTIVE_REQUESTS)";
    let asks = good
        .replace("requests: Column<u32>,", "requests: Column<u32>, tokens: pointsman_policy_sdk::Slot<u32>,")
        .replace(wants, &format!("tokens: wants.request(facts::MAX_TOKENS), {wants}"));
    let misbehaving = |what: &str| {
        asks.replace(
            "let requests = self",
            &format!("if self.tokens.get(facts) == 7 {{ {what} }}\nlet requests = self"),
        )
    };
    save(&source, &misbehaving("panic!(\"wild \\u{1b}[2J\\u{202e} word\")"));
    dev.until("live      shadow, generation ");
    dev.until("decided   ");
    assert!(gateway.chat(7).is_some());
    // O5.8
    let line = dev.until("log       error: panicked at src/lib.rs:");
    assert!(line.ends_with(": wild \u{fffd}[2J\u{fffd} word"), "{line}");
    // O5.1
    let failure = dev.until("failure   1 of ");
    let told = [" calls failed; the last, request `", "`: trap: panicked at src/lib.rs:"];
    assert!(told.into_iter().all(|part| failure.contains(part)), "{failure}");
    // More of them are too many.
    tokens.store(7, Ordering::Relaxed);
    dev.until("withdrawn aggregated.shadow.wasm (rolled_back): rolled back after ");
    assert!(!dev.output().contains(['\u{1b}', '\u{202e}']), "{:?}", dev.output());
    tokens.store(2, Ordering::Relaxed);

    // One that loops.
    save(&source, &misbehaving("loop { std::hint::black_box(0); }"));
    dev.until("live      shadow, generation ");
    tokens.store(7, Ordering::Relaxed);
    let withdrawn = dev.until("withdrawn aggregated.shadow.wasm (rolled_back): ");
    assert!(withdrawn.contains("deadline") || withdrawn.contains("timeout"), "{withdrawn}");
    tokens.store(2, Ordering::Relaxed);
    assert!(gateway.chat(2).is_some());

    a_newer_save_ends_a_build(&project, &good, &mut dev);
    dev.until("live      shadow, generation ");
    assert_eq!(dev.terminate().code(), Some(0));
    assert!(gateway.files().is_empty(), "{:?}", gateway.files());
    a_build_has_a_limit(&project);
}

/// A build script that does not end, and writes its process id first.
fn stuck(project: &Path) -> PathBuf {
    let pid = project.join("target/pid");
    fs::create_dir_all(project.join("target")).unwrap();
    let _ = fs::remove_file(&pid);
    let text = format!(
        "fn main() {{ std::fs::write({:?}, std::process::id().to_string()).unwrap(); \
         std::thread::sleep(std::time::Duration::from_secs(600)); }}",
        pid.display().to_string()
    );
    save(&project.join("build.rs"), &text);
    pid
}

fn process_of(pid: &Path) -> PathBuf {
    let read = || fs::read_to_string(pid).ok().filter(|text| !text.is_empty());
    until("the build script runs", || read().is_some());
    Path::new("/proc").join(read().unwrap())
}

/// Returns whether a process has ended; its parent may not have asked for its status.
fn is_gone(process: &Path) -> bool {
    fs::read_to_string(process.join("stat")).map_or(true, |stat| stat.contains(") Z "))
}

fn a_newer_save_ends_a_build(project: &Path, good: &str, dev: &mut Dev) {
    let process = process_of(&stuck(project));
    fs::remove_file(project.join("build.rs")).unwrap();
    save(&project.join("src/lib.rs"), &good.replace("fewest active requests: ", "fewest requests: "));
    // O5.6
    dev.until("build     ended: there is a newer save");
    // O5.6
    until("the build script is gone", || is_gone(&process));
}

fn a_build_has_a_limit(project: &Path) {
    let pid = stuck(project);
    let mut dev = Dev::start(project, &["--once", "--timeout", "24"]);
    let process = process_of(&pid);
    // O5.6
    dev.until("build     it took more than 24 s and was ended");
    assert_eq!(dev.wait().code(), Some(1));
    // O5.6
    assert!(is_gone(&process));
}
