//! The page as text for a terminal and as HTML.

use std::fmt::Write as _;

use pointsman_lab::html::escape;

/// A part of the page.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Block {
    Heading(String),
    Sentence(String),
    Warning(String),
    /// The first row is the head.
    Table(Vec<Vec<String>>),
}

/// Returns the blocks as text.
pub(super) fn text(blocks: &[Block]) -> String {
    let mut out = String::new();
    for block in blocks {
        let _ = match block {
            Block::Heading(text) => writeln!(out, "\n{text}\n"),
            Block::Sentence(text) => writeln!(out, "{text}"),
            Block::Warning(text) => writeln!(out, "warning: {text}"),
            Block::Table(rows) => {
                table(&mut out, rows);
                Ok(())
            }
        };
    }
    out
}

fn table(out: &mut String, rows: &[Vec<String>]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cells = |column: usize| rows.iter().filter_map(move |row| row.get(column));
    let widths: Vec<usize> = (0..columns)
        .map(|column| cells(column).map(|cell| cell.chars().count()).max().unwrap_or(0))
        .collect();
    for row in rows {
        let padded = row.iter().zip(&widths).enumerate().map(|(place, (cell, width))| match place {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        let _ = writeln!(out, "{}", padded.collect::<Vec<_>>().join("  ").trim_end());
    }
}

/// Returns the blocks as HTML.
pub(super) fn html(blocks: &[Block]) -> String {
    let mut out = String::new();
    for block in blocks {
        let _ = match block {
            Block::Heading(text) => write!(out, "<h2>{}</h2>", escape(text)),
            Block::Sentence(text) => write!(out, "<p>{}</p>", escape(text)),
            Block::Warning(text) => write!(out, "<div class=\"warning\">{}</div>", escape(text)),
            Block::Table(rows) => {
                out.push_str("<div class=\"wide\"><table class=\"figures\">");
                for (place, row) in rows.iter().enumerate() {
                    let tag = if place == 0 { "th" } else { "td" };
                    let cells: Vec<String> =
                        row.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
                    let _ = write!(out, "<tr>{}</tr>", cells.concat());
                }
                write!(out, "</table></div>")
            }
        };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_as_text_and_escaped_as_html() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        let blocks =
            [Block::Heading("A".to_owned()), Block::Table(vec![row(["worker", "ms"]), row(["<a>", "12.5"])])];
        assert_eq!(text(&blocks), "\nA\n\nworker    ms\n<a>     12.5\n");
        assert!(html(&blocks).contains("<tr><td>&lt;a&gt;</td><td>12.5</td></tr>"));
    }
}
