//! SGLang's `/generate` on real sockets: one worker and pairs, whole, streamed and in batches; engines that
//! fail, clients that leave, and bodies that do not fit.

use std::{collections::HashSet, time::Duration};

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{DONE, MODELS, chunk, json as json_answer, status, stream_head},
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

const GENERATE: &str = "/generate";

/// A body without `model`, as frameworks send it.
fn body(more: Value) -> String {
    let mut body = json!({
        "text": "which way does this train go, and who says so? ".repeat(6),
        "sampling_params": { "max_new_tokens": 4, "ignore_eos": true, "temperature": 0 },
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

fn recording(role: Role) -> SimConfig {
    SimConfig { record: 100, ..SimConfig::instant(Dialect::Sglang, role) }
}

async fn single() -> TestCluster {
    TestClusterBuilder::new().sim_with(recording(Role::Aggregated), "").start().await
}

/// A pair, and a worker that is not split.
async fn mixed() -> TestCluster {
    TestClusterBuilder::new().pair(Dialect::Sglang).sim_with(recording(Role::Aggregated), "").start().await
}

/// Prefill and decode engines. Requests are not retried.
async fn pair(change: impl FnOnce(&mut Config)) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        config.routing.retries = 0;
        change(config);
    });
    let builder = builder.sim_with(recording(Role::Prefill), "").sim_with(recording(Role::Decode), "");
    builder.start().await
}

async fn post(cluster: &TestCluster, body: impl Into<String>) -> Reply {
    cluster.client.post(GENERATE, &[], body.into()).await.unwrap()
}

async fn whole(cluster: &TestCluster, more: Value) -> Value {
    let reply = post(cluster, body(more)).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json().unwrap()
}

