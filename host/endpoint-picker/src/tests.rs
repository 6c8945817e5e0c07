//! The state machine with a picker that records what it is told.

use std::sync::Arc;

use bytes::Bytes;
use envoy_types::pb::envoy::{
    config::core::v3::{HeaderMap as EnvoyHeaders, HeaderValue as EnvoyHeader},
    extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode,
    service::ext_proc::v3::{
        HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProcessingResponse, ProtocolConfiguration,
        body_mutation::Mutation, processing_request::Request, processing_response::Response,
    },
};
use http::{Extensions, HeaderName, HeaderValue};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::{Duration, Instant},
};

use crate::{
    AnswerHead, Exchange, Pick, Picker, Refusal, RequestHead, conversation::Conversation, message::CHUNK,
};

/// Largest body that the picker takes.
const LIMIT: usize = 200_000;

struct Recorder(UnboundedSender<String>);

struct Recorded {
    log: UnboundedSender<String>,
    head: RequestHead,
    received: usize,
}

impl Picker for Recorder {
    type Exchange = Recorded;
    type Room = ();

    fn reserve(&self, _: usize) -> Option<()> {
        Some(())
    }

    fn begin(&self, head: RequestHead, _: &Extensions) -> Recorded {
        Recorded { log: self.0.clone(), head, received: 0 }
    }
}

fn refused(status: u16) -> Refusal {
    Refusal { status, code: "refused", headers: Vec::new(), body: Bytes::from_static(b"{}") }
}

impl Exchange for Recorded {
    async fn admit(&mut self) -> Result<(), Refusal> {
        if self.head.headers.contains_key("wrong-key") { Err(refused(403)) } else { Ok(()) }
    }

    fn must_end(&mut self) -> bool {
        false
    }

    fn receive(&mut self, bytes: usize) -> Result<(), Refusal> {
        self.received += bytes;
        if self.received > LIMIT { Err(refused(413)) } else { Ok(()) }
    }

    fn without_room(&mut self) -> Refusal {
        refused(503)
    }

    async fn pick(&mut self, body: Bytes) -> Result<Pick, Refusal> {
        if self.head.subset.as_ref().is_some_and(Vec::is_empty) {
            return Err(refused(503));
        }
        let _ = self.log.send(format!("{} {} {}", self.head.method, self.head.path, body.len()));
        Ok(Pick {
            endpoint: "10.0.0.1:8000".to_owned(),
            set_headers: vec![(HeaderName::from_static("a"), HeaderValue::from_static("b"))],
            remove_headers: vec![HeaderName::from_static("c")],
            body,
        })
    }

    fn answered(&mut self, head: AnswerHead<'_>) -> Vec<(HeaderName, HeaderValue)> {
        let hidden = if head.hides_body { " hidden" } else { "" };
        let AnswerHead { status, served, details, .. } = head;
        let _ = self.log.send(format!("answered {status} {served:?} {details:?}{hidden}"));
        Vec::new()
    }

    fn answer_bytes(&mut self, bytes: &[u8]) {
        let _ = self.log.send(format!("answer {}", bytes.len()));
    }

    fn ended(&mut self) {
        let _ = self.log.send("ended".to_owned());
    }

    fn deadline(&self) -> Instant {
        Instant::now() + Duration::from_secs(1)
    }

    fn time_passed(&mut self) -> Option<Refusal> {
        Some(refused(504))
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        let _ = self.log.send("dropped".to_owned());
    }
}

struct Talk {
    conversation: Conversation<Recorder>,
    log: UnboundedReceiver<String>,
}

impl Talk {
    fn new() -> Self {
        let (sender, log) = unbounded_channel();
        Self { conversation: Conversation::new(Arc::new(Recorder(sender)), Extensions::new(), None), log }
    }

    async fn say(&mut self, request: Request) -> Vec<ProcessingResponse> {
        self.try_say(request).await.unwrap()
    }

    async fn try_say(&mut self, request: Request) -> Result<Vec<ProcessingResponse>, tonic::Status> {
        let message = ProcessingRequest { request: Some(request), ..ProcessingRequest::default() };
        self.send(message).await
    }

    async fn send(&mut self, message: ProcessingRequest) -> Result<Vec<ProcessingResponse>, tonic::Status> {
        self.conversation.on(message).await?;
        Ok(std::iter::from_fn(|| self.conversation.next_answer()).collect())
    }

    /// Returns the calls that the picker got since the last time.
    fn calls(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.log.try_recv().ok()).collect()
    }
}

fn headers(fields: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let field = |(key, value): &(&str, &str)| EnvoyHeader {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..EnvoyHeader::default()
    };
    let headers = fields.iter().map(field).collect();
    HttpHeaders { headers: Some(EnvoyHeaders { headers }), end_of_stream, ..HttpHeaders::default() }
}

