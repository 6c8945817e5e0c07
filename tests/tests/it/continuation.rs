//! I14: a stream whose engine fails is continued by another one, and its client reads it as if nothing had
//! happened.

use std::time::Duration;

use pointsman_gateway::config::{Config, Model, Probe};
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{
    Act, CHAT, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::text_of,
    raw_engine::{chunk, stream_head},
};
use serde_json::{Value, json};
use tokio::time::Instant;

mod bodies;
mod exact;
mod handoffs;

const TOKENS: u32 = 24;

/// A request for a stream of `TOKENS` tokens with usage, of a prompt that fills whole tokens of the engine
/// model.
pub(crate) fn body(path: &str, more: Value) -> String {
    let mut body = json!({
        "model": "tiny", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": TOKENS,
        "temperature": 0, "ignore_eos": true,
    });
    let prompt = "tell me about the points of a railway ok.";
    let prompt = &prompt[..prompt.len() / 4 * 4];
    if path == CHAT {
        body["messages"] = json!([{"role": "user", "content": prompt}]);
    } else {
        body["prompt"] = json!(prompt);
    }
    let Value::Object(more) = more else { panic!("fields") };
    body.as_object_mut().unwrap().extend(more);
    body.to_string()
}

pub(crate) async fn stream(cluster: &TestCluster, path: &str, more: Value) -> Vec<String> {
    let stream = cluster.client.stream(path, &[], body(path, more)).await.unwrap();
    assert_eq!(stream.status, 200);
    tokio::time::timeout(Duration::from_secs(60), stream.all()).await.expect("the stream hung").unwrap()
}

/// The events of a stream as its client sees them, without what differs between two streams of equal
/// requests: the id, the time, the engine's fingerprint and what was cached.
pub(crate) fn normal(events: &[String]) -> Vec<String> {
    let first: Value = serde_json::from_str(&events[0]).unwrap();
    let (id, created) = (first["id"].as_str().unwrap(), first["created"].to_string());
    let without = |text: String, from: &str, to: char| match text.find(from) {
        Some(at) => {
            let end = at + from.len() + text[at + from.len()..].find(to).unwrap();
            format!("{}{}", &text[..at], &text[end..])
        }
        None => text,
    };
    let one = |event: &String| {
        let text = event.replace(id, "ID").replace(&format!("\"created\":{created}"), "\"created\":0");
        let text = without(text, "\"system_fingerprint\":\"", '"');
        without(text, "\"prompt_tokens_details\":{", '}')
    };
    events.iter().map(one).collect()
}

/// A cluster whose engines write a token every few milliseconds.
pub(crate) async fn cluster(
    dialect: Dialect,
    roles: &[Role],
    change: impl FnOnce(&mut Config),
) -> TestCluster {
    let sim = |role| SimConfig { itl: Duration::from_millis(3), ..SimConfig::instant(dialect, role) };
    let builder = roles
        .iter()
        .fold(TestClusterBuilder::new().config(change), |builder, role| builder.sim_with(sim(*role), ""));
    builder.start().await
}

pub(crate) const AGGREGATED: &[Role] = &[Role::Aggregated, Role::Aggregated];
pub(crate) const PAIRS: &[Role] = &[Role::Prefill, Role::Decode, Role::Decode];

fn once(kind: FaultKind) -> Vec<Fault> {
    vec![Fault { times: Some(1), ..Fault::always(kind) }]
}

/// The engines that answer clients.
fn answering(cluster: &TestCluster) -> Vec<usize> {
    let count = cluster.sims.len();
    (count - 2..count).collect()
}

async fn continued(cluster: &TestCluster, result: &str) -> f64 {
    let samples =
        cluster.metric(&format!("pointsman_continuations_total{{reason=\"{result}\"")).await.unwrap();
    samples.iter().sum()
}

/// Sends equal requests until one engine had the fault, and compares each stream with an undisturbed one.
async fn reads_through(cluster: &TestCluster, path: &str, more: &Value, kind: FaultKind, name: &str) {
    let undisturbed = normal(&stream(cluster, path, more.clone()).await);
    assert_eq!(undisturbed.last().unwrap(), "[DONE]");
    let before = cluster.faults_fired(name);
    for turn in 0..40 {
        // Only one of them has the fault, whichever serves first.
        let sim = &cluster.sims[answering(cluster)[turn % 2]];
        sim.set_faults(once(kind.clone()));
        let events = stream(cluster, path, more.clone()).await;
        sim.set_faults(Vec::new());
        // I14.5, I14.6
        assert_eq!(normal(&events), undisturbed, "{path} {kind:?} {more}");
        if cluster.faults_fired(name) > before {
            return;
        }
    }
    panic!("no engine had the fault");
}

