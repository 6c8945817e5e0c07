#![doc = include_str!("../README.md")]

use std::{io, time::Duration};

use bytes::{Buf as _, Bytes, BytesMut};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    select,
    time::{Instant, sleep_until, timeout},
};

pub mod command;
pub mod frame;
pub mod greeting;

use command::{Command, CommandError};
use frame::{Assembler, FrameError, Item};
use greeting::GreetingError;

/// Buffer space for one read, in bytes.
const READ_BYTES: usize = 16 * 1024;
/// Capacity above which an empty read buffer is freed.
const MAX_IDLE_BUFFER: usize = 1024 * 1024;
/// Maximum number of bytes that wait to be sent, so that a peer that sends PINGs without reading PONGs cannot
/// fill memory.
const MAX_UNSENT: usize = 64 * 1024;
/// Time limit from the first byte of a message to its last.
const MESSAGE_LIMIT: Duration = Duration::from_secs(60);
/// Number of unanswered TCP keepalive probes that end a connection. They start after one silence, a third of
/// it apart.
const KEEPALIVE_PROBES: u32 = 3;

/// Limits for a peer.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a message, all frames together.
    pub message: usize,
    /// Time from the first packet to the end of the handshake.
    pub connect: Duration,
    /// Idle time after which the peer gets a PING. If it sends nothing for as long again, the connection
    /// ends.
    pub silence: Duration,
}

/// Type of the own socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketType {
    /// Receives from a publisher.
    Sub,
    /// Sends requests and receives replies.
    Dealer,
}

/// Why a connection could not be made or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address is not `tcp://host:port`.
    #[error("cannot connect to `{0}`: expected tcp://host:port")]
    Address(String),
    /// There is no connection.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// The handshake took too long.
    #[error("handshake not finished within {0:?}")]
    Handshake(Duration),
    /// The peer's greeting is refused.
    #[error(transparent)]
    Greeting(#[from] GreetingError),
    /// A frame is refused.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A command cannot be parsed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The peer's socket has another type than one that can answer.
    #[error("unsuitable socket type `{0}` of the peer")]
    SocketType(String),
    /// The peer sent ERROR.
    #[error("the peer refused the connection: {0}")]
    Refused(String),
    /// The peer sent a message too early.
    #[error("the peer sent a message before the end of the handshake")]
    Early,
    /// Too many PONGs wait for the peer to read them.
    #[error("the peer sends PINGs and does not read the PONGs")]
    Flood,
    /// A message was not complete in time.
    #[error("message incomplete after {MESSAGE_LIMIT:?}")]
    Slow,
    /// The peer did not answer a PING.
    #[error("the peer was silent for {0:?}")]
    Silent(Duration),
    /// The connection failed.
    #[error("connection failed: {0}")]
    Io(#[from] io::Error),
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
}

impl Error {
    /// Returns whether the peer violated the protocol or a limit.
    pub fn is_violation(&self) -> bool {
        match self {
            Self::Greeting(_) | Self::Frame(_) | Self::Command(_) | Self::SocketType(_) => true,
            Self::Refused(_) | Self::Early | Self::Flood | Self::Slow => true,
            Self::Address(_) | Self::Connect(_) | Self::Handshake(_) => false,
            Self::Silent(_) | Self::Io(_) | Self::Closed => false,
        }
    }
}

impl SocketType {
    fn name(self) -> &'static str {
        match self {
            Self::Sub => "SUB",
            Self::Dealer => "DEALER",
        }
    }

    fn speaks_to(self, peer: &str) -> bool {
        match self {
            Self::Sub => matches!(peer, "PUB" | "XPUB"),
            Self::Dealer => matches!(peer, "ROUTER" | "REP" | "DEALER"),
        }
    }
}

/// A connection after its handshake.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    limits: Limits,
    assembler: Assembler,
    unread: BytesMut,
    unsent: BytesMut,
    /// Minor version of the peer's ZMTP 3. From 1 on it answers PINGs.
    minor: u8,
    liveness: Liveness,
}

/// When the peer last sent something.
#[derive(Clone, Copy, Debug)]
struct Liveness {
    at: Instant,
    /// A PING was sent since.
    pinged: bool,
}

