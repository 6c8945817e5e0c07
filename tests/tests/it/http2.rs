//! HTTP/2 for clients, over real sockets: one connection carries many requests, and none of them can take
//! more than a connection of HTTP/1.1 could.

use std::time::Duration;

use h2::Reason;
use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    CHAT, TestCluster, TestClusterBuilder,
    fountain::Fountain,
    http2::Http2Client,
    tls::{Authority, TlsFiles, connect},
};
use pointsman_workers::WorkerSpec;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

const LIMIT: Duration = Duration::from_secs(10);
/// The first bytes of a connection: preface, and empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

fn chat(tokens: u32) -> String {
    format!(
        r#"{{"model":"tiny","stream":true,"max_tokens":{tokens},"ignore_eos":true,"messages":[{{"role":"user","content":"x"}}]}}"#
    )
}

/// An engine that makes a token every 20 ms.
fn slow_engine() -> SimConfig {
    SimConfig { itl: Duration::from_millis(20), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) }
}

struct Secure {
    cluster: TestCluster,
    authority: Authority,
    _files: TlsFiles,
}

impl Secure {
    async fn start(builder: TestClusterBuilder, change: impl FnOnce(&mut Config)) -> Self {
        let authority = Authority::new().unwrap();
        let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
        let builder = builder.config(|config| {
            config.server.tls = Some(files.tls());
            config.server.threads = 1;
            change(config);
        });
        Self { cluster: builder.start().await, authority, _files: files }
    }

    async fn client(&self) -> Http2Client {
        let config = self.authority.client(None, &["h2", "http/1.1"]).unwrap();
        Http2Client::connect(self.cluster.gateway.address, &config).await.unwrap()
    }

    /// A connection whose frames the test writes itself.
    async fn raw(&self, frames: &[u8]) -> tokio_rustls::client::TlsStream<tokio::net::TcpStream> {
        let config = self.authority.client(None, &["h2"]).unwrap();
        let mut stream = connect(self.cluster.gateway.address, &config).await.unwrap();
        stream.write_all(PREFACE).await.unwrap();
        stream.write_all(frames).await.unwrap();
        stream
    }

