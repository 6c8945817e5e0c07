//! Width of lines: rustfmt wraps neither comments nor string literals, so this check does.

use std::path::Path;

use anyhow::{Context as _, ensure};

use crate::sh;

/// Largest width of a line in Rust files, columns.
const RUST: usize = 110;
/// Largest width of a line in Markdown files, columns.
const MARKDOWN: usize = 140;
/// Lines that are printed at most.
const SHOWN: usize = 40;

/// Returns an error that lists the lines which are too long.
pub(super) fn run() -> anyhow::Result<()> {
    let mut found = Vec::new();
    for (ending, limit) in [(".rs", RUST), (".md", MARKDOWN)] {
        for file in sh::tracked_files(ending)? {
            let path = sh::root().join(&file);
            if !path.is_file() {
                continue;
            }
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("could not read {}", file.display()))?;
            found.extend(too_long(&file, &text, limit));
        }
    }
    found.iter().take(SHOWN).for_each(|line| sh::status(line));
    let count = found.len();
    ensure!(count == 0, "{count} lines are too long: {RUST} columns in .rs, {MARKDOWN} in .md");
    sh::status("width: every line fits");
    Ok(())
}

/// Lines beyond the limit as `file:line: columns`. Lines that cannot be wrapped are left out.
fn too_long(file: &Path, text: &str, limit: usize) -> Vec<String> {
    let lines = text.lines().enumerate().filter(|(_, line)| !unbreakable(file, line));
    let wide = lines.filter_map(|(number, line)| {
        let columns = line.chars().count();
        (columns > limit).then(|| format!("{}:{}: {columns} columns", file.display(), number + 1))
    });
    wide.collect()
}

/// Whether a line cannot be wrapped: a Markdown table row, a line with a URL, or Rust source in which a
/// literal is longer than half a line, as captured requests and expected answers are.
fn unbreakable(file: &Path, line: &str) -> bool {
    let markdown = file.extension().is_some_and(|ending| ending == "md");
    let table = markdown && line.trim_start().starts_with('|');
    let url = line.contains("http://") || line.contains("https://");
    let comment = line.trim_start().starts_with("//");
    let literal =
        !markdown && !comment && line.contains('"') && line.split('"').any(|part| part.chars().count() > 55);
    table || url || literal
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::too_long;

    #[test]
    fn long_lines_are_found_with_their_place() {
        let text = format!("short\n// {}\n", "x".repeat(110));
        assert_eq!(too_long(Path::new("a.rs"), &text, 110), ["a.rs:2: 113 columns"]);
        assert!(too_long(Path::new("a.rs"), &"é".repeat(110), 110).is_empty(), "columns, not bytes");
    }

    #[test]
    fn tables_urls_and_literals_may_be_long() {
        let wide = "x".repeat(150);
        let fits = |file: &str, line: String| too_long(Path::new(file), &line, 110).is_empty();
        assert!(fits("a.md", format!("| {wide} |")));
        assert!(fits("a.md", format!("https://example.org/{wide}")));
        assert!(fits("a.rs", format!("const A: &str = \"{wide}\";")));
        assert!(!fits("a.md", wide.clone()));
        assert!(!fits("a.rs", format!("// \"{wide}\"")));
        assert!(!fits("a.rs", format!("let {wide} = 1;")));
    }
}
