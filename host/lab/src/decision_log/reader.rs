//! Reads the files of a decision log.

use std::{
    fs::File,
    io::{BufRead, BufReader, ErrorKind, Read},
    path::{Path, PathBuf},
};

use pointsman_decision_log::{FILE_PREFIX, FILE_SUFFIX, FileHeader, LOG_NAME, LOG_VERSION, LoggedRequest};

use crate::trace::{TraceError, parse_line};

/// Maximum length of a line, bytes. The gateway writes lines of about 100 KB at most.
const MAX_LINE: u64 = 4 * 1024 * 1024;
/// Maximum window of a zstd frame, as a power of two. The gateway's frames need 2^18.
const MAX_WINDOW_LOG: u32 = 24;

/// Numbers that describe the files that were read.
#[derive(Debug, Default)]
pub(crate) struct ReadStats {
    /// Number of files.
    pub(crate) files: usize,
    /// Number of skipped malformed lines.
    pub(crate) skipped: u64,
    /// Files of which the rest could not be read, one sentence for each.
    pub(crate) damaged: Vec<String>,
    /// Number of files that end within a frame, because the gateway was killed or is still writing.
    pub(crate) cut_files: u64,
}

/// Returns the files of a log in the order in which they were written. `path` is the log's directory or one
/// of its files.
pub(crate) fn files(path: &Path) -> Result<Vec<PathBuf>, TraceError> {
    let io = |error| TraceError::Io { file: path.display().to_string(), error };
    if !std::fs::metadata(path).map_err(io)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name();
        let is_log =
            name.to_str().is_some_and(|name| name.starts_with(FILE_PREFIX) && name.ends_with(FILE_SUFFIX));
        if is_log {
            found.push(entry.path());
        }
    }
    // A file's name begins with the time.
    found.sort();
    Ok(found)
}

/// Calls `take` for each request of a file.
///
/// # Errors
/// [`TraceError`] names the file, the line and the field. With `skip_bad`, malformed lines are counted and
/// skipped.
pub(crate) fn read(
    path: &Path,
    skip_bad: bool,
    stats: &mut ReadStats,
    mut take: impl FnMut(&FileHeader, LoggedRequest),
) -> Result<(), TraceError> {
    let file = path.display().to_string();
    let io = |error| TraceError::Io { file: file.clone(), error };
    let mut decoder = zstd::stream::read::Decoder::new(File::open(path).map_err(io)?).map_err(io)?;
    decoder.window_log_max(MAX_WINDOW_LOG).map_err(io)?;
    let mut input = BufReader::new(decoder);
    stats.files += 1;
    let mut header = None;
    let (mut bytes, mut read_bytes) = (Vec::new(), 0_u64);
    for line in 1_u64.. {
        read_bytes += bytes.len() as u64;
        bytes.clear();
        let mut damaged = false;
        let problem = match input.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes) {
            Ok(0) => break,
            Ok(length) if length as u64 == MAX_LINE => Err(format!("is longer than {MAX_LINE} bytes")),
            Ok(_) if bytes.last() != Some(&b'\n') => {
                stats.cut_files += 1;
                break;
            }
            Ok(_) => match &header {
                None => read_header(&bytes).map(|read| header = Some(read)),
                Some(header) => parse_line(&bytes).map(|request| take(header, request)),
            },
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                stats.cut_files += 1;
                break;
            }
            Err(error) => {
                // The rest of this file cannot be read, because a frame has no marker to search for.
                damaged = true;
                Err(format!("cannot be decompressed: {error}"))
            }
        };
        let Err(problem) = problem else { continue };
        if !damaged && header.is_some() {
            if !skip_bad {
                return Err(TraceError::Line { file, line, problem });
            }
            stats.skipped += 1;
        } else if skip_bad {
            stats.damaged.push(format!(
                "{file} was read up to byte {read_bytes} of its text only, because line {line} {problem}"
            ));
            break;
        } else {
            let problem = format!("{problem}; --skip-bad leaves the rest of the file out");
            return Err(TraceError::Unusable { file, line, problem });
        }
    }
    Ok(())
}

fn read_header(bytes: &[u8]) -> Result<FileHeader, String> {
    let header: FileHeader = parse_line(bytes)?;
    if header.log != LOG_NAME {
        return Err(format!("`log` is \"{}\"; expected \"{LOG_NAME}\"", header.log));
    }
    if header.version != LOG_VERSION {
        let version = header.version;
        return Err(format!("`version` is {version}; this command reads version {LOG_VERSION}"));
    }
    if header.block_tokens == 0 {
        return Err("`block_tokens` is 0; expected 1 or more".to_owned());
    }
    Ok(header)
}
