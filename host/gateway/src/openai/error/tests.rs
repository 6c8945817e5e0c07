use http::header;
use pointsman_routing::RouteError;
use pointsman_workers::{Leg, Pause, WorkerId};
use serde_json::json;

use super::*;
use crate::{
    openai::endpoint::Format,
    openai::request_error::RequestError,
    openai::sequence::LastNumber,
    upstream::{CallError, SHOULD_RETRY},
};

fn check(cause: impl Into<ApiError>, status: u16, code: &str, retry: bool) {
    let response = cause.into().response("id-1");
    assert_eq!(response.status().as_u16(), status, "{code}");
    assert_eq!(response.headers().contains_key(header::RETRY_AFTER), retry, "{code}");
    let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
    assert_eq!((&body["error"]["code"], &body["error"]["request_id"]), (&json!(code), &json!("id-1")));
    assert!(!body["error"]["message"].as_str().unwrap().is_empty());
}

#[test]
fn i_every_row_of_the_table_has_its_status_and_code() {
    check(RequestError::new("n", "`0`"), 400, "invalid_request", false);
    check(ApiError::Unauthorized, 401, "unauthorized", false);
    check(ApiError::UnknownKey, 401, "unauthorized", false);
    check(ApiError::TokenMayNot("it names no tenant"), 403, "forbidden", false);
    check(ApiError::TooManyWrongKeys, 429, "rate_limited", true);
    check(ApiError::ForeignOrigin("a".into()), 403, "forbidden", false);
    check(ApiError::NotJson, 415, "unsupported_media_type", false);
    check(ApiError::ModelNotFound("m".into(), "use n".into()), 404, "model_not_found", false);
    check(ApiError::of_route(RouteError::UnknownWorker(WorkerId(1)), 529), 404, "worker_not_found", false);
    check(
        ApiError::of_route(RouteError::NotEligible(WorkerId(1), "draining".into()), 529),
        409,
        "worker_not_eligible",
        false,
    );
    check(ApiError::PayloadTooLarge(9), 413, "payload_too_large", false);
    check(ApiError::RequestTimeout(Duration::from_secs(30)), 408, "request_timeout", false);
    check(
        ApiError::of_route(RouteError::Shed(ShedReason { status: 429, reason: "quota".into() }), 529),
        429,
        "shed",
        true,
    );
    check(ApiError::ClientClosed, 499, "client_closed", false);
    check(CallError::Broken("eof".into()), 502, "bad_upstream", false);
    check(
        ApiError::of_route(RouteError::NoWorker { leg: Leg::Decode, text: "none".to_owned() }, 529),
        503,
        "no_worker",
        true,
    );
    let silence = Silence { what: "head", key: "head", limit: Duration::from_secs(1) };
    check(CallError::Timeout(silence), 504, "engine_timeout", false);
    check(CallError::Down, 502, "bad_upstream", false);
    check(CallError::Asleep, 502, "bad_upstream", false);
    let poison = ApiError::Poison { cause: "broken".into(), left: Duration::from_secs(9) };
    check(poison, 502, "poison_request", false);
    check(ApiError::PrefillUnavailable, 503, "prefill_unavailable", true);
    check(ApiError::HandoffLost("all are down".into()), 503, "handoff_lost", true);
    check(ApiError::LoopDetected, 508, "loop_detected", false);
    check(ApiError::Draining, 503, "draining", true);
    check(ApiError::Deadline, 504, "deadline", false);
    check(ApiError::of_route(RouteError::AllBusy(Leg::Decode), 529), 529, "overloaded", true);
    for (is_too_many, status) in [(false, 503), (true, 429)] {
        let pause = Pause { left: Duration::from_secs(2), is_too_many, may_be_tried: false };
        let paused = RouteError::AllPaused { leg: Leg::Decode, pause };
        check(ApiError::of_route(paused, 529), status, "overloaded", true);
    }
    check(ApiError::of_route(RouteError::NoPin(Leg::Prefill), 529), 400, "invalid_request", false);
}

