//! From traffic to a comparison: the decision log, its export as a trace, and the summary of decisions.

use std::{fs, path::Path, time::Duration};

use clap::Parser;
use pointsman_gateway::config::Config;
use pointsman_lab::cli::{CompareArgs, TraceCommand};
use pointsman_routing::SlotKind;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{TestCluster, TestClusterBuilder};
use serde_json::{Value, json};
use tokio::time::Instant;

const SECRET: &str = "the secret phrase of alice";

/// The commands of the binary.
#[derive(Parser)]
enum Command {
    #[command(subcommand)]
    Trace(TraceCommand),
    Compare(Box<CompareArgs>),
}

fn run(args: &[&str]) {
    match Command::try_parse_from([&["pointsman"], args].concat()).unwrap() {
        Command::Trace(command) => command.run().unwrap(),
        Command::Compare(args) => args.run().unwrap(),
    };
}

/// Two engines that compute for a while, with a shadow in their slot.
async fn cluster(change: impl FnOnce(&mut Config)) -> TestCluster {
    let engine = || SimConfig {
        overhead: Duration::from_millis(5),
        ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
    };
    TestClusterBuilder::new()
        .config(|config| {
            let slot = config.policies.slots.entry(SlotKind::Aggregated).or_default();
            slot.shadow = Some(toml::from_str("builtin = 'least-loaded'").unwrap());
            change(config);
        })
        .sim_with(engine(), "")
        .sim_with(engine(), "")
        .start()
        .await
}

/// Streams a completion of token ids to its end.
async fn complete(cluster: &TestCluster, prompt: &[u32], nvext: Value) {
    let body = json!({ "model": "tiny", "stream": true, "max_tokens": 3, "ignore_eos": true, "prompt": prompt, "nvext": nvext });
    let stream = cluster.client.stream("/v1/completions", &[], body.to_string()).await.unwrap();
    assert_eq!(stream.status, 200);
    assert_eq!(stream.all().await.unwrap().last().unwrap(), "[DONE]");
}

async fn chat(cluster: &TestCluster, content: &str) -> u16 {
    let body =
        json!({ "model": "tiny", "max_tokens": 2, "messages": [{ "role": "user", "content": content }] });
    let headers = [("x-session-id", SECRET)];
    cluster.client.post("/v1/chat/completions", &headers, body.to_string()).await.unwrap().status.as_u16()
}

/// All lines of the log.
fn lines(log: &Path) -> Vec<Value> {
    let mut files: Vec<_> = fs::read_dir(log).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "zst"));
    files.sort();
    let text = files.iter().map(|file| zstd::stream::decode_all(fs::File::open(file).unwrap()).unwrap());
    let text = String::from_utf8(text.flatten().collect()).unwrap();
    // I10.2
    assert!(!text.contains("secret") && !text.contains("alice"), "no text of a client is logged: {text}");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Checks what is logged of the first request and of the refused one.
fn check_log(logged: &[Value]) {
    assert_eq!(
        (logged[0]["log"].as_str(), logged[0]["block_tokens"].as_u64()),
        (Some("pointsman-decisions"), Some(16))
    );
    // I10.1
    let [first, .., chat, refused] = &logged[1..] else { panic!("{logged:?}") };
    assert_eq!(logged.len(), 1 + 6, "the header, and a line for each request");
    let decision = &first["decisions"][0];
    let told = [
        &decision["slot"],
        &decision["lane"],
        &decision["policy"],
        &decision["decider"],
        &decision["shadow"]["policy"],
    ];
    assert_eq!(told, ["aggregated", "active", "predicted-latency", "policy", "least-loaded"], "{first}");
    assert!(
        decision["worker"].is_u64()
            && decision["digest"].is_string()
            && decision["shadow"]["worker"].is_u64(),
        "{first}"
    );
    assert_eq!(
        (&first["input_tokens"], &first["output_tokens"], &first["priority"]),
        (&json!(104), &json!(3), &json!(2.0))
    );
    assert!(first["outcome"]["ttft_ms"].as_f64() > Some(0.0) && first["outcome"]["code"] == "ok", "{first}");
    assert_eq!(first["blocks"]["ids"].as_array().map(Vec::len), Some(6));
    // Text without a tokenizer, and the engine's own count of it.
    assert!(
        chat["input_estimated"] == true && chat["outcome"]["prompt_reported"].as_u64() > Some(0),
        "{chat}"
    );
    assert_eq!(
        (&refused["model"], &refused["outcome"]["code"]),
        (&json!("other"), &json!("model_not_found"))
    );
}

