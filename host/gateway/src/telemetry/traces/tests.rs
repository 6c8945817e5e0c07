//! Tests which requests are recorded.

use super::*;
use crate::{config::Traces as Raw, telemetry::metrics::ReasonLabels};

fn traces(change: impl FnOnce(&mut Raw)) -> Arc<Traces> {
    let mut config = crate::config::Config::default();
    config.traces.endpoint = Some("http://127.0.0.1:9".to_owned());
    change(&mut config.traces);
    let settings = config.resolve().unwrap();
    Traces::start(&settings.traces, settings.server.listen, &Arc::default()).unwrap().unwrap()
}

fn headers(parent: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("traceparent", parent.parse().unwrap());
    headers
}

/// Returns headers with a `traceparent` whose trace id has these lower 64 bits.
fn parent(low: u64, flags: u8) -> HeaderMap {
    headers(&format!("00-4bf92f3577b34da6{low:016x}-00f067aa0ba902b7-{flags:02x}"))
}

fn recorded(traces: &Arc<Traces>, headers: &HeaderMap, trust: HintTrust) -> bool {
    traces.begin(headers, trust, Instant::now()).is_some()
}

#[tokio::test]
async fn m1_the_parent_s_flag_or_the_ratio_decides() {
    let (always, never) =
        (traces(|traces| traces.sample_ratio = 1.0), traces(|traces| traces.sample_ratio = 0.0));
    let (sampled, not) = (parent(7, 1), parent(7, 0));
    // M1.2
    assert!(recorded(&never, &sampled, HintTrust::Trusted) && !recorded(&always, &not, HintTrust::Trusted));
    // M1.3: the trace of an untrusted client decides nothing
    assert!(!recorded(&never, &sampled, HintTrust::Ignored) && recorded(&always, &not, HintTrust::Ignored));
    for bad in ["", "00-00000000000000000000000000000000-0000000000000000-00", "00-x-y-01"] {
        assert!(recorded(&always, &headers(bad), HintTrust::Trusted), "{bad}: the ratio decides");
        assert!(!recorded(&never, &headers(bad), HintTrust::Trusted), "{bad}: the ratio decides");
    }
    let ratio = traces(|traces| (traces.sample_ratio, traces.parent_based) = (0.25, false));
    let quarter = u64::MAX >> 3;
    // M1.4: by the id, as OpenTelemetry's samplers do
    assert!(recorded(&ratio, &parent(quarter - 1, 0), HintTrust::Trusted));
    assert!(!recorded(&ratio, &parent(quarter + 1, 1), HintTrust::Trusted));
    let count = (0..10_000).filter(|_| recorded(&ratio, &HeaderMap::new(), HintTrust::Trusted)).count();
    assert!((2_200..2_800).contains(&count), "{count} of 10,000");
}

#[tokio::test]
async fn m3_what_the_queue_cannot_take_is_dropped_and_counted() {
    let small = traces(|traces| traces.queue_spans = 4);
    for _ in 0..20 {
        let mut trace = small.begin(&parent(7, 1), HintTrust::Trusted, Instant::now()).unwrap();
        (0..500).for_each(|_| trace.stage("stage", Instant::now(), Attributes::default()));
        let id = "id";
        trace.finish(&Ending {
            endpoint: crate::openai::request::Endpoint::ChatCompletions,
            model: None,
            status: 200,
            code: "ok",
            request_id: id,
            request: None,
            usage: None,
            output_tokens: 0,
            first_token: None,
        });
    }
    let dropped =
        |reason| small.queue.metrics.trace_spans_dropped.get_or_create(&ReasonLabels { reason }).get();
    // M3.1: at most 64 spans of a request, and no request is queued that does not fit
    assert_eq!((dropped("request"), dropped("queue")), (20 * (500 - 63), 20 * 64));
}

#[test]
fn every_problem_of_the_section_is_reported_without_secrets() {
    let mut config = crate::config::Config::default();
    config.traces = Raw {
        endpoint: Some("http://user:geheim@host".to_owned()),
        headers: [("a b".to_owned(), "x".into()), ("key".to_owned(), "geheim\n".into())].into(),
        sample_ratio: 1.5,
        service_name: String::new(),
        resource_attributes: [("service.name".to_owned(), "x".to_owned())].into(),
        timeout: Duration::ZERO,
        queue_spans: 0,
        ..Raw::default()
    };
    let problems = config.resolve().unwrap_err().to_string();
    for path in [
        "endpoint",
        "headers.a b",
        "headers.key",
        "sample_ratio",
        "service_name",
        "resource_attributes",
        "timeout",
        "queue_spans",
    ] {
        assert!(problems.contains(&format!("traces.{path}")), "{path} in {problems}");
    }
    // M1.5
    assert!(!problems.contains("geheim"), "{problems}");
}
