//! Every relative link in the documentation leads to a file that exists, and to a heading that exists in it.
//!
//! Knows GitHub's rule for anchors. Does not follow links to other hosts.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

/// Directories that hold no documentation of this repository.
const SKIPPED: [&str; 4] = ["target", "node_modules", "fixtures", "released"];

pub(super) fn root() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).canonicalize().unwrap()
}

/// Markdown files at or below `dir`, hidden directories other than `.github` left out.
pub(super) fn pages(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let hidden = name.starts_with('.') && name != ".github";
        if path.is_dir() && !hidden && !SKIPPED.contains(&name) {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// The lines of a page without code blocks.
pub(super) fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// The line without its inline code.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// Targets of the links of a page that name a file of this repository or a heading.
pub(super) fn links(text: &str) -> Vec<String> {
    let lines: Vec<String> = prose(text).map(without_code).collect();
    let text = lines.join("\n");
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    let targets = targets.map(|(target, _)| target.trim().to_owned());
    targets.filter(|target| !target.contains("://") && !target.starts_with("mailto:")).collect()
}

/// Anchors of a page's headings, as GitHub forms them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// Returns what is wrong with a link from `page` to `target`.
fn problem(page: &Path, target: &str) -> Option<String> {
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if file.is_empty() { page.to_owned() } else { page.parent().unwrap().join(file) };
    if !path.exists() {
        return Some(format!("{}: `{target}` does not exist", page.display()));
    }
    let known = || anchors(&std::fs::read_to_string(&path).unwrap()).contains(anchor);
    let broken = !anchor.is_empty() && path.extension().is_some_and(|e| e == "md") && !known();
    broken.then(|| format!("{}: `{target}` names a heading that does not exist", page.display()))
}

#[test]
fn k1_no_page_has_the_digest_of_a_key() {
    let mut found = Vec::new();
    pages(&root(), &mut found);
    assert!(found.len() > 50, "{found:?}");
    for page in found {
        let text = std::fs::read_to_string(&page).unwrap();
        let usable = |line: &&str| {
            let given = line.trim_start_matches(['#', ' ']).strip_prefix("digest = \"");
            given.is_some_and(|digest| digest.len() > 60)
        };
        // K1.8: whoever copies it would let in everyone who read the page.
        assert_eq!(text.lines().find(usable), None, "{}", page.display());
    }
}

#[test]
fn every_relative_link_of_the_documentation_resolves() {
    let mut files = Vec::new();
    pages(&root(), &mut files);
    assert!(files.len() > 40, "only {} pages were found", files.len());
    let mut checked = 0;
    let mut problems = Vec::new();
    for page in &files {
        let targets = links(&std::fs::read_to_string(page).unwrap());
        checked += targets.len();
        problems.extend(targets.iter().filter_map(|target| problem(page, target)));
    }
    assert!(checked > 100, "only {checked} links were found");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Source files of the product at or below `dir`.
fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Targets `docs/PAGE.md` and `docs/PAGE.md#HEADING` in a source file.
fn named_pages(text: &str) -> Vec<String> {
    let of_target = |c: char| c.is_ascii_alphanumeric() || "/-_.#".contains(c);
    let ends = text.split("docs/").skip(1).map(|rest| rest.split(|c| !of_target(c)).next().unwrap());
    // The dot or colon of the sentence is not a part of the name.
    let ends = ends.map(|end| end.trim_end_matches('.'));
    ends.filter(|end| end.contains(".md")).map(|end| format!("docs/{end}")).collect()
}

#[test]
fn every_page_that_a_message_of_the_product_names_exists() {
    let mut files = Vec::new();
    for dir in ["host", "xtask", "policies"] {
        sources(&root().join(dir), &mut files);
    }
    let mut problems = Vec::new();
    let (mut pages, mut headings) = (0, 0);
    for file in &files {
        for target in named_pages(&std::fs::read_to_string(file).unwrap()) {
            pages += 1;
            headings += usize::from(target.contains('#'));
            // Pages are named from the root.
            let problem = problem(&root().join("README.md"), &target);
            problems.extend(problem.map(|problem| format!("{}: {problem}", file.display())));
        }
    }
    assert!(pages > 10 && headings > 2, "only {pages} pages and {headings} headings are named");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn every_page_is_in_the_table_of_contents() {
    let docs = root().join("docs");
    let summary = std::fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<PathBuf> = links(&summary).iter().map(|target| docs.join(target)).collect();
    let mut files = Vec::new();
    pages(&docs, &mut files);
    let missing: Vec<_> =
        files.iter().filter(|file| !listed.contains(*file) && !file.ends_with("SUMMARY.md")).collect();
    assert!(missing.is_empty(), "not in docs/SUMMARY.md: {missing:?}");
}

#[test]
fn the_check_finds_a_missing_file_and_a_missing_heading() {
    let page = root().join("README.md");
    assert!(problem(&page, "docs/absent.md").is_some());
    assert!(problem(&page, "docs/configuration.md#absent").is_some());
    assert_eq!(problem(&page, "docs/configuration.md#slots"), None);
    let text = "[a](b.md) `[no](c.md)`\n```\n[no](d.md)\n```\n[e](https://f/g.md)";
    assert_eq!(links(text), ["b.md"]);
    let text = "\"see docs/a.md#b-c\", docs/d.md. ../docs/e.md)";
    assert_eq!(named_pages(text), ["docs/a.md#b-c", "docs/d.md", "docs/e.md"]);
}