#[tokio::test]
async fn traffic_is_logged_exported_and_compared_with_what_the_shadow_would_have_done() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let cluster = cluster(|config| config.decisions.log_dir = Some(log.clone())).await;
    let shared: Vec<u32> = (0..64).collect();
    for turn in 0..4_u32 {
        let prompt = [&shared[..], &(1_000 * turn..1_000 * turn + 40).collect::<Vec<_>>()].concat();
        let nvext = if turn < 2 { json!({ "session_id": SECRET, "priority": 2 }) } else { json!({}) };
        complete(&cluster, &prompt, nvext).await;
    }
    assert_eq!(chat(&cluster, SECRET).await, 200);
    let unknown = json!({ "model": SECRET, "prompt": [1, 2, 3] }).to_string();
    assert_eq!(cluster.client.post("/v1/completions", &[], unknown).await.unwrap().status, 404);
    cluster.at_rest().await.unwrap();
    cluster.gateway.drain().await;
    check_log(&lines(&log));
    // The trace.
    let (trace, report) = (dir.path().join("t.jsonl"), dir.path().join("r.json"));
    let [log, trace, report] = [&log, &trace, &report].map(|path| path.to_str().unwrap());
    run(&["trace", "export", log, "-o", trace]);
    let exported: Vec<Value> =
        fs::read_to_string(trace).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ids: Vec<&Value> = exported.iter().map(|line| &line["hash_ids"]).collect();
    assert_eq!(
        ids[..3],
        [&json!([0, 1, 2, 3, 4, 5, 6]), &json!([0, 1, 2, 3, 7, 8, 9]), &json!([0, 1, 2, 3, 10, 11, 12])]
    );
    assert_eq!((&exported[1]["input_length"], &exported[1]["output_length"]), (&json!(104), &json!(3)));
    assert_eq!(exported[0]["session_id"], exported[1]["session_id"]);
    assert!(exported[0]["delay"].is_null() && exported[1]["delay"].as_f64() >= Some(0.0), "{exported:?}");
    assert_eq!(exported.len(), 5, "the refused request has no answer to simulate");
    // A trace of ours is an import, too; and what it says is the same.
    let again = dir.path().join("again.jsonl");
    run(&["trace", "import", trace, "--trace-block", "16", "-o", again.to_str().unwrap()]);
    assert_eq!(fs::read_to_string(&again).unwrap(), fs::read_to_string(trace).unwrap());
    let arms = ["--arm", "active=kv-aware", "--arm", "shadow=least-loaded", "--seeds", "1", "--json", report];
    run(&[&["compare", "--trace", trace, "--trace-block", "16", "--engines", "2"], &arms[..]].concat());
    let report: Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    let labels: Vec<&Value> =
        report["comparisons"][0]["arms"].as_array().unwrap().iter().map(|arm| &arm["label"]).collect();
    assert_eq!(labels, [&json!("active"), &json!("shadow")]);
}

#[tokio::test]
async fn i10_an_export_has_the_lengths_that_engines_reported() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let cluster = cluster(|config| config.decisions.log_dir = Some(log.clone())).await;
    let texts = |count: usize| vec!["several words of one prompt ".repeat(30); count];
    for (prompt, n) in [(json!(texts(1)[0]), 1), (json!(texts(1)[0]), 4), (json!(texts(2)), 1)] {
        let body = json!({ "model": "tiny", "max_tokens": 5, "ignore_eos": true, "n": n, "prompt": prompt });
        let answer = cluster.client.post("/v1/completions", &[], body.to_string()).await.unwrap();
        assert_eq!(answer.status, 200);
    }
    cluster.at_rest().await.unwrap();
    cluster.gateway.drain().await;
    let logged = lines(&log);
    let [_, one, four, list] = &logged[..] else { panic!("{logged:?}") };
    let counts = [one, four, list].map(|line| [&line["choices"], &line["prompts"], &line["output_tokens"]]);
    // I10.16
    let null = &Value::Null;
    assert_eq!(
        counts,
        [[null, null, &json!(5)], [&json!(4), null, &json!(20)], [null, &json!(2), &json!(10)]]
    );
    let trace = dir.path().join("t.jsonl");
    run(&["trace", "export", log.to_str().unwrap(), "-o", trace.to_str().unwrap()]);
    let text = fs::read_to_string(&trace).unwrap();
    let exported: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let lengths: Vec<_> =
        exported.iter().map(|line| [&line["input_length"], &line["output_length"]]).collect();
    let reported = &one["outcome"]["prompt_reported"];
    assert!(one["input_estimated"] == true && *reported != one["input_tokens"], "{one}");
    // I10.15, I10.16
    assert_eq!(lengths, [[reported, &json!(5)]; 2]);
    assert_eq!(exported[0]["hash_ids"][0], exported[1]["hash_ids"][0]);
}

#[tokio::test]
async fn i10_22_the_filter_before_a_policy_is_in_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let slots = "[policies.slots.aggregated]\nbuiltin = 'kv-aware'\n\
                 filters = [{ policy = 'formula', settings = { keep = 'active_requests < 1000' } }]\n";
    let cluster = cluster(|config| {
        config.policies.slots = toml::from_str::<Config>(slots).unwrap().policies.slots;
        config.decisions.log_dir = Some(log.clone());
    })
    .await;
    complete(&cluster, &[1, 2, 3], json!({})).await;
    cluster.at_rest().await.unwrap();
    cluster.gateway.drain().await;
    let logged = lines(&log);
    let decision = &logged[1]["decisions"][0];
    // I10.22
    assert_eq!([&decision["filter"], &decision["policy"]], ["formula", "kv-aware"], "{decision}");
}

