//! The table of metrics, the bound of label values, exemplars, alert rules and the dashboard.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use pointsman_gateway::config::Model;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{CHAT, Client, TestCluster, TestClusterBuilder};
use serde_json::{Value, json};

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const INTRODUCTION: &str = "# Metrics

`GET /metrics` of the admin listener. The format is OpenMetrics with exemplars for scrapers that ask for it, as
Prometheus does, and Prometheus text for all others. The number of series is bounded: models are those that a worker
serves or `other`, policies those that the operator installed, tenants those that the configuration names (at most
1,000 until a restart) or `other`, and all other values come from fixed lists. Requests without a tenant are
`none`. The buckets of latencies are those of vLLM with smaller ones below. The folder `deploy` of the
repository has alert rules and a dashboard.

`UPDATE_DOCS=1 cargo nextest run --workspace --test it metrics_reference` writes this table from a scrape.

| metric | type | unit | labels | meaning |
| --- | --- | --- | --- | --- |
";

fn file(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path)
}

fn read(path: &str) -> String {
    let path = file(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn chat(model: &str) -> String {
    json!({ "model": model, "max_tokens": 2, "stream": true, "messages": [{ "role": "user", "content": "hi" }] })
        .to_string()
}

async fn cluster() -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        let text = "[prefill]\nshadow = { builtin = \"least-loaded\" }\n[prefill.canary]\nshare = 0.5\nnative = \"random\"";
        config.policies.slots = toml::from_str(text).unwrap();
        config.queue.limit = 1;
        let waits = Model { wait_for_workers: Some(Duration::from_secs(1)), ..Model::default() };
        config.models.insert("tiny".to_owned(), waits);
    });
    let sim = |role| SimConfig { kv_events: true, ..SimConfig::instant(Dialect::Vllm, role) };
    let builder = builder.sim_with(sim(Role::Prefill), "").sim_with(sim(Role::Decode), "");
    let cluster = builder.start().await;
    cluster.kv_events_live().await.unwrap();
    for _ in 0..4 {
        assert_eq!(cluster.client.post(CHAT, &[], chat("tiny")).await.unwrap().status, 200);
    }
    cluster.at_rest().await.unwrap();
    cluster
}

async fn scrape(client: &Client, accept: &str) -> String {
    let reply = client.get_with("/metrics", &[("accept", accept)]).await.unwrap();
    String::from_utf8(reply.body.to_vec()).unwrap()
}

/// Names of labels of a series such as `a{b="c",d="e"} 1`.
fn labels(series: &str) -> BTreeSet<String> {
    let (mut names, mut rest) = (BTreeSet::new(), series.split_once('{').map_or("", |(_, rest)| rest));
    while let Some((name, value)) = rest.split_once("=\"") {
        names.insert(name.trim_start_matches(',').to_owned());
        let mut escaped = false;
        let end = value.find(|character| {
            let ends = character == '"' && !escaped;
            escaped = character == '\\' && !escaped;
            ends
        });
        rest = &value[end.unwrap() + 1..];
        if rest.starts_with('}') {
            break;
        }
    }
    names
}

/// The rows of the table from a scrape in the Prometheus text format.
fn table(scrape: &str) -> String {
    let (mut rows, mut found) = (BTreeMap::new(), BTreeMap::<String, BTreeSet<String>>::new());
    for line in scrape.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            rows.insert(name.to_owned(), (help.to_owned(), String::new()));
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            rows.get_mut(name).unwrap().1 = kind.to_owned();
        } else {
            let name = line.split(['{', ' ']).next().unwrap();
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            let name = base.filter(|base| rows.contains_key(*base)).unwrap_or(name);
            found.entry(name.to_owned()).or_default().extend(labels(line));
        }
    }
    let mut text = String::new();
    for (name, (help, kind)) in rows {
        let names = found.remove(&name).unwrap_or_default();
        let names: Vec<_> =
            names.iter().filter(|name| *name != "le").map(|name| format!("`{name}`")).collect();
        let base = name.strip_suffix("_total").unwrap_or(&name);
        let unit = ["seconds", "bytes", "tokens", "ratio"].iter().find(|unit| base.ends_with(*unit));
        let (unit, names) = (unit.copied().unwrap_or_default(), names.join(", "));
        writeln!(text, "| `{name}` | {kind} | {unit} | {names} | {help} |").unwrap();
    }
    text
}

