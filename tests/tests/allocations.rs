//! A relayed event allocates nothing, and a request little. The tests have a file of their own because their
//! allocator counts everything in the process, and run one after the other; the threads of engine and client
//! allocate nothing during the count.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs, reason = "tests")]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_gateway::config::{Config, ContinuationForm, Model};
use pointsman_tests::{TestCluster, TestClusterBuilder};
use pointsman_workers::WorkerSpec;
use tokio::runtime::Runtime;

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

/// Held by the test that counts.
static COUNTING: Mutex<()> = parking_lot::const_mutex(());

/// Requests before the count begins, and counted ones.
const REQUESTS: (u64, u64) = (100, 400);
/// Allocations of a request that is not streamed, by the gateway, the HTTP server and the runtime: 42, and a
/// few for periodic work.
const MAX_OF_REQUEST: u64 = 46;
/// Events before the count begins: buffers find their size.
const WARM: u32 = 200;
/// Events counted.
const COUNTED: u32 = 2_000;
const EVENT: &str = "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"tiny\",\
                     \"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"logprobs\":null,\
                     \"finish_reason\":null,\"token_ids\":null}]}\n\n";
const LAST: &str = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

/// An engine that writes an event for each command; `None` is the last.
fn engine(event: &str, commands: mpsc::Receiver<Option<()>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (event, last) = (chunk(event), chunk(LAST) + "0\r\n\r\n");
    thread::spawn(move || {
        let mut commands = Some(commands);
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_nodelay(true).unwrap();
            let mut commands = if is_generation(&mut stream) { commands.take() } else { None };
            let (event, last) = (event.clone(), last.clone());
            thread::spawn(move || {
                let Some(commands) = commands.take() else { return facts(&mut stream) };
                let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
                stream.write_all(head.as_bytes()).unwrap();
                for one in commands {
                    stream.write_all(if one.is_some() { &event } else { &last }.as_bytes()).unwrap();
                }
            });
        }
    });
    address
}

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

/// Returns whether the request on this connection is a generation. Probes use other connections.
fn is_generation(stream: &mut TcpStream) -> bool {
    let mut buffer = [0; 4096];
    let read = stream.read(&mut buffer).unwrap();
    if buffer.starts_with(b"POST") {
        return true;
    }
    answer(stream, &buffer[..read]);
    false
}

fn facts(stream: &mut TcpStream) {
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = stream.read(&mut buffer) {
        answer(stream, &buffer[..read]);
    }
}

fn answer(stream: &mut TcpStream, request: &[u8]) {
    let models = request.windows(10).any(|window| window == b"/v1/models");
    let body = if models { r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"# } else { "{}" };
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).unwrap();
}

/// An engine that answers each generation with the same text, as often as it is asked.
fn answering_engine() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let body = r#"{"id":"c","object":"chat.completion","created":1,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"y"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1}}"#;
    let head =
        "HTTP/1.1 200 OK\r\ndate: x\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: ";
    let text = format!("{head}{}\r\n\r\n{body}", body.len());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, text) = (stream.unwrap(), text.clone());
            stream.set_nodelay(true).unwrap();
            thread::spawn(move || {
                let (mut buffer, mut length) = ([0; 4096], 0);
                while let Ok(read @ 1..) = stream.read(&mut buffer[length..]) {
                    length += read;
                    if !buffer.starts_with(b"POST") {
                        answer(&mut stream, &buffer[..length]);
                    } else if buffer[..length].ends_with(b"}]}") {
                        stream.write_all(text.as_bytes()).unwrap();
                    } else {
                        continue;
                    }
                    length = 0;
                }
            });
        }
    });
    address
}

/// Starts a gateway with one data thread before `engine`, and connects a client.
fn start(engine: SocketAddr) -> (Runtime, TestCluster, TcpStream) {
    start_with(engine, |_| {})
}

fn start_with(engine: SocketAddr, change: impl FnOnce(&mut Config)) -> (Runtime, TestCluster, TcpStream) {
    let worker = format!("role=aggregated,engine=vllm,url=http://{engine}");
    // No probe, load query or re-scan falls into the counted time.
    let rare = Duration::from_secs(600);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let cluster = TestClusterBuilder::new().config(|config| {
        config.workers.push(WorkerSpec::parse_flag(&worker).unwrap());
        config.server.threads = 1;
        (config.probe.interval, config.probe.load_interval, config.policies.rescan) = (rare, rare, rare);
        change(config);
    });
    let cluster = runtime.block_on(cluster.start());
    let client = TcpStream::connect(cluster.gateway.address).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    (runtime, cluster, client)
}

