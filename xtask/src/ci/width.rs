//! Width of comments, which rustfmt does not wrap.

use anyhow::{Context as _, ensure};

use crate::sh;

/// Largest width of a line, columns.
const LIMIT: usize = 110;
/// Maximum number of lines that are printed.
const SHOWN: usize = 100;

/// Returns an error that lists the lines which are too long.
pub(super) fn run() -> anyhow::Result<()> {
    let mut found = Vec::new();
    for file in sh::tracked_files(".rs")? {
        let path = sh::root().join(&file);
        if path.is_file() {
            let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let wide = too_long(&text);
            found.extend(wide.map(|(line, columns)| format!("{}:{line}: {columns} columns", file.display())));
        }
    }
    found.iter().take(SHOWN).for_each(|line| sh::status(line));
    ensure!(found.is_empty(), "{} lines of comments are wider than {LIMIT} columns", found.len());
    sh::status("width: every comment fits");
    Ok(())
}

/// Returns the comments beyond the limit, with their number of columns. A URL cannot be wrapped.
fn too_long(text: &str) -> impl Iterator<Item = (usize, usize)> {
    let comments = (1..).zip(text.lines()).filter(|(_, line)| line.trim_start().starts_with("//"));
    let counted = comments.filter(|(_, line)| !line.contains("://"));
    counted.map(|(number, line)| (number, line.chars().count())).filter(|(_, columns)| *columns > LIMIT)
}

#[cfg(test)]
mod tests {
    use super::too_long;

    #[test]
    fn long_comments_are_found_with_their_place_and_urls_may_be_long() {
        let wide = "x".repeat(110);
        let text = format!("let a = \"{wide}\";\n// {wide}\n// https://{wide}\n// {}\n", "é".repeat(107));
        assert_eq!(too_long(&text).collect::<Vec<_>>(), [(2, 113)]);
    }
}
