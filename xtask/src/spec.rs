//! `spec`: lists the clauses of docs/behaviour.md with the assertions that prove them.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};

use crate::sh;

mod behaviour;
mod marks;

use marks::Mark;

/// Options of `spec`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print only problems.
    #[arg(long)]
    pub(crate) short: bool,
}

/// Prints every clause with the assertions that name it (`// B1.2`). Reads only sources and builds nothing.
///
/// # Errors
/// A clause has no assertion, or an id is wrong.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let document = std::fs::read_to_string(sh::root().join("docs/behaviour.md"))?;
    let (clauses, mut problems) = behaviour::read(&document);
    ensure!(clauses.len() > 40, "docs/behaviour.md has only {} clauses", clauses.len());
    let marks = all_marks(&mut problems)?;
    let (mut untested, mut deviating) = (0, 0);
    for clause in &clauses {
        let proofs = marks.get(&clause.id).map_or(&[][..], Vec::as_slice);
        let missing = proofs.is_empty() && !clause.deviates;
        untested += usize::from(missing);
        deviating += usize::from(clause.deviates);
        let count = if clause.deviates { "deviates".to_owned() } else { proofs.len().to_string() };
        if !args.short || missing {
            sh::print(&format!("{:<27} {count:>8}  {}", clause.id, clause.text));
        }
        for Mark { file, line, function, .. } in proofs.iter().filter(|_| !args.short) {
            sh::print(&format!("{:>38}{file}:{line}  {function}", ""));
        }
    }
    for (id, marks) in marks.iter().filter(|(id, _)| !clauses.iter().any(|clause| clause.id == **id)) {
        for Mark { file, line, .. } in marks {
            problems.push(format!("{file}:{line}: docs/behaviour.md has no clause {id}"));
        }
    }
    problems.iter().for_each(|problem| sh::print(problem));
    let (count, proofs) = (clauses.len(), marks.values().map(Vec::len).sum::<usize>());
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

/// Returns the marks of every Rust file of the repository, by clause.
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