    /// Waits until the gateway has counted this many connections that it ended for a reason.
    async fn until_ended(&self, reason: &str, count: f64) {
        let started = Instant::now();
        while self.ended(reason).await < count {
            if started.elapsed() > LIMIT {
                let text = self.cluster.metrics_text().await.unwrap();
                let ended: Vec<&str> =
                    text.lines().filter(|line| line.contains("connections_ended")).collect();
                panic!("{reason}: {ended:?}");
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn ended(&self, reason: &str) -> f64 {
        let name = format!("pointsman_client_connections_ended_total{{reason=\"{reason}\"}}");
        self.cluster.metric(&name).await.unwrap().iter().sum()
    }
}

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = vec![0, length[0], length[1], kind, flags, 0, 0, 0, stream];
    frame.extend_from_slice(payload);
    frame
}

#[tokio::test]
async fn j5_the_handshake_agrees_on_the_protocol_of_a_listener() {
    let builder = || TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    let secure = Secure::start(builder(), |_| {}).await;
    let address = secure.cluster.gateway.address;
    let agreed = async |address, offered: &[&str]| {
        let config = secure.authority.client(None, offered).unwrap();
        let stream = connect(address, &config).await.unwrap();
        stream.get_ref().1.alpn_protocol().map(|protocol| String::from_utf8_lossy(protocol).into_owned())
    };
    // J5.1
    assert_eq!(agreed(address, &["http/1.1", "h2"]).await.as_deref(), Some("h2"));
    assert_eq!(agreed(address, &["http/1.1"]).await.as_deref(), Some("http/1.1"));
    assert_eq!(agreed(address, &[]).await, None);
    let mut client = secure.client().await;
    let mut answer = client.send("POST", CHAT, &chat(3)).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert!(answer.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    let off = Secure::start(builder(), |config| config.server.http2.enabled = false).await;
    let config = off.authority.client(None, &["h2", "http/1.1"]).unwrap();
    let stream = connect(off.cluster.gateway.address, &config).await.unwrap();
    // J5.1
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
}

#[tokio::test]
async fn j5_tokens_arrive_one_by_one_and_nothing_of_http_1_leaks() {
    let builder = TestClusterBuilder::new().sim_with(slow_engine(), "");
    let secure = Secure::start(builder, |_| {}).await;
    let mut client = secure.client().await;
    let started = Instant::now();
    let mut answer = client.send("POST", CHAT, &chat(50)).await.unwrap();
    for name in ["connection", "keep-alive", "transfer-encoding", "upgrade", "proxy-connection", "te"] {
        // J5.2
        assert!(!answer.head.headers().contains_key(name), "{name}");
    }
    assert_eq!(answer.head.headers()["content-type"], "text/event-stream; charset=utf-8");
    let mut pieces = Vec::new();
    while let Some(piece) = answer.next().await.unwrap() {
        pieces.push(started.elapsed());
        assert!(piece.len() < 2_000, "events of many tokens came together");
    }
    // J5.2: 50 tokens in a second
    assert!(pieces.len() > 20 && pieces[0] < pieces[pieces.len() - 1] / 2, "{pieces:?}");
    // J5.2
    assert!(answer.trailers().await.unwrap().is_none());
    let mut refused = client.send("POST", CHAT, "{").await.unwrap();
    assert_eq!(refused.status(), 400);
    assert!(refused.text().await.unwrap().contains("invalid_request"));
    secure.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn j5_a_reset_ends_its_request_and_no_other() {
    let builder = TestClusterBuilder::new().sim_with(slow_engine(), "");
    let secure = Secure::start(builder, |_| {}).await;
    let mut client = secure.client().await;
    let mut goes_on = client.send("POST", CHAT, &chat(100)).await.unwrap();
    let mut given_up = client.send("POST", CHAT, &chat(5_000)).await.unwrap();
    assert!(given_up.next().await.unwrap().is_some());
    assert_eq!(secure.cluster.booked(), 2);
    given_up.sending.send_reset(Reason::CANCEL);
    let state = || secure.cluster.sims[0].state();
    secure.cluster.until("the engine notices", |_| state().client_disconnects == 1).await.unwrap();
    // J5.3
    assert_eq!((secure.cluster.booked(), state().running), (1, 1));
    assert!(goes_on.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    secure.cluster.at_rest().await.unwrap();
    // J5.3: an engine that has not answered yet
    let (answer, mut sending) = client.begin("POST", CHAT, &chat(5_000)).await.unwrap();
    secure.cluster.until("it is booked", |cluster| cluster.booked() == 1).await.unwrap();
    sending.send_reset(Reason::CANCEL);
    drop(answer);
    secure.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn j5_streams_of_a_connection_are_limited() {
    let builder = TestClusterBuilder::new().sim_with(slow_engine(), "");
    let secure = Secure::start(builder, |config| config.server.http2.max_concurrent_streams = 3).await;
    let mut client = secure.client().await;
    let mut answers = Vec::new();
    for _ in 0..3 {
        answers.push(client.send("POST", CHAT, &chat(30)).await.unwrap());
    }
    let fourth = client.begin("POST", CHAT, &chat(3)).await.unwrap();
    sleep(Duration::from_millis(100)).await;
    // J5.4: the client keeps to the limit that it was told
    assert_eq!(secure.cluster.booked(), 3);
    for answer in &mut answers {
        assert!(answer.text().await.unwrap().contains("[DONE]"));
    }
    assert_eq!(fourth.0.await.unwrap().status(), 200);
    // One that does not keep to it: HEADERS of five requests without an end. Their fields are :method POST,
    // :scheme https, :path /v1/chat/completions.
    let mut fields = vec![0x83, 0x87, 0x04, u8::try_from(CHAT.len()).unwrap()];
    fields.extend_from_slice(CHAT.as_bytes());
    let frames: Vec<u8> = [1, 3, 5, 7, 9].iter().flat_map(|stream| frame(1, 4, *stream, &fields)).collect();
    let mut rude = secure.raw(&frames).await;
    let mut seen = Vec::new();
    // J5.4: RST_STREAM with REFUSED_STREAM
    let refused = frame(3, 0, 7, &7_u32.to_be_bytes());
    let read = async {
        while !seen.windows(refused.len()).any(|frame| frame == refused) {
            let mut buffer = [0; 1024];
            let length = rude.read(&mut buffer).await.unwrap();
            assert!(length > 0, "{seen:?}");
            seen.extend_from_slice(&buffer[..length]);
        }
    };
    timeout(LIMIT, read).await.unwrap();
    drop(rude);
    secure.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn j5_requests_of_all_connections_are_limited_together() {
    let builder = TestClusterBuilder::new().sim_with(slow_engine(), "");
    let secure = Secure::start(builder, |config| config.limits.http2_requests = 2).await;
    let (mut first, mut second) = (secure.client().await, secure.client().await);
    let mut streams = [
        first.send("POST", CHAT, &chat(30)).await.unwrap(),
        second.send("POST", CHAT, &chat(30)).await.unwrap(),
    ];
    let mut refused = second.send("POST", CHAT, &chat(3)).await.unwrap();
    // J5.10, I_too_many_streams
    assert_eq!(
        (refused.status().as_u16(), refused.head.headers()["retry-after"].to_str().unwrap()),
        (503, "1")
    );
    let body = refused.text().await.unwrap();
    assert!(body.contains("too_many_streams") && body.contains("limits.http2_requests"), "{body}");
    for stream in &mut streams {
        assert!(stream.text().await.unwrap().contains("[DONE]"));
    }
    let until = Instant::now() + LIMIT;
    while secure.cluster.gateway.state().http2_requests.used() > 0 {
        assert!(Instant::now() < until, "places are not given back");
        sleep(Duration::from_millis(10)).await;
    }
    // J5.10: the connection continues.
    assert!(second.send("POST", CHAT, &chat(3)).await.unwrap().text().await.unwrap().contains("[DONE]"));
    secure.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn j5_a_client_that_abandons_too_many_requests_is_ended() {
    let builder = TestClusterBuilder::new().sim_with(slow_engine(), "");
    let secure = Secure::start(builder, |config| config.server.http2.max_resets = 20).await;
    let mut client = secure.client().await;
    let mut abandoned = 0;
    while abandoned < 200 {
        let Ok((answer, mut sending)) = client.begin("POST", CHAT, &chat(500)).await else { break };
        // Long enough for the request to be accepted.
        sleep(Duration::from_millis(2)).await;
        sending.send_reset(Reason::CANCEL);
        drop(answer);
        abandoned += 1;
    }
    // J5.5
    assert!((20..100).contains(&abandoned), "{abandoned}");
    let _ = timeout(LIMIT, client.ended()).await.unwrap();
    secure.until_ended("resets", 1.0).await;
    secure.cluster.at_rest().await.unwrap();
    let answer = secure.client().await.send("POST", CHAT, &chat(3)).await.unwrap().text().await.unwrap();
    assert!(answer.contains("[DONE]"));
    // Resets faster than requests are accepted: CVE-2023-44487.
    let mut fields = vec![0x83, 0x87, 0x04, u8::try_from(CHAT.len()).unwrap()];
    fields.extend_from_slice(CHAT.as_bytes());
    let both = |stream| [frame(1, 4, stream, &fields), frame(3, 0, stream, &8_u32.to_be_bytes())].concat();
    let mut flood = secure.raw(&(0..100).flat_map(|number| both(2 * number + 1)).collect::<Vec<u8>>()).await;
    // J5.5
    timeout(LIMIT, flood.read_to_end(&mut Vec::new())).await.unwrap().ok();
    secure.until_ended("resets", 2.0).await;
    secure.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn j5_a_stream_that_is_not_read_is_bounded_and_ended_and_others_go_on() {
    let fountain = Fountain::start().unwrap();
    let worker = WorkerSpec::parse_flag(&fountain.flag()).unwrap();
    let secure = Secure::start(TestClusterBuilder::new(), |config| {
        config.workers.push(worker);
        config.timeouts.client_write = Duration::from_secs(2);
    })
    .await;
    let mut client = secure.client().await;
    let started = Instant::now();
    let mut unread = client.send("POST", CHAT, &chat(9)).await.unwrap();
    while secure.cluster.booked() > 0 {
        let mut models = client.send("GET", "/v1/models", "").await.unwrap();
        // J5.6
        assert!(models.text().await.unwrap().contains("tiny"));
        assert!(started.elapsed() < LIMIT, "the stream was not ended");
        sleep(Duration::from_millis(50)).await;
    }
    assert!(started.elapsed() >= Duration::from_secs(2));
    // J5.6: the window of the stream, what waits for it, and the engine's socket
    let relayed = secure.cluster.gateway.state().metrics.relayed_bytes.get();
    assert!(relayed < 400_000, "{relayed} bytes were relayed to a client that read nothing");
    let ended = unread.text().await.unwrap_err();
    assert_eq!(ended.reason(), Some(Reason::CANCEL));
    assert!(client.send("GET", "/v1/models", "").await.is_ok());
    secure.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f4_the_booking_of_a_stream_that_is_not_read_expires_and_is_counted() {
    let fountain = Fountain::start().unwrap();
    let worker = WorkerSpec::parse_flag(&fountain.flag()).unwrap();
    let secure = Secure::start(TestClusterBuilder::new(), |config| {
        config.workers.push(worker);
        config.timeouts.booking = Duration::from_millis(300);
    })
    .await;
    let mut client = secure.client().await;
    let unread = client.send("POST", CHAT, &chat(9)).await.unwrap();
    secure.cluster.until("the booking expired", |cluster| cluster.booked() == 0).await.unwrap();
    let expired = secure.cluster.gateway.state().metrics.expired_bookings.get();
    // F4.9
    assert_eq!((expired, fountain.streams()), (1, 1));
    drop(unread);
    secure.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn j5_idle_connections_are_closed() {
    let builder = TestClusterBuilder::new().sim_with(slow_engine(), "");
    let change = |config: &mut Config| config.timeouts.client_idle = Duration::from_millis(500);
    let secure = Secure::start(builder, change).await;
    let mut client = secure.client().await;
    let mut answer = client.send("POST", CHAT, &chat(60)).await.unwrap();
    // A request of 1.2 s: the connection is not idle.
    assert!(answer.text().await.unwrap().contains("[DONE]"));
    // J5.7: with GOAWAY, which is not an error
    assert!(timeout(LIMIT, client.ended()).await.unwrap().unwrap().is_ok());
    // Asks for nothing, and does not end when it is asked to.
    let mut mute = secure.raw(&[]).await;
    // J5.7
    timeout(LIMIT, mute.read_to_end(&mut Vec::new())).await.unwrap().ok();
    secure.until_ended("idle", 2.0).await;
    secure.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn j5_a_client_that_answers_no_ping_is_ended() {
    let builder = TestClusterBuilder::new().sim_with(slow_engine(), "");
    let secure = Secure::start(builder, |config| {
        config.server.http2.keep_alive_interval = Duration::from_millis(500);
        config.server.http2.keep_alive_timeout = Duration::from_millis(500);
    })
    .await;
    // Its type is field 31 of the static table.
    let mut fields = vec![0x83, 0x87, 0x04, u8::try_from(CHAT.len()).unwrap()];
    fields.extend_from_slice(CHAT.as_bytes());
    fields.extend_from_slice(b"\x0F\x10\x10application/json");
    let request = [frame(1, 4, 1, &fields), frame(0, 1, 1, chat(5_000).as_bytes())].concat();
    let mut silent = secure.raw(&request).await;
    // J5.7
    timeout(LIMIT, silent.read_to_end(&mut Vec::new())).await.unwrap().ok();
    secure.until_ended("keep_alive", 1.0).await;
    secure.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn j5_a_drain_lets_streams_finish_and_says_goodbye() {
    let builder = TestClusterBuilder::new().sim_with(slow_engine(), "");
    let secure = Secure::start(builder, |_| {}).await;
    let mut client = secure.client().await;
    let mut answer = client.send("POST", CHAT, &chat(100)).await.unwrap();
    let Secure { cluster: TestCluster { gateway, sims, .. }, .. } = secure;
    let finish = async {
        let text = answer.text().await.unwrap();
        (text, client.ended().await.unwrap())
    };
    let ((), (text, ended)) = timeout(LIMIT, async { tokio::join!(gateway.drain(), finish) }).await.unwrap();
    // J5.8
    assert!(text.ends_with("data: [DONE]\n\n") && ended.is_ok(), "{ended:?}");
    assert_eq!(sims[0].state().client_disconnects, 0);
}

#[tokio::test]
async fn j5_a_stream_that_outlasts_the_drain_ends_with_an_error() {
    let builder = TestClusterBuilder::new().sim_with(slow_engine(), "");
    let secure = Secure::start(builder, |config| config.timeouts.drain = Duration::from_secs(1)).await;
    let mut client = secure.client().await;
    let mut stream = client.send("POST", CHAT, &chat(5_000)).await.unwrap();
    let whole = chat(5_000).replace("true,\"max", "false,\"max");
    let (whole, _sending) = client.begin("POST", CHAT, &whole).await.unwrap();
    secure.cluster.until("both run", |cluster| cluster.booked() == 2).await.unwrap();
    let Secure { cluster: TestCluster { gateway, sims: _sims, .. }, .. } = secure;
    let finish = async { (stream.text().await.unwrap(), whole.await.unwrap().status()) };
    let ((), (text, whole)) = timeout(LIMIT, async { tokio::join!(gateway.drain(), finish) }).await.unwrap();
    // J5.8
    assert!(text.contains("content") && text.contains(r#""code":"draining""#), "{text}");
    assert_eq!(whole, 503);
}

#[tokio::test]
async fn j5_heads_are_bounded() {
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    let secure = Secure::start(builder, |_| {}).await;
    // Heads that never end: HEADERS without END_HEADERS, then CONTINUATION with a field of 16 KB, or with
    // many small ones.
    let mut large = vec![0, 1, b'a', 0x7F, 0x80, 0x7F];
    large.extend_from_slice(&[b'x'; 16_255]);
    let small = [&[0x10, 1, b'x', 100][..], &[b'y'; 100]].concat().repeat(150);
    for (fields, reason) in [(large, "malformed"), (small, "flood")] {
        let mut frames = frame(1, 0, 1, &[0x83, 0x87, 0x84]);
        for _ in 0..500 {
            frames.extend(frame(9, 0, 1, &fields));
        }
        let config = secure.authority.client(None, &["h2"]).unwrap();
        let mut flood = connect(secure.cluster.gateway.address, &config).await.unwrap();
        flood.write_all(PREFACE).await.unwrap();
        // The gateway may end the connection before it has read everything.
        let _ = flood.write_all(&frames).await;
        // J5.9
        timeout(LIMIT, flood.read_to_end(&mut Vec::new())).await.unwrap().ok();
        let over = |cluster: &TestCluster| cluster.gateway.state().connections.used() == 0;
        secure.cluster.until("the connection is closed", over).await.unwrap();
        secure.until_ended(reason, 1.0).await;
        // J5.9
        assert_eq!(secure.ended(reason).await, 1.0);
    }
    let mut client = secure.client().await;
    let long = format!("/v1/models?{}", "x".repeat(40_000));
    let refused = client.send("GET", &long, "").await;
    // J5.9
    assert!(refused.as_ref().is_ok_and(|answer| answer.status() == 431) || refused.is_err());
}

#[tokio::test]
async fn j5_a_stream_whose_window_never_opens_is_ended() {
    let builder = TestClusterBuilder::new().sim_with(slow_engine(), "");
    let secure = Secure::start(builder, |config| config.timeouts.client_write = Duration::from_secs(1)).await;
    let fields = [&[0x83, 0x87, 0x04, u8::try_from(CHAT.len()).unwrap()], CHAT.as_bytes()].concat();
    let no_window = frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]);
    let frames = [no_window, frame(1, 4, 1, &fields), frame(0, 1, 1, chat(2_000).as_bytes())].concat();
    let _client = secure.raw(&frames).await;
    secure.cluster.until("the request runs", |cluster| cluster.booked() == 1).await.unwrap();
    // J5.6
    secure.cluster.at_rest().await.unwrap();
    let metrics = secure.cluster.metrics_text().await.unwrap();
    let counted = |line: &&str| line.starts_with("pointsman_requests_total{") && !line.ends_with("} 0");
    let ended: Vec<_> = metrics.lines().filter(counted).collect();
    // J5.6
    assert!(ended.len() == 1 && ended[0].contains("code=\"client_too_slow\""), "{ended:?}");
}

#[tokio::test]
async fn i5_a_stream_that_is_read_slowly_is_not_ended() {
    let fountain = Fountain::start().unwrap();
    let worker = WorkerSpec::parse_flag(&fountain.flag()).unwrap();
    let secure = Secure::start(TestClusterBuilder::new(), |config| {
        config.workers.push(worker);
        config.timeouts.client_write = Duration::from_secs(1);
    })
    .await;
    let fields = [&[0x83, 0x87, 0x04, u8::try_from(CHAT.len()).unwrap()], CHAT.as_bytes()].concat();
    let no_window = frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]);
    let frames = [no_window, frame(1, 4, 1, &fields), frame(0, 1, 1, chat(9).as_bytes())].concat();
    let (mut reading, mut writing) = tokio::io::split(secure.raw(&frames).await);
    let mut reset = JoinSet::new();
    reset.spawn(async move {
        let mut head = [0; 9];
        while head[3] != 3 {
            reading.read_exact(&mut head).await.unwrap();
            reading
                .read_exact(&mut vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))])
                .await
                .unwrap();
        }
    });
    for _ in 0..20 {
        // 10 kB a second
        writing.write_all(&frame(8, 0, 1, &2_000_u32.to_be_bytes())).await.unwrap();
        sleep(Duration::from_millis(200)).await;
        // I5.6
        assert!(reset.try_join_next().is_none(), "the stream was ended");
    }
}

#[tokio::test]
async fn i7_a_request_of_http_2_has_one_host_and_one_length() {
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    let secure = Secure::start(builder, |_| {}).await;
    // GET, https, the path, and indexed fields of the answer: 200 and 400.
    let (ok, refused) = (0x88, 0x8c);
    for (fields, status) in [
        (&[("content-length", "0")][..], ok),
        (&[("content-length", "0"), ("content-length", "0")], refused),
        (&[("host", "a")], ok),
        (&[("host", "a"), ("host", "b")], refused),
        (&[("host", "u@a")], refused),
    ] {
        let mut head = [&[0x82, 0x87, 0x04, 8], &b"/version"[..]].concat();
        for (name, value) in fields {
            // A literal with a new name.
            head.push(0);
            for text in [name, value] {
                head.push(u8::try_from(text.len()).unwrap());
                head.extend(text.as_bytes());
            }
        }
        let mut stream = secure.raw(&frame(1, 5, 1, &head)).await;
        let answered = loop {
            let mut head = [0; 9];
            timeout(LIMIT, stream.read_exact(&mut head)).await.unwrap().unwrap();
            let mut payload = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
            stream.read_exact(&mut payload).await.unwrap();
            if head[3] == 1 {
                break payload[0];
            }
        };
        // I7.9
        assert_eq!(answered, status, "{fields:?}");
    }
}

#[tokio::test]
async fn j5_no_reset_follows_an_early_refusal() {
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    let secure = Secure::start(builder, |_| {}).await;
    // POST, https, and two literals.
    let mut head = vec![0x83, 0x87];
    for (name, value) in [(0x41, "tiny.test"), (0x44, "/v1/nonsense")] {
        head.extend([name, u8::try_from(value.len()).unwrap()]);
        head.extend(value.as_bytes());
    }
    let (data, headers, reset, ping) = (0, 1, 3, 6);
    let (end_stream, end_headers, ack) = (1, 4, 1);
    let mut stream = secure.raw(&frame(headers, end_headers, 1, &head)).await;
    let next = async |stream: &mut tokio_rustls::client::TlsStream<tokio::net::TcpStream>| {
        let mut head = [0; 9];
        timeout(LIMIT, stream.read_exact(&mut head)).await.unwrap().unwrap();
        let length = usize::from(u16::from_be_bytes([head[1], head[2]]));
        stream.read_exact(&mut vec![0; length]).await.unwrap();
        (head[3], head[4], head[8])
    };
    while next(&mut stream).await != (data, end_stream, 1) {}
    // The request ends after its answer.
    let rest =
        [frame(data, 0, 1, b"{}"), frame(data, end_stream, 1, b""), frame(ping, 0, 0, &[7; 8])].concat();
    stream.write_all(&rest).await.unwrap();
    loop {
        let (kind, flags, of) = next(&mut stream).await;
        // J5.11
        assert!((kind, of) != (reset, 1));
        if (kind, flags) == (ping, ack) {
            break;
        }
    }
}

#[tokio::test]
async fn j5_http_2_without_tls_is_refused_in_its_own_words() {
    let cluster = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await;
    for address in [cluster.gateway.address, cluster.gateway.admin] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(PREFACE).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let (settings, goaway) = answer.split_at(9);
        // J5.12: RFC 9113: GOAWAY is a frame of type 7, and HTTP_1_1_REQUIRED the error 13
        assert_eq!((settings, goaway[3], goaway.last()), (&b"\0\0\0\x04\0\0\0\0\0"[..], 7, Some(&13)));
    }
}
