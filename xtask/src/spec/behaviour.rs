//! Reads the rules and clauses of docs/behaviour.md.

use std::collections::BTreeSet;

/// A rule (`B1`) or an error code (`I_shed`) with its clauses.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) id: String,
    pub(super) clauses: Vec<Clause>,
}

/// One statement that a test can check.
#[derive(Debug)]
pub(super) struct Clause {
    pub(super) id: String,
    /// Beginning of its text.
    pub(super) text: String,
    /// Whether the table of deviations says that this clause is not built. Such a clause needs no test.
    pub(super) deviates: bool,
}

/// Number of characters of a clause's text that are shown.
const SHOWN: usize = 90;

/// Reads the rules in the order of the document, and the problems with their ids.
pub(super) fn read(document: &str) -> (Vec<Rule>, Vec<String>) {
    let (mut rules, mut problems, mut deviations) = (Vec::<Rule>::new(), Vec::new(), BTreeSet::new());
    let mut section = "";
    for line in document.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            section = title;
        }
        if section == "Deviations" {
            deviations.extend(first_cell(line).filter(|cell| is_clause(cell)).map(str::to_owned));
        } else if let Some((id, text)) = item(line) {
            if is_rule(id) {
                rules.push(Rule { id: id.to_owned(), clauses: Vec::new() });
            } else if is_clause(id) {
                add(&mut rules, id, text, &mut problems);
            }
        } else if section.starts_with("I.") {
            rules.extend(error_codes(line));
        }
    }
    let mut seen = BTreeSet::new();
    for rule in &mut rules {
        if rule.clauses.is_empty() {
            problems
                .push(format!("rule {} has no clause: add an item `- {}.1 …` below it", rule.id, rule.id));
        }
        for clause in &mut rule.clauses {
            clause.deviates = deviations.remove(&clause.id);
            if !seen.insert(clause.id.clone()) {
                problems.push(format!("clause {} appears twice: give one of them another number", clause.id));
            }
        }
    }
    let unknown =
        deviations.iter().map(|id| format!("the table of deviations names {id}, which is not a clause"));
    problems.extend(unknown);
    (rules, problems)
}

/// Whether a text is the id of a clause: `B1.2`, `C7a.1`, `I_shed`.
pub(super) fn is_clause(text: &str) -> bool {
    if let Some(code) = text.strip_prefix("I_") {
        return !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    }
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    text.split_once('.').is_some_and(|(rule, clause)| is_rule(rule) && number(clause))
}

/// Whether a text is the id of a rule: `B1`, `C7a`.
fn is_rule(text: &str) -> bool {
    let Some(rest) = text.strip_prefix(|letter: char| ('A'..='S').contains(&letter)) else { return false };
    let digits = rest.strip_suffix(|letter: char| letter.is_ascii_lowercase()).unwrap_or(rest);
    !digits.is_empty() && digits.len() <= 2 && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Adds a clause to its rule. The rule must come before it.
fn add(rules: &mut [Rule], id: &str, text: &str, problems: &mut Vec<String>) {
    let clause = Clause { id: id.to_owned(), text: begin(text), deviates: false };
    let of = id.split_once('.').map_or("", |(rule, _)| rule);
    match rules.iter_mut().find(|rule| rule.id == of) {
        Some(rule) => rule.clauses.push(clause),
        None => problems.push(format!("clause {id} stands before its rule: add an item `- {of} …` above it")),
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

/// Returns the codes in the last column of the table of errors. Each code is a rule, and its own only clause.
fn error_codes(line: &str) -> Vec<Rule> {
    let row = line.strip_prefix('|').map(|row| row.trim_end_matches([' ', '|']));
    let codes = row.and_then(|row| row.rsplit('|').next()).unwrap_or_default();
    let rule = |code: &str| {
        let (id, text) = (format!("I_{code}"), begin(line.trim_matches([' ', '|'])));
        let clause = Clause { id: id.clone(), text, deviates: false };
        Rule { id, clauses: vec![clause] }
    };
    codes.split('`').skip(1).step_by(2).map(rule).collect()
}

fn begin(text: &str) -> String {
    text.chars().take(SHOWN).collect()
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
        let (rules, problems) = read(DOCUMENT);
        assert!(problems.is_empty(), "{problems:?}");
        let clauses: Vec<_> = rules.iter().flat_map(|rule| &rule.clauses).collect();
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
        for id in ["B1", "T1.1", "B.1", "B1.", "I_", "I_Shed", "B1.2a", "b1.2", "B123.1"] {
            assert!(!is_clause(id), "{id}");
        }
    }

    #[test]
    fn the_page_of_errors_shows_every_code_of_the_table() {
        let page = |name: &str| std::fs::read_to_string(crate::sh::root().join("docs").join(name)).unwrap();
        let (rules, _) = super::read(&page("behaviour.md"));
        let codes = rules.iter().filter_map(|rule| rule.id.strip_prefix("I_"));
        let errors = page("errors.md");
        let shown = errors.lines().filter_map(|line| line.strip_prefix("## `")?.strip_suffix('`'));
        assert_eq!(shown.collect::<BTreeSet<_>>(), codes.collect::<BTreeSet<_>>());
    }
}
