//! The commands for a running gateway, run as operators run them: the real binary against a real daemon.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests and their helpers may fail"
)]

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpListener,
    path::Path,
    process::Stdio,
    thread,
    time::Duration,
};

use pointsman_embedded_policies::LEAST_LOADED;
use pointsman_sim::{Dialect, Role, Sim, SimConfig, SimHandle};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};

use crate::process::{Process, body_of, command, run};

/// A daemon in a process of its own. Dropping it ends the process.
struct Daemon {
    _process: Process,
    listening: String,
    admin: String,
    _dir: tempfile::TempDir,
}

impl Daemon {
    /// Starts a daemon with this configuration, besides `[server]` with its addresses.
    fn start(config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p.toml");
        let addresses = "listen = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\nthreads = 1\n";
        fs::write(&file, format!("[server]\n{addresses}{config}")).unwrap();
        let mut command = command(crate::programs::pointsman(), &["serve", "--config"]);
        let mut process = Process::start(command.arg(&file).stdout(Stdio::piped()).stderr(Stdio::null()));
        let [listening, admin] = process.addresses();
        Self { _process: process, listening, admin, _dir: dir }
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        pointsman(&[arguments, &["--gateway", &format!("http://{}", self.admin)]].concat(), &[])
    }

    /// Runs `status` until it succeeds.
    fn ready(&self) -> Ran {
        for _ in 0..400 {
            let ran = self.run(&["status"]);
            if ran.code == Some(0) {
                return ran;
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("not ready: {}", self.run(&["status"]).out);
    }
}

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

fn pointsman(arguments: &[&str], variables: &[(&str, &str)]) -> Ran {
    let mut command = command(crate::programs::pointsman(), arguments);
    let (code, out, err) = run(command.envs(variables.iter().copied()), "");
    Ran { code, out, err }
}

fn chat(tokens: u32) -> String {
    let messages = json!([{ "role": "user", "content": "hello" }]);
    json!({ "model": "tiny", "max_tokens": tokens, "ignore_eos": true, "messages": messages }).to_string()
}

/// An engine, and a daemon in front of it.
async fn serving(change: impl FnOnce(&mut SimConfig), server: &str) -> (SimHandle, Daemon) {
    let mut config = SimConfig::instant(Dialect::Vllm, Role::Aggregated);
    change(&mut config);
    let sim = Sim::start(config).await.unwrap();
    let worker =
        format!("[[workers]]\nid = 7\nurl = '{}'\nrole = 'aggregated'\nengine = 'vllm'\n", sim.url());
    let daemon = Daemon::start(&format!("{server}[probe]\ninterval = '50ms'\n{worker}"));
    (sim, daemon)
}

#[tokio::test(flavor = "multi_thread")]
async fn status_workers_and_decisions_show_what_a_served_request_left() {
    let (_sim, daemon) = serving(|_| {}, "").await;
    // O1.1
    let ready = daemon.ready();
    for part in ["ready        yes: tiny", "1 of 1 eligible", "SLOT", "aggregated", "p50", "0 waiting, 0 B"] {
        // O1.2
        assert!(ready.out.contains(part), "{part}: {}", ready.out);
    }
    body_of(&daemon.listening, "POST /v1/chat/completions", &chat(4)).unwrap();
    let workers = daemon.run(&["workers"]);
    let row = workers.out.lines().find(|line| line.starts_with("7 ")).unwrap();
    let cells: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(cells[..5], ["7", "aggregated", "vllm", "eligible", "0"], "{}", workers.out);

    let listed: Value = serde_json::from_str(&body_of(&daemon.admin, "GET /decisions", "").unwrap()).unwrap();
    let id = listed["decisions"][0]["id"].as_str().unwrap();
    let table = daemon.run(&["decisions", "--last", "5", "--slot", "aggregated", "--worker", "7"]);
    assert!(table.out.lines().nth(1).unwrap().starts_with(id), "{}", table.out);
    assert_eq!(daemon.run(&["decisions", "--worker", "8"]).out, "no decision matches; the gateway keeps 1\n");
    let summary = daemon.run(&["decisions", "summary", "--window", "15m"]).out;
    let row = summary.lines().find(|line| line.starts_with("aggregated")).unwrap();
    // O1.13
    assert_eq!(
        row.split_whitespace().take(4).collect::<Vec<_>>(),
        ["aggregated", "all", "active", "1"],
        "{summary}"
    );
    let policies = daemon.run(&["policies"]).out;
    // O1.10
    assert!(policies.contains("decode-override  all    active"), "{policies}");
    let undo = daemon.run(&["policy", "rollback", "prefill", "--undo"]);
    // O1.12
    assert!(undo.code == Some(1) && undo.err.contains("(409 nothing_to_undo)"), "{}", undo.err);
    let reload = daemon.run(&["policy", "reload"]);
    // O1.11
    assert_eq!((reload.code, &*reload.out), (Some(0), "nothing changed\n"), "{}", reload.err);
    let frame = daemon.run(&["top", "--once"]);
    // O3.6
    assert_eq!((frame.code, frame.out.lines().count()), (Some(0), 24), "{}{}", frame.out, frame.err);
    assert!(frame.out.contains(" live ") && frame.out.contains(".0.0.1:"), "{}", frame.out);
    // O1.5
    let told = daemon.run(&["decisions", id]).out;
    for sentence in [
        "the aggregated leg of request",
        "Slot aggregated ran",
        "Worker 7 (rank 0) was chosen",
        "among 1 candidate.",
        "with status 200 (ok)",
        "4 output tokens",
    ] {
        assert!(told.contains(sentence), "{sentence}: {told}");
    }
    // O1.3
    let json = daemon.run(&["decisions", "--json", "--last", "50"]).out;
    assert_eq!(json.trim_end(), body_of(&daemon.admin, "GET /decisions?limit=50", "").unwrap());
    let json: Value = serde_json::from_str(&daemon.run(&["status", "--json"]).out).unwrap();
    assert_eq!((&json["ready"], &json["workers"]["total"]), (&json!(true), &json!(1)));
    // O1.1
    let missing = daemon.run(&["decisions", "0000000000000001"]);
    assert_eq!(missing.code, Some(1), "{}", missing.err);
    assert!(missing.err.contains("the gateway refused (404 decision_not_found)"), "{}", missing.err);
    let hint = "; a request id: `pointsman decisions --request 0000000000000001`";
    // O1.5
    assert!(missing.err.contains(hint), "{}", missing.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_keeps_no_candidate_is_named_by_the_decision_and_by_the_status() {
    let dir = tempfile::tempdir().unwrap();
    let filter = "keep = \"prompt_tokens > 100000\"\n";
    fs::write(dir.path().join("aggregated.formula.toml"), filter).unwrap();
    let policies = format!("[policies]\ndir = '{}'\n", dir.path().display());
    let (_sim, daemon) = serving(|_| {}, &policies).await;
    let status = daemon.ready().out;
    let digest = &pointsman_policy_runtime::digest(filter.as_bytes()).to_string()[..12];
    for shown in [status, daemon.run(&["policies"]).out] {
        let row = shown.lines().find(|line| line.starts_with("aggregated ")).unwrap();
        // T1.2
        assert!(row.contains("formula+predicted-latency") && row.contains(&format!(" {digest}+")), "{shown}");
    }
    body_of(&daemon.listening, "POST /v1/chat/completions", &chat(4)).unwrap();
    let listed: Value = serde_json::from_str(&body_of(&daemon.admin, "GET /decisions", "").unwrap()).unwrap();
    let told = daemon.run(&["decisions", listed["decisions"][0]["id"].as_str().unwrap()]).out;
    let ran = format!("\nSlot aggregated ran filter formula (digest {digest}, settings ");
    let kept = "), which kept 0 of 1; policy ";
    let none = "\nNo candidate was chosen: no worker can serve 'tiny': the filters dropped every candidate \
                (nobody_left). The decision took ";
    // T1.1
    assert!(
        told.contains(&ran) && told.contains(kept) && told.contains(", lane active) was not called.\n"),
        "{told}"
    );
    // T1.1
    assert!(told.contains(none), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn status_shows_a_refused_file_and_a_promotion_says_why_it_cannot_be() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("prefill.canary.wasm"), b"garbage").unwrap();
    let policies = format!("[policies]\ndir = '{}'\n", dir.path().display());
    let (_sim, daemon) = serving(|_| {}, &policies).await;
    let status = daemon.ready().out;
    let refused = status.lines().find(|line| line.starts_with("refused ")).unwrap_or_default();
    // O1.16
    assert!(refused.starts_with("refused      prefill.canary.wasm (not_wasm), "), "{status}");
    // O1.14
    for (from, expected) in [
        ("canary", "`prefill.canary.wasm` was refused (not_wasm): correct it first"),
        (
            "left",
            "`from=left` is not a lane for this: expected canary or shadow; slot `prefill` runs active `kv-aware`",
        ),
    ] {
        let promoted = daemon.run(&["policy", "promote", "prefill", "--from", from]);
        assert!(promoted.code == Some(1) && promoted.err.contains(expected), "{}", promoted.err);
    }
}

/// A daemon with a directory of policies that has these files.
fn with_policies(files: &[(&str, &[u8])], slots: &str) -> (tempfile::TempDir, Daemon) {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let daemon = Daemon::start(&format!("[policies]\ndir = '{}'\n{slots}", dir.path().display()));
    (dir, daemon)
}

#[test]
fn n7_settings_of_a_policy_do_not_reach_a_trial_of_another_and_a_trial_stops_no_start() {
    let formula = "[policies.slots.prefill]\nbuiltin = 'formula'\nsettings = { cost = 'engine_queue' }\n\
                   shadow = { share = 0.5, builtin = 'least-loaded' }\n\
                   [policies.slots.decode]\nsettings = { weight = 2 }\n";
    let files: [(&str, &[u8]); 3] = [
        ("prefill.canary.wasm", LEAST_LOADED),
        ("decode.canary.wasm", LEAST_LOADED),
        ("decode-override.canary.formula.toml", b"cost = \"1\"\n"),
    ];
    let (_dir, daemon) = with_policies(&files, formula);
    let policies: Value =
        serde_json::from_str(&body_of(&daemon.admin, "GET /policies", "").unwrap()).unwrap();
    let slot = |name: &str| {
        let slots = policies["slots"].as_array().unwrap();
        slots.iter().find(|slot| slot["slot"] == name).unwrap().clone()
    };
    let prefill = slot("prefill");
    // N7.22
    assert_eq!((&prefill["policy"], &prefill["refusals"]), (&json!("formula"), &json!([])), "{prefill}");
    for lane in ["canary", "shadow"] {
        assert_eq!(prefill[lane]["policy"], "least-loaded", "{prefill}");
    }
    let refusal = |name: &str| slot(name)["refusals"][0]["message"].as_str().unwrap_or_default().to_owned();
    let inherited = "; the canary got the settings of [policies.slots.decode]: set `canary.settings` there to give it \
                     others, `{}` for none";
    let decode = refusal("decode");
    // N7.22
    assert!(decode.contains("unknown field `weight`") && decode.ends_with(inherited), "{decode}");
    let takes_none = "the slot decode-override takes no formula; ";
    // N7.23
    assert!(refusal("decode-override").starts_with(takes_none), "{}", refusal("decode-override"));
}

#[test]
fn o1_a_rollback_names_its_undo() {
    let (_dir, daemon) = with_policies(&[("prefill.wasm", LEAST_LOADED)], "");
    let ran = daemon.run(&["policy", "rollback", "prefill"]);
    let undo = "stays out until its file or settings change; `pointsman policy rollback prefill --undo` lets it run \
                again";
    // O1.11
    assert!(ran.code == Some(0) && ran.out.contains(undo), "{}{}", ran.out, ran.err);
    let ran = daemon.run(&["policy", "rollback", "prefill", "--undo"]);
    // O1.12
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_moves_streams_says_what_moved_and_what_stayed() {
    let engine =
        SimConfig { itl: Duration::from_millis(20), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let sims = [Sim::start(engine.clone()).await.unwrap(), Sim::start(engine).await.unwrap()];
    let worker = |(id, sim): (u64, &SimHandle)| {
        format!("[[workers]]\nid = {id}\nurl = '{}'\nrole = 'aggregated'\nengine = 'vllm'\n", sim.url())
    };
    let workers: String = (7..).zip(&sims).map(worker).collect();
    let daemon = Daemon::start(&format!("[probe]\ninterval = '50ms'\n{workers}"));
    daemon.ready();
    // Both requests begin on worker 7.
    // O1.22
    let drained = daemon.run(&["drain", "8"]).out;
    assert_eq!(drained, "worker 8 is draining; it gets no new request\n");
    let send = |body: String| {
        let address = daemon.listening.clone();
        thread::spawn(move || body_of(&address, "POST /v1/chat/completions", &body).unwrap())
    };
    let streamed = chat(200).replace("\"ignore_eos\"", "\"stream\":true,\"ignore_eos\"");
    let (stream, whole) = (send(streamed), send(chat(100)));
    while !daemon.run(&["workers", "--json"]).out.contains("\"active_requests\":2") {
        thread::sleep(Duration::from_millis(20));
    }
    daemon.run(&["undrain", "8"]);
    let done = daemon.run(&["drain", "7", "--move"]);
    // O1.17
    assert_eq!(done.code, Some(0), "{}{}", done.out, done.err);
    let last = done.out.lines().last().unwrap();
    assert!(last.starts_with("worker 7 has no request after "), "{}", done.out);
    let stayed = " s: 1 stream moved, 1 stayed until its end (1 not_streamed: the answer is not streamed)";
    assert!(last.ends_with(stayed), "{}", done.out);
    // O1.17: how it goes
    assert!(done.out.contains("worker 7 has 1 request, 0 are moving: 1 stream moved"), "{}", done.out);
    assert!(stream.join().unwrap().contains("data: [DONE]"));
    assert!(whole.join().unwrap().contains("\"finish_reason\""));
}

#[test]
fn o1_a_drain_waits_no_longer_for_a_gateway_that_hangs() {
    // Nothing reads what arrives here.
    let hangs = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", hangs.local_addr().unwrap());
    let begun = tokio::time::Instant::now();
    let ran = pointsman(&["drain", "7", "--wait", "--timeout", "300ms", "--gateway", &url], &[]);
    // O1.4
    assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}: {}", begun.elapsed(), ran.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_waits_for_requests_and_can_be_undone() {
    let (_sim, daemon) = serving(|config| config.itl = Duration::from_millis(20), "").await;
    daemon.ready();
    let address = daemon.listening.clone();
    let request = thread::spawn(move || body_of(&address, "POST /v1/chat/completions", &chat(150)).unwrap());
    while !daemon.run(&["workers", "--json"]).out.contains("\"active_requests\":1") {
        thread::sleep(Duration::from_millis(20));
    }
    // O1.4
    let short = daemon.run(&["drain", "7", "--wait", "--timeout", "300ms"]);
    assert_eq!(short.code, Some(1), "{}{}", short.out, short.err);
    assert!(short.out.contains("\nworker 7 still has 1 request after 0."), "{}", short.out);
    // O1.22
    let warned =
        "new request\nwarning: model tiny cannot be served now: no other eligible worker serves it\n";
    assert!(short.out.contains(warned), "{}", short.out);
    // O1.17
    assert!(short.out.contains(": `--move` continues streams on other workers\n"), "{}", short.out);
    let workers = daemon.run(&["workers"]).out;
    assert!(workers.contains(" draining "), "{workers}");
    let done = daemon.run(&["drain", "7", "--wait"]);
    assert_eq!(
        (done.code, done.out.contains("\nworker 7 has no request after ")),
        (Some(0), true),
        "{}",
        done.out
    );
    assert!(request.join().unwrap().contains("\"finish_reason\""));
    // O1.2
    let drained = daemon.run(&["status"]);
    assert_eq!(drained.code, Some(1), "{}", drained.out);
    assert!(drained.out.contains("worker 7 gets no request: draining"), "{}", drained.out);
    assert!(drained.out.contains("0 of 1 eligible, 1 draining"), "{}", drained.out);
    // O1.4
    assert_eq!(daemon.run(&["undrain", "127.0.0.1"]).out, "worker 7 gets requests again\n");
    daemon.ready();
    // O1.4
    let not_drained = "worker 7 was not drained; it gets requests as before\n";
    assert_eq!(daemon.run(&["undrain", "7"]).out, not_drained);
    // O1.1
    let missing = daemon.run(&["drain", "8"]);
    assert_eq!(missing.code, Some(1), "{}", missing.err);
    // O1.9
    assert!(missing.err.contains("no worker is `8`"), "{}", missing.err);
}

#[test]
fn a_gateway_that_cannot_serve_is_not_ready_and_names_reach_no_terminal_as_control_characters() {
    let worker = "[[workers]]\nid = 3\nurl = 'http://127.0.0.1:9'\nrole = 'prefill'\nengine = 'vllm'\n\
                  models = [\"ti\\u001b[2Jny\"]\n";
    let daemon = Daemon::start(worker);
    let status = daemon.run(&["status"]);
    // O1.1, O1.2
    assert_eq!(status.code, Some(1), "{}{}", status.out, status.err);
    assert!(status.out.contains("ready        no\n"), "{}", status.out);
    assert!(status.out.contains("worker 3 gets no request:"), "{}", status.out);
    daemon.run(&["drain", "3"]);
    let undrained = daemon.run(&["undrain", "3"]).out;
    // O1.4
    assert!(undrained.starts_with("the drain of worker 3 ended, but it gets no request: "), "{undrained}");
    for arguments in [&["status"][..], &["workers"][..], &["status", "--json"][..]] {
        let out = daemon.run(arguments).out;
        // O1.6
        assert!(!out.contains('\u{1b}') && out.contains("ny"), "{out:?}");
    }
    let empty = Daemon::start("");
    let status = empty.run(&["status"]);
    assert!(status.code == Some(1) && status.out.contains("no worker is registered"), "{}", status.out);
    assert!(empty.run(&["workers"]).out.starts_with("no worker is registered"));
}

#[test]
fn a_missing_token_a_wrong_one_another_server_and_wrong_use_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (file("right", "s3cret-token\n"), file("wrong", "other-token\n"));
    let daemon = Daemon::start("admin_token = 's3cret-token'\nadmin_token_reads = true\n");
    let none = daemon.run(&["workers"]);
    // O1.1, O2.1
    assert_eq!(none.code, Some(1), "{}", none.err);
    assert!(
        none.err.contains("(401 unauthorized)") && none.err.contains("give it with --token-file"),
        "{}",
        none.err
    );
    let other = daemon.run(&["workers", "--token-file", &wrong]);
    // O2.1
    assert!(other.code == Some(1) && other.err.contains("(401 unauthorized)"), "{}", other.err);
    assert!(!other.err.contains("other-token"), "{}", other.err);
    assert_eq!(daemon.run(&["workers", "--token-file", &right]).code, Some(0));
    let url = format!("http://{}", daemon.admin);
    let variables = [("POINTSMAN_ADMIN_URL", &*url), ("POINTSMAN_ADMIN_TOKEN", "s3cret-token")];
    assert_eq!(pointsman(&["workers"], &variables).code, Some(0));

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 4096]);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>").unwrap();
    });
    let garbage = pointsman(&["status", "--gateway", &url], &[]);
    server.join().unwrap();
    // O2.1
    assert_eq!(garbage.code, Some(1));
    assert!(garbage.err.contains("is not one of a gateway's admin listener"), "{}", garbage.err);
    let away = pointsman(&["status", "--gateway", &url], &[]);
    // O2.1
    assert!(away.code == Some(1) && away.err.contains("check that the gateway runs"), "{}", away.err);
    for arguments in [
        &["status", "--gateway", "nonsense"][..],
        &["workers", "--token-file", "/no/such/file"][..],
        &["drain"][..],
        &["drain", "7", "--undo"][..],
        &["decisions", "--last", "0"][..],
    ] {
        // O1.1
        assert_eq!(pointsman(arguments, &[]).code, Some(2), "{arguments:?}");
    }
}

