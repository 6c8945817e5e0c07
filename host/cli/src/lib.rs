//! Parts of the command line that all programs of Pointsman share: version, log lines, errors, completions
//! and manual pages.

use std::{
    fmt,
    io::{ErrorKind, Write as _},
    process::ExitCode,
    time::Duration,
};

mod escape;
mod generate;
mod log;
mod log_queue;
mod negative_numbers;
mod text_log;
pub mod tree;
pub mod version;

pub use escape::escaped;
pub use generate::{ToolCommand, completions, manual_pages};
pub use log::{DEFAULT_LOG, LogArgs, start_log};
pub use log_queue::{LogFlush, lost_log_lines};
pub use negative_numbers::{parse, with_negative_numbers};

/// The reader of the command's output closed it, as `| head` does.
#[derive(Debug)]
pub struct OutputClosed;

impl fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output is closed")
    }
}

impl std::error::Error for OutputClosed {}

/// Reads a length of time from the command line.
///
/// # Errors
/// The text is not one.
pub fn duration(text: &str) -> Result<Duration, String> {
    let read = humantime_serde::re::humantime::parse_duration(text);
    read.map_err(|_| "expected a time with its unit, such as 500ms, 30s, 5m or 1h".to_owned())
}

/// Returns the exit code of a command, and prints its error to stderr.
#[must_use]
pub fn exit_code(outcome: anyhow::Result<ExitCode>) -> ExitCode {
    match outcome {
        Ok(code) => code,
        Err(error) if error.is::<OutputClosed>() => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "pointsman: {}", escaped(&with_causes(error.as_ref())));
            ExitCode::from(2)
        }
    }
}

/// Writes text to standard output. Unlike `print!`, it does not panic.
///
/// # Errors
/// [`OutputClosed`], or why standard output does not take the text.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => OutputClosed.into(),
        _ => anyhow::Error::new(error).context("cannot write to standard output"),
    })
}

/// Writes the last text of a command, which ends with `code` even if its output was closed.
///
/// # Errors
/// Why standard output does not take the text.
pub fn conclude(text: &str, code: ExitCode) -> anyhow::Result<ExitCode> {
    match print(text) {
        Err(error) if !error.is::<OutputClosed>() => Err(error),
        _ => Ok(code),
    }
}

/// Returns an error with its causes, each once: the text of an error may already contain its cause's text.
#[must_use]
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let next = inner.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_of_time_has_a_unit() {
        assert_eq!(duration("1m 30s"), Ok(Duration::from_secs(90)));
        for text in ["abc", "5", "", "-1s"] {
            let error = duration(text).unwrap_err();
            assert_eq!(error, "expected a time with its unit, such as 500ms, 30s, 5m or 1h", "{text}");
        }
    }
}
