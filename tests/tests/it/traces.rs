//! OpenTelemetry traces: what a collector receives for each kind of request, and what a bad collector costs.

use std::{collections::BTreeMap, time::Duration};

use pointsman_gateway::config::{Config, SemconvVersion, TokenSource};
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{Behaviour, CHAT, Collector, ReceivedSpan, TestCluster, TestClusterBuilder};
use serde_json::json;
use tokio::time::{sleep, timeout};

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
/// A text that must be in no span.
const PROMPT: &str = "xylophone";

fn body(stream: bool, tokens: u32) -> String {
    let mut body = json!({
        "model": "tiny", "stream": stream, "max_tokens": tokens, "ignore_eos": true,
        "messages": [{ "role": "user", "content": format!("{PROMPT} {}", "word ".repeat(40)) }],
    });
    if stream {
        body["stream_options"] = json!({ "include_usage": true });
    }
    body.to_string()
}

fn tracing_to(endpoint: String) -> impl FnOnce(&mut Config) {
    move |config: &mut Config| {
        config.traces.endpoint = Some(endpoint);
        config.traces.sample_ratio = 1.0;
        config.traces.interval = Duration::from_millis(20);
        config.traces.timeout = Duration::from_millis(400);
    }
}

fn sim(dialect: Dialect, role: Role) -> SimConfig {
    SimConfig { record: 100, ..SimConfig::instant(dialect, role) }
}

fn named<'a>(spans: &'a [ReceivedSpan], name: &str) -> &'a ReceivedSpan {
    let mut found = spans.iter().filter(|span| span.name == name);
    let span = found.next().unwrap_or_else(|| panic!("no span {name} in {:?}", names(spans)));
    assert!(found.next().is_none(), "two spans {name} in {:?}", names(spans));
    span
}

fn names(spans: &[ReceivedSpan]) -> Vec<&str> {
    spans.iter().map(|span| span.name.as_str()).collect()
}

fn attribute<'a>(span: &'a ReceivedSpan, key: &str) -> &'a str {
    span.attributes.get(key).unwrap_or_else(|| panic!("no {key} in {span:?}"))
}

/// Every span is in one trace below one root, lies within it, and holds no text of the prompt.
fn check_tree(spans: &[ReceivedSpan]) -> &ReceivedSpan {
    let root = spans.iter().find(|span| span.kind == 2).unwrap();
    for span in spans {
        assert_eq!(span.trace, root.trace, "{span:?}");
        assert!(span.id == root.id || span.parent == root.id, "{span:?}");
        assert!(
            root.start <= span.start && span.start <= span.end && span.end <= root.end,
            "{span:?} {root:?}"
        );
        // M1.6
        assert!(!format!("{span:?}").contains(PROMPT), "{span:?}");
        let has_remote_parent = span.id == root.id && !root.parent.is_empty();
        // M1.15
        assert_eq!(span.flags, if has_remote_parent { 0x301 } else { 0x101 }, "{span:?}");
    }
    root
}

fn engine_s_parent(cluster: &TestCluster, sim: usize) -> (String, String) {
    let headers: BTreeMap<_, _> =
        cluster.sims[sim].recorded().last().unwrap().headers.iter().cloned().collect();
    let fields: Vec<&str> = headers["traceparent"].split('-').collect();
    assert_eq!(fields[3], "01", "{headers:?}");
    (fields[1].to_owned(), fields[2].to_owned())
}

async fn dropped(cluster: &TestCluster, reason: &str) -> f64 {
    let series = format!("pointsman_trace_spans_dropped_total{{reason=\"{reason}\"}}");
    cluster.metric(&series).await.unwrap().iter().sum()
}

