//! Checks the links of a built book. The target of a link must be a file of the book, with an element that
//! has the name after `#`.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context as _, ensure};

/// Pages that repeat others: the whole book for printing, and the contents for browsers without scripts.
const REPEATED: [&str; 3] = ["print.html", "toc.html", "404.html"];

/// Returns the number of links in the book. An error lists the links without a target.
pub(super) fn check(book: &Path) -> anyhow::Result<usize> {
    let mut pages = Vec::new();
    html_files(book, &mut pages)?;
    let mut ids = HashMap::new();
    let (mut checked, mut broken) = (0, BTreeSet::new());
    for page in &pages {
        let text = read(page)?;
        ids.insert(page.clone(), values(&text, "id").map(str::to_owned).collect::<BTreeSet<_>>());
    }
    for page in pages.iter().filter(|page| !REPEATED.iter().any(|name| page.ends_with(name))) {
        let text = read(page)?;
        for link in values(&text, "href").chain(values(&text, "src")).filter(|link| is_local(link)) {
            checked += 1;
            if let Some(problem) = problem(book, page, link, &ids) {
                let shown = page.strip_prefix(book).unwrap_or(page).display();
                broken.insert(format!("{shown}: `{link}` {problem}"));
            }
        }
    }
    let lines: Vec<String> = broken.into_iter().collect();
    ensure!(lines.is_empty(), "{} links of the book lead nowhere:\n{}", lines.len(), lines.join("\n"));
    Ok(checked)
}

fn html_files(dir: &Path, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("could not read {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            html_files(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "html") {
            found.push(path);
        }
    }
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))
}

/// Returns the values of an attribute, in the order of the text.
fn values<'t>(text: &'t str, attribute: &str) -> impl Iterator<Item = &'t str> {
    let begin = format!(" {attribute}=\"");
    let mut rest = text;
    std::iter::from_fn(move || {
        let (_, behind) = rest.split_once(&begin)?;
        let (value, behind) = behind.split_once('"')?;
        rest = behind;
        Some(value)
    })
}

fn is_local(link: &str) -> bool {
    !link.is_empty() && !link.contains("://") && !link.starts_with("mailto:") && !link.starts_with("data:")
}

/// Returns the problem of a link of `page`.
fn problem(
    book: &Path,
    page: &Path,
    link: &str,
    ids: &HashMap<PathBuf, BTreeSet<String>>,
) -> Option<&'static str> {
    let (file, id) = link.split_once('#').unwrap_or((link, ""));
    let target = if file.is_empty() { page.to_owned() } else { normal(&page.parent()?.join(file)) };
    if !target.starts_with(book) {
        return Some("leaves the book");
    }
    let target = if target.is_dir() { target.join("index.html") } else { target };
    if !target.is_file() {
        return Some("does not exist");
    }
    let known = id.is_empty() || ids.get(&target).is_none_or(|known| known.contains(id));
    (!known).then_some("names a heading that does not exist")
}

/// Resolves `.` and `..` without reading the file system.
pub(super) fn normal(path: &Path) -> PathBuf {
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
    use std::fs;

    use super::check;

    #[test]
    fn a_missing_page_a_missing_heading_and_a_way_out_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let book = dir.path().canonicalize().unwrap();
        fs::write(book.join("b.html"), "<h1 id=\"there\">B</h1>").unwrap();
        let page = |links: &str| fs::write(book.join("a.html"), links).unwrap();
        page(r##"<a href="b.html#there"><a href="b.html"><a href="https://example.org/x.html">"##);
        assert_eq!(check(&book).unwrap(), 2);
        page(r##"<a href="c.html"><a href="b.html#gone"><a href="../b.html"><img src="d.png">"##);
        let problems = check(&book).unwrap_err().to_string();
        for wanted in ["`c.html` does not", "`b.html#gone` names", "`../b.html` leaves", "`d.png` does not"] {
            assert!(problems.contains(wanted), "{wanted}: {problems}");
        }
    }
}
