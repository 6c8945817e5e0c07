//! Decode workers that refuse what a prefill worker handed over: another one is asked (I17, I2.4, E5).

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{
    Act, COMPLETIONS, RESPONSES, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{self, chunk, json as json_answer, stream_head},
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};

const NO_TEMPLATE: &str = r#"{"error":{"message":"a chat template is missing","code":400}}"#;
const NOT_FOUND: &str = r#"{"detail":"Not Found"}"#;
/// Decode workers are preferred in their order.
const IN_TURN: &str = "[decode]\nbuiltin = 'formula'\nsettings = { cost = \"label_number('turn')\" }";
/// Engines that hand over by an answer or by an address, and more of the flags of their workers.
const KINDS: [(&str, [&str; 3]); 3] = [
    ("vllm", ["", "", ""]),
    ("trtllm", ["", "", ""]),
    ("vllm,transport=p2p_nccl", [",kv_addr=127.0.0.9:1", ",kv_addr=127.0.0.9:2", ",kv_addr=127.0.0.9:3"]),
];

/// Status and body.
type Refusal = (&'static str, &'static str);

/// A prefill worker and two decode workers.
struct Fleet {
    engines: [RawEngine; 3],
    cluster: TestCluster,
    /// What the first decode worker answers, and perhaps the second one.
    refusal: Arc<Mutex<Option<Refusal>>>,
}

/// The answer of an engine, with what each kind hands over.
fn answer(end: &str) -> String {
    let parameters = json!({ "request_type": "context_only", "ctx_request_id": 5 });
    let nixl = json!({ "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r",
        "remote_host": "127.0.0.1", "remote_port": 1 });
    let choice =
        json!({ "index": 0, "text": "good", "finish_reason": end, "disaggregated_params": parameters });
    json!({ "id": "x", "model": "tiny", "choices": [choice], "kv_transfer_params": nixl }).to_string()
}

async fn engine(end: &'static str, refusal: Arc<Mutex<Option<Refusal>>>) -> RawEngine {
    let script = move |_: &RawRequest| {
        let refused = refusal.lock().map(|(status, body)| raw_engine::status(status, body));
        vec![Act::Send(refused.unwrap_or_else(|| json_answer(&answer(end))))]
    };
    RawEngine::serving(script).await
}

impl Fleet {
    /// The first decode worker refuses with this; so does the second one if `both`.
    async fn start((kind, more): (&str, [&str; 3]), refused: Refusal, both: bool) -> Self {
        let refusal = Arc::new(Mutex::new(Some(refused)));
        let second = if both { refusal.clone() } else { Arc::default() };
        let engines = [
            engine("length", Arc::default()).await,
            engine("stop", refusal.clone()).await,
            engine("stop", second).await,
        ];
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                config.routing.enforce_disagg = true;
                config.policies.slots = toml::from_str(IN_TURN).unwrap();
                for (turn, (engine, more)) in engines.iter().zip(more).enumerate() {
                    let role = if turn == 0 { "prefill" } else { "decode" };
                    let id = turn + 1;
                    let flag = format!(
                        "id={id},role={role},engine={kind},url=http://{}{more},label.turn={turn}",
                        engine.address
                    );
                    config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
                }
            })
            .start()
            .await;
        Self { engines, cluster, refusal }
    }

    /// Number of requests that each engine got.
    fn posts(&self) -> [usize; 3] {
        self.engines
            .each_ref()
            .map(|engine| engine.requests().iter().filter(|request| request.line.starts_with("POST")).count())
    }
}

async fn ask(cluster: &TestCluster, headers: &[(&str, &str)], prompt: &str) -> Reply {
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 3}).to_string();
    cluster.client.post(COMPLETIONS, headers, body).await.unwrap()
}

async fn reason(cluster: &TestCluster, worker: u64) -> Value {
    let told = cluster.admin.get(&format!("/workers/{worker}")).await.unwrap().json().unwrap();
    told["worker"]["reason"].clone()
}

