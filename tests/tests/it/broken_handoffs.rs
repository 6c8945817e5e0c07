//! Handoffs on which decode workers break before their first token, although the prefill answered well (E6).

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use pointsman_gateway::config::Config;
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{MODELS, RawRequest, chunk, json as json_answer, status, stream_head},
};
use pointsman_workers::{WorkerId, WorkerSpec};
use serde_json::{Value, json};

/// How the engines of a fleet hand over.
#[derive(Clone, Copy, Debug)]
enum Handoff {
    Nixl,
    Mooncake,
    Sglang,
}

/// How a decode engine fails.
#[derive(Clone, Copy, Debug)]
enum Failure {
    /// Its answer is 500.
    Status,
    /// Its stream ends with the finish reason `error` before a token.
    FinishReason,
    Reset,
    /// Its answer is 500 after a while.
    Late,
}

/// Prefill engines with the ids 1, 2, … and decode engines with the ids 11, 12, …
struct Fleet {
    prefill: Vec<RawEngine>,
    decode: Vec<RawEngine>,
    cluster: TestCluster,
}

/// Whether a request breaks a decode engine: by the ids of the prefill worker, 0 for a local prefill, and of
/// the engine, and by the body.
type Breaks = Arc<dyn Fn(u64, u64, &str) -> bool + Send + Sync>;