#[tokio::test]
async fn m1_a_pair_s_request_is_one_tree_with_a_link_from_decode_to_prefill() {
    for (dialect, stream) in [(Dialect::Vllm, true), (Dialect::Sglang, false)] {
        let collector = Collector::accepting().await.unwrap();
        let cluster = TestClusterBuilder::new()
            .config(tracing_to(collector.endpoint()))
            .config(|config| {
                config.traces.headers = [("x-api-key".to_owned(), "secret-7".into())].into();
                config.traces.resource_attributes =
                    [("deployment.environment.name".into(), "test".into())].into();
            })
            .sim_with(sim(dialect, Role::Prefill), "")
            .sim_with(sim(dialect, Role::Decode), "")
            .start()
            .await;
        let headers = [("traceparent", PARENT), ("tracestate", "vendor=1")];
        let reply = cluster.client.post(CHAT, &headers, body(stream, 4)).await.unwrap();
        assert_eq!(reply.status.as_u16(), 200, "{:?}", reply.body);
        let spans = collector.traces(1).await.unwrap();
        if let Ok(dir) = std::env::var("OTLP_DUMP") {
            std::fs::write(format!("{dir}/{}.bin", dialect.as_str()), &collector.bodies()[0]).unwrap();
        }
        let root = check_tree(&spans);
        let (prefill, decode) = (named(&spans, "prefill"), named(&spans, "decode"));
        // M1.1
        assert_eq!((root.trace.as_str(), root.parent.as_str()), (TRACE, "00f067aa0ba902b7"));
        assert_eq!((root.name.as_str(), root.state.as_str()), ("POST /v1/chat/completions", "vendor=1"));
        for name in ["receive", "plan", "route prefill", "route decode", "relay"] {
            assert_eq!(named(&spans, name).kind, 1);
        }
        assert!(prefill.kind == 3 && decode.kind == 3);
        // M1.7
        assert_eq!(decode.links, std::slice::from_ref(&prefill.id));
        // M1.8
        assert_eq!(engine_s_parent(&cluster, 0), (TRACE.to_owned(), prefill.id.clone()));
        assert_eq!(engine_s_parent(&cluster, 1), (TRACE.to_owned(), decode.id.clone()));
        // M2.1
        let usage = |key| attribute(root, key).parse::<u32>().unwrap();
        assert!(usage("gen_ai.usage.input_tokens") > 10);
        assert_eq!(usage("gen_ai.usage.output_tokens"), 4);
        let expected = [
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.request.model", "tiny"),
            ("gen_ai.request.max_tokens", "4"),
            ("gen_ai.provider.name", dialect.as_str()),
            ("http.response.status_code", "200"),
        ];
        expected.iter().for_each(|(key, value)| assert_eq!(attribute(root, key), *value));
        assert_eq!(attribute(decode, "server.address"), "127.0.0.1");
        assert!(attribute(decode, "server.port").parse::<u16>().is_ok());
        // M2.2
        let route = named(&spans, "route decode");
        let expected = [("slot", "decode"), ("worker", "2"), ("attempt", "0"), ("lane", "active")];
        expected
            .iter()
            .for_each(|(key, value)| assert_eq!(attribute(route, &format!("pointsman.{key}")), *value));
        for key in ["generation", "decider", "candidates"] {
            attribute(route, &format!("pointsman.{key}"));
        }
        assert_eq!(named(&spans, "relay").events.len(), usize::from(stream), "the first token of a stream");
        assert_eq!(root.resource["service.name"], "pointsman");
        assert_eq!(root.resource["deployment.environment.name"], "test");
        // M1.14: the configured port is 0
        assert!(root.resource["service.instance.id"].ends_with("-0"), "{:?}", root.resource);
        // M3.2
        let head = &collector.heads()[0];
        assert!(head.starts_with("POST /v1/traces ") && head.contains("application/x-protobuf"), "{head}");
        assert!(head.contains("x-api-key: secret-7"), "{head}");
        // The gateway counts them when it has read the collector's answer.
        let mut exported = Vec::new();
        for _ in 0..400 {
            exported = cluster.metric("pointsman_trace_spans_exported_total").await.unwrap();
            if exported == [spans.len() as f64] {
                break;
            }
            sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(exported, [spans.len() as f64]);
    }
}

#[tokio::test]
async fn m1_retries_refusals_and_clients_that_leave_have_whole_traces() {
    let collector = Collector::accepting().await.unwrap();
    let slow = |role| SimConfig { itl: Duration::from_millis(20), ..sim(Dialect::Vllm, role) };
    let cluster = TestClusterBuilder::new()
        .config(tracing_to(collector.endpoint()))
        .config(|config| config.traces.semconv = SemconvVersion::V1_36)
        .sim_with(slow(Role::Aggregated), "")
        .sim_with(slow(Role::Aggregated), "")
        .start()
        .await;
    let fault = FaultKind::Status { status: 500, retry_after: None };
    let once = || vec![Fault { times: Some(1), ..Fault::always(fault.clone()) }];
    cluster.sims.iter().for_each(|sim| sim.set_faults(once()));
    let reply = cluster.client.post(CHAT, &[], body(false, 2)).await.unwrap();
    let spans = collector.traces(1).await.unwrap();
    check_tree(&spans);
    let legs: Vec<_> = spans.iter().filter(|span| span.name == "aggregated").collect();
    // M1.9
    assert!(legs.len() >= 2 && reply.status.as_u16() >= 200, "{:?}", names(&spans));
    assert_eq!((attribute(legs[0], "error.type"), legs[0].status), ("status_5xx", 2));
    assert_eq!(attribute(legs[1], "pointsman.attempt"), "1");
    // M1.13
    assert_eq!((legs[0].links.len(), &legs[1].links[..]), (0, std::slice::from_ref(&legs[0].id)));
    named(&spans, "pause aggregated");
    // M2.3
    assert_eq!(attribute(legs[0], "gen_ai.system"), "vllm");
    cluster.sims.iter().for_each(|sim| sim.set_faults(vec![]));

    let unknown =
        json!({ "model": format!("no \"{PROMPT}\"\n"), "messages": [{ "role": "user", "content": "x" }] });
    let unknown = unknown.to_string();
    let reply = cluster.client.post(CHAT, &[], unknown).await.unwrap();
    assert_eq!(reply.status.as_u16(), 404, "{:?}", reply.body);
    let spans = collector.traces(2).await.unwrap();
    let refused: Vec<_> = spans.iter().filter(|span| span.trace != spans[0].trace).cloned().collect();
    let root = check_tree(&refused);
    // M1.10
    assert_eq!((attribute(root, "http.response.status_code"), root.status), ("404", 0));
    assert!(
        root.attributes.contains_key("error.type") && !root.attributes.contains_key("gen_ai.request.model")
    );

    let mut stream = cluster.client.stream(CHAT, &[("traceparent", PARENT)], body(true, 200)).await.unwrap();
    stream.next().await.unwrap();
    drop(stream);
    let spans = collector.traces(3).await.unwrap();
    let left: Vec<_> = spans.into_iter().filter(|span| span.trace == TRACE).collect();
    let root = check_tree(&left);
    // M1.11
    assert_eq!(attribute(root, "error.type"), "client_closed");
    assert_eq!(attribute(named(&left, "aggregated"), "error.type"), "cancelled");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn m1_a_request_that_waits_for_tokens_and_a_place_has_a_span_of_each() {
    let collector = Collector::accepting().await.unwrap();
    let slow = SimConfig { itl: Duration::from_millis(20), ..sim(Dialect::Vllm, Role::Aggregated) };
    let cluster = TestClusterBuilder::new()
        .config(tracing_to(collector.endpoint()))
        .config(|config| {
            config.traces.semconv = SemconvVersion::V1_37;
            config.queue.limit = 4;
            let model = config.models.entry("tiny".to_owned()).or_default();
            (model.tokenizer, model.tokenizer_timeout) = (Some(TokenSource::Engine), Duration::from_secs(2));
        })
        .sim_with(slow, ",max_concurrency=1")
        .start()
        .await;
    let mut first = cluster.client.stream(CHAT, &[], body(true, 30)).await.unwrap();
    first.next().await.unwrap();
    let second = cluster.client.post(CHAT, &[("traceparent", PARENT)], body(true, 2)).await.unwrap();
    assert_eq!(second.status.as_u16(), 200, "{:?}", second.body);
    drop(first);
    let spans = collector.traces(2).await.unwrap();
    let spans: Vec<_> = spans.into_iter().filter(|span| span.trace == TRACE).collect();
    let root = check_tree(&spans);
    let (tokenize, queue) = (named(&spans, "tokenize"), named(&spans, "queue aggregated"));
    // M1.1
    assert!(tokenize.end <= queue.start && queue.end <= named(&spans, "aggregated").start);
    assert!(queue.end - queue.start > 20_000_000, "it waited for at least one token: {queue:?}");
    // M2.3
    assert_eq!(attribute(root, "gen_ai.provider.name"), "vllm");
    let newer = ["gen_ai.request.stream", "gen_ai.response.time_to_first_chunk", "gen_ai.system"];
    newer.iter().for_each(|key| assert!(!root.attributes.contains_key(*key), "{key} is not of 1.37"));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn m1_without_traces_or_outside_the_sample_nothing_is_sent() {
    let collector = Collector::accepting().await.unwrap();
    let cluster = TestClusterBuilder::new()
        .config(tracing_to(collector.endpoint()))
        .config(|config| config.traces.sample_ratio = 0.0)
        .sim_with(sim(Dialect::Vllm, Role::Aggregated), "")
        .start()
        .await;
    let not_parent_based = TestClusterBuilder::new()
        .config(tracing_to(collector.endpoint()))
        .config(|config| (config.traces.sample_ratio, config.traces.parent_based) = (0.0, false))
        .sim_with(sim(Dialect::Vllm, Role::Aggregated), "")
        .start()
        .await;
    // The last one: a client's flag where it does not decide.
    for (parent, parent_based) in
        [(None, true), (Some(PARENT.replace("-01", "-00")), true), (Some(PARENT.to_owned()), false)]
    {
        let cluster = if parent_based { &cluster } else { &not_parent_based };
        let headers: Vec<_> = parent.as_deref().map(|parent| ("traceparent", parent)).into_iter().collect();
        assert_eq!(cluster.client.post(CHAT, &headers, body(false, 2)).await.unwrap().status, 200);
        let sent = cluster.sims[0].recorded().last().unwrap().headers.clone();
        let sent = sent.iter().find(|(name, _)| name.as_str() == "traceparent").unwrap().1.clone();
        // M1.2
        assert!(sent.ends_with("-00"), "{sent}");
    }
    cluster.at_rest().await.unwrap();
    sleep(Duration::from_millis(100)).await;
    assert!(collector.bodies().is_empty());
}

#[tokio::test]
async fn m1_headers_of_an_attacker_neither_fail_a_request_nor_join_a_trace() {
    let collector = Collector::accepting().await.unwrap();
    let cluster = TestClusterBuilder::new()
        .config(tracing_to(collector.endpoint()))
        .sim_with(sim(Dialect::Vllm, Role::Aggregated), "")
        .start()
        .await;
    let long = "a=b,".repeat(5_000);
    let zeros = "00-00000000000000000000000000000000-0000000000000000-01";
    let cases =
        [[("traceparent", zeros), ("tracestate", "a=1")], [("traceparent", PARENT), ("tracestate", &long)]];
    for (count, headers) in cases.iter().enumerate() {
        let reply = cluster.client.post(CHAT, headers, body(false, 2)).await.unwrap();
        assert_eq!(reply.status.as_u16(), 200, "{:?}", reply.body);
        let spans = collector.traces(count + 1).await.unwrap();
        if count == 0 {
            // M1.15: it has no parent
            check_tree(&spans);
        }
        // M1.12
        assert!(spans.iter().all(|span| !span.trace.starts_with("0000000000") && span.state.is_empty()));
        let sent = cluster.sims[0].recorded().last().unwrap().headers.clone();
        assert!(sent.iter().all(|(name, _)| name.as_str() != "tracestate"), "{sent:?}");
    }
    // A head of 100 KB is refused whatever is in it.
    let reply = cluster.client.post(CHAT, &[("tracestate", &"a=b,".repeat(25_000))], body(false, 2)).await;
    assert!(reply.is_ok_and(|reply| reply.status.as_u16() == 431));
    assert_eq!(cluster.client.post(CHAT, &[], body(false, 2)).await.unwrap().status, 200);
}

#[tokio::test]
async fn m3_a_bad_collector_costs_spans_and_no_request() {
    let partial = vec![0x0A, 0x02, 0x08, 0x02];
    let cases = [
        (Behaviour::Accept(partial), "rejected"),
        (Behaviour::Status("500 Internal Server Error"), "status"),
        (Behaviour::Status("503 Service Unavailable"), "status"),
        (Behaviour::Hang, "timeout"),
        (Behaviour::Trickle, "timeout"),
    ];
    for (behaviour, reason) in cases {
        let collector = Collector::start(behaviour.clone()).await.unwrap();
        let cluster = TestClusterBuilder::new()
            .config(tracing_to(collector.endpoint()))
            .sim(Dialect::Vllm, Role::Aggregated)
            .start()
            .await;
        for _ in 0..5 {
            assert_eq!(cluster.client.post(CHAT, &[], body(true, 2)).await.unwrap().status, 200);
        }
        let counted = async {
            while dropped(&cluster, reason).await == 0.0 {
                sleep(Duration::from_millis(20)).await;
            }
        };
        // M3.3
        timeout(Duration::from_secs(10), counted).await.unwrap_or_else(|_| panic!("{behaviour:?}"));
        if reason == "rejected" {
            let exported = cluster.metric("pointsman_trace_spans_exported_total").await.unwrap()[0];
            assert!(exported > 0.0 && dropped(&cluster, reason).await % 2.0 == 0.0);
        }
    }
    let cluster = TestClusterBuilder::new()
        .config(tracing_to("http://127.0.0.1:9".to_owned()))
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    assert_eq!(cluster.client.post(CHAT, &[], body(true, 2)).await.unwrap().status, 200);
    for _ in 0..500 {
        if dropped(&cluster, "connect").await > 0.0 {
            return;
        }
        sleep(Duration::from_millis(20)).await;
    }
    panic!("a collector that is away was not counted");
}

#[tokio::test]
async fn m3_the_drain_exports_what_waits() {
    let collector = Collector::accepting().await.unwrap();
    let cluster = TestClusterBuilder::new()
        .config(tracing_to(collector.endpoint()))
        .config(|config| config.traces.interval = Duration::from_secs(600))
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    assert_eq!(cluster.client.post(CHAT, &[], body(false, 2)).await.unwrap().status, 200);
    cluster.at_rest().await.unwrap();
    assert!(collector.bodies().is_empty());
    let TestCluster { gateway, .. } = cluster;
    gateway.drain().await;
    // M3.4
    assert_eq!(collector.spans().unwrap().iter().filter(|span| span.kind == 2).count(), 1);
}