#[tokio::test]
async fn i17_a_decode_worker_that_refuses_everything_is_left_out() {
    for kind in KINDS {
        let fleet = Fleet::start(kind, ("400 Bad Request", NO_TEMPLATE), false).await;
        let mut statuses = Vec::new();
        for round in 0..15 {
            statuses.push(ask(&fleet.cluster, &[], &format!("hello {round}")).await.status.as_u16());
            fleet.cluster.at_rest().await.unwrap();
        }
        // I17.1, I17.5
        assert_eq!(statuses[..4], [400; 4], "{kind:?}");
        assert!(statuses[4..].iter().all(|status| *status == 200), "{kind:?}: {statuses:?}");
        let reason = reason(&fleet.cluster, 2).await;
        // I17.3
        assert!(reason.as_str().unwrap().contains("answered 400: a chat template is missing"), "{reason}");
        // An addressed handoff of a worker that takes nothing is lost, and the retry has a new one.
        let is_addressed = kind.0.contains("p2p");
        let lost = fleet.cluster.handoffs("lost_no_decode_worker").await.unwrap();
        assert_eq!(lost >= 5.0, is_addressed, "{kind:?}: {lost}");
        assert_eq!(fleet.posts()[0] > 15, is_addressed, "{kind:?}: {:?}", fleet.posts());
    }
}

