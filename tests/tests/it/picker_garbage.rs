//! Proxies that break the picker's protocol, at every layer: bytes, frames, messages, their order and number.

use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use envoy_types::pb::envoy::{
    config::core::v3::{HeaderMap, HeaderValue},
    service::ext_proc::v3::{
        HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, processing_request::Request as Part,
    },
};
use futures_util::future::join_all;
use h2::{
    SendStream,
    client::{ResponseFuture, SendRequest},
};
use http::{HeaderMap as Fields, Request};
use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{CHAT, TestCluster, TestClusterBuilder, picker::PickerClient};
use prost::Message as _;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tonic::Code;

const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
/// Time in which everything here has to end, many times over.
const LIMIT: Duration = Duration::from_secs(15);
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

fn chat() -> String {
    json!({ "model": "tiny", "stream": true, "messages": [{ "role": "user", "content": "hi" }] }).to_string()
}

async fn gateway(change: impl FnOnce(&mut Config)) -> TestCluster {
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).config(|config| {
        config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap());
        config.server.threads = 1;
        change(config);
    });
    builder.start().await
}

/// Asks as Envoy does, and checks that the endpoint is picked.
async fn picks(cluster: &TestCluster) {
    let picker = PickerClient::connect(cluster.gateway.ext_proc.unwrap()).await.unwrap();
    let (picked, carried) = timeout(LIMIT, picker.ask(CHAT, &[], &chat())).await.unwrap().unwrap();
    assert!(picked.endpoint().is_some(), "{picked:?}");
    drop(carried);
}

/// A connection whose messages the test writes itself.
struct Proxy {
    requests: SendRequest<Bytes>,
    _connection: JoinSet<()>,
}

/// A stream of it.
struct Talk {
    answer: ResponseFuture,
    sending: SendStream<Bytes>,
}

impl Proxy {
    async fn connect(cluster: &TestCluster, window: u32) -> Self {
        let stream = TcpStream::connect(cluster.gateway.ext_proc.unwrap()).await.unwrap();
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(window).max_concurrent_reset_streams(5_000);
        let (requests, connection) = builder.handshake(stream).await.unwrap();
        let mut task = JoinSet::new();
        task.spawn(async move { drop(connection.await) });
        Self { requests: requests.ready().await.unwrap(), _connection: task }
    }

    /// Opens a stream; `None`: the connection has ended.
    async fn open_as(&self, content_type: &str) -> Option<Talk> {
        let mut requests = self.requests.clone().ready().await.ok()?;
        let request = Request::post(format!("http://127.0.0.1{PROCESS}"));
        let request = request.header("content-type", content_type).header("te", "trailers").body(()).unwrap();
        let (answer, sending) = requests.send_request(request, false).ok()?;
        Some(Talk { answer, sending })
    }

    async fn open(&self) -> Talk {
        self.open_as("application/grpc").await.expect("the connection is open")
    }
}

impl Talk {
    fn bytes(&mut self, bytes: impl Into<Bytes>, end: bool) {
        // The stream may have ended.
        let _ = self.sending.send_data(bytes.into(), end);
    }

    fn say(&mut self, part: Part) {
        self.bytes(message(Some(part)), false);
    }

    fn close(&mut self) {
        self.bytes(Bytes::new(), true);
    }

    /// Reads to the end, and returns the gRPC status; `None`: the stream was reset.
    async fn status(self) -> Option<i32> {
        let Self { answer, sending: _sending } = self;
        let whole = async {
            let (head, mut body) = answer.await.ok()?.into_parts();
            if let Some(status) = grpc_status(&head.headers) {
                return Some(status);
            }
            while let Some(piece) = body.data().await {
                let piece = piece.ok()?;
                let _ = body.flow_control().release_capacity(piece.len());
            }
            grpc_status(&body.trailers().await.ok()??)
        };
        timeout(LIMIT, whole).await.expect("the stream ends")
    }
}

fn grpc_status(fields: &Fields) -> Option<i32> {
    fields.get("grpc-status")?.to_str().ok()?.parse().ok()
}

fn framed(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap());
    framed.extend_from_slice(message);
    framed.freeze()
}

fn message(request: Option<Part>) -> Bytes {
    framed(&ProcessingRequest { request, ..ProcessingRequest::default() }.encode_to_vec())
}

