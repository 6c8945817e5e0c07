//! `/metrics`, read by an independent parser: families are complete, names follow the rules, values agree.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::cluster::{TestCluster, TestClusterBuilder};
use serde_json::json;

#[derive(Debug, Default)]
struct Family {
    help: Option<String>,
    kind: Option<String>,
    /// Sample name with labels, and value.
    samples: Vec<(String, f64)>,
}

/// Splits the exposition into families.
///
/// Fails the test on a line that OpenMetrics does not allow, a second HELP or TYPE, and a repeated series.
fn parse(text: &str) -> BTreeMap<String, Family> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let (mut current, mut seen) = (String::new(), BTreeSet::new());
    let body = text.strip_suffix("# EOF\n").expect("the text ends with its end mark");
    for line in body.lines() {
        if let Some((kind, rest)) = line
            .strip_prefix("# HELP ")
            .map(|rest| ("help", rest))
            .or(line.strip_prefix("# TYPE ").map(|rest| ("type", rest)))
        {
            let (name, value) = rest.split_once(' ').expect(line);
            current = name.to_owned();
            let family = families.entry(current.clone()).or_default();
            let slot = if kind == "help" { &mut family.help } else { &mut family.kind };
            assert!(slot.replace(value.to_owned()).is_none() && family.samples.is_empty(), "twice: {line}");
            continue;
        }
        assert!(!line.starts_with('#'), "neither HELP nor TYPE: {line}");
        let (series, value) = line.rsplit_once(' ').expect(line);
        let name = series.split('{').next().unwrap();
        assert!(name.starts_with(&current), "{line} is in family {current}");
        if let Some(labels) = series.strip_prefix(name).filter(|labels| !labels.is_empty()) {
            check_labels(labels.strip_prefix('{').and_then(|labels| labels.strip_suffix('}')).expect(line));
        }
        assert!(seen.insert(series.to_owned()), "twice: {series}");
        families.get_mut(&current).unwrap().samples.push((series.to_owned(), value.parse().expect(line)));
    }
    families
}

/// Names are identifiers, values are quoted, and no name comes twice.
fn check_labels(mut labels: &str) {
    let mut names = BTreeSet::new();
    while !labels.is_empty() {
        let (name, rest) = labels.split_once("=\"").expect(labels);
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{labels}");
        assert!(names.insert(name), "label {name} comes twice");
        let (mut escaped, mut end) = (false, None);
        for (at, character) in rest.char_indices() {
            match character {
                '"' if !escaped => {
                    end = Some(at);
                    break;
                }
                _ => escaped = character == '\\' && !escaped,
            }
        }
        let rest = &rest[end.expect(labels) + 1..];
        labels = rest.strip_prefix(',').unwrap_or(rest);
    }
}

fn check(name: &str, family: &Family) {
    let (help, kind) = (family.help.as_deref().expect(name), family.kind.as_deref().expect(name));
    assert!(name.starts_with("pointsman_"), "{name}");
    assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
    assert!(help.ends_with('.') && help.len() > 10, "{name}: {help}");
    assert_eq!(name.ends_with("_seconds"), help.contains("in seconds"), "{name}: {help}");
    assert_eq!(name.ends_with("_bytes"), help.contains("in bytes"), "{name}: {help}");
    let suffixes: &[&str] = match kind {
        "counter" => &["_total"],
        "gauge" => &[""],
        "histogram" => &["_sum", "_count", "_bucket"],
        other => panic!("{name} is a {other}"),
    };
    for (series, value) in &family.samples {
        let sample = series.split('{').next().unwrap();
        let suffix = sample.strip_prefix(name).unwrap();
        assert!(suffixes.contains(&suffix), "{series} in a {kind}");
        assert!(*value >= 0.0 && value.is_finite(), "{series} {value}");
    }
    if kind == "histogram" {
        check_histogram(name, family);
    }
}

/// Buckets rise, and the last one holds as many observations as `_count`.
fn check_histogram(name: &str, family: &Family) {
    let of = |suffix: &str| -> Vec<(String, f64)> {
        let prefix = format!("{name}{suffix}");
        let series = family.samples.iter();
        series
            .filter_map(|(series, value)| Some((series.strip_prefix(&prefix)?.to_owned(), *value)))
            .collect()
    };
    let mut highest: BTreeMap<String, f64> = BTreeMap::new();
    for (labels, value) in of("_bucket") {
        let before = highest.insert(without_bound(&labels), value);
        assert!(before.is_none_or(|before| before <= value), "{name}{labels} falls");
    }
    let counts: BTreeMap<String, f64> =
        of("_count").into_iter().map(|(labels, value)| (without_bound(&labels), value)).collect();
    assert_eq!(highest, counts, "{name}");
}

