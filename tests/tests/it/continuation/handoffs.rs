//! E4 for rests of streams: their handoff is consumed, also when no client is left.

use std::time::Duration;

use pointsman_sim::{Dialect, Fault, FaultKind, FaultLeg, Role, SimConfig};
use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{chunk, json as json_answer, stream_head},
};
use serde_json::json;

use super::{CHAT, PAIRS, body, once, stream, text_of};

/// Pairs whose prefill takes a time.
async fn pairs(prefill: Duration, timeout: Duration) -> TestCluster {
    let sim = |role| {
        let overhead = if role == Role::Prefill { prefill } else { Duration::ZERO };
        SimConfig { itl: Duration::from_millis(3), overhead, ..SimConfig::instant(Dialect::Vllm, role) }
    };
    let builder = TestClusterBuilder::new().config(|config| config.timeouts.request = timeout);
    PAIRS.iter().fold(builder, |builder, role| builder.sim_with(sim(*role), "")).start().await
}

/// Asserts that nothing is booked, and that each engine gave its blocks back before their lease ended.
async fn assert_consumed(cluster: &TestCluster) {
    cluster.at_rest().await.unwrap();
    cluster
        .until("no handoff is pinned", |cluster| {
            cluster
                .sims
                .iter()
                .map(|sim| sim.state())
                .all(|state| state.pinned_blocks == 0 && state.running == 0)
        })
        .await
        .unwrap();
    // E4.2
    assert_eq!(cluster.sims[0].state().stranded, 0);
}

/// Each decode engine breaks its first stream.
fn cut_once(cluster: &TestCluster, rest: Option<FaultKind>) {
    for sim in &cluster.sims[1..] {
        let of_rest = rest.iter().map(|kind| Fault {
            prompt: Some("continue_final_message".to_owned()),
            times: Some(1),
            leg: Some(FaultLeg::Decode),
            ..Fault::always(kind.clone())
        });
        let cut = once(FaultKind::Cut { after_tokens: 3 });
        sim.set_faults(of_rest.chain(cut).collect());
    }
}

#[tokio::test]
async fn e4_the_handoff_of_a_rest_that_decode_refuses_is_consumed() {
    let cluster = pairs(Duration::ZERO, Duration::from_secs(30)).await;
    cut_once(&cluster, Some(FaultKind::Status { status: 400, retry_after: None }));
    let events = stream(&cluster, CHAT, json!({})).await;
    assert!(events.last().unwrap().contains("\"error\""), "{events:?}");
    assert_eq!(cluster.faults_fired("status-400"), 1);
    assert_consumed(&cluster).await;
}

#[tokio::test]
async fn e4_the_handoff_of_a_rest_whose_deadline_passed_in_prefill_is_consumed() {
    let cluster = pairs(Duration::from_millis(1_200), Duration::from_secs(2)).await;
    cut_once(&cluster, None);
    let events = stream(&cluster, CHAT, json!({})).await;
    assert!(events.last().unwrap().contains("\"error\""), "{events:?}");
    assert_eq!(cluster.faults_fired("cut"), 1);
    assert_consumed(&cluster).await;
}

#[tokio::test]
async fn e4_the_handoff_of_a_rest_whose_client_left_in_prefill_is_consumed() {
    let cluster = pairs(Duration::from_millis(400), Duration::from_secs(30)).await;
    cut_once(&cluster, None);
    let mut stream = cluster.client.stream(CHAT, &[], body(CHAT, json!({}))).await.unwrap();
    while cluster.faults_fired("cut") == 0 {
        stream.next().await.unwrap();
    }
    // The prefill of the rest runs.
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(stream);
    assert_consumed(&cluster).await;
}

/// An engine of a Mooncake pair whose first stream breaks off. The prefill of the rest answers after 200 ms,
/// and its decode after `end`.
async fn mooncake(end: Duration) -> RawEngine {
    let event = |choice: &str, cached: u32| {
        let usage = json!({"prompt_tokens": 90, "completion_tokens": 2, "total_tokens": 92,
            "prompt_tokens_details": {"cached_tokens": cached}});
        let usage = if cached > 0 { usage } else { json!(null) };
        let head = r#""id":"x","object":"chat.completion.chunk","created":1,"model":"tiny""#;
        format!(r#"{{{head},"choices":[{choice}],"usage":{usage}}}"#)
    };
    RawEngine::start(move |request: &RawRequest| {
        let is_rest = request.body.contains("continue_final_message");
        let content = |text: &str, end: &str| {
            let choice = format!(r#"{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":{end}}}"#);
            format!("data: {}\n\n", event(&choice, 0))
        };
        let (pause, answer) = match request.line.as_str() {
            "GET /v1/models" => (0, json_answer(r#"{"data":[{"id":"tiny","owned_by":"vllm"}]}"#)),
            "GET /query" => (0, json_answer(r#"{"0":{"engine_id":"e"}}"#)),
            line if line.starts_with("GET") => (0, json_answer("{}")),
            _ if request.body.contains("\"do_remote_decode\":true") => {
                let choice = r#"{"index":0,"message":{"content":"a"},"finish_reason":"length"}"#;
                let (pause, cached) = if is_rest { (200, 80) } else { (0, 48) };
                (pause, json_answer(&event(choice, cached)))
            }
            _ if is_rest => {
                let usage = format!("data: {}\n\ndata: [DONE]\n\n", event("", 89));
                let events = content(" b", "\"stop\"") + &usage;
                let events = [chunk(events.as_bytes()), chunk(b"")].concat();
                return vec![Act::Send(stream_head()), Act::Pause(end), Act::Send(events)];
            }
            _ => (100, [stream_head(), chunk(content("a", "null").as_bytes())].concat()),
        };
        vec![Act::Pause(Duration::from_millis(pause)), Act::Send(answer), Act::Close]
    })
    .await
}

#[tokio::test]
async fn c11_a_stream_that_goes_on_elsewhere_has_the_cached_tokens_of_its_first_prefill() {
    for end in [Duration::ZERO, Duration::from_millis(400)] {
        let engines = [mooncake(end).await, mooncake(end).await, mooncake(end).await];
        let builder = TestClusterBuilder::new().config(|config| {
            for (role, engine) in ["prefill", "decode", "decode"].into_iter().zip(&engines) {
                let port = engine.address.port();
                let transport = format!("transport=mooncake,bootstrap_port={port}");
                config.workers.push(engine.worker(&format!("role={role},engine=vllm,{transport}")));
            }
        });
        let cluster = builder.start().await;
        let events = stream(&cluster, CHAT, json!({})).await;
        assert_eq!((text_of(&events), &**events.last().unwrap()), ("a b".to_owned(), "[DONE]"));
        // C11.8
        assert!(events[events.len() - 2].contains("\"cached_tokens\":48"), "{end:?}: {events:?}");
        cluster.at_rest().await.unwrap();
        let list = cluster.admin.get("/decisions?limit=1").await.unwrap().json().unwrap();
        assert_eq!(list["decisions"][0]["outcome"]["cached_tokens"]["reported"], 48, "{end:?}: {list}");
    }
}
