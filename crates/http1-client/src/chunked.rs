//! The chunked transfer coding (RFC 9112, section 7.1), taken apart as the bytes come, wherever they are cut.

use crate::WireError;

/// Maximum size of the chunk extensions and trailers in an answer, bytes. Their content is ignored.
const MAX_ASIDE: u32 = 16 * 1024;

/// Decoder state of a chunked body.
#[derive(Debug, Default)]
pub struct Chunked {
    at: At,
    /// While the size is read: the size so far. Afterwards: the bytes left of the chunk's data.
    left: u64,
    aside: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum At {
    /// Before the size of a chunk.
    #[default]
    Start,
    Size,
    Extension,
    /// The line feed that ends the size's line.
    SizeEnd,
    Data,
    /// The carriage return after a chunk's data.
    DataEnd,
    /// Its line feed.
    Next,
    Trailers,
    /// Within a trailer's line.
    Trailer,
    TrailerEnd,
    /// The last line feed.
    End,
    Done,
}

impl Chunked {
    /// Appends the data that `bytes` carries to `out`; how many bytes at the end are not of this body any
    /// more.
    ///
    /// # Errors
    /// A chunk is malformed, or its extensions or trailers are too long.
    pub fn decode(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<usize, WireError> {
        let mut rest = bytes;
        out.reserve(bytes.len());
        while self.at != At::Done {
            if self.at == At::Data {
                let length = usize::try_from(self.left).unwrap_or(usize::MAX).min(rest.len());
                let (data, after) = rest.split_at(length);
                out.extend_from_slice(data);
                self.left -= length as u64;
                rest = after;
                if self.left > 0 {
                    break;
                }
                // Almost always the whole end of the line is there.
                let line_end = rest.strip_prefix(b"\r\n");
                self.at = if line_end.is_some() { At::Start } else { At::DataEnd };
                rest = line_end.unwrap_or(rest);
            }
            if matches!(self.at, At::Start | At::Size) {
                rest = self.digits(rest).ok_or(WireError::Chunk)?;
                if let Some(data) = rest.strip_prefix(b"\r\n").filter(|_| self.left > 0) {
                    (self.at, rest) = (At::Data, data);
                    continue;
                }
            }
            let Some((byte, after)) = rest.split_first() else { break };
            rest = after;
            self.at = self.step(*byte).ok_or(WireError::Chunk)?;
        }
        Ok(rest.len())
    }

    /// Returns whether the last chunk has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.at == At::Done
    }

    /// Reads the digits of a size that `bytes` begin with, and returns what is behind them; `None` when the
    /// size is too large.
    fn digits<'a>(&mut self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let mut rest = bytes;
        while let Some((byte, after)) = rest.split_first()
            && let Some(digit) = char::from(*byte).to_digit(16)
        {
            let is_full = self.left >> (u64::BITS - 4) != 0;
            (self.at, self.left) = (At::Size, (!is_full).then_some(self.left << 4 | u64::from(digit))?);
            rest = after;
        }
        Some(rest)
    }

    /// Returns the state after a byte; `None` when the byte is not allowed here.
    fn step(&mut self, byte: u8) -> Option<At> {
        match (self.at, byte) {
            (At::Size | At::Extension, b'\r') => Some(At::SizeEnd),
            (At::Size, b';' | b' ' | b'\t') => Some(At::Extension),
            (At::SizeEnd, b'\n') if self.left == 0 => Some(At::Trailers),
            (At::SizeEnd, b'\n') => Some(At::Data),
            (At::DataEnd, b'\r') => Some(At::Next),
            (At::Next, b'\n') => Some(At::Start),
            (At::Trailers, b'\r') => Some(At::End),
            (At::Trailer, b'\r') => Some(At::TrailerEnd),
            (At::TrailerEnd, b'\n') => Some(At::Trailers),
            (At::End, b'\n') => Some(At::Done),
            (At::Extension | At::Trailers | At::Trailer, byte) if byte != b'\n' => {
                self.aside += 1;
                let next = if self.at == At::Extension { At::Extension } else { At::Trailer };
                (self.aside <= MAX_ASIDE).then_some(next)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Decodes a body that comes in pieces. Returns its data, and the number of bytes after its end; `None`
    /// when the end is missing.
    fn decoded(pieces: &[&[u8]]) -> Result<Option<(Vec<u8>, usize)>, WireError> {
        let (mut chunked, mut out, mut behind) = (Chunked::default(), Vec::new(), 0);
        for piece in pieces {
            behind += chunked.decode(piece, &mut out)?;
        }
        Ok(chunked.is_done().then_some((out, behind)))
    }

    #[test]
    fn chunks_extensions_and_trailers() {
        let whole = b"5\r\nhello\r\n00A;name=\"v\" x\r\n0123456789\r\n0 \r\nX-T: 1\r\nY: 2\r\n\r\nHTTP";
        assert_eq!(decoded(&[whole]), Ok(Some((b"hello0123456789".to_vec(), 4))));
        assert_eq!(decoded(&[b"0\r\n\r\n"]), Ok(Some((vec![], 0))));
        assert_eq!(decoded(&[b"5\r\nhello\r\n0\r\n\r"]), Ok(None));
    }

    #[test]
    fn what_is_no_chunk_is_refused() {
        let bad: [&[u8]; 11] = [
            b"\r\n",
            b";\r\n",
            b"g\r\n",
            b"-1\r\n",
            b"5\nhello",
            b"5\r\nhelloX",
            b"5\r\nhello\n",
            b"5\r\nhello\rX",
            b"10000000000000000\r\n",
            b"0\r\nX: 1\n",
            b"0\r\n\rX",
        ];
        for bytes in bad {
            assert_eq!(decoded(&[bytes]), Err(WireError::Chunk), "{:?}", String::from_utf8_lossy(bytes));
        }
        let endless = [b"1;".to_vec(), vec![b'x'; MAX_ASIDE as usize + 1]].concat();
        assert_eq!(decoded(&[&endless]), Err(WireError::Chunk));
    }

    proptest! {
        #[test]
        fn it_does_not_matter_where_the_bytes_are_cut(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..40), 0..8),
            cuts in proptest::collection::vec(0_usize..400, 0..12),
            behind in proptest::collection::vec(any::<u8>(), 0..4),
        ) {
            let mut wire = Vec::new();
            for chunk in &chunks {
                wire.extend(format!("{:x}\r\n", chunk.len()).bytes());
                wire.extend(chunk);
                wire.extend(b"\r\n");
            }
            wire.extend(b"0\r\n\r\n");
            wire.extend(&behind);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(wire.len())).collect();
            cuts.extend([0, wire.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &wire[pair[0]..pair[1]]).collect();
            prop_assert_eq!(decoded(&pieces), Ok(Some((chunks.concat(), behind.len()))));
        }
    }
}
