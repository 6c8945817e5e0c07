//! Pages of the book whose text is in another directory of the repository.
//!
//! `docs/BENCHMARKS.md` includes `BENCHMARKS.md`, whose links are relative to its own directory. This module
//! replaces each include with the text of the file, and makes each link relative to the book's page. A link
//! to a file that is not a page of the book is replaced with its text.

use std::{
    collections::HashMap,
    fs,
    io::Write as _,
    path::{Component, Path, PathBuf},
};

use anyhow::Context as _;
use regex::{Captures, Regex};
use serde_json::Value;

use crate::sh;

/// A line that includes another file.
const INCLUDE: &str = r"(?m)^\{\{#include (\S+)\}\}$";
/// Code, which stays as it is, or a link: its text and its target.
const LINK: &str = r"(?x)
    (?ms: ^\ *``` .*? ^\ *``` ) | `[^`\n]*`
    | \[ ( (?: [^\[\]`] | `[^`]*` | \[[^\[\]]*\] )* ) \] \( ( [^()\s]+ ) \)";

struct Pages {
    /// For each file of the repository in the book: its page, and its heading if the page includes several
    /// files.
    places: HashMap<PathBuf, (PathBuf, String)>,
    include: Regex,
    link: Regex,
}

/// Reads the book that mdbook sends on stdin, and writes it with changed text to stdout.
pub(super) fn preprocess() -> anyhow::Result<()> {
    let mut given: Value =
        serde_json::from_reader(std::io::stdin().lock()).context("reading the book of mdbook")?;
    let mut book = given[1].take();
    let mut pages = Pages::new()?;
    each_page(&mut book, &mut |page, text| {
        pages.find_places(page, text);
        Ok(())
    })?;
    each_page(&mut book, &mut |page, text| {
        *text = pages.rewritten(page, text)?;
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

impl Pages {
    fn new() -> anyhow::Result<Self> {
        Ok(Self { places: HashMap::new(), include: Regex::new(INCLUDE)?, link: Regex::new(LINK)? })
    }

    fn find_places(&mut self, page: &Path, text: &str) {
        let own = Path::new("docs").join(page);
        for (number, found) in self.include.captures_iter(text).enumerate() {
            let file = beside(&own, &found[1]);
            let text = fs::read_to_string(sh::root().join(&file)).unwrap_or_default();
            let heading = text.lines().find_map(|line| line.strip_prefix("# ")).filter(|_| number > 0);
            self.places.insert(file, (page.to_owned(), heading.map(anchor).unwrap_or_default()));
        }
        self.places.insert(own, (page.to_owned(), String::new()));
        // The book begins with this page.
        for index in ["README.md", "docs/SUMMARY.md"] {
            self.places.entry(index.into()).or_insert_with(|| ("introduction.md".into(), String::new()));
        }
    }

    fn rewritten(&self, page: &Path, text: &str) -> anyhow::Result<String> {
        let own = Path::new("docs").join(page);
        let (mut out, mut end) = (String::new(), 0);
        for found in self.include.captures_iter(text) {
            let place = found.get_match().range();
            out.push_str(&self.with_links(&text[end..place.start], &own, page));
            end = place.end;
            let file = beside(&own, &found[1]);
            let text = fs::read_to_string(sh::root().join(&file));
            let text = text.with_context(|| format!("could not read {}", file.display()))?;
            out.push_str(&self.with_links(&text, &file, page));
        }
        Ok(out + &self.with_links(&text[end..], &own, page))
    }

    /// Returns the text of `file` with its links changed for `page`.
    fn with_links(&self, text: &str, file: &Path, page: &Path) -> String {
        let change = |found: &Captures<'_>| match (found.get(1), found.get(2)) {
            (Some(label), Some(target)) => match self.target(target.as_str(), file, page) {
                Some(target) => format!("[{}]({target})", label.as_str()),
                None => label.as_str().to_owned(),
            },
            _ => found[0].to_owned(),
        };
        self.link.replace_all(text, change).into_owned()
    }

    /// Returns the target of a link on `page`; `None` if it is not in the book.
    fn target(&self, target: &str, file: &Path, page: &Path) -> Option<String> {
        let (name, heading) = target.split_once('#').unwrap_or((target, ""));
        if name.is_empty() || name.contains("://") || name.starts_with("mailto:") {
            return Some(target.to_owned());
        }
        let path = beside(file, name);
        let (to, anchor) = match self.places.get(&path) {
            Some((to, first)) => (to.as_path(), if heading.is_empty() { first } else { heading }),
            // Pictures are beside the pages.
            None => (
                path.strip_prefix("docs")
                    .ok()
                    .filter(|path| path.extension().is_some_and(|end| end != "md"))?,
                "",
            ),
        };
        let up = "../".repeat(page.components().count().saturating_sub(1));
        // mdbook calls a page README.md `index`.
        let to = to.to_string_lossy().replace("README.md", "index.md");
        let anchor = if anchor.is_empty() { String::new() } else { format!("#{anchor}") };
        Some(format!("{up}{to}{anchor}"))
    }
}

/// Returns the anchor of a heading.
fn anchor(title: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
    title.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

/// Returns the path that `name` means in `file`, without reading the file system.
fn beside(file: &Path, name: &str) -> PathBuf {
    let mut out = PathBuf::new();
    for part in file.with_file_name("").join(name).components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Pages, anchor};

    fn on_page(text: &str, file: &str, page: &str) -> String {
        let mut pages = Pages::new().unwrap();
        let place = |file: &str, page: &str, heading: &str| (file.into(), (page.into(), heading.to_owned()));
        pages.places.extend([
            place("docs/limits.md", "limits.md", ""),
            place("policies/README.md", "policies/README.md", ""),
            place("policies/random/README.md", "policies/README.md", "random"),
        ]);
        pages.with_links(text, Path::new(file), Path::new(page))
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
