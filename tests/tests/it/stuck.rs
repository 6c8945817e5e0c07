//! Workers whose health is good and whose requests hang: they are told from slow ones by their progress, and
//! left out until they answer the gateway's own request. Streams that are silent while their engine works.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Fault, FaultKind, Role};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{MODELS, chunk, json, status, stream_head},
};
use pointsman_workers::{Ineligible, StuckBy};
use serde_json::Value;
use tokio::time::Instant;

const MS: Duration = Duration::from_millis(1);

/// Behaviour of a vLLM engine; changed while it runs.
#[derive(Default)]
struct Behaviour {
    /// Completions are never answered.
    hangs: AtomicBool,
    /// Generated tokens; `u64::MAX`: the engine does not tell.
    tokens: AtomicU64,
    /// Each reading of the metrics shows more tokens.
    works: AtomicBool,
}

impl Behaviour {
    fn copy(other: &Self) -> Self {
        let (hangs, works) = (other.hangs.load(Ordering::Relaxed), other.works.load(Ordering::Relaxed));
        let tokens = other.tokens.load(Ordering::Relaxed);
        Self { hangs: hangs.into(), tokens: tokens.into(), works: works.into() }
    }
}

fn metrics(behaviour: &Behaviour) -> Vec<u8> {
    let added = u64::from(behaviour.works.load(Ordering::Relaxed));
    // A short request does not show in the share of the cache.
    let running = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.0\n";
    let text = match behaviour.tokens.load(Ordering::Relaxed) {
        u64::MAX => running.to_owned(),
        _ => {
            let tokens = behaviour.tokens.fetch_add(added, Ordering::Relaxed);
            format!("{running}vllm:generation_tokens_total{{engine=\"0\"}} {tokens}.0\n")
        }
    };
    format!("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {}\r\n\r\n{text}", text.len())
        .into()
}

