//! Engines that work for longer than a limit for engines that do not: on a queue of prompts, on a long answer
//! that is not streamed, or too hard to answer a health check in time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use pointsman_gateway::config::Config;
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{MODELS, chunk, json, status, stream_head},
};
use pointsman_workers::{Health, Ineligible};
use tokio::time::sleep;

const ANSWER: &str = r#"{"id":"x","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}"#;
/// Answer of a vLLM prefill engine.
const PREFILLED: &str = r#"{"id":"p","choices":[{"index":0,"text":"","finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}}"#;
const MS: Duration = Duration::from_millis(1);

/// State of a vLLM engine; changed while it runs.
#[derive(Default)]
struct State {
    /// Each reading of the metrics shows more tokens.
    works: AtomicBool,
    tokens: AtomicU64,
    /// Time of a health check, milliseconds.
    health_ms: AtomicU64,
    /// Health checks are answered with 503.
    is_ill: AtomicBool,
}

fn state(works: bool) -> Arc<State> {
    Arc::new(State { works: works.into(), ..State::default() })
}

fn metrics(state: &State) -> Vec<u8> {
    let tokens = state.tokens.fetch_add(u64::from(state.works.load(Relaxed)), Relaxed);
    let text = format!(
        "vllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.0\nvllm:generation_tokens_total {tokens}\n"
    );
    format!("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {}\r\n\r\n{text}", text.len())
        .into()
}

/// Answers probes as vLLM does, and generation requests with `acts`.
async fn vllm(
    state: &Arc<State>,
    acts: impl Fn(&RawRequest) -> Vec<Act> + Send + Sync + 'static,
) -> RawEngine {
    let state = state.clone();
    let script = move |request: &RawRequest| match request.line.as_str() {
        "GET /health" => {
            let answer = if state.is_ill.load(Relaxed) { "503 Service Unavailable" } else { "200 OK" };
            let pause = Duration::from_millis(state.health_ms.load(Relaxed));
            vec![Act::Pause(pause), Act::Send(status(answer, "{}"))]
        }
        "GET /v1/models" => vec![Act::Send(json(MODELS))],
        "GET /metrics" => vec![Act::Send(metrics(&state))],
        line if line.starts_with("POST") => acts(request),
        _ => vec![Act::Send(status("404 Not Found", "{}"))],
    };
    RawEngine::start(script).await
}

/// Answers after a pause.
fn after(pause: Duration, answer: &str) -> Vec<Act> {
    vec![Act::Pause(pause), Act::Send(json(answer))]
}

async fn gateway(workers: &[(&str, &RawEngine)], change: impl FnOnce(&mut Config)) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        for (id, (role, engine)) in (1..).zip(workers) {
            config.workers.push(engine.worker(&format!("id={id},role={role},engine=vllm")));
        }
        config.probe.load_interval = 50 * MS;
        change(config);
    });
    builder.start().await
}