#[tokio::test]
async fn i14_a_cut_stream_goes_on_as_if_nothing_had_happened() {
    let cut = |after_tokens| FaultKind::Cut { after_tokens };
    let cases = [
        (json!({}), cut(1)),
        (json!({}), cut(TOKENS - 1)),
        (json!({"min_tokens": 20, "stop": ["@@"], "temperature": 0.5}), cut(9)),
        (json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}}), cut(5)),
    ];
    for (dialect, roles) in [Dialect::Vllm, Dialect::Sglang]
        .into_iter()
        .flat_map(|dialect| [(dialect, AGGREGATED), (dialect, PAIRS)])
    {
        let cluster = cluster(dialect, roles, |_| {}).await;
        for path in [CHAT, COMPLETIONS] {
            for (more, kind) in &cases {
                reads_through(&cluster, path, more, kind.clone(), "cut").await;
            }
        }
        // I14.9
        assert_eq!(continued(&cluster, "continued").await, 8.0, "{dialect:?} {roles:?}");
        cluster.at_rest().await.unwrap();
        // I14.11
        let failed = cluster.metric("pointsman_requests_total{code=\"bad_upstream\"").await.unwrap();
        assert!(failed.is_empty(), "{failed:?}");
    }
}

#[tokio::test]
async fn i14_a_stream_of_a_silent_engine_goes_on_elsewhere() {
    for (dialect, roles, probe) in [Dialect::Vllm, Dialect::Sglang].into_iter().flat_map(|dialect| {
        [Some(Probe::default()), None]
            .into_iter()
            .flat_map(move |probe| [(dialect, AGGREGATED, probe.clone()), (dialect, PAIRS, probe)])
    }) {
        let cluster = cluster(dialect, roles, |config| {
            config.timeouts.event_idle = Duration::from_millis(300);
            // The engine's figures are read every two seconds, or many times a second.
            config.probe = probe.unwrap_or_else(|| config.probe.clone());
        })
        .await;
        for after_tokens in [1, 6] {
            let begun = Instant::now();
            reads_through(&cluster, CHAT, &json!({}), FaultKind::Stall { after_tokens }, "stall").await;
            // I3.6: the stalled stream counts among the requests that the engine reports as running
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "{dialect:?} {roles:?}: {:?}",
                begun.elapsed()
            );
        }
        // I14.7: the engine that fell silent was told to stop
        cluster
            .until("all engines are free", |cluster| cluster.sims.iter().all(|sim| sim.state().running == 0))
            .await
            .unwrap();
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i3_the_silence_of_an_engine_of_a_pair_is_noticed_without_comments() {
    // SGLang reports no counter that moves within an answer.
    let sim = |role| {
        let overhead = Duration::from_millis(if role == Role::Prefill { 100 } else { 0 });
        SimConfig { overhead, ..SimConfig::instant(Dialect::Sglang, role) }
    };
    // Comments would set the timer again. Prefill is never silent for as long as the limit.
    let change = |config: &mut Config| {
        config.timeouts.event_idle = Duration::from_secs(1);
        config.timeouts.stream_comment = Duration::ZERO;
    };
    let builder = TestClusterBuilder::new().config(change);
    let cluster = PAIRS.iter().fold(builder, |builder, role| builder.sim_with(sim(*role), ""));
    let cluster = cluster.start().await;
    let undisturbed = normal(&stream(&cluster, CHAT, json!({})).await);
    for after_tokens in [1, 6] {
        for place in answering(&cluster) {
            cluster.sims[place].set_faults(vec![Fault::always(FaultKind::Stall { after_tokens })]);
        }
        let begun = Instant::now();
        let events = stream(&cluster, CHAT, json!({})).await;
        // I3.6: both engines fall silent
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
        assert!(last["error"]["message"].as_str().unwrap().contains("event_idle"), "{last}");
    }
    for place in answering(&cluster) {
        cluster.sims[place].set_faults(Vec::new());
    }
    assert_eq!(normal(&stream(&cluster, CHAT, json!({})).await), undisturbed);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i14_the_streams_of_an_engine_that_dies_go_on_elsewhere() {
    for roles in [AGGREGATED, PAIRS] {
        let cluster = cluster(Dialect::Vllm, roles, |_| {}).await;
        let long = || json!({"max_tokens": 100});
        let undisturbed = normal(&stream(&cluster, CHAT, long()).await);
        // All streams of one engine end in the same way, a moment apart.
        let dying = &cluster.sims[answering(&cluster)[0]];
        dying.set_faults(vec![Fault::always(FaultKind::Cut { after_tokens: 40 })]);
        let mut clients = tokio::task::JoinSet::new();
        for _ in 0..12 {
            let client = cluster.client.clone();
            clients.spawn(async move {
                let stream = client.stream(CHAT, &[], body(CHAT, long())).await.unwrap();
                stream.all().await.unwrap()
            });
        }
        while let Some(events) = clients.join_next().await {
            // I14.8: all of them broke together
            assert_eq!(normal(&events.unwrap()), undisturbed);
        }
        assert!(cluster.faults_fired("cut") >= 2, "the engine had no streams");
        assert_eq!(continued(&cluster, "continued").await, cluster.faults_fired("cut") as f64);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i14_a_stream_that_breaks_alone_is_not_sent_to_another_engine() {
    let cluster = cluster(Dialect::Vllm, AGGREGATED, |_| {}).await;
    // Another stream of each engine continues for long.
    let mut others = Vec::new();
    for worker in ["1", "2"] {
        let long = body(CHAT, json!({"max_tokens": 3_000}));
        let mut other = cluster.client.stream(CHAT, &[("x-worker-instance-id", worker)], long).await.unwrap();
        other.next().await.unwrap();
        others.push(other);
    }
    for sim in &cluster.sims {
        sim.set_faults(once(FaultKind::Cut { after_tokens: 4 }));
    }
    let events = stream(&cluster, CHAT, json!({})).await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    // I14.8
    assert_eq!(last["error"]["code"], "bad_upstream");
    assert!(
        last["error"]["message"].as_str().unwrap().contains("continues with its other requests"),
        "{last}"
    );
    assert_eq!(cluster.faults_fired("cut"), 1, "the request visits no other engine");
    // I14.9
    assert_eq!((continued(&cluster, "alone").await, continued(&cluster, "failed").await), (1.0, 0.0));
    drop(others);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i14_the_stream_of_an_engine_that_is_silent_on_its_others_goes_on_elsewhere() {
    let cluster = cluster(Dialect::Vllm, AGGREGATED, |_| {}).await;
    let undisturbed = normal(&stream(&cluster, CHAT, json!({})).await);
    // The other streams of the first engine stand still, as those of an engine that has just died. The second
    // one has more of them, so that the first one is preferred.
    let mut others = Vec::new();
    for (sim, count) in [(0, 1), (1, 4)] {
        cluster.sims[sim].set_faults(vec![Fault::always(FaultKind::Stall { after_tokens: 2 })]);
        let worker = (sim + 1).to_string();
        for _ in 0..count {
            let long = body(CHAT, json!({"max_tokens": 3_000}));
            let mut other =
                cluster.client.stream(CHAT, &[("x-worker-instance-id", &worker)], long).await.unwrap();
            other.next().await.unwrap();
            others.push(other);
        }
        cluster.sims[sim].set_faults(Vec::new());
    }
    let mut dies = once(FaultKind::Cut { after_tokens: 4 });
    dies.push(Fault::always(FaultKind::SlowHealth { ms: 20_000 }));
    cluster.sims[0].set_faults(dies);
    // Those that stand still have sent what they have.
    tokio::time::sleep(Duration::from_millis(100)).await;
    for _ in 0..40 {
        // I14.8
        assert_eq!(normal(&stream(&cluster, CHAT, json!({})).await), undisturbed);
        if cluster.faults_fired("cut") > 0 {
            break;
        }
    }
    assert_eq!((cluster.faults_fired("cut"), continued(&cluster, "continued").await), (1, 1.0));
    drop(others);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i14_a_second_failure_ends_the_stream_with_one_error_that_says_what_was_delivered() {
    let cluster = cluster(Dialect::Vllm, AGGREGATED, |_| {}).await;
    for sim in &cluster.sims {
        sim.set_faults(vec![Fault::always(FaultKind::Cut { after_tokens: 4 })]);
    }
    let events = stream(&cluster, CHAT, json!({})).await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    let message = last["error"]["message"].as_str().unwrap();
    // I14.3, I14.10
    assert!(message.contains("8 output tokens were delivered"), "{message}");
    assert_eq!(events.iter().filter(|event| event.contains("\"error\"")).count(), 1);
    assert_eq!(text_of(&events).len(), 8 * 4);
    // I14.9
    assert_eq!((continued(&cluster, "continued").await, continued(&cluster, "exhausted").await), (1.0, 1.0));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i14_what_is_not_eligible_or_off_ends_with_the_error_event_of_its_engine() {
    let cases = [
        (json!({"seed": 7, "temperature": 0.5}), 1, Some("seed")),
        (json!({"frequency_penalty": 0.5}), 1, Some("penalties")),
        (json!({"stop": [" arc"]}), 0, None),
        (json!({}), 0, None),
    ];
    for (more, continuations, reason) in cases {
        let cluster =
            cluster(Dialect::Vllm, AGGREGATED, |config| config.routing.continuations = continuations).await;
        for sim in &cluster.sims {
            sim.set_faults(once(FaultKind::Cut { after_tokens: 4 }));
        }
        let events = stream(&cluster, CHAT, more.clone()).await;
        let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
        // I14.1, I14.3
        assert_eq!(last["error"]["code"], "bad_upstream", "{more}");
        let message = last["error"]["message"].as_str().unwrap();
        assert!(!message.contains("delivered"), "{message}");
        let counted = match reason {
            Some(reason) => continued(&cluster, reason).await,
            None => 1.0 - cluster.metric("pointsman_continuations_total{").await.unwrap().iter().sum::<f64>(),
        };
        assert_eq!(counted, 1.0, "{more}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i14_streams_of_other_endpoints_end_with_the_error_event_of_their_engine() {
    for (path, more) in [
        ("/v1/messages", json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS})),
        ("/v1/responses", json!({"input": "hi", "max_output_tokens": TOKENS})),
    ] {
        let cluster = cluster(Dialect::Vllm, AGGREGATED, |_| {}).await;
        for sim in &cluster.sims {
            sim.set_faults(once(FaultKind::Cut { after_tokens: 4 }));
        }
        let mut body = json!({"model": "tiny", "stream": true, "ignore_eos": true});
        let (Value::Object(fields), Value::Object(more)) = (&mut body, more) else { panic!("objects") };
        fields.extend(more);
        let stream = cluster.client.stream(path, &[], body.to_string()).await.unwrap();
        let events = stream.all().await.unwrap();
        assert!(events.last().unwrap().contains("error"), "{path}: {events:?}");
        // I14.1, I14.9
        assert_eq!(continued(&cluster, "endpoint").await, 1.0, "{path}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i14_a_model_may_be_left_out() {
    let cluster = cluster(Dialect::Vllm, AGGREGATED, |config| {
        let model = Model { continuations: Some(0), ..Model::default() };
        config.models.insert("tiny".to_owned(), model);
    })
    .await;
    for sim in &cluster.sims {
        sim.set_faults(once(FaultKind::Cut { after_tokens: 4 }));
    }
    let events = stream(&cluster, CHAT, json!({})).await;
    // I14.3
    assert!(events.last().unwrap().contains("bad_upstream"));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i14_without_another_engine_the_stream_ends_with_the_first_failure() {
    let cluster = cluster(Dialect::Vllm, &[Role::Aggregated], |_| {}).await;
    cluster.sims[0].set_faults(once(FaultKind::Cut { after_tokens: 4 }));
    let events = stream(&cluster, CHAT, json!({})).await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    let message = last["error"]["message"].as_str().unwrap();
    // I14.10
    assert_eq!(last["error"]["code"], "bad_upstream");
    assert!(message.contains("4 output tokens were delivered"), "{message}");
    assert_eq!(continued(&cluster, "failed").await, 1.0);
    cluster.at_rest().await.unwrap();
}

/// An engine that answers requests for a rest with `events`, and others with a stream of its own.
async fn raw(events: Vec<u8>) -> RawEngine {
    let answer = |line: &str| -> Vec<u8> {
        let body = match line {
            "GET /v1/models" => {
                r#"{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"vllm"}]}"#
            }
            _ => "{}",
        };
        pointsman_tests::raw_engine::status("200 OK", body)
    };
    let choice = r#"{"index":0,"delta":{"content":"own"},"finish_reason":"stop"}"#;
    let own = format!(
        "data: {{\"id\":\"x\",\"created\":1,\"model\":\"tiny\",\"choices\":[{choice}]}}\n\ndata: [DONE]\n\n"
    );
    let script = move |request: &RawRequest| {
        if request.line.starts_with("GET") {
            return vec![Act::Send(answer(&request.line))];
        }
        let events =
            if request.body.contains("continue_final_message") { &events[..] } else { own.as_bytes() };
        vec![Act::Send([stream_head(), chunk(events), chunk(b"")].concat())]
    };
    RawEngine::start(script).await
}

fn raw_chunk(model: &str, delta: &str) -> String {
    format!(
        "data: {{\"id\":\"y\",\"object\":\"chat.completion.chunk\",\"created\":5,\"model\":\"{model}\",\"choices\":\
         [{{\"index\":0,\"delta\":{delta},\"finish_reason\":null}}]}}\n\n"
    )
}

#[tokio::test]
async fn i14_a_rest_that_does_not_fit_ends_the_stream_with_one_valid_error() {
    let text = raw_chunk("tiny", r#"{"content":" x"}"#);
    let error = "data: {\"error\":{\"message\":\"no rest for you\",\"type\":\"x\",\"code\":500}}\n\n";
    let cases = [
        (raw_chunk("huge", r#"{"content":" x"}"#), "model"),
        (text.clone() + &raw_chunk("tiny", r#"{"role":"assistant","content":""}"#), "role"),
        (raw_chunk("tiny", r#"{"tool_calls":[{"index":0}]}"#), "does not belong"),
        (error.to_owned(), "no rest for you"),
        (text + error, "no rest for you"),
        ("data: {\"choices\":\n\n".to_owned(), "not an event"),
        (String::new(), "the stream ended"),
    ];
    for (events, word) in cases {
        let engine = raw(events.clone().into_bytes()).await;
        let cluster = TestClusterBuilder::new()
            .config(|config| config.workers.push(engine.worker("id=9,role=aggregated,engine=vllm")))
            .sim(Dialect::Vllm, Role::Aggregated)
            .start()
            .await;
        cluster.sims[0].set_faults(vec![Fault::always(FaultKind::Cut { after_tokens: 4 })]);
        let mut seen = None;
        for turn in 0..40 {
            let prompt = json!({"messages": [{"role": "user", "content": format!("turn {turn}")}]});
            let events = stream(&cluster, CHAT, prompt).await;
            if events.last().unwrap() != "[DONE]" {
                seen = Some(events);
                break;
            }
        }
        let seen = seen.expect("the engine that cuts its streams served none");
        let last: Value = serde_json::from_str(seen.last().unwrap()).unwrap();
        let message = last["error"]["message"].as_str().unwrap();
        // I14.10
        assert!(message.contains(word), "{events}: {message}");
        assert!(message.contains("output tokens were delivered"), "{message}");
        assert_eq!(seen.iter().filter(|event| event.contains("\"error\"")).count(), 1);
        let roles = seen.iter().filter(|event| event.contains("\"role\":\"assistant\"")).count();
        assert_eq!(roles, 1, "{seen:?}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i14_a_client_that_leaves_while_its_rest_is_sought_frees_everything() {
    let cluster = cluster(Dialect::Vllm, PAIRS, |_| {}).await;
    for sim in &cluster.sims[1..] {
        sim.set_faults(vec![Fault { times: Some(1), ..Fault::always(FaultKind::Cut { after_tokens: 3 }) }]);
    }
    let mut stream =
        cluster.client.stream(CHAT, &[], body(CHAT, json!({"max_tokens": 2_000}))).await.unwrap();
    while cluster.faults_fired("cut") == 0 {
        stream.next().await.unwrap();
    }
    drop(stream);
    // Invariant 8, and the handoff of the rest is consumed.
    cluster.at_rest().await.unwrap();
    cluster
        .until("all engines are free", |cluster| cluster.sims.iter().all(|sim| sim.state().running == 0))
        .await
        .unwrap();
}

#[tokio::test]
async fn i14_a_client_gets_comments_while_workers_are_sought() {
    let cluster = cluster(Dialect::Vllm, AGGREGATED, |config| {
        config.timeouts.stream_comment = Duration::from_millis(20);
        config.timeouts.event_idle = Duration::from_secs(5);
    })
    .await;
    for sim in &cluster.sims {
        let hang = Fault {
            prompt: Some("continue_final_message".to_owned()),
            ..Fault::always(FaultKind::HangBeforeHeaders)
        };
        sim.set_faults([once(FaultKind::Cut { after_tokens: 4 }), vec![hang]].concat());
    }
    let mut stream = cluster.client.stream(CHAT, &[], body(CHAT, json!({}))).await.unwrap();
    let (mut events, mut comments) = (Vec::new(), 0);
    while comments < 3 {
        let event = stream.next().await.unwrap().unwrap();
        comments += if event == " " && cluster.faults_fired("cut") > 0 { 1 } else { 0 };
        events.push(event);
    }
    // I3.8
    assert_eq!(text_of(&events).len(), 4 * 4);
    cluster
        .until("the rest was sent", |cluster| cluster.faults_fired("hang-before-headers") == 1)
        .await
        .unwrap();
    drop(stream);
    cluster.at_rest().await.unwrap();
}
