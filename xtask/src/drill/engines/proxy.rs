//! A proxy in front of one simulated engine, which can misbehave in every byte of an answer.
//!
//! It serves one request on each connection. Without a case, it forwards everything unchanged.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
    time::timeout,
};

use super::cases::{Answer, Case};

/// Maximum time of a step. The gateway gives up earlier.
const LIMIT: Duration = Duration::from_secs(30);

/// A running proxy. Dropping it closes all its connections.
#[derive(Debug)]
pub(super) struct Proxy {
    pub(super) address: SocketAddr,
    shared: Arc<Shared>,
    task: AbortHandle,
}

#[derive(Debug)]
struct Shared {
    /// Address of the engine.
    engine: String,
    case: Mutex<Option<Case>>,
    /// Number of requests to which the case applied.
    hits: AtomicU64,
}

/// A request as it arrived.
struct Request {
    bytes: Vec<u8>,
    head: usize,
    line: String,
}

impl Proxy {
    /// Starts a proxy for the engine at `engine`, `host:port`.
    pub(super) async fn start(engine: &str) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared =
            Arc::new(Shared { engine: engine.to_owned(), case: Mutex::new(None), hits: AtomicU64::new(0) });
        let proxy = shared.clone();
        let mut runner = JoinSet::new();
        let task = runner.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let proxy = proxy.clone();
                connections.spawn(async move { serve(stream, &proxy).await });
                while connections.try_join_next().is_some() {}
            }
        });
        runner.detach_all();
        Ok(Self { address, shared, task })
    }

    /// Starts to misbehave, or to forward everything if there is no case.
    pub(super) fn misbehave(&self, case: Option<Case>) {
        *self.shared.case.lock() = case;
    }

    /// Returns the number of requests to which a case applied.
    pub(super) fn hits(&self) -> u64 {
        self.shared.hits.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut client: TcpStream, proxy: &Shared) -> Option<()> {
    client.set_nodelay(true).ok()?;
    let request = read_request(&mut client).await?;
    let case = proxy.case.lock().clone().filter(|case| request.line.starts_with(&case.target));
    let Some(case) = case else { return pass_on(client, proxy, &request).await };
    proxy.hits.fetch_add(1, Ordering::Relaxed);
    let answer = if case.edits { real_answer(proxy, &request).await? } else { Answer::default() };
    for step in &case.steps {
        timeout(LIMIT, step.act(&mut client, &answer)).await.ok()??;
    }
    Some(())
}

/// Forwards a request and its answer until either side closes its connection.
async fn pass_on(mut client: TcpStream, proxy: &Shared, request: &Request) -> Option<()> {
    let mut engine = TcpStream::connect(&proxy.engine).await.ok()?;
    engine.set_nodelay(true).ok()?;
    engine.write_all(&closing(request)).await.ok()?;
    let (mut buffer, mut ignored) = (vec![0; 16 * 1024], [0; 16]);
    loop {
        tokio::select! {
            read = engine.read(&mut buffer) => match read {
                Ok(read @ 1..) => client.write_all(buffer.get(..read)?).await.ok()?,
                _ => return None,
            },
            // The client has disconnected, and the engine must notice it.
            _ = client.read(&mut ignored) => return None,
        }
    }
}

/// Sends the request to the engine and reads its whole answer.
async fn real_answer(proxy: &Shared, request: &Request) -> Option<Answer> {
    let mut engine = TcpStream::connect(&proxy.engine).await.ok()?;
    engine.write_all(&closing(request)).await.ok()?;
    let mut bytes = Vec::new();
    timeout(LIMIT, engine.read_to_end(&mut bytes)).await.ok()?.ok()?;
    let head = head_length(&bytes)?;
    let text = String::from_utf8_lossy(bytes.get(..head)?).to_ascii_lowercase();
    let body = bytes.get(head..)?;
    let body = if text.contains("transfer-encoding: chunked") { joined(body)? } else { body.to_vec() };
    Some(Answer { stream: text.contains("text/event-stream"), body: String::from_utf8(body).ok()? })
}

/// Returns the request with a header that ends the connection after the answer.
fn closing(request: &Request) -> Vec<u8> {
    let (head, body) = request.bytes.split_at(request.head - 2);
    [head, b"connection: close\r\n", body].concat()
}

/// Returns the data of a chunked body.
fn joined(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut data = Vec::new();
    loop {
        let line = rest.windows(2).position(|pair| pair == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(rest.get(..line)?).ok()?.trim(), 16).ok()?;
        if size == 0 {
            return Some(data);
        }
        let start = line + 2;
        data.extend_from_slice(rest.get(start..start + size)?);
        rest = rest.get(start + size + 2..)?;
    }
}

async fn read_request(client: &mut TcpStream) -> Option<Request> {
    let mut bytes = Vec::new();
    let head = loop {
        if let Some(head) = head_length(&bytes) {
            break head;
        }
        if client.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let text = String::from_utf8_lossy(bytes.get(..head)?).to_ascii_lowercase();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
    while bytes.len() < head + length.unwrap_or(0) {
        if client.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    let line = text.lines().next().unwrap_or_default().to_owned();
    Some(Request { bytes, head, line })
}

fn head_length(bytes: &[u8]) -> Option<usize> {
    bytes.windows(4).position(|window| window == b"\r\n\r\n").map(|end| end + 4)
}

#[cfg(test)]
mod tests {
    use super::{head_length, joined};

    #[test]
    fn chunks_are_joined() {
        assert_eq!(joined(b"3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n").unwrap(), b"abc0123456789");
        assert_eq!(joined(b"3\r\nab"), None);
        assert_eq!(head_length(b"a\r\n\r\nb"), Some(5));
    }
}
