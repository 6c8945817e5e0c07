//! Answers with status 200 that end because the engine gave the request up: it pauses, sleeps, or was told to
//! abort all requests.

use std::time::Duration;

use pointsman_tests::{
    Act, CHAT, COMPLETIONS, MESSAGES, RawEngine, TestCluster, TestClusterBuilder,
    raw_engine::{DONE, chunk, json, stream_head},
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json as value};

use crate::errors_in_answers::{LAST, ask, engine, gateway, good, stream, told};

async fn legs(cluster: &TestCluster, outcome: &str) -> f64 {
    let samples = cluster.metric("pointsman_legs_total{").await.unwrap();
    let counted = cluster
        .metric(&format!("pointsman_legs_total{{leg=\"aggregated\",engine=\"openai\",outcome=\"{outcome}\""))
        .await;
    assert!(!samples.is_empty());
    counted.unwrap().into_iter().sum()
}

/// An event of a completion, or of a chat.
fn event(path: &str, text: &str, finish: &str) -> String {
    let text = if path == CHAT {
        format!(r#""delta":{{"content":"{text}"}}"#)
    } else {
        format!(r#""text":"{text}""#)
    };
    let finish = if finish.is_empty() { "null".to_owned() } else { format!("\"{finish}\"") };
    let choice = format!(r#"{{"index":0,{text},"finish_reason":{finish}}}"#);
    format!("data: {{\"id\":\"x\",\"created\":1,\"model\":\"tiny\",\"choices\":[{choice}]}}\n\n")
}

/// The first event of a chat.
fn role() -> String {
    event(CHAT, "", "").replace(r#"{"content"#, r#"{"role":"assistant","content"#)
}

/// Answers of an engine that gives the request up before its first token.
fn given_up(finish: &str) -> Vec<(&'static str, bool, Vec<Act>)> {
    let whole = |choice: &str| {
        let choice = format!(r#"{{"index":0,{choice},"finish_reason":"{finish}"}}"#);
        vec![Act::Send(json(&format!(r#"{{"id":"c","choices":[{choice}]}}"#)))]
    };
    let (end, chat_end) = (event(COMPLETIONS, "", finish), event(CHAT, "", finish));
    let late = vec![
        Act::Send([stream_head(), chunk(role().as_bytes())].concat()),
        Act::Pause(Duration::from_millis(40)),
        Act::Send([chunk((chat_end.clone() + DONE).as_bytes()), chunk(b"")].concat()),
    ];
    vec![
        (COMPLETIONS, false, whole(r#""text":"half""#)),
        (CHAT, false, whole(r#""message":{"content":"half"}"#)),
        (COMPLETIONS, true, stream(&(end.clone() + DONE), false)),
        (COMPLETIONS, true, stream(&(end + DONE), true)),
        (CHAT, true, stream(&(role() + &chat_end + DONE), false)),
        (CHAT, true, late),
    ]
}

#[tokio::test]
async fn i3_a_request_that_an_engine_gave_up_before_a_token_is_tried_elsewhere() {
    for (finish, cases) in [("abort", 6), ("error", 1), ("cancelled", 1), ("timeout", 1)] {
        for (path, streams, acts) in given_up(finish).into_iter().take(cases) {
            let whole = format!("{LAST}\n\n{DONE}");
            let answer = r#"{"id":"c","choices":[{"index":0,"text":"good","finish_reason":"stop"}]}"#;
            let (other, expected) =
                if streams { (good(), whole.as_str()) } else { (vec![Act::Send(json(answer))], answer) };
            let engines = [engine(acts).await, engine(other).await];
            let cluster = gateway(&[&engines[0], &engines[1]]).await;
            for _ in 0..3 {
                // I3.16, I3.17
                assert_eq!(told(&ask(&cluster, path, streams).await), (200, expected.to_owned()), "{finish}");
            }
            let asked = u32::try_from(engines[0].requests().len()).unwrap();
            assert!(asked > 0, "it was asked");
            cluster.at_rest().await.unwrap();
            // I3.16
            let counted = (legs(&cluster, "gave_up").await, legs(&cluster, "ok").await);
            assert_eq!(counted, (f64::from(asked), 3.0), "{path} {finish}");
            // Without another worker, the client is told.
            let cluster = gateway(&[&engines[0]]).await;
            let (status, text) = told(&ask(&cluster, path, streams).await);
            // I3.16, I1.2
            assert!(status == 502 || (streams && status == 200), "{text}");
            assert!(text.contains(&format!("the finish reason `{finish}`")), "{text}");
            assert!(!text.contains("[DONE]") && !text.contains("half"), "{text}");
            cluster.at_rest().await.unwrap();
        }
    }
}

/// An engine that gives up each stream after two tokens, and generates the rest of others.
async fn gives_up_midway(path: &'static str) -> RawEngine {
    RawEngine::serving(move |request| {
        if request.body.contains("one two") {
            let rest = event(path, " three", "stop") + DONE;
            return vec![Act::Send([stream_head(), chunk(rest.as_bytes()), chunk(b"")].concat())];
        }
        let begin = if path == CHAT { role() } else { String::new() } + &event(path, "one", "");
        let end = event(path, " two", "") + &event(path, "", "abort") + DONE;
        vec![
            Act::Send([stream_head(), chunk(begin.as_bytes())].concat()),
            Act::Pause(Duration::from_millis(20)),
            Act::Send([chunk(end.as_bytes()), chunk(b"")].concat()),
        ]
    })
    .await
}

/// A gateway before two vLLM engines that give up each stream after two tokens.
async fn midway(path: &'static str) -> (TestCluster, [RawEngine; 2]) {
    let engines = [gives_up_midway(path).await, gives_up_midway(path).await];
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            for engine in &engines {
                config.workers.push(engine.worker("role=aggregated,engine=vllm"));
            }
        })
        .start()
        .await;
    (cluster, engines)
}

async fn events_of(cluster: &TestCluster, path: &str, more: Value) -> Vec<String> {
    let mut body = value!({"model": "tiny", "stream": true, "max_tokens": 9, "prompt": "count",
        "messages": [{"role": "user", "content": "count"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.as_object_mut().unwrap().remove(if path == CHAT { "prompt" } else { "messages" });
    let stream = cluster.client.stream(path, &[], body.to_string()).await.unwrap();
    stream.all().await.unwrap()
}

#[tokio::test]
async fn i14_a_stream_that_an_engine_gave_up_is_continued() {
    for path in [CHAT, COMPLETIONS] {
        let (cluster, engines) = midway(path).await;
        let events = events_of(&cluster, path, value!({})).await.concat();
        // I3.16, I14.5
        let at = |text: &str| events.find(text).unwrap_or_else(|| panic!("no {text}: {events}"));
        assert!(
            at("one") < at(" two") && at(" two") < at(" three") && events.ends_with("[DONE]"),
            "{events}"
        );
        assert!(!events.contains("abort") && !events.contains("\"error\""), "{events}");
        assert_eq!(engines.each_ref().map(|engine| engine.requests().len()), [1, 1]);
        cluster.at_rest().await.unwrap();
        let continued = r#"pointsman_continuations_total{reason="continued""#;
        // I14.9
        assert_eq!(cluster.metric(continued).await.unwrap().iter().sum::<f64>(), 1.0);
    }
}

#[tokio::test]
async fn i3_a_stream_that_an_engine_gave_up_and_that_is_not_continued_ends_with_an_error() {
    for path in [CHAT, COMPLETIONS] {
        let (cluster, _engines) = midway(path).await;
        let events = events_of(&cluster, path, value!({"seed": 7, "temperature": 1})).await;
        let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
        // I3.16, I1.2
        assert_eq!(last["error"]["code"], "bad_upstream", "{events:?}");
        assert!(last["error"]["message"].as_str().unwrap().contains("`abort`"), "{last}");
        assert!(!events[..events.len() - 1].concat().contains("abort"), "{events:?}");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i3_a_leg_that_the_gateway_aborted_is_no_failure_of_its_engine() {
    let ends = |head: bool| {
        let abort = event(COMPLETIONS, "", "abort") + DONE;
        RawEngine::serving(move |request| {
            if request.line.ends_with("/abort_request") {
                return vec![Act::Send(json("{}"))];
            }
            let answer = [stream_head(), chunk(abort.as_bytes()), chunk(b"")].concat();
            let begin = if head { answer[..stream_head().len()].to_vec() } else { Vec::new() };
            let rest = answer[begin.len()..].to_vec();
            vec![Act::Send(begin), Act::Pause(Duration::from_secs(1)), Act::Send(rest)]
        })
    };
    for head in [false, true] {
        let (prefill, decode) = (ends(head).await, ends(head).await);
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                for (role, engine) in [("prefill", &prefill), ("decode", &decode)] {
                    let port = if role == "prefill" { ",bootstrap_port=1" } else { "" };
                    let flag = format!("role={role},engine=sglang,url=http://{}{port}", engine.address);
                    config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
                }
            })
            .start()
            .await;
        let body = r#"{"model":"tiny","prompt":"a","max_tokens":5,"stream":true}"#;
        let leaving = cluster.client.post(COMPLETIONS, &[], body);
        let sent = async {
            let both = |_: &TestCluster| !prefill.requests().is_empty() && !decode.requests().is_empty();
            cluster.until("both legs are sent", both).await.unwrap();
            // The heads arrive.
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        tokio::select! {
            reply = leaving => panic!("it was answered: {reply:?}"),
            () = sent => {}
        }
        // The client leaves.
        cluster.at_rest().await.unwrap();
        let counted = async |outcome| {
            let both = cluster.metric("pointsman_legs_total{").await.unwrap().iter().sum::<f64>();
            let mut these = 0.0;
            for leg in ["prefill", "decode"] {
                let series =
                    format!("pointsman_legs_total{{leg=\"{leg}\",engine=\"sglang\",outcome=\"{outcome}\"");
                these += cluster.metric(&series).await.unwrap().iter().sum::<f64>();
            }
            (these, both)
        };
        // E1.4, F4.16
        assert_eq!(counted("cancelled").await, (2.0, 2.0), "head: {head}");
    }
}

#[tokio::test]
async fn i3_only_the_finish_reason_of_a_choice_says_that_the_engine_gave_up() {
    for reason in ["abort", "error", "timeout"] {
        let part = value!({ "arguments": { "finish_reason": reason } });
        let choice = |key: &str| {
            value!({ "index": 0, key: { "content": "a", "annotations": [part] }, "x": part,
            "text": "a", "finish_reason": "stop" })
        };
        for (path, key) in [(CHAT, "message"), (COMPLETIONS, "part")] {
            let whole = value!({ "id": "c", "finish_reason": reason, "choices": [choice(key)], "y": [part] })
                .to_string();
            let engine = engine(vec![Act::Send(json(&whole))]).await;
            let cluster = gateway(&[&engine]).await;
            // I3.16
            assert_eq!(told(&ask(&cluster, path, false).await), (200, whole), "{path}");
        }
        let events =
            format!("data: {}\n\n{DONE}", value!({ "id": "c", "choices": [choice("delta")], "y": [part] }));
        let engine = engine(stream(&events, false)).await;
        let cluster = gateway(&[&engine]).await;
        // I3.16
        assert_eq!(told(&ask(&cluster, CHAT, true).await), (200, events));
    }
}

/// The stream of a message with this text, as vLLM ends it for a reason.
fn message_events(text: Option<&str>, reason: &str) -> String {
    let start = value!({ "id": "m", "type": "message", "content": [], "stop_reason": null });
    let block = value!({ "type": "content_block_start", "index": 0, "content_block": { "type": "text", "text": "" } });
    let delta = |text| value!({ "type": "content_block_delta", "index": 0, "delta": { "type": "text_delta", "text": text } });
    let end = value!({ "type": "content_block_stop", "index": 0 });
    let blocks = text.map(|text| vec![block, delta(text), end]).unwrap_or_default();
    let reason: Value = serde_json::from_str(reason).unwrap();
    let usage = value!({ "input_tokens": 3, "output_tokens": 1 });
    [value!({ "type": "message_start", "message": start })]
        .into_iter()
        .chain(blocks)
        .chain([
            value!({ "type": "message_delta", "delta": { "stop_reason": reason }, "usage": usage }),
            value!({ "type": "message_stop" }),
        ])
        .map(|event| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap()))
        .collect()
}

#[tokio::test]
async fn i3_a_message_without_a_stop_reason_was_given_up() {
    let whole = |text: &str, reason: &str| {
        format!(
            r#"{{"id":"m","type":"message","role":"assistant","content":[{{"type":"text","text":"{text}"}}]{reason}}}"#
        )
    };
    let good = whole("good", r#","stop_reason":"end_turn""#);
    let good_stream = message_events(Some("good"), r#""end_turn""#);
    let nothing = message_events(None, "null");
    let at = nothing.find("event: message_delta").unwrap();
    let only_ends = [&nothing[..at], &nothing[nothing.find("event: message_stop").unwrap()..]].concat();
    for (streams, lost) in [
        (false, vec![Act::Send(json(&whole("half", "")))]),
        (false, vec![Act::Send(json(&whole("half", r#","stop_reason":null"#)))]),
        (true, stream(&nothing, false)),
        (true, stream(&nothing, true)),
        (true, stream(&only_ends, false)),
    ] {
        let (other, expected) = if streams {
            (stream(&good_stream, false), &good_stream)
        } else {
            (vec![Act::Send(json(&good))], &good)
        };
        let engines = [engine(lost).await, engine(other).await];
        let cluster = gateway(&[&engines[0], &engines[1]]).await;
        for _ in 0..3 {
            // I3.16, I3.17
            assert_eq!(told(&ask(&cluster, MESSAGES, streams).await), (200, expected.clone()));
        }
        let asked = u32::try_from(engines[0].requests().len()).unwrap();
        assert!(asked > 0, "it was asked");
        cluster.at_rest().await.unwrap();
        // I3.16
        let counted = (legs(&cluster, "gave_up").await, legs(&cluster, "ok").await);
        assert_eq!(counted, (f64::from(asked), 3.0));
    }
    // After a token, the client is told.
    let half = engine(stream(&message_events(Some("half"), "null"), false)).await;
    let cluster = gateway(&[&half]).await;
    let (status, text) = told(&ask(&cluster, MESSAGES, true).await);
    // I3.16, I1.2
    assert!(status == 200 && text.contains("the finish reason `abort`"), "{status} {text}");
    assert!(text.contains("event: error") && !text.contains("message_stop"), "{text}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i3_a_message_delta_that_only_counts_tokens_does_not_end_a_message() {
    let counts = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":null},\
                  \"usage\":{\"output_tokens\":1}}\n\n";
    let events = message_events(Some("good"), r#""end_turn""#);
    for place in ["event: content_block_start", "event: content_block_stop"] {
        let answer = events.replace(place, &format!("{counts}{place}"));
        let engine = engine(stream(&answer, true)).await;
        let cluster = gateway(&[&engine]).await;
        // I3.16
        assert_eq!(told(&ask(&cluster, MESSAGES, true).await), (200, answer));
        cluster.at_rest().await.unwrap();
        assert_eq!((legs(&cluster, "ok").await, engine.requests().len()), (1.0, 1));
    }
}