/// Events of a stream but the last, which is the end mark.
async fn events(cluster: &TestCluster, more: Value) -> Vec<Value> {
    let mut more = more;
    more["stream"] = json!(true);
    let stream = cluster.client.stream(GENERATE, &[], body(more)).await.unwrap();
    assert_eq!(stream.status, 200);
    let mut events = stream.all().await.unwrap();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

/// The message of a refusal.
fn refusal(reply: &Reply) -> (u16, String) {
    let text = reply.json().unwrap()["error"]["message"].as_str().unwrap_or_default().to_owned();
    (reply.status.as_u16(), text)
}

async fn newest(cluster: &TestCluster) -> Value {
    cluster.at_rest().await.unwrap();
    let list = cluster.admin.get("/decisions?ended=true&limit=1").await.unwrap().json().unwrap();
    list["decisions"][0].clone()
}

/// What an engine got.
fn sent(cluster: &TestCluster, sim: usize) -> Vec<Value> {
    let recorded = cluster.sims[sim].recorded();
    let bodies = recorded.iter().filter(|seen| seen.path == GENERATE).map(|seen| &seen.body);
    bodies.map(|body| serde_json::from_str(body).unwrap()).collect()
}

async fn idle(cluster: &TestCluster) {
    let is_idle =
        |cluster: &TestCluster| cluster.sims.iter().all(|sim| sim.state().running + sim.state().waiting == 0);
    cluster.until("the engines are idle", is_idle).await.unwrap();
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a1_generate_is_answered_whole_and_streamed_by_one_worker_and_by_a_pair() {
    for cluster in [single().await, pair(|_| {}).await] {
        let answer = whole(&cluster, json!({})).await;
        let meta = &answer["meta_info"];
        assert_eq!(answer["output_ids"].as_array().map(Vec::len), Some(4), "{answer}");
        assert_eq!(meta["finish_reason"], json!({ "type": "length", "length": 4 }));
        let outcome = newest(&cluster).await["outcome"].clone();
        // A1.13
        assert_eq!(
            (&outcome["output_tokens"], &outcome["output_tokens_source"]),
            (&json!(4), &json!("usage")),
            "{outcome}"
        );
        let events = events(&cluster, json!({})).await;
        let texts: Vec<&str> = events.iter().map(|event| event["text"].as_str().unwrap()).collect();
        assert_eq!((texts.len(), texts[3]), (4, answer["text"].as_str().unwrap()));
        assert!(texts.windows(2).all(|pair| pair[1].starts_with(pair[0]) && pair[0] != pair[1]), "{texts:?}");
        let outcome = newest(&cluster).await["outcome"].clone();
        // A1.13
        assert_eq!(
            (&outcome["output_tokens"], &outcome["output_tokens_source"]),
            (&json!(4), &json!("usage")),
            "{outcome}"
        );
        assert!(outcome["ttft_ms"].is_f64(), "{outcome}");
        let ids = whole(&cluster, json!({ "text": null, "input_ids": [5, 6, 7, 8] })).await;
        assert_eq!(ids["meta_info"]["prompt_tokens"], 4);
        idle(&cluster).await;
        let served = cluster
            .metric("pointsman_requests_total{endpoint=\"generate\",model=\"tiny\",status=\"200\"")
            .await;
        assert_eq!(served.unwrap(), [3.0]);
    }
}

#[tokio::test]
async fn c9_a_pair_gets_both_legs_at_once_and_a_batch_a_room_for_each_prompt() {
    let cluster = pair(|_| {}).await;
    let own =
        json!({ "rid": "mine", "bootstrap_host": "10.0.0.1", "bootstrap_room": 7, "routed_dp_rank": 3 });
    whole(&cluster, own.clone()).await;
    let [prefill, decode] = [0, 1].map(|sim| sent(&cluster, sim).pop().unwrap());
    // C9.2
    assert_eq!(prefill, decode);
    assert!(
        prefill["bootstrap_room"].as_u64() > Some(1 << 41) && prefill["bootstrap_host"] == "127.0.0.1",
        "{prefill}"
    );
    assert!(
        prefill["rid"] != "mine" && prefill.get("routed_dp_rank").is_none() && prefill.get("model").is_none()
    );
    for prompts in
        [json!({ "text": ["a b", "c d", "e f"] }), json!({ "text": null, "input_ids": [[1, 2], [3], [4]] })]
    {
        let answer = whole(&cluster, prompts.clone()).await;
        assert_eq!(answer.as_array().map(Vec::len), Some(3), "{answer}");
        let outcome = newest(&cluster).await["outcome"].clone();
        // A1.13
        assert_eq!(outcome["output_tokens"], 12, "{outcome}");
        let [prefill, decode] = [0, 1].map(|sim| sent(&cluster, sim).pop().unwrap());
        let list = |field: &str| prefill[field].as_array().cloned().unwrap_or_default();
        let rooms: HashSet<u64> = list("bootstrap_room").iter().map(|room| room.as_u64().unwrap()).collect();
        // C9.2
        assert_eq!(
            (rooms.len(), list("bootstrap_host").len(), list("bootstrap_port").len()),
            (3, 3, 3),
            "{prefill}"
        );
        assert_eq!(prefill, decode);
        let events = events(&cluster, prompts).await;
        let ids: HashSet<&str> =
            events.iter().map(|event| event["meta_info"]["id"].as_str().unwrap()).collect();
        // A5.17
        assert_eq!((events.len(), ids.len()), (12, 1));
        let indexes: HashSet<u64> = events.iter().map(|event| event["index"].as_u64().unwrap()).collect();
        assert_eq!(indexes.len(), 3);
        let outcome = newest(&cluster).await["outcome"].clone();
        // A1.13
        assert_eq!(
            (&outcome["output_tokens"], &outcome["output_tokens_source"]),
            (&json!(12), &json!("usage")),
            "{outcome}"
        );
    }
    let handoffs = cluster.sims[1].state().handoffs;
    assert_eq!((handoffs.pulled, handoffs.wrong, handoffs.failed), (13, 0, 0));
    idle(&cluster).await;
}

#[tokio::test]
async fn a1_only_sglang_workers_are_candidates_for_generate() {
    let cluster = TestClusterBuilder::new()
        .sim(Dialect::Vllm, Role::Aggregated)
        .pair(Dialect::Vllm)
        .sim_with(recording(Role::Aggregated), "")
        .start()
        .await;
    for _ in 0..8 {
        whole(&cluster, json!({})).await;
    }
    // A1.10
    assert_eq!(sent(&cluster, 3).len(), 8);
    let pinned =
        cluster.client.post(GENERATE, &[("x-worker-instance-id", "1")], body(json!({}))).await.unwrap();
    let (code, text) = refusal(&pinned);
    // A1.10
    assert!(code == 409 && text.contains("runs an engine without this endpoint"), "{text}");
    cluster.sims[3].set_faults(vec![Fault::always(FaultKind::Status { status: 500, retry_after: None })]);
    assert_eq!(post(&cluster, body(json!({}))).await.status, 502, "no vLLM worker is tried");
    idle(&cluster).await;

    let without = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    let (code, text) = refusal(&post(&without, body(json!({}))).await);
    // A1.10
    assert_eq!(code, 400);
    assert!(
        text.contains("only SGLang has this endpoint, and no worker of the model `tiny` runs it"),
        "{text}"
    );
    assert!(without.sims.iter().all(|sim| sim.state().requests.values().sum::<u64>() == 0));
    without.at_rest().await.unwrap();
}

#[tokio::test]
async fn c9_what_a_pair_cannot_answer_goes_to_one_worker_or_is_refused() {
    let several = json!({ "sampling_params": { "n": 2, "max_new_tokens": 3 } });
    let logprobs = json!({ "return_logprob": true, "logprob_start_len": 0 });
    let cluster = pair(|_| {}).await;
    let hidden = json!({ "return_hidden_states": true });
    let experts = json!({ "return_routed_experts": true });
    let of_tokens = json!({ "return_logprob": true, "token_ids_logprob": [1, 2] });
    for (more, field) in [
        (&several, "n: "),
        (&logprobs, "logprob_start_len: "),
        (&hidden, "return_hidden_states: "),
        (&experts, "return_routed_experts: "),
        (&of_tokens, "token_ids_logprob: "),
    ] {
        let asked = timeout(Duration::from_secs(5), post(&cluster, body(more.clone())));
        let (code, text) = refusal(&asked.await.expect("the pair does not hang"));
        // C9.3
        assert!(code == 400 && text.starts_with(field), "{code} {text}");
    }
    whole(&cluster, json!({ "return_logprob": true })).await;
    assert_eq!((sent(&cluster, 0).len(), sent(&cluster, 1).len()), (1, 1));
    let mixed = mixed().await;
    whole(&mixed, logprobs).await;
    for more in [hidden, experts, of_tokens] {
        whole(&mixed, more).await;
    }
    let answer = whole(&mixed, several.clone()).await;
    // C9.3
    assert_eq!((answer.as_array().map(Vec::len), sent(&mixed, 2).len()), (Some(2), 5), "{answer}");
    let outcome = newest(&mixed).await["outcome"].clone();
    // A1.13: the prompt counts once
    let prompt = &answer[0]["meta_info"]["prompt_tokens"];
    assert_eq!((&outcome["output_tokens"], &outcome["prompt_tokens"]), (&json!(6), prompt), "{outcome}");
    assert_eq!(events(&mixed, several).await.len(), 6);
    idle(&mixed).await;
}

#[tokio::test]
async fn c9_more_log_probabilities_than_a_pair_hands_over_go_to_one_worker_or_are_refused() {
    let asking = |number: u32| {
        let messages = json!([{ "role": "user", "content": "which way does this train go?" }]);
        let chat = json!({ "messages": messages, "logprobs": true, "top_logprobs": number, "max_tokens": 2 });
        let completion = json!({ "prompt": "which way?", "logprobs": number, "max_tokens": 2 });
        let generate = json!({ "return_logprob": true, "top_logprobs_num": number });
        let batch =
            json!({ "text": ["a b", "c d"], "return_logprob": true, "top_logprobs_num": [1, number] });
        [
            ("/v1/chat/completions", chat.to_string(), "top_logprobs: "),
            ("/v1/completions", completion.to_string(), "logprobs: "),
            (GENERATE, body(generate), "top_logprobs_num: "),
            (GENERATE, body(batch), "top_logprobs_num: "),
        ]
    };
    let cluster = pair(|_| {}).await;
    for (path, body, field) in asking(129) {
        let (code, text) = refusal(&cluster.client.post(path, &[], body).await.unwrap());
        // C9.5
        assert!(code == 400 && text.starts_with(field), "{code} {text}");
    }
    assert!(cluster.sims.iter().all(|sim| sim.recorded().is_empty()));
    for (path, body, _) in asking(128) {
        assert_eq!(cluster.client.post(path, &[], body).await.unwrap().status, 200, "{path}");
    }
    idle(&cluster).await;
    let mixed = mixed().await;
    for (path, body, _) in asking(200) {
        assert_eq!(mixed.client.post(path, &[], body).await.unwrap().status, 200, "{path}");
    }
    // C9.5
    assert_eq!(mixed.sims[2].recorded().iter().filter(|seen| !seen.body.is_empty()).count(), 4);
    idle(&mixed).await;
}

#[tokio::test]
async fn a1_bodies_of_generate_that_do_not_fit_are_refused_here() {
    let cluster = single().await;
    let many = vec!["a"; 2_049];
    for (more, expected) in [
        (json!({ "sampling_params": [{}, {}] }), "sampling_params: 2 elements for 1 prompts"),
        (json!({ "text": ["a", "b"], "sampling_params": [{}] }), "sampling_params: 1 elements for 2 prompts"),
        (json!({ "sampling_params": { "max_new_tokens": -1 } }), "negative"),
        (json!({ "sampling_params": { "n": 1_000_000 } }), "n: `1000000` is not a whole number"),
        (json!({ "sampling_params": 4 }), "sampling_params: `4`"),
        (json!({ "text": many }), "text: 2049 prompts are more than 2048"),
        (json!({ "lora_path": "x".repeat(600) }), "lora_path: a text of 600 bytes"),
    ] {
        let (code, text) = refusal(&post(&cluster, body(more)).await);
        // A1.11, A1.12
        assert!(code == 400 && text.contains(expected), "{code} {text}");
    }
    let (code, text) = refusal(&post(&cluster, r#"{"sampling_params":{"max_new_tokens":4}}"#).await);
    // A1.10
    assert_eq!((code, text.as_str()), (400, "text: is missing"));
    assert!(sent(&cluster, 0).is_empty());
    let (code, text) = refusal(&post(&cluster, body(json!({ "text": 7 }))).await);
    assert!(code == 400 && text.starts_with("Either"), "the engine's own refusal passes: {text}");
    cluster.at_rest().await.unwrap();
}

/// An engine that answers each request with what `acts` returns for its body.
async fn engine(models: &'static str, acts: impl Fn(&str) -> Vec<Act> + Send + Sync + 'static) -> RawEngine {
    let script = move |request: &RawRequest| match request.line.as_str() {
        "GET /health" => vec![Act::Send(json_answer("{}"))],
        "GET /v1/models" => vec![Act::Send(json_answer(models))],
        "POST /abort_request" => vec![Act::Send(json_answer("{}")), Act::Close],
        line if line.starts_with("POST") => acts(&request.body),
        _ => vec![Act::Send(status("404 Not Found", "{}"))],
    };
    RawEngine::start(script).await
}

async fn before(engines: &[(&str, &RawEngine)]) -> TestCluster {
    let flags: Vec<String> = (1..)
        .zip(engines)
        .map(|(id, (role, engine))| {
            format!("id={id},role={role},engine=sglang,url=http://{}", engine.address)
        })
        .collect();
    let builder = TestClusterBuilder::new().config(|config| {
        config.routing.quarantine = Duration::ZERO;
        config.workers = flags.iter().map(|flag| WorkerSpec::parse_flag(flag).unwrap()).collect();
    });
    builder.start().await
}

/// An event with a finish reason, as JSON.
fn event(text: &str, finish: &str, completion: u64) -> String {
    format!(
        "data: {{\"text\":\"{text}\",\"output_ids\":[1],\"meta_info\":{{\"id\":\"x\",\"finish_reason\":{finish},\
         \"prompt_tokens\":9,\"completion_tokens\":{completion},\"cached_tokens\":0}}}}\n\n"
    )
}

fn aborted(status: &str) -> String {
    format!(
        "{{\"type\":\"abort\",\"message\":\"the engine said why\",\"status_code\":{status},\"err_type\":null}}"
    )
}

fn streams(events: &str) -> Vec<Act> {
    vec![Act::Send([stream_head(), chunk(events.as_bytes()), chunk(b"")].concat())]
}

async fn streamed(cluster: &TestCluster) -> (u16, String) {
    let reply = post(cluster, body(json!({ "stream": true }))).await;
    (reply.status.as_u16(), String::from_utf8(reply.body.to_vec()).unwrap())
}

#[tokio::test]
async fn a1_an_output_that_was_aborted_with_a_status_is_an_error_and_one_without_is_an_answer() {
    let partial = event("a", "null", 1);
    // As the first event, the error has a status of its own.
    for (status, expected) in [("400", 400), ("503", 503), ("500", 502)] {
        let first = format!("{}{DONE}", event("", &aborted(status), 0));
        let engine = engine(MODELS, move |_| streams(&first)).await;
        let cluster = before(&[("aggregated", &engine)]).await;
        let reply = post(&cluster, body(json!({ "stream": true }))).await;
        let (code, text) = refusal(&reply);
        // A1.13
        assert!(code == expected && text.contains("the engine said why"), "{status}: {code} {text}");
        cluster.at_rest().await.unwrap();
    }
    // Later, it ends the stream.
    let later = format!("{partial}{}{DONE}", event("a", &aborted("500"), 1));
    let engine_500 = engine(MODELS, {
        let (partial, last) = (partial.clone(), later[partial.len()..].to_owned());
        move |_| {
            let pause = Act::Pause(Duration::from_millis(100));
            let first = Act::Send([stream_head(), chunk(partial.as_bytes())].concat());
            vec![first, pause, Act::Send([chunk(last.as_bytes()), chunk(b"")].concat())]
        }
    })
    .await;
    let cluster = before(&[("aggregated", &engine_500)]).await;
    let (code, text) = streamed(&cluster).await;
    let error: Value =
        serde_json::from_str(text.strip_prefix(&*partial).unwrap().trim().trim_start_matches("data: "))
            .unwrap();
    // A1.13
    assert_eq!((code, &error["error"]["code"]), (200, &json!("bad_upstream")), "{text}");
    cluster.at_rest().await.unwrap();
    // Somebody aborted the request by its id: its output so far is the answer.
    let ended = format!("{partial}{}{DONE}", event("a", &aborted("null"), 1));
    let answer = ended.clone();
    let engine_null = engine(MODELS, move |_| streams(&ended)).await;
    let cluster = before(&[("aggregated", &engine_null)]).await;
    // A1.13
    assert_eq!(streamed(&cluster).await, (200, answer));
    assert_eq!(newest(&cluster).await["outcome"]["code"], "ok");
}

#[tokio::test]
async fn a1_a_whole_answer_whose_output_was_aborted_with_a_status_is_an_error() {
    let output = |finish: &str| {
        let event = event("", finish, 0);
        event.trim().trim_start_matches("data: ").to_owned()
    };
    let good = output(r#"{"type":"stop","matched":2}"#);
    for (status, expected) in [("400", 400), ("503", 503), ("500", 502)] {
        let bad = output(&aborted(status));
        for answer in [bad.clone(), format!("[{good},{bad}]"), format!(" [{bad}, {bad}]")] {
            let shown = answer.clone();
            let engine = engine(MODELS, move |_| vec![Act::Send(json_answer(&answer))]).await;
            let cluster = before(&[("aggregated", &engine)]).await;
            let reply = post(&cluster, body(json!({}))).await;
            let (code, text) = refusal(&reply);
            // A1.13
            assert!(code == expected && text.contains("the engine said why"), "{shown}: {code} {text}");
            cluster.at_rest().await.unwrap();
        }
    }
    // Somebody aborted the request by its id: its output so far is the answer.
    let bad = output(&aborted("null"));
    let answer = bad.clone();
    let engine_null = engine(MODELS, move |_| vec![Act::Send(json_answer(&answer))]).await;
    let cluster = before(&[("aggregated", &engine_null)]).await;
    let reply = post(&cluster, body(json!({}))).await;
    // A1.13
    assert_eq!((reply.status.as_u16(), &*reply.body), (200, bad.as_bytes()));
}

#[tokio::test]
async fn a1_an_aborted_whole_answer_is_tried_at_another_worker() {
    let output = |finish: &str| event("", finish, 0).trim().trim_start_matches("data: ").to_owned();
    let (good, bad) = (output(r#"{"type":"stop","matched":2}"#), output(&aborted("500")));
    for is_batch in [false, true] {
        let answer = |output: &str| if is_batch { format!("[{output},{output}]") } else { output.to_owned() };
        let (expected, answers) = (answer(&good), [answer(&good), answer(&bad)]);
        let [engine_good, engine_bad] =
            answers.map(|answer| engine(MODELS, move |_| vec![Act::Send(json_answer(&answer))]));
        let (engine_good, engine_bad) = (engine_good.await, engine_bad.await);
        let cluster = before(&[("aggregated", &engine_good), ("aggregated", &engine_bad)]).await;
        for number in (0..64).take_while(|number| *number < 4 || engine_bad.requests().is_empty()) {
            let reply = post(&cluster, body(json!({ "text": format!("{number} and more") }))).await;
            // A1.13
            assert_eq!((reply.status.as_u16(), &*reply.body), (200, expected.as_bytes()));
        }
        assert!(!engine_bad.requests().is_empty());
        let outcome = "pointsman_legs_total{leg=\"aggregated\",engine=\"sglang\",outcome=\"status_5xx\"";
        assert!(cluster.metric(outcome).await.unwrap().into_iter().sum::<f64>() > 0.0);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn a1_refusals_of_sglang_and_counts_that_are_no_numbers_pass() {
    let refused = r#"{"error":{"message":"The input is too long"}}"#;
    let engine_400 = engine(MODELS, move |_| vec![Act::Send(status("400 Bad Request", refused))]).await;
    let cluster = before(&[("aggregated", &engine_400)]).await;
    let reply = post(&cluster, body(json!({}))).await;
    // I1.3
    assert_eq!((reply.status.as_u16(), &*reply.body), (400, refused.as_bytes()));
    cluster.at_rest().await.unwrap();
    for count in [0, 7_000, u64::from(u32::MAX), u64::MAX] {
        let lies = format!("{}{DONE}", event("a", r#"{"type":"stop","matched":2}"#, count));
        let answer = lies.clone();
        let engine = engine(MODELS, move |_| streams(&lies)).await;
        let cluster = before(&[("aggregated", &engine)]).await;
        assert_eq!(streamed(&cluster).await, (200, answer));
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn a1_without_a_model_an_adapter_that_is_served_is_the_model() {
    let list = r#"{"data":[{"id":"tiny"},{"id":"fr","parent":"tiny"}]}"#;
    let answer = r#"{"text":"x","output_ids":[1],"meta_info":{"id":"i","finish_reason":{"type":"stop"}}}"#;
    let engine_of_both = engine(list, move |_| vec![Act::Send(json_answer(answer))]).await;
    let cluster = before(&[("aggregated", &engine_of_both)]).await;
    for (adapter, model) in
        [(json!("fr"), "fr"), (json!("de"), "tiny"), (json!(null), "tiny"), (json!(["fr"]), "tiny")]
    {
        let reply = post(&cluster, body(json!({ "lora_path": adapter }))).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        // A1.12
        assert_eq!(newest(&cluster).await["model"], model, "{adapter}");
        let sent: Value = serde_json::from_str(&engine_of_both.requests().pop().unwrap().body).unwrap();
        assert_eq!((&sent["lora_path"], sent.get("model")), (&adapter, None));
    }
    let engine_of_one = engine(MODELS, |_| vec![Act::Send(json_answer("{}"))]).await;
    let cluster = before(&[("aggregated", &engine_of_one), ("aggregated", &engine_of_both)]).await;
    for _ in 0..4 {
        let named = body(json!({ "model": "tiny", "lora_path": "fr" }));
        assert_eq!(post(&cluster, named).await.status, 200);
        // A1.12
        assert_eq!(newest(&cluster).await["model"], "fr");
        let sent: Value = serde_json::from_str(&engine_of_both.requests().pop().unwrap().body).unwrap();
        assert_eq!((&sent["lora_path"], &sent["model"]), (&json!("fr"), &json!("tiny")));
    }
    assert!(!engine_of_one.requests().iter().any(|request| request.line.starts_with("POST")));
    let other = SimConfig { model: "other".to_owned(), ..recording(Role::Aggregated) };
    let two = TestClusterBuilder::new().sim_with(recording(Role::Aggregated), "").sim_with(other, "");
    let two = two.start().await;
    // A1.9
    let (code, text) = refusal(&post(&two, body(json!({}))).await);
    assert_eq!((code, text.as_str()), (400, "model: is missing: expected one of other, tiny"));
    assert_eq!(post(&two, body(json!({ "model": "other" }))).await.status, 200);
    assert_eq!(sent(&two, 1).len(), 1);
}

#[tokio::test]
async fn a1_prompts_of_generate_are_routed_to_the_worker_that_has_them_cached() {
    let engine = || SimConfig { kv_events: true, ..recording(Role::Aggregated) };
    let cluster = TestClusterBuilder::new().sim_with(engine(), "").sim_with(engine(), "").start().await;
    cluster.kv_events_live().await.unwrap();
    for first in [1_000_u32, 5_000, 9_000, 13_000] {
        let ids: Vec<u32> = (first..first + 640).collect();
        let prompt = json!({ "text": null, "input_ids": ids });
        whole(&cluster, prompt.clone()).await;
        idle(&cluster).await;
        cluster.kv_events_applied().await.unwrap();
        let again = whole(&cluster, prompt).await;
        let cached = &again["meta_info"]["cached_tokens"];
        assert!(cached.as_u64() >= Some(600), "{again}");
        let decision = newest(&cluster).await;
        // A1.10: as of the ids of a completion
        assert_eq!(&decision["outcome"]["cached_tokens"]["predicted"], cached, "{decision}");
    }
    let served = [0, 1].map(|sim| sent(&cluster, sim).len());
    assert_eq!(served.iter().sum::<usize>(), 8);
}

#[tokio::test]
async fn e3_a_prefill_of_generate_that_fails_ends_its_decode_at_once() {
    let fault = |kind| vec![Fault::always(kind)];
    for (kind, stream) in [
        (FaultKind::Status { status: 500, retry_after: None }, false),
        (FaultKind::Status { status: 500, retry_after: None }, true),
        (FaultKind::Refuse, false),
        (FaultKind::WrongContentType, false),
    ] {
        let cluster = pair(|config| config.routing.quarantine = Duration::ZERO).await;
        cluster.sims[0].set_faults(fault(kind.clone()));
        let begun = Instant::now();
        let reply = post(&cluster, body(json!({ "stream": stream, "text": ["a b c", "d e f"] }))).await;
        // E3.1, C11.1
        assert_eq!(
            (reply.status.as_u16(), reply.code().as_str()),
            (502, "bad_upstream"),
            "{kind:?} {reply:?}"
        );
        assert!(begun.elapsed() < Duration::from_secs(20), "decode was waited for");
        idle(&cluster).await;
    }
    // Tokens may have come before.
    let cluster = pair(|config| config.routing.quarantine = Duration::ZERO).await;
    cluster.sims[0].set_faults(fault(FaultKind::Cut { after_tokens: 0 }));
    let (_, text) = streamed(&cluster).await;
    // C11.1, C11.3
    assert!(text.contains("bad_upstream") && !text.contains(DONE), "{text}");
    idle(&cluster).await;
}

#[tokio::test]
async fn c9_a_prefill_of_generate_that_was_aborted_failed() {
    let slow_stream = |finish: String| {
        move |_: &str| {
            vec![Act::Send(
                [stream_head(), chunk(event("a", &finish, 1).as_bytes()), chunk(DONE.as_bytes()), chunk(b"")]
                    .concat(),
            )]
        }
    };
    let list = |_: &str| {
        let output =
            |finish: String| format!("{{\"text\":\"\",\"meta_info\":{{\"finish_reason\":{finish}}}}}");
        let outputs = [output("{\"type\":\"length\"}".to_owned()), output(aborted("null"))].join(",");
        vec![Act::Send(json_answer(&format!("[{outputs}]")))]
    };
    let by_id = engine(MODELS, slow_stream(aborted("null"))).await;
    let by_engine = engine(MODELS, slow_stream(aborted("500"))).await;
    let batch = engine(MODELS, list).await;
    let decode = engine(MODELS, |_| vec![Act::Hang]).await;
    for (prefill, more) in [
        (&by_id, json!({ "stream": true })),
        (&by_engine, json!({ "stream": true })),
        (&batch, json!({ "text": ["a", "b"] })),
    ] {
        let cluster = before(&[("prefill", prefill), ("decode", &decode)]).await;
        let asked = timeout(Duration::from_secs(20), post(&cluster, body(more.clone())));
        let reply = asked.await.expect("decode is not waited for");
        // C9.4
        assert_eq!(reply.status.as_u16(), 502, "{more} {reply:?}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn e3_generate_is_retried_when_an_engine_of_the_pair_dies_and_ends_with_an_error_in_a_stream() {
    for dies in [0, 2] {
        let mut builder = TestClusterBuilder::new();
        for role in [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode] {
            builder = builder.sim_with(recording(role), "");
        }
        let cluster = builder.start().await;
        cluster.sims[dies].set_faults(vec![Fault::always(FaultKind::Die)]);
        // Equal engines are chosen by chance.
        for number in (0..64).take_while(|number| *number < 12 || cluster.faults_fired("die") == 0) {
            let more = json!({ "stream": number % 2 == 0, "text": format!("prompt number {number}") });
            let reply = post(&cluster, body(more)).await;
            // I2.1, I2.3
            assert_eq!(reply.status, 200, "{reply:?}");
        }
        assert_eq!(cluster.faults_fired("die"), 1);
        cluster.at_rest().await.unwrap();
    }
    let cluster = pair(|config| config.routing.quarantine = Duration::ZERO).await;
    cluster.sims[1].set_faults(vec![Fault::always(FaultKind::Cut { after_tokens: 2 })]);
    let (code, text) = streamed(&cluster).await;
    let last: Value = serde_json::from_str(text.trim_end().rsplit("data: ").next().unwrap()).unwrap();
    // I1.2, I14.1: it is not continued
    assert_eq!((code, &last["error"]["code"]), (200, &json!("bad_upstream")), "{text}");
    assert!(text.matches("\"meta_info\"").count() >= 1, "{text}");
    idle(&cluster).await;
    let why = cluster.metric("pointsman_continuations_total{").await.unwrap();
    assert_eq!(why.iter().sum::<f64>(), 1.0);
    // The engine ends the output with `abort` and a status.
    cluster.sims[1].set_faults(vec![Fault::always(FaultKind::TransferFail)]);
    let (code, text) = streamed(&cluster).await;
    let last: Value = serde_json::from_str(text.trim_end().rsplit("data: ").next().unwrap()).unwrap();
    // A1.13: the head may have been passed on before (I2.6)
    assert!(matches!(code, 200 | 502) && last["error"]["code"] == "bad_upstream", "{code} {text}");
    let reply = post(&cluster, body(json!({}))).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (502, "bad_upstream"), "{reply:?}");
    idle(&cluster).await;
}

#[tokio::test]
async fn e2_a_client_of_generate_that_leaves_aborts_each_item_of_its_batch() {
    let hangs = || engine(MODELS, |_| vec![Act::Hang]);
    let (prefill, decode) = (hangs().await, hangs().await);
    let cluster = before(&[("prefill", &prefill), ("decode", &decode)]).await;
    let of = |engine: &RawEngine, abort: bool| -> Vec<String> {
        let requests = engine.requests();
        let those = requests.iter().filter(|request| (request.line == "POST /abort_request") == abort);
        let rid = |request: &RawRequest| serde_json::from_str::<Value>(&request.body).unwrap()["rid"].clone();
        those.map(|request| rid(request).as_str().unwrap_or_default().to_owned()).collect()
    };
    for (count, (more, items)) in (1..).zip([
        (json!({ "text": ["a", "b", "c"] }), 3),
        (json!({}), 0),
        (json!({ "text": null, "input_ids": [[1]] }), 1),
    ]) {
        {
            let client = cluster.client.post(GENERATE, &[], body(more));
            let both = cluster.until("both legs are sent", |_| {
                of(&prefill, false).len() == count && of(&decode, false).len() == count
            });
            tokio::select! {
                reply = client => panic!("no leg answers: {reply:?}"),
                both = both => both.unwrap(),
            }
            // The client leaves.
        }
        let rid = of(&decode, false)[count - 1].clone();
        let ids: Vec<String> = match items {
            0 => vec![rid],
            items => (0..items).map(|item| format!("{rid}_{item}")).collect(),
        };
        for engine in [&prefill, &decode] {
            // E1.4, E2.5
            let all = |_: &TestCluster| ids.iter().all(|id| of(engine, true).contains(id));
            cluster.until("each item is aborted", all).await.unwrap();
        }
    }
}

#[tokio::test]
async fn e1_a_client_that_leaves_a_stream_of_generate_frees_the_pair() {
    let paced = |role| SimConfig { itl: Duration::from_millis(20), ..recording(role) };
    let builder =
        TestClusterBuilder::new().sim_with(paced(Role::Prefill), "").sim_with(paced(Role::Decode), "");
    let cluster = builder.start().await;
    let long = json!({ "stream": true, "sampling_params": { "max_new_tokens": 5_000, "ignore_eos": true } });
    let mut stream = cluster.client.stream(GENERATE, &[], body(long)).await.unwrap();
    for _ in 0..3 {
        stream.next().await.unwrap();
    }
    drop(stream);
    // E1.5: the whole answer takes 100 s
    idle(&cluster).await;
}
