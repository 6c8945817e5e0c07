//! `spec`: every number of docs/behaviour.md with the tests whose names begin with it.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::sh;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print counts only.
    #[arg(long)]
    short: bool,
}

/// Prints the table; returns an error when a number has no test.
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
    ensure!(empty.is_empty(), "numbers without a test: {}", empty.join(", "));
    Ok(())
}

/// Numbers with the beginning of their text: items `- X1 …`, and codes in the table of errors as `I_<code>`.
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

fn is_number(text: &str) -> bool {
    let mut letters = text.chars();
    letters.next().is_some_and(|first| ('A'..='H').contains(&first))
        && letters.next().is_some_and(|second| second.is_ascii_digit())
        && text.len() <= 4
}

fn tests() -> anyhow::Result<Vec<String>> {
    let mut list = sh::cargo();
    list.args(["nextest", "list", "--workspace", "--message-format", "json"]);
    let output = list.output().context("could not start cargo nextest: cargo install cargo-nextest")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed: Value = serde_json::from_slice(&output.stdout)?;
    let suites = listed["rust-suites"].as_object().context("cargo nextest listed no suites")?.values();
    let cases = suites.flat_map(|suite| suite["testcases"].as_object().into_iter().flatten());
    Ok(cases.map(|(name, _)| name.rsplit("::").next().unwrap_or(name).to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::numbers;

    #[test]
    fn items_and_error_codes_are_numbers() {
        let text = "- A1 The first rule.\n- Z9 not a section\n- word\n## I. Errors\n| 504 | why | `deadline`, `timeout` |\n\
                    ## J.\n| `x` |\n- H12b The last.\n";
        let found: Vec<String> = numbers(text).into_keys().collect();
        assert_eq!(found, ["A1", "H12b", "I_deadline", "I_timeout"]);
    }
}
