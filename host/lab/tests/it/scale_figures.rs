//! Checks that the figures of docs/scale.md follow from its unit costs: computes each row of a result again.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test and its helpers")]

use std::collections::BTreeMap;

/// Values by their name.
type Values = BTreeMap<String, f64>;

/// Returns the cells of the rows of all tables whose first column has this title.
fn rows(page: &str, title: &str) -> Vec<Vec<String>> {
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    let (mut found, mut inside) = (Vec::new(), false);
    for line in page.lines() {
        let row = cells(line);
        inside = line.starts_with('|') && (inside || row[0] == title);
        if inside && row[0] != title && !row[0].starts_with("---") {
            found.push(row);
        }
    }
    found
}

fn number(text: &str) -> f64 {
    text.replace(',', "").parse().unwrap_or_else(|_| panic!("`{text}` is not a number"))
}

/// Computes sums of products and quotients, from left to right: `a * b / c + d`.
fn compute(formula: &str, values: &Values) -> f64 {
    let value = |word: &str| {
        let known = values.get(word).copied();
        known.or_else(|| word.parse().ok()).unwrap_or_else(|| panic!("{word} in `{formula}`"))
    };
    let term = |term: &str| {
        let words: Vec<&str> = term.split_whitespace().collect();
        words[1..].chunks(2).fold(value(words[0]), |product, pair| match pair {
            ["*", word] => product * value(word),
            ["/", word] => product / value(word),
            _ => panic!("`{formula}` is not a sum of products"),
        })
    };
    formula.split(" + ").map(term).sum()
}

#[test]
fn every_figure_follows_from_its_units() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/scale.md")).unwrap();
    let mut values: Values =
        rows(&page, "unit").into_iter().map(|row| (row[0].clone(), number(&row[1]))).collect();
    let results = rows(&page, "figure");
    assert!(values.len() > 8 && results.len() > 8, "{} units, {} figures", values.len(), results.len());
    for row in results {
        let [_, name, shown, formula] = &row[..4] else { panic!("{row:?}") };
        let computed = compute(formula, &values);
        let off = (number(shown) / computed - 1.0).abs();
        assert!(off < 0.01, "{name} is {computed}, not {shown}: `{formula}`");
        values.insert(name.clone(), computed);
    }
}

#[test]
fn a_formula_is_computed_and_an_unknown_name_is_found() {
    let values = Values::from([("a".to_owned(), 6.0), ("b".to_owned(), 4.0)]);
    assert!((compute("a * b / 3 + b", &values) - 12.0).abs() < 1e-9);
    assert!(std::panic::catch_unwind(|| compute("a * c", &values)).is_err());
}
