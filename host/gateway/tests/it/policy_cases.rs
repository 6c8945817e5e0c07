//! A `cases.toml` gives the same results natively (the SDK's test runner) and on the compiled component
//! (`pointsman policy test`).

#![allow(clippy::expect_used, reason = "helpers of tests")]

use std::{fs, path::Path, process::Command};

use pointsman_policy_sdk::testing::{run_decode_override, run_scorer, run_selector};
use policy_cache_aware::CacheAware;
use policy_conditional_disagg::ConditionalDisagg;
use policy_formula::Rank;
use policy_kv_aware::KvAware;
use policy_least_loaded::LeastLoaded;
use policy_longest_prefix::LongestPrefix;
use policy_predicted_disagg::PredictedDisagg;
use policy_predicted_latency::PredictedLatency;
use policy_queue_kv_prefix::QueueKvPrefix;
use serde_json::{Map, Value, json};

/// Runs the cases of a file natively.
type Native = fn(&str) -> Result<(), String>;

const POLICIES: [(&str, Native); 9] = [
    ("least-loaded", run_selector::<LeastLoaded>),
    ("kv-aware", run_scorer::<KvAware>),
    ("predicted-latency", run_scorer::<PredictedLatency>),
    ("queue-kv-prefix", run_scorer::<QueueKvPrefix>),
    ("cache-aware", run_selector::<CacheAware>),
    ("longest-prefix", run_selector::<LongestPrefix>),
    ("conditional-disagg", run_decode_override::<ConditionalDisagg>),
    ("predicted-disagg", run_decode_override::<PredictedDisagg>),
    ("formula", run_selector::<Rank>),
];

