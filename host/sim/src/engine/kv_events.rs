//! KV events: the blocks that the prefix cache stores and evicts, published over ZMQ as by the real engines.
//!
//! vLLM (0.32) sends one map for all blocks of a prompt. SGLang (0.5) sends one array for each page.

use bytes::{BufMut as _, Bytes, BytesMut};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::broadcast::{self, Receiver, Sender, error::RecvError},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{config::Dialect, core::CacheEvent};

/// Maximum number of messages that wait for a slow subscriber. It misses further ones, as with ZMQ's
/// high-water mark.
const QUEUE: usize = 4_096;
/// Start of the greeting of ZMTP 3.0 with the mechanism NULL; zeros follow, up to 64 bytes.
const GREETING: &[u8; 16] = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL";

/// Publishes the events of one engine.
pub(crate) struct Publisher {
    dialect: Dialect,
    block_size: u32,
    topic: String,
    seq: u64,
    messages: Sender<Bytes>,
}

impl Publisher {
    pub(crate) fn new(dialect: Dialect, block_size: u32, topic: String) -> Self {
        Self { dialect, block_size, topic, seq: 0, messages: broadcast::channel(QUEUE).0 }
    }

    /// Sends the events of one step as one message.
    pub(crate) fn publish(&mut self, events: &[CacheEvent]) {
        if events.is_empty() {
            return;
        }
        let mut payload = BytesMut::new();
        payload.put_u8(0x93);
        payload.put_u8(0xcb);
        payload.put_f64(super::unix_now() as f64);
        let runs = self.runs(events);
        array(&mut payload, runs.len());
        for run in runs {
            match self.dialect {
                Dialect::Sglang => self.positional(run, &mut payload),
                _ => self.named(run, &mut payload),
            }
        }
        payload.put_u8(0);
        let mut message = BytesMut::new();
        frame(&mut message, 1, self.topic.as_bytes());
        frame(&mut message, 1, &self.seq.to_be_bytes());
        frame(&mut message, 0, &payload);
        self.seq += 1;
        // Without subscribers the message is lost, as with ZMQ.
        let _ = self.messages.send(message.freeze());
    }

    /// Groups blocks that follow one another. SGLang reports each block separately.
    fn runs<'a>(&self, events: &'a [CacheEvent]) -> Vec<&'a [CacheEvent]> {
        let follows = |a: &CacheEvent, b: &CacheEvent| match (a, b) {
            (CacheEvent::Stored { hash, .. }, CacheEvent::Stored { parent, .. }) => *parent == Some(*hash),
            _ => false,
        };
        match self.dialect {
            Dialect::Sglang => events.chunks(1).collect(),
            _ => events.chunk_by(follows).collect(),
        }
    }

    fn named(&self, run: &[CacheEvent], out: &mut BytesMut) {
        match run.first() {
            Some(CacheEvent::Stored { parent, .. }) => {
                out.put_u8(0x80 | 9);
                text(out, "type");
                text(out, "BlockStored");
                text(out, "block_hashes");
                hashes(run, out);
                text(out, "parent_block_hash");
                optional(out, *parent);
                text(out, "token_ids");
                tokens(run, out);
                text(out, "block_size");
                number(out, self.block_size.into());
                // Neither field has a default, so vLLM writes both in every event.
                for field in ["lora_id", "lora_name"] {
                    text(out, field);
                    out.put_u8(0xc0);
                }
                text(out, "medium");
                text(out, "GPU");
                text(out, "extra_keys");
                extra_keys(run, out);
            }
            _ => {
                out.put_u8(0x80 | 3);
                text(out, "type");
                text(out, "BlockRemoved");
                text(out, "block_hashes");
                hashes(run, out);
                text(out, "medium");
                text(out, "GPU");
            }
        }
    }

    fn positional(&self, run: &[CacheEvent], out: &mut BytesMut) {
        match run.first() {
            Some(CacheEvent::Stored { parent, .. }) => {
                array(out, 7);
                text(out, "BlockStored");
                hashes(run, out);
                optional(out, *parent);
                tokens(run, out);
                number(out, self.block_size.into());
                out.put_u8(0xc0);
                text(out, "GPU");
            }
            _ => {
                array(out, 3);
                text(out, "BlockRemoved");
                hashes(run, out);
                text(out, "GPU");
            }
        }
    }

    /// Returns the number of messages so far.
    pub(crate) fn sent(&self) -> u64 {
        self.seq
    }

    pub(crate) fn subscribe(&self) -> Receiver<Bytes> {
        self.messages.subscribe()
    }
}

