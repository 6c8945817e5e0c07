//! A file of lines that has whole ones only, also when the disk is full.

use std::{
    fs::File,
    io::{self, Write as _},
};

/// Bytes that are buffered.
const BUFFER_BYTES: usize = 64 * 1024;

/// Writes lines to a file.
pub(super) struct LineFile {
    file: File,
    /// Bytes of the lines in the file.
    length: u64,
    buffer: Vec<u8>,
}

/// Lines that are not in the file, though they were added.
#[derive(Debug)]
pub(super) struct Lost {
    pub(super) lines: usize,
    pub(super) error: io::Error,
}

impl LineFile {
    /// Begins with an empty file.
    pub(super) fn new(file: File) -> Self {
        Self { file, length: 0, buffer: Vec::new() }
    }

    /// Adds a line, which ends with a line feed.
    pub(super) fn add(&mut self, line: &[u8]) -> Result<(), Lost> {
        self.buffer.extend_from_slice(line);
        if self.buffer.len() < BUFFER_BYTES { Ok(()) } else { self.flush() }
    }

    /// Writes the buffered lines. After an error, the file has those of them that fitted, and nothing may be
    /// added.
    pub(super) fn flush(&mut self) -> Result<(), Lost> {
        let (written, result) = write(&mut self.file, &self.buffer);
        let (fitted, rest) = self.buffer.split_at(written);
        let whole = fitted.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        self.length += whole as u64;
        let result = result.map_err(|error| {
            let count = |bytes: &[u8]| bytes.iter().filter(|byte| **byte == b'\n').count();
            let cut = self.file.set_len(self.length);
            Lost { lines: count(rest), error: cut.err().unwrap_or(error) }
        });
        self.buffer.clear();
        result
    }
}

/// Writes bytes, and returns how many were written also after an error.
fn write(file: &mut File, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut written = 0;
    while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
        match file.write(rest) {
            Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
            Ok(count) => written += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (written, Err(error)),
        }
    }
    (written, Ok(()))
}
