//! vLLM's NIXL handoff between two engines over real sockets, and its failures.

use crate::client::*;
use pointsman_sim::{Dialect, Fault, FaultKind, Role};
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

fn original() -> Value {
    json!({"model": "tiny", "prompt": "x".repeat(4 * 40), "max_tokens": 8, "ignore_eos": true})
}

fn prefill_body(original: &Value) -> Value {
    let mut body = original.clone();
    body["max_tokens"] = json!(1);
    body["min_tokens"] = json!(1);
    body["stream"] = json!(false);
    body["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    body
}

fn decode_body(original: &Value, params: &Value) -> Value {
    let mut body = original.clone();
    body["kv_transfer_params"] = params.clone();
    body
}

async fn pair() -> (pointsman_sim::SimHandle, pointsman_sim::SimHandle) {
    (start(Dialect::Vllm, Role::Prefill).await, start(Dialect::Vllm, Role::Decode).await)
}

#[tokio::test]
async fn both_legs_answer_what_one_engine_answers() {
    let (prefill, decode) = pair().await;
    let single = start(Dialect::Vllm, Role::Aggregated).await;
    let whole = post(&single, PATH, &original()).await;

    let first = post(&prefill, PATH, &prefill_body(&original())).await;
    assert_eq!(first.status, 200);
    let first = first.json();
    assert_eq!(first["choices"][0]["finish_reason"], "length");
    assert_eq!(first["usage"]["completion_tokens"], 1);
    let params = &first["kv_transfer_params"];
    assert_eq!(params["remote_block_ids"], json!([[1, 2, 3]]), "40 tokens in blocks of 16");
    assert_eq!(params["remote_num_tokens"], 40);
    assert_eq!(params["remote_port"], json!(prefill.bootstrap_port()));
    assert_eq!(params["remote_engine_id"].as_str().map(str::len), Some(36));
    assert!(params["remote_request_id"].as_str().unwrap().starts_with("cmpl-req-1-0-"));
    assert_eq!(params.as_object().unwrap().len(), 14);
    assert_eq!(prefill.state().pinned_blocks, 3);

    let second = post(&decode, PATH, &decode_body(&original(), params)).await;
    assert_eq!(second.status, 200);
    assert_eq!(second.answer(), whole.answer());
    let second = second.json();
    assert_eq!(second["id"], "cmpl-req-1");
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(second["kv_transfer_params"], Value::Null);
    for sim in [&prefill, &decode] {
        assert_eq!(sim.state().handoffs.pulled, 1);
        eventually(sim, "blocks are free", |state| state.used_blocks == 0 && state.pinned_blocks == 0).await;
    }
    assert_eq!(prefill.state().stranded, 0);
    assert_eq!(prefill.state().requests.get("prefill/ok"), Some(&1));
    assert_eq!(decode.state().requests.get("decode/ok"), Some(&1));
}

#[tokio::test]
async fn parameters_have_vllms_keys_in_vllms_order() {
    let prefill = start(Dialect::Vllm, Role::Prefill).await;
    let text = post(&prefill, PATH, &prefill_body(&original())).await.text();
    let keys = [
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "transfer_mode",
        "remote_prefill_cached_tokens",
    ];
    let places: Vec<usize> = keys.iter().map(|key| text.find(&format!("\"{key}\"")).expect(key)).collect();
    assert!(places.is_sorted(), "{text}");
    assert!(text.contains(r#""remote_blocks_expiry_time":null,"transfer_mode":"pull""#));
}

#[tokio::test]
async fn a_streamed_decode_has_every_token_and_usage() {
    let (prefill, decode) = pair().await;
    let params = post(&prefill, PATH, &prefill_body(&original())).await.json()["kv_transfer_params"].clone();
    let mut body = decode_body(&original(), &params);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let answer = post(&decode, PATH, &body).await;
    assert!(answer.complete && answer.head.contains("content-type: text/event-stream; charset=utf-8"));
    let events = answer.events();
    assert_eq!(events.len(), 8 + 2);
    assert_eq!(events[9], "[DONE]");
    assert!(events[8].contains(r#""choices":[],"usage":{"prompt_tokens":40,"total_tokens":48,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":0}}"#));
    let single = start(Dialect::Vllm, Role::Aggregated).await;
    assert_eq!(answer.answer(), post(&single, PATH, &original()).await.answer());
}

#[tokio::test]
async fn blocks_that_the_decode_engine_has_cached_are_not_transferred() {
    // A token takes 0.3 s. The decode engine has computed the first 32 of 33 tokens before.
    let prefill = start(Dialect::Vllm, Role::Prefill).await;
    let per_token = std::time::Duration::from_millis(300);
    let decode =
        start_with(Dialect::Vllm, Role::Decode, |config| config.transfer_per_token = per_token).await;
    let request = json!({"model": "tiny", "prompt": "x".repeat(4 * 33), "max_tokens": 2, "ignore_eos": true});
    assert_eq!(post(&decode, PATH, &request).await.status, 200);
    let params = post(&prefill, PATH, &prefill_body(&request)).await.json()["kv_transfer_params"].clone();
    let began = tokio::time::Instant::now();
    assert_eq!(post(&decode, PATH, &decode_body(&request, &params)).await.status, 200);
    let took = began.elapsed();
    assert!(per_token <= took && took < per_token * 33, "{took:?}");
}

#[tokio::test]
async fn a_second_use_fails_and_is_counted() {
    let (prefill, decode) = pair().await;
    let params = post(&prefill, PATH, &prefill_body(&original())).await.json()["kv_transfer_params"].clone();
    let body = decode_body(&original(), &params);
    assert_eq!(post(&decode, PATH, &body).await.status, 200);
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    for body in [&body, &streamed] {
        let again = post(&decode, PATH, body).await;
        assert_eq!(again.status, 500, "before headers, streaming or not");
        assert_eq!(
            again.text(),
            r#"{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}"#
        );
    }
    assert_eq!((decode.state().handoffs.pulled, decode.state().handoffs.reused), (1, 2));
    assert_eq!(decode.state().requests.get("decode/failed"), Some(&2));
    assert!(!decode.state().dead);
}

#[tokio::test]
async fn a_handoff_of_another_request_fails() {
    let (prefill, decode) = pair().await;
    let params = post(&prefill, PATH, &prefill_body(&original())).await.json()["kv_transfer_params"].clone();
    let changes = [
        ("remote_engine_id", json!("00000000-0000-4000-a000-000000000000")),
        ("remote_request_id", json!("cmpl-other-0-00000000")),
        ("remote_block_ids", json!([[1, 2]])),
    ];
    for (field, value) in changes {
        let mut wrong = params.clone();
        wrong[field] = value;
        assert_eq!(post(&decode, PATH, &decode_body(&original(), &wrong)).await.status, 500, "{field}");
    }
    let mut other = original();
    other["prompt"] = json!("y".repeat(4 * 40));
    assert_eq!(post(&decode, PATH, &decode_body(&other, &params)).await.status, 500, "another prompt");
    assert_eq!(decode.state().handoffs.wrong, 4);
    assert_eq!(prefill.state().pinned_blocks, 3, "no request consumed it");

    let mut nowhere = params.clone();
    nowhere["remote_port"] = json!(1);
    assert_eq!(post(&decode, PATH, &decode_body(&original(), &nowhere)).await.status, 500);
    assert_eq!(decode.state().handoffs.failed, 1);
    assert_eq!(post(&decode, PATH, &decode_body(&original(), &params)).await.status, 200, "still good");
}

#[tokio::test]
async fn a_lease_that_ends_strands_the_blocks_and_fails_the_decode() {
    let prefill = start_with(Dialect::Vllm, Role::Prefill, |config| config.speedup = 1000.0).await;
    let decode = start(Dialect::Vllm, Role::Decode).await;
    let params = post(&prefill, PATH, &prefill_body(&original())).await.json()["kv_transfer_params"].clone();
    eventually(&prefill, "lease of 30 ms ends", |state| state.stranded == 1 && state.pinned_blocks == 0)
        .await;
    assert_eq!(post(&decode, PATH, &decode_body(&original(), &params)).await.status, 500);
    assert_eq!(decode.state().handoffs.expired, 1);
}

#[tokio::test]
async fn incomplete_parameters_kill_the_engine() {
    let dead = r#"{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}"#;
    for field in ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"] {
        let (prefill, decode) = pair().await;
        let tolerant = start_with(Dialect::Vllm, Role::Decode, |config| config.tolerant = true).await;
        let params =
            post(&prefill, PATH, &prefill_body(&original())).await.json()["kv_transfer_params"].clone();
        let mut partial = params.clone();
        partial.as_object_mut().unwrap().remove(field);

        let answer = post(&decode, PATH, &decode_body(&original(), &partial)).await;
        assert_eq!((answer.status, answer.text().as_str()), (500, dead), "{field}");
        assert!(decode.state().dead);
        assert_eq!(get(&decode, "/health").await.status, 500);
        assert_eq!(post(&decode, PATH, &original()).await.text(), dead);
        assert_eq!(get(&decode, "/sim/state").await.json()["handoffs"]["missing"], 1);

        assert_eq!(post(&tolerant, PATH, &decode_body(&original(), &partial)).await.status, 500);
        assert_eq!(get(&tolerant, "/health").await.status, 200);
        assert_eq!(post(&tolerant, PATH, &decode_body(&original(), &params)).await.status, 200);
    }
}

#[tokio::test]
async fn a_streaming_prefill_returns_nothing_and_pins_all_the_same() {
    let prefill = start(Dialect::Vllm, Role::Prefill).await;
    let mut body = prefill_body(&original());
    body["stream"] = json!(true);
    let answer = post(&prefill, PATH, &body).await;
    assert_eq!(answer.status, 200);
    assert!(!answer.text().contains("kv_transfer_params") && !answer.text().contains("remote_"));
    assert_eq!(prefill.state().pinned_blocks, 3);
}

#[tokio::test]
async fn a_prefill_that_did_not_end_on_its_length_hands_nothing_on() {
    let prefill = start(Dialect::Vllm, Role::Prefill).await;
    prefill.set_faults(vec![Fault::always(FaultKind::FirstTokenEos)]);
    let answer = post(&prefill, PATH, &prefill_body(&original())).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!((&answer["choices"][0]["text"], &answer["kv_transfer_params"]), (&json!(""), &Value::Null));
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    eventually(&prefill, "all free", |state| state.used_blocks == 0 && state.pinned_blocks == 0).await;
}

#[tokio::test]
async fn legs_are_checked_against_the_role() {
    let (prefill, decode) = pair().await;
    let single = start(Dialect::Vllm, Role::Aggregated).await;
    assert_eq!(post(&decode, PATH, &prefill_body(&original())).await.status, 400);
    assert_eq!(post(&single, PATH, &prefill_body(&original())).await.status, 400);
    let params = post(&prefill, PATH, &prefill_body(&original())).await.json()["kv_transfer_params"].clone();
    let wrong = post(&prefill, PATH, &decode_body(&original(), &params)).await;
    assert!(wrong.text().contains("a decode leg came to an engine whose role is prefill"));
    let mut both = prefill_body(&original());
    both["kv_transfer_params"]["do_remote_prefill"] = json!(true);
    assert_eq!(post(&prefill, PATH, &both).await.status, 400);
    let mut options = prefill_body(&original());
    options["stream_options"] = json!({"include_usage": true});
    let refused = post(&prefill, PATH, &options).await;
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("Stream options can only be defined when `stream=True`"));
    // Without parameters, the decode engine computes the prompt itself.
    assert_eq!(post(&decode, PATH, &original()).await.status, 200);
    assert_eq!(decode.state().requests.get("aggregated/ok"), Some(&1));
}

#[tokio::test]
async fn faults_of_the_handoff_itself() {
    let (prefill, decode) = pair().await;
    prefill
        .set_faults(vec![Fault::always(FaultKind::PartialParams { field: "remote_block_ids".to_owned() })]);
    let partial = post(&prefill, PATH, &prefill_body(&original())).await.json()["kv_transfer_params"].clone();
    assert!(partial.get("remote_block_ids").is_none() && partial.get("remote_engine_id").is_some());
    prefill.set_faults(Vec::new());
    decode.set_faults(vec![Fault::always(FaultKind::TransferFail)]);
    let params = post(&prefill, PATH, &prefill_body(&original())).await.json()["kv_transfer_params"].clone();
    assert_eq!(post(&decode, PATH, &decode_body(&original(), &params)).await.status, 500);
    assert_eq!(decode.state().handoffs.failed, 1);
}

#[tokio::test]
async fn side_channel_survives_a_prefill_engine_that_was_replaced() {
    let first = start(Dialect::Vllm, Role::Prefill).await;
    let decode = start(Dialect::Vllm, Role::Decode).await;
    let params = post(&first, PATH, &prefill_body(&original())).await.json()["kv_transfer_params"].clone();
    assert_eq!(post(&decode, PATH, &decode_body(&original(), &params)).await.status, 200);
    let port = first.bootstrap_port().unwrap();
    first.kill().await;
    assert_eq!(
        post(&decode, PATH, &decode_body(&original(), &params)).await.status,
        500,
        "dead side channel"
    );
    let second = start_with(Dialect::Vllm, Role::Prefill, |config| config.side_port = port).await;
    assert_eq!(
        post(&decode, PATH, &decode_body(&original(), &params)).await.status,
        500,
        "another engine now"
    );
    assert_eq!((decode.state().handoffs.failed, decode.state().handoffs.wrong), (1, 1));
    let params = post(&second, PATH, &prefill_body(&original())).await.json()["kv_transfer_params"].clone();
    assert_eq!(post(&decode, PATH, &decode_body(&original(), &params)).await.status, 200);
}