#[test]
fn i_an_engine_s_4xx_passes_unchanged_and_its_5xx_text_is_carried() {
    let refused = CallError::Status {
        status: StatusCode::BAD_REQUEST,
        content_type: Some(HeaderValue::from_static("text/x")),
        retry: RetryAdvice { after: Some(HeaderValue::from_static("7")), should: Some(false) },
        body: Bytes::from_static(b"{\"error\": 1 }"),
        in_body: false,
    };
    let response = ApiError::from(refused).response("id");
    // I1.3
    assert_eq!((response.status().as_u16(), response.body().as_ref()), (400, b"{\"error\": 1 }".as_slice()));
    assert_eq!(response.headers().get(header::CONTENT_TYPE).unwrap(), "text/x");
    assert_eq!(response.headers().get(header::RETRY_AFTER).unwrap(), "7");
    // I1.12
    assert_eq!(response.headers().get(SHOULD_RETRY).unwrap(), "false");
    let body = Bytes::from_static(br#"{"error":{"message":"out of blocks","code":500}}"#);
    let status = StatusCode::INTERNAL_SERVER_ERROR;
    let failed = |should, body| {
        let retry = RetryAdvice { after: None, should };
        ApiError::from(CallError::Status { status, content_type: None, retry, body, in_body: false })
    };
    // I1.1: it quotes the engine's text
    assert_eq!(failed(None, body.clone()).to_string(), "the engine answered 500: out of blocks");
    for (should, sent) in [(None, false), (Some(true), false), (Some(false), true)] {
        let response = failed(should, body.clone()).response("id");
        // I1.12
        assert_eq!((response.status().as_u16(), response.headers().contains_key(SHOULD_RETRY)), (502, sent));
    }
}

#[test]
fn i1_what_another_try_cannot_mend_says_so_to_clients() {
    let poison = ApiError::Poison { cause: "broken".into(), left: Duration::from_secs(9) };
    let too_large = ApiError::from(CallError::TooLarge("it has more".into()));
    let pinned = ApiError::Pinned(Box::new(too_large.clone()), "it is pinned".into());
    let should = |cause: &ApiError| {
        let value = cause.response("id").headers().get(SHOULD_RETRY).cloned();
        value.map(|value| value.to_str().unwrap().to_owned())
    };
    for cause in [ApiError::Deadline, ApiError::LoopDetected, poison, too_large, pinned] {
        // I1.12
        assert_eq!(should(&cause).as_deref(), Some("false"), "{cause}");
    }
    for cause in [ApiError::from(CallError::Broken("eof".into())), ApiError::PrefillUnavailable] {
        // I1.12
        assert_eq!(should(&cause), None, "{cause}");
    }
}

#[test]
fn i6_an_overload_is_529_for_clients_of_anthropic_s_api() {
    let pause = Pause { left: Duration::from_secs(2), is_too_many: false, may_be_tried: false };
    let paused = ApiError::of_route(RouteError::AllPaused { leg: Leg::Decode, pause }, 529);
    let status = |cause: &ApiError, format| cause.response_as(format, "id").status().as_u16();
    // I6.23
    assert_eq!((status(&paused, Format::Anthropic), status(&paused, Format::OpenAi)), (529, 503));
    assert_eq!(status(&ApiError::Draining, Format::Anthropic), 503);
}

#[test]
fn a5_a_connect_error_does_not_name_the_address() {
    let cause = ApiError::from(CallError::Connect("tcp connect error 10.1.2.3:99".into()));
    // A5.2: in errors
    assert!(!cause.to_string().contains("10.1.2.3"));
}

#[test]
fn i_a_mid_stream_error_is_one_valid_event() {
    let event = ApiError::Deadline.event(Format::OpenAi, "id", LastNumber::default());
    let json = event.strip_prefix(b"data: ").and_then(|rest| rest.strip_suffix(b"\n\n")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(json).unwrap();
    assert_eq!(json["error"]["code"], "deadline");
}

#[test]
fn i1_an_error_within_a_stream_says_when_to_retry_without_a_header() {
    let text = |cause: &ApiError| {
        String::from_utf8(cause.event(Format::OpenAi, "id", LastNumber::default()).to_vec()).unwrap()
    };
    let pause = Pause { left: Duration::from_secs(7), is_too_many: false, may_be_tried: false };
    let paused = ApiError::of_route(RouteError::AllPaused { leg: Leg::Decode, pause }, 529);
    // I1.10
    assert!(text(&paused).contains("; retry after 7 s\""), "{}", text(&paused));
    let cause = Box::new(ApiError::BadUpstream("it broke".to_owned()));
    let broken = ApiError::NotContinued { cause, delivered: 3, why: paused.message() };
    assert!(text(&broken).contains("; retry later\""), "{}", text(&broken));
    assert!(paused.message().ends_with("retry after the time in `retry-after`"), "an answer has the header");
}
