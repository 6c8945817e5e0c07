//! `spec`: the rules of docs/behaviour.md with the tests that are named after them, or its clauses with the
//! assertions that prove them.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::sh;

mod behaviour;
mod functions;
mod marks;

use behaviour::Rule;
use marks::Mark;

/// Options of `spec`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// List clauses with the assertions that name them (`// B1.2`). Reads sources only, builds nothing.
    #[arg(long)]
    clauses: bool,
    /// Print counts only.
    #[arg(long)]
    short: bool,
}

impl Args {
    /// The check of CI: clauses, and only those without a test are printed.
    pub(crate) fn check() -> Self {
        Self { clauses: true, short: true }
    }
}

/// Prints the table; returns an error when a rule or a clause has no test.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let document = std::fs::read_to_string(sh::root().join("docs/behaviour.md"))?;
    let (rules, mut problems) = behaviour::read(&document);
    ensure!(rules.len() > 40, "docs/behaviour.md has only {} rules", rules.len());
    let marks = all_marks(&mut problems)?;
    if args.clauses { clauses(args, &rules, &marks, problems) } else { named_tests(args, &rules, &marks) }
}

/// Prints every clause with the assertions that prove it.
fn clauses(
    args: &Args,
    rules: &[Rule],
    marks: &BTreeMap<String, Vec<Mark>>,
    mut problems: Vec<String>,
) -> anyhow::Result<()> {
    let all = || rules.iter().flat_map(|rule| &rule.clauses);
    let (mut untested, mut deviating) = (0, 0);
    for clause in all() {
        let proofs = marks.get(&clause.id).map_or(&[][..], Vec::as_slice);
        let missing = proofs.is_empty() && !clause.deviates;
        untested += usize::from(missing);
        deviating += usize::from(clause.deviates);
        let count = if clause.deviates { "deviates".to_owned() } else { proofs.len().to_string() };
        if !args.short || missing {
            sh::print(&format!("{:<27} {count:>8}  {}", clause.id, clause.text));
        }
        for Mark { file, line, tests, .. } in proofs.iter().filter(|_| !args.short) {
            sh::print(&format!("{:>38}{file}:{line}  {}", "", tests.join(", ")));
        }
    }
    for (id, marks) in marks.iter().filter(|(id, _)| !all().any(|clause| clause.id == **id)) {
        for Mark { file, line, .. } in marks {
            problems.push(format!("{file}:{line}: docs/behaviour.md has no clause {id}"));
        }
    }
    problems.iter().for_each(|problem| sh::print(problem));
    let (count, proofs) = (all().count(), marks.values().map(Vec::len).sum::<usize>());
    sh::print(&format!(
        "{count} clauses, {proofs} proofs, {deviating} listed as deviations, {untested} without a test"
    ));
    ensure!(problems.is_empty(), "{} ids of clauses or their places are wrong", problems.len());
    ensure!(
        untested == 0,
        "{untested} clauses have no test: write one and put `// <id>` above the assertion that proves the clause"
    );
    Ok(())
}

/// Prints every rule with the tests whose names begin with its number.
fn named_tests(args: &Args, rules: &[Rule], marks: &BTreeMap<String, Vec<Mark>>) -> anyhow::Result<()> {
    let tests = tests()?;
    let (mut empty, mut count) = (Vec::new(), 0);
    for rule in rules {
        let prefix = format!("{}_", rule.id.to_lowercase());
        let named: Vec<&String> = tests.iter().filter(|name| name.starts_with(&prefix)).collect();
        sh::print(&format!("{:<24} {:>3}  {}", rule.id, named.len(), rule.text));
        if !args.short {
            named.iter().for_each(|name| sh::print(&format!("{:>28} {name}", "")));
        }
        count += named.len();
        if named.is_empty() && !rule.clauses.iter().any(|clause| marks.contains_key(&clause.id)) {
            empty.push(rule.id.as_str());
        }
    }
    sh::print(&format!("{} rules, {count} tests named after one, of {}", rules.len(), tests.len()));
    ensure!(empty.is_empty(), "rules without a test: {}", empty.join(", "));
    Ok(())
}

/// Marks of every Rust file of the repository, by clause.
fn all_marks(problems: &mut Vec<String>) -> anyhow::Result<BTreeMap<String, Vec<Mark>>> {
    let mut by_clause = BTreeMap::<String, Vec<Mark>>::new();
    for file in sh::tracked_files(".rs")? {
        let (path, name) = (sh::root().join(&file), file.display().to_string());
        // This program's own tests contain examples of marks.
        if name.starts_with("xtask/") || !path.is_file() {
            continue;
        }
        let source = std::fs::read_to_string(&path).with_context(|| format!("could not read {name}"))?;
        let (found, wrong) = marks::marks(&name, &source);
        problems.extend(wrong);
        for mark in found {
            by_clause.entry(mark.clause.clone()).or_default().push(mark);
        }
    }
    Ok(by_clause)
}

/// Names of all tests, without their modules.
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
