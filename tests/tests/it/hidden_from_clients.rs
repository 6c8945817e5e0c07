//! What engines write for each other, and no client gets: fields of the handoff in answers and events, and
//! addresses and rooms in error texts. What the model or the client wrote stays (A5).

use std::{sync::Arc, time::Duration};

use pointsman_tests::{
    Act, CHAT, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    log::Log,
    own_process,
    raw_engine::{MODELS, chunk, json as json_answer, status, stream_head},
};
use serde_json::{Value, json};
use tokio::sync::Notify;

const SECRET: &str = "10.77.0.9";

/// The fields with which engines hand over, at one place of an answer.
fn handed_over() -> Value {
    json!({ "kv_transfer_params": { "remote_host": SECRET, "remote_port": 5600, "remote_block_ids": [1] },
        "ec_transfer_params": [{ "peer_host": SECRET }] })
}

/// An object with those fields.
fn with(mut object: Value, fields: &Value) -> Value {
    object.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    object
}

/// The same, with null in the place of each.
fn without(object: Value) -> Value {
    with(object, &json!({ "kv_transfer_params": null, "ec_transfer_params": null }))
}

/// Gives an object the fields, or nulls.
type Mark = dyn Fn(Value) -> Value;

fn stream(events: &str) -> Vec<Act> {
    vec![Act::Send([stream_head(), chunk(events.as_bytes()), chunk(b"")].concat())]
}

/// Named events, each with its type.
fn named(events: &[Value]) -> String {
    let event = |event: &Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap());
    events.iter().map(event).collect()
}

fn unnamed(event: &Value) -> String {
    format!("data: {event}\n\ndata: [DONE]\n\n")
}

/// What a client of one worker gets for an answer of it.
async fn passed(kind: &str, path: &str, is_stream: bool, answer: &str) -> String {
    let acts = if is_stream { stream(answer) } else { vec![Act::Send(json_answer(answer))] };
    let engine = RawEngine::serving(move |_| acts.clone()).await;
    let builder = TestClusterBuilder::new().config(|config| {
        config.workers = vec![engine.worker(&format!("role=aggregated,engine={kind},model=tiny"))];
    });
    let cluster = builder.start().await;
    let body = json!({ "model": "tiny", "stream": is_stream, "max_tokens": 4, "prompt": "x", "input": "x", "text": "x",
        "query": "x", "documents": ["x"], "messages": [{ "role": "user", "content": "x" }] });
    let reply = cluster.client.post(path, &[], body.to_string()).await.unwrap();
    let text = String::from_utf8(reply.body.to_vec()).unwrap();
    assert_eq!(reply.status, 200, "{path}: {text}");
    cluster.at_rest().await.unwrap();
    text
}

/// Answers of every endpoint, without the fields.
fn answers() -> Vec<(&'static str, Value)> {
    let choice = json!({ "index": 0, "text": "a", "message": { "content": "a" }, "finish_reason": "stop" });
    let usage = json!({ "input_tokens": 1, "output_tokens": 1 });
    vec![
        (CHAT, json!({ "id": "x", "choices": [choice] })),
        ("/v1/completions", json!({ "id": "x", "choices": [choice] })),
        (
            "/v1/messages",
            json!({ "id": "m", "type": "message", "content": [], "stop_reason": "end_turn", "usage": usage }),
        ),
        (
            "/v1/responses",
            json!({ "id": "resp_1", "object": "response", "status": "completed", "output": [] }),
        ),
        ("/v1/embeddings", json!({ "object": "list", "data": [] })),
        ("/v1/rerank", json!({ "id": "r", "results": [] })),
        ("/tokenize", json!({ "count": 1, "tokens": [1] })),
    ]
}

#[tokio::test]
async fn a5_fields_of_the_handoff_are_in_no_whole_answer() {
    for (path, answer) in answers() {
        let mut given = with(answer.clone(), &handed_over());
        let mut expected = without(answer);
        if let Some(choice) = given.pointer_mut("/choices/0") {
            *choice = with(choice.clone(), &handed_over());
            expected["choices"][0] = without(expected["choices"][0].clone());
        }
        let passed = passed("vllm", path, false, &given.to_string()).await;
        // A5.14
        assert_eq!(serde_json::from_str::<Value>(&passed).unwrap(), expected, "{path}");
    }
}

