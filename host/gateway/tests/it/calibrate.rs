//! `pointsman calibrate` as a user runs it, against an engine with a known step time.

#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "helpers of tests")]

use std::{
    convert::Infallible,
    fs,
    path::Path,
    process::{Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use parking_lot::Mutex;
use pointsman_lab::Fleet;
use pointsman_sim::core::{BatchEngine, BatchLimits, PromptKv, Sequence, StepTime};
use serde_json::{Value, json};
use tokio::{net::TcpListener, process::Command, sync::mpsc};

mod pair;
mod tls;

/// Fault of a simulated engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    NeedsKey,
    NoUsage,
    NoStream,
    Refuses,
}

const LIMITS: BatchLimits = BatchLimits {
    max_num_seqs: 16,
    max_batched_tokens: 256,
    blocks: 1_024,
    block_size: 32,
    prefill_only: false,
};
const TRUTH: [f64; 5] = [20.0, 1.5, 0.004, 0.1, 0.0];

/// An engine behind HTTP that works in steps of a known time.
struct Engine {
    flaw: Flaw,
    core: Mutex<BatchEngine>,
    /// Channel for the tokens of each request; its index is the request's tag.
    requests: Mutex<Vec<mpsc::UnboundedSender<bool>>>,
    open: Mutex<(usize, usize)>,
    /// Time that its steps should have taken, and that they took, ms. On a busy machine sleeps are late.
    steps: Mutex<(f64, f64)>,
    /// Engines of the same machine that are in a step: each makes the steps of the others longer.
    busy: Arc<AtomicUsize>,
}

/// Factor of a step beside one of another engine of the machine.
const CONTENTION: f64 = 1.6;

impl Engine {
    async fn start(flaw: Flaw) -> (String, Arc<Self>) {
        Self::start_beside(flaw, Arc::default()).await
    }

    /// Starts an engine that shares its machine with those of the same counter.
    async fn start_beside(flaw: Flaw, busy: Arc<AtomicUsize>) -> (String, Arc<Self>) {
        let [c0, c1, c2, c3, c4] = TRUTH;
        let core = BatchEngine::new(LIMITS, StepTime::Linear { c0, c1, c2, c3, c4 });
        let engine = Arc::new(Self {
            flaw,
            core: Mutex::new(core),
            requests: Mutex::default(),
            open: Mutex::default(),
            steps: Mutex::default(),
            busy,
        });
        let app = Router::new()
            .route("/v1/models", get(models))
            .route("/metrics", get(metrics))
            .route("/server_info", get(server_info))
            .route("/v1/completions", post(completions))
            .with_state(engine.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let steps = engine.clone();
        std::thread::spawn(move || steps.run());
        let serve = async move { axum::serve(listener, app).await };
        tokio::runtime::Handle::current().spawn(serve);
        (url, engine)
    }

    fn run(&self) {
        loop {
            let Some(milliseconds) = self.core.lock().begin_step() else {
                std::thread::sleep(Duration::from_micros(200));
                continue;
            };
            let others = self.busy.fetch_add(1, Ordering::SeqCst);
            let milliseconds = if others > 0 { milliseconds * CONTENTION } else { milliseconds };
            let begin = tokio::time::Instant::now();
            std::thread::sleep(Duration::from_secs_f64(milliseconds / 1e3));
            self.busy.fetch_sub(1, Ordering::SeqCst);
            let mut tokens = Vec::new();
            self.core.lock().end_step(&mut tokens);
            {
                let mut steps = self.steps.lock();
                steps.0 += milliseconds;
                steps.1 += begin.elapsed().as_secs_f64() * 1e3;
            }
            let requests = self.requests.lock();
            for token in tokens {
                let _ = requests[usize::try_from(token.tag).expect("small")].send(token.last);
            }
        }
    }

    fn submit(&self, isl: u32, osl: u32, kv: PromptKv) -> mpsc::UnboundedReceiver<bool> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut requests = self.requests.lock();
        let tag = requests.len() as u64;
        requests.push(sender);
        self.core.lock().submit(Sequence { tag, prompt: Arc::from([]), isl, osl, kv, keeps_blocks: false });
        receiver
    }
}

async fn models() -> Json<Value> {
    Json(json!({"data": [{"id": "tiny", "max_model_len": 1_024}]}))
}

async fn metrics() -> &'static str {
    "vllm:cache_config_info{block_size=\"32\",num_gpu_blocks=\"1024\"} 1.0\n"
}

async fn server_info() -> Json<Value> {
    Json(json!({"vllm_config": {"scheduler_config": {"max_num_seqs": 16, "max_num_batched_tokens": 256}}}))
}

