//! The two legs of a request on real sockets: what is held back, what is cancelled, what an attempt may
//! reuse.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use pointsman_gateway::config::{Config, LegOrder};
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw::connect_small,
    raw_engine::{ANSWER, DONE, MODELS, chunk, json as json_answer, status, stream_head},
};
use pointsman_workers::WorkerId;
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt as _,
    time::{Instant, timeout},
};

const TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\n";
const LAST: &str = "data: {\"choices\":[{\"index\":0,\"text\":\"b\",\"finish_reason\":\"stop\"}]}\n\n";
/// How long a leg of a pair takes that is slow on purpose.
/// Long enough that a busy machine does not take it for the work of a moment.
const SLOW: Duration = Duration::from_secs(3);
const MS: Duration = Duration::from_millis(1);

fn prompt(more: Value) -> String {
    let mut body = json!({
        "model": "tiny", "max_tokens": 4, "ignore_eos": true,
        "prompt": "which way does this train go, and who says so? ".repeat(6),
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

/// An engine that answers probes, aborts, and generation requests with `acts`.
async fn engine(acts: impl Fn() -> Vec<Act> + Send + Sync + 'static) -> RawEngine {
    let script = move |request: &RawRequest| match request.line.as_str() {
        "GET /health" => vec![Act::Send(json_answer("{}"))],
        "GET /v1/models" => vec![Act::Send(json_answer(MODELS))],
        "POST /abort_request" => vec![Act::Send(json_answer("{}")), Act::Close],
        line if line.starts_with("POST") => acts(),
        _ => vec![Act::Send(status("404 Not Found", "{}"))],
    };
    RawEngine::start(script).await
}

fn engines(config: &mut Config, dialect: &str, prefill: &[&RawEngine], decode: &RawEngine) {
    (config.routing.retries, config.routing.quarantine) = (0, Duration::ZERO);
    let prefill = prefill.iter().map(|engine| ("prefill", *engine));
    for (id, (role, engine)) in (1..).zip(prefill.chain([("decode", decode)])) {
        config.workers.push(engine.worker(&format!("id={id},role={role},engine={dialect}")));
    }
}

/// A pair of SGLang engines, each with a script for generation requests.
struct Pair {
    prefill: RawEngine,
    decode: RawEngine,
    cluster: TestCluster,
}

async fn pair(prefill: Vec<Act>, decode: Vec<Act>, change: impl FnOnce(&mut Config)) -> Pair {
    let (prefill, decode) = (engine(move || prefill.clone()).await, engine(move || decode.clone()).await);
    let configured = |config: &mut Config| {
        engines(config, "sglang", &[&prefill], &decode);
        change(config);
    };
    let cluster = TestClusterBuilder::new().config(configured).start().await;
    Pair { prefill, decode, cluster }
}

/// A stream of these events.
fn events(parts: &[&str]) -> Vec<Act> {
    vec![Act::Send([stream_head(), chunk(parts.concat().as_bytes()), b"0\r\n\r\n".to_vec()].concat())]
}

fn failure() -> Act {
    Act::Send(status("500 Internal Server Error", r#"{"error":{"message":"out of blocks","code":500}}"#))
}

/// The ids of the aborts that an engine received.
fn aborts(engine: &RawEngine) -> Vec<String> {
    let aborts = engine.requests().into_iter().filter(|request| request.line.ends_with("/abort_request"));
    aborts.map(|request| field(&request.body, "rid").as_str().unwrap().to_owned()).collect()
}

/// The id of the first generation request that an engine received.
fn generation(engine: &RawEngine) -> String {
    generations(engine).swap_remove(0)
}

/// The ids of the generation requests that an engine received.
fn generations(engine: &RawEngine) -> Vec<String> {
    let sent = engine.requests().into_iter().filter(|request| request.line.ends_with(COMPLETIONS));
    sent.map(|request| field(&request.body, "rid").as_str().unwrap().to_owned()).collect()
}

fn field(body: &str, name: &str) -> Value {
    serde_json::from_str::<Value>(body).unwrap()[name].clone()
}

async fn decisions(cluster: &TestCluster, headers: &[(&str, &str)], body: String) -> Vec<String> {
    let all: Vec<(&str, &str)> = headers.iter().copied().chain([("x-pointsman-decision", "1")]).collect();
    let reply = cluster.client.post(COMPLETIONS, &all, body).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    let header = reply.headers["x-pointsman-decision"].to_str().unwrap().to_owned();
    header.split(", ").map(|one| one.split(' ').next().unwrap().to_owned()).collect()
}

fn booked(cluster: &TestCluster, worker: u64) -> u32 {
    cluster.gateway.state().registry.snapshot().get(WorkerId(worker)).unwrap().active_requests()
}

fn slow(dialect: Dialect, role: Role) -> SimConfig {
    SimConfig { overhead: SLOW, ..SimConfig::instant(dialect, role) }
}

#[tokio::test]
async fn i3_the_streams_of_a_pair_are_known_by_their_first_bytes() {
    let whole = [TOKEN, LAST, DONE].concat();
    let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    let acts = vec![Act::Send([head, chunk(whole.as_bytes()), b"0\r\n\r\n".to_vec()].concat())];
    let pair = pair(acts.clone(), acts, |_| {}).await;
    let body = prompt(json!({"stream": true}));
    let reply = pair.cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
    // I3.13
    assert_eq!((reply.status.as_u16(), reply.body.as_ref()), (200, whole.as_bytes()), "{reply:?}");
    pair.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c11_tokens_flow_while_prefill_runs_and_the_end_is_held() {
    let answer = vec![Act::Pause(SLOW), Act::Send(json_answer(ANSWER))];
    let Pair { prefill, decode, cluster } = pair(answer, events(&[TOKEN, LAST, DONE]), |_| {}).await;
    let started = Instant::now();
    let mut stream = cluster.client.stream(COMPLETIONS, &[], prompt(json!({"stream": true}))).await.unwrap();
    let first = stream.next().await.unwrap().unwrap();
    // C11.2, C6.7, C6.8: decode was sent and answers while prefill runs as a task of its own
    assert!(first.contains("\"a\"") && started.elapsed() < SLOW, "{first} after {:?}", started.elapsed());
    let second = stream.next().await.unwrap().unwrap();
    // C11.3, C11.5
    assert!(second.contains("\"stop\"") && started.elapsed() >= SLOW, "{second} {:?}", started.elapsed());
    assert_eq!(stream.next().await.unwrap().as_deref(), Some("[DONE]"));
    // C6.7: with the same id
    assert_eq!(generation(&prefill), generation(&decode));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c6_a_client_that_does_not_read_keeps_no_booking_of_prefill() {
    let flood = Act::Repeat(chunk(TOKEN.repeat(200).as_bytes()));
    let answer = vec![Act::Pause(1_500 * MS), Act::Send(json_answer(ANSWER))];
    let pair = pair(answer, vec![Act::Send(stream_head()), flood], |_| {}).await;
    let body = prompt(json!({"stream": true}));
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut client = connect_small(pair.cluster.gateway.address).await.unwrap();
    client.write_all((head + &body).as_bytes()).await.unwrap();
    let both = |cluster: &TestCluster| (booked(cluster, 1), booked(cluster, 2)) == (1, 1);
    pair.cluster.until("both legs run", both).await.unwrap();
    // Its connection is full long before.
    pair.cluster.until("prefill ended", |cluster| booked(cluster, 1) == 0).await.unwrap();
    // C6.7
    assert_eq!(booked(&pair.cluster, 2), 1, "the client is still there");
    drop(client);
    pair.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c11_a_whole_answer_is_held_until_prefill_ended() {
    let answer = vec![Act::Pause(SLOW), Act::Send(json_answer(ANSWER))];
    let pair = pair(answer, vec![Act::Send(json_answer(ANSWER))], |_| {}).await;
    let started = Instant::now();
    let reply = pair.cluster.client.post(COMPLETIONS, &[], prompt(json!({}))).await.unwrap();
    // C11.6
    assert!(reply.status == 200 && started.elapsed() >= SLOW, "{reply:?} after {:?}", started.elapsed());
    pair.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c11_a_late_prefill_failure_replaces_the_held_end_by_an_error() {
    let late = vec![Act::Pause(300 * MS), failure()];
    let pair = pair(late, events(&[TOKEN, LAST, DONE]), |_| {}).await;
    let stream = pair.cluster.client.stream(COMPLETIONS, &[], prompt(json!({"stream": true}))).await.unwrap();
    let seen = stream.all().await.unwrap();
    let last: Value = serde_json::from_str(seen.last().unwrap()).unwrap();
    // C11.1
    assert_eq!((seen.len(), &last["error"]["code"]), (2, &json!("bad_upstream")), "{seen:?}");
    assert!(seen[0].contains("\"a\""), "{seen:?}");
    pair.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c11_a_held_end_becomes_504_at_the_deadline() {
    let short = |config: &mut Config| config.timeouts.request = 600 * MS;
    let whole = pair(vec![Act::Hang], vec![Act::Send(json_answer(ANSWER))], short).await;
    let reply = whole.cluster.client.post(COMPLETIONS, &[], prompt(json!({}))).await.unwrap();
    // C11.4, C11.6
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (504, "deadline"));
    let streamed = pair(vec![Act::Hang], events(&[TOKEN, LAST, DONE]), short).await;
    let body = prompt(json!({"stream": true}));
    let seen = streamed.cluster.client.stream(COMPLETIONS, &[], body).await.unwrap().all().await.unwrap();
    let last: Value = serde_json::from_str(seen.last().unwrap()).unwrap();
    // C11.4: as an event, because tokens were sent before
    assert_eq!((seen.len(), &last["error"]["code"]), (2, &json!("deadline")), "{seen:?}");
}

#[tokio::test]
async fn c11_a_decode_error_is_not_held() {
    let pair = pair(vec![Act::Hang], vec![failure()], |_| {}).await;
    let reply = pair.cluster.client.post(COMPLETIONS, &[], prompt(json!({}))).await.unwrap();
    // C11.7
    assert_eq!(reply.code(), "bad_upstream", "{reply:?}: a held answer would end at the deadline");
    pair.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i_a_head_that_comes_while_prefill_runs_does_not_rule_out_a_retry() {
    a_head_and(Vec::new()).await;
    a_head_and(chunk(b": ping\n\n")).await;
    // I2.2: the head is passed on, and no event arrived
    a_head_and(chunk(b"data: {\"choices\":[")).await;
}

/// The decode engine sends a head and `more`, and no whole event, while prefill runs and fails.
async fn a_head_and(more: Vec<u8>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let prefill = |calls: Arc<AtomicUsize>| {
        engine(move || match calls.fetch_add(1, Ordering::SeqCst) {
            0 => vec![Act::Pause(200 * MS), failure()],
            _ => vec![Act::Send(json_answer(ANSWER))],
        })
    };
    let (one, two) = (prefill(calls.clone()).await, prefill(calls).await);
    let attempts = Arc::new(AtomicUsize::new(0));
    let decode = engine(move || match attempts.fetch_add(1, Ordering::SeqCst) {
        0 => vec![Act::Send([stream_head(), more.clone()].concat()), Act::Hang],
        _ => events(&[TOKEN, LAST, DONE]),
    })
    .await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            engines(config, "sglang", &[&one, &two], &decode);
            config.routing.retries = 1;
        })
        .start()
        .await;
    let stream = cluster.client.stream(COMPLETIONS, &[], prompt(json!({"stream": true}))).await.unwrap();
    // I2.6: the first attempt sent nothing but its head
    assert_eq!((stream.status.as_u16(), stream.all().await.unwrap().len()), (200, 3));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn e3_a_failed_leg_stops_the_other_at_once_in_both_directions() {
    // E3.3: by status and in transport
    for fails in [failure(), Act::Reset] {
        for prefill_fails in [true, false] {
            let (failing, waiting) = (vec![Act::Pause(100 * MS), fails.clone()], vec![Act::Hang]);
            let (first, second) = if prefill_fails { (failing, waiting) } else { (waiting, failing) };
            let Pair { prefill, decode, cluster } = pair(first, second, |_| {}).await;
            let other = if prefill_fails { &decode } else { &prefill };
            let started = Instant::now();
            let reply = cluster.client.post(COMPLETIONS, &[], prompt(json!({}))).await.unwrap();
            assert_eq!(reply.code(), "bad_upstream", "{reply:?}");
            cluster.until("the other leg is closed", |_| other.open() == 0).await.unwrap();
            let took = started.elapsed();
            // The other leg hangs: alone it would wait for timeouts.whole_head, 5 minutes.
            // E3.1, E3.2, E3.3
            assert!(took < 20_000 * MS, "{fails:?} of prefill {prefill_fails}: {took:?}");
            cluster.until("the other leg is aborted", |_| !aborts(other).is_empty()).await.unwrap();
            // E2.3
            assert_eq!(aborts(other)[0], generation(other));
            cluster.at_rest().await.unwrap();
        }
    }
}

#[tokio::test]
async fn e1_both_legs_of_a_pair_are_aborted_by_their_id_when_the_client_leaves() {
    let Pair { prefill, decode, cluster } = pair(vec![Act::Hang], vec![Act::Hang], |_| {}).await;
    let leaving = cluster.client.post(COMPLETIONS, &[], prompt(json!({"stream": true})));
    let both = |_: &TestCluster| [&prefill, &decode].into_iter().all(|leg| !generations(leg).is_empty());
    tokio::select! {
        reply = leaving => panic!("no leg answers: {reply:?}"),
        sent = cluster.until("both legs are sent", both) => sent.unwrap(),
    }
    // The client leaves.
    for engine in [&prefill, &decode] {
        cluster.until("the leg is aborted", |_| !aborts(engine).is_empty()).await.unwrap();
        // E1.4, E2.3
        assert_eq!(aborts(engine)[0], generation(engine));
    }
    // E1.4: the legs are kept until the engines end them
    assert!(prefill.open() > 0 && decode.open() > 0 && booked(&cluster, 2) == 1);
}

#[tokio::test]
async fn e2_each_item_of_an_sglang_batch_is_aborted() {
    let Pair { prefill, decode, cluster } = pair(vec![Act::Hang], vec![Act::Hang], |_| {}).await;
    for (prompts, items) in [(json!(["a", "b", "c"]), 3), (json!(["a"]), 1), (json!([[1, 2], [3]]), 2)] {
        let (begun, sent) = (aborts(&decode).len(), generations(&decode).len());
        let first = generations(&prefill).len();
        {
            let client = cluster.client.post(COMPLETIONS, &[], prompt(json!({"prompt": prompts})));
            let sent = cluster.until("both legs are sent", |_| {
                generations(&decode).len() > sent && generations(&prefill).len() > first
            });
            tokio::select! {
                reply = client => panic!("no leg answers: {reply:?}"),
                sent = sent => sent.unwrap(),
            }
            // The client leaves.
        }
        let rid = generations(&decode)[sent].clone();
        for engine in [&prefill, &decode] {
            let all = |engine: &RawEngine| {
                let aborted = aborts(engine);
                (0..items).all(|item| aborted.contains(&format!("{rid}_{item}")))
            };
            // E2.5
            cluster.until("each item is aborted", |_| all(engine)).await.unwrap();
            assert!(!aborts(engine).contains(&rid), "the engine does not know the id of the whole batch");
        }
        assert!(aborts(&decode).len() > begun);
    }
}

#[tokio::test]
async fn a5_the_id_of_an_sglang_batch_has_no_item_s_number() {
    let cluster = TestCluster::disaggregated(Dialect::Sglang, 1, 1).await.unwrap();
    let single = TestClusterBuilder::new().sim(Dialect::Sglang, Role::Aggregated).start().await;
    for cluster in [&cluster, &single] {
        for prompts in [json!(["which way", "who says so"]), json!(["which way"])] {
            for stream in [false, true] {
                let body = prompt(json!({"prompt": prompts, "stream": stream}));
                let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
                let text = String::from_utf8(reply.body.to_vec()).unwrap();
                assert_eq!(reply.status, 200, "{text}");
                let ids: HashSet<&str> =
                    text.split("\"id\":\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
                // A5.17
                assert_eq!(ids.len(), 1, "{text}");
                let is_ours = |id: &&str| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
                assert!(ids.iter().all(is_ours), "{text}");
            }
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn c6_several_choices_are_refused_by_an_sglang_pair_and_served_by_an_engine_that_is_not_split() {
    let several = || prompt(json!({"n": 2}));
    let cluster = TestCluster::disaggregated(Dialect::Sglang, 1, 1).await.unwrap();
    for body in [several(), prompt(json!({"n": 2, "prompt": ["a", "b"], "stream": true}))] {
        let asked = timeout(Duration::from_secs(5), cluster.client.post(COMPLETIONS, &[], body));
        let refused = asked.await.expect("the pair does not hang").unwrap();
        let message = refused.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
        // C6.9
        assert_eq!(refused.status, 400, "{message}");
        assert!(message.starts_with("n: "), "{message}");
    }
    assert_eq!(cluster.sims[1].state().requests.values().sum::<u64>(), 0, "nothing was sent");
    let mixed =
        TestClusterBuilder::new().pair(Dialect::Sglang).sim(Dialect::Sglang, Role::Aggregated).start().await;
    let reply = mixed.client.post(COMPLETIONS, &[], several()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.json().unwrap()["choices"].as_array().unwrap().len(), 2);
    mixed.at_rest().await.unwrap();
}

#[tokio::test]
async fn e2_a_consumed_sglang_decode_is_aborted_by_its_id() {
    let head = vec![Act::Send([stream_head(), chunk(TOKEN.as_bytes())].concat()), Act::Hang];
    let Pair { prefill: _prefill, decode, cluster } =
        pair(vec![Act::Send(json_answer(ANSWER))], head, |_| {}).await;
    let mut stream = cluster.client.stream(COMPLETIONS, &[], prompt(json!({"stream": true}))).await.unwrap();
    stream.next().await.unwrap().unwrap();
    drop(stream);
    cluster.until("decode is aborted", |_| !aborts(&decode).is_empty()).await.unwrap();
    // E2.3
    assert_eq!(aborts(&decode)[0], generation(&decode));
    cluster.until("decode is closed", |_| decode.open() == 0).await.unwrap();
    cluster.at_rest().await.unwrap();
    // The engine may have read the request after the first abort. A request that is over is not aborted a
    // third time.
    cluster.until("the abort is repeated", |_| aborts(&decode).len() == 2).await.unwrap();
    tokio::time::sleep(500 * MS).await;
    assert_eq!(aborts(&decode), [generation(&decode), generation(&decode)]);
}

#[tokio::test]
async fn e2_the_other_prompts_of_a_list_are_aborted_before_its_stream_is_closed() {
    let given_up = "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\n";
    let acts = vec![
        Act::Send([stream_head(), chunk(TOKEN.as_bytes())].concat()),
        Act::Pause(50 * MS),
        Act::Send(chunk(given_up.as_bytes())),
        Act::Hang,
    ];
    let Pair { prefill: _prefill, decode, cluster } =
        pair(vec![Act::Send(json_answer(ANSWER))], acts, |_| {}).await;
    let body = prompt(json!({ "stream": true, "prompt": ["one prompt", "another prompt"] }));
    let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
    assert!(String::from_utf8_lossy(&reply.body).contains("`abort`"), "{reply:?}");
    cluster.until("decode is closed", |_| decode.open() == 0).await.unwrap();
    cluster.at_rest().await.unwrap();
    let id = generation(&decode);
    // E2.5, E2.7
    assert_eq!(aborts(&decode)[..2], [format!("{id}_0"), format!("{id}_1")]);
}

#[tokio::test]
async fn e4_a_prefill_that_may_be_cancelled_ends_with_its_client() {
    for (version, flag, consumed) in [
        ("0.32.0", ",prefill_cancellable=true", 0),
        ("0.32.0", "", 1),
        ("0.33.0", "", 0),
        ("0.33.0", ",prefill_cancellable=false", 1),
    ] {
        let of = |config| SimConfig { version: Some(version.to_owned()), ..config };
        let cluster = TestClusterBuilder::new()
            .sim_with(of(slow(Dialect::Vllm, Role::Prefill)), flag)
            .sim_with(of(SimConfig::instant(Dialect::Vllm, Role::Decode)), "")
            .start()
            .await;
        let has_it = |cluster: &TestCluster| {
            let prefill = cluster.sims[0].state();
            prefill.running + prefill.waiting == 1
        };
        tokio::select! {
            reply = cluster.client.post(COMPLETIONS, &[], prompt(json!({}))) => panic!("prefill has ended: {reply:?}"),
            seen = cluster.until("prefill runs", has_it) => seen.unwrap(),
        }
        cluster.at_rest().await.unwrap();
        // E1.2, E4.1: a prefill that continues has a handoff
        assert_eq!(cluster.sims[1].state().handoffs.pulled, consumed, "{version}`{flag}`");
    }
}

#[tokio::test]
async fn c6_a5_each_attempt_has_a_room_and_an_id_of_its_own() {
    let recording = |role| SimConfig { record: 100, ..SimConfig::instant(Dialect::Sglang, role) };
    let cluster = TestClusterBuilder::new()
        .sim_with(recording(Role::Prefill), "")
        .sim_with(recording(Role::Prefill), "")
        .sim_with(recording(Role::Decode), "")
        .start()
        .await;
    let fault = Fault::always(FaultKind::Status { status: 500, retry_after: None });
    cluster.sims[0].set_faults(vec![Fault { times: Some(1), ..fault }]);
    let mut asked = 0;
    while cluster.faults_fired("status-500") == 0 {
        asked += 1;
        assert!(asked < 40, "no request met the fault");
        let body = prompt(json!({"prompt": format!("{asked} is the number of this prompt")}));
        assert_eq!(cluster.client.post(COMPLETIONS, &[], body).await.unwrap().status, 200);
    }
    let sent: Vec<Value> = cluster.sims[..2]
        .iter()
        .flat_map(|sim| sim.recorded())
        .filter(|recorded| recorded.path == COMPLETIONS)
        .map(|recorded| serde_json::from_str(&recorded.body).unwrap())
        .collect();
    assert_eq!(sent.len(), asked + 1, "one request was tried twice");
    let rooms: HashSet<u64> = sent.iter().map(|body| body["bootstrap_room"].as_u64().unwrap()).collect();
    // C6.6
    assert_eq!(rooms.len(), sent.len());
    let ids: HashSet<&str> = sent.iter().map(|body| body["rid"].as_str().unwrap()).collect();
    // A5.4
    assert_eq!(ids.len(), sent.len());
    let hex = |id: &&str| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    // A5.3
    assert!(ids.iter().all(hex), "{ids:?}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c7_the_rest_of_a_prefill_answer_is_drained() {
    const PREFILLED: &str = include_str!("../../fixtures/pd/prefill-response.json");
    let (first, rest) = PREFILLED.split_at(PREFILLED.len() - 20);
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let acts = vec![
        Act::Send([head.to_vec(), chunk(first.as_bytes())].concat()),
        Act::Pause(100 * MS),
        Act::Send([chunk(rest.as_bytes()), chunk(&[b' '; 2_000])].concat()),
        Act::Pause(100 * MS),
        Act::Send(b"0\r\n\r\n".to_vec()),
    ];
    let (prefill, decode) =
        (engine(move || acts.clone()).await, engine(|| vec![Act::Send(json_answer(ANSWER))]).await);
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            engines(config, "vllm", &[&prefill], &decode);
            config.server.threads = 1;
        })
        .start()
        .await;
    for _ in 0..3 {
        let reply = cluster.client.post(COMPLETIONS, &[], prompt(json!({}))).await.unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    // C7.3: nothing is left on the connection, so it is used again
    assert_eq!((prefill.requests().len(), prefill.connections()), (3, 1));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c7a_incomplete_parameters_fall_back_to_local_prefill_where_that_is_allowed() {
    for (fallback, enforced, expected) in [(true, false, 200), (false, false, 502), (true, true, 502)] {
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                config.routing.local_fallback = fallback;
                config.routing.enforce_disagg = enforced;
            })
            .pair(Dialect::Vllm)
            .start()
            .await;
        let kind = FaultKind::PartialParams { field: "remote_block_ids".into() };
        cluster.sims[0].set_faults(vec![Fault::always(kind)]);
        let reply = cluster.client.post(COMPLETIONS, &[], prompt(json!({}))).await.unwrap();
        // C7a.3, C7a.4
        assert_eq!(reply.status.as_u16(), expected, "fallback {fallback}, enforced {enforced}: {reply:?}");
        cluster.at_rest().await.unwrap();
        let metrics = cluster.metrics_text().await.unwrap();
        let counted = |result: &str| metrics.contains(&format!("handoffs_total{{result=\"{result}\"}} 1"));
        // C7a.5
        assert_eq!((counted("incomplete"), counted("local_fallback")), (true, expected == 200), "{metrics}");
    }
}

#[tokio::test]
async fn c3_a_choice_is_committed_once_and_a_pin_moves_no_cursor() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            let plan = "[decode-override]\nbuiltin = \"conditional-disagg\"\nsettings = { enabled = true }";
            let slots = format!("[prefill]\nnative = \"round-robin\"\n{plan}");
            config.policies.slots = toml::from_str(&slots).unwrap();
        })
        .sim(Dialect::Vllm, Role::Prefill)
        .pair(Dialect::Vllm)
        .start()
        .await;
    let (mut taken, number) = (Vec::new(), std::cell::Cell::new(0));
    for turn in 0..4 {
        // Prompts differ, so that no decode worker has them cached and the plan stays remote.
        let body = || {
            number.set(number.get() + 1);
            prompt(json!({"prompt": format!("{} and nothing else ", number.get()).repeat(9)}))
        };
        for _ in 0..turn {
            let pinned = decisions(&cluster, &[("x-prefill-instance-id", "1")], body()).await;
            assert_eq!(pinned[0], "prefill=1/0");
            assert_eq!(cluster.client.post("/v1/route", &[], body()).await.unwrap().status, 200);
        }
        taken.push(decisions(&cluster, &[], body()).await.remove(0));
    }
    // C3.4, C3.5, F2.5
    assert_eq!(taken, ["prefill=1/0", "prefill=2/0", "prefill=1/0", "prefill=2/0"]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c3_d5_f4_legs_are_booked_from_their_choice_to_their_end() {
    for order in [LegOrder::PrefillFirst, LegOrder::DecodeFirst] {
        let cluster = TestClusterBuilder::new()
            .config(|config| config.routing.order = order)
            .sim_with(slow(Dialect::Vllm, Role::Prefill), "")
            .sim_with(slow(Dialect::Vllm, Role::Prefill), "")
            .sim(Dialect::Vllm, Role::Decode)
            .start()
            .await;
        let client = cluster.client.clone();
        let tasks = tokio_util::task::TaskTracker::new();
        let pins = [("x-prefill-instance-id", "2")];
        let request =
            tasks.spawn(async move { client.post(COMPLETIONS, &pins, prompt(json!({}))).await.unwrap() });
        cluster.until("prefill runs", |cluster| cluster.sims[1].state().running == 1).await.unwrap();
        // C3.6
        assert_eq!((booked(&cluster, 1), booked(&cluster, 2)), (0, 1), "{order:?}");
        // D5.2: the first choice is booked while the second one runs
        assert_eq!(booked(&cluster, 3), u32::from(order == LegOrder::DecodeFirst), "{order:?}");
        assert_eq!(request.await.unwrap().status, 200);
        // F4.5: at the end
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn f4_prefill_is_complete_at_the_first_token_and_an_error_frees_the_booking() {
    let config = SimConfig { itl: 20 * MS, ..slow(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new()
        .config(|config| config.routing.retries = 0)
        .sim_with(config, "")
        .start()
        .await;
    let waiting = |cluster: &TestCluster| {
        let worker = cluster.gateway.state().registry.snapshot().get(WorkerId(1)).unwrap().clone();
        worker.candidates()[0].load().active_prefill_tokens()
    };
    let client = cluster.client.clone();
    let body = prompt(json!({"stream": true, "max_tokens": 500}));
    let tasks = tokio_util::task::TaskTracker::new();
    let request = tasks.spawn(async move {
        let mut stream = client.stream(COMPLETIONS, &[], body).await.unwrap();
        stream.next().await.unwrap().unwrap();
        stream
    });
    cluster.until("prefill is booked", |cluster| waiting(cluster) > 0).await.unwrap();
    let stream = request.await.unwrap();
    // F4.2
    cluster.until("prefill is complete", |cluster| waiting(cluster) == 0).await.unwrap();
    assert_eq!(booked(&cluster, 1), 1, "the request still runs");
    drop(stream);
    cluster.at_rest().await.unwrap();
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::Status { status: 500, retry_after: None })]);
    assert_eq!(cluster.client.post(COMPLETIONS, &[], prompt(json!({}))).await.unwrap().status, 502);
    // F4.5: on error
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d3_a_required_domain_joins_the_client_s_taints_and_an_unknown_prefill_worker_starts_nothing() {
    let cluster = TestClusterBuilder::new()
        .sim_with(
            SimConfig::instant(Dialect::Vllm, Role::Prefill),
            ",taint=gold,topology.rack=r1,kv_transfer=required:rack",
        )
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Decode), ",topology.rack=r1")
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Decode), ",taint=gold,topology.rack=r2")
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Decode), ",taint=gold,topology.rack=r1")
        .start()
        .await;
    for _ in 0..4 {
        let body = prompt(json!({"nvext": {"required_taints": ["gold"]}}));
        // D3.2: worker 2 lacks the client's taint, worker 3 the domain
        assert_eq!(decisions(&cluster, &[], body).await, ["prefill=1/0", "decode=4/0"]);
    }
    let asked = |cluster: &TestCluster| cluster.sims[0].state().requests.values().sum::<u64>();
    let before = asked(&cluster);
    let pin = [("x-prefill-instance-id", "99")];
    let reply = cluster.client.post(COMPLETIONS, &pin, prompt(json!({}))).await.unwrap();
    // D3.5
    assert_eq!((reply.code().as_str(), asked(&cluster)), ("worker_not_found", before));
    cluster.at_rest().await.unwrap();
}
