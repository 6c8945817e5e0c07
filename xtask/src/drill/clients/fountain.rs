//! An engine of the model `endless` that never ends a stream. A stream has 50 large events a second, about 36
//! KB, as long as its client reads them. Data that the client does not read fills the kernel's buffers within
//! seconds.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
    task::JoinSet,
};

const EVENT: &str = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"}}]}\n\n";
const MODELS: &str = r#"{"object":"list","data":[{"id":"endless","object":"model"}]}"#;

/// Number of events in one write.
const EVENTS: usize = 5;
/// Number of repetitions of the text in one event.
const WORDS: usize = 110;
/// Pause between two writes.
const PAUSE: Duration = Duration::from_millis(100);

/// A running engine. Dropping it ends the engine.
pub(super) struct Fountain {
    address: String,
    _tasks: JoinSet<()>,
}

impl Fountain {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let socket = TcpSocket::new_v4()?;
        // Thousands of streams wait at the same time, and the kernel's default would buffer megabytes for
        // each.
        socket.set_send_buffer_size(16 * 1024)?;
        socket.bind("127.0.0.1:0".parse()?)?;
        let listener = socket.listen(4096)?;
        let address = listener.local_addr()?.to_string();
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener));
        Ok(Self { address, _tasks: tasks })
    }

    /// Returns the `--worker` flag for the engine.
    pub(super) fn worker_flag(&self, id: u32) -> String {
        format!("id={id},role=aggregated,engine=openai,url=http://{},model=endless", self.address)
    }
}

async fn accept(listener: TcpListener) {
    let mut streams = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        streams.spawn(async move { drop(serve(stream).await) });
        while streams.try_join_next().is_some() {}
    }
}

async fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let read = stream.read(&mut buffer).await?;
        let request = buffer.get(..read).unwrap_or_default();
        if read == 0 {
            return Ok(());
        }
        if request.starts_with(b"POST") {
            let head =
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
            stream.write_all(head.as_bytes()).await?;
            let events = EVENT.replace(" token", &" token".repeat(WORDS)).repeat(EVENTS);
            let chunk = format!("{:x}\r\n{events}\r\n", events.len());
            loop {
                stream.write_all(chunk.as_bytes()).await?;
                tokio::time::sleep(PAUSE).await;
            }
        }
        let body = if request.starts_with(b"GET /v1/models") { MODELS } else { "{}" };
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
        stream.write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes()).await?;
    }
}
