//! A ZMTP 3 connection over TCP, as far as a feed needs it: SUB and DEALER sockets that connect, the NULL mechanism.
//!
//! Owns the socket and the limits. A peer may be hostile: memory grows with the bytes that came, never with what a header
//! claims, and whatever takes too long or is too much ends the connection. Who does not call [`Connection::recv`] reads
//! nothing: the bytes wait in the kernel's buffers, then at the peer.

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

/// Room for one read, in bytes.
const READ: usize = 16 * 1024;
/// Room for unread bytes that is kept when there are none.
const KEEP: usize = 1024 * 1024;
/// Bytes that may wait to be sent: a peer that asks without reading must not fill memory.
const MAX_UNSENT: usize = 64 * 1024;
/// A message that began has to be whole after this time.
const WHOLE: Duration = Duration::from_secs(60);
/// Keepalive probes that may be lost, after one silence, a third of it apart.
const PROBES: u32 = 3;

/// What is taken from a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of a message, all frames together.
    pub(crate) message: usize,
    /// From the first packet to the end of the handshake.
    pub(crate) connect: Duration,
    /// Without a byte for so long a peer is asked whether it lives; if it says nothing for as long again, it does not.
    pub(crate) silence: Duration,
}

/// What a socket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Takes what a publisher says.
    Sub,
    /// Asks and takes answers.
    Dealer,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ZmtpError {
    #[error("`{0}` is not tcp://host:port")]
    Address(String),
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    #[error("no handshake within {0:?}")]
    Handshake(Duration),
    #[error(transparent)]
    Greeting(#[from] GreetingError),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("the peer's socket is {0}")]
    SocketType(String),
    #[error("the peer refuses: {0}")]
    Refused(String),
    #[error("a message before the end of the handshake")]
    Early,
    #[error("the peer asks and does not read the answers")]
    Flood,
    #[error("a message that is not whole after {WHOLE:?}")]
    Slow,
    #[error("no sign of life for {0:?}")]
    Silent(Duration),
    #[error("broken connection: {0}")]
    Io(#[from] io::Error),
    #[error("the peer closed the connection")]
    Closed,
}

impl ZmtpError {
    /// Whether the peer broke the protocol or a limit.
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
    /// The peer's minor version. From 1 on it answers PING.
    minor: u8,
    heart: Heart,
}

/// When the peer last showed life.
#[derive(Clone, Copy, Debug)]
struct Heart {
    at: Instant,
    asked: bool,
}

impl Connection {
    /// Connects to `tcp://host:port` and shakes hands.
    ///
    /// # Errors
    /// [`ZmtpError`].
    pub(crate) async fn open(endpoint: &str, kind: Kind, limits: Limits) -> Result<Self, ZmtpError> {
        let limit = limits.connect;
        let shaken = timeout(limit, Self::shake(endpoint, kind, limits)).await;
        shaken.unwrap_or(Err(ZmtpError::Handshake(limit)))
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

    /// The next message. Dropping the future loses none.
    ///
    /// # Errors
    /// [`ZmtpError`]; the connection is over.
    pub(crate) async fn recv(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        let mut whole_by = None;
        loop {
            while let Some(item) = self.assembler.next(&mut self.unread)? {
                match item {
                    Item::Message(parts) => return Ok(parts),
                    Item::Command(body) => self.on_command(&body)?,
                }
            }
            if self.unread.is_empty() && !self.assembler.is_open() {
                whole_by = None;
            } else if Instant::now() >= *whole_by.get_or_insert_with(|| Instant::now() + WHOLE) {
                return Err(ZmtpError::Slow);
            }
            self.exchange(whole_by).await?;
        }
    }

    async fn shake(endpoint: &str, kind: Kind, limits: Limits) -> Result<Self, ZmtpError> {
        let address = endpoint.strip_prefix("tcp://");
        let address = address.ok_or_else(|| ZmtpError::Address(endpoint.to_owned()))?;
        let stream = TcpStream::connect(address).await.map_err(ZmtpError::Connect)?;
        watch(&stream, limits.silence)?;
        let mut this = Self {
            stream,
            limits,
            assembler: Assembler::new(limits.message),
            unread: BytesMut::new(),
            unsent: BytesMut::new(),
            minor: 0,
            heart: Heart { at: Instant::now(), asked: false },
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

    /// Reads or writes once, or finds the peer silent. Cancellation loses nothing.
    async fn exchange(&mut self, whole_by: Option<Instant>) -> Result<(), ZmtpError> {
        self.make_room();
        let beat = (self.minor > 0).then(|| self.heart.at + self.limits.silence);
        let wake = [beat, whole_by].into_iter().flatten().min();
        let (mut reader, mut writer) = self.stream.split();
        select! {
            // A peer that never falls silent has to get its PONGs too.
            biased;
            wrote = writer.write_buf(&mut self.unsent), if !self.unsent.is_empty() => {
                wrote?;
            }
            read = reader.read_buf(&mut self.unread) => {
                if read? == 0 {
                    return Err(ZmtpError::Closed);
                }
                self.heart = Heart { at: Instant::now(), asked: false };
            }
            // What came while nobody read is read before this is looked at.
            () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {
                if beat.is_some_and(|beat| beat <= Instant::now()) {
                    self.feel()?;
                }
            }
        }
        Ok(())
    }

    /// Nothing came for one silence: asks, or gives up when it did so before.
    fn feel(&mut self) -> Result<(), ZmtpError> {
        if self.heart.asked {
            return Err(ZmtpError::Silent(self.limits.silence * 2));
        }
        command::ping(&mut self.unsent);
        self.heart = Heart { at: Instant::now(), asked: true };
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), ZmtpError> {
        while !self.unsent.is_empty() {
            self.stream.write_buf(&mut self.unsent).await?;
        }
        Ok(())
    }

    fn make_room(&mut self) {
        self.unread.reserve(READ);
        if self.unread.is_empty() && self.unread.capacity() > KEEP {
            self.unread = BytesMut::with_capacity(READ);
        }
    }
}

/// Lets the kernel find out that the peer's machine is gone, whatever version of ZMTP it speaks.
fn watch(stream: &TcpStream, silence: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let second = Duration::from_secs(1);
    let keepalive = TcpKeepalive::new().with_time(silence.max(second));
    let keepalive = keepalive.with_interval((silence / PROBES).max(second)).with_retries(PROBES);
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive)?;
    // The same bound when something of ours was not acknowledged, for then there are no probes.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(silence.max(second) * 2))?;
    Ok(())
}

#[cfg(test)]
mod tests;