#[tokio::test]
async fn i17_a_decode_worker_of_a_bootstrap_pair_that_refuses_everything_is_left_out() {
    let cluster = TestClusterBuilder::new()
        .sim(Dialect::Sglang, Role::Prefill)
        .sim_with(SimConfig::instant(Dialect::Sglang, Role::Decode), ",label.turn=1")
        .sim_with(SimConfig::instant(Dialect::Sglang, Role::Decode), ",label.turn=2")
        .config(|config| config.policies.slots = toml::from_str(IN_TURN).unwrap())
        .start()
        .await;
    let refusal = FaultKind::Status { status: 400, retry_after: None };
    cluster.sims[1].set_faults(vec![Fault::always(refusal)]);
    let mut statuses = Vec::new();
    for round in 0..15 {
        statuses.push(ask(&cluster, &[], &format!("hello {round}")).await.status.as_u16());
    }
    // I17.5
    assert!(statuses[4..].iter().all(|status| *status == 200), "{statuses:?}");
    assert!(reason(&cluster, 2).await.as_str().unwrap().contains("answered 400"));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i17_wrong_requests_eject_no_decode_worker() {
    let fleet = Fleet::start(KINDS[0], ("400 Bad Request", NO_TEMPLATE), true).await;
    for round in 0..12 {
        let reply = ask(&fleet.cluster, &[], &format!("wrong {round}")).await;
        assert_eq!((reply.status.as_u16(), &*reply.body), (400, NO_TEMPLATE.as_bytes()));
        fleet.cluster.at_rest().await.unwrap();
        for worker in [2, 3] {
            // I17.2
            assert_eq!(reason(&fleet.cluster, worker).await, Value::Null);
        }
    }
    // E6.7: each handoff was offered to both.
    assert_eq!(fleet.cluster.handoffs("lost_no_decode_worker").await.unwrap(), 12.0);
}

#[tokio::test]
async fn i17_a_long_prompt_goes_to_a_decode_worker_with_a_longer_context() {
    let sim = |role, max_model_len| SimConfig { max_model_len, ..SimConfig::instant(Dialect::Vllm, role) };
    let cluster = TestClusterBuilder::new()
        .sim_with(sim(Role::Prefill, 3_000), "")
        .sim_with(sim(Role::Decode, 400), ",label.turn=1")
        .sim_with(sim(Role::Decode, 3_000), ",label.turn=2")
        .config(|config| {
            config.routing.enforce_disagg = true;
            config.policies.slots = toml::from_str(IN_TURN).unwrap();
        })
        .start()
        .await;
    for round in 0..8 {
        let reply = ask(&cluster, &[], &format!("{round} {}", "word ".repeat(600))).await;
        // I17.6
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    cluster.at_rest().await.unwrap();
    let prefills: u64 = cluster.sims[0].state().requests.values().sum();
    // E5.2: the same handoff
    assert_eq!((prefills, cluster.sims[2].state().handoffs.pulled), (8, 8));
    assert_eq!(reason(&cluster, 2).await, Value::Null, "it works");
    let reply = ask(&cluster, &[], &"word ".repeat(5_000)).await;
    assert_eq!(reply.status, 400, "too long for all");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i2_a_decode_worker_that_lacks_the_model_the_key_or_the_route_is_not_the_clients_error() {
    let page = "<html><h1>404 Not Found</h1></html>";
    let refusals = [
        ("404 Not Found", NOT_FOUND),
        ("404 Not Found", page),
        ("401 Unauthorized", NOT_FOUND),
        ("407 Proxy Authentication Required", NOT_FOUND),
        ("499 Client Closed Request", NOT_FOUND),
    ];
    for kind in KINDS {
        let fleet = Fleet::start(kind, refusals[0], false).await;
        // An engine that has answered lacks no endpoint (I17.7).
        *fleet.refusal.lock() = None;
        assert_eq!(ask(&fleet.cluster, &[], "an answer before").await.status, 200);
        for refusal in refusals {
            *fleet.refusal.lock() = Some(refusal);
            let before = fleet.posts();
            // Few enough that the first worker is not left out.
            for round in 0..3 {
                let reply = ask(&fleet.cluster, &[], &format!("hello {round}")).await;
                // I2.4
                assert_eq!(reply.status, 200, "{kind:?} {refusal:?}: {reply:?}");
            }
            fleet.cluster.at_rest().await.unwrap();
            let after = fleet.posts();
            // E5.2, E5.3
            let prefills = if kind.0.contains("p2p") || refusal.0.starts_with("499") { 6 } else { 3 };
            let posts = [0, 1, 2].map(|engine| after[engine] - before[engine]);
            assert_eq!(posts, [prefills, 3, 3], "{kind:?} {refusal:?}");
            *fleet.refusal.lock() = None;
            assert_eq!(ask(&fleet.cluster, &[], "an answer in between").await.status, 200);
        }
    }
}

#[tokio::test]
async fn i2_a_bootstrap_pair_whose_decode_worker_lacks_the_model_is_tried_anew() {
    for status in [401, 404] {
        let cluster = TestCluster::disaggregated(Dialect::Sglang, 1, 2).await.unwrap();
        let refusal = FaultKind::Status { status, retry_after: None };
        cluster.sims[1].set_faults(vec![Fault::always(refusal)]);
        for round in 0..8 {
            // I2.4
            assert_eq!(ask(&cluster, &[], &format!("hello {round}")).await.status, 200);
        }
        cluster.at_rest().await.unwrap();
        assert_eq!(cluster.sims.iter().map(|sim| sim.state().stranded).sum::<u64>(), 0);
    }
}

#[tokio::test]
async fn i2_the_answer_of_decode_workers_that_all_lack_the_model_passes_and_each_is_asked_once() {
    for kind in KINDS {
        let fleet = Fleet::start(kind, ("404 Not Found", NOT_FOUND), true).await;
        let reply = ask(&fleet.cluster, &[], "hello").await;
        // I2.4
        assert_eq!((reply.status.as_u16(), &*reply.body), (404, NOT_FOUND.as_bytes()), "{kind:?}");
        fleet.cluster.at_rest().await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(fleet.posts()[1..], [1, 1], "{kind:?}");
        // E6.7
        let lost = fleet.cluster.handoffs("lost_no_decode_worker").await.unwrap();
        assert_eq!(lost, if kind.0.contains("p2p") { 2.0 } else { 1.0 }, "{kind:?}");
        let pinned = ask(&fleet.cluster, &[("x-worker-instance-id", "2")], "pinned").await;
        // I2.8
        assert_eq!(pinned.status, 404, "{kind:?} {pinned:?}");
        fleet.cluster.at_rest().await.unwrap();
        assert_eq!(fleet.posts()[1], 3, "{kind:?}: once for the client, once for the handoff");
    }
}

#[tokio::test]
async fn i2_an_offer_after_a_refusal_is_a_retry() {
    for (retries, expected) in [(0, 404), (1, 200)] {
        let cluster = TestClusterBuilder::new()
            .sim(Dialect::Vllm, Role::Prefill)
            .sim_with(SimConfig::instant(Dialect::Vllm, Role::Decode), ",label.turn=1")
            .sim_with(SimConfig::instant(Dialect::Vllm, Role::Decode), ",label.turn=2")
            .config(|config| {
                (config.routing.enforce_disagg, config.routing.retries) = (true, retries);
                config.policies.slots = toml::from_str(IN_TURN).unwrap();
            })
            .start()
            .await;
        let refusal = FaultKind::Status { status: 404, retry_after: None };
        cluster.sims[1].set_faults(vec![Fault::always(refusal)]);
        // I2.3
        assert_eq!(ask(&cluster, &[], "hello").await.status.as_u16(), expected);
        let asked = |place: usize| cluster.sims[place].state().requests.values().sum::<u64>();
        // E6.6
        cluster
            .until("the handoff is consumed", |cluster| cluster.sims[2].state().handoffs.pulled == 1)
            .await
            .unwrap();
        cluster.at_rest().await.unwrap();
        // E6.6
        assert_eq!([asked(1), asked(2)], [1, 1], "{retries} retries");
    }
}

#[tokio::test]
async fn e6_a_handoff_whose_request_decode_refuses_within_an_answer_is_consumed() {
    let error =
        r#"{"error":{"message":"the guided grammar is invalid","type":"BadRequestError","code":400}}"#;
    let event = chunk(format!("data: {error}\n\n").as_bytes());
    let early = vec![Act::Send([stream_head(), event.clone(), chunk(b"")].concat())];
    let pause = Act::Pause(Duration::from_millis(100));
    let late = vec![Act::Send(stream_head()), pause, Act::Send([event, chunk(b"")].concat())];
    let refusals = [(false, 400, vec![Act::Send(json_answer(error))]), (true, 400, early), (true, 200, late)];
    for ((kind, [prefill_flags, flags, _]), (stream, status, acts)) in
        KINDS.into_iter().flat_map(|kind| refusals.clone().map(|refusal| (kind, refusal)))
    {
        let is_one_token = |request: &RawRequest| request.body.contains("\"max_tokens\":1,");
        let refuses = move |request: &RawRequest| {
            if is_one_token(request) { vec![Act::Send(json_answer(&answer("stop")))] } else { acts.clone() }
        };
        let (prefill, decode) = (engine("length", Arc::default()).await, RawEngine::serving(refuses).await);
        let builder = TestClusterBuilder::new().config(|config| {
            for (role, engine, flags) in [("prefill", &prefill, prefill_flags), ("decode", &decode, flags)] {
                let flag = format!("role={role},engine={kind},url=http://{}{flags}", engine.address);
                config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
            }
        });
        let cluster = builder.start().await;
        let body = json!({"model": "tiny", "prompt": "which way?", "max_tokens": 9, "stream": stream});
        let reply = cluster.client.post(COMPLETIONS, &[], body.to_string()).await.unwrap();
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        assert_eq!(
            (reply.status.as_u16(), text.contains("grammar is invalid")),
            (status, true),
            "{kind}: {text}"
        );
        cluster.until("the handoff is consumed", |_| decode.requests().len() == 2).await.unwrap();
        cluster.at_rest().await.unwrap();
        let one_token: Vec<bool> = decode.requests().iter().map(is_one_token).collect();
        // E6.16, E5.1
        assert_eq!(
            (prefill.requests().len(), one_token),
            (1, vec![false, true]),
            "{kind}, streamed: {stream}"
        );
    }
}

/// What an engine does that refuses a request within an answer with status 200.
#[derive(Clone, Copy, Debug)]
enum Within {
    Whole,
    FirstEvent,
    /// After the head of a stream.
    LateEvent,
}

impl Within {
    fn acts(self, code: u16) -> Vec<Act> {
        let error = json!({ "error": { "message": "not now", "code": code } }).to_string();
        let event = chunk(format!("data: {error}\n\n").as_bytes());
        let rest = [event, chunk(b"")].concat();
        let pause = Act::Pause(Duration::from_millis(100));
        match self {
            Self::Whole => vec![Act::Send(json_answer(&error))],
            Self::FirstEvent => vec![Act::Send([stream_head(), rest].concat())],
            Self::LateEvent => vec![Act::Send(stream_head()), pause, Act::Send(rest)],
        }
    }
}

/// A decode engine that refuses the first requests within its answers, and takes the others.
async fn refusing_within(within: Within, code: u16, times: usize) -> RawEngine {
    let left = Mutex::new(times);
    let event = json!({ "id": "x", "model": "tiny",
        "choices": [{ "index": 0, "text": "good", "finish_reason": "stop" }] });
    let good = format!("data: {event}\n\ndata: [DONE]\n\n");
    RawEngine::serving(move |request| {
        let mut left = left.lock();
        let streams = request.body.contains("\"stream\":true");
        if *left > 0 {
            *left -= 1;
            return if streams { within } else { Within::Whole }.acts(code);
        }
        if streams {
            return vec![Act::Send([stream_head(), chunk(good.as_bytes()), chunk(b"")].concat())];
        }
        vec![Act::Send(json_answer(&answer("stop")))]
    })
    .await
}

/// A gateway before a prefill worker, and decode workers that are preferred in their order.
async fn gateway((kind, more): (&str, [&str; 3]), engines: &[&RawEngine], terms: &str) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        config.routing.enforce_disagg = true;
        config.policies.slots = toml::from_str(IN_TURN).unwrap();
        for (turn, (engine, more)) in engines.iter().zip(more).enumerate() {
            let role = if turn == 0 { "prefill" } else { "decode" };
            let url = format!("url=http://{}", engine.address);
            let flag = format!("role={role},engine={kind},{url}{more},label.turn={turn}{terms}");
            config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
        }
    });
    builder.start().await
}

