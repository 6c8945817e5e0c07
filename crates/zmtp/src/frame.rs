//! Assembles ZMTP frames to messages and commands. Works on byte buffers, not on sockets.
//!
//! Memory is reserved for received bytes only, never for the length that a header claims.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// Maximum number of frames of a message.
pub const MAX_FRAMES: usize = 16;
/// Maximum size of a command, bytes.
pub const MAX_COMMAND: usize = 4 * 1024;

/// A message or a command from the peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Item {
    /// The frames of a message.
    Message(Vec<Bytes>),
    /// The body of a command.
    Command(Bytes),
}

/// Why a frame is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The combination of flags is invalid.
    #[error("invalid frame flags {0:#04x}")]
    Flags(u8),
    /// The message is over the limit.
    #[error("message of at least {claimed} bytes exceeds the limit of {limit}")]
    Message {
        /// Bytes that the headers so far claim.
        claimed: u64,
        /// Limit in bytes.
        limit: usize,
    },
    /// The message has too many frames.
    #[error("message of more than {MAX_FRAMES} frames")]
    Frames,
    /// The command is over the limit.
    #[error("command of {0} bytes exceeds the limit of {MAX_COMMAND}")]
    Command(u64),
}

/// Assembles frames.
#[derive(Debug)]
pub struct Assembler {
    max_message: usize,
    parts: Vec<Bytes>,
    bytes: usize,
}

struct Header {
    flags: u8,
    length: u64,
    size: usize,
}

impl Assembler {
    /// Creates an assembler with a limit of a message's bytes, all frames together.
    pub fn new(max_message: usize) -> Self {
        Self { max_message, parts: Vec::new(), bytes: 0 }
    }

    /// Takes the next message or command out of `unread`; `None` if it is incomplete.
    ///
    /// # Errors
    /// [`FrameError`], as soon as the header was received.
    pub fn next(&mut self, unread: &mut BytesMut) -> Result<Option<Item>, FrameError> {
        while let Some(header) = Header::read(unread)? {
            let length = self.admit(&header)?;
            let Some(body) = unread.get(header.size..).and_then(|rest| rest.get(..length)) else { break };
            // Copy the body: a slice would keep the whole read buffer alive.
            let body = Bytes::copy_from_slice(body);
            unread.advance(header.size + length);
            if header.flags & COMMAND != 0 {
                return Ok(Some(Item::Command(body)));
            }
            self.bytes += length;
            self.parts.push(body);
            if header.flags & MORE == 0 {
                self.bytes = 0;
                return Ok(Some(Item::Message(std::mem::take(&mut self.parts))));
            }
        }
        Ok(None)
    }

    /// Returns whether a message is incomplete.
    pub fn is_open(&self) -> bool {
        !self.parts.is_empty()
    }

    fn admit(&self, header: &Header) -> Result<usize, FrameError> {
        let length = usize::try_from(header.length).unwrap_or(usize::MAX);
        if header.flags & COMMAND != 0 {
            return if length > MAX_COMMAND { Err(FrameError::Command(header.length)) } else { Ok(length) };
        }
        if self.parts.len() >= MAX_FRAMES {
            return Err(FrameError::Frames);
        }
        if length > self.max_message.saturating_sub(self.bytes) {
            let claimed = header.length.saturating_add(self.bytes as u64);
            return Err(FrameError::Message { claimed, limit: self.max_message });
        }
        Ok(length)
    }
}

impl Header {
    fn read(bytes: &[u8]) -> Result<Option<Self>, FrameError> {
        let Some(flags) = bytes.first().copied() else { return Ok(None) };
        // A command is always a single frame.
        if flags > (MORE | LONG | COMMAND) || flags & (MORE | COMMAND) == (MORE | COMMAND) {
            return Err(FrameError::Flags(flags));
        }
        let rest = bytes.get(1..).unwrap_or_default();
        Ok(if flags & LONG == 0 {
            rest.first().map(|length| Self { flags, length: u64::from(*length), size: 2 })
        } else {
            rest.first_chunk().map(|length| Self { flags, length: u64::from_be_bytes(*length), size: 9 })
        })
    }
}

