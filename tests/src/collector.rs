//! An OTLP receiver that decodes the spans it gets, and may behave badly.

use std::{collections::BTreeMap, io, net::SocketAddr, sync::Arc, time::Duration};

use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{KeyValue, any_value::Value},
};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
};

/// How the collector answers.
#[derive(Clone, Debug)]
pub enum Behaviour {
    /// 200 with this body, an `ExportTraceServiceResponse`.
    Accept(Vec<u8>),
    /// This status line, such as `500 Internal Server Error`.
    Status(&'static str),
    /// Never.
    Hang,
    /// One byte a second.
    Trickle,
}

/// A running collector. Dropping it closes everything.
#[derive(Debug)]
pub struct Collector {
    /// Address on which the collector listens.
    pub address: SocketAddr,
    shared: Arc<Mutex<Received>>,
    task: AbortHandle,
}

#[derive(Debug, Default)]
struct Received {
    bodies: Vec<Vec<u8>>,
    heads: Vec<String>,
}

/// A span as it was received; ids are hex digits.
#[derive(Clone, Debug, Default)]
pub struct ReceivedSpan {
    /// Trace.
    pub trace: String,
    /// Span.
    pub id: String,
    /// Parent; empty: none.
    pub parent: String,
    /// Name.
    pub name: String,
    /// 1 internal, 2 server, 3 client.
    pub kind: i32,
    /// Attributes; numbers and booleans as texts.
    pub attributes: BTreeMap<String, String>,
    /// Spans of links.
    pub links: Vec<String>,
    /// Names of events.
    pub events: Vec<String>,
    /// 0 unset, 2 error.
    pub status: i32,
    /// Trace state.
    pub state: String,
    /// Flags: 0x1 sampled, 0x100 known whether the parent is remote, 0x200 remote.
    pub flags: u32,
    /// Nanoseconds since the Unix epoch.
    pub start: u64,
    /// Nanoseconds since the Unix epoch.
    pub end: u64,
    /// Attributes of the resource.
    pub resource: BTreeMap<String, String>,
}

impl Collector {
    /// Starts a collector on a free port of the loopback interface.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start(behaviour: Behaviour) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::<Mutex<Received>>::default();
        let received = shared.clone();
        let mut runner = JoinSet::new();
        let task = runner.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, behaviour.clone(), received.clone()));
            }
        });
        runner.detach_all();
        Ok(Self { address, shared, task })
    }

    /// Starts a collector that takes every span.
    ///
    /// # Errors
    /// Same as [`Collector::start`].
    pub async fn accepting() -> io::Result<Self> {
        Self::start(Behaviour::Accept(Vec::new())).await
    }

    /// The endpoint for `[traces]`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The heads of the requests so far.
    #[must_use]
    pub fn heads(&self) -> Vec<String> {
        self.shared.lock().heads.clone()
    }

    /// The encoded messages so far.
    #[must_use]
    pub fn bodies(&self) -> Vec<Vec<u8>> {
        self.shared.lock().bodies.clone()
    }

    /// The spans so far.
    ///
    /// # Errors
    /// A message is not valid.
    pub fn spans(&self) -> anyhow::Result<Vec<ReceivedSpan>> {
        let mut spans = Vec::new();
        for body in self.bodies() {
            spans.extend(decode(&body)?);
        }
        Ok(spans)
    }

    /// Waits up to 10 s until `count` root spans arrived, and returns all spans.
    ///
    /// # Errors
    /// They did not come, or a message is not valid.
    pub async fn traces(&self, count: usize) -> anyhow::Result<Vec<ReceivedSpan>> {
        for _ in 0..1_000 {
            let spans = self.spans()?;
            if spans.iter().filter(|span| span.kind == 2).count() >= count {
                return Ok(spans);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        anyhow::bail!("{count} traces did not arrive within 10 s: {:?}", self.spans()?)
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    mut stream: TcpStream,
    behaviour: Behaviour,
    received: Arc<Mutex<Received>>,
) -> io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        let end = loop {
            if let Some(end) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        };
        let head = String::from_utf8_lossy(buffer.get(..end).unwrap_or_default()).into_owned();
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
        });
        while buffer.len() < end + length.unwrap_or(0) {
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        }
        let rest = buffer.split_off(end + length.unwrap_or(0));
        let body = std::mem::replace(&mut buffer, rest).split_off(end);
        {
            let mut received = received.lock();
            received.heads.push(head);
            received.bodies.push(body);
        }
        match &behaviour {
            Behaviour::Accept(answer) => {
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", answer.len());
                stream.write_all(&[head.as_bytes(), answer].concat()).await?;
            }
            Behaviour::Status(status) => {
                stream
                    .write_all(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").as_bytes())
                    .await?;
            }
            Behaviour::Hang => std::future::pending().await,
            Behaviour::Trickle => {
                for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n".iter().cycle() {
                    stream.write_all(&[*byte]).await?;
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}

/// Decodes an `ExportTraceServiceRequest`.
fn decode(body: &[u8]) -> anyhow::Result<Vec<ReceivedSpan>> {
    let mut spans = Vec::new();
    for resource_spans in ExportTraceServiceRequest::decode(body)?.resource_spans {
        let resource = attributes(resource_spans.resource.unwrap_or_default().attributes)?;
        for span in resource_spans.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            spans.push(ReceivedSpan {
                trace: hex(&span.trace_id),
                id: hex(&span.span_id),
                parent: hex(&span.parent_span_id),
                name: span.name,
                kind: span.kind,
                attributes: attributes(span.attributes)?,
                links: span.links.iter().map(|link| hex(&link.span_id)).collect(),
                events: span.events.into_iter().map(|event| event.name).collect(),
                status: span.status.map_or(0, |status| status.code),
                state: span.trace_state,
                flags: span.flags,
                start: span.start_time_unix_nano,
                end: span.end_time_unix_nano,
                resource: resource.clone(),
            });
        }
    }
    Ok(spans)
}

fn attributes(pairs: Vec<KeyValue>) -> anyhow::Result<BTreeMap<String, String>> {
    let text = |pair: KeyValue| {
        let text = match pair.value.and_then(|any| any.value) {
            Some(Value::StringValue(text)) => text,
            Some(Value::BoolValue(value)) => value.to_string(),
            Some(Value::IntValue(value)) => value.to_string(),
            Some(Value::DoubleValue(value)) => value.to_string(),
            other => anyhow::bail!("the value of {} is {other:?}", pair.key),
        };
        Ok((pair.key, text))
    };
    pairs.into_iter().map(text).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
