//! Fields of log lines as text. A field may contain text of a client, an engine or a policy: what could end
//! the line, move the cursor or reorder the text is escaped, and a long value is cut. The JSON format escapes
//! by itself.

use std::fmt::{self, Write};

use tracing::field::Field;
use tracing_subscriber::{
    field::MakeExt as _,
    fmt::{
        FormatFields,
        format::{Writer, debug_fn},
    },
};

use crate::escape::is_unsafe;

/// Maximum length of a value, characters.
const MAX_VALUE: usize = 4_096;

/// Returns the format of fields.
pub(crate) fn fields() -> impl for<'writer> FormatFields<'writer> + 'static {
    debug_fn(|writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug| match field.name() {
        "message" => write!(Escaped::new(writer), "{value:?}"),
        // The crate `log` adds these to its events.
        name if name.starts_with("log.") => Ok(()),
        name => {
            write!(writer, "{name}=")?;
            write!(Escaped::new(writer), "{value:?}")
        }
    })
    .delimited(" ")
}

/// Writes text with escapes, up to the limit.
struct Escaped<'a, W> {
    writer: &'a mut W,
    left: usize,
}

impl<'a, W: Write> Escaped<'a, W> {
    fn new(writer: &'a mut W) -> Self {
        Self { writer, left: MAX_VALUE }
    }
}

impl<W: Write> Write for Escaped<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // Almost every piece is plain and short.
        if text.len() < self.left && text.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
            self.left -= text.len();
            return self.writer.write_str(text);
        }
        for character in text.chars() {
            match self.left {
                0 => return Ok(()),
                1 => self.writer.write_char('…')?,
                _ if is_unsafe(character) => write!(self.writer, "{}", character.escape_default())?,
                _ => self.writer.write_char(character)?,
            }
            self.left -= 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc};

    use parking_lot::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(write: impl FnOnce()) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
        tracing::subscriber::with_default(log.fmt_fields(fields()).finish(), write);
        String::from_utf8(lines.0.lock().clone()).unwrap()
    }

    #[test]
    fn text_of_others_neither_ends_a_line_nor_moves_the_cursor() {
        let forged = "bad\n2026-01-01T00:00:00Z  INFO audit: forged\r\u{1b}[2J\u{1b}]0;x\u{7}\u{9b}1m\u{202e}\u{2028}\u{7f}\t";
        let text = logged(|| {
            tracing::info!(error = %forged, name = forged, debug = ?forged, "{forged} {}", 7);
        });
        assert_eq!(text.lines().count(), 1, "{text}");
        let unsafe_ones: Vec<char> = text.trim_end_matches('\n').chars().filter(|c| is_unsafe(*c)).collect();
        assert!(unsafe_ones.is_empty(), "{text:?}");
        assert!(text.contains("error=bad\\n2026") && text.contains("\\u{1b}[2J"), "{text}");
        assert!(text.contains("bad\\n2026-01-01T00:00:00Z  INFO audit: forged"), "{text}");
    }

    #[test]
    fn a_value_is_cut() {
        let text = logged(|| tracing::info!(error = %"x".repeat(1 << 20), "failed"));
        assert!(text.len() < 5_000 && text.contains('…'), "{}", text.len());
        let text = logged(|| tracing::info!(slot = "prefill", generation = 3, "policy installed"));
        assert!(text.ends_with("policy installed slot=\"prefill\" generation=3\n"), "{text}");
    }
}
