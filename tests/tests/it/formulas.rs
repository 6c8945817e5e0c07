//! Formulas of operators in a running gateway: in the configuration, and as files that are dropped, refused,
//! tried on a share of the requests, rolled back and named by receipts.

use pointsman_embedded_policies::{FORMULA, FORMULA_FILTER, LEAST_LOADED};
use pointsman_gateway::config::Config;
use pointsman_policy_runtime::{Access, Capacity, FormulaSettings, Limits, PolicyEngine, compile, digest};
use pointsman_policy_tools::replay::{RankBy, Report, replay_behind};
use pointsman_routing::Origin;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{CHAT, Reply, TestCluster, TestClusterBuilder};
use serde_json::{Value, json};

use crate::slots::slot;

/// Prefers the worker of the higher id, whatever runs there.
const LAST: &str = "cost = \"label('place') == 'last' ? 0 : 1\"\n";
/// Prefers the other one.
const FIRST: &str = "cost = \"label('place') == 'last' ? 1 : 0\"\n";

/// Two workers: `spot` is a taint of the first, and the label `place` of the second is `last`.
async fn cluster(config: &str) -> TestCluster {
    let more: Config = toml::from_str(config).unwrap();
    let engine = || SimConfig::instant(Dialect::Vllm, Role::Aggregated);
    TestClusterBuilder::new()
        .config(|config| {
            config.policies.slots = more.policies.slots;
            config.routing.hash_salt = more.routing.hash_salt;
            config.auth.keys = more.auth.keys;
        })
        .sim_with(engine(), ",taint=spot")
        .sim_with(engine(), ",label.place=last")
        .start()
        .await
}

async fn post(cluster: &TestCluster, headers: &[(&str, &str)]) -> Reply {
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]});
    let headers = [&[("x-pointsman-decision", "1")], headers].concat();
    cluster.client.post(CHAT, &headers, body.to_string()).await.unwrap()
}

/// Returns the header that says who decided and which worker serves.
async fn ask(cluster: &TestCluster) -> String {
    let reply = post(cluster, &[]).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.headers["x-pointsman-decision"].to_str().unwrap().to_owned()
}

async fn reload(cluster: &TestCluster) -> Value {
    cluster.admin.post("/policies/reload", &[], "").await.unwrap().json().unwrap()
}

