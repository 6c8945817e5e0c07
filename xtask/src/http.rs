//! A blocking HTTP/1.1 client for the tools: whole answers, and events with the time each came.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

/// What a streamed completion was like for its client.
#[derive(Clone, Debug)]
pub(crate) struct Streamed {
    pub(crate) ttft: Option<Duration>,
    pub(crate) events: u32,
    /// Ended with `[DONE]`, and no error event came.
    pub(crate) complete: bool,
    /// Status or error, when it was not.
    pub(crate) problem: Option<String>,
}

/// GETs a path and answers the body of a success.
pub(crate) fn get(address: &str, path: &str) -> anyhow::Result<String> {
    let mut stream = connect(address)?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
    read_whole(stream, &format!("GET {path}"))
}

fn read_whole(stream: TcpStream, what: &str) -> anyhow::Result<String> {
    let mut reader = BufReader::new(stream);
    let head = Head::read(&mut reader)?;
    let mut body = Vec::new();
    if head.chunked {
        while let Some(chunk) = read_chunk(&mut reader)? {
            body.extend(chunk);
        }
    } else {
        reader.read_to_end(&mut body)?;
    }
    let body = String::from_utf8(body)?;
    if head.status != 200 {
        bail!("{what} answered {}: {body}", head.status);
    }
    Ok(body)
}

/// POSTs JSON and answers the body of a success.
pub(crate) fn post(address: &str, path: &str, body: &str) -> anyhow::Result<String> {
    let mut stream = connect(address)?;
    let length = body.len();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )?;
    read_whole(stream, &format!("POST {path}"))
}

/// POSTs a streaming chat completion and reads it to its end.
pub(crate) fn stream_chat(address: &str, body: &str) -> anyhow::Result<Streamed> {
    stream_chat_with(address, body, "")
}

/// As [`stream_chat`], with further headers, each with its line end.
pub(crate) fn stream_chat_with(address: &str, body: &str, headers: &str) -> anyhow::Result<Streamed> {
    let mut stream = connect(address)?;
    let started = Instant::now();
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\n{headers}content-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )?;
    let mut reader = BufReader::new(stream);
    let head = Head::read(&mut reader)?;
    let mut outcome = Streamed { ttft: None, events: 0, complete: false, problem: None };
    let mut text = Vec::new();
    if !head.chunked {
        reader.read_to_end(&mut text)?;
        outcome.problem = Some(format!("{}: {}", head.status, String::from_utf8_lossy(&text)));
        return Ok(outcome);
    }
    while let Some(chunk) = read_chunk(&mut reader)? {
        text.extend(chunk);
        while let Some(end) = text.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = text.drain(..end + 2).collect();
            let event = String::from_utf8_lossy(&event).into_owned();
            outcome.events += 1;
            if event.contains("\"content\":\"") && !event.contains("\"content\":\"\"") {
                outcome.ttft.get_or_insert(started.elapsed());
            }
            if event.contains("[DONE]") {
                outcome.complete = outcome.problem.is_none();
            }
            if event.contains("{\"error\"") {
                outcome.problem = Some(event);
            }
        }
    }
    if head.status != 200 {
        outcome.problem = Some(format!("{}: {}", head.status, String::from_utf8_lossy(&text)));
    } else if !outcome.complete && outcome.problem.is_none() {
        outcome.problem = Some("the stream ended early".to_owned());
    }
    Ok(outcome)
}

/// How a request ended for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// A whole JSON answer.
    Whole,
    /// A stream of valid events to `[DONE]`.
    Streamed,
    /// One valid error: an error body, or a stream whose last event is one.
    OneError,
    /// Anything else.
    Neither(String),
}

/// POSTs a request and judges what came back, to its last byte.
pub(crate) fn outcome(address: &str, path: &str, body: &str, stream: bool) -> Outcome {
    judge(address, path, body, stream).unwrap_or_else(|error| Outcome::Neither(format!("{error:#}")))
}

fn judge(address: &str, path: &str, body: &str, stream: bool) -> anyhow::Result<Outcome> {
    let mut out = connect(address)?;
    let length = body.len();
    write!(
        out,
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )?;
    let mut reader = BufReader::new(out);
    let head = Head::read(&mut reader)?;
    let mut text = Vec::new();
    if head.chunked {
        while let Some(chunk) = read_chunk(&mut reader)? {
            text.extend(chunk);
        }
    } else {
        reader.read_to_end(&mut text)?;
    }
    let text = String::from_utf8(text)?;
    let is_error = |json: &serde_json::Value| json["error"].is_object() || json["message"].is_string();
    if !(200..300).contains(&head.status) {
        let json: serde_json::Value = serde_json::from_str(&text).with_context(|| text.clone())?;
        return Ok(if is_error(&json) { Outcome::OneError } else { Outcome::Neither(text) });
    }
    if !stream {
        let json: serde_json::Value = serde_json::from_str(&text).with_context(|| text.clone())?;
        return Ok(if json["choices"].is_array() { Outcome::Whole } else { Outcome::Neither(text) });
    }
    let events: Vec<&str> = text.split_terminator("\n\n").filter(|event| !event.starts_with(':')).collect();
    for (place, event) in events.iter().enumerate() {
        let data = event.strip_prefix("data: ").with_context(|| format!("no event: {event:?}"))?;
        let last = place + 1 == events.len();
        if data == "[DONE]" {
            return Ok(if last {
                Outcome::Streamed
            } else {
                Outcome::Neither("events after [DONE]".to_owned())
            });
        }
        let json: serde_json::Value = serde_json::from_str(data).with_context(|| data.to_owned())?;
        if json["error"].is_object() {
            // An engine's own error event may be followed by its end mark.
            let rest = events.get(place + 1..).unwrap_or_default();
            let over = last || rest == ["data: [DONE]"];
            return Ok(if over {
                Outcome::OneError
            } else {
                Outcome::Neither(format!("after an error: {rest:?}"))
            });
        }
    }
    Ok(Outcome::Neither("a stream without an end".to_owned()))
}

struct Head {
    status: u16,
    chunked: bool,
}

impl Head {
    fn read(reader: &mut impl BufRead) -> anyhow::Result<Self> {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let mut head =
            Self { status: status.with_context(|| format!("not HTTP: {line:?}"))?, chunked: false };
        loop {
            line.clear();
            reader.read_line(&mut line)?;
            let header = line.trim_end().to_ascii_lowercase();
            if header.is_empty() {
                return Ok(head);
            }
            head.chunked |= header == "transfer-encoding: chunked";
        }
    }
}

fn connect(address: &str) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect(address).with_context(|| format!("connect to {address}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    Ok(stream)
}

fn read_chunk(reader: &mut impl BufRead) -> anyhow::Result<Option<Vec<u8>>> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let size = usize::from_str_radix(line.trim(), 16).with_context(|| format!("chunk size {line:?}"))?;
    let mut chunk = vec![0; size + 2];
    reader.read_exact(&mut chunk)?;
    chunk.truncate(size);
    Ok(if size == 0 { None } else { Some(chunk) })
}