/// Sends a request that is not streamed. Returns the status and the text of its answer.
async fn ask(cluster: &TestCluster, turn: u32) -> (u16, String) {
    let body = format!(r#"{{"model":"tiny","prompt":"turn {turn}","max_tokens":4}}"#);
    let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
    (reply.status.as_u16(), String::from_utf8_lossy(&reply.body).into_owned())
}

#[tokio::test]
async fn i3_a_prefill_may_take_longer_while_its_engine_works() {
    for works in [true, false] {
        let prefill = vllm(&state(works), |_| after(1_500 * MS, PREFILLED)).await;
        let decode = vllm(&state(true), |_| after(Duration::ZERO, ANSWER)).await;
        let change = |config: &mut Config| {
            config.timeouts.prefill_head = 500 * MS;
            config.routing.retries = 0;
        };
        let cluster = gateway(&[("prefill", &prefill), ("decode", &decode)], change).await;
        let (status, text) = ask(&cluster, 0).await;
        // I3.22
        assert_eq!(
            (status, text.contains("timeouts.prefill_head")),
            if works { (200, false) } else { (504, true) }
        );
        // I3.24
        let is_failing = cluster.worker(1).ineligible() == Some(Ineligible::Failing);
        assert_eq!(is_failing, !works, "{:?}", cluster.worker(1).ineligible());
        cluster.at_rest().await.unwrap();
    }
}

/// A queue that is longer than the longest wait: the engine does what it can.
#[tokio::test]
async fn i3_a_limit_that_passes_while_an_engine_works_is_no_failure_of_its_worker() {
    let prefill = vllm(&state(true), |_| after(Duration::from_secs(5), PREFILLED)).await;
    let decode = vllm(&state(true), |_| after(Duration::ZERO, ANSWER)).await;
    let change = |config: &mut Config| {
        config.timeouts.prefill_head = 300 * MS;
        config.timeouts.event_idle_max = 1_000 * MS;
        config.routing.retries = 0;
    };
    let cluster = gateway(&[("prefill", &prefill), ("decode", &decode)], change).await;
    let replies = tokio::join!(ask(&cluster, 0), ask(&cluster, 1), ask(&cluster, 2), ask(&cluster, 3));
    for (status, text) in <[_; 4]>::from(replies) {
        // I3.22
        assert!(status == 504 && text.contains("within 1s, the limit of timeouts.event_idle_max"), "{text}");
    }
    // I3.24
    let prefill = cluster.worker(1);
    assert_eq!((prefill.ineligible(), prefill.is_failing()), (None, false));
    assert_eq!(
        cluster
            .metric("pointsman_legs_total{leg=\"prefill\",engine=\"vllm\",outcome=\"timeout\"")
            .await
            .unwrap(),
        [4.0]
    );
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i3_a_whole_answer_may_take_until_the_deadline_while_its_engine_works() {
    let request = Duration::from_secs(2);
    let cases = [
        // An answer that takes three times timeouts.whole_head is computed once.
        (true, 3_000 * MS, None, 200, "\"text\":\"a\"", 1),
        // No other worker computes it again.
        (true, 20 * request, Some(request), 504, "\"code\":\"deadline\"", 1),
        (false, 20 * request, None, 504, "timeouts.whole_head; ask for a stream (`stream: true`)", 2),
    ];
    for (works, takes, limit, expected, part, calls) in cases {
        let state = state(works);
        let engines = [
            vllm(&state, move |_| after(takes, ANSWER)).await,
            vllm(&state, move |_| after(takes, ANSWER)).await,
        ];
        let change = |config: &mut Config| {
            config.timeouts.whole_head = 1_000 * MS;
            config.timeouts.request = limit.unwrap_or(config.timeouts.request);
        };
        let cluster = gateway(&[("aggregated", &engines[0]), ("aggregated", &engines[1])], change).await;
        let (status, text) = ask(&cluster, 0).await;
        // I3.23
        assert!(status == expected && text.contains(part), "{status} {text}");
        let called: usize = engines.iter().map(|engine| engine.requests().len()).sum();
        assert_eq!(called, calls, "{part}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn f4_a_worker_at_its_limit_gets_no_more_while_it_computes_an_answer_that_outlives_its_booking() {
    let engine = vllm(&state(true), |_| after(1_200 * MS, ANSWER)).await;
    let change = |config: &mut Config| {
        config.timeouts.booking = 100 * MS;
        config.queue.limit = 10;
        config.workers[0].max_concurrency = Some(1);
    };
    let cluster = gateway(&[("aggregated", &engine)], change).await;
    let ((first, _), (second, _), ()) = tokio::join!(ask(&cluster, 0), ask(&cluster, 1), async {
        sleep(700 * MS).await;
        // F4.18
        assert_eq!((cluster.booked(), engine.requests().len()), (1, 1));
    });
    assert_eq!((first, second), (200, 200));
    assert_eq!(cluster.metric("pointsman_expired_bookings_total").await.unwrap(), [0.0]);
    cluster.at_rest().await.unwrap();
}

/// An event of a stream, and a pause after it.
fn event_and_pause() -> [Act; 2] {
    let event = "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\n";
    [Act::Send(chunk(event.as_bytes())), Act::Pause(20 * MS)]
}

/// An engine whose health checks take longer than they may. A request for a stream gets events for 20 s.
async fn slow_to_answer_checks(state: &Arc<State>, reads_figures: bool) -> (TestCluster, RawEngine) {
    let engine = vllm(state, |request| {
        if !request.body.contains("\"stream\":true") {
            return after(Duration::ZERO, ANSWER);
        }
        let mut acts = vec![Act::Send(stream_head())];
        acts.extend(std::iter::repeat_n(event_and_pause(), 1_000).flatten());
        acts
    })
    .await;
    let change = |config: &mut Config| {
        (config.probe.timeout, config.probe.health_timeout) = (50 * MS, 100 * MS);
        config.probe.stuck_after = 400 * MS;
        if !reads_figures {
            config.probe.load_interval = Duration::ZERO;
        }
    };
    let cluster = gateway(&[("aggregated", &engine)], change).await;
    state.health_ms.store(1_000, Relaxed);
    (cluster, engine)
}

/// Watches that the worker serves for as long as some ten health checks take.
async fn stays_healthy(cluster: &TestCluster) {
    for _ in 0..75 {
        assert_eq!(cluster.worker(1).ineligible(), None);
        sleep(20 * MS).await;
    }
}

#[tokio::test]
async fn b7_a_health_check_that_times_out_does_not_count_while_a_stream_flows() {
    let state = state(false);
    let (cluster, _engine) = slow_to_answer_checks(&state, false).await;
    let body = r#"{"model":"tiny","prompt":"a","stream":true}"#;
    let mut stream = cluster.client.stream(COMPLETIONS, &[], body).await.unwrap();
    stream.next().await.unwrap();
    let reading = tokio_util::task::TaskTracker::new().spawn(stream.all());
    // B7.9
    stays_healthy(&cluster).await;
    assert_eq!(ask(&cluster, 0).await.0, 200);
    let is_out = |cluster: &TestCluster| cluster.worker(1).health() == Health::Unhealthy;
    // An error status counts.
    state.health_ms.store(0, Relaxed);
    state.is_ill.store(true, Relaxed);
    cluster.until("it fails its checks", is_out).await.unwrap();
    state.is_ill.store(false, Relaxed);
    cluster.until("it passes", |cluster| !is_out(cluster)).await.unwrap();
    // So does a check that times out while nothing moves.
    reading.abort();
    state.health_ms.store(1_000, Relaxed);
    cluster.until("it does not answer", is_out).await.unwrap();
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b7_a_health_check_that_times_out_does_not_count_while_figures_move() {
    let state = state(true);
    let (cluster, _engine) = slow_to_answer_checks(&state, true).await;
    // B7.9
    stays_healthy(&cluster).await;
    state.works.store(false, Relaxed);
    let is_out = |cluster: &TestCluster| cluster.worker(1).health() == Health::Unhealthy;
    cluster.until("it does not answer", is_out).await.unwrap();
}
