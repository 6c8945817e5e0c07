//! Text for terminals: tables, units, and no control characters of strangers.

use std::{
    borrow::Cow,
    time::{SystemTime, UNIX_EPOCH},
};

use unicode_width::UnicodeWidthStr as _;

/// Widest cell of a table, columns of the terminal. The last cell of a row may be wider.
const MAX_CELL: usize = 44;
/// Stands for a value that is not known.
pub const NONE: &str = "-";

/// Replaces characters that would move the cursor, change colours or reorder text. Names of workers and
/// models come from engines and clients.
pub fn clean(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().map(|c| if is_unsafe(c) { char::REPLACEMENT_CHARACTER } else { c }).collect())
}

/// Returns whether a character is a control character, or one that is invisible or changes the direction of
/// text.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}')
        || matches!(c, '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Returns a text between backticks, of which it then has none. A client chooses the id of its request.
#[must_use]
pub fn quoted(text: &str) -> String {
    format!("`{}`", text.replace('`', "'"))
}

/// Cuts a text to a number of columns, with `…` at the end.
pub fn cut(text: &str, columns: usize) -> String {
    if text.width() <= columns {
        return text.to_owned();
    }
    let mut kept = String::new();
    for c in text.chars() {
        kept.push(c);
        if kept.width() >= columns {
            kept.pop();
            break;
        }
    }
    kept + "…"
}

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub enum Column {
    /// Text.
    Left(&'static str),
    /// Numbers.
    Right(&'static str),
}

/// A table with aligned columns.
#[derive(Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table without rows.
    #[must_use]
    pub fn new(columns: &[Column]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row, one cell for each column.
    pub fn row(&mut self, cells: Vec<String>) {
        let last = self.columns.len().saturating_sub(1);
        let cell = |(place, text): (usize, String)| {
            let text = clean(&text);
            if place == last { text.into_owned() } else { cut(&text, MAX_CELL) }
        };
        self.rows.push(cells.into_iter().enumerate().map(cell).collect());
    }

    /// Returns the text with one line for each row.
    pub fn text(&self) -> String {
        let name = |column: &Column| match column {
            Column::Left(name) | Column::Right(name) => (*name).to_owned(),
        };
        let names: Vec<String> = self.columns.iter().map(name).collect();
        let lines = || std::iter::once(&names).chain(&self.rows);
        let width = |place| lines().filter_map(|row| row.get(place)).map(|cell: &String| cell.width()).max();
        let widths: Vec<usize> = (0..names.len()).map(|place| width(place).unwrap_or(0)).collect();
        let mut text = String::new();
        for row in lines() {
            let mut line = String::new();
            for ((cell, column), width) in row.iter().zip(&self.columns).zip(&widths) {
                let space = " ".repeat(width.saturating_sub(cell.width()));
                match column {
                    Column::Left(_) => line.push_str(&format!("{cell}{space}  ")),
                    Column::Right(_) => line.push_str(&format!("{space}{cell}  ")),
                }
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// The time now, milliseconds since the Unix epoch.
#[must_use]
pub fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Returns how long ago something was, from both times in milliseconds since the Unix epoch.
#[must_use]
pub fn ago(at_ms: u64, now_ms: u64) -> String {
    format!("{} ago", age(now_ms.saturating_sub(at_ms) / 1_000))
}

/// A time in milliseconds.
pub fn millis(time: Option<f64>) -> String {
    match time {
        None => NONE.to_owned(),
        Some(time) if time < 10.0 => format!("{time:.1} ms"),
        Some(time) if time < 10_000.0 => format!("{time:.0} ms"),
        Some(time) => format!("{:.1} s", time / 1e3),
    }
}

/// Returns a number with its noun: `1 request`, `2 requests`.
pub fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// A share from 0 to 1.
pub fn percent(share: Option<f64>) -> String {
    share.map_or(NONE.to_owned(), |share| {
        if share > 0.0 && share < 0.1 {
            format!("{:.1} %", share * 100.0)
        } else {
            format!("{:.0} %", share * 100.0)
        }
    })
}

/// A number of bytes.
#[expect(clippy::cast_precision_loss, reason = "a text has three digits")]
pub fn bytes(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["B", "KiB", "MiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} GiB")
}

/// A time in seconds, in its two largest units.
pub fn age(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

/// A moment in milliseconds since the Unix epoch, in UTC.
pub fn moment(ms: u64) -> String {
    let time = std::time::UNIX_EPOCH.checked_add(std::time::Duration::from_millis(ms));
    // Years beyond 9999 have no such form.
    let time = time.filter(|_| ms < 253_402_300_800_000);
    time.map_or(NONE.to_owned(), |time| {
        humantime_serde::re::humantime::format_rfc3339_millis(time).to_string()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_followed_by_a_noun_in_the_singular() {
        assert_eq!(
            [0, 1, 2].map(|count| counted(count, "request")),
            ["0 requests", "1 request", "2 requests"]
        );
    }

    #[test]
    fn no_control_character_of_any_kind_is_left() {
        let wild = "a\u{1b}[2J\u{9b}31m\r\n\t\u{7}\u{202e}\u{200b}\u{feff}\u{e0041}é漢";
        assert_eq!(clean(wild), "a�[2J�31m��������é漢");
        assert!(matches!(clean("plain é漢"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_table_is_aligned_by_the_width_of_its_characters() {
        let mut table = Table::new(&[Column::Left("NAME"), Column::Right("N"), Column::Left("WHY")]);
        table.row(vec!["漢字".into(), "7".into(), "-".into()]);
        table.row(vec!["x\u{1b}".into(), "1234".into(), "y".repeat(60)]);
        table.row(vec!["z".repeat(60), String::new(), String::new()]);
        let (wide, z) = ("y".repeat(60), "z".repeat(43));
        let pad = |text: &str, width: usize| format!("{text}{}", " ".repeat(width));
        let expected = format!(
            "{}     N  WHY\n{}     7  -\n{}  1234  {wide}\n{z}…\n",
            pad("NAME", 40),
            pad("漢字", 40),
            pad("x�", 42)
        );
        assert_eq!(table.text(), expected);
    }

    #[test]
    fn values_have_units() {
        assert_eq!(
            [millis(None), millis(Some(1.25)), millis(Some(41.2)), millis(Some(12_340.0))],
            ["-", "1.2 ms", "41 ms", "12.3 s"]
        );
        assert_eq!([percent(None), percent(Some(0.004)), percent(Some(0.5))], ["-", "0.4 %", "50 %"]);
        assert_eq!([bytes(7), bytes(2_048), bytes(5 << 30)], ["7 B", "2.0 KiB", "5.0 GiB"]);
        assert_eq!([age(7), age(67), age(7_300), age(200_000)], ["7 s", "1 min 7 s", "2 h 1 min", "2 d 7 h"]);
        assert_eq!([moment(0), moment(u64::MAX)], ["1970-01-01T00:00:00.000Z", "-"]);
    }
}
