//! Width of lines of Rust: rustfmt wraps neither comments nor string literals, so this module checks their
//! width.

use anyhow::{Context as _, ensure};

use crate::sh;

/// Largest width of a line, columns.
const LIMIT: usize = 110;
/// Largest width of a line that contains a part of a string, columns. rustfmt does not change such lines.
const LIMIT_WITH_STRING: usize = 140;
/// Maximum number of lines that are printed.
const SHOWN: usize = 100;

/// Returns an error that lists the lines which are too long.
pub(super) fn run() -> anyhow::Result<()> {
    let mut found = Vec::new();
    for file in sh::tracked_files(".rs")? {
        let path = sh::root().join(&file);
        if !path.is_file() {
            continue;
        }
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("could not read {}", file.display()))?;
        let wide =
            too_long(&text).map(|(line, columns)| format!("{}:{line}: {columns} columns", file.display()));
        found.extend(wide);
    }
    found.iter().take(SHOWN).for_each(|line| sh::status(line));
    let count = found.len();
    ensure!(count == 0, "{count} lines are wider than {LIMIT} columns ({LIMIT_WITH_STRING} with a string)");
    sh::status("width: every line fits");
    Ok(())
}

/// Returns the lines beyond the limit, with their number of columns.
fn too_long(text: &str) -> impl Iterator<Item = (usize, usize)> {
    let numbered = text.lines().enumerate().filter(|(_, line)| !unbreakable(line));
    numbered.filter_map(|(number, line)| {
        let columns = line.chars().count();
        let limit = if has_string(line) { LIMIT_WITH_STRING } else { LIMIT };
        (columns > limit).then_some((number + 1, columns))
    })
}

/// Whether a line cannot be wrapped: it contains a URL, a raw string, or a literal that is longer than half a
/// line, such as a captured request or an expected answer.
fn unbreakable(line: &str) -> bool {
    let url = line.contains("http://") || line.contains("https://");
    let raw = line.contains("r#\"");
    let literal = has_string(line) && line.split('"').any(|part| part.chars().count() > 55);
    url || raw || literal
}

/// Whether a line contains a string or continues one.
fn has_string(line: &str) -> bool {
    !line.trim_start().starts_with("//") && (line.contains('"') || line.ends_with('\\'))
}

#[cfg(test)]
mod tests {
    use super::too_long;

    fn fits(line: &str) -> bool {
        too_long(line).next().is_none()
    }

    #[test]
    fn long_lines_are_found_with_their_place() {
        let text = format!("short\n// {}\n", "x".repeat(110));
        assert_eq!(too_long(&text).collect::<Vec<_>>(), [(2, 113)]);
        assert!(fits(&"é".repeat(110)), "columns, not bytes");
    }

    #[test]
    fn urls_and_literals_may_be_long() {
        let wide = "x".repeat(150);
        assert!(fits(&format!("https://example.org/{wide}")));
        assert!(fits(&format!("const A: &str = \"{wide}\";")));
        assert!(fits(&format!("let {} = \"a\";", "x ".repeat(60))));
        assert!(fits(&format!("const A: &str = r#\"{}\"#;", "\"a\":1,".repeat(60))));
        assert!(!fits(&format!("// \"{wide}\"")));
        assert!(!fits(&format!("let {wide} = 1;")));
    }
}