/// Accepts subscribers until `stop` is cancelled. `subscribe` returns all later messages.
pub(crate) async fn serve(
    listener: TcpListener,
    subscribe: impl Fn() -> Receiver<Bytes>,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let Ok((stream, _)) = accepted else { return };
        let (messages, stop) = (subscribe(), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                _ = feed(stream, messages) => {}
                () = stop.cancelled() => {}
            }
        });
    }
}

/// Sends every message to one subscriber, whatever topics it subscribes to.
async fn feed(mut stream: TcpStream, mut messages: Receiver<Bytes>) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut greeting = [0; 64];
    stream.write_all(GREETING).await?;
    stream.write_all(&[0; 64 - GREETING.len()]).await?;
    stream.read_exact(&mut greeting).await?;
    let mut ready = BytesMut::new();
    ready.put_slice(b"\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    let mut command = BytesMut::new();
    frame(&mut command, 4, &ready);
    stream.write_all(&command).await?;
    let (mut read, mut write) = stream.split();
    let mut ignored = [0; 1_024];
    loop {
        tokio::select! {
            // Reads READY and SUBSCRIBE from the peer.
            count = read.read(&mut ignored) => if count? == 0 { return Ok(()) },
            message = messages.recv() => match message {
                Ok(message) => write.write_all(&message).await?,
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Ok(()),
            },
        }
    }
}

/// Appends a ZMTP frame. The flags are 1 if more frames follow, and 4 for a command.
fn frame(out: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(len) => {
            out.put_u8(flags);
            out.put_u8(len);
        }
        Err(_) => {
            out.put_u8(flags | 2);
            out.put_u64(body.len() as u64);
        }
    }
    out.put_slice(body);
}

fn hashes(run: &[CacheEvent], out: &mut BytesMut) {
    array(out, run.len());
    for event in run {
        let (CacheEvent::Stored { hash, .. } | CacheEvent::Removed { hash }) = event;
        number(out, *hash);
    }
}

/// Appends the multimodal objects of each block, as vLLM does: `[identifier, offset]`.
fn extra_keys(run: &[CacheEvent], out: &mut BytesMut) {
    array(out, run.len());
    for event in run {
        match event {
            CacheEvent::Stored { objects, .. } if !objects.is_empty() => {
                array(out, objects.len());
                for (hash, offset) in objects {
                    array(out, 2);
                    text(out, &format!("{hash:016x}").repeat(4));
                    out.put_u8(0xd3);
                    out.put_i64(*offset);
                }
            }
            _ => out.put_u8(0xc0),
        }
    }
}

fn tokens(run: &[CacheEvent], out: &mut BytesMut) {
    let all = || {
        run.iter().flat_map(|event| match event {
            CacheEvent::Stored { tokens, .. } => tokens.as_slice(),
            CacheEvent::Removed { .. } => &[],
        })
    };
    array(out, all().count());
    all().for_each(|token| number(out, u64::from(*token)));
}

fn array(out: &mut BytesMut, len: usize) {
    out.put_u8(0xdd);
    out.put_u32(u32::try_from(len).unwrap_or(u32::MAX));
}

fn number(out: &mut BytesMut, value: u64) {
    out.put_u8(0xcf);
    out.put_u64(value);
}

fn optional(out: &mut BytesMut, value: Option<u64>) {
    match value {
        Some(value) => number(out, value),
        None => out.put_u8(0xc0),
    }
}

fn text(out: &mut BytesMut, value: &str) {
    out.put_u8(0xd9);
    out.put_u8(u8::try_from(value.len()).unwrap_or(u8::MAX));
    out.put_slice(value.as_bytes());
}
