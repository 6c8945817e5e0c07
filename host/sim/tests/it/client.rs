//! A raw HTTP client, with one connection per request. It returns raw bytes, and whether the response ended
//! as announced.

use std::{io, net::SocketAddr, time::Duration};

use pointsman_sim::{Dialect, Role, Sim, SimConfig, SimHandle, SimState};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// A response as received.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    /// Whether the last chunk or all announced bytes were received.
    pub(crate) complete: bool,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Returns the data of each event.
    pub(crate) fn events(&self) -> Vec<String> {
        let text = self.text();
        text.split("\n\n").filter_map(|event| event.strip_prefix("data: ").map(str::to_owned)).collect()
    }

    /// Returns all generated text, in any format.
    pub(crate) fn answer(&self) -> String {
        if !self.head.contains("event-stream") {
            return text_of(&self.json(), "message");
        }
        let events = self.events();
        let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
        chunks.map(|chunk| text_of(&chunk, "delta")).collect()
    }
}

fn text_of(value: &Value, chat: &str) -> String {
    let choice = &value["choices"][0];
    choice["text"].as_str().or_else(|| choice[chat]["content"].as_str()).unwrap_or("").to_owned()
}

pub(crate) async fn start(dialect: Dialect, role: Role) -> SimHandle {
    Sim::start(SimConfig::instant(dialect, role)).await.expect("starts")
}

pub(crate) async fn start_with(
    dialect: Dialect,
    role: Role,
    change: impl FnOnce(&mut SimConfig),
) -> SimHandle {
    let mut config = SimConfig::instant(dialect, role);
    change(&mut config);
    Sim::start(config).await.expect("starts")
}

pub(crate) async fn post(sim: &SimHandle, path: &str, body: &Value) -> Answer {
    try_post(sim.addr(), path, body).await.expect("an answer")
}

pub(crate) async fn get(sim: &SimHandle, path: &str) -> Answer {
    send(sim.addr(), &format!("GET {path} HTTP/1.1\r\nhost: sim\r\nconnection: close\r\n\r\n"))
        .await
        .expect("an answer")
}

pub(crate) async fn try_post(addr: SocketAddr, path: &str, body: &Value) -> io::Result<Answer> {
    send(addr, &request_bytes(path, &body.to_string())).await
}

pub(crate) fn request_bytes(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: sim\r\nconnection: close\r\nx-request-id: req-1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

pub(crate) async fn send(addr: SocketAddr, request: &str) -> io::Result<Answer> {
    let mut stream = TcpStream::connect(addr).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await?;
    parse(&bytes).ok_or_else(|| io::Error::other("no whole head"))
}

/// Sends a request and leaves the response to the caller.
pub(crate) async fn open(sim: &SimHandle, path: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(sim.addr()).await.expect("connects");
    stream.write_all(request_bytes(path, &body.to_string()).as_bytes()).await.expect("writes");
    stream
}

/// Reads until the response contains `needle`.
pub(crate) async fn read_until(stream: &mut TcpStream, needle: &str) -> String {
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&seen).into_owned();
        if text.contains(needle) {
            return text;
        }
        let read = stream.read(&mut buffer).await.expect("reads");
        assert!(read > 0, "ended before `{needle}`: {text}");
        seen.extend_from_slice(&buffer[..read]);
    }
}

/// Returns whether nothing is received for `ms` milliseconds.
pub(crate) async fn silent(stream: &mut TcpStream, ms: u64) -> bool {
    let mut buffer = [0; 1];
    tokio::time::timeout(Duration::from_millis(ms), stream.read(&mut buffer)).await.is_err()
}

/// Waits until the engine has a state, because it notices disconnects with a delay.
pub(crate) async fn eventually(sim: &SimHandle, what: &str, is: impl Fn(&SimState) -> bool) {
    for _ in 0..2000 {
        if is(&sim.state()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("never: {what}; {:?}", sim.state());
}

fn parse(bytes: &[u8]) -> Option<Answer> {
    let at = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&bytes[..at]).to_ascii_lowercase();
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let rest = &bytes[at + 4..];
    let (body, complete) = if head.contains("transfer-encoding: chunked") {
        dechunk(rest)
    } else {
        let length = head.split("content-length: ").nth(1)?.split("\r\n").next()?.parse::<usize>().ok()?;
        (rest.to_vec(), rest.len() == length)
    };
    Some(Answer { status, head, body, complete })
}

fn dechunk(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    while let Some(at) = rest.windows(2).position(|window| window == b"\r\n") {
        let size =
            usize::from_str_radix(std::str::from_utf8(&rest[..at]).expect("a size"), 16).expect("a size");
        rest = &rest[at + 2..];
        if size == 0 {
            return (body, true);
        }
        let have = size.min(rest.len());
        body.extend_from_slice(&rest[..have]);
        rest = rest.get(size + 2..).unwrap_or_default();
    }
    (body, false)
}
