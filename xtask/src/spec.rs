//! `spec`: every number of docs/behaviour.md with the tests whose names begin with it, as the test runner lists them.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::sh;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Count only; do not list the tests.
    #[arg(long)]
    short: bool,
}

/// Prints the table; an error when a number has no test.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let behaviour = std::fs::read_to_string(sh::root().join("docs/behaviour.md"))?;
    let numbers = numbers(&behaviour);
    ensure!(numbers.len() > 40, "docs/behaviour.md has only {} numbers", numbers.len());
    let tests = tests()?;
    let (mut empty, mut named_tests) = (Vec::new(), 0);
    for (number, says) in &numbers {
        let prefix = format!("{}_", number.to_lowercase());
        let named: Vec<&String> = tests.iter().filter(|name| name.starts_with(&prefix)).collect();
        sh::print(&format!("{number:<24} {:>3}  {says}", named.len()));
        if !args.short {
            named.iter().for_each(|name| sh::print(&format!("{:>28} {name}", "")));
        }
        named_tests += named.len();
        if named.is_empty() {
            empty.push(number.as_str());
        }
    }
    sh::print(&format!("{} numbers, {named_tests} tests named by one, of {}", numbers.len(), tests.len()));
    ensure!(empty.is_empty(), "no test for: {}", empty.join(", "));
    Ok(())
}

/// The numbers with the beginning of their text: items `- X1 …`, and rows of table I as `I_<code>`.
fn numbers(text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut errors = false;
    for line in text.lines() {
        if line.starts_with("## ") {
            errors = line.starts_with("## I.");
        }
        if let Some((number, says)) = line.strip_prefix("- ").and_then(|item| item.split_once(' '))
            && is_number(number)
        {
            found.insert(number.to_owned(), says.chars().take(80).collect());
        } else if errors
            && line.starts_with('|')
            && let Some(codes) = line.trim_end_matches(" |").rsplit('|').next()
        {
            for code in codes.split('`').skip(1).step_by(2) {
                found.insert(format!("I_{code}"), line.chars().take(80).collect());
            }
        }
    }
    found
}

fn is_number(word: &str) -> bool {
    let mut letters = word.chars();
    letters.next().is_some_and(|first| ('A'..='H').contains(&first))
        && letters.next().is_some_and(|second| second.is_ascii_digit())
        && word.len() <= 4
}

fn tests() -> anyhow::Result<Vec<String>> {
    let mut list = sh::cargo();
    list.args(["nextest", "list", "--workspace", "--message-format", "json"]);
    let output = list.output().context("could not run cargo nextest; cargo install cargo-nextest")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed: Value = serde_json::from_slice(&output.stdout)?;
    let suites = listed["rust-suites"].as_object().context("no suites")?.values();
    let cases = suites.flat_map(|suite| suite["testcases"].as_object().into_iter().flatten());
    Ok(cases.map(|(name, _)| name.rsplit("::").next().unwrap_or(name).to_owned()).collect())
}
