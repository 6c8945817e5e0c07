//! An engine that answers generation requests with the bytes of a script, and counts its connections.

use std::{
    any::Any,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_workers::WorkerSpec;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::{AbortHandle, JoinSet},
};

/// One step of an answer.
#[derive(Clone, Debug)]
pub enum Act {
    /// Writes bytes.
    Send(Vec<u8>),
    /// Writes the same bytes until the connection fails.
    Repeat(Vec<u8>),
    /// Waits.
    Pause(Duration),
    /// Waits for a notification.
    Wait(Arc<Notify>),
    /// Does nothing more, and keeps the connection open until its other end closes it.
    Hang,
    /// Closes the connection.
    Close,
    /// Resets the connection.
    Reset,
    /// Keeps a value until the connection is closed.
    Keep(Arc<dyn Any + Send + Sync>),
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct RawRequest {
    /// Method and path, such as `POST /v1/completions`.
    pub line: String,
    /// Head as text in lower case.
    pub head: String,
    /// Body as text.
    pub body: String,
}

/// A running engine. Dropping it closes everything.
#[derive(Debug)]
pub struct RawEngine {
    /// Address on which the engine listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    task: AbortHandle,
}

/// The models of an engine that serves `tiny`.
pub const MODELS: &str = r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"#;
/// A completion.
pub const ANSWER: &str = r#"{"id":"c","choices":[{"index":0,"text":"good","finish_reason":"stop"}]}"#;
/// End of a stream.
pub const DONE: &str = "data: [DONE]\n\n";

type Script = Box<dyn Fn(&RawRequest) -> Vec<Act> + Send + Sync>;

struct Shared {
    script: Script,
    /// Connections with a request of the gateway's data threads on them.
    open: AtomicUsize,
    requests: Mutex<Vec<RawRequest>>,
    connections: AtomicUsize,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("open", &self.open).finish_non_exhaustive()
    }
}

/// Counts an open connection until it is dropped.
struct Open(Arc<Shared>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl RawEngine {
    /// Returns the worker with this address and the other parts of a `--worker` flag.
    ///
    /// # Panics
    /// The flag is not valid.
    #[must_use]
    #[expect(clippy::expect_used, reason = "helpers of tests may fail as tests do")]
    pub fn worker(&self, flag: &str) -> WorkerSpec {
        WorkerSpec::parse_flag(&format!("{flag},url=http://{}", self.address)).expect("a worker")
    }

    /// Starts an engine on a free port of the loopback interface.
    ///
    /// # Panics
    /// No port is free.
    #[expect(clippy::expect_used, reason = "helpers of tests may fail as tests do")]
    pub async fn start(script: impl Fn(&RawRequest) -> Vec<Act> + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1:0", script).await.expect("a port")
    }

    /// Starts an engine that serves the model `tiny`, and reports nothing else: only requests other than
    /// `GET` are answered by the script.
    ///
    /// # Panics
    /// No port is free.
    pub async fn serving(script: impl Fn(&RawRequest) -> Vec<Act> + Send + Sync + 'static) -> Self {
        Self::start(move |request| match request.line.as_str() {
            "GET /v1/models" => vec![Act::Send(json(MODELS))],
            line if line.starts_with("GET") => vec![Act::Send(json("{}"))],
            _ => script(request),
        })
        .await
    }

    /// Like [`RawEngine::start`], on an address.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn start_at(
        address: &str,
        script: impl Fn(&RawRequest) -> Vec<Act> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            script: Box::new(script),
            open: AtomicUsize::new(0),
            requests: Mutex::default(),
            connections: AtomicUsize::new(0),
        });
        let engine = shared.clone();
        let mut runner = JoinSet::new();
        let task = runner.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, engine.clone()));
                while connections.try_join_next().is_some() {}
            }
        });
        runner.detach_all();
        Ok(Self { address, shared, task })
    }

    /// Number of open connections that carried a `POST`.
    #[must_use]
    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    /// Number of connections that ever carried a `POST`.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// The `POST` requests so far.
    #[must_use]
    pub fn requests(&self) -> Vec<RawRequest> {
        self.shared.requests.lock().clone()
    }
}

impl Drop for RawEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A JSON answer with its length.
#[must_use]
pub fn json(body: &str) -> Vec<u8> {
    status("200 OK", body)
}

/// A JSON answer with a status such as `404 Not Found`.
#[must_use]
pub fn status(status: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

/// The head of a chunked stream of events.
#[must_use]
pub fn stream_head() -> Vec<u8> {
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_vec()
}

/// One chunk.
#[must_use]
pub fn chunk(data: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat()
}

async fn serve(mut stream: TcpStream, engine: Arc<Shared>) {
    let (mut counted, mut kept) = (None, Vec::new());
    while let Some(request) = read_request(&mut stream).await {
        if request.line.starts_with("POST") {
            engine.requests.lock().push(request.clone());
            counted.get_or_insert_with(|| {
                engine.open.fetch_add(1, Ordering::SeqCst);
                engine.connections.fetch_add(1, Ordering::SeqCst);
                Open(engine.clone())
            });
        }
        for act in (engine.script)(&request) {
            match act {
                Act::Send(bytes) => drop(stream.write_all(&bytes).await),
                Act::Repeat(bytes) => while stream.write_all(&bytes).await.is_ok() {},
                Act::Pause(pause) => tokio::time::sleep(pause).await,
                Act::Wait(notified) => notified.notified().await,
                Act::Hang => return until_closed(&mut stream).await,
                Act::Close => return,
                Act::Keep(value) => kept.push(value),
                Act::Reset => {
                    let _ = stream.set_zero_linger();
                    return;
                }
            }
        }
    }
}

async fn until_closed(stream: &mut TcpStream) {
    let mut buffer = [0; 1024];
    while matches!(stream.read(&mut buffer).await, Ok(1..)) {}
}

async fn read_request(stream: &mut TcpStream) -> Option<RawRequest> {
    let mut bytes = Vec::new();
    let head = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let text = String::from_utf8_lossy(bytes.get(..head)?).to_ascii_lowercase();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    let end = head + length.unwrap_or(0);
    while bytes.len() < end {
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    let line = String::from_utf8_lossy(bytes.get(..head)?).lines().next()?.to_owned();
    let line = line.rsplit_once(' ').map_or(line.clone(), |(line, _)| line.to_owned());
    let body = String::from_utf8_lossy(bytes.get(head..end)?).into_owned();
    Some(RawRequest { line, head: text, body })
}
