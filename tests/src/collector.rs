//! An OTLP receiver that decodes the spans it gets, and may behave badly.

use std::{collections::BTreeMap, io, net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
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
    pub kind: u64,
    /// Attributes; numbers and booleans as texts.
    pub attributes: BTreeMap<String, String>,
    /// Spans of links.
    pub links: Vec<String>,
    /// Names of events.
    pub events: Vec<String>,
    /// 0 unset, 2 error.
    pub status: u64,
    /// Trace state.
    pub state: String,
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

    /// Waits up to 10 s until `count` root spans came, and returns all spans.
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

/// Value of a protobuf field.
enum Field<'a> {
    Number(u64),
    Double(f64),
    Bytes(&'a [u8]),
}

impl Field<'_> {
    fn number(&self) -> u64 {
        if let Self::Number(number) = self { *number } else { 0 }
    }

    fn bytes(&self) -> &[u8] {
        if let Self::Bytes(bytes) = self { bytes } else { &[] }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(self.bytes()).into_owned()
    }

    fn hex(&self) -> String {
        self.bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn varint(bytes: &mut &[u8]) -> anyhow::Result<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first().ok_or_else(|| anyhow::anyhow!("a number is cut off"))?;
        *bytes = rest;
        value |= u64::from(first & 0x7F) << shift;
        if first & 0x80 == 0 {
            return Ok(value);
        }
    }
    anyhow::bail!("a number is too long")
}

fn fields(mut bytes: &[u8]) -> anyhow::Result<Vec<(u64, Field<'_>)>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        let mut take = |length: usize| {
            let (taken, rest) =
                bytes.split_at_checked(length).ok_or_else(|| anyhow::anyhow!("a field is cut off"))?;
            bytes = rest;
            anyhow::Ok(taken)
        };
        let value = match key & 7 {
            0 => Field::Number(varint(&mut bytes)?),
            1 => {
                let eight: [u8; 8] = take(8)?.try_into()?;
                // Attributes are the only doubles, in field 4; the other fields of this size are numbers.
                if key >> 3 == 4 {
                    Field::Double(f64::from_le_bytes(eight))
                } else {
                    Field::Number(u64::from_le_bytes(eight))
                }
            }
            2 => {
                let length = usize::try_from(varint(&mut bytes)?)?;
                let (taken, rest) =
                    bytes.split_at_checked(length).ok_or_else(|| anyhow::anyhow!("a field is cut off"))?;
                bytes = rest;
                Field::Bytes(taken)
            }
            5 => Field::Number(u64::from(u32::from_le_bytes(take(4)?.try_into()?))),
            other => anyhow::bail!("wire type {other}"),
        };
        found.push((key >> 3, value));
    }
    Ok(found)
}

fn attribute(bytes: &[u8]) -> anyhow::Result<(String, String)> {
    let (mut key, mut value) = (String::new(), String::new());
    for (number, field) in fields(bytes)? {
        match number {
            1 => key = field.text(),
            2 => {
                for (kind, any) in fields(field.bytes())? {
                    value = match (kind, &any) {
                        (1, any) => any.text(),
                        (2, any) => (any.number() != 0).to_string(),
                        (3, any) => any.number().cast_signed().to_string(),
                        (4, Field::Double(double)) => double.to_string(),
                        (other, _) => anyhow::bail!("a value of kind {other}"),
                    };
                }
            }
            _ => {}
        }
    }
    Ok((key, value))
}

/// Decodes an `ExportTraceServiceRequest`.
fn decode(body: &[u8]) -> anyhow::Result<Vec<ReceivedSpan>> {
    let mut spans = Vec::new();
    for (_, resource_spans) in fields(body)? {
        let mut resource = BTreeMap::new();
        for (number, field) in fields(resource_spans.bytes())? {
            match number {
                1 => {
                    for (_, pair) in fields(field.bytes())? {
                        resource.extend([attribute(pair.bytes())?]);
                    }
                }
                2 => {
                    for (number, span) in fields(field.bytes())? {
                        if number == 2 {
                            spans.push(ReceivedSpan {
                                resource: resource.clone(),
                                ..decode_span(span.bytes())?
                            });
                        }
                    }
                }
                _ => {}
            }
        }
    }
    Ok(spans)
}

fn decode_span(bytes: &[u8]) -> anyhow::Result<ReceivedSpan> {
    let mut span = ReceivedSpan::default();
    for (number, field) in fields(bytes)? {
        match number {
            1 => span.trace = field.hex(),
            2 => span.id = field.hex(),
            3 => span.state = field.text(),
            4 => span.parent = field.hex(),
            5 => span.name = field.text(),
            6 => span.kind = field.number(),
            7 => span.start = field.number(),
            8 => span.end = field.number(),
            9 => span.attributes.extend([attribute(field.bytes())?]),
            11 => {
                let parts = fields(field.bytes())?;
                span.events
                    .extend(parts.iter().filter(|(number, _)| *number == 2).map(|(_, name)| name.text()));
            }
            13 => {
                let parts = fields(field.bytes())?;
                span.links.extend(parts.iter().filter(|(number, _)| *number == 2).map(|(_, id)| id.hex()));
            }
            15 => {
                let parts = fields(field.bytes())?;
                span.status =
                    parts.iter().find(|(number, _)| *number == 3).map_or(0, |(_, code)| code.number());
            }
            _ => {}
        }
    }
    Ok(span)
}