#[test]
fn o1_status_shows_ids_where_the_list_of_workers_cannot_be_read() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let status = json!({
        "version": "0.1.0", "uptime_s": 7, "ready": false, "models": [], "slots": [], "compiling": [],
        "reasons": ["worker 9007199254740993 gets no request: paused"],
        "live": { "requests_per_second": 0.0, "errors_per_second": 0.0, "refusals_per_second": 0.0, "inflight": 0,
                  "connections": 0, "session_bindings": 0, "queue": { "waiting": 0, "waiting_bytes": 0 } },
        "workers": { "total": 1, "eligible": 0, "ineligible": { "paused": 1 } },
    })
    .to_string();
    let server = thread::spawn(move || {
        for body in [&*status, "<html>"] {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let length = body.len();
            write!(stream, "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}")
                .unwrap();
        }
    });
    let shown = pointsman(&["status", "--gateway", &url], &[]);
    server.join().unwrap();
    // O1.29
    assert!(shown.out.contains("worker 9007199254740993 gets no request"), "{}{}", shown.out, shown.err);
    assert_eq!(shown.code, Some(1), "it is not ready");
}

/// Writes `ca.pem`, and for each name its certificate and key. The first name is a server's.
fn certificates(dir: &Path, names: &[&str]) {
    let write = |name: String, pem: String| fs::write(dir.join(name), pem).unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, "test authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    write("ca.pem".to_owned(), params.self_signed(&key).unwrap().pem());
    let issuer = Issuer::new(params, key);
    for name in names {
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec![(*name).to_owned()]).unwrap();
        write(format!("{name}.pem"), leaf.signed_by(&key, &issuer).unwrap().pem());
        write(format!("{name}.key"), key.serialize_pem());
    }
}