/// Puts a formula file in place of the last one, and waits until it serves: a busy machine compiles for long.
async fn install(cluster: &TestCluster, text: &str) {
    cluster.drop_policy("aggregated.formula.toml", text.as_bytes()).unwrap();
    reload(cluster).await;
    // A filter is one of several parts, and not what the slot is named after.
    let wanted = digest(text.as_bytes()).to_string();
    for _ in 0..1_200 {
        if slot(cluster).await["parts"].to_string().contains(&wanted) {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    panic!("{text} never served: {}", slot(cluster).await);
}

/// Replays what was decided by the formula with a formula file.
async fn replay(cluster: &TestCluster, text: &str) -> Report {
    let export = cluster.admin.get("/decisions/export?slot=aggregated&policy=formula").await.unwrap();
    let limits = Limits { deadline: std::time::Duration::from_secs(1), ..Limits::default() };
    let engine = PolicyEngine::new(limits, Capacity::detect()).unwrap();
    let access = Access::default();
    let load = |bytes: &[u8], settings: Option<String>| {
        compile(&engine, bytes, &access).unwrap().configure(Origin::Embedded, &settings.unwrap()).unwrap()
    };
    let settings = FormulaSettings::of_file(text, 0).unwrap();
    let (keep, rank) = (load(FORMULA_FILTER, settings.keep), load(FORMULA, settings.rank));
    replay_behind(Some(&keep), &rank, access.state(), &*export.body, RankBy::Policy).unwrap()
}

#[tokio::test]
async fn a_formula_dropped_in_serves_the_next_request_and_its_receipt_names_the_file_s_digest() {
    let cluster = cluster("").await;
    assert!(ask(&cluster).await.contains("predicted-latency@1 policy"));
    cluster.drop_policy("aggregated.formula.toml", LAST.as_bytes()).unwrap();
    let mut header = ask(&cluster).await;
    // A minute, because a debug build compiles it for half of one on a busy machine.
    for _ in 0..1_200 {
        if header.contains("formula@2 policy") {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        header = ask(&cluster).await;
    }
    assert!(header.starts_with("aggregated=2/") && header.contains("formula@2 policy"), "{header}");
    let status = slot(&cluster).await;
    let text = digest(LAST.as_bytes()).to_string();
    assert_eq!((&status["policy"], &status["digest"]), (&json!("formula"), &json!(text)));
    assert_eq!(status["file"], "aggregated.formula.toml", "{status}");
    assert!(status["origin"].to_string().contains("aggregated.formula.toml"), "{status}");
    let receipt = cluster.newest_receipt().await.unwrap();
    assert!(receipt.to_string().contains(&text), "{receipt}");
    assert_eq!(receipt["costs"], json!([1.0, 0.0]), "{receipt}");
    // Another text is another generation, and a removed file gives the slot back.
    install(&cluster, FIRST).await;
    let header = ask(&cluster).await;
    assert!(header.starts_with("aggregated=1/") && header.contains("formula@3 policy"), "{header}");
    std::fs::remove_file(cluster.policy_path("aggregated.formula.toml")).unwrap();
    reload(&cluster).await;
    reload(&cluster).await;
    assert!(ask(&cluster).await.contains("predicted-latency@4 policy"));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_bad_formula_is_refused_with_line_and_column_and_the_last_one_serves() {
    let cluster = cluster("").await;
    install(&cluster, LAST).await;
    for (text, message) in [
        (
            "# queue first\ncost = \"2 * engine_que\"\n",
            "line 2, column 13: cost: unknown name `engine_que`; did you mean `engine_queue`?",
        ),
        ("cost = \"1 +\"\n", "line 1, column 12: cost: expected "),
        ("cots = \"1\"\n", "line 1, column 1: unknown field `cots`, expected one of `cost`, `keep`, `shed`"),
        (
            "cost = \"1\"\nshed = { when = \"min(engine_queue) < 40\" }\n",
            "line 2, column 17: shed.when: it holds for an idle fleet",
        ),
    ] {
        cluster.drop_policy("aggregated.formula.toml", text.as_bytes()).unwrap();
        reload(&cluster).await;
        let refusals = slot(&cluster).await["refusals"].as_array().unwrap().clone();
        let last = refusals.last().unwrap();
        assert_eq!((&last["kind"], &last["file"]), (&json!("formula"), &json!("aggregated.formula.toml")));
        assert!(last["message"].as_str().unwrap().starts_with(message), "{last}");
        assert_eq!(last["digest"], json!(digest(text.as_bytes()).to_string()));
        assert!(ask(&cluster).await.contains("formula@2 policy"));
    }
    // A component beside it is refused as well: one of the two has to go.
    cluster.drop_policy("aggregated.wasm", LEAST_LOADED).unwrap();
    reload(&cluster).await;
    let refusals = slot(&cluster).await["refusals"].as_array().unwrap().clone();
    assert_eq!(refusals.last().unwrap()["kind"], "two_files");
    assert!(ask(&cluster).await.contains("formula@2 policy"));
    std::fs::remove_file(cluster.policy_path("aggregated.formula.toml")).unwrap();
    reload(&cluster).await;
    assert!(ask(&cluster).await.contains("least-loaded@3 policy"));
    // N7.7
    for (name, near) in [
        ("aggregated.formula.TOML", "aggregated.formula.toml"),
        ("aggregated.toml", "aggregated.formula.toml"),
    ] {
        cluster.drop_policy(name, LAST.as_bytes()).unwrap();
        let report = reload(&cluster).await;
        assert_eq!(report["strays"], json!([name]), "{report}");
        let problem = format!("the file name selects no slot; did you mean `{near}`?");
        assert_eq!(report["stray_problems"], json!([problem]), "{report}");
        std::fs::remove_file(cluster.policy_path(name)).unwrap();
    }
    // The name of no slot.
    cluster.drop_policy("agregated.formula.toml", LAST.as_bytes()).unwrap();
    let report = reload(&cluster).await;
    assert_eq!(report["strays"], json!(["agregated.formula.toml"]), "{report}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn a_formula_is_a_canary_is_promoted_and_rolled_back() {
    let cluster = cluster("[policies.slots.aggregated]\ncanary = { share = 0.5 }").await;
    cluster.drop_policy("aggregated.canary.formula.toml", LAST.as_bytes()).unwrap();
    reload(&cluster).await;
    let mut by_formula = 0;
    for _ in 0..60 {
        let header = ask(&cluster).await;
        by_formula += u32::from(header.contains("formula@2 policy"));
        assert!(
            header.contains("formula@2 policy") || header.contains("predicted-latency@1 policy"),
            "{header}"
        );
    }
    assert!((10..50).contains(&by_formula), "{by_formula} of 60");
    let promoted = cluster.admin.post("/policies/aggregated/promote?from=canary", &[], "").await.unwrap();
    assert_eq!(promoted.status, 200, "{promoted:?}");
    for _ in 0..8 {
        assert!(ask(&cluster).await.contains("formula@3 policy"));
    }
    assert_eq!(slot(&cluster).await["source"], "promoted");
    let back = cluster.admin.post("/policies/aggregated/rollback", &[], "").await.unwrap();
    assert_eq!(back.status, 200, "{back:?}");
    assert!(ask(&cluster).await.contains("predicted-latency@4 policy"));
    assert_eq!(slot(&cluster).await["quarantined"], json!([digest(LAST.as_bytes()).to_string()]));
    // The text that was rolled back is not taken from another lane's file, and another text is.
    cluster.drop_policy("aggregated.formula.toml", LAST.as_bytes()).unwrap();
    reload(&cluster).await;
    assert!(ask(&cluster).await.contains("predicted-latency@4 policy"));
    let refusals = slot(&cluster).await["refusals"].as_array().unwrap().clone();
    let last = refusals.last().unwrap();
    assert_eq!((&last["kind"], &last["file"]), (&json!("quarantined"), &json!("aggregated.formula.toml")));
    install(&cluster, FIRST).await;
    assert!(ask(&cluster).await.contains("formula@5 policy"));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn n7_a_filter_is_tried_before_both_parts_of_a_formula_file() {
    let cluster = cluster("").await;
    install(&cluster, "cost = \"label('place') == 'last' ? 0 : 1\"\nkeep = \"taint('spot')\"\n").await;
    cluster.drop_policy("aggregated.canary.formula.toml", b"keep = \"active_requests < 9\"\n").unwrap();
    reload(&cluster).await;
    let canary = slot(&cluster).await["canary"].clone();
    let worlds: Vec<_> = canary["parts"].as_array().unwrap().iter().map(|part| &part["world"]).collect();
    // N7.8
    assert_eq!(worlds, ["filter", "filter", "selector"], "{canary}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn keep_narrows_like_a_filter_and_shed_rejects_with_its_status() {
    let cluster = cluster("").await;
    let file = "cost = \"label('place') == 'last' ? 0 : 1\"\nkeep = \"taint('spot')\"\n";
    install(&cluster, file).await;
    assert!(ask(&cluster).await.starts_with("aggregated=1/"), "keep comes before cost");
    let receipt = cluster.newest_receipt().await.unwrap();
    let stages = receipt["stages"].as_array().unwrap();
    let worlds: Vec<&str> = stages.iter().filter_map(|stage| stage["world"].as_str()).collect();
    assert_eq!((worlds, &receipt["left"]), (vec!["filter", "selector"], &json!([0])), "{receipt}");
    let report = replay(&cluster, file).await;
    assert!(report.decisions > 0 && report.agree == report.decisions, "{report:?}");
    let other = replay(&cluster, "cost = \"1\"\nkeep = \"!taint('spot')\"\n").await;
    assert!(other.agree < report.agree, "{other:?}");
    // `keep` alone: what is configured ranks.
    install(&cluster, "keep = \"!taint('spot')\"\n").await;
    let header = ask(&cluster).await;
    // T1.4
    let decided = "formula+predicted-latency@3 policy";
    assert!(header.starts_with("aggregated=2/") && header.ends_with(decided), "{header}");
    let metrics = cluster.metrics_text().await.unwrap();
    let lines =
        |name: &str| metrics.lines().filter(|line| line.starts_with(name)).collect::<Vec<_>>().join("\n");
    // T1.4
    assert!(lines("pointsman_decisions_total").contains("policy=\"formula+predicted-latency\""), "{metrics}");
    let short = digest(b"keep = \"!taint('spot')\"\n").short();
    // T1.5
    assert!(lines("pointsman_policy_info").contains(&format!("digest=\"{short}+")), "{metrics}");
    let list = cluster.admin.get("/decisions?limit=1&policy=formula%2Bpredicted-latency").await.unwrap();
    let list = list.json().unwrap();
    // T1.4
    assert_eq!(list["decisions"][0]["program"], "formula+predicted-latency", "{list}");
    assert_eq!(list["decisions"][0]["policy"], "predicted-latency", "{list}");
    // None is kept: the answer is that of any filter.
    install(&cluster, "keep = \"taint('none')\"\n").await;
    let reply = post(&cluster, &[]).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!(reply.status, 503, "{text}");
    assert!(text.contains("the filters dropped every candidate"), "{text}");
    let refused = |reply: &Reply| {
        let header = reply.headers["x-pointsman-decision"].to_str().unwrap();
        let (leg, rest) = header.split_once(" id=").unwrap();
        (leg.to_owned(), rest.split_once(' ').unwrap().1.to_owned())
    };
    let expected = ("aggregated=-".to_owned(), "formula+predicted-latency@4 nobody_left".to_owned());
    // T2.2
    assert_eq!(refused(&reply), expected);
    let shed = "cost = \"1\"\nshed = { when = \"prompt_tokens > 0\", status = 529, reason = \"not now\" }\n";
    install(&cluster, shed).await;
    let reply = post(&cluster, &[]).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!((reply.status.as_u16(), text.contains("not now")), (529, true), "{text}");
    // T2.2
    assert_eq!(refused(&reply), ("aggregated=-".to_owned(), "formula@5 shed".to_owned()));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn the_configuration_holds_formulas_and_tenants_are_named() {
    let config = r#"
        # The digests of `sk-batch` and `sk-gold`.
        [[auth.keys]]
        id = "batch"
        tenant = "batch"
        digest = "sha256:38fcc73a9dc613f145bed24eb4123f92105c78567a6e563d43dbcb1f29927864"
        [[auth.keys]]
        id = "gold"
        tenant = "gold"
        digest = "sha256:83a9d60338d134e3e8f33851f115498635f1090262307ce959b86e5eee88bb90"
        [routing]
        hash_salt = 77
        [policies.slots.aggregated]
        builtin = "formula"
        [policies.slots.aggregated.settings]
        cost = "label('place') == 'last' ? 0 : 1"
        keep = "tenant != 'batch' || taint('spot')"
        shed = { when = "tenant == 'none' && min(engine_queue) > 40" }
    "#;
    let cluster = cluster(config).await;
    let serve = async |key: &str| {
        let reply = post(&cluster, &[("authorization", key)]).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.headers["x-pointsman-decision"].to_str().unwrap().to_owned()
    };
    assert!(serve("Bearer sk-batch").await.starts_with("aggregated=1/"));
    let gold = serve("Bearer sk-gold").await;
    assert!(gold.starts_with("aggregated=2/") && gold.contains("formula@1 policy"), "{gold}");
    // The same in a file: its names are hashed with the gateway's salt.
    let file = "cost = \"tenant in ['x', 'gold'] && taint('spot') ? 0 : 1\"\n";
    install(&cluster, file).await;
    for _ in 0..8 {
        assert!(serve("Bearer sk-gold").await.starts_with("aggregated=1/"));
    }
    cluster.at_rest().await.unwrap();

    let wrong = r#"
        [policies.slots.aggregated]
        builtin = "formula"
        settings = { cost = "2 * kv_usge" }
    "#;
    let more: Config = toml::from_str(wrong).unwrap();
    let builder = TestClusterBuilder::new().config(|config| config.policies.slots = more.policies.slots);
    let problem =
        builder.sim(Dialect::Vllm, Role::Aggregated).try_start().await.map(drop).unwrap_err().to_string();
    let expected = "cost: column 5: unknown name `kv_usge`; did you mean `kv_usage`?";
    assert!(problem.contains("policies.slots.aggregated") && problem.contains(expected), "{problem}");
}
