//! Pairs whose prefill engine accepts a request and never answers: which worker is blamed, and what the
//! client is told.

use std::time::Duration;

use pointsman_tests::{Act, RawEngine, RawRequest, TestClusterBuilder, raw_engine::json as json_answer};
use pointsman_workers::{WorkerId, WorkerSpec};
use serde_json::Value;

const MS: Duration = Duration::from_millis(1);

/// An engine that accepts every request and never answers.
async fn silent() -> RawEngine {
    let script = |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => {
            vec![Act::Send(json_answer(r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"#))]
        }
        "GET /query" => vec![Act::Send(json_answer(r#"{"0":{"engine_id":"e"}}"#))],
        line if line.starts_with("GET") || line.contains("abort") => vec![Act::Send(json_answer("{}"))],
        _ => vec![Act::Hang],
    };
    RawEngine::start(script).await
}

#[tokio::test]
async fn i3_a_prefill_that_never_answers_is_the_error_of_the_request() {
    // SGLang's prefill engine waits for the decode engine: either may hang.
    let kinds = [("vllm", false), ("vllm,transport=mooncake", false), ("sglang", true)];
    for (kind, both) in kinds {
        for stream in [false, true] {
            let engines = [silent().await, silent().await];
            let builder = TestClusterBuilder::new().config(|config| {
                config.timeouts.prefill_head = 400 * MS;
                config.routing.quarantine = Duration::ZERO;
                for (id, (role, engine)) in (1..).zip(["prefill", "decode"].iter().zip(&engines)) {
                    let port = engine.address.port();
                    let more = if kind == "vllm" { String::new() } else { format!(",bootstrap_port={port}") };
                    let flag =
                        format!("id={id},role={role},engine={kind}{more},url=http://{}", engine.address);
                    config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
                }
            });
            let cluster = builder.start().await;
            let body = format!(r#"{{"model":"tiny","prompt":"a","stream":{stream}}}"#);
            let reply = cluster.client.post("/v1/completions", &[], body).await.unwrap();
            let text = String::from_utf8_lossy(&reply.body).into_owned();
            let error: Value = serde_json::from_str(text.trim_start_matches("data: ")).unwrap();
            // I3.27
            assert_eq!(
                (reply.status.as_u16(), &error["error"]["code"]),
                (504, &"engine_timeout".into()),
                "{kind}: {text}"
            );
            assert!(text.contains("timeouts.prefill_head"), "{kind}: {text}");
            let snapshot = cluster.gateway.state().registry.snapshot();
            let failing = [1, 2].map(|id| snapshot.get(WorkerId(id)).unwrap().ineligible().is_some());
            // I3.27
            assert_eq!(failing, [true, both], "{kind}, streamed: {stream}");
            cluster.at_rest().await.unwrap();
        }
    }
}
