//! Every endpoint of the clients' listener besides chat and completions, on real sockets: served, refused by
//! the engine, cut, abandoned, and without the fields that belong to the gateway.

use std::time::Duration;

use http::StatusCode;
use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{chunk, json, status, stream_head},
};
use serde_json::{Value, json};

const FORM: &str = "multipart/form-data; boundary=cut";

/// A form with a file, as clients send it: the file comes first.
fn form(fields: &[(&str, &str)]) -> String {
    let file = "--cut\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\
                content-type: audio/wav\r\n\r\nRIFF\0\u{1}--cu\r\n";
    let one = |(name, value): &(&str, &str)| {
        format!("--cut\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
    };
    format!("{file}{}--cut--\r\n", fields.iter().map(one).collect::<String>())
}

/// Every endpoint with a body that an engine serves: path, content type, body, and where its answer has
/// something.
fn requests() -> Vec<(&'static str, &'static str, String, &'static str)> {
    let json_type = "application/json";
    let messages = json!([{ "role": "user", "content": "hello there" }]);
    let rerank = json!({ "model": "tiny", "query": "q", "documents": ["a", "b"] }).to_string();
    let score = json!({ "model": "tiny", "text_1": "q", "text_2": ["a", "b"] }).to_string();
    vec![
        (
            "/v1/responses",
            json_type,
            json!({ "model": "tiny", "instructions": "be kind", "input": "hello there", "max_output_tokens": 4 })
                .to_string(),
            "/output/0/content/0/text",
        ),
        (
            "/v1/messages",
            json_type,
            json!({ "model": "tiny", "system": "be kind", "messages": messages, "max_tokens": 4 }).to_string(),
            "/content/0/text",
        ),
        (
            "/v1/messages/count_tokens",
            json_type,
            json!({ "model": "tiny", "messages": messages }).to_string(),
            "/input_tokens",
        ),
        ("/v1/rerank", json_type, rerank.clone(), "/results/1/relevance_score"),
        ("/v2/rerank", json_type, rerank.clone(), "/results/1/relevance_score"),
        ("/rerank", json_type, rerank, "/results/1/relevance_score"),
        ("/v1/score", json_type, score.clone(), "/data/1/score"),
        ("/score", json_type, score, "/data/1/score"),
        ("/pooling", json_type, r#"{"model":"tiny","input":"x"}"#.to_owned(), "/data/0/data/0"),
        ("/classify", json_type, r#"{"model":"tiny","input":"x"}"#.to_owned(), "/data/0/label"),
        ("/v1/embeddings", json_type, r#"{"model":"tiny","input":"x"}"#.to_owned(), "/data/0/embedding"),
        ("/tokenize", json_type, r#"{"model":"tiny","prompt":"a b"}"#.to_owned(), "/tokens/0"),
        ("/detokenize", json_type, r#"{"model":"tiny","tokens":[1,2]}"#.to_owned(), "/prompt"),
        ("/v1/audio/transcriptions", FORM, form(&[("model", "tiny")]), "/text"),
        ("/v1/audio/translations", FORM, form(&[("model", "tiny")]), "/text"),
        (
            "/v1/images/generations",
            json_type,
            r#"{"model":"tiny","prompt":"a bridge"}"#.to_owned(),
            "/data/0/b64_json",
        ),
    ]
}

fn recording(dialect: Dialect, role: Role) -> SimConfig {
    SimConfig { record: 100, ..SimConfig::instant(dialect, role) }
}

async fn aggregated() -> TestCluster {
    let sim = recording(Dialect::Vllm, Role::Aggregated);
    TestClusterBuilder::new().sim_with(sim, "").start().await
}

async fn post(cluster: &TestCluster, path: &str, kind: &str, body: impl Into<String>) -> Reply {
    cluster.client.post_as(kind, path, &[], body.into()).await.unwrap()
}

/// A gateway in front of an engine that answers every POST with a script.
async fn scripted(acts: Vec<Act>, change: impl FnOnce(&mut Config)) -> (RawEngine, TestCluster) {
    let engine = RawEngine::start(move |request: &RawRequest| {
        let models = r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"#;
        match request.line.as_str() {
            "GET /v1/models" => vec![Act::Send(json(models))],
            line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
            _ => acts.clone(),
        }
    })
    .await;
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.workers = vec![engine.worker("role=aggregated,engine=vllm,model=tiny")];
            config.routing.retries = 0;
            change(config);
        })
        .start()
        .await;
    (engine, cluster)
}

#[tokio::test]
async fn b12_every_endpoint_is_served_and_its_body_reaches_the_engine_unchanged() {
    let cluster = aggregated().await;
    for (path, kind, body, place) in requests() {
        let reply = post(&cluster, path, kind, body.clone()).await;
        assert_eq!(reply.status, StatusCode::OK, "{path}: {:?}", reply.body);
        assert!(reply.headers.contains_key("x-request-id"), "{path}");
        let answer = reply.json().unwrap();
        assert!(answer.pointer(place).is_some_and(|value| !value.is_null()), "{path}: {answer}");
        if let Some(seen) = cluster.sims[0].recorded().iter().find(|seen| seen.path == path) {
            // I6.1
            assert_eq!(seen.body, body, "{path}");
            let sent = seen.headers.iter().find(|(name, _)| name == "content-type");
            assert_eq!(sent.map(|(_, value)| value.as_str()), Some(kind), "{path}");
        } else {
            assert!(path.contains("token"), "{path} was not recorded");
        }
    }
    cluster.at_rest().await.unwrap();
    let metrics = cluster.metrics_text().await.unwrap();
    for label in ["responses", "messages", "count_tokens", "rerank", "score", "transcriptions", "detokenize"]
    {
        let line = format!("endpoint=\"{label}\",model=\"tiny\",status=\"200\",code=\"ok\"");
        assert!(metrics.contains(&line), "{label}");
    }
}

#[tokio::test]
async fn b12_sglang_serves_the_same_endpoints_where_it_has_them() {
    let sim = recording(Dialect::Sglang, Role::Aggregated);
    let cluster = TestClusterBuilder::new().sim_with(sim, "").start().await;
    for (path, kind, body, _) in requests() {
        let reply = post(&cluster, path, kind, body).await;
        let absent = ["/v2/rerank", "/rerank", "/score", "/pooling", "/v1/images/generations"];
        let absent = absent.contains(&path) || path.ends_with("tokenize");
        let expected = if absent { StatusCode::NOT_FOUND } else { StatusCode::OK };
        assert_eq!(reply.status, expected, "{path}: {:?}", reply.body);
    }
    let list = post(&cluster, "/v1/rerank", "application/json", requests()[3].2.clone()).await;
    assert!(list.json().unwrap().is_array(), "SGLang answers with a list: {:?}", list.body);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b12_the_engine_s_refusal_of_every_endpoint_passes_unchanged() {
    let refusal = r#"{"error":{"message":"not today","type":"BadRequestError","code":400}, "x": 1 }"#;
    let (_engine, cluster) = scripted(vec![Act::Send(status("400 Bad Request", refusal))], |_| {}).await;
    for (path, kind, body, _) in requests() {
        let reply = post(&cluster, path, kind, body).await;
        assert_eq!((reply.status.as_u16(), reply.body.as_ref()), (400, refusal.as_bytes()), "{path}");
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn b12_an_answer_that_is_cut_is_an_error_on_every_endpoint() {
    let cut =
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{\"data\":".to_vec();
    let (_engine, cluster) = scripted(vec![Act::Send(cut), Act::Close], |config| {
        config.routing.quarantine = Duration::ZERO;
    })
    .await;
    for (path, kind, body, _) in requests() {
        let reply = post(&cluster, path, kind, body).await;
        assert_eq!(reply.status.as_u16(), 502, "{path}: {:?}", reply.body);
        let shape = reply.json().unwrap();
        let is_anthropic = path.starts_with("/v1/messages");
        assert_eq!(shape["type"] == "error", is_anthropic, "{path}: {shape}");
        assert_eq!(shape["error"]["code"], "bad_upstream", "{path}");
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a5_no_reserved_field_of_a_responses_or_messages_body_reaches_an_engine() {
    let cluster = aggregated().await;
    let handoff = json!({ "do_remote_prefill": true, "remote_host": "10.0.0.1" });
    for (path, kind, body, _) in requests().into_iter().filter(|(_, kind, ..)| *kind != FORM) {
        let mut body: Value = serde_json::from_str(&body).unwrap();
        body["kv_transfer_params"] = handoff.clone();
        body["request_id"] = json!("mine");
        body["bootstrap_room"] = json!(7);
        body["nvext"] = json!({});
        body["vllm_xargs"] = json!({ "kv_transfer_params": handoff, "keep": 1 });
        let reply = post(&cluster, path, kind, body.to_string()).await;
        assert_eq!(reply.status, StatusCode::OK, "{path}: {:?}", reply.body);
        let recorded = cluster.sims[0].recorded();
        let Some(seen) = recorded.iter().find(|seen| seen.path == path) else { continue };
        for field in ["kv_transfer_params", "request_id", "bootstrap_room", "nvext"] {
            assert!(!seen.body.contains(field), "{path}: {}", seen.body);
        }
        assert!(seen.body.contains("keep"), "{path}");
    }
    // A form cannot be cleaned: it reaches the engine as it is.
    let bad = form(&[("model", "tiny"), ("kv_transfer_params", "{}")]);
    let reply = post(&cluster, "/v1/audio/transcriptions", FORM, bad).await;
    // I6.6
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (400, "invalid_request"));
    assert!(reply.json().unwrap()["error"]["message"].as_str().unwrap().contains("kv_transfer_params"));
}

/// The bytes of a Messages stream as vLLM writes it, older versions with the end mark after it.
const MESSAGES: &str = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\
\"usage\":{\"input_tokens\":5,\"output_tokens\":0}}}\n\n\
event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n\
event: ping\ndata: {\"type\": \"ping\"}\n\n\
event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\
\"text\":\"[DONE] {\\\"error\\\": {}}\"}}\n\n\
event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"b\"}}\n\n\
event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\n\
event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\
\"usage\":{\"input_tokens\":5,\"output_tokens\":2}}\n\n\
event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";

const RESPONSES: &str = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"error\":null}}\n\n\
event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n\
event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"error\":null,\
\"usage\":{\"input_tokens\":5,\"output_tokens\":1}}}\n\n";

fn streamed(path: &str) -> String {
    let (_, _, body, _) = requests().into_iter().find(|(other, ..)| *other == path).unwrap();
    let mut body: Value = serde_json::from_str(&body).unwrap();
    body["stream"] = json!(true);
    body.to_string()
}

#[tokio::test]
async fn b12_named_events_pass_byte_for_byte_in_pieces_of_any_size() {
    let with_mark = format!("{MESSAGES}data: [DONE]\n\n");
    for (path, stream) in
        [("/v1/messages", MESSAGES), ("/v1/messages", &with_mark), ("/v1/responses", RESPONSES)]
    {
        for step in [1, 7, 100_000] {
            let mut acts = vec![Act::Send(stream_head())];
            acts.extend(stream.as_bytes().chunks(step).map(|piece| Act::Send(chunk(piece))));
            acts.push(Act::Send(chunk(b"")));
            let (_engine, cluster) = scripted(acts, |_| {}).await;
            let reply = post(&cluster, path, "application/json", streamed(path)).await;
            let text = String::from_utf8_lossy(&reply.body).into_owned();
            // I6.4
            assert_eq!((reply.status.as_u16(), text.as_str()), (200, stream), "{path} {step}");
            cluster.at_rest().await.unwrap();
            let metrics = cluster.metrics_text().await.unwrap();
            let tokens = if path == "/v1/messages" { 2 } else { 1 };
            assert!(metrics.contains(&format!("pointsman_output_tokens_total {tokens}\n")), "{path}");
            // I6.9
            assert!(metrics.contains("pointsman_prompt_tokens_total 5\n"), "{path}");
        }
    }
}

#[tokio::test]
async fn b12_a_named_stream_without_its_last_event_ends_with_a_named_error() {
    for (path, stream) in [("/v1/messages", MESSAGES), ("/v1/responses", RESPONSES)] {
        let last = stream.trim_end().rfind("event: ").unwrap();
        let cut = stream.as_bytes()[..last].to_vec();
        let (_engine, cluster) =
            scripted(vec![Act::Send(stream_head()), Act::Send(chunk(&cut)), Act::Close], |_| {}).await;
        let reply = post(&cluster, path, "application/json", streamed(path)).await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        let (passed, error) = text.split_at(last);
        assert_eq!(passed.as_bytes(), cut, "{path}");
        let data = error.strip_prefix("event: error\ndata: ").unwrap().trim_end();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(
            (&data["type"], &data["error"]["code"]),
            (&json!("error"), &json!("bad_upstream")),
            "{path}"
        );
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn b12_an_error_event_of_the_engine_becomes_the_client_s_in_its_shape() {
    let error = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\",\"message\":\"out of luck\"}}\n\n";
    let begin = MESSAGES.split_inclusive("\n\n").take(4).collect::<String>();
    let acts = vec![
        Act::Send(stream_head()),
        Act::Send(chunk(begin.as_bytes())),
        Act::Pause(Duration::from_millis(50)),
        Act::Send(chunk(error.as_bytes())),
        Act::Send(chunk(b"")),
    ];
    let (_engine, cluster) = scripted(acts, |_| {}).await;
    let reply = post(&cluster, "/v1/messages", "application/json", streamed("/v1/messages")).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert!(text.starts_with(&begin), "{text}");
    let data = text.trim_end().rsplit("data: ").next().unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["error"]["type"], "api_error");
    assert!(data["error"]["message"].as_str().unwrap().contains("out of luck"), "{data}");
}

#[tokio::test]
async fn b12_when_a_client_leaves_a_stream_of_messages_or_responses_the_engine_stops() {
    let slow = SimConfig {
        itl: Duration::from_millis(20),
        natural_len: 10_000,
        record: 10,
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    let cluster = TestClusterBuilder::new().sim_with(slow, "").start().await;
    for path in ["/v1/messages", "/v1/responses"] {
        let mut body: Value = serde_json::from_str(&streamed(path)).unwrap();
        let cap = if path == "/v1/messages" { "max_tokens" } else { "max_output_tokens" };
        body[cap] = json!(5_000);
        let mut stream = cluster.client.stream(path, &[], body.to_string()).await.unwrap();
        for _ in 0..4 {
            let event = stream.next().await.unwrap().unwrap();
            assert!(event.starts_with("event: "), "{event}");
        }
        drop(stream);
        cluster.at_rest().await.unwrap();
        cluster.until("the engine is idle", |cluster| cluster.sims[0].state().running == 0).await.unwrap();
    }
}

#[tokio::test]
async fn b12_messages_and_responses_run_on_a_vllm_pair() {
    let cluster = TestClusterBuilder::new()
        .sim_with(recording(Dialect::Vllm, Role::Prefill), "")
        .sim_with(recording(Dialect::Vllm, Role::Decode), "")
        .start()
        .await;
    let reply = post(&cluster, "/v1/messages", "application/json", requests()[1].2.clone()).await;
    assert_eq!(reply.status, StatusCode::OK, "{:?}", reply.body);
    let answer = reply.json().unwrap();
    // I6.2
    assert_eq!((&answer["type"], &answer["usage"]["output_tokens"]), (&json!("message"), &json!(4)));
    assert!(answer["kv_transfer_params"].is_null(), "{answer}");
    let prefill = cluster.sims[0].recorded();
    let asked: Value = serde_json::from_str(&prefill[0].body).unwrap();
    assert_eq!(
        (&asked["max_tokens"], &asked["stream"], &asked["kv_transfer_params"]["do_remote_decode"]),
        (&json!(1), &json!(false), &json!(true))
    );
    let decode: Value = serde_json::from_str(&cluster.sims[1].recorded()[0].body).unwrap();
    assert_eq!(
        (&decode["max_tokens"], &decode["kv_transfer_params"]["do_remote_prefill"]),
        (&json!(4), &json!(true))
    );
    let streamed_reply = post(&cluster, "/v1/messages", "application/json", streamed("/v1/messages")).await;
    let text = String::from_utf8_lossy(&streamed_reply.body).into_owned();
    assert!(text.starts_with("event: message_start\n") && text.contains("event: message_stop\n"), "{text}");
    assert_eq!(text.matches("event: content_block_delta\n").count(), 4, "{text}");
    let [prefilled, decoded] = [0, 1].map(|place: usize| cluster.sims[place].recorded().len());
    let response = json!({ "model": "tiny", "input": "hello there", "max_output_tokens": 4, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"] });
    let reply = post(&cluster, "/v1/responses", "application/json", response.to_string()).await;
    let answer = reply.json().unwrap();
    // I6.14
    assert_eq!((&answer["status"], &answer["usage"]["output_tokens"]), (&json!("incomplete"), &json!(4)));
    assert!(answer["kv_transfer_params"].is_null(), "{answer}");
    let asked: Value = serde_json::from_str(&cluster.sims[0].recorded()[prefilled].body).unwrap();
    let expected = json!({ "model": "tiny", "input": "hello there", "max_output_tokens": 1, "stream": false,
        "top_logprobs": 2, "include": ["message.output_text.logprobs"], "store": false,
        "kv_transfer_params": { "do_remote_decode": true, "do_remote_prefill": false } });
    assert_eq!(asked, expected);
    let decode: Value = serde_json::from_str(&cluster.sims[1].recorded()[decoded].body).unwrap();
    assert_eq!(
        (&decode["top_logprobs"], &decode["kv_transfer_params"]["do_remote_prefill"], decode.get("store")),
        (&json!(2), &json!(true), None)
    );
    let reply = post(&cluster, "/v1/responses", "application/json", streamed("/v1/responses")).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert!(text.starts_with("event: response.created\n"), "{text}");
    assert!(text.contains("event: response.incomplete\n"), "{text}");
    assert_eq!(cluster.sims[0].recorded().len(), prefilled + 2);
    for (path, kind, body, _) in requests() {
        let reply = post(&cluster, path, kind, body).await;
        assert_eq!(reply.status, StatusCode::OK, "{path}: {:?}", reply.body);
    }
    cluster.at_rest().await.unwrap();
    let state = cluster.sims[0].state();
    assert_eq!(state.pinned_blocks, 0, "every handoff was consumed");
}

#[tokio::test]
async fn c8_a_message_that_ended_within_prefill_is_the_answer_in_events() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::FirstTokenEos)]);
    let reply = post(&cluster, "/v1/messages", "application/json", streamed("/v1/messages")).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    let names: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    assert_eq!((names.first(), names.last()), (Some(&"message_start"), Some(&"message_stop")), "{text}");
    assert!(text.contains(r#""stop_reason":"end_turn""#), "{text}");
    assert_eq!(cluster.sims[1].state().requests.values().sum::<u64>(), 0, "no decode was started");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i6_a_response_that_ends_within_prefill_is_that_of_decode() {
    let cluster = TestCluster::disaggregated(Dialect::Vllm, 1, 1).await.unwrap();
    cluster.sims[0].set_faults(vec![Fault::always(FaultKind::FirstTokenEos)]);
    let reply = post(&cluster, "/v1/responses", "application/json", streamed("/v1/responses")).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    // I6.14
    assert!(text.contains("event: response.incomplete\n"), "{text}");
    let served = cluster.sims.iter().map(|sim| sim.state().requests.values().sum::<u64>());
    assert_eq!(served.collect::<Vec<_>>(), [1, 1]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i6_a_response_that_the_decode_worker_of_a_vllm_pair_stored_is_continued_there() {
    let mut builder = TestClusterBuilder::new();
    for role in [Role::Prefill, Role::Decode, Role::Decode, Role::Aggregated] {
        builder = builder.sim_with(recording(Dialect::Vllm, role), "");
    }
    let cluster = builder.start().await;
    let respond = async |more: Value| {
        let mut body: Value = serde_json::from_str(&requests()[0].2).unwrap();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        post(&cluster, "/v1/responses", "application/json", body.to_string()).await.json().unwrap()
    };
    let of_each = || cluster.sims.iter().map(|sim| sim.recorded().len()).collect::<Vec<_>>();
    for _ in 0..4 {
        let before = of_each();
        let first = respond(json!({})).await;
        let between = of_each();
        // I6.14
        assert_eq!(between[0], before[0] + 1, "{between:?}");
        let second = respond(json!({ "previous_response_id": first["id"] })).await;
        assert_eq!(second["status"], "incomplete", "{second}");
        let after = of_each();
        let more = |from: &[usize], to: &[usize]| -> Vec<usize> {
            (1..4).filter(|place| to[*place] > from[*place]).collect()
        };
        assert_eq!((after[0], more(&between, &after)), (between[0], more(&before, &between)));
    }
}

#[tokio::test]
async fn i6_a_response_runs_on_one_worker_if_a_vllm_worker_of_the_pair_is_old() {
    let mut builder = TestClusterBuilder::new();
    for (role, version) in [(Role::Prefill, "0.19.0"), (Role::Decode, "0.18.1")] {
        let sim = SimConfig { version: Some(version.to_owned()), ..recording(Dialect::Vllm, role) };
        builder = builder.sim_with(sim, "");
    }
    let cluster = builder.start().await;
    let reply = post(&cluster, "/v1/responses", "application/json", requests()[0].2.clone()).await;
    assert_eq!(reply.status, StatusCode::OK, "{reply:?}");
    // I6.14
    assert_eq!(cluster.sims.iter().map(|sim| sim.recorded().len()).collect::<Vec<_>>(), [0, 1]);
}

/// A pair of SGLang workers, each of its version.
async fn sglang_pair(versions: [&str; 2], overhead: Duration) -> TestCluster {
    let mut builder = TestClusterBuilder::new();
    for (role, version) in [Role::Prefill, Role::Decode].into_iter().zip(versions) {
        let version = Some(version.to_owned());
        let sim = SimConfig { version, overhead, ..recording(Dialect::Sglang, role) };
        builder = builder.sim_with(sim, "");
    }
    builder.start().await
}

#[tokio::test]
async fn i6_messages_and_responses_run_on_a_pair_of_sglang_workers() {
    let cluster = sglang_pair(["0.5.23", "0.5.24"], Duration::ZERO).await;
    for (path, kind, body, place) in requests().into_iter().take(2) {
        let reply = post(&cluster, path, kind, body).await;
        assert_eq!(reply.status, StatusCode::OK, "{reply:?}");
        assert!(reply.json().unwrap().pointer(place).is_some(), "{reply:?}");
        let reply = post(&cluster, path, kind, streamed(path)).await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        let deltas = ["content_block_delta\n", "output_text.delta\n"].map(|name| text.matches(name).count());
        assert_eq!(deltas.iter().sum::<usize>(), 4, "{text}");
        assert!(
            text.contains("event: message_stop\n") || text.contains("event: response.incomplete\n"),
            "{text}"
        );
    }
    cluster.at_rest().await.unwrap();
    let sent = |place: usize| -> Vec<Value> {
        let recorded = cluster.sims[place].recorded();
        recorded.iter().map(|seen| serde_json::from_str(&seen.body).unwrap()).collect()
    };
    let (prefill, decode) = (sent(0), sent(1));
    assert_eq!((prefill.len(), decode.len()), (4, 4));
    for (prefill, decode) in prefill.iter().zip(&decode) {
        // I6.3
        assert!(prefill["bootstrap_room"].is_u64() && prefill["bootstrap_room"] == decode["bootstrap_room"]);
        assert_eq!(prefill["store"] == false, prefill.get("input").is_some(), "{prefill}");
        assert!(decode.get("store").is_none(), "{decode}");
    }
}

#[tokio::test]
async fn i6_a_message_and_a_response_whose_client_left_are_aborted_on_an_sglang_pair() {
    let cluster = sglang_pair(["0.5.23", "0.5.23"], Duration::from_secs(1)).await;
    for (path, kind, body, _) in requests().into_iter().take(2) {
        let aborted = |cluster: &TestCluster| cluster.sims.iter().map(|sim| sim.state().aborted).sum::<u64>();
        let before = aborted(&cluster);
        let runs = |cluster: &TestCluster| {
            cluster.sims.iter().all(|sim| sim.state().running + sim.state().waiting > 0)
        };
        tokio::select! {
            reply = post(&cluster, path, kind, body) => panic!("it has ended: {reply:?}"),
            seen = cluster.until("both legs run", runs) => seen.unwrap(),
        }
        let free = |cluster: &TestCluster| {
            cluster.sims.iter().all(|sim| sim.state().running + sim.state().waiting == 0)
        };
        cluster.until("both legs are free", free).await.unwrap();
        cluster.at_rest().await.unwrap();
        // E1.4
        assert!(aborted(&cluster) > before, "{path}");
    }
}

#[tokio::test]
async fn i6_responses_that_only_one_worker_can_run_are_not_split() {
    let cluster = sglang_pair(["0.5.23", "0.5.23"], Duration::ZERO).await;
    for (field, value) in [("background", json!(true)), ("tools", json!([{ "type": "web_search" }]))] {
        let mut body: Value = serde_json::from_str(&requests()[0].2).unwrap();
        body[field] = value;
        let reply = post(&cluster, "/v1/responses", "application/json", body.to_string()).await;
        // I6.3
        assert_eq!(reply.status, 400, "{field}: {reply:?}");
    }
    let old = sglang_pair(["0.5.23", "0.5.22"], Duration::ZERO).await;
    let reply = post(&old, "/v1/responses", "application/json", requests()[0].2.clone()).await;
    // I6.3
    assert_eq!(reply.status, 400, "{reply:?}");
    assert!(old.sims.iter().chain(&cluster.sims).all(|sim| sim.recorded().is_empty()));
}

#[tokio::test]
async fn i6_a_response_that_may_be_stored_runs_on_one_worker_where_there_is_one() {
    let respond = async |cluster: &TestCluster, more: Value| {
        let mut body: Value = serde_json::from_str(&requests()[0].2).unwrap();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        post(cluster, "/v1/responses", "application/json", body.to_string()).await
    };
    let mut builder = TestClusterBuilder::new();
    for role in [Role::Prefill, Role::Decode, Role::Aggregated] {
        let sim = SimConfig { version: Some("0.5.23".to_owned()), ..recording(Dialect::Sglang, role) };
        builder = builder.sim_with(sim, "");
    }
    let cluster = builder.start().await;
    let first = respond(&cluster, json!({})).await.json().unwrap();
    let second = respond(&cluster, json!({ "previous_response_id": first["id"] })).await;
    assert_eq!(second.status, StatusCode::OK, "{second:?}");
    let of_each: Vec<usize> = cluster.sims.iter().map(|sim| sim.recorded().len()).collect();
    // I6.3
    assert_eq!(of_each, [0, 0, 2]);
    let pair = sglang_pair(["0.5.23", "0.5.23"], Duration::ZERO).await;
    let first = respond(&pair, json!({})).await.json().unwrap();
    let second = respond(&pair, json!({ "previous_response_id": first["id"] })).await;
    // I6.3: no worker of a pair has stored it.
    assert!([404, 400].contains(&second.status.as_u16()), "{second:?}");
}

#[tokio::test]
async fn b12_a_split_sglang_fleet_says_that_it_cannot_serve_messages_and_counts_tokens() {
    let cluster = sglang_pair(["0.5.22", "0.5.23"], Duration::ZERO).await;
    let reply = post(&cluster, "/v1/messages", "application/json", requests()[1].2.clone()).await;
    let error = reply.json().unwrap();
    // I6.3
    assert_eq!((reply.status.as_u16(), &error["type"]), (400, &json!("error")));
    assert!(error["error"]["message"].as_str().unwrap().contains("/v1/messages"), "{error}");
    let count =
        post(&cluster, "/v1/messages/count_tokens", "application/json", requests()[2].2.clone()).await;
    // I6.7
    assert_eq!(count.status, StatusCode::OK, "{:?}", count.body);
}

#[tokio::test]
async fn b12_transcripts_pass_as_text_and_as_a_stream() {
    let cluster = aggregated().await;
    let text = form(&[("model", "tiny"), ("response_format", "text")]);
    let reply = post(&cluster, "/v1/audio/transcriptions", FORM, text).await;
    assert!(String::from_utf8_lossy(&reply.body).ends_with("bytes of audio"), "{:?}", reply.body);
    assert_eq!(reply.headers["content-type"], "text/plain; charset=utf-8");
    let stream = form(&[("model", "tiny"), ("stream", "true")]);
    let reply = post(&cluster, "/v1/audio/transcriptions", FORM, stream).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert!(text.contains("transcription.chunk") && text.ends_with("data: [DONE]\n\n"), "{text}");
    let unknown = form(&[("model", "none")]);
    let reply = post(&cluster, "/v1/audio/transcriptions", FORM, unknown).await;
    let message = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("the model `none` does not exist"), "{message}");
    // A1.9
    assert_eq!(post(&cluster, "/v1/audio/transcriptions", FORM, form(&[])).await.status, StatusCode::OK);
    let reply = post(&cluster, "/v1/audio/transcriptions", "application/json", "{}").await;
    assert_eq!(reply.status.as_u16(), 400);
    let large = TestClusterBuilder::new()
        .config(|config| config.server.max_body_bytes = 1_000)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let reply = post(&large, "/v1/audio/transcriptions", FORM, form(&[("prompt", &"x".repeat(2_000))])).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (413, "payload_too_large"));
}

#[tokio::test]
async fn b3_clients_learn_the_context_of_a_model() {
    let sim =
        |max_model_len| SimConfig { max_model_len, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let builder = TestClusterBuilder::new().sim_with(sim(8_192), "").sim_with(sim(4_096), "");
    let cluster = builder.start().await;
    let length = async |cluster: &TestCluster| {
        let list = cluster.client.get("/v1/models").await.unwrap().json().unwrap();
        let one = cluster.client.get("/v1/models/tiny").await.unwrap().json().unwrap();
        assert_eq!(list["data"][0], one);
        one["max_model_len"].clone()
    };
    // B3.5
    assert_eq!(length(&cluster).await, 4_096);
    assert_eq!(cluster.admin.delete("/workers/2").await.unwrap().status, 200);
    assert_eq!(length(&cluster).await, 8_192);
}

#[tokio::test]
async fn b12_models_version_health_and_unknown_paths_answer_as_openai_does() {
    let cluster = aggregated().await;
    let get = async |path: &str| cluster.client.get(path).await.unwrap();
    // I7.1
    assert_eq!(get("/v1/models/tiny").await.json().unwrap()["id"], "tiny");
    let missing = get("/v1/models/meta/llama%203").await;
    assert_eq!((missing.status.as_u16(), missing.code().as_str()), (404, "model_not_found"));
    assert!(missing.json().unwrap()["error"]["message"].as_str().unwrap().contains("meta/llama 3"));
    assert!(get("/version").await.json().unwrap()["version"].is_string());
    for path in ["/health", "/healthz"] {
        assert_eq!(get(path).await.body.as_ref(), b"ok");
    }
    let unknown = post(&cluster, "/v1/chat/complete", "application/json", "{}").await;
    // I_unknown_url
    assert_eq!((unknown.status.as_u16(), unknown.code().as_str()), (404, "unknown_url"));
    assert!(unknown.json().unwrap()["error"]["message"].as_str().unwrap().contains("POST /v1/chat/complete"));
    let wrong = get("/v1/chat/completions").await;
    // I7.2, I_method_not_allowed
    assert_eq!((wrong.status.as_u16(), wrong.code().as_str()), (405, "method_not_allowed"));
    assert_eq!(wrong.headers["allow"], "POST");
    let web_socket = [("connection", "upgrade"), ("upgrade", "websocket"), ("sec-websocket-key", "a")];
    let refused = cluster.client.get_with("/v1/responses", &web_socket).await.unwrap();
    // I7.18
    assert_eq!((refused.status.as_u16(), refused.code().as_str()), (426, "upgrade_required"));
    assert!(refused.json().unwrap()["error"]["message"].as_str().unwrap().contains("POST"));
    assert_eq!(get("/v1/responses").await.status.as_u16(), 405);
    let head = cluster.client.send("HEAD", "/v1/models", &[]).await.unwrap();
    assert_eq!((head.status.as_u16(), head.body.len()), (200, 0));
    let options = cluster.client.send("OPTIONS", "/v1/models", &[]).await.unwrap();
    assert_eq!((options.status.as_u16(), options.headers["allow"].as_bytes()), (204, b"GET,HEAD".as_slice()));
    assert!(!options.headers.contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn i7_a_path_that_is_not_text_is_refused_as_other_requests_are() {
    let cluster = aggregated().await;
    let slot = "/policies/%FF";
    for (client, method, path) in [
        (&cluster.client, "GET", "/v1/models/%FF".to_owned()),
        (&cluster.client, "GET", "/v1/responses/a%80".to_owned()),
        (&cluster.client, "DELETE", "/v1/responses/%C3%28".to_owned()),
        (&cluster.client, "POST", "/v1/responses/%FF/cancel".to_owned()),
        (&cluster.admin, "GET", "/decisions/%FF".to_owned()),
        (&cluster.admin, "GET", "/workers/%FF".to_owned()),
        (&cluster.admin, "GET", format!("{slot}/log")),
        (&cluster.admin, "POST", format!("{slot}/rollback")),
        (&cluster.admin, "DELETE", format!("{slot}/rollback")),
        (&cluster.admin, "POST", format!("{slot}/promote")),
    ] {
        let refused = client.send(method, &path, &[]).await.unwrap();
        // I7.19
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (400, "invalid_request"), "{path}");
        assert!(refused.json().unwrap()["error"]["request_id"].is_string(), "{path}");
    }
    let line = "status=\"400\",code=\"invalid_request\"} 4";
    let text = cluster.metrics_text().await.unwrap();
    assert!(text.contains(line), "{text}");
}

#[tokio::test]
async fn a5_answers_to_messages_have_the_id_in_the_header_of_the_anthropic_api_too() {
    let cluster = aggregated().await;
    let message = |model: &str| {
        json!({ "model": model, "max_tokens": 2, "messages": [{ "role": "user", "content": "hi" }] })
            .to_string()
    };
    let streamed = message("tiny").replacen('{', "{\"stream\":true,", 1);
    for (path, body, status) in [
        ("/v1/messages", message("tiny"), 200),
        ("/v1/messages", streamed, 200),
        ("/v1/messages/count_tokens", message("tiny"), 200),
        ("/v1/messages", message("other"), 404),
        ("/v1/messages", "{".to_owned(), 400),
        ("/v1/messages/batches", "{}".to_owned(), 404),
    ] {
        let reply = post(&cluster, path, "application/json", &body).await;
        assert_eq!(reply.status.as_u16(), status, "{path} {body}");
        // A5.5
        assert_eq!(reply.headers["request-id"], reply.headers["x-request-id"], "{path} {body}");
    }
    let chat = message("tiny");
    let reply = post(&cluster, "/v1/chat/completions", "application/json", &chat).await;
    // A5.5
    assert!(!reply.headers.contains_key("request-id"), "{:?}", reply.headers);
}

#[tokio::test]
async fn b12_cors_is_off_until_origins_are_configured() {
    let page = [
        ("origin", "https://page.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ];
    let off = aggregated().await;
    let reply = off.client.send("OPTIONS", "/v1/messages", &page).await.unwrap();
    assert!(!reply.headers.keys().any(|name| name.as_str().starts_with("access-control")));
    let cluster = TestClusterBuilder::new()
        .config(|config| config.server.cors_origins = vec!["https://page.example".to_owned()])
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let reply = cluster.client.send("OPTIONS", "/v1/messages", &page).await.unwrap();
    assert_eq!(reply.status.as_u16(), 200);
    assert_eq!(reply.headers["access-control-allow-origin"], "https://page.example");
    assert_eq!(reply.headers["access-control-allow-headers"], "authorization,content-type");
    let body = requests()[1].2.clone();
    let reply = cluster.client.post("/v1/messages", &page[..1], body).await.unwrap();
    assert_eq!(reply.headers["access-control-allow-origin"], "https://page.example");
    let exposed = reply.headers["access-control-expose-headers"].to_str().unwrap();
    let exposed: Vec<&str> = exposed.split(',').map(str::trim).collect();
    for limit in ["limit", "remaining", "reset"] {
        for kind in ["requests", "tokens"] {
            // I7.3
            assert!(exposed.contains(&format!("x-ratelimit-{limit}-{kind}").as_str()), "{exposed:?}");
        }
    }
    // I7.3
    assert!(exposed.contains(&"retry-after-ms") && exposed.contains(&"x-request-id"), "{exposed:?}");
    assert!(exposed.contains(&"request-id") && exposed.contains(&"x-should-retry"), "{exposed:?}");
    assert_eq!(reply.headers["request-id"], reply.headers["x-request-id"]);
    let other = [("origin", "https://other.example")];
    let reply = cluster.client.send("GET", "/v1/models", &other).await.unwrap();
    // I7.3
    assert!(!reply.headers.contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn i7_what_a_page_of_another_site_sends_without_asking_is_refused() {
    let cluster = aggregated().await;
    let page = [("origin", "http://evil.example")];
    for (path, kind, body, _) in requests() {
        let unasked = if kind == FORM { FORM } else { "text/plain" };
        let reply = cluster.client.post_as(unasked, path, &page, body.clone()).await.unwrap();
        // I7.10
        assert_eq!((reply.status.as_u16(), &*reply.code()), (403, "forbidden"), "{path}: {reply:?}");
        assert_eq!(post(&cluster, path, unasked, body).await.status, StatusCode::OK, "{path}: a program");
    }
    let sent = cluster.sims[0].recorded().iter().filter(|seen| !seen.path.contains("token")).count();
    assert_eq!(sent, requests().iter().filter(|(path, ..)| !path.contains("token")).count());
    let (_, _, body, _) = requests().swap_remove(1);
    for (origins, kind) in [(vec![], "application/json"), (vec![page[0].1], "text/plain"), (vec!["*"], FORM)]
    {
        let cluster = TestClusterBuilder::new()
            .config(|config| config.server.cors_origins = origins.into_iter().map(str::to_owned).collect())
            .sim(Dialect::Vllm, Role::Aggregated)
            .start()
            .await;
        let reply = cluster.client.post_as(kind, "/v1/messages", &page, body.clone()).await.unwrap();
        // I7.10
        assert_eq!(reply.status, StatusCode::OK, "{kind}: {reply:?}");
    }
}

#[tokio::test]
async fn i7_a_page_of_another_site_previews_and_cancels_nothing() {
    let cluster = aggregated().await;
    let page = [("origin", "http://evil.example")];
    let held = [page[0], ("authorization", "Basic YTpi")];
    let chat = requests()[2].2.clone();
    let cases = [("/v1/route", chat, 200), ("/v1/responses/resp_none/cancel", String::new(), 404)];
    for (path, body, _) in &cases {
        for headers in [&page[..], &held] {
            let reply = cluster.client.post_as("text/plain", path, headers, body.clone()).await.unwrap();
            // I7.10
            assert_eq!((reply.status.as_u16(), &*reply.code()), (403, "forbidden"), "{path}: {reply:?}");
        }
    }
    assert!(!cluster.sims[0].recorded().iter().any(|seen| seen.path.ends_with("/cancel")));
    for (path, body, status) in cases {
        let program = post(&cluster, path, "text/plain", body.clone()).await;
        assert_eq!(program.status.as_u16(), status, "{path}: {program:?}");
        let asked = cluster.client.post(path, &page, body).await.unwrap();
        // I7.10
        assert_eq!(asked.status.as_u16(), status, "{path}: {asked:?}");
    }
}

#[tokio::test]
async fn b12_clients_of_messages_send_their_key_as_anthropic_s_do_and_errors_have_its_shape() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.auth.keys = pointsman_tests::client_keys(&[("alpha", "")]))
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let body = requests()[1].2.clone();
    let send = async |headers: &[(&str, &str)], body: String| {
        cluster.client.post("/v1/messages", headers, body).await.unwrap()
    };
    // I6.8
    assert_eq!(send(&[("x-api-key", "alpha")], body.clone()).await.status, StatusCode::OK);
    for (headers, body, status, kind) in [
        (&[("x-api-key", "beta")][..], body.clone(), 401, "authentication_error"),
        (&[][..], body.clone(), 401, "authentication_error"),
        (&[("x-api-key", "alpha")][..], body.replace("tiny", "none"), 404, "not_found_error"),
        (&[("x-api-key", "alpha")][..], "{".to_owned(), 400, "invalid_request_error"),
    ] {
        let reply = send(headers, body).await;
        let error = reply.json().unwrap();
        // I6.5
        assert_eq!((reply.status.as_u16(), &error["type"]), (status, &json!("error")), "{error}");
        assert_eq!(error["error"]["type"], kind);
        assert!(error["request_id"].is_string());
    }
    for (method, path, status, is_message) in [
        ("GET", "/v1/messages", 405, true),
        ("DELETE", "/v1/messages/count_tokens", 405, true),
        ("POST", "/v1/messages/batches", 404, true),
        ("POST", "/v1/messages2", 404, false),
    ] {
        let reply = cluster.client.send(method, path, &[]).await.unwrap();
        let error = reply.json().unwrap();
        // I6.5
        assert_eq!((reply.status.as_u16(), error["type"] == "error"), (status, is_message), "{error}");
    }
}

const SPEECH: &str = "/v1/audio/speech";

fn speech(input: &str) -> String {
    json!({ "model": "tiny", "input": input, "voice": "alloy", "response_format": "wav" }).to_string()
}

#[tokio::test]
async fn a1_speech_is_one_leg_whose_audio_passes_byte_for_byte() {
    let cluster = TestClusterBuilder::new()
        .sim(Dialect::Vllm, Role::Prefill)
        .sim_with(recording(Dialect::Vllm, Role::Decode), "")
        .sim_with(recording(Dialect::Vllm, Role::Aggregated), "")
        .start()
        .await;
    let reply = post(&cluster, SPEECH, "application/json", speech("hi")).await;
    let audio: &[u8] = b"RIFF\xff\xff\xff\xffWAVEh\0i\0";
    // A1.14
    assert_eq!((reply.status.as_u16(), &*reply.body), (200, audio), "{reply:?}");
    assert_eq!(reply.headers["content-type"], "audio/wav");
    // A decode worker may serve whole requests, too.
    let bodies: Vec<_> =
        cluster.sims[1..].iter().flat_map(|sim| sim.recorded()).map(|seen| seen.body).collect();
    assert_eq!(bodies, [speech("hi")]);
    let reply = post(&cluster, SPEECH, "application/json", r#"{"model":"tiny"}"#).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (400, "invalid_request"));
    cluster.at_rest().await.unwrap();
    // Audio may look like anything.
    let odd: &[u8] = b"\ndata: {\"error\":{\"message\":\"x\"},\"usage\":{\"completion_tokens\":7}}\n\n\0";
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n";
    for audio in [odd, b""] {
        let body = if audio.is_empty() { Vec::new() } else { chunk(audio) };
        let acts = vec![Act::Send([head.as_slice(), &body, &chunk(b"")].concat())];
        let (_engine, cluster) = scripted(acts, |_| {}).await;
        let reply = post(&cluster, SPEECH, "application/json", speech("hi")).await;
        // A1.14
        assert_eq!((reply.status.as_u16(), &*reply.body), (200, audio));
        assert_eq!(reply.headers["content-type"], "audio/mpeg");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn a1_audio_that_is_cut_or_refused_is_an_error() {
    let cut = b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ncontent-length: 99\r\n\r\nRIFF".to_vec();
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ntransfer-encoding: chunked\r\n\r\n";
    let open = [head.as_slice(), &chunk(b"RIFF")];
    let error = json(r#"{"error":{"message":"no voice","code":400}}"#);
    let refusal = status("400 Bad Request", r#"{"error":{"message":"no voice"}}"#);
    for (acts, expected) in [
        (vec![Act::Send(cut), Act::Close], None),
        (vec![Act::Send(open.concat()), Act::Close], None),
        (vec![Act::Send(error)], Some(400)),
        (vec![Act::Send(refusal)], Some(400)),
        (vec![Act::Send(json("{\"cut\":"))], Some(502)),
        (vec![Act::Reset], Some(502)),
    ] {
        let (_engine, cluster) =
            scripted(acts.clone(), |config| config.routing.quarantine = Duration::ZERO).await;
        let reply = cluster.client.post_as("application/json", SPEECH, &[], speech("hi")).await;
        match (reply, expected) {
            // The head may have come alone: then the client's connection ends within the body (I6.16).
            (Err(_), None) => {}
            (Ok(reply), expected) => {
                assert_eq!(reply.status.as_u16(), expected.unwrap_or(502), "{acts:?}: {reply:?}");
            }
            (Err(error), Some(_)) => panic!("{acts:?}: {error}"),
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i6_vectors_in_binary_pass_byte_for_byte_with_their_metadata() {
    let is_default = |config: &mut Config| config.routing = Config::default().routing;
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ntransfer-encoding: chunked\r\n";
    let items = vec![r#"{"index":0,"start":0,"end":4,"shape":[1]}"#; 1_200].join(",");
    let long = format!(r#"{{"id":"embd-1","data":[{items}],"usage":{{"prompt_tokens":7}}}}"#);
    assert!((48_000..64_000).contains(&long.len()), "about the largest that Python's clients read");
    // Vectors may look like anything.
    let odd =
        [br#"{"error":{"message":"x"},"usage":{"prompt_tokens":9}}"#.as_slice(), &[0, 255, 13, 10]].concat();
    for (metadata, path) in [(long.as_str(), "/v1/embeddings"), ("", "/v1/embeddings"), (&long, "/pooling")] {
        let line = if metadata.is_empty() { String::new() } else { format!("Metadata: {metadata}\r\n") };
        let acts =
            [head.as_slice(), line.as_bytes(), b"x-own: 1\r\n\r\n", &chunk(&odd), &chunk(b"")].concat();
        let (engine, cluster) = scripted(vec![Act::Send(acts)], is_default).await;
        for round in 0..8 {
            let body = json!({"model": "tiny", "input": format!("x{round}"), "encoding_format": "bytes"});
            let reply = post(&cluster, path, "application/json", body.to_string()).await;
            // I6.11
            assert_eq!((reply.status.as_u16(), &*reply.body), (200, &*odd), "{path}");
            assert_eq!(reply.headers["content-type"], "application/octet-stream");
            let passed = reply.headers.get("metadata").map_or("", |value| value.to_str().unwrap());
            assert_eq!((passed, reply.headers.get("x-own")), (metadata, None));
        }
        let posts = engine.requests().iter().filter(|request| request.line.starts_with("POST")).count();
        assert_eq!(posts, 8, "none is tried again");
        cluster.at_rest().await.unwrap();
        let metrics = cluster.metrics_text().await.unwrap();
        let tokens = if metadata.is_empty() { 0 } else { 56 };
        let reported = format!("pointsman_isl_tokens_sum{{source=\"usage\"}} {tokens}.0\n");
        assert!(metrics.contains(&reported), "{metrics}");
    }
    // A page of a proxy is no answer, and neither is one that was cut.
    let page = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 3\r\n\r\n<p>".to_vec();
    let cut = [head.as_slice(), b"\r\n", &chunk(b"abcd")].concat();
    for acts in [vec![Act::Send(page)], vec![Act::Send(cut), Act::Close]] {
        let (_engine, cluster) = scripted(acts, |_| {}).await;
        let body = json!({"model": "tiny", "input": "x", "encoding_format": "bytes"}).to_string();
        let reply = post(&cluster, "/v1/embeddings", "application/json", body).await;
        assert_eq!(reply.status, StatusCode::BAD_GATEWAY);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i6_an_answer_that_is_too_large_is_no_failure_of_its_worker() {
    let answer = |mib: usize| json(&format!(r#"{{"data":["{}"]}}"#, "x".repeat(mib << 20)));
    let head =
        format!("HTTP/1.1 200 OK\r\nmetadata: {}\r\ncontent-length: 2\r\n\r\n{{}}", "x".repeat(70_000));
    let ask = async |cluster: &TestCluster, input: &str| {
        let body = json!({"model": "tiny", "input": input}).to_string();
        post(cluster, "/v1/embeddings", "application/json", body).await
    };
    let is_default = |config: &mut Config| config.routing = Config::default().routing;
    let (_engine, cluster) = scripted(vec![Act::Send(answer(80))], is_default).await;
    let reply = ask(&cluster, "x").await;
    // I6.12
    assert_eq!((reply.status.as_u16(), reply.body.len() > 80 << 20), (200, true));
    cluster.at_rest().await.unwrap();
    for (acts, named) in
        [(answer(2), "limits.answer_bytes"), (head.into_bytes(), "head has more than 65536 bytes")]
    {
        let (engine, cluster) = scripted(vec![Act::Send(acts)], |config| {
            is_default(config);
            config.limits.answer_bytes = 1 << 20;
        })
        .await;
        for round in 0..8 {
            let reply = ask(&cluster, &format!("x{round}")).await;
            assert_eq!((reply.status.as_u16(), reply.code().as_str()), (502, "bad_upstream"));
            assert!(String::from_utf8_lossy(&reply.body).contains(named), "{reply:?}");
            // I1.12
            assert_eq!(reply.headers["x-should-retry"], "false");
        }
        let posts = engine.requests().iter().filter(|request| request.line.starts_with("POST")).count();
        assert_eq!(posts, 8, "none is tried again");
        let workers = cluster.admin.get("/workers").await.unwrap().json().unwrap();
        assert_eq!(workers["workers"][0]["ineligible"], Value::Null, "{workers}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i6_a_head_that_is_too_long_is_a_failure_unless_it_may_name_vectors() {
    let head = format!("HTTP/1.1 200 OK\r\nx: {}\r\ncontent-length: 2\r\n\r\n{{}}", "x".repeat(70_000));
    let (_engine, cluster) = scripted(vec![Act::Send(head.into_bytes())], |config| {
        config.routing = Config::default().routing;
        config.routing.quarantine = Duration::ZERO;
    })
    .await;
    for round in 0..8 {
        let body = json!({"model": "tiny", "prompt": format!("x{round}"), "max_tokens": 2}).to_string();
        let reply = post(&cluster, "/v1/completions", "application/json", body).await;
        assert!(matches!(reply.status.as_u16(), 502 | 503), "{reply:?}");
    }
    let workers = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    // I6.12
    assert_ne!(workers["workers"][0]["ineligible"], Value::Null, "{workers}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i6_other_spellings_reach_the_engine_on_their_path() {
    let answer = r#"{"data":[]}"#;
    let (engine, cluster) = scripted(vec![Act::Send(json(answer))], |_| {}).await;
    for (path, body) in [
        ("/v1/tokenize", r#"{"model":"tiny","prompt":["a b","c"]}"#),
        ("/v1/tokenize", r#"{"model":"tiny","messages":[{"role":"user","content":"a"}]}"#),
        ("/v1/detokenize", r#"{"model":"tiny","tokens":[[1,2],[3]]}"#),
        ("/v1/classify", r#"{"model":"tiny","input":["a","b"]}"#),
        ("/v2/embed", r#"{"model":"tiny","texts":["a"],"input_type":"query","max_tokens":8}"#),
        ("/v2/embed", r#"{"images":["data:image/png;base64,AA=="]}"#),
    ] {
        let reply = post(&cluster, path, "application/json", body).await;
        assert_eq!((reply.status.as_u16(), &*reply.body), (200, answer.as_bytes()), "{path}");
        let seen = engine.requests().pop().unwrap();
        // I6.1
        assert_eq!((seen.line, seen.body), (format!("POST {path}"), body.to_owned()));
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i6_token_ids_run_on_one_vllm_worker_and_are_counted() {
    const PATH: &str = "/inference/v1/generate";
    let stream = [
        stream_head(),
        chunk(b"data: {\"request_id\":\"a\",\"choices\":[{\"index\":0,\"token_ids\":[7,8]}]}\n\n"),
        chunk(b"data: {\"request_id\":\"a\",\"choices\":[{\"index\":0,\"finish_reason\":\"stop\",\"token_ids\":[9]}]}\n\n"),
        chunk(b"data: [DONE]\n\n"),
        chunk(b""),
    ];
    let (engine, cluster) = scripted(vec![Act::Send(stream.concat())], |_| {}).await;
    let clean = r#"{"token_ids":[1,2,3],"sampling_params":{"max_tokens":3,"n":1},"stream":true}"#;
    let body = clean.replace("true}", r#"true,"kv_transfer_params":{"do_remote_prefill":true}}"#);
    let reply = post(&cluster, PATH, "application/json", body).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let events = String::from_utf8_lossy(&reply.body).into_owned();
    assert!(events.ends_with("\"token_ids\":[9]}]}\n\ndata: [DONE]\n\n"), "{events}");
    cluster.at_rest().await.unwrap();
    // I6.13
    assert_eq!(cluster.metric("pointsman_output_tokens_total").await.unwrap(), [3.0]);
    let seen = engine.requests().pop().unwrap();
    assert_eq!((seen.line, seen.body), (format!("POST {PATH}"), clean.to_owned()));
    for (body, named) in [
        (r#"{"sampling_params":{}}"#, "token_ids"),
        (r#"{"token_ids":[1],"sampling_params":{"n":1000}}"#, "limits.choices"),
    ] {
        let reply = post(&cluster, PATH, "application/json", body).await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        assert!(reply.status == 400 && text.contains(named), "{text}");
    }
    cluster.at_rest().await.unwrap();
    let pair = TestClusterBuilder::new().pair(Dialect::Sglang).start().await;
    let reply = post(&pair, PATH, "application/json", clean).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert!(reply.status == 400 && text.contains("only vLLM has this endpoint"), "{text}");
}

#[tokio::test]
async fn f8_a_session_of_messages_stays_on_its_worker() {
    let mut builder =
        TestClusterBuilder::new().config(|config| config.routing.session_affinity = Duration::from_secs(60));
    for _ in 0..4 {
        builder = builder.sim_with(recording(Dialect::Vllm, Role::Aggregated), "");
    }
    let cluster = builder.start().await;
    for _ in 0..8 {
        for path in ["/v1/messages", "/v1/responses", "/v1/rerank"] {
            let (_, _, body, _) = requests().into_iter().find(|(other, ..)| *other == path).unwrap();
            let reply = cluster.client.post(path, &[("x-session-id", "s1")], body).await.unwrap();
            assert_eq!(reply.status, StatusCode::OK);
            cluster.at_rest().await.unwrap();
        }
    }
    let served = cluster.sims.iter().filter(|sim| !sim.recorded().is_empty()).count();
    assert_eq!(served, 1, "all requests of the session went to one worker");
}
