//! The report: the result for each part of the source.

use std::fmt;

/// Maximum length of a source's text in a message or a comment, characters.
const MAX_SHOWN: usize = 120;

/// Position of a part of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// A part that the source leaves to its default.
    Default,
    /// Line of a file, from 1.
    Line(usize),
    /// Argument of a command line, from 1.
    Argument(usize),
}

/// Result of translating a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The result does the same.
    Translated,
    /// The result does something similar.
    Approximated,
    /// The result does not do it.
    Missing,
}

/// Results of translating all parts.
#[derive(Debug, Default)]
pub(crate) struct Report {
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    kind: Kind,
    place: Place,
    theirs: String,
    ours: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Line(line) => write!(f, "line {line}"),
            Self::Argument(argument) => write!(f, "argument {argument}"),
        }
    }
}

impl Report {
    /// Adds the result for the part `theirs`. For an approximation, `ours` says how it differs; for a part
    /// without a counterpart, it says what to do.
    pub(crate) fn add(
        &mut self,
        kind: Kind,
        place: Place,
        theirs: impl Into<String>,
        ours: impl Into<String>,
    ) {
        self.entries.push(Entry { kind, place, theirs: theirs.into(), ours: ours.into() });
    }

    /// Returns whether a part has no counterpart.
    pub(crate) fn has_missing(&self) -> bool {
        self.count(Kind::Missing) > 0
    }

    /// Returns whether an entry is about this part.
    pub(crate) fn mentions(&self, theirs: &str) -> bool {
        self.entries.iter().any(|entry| entry.theirs == theirs)
    }

    fn count(&self, kind: Kind) -> usize {
        self.entries.iter().filter(|entry| entry.kind == kind).count()
    }

    /// Returns the report as lines for a person.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for (kind, title) in [
            (Kind::Translated, "translated"),
            (Kind::Approximated, "approximated, and how it differs"),
            (Kind::Missing, "without counterpart, and what to do"),
        ] {
            let mut entries: Vec<&Entry> = self.entries.iter().filter(|entry| entry.kind == kind).collect();
            entries.sort_by_key(|entry| entry.place);
            if !entries.is_empty() {
                text.push_str(&format!("{title}:\n"));
            }
            for entry in entries {
                text.push_str(&format!("  {}: {} -> {}\n", entry.place, plain(&entry.theirs), entry.ours));
            }
        }
        let count = |kind| self.count(kind);
        text.push_str(&format!(
            "pointsman: {} translated, {} approximated, {} without counterpart\n",
            count(Kind::Translated),
            count(Kind::Approximated),
            count(Kind::Missing)
        ));
        text
    }
}

/// Returns a text of the source as one line without control characters and marks that reorder text, cut at
/// [`MAX_SHOWN`] characters. It cannot leave a comment or forge a line.
pub(crate) fn plain(text: &str) -> String {
    let mut shown = String::new();
    for letter in text.chars().take(MAX_SHOWN) {
        if is_hidden(letter) { shown.extend(letter.escape_unicode()) } else { shown.push(letter) }
    }
    if text.chars().nth(MAX_SHOWN).is_some() {
        shown.push('…');
    }
    shown
}

/// Returns whether a letter breaks lines, reorders text, or is not seen.
pub(crate) fn is_hidden(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{2028}' | '\u{2029}' | '\u{200e}' | '\u{200f}' | '\u{61c}' | '\u{feff}')
        || ('\u{202a}'..='\u{202e}').contains(&letter)
        || ('\u{2066}'..='\u{2069}').contains(&letter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s1_the_report_groups_by_outcome_and_orders_by_place() {
        let mut report = Report::default();
        report.add(Kind::Missing, Place::Line(9), "plugin `x`", "nothing");
        report.add(Kind::Translated, Place::Line(7), "plugin `b`", "key b");
        report.add(Kind::Translated, Place::Default, "port", "key a");
        report.add(Kind::Translated, Place::Line(2), "plugin `a`", "key a");
        let text = report.text();
        let at = |part: &str| text.find(part).unwrap();
        assert!(at("  default: port") < at("  line 2: plugin `a`"));
        assert!(at("  line 2") < at("  line 7") && at("  line 7") < at("without counterpart"));
        // S1.2
        assert!(text.ends_with("pointsman: 3 translated, 0 approximated, 1 without counterpart\n"), "{text}");
        assert!(report.has_missing());
    }

    #[test]
    fn s1_names_of_the_source_stay_on_their_line() {
        // S1.5
        assert_eq!(plain("a\nb\r\u{1b}[1m\u{202e}\u{2028}"), "a\\u{a}b\\u{d}\\u{1b}[1m\\u{202e}\\u{2028}");
        assert_eq!(plain(&"é".repeat(500)).chars().count(), MAX_SHOWN + 1);
    }
}
