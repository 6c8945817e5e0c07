//! ZMTP 3 client over TCP with what a feed needs: connecting SUB and DEALER sockets, NULL mechanism.
//!
//! Owns the socket and the limits. A peer may be hostile: memory grows with the bytes received, never with
//! the length that a header claims, and exceeding a limit ends the connection. It reads only inside
//! [`Connection::recv`], so that a slow caller fills the kernel's buffers and then slows down the peer.

use std::{io, time::Duration};

use bytes::{Buf as _, Bytes, BytesMut};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    select,
    time::{Instant, sleep_until, timeout},
};

mod command;
mod frame;
mod greeting;

pub(crate) use command::{Command, CommandError};
pub(crate) use frame::{Assembler, FrameError, Item};
pub(crate) use greeting::GreetingError;

/// Buffer space for one read, in bytes.
const READ_BYTES: usize = 16 * 1024;
/// Capacity above which an empty read buffer is freed.
const MAX_IDLE_BUFFER: usize = 1024 * 1024;
/// Limit of bytes that wait to be sent, so that a peer that sends PINGs without reading PONGs cannot fill
/// memory.
const MAX_UNSENT: usize = 64 * 1024;
/// Time limit from the first byte of a message to its last.
const MESSAGE_LIMIT: Duration = Duration::from_secs(60);
/// Number of unanswered TCP keepalive probes that end a connection. They start after one silence, a third of
/// it apart.
const KEEPALIVE_PROBES: u32 = 3;

/// Limits for a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of a message, all frames together.
    pub(crate) message: usize,
    /// Time from the first packet to the end of the handshake.
    pub(crate) connect: Duration,
    /// Idle time after which the peer gets a PING. If it sends nothing for as long again, the connection
    /// ends.
    pub(crate) silence: Duration,
}

/// Type of our socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Receives from a publisher.
    Sub,
    /// Sends requests and receives replies.
    Dealer,
}

/// Why a connection could not be made or ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ZmtpError {
    #[error("cannot connect to `{0}`: expected tcp://host:port")]
    Address(String),
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    #[error("handshake not finished within {0:?}")]
    Handshake(Duration),
    #[error(transparent)]
    Greeting(#[from] GreetingError),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("unsuitable socket type `{0}` of the peer")]
    SocketType(String),
    #[error("the peer refused the connection: {0}")]
    Refused(String),
    #[error("the peer sent a message before the end of the handshake")]
    Early,
    #[error("the peer sends PINGs and does not read the PONGs")]
    Flood,
    #[error("message incomplete after {MESSAGE_LIMIT:?}")]
    Slow,
    #[error("the peer was silent for {0:?}")]
    Silent(Duration),
    #[error("connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("the peer closed the connection")]
    Closed,
}

impl ZmtpError {
    /// Returns whether the peer violated the protocol or a limit.
    pub(crate) fn is_violation(&self) -> bool {
        match self {
            Self::Greeting(_) | Self::Frame(_) | Self::Command(_) | Self::SocketType(_) => true,
            Self::Refused(_) | Self::Early | Self::Flood | Self::Slow => true,
            Self::Address(_) | Self::Connect(_) | Self::Handshake(_) => false,
            Self::Silent(_) | Self::Io(_) | Self::Closed => false,
        }
    }
}

impl Kind {
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
pub(crate) struct Connection {
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
    /// [`ZmtpError`].
    pub(crate) async fn open(endpoint: &str, kind: Kind, limits: Limits) -> Result<Self, ZmtpError> {
        let limit = limits.connect;
        let connected = timeout(limit, Self::handshake(endpoint, kind, limits)).await;
        connected.unwrap_or(Err(ZmtpError::Handshake(limit)))
    }

    /// Subscribes to a prefix of topics.
    ///
    /// # Errors
    /// [`ZmtpError`].
    pub(crate) async fn subscribe(&mut self, topic: &str) -> Result<(), ZmtpError> {
        command::subscribe(topic, self.minor, &mut self.unsent);
        self.flush().await
    }

    /// Sends a message. The caller sets the time limit.
    ///
    /// # Errors
    /// [`ZmtpError`].
    pub(crate) async fn send(&mut self, parts: &[&[u8]]) -> Result<(), ZmtpError> {
        frame::message(parts, &mut self.unsent);
        self.flush().await
    }

    /// Returns the next message. Cancel-safe.
    ///
    /// # Errors
    /// [`ZmtpError`]; the connection is then unusable.
    pub(crate) async fn recv(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
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
                return Err(ZmtpError::Slow);
            }
            self.exchange(complete_by).await?;
        }
    }

    async fn handshake(endpoint: &str, kind: Kind, limits: Limits) -> Result<Self, ZmtpError> {
        let address = endpoint.strip_prefix("tcp://");
        let address = address.ok_or_else(|| ZmtpError::Address(endpoint.to_owned()))?;
        let stream = TcpStream::connect(address).await.map_err(ZmtpError::Connect)?;
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
        command::ready(kind.name(), &mut this.unsent);
        let peer = loop {
            match this.assembler.next(&mut this.unread)? {
                None => this.exchange(None).await?,
                Some(Item::Message(_)) => return Err(ZmtpError::Early),
                Some(Item::Command(body)) => match Command::read(&body)? {
                    Command::Ready(peer) => break peer,
                    Command::Error(reason) => return Err(ZmtpError::Refused(reason)),
                    Command::Ping(_) | Command::Other => return Err(ZmtpError::Early),
                },
            }
        };
        if !kind.speaks_to(&peer) {
            return Err(ZmtpError::SocketType(peer));
        }
        this.flush().await?;
        this.minor = minor;
        Ok(this)
    }

    fn on_command(&mut self, body: &Bytes) -> Result<(), ZmtpError> {
        match Command::read(body)? {
            Command::Ping(context) => command::pong(&context, &mut self.unsent),
            Command::Error(reason) => return Err(ZmtpError::Refused(reason)),
            Command::Ready(_) | Command::Other => {}
        }
        if self.unsent.len() > MAX_UNSENT { Err(ZmtpError::Flood) } else { Ok(()) }
    }

    /// Reads or writes once, or waits until a limit is reached. Cancel-safe.
    async fn exchange(&mut self, complete_by: Option<Instant>) -> Result<(), ZmtpError> {
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
                    return Err(ZmtpError::Closed);
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
    fn on_silence(&mut self) -> Result<(), ZmtpError> {
        if self.liveness.pinged {
            return Err(ZmtpError::Silent(self.limits.silence * 2));
        }
        command::ping(&mut self.unsent);
        self.liveness = Liveness { at: Instant::now(), pinged: true };
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), ZmtpError> {
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