#[tokio::test]
async fn m4_the_table_of_metrics_is_that_of_a_scrape() {
    let cluster = cluster().await;
    cluster.gateway.state().metrics.create_every_series();
    // What policies learn from the cluster's first request arrives later.
    cluster.until_counted("pointsman_policy_observations_total{slot=\"decode\"", 1.0).await.unwrap();
    let scraped = scrape(&cluster.admin, "text/plain").await;
    let text = format!("{INTRODUCTION}{}", table(&scraped));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(file("docs/metrics.md"), &text).unwrap();
        let mut recorded = scraped;
        for sim in &cluster.sims {
            let address = sim.url().trim_start_matches("http://").parse().unwrap();
            let engine = scrape(&Client::new(address), "text/plain").await;
            let new = engine.lines().filter(|line| !line.starts_with('#') && !line.starts_with("sim_"));
            new.for_each(|line| {
                writeln!(recorded, "{}", line.replacen('{', &format!("{{instance=\"{address}\","), 1))
                    .unwrap()
            });
        }
        let series = recorded.lines().filter(|line| !line.starts_with('#'));
        let series: BTreeMap<_, _> = series.filter_map(|line| line.rsplit_once(' ')).collect();
        let text: String = series.iter().map(|(series, value)| format!("{series} {value}\n")).collect();
        std::fs::write(file("deploy/prometheus/recorded-scrape.txt"), text).unwrap();
    }
    let build = cluster.metric("pointsman_build_info{version=\"0.").await.unwrap();
    // M4.6
    assert_eq!(build, [1.0]);
    // M4.1
    assert_eq!(read("docs/metrics.md"), text, "the table is stale: its head says how to write it");
}

#[tokio::test]
async fn m4_clients_cannot_add_series() {
    let cluster = cluster().await;
    let series = async || -> BTreeSet<String> {
        let text = scrape(&cluster.admin, "*/*").await;
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples.filter_map(|line| Some(line.rsplit_once(' ')?.0.to_owned())).collect()
    };
    let refuse = async |count: usize| {
        let model = format!("{count}\"}} 1\n# {{\\\u{1F600}\r\0");
        let tenant = format!("t{count}");
        let headers =
            [("x-request-id", tenant.as_str()), ("x-tenant", &tenant), ("authorization", "Bearer none")];
        let reply = cluster.client.post(CHAT, &headers, chat(&model)).await.unwrap();
        assert_eq!(reply.status.as_u16(), 404, "{:?}", reply.body);
        let path = format!("/v1/models/{count}");
        cluster.client.get(&path).await.unwrap();
    };
    refuse(0).await;
    cluster.at_rest().await.unwrap();
    // What policies learn from the cluster's first request arrives later.
    cluster.until_counted("pointsman_policy_observations_total{slot=\"decode\"", 1.0).await.unwrap();
    let before = series().await;
    for count in 1..1_000 {
        refuse(count).await;
    }
    cluster.at_rest().await.unwrap();
    let after = series().await;
    // M4.2
    assert_eq!(after.difference(&before).collect::<Vec<_>>(), [""; 0]);
    let text = scrape(&cluster.admin, "*/*").await;
    let others: Vec<_> = text.lines().filter(|line| line.contains("model=\"other\"")).collect();
    assert!(others.iter().any(|line| line.ends_with(" 1000")), "{others:?}");
}

