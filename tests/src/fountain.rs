//! An engine that streams as fast as its reader allows and never ends a stream. The bytes that it wrote are
//! those that its reader took.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

const EVENT: &str = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"finish_reason\":null}]}\n\n";
/// Events in one write: about 16 KB.
const EVENTS_AT_ONCE: usize = 160;

/// A running fountain; its threads end with their connections.
#[derive(Debug)]
pub struct Fountain {
    /// Address of the engine.
    pub address: SocketAddr,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    written: AtomicU64,
    streams: AtomicUsize,
}

impl Fountain {
    /// Starts an engine that serves the model `tiny` on a free port.
    ///
    /// # Errors
    /// No port is free.
    pub fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (address, counts) = (listener.local_addr()?, Arc::<Counts>::default());
        let shared = counts.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let counts = shared.clone();
                thread::spawn(move || drop(serve(stream, &counts)));
            }
        });
        Ok(Self { address, counts })
    }

    /// The `--worker` flag of the engine.
    #[must_use]
    pub fn flag(&self) -> String {
        format!("id=1,role=aggregated,engine=vllm,url=http://{}", self.address)
    }

    /// Bytes of all streams that were written so far.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.counts.written.load(Relaxed)
    }

    /// Number of streams whose connection is open.
    #[must_use]
    pub fn streams(&self) -> usize {
        self.counts.streams.load(Relaxed)
    }
}

fn serve(mut stream: TcpStream, counts: &Counts) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = stream.read(&mut buffer)?;
        let request = buffer.get(..read).unwrap_or_default();
        if read == 0 {
            return Ok(());
        }
        if request.starts_with(b"POST /v1/chat") {
            counts.streams.fetch_add(1, Relaxed);
            let ended = pour(&mut stream, counts);
            counts.streams.fetch_sub(1, Relaxed);
            return ended;
        }
        let models = request.starts_with(b"GET /v1/models");
        let body = if models { r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"# } else { "{}" };
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
        stream.write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes())?;
    }
}

fn pour(stream: &mut TcpStream, counts: &Counts) -> std::io::Result<()> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes())?;
    let events = EVENT.repeat(EVENTS_AT_ONCE);
    let chunk = format!("{:x}\r\n{events}\r\n", events.len());
    loop {
        stream.write_all(chunk.as_bytes())?;
        counts.written.fetch_add(chunk.len() as u64, Relaxed);
    }
}