async fn completions(State(engine): State<Arc<Engine>>, headers: http::HeaderMap, body: Bytes) -> Response {
    let request: Value = serde_json::from_slice(&body).expect("JSON");
    let prompt = request["prompt"].as_array().expect("token ids").len() as u32;
    let osl = request["max_tokens"].as_u64().expect("a number") as u32;
    match engine.flaw {
        Flaw::NeedsKey if headers.get("authorization").is_none_or(|value| value != "Bearer right") => {
            return StatusCode::UNAUTHORIZED.into_response();
        }
        Flaw::Refuses => return (StatusCode::BAD_REQUEST, "prompts of token ids are off").into_response(),
        Flaw::NoStream => return Json(json!({"choices": [{"text": "a"}]})).into_response(),
        _ => {}
    }
    {
        let mut open = engine.open.lock();
        open.0 += 1;
        open.1 = open.1.max(open.0);
    }
    let tokens = engine.submit(prompt, osl, PromptKv::Computed);
    answer(engine, tokens, prompt, osl)
}

/// Streams the tokens of a request.
fn answer(engine: Arc<Engine>, mut tokens: mpsc::UnboundedReceiver<bool>, prompt: u32, osl: u32) -> Response {
    let (chunks, events) = mpsc::unbounded_channel::<String>();
    let flaw = engine.flaw;
    let stream = async move {
        while let Some(last) = tokens.recv().await {
            let _ = chunks.send(format!("data: {}\n\n", json!({"choices": [{"text": "a"}]})));
            if last {
                engine.open.lock().0 -= 1;
                break;
            }
        }
        if flaw != Flaw::NoUsage {
            let usage = json!({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": osl}});
            let _ = chunks.send(format!("data: {usage}\n\n"));
        }
        let _ = chunks.send("data: [DONE]\n\n".to_owned());
    };
    tokio::runtime::Handle::current().spawn(stream);
    let events = futures_util::stream::unfold(events, |mut events| async {
        let event = events.recv().await?;
        Some((Ok::<_, Infallible>(event), events))
    });
    ([("content-type", "text/event-stream")], Body::from_stream(events)).into_response()
}

async fn calibrate(directory: &Path, args: &[&str]) -> Output {
    calibrate_with(directory, args, None).await
}

async fn calibrate_with(directory: &Path, args: &[&str], key: Option<&str>) -> Output {
    let mut command = Command::new(crate::programs::pointsman());
    command.current_dir(directory).arg("calibrate").args(args).env_remove("OPENAI_API_KEY");
    command.envs(key.map(|key| ("OPENAI_API_KEY", key))).output().await.expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const SMALL: [&str; 8] =
    ["--max-requests", "110", "--max-concurrency", "4", "--max-prompt-tokens", "600", "--output-tokens", "8"];

#[tokio::test(flavor = "multi_thread")]
async fn a_known_step_time_is_recovered_over_sockets_and_compare_reads_the_fleet_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let (url, engine) = Engine::start(Flaw::None).await;
    let args = [&["--url", &url, "-o", "fleet.toml", "--json", "r.json"], SMALL.as_slice()].concat();
    let output = calibrate(directory.path(), &args).await;
    let told = text(&output.stdout);
    assert!(output.status.success(), "{told}{}", text(&output.stderr));
    // The bounds hold.
    assert!(engine.requests.lock().len() <= 110 && engine.open.lock().1 <= 4, "{:?}", engine.open.lock());
    let fleet = Fleet::read(&directory.path().join("fleet.toml")).expect("a fleet");
    let group = &fleet.engines[0];
    assert_eq!((fleet.block_tokens, group.blocks, group.max_num_seqs), (32, Some(1_024), 16));
    assert_eq!(group.max_batched_tokens, 256);
    let pointsman_lab::StepTimeSpec::Linear { c0, c1, c3, c4, .. } = group.step_time else {
        panic!("{told}")
    };
    let report: Value =
        serde_json::from_slice(&fs::read(directory.path().join("r.json")).expect("")).expect("");
    let errors = &report["calibration"]["held_out"];
    assert!(errors["ttft"]["requests"].as_u64() >= Some(30), "{errors}");
    let late = {
        let steps = engine.steps.lock();
        steps.1 / steps.0
    };
    let near = |found: f64, truth: f64| (0.75..1.25 * late).contains(&(found / truth));
    assert!(near(c0, TRUTH[0]), "steps took {late} times too long: {told}");
    // On a busy machine the times of sockets and sleeps hide what is asserted here. The lab's own tests
    // assert that the coefficients are exact when the times are.
    if late < 1.1 {
        let prompt = |c3: f64, c4: f64| 200.0 * c3 + 200.0 * 200.0 * c4;
        let share = prompt(c3, c4) / prompt(TRUTH[3], TRUTH[4]);
        assert!((0.6..1.6).contains(&share) && c1 < 6.0, "{share}: {told}");
        for (figure, most) in [("ttft", 30.0), ("e2e", 20.0)] {
            assert!(errors[figure]["median_percent"].as_f64().expect("a number") < most, "{errors}");
        }
    }
    // The same measurements give the same file again, and never in the place of another one.
    let refused = calibrate(directory.path(), &["--from", "r.json", "-o", "fleet.toml"]).await;
    let told = text(&refused.stderr);
    assert!(refused.status.code() == Some(2) && told.contains("`fleet.toml` exists: give another"), "{told}");
    let again = calibrate(directory.path(), &["--from", "r.json", "-o", "again.toml"]).await;
    assert!(again.status.success(), "{}", text(&again.stderr));
    let read = |name: &str| fs::read(directory.path().join(name)).expect("written");
    assert_eq!(text(&read("fleet.toml")), text(&read("again.toml")));
    fs::write(
        directory.path().join("t.jsonl"),
        "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 9}\n",
    )
    .expect("");
    let mut compare = Command::new(crate::programs::pointsman());
    compare.current_dir(directory.path()).args(["compare", "--trace", "t.jsonl", "--fleet", "fleet.toml"]);
    let output = compare.args(["--arm", "kv", "--seeds", "1"]).output().await.expect("runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_usable_is_named_with_what_to_do_and_ends_with_code_2() {
    let directory = tempfile::tempdir().expect("a directory");
    let flawed = [Flaw::NeedsKey, Flaw::NoUsage, Flaw::NoStream, Flaw::Refuses];
    let mut urls = Vec::new();
    for flaw in flawed {
        urls.push(Engine::start(flaw).await.0);
    }
    let table: [(&[&str], &str); 11] = [
        (&["--url", "ftp://x"], "ftp://x: not the address of an HTTP server; expected http://HOST:PORT"),
        (&["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1: cannot be reached: Connection refused"),
        (&["--url", &urls[0]], "401 Unauthorized; set the environment variable OPENAI_API_KEY"),
        (&["--url", &urls[1]], "sent no usage with token counts"),
        (&["--url", &urls[2]], "answered without a stream"),
        (
            &["--url", &urls[3]],
            "400 Bad Request to a request with a prompt of token ids: prompts of token ids are off",
        ),
        (&["--url", &urls[3], "--model", "big"], "--model big: "),
        (&["--url", &urls[3], "--max-prompt-tokens", "2000"], "takes prompts of at most 960"),
        (&["--log", "."], ".: 0 files contain no request of that time; log some traffic first"),
        (&["--log", ".", "--url", "http://127.0.0.1:1"], "cannot be used with"),
        (&["--from", "none.json"], "--from none.json: not the JSON of an earlier run"),
    ];
    for (args, message) in table {
        let output = calibrate(directory.path(), args).await;
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {told}");
        assert!(told.contains(message), "{args:?}: {told}");
    }
    let args = ["--url", &urls[0], "--max-requests", "10", "--output-tokens", "2"];
    let output = calibrate_with(directory.path(), &args, Some("right")).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_prints_the_plan_and_sends_no_prompt() {
    let directory = tempfile::tempdir().expect("a directory");
    let (url, engine) = Engine::start(Flaw::None).await;
    let output = calibrate(directory.path(), &["--url", &url, "--dry-run", "--max-seconds", "77"]).await;
    let told = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        told.contains("aggregated engine (1024 blocks of 32 tokens, 16 sequences, 256 tokens a step)"),
        "{told}"
    );
    assert!(told.contains("at most 8 requests at the same time and 77 s"), "{told}");
    assert_eq!(engine.requests.lock().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_and_the_end_of_the_time_leave_what_was_measured() {
    let directory = tempfile::tempdir().expect("a directory");
    let (url, _engine) = Engine::start(Flaw::None).await;
    let mut command = Command::new(crate::programs::pointsman());
    command.args(["calibrate", "--url", &url, "--output-tokens", "8"]).env_remove("OPENAI_API_KEY");
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    tokio::time::sleep(Duration::from_secs(5)).await;
    let id = child.id().expect("runs").to_string();
    Command::new("kill").args(["-INT", &id]).status().await.expect("kill");
    let interrupted = child.wait_with_output().await.expect("ends");
    let timed = ["--url", &url, "--output-tokens", "8", "--max-seconds", "4"];
    for output in [interrupted, calibrate(directory.path(), &timed).await] {
        let (told, warned) = (text(&output.stdout), text(&output.stderr));
        assert!(warned.contains("by Ctrl-C or --max-seconds; these are used"), "{told}{warned}");
        assert!(output.status.success() && told.contains("aggregated engine, fitted to"), "{told}{warned}");
    }
}
