//! Reads the rules (`B1`) and clauses (`B1.2`) of docs/behaviour.md.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use regex::Regex;

/// A statement that a test can check, or an error code.
#[derive(Debug)]
pub(super) struct Clause {
    /// `B1.2`, `C7a.1`, `I_shed`.
    pub(super) id: String,
    /// Beginning of its text.
    pub(super) text: String,
    /// Whether the table of deviations says that this clause is not built. Such a clause needs no test.
    pub(super) deviates: bool,
}

/// Number of characters of a clause's text that are shown.
const SHOWN: usize = 90;

#[expect(clippy::unwrap_used, reason = "a test reads both patterns")]
static IS_RULE: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^[A-T][0-9]{1,2}[a-z]?$").unwrap());
#[expect(clippy::unwrap_used, reason = "a test reads both patterns")]
static IS_CLAUSE: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"^(I_[a-z_]+|[A-T][0-9]{1,2}[a-z]?\.[0-9]+)$").unwrap());

/// Reads the clauses in the order of the document, and the problems with their ids.
pub(super) fn read(document: &str) -> (Vec<Clause>, Vec<String>) {
    let (mut clauses, mut problems, mut deviations) = (Vec::<Clause>::new(), Vec::new(), BTreeSet::new());
    // Number of clauses of each rule.
    let mut rules = BTreeMap::<&str, usize>::new();
    let mut section = "";
    for line in document.lines() {
        section = line.strip_prefix("## ").unwrap_or(section);
        if section == "Deviations" {
            deviations.extend(first_cell(line).filter(|cell| is_clause(cell)));
        } else if let Some((id, text)) = item(line) {
            if IS_RULE.is_match(id) {
                rules.entry(id).or_default();
            } else if is_clause(id) {
                let rule = id.split_once('.').map_or("", |(rule, _)| rule);
                match rules.get_mut(rule) {
                    Some(count) => *count += 1,
                    None => problems.push(format!(
                        "clause {id} stands before its rule: add an item `- {rule} …` above it"
                    )),
                }
                clauses.push(Clause::new(id.to_owned(), text));
            }
        } else if section.starts_with("I.") {
            clauses.extend(error_codes(line));
        }
    }
    let empty = rules.iter().filter(|(_, count)| **count == 0);
    problems.extend(
        empty.map(|(rule, _)| format!("rule {rule} has no clause: add an item `- {rule}.1 …` below it")),
    );
    let mut seen = BTreeSet::new();
    for clause in &mut clauses {
        clause.deviates = deviations.remove(clause.id.as_str());
        if !seen.insert(clause.id.clone()) {
            problems.push(format!("clause {} appears twice: give one of them another number", clause.id));
        }
    }
    let unknown =
        deviations.iter().map(|id| format!("the table of deviations names {id}, which is not a clause"));
    problems.extend(unknown);
    (clauses, problems)
}

/// Whether a text is the id of a clause.
pub(super) fn is_clause(text: &str) -> bool {
    IS_CLAUSE.is_match(text)
}

impl Clause {
    fn new(id: String, text: &str) -> Self {
        Self { id, text: text.chars().take(SHOWN).collect(), deviates: false }
    }
}

/// Returns the id and the text of a list item, or of a table row that begins with the id of a clause.
fn item(line: &str) -> Option<(&str, &str)> {
    let trimmed = line.trim_start();
    if let Some(item) = trimmed.strip_prefix("- ") {
        return item.split_once(' ');
    }
    let id = first_cell(line).filter(|cell| is_clause(cell))?;
    let text = trimmed.trim_start_matches('|').trim_start().strip_prefix(id)?;
    Some((id, text.trim_matches([' ', '|'])))
}

/// Returns the first cell of a table row.
fn first_cell(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix('|')?.split('|').next().map(str::trim)
}

/// Returns the codes in the last column of the table of errors.
fn error_codes(line: &str) -> Vec<Clause> {
    let row = line.strip_prefix('|').map(|row| row.trim_end_matches([' ', '|']));
    let codes = row.and_then(|row| row.rsplit('|').next()).unwrap_or_default();
    let clause = |code: &str| Clause::new(format!("I_{code}"), line.trim_matches([' ', '|']));
    codes.split('`').skip(1).step_by(2).map(clause).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{is_clause, read};

    const DOCUMENT: &str = "# Rules\n- B1 No workers.\n  - B1.1 It fails,\n    and so on.\n  - B1.2 Or not.\n- word\n\
        - E1 A table:\n\n  | clause | state |\n  | --- | --- |\n  | E1.1 | queued | freed |\n## I. Errors\n\
        | bad | 400 | `bad_one` / `bad_two` |\n## Deviations\n| B1.2 | not built |\n| C6 | partly |\n";

    #[test]
    fn items_rows_and_codes_are_clauses() {
        let (clauses, problems) = read(DOCUMENT);
        assert!(problems.is_empty(), "{problems:?}");
        let ids: Vec<_> = clauses.iter().map(|clause| clause.id.as_str()).collect();
        assert_eq!(ids, ["B1.1", "B1.2", "E1.1", "I_bad_one", "I_bad_two"]);
        let texts: Vec<_> = clauses.iter().map(|clause| clause.text.as_str()).collect();
        assert_eq!(texts[..3], ["It fails,", "Or not.", "queued | freed"]);
        assert_eq!(clauses.iter().map(|clause| clause.deviates).collect::<Vec<_>>()[..2], [false, true]);
    }

    #[test]
    fn wrong_ids_are_problems() {
        let wrong =
            "- B1 A rule.\n- B2 Another.\n  - B2.1 x\n  - B2.1 y\n  - C1.1 z\n## Deviations\n| B7.1 | x |\n";
        let (_, problems) = read(wrong);
        let starts = ["clause C1.1 stands before", "rule B1 has no clause", "clause B2.1 appears twice"];
        for start in starts {
            assert!(problems.iter().any(|problem| problem.starts_with(start)), "{start}: {problems:?}");
        }
        assert!(problems.iter().any(|problem| problem.contains("names B7.1")), "{problems:?}");
    }

    #[test]
    fn ids_of_clauses_are_told_apart() {
        for id in ["B1.2", "C7a.1", "A5.12", "I_shed", "I1.3"] {
            assert!(is_clause(id), "{id}");
        }
        for id in ["B1", "U1.1", "B.1", "B1.", "I_", "I_Shed", "B1.2a", "b1.2", "B123.1"] {
            assert!(!is_clause(id), "{id}");
        }
    }

    #[test]
    fn the_page_of_errors_shows_every_code_of_the_table() {
        let page = |name: &str| std::fs::read_to_string(crate::sh::root().join("docs").join(name)).unwrap();
        let (clauses, _) = super::read(&page("behaviour.md"));
        let codes = clauses.iter().filter_map(|clause| clause.id.strip_prefix("I_"));
        let errors = page("errors.md");
        let shown = errors.lines().filter_map(|line| line.strip_prefix("## `")?.strip_suffix('`'));
        assert_eq!(shown.collect::<BTreeSet<_>>(), codes.collect::<BTreeSet<_>>());
    }
}
