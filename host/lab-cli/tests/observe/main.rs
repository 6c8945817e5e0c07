//! `pointsman observe` with real sockets: simulated engines, and a real nginx or Envoy as the router in
//! place, with the configuration of `deploy`. Tests of a router that is not installed are skipped.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::unwrap_used,
    reason = "helpers of tests are tests"
)]

use std::{os::unix::fs::PermissionsExt as _, path::Path, process::Command, time::Duration};

use envoy_types::pb::envoy::{
    config::core::v3::{HeaderMap, HeaderValue},
    service::ext_proc::v3::{
        HttpBody, HttpHeaders, ProcessingRequest, external_processor_client::ExternalProcessorClient,
        processing_request::Request as Part,
    },
};
use futures_util::{StreamExt as _, stream};
use pointsman_rig::fleet::free_port;
use reqwest::Client;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time::Instant,
};
use tonic::transport::Endpoint;

use self::scene::{LAB, Scene, SmallDisk, client, metrics_server};

mod copies;
mod scene;

/// Stands in every prompt, and must be nowhere on disk.
const MARKER: &str = "xylophone-in-the-prompt";
const KEY: &str = "sk-never-on-disk";

fn body(number: usize, padding: usize) -> String {
    json!({
        "model": "tiny", "max_tokens": 8, "ignore_eos": true, "stream": true,
        "messages": [{"role": "user", "content": format!("{MARKER} {} {}", number % 4, "x".repeat(padding))}],
    })
    .to_string()
}

/// Sends a chat, and returns how long its whole answer took.
async fn chat(client: &Client, base: &str, number: usize) -> Duration {
    let begun = Instant::now();
    let request = client.post(format!("{base}/v1/chat/completions")).bearer_auth(KEY);
    let request = request.header("content-type", "application/json").header("x-session-id", "alice");
    let answer = request.body(body(number, 3_000)).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let text = answer.text().await.unwrap();
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
    begun.elapsed()
}