#[tokio::test]
async fn a_log_that_cannot_be_written_costs_no_request_and_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let log = dir.path().join("file/log");
    let cluster = cluster(|config| config.decisions.log_dir = Some(log)).await;
    let end = Instant::now() + Duration::from_secs(60);
    // I10.8
    loop {
        let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
        if status["reasons"].to_string().contains("file/log cannot be written") {
            break;
        }
        assert!(Instant::now() < end, "{}", status["reasons"]);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for _ in 0..5 {
        // I10.3
        assert_eq!(chat(&cluster, "hello").await, 200);
    }
    let dropped = "pointsman_decision_log_dropped_total{reason=\"disk\"}";
    assert_eq!(cluster.until_counted(dropped, 5.0).await.unwrap(), 5.0);
}

#[tokio::test]
async fn active_canary_and_shadow_are_summarized_side_by_side() {
    let cluster = cluster(|config| {
        let slot = config.policies.slots.entry(SlotKind::Aggregated).or_default();
        slot.canary = Some(toml::from_str("native = 'random'\nshare = 0.5").unwrap());
    })
    .await;
    for number in 0..60_u32 {
        // Equal prompts: the second finds the blocks of the first.
        complete(
            &cluster,
            &(0..64 + number % 2).collect::<Vec<_>>(),
            json!({ "session_id": number.to_string() }),
        )
        .await;
    }
    cluster.at_rest().await.unwrap();
    let summary = cluster.admin.get("/decisions/summary").await.unwrap();
    let summary: Value = summary.json().unwrap();
    let slots = summary["slots"].as_array().unwrap();
    assert_eq!((summary["window_s"].as_u64(), slots.len()), (Some(3_600), 4));
    let slot = slots.iter().find(|slot| slot["slot"] == "aggregated").unwrap();
    let [active, canary, shadow] = &slot["lanes"].as_array().unwrap()[..] else { panic!("{slot}") };
    let count = |lane: &Value, key: &str| lane[key].as_u64().unwrap_or_else(|| panic!("{key}: {lane}"));
    assert_eq!(count(active, "decisions") + count(canary, "decisions"), 60);
    assert!(count(active, "decisions") > 10 && count(canary, "decisions") > 10, "{slot}");
    assert_eq!(
        (&active["policy"], &canary["native"], &shadow["policy"]),
        (&json!("predicted-latency"), &json!("random"), &json!("least-loaded"))
    );
    // I9.3: the shadow is compared with the active generation alone.
    assert_eq!(count(shadow, "decisions"), count(active, "decisions"));
    assert_eq!([count(active, "compared"), count(canary, "compared")], [count(shadow, "decisions"), 0]);
    assert_eq!(active["agreement"], shadow["agreement"]);
    let status: Value = cluster.admin.get("/status").await.unwrap().json().unwrap();
    let of_slot = |slot: &&Value| slot["slot"] == "aggregated";
    let counted = status["slots"].as_array().unwrap().iter().find(of_slot).unwrap()["shadow"].clone();
    let compared = ["agree", "disagree", "failed"].map(|key| count(&counted, key));
    // I9.3: so are its counts.
    assert_eq!(compared.iter().sum::<u64>(), count(shadow, "decisions"), "{counted}");
    // I9.3
    assert_eq!(compared[0], count(shadow, "agreed"), "{counted}");
    assert_eq!(
        [count(&active["ttft_ms"], "count"), count(&canary["e2e_ms"], "count")],
        [count(active, "decisions"), count(canary, "decisions")]
    );
    assert!(
        shadow["ttft_ms"].is_null() && active["e2e_ms"]["p90"].as_f64() >= active["e2e_ms"]["p50"].as_f64(),
        "{slot}"
    );
    // The index is known to all of them: what the shadow's choice has cached is known, too.
    assert!(
        active["predicted_hit_rate"].as_f64() > Some(0.5) && shadow["predicted_hit_rate"].is_f64(),
        "{slot}"
    );
    assert_eq!(active["decisions_by_minute"].as_array().map(Vec::len), Some(60));
    assert_eq!(count(active, "call_p99_us_max"), 250_000);
    let short: Value = cluster.admin.get("/decisions/summary?window=5m").await.unwrap().json().unwrap();
    assert_eq!(short["window_s"], 300);
    for (query, problem) in
        [("window=2h", "window: `2h` is not a time from 1s to 1h"), ("colour=red", "colour")]
    {
        let reply = cluster.admin.get(&format!("/decisions/summary?{query}")).await.unwrap();
        assert_eq!((reply.status.as_u16(), reply.code()), (400, "invalid_request".to_owned()));
        assert!(String::from_utf8_lossy(&reply.body).contains(problem), "{query}");
    }
}