#[tokio::test]
async fn a5_fields_of_the_handoff_are_in_no_event() {
    let of_each =
        |wrap: &dyn Fn(&Mark) -> String| (wrap(&|object| with(object, &handed_over())), wrap(&without));
    let chat = |mark: &Mark| {
        let choice = json!({ "index": 0, "delta": { "content": "a" }, "text": "a", "finish_reason": "stop" });
        unnamed(&mark(json!({ "id": "x", "choices": [mark(choice)] })))
    };
    let response = |mark: &Mark| {
        let of =
            |status| mark(json!({ "id": "resp_1", "object": "response", "status": status, "output": [] }));
        named(&[
            mark(json!({ "type": "response.created", "sequence_number": 0, "response": of("in_progress") })),
            json!({ "type": "response.output_text.delta", "sequence_number": 1, "delta": "a" }),
            mark(json!({ "type": "response.completed", "sequence_number": 2, "response": of("completed") })),
        ])
    };
    let message = |mark: &Mark| {
        let usage = json!({ "input_tokens": 1, "output_tokens": 1 });
        let start = mark(json!({ "id": "m", "type": "message", "usage": usage }));
        named(&[
            mark(json!({ "type": "message_start", "message": start })),
            json!({ "type": "content_block_delta", "index": 0, "delta": { "type": "text_delta", "text": "a" } }),
            mark(json!({ "type": "message_delta", "delta": { "stop_reason": "end_turn" }, "usage": usage })),
            mark(json!({ "type": "message_stop" })),
        ])
    };
    let generate = |mark: &Mark| {
        let end = json!({ "type": "stop" });
        let meta = json!({ "id": "x", "finish_reason": end, "prompt_tokens": 1, "completion_tokens": 1 });
        unnamed(&mark(json!({ "text": "a", "meta_info": meta })))
    };
    for (kind, path, (given, expected)) in [
        ("vllm", CHAT, of_each(&chat)),
        ("vllm", "/v1/completions", of_each(&chat)),
        ("vllm", "/v1/responses", of_each(&response)),
        ("vllm", "/v1/messages", of_each(&message)),
        ("sglang", "/generate", of_each(&generate)),
    ] {
        assert!(given.contains(SECRET));
        // A5.14
        assert_eq!(passed(kind, path, true, &given).await, expected, "{path}");
    }
}

#[tokio::test]
async fn a5_what_the_model_or_the_client_wrote_stays() {
    let fields = with(handed_over(), &json!({ "disaggregated_params": { "a": 1 }, "prompt_token_ids": [1] }));
    let tool = json!({ "type": "tool_use", "id": "t", "name": "n", "input": { "body": fields } });
    let calls = json!([{ "id": "a", "type": "function", "function": { "name": "n", "arguments": fields } }]);
    let choice = |key: &str| json!({ "index": 0, key: { "content": null, "tool_calls": calls }, "finish_reason": "tool_calls" });
    let schema = json!({ "type": "object", "properties": fields });
    let usage = json!({ "input_tokens": 1, "output_tokens": 1 });
    for kind in ["vllm", "trtllm", "openai"] {
        for (path, answer) in [
            (
                "/v1/messages",
                json!({ "id": "m", "type": "message", "content": [tool], "stop_reason": "tool_use", "usage": usage }),
            ),
            (
                "/v1/responses",
                json!({ "id": "resp_1", "object": "response", "status": "completed", "output": [],
                "tools": [{ "type": "function", "name": "n", "parameters": schema }] }),
            ),
            (
                "/v1/rerank",
                json!({ "id": "r", "results": [{ "index": 0, "document": fields, "relevance_score": 1 }] }),
            ),
            (CHAT, json!({ "id": "x", "choices": [choice("message")] })),
        ] {
            let answer = answer.to_string();
            // I6.1, A5.14
            assert_eq!(passed(kind, path, false, &answer).await, answer, "{kind} {path}");
        }
        let event = unnamed(&json!({ "id": "x", "choices": [choice("delta")] }));
        // A5.14
        assert_eq!(passed(kind, CHAT, true, &event).await, event, "{kind}");
    }
}

/// An SGLang pair with these answers of its legs.
async fn pair(prefill: Vec<Act>, decode: Vec<Act>) -> (TestCluster, [RawEngine; 2]) {
    let script = |acts: Vec<Act>| {
        move |request: &RawRequest| match request.line.as_str() {
            "GET /v1/models" => vec![Act::Send(json_answer(MODELS))],
            line if line.starts_with("GET") || line.contains("abort") => vec![Act::Send(json_answer("{}"))],
            _ => acts.clone(),
        }
    };
    let engines = [RawEngine::start(script(prefill)).await, RawEngine::start(script(decode)).await];
    let flags = engines
        .iter()
        .zip(["prefill", "decode"])
        .map(|(engine, role)| engine.worker(&format!("role={role},engine=sglang,bootstrap_port=8998")));
    let workers = flags.collect();
    let builder = TestClusterBuilder::new().config(|config| {
        config.workers = workers;
        config.routing.retries = 0;
        config.routing.quarantine = Duration::ZERO;
    });
    (builder.start().await, engines)
}