/// Runs the cases on the compiled component and returns exit code, standard output and standard error.
fn compiled(name: &str, cases: &str) -> (Option<i32>, String, String) {
    let directory = tempfile::tempdir().expect("a directory");
    let bytes = pointsman_embedded_policies::by_name(name).expect("embedded");
    fs::write(directory.path().join("policy.wasm"), bytes).expect("written");
    fs::write(directory.path().join("cases.toml"), cases).expect("written");
    let mut command = Command::new(crate::programs::pointsman());
    let output = command.current_dir(directory.path()).args(["policy", "test", "policy.wasm"]).output();
    let output = output.expect("the binary runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn shipped(name: &str) -> String {
    let policies = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies");
    fs::read_to_string(policies.join(name).join("cases.toml")).expect("read")
}

#[test]
fn both_runners_give_the_same_answer_to_every_shipped_case() {
    for (name, native) in POLICIES {
        // An expectation that no policy meets, so that both reports state every answer.
        let mut cases: toml::Table = shipped(name).parse().expect("TOML");
        let list = cases["case"].as_array_mut().expect("cases");
        let count = list.len();
        for case in list {
            case.as_table_mut().expect("a table").insert("expect".to_owned(), impossible());
        }
        let cases = toml::to_string(&cases).expect("TOML");
        let report = native(&cases).expect_err("no case meets the expectation");
        assert_eq!(report.lines().filter(|line| line.starts_with("FAILED ")).count(), count, "{report}");
        let (code, out, err) = compiled(name, &cases);
        // Only the command warns of facts that the policy does not ask for.
        let answers = |text: &str| -> Vec<String> {
            text.lines().filter(|line| !line.starts_with("warning ")).map(str::to_owned).collect()
        };
        assert_eq!((code, answers(&out)), (Some(1), answers(&report)), "{name}: {err}");
    }
}

fn impossible() -> toml::Value {
    toml::Value::Table(toml::Table::from_iter([("row".to_owned(), toml::Value::Integer(4_294_967_295))]))
}

#[test]
fn both_runners_refuse_a_malformed_file_with_the_same_message() {
    for (cases, part) in [
        ("", "the file has no cases"),
        ("[[case]]\nname = \"a\"\nrow = []\nexpect = \"abstain\"\n", "did you mean `rows`?"),
        (
            "[[case]]\nname = \"a\"\nrows = [{ kv-usge = 1 }]\nexpect = { row = 0 }\n",
            "did you mean \"kv-usage\"?",
        ),
        ("[[case]]\nname = \"a\"\nrequest = { n = -1 }\nexpect = { row = 0 }\n", "request.n: -1 is not"),
        ("[[case]]\nname = \"a\"\nrows = [{}]\n", "missing field `expect`"),
        ("[[case]\n", "the file is not a list of cases"),
    ] {
        for (name, native) in POLICIES {
            let message = native(cases).expect_err("malformed");
            assert!(message.starts_with("cases.toml: ") && message.contains(part), "{message}");
            let (code, out, err) = compiled(name, cases);
            assert_eq!((code, out.as_str()), (Some(2), ""), "{name}: {err}");
            assert!(err.contains(&message), "{name}: expected {message:?} in {err:?}");
        }
    }
}

/// Digest of the policy in the receipts of these tests.
const DIGEST: &str = "c96931f1b27e";

/// Facts of a worker that `predicted-disagg` asks for.
const FACTS: [&str; 9] = [
    "active-prefill-tokens",
    "cached-blocks-device",
    "active-requests",
    "engine-running",
    "engine-queue",
    "kv-usage",
    "load-age-ms",
    "prefill-us-per-ktoken",
    "local-prefill",
];

fn number(facts: &toml::Value, name: &str, default: f32) -> f32 {
    facts.get(name).map_or(default, |value| value.to_string().parse().expect("a number"))
}

/// Returns the facts as in a receipt, with a value for each worker.
fn columns(workers: &[toml::Value]) -> Map<String, Value> {
    let column = |name: &str| workers.iter().map(|worker| number(worker, name, 0.0)).collect::<Vec<f32>>();
    FACTS.into_iter().map(|name| (name.to_owned(), json!(column(name)))).collect()
}

/// Returns the receipt of a plan for remote prefill, with the facts of a case.
fn receipt(case: &toml::Value, workers: &[toml::Value]) -> Value {
    let request = ["prompt-tokens", "block-size", "itl-target-us"];
    let request = request.map(|name| (name.to_owned(), json!(number(&case["request"], name, 0.0))));
    json!({
        "id": "1", "request_id": "r", "model": "m", "leg": "prefill", "attempt": 0, "slot": "decode-override",
        "generation": 1, "mode": "active", "policy": "predicted-disagg", "digest": DIGEST,
        "decider": { "by": "policy" }, "reason": null, "call": { "now_us": 0 },
        "candidates": (0..workers.len()).map(|worker| (worker, 0)).collect::<Vec<_>>(),
        "stages": [{
            "policy": "predicted-disagg", "digest": DIGEST, "request": Map::from_iter(request),
            "decode": columns(&[case["decode"].clone()]), "workers": columns(workers),
        }],
        "plan": { "word": "remote", "decode": [9, 0] }, "inputs_dropped": false, "took_us": 1.0,
    })
}

#[test]
fn o1_the_sentence_about_each_case_of_predicted_disagg_follows_the_rule_of_the_policy() {
    let cases: toml::Table = shipped("predicted-disagg").parse().expect("TOML");
    let mut checked = 0;
    for case in cases["case"].as_array().expect("cases") {
        let name = case["name"].as_str().expect("a name");
        let Some(plan) = case["expect"].get("plan").and_then(toml::Value::as_str) else { continue };
        let workers = case["rows"].as_array().expect("rows");
        if workers.is_empty() {
            continue;
        }
        let sentences = pointsman_admin_cli::sentences(&receipt(case, workers), &|_| None, DIGEST);
        let reason = sentences.iter().find(|sentence| sentence.starts_with("Remote, because "));
        let reason = reason.unwrap_or_else(|| panic!("{name}: {sentences:?}"));
        // O1.27: either it says what forbids local prefill, or its numbers show what is cheaper.
        let compares = reason.contains("the decode worker saves too little");
        let numbers = reason.split(|c: char| !c.is_ascii_digit()).filter_map(|text| text.parse::<f32>().ok());
        let is_local = compares && {
            let numbers: Vec<f32> = numbers.collect();
            let [local, _, own, requests, _, _, remote, ..] = numbers[..] else { panic!("{reason}") };
            let none = toml::Value::Table(toml::Table::new());
            let setting = |name, default| number(case.get("settings").unwrap_or(&none), name, default);
            let delayed = requests * setting("delayed-weight", 1.0) * own;
            local + delayed + setting("margin-tokens", 1_000.0) < remote
        };
        assert_eq!(is_local, plan == "local", "{name}: {reason}");
        checked += 1;
    }
    assert!(checked > 20, "{checked}");
}