fn post() -> Request {
    Request::RequestHeaders(headers(&[(":method", "POST"), (":path", "/v1/completions")], false))
}

fn body(body: &[u8], end_of_stream: bool) -> HttpBody {
    HttpBody { body: body.to_vec(), end_of_stream, ..HttpBody::default() }
}

fn modes(request: BodySendMode, answer: BodySendMode) -> Option<ProtocolConfiguration> {
    Some(ProtocolConfiguration {
        request_body_mode: request.into(),
        response_body_mode: answer.into(),
        ..ProtocolConfiguration::default()
    })
}

/// Returns a short form of an answer.
fn shown(answer: &ProcessingResponse) -> String {
    let meta = if answer.dynamic_metadata.is_some() { "+metadata" } else { "" };
    let common = |kind: &str, common: Option<_>| {
        let common: envoy_types::pb::envoy::service::ext_proc::v3::CommonResponse = common.unwrap();
        let set = common.header_mutation.map_or(0, |mutation| mutation.set_headers.len());
        let body = match common.body_mutation.and_then(|mutation| mutation.mutation) {
            Some(Mutation::StreamedResponse(chunk)) => {
                format!(" {}{}", chunk.body.len(), if chunk.end_of_stream { " end" } else { "" })
            }
            Some(Mutation::Body(body)) => format!(" replaced by {}", body.len()),
            _ => String::new(),
        };
        format!("{kind} set={set}{body}{meta}")
    };
    match answer.response.clone().unwrap() {
        Response::RequestHeaders(one) => common("request-headers", one.response),
        Response::RequestBody(one) => common("request-body", one.response),
        Response::ResponseHeaders(one) => common("answer-headers", one.response),
        Response::ResponseBody(one) => common("answer-body", one.response),
        Response::RequestTrailers(_) => "request-trailers".to_owned(),
        Response::ResponseTrailers(_) => "answer-trailers".to_owned(),
        Response::ImmediateResponse(one) => format!("refused {}", one.status.unwrap().code),
        Response::StreamedImmediateResponse(_) => "?".to_owned(),
    }
}

fn all(answers: &[ProcessingResponse]) -> Vec<String> {
    answers.iter().map(shown).collect()
}

#[tokio::test]
async fn a_streamed_request_is_answered_when_its_body_is_whole_and_in_chunks() {
    let mut talk = Talk::new();
    assert!(talk.say(post()).await.is_empty());
    let half = vec![b'x'; CHUNK];
    assert!(talk.say(Request::RequestBody(body(&half, false))).await.is_empty());
    let answers = talk.say(Request::RequestBody(body(&half[..10], true))).await;
    let chunks = ["request-headers set=2+metadata", "request-body set=0 62000", "request-body set=0 10 end"];
    assert_eq!(all(&answers), chunks);
    assert_eq!(talk.calls(), ["POST /v1/completions 62010"]);
    let status = headers(&[(":status", "200")], false);
    assert_eq!(all(&talk.say(Request::ResponseHeaders(status)).await), ["answer-headers set=0"]);
    let answers = talk.say(Request::ResponseBody(body(&vec![b'y'; CHUNK + 1], false))).await;
    assert_eq!(all(&answers), ["answer-body set=0 62000", "answer-body set=0 1"]);
    assert_eq!(all(&talk.say(Request::ResponseBody(body(b"", true))).await), ["answer-body set=0 0 end"]);
    assert_eq!(talk.calls(), ["answered 200 None None", "answer 62001", "answer 0", "ended", "dropped"]);
}

#[tokio::test]
async fn a_buffered_request_is_answered_with_its_body_and_left_unchanged() {
    let mut talk = Talk::new();
    let protocol_config = modes(BodySendMode::Buffered, BodySendMode::Streamed);
    let message =
        ProcessingRequest { request: Some(post()), protocol_config, ..ProcessingRequest::default() };
    assert_eq!(all(&talk.send(message).await.unwrap()), ["request-headers set=0"]);
    let answers = talk.say(Request::RequestBody(body(b"{}", true))).await;
    assert_eq!(all(&answers), ["request-body set=2+metadata"]);
    let status = headers(&[(":status", "200")], false);
    talk.say(Request::ResponseHeaders(status)).await;
    assert_eq!(all(&talk.say(Request::ResponseBody(body(b"{}", true))).await), ["answer-body set=0"]);
}

#[tokio::test]
async fn an_answer_whose_body_is_not_sent_ends_with_its_head() {
    let mut talk = Talk::new();
    let protocol_config = modes(BodySendMode::FullDuplexStreamed, BodySendMode::None);
    let message =
        ProcessingRequest { request: Some(post()), protocol_config, ..ProcessingRequest::default() };
    talk.send(message).await.unwrap();
    talk.say(Request::RequestBody(body(b"{}", true))).await;
    talk.calls();
    let status = headers(&[(":status", "200")], false);
    assert_eq!(all(&talk.say(Request::ResponseHeaders(status)).await), ["answer-headers set=0"]);
    assert_eq!(talk.calls(), ["answered 200 None None hidden", "ended", "dropped"]);
    let answers = talk.say(Request::ResponseTrailers(HttpTrailers::default())).await;
    assert_eq!(all(&answers), ["answer-trailers"]);
}

