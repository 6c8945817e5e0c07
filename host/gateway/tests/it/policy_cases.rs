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