async fn ask_for(cluster: &TestCluster, stream: bool) -> (u16, String) {
    let body = json!({"model": "tiny", "prompt": "which way?", "max_tokens": 9, "stream": stream});
    let reply = cluster.client.post(COMPLETIONS, &[], body.to_string()).await.unwrap();
    (reply.status.as_u16(), String::from_utf8_lossy(&reply.body).into_owned())
}

#[tokio::test]
async fn e6_a_handoff_that_decode_refuses_within_an_answer_goes_to_another_worker() {
    let refusals = [
        (Within::Whole, 503),
        (Within::FirstEvent, 429),
        (Within::LateEvent, 503),
        (Within::Whole, 404),
        (Within::FirstEvent, 401),
        (Within::LateEvent, 407),
    ];
    for kind in KINDS {
        for (within, code) in refusals {
            let prefill = engine("length", Arc::default()).await;
            let decode = [refusing_within(within, code, 9).await, refusing_within(within, code, 0).await];
            let cluster = gateway(kind, &[&prefill, &decode[0], &decode[1]], "").await;
            let (status, text) = ask_for(&cluster, !matches!(within, Within::Whole)).await;
            assert!(status == 200 && text.contains("good"), "{kind:?} {within:?} {code}: {status} {text}");
            cluster.at_rest().await.unwrap();
            let asked = [&prefill, &decode[0], &decode[1]].map(|engine| engine.requests().len());
            // E6.16, E5.2, E5.3: an addressed handoff is lost, and counted
            let is_addressed = kind.0.contains("p2p");
            let prefills = if is_addressed { 2 } else { 1 };
            assert_eq!(asked, [prefills, 1, 1], "{kind:?} {within:?} {code}");
            let lost = cluster.handoffs("lost_no_decode_worker").await.unwrap();
            assert_eq!(lost, f64::from(u8::from(is_addressed)), "{kind:?} {within:?} {code}");
        }
    }
}