fn event(text: &str, finish: &str) -> Vec<u8> {
    let choice = format!(r#"{{"index":0,"text":"{text}","finish_reason":{finish}}}"#);
    chunk(format!("data: {{\"id\":\"x\",\"choices\":[{choice}]}}\n\n").as_bytes())
}

/// Answers probes as vLLM does, and generation requests with `acts`.
async fn vllm(
    behaviour: &Arc<Behaviour>,
    acts: impl Fn(&RawRequest) -> Vec<Act> + Send + Sync + 'static,
) -> RawEngine {
    let behaviour = behaviour.clone();
    let script = move |request: &RawRequest| match request.line.as_str() {
        "GET /health" => vec![Act::Send(json("{}"))],
        "GET /v1/models" => vec![Act::Send(json(MODELS))],
        "GET /metrics" => vec![Act::Send(metrics(&behaviour))],
        line if line.starts_with("POST") && behaviour.hangs.load(Ordering::Relaxed) => vec![Act::Hang],
        line if line.starts_with("POST") => acts(request),
        _ => vec![Act::Send(status("404 Not Found", "{}"))],
    };
    RawEngine::start(script).await
}

fn answer(_: &RawRequest) -> Vec<Act> {
    vec![Act::Send(json(r#"{"id":"x","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}"#))]
}

fn add(config: &mut Config, id: u64, engine: &RawEngine) {
    config.workers.push(engine.worker(&format!("id={id},role=aggregated,engine=vllm")));
}

async fn ask(cluster: &TestCluster, turn: u32) -> u16 {
    let body = format!(r#"{{"model":"tiny","prompt":"turn {turn}","max_tokens":4}}"#);
    cluster.client.post(COMPLETIONS, &[], body).await.unwrap().status.as_u16()
}

/// Two workers in turn, the second of which may hang.
async fn two_in_turn(
    behaviour: &Arc<Behaviour>,
    change: impl FnOnce(&mut Config),
) -> (TestCluster, [RawEngine; 2]) {
    let good = Arc::new(Behaviour { works: AtomicBool::new(true), ..Behaviour::default() });
    let engines = [vllm(&good, answer).await, vllm(behaviour, answer).await];
    let builder = TestClusterBuilder::new().config(|config| {
        config.policies.slots = toml::from_str("[aggregated]\nnative = \"round-robin\"").unwrap();
        config.probe.stuck_after = 500 * MS;
        config.probe.load_interval = 50 * MS;
        add(config, 1, &engines[0]);
        add(config, 2, &engines[1]);
        change(config);
    });
    (builder.start().await, engines)
}

#[tokio::test]
async fn b7_a_worker_that_hangs_while_its_health_is_good_is_ejected_and_comes_back() {
    let behaviour = Arc::new(Behaviour::default());
    let (cluster, engines) = two_in_turn(&behaviour, |_| {}).await;
    for turn in 0..4 {
        assert_eq!(ask(&cluster, turn).await, 200);
    }
    behaviour.hangs.store(true, Ordering::Relaxed);
    let client = cluster.client.clone();
    let waits = cluster.gateway.state().tracker.spawn(async move {
        let ask = async |turn: u32| {
            let body = format!(r#"{{"model":"tiny","prompt":"wait {turn}","max_tokens":4}}"#);
            client.post(COMPLETIONS, &[], body).await
        };
        tokio::join!(ask(0), ask(1), ask(2), ask(3))
    });
    cluster.until("it is ejected", |cluster| cluster.worker(2).is_ejected()).await.unwrap();
    let stuck = cluster.worker(2);
    assert_eq!(stuck.ineligible(), Some(Ineligible::Stuck));
    // B7.6
    for turn in 0..16 {
        assert_eq!(ask(&cluster, turn).await, 200, "turn {turn}");
    }
    let asked = |of: &str| engines[1].requests().iter().filter(|request| request.body.contains(of)).count();
    assert!(asked("wait") >= 1 && engines[0].requests().len() >= 18);
    // B7.8
    let list = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    let shown = list["workers"].as_array().unwrap().iter().find(|worker| worker["id"] == 2).unwrap().clone();
    assert_eq!(
        (&shown["ineligible"], &shown["stuck"]["by"]),
        (&"stuck".into(), &"silence".into()),
        "{shown}"
    );
    assert_eq!(cluster.metric("pointsman_worker_stuck{worker=\"2\"").await.unwrap(), [1.0]);
    assert_eq!(cluster.metric("pointsman_worker_ejections_total{worker=\"2\"").await.unwrap(), [1.0]);
    assert_eq!(cluster.metric("pointsman_worker_ejections_total{worker=\"1\"").await.unwrap(), [0.0]);
    // B7.4: of the gateway's own requests each asks for one token, and none is a client's.
    cluster.until("it is probed", |_| asked("Hello") >= 1).await.unwrap();
    behaviour.hangs.store(false, Ordering::Relaxed);
    cluster.until("it is back", |cluster| cluster.worker(2).ineligible().is_none()).await.unwrap();
    assert!(engines[1].requests().iter().all(|request| {
        let body: Value = serde_json::from_str(&request.body).unwrap();
        body["prompt"] != "Hello" || (body["max_tokens"] == 1 && body.get("kv_transfer_params").is_none())
    }));
    waits.abort();
    drop(waits);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b7_the_only_worker_of_a_pool_is_not_ejected() {
    let behaviour = Arc::new(Behaviour::default());
    let engine = vllm(&behaviour, answer).await;
    let builder = TestClusterBuilder::new().config(|config| {
        config.probe.stuck_after = 200 * MS;
        config.probe.load_interval = 50 * MS;
        config.timeouts.whole_head = Duration::from_secs(2);
        add(config, 1, &engine);
    });
    let cluster = builder.start().await;
    behaviour.hangs.store(true, Ordering::Relaxed);
    let (hung, ()) = tokio::join!(ask(&cluster, 0), async {
        cluster.until("it is stuck", |cluster| cluster.worker(1).stuck().is_some()).await.unwrap();
        behaviour.hangs.store(false, Ordering::Relaxed);
        // B7.5
        assert!(!cluster.worker(1).is_ejected());
        assert_eq!(ask(&cluster, 1).await, 200);
    });
    assert_eq!(hung, 504);
    cluster.until("it answers", |cluster| cluster.worker(1).stuck().is_none()).await.unwrap();
    assert_eq!(cluster.worker(1).ejections(), 0);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b7_an_engine_without_figures_is_stuck_after_three_deadlines_in_a_row() {
    let behaviour = Arc::new(Behaviour { tokens: AtomicU64::new(u64::MAX), ..Behaviour::default() });
    let change = |config: &mut Config| {
        config.timeouts.whole_head = Duration::from_secs(2);
        config.routing.retries = 0;
    };
    let (cluster, engines) = two_in_turn(&behaviour, change).await;
    behaviour.hangs.store(true, Ordering::Relaxed);
    let (mut failed, mut turn) = (0, 0);
    let end = Instant::now() + Duration::from_secs(60);
    while cluster.worker(2).stuck().is_none() && Instant::now() < end {
        failed += u32::from(ask(&cluster, turn).await == 504);
        turn += 1;
    }
    // B7.3
    assert_eq!((failed, cluster.worker(2).stuck().map(|stuck| stuck.by)), (3, Some(StuckBy::Deadlines)));
    cluster.until("it is ejected", |cluster| cluster.worker(2).is_ejected()).await.unwrap();
    let before = engines[1].requests().iter().filter(|request| request.body.contains("turn")).count();
    for turn in 0..16 {
        assert_eq!(ask(&cluster, turn).await, 200);
    }
    let after = engines[1].requests().iter().filter(|request| request.body.contains("turn")).count();
    assert_eq!(before, after);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b7_a_prefill_worker_is_stuck_when_the_deadlines_of_three_requests_pass() {
    let script = |request: &RawRequest| match request.line.as_str() {
        "GET /health" => vec![Act::Send(json("{}"))],
        "GET /v1/models" => vec![Act::Send(json(MODELS))],
        line if line.starts_with("POST") => vec![Act::Hang],
        _ => vec![Act::Send(status("404 Not Found", "{}"))],
    };
    let engines = [RawEngine::start(script).await, RawEngine::start(script).await];
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.timeouts.request = 400 * MS;
            for (role, engine) in ["prefill", "decode"].iter().zip(&engines) {
                config.workers.push(engine.worker(&format!("role={role},engine=vllm")));
            }
        })
        .start()
        .await;
    for turn in 0..3 {
        assert_eq!(ask(&cluster, turn).await, 504);
    }
    let prefill = cluster.gateway.state().registry.snapshot();
    let of = |role| prefill.workers().iter().find(|worker| worker.spec().role == role).unwrap().clone();
    cluster.until("it is stuck", |_| of(pointsman_workers::Role::Prefill).stuck().is_some()).await.unwrap();
    // B7.3: the deadline of the request
    assert_eq!(of(pointsman_workers::Role::Prefill).stuck().map(|stuck| stuck.by), Some(StuckBy::Deadlines));
    assert_eq!(of(pointsman_workers::Role::Decode).stuck(), None, "it was not asked");
}

#[tokio::test]
async fn b7_a_prefill_worker_whose_handoffs_do_not_finish_is_ejected() {
    let mut builder = TestClusterBuilder::new().config(|config| {
        config.timeouts.prefill_head = 1_000 * MS;
        config.timeouts.head = 1_000 * MS;
        // The engine sends a head, and nothing after it.
        config.timeouts.event_idle = 1_000 * MS;
        config.timeouts.request = Duration::from_secs(5);
    });
    for role in [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode] {
        builder = builder.sim(Dialect::Sglang, role);
    }
    let cluster = builder.start().await;
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::HangAfterHeaders)]);
    let (mut turn, end) = (0, Instant::now() + Duration::from_secs(40));
    while !cluster.worker(1).is_ejected() && Instant::now() < end {
        assert_eq!(ask(&cluster, turn).await, 200, "turn {turn}");
        turn += 1;
    }
    // B7.7
    assert_eq!(
        cluster.worker(1).stuck().map(|stuck| stuck.by),
        Some(StuckBy::Handoffs),
        "after {turn} requests"
    );
    for id in 2..=4 {
        assert_eq!(cluster.worker(id).stuck(), None, "worker {id}");
    }
    let before = cluster.faults_fired("hang-after-headers");
    for turn in 0..12 {
        assert_eq!(ask(&cluster, turn).await, 200);
    }
    assert_eq!(cluster.faults_fired("hang-after-headers"), before);
    cluster.at_rest().await.unwrap();
}

/// An engine whose streams are silent for `pause` after their first event.
async fn silent(behaviour: &Arc<Behaviour>, pause: Duration, dialect: &str) -> (TestCluster, RawEngine) {
    let engine = vllm(behaviour, move |_| {
        let first = Act::Send([stream_head(), event("a", "null")].concat());
        let rest = [event("b", "\"stop\""), chunk(b"data: [DONE]\n\n"), chunk(b"")].concat();
        vec![first, Act::Pause(pause), Act::Send(rest)]
    })
    .await;
    let builder = TestClusterBuilder::new().config(|config| {
        config.timeouts.event_idle = 1_000 * MS;
        config.timeouts.event_idle_max = 4_000 * MS;
        config.timeouts.stream_comment = 200 * MS;
        config.probe.load_interval = 50 * MS;
        config.workers.push(engine.worker(&format!("id=1,role=aggregated,engine={dialect}")));
    });
    (builder.start().await, engine)
}

/// The text of a stream, and how long it took.
async fn stream(cluster: &TestCluster) -> (String, Duration) {
    let begun = Instant::now();
    let body = r#"{"model":"tiny","prompt":"a","stream":true}"#;
    let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
    assert_eq!(reply.status, 200);
    cluster.at_rest().await.unwrap();
    (String::from_utf8(reply.body.to_vec()).unwrap(), begun.elapsed())
}

#[tokio::test]
async fn i3_a_stream_that_is_silent_while_its_engine_works_goes_on_with_comments_between_events() {
    let counts = Behaviour { works: AtomicBool::new(true), ..Behaviour::default() };
    let says_running = Behaviour { tokens: AtomicU64::new(u64::MAX), ..Behaviour::default() };
    for behaviour in [counts, says_running] {
        let (cluster, _engine) = silent(&Arc::new(behaviour), 2_500 * MS, "vllm").await;
        let (text, took) = stream(&cluster).await;
        // I3.6
        assert!(text.ends_with("data: [DONE]\n\n") && took >= 2_400 * MS, "{took:?} {text}");
        // I3.8
        let events: Vec<&str> = text.split_terminator("\n\n").collect();
        let comments = text.lines().filter(|line| *line == " ").count();
        let most = usize::try_from(took.as_millis() / 200).unwrap() + 1;
        assert!((2..=most).contains(&comments), "{took:?} {text}");
        assert!(events[0].starts_with("data: ") && events[1].starts_with(" \n"), "{text}");
        // I3.8: each blank line ends an event with data, for clients that parse what they have at any
        assert!(events.len() == 3 && events.iter().all(|event| event.contains("data: ")), "{text}");
    }
}

#[tokio::test]
async fn i3_an_sglang_engine_without_metrics_is_asked_for_its_load() {
    for works in [true, false] {
        let used = AtomicU64::new(100);
        let engine = RawEngine::start(move |request| match request.line.as_str() {
            "GET /health" | "GET /ready" => vec![Act::Send(json("{}"))],
            "GET /v1/models" => vec![Act::Send(json(r#"{"data":[{"id":"tiny","owned_by":"sglang"}]}"#))],
            "GET /server_info" => vec![Act::Send(json(r#"{"disaggregation_mode":"null"}"#))],
            "GET /v1/loads?include=core" => {
                let used = used.fetch_add(u64::from(works), Ordering::Relaxed);
                let load = format!(
                    r#"{{"loads":[{{"num_running_reqs":1,"num_waiting_reqs":2,"num_used_tokens":{used}}}]}}"#
                );
                vec![Act::Send(json(&load))]
            }
            line if line.starts_with("POST") => {
                let first = Act::Send([stream_head(), event("a", "null")].concat());
                let rest = [event("b", "\"stop\""), chunk(b"data: [DONE]\n\n"), chunk(b"")].concat();
                vec![first, Act::Pause(2_500 * MS), Act::Send(rest)]
            }
            _ => vec![Act::Send(status("404 Not Found", "{}"))],
        })
        .await;
        let builder = TestClusterBuilder::new().config(|config| {
            config.timeouts.event_idle = 1_000 * MS;
            config.probe.load_interval = 50 * MS;
            config.workers.push(engine.worker("id=1,role=aggregated,engine=sglang"));
        });
        let cluster = builder.start().await;
        let load = |cluster: &TestCluster| cluster.worker(1).engine_load();
        // B8.3
        cluster.until("its load is read", |cluster| load(cluster).is_some()).await.unwrap();
        assert_eq!(load(&cluster).map(|load| (load.running, load.waiting)), Some((Some(1), Some(2))));
        let (text, _) = stream(&cluster).await;
        // I3.6: the tokens in use move while it works
        assert_eq!(text.ends_with("data: [DONE]\n\n"), works, "{text}");
        assert_eq!(text.contains("timeouts.event_idle"), !works, "{text}");
    }
}

#[tokio::test]
async fn i3_a_stream_ends_when_nothing_moves_and_always_at_its_bound() {
    let (still, works) =
        (Behaviour::default(), Behaviour { works: AtomicBool::new(true), ..Behaviour::default() });
    let unknown = Behaviour::default();
    let cases = [
        // I3.6
        (still, "vllm", 1_000 * MS, "timeouts.event_idle"),
        // I3.7
        (works, "vllm", 4_000 * MS, "timeouts.event_idle_max"),
        // I3.6: health checks are not progress, so that the stream may continue on another worker.
        (unknown, "openai", 4_000 * MS, "timeouts.event_idle"),
    ];
    for (behaviour, dialect, least, key) in cases {
        let (cluster, _engine) = silent(&Arc::new(behaviour), Duration::from_secs(60), dialect).await;
        let (text, took) = stream(&cluster).await;
        assert!(text.contains("\"code\":\"engine_timeout\""), "{text}");
        let other = key == "timeouts.event_idle" && text.contains("timeouts.event_idle_max");
        assert!(took >= least && text.contains(key) && !other, "{dialect} {took:?} {text}");
    }
}

#[tokio::test]
async fn i3_a_stream_of_an_engine_without_figures_goes_on_while_its_health_checks_are_answered() {
    // A model that thinks without output: for more than twice timeouts.event_idle.
    let (cluster, _engine) = silent(&Arc::new(Behaviour::default()), 2_500 * MS, "openai").await;
    let (text, took) = stream(&cluster).await;
    // I3.6
    assert!(text.ends_with("data: [DONE]\n\n") && took >= 2_400 * MS, "{took:?} {text}");
}

#[tokio::test]
async fn i3_comments_of_an_engine_are_no_events() {
    // The engine keeps its connection with comments for ten seconds.
    let pings = || {
        let ping = [Act::Pause(250 * MS), Act::Send(chunk(b": {\"error\":{\"message\":\"x\"}}\n\n"))];
        std::iter::repeat_n(ping, 40).flatten().collect::<Vec<_>>()
    };
    let begun = Arc::new(AtomicBool::new(true));
    let begins = begun.clone();
    let behaviour = Arc::new(Behaviour { works: AtomicBool::new(true), ..Behaviour::default() });
    let engine = vllm(&behaviour, move |_| {
        let first = if begins.load(Ordering::Relaxed) { event("a", "null") } else { Vec::new() };
        let mut acts = vec![Act::Send([stream_head(), first].concat())];
        acts.extend(pings());
        acts.push(Act::Send([event("b", "\"stop\""), chunk(b"data: [DONE]\n\n"), chunk(b"")].concat()));
        acts
    })
    .await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.timeouts.event_idle = 1_000 * MS;
            config.timeouts.event_idle_max = 2_000 * MS;
            config.timeouts.head = 1_000 * MS;
            config.probe.load_interval = 50 * MS;
            config.routing.retries = 0;
            add(config, 1, &engine);
        })
        .start()
        .await;
    for has_begun in [true, false] {
        let (least, key) = (2_000 * MS, "timeouts.event_idle_max");
        begun.store(has_begun, Ordering::Relaxed);
        let (text, took) = stream(&cluster).await;
        // I3.7
        assert!(text.contains("\"code\":\"engine_timeout\"") && text.contains(key), "{took:?} {text}");
        assert!(took >= least, "{took:?}: the engine would have gone on after ten seconds");
        assert_eq!(text.matches("data: ").count(), 1 + usize::from(has_begun), "{text}");
        // I3.5
        assert!(text.contains(": {\"error\""), "{text}");
    }
}

/// A long prompt, or a long queue in the engine: three times the limit before anything comes.
#[tokio::test]
async fn i3_a_stream_may_take_longer_to_begin_while_its_engine_works() {
    let works = || Behaviour { works: AtomicBool::new(true), ..Behaviour::default() };
    let says_running = || Behaviour { tokens: AtomicU64::new(u64::MAX), ..Behaviour::default() };
    let still = Behaviour::default;
    let cases = [
        (works(), "vllm", true),
        (says_running(), "vllm", true),
        (still(), "vllm", false),
        // Health checks prove nothing, and another worker may serve the request.
        (still(), "openai", false),
    ];
    for (behaviour, dialect, waits) in cases {
        for head_at_once in [true, false] {
            let engine = vllm(&Arc::new(Behaviour::copy(&behaviour)), move |_| {
                let (head, pause) = (Act::Send(stream_head()), Act::Pause(1_500 * MS));
                let [one, two] = if head_at_once { [head, pause] } else { [pause, head] };
                let events = [event("b", "\"stop\""), chunk(b"data: [DONE]\n\n"), chunk(b"")].concat();
                vec![one, two, Act::Send(events)]
            })
            .await;
            let builder = TestClusterBuilder::new().config(|config| {
                config.timeouts.head = 500 * MS;
                config.probe.interval = 100 * MS;
                config.probe.load_interval = 50 * MS;
                config.routing.retries = 0;
                config.workers.push(engine.worker(&format!("id=1,role=aggregated,engine={dialect}")));
            });
            let cluster = builder.start().await;
            let body = r#"{"model":"tiny","prompt":"a","stream":true}"#;
            let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
            let text = String::from_utf8_lossy(&reply.body).into_owned();
            // I3.15
            assert_eq!(text.ends_with("data: [DONE]\n\n"), waits, "{dialect} {head_at_once}: {text}");
            assert_eq!(text.contains("timeouts.head"), !waits, "{text}");
            cluster.at_rest().await.unwrap();
        }
    }
}

#[tokio::test]
async fn i3_an_engine_that_only_says_that_requests_run_is_stuck_after_three_streams_that_do_not_begin() {
    let behaviour =
        Behaviour { hangs: AtomicBool::new(true), tokens: AtomicU64::new(u64::MAX), ..Behaviour::default() };
    let engine = vllm(&Arc::new(behaviour), answer).await;
    let builder = TestClusterBuilder::new().config(|config| {
        config.timeouts.head = 500 * MS;
        config.probe.load_interval = 50 * MS;
        config.routing.retries = 0;
        add(config, 1, &engine);
    });
    let cluster = builder.start().await;
    let begun = Instant::now();
    let ask = || cluster.client.post(COMPLETIONS, &[], r#"{"model":"tiny","prompt":"a","stream":true}"#);
    let (one, two, three) = tokio::join!(ask(), ask(), ask());
    for reply in [one, two, three] {
        let text = String::from_utf8_lossy(&reply.unwrap().body).into_owned();
        // B7.3, I3.15
        assert!(text.contains("\"code\":\"engine_timeout\""), "{text}");
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}