fn headers(fields: &[(&str, &str)]) -> HttpHeaders {
    let field = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    let headers = fields.iter().map(field).collect();
    HttpHeaders { headers: Some(HeaderMap { headers }), ..HttpHeaders::default() }
}

fn head() -> Part {
    Part::RequestHeaders(headers(&[(":method", "POST"), (":path", CHAT)]))
}

fn body(text: &str, end_of_stream: bool) -> Part {
    Part::RequestBody(HttpBody { body: text.into(), end_of_stream, ..HttpBody::default() })
}

fn answer_head() -> Part {
    Part::ResponseHeaders(headers(&[(":status", "200"), ("content-type", "text/event-stream")]))
}

fn answer_body() -> Part {
    Part::ResponseBody(HttpBody { body: b"data: {}\n\n".to_vec(), ..HttpBody::default() })
}

/// A request, and messages of one kind.
fn with_many(part: &dyn Fn() -> Part) -> Vec<Bytes> {
    let request = [head(), body(&chat(), true)].into_iter();
    request.chain((0..50).map(|_| part())).map(|part| message(Some(part))).collect()
}

async fn until_booked(cluster: &TestCluster, count: u32) {
    cluster.until("booked", |cluster| cluster.booked() == count).await.unwrap();
}

#[tokio::test]
async fn r7_bytes_that_are_not_http2_end_their_connection_only() {
    let cluster = gateway(|_| {}).await;
    let proxy = Proxy::connect(&cluster, 65_535).await;
    let mut talk = proxy.open().await;
    talk.say(head());
    let frame = |length: [u8; 3], kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        [PREFACE, &length, &[kind, flags, 0, 0, 0, stream], payload].concat()
    };
    for bytes in [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03".repeat(20),
        vec![0xff; 70_000],
        // A frame that is larger than HTTP/2 allows; data on a stream that was not opened; garbage as a head.
        frame([0xff, 0xff, 0xff], 0, 0, 1, &[]),
        frame([0, 0, 1], 0, 0, 3, &[0]),
        frame([0, 0, 4], 1, 4, 1, &[0xff; 4]),
    ] {
        let mut stream = TcpStream::connect(cluster.gateway.ext_proc.unwrap()).await.unwrap();
        let _ = stream.write_all(&bytes).await;
        let ended = timeout(LIMIT, stream.read_to_end(&mut Vec::new())).await;
        // R7.1
        assert!(ended.is_ok(), "the connection of {:?}… stays open", &bytes[..16]);
    }
    picks(&cluster).await;
    talk.say(body(&chat(), true));
    // R7.1: a stream of another connection continues.
    until_booked(&cluster, 1).await;
    drop(talk);
    // R7.2
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn r7_messages_that_break_the_protocol_end_their_stream_with_a_status() {
    let cluster = gateway(|_| {}).await;
    let proxy = Proxy::connect(&cluster, 65_535).await;
    let [request, whole] = [head(), body(&chat(), true)];
    let invalid = Code::InvalidArgument;
    let cases: Vec<(&str, Code, Vec<Bytes>)> = vec![
        ("an empty message", invalid, vec![message(None)]),
        ("a message that is no protobuf", Code::Internal, vec![framed(&[0xff; 40])]),
        ("a compressed message", Code::Internal, vec![Bytes::from_static(&[1, 0, 0, 0, 1, 0])]),
        ("JSON in the place of a message's prefix", Code::Internal, vec![Bytes::from_static(b"{\"a\": 1}")]),
        ("a head twice", invalid, vec![message(Some(head())), message(Some(head()))]),
        (
            "a head twice, when the endpoint is picked",
            invalid,
            vec![message(Some(request)), message(Some(whole)), message(Some(head()))],
        ),
        ("a body first", invalid, vec![message(Some(body("{}", true)))]),
        ("the answer first", invalid, vec![message(Some(answer_head()))]),
        ("the answer's body first", invalid, vec![message(Some(answer_body()))]),
        (
            "a body behind its end",
            invalid,
            [head(), body(&chat(), true), body("{}", false)].map(|part| message(Some(part))).into(),
        ),
        (
            "the answer's head twice",
            invalid,
            [head(), body(&chat(), true), answer_head(), answer_head()]
                .map(|part| message(Some(part)))
                .into(),
        ),
        (
            "trailers without an end",
            Code::ResourceExhausted,
            with_many(&|| Part::RequestTrailers(HttpTrailers::default())),
        ),
        (
            "trailers of the answer without an end",
            Code::ResourceExhausted,
            with_many(&|| Part::ResponseTrailers(HttpTrailers::default())),
        ),
        ("ends of the body without an end", Code::ResourceExhausted, with_many(&|| body("", true))),
    ];
    for (what, code, messages) in cases {
        let mut talk = proxy.open().await;
        for message in messages {
            talk.bytes(message, false);
        }
        // R7.1, R7.6
        assert_eq!(talk.status().await, Some(code as i32), "{what}");
        // R7.2
        cluster.at_rest().await.unwrap();
    }
    let mut talk = proxy.open_as("application/json").await.unwrap();
    talk.bytes(chat(), true);
    // R7.1
    assert!(talk.status().await.is_some_and(|status| status != 0), "not gRPC");
    picks(&cluster).await;
}

