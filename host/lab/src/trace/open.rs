//! Opens trace files, also compressed ones.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read, Seek as _},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// First bytes of files in the formats of gzip and zstd.
const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Maximum size of a compressed file after it was expanded, bytes.
const MAX_EXPANDED: u64 = 16 * 1024 * 1024 * 1024;
/// Maximum window of a zstd frame, as a power of two: that of `zstd --ultra -22`.
const MAX_WINDOW_LOG: u32 = 27;

/// Opens a trace file, and expands it if it is compressed with gzip or zstd. `bytes` counts what is read of
/// the file.
pub(super) fn open(path: &Path, bytes: &Arc<AtomicU64>) -> io::Result<Box<dyn BufRead>> {
    let mut file = File::open(path)?;
    let mut first = Vec::with_capacity(4);
    file.by_ref().take(4).read_to_end(&mut first)?;
    let is_compressed = first.starts_with(&GZIP) || first.starts_with(&ZSTD);
    // A pipe cannot go back.
    let can_rewind = file.rewind().is_ok();
    let file = Counted { file, bytes: Arc::clone(bytes) };
    let input: Box<dyn BufRead> = if can_rewind {
        Box::new(BufReader::new(file))
    } else {
        Box::new(BufReader::new(io::Cursor::new(first.clone()).chain(file)))
    };
    if !is_compressed {
        return Ok(input);
    }
    let expanded: Box<dyn Read> = if first.starts_with(&GZIP) {
        Box::new(flate2::bufread::MultiGzDecoder::new(input))
    } else {
        let mut decoder = zstd::stream::read::Decoder::with_buffer(input)?;
        decoder.window_log_max(MAX_WINDOW_LOG)?;
        Box::new(decoder)
    };
    Ok(Box::new(BufReader::new(Bounded { expanded, left: MAX_EXPANDED })))
}

/// Counts the bytes that are read.
struct Counted {
    file: File,
    bytes: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(out)?;
        self.bytes.fetch_add(read as u64, Relaxed);
        Ok(read)
    }
}

/// Ends with an error, not silently, when a file expands to more than it may.
struct Bounded {
    expanded: Box<dyn Read>,
    left: u64,
}

impl Read for Bounded {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.expanded.read(out)?;
        self.left = self.left.checked_sub(read as u64).ok_or_else(|| {
            io::Error::other(format!(
                "expands to more than {MAX_EXPANDED} bytes: expand it first, and split it"
            ))
        })?;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_expands_to_too_much_is_an_error() {
        let mut bounded = Bounded { expanded: Box::new(io::repeat(b'x')), left: 10 };
        let mut out = [0; 8];
        assert_eq!(bounded.read(&mut out).unwrap(), 8);
        assert!(bounded.read(&mut out).unwrap_err().to_string().starts_with("expands to more than"));
    }
}
