//! Decodes request bodies with a content coding, and no further than their limit.
//!
//! A few bytes may decode to gigabytes. Bytes are therefore decoded as they arrive, in small pieces, and the
//! first byte beyond the limit ends the request.

use std::io::{self, Write};

use axum::http::{HeaderMap, header};
use brotli_decompressor::DecompressorWriter;
use bytes::{Bytes, BytesMut};
use flate2::write::GzDecoder;
use zstd::stream::{
    raw::{DParameter, Decoder as ZstdDecoder},
    zio,
};

use crate::{
    budget::Share,
    openai::{body_bytes::reserve, error::ApiError, short_text::shortened},
};

/// Bytes that are decoded at once. They are at most 1 MB of gzip.
const PIECE: usize = 1024;
/// Work after which other requests of the thread get their turn: decoded bytes, and 16 for each coded one.
const TURN: usize = 256 * 1024;
/// Buffer between a decoder and the body, bytes.
const BUFFER: usize = 8 * 1024;
/// Largest window of a zstd frame, as a power of two: the limit of HTTP (RFC 9659), 8 MiB.
const MAX_ZSTD_WINDOW: u32 = 23;

/// A content coding that is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    Gzip,
    Zstd,
    Brotli,
}

impl Coding {
    /// Returns the coding of a body; `None` if it has none.
    ///
    /// # Errors
    /// [`ApiError::UnsupportedCoding`], also for a body that was coded several times.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Option<Self>, ApiError> {
        let mut found = None;
        for value in headers.get_all(header::CONTENT_ENCODING) {
            let Ok(list) = value.to_str() else { return Err(unsupported(headers)) };
            for name in list.split(',').map(str::trim) {
                if name.is_empty() || name.eq_ignore_ascii_case("identity") {
                    continue;
                }
                let coding = Self::named(name).filter(|_| found.is_none());
                found = Some(coding.ok_or_else(|| unsupported(headers))?);
            }
        }
        Ok(found)
    }

    fn named(name: &str) -> Option<Self> {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        match () {
            () if is("gzip") || is("x-gzip") => Some(Self::Gzip),
            () if is("zstd") => Some(Self::Zstd),
            () if is("br") => Some(Self::Brotli),
            () => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Brotli => "br",
        }
    }
}

fn unsupported(headers: &HeaderMap) -> ApiError {
    let values = headers.get_all(header::CONTENT_ENCODING).iter();
    let names: Vec<_> = values.map(|value| String::from_utf8_lossy(value.as_bytes())).collect();
    ApiError::UnsupportedCoding(shortened(&names.join(", ")))
}

/// Decodes a whole body of at most `limit` decoded bytes, which `held` grows by.
///
/// # Errors
/// Same as [`Decoder::decode`].
#[cfg(feature = "ext-proc")]
pub(crate) async fn decode(
    coding: Coding,
    body: &[u8],
    limit: usize,
    held: &mut Share,
) -> Result<Bytes, ApiError> {
    let mut decoder = Decoder::new(coding, limit)?;
    decoder.decode(body, held).await?;
    decoder.finish(held)
}

/// Decodes a body that arrives piece by piece.
pub(super) struct Decoder {
    coding: Coding,
    inner: Inner,
    /// Number of bytes that `held` accounts for.
    counted: usize,
    /// Work since other requests had their turn.
    work: usize,
}