#[tokio::test]
async fn m4_exemplars_name_sampled_traces_in_openmetrics_only() {
    let cluster = cluster().await;
    let open = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3,*/*;q=0.1";
    let exemplar = "# {trace_id=\"4bf92f3577b34da6a3ce929d0e0e4736\"}";
    assert!(!scrape(&cluster.admin, open).await.contains("trace_id"), "no trace was sampled");
    cluster.client.post(CHAT, &[("traceparent", PARENT)], chat("tiny")).await.unwrap();
    cluster.at_rest().await.unwrap();
    let text = scrape(&cluster.admin, open).await;
    for metric in ["pointsman_ttft_seconds_bucket{", "pointsman_request_seconds_bucket{"] {
        // M4.3
        assert!(text.lines().any(|line| line.starts_with(metric) && line.contains(exemplar)), "{metric}");
    }
    let reply = cluster.admin.get_with("/metrics", &[("accept", "text/plain;version=0.0.4")]).await.unwrap();
    let text = String::from_utf8(reply.body.to_vec()).unwrap();
    // M4.4
    assert!(reply.headers["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
    assert!(!text.contains("trace_id") && !text.contains("# EOF"));
    assert!(text.contains("# TYPE pointsman_requests_total counter\n"));
    promtool(&["check", "metrics"], Some(text.as_bytes()));
}

#[tokio::test]
async fn m4_what_alerts_look_at_is_there_without_a_worker_or_an_event() {
    let cluster = TestClusterBuilder::new().start().await;
    // M4.8
    assert_eq!(cluster.metric("pointsman_servable_models ").await.unwrap(), [0.0]);
    for (counter, label, values) in [
        ("handoffs", "result", &["lost_no_decode_worker", "lost_prefill_died"][..]),
        ("trace_spans_dropped", "reason", &["connect", "queue", "timeout"]),
        ("log_lines_dropped", "reason", &["queue_full", "write_failed"]),
        ("key_set_fetches", "result", &["failed"]),
        ("decision_log_dropped", "reason", &["queue", "disk"]),
    ] {
        for value in values {
            let series = format!("pointsman_{counter}_total{{{label}=\"{value}\"}}");
            // M4.9, M5.4
            assert_eq!(cluster.metric(&series).await.unwrap(), [0.0], "{series}");
        }
    }
    let served = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    // M5.4
    assert!(!served.metric("pointsman_invariant_violations_total{").await.unwrap().is_empty());
    // M4.8
    assert_eq!(served.metric("pointsman_servable_models ").await.unwrap(), [1.0]);
}

/// Runs promtool, if it is installed. Problems of style (exit code 3) are not a failure.
fn promtool(arguments: &[&str], input: Option<&[u8]>) {
    use std::io::Write as _;
    let mut command = Command::new("promtool");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut child) = command.spawn() else {
        eprintln!("skipped: promtool is not installed (Debian: prometheus)");
        return;
    };
    child.stdin.take().unwrap().write_all(input.unwrap_or_default()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(matches!(output.status.code(), Some(0 | 3)), "{arguments:?}: {}", String::from_utf8_lossy(&text));
}

#[test]
fn m5_alert_rules_pass_promtool_and_fire_for_no_healthy_run() {
    let rules = file("deploy/helm/pointsman/files/alerts.yaml").canonicalize().unwrap();
    let tests = file("deploy/prometheus/alerts.test.yaml").canonicalize().unwrap();
    // M5.1
    promtool(&["check", "rules", rules.to_str().unwrap()], None);
    // M5.6
    promtool(&["test", "rules", tests.to_str().unwrap()], None);
    let mut test = format!(
        "rule_files: ['{}']\nevaluation_interval: 1m\ntests:\n- interval: 1m\n  input_series:\n",
        rules.display()
    );
    for line in read("deploy/prometheus/recorded-scrape.txt").lines() {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let value: f64 = value.parse().unwrap();
        writeln!(test, "  - {{ series: '{series}', values: '{value:.9}x60' }}").unwrap();
    }
    test.push_str("  promql_expr_test:\n  - expr: count(ALERTS) or vector(0)\n    eval_time: 55m\n    exp_samples: [{ labels: '{}', value: 0 }]\n");
    let dir = tempfile::tempdir().unwrap();
    let generated = dir.path().join("healthy.yaml");
    std::fs::write(&generated, test).unwrap();
    // M5.2
    promtool(&["test", "rules", generated.to_str().unwrap()], None);
}

/// Metrics, and labels of groupings and matchers, of an expression.
fn mentioned(expression: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let is_name = |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | ':');
    let words = expression.split(|character| !is_name(character));
    let metrics = words.filter(|word| {
        word.starts_with("pointsman_") || word.starts_with("vllm:") || word.starts_with("sglang:")
    });
    let mut labels = BTreeSet::new();
    for group in expression.split("by (").skip(1) {
        labels.extend(group.split(')').next().unwrap().split(',').map(|label| label.trim().to_owned()));
    }
    for matcher in expression.split('{').skip(1) {
        labels.extend(matcher.split(['=', '!']).next().map(str::to_owned));
    }
    (metrics.map(str::to_owned).collect(), labels)
}

#[test]
fn m5_every_metric_and_label_of_rules_and_dashboard_was_scraped() {
    let mut known = BTreeMap::<String, BTreeSet<String>>::new();
    let recorded =
        read("deploy/prometheus/recorded-scrape.txt") + &read("tests/fixtures/engines/metrics.txt");
    let sglang = ["num_running_reqs", "num_queue_reqs", "token_usage"]
        .map(|name| format!("sglang:{name}{{tp_rank=\"0\"}} 1\n"));
    for line in (recorded + &sglang.concat()).lines().filter(|line| !line.starts_with('#')) {
        known.entry(line.split(['{', ' ']).next().unwrap().to_owned()).or_default().extend(labels(line));
    }
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana/pointsman.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "two panels have one id");
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let mut expressions: Vec<String> =
        targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect();
    assert!(expressions.len() > 40, "{}", expressions.len());
    let rules = read("deploy/helm/pointsman/files/alerts.yaml");
    let rules = rules.split("expr:").skip(1).map(|rule| rule.split("labels:").next().unwrap().to_owned());
    expressions.extend(rules);
    for expression in &expressions {
        let (metrics, used) = mentioned(expression);
        // Those of a target are Prometheus' own.
        let mut having = BTreeSet::from(["__name__", "job", "instance", "namespace"].map(str::to_owned));
        for metric in
            metrics.iter().filter(|metric| !metric.ends_with("num_") && !metric.ends_with(":num_requests_"))
        {
            // M5.3
            having.extend(
                known.get(metric).unwrap_or_else(|| panic!("{metric} was not scraped: {expression}")).clone(),
            );
        }
        let unknown: Vec<_> = used.difference(&having).collect();
        assert!(unknown.is_empty() || unknown == ["model"], "labels {unknown:?} of {expression}");
    }
}

/// Counters of faults that no rule looks at, with the reason.
const WITHOUT_RULE: [(&str, &str); 7] = [
    ("pointsman_ext_proc_picks_total", "a refusal is the answer to a request, which PointsmanErrors counts"),
    (
        "pointsman_index_dropped_total",
        "it makes predictions worse, which PointsmanCachePredictionOff looks at",
    ),
    ("pointsman_poison_requests_total", "a fault of a client or of the engines, which the log names"),
    (
        "pointsman_policy_shadow_total",
        "what a shadow would refuse is a result of the trial, and no request fails",
    ),
    (
        "pointsman_replicas_dropped_total",
        "routing knows the load of other gateways less well, and no request fails",
    ),
    (
        "pointsman_replicas_state_problems_total",
        "shared state is advice, unsent changes are sent again, and the log names the rest",
    ),
    ("pointsman_tls_reloads_total", "PointsmanCertificateNotReloaded looks at the last reload instead"),
];

#[test]
fn m5_each_counter_of_faults_has_a_rule_or_a_reason_to_have_none() {
    let rules = read("deploy/helm/pointsman/files/alerts.yaml");
    let table = read("docs/metrics.md");
    let counters = table.lines().filter(|row| row.contains("| counter |"));
    let faults = counters.filter(|row| ["bug", "dropped", "refused"].iter().any(|word| row.contains(word)));
    let names = faults.map(|row| row.split('`').nth(1).unwrap());
    let without: Vec<_> = names.filter(|name| !rules.contains(name)).collect();
    // M5.5
    assert_eq!(without, WITHOUT_RULE.map(|(name, _)| name), "add a rule, or a reason to have none");
}
