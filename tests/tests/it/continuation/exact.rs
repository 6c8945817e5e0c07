//! The rest of a stream from token ids (`models.NAME.continuation = "exact"`), and who may have streams
//! continued.

use pointsman_gateway::config::{ContinuationForm, TenantEntry};
use pointsman_workers::WorkerSpec;

use super::*;

/// A prompt that does not end with a token of the engine model: what follows in a text is divided into other
/// tokens than the answer was.
fn odd(path: &str) -> Value {
    let prompt = "tell me about the points of a railway, please";
    assert!(!prompt.len().is_multiple_of(4));
    if path == CHAT {
        json!({"messages": [{"role": "user", "content": prompt}]})
    } else {
        json!({"prompt": prompt})
    }
}

fn exactly(config: &mut Config) {
    let model = Model { continuation: Some(ContinuationForm::Exact), ..Model::default() };
    config.models.insert("tiny".to_owned(), model);
}

/// A cluster of engines that record their requests.
async fn recording(dialect: Dialect, roles: &[Role], change: impl FnOnce(&mut Config)) -> TestCluster {
    let itl = Duration::from_millis(3);
    let sim = |role| SimConfig { itl, record: 100, ..SimConfig::instant(dialect, role) };
    let builder = roles
        .iter()
        .fold(TestClusterBuilder::new().config(change), |builder, role| builder.sim_with(sim(*role), ""));
    builder.start().await
}

/// Bodies that the engines got.
fn bodies(cluster: &TestCluster) -> Vec<Value> {
    let recorded = cluster.sims.iter().flat_map(|sim| sim.recorded());
    recorded.filter_map(|recorded| serde_json::from_str(&recorded.body).ok()).collect()
}

#[tokio::test]
async fn i14_the_rest_from_token_ids_is_what_the_first_engine_would_have_written() {
    for roles in [AGGREGATED, PAIRS] {
        let plain = cluster(Dialect::Vllm, roles, |_| {}).await;
        let exact = recording(Dialect::Vllm, roles, exactly).await;
        for path in [CHAT, COMPLETIONS] {
            for more in [json!({}), json!({"stream_options": {"include_usage": false}})] {
                let more = with(odd(path), more);
                // I14.13: as without the field
                let without = normal(&stream(&plain, path, more.clone()).await);
                assert_eq!(normal(&stream(&exact, path, more.clone()).await), without);
                for after_tokens in [1, 9, TOKENS - 1] {
                    // I14.12
                    reads_through(&exact, path, &more, FaultKind::Cut { after_tokens }, "cut").await;
                }
            }
        }
        // I14.9
        assert_eq!(continued(&exact, "continued_exact").await, 12.0, "{roles:?}");
        assert_eq!(continued(&exact, "continued").await, 0.0);
        assert!(bodies(&exact).iter().any(|body| body["return_token_ids"] == json!(true)));
        assert!(bodies(&exact).iter().any(|body| body["prompt"].is_array()));
        exact.at_rest().await.unwrap();
        plain.at_rest().await.unwrap();
    }
}

/// A body with further fields.
fn with(mut body: Value, more: Value) -> Value {
    let (Value::Object(fields), Value::Object(more)) = (&mut body, more) else { panic!("objects") };
    fields.extend(more);
    body
}