impl Connection {
    /// Connects to `tcp://host:port` and performs the handshake.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn open(endpoint: &str, socket_type: SocketType, limits: Limits) -> Result<Self, Error> {
        let limit = limits.connect;
        let connected = timeout(limit, Self::handshake(endpoint, socket_type, limits)).await;
        connected.unwrap_or(Err(Error::Handshake(limit)))
    }

    /// Subscribes to a prefix of topics.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn subscribe(&mut self, topic: &str) -> Result<(), Error> {
        command::subscribe(topic, self.minor, &mut self.unsent);
        self.flush().await
    }

    /// Sends a message. The caller sets the time limit.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn send(&mut self, parts: &[&[u8]]) -> Result<(), Error> {
        frame::message(parts, &mut self.unsent);
        self.flush().await
    }

    /// Returns the next message. Cancel-safe.
    ///
    /// # Errors
    /// [`Error`]; the connection is then unusable.
    pub async fn recv(&mut self) -> Result<Vec<Bytes>, Error> {
        let mut complete_by = None;
        loop {
            while let Some(item) = self.assembler.next(&mut self.unread)? {
                match item {
                    Item::Message(parts) => return Ok(parts),
                    Item::Command(body) => self.on_command(&body)?,
                }
            }
            if self.unread.is_empty() && !self.assembler.is_open() {
                complete_by = None;
            } else if Instant::now() >= *complete_by.get_or_insert_with(|| Instant::now() + MESSAGE_LIMIT) {
                return Err(Error::Slow);
            }
            self.exchange(complete_by).await?;
        }
    }

    async fn handshake(endpoint: &str, socket_type: SocketType, limits: Limits) -> Result<Self, Error> {
        let address = endpoint.strip_prefix("tcp://");
        let address = address.ok_or_else(|| Error::Address(endpoint.to_owned()))?;
        let stream = TcpStream::connect(address).await.map_err(Error::Connect)?;
        enable_keepalive(&stream, limits.silence)?;
        let mut this = Self {
            stream,
            limits,
            assembler: Assembler::new(limits.message),
            unread: BytesMut::new(),
            unsent: BytesMut::new(),
            minor: 0,
            liveness: Liveness { at: Instant::now(), pinged: false },
        };
        this.unsent.extend_from_slice(&greeting::ours());
        let minor = loop {
            match greeting::check(&this.unread)? {
                Some(minor) => break minor,
                None => this.exchange(None).await?,
            }
        };
        this.unread.advance(greeting::LENGTH);
        command::ready(socket_type.name(), &mut this.unsent);
        let peer = loop {
            match this.assembler.next(&mut this.unread)? {
                None => this.exchange(None).await?,
                Some(Item::Message(_)) => return Err(Error::Early),
                Some(Item::Command(body)) => match Command::read(&body)? {
                    Command::Ready(peer) => break peer,
                    Command::Error(reason) => return Err(Error::Refused(reason)),
                    Command::Ping(_) | Command::Other => return Err(Error::Early),
                },
            }
        };
        if !socket_type.speaks_to(&peer) {
            return Err(Error::SocketType(peer));
        }
        this.flush().await?;
        this.minor = minor;
        Ok(this)
    }

    fn on_command(&mut self, body: &Bytes) -> Result<(), Error> {
        match Command::read(body)? {
            Command::Ping(context) => command::pong(&context, &mut self.unsent),
            Command::Error(reason) => return Err(Error::Refused(reason)),
            Command::Ready(_) | Command::Other => {}
        }
        if self.unsent.len() > MAX_UNSENT { Err(Error::Flood) } else { Ok(()) }
    }

    /// Reads or writes once, or waits until a limit is reached. Cancel-safe.
    async fn exchange(&mut self, complete_by: Option<Instant>) -> Result<(), Error> {
        self.prepare_buffer();
        let ping_at = (self.minor > 0).then(|| self.liveness.at + self.limits.silence);
        let wake = [ping_at, complete_by].into_iter().flatten().min();
        let (mut reader, mut writer) = self.stream.split();
        select! {
            // Write first, so that a peer that sends without pause gets its PONGs too.
            biased;
            wrote = writer.write_buf(&mut self.unsent), if !self.unsent.is_empty() => {
                wrote?;
            }
            read = reader.read_buf(&mut self.unread) => {
                if read? == 0 {
                    return Err(Error::Closed);
                }
                self.liveness = Liveness { at: Instant::now(), pinged: false };
            }
            // Reads come first, so bytes that arrived before this call count as a sign of life.
            () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {
                if ping_at.is_some_and(|at| at <= Instant::now()) {
                    self.on_silence()?;
                }
            }
        }
        Ok(())
    }

    /// Handles an idle period: sends a PING, or ends the connection if the last PING was not answered.
    fn on_silence(&mut self) -> Result<(), Error> {
        if self.liveness.pinged {
            return Err(Error::Silent(self.limits.silence * 2));
        }
        command::ping(&mut self.unsent);
        self.liveness = Liveness { at: Instant::now(), pinged: true };
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), Error> {
        while !self.unsent.is_empty() {
            self.stream.write_buf(&mut self.unsent).await?;
        }
        Ok(())
    }

    fn prepare_buffer(&mut self) {
        self.unread.reserve(READ_BYTES);
        if self.unread.is_empty() && self.unread.capacity() > MAX_IDLE_BUFFER {
            self.unread = BytesMut::with_capacity(READ_BYTES);
        }
    }
}

/// Enables TCP keepalive, which detects that the peer's machine is gone with every version of ZMTP.
fn enable_keepalive(stream: &TcpStream, silence: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let second = Duration::from_secs(1);
    let keepalive = TcpKeepalive::new().with_time(silence.max(second));
    let keepalive =
        keepalive.with_interval((silence / KEEPALIVE_PROBES).max(second)).with_retries(KEEPALIVE_PROBES);
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive)?;
    // The same limit for unacknowledged data, because the kernel sends no probes while data is outstanding.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(silence.max(second) * 2))?;
    Ok(())
}

#[cfg(test)]
mod tests;
