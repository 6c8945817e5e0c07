//! Sockets of clients that misbehave.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

/// Raises the limit of open files, because thousands of clients run in this process.
pub(super) fn raise_file_limit() -> anyhow::Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// Connects with a small receive buffer, so that data which the client does not read stays in the gateway.
pub(super) async fn connect(address: &str) -> anyhow::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(4 * 1024)?;
    let stream = socket.connect(address.parse()?).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Connects and sends bytes.
pub(super) async fn send(address: &str, bytes: &[u8]) -> anyhow::Result<TcpStream> {
    let mut stream = connect(address).await?;
    stream.write_all(bytes).await?;
    Ok(stream)
}

/// Reads until the end, at most for `limit`. Returns the status of the answer, or `reset`, `closed` or
/// `silent`.
pub(super) async fn outcome(stream: &mut TcpStream, limit: Duration) -> String {
    let mut answer = Vec::new();
    let ended = timeout(limit, stream.read_to_end(&mut answer)).await;
    let text = String::from_utf8_lossy(&answer);
    match (text.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)), ended) {
        (Some(status), _) => status.to_owned(),
        (None, Ok(Ok(_))) => "closed".to_owned(),
        (None, Ok(Err(_))) => "reset".to_owned(),
        (None, Err(_)) => "silent".to_owned(),
    }
}

/// Returns the outcomes with their numbers, such as `3 x 408, 1 x 503`.
pub(super) fn counted(outcomes: &[String]) -> String {
    let mut counts = std::collections::BTreeMap::<&str, usize>::new();
    for outcome in outcomes {
        *counts.entry(outcome).or_default() += 1;
    }
    counts.iter().map(|(what, count)| format!("{count} x {what}")).collect::<Vec<_>>().join(", ")
}

/// Returns the head of a POST with a JSON body of `length` bytes.
pub(super) fn post(path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}