#[tokio::test]
async fn i14_a_prefill_engine_that_ends_a_rest_of_token_ids_is_left_for_another_worker() {
    let roles = &[Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    let cluster = recording(Dialect::Vllm, roles, exactly).await;
    // Only one of the prefill workers ends rests, whichever is chosen first.
    let prompt = Some("\"prompt\":[".to_owned());
    cluster.sims[0].set_faults(vec![Fault { prompt, ..Fault::always(FaultKind::FirstTokenEos) }]);
    let mut streams = 0;
    while cluster.faults_fired("first-token-eos") == 0 {
        assert!(streams < 40, "the prefill engine got no rest");
        streams += 1;
        let more = odd(COMPLETIONS);
        // I14.12, I14.4
        reads_through(&cluster, COMPLETIONS, &more, FaultKind::Cut { after_tokens: 5 }, "cut").await;
    }
    assert_eq!(continued(&cluster, "continued_exact").await, f64::from(streams));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i14_token_ids_are_not_asked_for_where_they_decide_nothing() {
    let cases =
        [(Dialect::Vllm, json!({"temperature": 0.5}), "sampled"), (Dialect::Sglang, json!({}), "engine")];
    for (dialect, more, why) in cases {
        let cluster = recording(dialect, AGGREGATED, exactly).await;
        reads_through(&cluster, COMPLETIONS, &more, FaultKind::Cut { after_tokens: 5 }, "cut").await;
        // I14.12, I14.9
        assert_eq!(continued(&cluster, "continued").await, 1.0);
        assert!(bodies(&cluster).iter().all(|body| body.get("return_token_ids").is_none()));
        let failed = receipts(&cluster)
            .await
            .into_iter()
            .find_map(|one| Some(one["outcome"]["stream_failed"].clone()).filter(|failed| !failed.is_null()));
        // I14.15
        assert_eq!(failed.unwrap()["why"], json!(why));
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i14_the_ids_that_a_client_asks_for_are_its_own() {
    let cluster = recording(Dialect::Vllm, AGGREGATED, exactly).await;
    let events = stream(&cluster, COMPLETIONS, json!({"return_token_ids": true})).await;
    // I14.13
    assert!(
        events[0].contains("\"token_ids\":[") && events[0].contains("\"prompt_token_ids\":["),
        "{events:?}"
    );
    cluster.at_rest().await.unwrap();
}

/// The receipts of all decisions, the newest first.
async fn receipts(cluster: &TestCluster) -> Vec<Value> {
    let list = cluster.admin.get("/decisions?limit=100").await.unwrap().json().unwrap();
    let mut receipts = Vec::new();
    for one in list["decisions"].as_array().unwrap() {
        let path = format!("/decisions/{}", one["id"].as_str().unwrap());
        receipts.push(cluster.admin.get(&path).await.unwrap().json().unwrap());
    }
    receipts
}

#[tokio::test]
async fn i14_both_receipts_say_why_a_stream_was_continued_or_not() {
    for roles in [AGGREGATED, PAIRS] {
        let cluster = recording(Dialect::Vllm, roles, exactly).await;
        let events = broken_once(&cluster, &[], json!({})).await;
        assert!(!events.iter().any(|event| event.contains("\"error\"")), "{events:?}");
        cluster.at_rest().await.unwrap();
        let receipts = receipts(&cluster).await;
        let failed = receipts.iter().find(|one| !one["outcome"]["stream_failed"].is_null()).unwrap();
        let rest = receipts.iter().find(|one| !one["outcome"]["continues"].is_null()).unwrap();
        let expected =
            json!({"result": "continued_exact", "why": null, "delivered_tokens": 4, "rest": rest["id"]});
        // I14.15
        assert_eq!(failed["outcome"]["stream_failed"], expected);
        assert_eq!(rest["outcome"]["continues"], failed["id"]);
        let legs = [&failed["leg"], &rest["leg"]];
        assert!(legs.iter().all(|leg| **leg != json!("prefill")), "{legs:?}");
        broken_once(&cluster, &[], json!({"presence_penalty": 0.5})).await;
        cluster.at_rest().await.unwrap();
        let receipts = self::receipts(&cluster).await;
        let failed = |one: &&Value| one["outcome"]["stream_failed"]["result"] == json!("penalties");
        let failed = &receipts.iter().find(failed).unwrap()["outcome"]["stream_failed"];
        assert_eq!(failed, &json!({"result": "penalties", "why": null, "delivered_tokens": 4, "rest": null}));
    }
}

/// The events of a stream whose engine cut it after four tokens.
async fn broken_once(cluster: &TestCluster, headers: &[(&str, &str)], more: Value) -> Vec<String> {
    let before = cluster.faults_fired("cut");
    for turn in 0..40 {
        // Only one of them has the fault, whichever serves first.
        let sim = &cluster.sims[answering(cluster)[turn % 2]];
        sim.set_faults(once(FaultKind::Cut { after_tokens: 4 }));
        let stream = cluster.client.stream(CHAT, headers, body(CHAT, more.clone())).await.unwrap();
        let events = stream.all().await.unwrap();
        sim.set_faults(Vec::new());
        if cluster.faults_fired("cut") > before {
            return events;
        }
    }
    panic!("no engine had the fault");
}

#[tokio::test]
async fn i14_a_tenant_may_be_left_out() {
    let cluster = cluster(Dialect::Vllm, AGGREGATED, |config| {
        config.server.tenant_header = "x-tenant".to_owned();
        config.auth.trusted_proxies = vec!["127.0.0.0/8".to_owned()];
        let entry = TenantEntry { continuations: Some(0), ..TenantEntry::default() };
        config.tenants.insert("batch".to_owned(), entry);
    })
    .await;
    for (tenant, is_continued) in [("batch", false), ("other", true)] {
        let events = broken_once(&cluster, &[("x-tenant", tenant)], json!({"user": tenant})).await;
        // I14.3
        assert_eq!(events.last().unwrap() == "[DONE]", is_continued, "{tenant}: {events:?}");
    }
    cluster.at_rest().await.unwrap();
}

/// An engine that answers a completion of token ids with `rest`, and others with a stream that breaks off.
async fn breaking(rest: &'static str) -> RawEngine {
    let chunk_of = |text: &str, prompt: &str, ids: &str| {
        format!(
            "data: {{\"id\":\"x\",\"object\":\"text_completion\",\"created\":1,\"model\":\"tiny\",\"choices\":[{{\
             \"index\":0,\"text\":\"{text}\",\"logprobs\":null,\"finish_reason\":null,\
             \"prompt_token_ids\":{prompt},\"token_ids\":{ids}}}]}}\n\n"
        )
    };
    let begun = chunk_of("a", "[7]", "[1]") + &chunk_of(" b", "null", "[2]");
    let good = chunk_of(" c", "[7,1,2]", "[3]") + "data: [DONE]\n\n";
    let script = move |request: &RawRequest| {
        let answer =
            |status: &str, body: &str| vec![Act::Send(pointsman_tests::raw_engine::status(status, body))];
        if request.line.starts_with("GET /v1/models") {
            let models = r#"{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"vllm"}]}"#;
            return answer("200 OK", models);
        }
        if request.line.starts_with("GET") {
            return answer("200 OK", "{}");
        }
        if !request.body.contains("[7,1,2]") {
            return vec![Act::Send([stream_head(), chunk(begun.as_bytes())].concat()), Act::Close];
        }
        match rest {
            "refuses" => answer("400 Bad Request", r#"{"error":{"message":"out of vocabulary","code":400}}"#),
            "good" => vec![Act::Send([stream_head(), chunk(good.as_bytes()), chunk(b"")].concat())],
            prompt => {
                let events = chunk_of(" c", prompt, "[3]");
                vec![Act::Send([stream_head(), chunk(events.as_bytes()), chunk(b"")].concat())]
            }
        }
    };
    RawEngine::start(script).await
}

#[tokio::test]
async fn i14_an_engine_that_does_not_begin_from_its_token_ids_ends_the_stream_with_one_valid_error() {
    let cases = [
        ("refuses", Some("out of vocabulary")),
        ("[7,1]", Some("does not begin from the token ids")),
        ("null", Some("does not begin from the token ids")),
        ("good", None),
    ];
    for (rest, word) in cases {
        let (one, two) = (breaking(rest).await, breaking(rest).await);
        let flags =
            [&one, &two].map(|engine| format!("role=aggregated,engine=vllm,url=http://{}", engine.address));
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                exactly(config);
                let specs = flags.iter().map(|flag| WorkerSpec::parse_flag(flag).unwrap());
                config.workers.extend(specs);
            })
            .start()
            .await;
        let events = stream(&cluster, COMPLETIONS, json!({})).await;
        // I14.13
        assert!(!events.iter().any(|event| event.contains("token_ids\":[")), "{events:?}");
        let last = events.last().unwrap();
        match word {
            Some(word) => {
                let last: Value = serde_json::from_str(last).unwrap();
                let message = last["error"]["message"].as_str().unwrap();
                // I14.10
                assert!(message.contains(word), "{rest}: {message}");
                assert!(message.contains("2 output tokens were delivered"), "{message}");
                assert_eq!(text_of(&events), "a b");
                let errors = events.iter().filter(|event| event.contains("\"error\"")).count();
                assert_eq!((errors, continued(&cluster, "failed").await), (1, 1.0), "{rest}");
            }
            None => assert_eq!((text_of(&events), &**last), ("a b c".to_owned(), "[DONE]")),
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i14_a_rest_that_fails_before_its_first_token_is_tried_again() {
    for before in ["", r#"{"content":""}"#] {
        fails_once(before).await;
    }
}

/// The first engine of a rest fails after the event `before`, which has no token.
async fn fails_once(before: &'static str) {
    let rests = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let engine = async || {
        let rests = rests.clone();
        let script = move |request: &RawRequest| {
            let answer = |body: &str| vec![Act::Send(pointsman_tests::raw_engine::status("200 OK", body))];
            if request.line.starts_with("GET /v1/models") {
                return answer(
                    r#"{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"vllm"}]}"#,
                );
            }
            if request.line.starts_with("GET") {
                return answer("{}");
            }
            let (role, text) = (
                raw_chunk("tiny", r#"{"role":"assistant","content":""}"#),
                raw_chunk("tiny", r#"{"content":"a"}"#),
            );
            if !request.body.contains("continue_final_message") {
                return vec![
                    Act::Send([stream_head(), chunk((role + &text).as_bytes())].concat()),
                    Act::Close,
                ];
            }
            let events = if rests.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0 {
                let before = if before.is_empty() { String::new() } else { raw_chunk("tiny", before) };
                role + &before + "data: {\"error\":{\"message\":\"busy\",\"type\":\"x\",\"code\":503}}\n\n"
            } else {
                role + &text + "data: [DONE]\n\n"
            };
            vec![Act::Send([stream_head(), chunk(events.as_bytes()), chunk(b"")].concat())]
        };
        RawEngine::start(script).await
    };
    let engines = [engine().await, engine().await, engine().await];
    let flags =
        engines.each_ref().map(|engine| format!("role=aggregated,engine=vllm,url=http://{}", engine.address));
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.workers.extend(flags.iter().map(|flag| WorkerSpec::parse_flag(flag).unwrap()))
        })
        .start()
        .await;
    let events = stream(&cluster, CHAT, json!({})).await;
    // I14.4
    assert_eq!((text_of(&events), &**events.last().unwrap()), ("aa".to_owned(), "[DONE]"), "{events:?}");
    assert_eq!((continued(&cluster, "continued").await, continued(&cluster, "failed").await), (1.0, 0.0));
    cluster.at_rest().await.unwrap();
}