#[tokio::test]
async fn r7_a_stream_that_is_closed_in_the_middle_leaves_nothing_booked() {
    let cluster = gateway(|_| {}).await;
    let proxy = Proxy::connect(&cluster, 65_535).await;
    let beginnings = || {
        let all = [head(), body("{", false), body(&chat()[1..], true), answer_head(), answer_body()];
        all.map(|part| message(Some(part)))
    };
    for count in 0..=beginnings().len() {
        for reset in [false, true] {
            let mut talk = proxy.open().await;
            for message in beginnings().into_iter().take(count) {
                talk.bytes(message, false);
            }
            if count >= 3 {
                until_booked(&cluster, 1).await;
            }
            if reset {
                talk.sending.send_reset(h2::Reason::CANCEL);
            } else {
                talk.close();
                // R7.1
                assert_eq!(talk.status().await, Some(0), "closed after {count} messages");
            }
            // R7.2
            cluster.at_rest().await.unwrap();
        }
    }
    // Half of a message, and trailers in the place of a body.
    let mut talk = proxy.open().await;
    talk.say(head());
    talk.bytes(Bytes::from_static(&[0, 0, 0, 0, 9, 1]), true);
    // R7.1
    assert!(talk.status().await.is_some_and(|status| status != 0));
    let mut talk = proxy.open().await;
    talk.say(head());
    talk.say(Part::RequestTrailers(HttpTrailers::default()));
    talk.close();
    assert!(talk.status().await.is_some());
    cluster.at_rest().await.unwrap();
    let mut proxy = proxy;
    for _ in 0..500 {
        // Too many resets at once end the connection.
        let Some(mut talk) = proxy.open_as("application/grpc").await else {
            proxy = Proxy::connect(&cluster, 65_535).await;
            continue;
        };
        talk.say(head());
        talk.say(body(&chat(), true));
        talk.sending.send_reset(h2::Reason::CANCEL);
    }
    // R7.2
    cluster.at_rest().await.unwrap();
    picks(&cluster).await;
}

#[tokio::test]
async fn r7_a_stream_that_never_ends_is_ended() {
    let cluster = gateway(|config| {
        config.timeouts.body_idle = Duration::from_millis(300);
        config.timeouts.client_write = Duration::from_millis(500);
        config.timeouts.request = Duration::from_secs(3);
    })
    .await;
    let proxy = Proxy::connect(&cluster, 65_535).await;
    let silent = proxy.open().await;
    let mut half = proxy.open().await;
    half.say(head());
    half.say(body("{", false));
    let started = Instant::now();
    // R7.4: refused with 408, in a message.
    assert_eq!(half.status().await, Some(0));
    assert!(started.elapsed() < Duration::from_secs(5));
    let deaf = Proxy::connect(&cluster, 0).await;
    let mut talk = deaf.open().await;
    talk.say(head());
    talk.say(body(&chat(), true));
    // R7.4
    assert_eq!(talk.status().await, None, "it is reset: its proxy reads nothing");
    let slow = Proxy::connect(&cluster, 10).await;
    let mut talk = slow.open().await;
    talk.say(head());
    talk.say(body(&chat(), true));
    until_booked(&cluster, 1).await;
    // R7.2: of the answer ten bytes are read, and no more. The deadline of the request ends it.
    cluster.at_rest().await.unwrap();
    // R7.4
    assert_eq!(silent.status().await, Some(Code::DeadlineExceeded as i32));
    picks(&cluster).await;
}