enum Inner {
    Gzip(Members),
    Zstd(zio::Writer<Decoded, ZstdDecoder<'static>>),
    Brotli(Box<DecompressorWriter<Decoded>>),
}

/// Decodes the members of a gzip body. Zeros behind the last one are padding, as gzip's own tools take them.
struct Members {
    current: GzDecoder<Decoded>,
    is_padded: bool,
}

/// The decoded bytes.
#[derive(Default)]
struct Decoded {
    bytes: BytesMut,
    limit: usize,
    /// Whether the body has more than `limit` bytes.
    is_over: bool,
}

impl Decoder {
    /// Returns a decoder of at most `limit` bytes.
    ///
    /// # Errors
    /// There is no memory for a zstd decoder.
    pub(super) fn new(coding: Coding, limit: usize) -> Result<Self, ApiError> {
        let decoded = Decoded { bytes: BytesMut::new(), limit, is_over: false };
        let inner = match coding {
            Coding::Gzip => Inner::Gzip(Members { current: GzDecoder::new(decoded), is_padded: false }),
            Coding::Zstd => {
                let decoder = ZstdDecoder::new().and_then(|mut decoder| {
                    decoder.set_parameter(DParameter::WindowLogMax(MAX_ZSTD_WINDOW))?;
                    Ok(decoder)
                });
                let decoder = decoder.map_err(|error| invalid(coding, &error))?;
                Inner::Zstd(zio::Writer::new_with_capacity(decoded, decoder, BUFFER))
            }
            Coding::Brotli => Inner::Brotli(Box::new(DecompressorWriter::new(decoded, BUFFER))),
        };
        Ok(Self { coding, inner, counted: 0, work: 0 })
    }

    /// Decodes the next bytes.
    ///
    /// # Errors
    /// They are not in the coding, the body is too large, or the bodies in flight are.
    pub(super) async fn decode(&mut self, bytes: &[u8], held: &mut Share) -> Result<(), ApiError> {
        for piece in bytes.chunks(PIECE) {
            let written = self.writer().write_all(piece);
            written.map_err(|error| self.failure(&error))?;
            self.work += 16 * piece.len() + self.count(held)?;
            if self.work >= TURN {
                self.work = 0;
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    /// Returns the decoded body.
    ///
    /// # Errors
    /// Same as [`Self::decode`], and a body that ends too early.
    pub(super) fn finish(mut self, held: &mut Share) -> Result<Bytes, ApiError> {
        let finished = match &mut self.inner {
            Inner::Gzip(members) => members.current.try_finish(),
            Inner::Zstd(decoder) => decoder.finish(),
            Inner::Brotli(decoder) => decoder.close(),
        };
        finished.map_err(|error| self.failure(&error))?;
        self.count(held)?;
        Ok(std::mem::take(&mut self.decoded().bytes).freeze())
    }

    fn writer(&mut self) -> &mut dyn Write {
        match &mut self.inner {
            Inner::Gzip(members) => members,
            Inner::Zstd(decoder) => decoder,
            Inner::Brotli(decoder) => decoder,
        }
    }

    fn decoded(&mut self) -> &mut Decoded {
        match &mut self.inner {
            Inner::Gzip(members) => members.current.get_mut(),
            Inner::Zstd(decoder) => decoder.writer_mut(),
            Inner::Brotli(decoder) => decoder.get_mut(),
        }
    }

    /// Counts the bytes that were decoded since the last call. Returns how many.
    fn count(&mut self, held: &mut Share) -> Result<usize, ApiError> {
        let decoded = self.decoded().bytes.len();
        let more = decoded - self.counted;
        reserve(held, more)?;
        self.counted = decoded;
        Ok(more)
    }

    fn failure(&mut self, error: &io::Error) -> ApiError {
        let decoded = self.decoded();
        if decoded.is_over { ApiError::PayloadTooLarge(decoded.limit) } else { invalid(self.coding, error) }
    }
}

fn invalid(coding: Coding, error: &io::Error) -> ApiError {
    ApiError::FalseCoding(coding.name(), error.to_string())
}

impl Write for Members {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.is_padded {
            let taken = self.current.write(bytes)?;
            if taken > 0 || bytes.is_empty() {
                return Ok(taken);
            }
            // The member has ended.
            self.is_padded = bytes.starts_with(&[0]);
        }
        if self.is_padded {
            return match bytes.iter().position(|byte| *byte != 0) {
                Some(_) => Err(io::Error::other("bytes follow the zeros behind its last member")),
                None => Ok(bytes.len()),
            };
        }
        let ended = std::mem::replace(&mut self.current, GzDecoder::new(Decoded::default()));
        self.current = GzDecoder::new(ended.finish()?);
        self.current.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.current.flush()
    }
}

impl Write for Decoded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.limit - self.bytes.len() {
            self.is_over = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