#[tokio::test]
async fn trailers_end_a_body_and_are_passed_on() {
    let mut talk = Talk::new();
    talk.say(post()).await;
    talk.say(Request::RequestBody(body(b"{}", false))).await;
    let answers = talk.say(Request::RequestTrailers(HttpTrailers::default())).await;
    let expected = ["request-headers set=2+metadata", "request-body set=0 2", "request-trailers"];
    assert_eq!(all(&answers), expected);
    talk.say(Request::ResponseHeaders(headers(&[(":status", "200")], false))).await;
    let answers = talk.say(Request::ResponseTrailers(HttpTrailers::default())).await;
    assert_eq!(all(&answers), ["answer-trailers"]);
    assert_eq!(talk.calls().last().unwrap(), "dropped");
}

#[tokio::test]
async fn a_request_without_a_body_is_answered_at_once() {
    let mut talk = Talk::new();
    let get = headers(&[(":method", "GET"), (":path", "/v1/models")], true);
    let answers = talk.say(Request::RequestHeaders(get)).await;
    assert_eq!(all(&answers), ["request-headers set=2+metadata"]);
    assert_eq!(talk.calls(), ["GET /v1/models 0"]);
}

#[tokio::test]
async fn a_repeated_end_is_ignored_and_a_body_that_goes_on_is_not() {
    let mut talk = Talk::new();
    talk.say(post()).await;
    talk.say(Request::RequestBody(body(b"{}", true))).await;
    for _ in 0..16 {
        assert!(talk.say(Request::RequestBody(body(b"", true))).await.is_empty());
    }
    let status = talk.try_say(Request::RequestBody(body(b"", true))).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    let mut talk = Talk::new();
    talk.say(post()).await;
    talk.say(Request::RequestBody(body(b"{}", true))).await;
    let status = talk.try_say(Request::RequestBody(body(b"x", true))).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}

#[tokio::test]
async fn refusals_end_the_stream_and_the_exchange() {
    let mut talk = Talk::new();
    let wrong = headers(&[(":method", "POST"), ("wrong-key", "1")], false);
    assert_eq!(all(&talk.say(Request::RequestHeaders(wrong)).await), ["refused 403"]);
    assert!(talk.conversation.is_over());
    assert_eq!(talk.calls(), ["dropped"]);
    let mut talk = Talk::new();
    talk.say(post()).await;
    let large = vec![b'x'; LIMIT + 1];
    assert_eq!(all(&talk.say(Request::RequestBody(body(&large, false))).await), ["refused 413"]);
    assert_eq!((talk.conversation.is_over(), talk.calls()), (true, vec!["dropped".to_owned()]));
    let mut talk = Talk::new();
    talk.say(post()).await;
    talk.conversation.time_passed().unwrap();
    assert_eq!(shown(&talk.conversation.next_answer().unwrap()), "refused 504");
}

#[tokio::test]
async fn modes_in_which_no_endpoint_can_be_picked_are_refused() {
    for mode in [BodySendMode::None, BodySendMode::Streamed, BodySendMode::BufferedPartial] {
        let mut talk = Talk::new();
        let protocol_config = modes(mode, BodySendMode::None);
        let message =
            ProcessingRequest { request: Some(post()), protocol_config, ..ProcessingRequest::default() };
        assert_eq!(all(&talk.send(message).await.unwrap()), ["refused 500"]);
        assert!(talk.calls().is_empty(), "no exchange begins");
    }
}

#[tokio::test]
async fn messages_out_of_order_end_the_stream() {
    let status = headers(&[(":status", "200")], true);
    let error = Talk::new().try_say(Request::ResponseHeaders(status)).await.unwrap_err();
    assert!(error.message().contains("request_header_mode"), "{error}");
    let mut talk = Talk::new();
    talk.say(post()).await;
    assert!(talk.try_say(post()).await.is_err());
    assert!(Talk::new().send(ProcessingRequest::default()).await.is_err());
    let observed =
        ProcessingRequest { observability_mode: true, request: Some(post()), ..ProcessingRequest::default() };
    assert!(Talk::new().send(observed).await.unwrap_err().message().contains("observability_mode"));
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_says_nothing_ends() {
    let mut conversation = Talk::new().conversation;
    let until = conversation.deadline();
    assert_eq!(until, Instant::now() + Duration::from_secs(10));
    assert_eq!(conversation.time_passed().unwrap_err().code(), tonic::Code::DeadlineExceeded);
}
