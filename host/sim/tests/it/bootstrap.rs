//! SGLang's bootstrap handoff between two engines over real sockets, and its failures.

use std::time::Duration;

use crate::client::*;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimHandle};
use serde_json::{Value, json};

const PATH: &str = "/v1/chat/completions";

fn body(prefill: &SimHandle, room: u64) -> Value {
    json!({
        "model": "tiny", "messages": [{"role": "user", "content": "x".repeat(4 * 40)}],
        "max_tokens": 5, "ignore_eos": true, "rid": format!("{room:032x}"),
        "bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port(), "bootstrap_room": room,
    })
}

async fn pair() -> (SimHandle, SimHandle) {
    (start(Dialect::Sglang, Role::Prefill).await, start(Dialect::Sglang, Role::Decode).await)
}

#[tokio::test]
async fn legs_meet_in_their_room_and_answer_what_one_engine_answers() {
    let (prefill, decode) = pair().await;
    let single = start(Dialect::Sglang, Role::Aggregated).await;
    let body = body(&prefill, (1 << 62) + 5);
    let (first, second) = tokio::join!(post(&prefill, PATH, &body), post(&decode, PATH, &body));
    assert_eq!((first.status, second.status), (200, 200));
    let plain = json!({"model": "tiny", "messages": body["messages"], "max_tokens": 5, "ignore_eos": true});
    assert_eq!(second.answer(), post(&single, PATH, &plain).await.answer());
    let (first, second) = (first.json(), second.json());
    assert_eq!(second["id"], body["rid"]);
    assert_eq!(
        (&first["usage"]["completion_tokens"], &second["usage"]["completion_tokens"]),
        (&json!(1), &json!(5))
    );
    for sim in [&prefill, &decode] {
        assert_eq!(sim.state().handoffs.pulled, 1);
        eventually(sim, "all free", |state| state.used_blocks == 0 && state.running == 0).await;
    }
    assert_eq!(prefill.state().stranded, 0);
}

#[tokio::test]
async fn a_prefill_does_not_end_before_its_decode_came() {
    let (prefill, decode) = pair().await;
    let body = body(&prefill, 7);
    let mut first = open(&prefill, PATH, &body).await;
    assert!(silent(&mut first, 50).await, "awaiting prefill before sending decode is a deadlock");
    assert_eq!(post(&decode, PATH, &body).await.status, 200);
    read_until(&mut first, "\"finish_reason\":\"length\"").await;
}