/// Labels without `le`, and without braces and commas at the ends.
fn without_bound(labels: &str) -> String {
    let labels = labels.trim_matches(['{', '}']);
    let Some((before, rest)) = labels.split_once("le=\"") else { return labels.to_owned() };
    let (_, after) = rest.split_once('"').unwrap();
    format!("{before}{after}").trim_matches(',').to_owned()
}

async fn exposition(cluster: &TestCluster) -> String {
    let reply =
        cluster.admin.get_with("/metrics", &[("accept", "application/openmetrics-text")]).await.unwrap();
    assert!(reply.headers["content-type"].to_str().unwrap().starts_with("application/openmetrics-text"));
    String::from_utf8(reply.body.to_vec()).unwrap()
}

#[tokio::test]
async fn the_exposition_is_valid_and_follows_the_naming_rules() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            let text = "[prefill]\nshadow = { builtin = \"least-loaded\" }\n[prefill.canary]\nshare = 0.5\nnative = \"random\"";
            config.policies.slots = toml::from_str(text).unwrap();
        })
        .pair(Dialect::Vllm)
        .start()
        .await;
    for _ in 0..4 {
        let body =
            json!({ "model": "tiny", "max_tokens": 2, "messages": [{ "role": "user", "content": "hi" }] });
        assert_eq!(
            cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap().status,
            200
        );
    }
    cluster.at_rest().await.unwrap();
    let text = exposition(&cluster).await;
    let families = parse(&text);
    families.iter().for_each(|(name, family)| check(name, family));
    assert!(families.len() > 40, "{} families", families.len());
    for name in ["pointsman_requests", "pointsman_policy_call_seconds", "pointsman_worker_eligible"] {
        assert!(!families[name].samples.is_empty(), "{name} has no samples");
    }
    let again = parse(&exposition(&cluster).await);
    assert!(again.keys().eq(families.keys()), "a second scrape has the same families");
}

#[tokio::test]
async fn f4_series_exist_at_zero_before_the_first_request_of_a_model() {
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.models.entry("later".to_owned()).or_default();
        })
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let text = exposition(&cluster).await;
    let mut expected = vec![
        "pointsman_isl_tokens_count{source=\"usage\"} 0".to_owned(),
        "pointsman_osl_tokens_count{source=\"counted\"} 0".to_owned(),
        "pointsman_cache_hit_ratio_count{source=\"usage\"} 0".to_owned(),
    ];
    for model in ["tiny", "later"] {
        let labels = format!("endpoint=\"chat_completions\",model=\"{model}\",status=\"200\",code=\"ok\"");
        expected.push(format!("pointsman_requests_total{{{labels}}} 0"));
    }
    for line in expected {
        // F4.15
        assert!(text.lines().any(|other| other == line), "{line} is missing: {text}");
    }
}

#[tokio::test]
async fn f4_legs_have_durations_and_those_that_the_gateway_ends_are_cancelled() {
    let slow =
        SimConfig { itl: Duration::from_millis(10), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new().sim_with(slow, "").start().await;
    let chat = |tokens: u32, stream: bool| {
        json!({
            "model": "tiny", "max_tokens": tokens, "ignore_eos": true, "stream": stream,
            "messages": [{ "role": "user", "content": "hi" }],
        })
        .to_string()
    };
    let path = "/v1/chat/completions";
    for stream in [false, true] {
        let served = cluster.client.post(path, &[], chat(5, stream)).await.unwrap();
        assert_eq!(served.status, 200);
    }
    let mut left = cluster.client.stream(path, &[], chat(5_000, true)).await.unwrap();
    left.next().await.unwrap();
    drop(left);
    cluster.at_rest().await.unwrap();
    let of = |metric: &str, outcome: &str| {
        format!("{metric}{{leg=\"aggregated\",engine=\"vllm\",outcome=\"{outcome}\"}}")
    };
    for (outcome, count) in [("ok", 2.0), ("cancelled", 1.0)] {
        for metric in ["pointsman_legs_total", "pointsman_leg_seconds_count"] {
            // F4.16
            assert_eq!(cluster.metric(&of(metric, outcome)).await.unwrap(), [count], "{metric} {outcome}");
        }
    }
    let took = cluster.metric(&of("pointsman_leg_seconds_sum", "ok")).await.unwrap();
    // F4.16: ten tokens, 10 ms each
    assert!(took[0] >= 0.08 && took[0] < 60.0, "{took:?}");
}

#[tokio::test]
async fn idle_connections_to_workers_that_are_closed_are_counted() {
    let cluster = TestClusterBuilder::new()
        .config(|config| config.upstream.idle_timeout = Duration::from_millis(50))
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let body = r#"{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}"#;
    assert_eq!(cluster.client.post("/v1/chat/completions", &[], body).await.unwrap().status, 200);
    for _ in 0..200 {
        let text = cluster.metrics_text().await.unwrap();
        let line = text.lines().find(|line| line.starts_with("pointsman_upstream_connections_closed_total "));
        if line.is_some_and(|line| !line.ends_with(" 0")) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("no idle connection was closed within 10 s");
}