#[tokio::test]
async fn e6_a_handoff_that_the_only_decode_worker_refuses_within_an_answer_is_offered_again() {
    for within in [Within::Whole, Within::LateEvent] {
        let stream = !matches!(within, Within::Whole);
        let prefill = engine("length", Arc::default()).await;
        let decode = refusing_within(within, 503, 1).await;
        let cluster = gateway(KINDS[0], &[&prefill, &decode], "").await;
        let (status, text) = ask_for(&cluster, stream).await;
        // E6.9, E6.16
        assert_eq!((status, text.contains("good")), (200, true), "{within:?}: {text}");
        cluster.until("the handoff is offered again", |_| decode.requests().len() == 2).await.unwrap();
        cluster.at_rest().await.unwrap();
        assert_eq!(prefill.requests().len(), 1, "{within:?}");
        let is_one_token = decode.requests()[1].body.contains("\"max_tokens\":1,");
        // E6.6
        assert!(!is_one_token, "{within:?}");
        assert_eq!(cluster.handoffs("lost_no_decode_worker").await.unwrap(), 0.0);

        let decode = refusing_within(within, 503, 99).await;
        let cluster = gateway(KINDS[0], &[&prefill, &decode], ",handoff_lease_s=2").await;
        let (status, text) = ask_for(&cluster, stream).await;
        assert!(status == 503 || (stream && status == 200), "{within:?}: {status} {text}");
        assert!(text.contains("overloaded"), "{within:?}: {text}");
        cluster.at_rest().await.unwrap();
        // E6.7, E6.9
        assert_eq!(cluster.handoffs("lost_no_decode_worker").await.unwrap(), 1.0, "{within:?}");
        assert_eq!(prefill.requests().len(), 2, "one prefill for each request");
        assert!(decode.requests().len() > 1, "it was offered again");
    }
}

/// Endpoints, the first event of their streams, and the rest. Engines send the first one with their first
/// output, except where it says otherwise.
const STREAMS: [(&str, &str, &str); 4] = [
    (
        "/v1/chat/completions",
        r#"data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
        r#"data: {"id":"x","choices":[{"index":0,"delta":{"content":"good"},"finish_reason":"stop"}]}"#,
    ),
    (
        "/v1/messages",
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\"}}",
        "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"good\"}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}",
    ),
    // The first event comes before the engine generates anything.
    (
        RESPONSES,
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"status\":\"in_progress\"},\"sequence_number\":0}",
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"good\",\"sequence_number\":1}\n\nevent: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"status\":\"completed\"},\"sequence_number\":2}",
    ),
    // The client gets the first event at once.
    (
        COMPLETIONS,
        r#"data: {"id":"x","choices":[{"index":0,"text":"","finish_reason":null}]}"#,
        r#"data: {"id":"x","choices":[{"index":0,"text":"good","finish_reason":"stop"}]}"#,
    ),
];