#[test]
fn o1_a_certificate_tells_the_gateway_who_runs_a_command() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path(), &["127.0.0.1", "reader.example", "operator.example"]);
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let entry = |role: &str, name: &str| format!("[[auth.certificates]]\nname = '{name}'\nrole = '{role}'\n");
    let daemon = Daemon::start(&format!(
        "admin_token_reads = true\n[server.admin_tls]\ncert_file = '{}'\nkey_file = '{}'\nclient_ca_file = '{}'\n\
         require_client_cert = true\n{}{}[[workers]]\nid = 7\nurl = 'http://127.0.0.1:9'\nrole = 'decode'\n\
         engine = 'vllm'\n",
        file("127.0.0.1.pem"),
        file("127.0.0.1.key"),
        file("ca.pem"),
        entry("viewer", "reader.example"),
        entry("operator", "operator.example"),
    ));
    let url = format!("https://{}", daemon.admin);
    let run = |command: &[&str], who: Option<&str>| {
        let ca = file("ca.pem");
        let mut arguments = [command, &["--gateway", &url, "--tls-ca", &ca]].concat();
        let (cert, key) = (
            file(&format!("{}.pem", who.unwrap_or_default())),
            file(&format!("{}.key", who.unwrap_or_default())),
        );
        if who.is_some() {
            arguments.extend(["--tls-cert", &cert, "--tls-key", &key]);
        }
        pointsman(&arguments, &[])
    };
    let none = run(&["workers"], None);
    // O1.7
    assert!(none.code == Some(1) && none.err.contains("ertificate"), "{}", none.err);
    assert_eq!(run(&["workers"], Some("reader.example")).code, Some(0));
    let refused = run(&["drain", "7"], Some("reader.example"));
    // O1.7
    assert!(refused.code == Some(1) && refused.err.contains("(403"), "{}", refused.err);
    let drained = run(&["drain", "7"], Some("operator.example"));
    // O1.7
    assert_eq!((drained.code, &*drained.err), (Some(0), ""));
    // O1.7: a missing key, and files that are not there, are wrong use.
    assert_eq!(pointsman(&["workers", "--gateway", &url, "--tls-cert", &file("ca.pem")], &[]).code, Some(2));
    let missing = run(&["workers"], Some("nobody.example"));
    assert_eq!(missing.code, Some(2));
    assert!(missing.err.contains(&format!("--tls-cert {}", file("nobody.example.pem"))), "{}", missing.err);
    let variables = ["CERT", "KEY", "CA"].map(|name| format!("POINTSMAN_ADMIN_TLS_{name}"));
    let (cert, key, ca) = (file("reader.example.pem"), file("reader.example.key"), file("ca.pem"));
    let variables = [(&*variables[0], &*cert), (&*variables[1], &*key), (&*variables[2], &*ca)];
    // O1.7
    assert_eq!(pointsman(&["health", "--gateway", &url], &variables).code, Some(0));
}

#[test]
fn o1_health_tells_whether_the_process_answers_and_whether_it_can_serve() {
    let daemon = Daemon::start("");
    let alive = daemon.run(&["health"]);
    // O1.8
    assert_eq!((alive.code, &*alive.out), (Some(0), "ok\n"), "{}", alive.err);
    let ready = daemon.run(&["health", "--ready"]);
    // O1.8: no worker, so nothing can be served.
    assert_eq!(ready.code, Some(1), "{}", ready.out);
    assert!(ready.out.contains("\"ready\":false"), "{}", ready.out);
    let url = format!("http://{}", daemon.admin);
    drop(daemon);
    // O1.8
    assert_eq!(pointsman(&["health", "--gateway", &url], &[]).code, Some(1));
}