#[tokio::test]
async fn a_decode_waits_for_its_prefill_and_streams_then() {
    let (prefill, decode) = pair().await;
    let mut body = body(&prefill, 8);
    body["stream"] = json!(true);
    let mut second = open(&decode, PATH, &body).await;
    read_until(&mut second, "200 OK").await;
    assert!(silent(&mut second, 50).await, "headers prove nothing");
    let first = post(&prefill, PATH, &body).await;
    assert!(first.complete && first.text().contains("[DONE]"));
    let text = read_until(&mut second, "data: [DONE]").await;
    assert!(text.contains(r#""finish_reason":"length","matched_stop":null"#));
}

#[tokio::test]
async fn a_prefill_that_leaves_fails_its_decode_at_once() {
    let (prefill, decode) = pair().await;
    // The prefill is long, so that its client can disconnect in the middle.
    let slow =
        start_with(Dialect::Sglang, Role::Prefill, |config| config.overhead = Duration::from_secs(60)).await;
    drop(prefill);
    let body = body(&slow, 9);
    let first = open(&slow, PATH, &body).await;
    let leaving = async {
        eventually(&slow, "the prefill runs", |state| state.running == 1).await;
        drop(first);
    };
    let (second, ()) = tokio::join!(post(&decode, PATH, &body), leaving);
    assert_eq!(second.status, 500);
    assert!(second.text().contains("the prefill of this bootstrap room failed"));
    assert_eq!(decode.state().handoffs.failed, 1);
    eventually(&slow, "all free", |state| state.used_blocks == 0 && state.client_disconnects == 1).await;
}

#[tokio::test]
async fn a_decode_that_leaves_fails_its_prefill() {
    let decode = start(Dialect::Sglang, Role::Decode).await;
    let prefill =
        start_with(Dialect::Sglang, Role::Prefill, |config| config.overhead = Duration::from_secs(3)).await;
    let body = body(&prefill, 10);
    let second = open(&decode, PATH, &body).await;
    let leaving = async {
        eventually(&prefill, "the prefill runs", |state| state.running == 1).await;
        drop(second);
    };
    let (first, ()) = tokio::join!(post(&prefill, PATH, &body), leaving);
    assert_eq!(first.status, 500);
    assert!(first.text().contains("the decode of this bootstrap room left"), "{}", first.text());
    let state = prefill.state();
    assert_eq!((state.used_blocks, state.pinned_blocks, state.stranded), (0, 0, 0), "held until the lease");
    eventually(&decode, "free", |state| state.used_blocks == 0 && state.client_disconnects == 1).await;
}

#[tokio::test]
async fn a_bootstrap_room_used_twice_fails_all_its_legs() {
    let (prefill, decode) = pair().await;
    // An id may be used once at a time, whatever the room.
    let again = |body: &Value| {
        let mut again = body.clone();
        again["rid"] = json!("again");
        again
    };
    let body = body(&prefill, 11);
    let other = again(&body);
    let (one, two) = tokio::join!(post(&prefill, PATH, &body), post(&prefill, PATH, &other));
    assert_eq!((one.status, two.status), (500, 500));
    assert_eq!(prefill.state().duplicate_rooms, 1);

    let body = self::body(&prefill, 12);
    let other = again(&body);
    let (one, two) = tokio::join!(post(&decode, PATH, &body), post(&decode, PATH, &other));
    assert_eq!((one.status, two.status), (500, 500));
    assert_eq!(prefill.state().duplicate_rooms, 2);

    let body = self::body(&prefill, 13);
    let (one, two) = tokio::join!(post(&prefill, PATH, &body), post(&decode, PATH, &body));
    assert_eq!((one.status, two.status), (200, 200));
    assert_eq!(post(&prefill, PATH, &body).await.status, 500, "used before");
    assert_eq!(post(&decode, PATH, &body).await.status, 500, "used before");
    assert_eq!(prefill.state().duplicate_rooms, 4);
}

#[tokio::test]
async fn every_wait_has_a_deadline() {
    let fast = |config: &mut pointsman_sim::SimConfig| config.speedup = 3000.0;
    let prefill = start_with(Dialect::Sglang, Role::Prefill, fast).await;
    let decode = start_with(Dialect::Sglang, Role::Decode, fast).await;
    // A prefill leg without its decode leg waits for 30 s, and a decode leg without its prefill leg for 300
    // s, accelerated 3,000 times.
    let alone = post(&prefill, PATH, &body(&prefill, 14)).await;
    assert_eq!(alone.status, 500);
    assert_eq!(prefill.state().stranded, 1);
    let alone = post(&decode, PATH, &body(&prefill, 15)).await;
    assert_eq!(alone.status, 500);
    assert_eq!(decode.state().handoffs.expired, 1);
}

#[tokio::test]
async fn a_batch_has_a_room_and_an_id_for_each_prompt() {
    let (prefill, decode) = pair().await;
    let port = prefill.bootstrap_port();
    let body = json!({
        "model": "tiny", "prompt": ["aaaabbbb", "ccccdddd"], "max_tokens": 3, "ignore_eos": true, "rid": "r",
        "bootstrap_host": vec!["127.0.0.1"; 2], "bootstrap_port": vec![port; 2], "bootstrap_room": [21, 22],
    });
    let path = "/v1/completions";
    let (first, second) = tokio::join!(post(&prefill, path, &body), post(&decode, path, &body));
    assert_eq!((first.status, second.status), (200, 200));
    let second = second.json();
    assert_eq!((second["choices"].as_array().unwrap().len(), &second["id"]), (2, &json!("r_0")));
    assert_eq!(
        (&second["usage"]["prompt_tokens"], &second["usage"]["completion_tokens"]),
        (&json!(4), &json!(6))
    );
    assert_eq!(decode.state().handoffs.pulled, 2);
    // A single value applies to the whole batch: all items have the same host and port, and rooms from this
    // number on.
    let mut single = body.clone();
    for (key, value) in [("bootstrap_host", json!("127.0.0.1")), ("bootstrap_port", json!(port))] {
        single[key] = value;
    }
    (single["bootstrap_room"], single["stream"]) = (json!(31), json!(true));
    let (_, second) = tokio::join!(post(&prefill, path, &single), post(&decode, path, &single));
    let events = second.events();
    for id in ["r_0", "r_1"] {
        assert!(events.iter().any(|event| event.contains(&format!(r#"{{"id":"{id}""#))), "{id}: {events:?}");
    }
    assert_eq!(decode.state().handoffs.pulled, 4);
    let mut short = body.clone();
    short["bootstrap_room"] = json!([41]);
    let refused = post(&prefill, path, &short).await;
    assert!(
        refused.status == 500 && refused.text().contains("list index out of range"),
        "{}",
        refused.text()
    );
}

#[tokio::test]
async fn several_choices_hang_on_a_pair_and_run_on_one_engine() {
    let (prefill, decode) = pair().await;
    let single = start(Dialect::Sglang, Role::Aggregated).await;
    let mut body = body(&prefill, 61);
    body["n"] = json!(2);
    let (mut first, mut second) = (open(&prefill, PATH, &body).await, open(&decode, PATH, &body).await);
    assert!(silent(&mut first, 150).await && silent(&mut second, 20).await);
    let plain = json!({"model": "tiny", "messages": body["messages"], "n": 2, "max_tokens": 2});
    assert_eq!(post(&single, PATH, &plain).await.json()["choices"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn room_0_is_taken_for_metadata_that_have_not_arrived() {
    let (prefill, decode) = pair().await;
    let body = body(&prefill, 0);
    let _first = open(&prefill, PATH, &body).await;
    let mut second = open(&decode, PATH, &body).await;
    assert!(silent(&mut second, 150).await);
}

#[tokio::test]
async fn the_rank_of_the_header_counts_more_than_the_body_s() {
    let single = start_with(Dialect::Sglang, Role::Aggregated, |config| config.dp_size = 2).await;
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "routed_dp_rank": 1});
    assert_eq!(post(&single, PATH, &body).await.status, 200);
    let asked = async |rank: &str| {
        let request = request_bytes(PATH, &body.to_string());
        let ranked = request.replace("x-request-id: req-1", &format!("x-data-parallel-rank: {rank}"));
        send(single.addr(), &ranked).await.unwrap()
    };
    assert_eq!(asked("0").await.status, 200);
    assert!(asked("2").await.text().contains("routed_dp_rank=2 out of range"));
    assert!(asked("first").await.text().contains("must be an integer"));
}

#[tokio::test]
async fn an_idle_engine_of_a_pair_switches_its_role() {
    let may = |config: &mut pointsman_sim::SimConfig| config.role_switch = true;
    let one = start_with(Dialect::Sglang, Role::Decode, may).await;
    let two = start_with(Dialect::Sglang, Role::Prefill, may).await;
    let fixed = start(Dialect::Sglang, Role::Decode).await;
    let switch = |role: &str| json!({"new_role": role});
    let refused = post(&fixed, "/pd_role_switch", &switch("prefill")).await;
    assert_eq!((refused.status, &refused.json()["success"]), (400, &json!(false)));
    assert_eq!(post(&one, "/pd_role_switch", &switch("cook")).await.status, 400);
    for (sim, role) in [(&one, "prefill"), (&two, "decode")] {
        assert_eq!(post(sim, "/pd_role_switch", &switch(role)).await.json()["message"], "ok");
        assert_eq!(get(sim, "/model_info").await.json()["disaggregation_mode"], role);
        assert_ne!(
            get(sim, "/server_info").await.json()["disaggregation_mode"],
            role,
            "it keeps the first one"
        );
    }
    let body = body(&one, 62);
    let (first, second) = tokio::join!(post(&one, PATH, &body), post(&two, PATH, &body));
    assert_eq!((first.status, second.status), (200, 200));
}

#[tokio::test]
async fn what_a_disaggregated_engine_refuses() {
    let (prefill, decode) = pair().await;
    let single = start(Dialect::Sglang, Role::Aggregated).await;
    let plain = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    for sim in [&prefill, &decode] {
        let refused = post(sim, PATH, &plain).await;
        assert_eq!((refused.status, refused.json()["object"].as_str()), (400, Some("error")));
        assert!(refused.text().contains("without bootstrap room id"));
        assert_eq!(sim.state().handoffs.missing, 1);
    }
    assert_eq!(post(&single, PATH, &body(&prefill, 40)).await.status, 200, "it ignores the room");
    assert_eq!(single.state().handoffs.wrong, 1, "and the model counts it");
    let mut too_big = body(&prefill, 41);
    too_big["bootstrap_room"] = json!(1_u64 << 63);
    assert_eq!(post(&prefill, PATH, &too_big).await.status, 400);
    let mut rank = body(&prefill, 42);
    rank["routed_dp_rank"] = json!(1);
    assert!(post(&prefill, PATH, &rank).await.text().contains("out of range [0, 1)"));
}

#[tokio::test]
async fn different_prompts_of_the_legs_are_detected() {
    let (prefill, decode) = pair().await;
    let first = body(&prefill, 50);
    let mut second = first.clone();
    second["messages"][0]["content"] = json!("something else");
    let (one, two) = tokio::join!(post(&prefill, PATH, &first), post(&decode, PATH, &second));
    assert_eq!((one.status, two.status), (500, 500));
    assert_eq!(decode.state().handoffs.wrong, 1);
}

#[tokio::test]
async fn an_unset_port_is_the_one_the_decode_engine_was_told() {
    let prefill = start(Dialect::Sglang, Role::Prefill).await;
    let port = prefill.bootstrap_port().unwrap();
    let decode = start_with(Dialect::Sglang, Role::Decode, |config| config.bootstrap_port = port).await;
    let mut body = body(&prefill, 60);
    body["bootstrap_port"] = Value::Null;
    let (one, two) = tokio::join!(post(&prefill, PATH, &body), post(&decode, PATH, &body));
    assert_eq!((one.status, two.status), (200, 200));
}

#[tokio::test]
async fn an_abort_needs_the_id_of_a_request_and_stops_all_that_begin_with_it() {
    let sim =
        start_with(Dialect::Sglang, Role::Aggregated, |config| config.itl = Duration::from_millis(20)).await;
    let ask = |rid: &str, stream: bool| {
        let messages = json!([{"role": "user", "content": "hi"}]);
        json!({"model": "tiny", "rid": rid, "stream": stream, "max_tokens": 100_000, "ignore_eos": true,
            "messages": messages})
    };
    let abort = async |body: Value| post(&sim, "/abort_request", &body).await;
    let mut one = open(&sim, PATH, &ask("abc", true)).await;
    let mut two = open(&sim, PATH, &ask("abc2", false)).await;
    let mut other = open(&sim, PATH, &ask("xyz", true)).await;
    eventually(&sim, "all run", |state| state.running == 3).await;
    let refused = post(&sim, PATH, &ask("xyz", false)).await;
    assert!(refused.status == 400 && refused.text().contains("Duplicate request ID"), "{}", refused.text());
    for unknown in ["", "ab", "abc2_0"] {
        assert_eq!(abort(json!({"rid": unknown, "abort_all": false})).await.status, 200);
    }
    assert_eq!(sim.state().running, 3);
    assert_eq!(abort(json!({"rid": "abc", "abort_all": false})).await.status, 200);
    assert!(read_until(&mut one, "[DONE]").await.contains(r#""finish_reason":"abort""#));
    assert!(read_until(&mut two, "\"usage\"").await.contains(r#""finish_reason":"abort""#));
    eventually(&sim, "two left", |state| state.running == 1 && state.aborted == 2).await;
    read_until(&mut other, "200 OK").await;
    assert_eq!(abort(json!({"abort_all": true})).await.status, 200);
    read_until(&mut other, "[DONE]").await;
    eventually(&sim, "all free", |state| state.used_blocks == 0 && state.aborted == 3).await;
}

#[tokio::test]
async fn the_items_of_a_batch_are_aborted_one_by_one() {
    let sim =
        start_with(Dialect::Sglang, Role::Aggregated, |config| config.itl = Duration::from_millis(20)).await;
    let batch = json!({"model": "tiny", "rid": "b", "prompt": ["one", "two"], "stream": true,
        "max_tokens": 100_000, "ignore_eos": true});
    let mut stream = open(&sim, "/v1/completions", &batch).await;
    eventually(&sim, "both run", |state| state.running == 2).await;
    for (rid, left) in [("b", 2), ("b_0", 1), ("b_1", 0)] {
        assert_eq!(post(&sim, "/abort_request", &json!({"rid": rid})).await.status, 200);
        eventually(&sim, rid, |state| state.running == left).await;
    }
    read_until(&mut stream, "[DONE]").await;
}

#[tokio::test]
async fn an_aborted_prefill_fails_its_decode() {
    let (prefill, decode) = pair().await;
    let body = body(&prefill, 70);
    let waiting = open(&prefill, PATH, &body).await;
    let slow =
        start_with(Dialect::Sglang, Role::Prefill, |config| config.overhead = Duration::from_secs(60)).await;
    drop(waiting);
    let body = self::body(&slow, 71);
    let aborting = async {
        eventually(&slow, "it runs", |state| state.running == 1).await;
        post(&slow, "/abort_request", &json!({"rid": body["rid"]})).await;
    };
    let (one, two, ()) = tokio::join!(post(&slow, PATH, &body), post(&decode, PATH, &body), aborting);
    assert_eq!((one.status, two.status), (200, 500));
    assert_eq!(one.json()["choices"][0]["finish_reason"], "abort");
    eventually(&decode, "free", |state| state.used_blocks == 0).await;
}

#[tokio::test]
async fn a_transfer_that_fails_shows_in_a_stream_as_an_error_event() {
    let (prefill, decode) = pair().await;
    decode.set_faults(vec![Fault::always(FaultKind::TransferFail)]);
    let mut body = body(&prefill, 80);
    body["stream"] = json!(true);
    let (_, two) = tokio::join!(post(&prefill, PATH, &body), post(&decode, PATH, &body));
    assert_eq!((two.status, two.complete), (200, true));
    let events = two.events();
    assert!(
        events[0].starts_with(r#"{"error":{"object":"error","message":"KV transfer failed""#),
        "{events:?}"
    );
    assert_eq!(events[1], "[DONE]");
    assert_eq!(decode.state().requests.get("decode/failed"), Some(&1));
}

#[tokio::test]
async fn facts_and_loads_are_sglangs() {
    let (prefill, _decode) = pair().await;
    let info = get(&prefill, "/server_info").await.json();
    assert_eq!(info["disaggregation_mode"], "prefill");
    assert_eq!(info["disaggregation_bootstrap_port"], json!(prefill.bootstrap_port()));
    assert_eq!((&info["dp_size"], &info["max_total_num_tokens"]), (&json!(1), &json!(448_000)));
    let loads = get(&prefill, "/v1/loads?include=core,disagg,queues,memory").await.json();
    assert_eq!(loads["loads"][0]["num_running_reqs"], 0);
    assert_eq!(get(&prefill, "/v1/models").await.json()["data"][0]["owned_by"], "sglang");
    assert_eq!(get(&prefill, "/version").await.status, 404);
    let metrics = get(&prefill, "/metrics").await.text();
    assert!(
        metrics.contains(
            "sglang:num_running_reqs{engine_type=\"prefill\",model_name=\"tiny\",tp_rank=\"0\"} 0.0"
        )
    );
    assert!(metrics.contains("sglang:token_usage{") && metrics.contains("sglang:num_queue_reqs{"));
}
