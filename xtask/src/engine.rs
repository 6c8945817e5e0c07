//! An engine that answers as fast as it can, or at a set pace. Every event says when it was written.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::LazyLock,
    thread,
    time::{Duration, Instant},
};

static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Nanoseconds on the clock that the engine and the clients share.
pub(crate) fn now() -> u64 {
    u64::try_from(EPOCH.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// A listening engine. Its threads end with the process.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
}

/// How it answers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// Before a prefill answer.
    pub(crate) prefill: Duration,
    /// Between events.
    pub(crate) event: Duration,
    /// Events of a stream.
    pub(crate) events: u32,
    /// Whether it is the prefill half of a SGLang pair, whose one token nobody reads.
    pub(crate) sglang_prefill: bool,
    /// Told the `"marker"` of every stream whose reader left early, when that was noticed.
    pub(crate) left: Option<fn(u64)>,
}

const HANDOFF: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"engine-0","remote_request_id":"cmpl-0","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"remote_num_tokens":48,"remote_blocks_expiry_time":null,"transfer_mode":"pull"}"#;

/// In a body: answer as a prefill half would. For clients that make both calls themselves.
pub(crate) const PREFILL_LEG: &[u8] = b"\"prefill_leg\":true";

impl Engine {
    pub(crate) fn start(pace: Pace) -> anyhow::Result<Self> {
        LazyLock::force(&EPOCH);
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let serve = move || drop(serve(stream, pace));
                let _ = thread::Builder::new().stack_size(128 * 1024).spawn(serve);
            }
        });
        Ok(Self { address })
    }
}

fn serve(stream: TcpStream, pace: Pace) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream.try_clone()?;
    let mut reader = BufReader::with_capacity(64 * 1024, stream);
    let (mut head, mut body) = (String::new(), Vec::new());
    loop {
        head.clear();
        if reader.read_line(&mut head)? == 0 {
            return Ok(());
        }
        let post = head.starts_with("POST");
        let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut length = 0;
        loop {
            head.clear();
            reader.read_line(&mut head)?;
            let line = head.trim_end();
            if line.is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        body.resize(length, 0);
        reader.read_exact(&mut body)?;
        if !post {
            whole(&mut out, "application/json", &facts(&path))?;
        } else if contains(&body, b"\"do_remote_decode\":true") {
            thread::sleep(pace.prefill);
            let answer = answer(&format!(",\"kv_transfer_params\":{HANDOFF}"));
            whole(&mut out, "application/json", &answer)?;
        } else if pace.sglang_prefill || contains(&body, PREFILL_LEG) {
            stream_events(&mut out, Pace { events: 1, event: Duration::ZERO, ..pace })?;
        } else if contains(&body, b"\"stream\":true") {
            let streamed = stream_events(&mut out, pace);
            if streamed.is_err()
                && let (Some(left), Some(marker)) = (pace.left, marker(&body))
            {
                left(marker);
            }
            streamed?;
        } else {
            whole(&mut out, "application/json", &answer(""))?;
        }
    }
}

fn answer(more: &str) -> String {
    format!(
        r#"{{"id":"cmpl-0","object":"chat.completion","created":1,"model":"tiny","choices":[{{"index":0,"message":{{"role":"assistant","content":"token"}},"finish_reason":"length"}}],"usage":{{"prompt_tokens":48,"completion_tokens":1,"total_tokens":49}}{more}}}"#
    )
}

fn facts(path: &str) -> String {
    if path.ends_with("/models") {
        return r#"{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"bench","max_model_len":1000000}]}"#.to_owned();
    }
    if path.ends_with("/metrics") {
        return "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n"
            .to_owned();
    }
    "{}".to_owned()
}

fn whole(out: &mut TcpStream, content_type: &str, body: &str) -> std::io::Result<()> {
    let length = body.len();
    let answer =
        format!("HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n{body}");
    out.write_all(answer.as_bytes())
}

fn stream_events(out: &mut TcpStream, pace: Pace) -> std::io::Result<()> {
    out.write_all(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n",
    )?;
    let started = Instant::now();
    for turn in 0..pace.events {
        if !pace.event.is_zero() {
            thread::sleep((pace.event * turn).saturating_sub(started.elapsed()));
        }
        if pace.left.is_some() {
            still_there(out)?;
        }
        let finish = if turn + 1 == pace.events { "\"length\"" } else { "null" };
        let event = format!(
            "data: {{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"tiny\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" token\"}},\"logprobs\":null,\"finish_reason\":{finish}}}],\"t\":\"{:016}\"}}\n\n",
            now()
        );
        chunk(out, &event)?;
    }
    chunk(out, "data: [DONE]\n\n")?;
    out.write_all(b"0\r\n\r\n")
}

/// An error when the reader closed its end.
fn still_there(out: &TcpStream) -> std::io::Result<()> {
    out.set_nonblocking(true)?;
    let peeked = out.peek(&mut [0]);
    out.set_nonblocking(false)?;
    match peeked {
        Ok(0) => Err(std::io::ErrorKind::BrokenPipe.into()),
        Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}

fn marker(body: &[u8]) -> Option<u64> {
    let text = String::from_utf8_lossy(body);
    let (_, rest) = text.split_once("\"marker\":")?;
    rest.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

fn chunk(out: &mut TcpStream, text: &str) -> std::io::Result<()> {
    out.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes())
}

fn contains(body: &[u8], needle: &[u8]) -> bool {
    // What routers add stands at the end; what clients of ours write stands at the start.
    let ends = [&body[..body.len().min(512)], &body[body.len().saturating_sub(512)..]];
    ends.iter().any(|part| part.windows(needle.len()).any(|window| window == needle))
}
