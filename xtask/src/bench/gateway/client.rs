//! A client with one kept connection, that stamps every event.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, ensure};

use crate::engine;

/// One client connection.
#[derive(Debug)]
pub(super) struct Client {
    reader: BufReader<TcpStream>,
    out: TcpStream,
    address: SocketAddr,
    chunk: Vec<u8>,
    line: String,
}

/// What the clients of one run saw.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// From sending the request to the first event (or the whole answer), nanoseconds.
    pub(super) ttft: Vec<u64>,
    /// From the engine's write to our read, nanoseconds, an event each.
    pub(super) hops: Vec<u64>,
    pub(super) events: u64,
    pub(super) chunks: u64,
}

impl Client {
    pub(super) fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        let out = TcpStream::connect(address)?;
        out.set_nodelay(true)?;
        out.set_read_timeout(Some(Duration::from_secs(30)))?;
        let reader = BufReader::with_capacity(32 * 1024, out.try_clone()?);
        Ok(Self { reader, out, address, chunk: Vec::new(), line: String::new() })
    }

    /// One request, to its end; an error when the answer is not whole.
    pub(super) fn post(&mut self, body: &[u8], seen: &mut Seen) -> anyhow::Result<()> {
        let started = engine::now();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        let mut message = Vec::with_capacity(head.len() + body.len());
        message.extend_from_slice(head.as_bytes());
        message.extend_from_slice(body);
        self.out.write_all(&message)?;
        self.read_line()?;
        ensure!(self.line.starts_with("HTTP/1.1 200"), "answered {:?}", self.line.trim_end());
        let (mut length, mut chunked) = (0, false);
        loop {
            self.read_line()?;
            let line = self.line.trim_end();
            if line.is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(':') {
                if name.eq_ignore_ascii_case("content-length") {
                    length = value.trim().parse()?;
                }
                chunked |= name.eq_ignore_ascii_case("transfer-encoding");
            }
        }
        if !chunked {
            self.chunk.resize(length, 0);
            self.reader.read_exact(&mut self.chunk)?;
            seen.ttft.push(engine::now() - started);
            ensure!(length > 0, "an empty answer");
            return Ok(());
        }
        let mut first = true;
        let mut done = false;
        loop {
            self.read_line()?;
            let size = usize::from_str_radix(self.line.trim(), 16).context("chunk size")?;
            self.chunk.resize(size + 2, 0);
            self.reader.read_exact(&mut self.chunk)?;
            if size == 0 {
                break;
            }
            let now = engine::now();
            if first {
                seen.ttft.push(now - started);
                first = false;
            }
            seen.chunks += 1;
            done |= self.chunk.windows(6).any(|window| window == b"[DONE]");
            seen.take(&self.chunk, now);
        }
        ensure!(done, "the stream ended early");
        Ok(())
    }

    fn read_line(&mut self) -> anyhow::Result<()> {
        self.line.clear();
        ensure!(self.reader.read_line(&mut self.line)? > 0, "the connection was closed");
        Ok(())
    }
}

impl Seen {
    fn take(&mut self, chunk: &[u8], now: u64) {
        const MARK: &[u8] = b"\"t\":\"";
        let mut from = 0;
        while let Some(place) = chunk.get(from..).and_then(|rest| find(rest, MARK)) {
            from += place + MARK.len();
            let digits = chunk.get(from..from + 16).and_then(|digits| std::str::from_utf8(digits).ok());
            if let Some(sent) = digits.and_then(|digits| digits.parse::<u64>().ok()) {
                self.events += 1;
                self.hops.push(now.saturating_sub(sent));
            }
        }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.ttft.extend(other.ttft);
        self.hops.extend(other.hops);
        self.events += other.events;
        self.chunks += other.chunks;
    }
}

fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|window| window == needle)
}

/// The value below which `share` of the values lie.
pub(super) fn quantile(values: &mut [u64], share: f64) -> f64 {
    values.sort_unstable();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index"
    )]
    let place = ((values.len() as f64 - 1.0).max(0.0) * share) as usize;
    #[expect(clippy::cast_precision_loss, reason = "a figure to show")]
    values.get(place).map_or(f64::NAN, |value| *value as f64)
}
