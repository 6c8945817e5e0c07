//! Pages of the book whose text is in another directory of the repository.
//!
//! `docs/BENCHMARKS.md` includes `BENCHMARKS.md`, whose links are relative to its own directory. This module
//! replaces each include with the text of the file, and makes each link relative to the book's page. A link
//! to a file that is not a page of the book is replaced with its text.

use std::{
    collections::HashMap,
    fs,
    io::{Read as _, Write as _},
    path::{Component, Path, PathBuf},
};

use anyhow::Context as _;
use serde_json::Value;

use crate::sh;

/// For each file of the repository in the book: its page, and its heading if the page includes several files.
type Places = HashMap<PathBuf, (PathBuf, String)>;

/// Reads the book that mdbook sends on stdin, and writes it with changed text to stdout.
pub(super) fn preprocess() -> anyhow::Result<()> {
    let mut input = String::new();
    std::io::stdin().read_to_string(&mut input).context("could not read the book of mdbook")?;
    let mut given: Value = serde_json::from_str(&input).context("the book of mdbook is not JSON")?;
    let mut book = given[1].take();
    let mut places = Places::new();
    each_page(&mut book, &mut |page, text| {
        find_places(page, text, &mut places);
        Ok(())
    })?;
    each_page(&mut book, &mut |page, text| {
        *text = rewritten(page, text, &places)?;
        Ok(())
    })?;
    std::io::stdout().write_all(book.to_string().as_bytes()).context("could not answer mdbook")
}

/// Calls `visit` with the path relative to docs/ and the text of each page.
fn each_page(
    part: &mut Value,
    visit: &mut dyn FnMut(&Path, &mut String) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if let Some(path) = part["source_path"].as_str().map(PathBuf::from)
        && let Some(Value::String(text)) = part.get_mut("content")
    {
        visit(&path, text)?;
    }
    match part {
        Value::Array(parts) => parts.iter_mut().try_for_each(|part| each_page(part, visit)),
        Value::Object(parts) => parts.values_mut().try_for_each(|part| each_page(part, visit)),
        _ => Ok(()),
    }
}

/// Returns the file that a line includes, relative to the root of the repository.
fn included(page: &Path, line: &str) -> Option<PathBuf> {
    let name = line.trim().strip_prefix("{{#include ")?.strip_suffix("}}")?;
    Some(normal(&Path::new("docs").join(page).parent()?.join(name.trim())))
}

fn find_places(page: &Path, text: &str, places: &mut Places) {
    places.insert(Path::new("docs").join(page), (page.to_owned(), String::new()));
    for (number, file) in text.lines().filter_map(|line| included(page, line)).enumerate() {
        let heading = if number == 0 { None } else { fs::read_to_string(sh::root().join(&file)).ok() };
        let heading =
            heading.as_deref().and_then(|text| text.lines().find_map(|line| line.strip_prefix("# ")));
        places.insert(file, (page.to_owned(), heading.map(anchor).unwrap_or_default()));
    }
    // The book begins with this page.
    for index in ["README.md", "docs/SUMMARY.md"] {
        places.entry(index.into()).or_insert_with(|| ("introduction.md".into(), String::new()));
    }
}

/// Returns the anchor of a heading.
fn anchor(title: &str) -> String {
    let kept = title
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
        .collect::<String>();
    kept.replace(' ', "-")
}

fn rewritten(page: &Path, text: &str, places: &Places) -> anyhow::Result<String> {
    let own = Path::new("docs").join(page);
    let mut out = String::new();
    let mut pending = String::new();
    for line in text.lines() {
        let Some(file) = included(page, line) else {
            pending.push_str(line);
            pending.push('\n');
            continue;
        };
        out.push_str(&with_links(&std::mem::take(&mut pending), &own, page, places));
        let path = sh::root().join(&file);
        let text = fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
        out.push_str(&with_links(&text, &file, page, places));
    }
    out.push_str(&with_links(&pending, &own, page, places));
    Ok(out)
}