/// Asserts that only its owner may read a file below a directory, and that none has the text of a prompt or a
/// key.
fn assert_private(dir: &Path) {
    let mut files = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", path.display());
        assert_no_text(&bytes, &path.display().to_string());
        files += 1;
    }
    assert!(files >= 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_a_page_says_what_an_nginx_did_and_nothing_has_text() {
    let scene = Scene::start(&[]).await;
    let Some((_nginx, base)) = scene.nginx("10s").await else { return };
    let client = client();
    for number in 0..60 {
        chat(&client, &base, number).await;
    }
    let (out, printed) = (scene.out(), scene.dir.path().join("printed"));
    let text = scene.observer.end(&printed);
    // S5.1
    assert!(text.contains("60 copies arrived, 60 are in the trace. The engines began 60 answers"), "{text}");
    // S5.4
    for part in ["What your router did (measured)", "What each policy would have done", "Why", "How sure"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // S5.4
    assert!(text.contains("      30     50.0 "), "nginx gives each engine half: {text}");
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    // S5.4
    assert!(
        page.contains("your router, simulated") && page.contains("kv-aware") && !page.contains("http-equiv")
    );
    // S5.2
    assert_private(&out);
    // S5.2
    assert!(!text.contains(MARKER) && !text.contains(KEY) && !text.contains("alice"));
    let trace = std::fs::read_to_string(out.join("trace.jsonl")).unwrap();
    let first: serde_json::Value = serde_json::from_str(trace.lines().next().unwrap()).unwrap();
    // S5.4
    assert_eq!(
        (trace.lines().count(), &first["output_length"], &first["model"]),
        (60, &json!(8), &json!("tiny"))
    );
    let compare = Command::new(LAB)
        .args(["compare", "--trace-block", "16", "--arm", "kv-aware", "--seeds", "1", "--trace"])
        .arg(out.join("trace.jsonl"))
        .arg("--fleet")
        .arg(out.join("fleet.toml"))
        .output()
        .unwrap();
    // S5.4
    assert!(compare.status.success(), "{}", String::from_utf8_lossy(&compare.stderr));
}

/// Sends a prompt of token ids to an engine and its copy to the observer.
async fn tokens(client: &Client, engine: &str, observer: &str, prompt: &[u32]) {
    let body = json!({"model": "tiny", "max_tokens": 8, "ignore_eos": true, "prompt": prompt}).to_string();
    for base in [observer, engine] {
        let request =
            client.post(format!("{base}/v1/completions")).header("content-type", "application/json");
        assert_eq!(request.body(body.clone()).send().await.unwrap().status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_kv_events_tell_which_engine_served_and_the_forecast_of_the_router_is_near() {
    let scene = Scene::start(&[]).await;
    let client = client();
    scene.until_connected().await;
    // The engines accept the connections.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let observer = format!("http://127.0.0.1:{}", scene.port);
    for number in 0..40_u32 {
        // Eight conversations, each on one engine, with one exception of five.
        let conversation = number % 8;
        let engine = scene.engines[((conversation + u32::from(number % 5 == 0)) % 2) as usize].url();
        let prompt: Vec<u32> =
            (0..(200 + 20 * (number / 8))).map(|token| conversation * 1_000 + token).collect();
        tokens(&client, &engine, &observer, &prompt).await;
    }
    // The last events arrive.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let printed = scene.dir.path().join("printed");
    let queried: u64 = scene.engines.iter().map(|engine| engine.state().prefix_queries).sum();
    let cached: u64 = scene.engines.iter().map(|engine| engine.state().prefix_hits).sum();
    let text = scene.observer.end(&printed);
    // S5.6
    assert!(text.contains("100.0 % by KV events"), "{text}");
    // S5.6
    assert!(text.contains("0.0 % of the requests are estimated from bytes"), "{text}");
    let line = text.lines().find(|line| line.starts_with("hit rate")).unwrap();
    let cells: Vec<f64> = line.split_whitespace().filter_map(|cell| cell.parse().ok()).collect();
    let measured = cached as f64 / queried as f64;
    // S5.6
    assert!((cells[0] - measured).abs() < 0.001 && (cells[1] - measured).abs() < 0.02, "{measured} {text}");
}

/// Sends requests while the observer runs, is stopped and is dead.
async fn assert_nothing_is_lost(mut scene: Scene, base: &str) {
    let client = client();
    let mut longest = Vec::new();
    for state in ["runs", "stopped", "dead"] {
        match state {
            "stopped" => scene.observer.signal("-STOP"),
            "dead" => {
                scene.observer.0.kill().unwrap();
                scene.observer.0.wait().unwrap();
            }
            _ => {}
        }
        let mut times = Vec::new();
        for number in 0..40 {
            times.push(chat(&client, base, number).await);
        }
        longest.push((state, times.into_iter().max().unwrap()));
    }
    // With nginx, a copy may hold up the next request of its connection for 200 ms, once in 10 s.
    // S5.3
    assert!(longest.iter().all(|(_, time)| *time < Duration::from_secs(2)), "{longest:?}");
    eprintln!("longest answers: {longest:?}");
    let served: u64 = scene.engines.iter().map(|engine| engine.state().generated_tokens).sum();
    // S5.3
    assert_eq!(served, 3 * 40 * 8);
    // S5.2
    assert_private(&scene.out());
    let log = std::fs::read(scene.dir.path().join("printed")).unwrap();
    // The log has every level of every crate.
    assert!(log.windows(5).any(|window| window == b"TRACE"));
    // S5.2
    assert_no_text(&log, "the log");
}

/// Asserts that the text of a prompt, a key and the name of a session are not in a file.
fn assert_no_text(bytes: &[u8], name: &str) {
    for text in [MARKER, KEY, "alice", "xxxx"] {
        let found = bytes.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(!found, "{text} is in {name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_nginx_loses_nothing_when_the_observer_is_stopped_or_dead() {
    let scene = Scene::start_with_log("trace", &[]).await;
    let Some((_nginx, base)) = scene.nginx("200ms").await else { return };
    assert_nothing_is_lost(scene, &base).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_envoy_loses_nothing_when_the_observer_is_stopped_or_dead() {
    let scene = Scene::start_with_log("trace", &[]).await;
    let Some((_envoy, base)) = scene.envoy("observe.yaml", false).await else { return };
    assert_nothing_is_lost(scene, &base).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_what_envoy_copies_is_in_the_trace() {
    let scene = Scene::start(&[]).await;
    let Some((envoy, base)) = scene.envoy("observe.yaml", true).await else { return };
    let client = client();
    for number in 0..20 {
        chat(&client, &base, number).await;
    }
    envoy.until_copied(&client, 20).await;
    let printed = scene.dir.path().join("printed");
    let text = scene.observer.end(&printed);
    // S5.1
    assert!(text.contains("20 copies arrived, 20 are in the trace. The engines began 20 answers"), "{text}");
}

#[test]
fn the_page_has_the_configuration_of_nginx() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let [page, file] = ["docs/observe.md", "deploy/nginx/observe.conf"]
        .map(|name| std::fs::read_to_string(root.join(name)).unwrap());
    assert!(
        page.contains(&format!("```nginx\n{file}```\n")),
        "copy deploy/nginx/observe.conf to docs/observe.md"
    );
}

/// Sends a chat with other settings, and returns the status and the text of the answer.
async fn ask(client: &Client, base: &str, body: serde_json::Value) -> (u16, String) {
    let request =
        client.post(format!("{base}/v1/chat/completions")).header("content-type", "application/json");
    let answer = request.body(body.to_string()).send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_what_envoy_shows_with_answers_has_engine_and_length() {
    // Without KV events and with prompts of text, a copy would leave the engine to a guess.
    let scene = Scene::start(&[]).await;
    let Some((envoy, base)) = scene.envoy("observe-answers.yaml", true).await else { return };
    let client = client();
    for number in 0..30 {
        let messages = json!([{"role": "user", "content": format!("{MARKER} {number}")}]);
        let (stream, usage) = (number % 3 != 0, number % 3 == 1);
        let mut body = json!({
            "model": "tiny", "max_tokens": 3 + number, "ignore_eos": true, "stream": stream, "messages": messages,
        });
        if usage {
            body["stream_options"] = json!({"include_usage": true});
        }
        assert_eq!(ask(&client, &base, body).await.0, 200);
    }
    let refused =
        json!({"model": "tiny", "max_tokens": 0, "messages": [{"role": "user", "content": MARKER}]});
    assert_eq!(ask(&client, &base, refused).await.0, 400);
    envoy.until_copied(&client, 31).await;
    let (out, printed) = (scene.out(), scene.dir.path().join("printed"));
    let text = scene.observer.end(&printed);
    // S5.9
    assert!(text.contains("31 copies arrived, 30 are in the trace, 1 are not compared because"), "{text}");
    // S5.9
    assert!(text.contains("100.0 % told with the answer"), "{text}");
    // S5.9: the refused one is not among them.
    assert!(text.contains("Output tokens: 100.0 % of the requests have those of their answer"), "{text}");
    let trace = std::fs::read_to_string(out.join("trace.jsonl")).unwrap();
    let lengths: Vec<u64> = trace
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).unwrap()["output_length"].as_u64().unwrap()
        })
        .collect();
    // S5.9
    assert_eq!(lengths, (3..33).collect::<Vec<u64>>());
    // S5.2
    assert_private(&out);
    assert!(!text.contains(MARKER));
}

/// Shows a request to the observer as Envoy's `ext_proc` does, and waits until the observer ends the call.
/// Returns how many messages the observer sent.
async fn show(observer: &str, parts: Vec<ProcessingRequest>) -> Result<usize, tonic::Status> {
    let channel = Endpoint::new(observer.to_owned()).unwrap().connect().await.unwrap();
    let parts = stream::iter(parts).chain(stream::pending());
    let mut answers = ExternalProcessorClient::new(channel).process(parts).await?.into_inner();
    let mut count = 0;
    while tokio::time::timeout(Duration::from_secs(5), answers.message()).await.unwrap()?.is_some() {
        count += 1;
    }
    Ok(count)
}

fn headers(pairs: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let header = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    let headers = Some(HeaderMap { headers: pairs.iter().map(header).collect() });
    HttpHeaders { headers, end_of_stream, ..HttpHeaders::default() }
}

/// The messages of a chat and of its answer, which has this status.
fn exchange(number: usize, status: &str, observability_mode: bool) -> Vec<ProcessingRequest> {
    let path = "/v1/chat/completions";
    let request = headers(&[(":method", "POST"), (":path", path)], false);
    let body = HttpBody { body: body(number, 300).into_bytes(), end_of_stream: true, ..HttpBody::default() };
    let parts = [
        Part::RequestHeaders(request),
        Part::RequestBody(body),
        Part::ResponseHeaders(headers(&[(":status", status)], true)),
    ];
    let of = |request| ProcessingRequest {
        request: Some(request),
        observability_mode,
        ..ProcessingRequest::default()
    };
    parts.map(of).to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_requests_that_failed_are_left_out_and_those_that_envoy_holds_pass() {
    let scene = Scene::start(&[]).await;
    let observer = format!("http://127.0.0.1:{}", scene.port);
    for number in 0..30 {
        let status = if number % 3 == 0 { "503" } else { "200" };
        // S5.9: nothing is answered.
        assert_eq!(show(&observer, exchange(number, status, true)).await.unwrap(), 0);
    }
    for number in 0..4 {
        let head = exchange(number, "200", false).into_iter().take(1).collect();
        // S5.10: the call ends at once, without an error, and without an answer.
        assert_eq!(show(&observer, head).await.unwrap(), 0);
    }
    let listing = ProcessingRequest {
        request: Some(Part::RequestHeaders(headers(&[(":method", "GET"), (":path", "/v1/models")], true))),
        ..ProcessingRequest::default()
    };
    // S5.10: what no policy decides is not missed either.
    assert_eq!(show(&observer, vec![listing]).await.unwrap(), 0);
    let (out, printed) = (scene.out(), scene.dir.path().join("printed"));
    let text = scene.observer.end(&printed);
    // S5.9, S5.10
    assert!(text.contains("34 copies arrived, 20 are in the trace, 10 are not compared because"), "{text}");
    assert!(text.contains("missed: 4 shown by Envoy without observability_mode: true"), "{text}");
    assert!(text.contains("simulating 20 requests"), "{text}");
    let trace = std::fs::read_to_string(out.join("trace.jsonl")).unwrap();
    // S5.9
    assert_eq!(trace.lines().count(), 20);
    // S5.10
    assert!(text.contains("request not observed: Envoy waits for answers"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_envoy_loses_no_answer_when_the_observer_it_shows_them_to_is_stopped_or_dead() {
    let scene = Scene::start_with_log("trace", &[]).await;
    let Some((_envoy, base)) = scene.envoy("observe-answers.yaml", false).await else { return };
    assert_nothing_is_lost(scene, &base).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_a_flood_of_copies_is_answered_at_once_and_stays_within_memory_and_disk() {
    let scene = Scene::start(&["--max-memory", "4", "--max-body", "2", "--max-trace", "1"]).await;
    let url = format!("http://127.0.0.1:{}/v1/chat/completions", scene.port);
    let client = client();
    // Every tenth body is above the limit of one.
    let bodies = [400 << 10, 3 << 20].map(|padding| bytes::Bytes::from(body(0, padding)));
    let mut tasks = JoinSet::new();
    // As many as connections with some room, all at once.
    for number in 0..450 {
        let (client, url) = (client.clone(), url.clone());
        let body = bodies[usize::from(number % 10 == 0)].clone();
        tasks.spawn(async move {
            match client.post(url).body(body).send().await {
                Ok(answer) => u16::from(answer.status()),
                Err(_) => 0,
            }
        });
    }
    let answers = tokio::time::timeout(Duration::from_secs(60), tasks.join_all()).await.unwrap();
    // S5.5
    assert!(answers.iter().all(|status| *status == 200), "{answers:?}");
    let (memory, out, printed) = (scene.observer.memory_mib(), scene.out(), scene.dir.path().join("printed"));
    // S5.5
    assert!(memory < 150, "{memory} MiB");
    let text = scene.observer.end(&printed);
    // S5.5
    assert!(text.contains("450 copies arrived"), "{text}");
    // S5.5
    assert!(text.contains("body above --max-body") && text.contains("trace above --max-trace"), "{text}");
    let length = std::fs::metadata(out.join("trace.jsonl")).unwrap().len();
    // S5.5
    assert!(length <= 1 << 20, "{length}");
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_connections_that_send_no_head_give_their_places_back() {
    let scene = Scene::start(&[]).await;
    let mut silent = Vec::new();
    for number in 0..512 {
        let mut stream = TcpStream::connect(("127.0.0.1", scene.port)).await.unwrap();
        // Nothing, a beginning of either version, or half of a head.
        let begin =
            [&b""[..], b"PRI * HT", b"POST /v1/chat", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"][number % 4];
        stream.write_all(begin).await.unwrap();
        silent.push(stream);
    }
    let (client, url) = (client(), format!("http://127.0.0.1:{}/v1/chat/completions", scene.port));
    let send = || client.post(&url).timeout(Duration::from_secs(5)).body(body(0, 10)).send();
    // Every place is held.
    assert!(send().await.is_err());
    let begun = Instant::now();
    while send().await.is_err() {
        // S5.7
        assert!(begun.elapsed() < Duration::from_secs(15), "places are held");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // A place is free as soon as one connection is closed, and all are in time.
    for mut stream in silent {
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(Duration::from_secs(15), stream.read_to_end(&mut rest)).await;
        // S5.7
        assert!(closed.is_ok());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_a_full_disk_leaves_whole_lines_and_the_page() {
    let Some(disk) = SmallDisk::mount(3) else { return };
    let scene = Scene::start(&["--out", disk.path().to_str().unwrap()]).await;
    let (client, url) = (client(), format!("http://127.0.0.1:{}/v1/chat/completions", scene.port));
    for number in 0..60 {
        // A line of 35 kB, for 25,000 tokens. 1 MiB of the disk is for them.
        let body = body(number, 100_000);
        assert_eq!(client.post(&url).body(body).send().await.unwrap().status(), 200);
    }
    let printed = scene.dir.path().join("printed");
    let text = scene.observer.end(&printed);
    let trace = std::fs::read_to_string(disk.path().join("trace.jsonl")).unwrap();
    let lines = trace.lines().count();
    // S5.5
    assert!((20..60).contains(&lines) && trace.ends_with("}\n"), "{lines}");
    // S5.5
    assert!(
        text.contains(&format!("60 copies arrived, {lines} are in the trace, missed: {} trace", 60 - lines)),
        "{text}"
    );
    // S5.5
    assert!(text.contains("its output lengths are those that were assumed at first"), "{text}");
    let page = std::fs::read_to_string(disk.path().join("report.html")).unwrap();
    // S5.5
    assert!(
        page.ends_with("</html>\n") && page.contains("What each policy would have done"),
        "{}",
        page.len()
    );
    let left = std::fs::read_dir(disk.path()).unwrap().count();
    assert_eq!(left, 3, "trace, fleet and page");
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_what_is_too_long_is_named_by_what_it_is() {
    let large = metrics_server("#".repeat(5 << 20), Duration::ZERO).await;
    let scene = Scene::start(&["--workers", &large, "--block-tokens", "1", "--bytes-per-token", "1"]).await;
    let (client, url) = (client(), format!("http://127.0.0.1:{}/v1/chat/completions", scene.port));
    // The line of a million blocks would have 20 MB.
    let answer = client.post(&url).body(body(0, 1 << 20)).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let printed = scene.dir.path().join("printed");
    let text = scene.observer.end(&printed);
    // S5.5
    assert!(text.contains("1 prompt too long for a line of the trace"), "{text}");
    // S5.5
    assert!(text.contains("answers of /metrics were not read, because they are above 4 MiB"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_engines_are_read_before_copies_and_the_page_warns_of_counters_that_move_late() {
    let metrics = "sglang:prompt_tokens_total{a=\"b\"} 70\n".to_owned();
    let slow = metrics_server(metrics, Duration::from_millis(800)).await;
    let begun = Instant::now();
    let scene = Scene::start(&["--workers", &slow]).await;
    // What came before the first reading could not be counted.
    // S5.8
    assert!(begun.elapsed() >= Duration::from_millis(800), "{:?}", begun.elapsed());
    let (client, url) = (client(), format!("http://127.0.0.1:{}/v1/chat/completions", scene.port));
    for number in 0..20 {
        assert_eq!(client.post(&url).body(body(number, 10)).send().await.unwrap().status(), 200);
    }
    let printed = scene.dir.path().join("printed");
    let text = scene.observer.end(&printed);
    // S5.4
    assert!(text.contains("warning: SGLang counts tokens at the ends of requests"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_engines_that_do_not_answer_are_named_at_once_and_none_is_an_error() {
    let observe = |workers: &str| {
        let dir = tempfile::tempdir().unwrap();
        let mut command = std::process::Command::new(scene::LAB);
        command.args(["observe", "--listen", "127.0.0.1:0", "--for", "1s", "--workers", workers, "--out"]);
        let output = command.arg(dir.path().join("out")).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    let answers = metrics_server("vllm:num_requests_running 0\n".to_owned(), Duration::ZERO).await;
    let other = metrics_server("<html></html>".to_owned(), Duration::ZERO).await;
    let gone = format!("http://127.0.0.1:{}", free_port().unwrap());
    let twice = format!("{answers},{answers}/");
    let run = |workers: String| tokio::task::spawn_blocking(move || observe(&workers));
    let (code, text) = run(format!("{gone},{answers},{other}")).await.unwrap();
    // S5.11
    assert!(text.contains(&format!("warning: {gone}/metrics does not answer with 200")), "{text}");
    // S5.11
    assert!(text.contains(&format!("warning: {other}/metrics has no metrics of vLLM or SGLang")), "{text}");
    // S5.11
    assert!(
        text.contains(&format!("{gone}: none of ")) && !text.contains(&format!("{answers}: none of ")),
        "{text}"
    );
    // S5.12
    assert_eq!(code, Some(1), "{text}");
    let (code, text) = run(format!("{gone},{other}")).await.unwrap();
    // S5.11
    assert!(code == Some(2) && text.contains("no engine of --workers answers"), "{text}");
    let (code, text) = run(twice).await.unwrap();
    // S5.11
    assert!(code == Some(2) && text.contains("/: the engine is named twice"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn n8_the_page_is_written_when_the_terminal_goes_away() {
    let (terminal, output) = std::io::pipe().unwrap();
    let mut scene = Scene::start_with_output("off", &[], Some(output.into())).await;
    let (client, url) = (client(), format!("http://127.0.0.1:{}/v1/chat/completions", scene.port));
    for number in 0..200 {
        assert_eq!(client.post(&url).body(body(number, 10)).send().await.unwrap().status(), 200);
    }
    drop(terminal);
    scene.observer.signal("-HUP");
    // Another one, now during the simulation: this file is written before it.
    let fleet = scene.out().join("fleet.toml");
    while !fleet.exists() {
        let ended = scene.observer.0.try_wait().unwrap();
        assert!(ended.is_none() || fleet.exists(), "it ended before the simulation");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    scene.observer.signal("-HUP");
    let out = scene.out();
    tokio::task::spawn_blocking(move || scene.observer.0.wait().unwrap()).await.unwrap();
    // N8.5
    assert!(std::fs::read_to_string(out.join("report.html")).unwrap().contains("kv-aware"));
}