/// When a decode engine refuses a request that it began to answer.
#[derive(Clone, Copy, Debug)]
enum Refuses {
    /// Together with the first event.
    AtOnce,
    Later,
}

/// An engine of a version that hands over all endpoints.
async fn new_engine(script: impl Fn() -> Vec<Act> + Send + Sync + 'static) -> RawEngine {
    RawEngine::start(move |request| match request.line.as_str() {
        "GET /v1/models" => {
            vec![Act::Send(json_answer(r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"#))]
        }
        "GET /version" => vec![Act::Send(json_answer(r#"{"version":"0.33.0"}"#))],
        line if line.starts_with("GET") => vec![Act::Send(json_answer("{}"))],
        _ => script(),
    })
    .await
}

/// A decode engine that serves a stream, or refuses it after its first event.
async fn refusing_after((path, first, last): (&str, &str, &str), refuses: Option<Refuses>) -> RawEngine {
    let is_named = !path.ends_with("completions");
    let (name, end) = if is_named { ("event: error\n", "") } else { ("", "data: [DONE]\n\n") };
    let error = json!({ "type": "error", "error": { "message": "not now", "code": 503 } });
    let rest = [chunk(format!("{name}data: {error}\n\n").as_bytes()), chunk(b"")].concat();
    let good = [chunk(format!("{last}\n\n{end}").as_bytes()), chunk(b"")].concat();
    let begin = [stream_head(), chunk(format!("{first}\n\n").as_bytes())].concat();
    new_engine(move || match refuses {
        None => vec![Act::Send([&begin[..], &good].concat())],
        Some(Refuses::AtOnce) => vec![Act::Send([&begin[..], &rest].concat())],
        Some(Refuses::Later) => {
            let pause = Act::Pause(Duration::from_millis(100));
            vec![Act::Send(begin.clone()), pause, Act::Send(rest.clone())]
        }
    })
    .await
}

#[tokio::test]
async fn e6_a_decode_worker_that_refuses_after_its_first_output_has_taken_the_handoff() {
    for (stream, refuses) in STREAMS.into_iter().flat_map(|s| [(s, Refuses::AtOnce), (s, Refuses::Later)]) {
        let prefill = new_engine(|| vec![Act::Send(json_answer(&answer("length")))]).await;
        let decode = [refusing_after(stream, Some(refuses)).await, refusing_after(stream, None).await];
        let cluster = gateway(KINDS[0], &[&prefill, &decode[0], &decode[1]], "").await;
        let path = stream.0;
        let mut body = json!({"model": "tiny", "max_tokens": 9, "stream": true});
        match path {
            COMPLETIONS => body["prompt"] = json!("which way?"),
            RESPONSES => {
                body = json!({"model": "tiny", "stream": true, "store": false, "input": "which way?"});
            }
            _ => body["messages"] = json!([{"role": "user", "content": "which way?"}]),
        }
        let reply = cluster.client.post(path, &[], body.to_string()).await.unwrap();
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        // I2.2: a client that has an event gets the refusal
        assert_eq!(
            (reply.status.as_u16(), text.contains("good")),
            (200, path != COMPLETIONS),
            "{path} {text}"
        );
        assert_eq!(text.matches(stream.1).count(), 1, "{path} {refuses:?}: {text}");
        cluster.at_rest().await.unwrap();
        let line = format!("POST {path}");
        let asked = [&prefill, &decode[0], &decode[1]]
            .map(|engine| engine.requests().iter().filter(|request| request.line == line).count());
        let expected = match path {
            // E6.16, E5.2: it has not begun
            RESPONSES => [1, 1, 1],
            COMPLETIONS => [1, 1, 0],
            // E6.16, E5.3: the retry has a handoff of its own
            _ => [2, 1, 1],
        };
        assert_eq!(asked, expected, "{path} {refuses:?}");
        assert_eq!(cluster.handoffs("lost_no_decode_worker").await.unwrap(), 0.0, "{path} {refuses:?}");
    }
}