#[tokio::test]
async fn r7_large_messages_have_limits_alone_and_together() {
    const BODY: usize = 1024 * 1024;
    let cluster = gateway(|config| {
        config.server.max_body_bytes = BODY;
        config.limits.body_bytes_in_flight = 8 * BODY;
    })
    .await;
    let used = || cluster.gateway.state().body_bytes.used();
    let proxy = Proxy::connect(&cluster, 65_535).await;
    let large = "x".repeat(70_000);
    let mut talk = proxy.open().await;
    talk.say(Part::RequestHeaders(headers(&[(":method", "POST"), (":path", CHAT), ("a", &large)])));
    // R3.7: refused with 431, in a message.
    assert_eq!(talk.status().await, Some(0));
    let picker = PickerClient::connect(cluster.gateway.ext_proc.unwrap()).await.unwrap();
    for many in [&[("a", &*large)][..], &[("a", ""); 300]] {
        let (refused, _) = picker.ask(CHAT, many, &chat()).await.unwrap();
        // R3.7
        assert_eq!(refused.refusal().0, 431);
    }
    let mut talk = proxy.open().await;
    talk.bytes(Bytes::from_static(&[0, 0x7f, 0, 0, 0, 1]), false);
    // R7.3
    assert_eq!(talk.status().await, Some(Code::OutOfRange as i32));
    // Each begins a message that it does not end.
    let prefix = {
        let mut begun = BytesMut::from(&[0][..]);
        begun.put_u32(u32::try_from(BODY).unwrap());
        begun.put_bytes(b'x', 60_000);
        begun.freeze()
    };
    let mut open = JoinSet::new();
    for _ in 0..30 {
        let mut talk = proxy.open().await;
        talk.bytes(prefix.clone(), false);
        open.spawn(talk.status());
    }
    let mut refused = 0;
    while refused < 23 {
        let status = timeout(LIMIT, open.join_next()).await.expect("those beyond the memory end");
        // R7.3
        assert_eq!(status.unwrap().unwrap(), Some(Code::ResourceExhausted as i32));
        refused += 1;
    }
    // R7.3
    assert_eq!(used(), 7 * BODY);
    // Small messages have the last eighth.
    picks(&cluster).await;
    drop(open);
    cluster.until("memory is given back", |_| used() == 0).await.unwrap();
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn r7_thousands_of_silent_streams_have_a_limit() {
    let cluster = gateway(|config| config.ext_proc.max_streams = 100).await;
    let mut proxies = Vec::new();
    for _ in 0..4 {
        proxies.push(Proxy::connect(&cluster, 65_535).await);
    }
    let mut held = Vec::new();
    for proxy in &proxies {
        let opened = join_all((0..500).map(|_| proxy.open())).await;
        let mut statuses = JoinSet::new();
        opened.into_iter().for_each(|talk| drop(statuses.spawn(talk.status())));
        held.push(statuses);
    }
    let (mut refused, started) = (0, Instant::now());
    while refused < 1_900 {
        for statuses in &mut held {
            while let Some(status) = statuses.try_join_next() {
                // R7.4
                assert_eq!(status.unwrap(), Some(Code::ResourceExhausted as i32));
                refused += 1;
            }
        }
        assert!(started.elapsed() < Duration::from_secs(9), "{refused} are refused");
        sleep(Duration::from_millis(20)).await;
    }
    drop((held, proxies));
    // R7.4
    picks_soon(&cluster).await;
    cluster.at_rest().await.unwrap();
}

/// Waits until an endpoint is picked: streams of others may still end.
async fn picks_soon(cluster: &TestCluster) {
    let picker = PickerClient::connect(cluster.gateway.ext_proc.unwrap()).await.unwrap();
    for _ in 0..200 {
        if picker.ask(CHAT, &[], &chat()).await.is_ok_and(|(picked, _)| picked.endpoint().is_some()) {
            return;
        }
        sleep(Duration::from_millis(20)).await;
    }
    panic!("no endpoint is picked");
}
