//! Errors in answers with status 200, and what may stand before the first event of a stream. An overload is
//! back-pressure (I13), and an error before the first event is tried elsewhere (I2).

use std::time::Duration;

use pointsman_gateway::config::SlotEntry;
use pointsman_routing::{NativeMode, SlotKind};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{chunk, json, status, stream_head},
};
use pointsman_workers::WorkerSpec;
use serde_json::json as value;

pub(crate) const LAST: &str = r#"data: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}"#;

pub(crate) async fn engine(acts: Vec<Act>) -> RawEngine {
    RawEngine::serving(move |_| acts.clone()).await
}

/// A gateway that asks these engines in turn.
pub(crate) async fn gateway(engines: &[&RawEngine]) -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            let entry = SlotEntry { native: Some(NativeMode::RoundRobin), ..SlotEntry::default() };
            config.policies.slots.insert(SlotKind::Aggregated, entry);
            for (id, engine) in (1..).zip(engines) {
                let url = format!("url=http://{}", engine.address);
                let flag = format!("id={id},role=aggregated,engine=openai,{url}");
                config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
            }
        })
        .start()
        .await
}

/// A stream of these bytes. `late`: the head comes some time before them.
pub(crate) fn stream(text: &str, late: bool) -> Vec<Act> {
    let pause = if late { Duration::from_millis(40) } else { Duration::ZERO };
    let body = [chunk(text.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
    if late {
        return vec![Act::Send(stream_head()), Act::Pause(pause), Act::Send(body)];
    }
    vec![Act::Send([stream_head(), body].concat())]
}

pub(crate) fn good() -> Vec<Act> {
    stream(&format!("{LAST}\n\ndata: [DONE]\n\n"), false)
}

pub(crate) async fn ask(cluster: &TestCluster, path: &str, stream: bool) -> Reply {
    let body = value!({"model": "tiny", "prompt": "a", "input": "a", "store": false, "max_tokens": 5,
        "messages": [{"role": "user", "content": "a"}], "stream": stream});
    cluster.client.post(path, &[], body.to_string()).await.unwrap()
}

pub(crate) fn told(reply: &Reply) -> (u16, String) {
    (reply.status.as_u16(), String::from_utf8_lossy(&reply.body).into_owned())
}

fn retry_after(reply: &Reply) -> Option<&str> {
    reply.headers.get("retry-after").map(|value| value.to_str().unwrap())
}

async fn paused(cluster: &TestCluster) -> f64 {
    cluster.metric(r#"pointsman_worker_paused{worker="1""#).await.unwrap().into_iter().sum()
}

#[tokio::test]
async fn i13_an_overload_that_is_named_in_an_answer_is_back_pressure() {
    for (error, status) in [
        (r#"{"error":{"message":"full","type":"overloaded_error"}}"#, 503),
        (r#"{"error":{"message":"full","type":"ServiceUnavailableError","code":null}}"#, 503),
        (r#"{"error":{"message":"full","type":"server_error","code":"rate_limit_exceeded"}}"#, 429),
        (r#"{"error":{"message":"full","code":503.0}}"#, 503),
        (r#"{"object":"error","message":"full","type":"Service Unavailable"}"#, 503),
    ] {
        let first = engine(vec![Act::Send(json(error))]).await;
        let cluster = gateway(&[&first]).await;
        for _ in 0..3 {
            let reply = ask(&cluster, COMPLETIONS, false).await;
            // I1.4, I13.4, I13.5
            assert_eq!(reply.status.as_u16(), status, "{error}: {reply:?}");
            assert!(retry_after(&reply).is_some() || status == 429, "{error}: {reply:?}");
        }
        // I13.3
        assert_eq!((first.requests().len(), paused(&cluster).await), (1, 1.0), "{error}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i13_an_overload_that_is_named_in_a_first_event_is_tried_elsewhere() {
    let chat = r#"data: {"error":{"message":"full","type":"overloaded_error"}}"#;
    let message = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\
         \"message\":\"full\"}}";
    let response = "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"object\":\
         \"response\",\"status\":\"failed\",\"error\":{\"code\":\"server_overloaded\",\"message\":\"full\"}}}";
    let stopped = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\
         \"end_turn\"}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    let completed = "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{}}\n\n";
    let done = format!("{LAST}\n\ndata: [DONE]\n\n");
    for (path, error, whole) in [
        (COMPLETIONS, chat, done.as_str()),
        ("/v1/messages", message, stopped),
        ("/v1/responses", response, completed),
    ] {
        for late in [false, true] {
            let engines =
                [engine(stream(&format!("{error}\n\n"), late)).await, engine(stream(whole, false)).await];
            let cluster = gateway(&[&engines[0], &engines[1]]).await;
            for _ in 0..2 {
                // I2.2, I13.1
                assert_eq!(told(&ask(&cluster, path, true).await), (200, whole.to_owned()), "{path} {late}");
            }
            // I13.3
            assert_eq!((engines[0].requests().len(), paused(&cluster).await), (1, 1.0), "{path} {late}");
            cluster.at_rest().await.unwrap();
        }
    }
    // A response that failed for another reason is the client's.
    let failed = response.replace("server_overloaded", "server_error") + "\n\n";
    let only = engine(stream(&failed, false)).await;
    let cluster = gateway(&[&only]).await;
    // I6.4
    assert_eq!(told(&ask(&cluster, "/v1/responses", true).await), (200, failed));
}

#[tokio::test]
async fn i1_an_error_in_an_answer_has_the_status_that_its_type_or_code_names() {
    for (kind, code, expected) in [
        ("BadRequestError", "null", 400),
        ("invalid_request_error", "\"context_length_exceeded\"", 400),
        ("invalid_request_error", "\"model_not_found\"", 404),
        ("NotFoundError", "null", 404),
        ("not_found_error", "\"\"", 404),
        ("authentication_error", "null", 401),
        ("permission_error", "null", 403),
        ("request_too_large", "null", 413),
        ("UnprocessableEntityError", "\"422.0\"", 422),
        ("Unprocessable Entity", "0", 422),
        ("InternalServerError", "null", 502),
        ("x", "503.5", 502),
    ] {
        let error = format!(r#"{{"error":{{"message":"it is so","type":"{kind}","code":{code}}}}}"#);
        let only = engine(vec![Act::Send(json(&error))]).await;
        let cluster = gateway(&[&only]).await;
        let reply = ask(&cluster, COMPLETIONS, false).await;
        // I1.4
        assert_eq!(reply.status.as_u16(), expected, "{error}: {reply:?}");
        assert!(told(&reply).1.contains("it is so"), "{error}: {reply:?}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i6_an_error_event_of_a_named_stream_has_the_engine_s_code_and_the_next_number() {
    let event = |kind: &str, more: &str| format!("event: {kind}\ndata: {{\"type\":\"{kind}\"{more}}}\n\n");
    // What only announces a response waits for an event that does more (I3.17).
    let begins = event("response.created", r#","sequence_number":5,"response":{}"#)
        + &event("response.output_text.delta", r#","sequence_number":6,"delta":"a""#);
    let error = event("error", r#","sequence_number":7,"code":"out_of_blocks","message":"none is left""#);
    let message = event("message_start", r#","message":{}"#);
    let failed = event("error", r#","error":{"type":"out_of_blocks","message":"none is left"}"#);
    for (path, events) in [("/v1/responses", begins + &error), ("/v1/messages", message + &failed)] {
        // The client has the head before the error comes.
        let (head, wait) = (Act::Send(stream_head()), Act::Pause(Duration::from_millis(500)));
        let body = Act::Send([chunk(events.as_bytes()), chunk(b"")].concat());
        let only = engine(vec![head, wait, body]).await;
        let cluster = gateway(&[&only]).await;
        let (_, text) = told(&ask(&cluster, path, true).await);
        let last = text.rsplit("data: ").next().unwrap();
        let last: serde_json::Value = serde_json::from_str(last.trim()).unwrap();
        // I1.4
        assert_eq!(last["error"]["code"], "out_of_blocks", "{text}");
        let said = "the engine ended its answer with the error `out_of_blocks`: none is left";
        assert_eq!(last["error"]["message"], said, "{text}");
        if path == "/v1/responses" {
            // I6.5
            assert_eq!((&last["sequence_number"], &last["code"]), (&value!(7), &value!("out_of_blocks")));
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i2_a_first_event_that_is_an_error_in_any_form_is_tried_elsewhere() {
    for error in [
        "event: error\ndata: out of blocks\n\n",
        "event: error\ndata: {\"message\":\"out of blocks\"}\n\n",
        "event: error\ndata: {\"object\":\"error\",\"message\":\"out of blocks\"}\n\n",
        "data: {\"object\":\"error\",\"message\":\"out of blocks\",\"code\":500}\n\n",
        "data: {\"error\":\"out of blocks\"}\n\n",
        ": hello\n\nevent: error\r\ndata: \"out of blocks\"\r\n\r\n",
    ] {
        for late in [false, true] {
            let engines = [engine(stream(error, late)).await, engine(good()).await];
            let cluster = gateway(&[&engines[0], &engines[1]]).await;
            for _ in 0..2 {
                let (status, text) = told(&ask(&cluster, COMPLETIONS, true).await);
                // I2.2
                let whole = format!("{LAST}\n\ndata: [DONE]\n\n");
                assert_eq!(
                    (status, text.trim_start_matches(": hello\n\n")),
                    (200, whole.as_str()),
                    "{error}"
                );
            }
            assert!(!engines[0].requests().is_empty(), "it was asked");
            cluster.at_rest().await.unwrap();
            // Without another worker, the client gets the engine's own words.
            let cluster = gateway(&[&engines[0]]).await;
            let (status, text) = told(&ask(&cluster, COMPLETIONS, true).await);
            // I1.5
            assert_eq!(status, if late { 200 } else { 502 }, "{error}: {text}");
            assert!(text.contains("out of blocks") && text.contains("bad_upstream"), "{error}: {text}");
            cluster.at_rest().await.unwrap();
        }
    }
}

#[tokio::test]
async fn i3_an_event_that_is_named_error_ends_a_stream_of_events_without_a_name() {
    for error in ["out of blocks", "{\"message\":\"out of blocks\",\"code\":500}", "\"out of blocks\""] {
        let token = "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\n";
        let events = format!("{token}{token}event: error\ndata: {error}\n\ndata: [DONE]\n\n");
        let only = engine(stream(&events, false)).await;
        let cluster = gateway(&[&only]).await;
        let (status, text) = told(&ask(&cluster, COMPLETIONS, true).await);
        // I3.18, I1.2
        let rest = text.strip_prefix(&token.repeat(2)).unwrap_or_else(|| panic!("{text}"));
        assert!(
            rest.starts_with("data: {\"error\":") && rest.matches("data:").count() == 1,
            "{error}: {text}"
        );
        assert!(status == 200 && rest.contains("out of blocks") && rest.contains("bad_upstream"), "{text}");
        let failed = cluster.metric(r#"pointsman_legs_total{leg="aggregated",engine="openai",outcome="ok""#);
        assert_eq!(failed.await.unwrap().iter().sum::<f64>(), 0.0);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i3_keep_alives_before_the_first_event_do_not_end_a_stream() {
    let whole = format!("{LAST}\n\ndata: [DONE]\n\n");
    for (alive, passed) in [
        (": ping\n\n", ": ping\n\n"),
        ("data: ping\n\n", ""),
        ("data:ping\r\n\r\n", ""),
        ("event: ping\ndata: ping\n\n", "event: ping\ndata: ping\n\n"),
        (": a\n\ndata: keep-alive\n\n", ": a\n\n"),
    ] {
        let only = engine(stream(&format!("{alive}{whole}"), true)).await;
        let cluster = gateway(&[&only]).await;
        // I3.10
        assert_eq!(
            told(&ask(&cluster, COMPLETIONS, true).await),
            (200, format!("{passed}{whole}")),
            "{alive}"
        );
        // An engine that fails behind them is left for another one.
        let failing = stream(&format!("{alive}data: {{\"error\":{{\"message\":\"x\"}}}}\n\n"), true);
        let engines = [engine(failing).await, engine(good()).await];
        let cluster = gateway(&[&engines[0], &engines[1]]).await;
        for _ in 0..2 {
            let (status, text) = told(&ask(&cluster, COMPLETIONS, true).await);
            // I2.2
            assert!(status == 200 && text.ends_with(&whole) && !text.contains("error"), "{alive}: {text}");
        }
        assert!(!engines[0].requests().is_empty(), "it was asked");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i13_a_time_in_fractions_or_milliseconds_is_an_engine_s_own_time() {
    for (headers, after) in [
        ("Retry-After: 1.5", "2"),
        ("retry-after-ms: 2500", "3"),
        ("Retry-After: 9\r\nRetry-After-Ms: 1200.5", "2"),
        ("Retry-After: 4\r\nretry-after-ms: soon", "4"),
    ] {
        for (line, code) in [("503 Service Unavailable", 503), ("429 Too Many Requests", 429)] {
            let refusal = status(&format!("{line}\r\n{headers}"), "");
            let only = engine(vec![Act::Send(refusal)]).await;
            let cluster = gateway(&[&only]).await;
            let reply = ask(&cluster, COMPLETIONS, false).await;
            // I13.2, I13.4, I1.3
            assert_eq!((reply.status.as_u16(), retry_after(&reply)), (code, Some(after)), "{headers}");
            let text = told(&reply).1;
            assert!(!text.contains(": ;") && !text.contains(".."), "{text}");
            // The pause has the length that the engine named, and not a rounded one.
            let snapshot = cluster.gateway.state().registry.snapshot();
            let pause = snapshot.workers()[0].pause().unwrap().left;
            assert!(pause < Duration::from_secs(after.parse().unwrap()), "{headers} {pause:?}");
        }
    }
}

#[tokio::test]
async fn i4_a_refusal_of_a_poison_request_says_how_long_in_whole_seconds() {
    let engines = [engine(vec![Act::Reset]).await, engine(vec![Act::Reset]).await];
    let cluster = gateway(&[&engines[0], &engines[1]]).await;
    for _ in 0..2 {
        let (status, text) = told(&ask(&cluster, COMPLETIONS, false).await);
        // I4.2
        assert!(status == 502 && text.contains("refused for 60 s"), "{text}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