#[test]
fn a_request_allocates_little() {
    let _counting = COUNTING.lock();
    let _profiler = dhat::Profiler::builder().testing().build();
    let (runtime, cluster, mut client) = start(answering_engine());
    let body = r#"{"model":"tiny","stream":false,"max_tokens":1,"messages":[{"role":"user","content":"x"}]}"#;
    let head =
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ";
    let request = format!("{head}{}\r\n\r\n{body}", body.len());
    let mut buffer = [0; 4096];
    let mut ask = || {
        client.write_all(request.as_bytes()).unwrap();
        let mut length = 0;
        while !buffer[..length].ends_with(b"}}") {
            let read = client.read(&mut buffer[length..]).unwrap();
            assert!(read > 0, "the answer was cut");
            length += read;
        }
        assert!(buffer.starts_with(b"HTTP/1.1 200"));
    };
    let (warm, counted) = REQUESTS;
    (0..warm).for_each(|_| ask());
    let before = dhat::HeapStats::get().total_blocks;
    (0..counted).for_each(|_| ask());
    let blocks = dhat::HeapStats::get().total_blocks - before;
    runtime.block_on(cluster.at_rest()).unwrap();
    let of_request = blocks.div_ceil(counted);
    assert!(
        of_request <= MAX_OF_REQUEST,
        "{blocks} allocations for {counted} requests, {of_request} for each"
    );
}

#[test]
fn a_relayed_event_allocates_nothing() {
    events_allocate_nothing(EVENT, "", ContinuationForm::Text);
}

#[test]
fn a_relayed_event_with_token_ids_allocates_nothing() {
    let event = EVENT.replace("\"token_ids\":null", "\"token_ids\":[31337]");
    events_allocate_nothing(&event, r#","temperature":0"#, ContinuationForm::Exact);
}

fn events_allocate_nothing(event: &str, field: &str, form: ContinuationForm) {
    let _counting = COUNTING.lock();
    let _profiler = dhat::Profiler::builder().testing().build();
    let (send, commands) = mpsc::channel();
    let (runtime, cluster, mut client) = start_with(engine(event, commands), |config| {
        let model = Model { continuation: Some(form), ..Model::default() };
        config.models.insert("tiny".to_owned(), model);
    });
    let body =
        format!(r#"{{"model":"tiny","stream":true{field},"messages":[{{"role":"user","content":"x"}}]}}"#);
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all((head + &body).as_bytes()).unwrap();
    let mut buffer = vec![0; 64 * 1024];
    let mut next = |send: &mpsc::Sender<Option<()>>, one: Option<()>| {
        send.send(one).unwrap();
        let mut length = 0;
        // Each event is read before the next is written, so that every one of them is a chunk of its own.
        while !buffer[..length].ends_with(b"}\n\n\r\n") && !buffer[..length].ends_with(b"0\r\n\r\n") {
            let read = client.read(&mut buffer[length..]).unwrap();
            assert!(read > 0, "the stream was cut");
            length += read;
        }
        assert!(!buffer[..length].windows(5).any(|part| part == b"31337"), "the ids are for the gateway");
    };
    for _ in 0..WARM {
        next(&send, Some(()));
    }
    let before = dhat::HeapStats::get().total_blocks;
    for _ in 0..COUNTED {
        next(&send, Some(()));
    }
    let blocks = dhat::HeapStats::get().total_blocks - before;
    next(&send, None);
    runtime.block_on(cluster.at_rest()).unwrap();
    // The channel of this test makes a block for every 31 messages; the gateway's threads do periodic
    // work.
    let ours = u64::from(COUNTED / 31);
    assert!(blocks <= ours + 40, "{blocks} allocations for {COUNTED} events, of which {ours} are the test's");
    assert!(
        dhat::HeapStats::get().total_blocks > before + blocks,
        "the end of a stream allocates: it is counted at all"
    );
}
