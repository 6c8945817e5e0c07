//! Functions of a formatted Rust file, found by their indentation.

use std::{collections::BTreeSet, ops::RangeInclusive};

#[derive(Debug)]
pub(super) struct Function {
    pub(super) name: String,
    /// Lines from its `fn` to its closing brace, counted from 0.
    pub(super) lines: RangeInclusive<usize>,
    /// Whether a normal run of the tests runs it as a test.
    is_test: bool,
}

/// Finds every function that has a body.
pub(super) fn functions(lines: &[&str]) -> Vec<Function> {
    let found = lines.iter().enumerate().filter_map(|(start, line)| {
        let name = name(line)?;
        let end = end(lines, start)?;
        Some(Function { name, lines: start..=end, is_test: is_test(lines, start) })
    });
    found.collect()
}

/// Returns the name of the function if it is a test, and the names of the tests that call it directly or
/// through functions of the same file.
pub(super) fn tests_that_call(function: &Function, functions: &[Function], lines: &[&str]) -> Vec<String> {
    let (mut tests, mut seen) = (BTreeSet::new(), BTreeSet::new());
    let mut open = vec![function];
    while let Some(function) = open.pop() {
        if !seen.insert(*function.lines.start()) {
            continue;
        }
        if function.is_test {
            tests.insert(function.name.clone());
            continue;
        }
        let calls = |other: &&Function| {
            let body = lines.get(other.lines.clone()).unwrap_or_default();
            body.iter().skip(1).any(|line| mentions(line, &function.name))
        };
        open.extend(functions.iter().filter(calls));
    }
    tests.into_iter().collect()
}

/// Whether a line contains the name as a whole word.
fn mentions(line: &str, name: &str) -> bool {
    let in_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    line.match_indices(name).any(|(at, _)| {
        let before = line.get(..at).and_then(|text| text.chars().next_back());
        let after = line.get(at + name.len()..).and_then(|text| text.chars().next());
        !before.is_some_and(in_name) && !after.is_some_and(in_name)
    })
}

/// Returns the name of the function that begins on a line.
fn name(line: &str) -> Option<String> {
    let (before, after) = line.split_once("fn ")?;
    let qualifiers = ["pub", "pub(crate)", "pub(super)", "async", "const", "unsafe"];
    if !before.split_whitespace().all(|word| qualifiers.contains(&word)) {
        return None;
    }
    let name: String =
        after.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
    (!name.is_empty()).then_some(name)
}

/// Returns the line of the closing brace, which is indented like the function's first line.
fn end(lines: &[&str], start: usize) -> Option<usize> {
    let first = lines.get(start)?;
    if first.ends_with('}') {
        return Some(start);
    }
    let indentation = first.len() - first.trim_start().len();
    let closes = |line: &&str| line.trim() == "}" && line.len() == indentation + 1;
    let rest = lines.iter().enumerate().skip(start);
    rest.take_while(|(_, line)| !line.ends_with(';') || line.starts_with(' ') || line.is_empty())
        .find(|(_, line)| closes(line))
        .map(|(number, _)| number)
}

/// Whether the attributes above a function make it a test that is not ignored.
fn is_test(lines: &[&str], start: usize) -> bool {
    let above = lines.iter().take(start).rev().map(|line| line.trim());
    let attributes: Vec<&str> =
        above.take_while(|line| !line.is_empty() && !line.ends_with(['}', ';', '{'])).collect();
    let has = |names: &[&str]| attributes.iter().any(|line| names.iter().any(|name| line.starts_with(name)));
    has(&["#[test]", "#[tokio::test"]) && !has(&["#[ignore"])
}
