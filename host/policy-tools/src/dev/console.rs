//! Terminal of the command: prints lines, and in a terminal one status line below them, and reads keys.

use std::{
    io::{IsTerminal as _, Read as _, Stdout, Write as _},
    time::Duration,
};

use pointsman_admin_cli::text::{clean, cut};
use termion::raw::{IntoRawMode as _, RawTerminal};
use tokio::{sync::mpsc, time::Instant};

/// Longest line, columns.
const MAX_COLUMNS: usize = 300;
/// Lines of one text that are shown.
const MAX_LINES: usize = 40;
/// Columns of labels and of the space before further lines.
const LABEL: usize = 10;
/// Time between two status lines when the output is not a terminal.
const STATUS_INTERVAL: Duration = Duration::from_secs(5);

/// Standard output.
pub(super) struct Console {
    /// Set where keys are read. Dropping it restores the terminal.
    raw: Option<RawTerminal<Stdout>>,
    /// The status that is shown, or was printed last.
    status: String,
    printed: Option<Instant>,
}

impl Console {
    /// Opens the console, for single keys where `keys` is set and both streams are a terminal.
    pub(super) fn open(keys: bool) -> std::io::Result<Self> {
        let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
        let raw = if keys && terminal { Some(std::io::stdout().into_raw_mode()?) } else { None };
        Ok(Self { raw, status: String::new(), printed: None })
    }

    /// Returns whether keys are read.
    pub(super) fn reads_keys(&self) -> bool {
        self.raw.is_some()
    }

    /// Shows a text below a label. Further lines of the text stand under the first.
    pub(super) fn print_below(&mut self, label: &str, text: &str) -> anyhow::Result<()> {
        let count = text.lines().count();
        let mut lines: Vec<String> = text.lines().take(MAX_LINES).map(printable).collect();
        if count > MAX_LINES {
            lines.push(format!("and {} lines more", count - MAX_LINES));
        }
        let mut label = label;
        let mut block = String::new();
        for line in lines {
            block.push_str(format!("{label:<LABEL$}{line}").trim_end());
            block.push_str(if self.raw.is_some() { "\r\n" } else { "\n" });
            label = "";
        }
        let status = self.drawn_status();
        let clear = if self.raw.is_some() { "\r\x1b[K" } else { "" };
        write(&format!("{clear}{block}{status}"))
    }

    /// Shows what changes all the time: in place in a terminal, elsewhere as a line now and then.
    pub(super) fn status(&mut self, text: &str) -> anyhow::Result<()> {
        let text = printable(&format!("{:<LABEL$}{text}", "now"));
        if text == self.status {
            return Ok(());
        }
        if self.raw.is_some() {
            self.status = text;
            return write(&self.drawn_status());
        }
        let now = Instant::now();
        if self.printed.is_some_and(|last| now.duration_since(last) < STATUS_INTERVAL) {
            return Ok(());
        }
        (self.status, self.printed) = (text, Some(now));
        write(&format!("{}\n", self.status))
    }

    /// Forgets the status, so that the next one is shown.
    pub(super) fn clear_status(&mut self) -> anyhow::Result<()> {
        (self.status, self.printed) = (String::new(), None);
        if self.raw.is_some() { write("\r\x1b[K") } else { Ok(()) }
    }

    fn drawn_status(&self) -> String {
        if self.raw.is_none() {
            return String::new();
        }
        let width = termion::terminal_size().map_or(80, |(width, _)| usize::from(width));
        format!("\r\x1b[K{}", cut(&self.status, width.saturating_sub(1)))
    }
}

/// A line without control characters, and not too long.
fn printable(line: &str) -> String {
    cut(&clean(&line.replace('\t', "    ")), MAX_COLUMNS)
}

fn write(text: &str) -> anyhow::Result<()> {
    pointsman_cli::print(text)
}

/// Sends each key of standard input. Bytes that arrive together are an escape sequence or pasted
/// text, and are dropped.
pub(super) fn keys() -> std::io::Result<mpsc::Receiver<char>> {
    let (sender, keys) = mpsc::channel(16);
    std::thread::Builder::new().name("keys".to_owned()).spawn(move || {
        let mut input = std::io::stdin().lock();
        let mut bytes = [0; 64];
        while let Ok(count @ 1..) = input.read(&mut bytes) {
            if let (1, [key, ..]) = (count, bytes)
                && sender.blocking_send(char::from(key)).is_err()
            {
                return;
            }
        }
    })?;
    Ok(keys)
}

impl Drop for Console {
    fn drop(&mut self) {
        if self.raw.is_some() && !self.status.is_empty() {
            let _ = std::io::stdout().write_all(b"\r\n");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_no_control_character_and_a_limit() {
        assert_eq!(printable("a\tb\u{1b}[2J\u{202e}c"), "a    b\u{fffd}[2J\u{fffd}c");
        assert_eq!(printable(&"x".repeat(10_000)).chars().count(), MAX_COLUMNS);
    }
}