/// Writes a message.
pub fn message(parts: &[&[u8]], out: &mut BytesMut) {
    for (place, part) in parts.iter().enumerate() {
        frame(if place + 1 < parts.len() { MORE } else { 0 }, part, out);
    }
}

/// Writes a command.
pub fn command(body: &[u8], out: &mut BytesMut) {
    frame(COMMAND, body, out);
}

fn frame(flags: u8, body: &[u8], out: &mut BytesMut) {
    if let Ok(length) = u8::try_from(body.len()) {
        out.put_slice(&[flags, length]);
    } else {
        out.put_u8(flags | LONG);
        out.put_u64(body.len() as u64);
    }
    out.put_slice(body);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(bytes: &[u8], limit: usize) -> Result<Vec<Item>, FrameError> {
        let (mut unread, mut assembler) = (BytesMut::from(bytes), Assembler::new(limit));
        std::iter::from_fn(|| assembler.next(&mut unread).transpose()).collect()
    }

    #[test]
    fn what_is_written_is_read_however_it_is_cut() {
        let long = vec![7; 300];
        let mut out = BytesMut::new();
        message(&[b"kv", &long, b""], &mut out);
        command(b"\x04PING", &mut out);
        command(&long, &mut out);
        message(&[b"x"], &mut out);
        let copy = Bytes::copy_from_slice;
        let expected = [
            Item::Message(vec![copy(b"kv"), copy(&long), Bytes::new()]),
            Item::Command(copy(b"\x04PING")),
            Item::Command(copy(&long)),
            Item::Message(vec![copy(b"x")]),
        ];
        assert_eq!(all(&out, 400).unwrap(), expected);
        for step in 1..out.len() {
            let (mut unread, mut assembler, mut items) = (BytesMut::new(), Assembler::new(400), Vec::new());
            for piece in out.chunks(step) {
                unread.extend_from_slice(piece);
                while let Some(item) = assembler.next(&mut unread).unwrap() {
                    items.push(item);
                }
            }
            assert_eq!(items, expected, "in steps of {step}");
        }
    }

    #[test]
    fn a_command_may_stand_between_the_frames_of_a_message() {
        let items = all(b"\x01\x01a\x04\x05\x04PING\x00\x01b", 9).unwrap();
        assert_eq!(items[0], Item::Command(Bytes::from_static(b"\x04PING")));
        assert_eq!(items[1], Item::Message(vec![Bytes::from_static(b"a"), Bytes::from_static(b"b")]));
    }

    #[test]
    fn lengths_and_counts_have_limits() {
        let huge = |flags: u8, length: u64| [[flags].as_slice(), &length.to_be_bytes()].concat();
        let over = |claimed| Err(FrameError::Message { claimed, limit: 10 });
        assert_eq!(all(&huge(2, 1 << 63), 10), over(1 << 63));
        assert_eq!(all(&huge(3, u64::MAX), 10), over(u64::MAX));
        assert_eq!(all(&huge(2, 11), 10), over(11));
        assert_eq!(all(&huge(2, 10), 10), Ok(vec![]));
        assert_eq!(all(b"\x01\x06aaaaaa\x00\x05", 10), over(11));
        assert_eq!(all(&huge(6, 1 << 63), 10), Err(FrameError::Command(1 << 63)));
        assert_eq!(all(&b"\x01\x00".repeat(MAX_FRAMES), 10), Ok(vec![]));
        assert_eq!(all(&b"\x01\x00".repeat(MAX_FRAMES + 1), 10), Err(FrameError::Frames));
        for flags in [5, 7, 8, 0x80, 0xff] {
            assert_eq!(all(&[flags], 10), Err(FrameError::Flags(flags)));
        }
    }
}