fn serves(models: &'static str, request: &RawRequest) -> Option<Vec<Act>> {
    let answer = match request.line.as_str() {
        "GET /v1/models" => json_answer(models),
        "GET /query" => json_answer(r#"{"0":{"engine_id":"e"}}"#),
        line if line.starts_with("GET") || line.contains("abort") => json_answer("{}"),
        _ => return None,
    };
    Some(vec![Act::Send(answer)])
}

fn completion(end: &str, handoff: &Value) -> Vec<u8> {
    let choice = json!({ "index": 0, "text": "hi", "finish_reason": end });
    json_answer(&json!({ "id": "x", "choices": [choice], "kv_transfer_params": handoff }).to_string())
}

/// A stream of one choice with this text and finish reason.
fn stream(text: &str, end: &str) -> Vec<u8> {
    let event = json!({ "id": "x", "choices": [{ "index": 0, "text": text, "finish_reason": end }] });
    let events = format!("data: {event}\n\ndata: [DONE]\n\n");
    [stream_head(), chunk(events.as_bytes()), chunk(b"")].concat()
}

async fn prefill_engine() -> RawEngine {
    RawEngine::start(|request| {
        // The port by which decode engines find it is the one of its address.
        let port = request.head.lines().find_map(|line| line.strip_prefix("host: 127.0.0.1:"));
        let handoff = json!({ "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r",
            "remote_host": "127.0.0.1", "remote_port": port.and_then(|port| port.trim().parse::<u16>().ok()) });
        serves(MODELS, request).unwrap_or_else(|| vec![Act::Send(completion("length", &handoff))])
    })
    .await
}

async fn decode_engine(id: u64, ports: Vec<u16>, failure: Failure, breaks: Breaks) -> RawEngine {
    RawEngine::start(move |request| {
        if let Some(answer) = serves(MODELS, request) {
            return answer;
        }
        let body = &request.body;
        let source = (1..).zip(&ports).find(|(_, port)| body.contains(&port.to_string())).map(|(id, _)| id);
        if !breaks(source.unwrap_or(0), id, body) {
            let whole = || completion("stop", &Value::Null);
            let streams = body.contains("\"stream\":true");
            return vec![Act::Send(if streams { stream("hi", "stop") } else { whole() })];
        }
        let error = json!({ "error": { "message": "KV load failed", "code": 500 } });
        let error = Act::Send(status("500 Internal Server Error", &error.to_string()));
        match failure {
            Failure::Status => vec![error],
            Failure::FinishReason => vec![Act::Send(stream("", "error"))],
            Failure::Reset => vec![Act::Reset],
            Failure::Late => vec![Act::Pause(Duration::from_millis(500)), error],
        }
    })
    .await
}

/// Starts a fleet in which the workers of each leg are chosen in the order of their ids.
async fn fleet_with(
    handoff: Handoff,
    (prefill, decode): (u64, u64),
    failure: Failure,
    breaks: impl Fn(u64, u64, &str) -> bool + Send + Sync + 'static,
    change: impl FnOnce(&mut Config),
) -> Fleet {
    let mut fleet: [Vec<RawEngine>; 2] = Default::default();
    for _ in 0..prefill {
        fleet[0].push(prefill_engine().await);
    }
    let (ports, breaks): (Vec<u16>, Breaks) =
        (fleet[0].iter().map(|engine| engine.address.port()).collect(), Arc::new(breaks));
    for id in 11..11 + decode {
        fleet[1].push(decode_engine(id, ports.clone(), failure, breaks.clone()).await);
    }
    let builder = TestClusterBuilder::new().config(|config| {
        let in_turn = "builtin = 'formula'\nsettings = { cost = \"label_number('turn')\" }\n";
        config.policies.slots = toml::from_str(&format!("[prefill]\n{in_turn}[decode]\n{in_turn}")).unwrap();
        for (engines, role, first) in [(&fleet[0], "prefill", 1), (&fleet[1], "decode", 11)] {
            for (id, engine) in (first..).zip(engines) {
                let port = engine.address.port();
                let more = match handoff {
                    Handoff::Nixl => "engine=vllm".to_owned(),
                    Handoff::Mooncake => format!("engine=vllm,transport=mooncake,bootstrap_port={port}"),
                    Handoff::Sglang if role == "prefill" => format!("engine=sglang,bootstrap_port={port}"),
                    Handoff::Sglang => "engine=sglang".to_owned(),
                };
                let address = engine.address;
                let flag = format!("id={id},role={role},{more},url=http://{address},label.turn={id}");
                config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
            }
        }
        change(config);
    });
    let cluster = builder.start().await;
    let [prefill, decode] = fleet;
    Fleet { prefill, decode, cluster }
}

async fn fleet(
    size: (u64, u64),
    breaks: impl Fn(u64, u64, &str) -> bool + Send + Sync + 'static,
    change: impl FnOnce(&mut Config),
) -> Fleet {
    fleet_with(Handoff::Nixl, size, Failure::Status, breaks, change).await
}

fn body(prompt: &str, stream: bool) -> String {
    json!({ "model": "tiny", "max_tokens": 4, "stream": stream, "prompt": prompt }).to_string()
}

impl Fleet {
    async fn ask(&self, prompt: &str) -> Reply {
        let headers = [("x-pointsman-decision", "1")];
        self.cluster.client.post(COMPLETIONS, &headers, body(prompt, false)).await.unwrap()
    }

    /// Asks for a stream, or a whole answer. Returns whether it was served.
    async fn serves(&self, prompt: &str, stream: bool) -> bool {
        let reply = self.cluster.client.post(COMPLETIONS, &[], body(prompt, stream)).await.unwrap();
        let text = String::from_utf8_lossy(&reply.body);
        reply.status == 200 && text.contains("hi") && !text.contains("\"error\"")
    }

    /// The workers whose last requests failed.
    fn failing(&self) -> Vec<u64> {
        let snapshot = self.cluster.gateway.state().registry.snapshot();
        let mut ids: Vec<u64> = snapshot
            .workers()
            .iter()
            .filter(|worker| worker.is_failing())
            .map(|worker| worker.id().0)
            .collect();
        ids.sort_unstable();
        ids
    }

    async fn poisoned(&self) -> f64 {
        self.cluster.metric("pointsman_poison_requests_total{").await.unwrap().iter().sum()
    }
}

#[tokio::test]
async fn e6_a_prefill_worker_whose_handoffs_no_decode_worker_can_load_costs_no_request() {
    for handoff in [Handoff::Nixl, Handoff::Mooncake, Handoff::Sglang] {
        for failure in [Failure::Status, Failure::FinishReason, Failure::Reset] {
            let fleet = fleet_with(handoff, (2, 2), failure, |prefill, _, _| prefill == 1, |_| {}).await;
            let streams = matches!(failure, Failure::FinishReason);
            for turn in 0..14 {
                let is_served = fleet.serves(&format!("turn {turn}"), streams).await;
                // E6.11
                assert!(is_served, "{handoff:?} {failure:?} {turn}");
            }
            // E6.12
            assert_eq!(fleet.failing(), [1], "{handoff:?} {failure:?}");
            let workers = fleet.cluster.admin.get("/workers/1").await.unwrap().json().unwrap();
            assert_eq!(workers["worker"]["reason"], "decode workers break on its handoffs");
            // I4.6
            assert_eq!(fleet.poisoned().await, 0.0, "{handoff:?} {failure:?}");
            fleet.cluster.at_rest().await.unwrap();
        }
    }
}

#[tokio::test]
async fn e6_a_pair_that_cannot_transfer_does_not_eject_its_prefill_worker() {
    for handoff in [Handoff::Nixl, Handoff::Mooncake, Handoff::Sglang] {
        let breaks = |prefill, decode, _: &str| (prefill, decode) == (1, 11);
        let fleet = fleet_with(handoff, (2, 2), Failure::Status, breaks, |_| {}).await;
        for turn in 0..14 {
            assert!(fleet.serves(&format!("turn {turn}"), false).await, "{handoff:?} {turn}");
        }
        let failing = fleet.failing();
        // E6.12
        assert!(!failing.contains(&1) && !failing.contains(&2), "{handoff:?}: {failing:?}");
        fleet.cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn e6_a_decode_worker_that_breaks_on_every_handoff_is_charged_itself() {
    let in_rounds = |config: &mut Config| {
        let in_turn = "builtin = 'formula'\nsettings = { cost = \"label_number('turn')\" }\n";
        let slots = format!("[prefill]\nnative = 'round-robin'\n[decode]\n{in_turn}");
        config.policies.slots = toml::from_str(&slots).unwrap();
    };
    let fleet = fleet((2, 3), |_, decode, _| decode == 11, in_rounds).await;
    for turn in 0..14 {
        assert!(fleet.serves(&format!("turn {turn}"), false).await, "{turn}");
    }
    // E6.12
    assert_eq!(fleet.failing(), [11]);
    assert!(fleet.prefill.iter().all(|engine| engine.requests().len() > 4));
    fleet.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn e6_the_only_worker_of_a_leg_is_tried_again_with_another_partner() {
    for (size, bad) in [((2, 1), 1), ((1, 2), 11)] {
        let fleet = fleet(size, move |prefill, decode, _| [prefill, decode].contains(&bad), |_| {}).await;
        for turn in 0..6 {
            // E6.11
            assert!(fleet.serves(&format!("turn {turn}"), false).await, "{size:?} {turn}");
        }
        fleet.cluster.at_rest().await.unwrap();
    }
    let fleet = fleet((1, 1), |_, _, _| true, |_| {}).await;
    let reply = fleet.ask("a pair").await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert!((reply.status.as_u16(), text.contains("KV load failed")) == (502, true), "{text}");
    // E6.11: never with the same one
    assert_eq!((fleet.prefill[0].requests().len(), fleet.decode[0].requests().len()), (1, 1));
}

#[tokio::test]
async fn e6_a_prompt_whose_handoff_broke_does_not_draw_the_next_turn() {
    let broken = Arc::new(AtomicBool::new(true));
    let now = broken.clone();
    let breaks = move |prefill, _, _: &str| prefill == 1 && now.load(Ordering::SeqCst);
    let fleet = fleet((2, 2), breaks, |config| config.policies.slots = Default::default()).await;
    let mut tried = 0;
    for talk in 0..80 {
        if tried == 4 {
            break;
        }
        let (prompt, before) = (format!("talk {talk} ").repeat(60), fleet.prefill[0].requests().len());
        broken.store(true, Ordering::SeqCst);
        assert!(fleet.serves(&prompt, false).await, "{talk}");
        broken.store(false, Ordering::SeqCst);
        if fleet.prefill[0].requests().len() > before {
            tried += 1;
            fleet.cluster.gateway.state().router.index().flush();
            let reply = fleet.ask(&format!("{prompt} and the next turn")).await;
            let decisions = reply.headers["x-pointsman-decision"].to_str().unwrap();
            // E6.11
            assert!(reply.status == 200 && decisions.contains("prefill=2/0"), "{talk}: {decisions}");
        }
    }
    assert_eq!(tried, 4, "chance never chose the worker");
    fleet.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn e6_a_local_prefill_follows_where_no_other_prefill_worker_is_left() {
    for (decode, retries) in [(2, 2), (1, 2), (2, 0)] {
        let change = move |config: &mut Config| {
            (config.routing.local_fallback, config.routing.retries) = (true, retries);
        };
        let fleet = fleet((1, decode), |prefill, _, _| prefill == 1, change).await;
        for turn in 0..8 {
            let reply = fleet.ask(&format!("turn {turn}")).await;
            assert_eq!(reply.status, 200, "{decode} {retries} {turn}: {reply:?}");
            // E6.13, B6.3
            let decisions = reply.headers["x-pointsman-decision"].to_str().unwrap();
            assert!(decisions.contains("aggregated=1"), "{decisions}");
        }
        fleet.cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn e6_a_local_prefill_that_breaks_in_the_same_way_acquits_the_handoff() {
    for decode in [1, 2] {
        let breaks = |_, _, body: &str| body.contains("poison");
        let fleet = fleet((1, decode), breaks, |config| config.routing.local_fallback = true).await;
        for turn in 0..14 {
            let reply = fleet.ask(&format!("poison {turn}")).await;
            // I4.6: a single decode worker may itself be broken
            let code = if decode == 2 { "poison_request" } else { "bad_upstream" };
            assert_eq!(reply.code(), code, "{decode} {turn} {reply:?}");
        }
        // E6.15
        assert_eq!(fleet.failing(), if decode == 2 { vec![] } else { vec![11] });
        fleet.cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i4_two_decode_workers_that_break_on_handoffs_of_one_prefill_worker_blame_the_second_request() {
    for others in [false, true] {
        let fleet = fleet((1, 2), |_, _, body| body.contains("broken"), |_| {}).await;
        // I4.1, I4.6, I4.7
        for (code, prefills) in [("bad_upstream", 2), ("poison_request", 1), ("poison_request", 0)] {
            let before = fleet.prefill[0].requests().len();
            let reply = fleet.ask("broken").await;
            assert_eq!((reply.status.as_u16(), reply.code().as_str()), (502, code), "{others} {reply:?}");
            assert_eq!(fleet.prefill[0].requests().len() - before, prefills, "{others} {code}");
            assert!(!others || fleet.serves("another", false).await);
        }
        assert!(fleet.serves("another", false).await);
        assert_eq!(fleet.failing(), [] as [u64; 0]);
        fleet.cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i4_a_prefill_worker_that_fails_with_other_requests_proves_nothing_against_one() {
    let fleet = fleet((1, 2), |_, _, _| true, |_| {}).await;
    for turn in 0..3 {
        assert_eq!(fleet.ask(&format!("turn {turn}")).await.code(), "bad_upstream");
    }
    assert_eq!(fleet.failing(), [1]);
    for _ in 0..3 {
        // I4.7
        assert_eq!(fleet.ask("again").await.code(), "bad_upstream");
    }
    assert_eq!(fleet.poisoned().await, 0.0);
    fleet.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i4_a_request_that_breaks_decode_workers_which_take_other_handoffs_is_refused() {
    let breaks = |_, _, body: &str| body.contains("poison");
    let fleet = fleet_with(Handoff::Nixl, (1, 2), Failure::Late, breaks, |_| {}).await;
    let other = async {
        // Before the second engine breaks.
        let is_asked = |_: &TestCluster| !fleet.decode[1].requests().is_empty();
        fleet.cluster.until("the second engine is asked", is_asked).await.unwrap();
        fleet.serves("another", false).await
    };
    let (reply, served) = tokio::join!(fleet.ask("poison"), other);
    // I4.6
    assert_eq!((reply.code().as_str(), served), ("poison_request", true), "{reply:?}");
    let visits = fleet.decode.iter().map(|engine| engine.requests().len()).sum::<usize>();
    assert_eq!(fleet.ask("poison").await.code(), "poison_request");
    assert_eq!(fleet.decode.iter().map(|engine| engine.requests().len()).sum::<usize>(), visits);
}

#[tokio::test]
async fn i4_a_request_that_breaks_a_handoff_and_a_local_prefill_is_refused() {
    let breaks = |_, _, body: &str| body.contains("poison");
    let fleet = fleet((1, 2), breaks, |config| config.routing.local_fallback = true).await;
    for _ in 0..2 {
        // I4.6
        assert_eq!(fleet.ask("poison").await.code(), "poison_request");
    }
    assert_eq!((fleet.decode[0].requests().len(), fleet.decode[1].requests().len()), (1, 1));
    assert!(fleet.serves("another", false).await);
    let worker = fleet.cluster.gateway.state().registry.snapshot().get(WorkerId(1)).unwrap().clone();
    assert!(!worker.is_failing());
    fleet.cluster.at_rest().await.unwrap();
}
