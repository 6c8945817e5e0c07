//! The form of the documentation: four parts, short pages where a length is promised, and lines that fit.

use std::path::Path;

use super::docs_links::{links, pages, prose, root};

/// Largest width of a line of prose in Markdown, columns.
const WIDTH: usize = 120;

fn read(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap()
}

/// Returns whether a line may be wider: a row of a table, or one word (a URL) or inline code that fills most
/// of a line.
fn may_be_wide(line: &str) -> bool {
    let fills = |part: &str| part.chars().count() > WIDTH - 30;
    let code = || line.split('`').skip(1).step_by(2);
    line.trim_start().starts_with('|') || line.split_whitespace().any(fills) || code().any(fills)
}

/// Lines of prose that are too wide, with their place.
fn too_wide(name: &Path, text: &str) -> Vec<String> {
    let wide = prose(text).filter(|line| line.chars().count() > WIDTH && !may_be_wide(line));
    wide.map(|line| format!("{}: {} columns: {line}", name.display(), line.chars().count())).collect()
}

#[test]
fn lines_of_prose_fit() {
    let mut files = Vec::new();
    pages(&root(), &mut files);
    let text = |file: &Path| std::fs::read_to_string(file).unwrap();
    let found: Vec<String> = files.iter().flat_map(|file| too_wide(file, &text(file))).collect();
    assert!(found.is_empty(), "{} lines are wider than {WIDTH} columns:\n{}", found.len(), found.join("\n"));
}

#[test]
fn rows_code_and_long_links_may_be_wide() {
    let wide = "a ".repeat(61);
    let link = format!("see [x](https://example.org/{})", "y".repeat(120));
    let text = format!("{wide}\n| {wide} |\n```\n{wide}\n```\n{link}\n{}\n", "é".repeat(80));
    assert_eq!(too_wide(Path::new("a.md"), &text).len(), 1, "only the first line");
}

#[test]
fn the_table_of_contents_has_four_parts_and_newcomers_read_two_pages() {
    let summary = read("docs/SUMMARY.md");
    let parts: Vec<&str> = summary.split("\n# ").skip(1).collect();
    let titles: Vec<&str> = parts.iter().filter_map(|part| part.lines().next()).collect();
    assert_eq!(titles, ["Tutorial", "How-to", "Reference", "Explanation"]);
    assert_eq!(links(parts[0]), ["first-gateway.md", "first-policy.md"]);
    for name in ["README.md", "docs/introduction.md"] {
        let both: Vec<String> =
            links(&read(name)).into_iter().filter(|link| link.contains("first-")).collect();
        let names: Vec<&str> = both.iter().map(|link| link.trim_start_matches("docs/")).collect();
        assert_eq!(names, ["first-gateway.md", "first-policy.md"], "{name}");
    }
}

#[test]
fn pages_with_a_promised_length_keep_it() {
    for (name, most) in [("README.md", 90), ("BENCHMARKS.md", 100), ("CHANGELOG.md", 110)] {
        let lines = read(name).lines().count();
        assert!(lines <= most, "{name} has {lines} lines, more than {most}");
    }
}

#[test]
fn benchmarks_are_one_table_of_twenty_rows_with_ratio_rival_and_command() {
    let text = read("BENCHMARKS.md");
    let rows: Vec<&str> = text.lines().skip_while(|line| !line.contains("| ratio |")).collect();
    let rows: Vec<&str> = rows.into_iter().take_while(|line| line.starts_with('|')).skip(2).collect();
    assert!((10..=20).contains(&rows.len()), "{} rows", rows.len());
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, _, ratio, rival, command] = cells[..] else { panic!("{row}") };
        assert!(ratio.starts_with(|c: char| c.is_ascii_digit()) && !rival.is_empty(), "{row}");
        assert!(command.starts_with("the same") || command.contains('`'), "{row}");
    }
}