#[tokio::test]
async fn a5_errors_of_engines_name_no_addresses_and_no_rooms() {
    let text = "Decode transfer failed with KVTransferError(bootstrap_room=4793981895866140836): Lost connection with \
                prefill instance (bootstrap_addr: 10.77.0.9:8998) at 12:30; max_tokens: 8192";
    let hidden = "KVTransferError(bootstrap_room=[hidden]): Lost connection with prefill instance (bootstrap_addr: \
                  [hidden]) at 12:30; max_tokens: 8192";
    let error = json!({ "object": "error", "message": text, "type": "InternalServerError", "code": 500 });
    let choice = json!({ "index": 0, "delta": { "content": "a" }, "message": { "content": "a" }, "finish_reason": "stop" });
    let good = json!({ "id": "x", "choices": [choice] });
    let token = good.to_string().replace("\"stop\"", "null");
    let failed = |kind: &str| vec![Act::Send(status(kind, &error.to_string()))];
    let hang = || vec![Act::Hang];
    let prefilled = || vec![Act::Send(json_answer(&good.to_string()))];
    let later = format!("data: {token}\n\ndata: {}\n\ndata: [DONE]\n\n", json!({ "error": error }));
    let first = unnamed(&json!({ "error": error }));
    for (is_stream, prefill, decode) in [
        (false, prefilled(), failed("500 Internal Server Error")),
        (false, prefilled(), failed("400 Bad Request")),
        (false, prefilled(), vec![Act::Send(json_answer(&error.to_string()))]),
        (false, failed("500 Internal Server Error"), hang()),
        (false, failed("400 Bad Request"), hang()),
        (true, stream(&unnamed(&good)), stream(&later)),
        (true, stream(&unnamed(&good)), stream(&first)),
        (true, stream(&first), hang()),
    ] {
        let (cluster, _engines) = pair(prefill, decode).await;
        let body =
            json!({ "model": "tiny", "stream": is_stream, "messages": [{ "role": "user", "content": "x" }] });
        let reply = cluster.client.post(CHAT, &[], body.to_string()).await.unwrap();
        let answer = String::from_utf8(reply.body.to_vec()).unwrap();
        // A5.2: in errors
        assert!(answer.contains(hidden) && !answer.contains(SECRET), "{is_stream} {answer}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn a5_an_address_that_the_client_sent_stays_in_an_error() {
    let text = "cannot load http://10.77.0.9:8080/cat.png, said 10.77.0.8:9000";
    let refused = json!({ "error": { "message": text, "code": 400 } }).to_string();
    let refused = vec![Act::Send(status("400 Bad Request", &refused))];
    let good = json!({ "id": "x", "choices": [{ "index": 0, "message": { "content": "a" }, "finish_reason": "stop" }] });
    let (cluster, _engines) = pair(vec![Act::Send(json_answer(&good.to_string()))], refused).await;
    let body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "see http://10.77.0.9:8080/cat.png" }] });
    let reply = cluster.client.post(CHAT, &[], body.to_string()).await.unwrap();
    // A5.20
    assert_eq!(
        reply.json().unwrap()["error"]["message"],
        "cannot load http://10.77.0.9:8080/cat.png, said [hidden]"
    );
}

#[tokio::test]
async fn a5_a_prefill_answer_that_cannot_be_read_is_not_quoted() {
    // I3.14: the last one is cut
    for answer in
        [r#"{"text":"OUTPUT","meta_info":{}}"#, "OUTPUT", r#"{"choices":"OUTPUT"}"#, r#"{"choices":[OUTPUT"#]
    {
        let (cluster, _engines) = pair(vec![Act::Send(json_answer(answer))], vec![Act::Hang]).await;
        let body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "x" }] });
        let reply = cluster.client.post(CHAT, &[], body.to_string()).await.unwrap();
        let text = String::from_utf8(reply.body.to_vec()).unwrap();
        // A5.20
        assert!(reply.status == 502 && !text.contains("OUTPUT"), "{text}");
        assert!(text.contains("the prefill answer is not valid"), "{text}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn a5_an_error_after_the_gateways_own_abort_is_not_logged() {
    own_process!();
    let log = Log::start();
    let aborted = Arc::new(Notify::new());
    let error = status(
        "500 Internal Server Error",
        r#"{"error":{"message":"KVTransferError(bootstrap_room=7): Aborted by AbortReq."}}"#,
    );
    let engine = RawEngine::serving(move |request| {
        if request.line.ends_with("/abort_request") {
            aborted.notify_one();
            return vec![Act::Pause(Duration::from_millis(50)), Act::Send(json_answer("{}"))];
        }
        let wait = request.body.contains("leaves").then(|| Act::Wait(aborted.clone()));
        wait.into_iter().chain([Act::Send(error.clone())]).collect()
    });
    let engine = engine.await;
    let builder = TestClusterBuilder::new()
        .config(|config| config.workers = vec![engine.worker("role=aggregated,engine=sglang,model=tiny")]);
    let cluster = builder.start().await;
    let ask = |id: &'static str| {
        let body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": id }] });
        let client = &cluster.client;
        async move { client.post(CHAT, &[("x-request-id", id)], body.to_string()).await.unwrap() }
    };
    let has_it = |_: &TestCluster| engine.requests().iter().any(|request| request.body.contains("leaves"));
    tokio::select! {
        reply = ask("leaves") => panic!("it was answered: {reply:?}"),
        () = async { cluster.until("the engine has it", has_it).await.unwrap() } => {}
    }
    // The client leaves.
    cluster.at_rest().await.unwrap();
    assert_eq!(ask("stays").await.status, 502);
    let text = log.text();
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("names workers")).collect();
    // A5.20
    assert!(lines.len() == 1 && lines[0].contains("suppressed=0"), "{lines:?}");
    assert!(lines[0].contains(r#"request="stays""#) && lines[0].contains("bootstrap_room=7"), "{lines:?}");
}
