//! Pairs of TensorRT-LLM engines: what the context leg may leave out of its answer, and requests that are not
//! split. Also usage of a prefill answer that cannot be read, of each engine with a completed handoff.

use std::sync::atomic::{AtomicUsize, Ordering};

use pointsman_tests::{
    Act, CHAT, COMPLETIONS, RawEngine, TestCluster, TestClusterBuilder, client::Reply,
    raw_engine::json as json_answer,
};
use serde_json::{Value, json};

/// A prefill answer with what each engine hands over.
fn context_answer() -> Value {
    let parameters = json!({ "request_type": "context_only", "ctx_request_id": 5, "first_gen_tokens": [7] });
    let nixl = json!({ "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r",
        "remote_host": "127.0.0.1", "remote_port": 1 });
    let message = json!({ "role": "assistant", "content": "a" });
    let choice = json!({ "index": 0, "text": "a", "message": message, "finish_reason": "length",
        "disaggregated_params": parameters });
    json!({ "id": "x", "model": "tiny", "choices": [choice], "kv_transfer_params": nixl })
}

/// Returns a context answer with these parameters, or without any.
fn with_parameters(parameters: Option<Value>) -> Value {
    let mut answer = context_answer();
    let choice = answer["choices"][0].as_object_mut().unwrap();
    choice.remove("disaggregated_params");
    choice.extend(parameters.map(|parameters| ("disaggregated_params".to_owned(), parameters)));
    answer
}

/// An engine that gives these answers in turn.
async fn engine(answers: Vec<Value>) -> RawEngine {
    let turn = AtomicUsize::new(0);
    RawEngine::serving(move |_| {
        let answer = &answers[turn.fetch_add(1, Ordering::Relaxed) % answers.len()];
        vec![Act::Send(json_answer(&answer.to_string()))]
    })
    .await
}

async fn generating() -> RawEngine {
    let message = json!({ "role": "assistant", "content": "good" });
    let choice = json!({ "index": 0, "text": "good", "message": message, "finish_reason": "stop" });
    engine(vec![json!({ "id": "x", "model": "tiny", "choices": [choice] })]).await
}

async fn gateway(engine: &str, workers: &[(&str, &RawEngine)]) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        for (role, worker) in workers {
            config.workers.push(worker.worker(&format!("role={role},engine={engine}")));
        }
    });
    builder.start().await
}

/// Sends a prompt, or a chat of it, with more fields.
async fn post(cluster: &TestCluster, path: &str, more: Value) -> Reply {
    let mut body = match path {
        CHAT => json!({ "model": "tiny", "messages": [{ "role": "user", "content": "hello" }] }),
        _ => json!({ "model": "tiny", "prompt": "hello" }),
    };
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    cluster.client.post(path, &[], body.to_string()).await.unwrap()
}

/// Returns the body of an engine's last request.
fn last(engine: &RawEngine) -> Value {
    serde_json::from_str(&engine.requests().last().unwrap().body).unwrap()
}

