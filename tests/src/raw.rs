//! Clients that write bytes of their own to a socket: malformed, slow, or never reading.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

/// Longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(10);

/// Connects with a receive buffer of a few kilobytes: what a client does not read stays with the gateway.
///
/// # Errors
/// The connection is refused.
pub async fn connect_small(address: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(4 * 1024)?;
    socket.connect(address).await
}

/// Sends bytes on a new connection and keeps it open.
///
/// # Errors
/// The connection broke.
pub async fn send(address: SocketAddr, bytes: impl AsRef<[u8]>) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    stream.write_all(bytes.as_ref()).await?;
    Ok(stream)
}

/// Reads until the peer closed. A reset ends the text with `(reset)`, and a peer that stays silent with
/// `(open)`.
pub async fn until_closed(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let mut end = "";
    match timeout(LIMIT, stream.read_to_end(&mut bytes)).await {
        Ok(Ok(_)) => {}
        Ok(Err(_)) => end = "(reset)",
        Err(_) => end = "(open)",
    }
    String::from_utf8_lossy(&bytes).into_owned() + end
}

/// Reads until the text contains `mark`, for at most two seconds; returns the read text.
pub async fn until_mark(stream: &mut TcpStream, mark: &str) -> String {
    let (mut text, mut buffer) = (String::new(), [0; 4096]);
    let mut seen = 0;
    let read = async {
        while !text.get(seen..).unwrap_or_default().contains(mark) {
            seen = text.len().saturating_sub(mark.len());
            match stream.read(&mut buffer).await {
                Ok(read @ 1..) => {
                    text.push_str(&String::from_utf8_lossy(buffer.get(..read).unwrap_or_default()))
                }
                _ => break,
            }
        }
    };
    let _ = timeout(LIMIT, read).await;
    text
}

/// Resident memory of this process, bytes.
#[must_use]
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