/// Returns the text of `file` with its links changed for `page`.
fn with_links(text: &str, file: &Path, page: &Path, places: &Places) -> String {
    let (mut out, mut block) = (String::new(), false);
    let mut code = false;
    for line in text.split_inclusive('\n') {
        let fence = line.trim_start().starts_with("```");
        block ^= fence;
        if block || fence || line.trim().is_empty() {
            code = false;
            out.push_str(line);
            continue;
        }
        let mut rest = line;
        while let Some(at) = rest.find(['`', ']']) {
            let (before, behind) = rest.split_at(at);
            out.push_str(before);
            code ^= behind.starts_with('`');
            match behind.strip_prefix("](").filter(|_| !code).and_then(|link| link.split_once(')')) {
                Some((target, after)) => {
                    add_link(&mut out, target, file, page, places);
                    rest = after;
                }
                None => {
                    out.push_str(&behind[..1]);
                    rest = &behind[1..];
                }
            }
        }
        out.push_str(rest);
    }
    out
}

/// Ends a link whose text is at the end of `out`.
fn add_link(out: &mut String, target: &str, file: &Path, page: &Path, places: &Places) {
    let (name, heading) = target.split_once('#').unwrap_or((target, ""));
    if name.is_empty() || name.contains("://") || name.starts_with("mailto:") {
        out.push_str(&format!("]({target})"));
        return;
    }
    let path = normal(&file.parent().unwrap_or(Path::new("")).join(name));
    let place = places.get(&path);
    // Pictures are beside the pages.
    let picture =
        path.strip_prefix("docs").ok().filter(|path| path.extension().is_some_and(|end| end != "md"));
    let (to, anchor) = match (place, picture) {
        (Some((to, first)), _) => (to.as_path(), if heading.is_empty() { first.as_str() } else { heading }),
        (None, Some(picture)) => (picture, ""),
        (None, None) => {
            if let Some(begin) = begin_of_link(out) {
                out.remove(begin);
            }
            return;
        }
    };
    let up = "../".repeat(page.components().count().saturating_sub(1));
    // mdbook calls a page README.md `index`.
    let to = to.to_string_lossy().replace("README.md", "index.md");
    let anchor = if anchor.is_empty() { String::new() } else { format!("#{anchor}") };
    out.push_str(&format!("]({up}{to}{anchor})"));
}

/// Returns the start of the text of the link that ends at the end of `out`.
fn begin_of_link(out: &str) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, byte) in out.bytes().enumerate().rev() {
        match byte {
            b']' => depth += 1,
            b'[' if depth == 0 => return Some(at),
            b'[' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Resolves `.` and `..` without reading the file system.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                out.pop();
            }
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Places, anchor, with_links};

    fn places() -> Places {
        let place = |file: &str, page: &str, heading: &str| (file.into(), (page.into(), heading.to_owned()));
        Places::from([
            place("docs/limits.md", "limits.md", ""),
            place("policies/README.md", "policies/README.md", ""),
            place("policies/random/README.md", "policies/README.md", "random"),
        ])
    }

    fn on_page(text: &str, file: &str, page: &str) -> String {
        with_links(text, Path::new(file), Path::new(page), &places())
    }

    #[test]
    fn links_of_an_included_file_lead_to_pages_of_the_book() {
        let text = "[a](docs/limits.md#policies) ![b](docs/page.png) [c](https://e.org) [d](policies/random/README.md)";
        let page = "[a](limits.md#policies) ![b](page.png) [c](https://e.org) [d](policies/index.md#random)";
        assert_eq!(on_page(text, "BENCHMARKS.md", "BENCHMARKS.md"), page);
        let text = "[limits](../docs/limits.md), [random](random/README.md)";
        let page = "[limits](../limits.md), [random](../policies/index.md#random)";
        assert_eq!(on_page(text, "policies/README.md", "policies/README.md"), page);
    }

    #[test]
    fn a_link_to_a_file_of_the_repository_becomes_its_text() {
        assert_eq!(on_page("see [`deny` [x]](deny.toml).", "A.md", "A.md"), "see `deny` [x].");
    }

    #[test]
    fn code_keeps_what_looks_like_a_link() {
        let text = "`[a](b.md)` and `x`\n```\n[a](b.md)\n```\n";
        assert_eq!(on_page(text, "A.md", "A.md"), text);
    }

    #[test]
    fn anchors_have_neither_capitals_nor_punctuation() {
        assert_eq!(anchor("`least-loaded` in Python"), "least-loaded-in-python");
    }
}
