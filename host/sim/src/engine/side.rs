//! Side channel between engines for KV transfers: JSON lines over TCP, one reply per request.
//!
//! It models NIXL's side channel and SGLang's bootstrap server, whose bytes the gateway never sees. A join is
//! answered when the bootstrap room has its result. A client that closes its connection earlier leaves the
//! bootstrap room.

use std::{collections::HashMap, io, sync::Arc, time::Duration};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Engine,
    rooms::{self, RoomFailure},
    verdict::Verdict,
};
use crate::core;

/// A request to another engine.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub(crate) enum Ask {
    /// NIXL: pulls the blocks of a finished prefill.
    Pull {
        /// Version of the decode engine. The handshake refuses a version other than the prefill engine's, as
        /// NIXL's compatibility hash does.
        version: String,
        engine_id: String,
        request_id: String,
        block_ids: Vec<u32>,
        fingerprint: u64,
        transfer_us: u64,
    },
    /// SGLang: waits for the KV of the prefill in this bootstrap room.
    Join { room: u64, fingerprint: u64 },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Reply {
    pub(crate) verdict: Verdict,
    pub(crate) message: String,
}

/// Maximum length of a line in bytes. A prompt of 128k tokens has 8k blocks of up to 6 digits.
const MAX_LINE: u64 = 1 << 20;

type Wire = BufReader<TcpStream>;

/// Pooled connections to other engines, so that thousands of handoffs per second do not exhaust ports.
#[derive(Default)]
pub(crate) struct Client {
    idle: Mutex<HashMap<(String, u16), Vec<Wire>>>,
}

impl Client {
    const MAX_IDLE: usize = 64;

    pub(crate) async fn ask(&self, host: &str, port: u16, ask: &Ask) -> io::Result<Reply> {
        let mut line = serde_json::to_vec(ask)?;
        line.push(b'\n');
        let key = (host.to_owned(), port);
        let kept = self.idle.lock().get_mut(&key).and_then(Vec::pop);
        if let Some(mut wire) = kept
            && let Ok(reply) = exchange(&mut wire, &line).await
        {
            self.keep(key, wire);
            return Ok(reply);
        }
        // There is no pooled connection, or the engine behind it was replaced.
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        let mut wire = BufReader::new(stream);
        let reply = exchange(&mut wire, &line).await?;
        self.keep(key, wire);
        Ok(reply)
    }

    fn keep(&self, key: (String, u16), wire: Wire) {
        let mut idle = self.idle.lock();
        let wires = idle.entry(key).or_default();
        if wires.len() < Self::MAX_IDLE {
            wires.push(wire);
        }
    }
}

async fn exchange(wire: &mut Wire, line: &[u8]) -> io::Result<Reply> {
    wire.get_mut().write_all(line).await?;
    let answer = read_line(wire).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(serde_json::from_slice(&answer)?)
}

async fn read_line(wire: &mut Wire) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    wire.take(MAX_LINE).read_until(b'\n', &mut line).await?;
    Ok(line.ends_with(b"\n").then_some(line))
}

/// Serves other engines until `stop` is cancelled.
pub(crate) async fn serve(
    engine: Arc<Engine>,
    listener: TcpListener,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else {
            // The process has probably run out of file descriptors: wait until some are closed.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let (engine, stop) = (Arc::clone(&engine), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                ended = serve_connection(&engine, stream) => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "side channel connection ended");
                    }
                }
            }
        });
    }
}

async fn serve_connection(engine: &Arc<Engine>, stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut wire = BufReader::new(stream);
    while let Some(line) = read_line(&mut wire).await? {
        let reply = match serde_json::from_slice::<Ask>(&line)? {
            Ask::Join { room, fingerprint } => {
                let joined = tokio::select! {
                    joined = rooms::join(engine, room, fingerprint) => joined,
                    // The decode engine sends nothing while it waits. If the connection becomes readable, the
                    // engine has disconnected.
                    _ = wire.fill_buf() => Err(RoomFailure::DecodeLeft),
                };
                joined_reply(joined)
            }
            pull => pull_reply(engine, &pull),
        };
        engine.counters.handoff(reply.verdict.into());
        let mut answer = serde_json::to_vec(&reply)?;
        answer.push(b'\n');
        wire.get_mut().write_all(&answer).await?;
    }
    Ok(())
}

fn pull_reply(engine: &Engine, ask: &Ask) -> Reply {
    let Ask::Pull { version, engine_id, request_id, block_ids, fingerprint, transfer_us } = ask else {
        return Reply { verdict: Verdict::Failed, message: "not a pull".to_owned() };
    };
    if version != engine.config.version() {
        let message = format!("version `{version}` is not compatible with `{}`", engine.config.version());
        return Reply { verdict: Verdict::Failed, message };
    }
    if *engine_id != engine.id {
        let message = format!("engine id `{engine_id}` is not `{}`", engine.id);
        return Reply { verdict: Verdict::Wrong, message };
    }
    let ask = core::Ask {
        block_ids: Some(block_ids),
        fingerprint: *fingerprint,
        transfer: Duration::from_micros(*transfer_us),
    };
    let now = engine.clock.now();
    let (verdict, what) = match engine.with_core(|core| core.pull(now, request_id, &ask)) {
        core::Pull::Pulled => return Reply { verdict: Verdict::Pulled, message: String::new() },
        core::Pull::Reused => (Verdict::Reused, "was pulled before"),
        core::Pull::Expired => (Verdict::Expired, "expired"),
        core::Pull::Unknown => (Verdict::Wrong, "is unknown"),
        core::Pull::Wrong(what) => (Verdict::Wrong, what),
    };
    tracing::error!(request_id, what, "bad pull");
    Reply { verdict, message: format!("handoff `{request_id}`: {what}") }
}

fn joined_reply(joined: Result<Verdict, RoomFailure>) -> Reply {
    match joined {
        Ok(verdict) => Reply { verdict, message: String::new() },
        Err(failure) => {
            let verdict = match failure {
                RoomFailure::Duplicate => Verdict::Reused,
                RoomFailure::WrongPrompt => Verdict::Wrong,
                RoomFailure::TimedOut => Verdict::Expired,
                RoomFailure::PrefillLeft | RoomFailure::DecodeLeft => Verdict::Failed,
            };
            Reply { verdict, message: failure.message().to_owned() }
        }
    }
}
