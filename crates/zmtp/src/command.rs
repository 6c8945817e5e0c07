//! Commands that a subscriber uses: READY, ERROR, SUBSCRIBE, PING, PONG.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use crate::frame;

/// Maximum size of a PING that its PONG repeats, bytes.
const MAX_CONTEXT: usize = 16;

/// A command from the peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// The peer's part of the handshake, with its socket type.
    Ready(String),
    /// The peer refuses the connection, with the reason.
    Error(String),
    /// A request for a PONG with this context.
    Ping(Bytes),
    /// PONG, or an unknown command. Only its arrival matters.
    Other,
}

/// Name of a command that cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed {0} command")]
pub struct CommandError(&'static str);

impl Command {
    /// Parses a command's body.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn read(body: &Bytes) -> Result<Self, CommandError> {
        let mut rest = body.clone();
        let name = take_short(&mut rest).ok_or(CommandError("nameless"))?;
        match name.as_ref() {
            b"READY" => read_ready(rest),
            b"ERROR" => {
                let reason = take_short(&mut rest).ok_or(CommandError("ERROR"))?;
                Ok(Self::Error(reason.escape_ascii().to_string()))
            }
            b"PING" => {
                // Two bytes of time to live precede the context.
                let context = (rest.len() >= 2).then(|| rest.slice(2..)).ok_or(CommandError("PING"))?;
                if context.len() > MAX_CONTEXT { Err(CommandError("PING")) } else { Ok(Self::Ping(context)) }
            }
            _ => Ok(Self::Other),
        }
    }
}

fn read_ready(mut rest: Bytes) -> Result<Command, CommandError> {
    let mut socket_type = None;
    while !rest.is_empty() {
        let name = take_short(&mut rest).ok_or(CommandError("READY"))?;
        let length = rest.try_get_u32().map_err(|_| CommandError("READY"))?;
        let value = take_bytes(&mut rest, length as usize).ok_or(CommandError("READY"))?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            socket_type = Some(value.escape_ascii().to_string());
        }
    }
    socket_type.map(Command::Ready).ok_or(CommandError("READY"))
}

/// Takes a byte string with a length of one byte.
fn take_short(rest: &mut Bytes) -> Option<Bytes> {
    let length = rest.try_get_u8().ok()?;
    take_bytes(rest, usize::from(length))
}

fn take_bytes(rest: &mut Bytes, length: usize) -> Option<Bytes> {
    (length <= rest.len()).then(|| rest.split_to(length))
}

/// Writes a READY command for a socket of this type.
pub fn ready(socket_type: &str, out: &mut BytesMut) {
    let mut body = BytesMut::new();
    body.put_slice(b"\x05READY");
    for (name, value) in [("Socket-Type", socket_type), ("Identity", "")] {
        body.put_u8(u8::try_from(name.len()).unwrap_or(u8::MAX));
        body.put_slice(name.as_bytes());
        body.put_u32(u32::try_from(value.len()).unwrap_or(u32::MAX));
        body.put_slice(value.as_bytes());
    }
    frame::command(&body, out);
}

/// Writes a subscription: a command, or a message for a peer with ZMTP 3.0.
pub fn subscribe(topic: &str, minor: u8, out: &mut BytesMut) {
    if minor == 0 {
        frame::message(&[&[b"\x01", topic.as_bytes()].concat()], out);
    } else {
        frame::command(&[b"\x09SUBSCRIBE", topic.as_bytes()].concat(), out);
    }
}

/// Writes a PING. Its time to live is 0, so that the peer does not disconnect a slow reader.
pub fn ping(out: &mut BytesMut) {
    frame::command(b"\x04PING\0\0", out);
}

/// Writes the PONG for a PING.
pub fn pong(context: &[u8], out: &mut BytesMut) {
    frame::command(&[b"\x04PONG", context].concat(), out);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &'static [u8]) -> Result<Command, CommandError> {
        Command::read(&Bytes::from_static(body))
    }

    #[test]
    fn well_formed_commands_are_parsed_and_malformed_ones_are_errors() {
        assert_eq!(read(b"\x05READY\x0bSocket-Type\0\0\0\x03PUB"), Ok(Command::Ready("PUB".to_owned())));
        let more = b"\x05READY\x08Identity\0\0\0\0\x0bsocket-type\0\0\0\x04XPUB";
        assert_eq!(read(more), Ok(Command::Ready("XPUB".to_owned())));
        assert_eq!(read(b"\x05ERROR\x03no\n"), Ok(Command::Error("no\\n".to_owned())));
        assert_eq!(read(b"\x04PING\0\x0aabc"), Ok(Command::Ping(Bytes::from_static(b"abc"))));
        assert_eq!(read(b"\x04PONG"), Ok(Command::Other));
        assert_eq!(read(b"\x07UNKNOWN and more"), Ok(Command::Other));
        for (body, what) in [
            (b"".as_slice(), "nameless"),
            (b"\x05REA", "nameless"),
            (b"\x05READY", "READY"),
            (b"\x05READY\x0bSocket-Type", "READY"),
            (b"\x05READY\x0bSocket-Type\xff\xff\xff\xffPUB", "READY"),
            (b"\x05READY\x0cSocket-Type", "READY"),
            (b"\x05ERROR", "ERROR"),
            (b"\x04PING\0", "PING"),
            (b"\x04PING\0\0seventeen bytes!!", "PING"),
        ] {
            assert_eq!(read(body), Err(CommandError(what)), "{}", body.escape_ascii());
        }
    }
}