#[tokio::test]
async fn c7_a_context_answer_of_trtllm_may_lack_the_prompt_s_token_ids() {
    let cases = [
        (json!({}), json!({})),
        (json!({ "prompt_token_ids": null, "prompt_token_ids_b64": null }), json!({})),
        (json!({ "prompt_token_ids": [], "prompt_token_ids_b64": "" }), json!({})),
        (json!({ "prompt_token_ids": [1, 2] }), json!({ "prompt_token_ids": [1, 2] })),
        (json!({ "prompt_token_ids_b64": "AQAAAA==" }), json!({ "prompt_token_ids_b64": "AQAAAA==" })),
        (
            json!({ "prompt_token_ids": [1], "prompt_token_ids_b64": "AQAAAA==" }),
            json!({ "prompt_token_ids_b64": "AQAAAA==" }),
        ),
    ];
    for (ids, expected) in cases {
        let mut answer = context_answer();
        answer.as_object_mut().unwrap().extend(ids.as_object().unwrap().clone());
        let (context, generation) = (engine(vec![answer]).await, generating().await);
        let cluster = gateway("trtllm", &[("prefill", &context), ("decode", &generation)]).await;
        for path in [CHAT, COMPLETIONS] {
            let reply = post(&cluster, path, json!({})).await;
            assert_eq!(reply.status, 200, "{path} {ids}: {reply:?}");
            let sent = last(&generation);
            let parameters = &sent["disaggregated_params"];
            assert_eq!(
                (&parameters["request_type"], &parameters["ctx_request_id"]),
                (&json!("generation_only"), &json!(5))
            );
            if path == CHAT {
                assert_eq!(sent["messages"][0]["content"], "hello", "{sent}");
                for field in ["prompt_token_ids", "prompt_token_ids_b64"] {
                    // C7.8
                    assert_eq!(sent.get(field), expected.get(field), "{ids}: {sent}");
                }
            } else {
                let has_list = ids["prompt_token_ids"].as_array().is_some_and(|ids| !ids.is_empty());
                let prompt = if has_list { &ids["prompt_token_ids"] } else { &json!("hello") };
                // C7.8
                assert_eq!(&sent["prompt"], prompt, "{ids}: {sent}");
                assert!(sent.get("prompt_token_ids_b64").is_none(), "a completion has no such field: {sent}");
            }
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn c7a_parameters_of_trtllm_that_decode_cannot_use_are_not_sent() {
    let lacks = "lack `ctx_request_id`";
    let none = "has no handoff parameters";
    let cases = [
        (None, none),
        (Some(json!(null)), none),
        (Some(json!("abc")), none),
        (Some(json!([{ "ctx_request_id": 5 }])), none),
        (Some(json!({})), lacks),
        (Some(json!({ "request_type": "context_only" })), lacks),
        (Some(json!({ "request_type": "context_only", "ctx_request_id": null })), lacks),
    ];
    for (parameters, expected) in cases {
        let context = engine(vec![with_parameters(parameters.clone())]).await;
        let generation = generating().await;
        let cluster = gateway("trtllm", &[("prefill", &context), ("decode", &generation)]).await;
        let reply = post(&cluster, CHAT, json!({})).await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        // C7a.2, C7a.8
        assert!(reply.status == 502 && text.contains(expected), "{parameters:?}: {text}");
        assert_eq!((context.requests().len(), generation.requests().len()), (1, 0), "{parameters:?}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn c7_a_handoff_whose_usage_cannot_be_read_is_handed_over() {
    let details =
        |cached: Value| json!({ "prompt_tokens": 5, "prompt_tokens_details": { "cached_tokens": cached } });
    let cached = json!({ "cached_tokens": 1 });
    let usages = [
        details(json!(-1)),
        details(json!(3.0)),
        details(json!("3")),
        details(json!([])),
        json!([]),
        json!("none"),
        json!({ "prompt_tokens_details": [] }),
        json!({ "prompt_tokens_details": "none" }),
        json!({ "cache_read_input_tokens": -1 }),
        json!({ "prompt_tokens_details": cached, "input_tokens_details": cached }),
    ];
    for name in ["vllm", "trtllm"] {
        let answers = usages.iter().map(|usage| {
            let mut answer = context_answer();
            answer["usage"] = usage.clone();
            answer
        });
        let (prefill, decode) = (engine(answers.collect()).await, generating().await);
        let cluster = gateway(name, &[("prefill", &prefill), ("decode", &decode)]).await;
        for (number, usage) in (1..).zip(&usages) {
            let reply = post(&cluster, COMPLETIONS, json!({})).await;
            // C7.10
            assert_eq!(reply.status, 200, "{name} {usage}: {reply:?}");
            assert_eq!((prefill.requests().len(), decode.requests().len()), (number, number));
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn c7_a_request_for_several_sequences_is_not_split_for_trtllm() {
    let several = [json!({ "best_of": 2 }), json!({ "use_beam_search": true })];
    let one = [json!({ "best_of": 1, "use_beam_search": false }), json!({ "best_of": null })];
    let (context, generation) = (engine(vec![context_answer()]).await, generating().await);
    let pair = [("prefill", &context), ("decode", &generation)];
    let cluster = gateway("trtllm", &pair).await;
    for path in [CHAT, COMPLETIONS] {
        for more in &several {
            assert_eq!(post(&cluster, path, more.clone()).await.status, 200, "{path} {more}");
        }
    }
    // C7.9: the generation worker runs them alone.
    assert_eq!((context.requests().len(), generation.requests().len()), (0, 4));
    for more in one {
        assert_eq!(post(&cluster, CHAT, more).await.status, 200);
    }
    assert_eq!((context.requests().len(), generation.requests().len()), (2, 6));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn c7_a_prefill_answer_with_numbers_that_json_lacks_is_handed_over() {
    for name in ["vllm", "trtllm"] {
        let mut answer = context_answer();
        answer["choices"][0]["logprobs"] = json!(["here"]);
        let text = answer.to_string().replace("\"here\"", "NaN,-Infinity");
        assert!(serde_json::from_str::<Value>(&text).is_err(), "{text}");
        let prefill = RawEngine::serving(move |_| vec![Act::Send(json_answer(&text))]).await;
        let decode = generating().await;
        let cluster = gateway(name, &[("prefill", &prefill), ("decode", &decode)]).await;
        let reply = post(&cluster, COMPLETIONS, json!({ "logprobs": 2 })).await;
        // C7.11
        assert_eq!(reply.status, 200, "{name}: {reply:?}");
        assert_eq!((prefill.requests().len(), decode.requests().len()), (1, 1), "{name}");
        cluster.at_rest().await.unwrap();
    }
}
