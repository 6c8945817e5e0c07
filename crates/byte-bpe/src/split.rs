//! Splits texts into words with the patterns of a tokenizer.
//!
//! Nearly all patterns end with `|\s+(?!\S)|\s+`: a run of white space leaves its last character to the
//! word after it. Automata have no look-ahead, so this ending is replaced by `\s+`, and a match of it gives
//! its last character back. The rest runs on a lazily built DFA, which looks at each byte once.

use regex_automata::{
    Anchored, Input, MatchKind,
    hybrid::dfa::{self, DFA},
    meta,
};

use crate::Unsupported;

/// Ending of a pattern with look-ahead.
const LOOK_AHEAD: &str = r"|\s+(?!\S)|\s+";
/// Replacement of that ending, as the second pattern of the automaton.
const SPACES: &str = r"\s+";
/// Memory of an automaton's states for each thread, bytes. It starts over when they are full.
const STATE_BYTES: usize = 4 << 20;

/// One rule that splits texts.
#[derive(Debug)]
pub(super) struct Splitter {
    rule: Rule,
    /// Whether text that does not match is a word, too; otherwise it is dropped.
    keep_gaps: bool,
}

#[derive(Debug)]
enum Rule {
    /// Matches nearly everywhere: tried at each position.
    Words(Box<DFA>),
    /// Matches somewhere: searched for.
    Some(meta::Regex),
}

/// State of one thread for a [`Splitter`].
#[derive(Debug)]
pub(super) enum SplitCache {
    Words(Box<dfa::Cache>),
    Some(Box<meta::Cache>),
}

impl Splitter {
    /// Compiles a pattern.
    ///
    /// # Errors
    /// Why it is not supported.
    pub(super) fn new(pattern: &str, keep_gaps: bool) -> Result<Self, Unsupported> {
        let unsupported = |why: &dyn std::fmt::Display| Unsupported(format!("pattern `{pattern}`: {why}"));
        if is_possessive(pattern) {
            return Err(unsupported(&"possessive quantifier"));
        }
        let main = pattern.strip_suffix(LOOK_AHEAD);
        // Checks the syntax, too: the ending stands in no group if the rest is a whole pattern.
        let regex = meta::Regex::new(main.unwrap_or(pattern)).map_err(|error| unsupported(&error))?;
        if regex.is_match("") {
            return Err(unsupported(&"it matches the empty text"));
        }
        let rule = match main {
            Some(main) => {
                let config = DFA::config().match_kind(MatchKind::LeftmostFirst).cache_capacity(STATE_BYTES);
                let dfa = DFA::builder().configure(config).build_many(&[main, SPACES]);
                Rule::Words(Box::new(dfa.map_err(|error| unsupported(&error))?))
            }
            None => Rule::Some(regex),
        };
        Ok(Self { rule, keep_gaps })
    }

    pub(super) fn cache(&self) -> SplitCache {
        match &self.rule {
            Rule::Words(dfa) => SplitCache::Words(Box::new(dfa.create_cache())),
            Rule::Some(regex) => SplitCache::Some(Box::new(regex.create_cache())),
        }
    }

    /// Calls `each` with the words of a text, until it returns false. Returns whether it never did, or `None`
    /// if the automaton failed.
    pub(super) fn split<'t>(
        &self,
        text: &'t str,
        cache: &mut SplitCache,
        mut each: impl FnMut(&'t str) -> bool,
    ) -> Option<bool> {
        let (mut at, mut gap) = (0, 0);
        loop {
            let found = match (&self.rule, &mut *cache) {
                (Rule::Words(dfa), SplitCache::Words(cache)) => next_word(dfa, cache, text, at)?,
                (Rule::Some(regex), SplitCache::Some(cache)) => {
                    let found = regex.search_with(cache, &Input::new(text).range(at..));
                    found.map(|found| (found.start(), found.end()))
                }
                _ => return None,
            };
            let (start, end) = found.unwrap_or((text.len(), text.len()));
            if self.keep_gaps && start > gap && !each(text.get(gap..start)?) {
                return Some(false);
            }
            if end > start && !each(text.get(start..end)?) {
                return Some(false);
            }
            if end == text.len() {
                return Some(true);
            }
            (at, gap) = (end, end);
        }
    }
}

/// Returns whether a pattern has a possessive quantifier such as `x*+`, which automata would read as a nested
/// one.
fn is_possessive(pattern: &str) -> bool {
    let (mut class, mut quantifier) = (false, false);
    let mut chars = pattern.chars().peekable();
    while let Some(char) = chars.next() {
        if char == '+' && quantifier {
            return true;
        }
        quantifier = !class && matches!(char, '+' | '*' | '?' | '}');
        match char {
            '[' => class = true,
            ']' => class = false,
            // The braces of `\p{L}` are not a quantifier.
            '\\' if matches!(chars.next(), Some('p' | 'P' | 'x' | 'u')) && chars.peek() == Some(&'{') => {
                chars.by_ref().take_while(|char| *char != '}').for_each(drop);
            }
            _ => {}
        }
    }
    false
}

/// Finds the first word from `at` on. `None` if the automaton failed.
fn next_word(dfa: &DFA, cache: &mut dfa::Cache, text: &str, mut at: usize) -> Option<Option<(usize, usize)>> {
    while at < text.len() {
        let input = Input::new(text).range(at..).anchored(Anchored::Yes);
        let Some(found) = dfa.try_search_fwd(cache, &input).ok()? else {
            at += text.get(at..)?.chars().next()?.len_utf8();
            continue;
        };
        let mut end = found.offset();
        if found.pattern().as_usize() == 1 && end < text.len() {
            let last = text.get(at..end)?.chars().next_back()?.len_utf8();
            if end - last > at {
                end -= last;
            }
        }
        return Some(Some((at, end)));
    }
    Some(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn possessive_quantifiers_are_found_outside_of_classes_and_names() {
        for pattern in ["a++", r"\s*+", "(?:b)?+", r"\p{N}{1,3}+", r"x\pL{2}+", r"[ab]++c", r"\p{L}++"] {
            assert!(is_possessive(pattern), "{pattern}");
        }
        let fine = [
            r"\p{L}+",
            r"[*+,]+x",
            r"a+|\+b",
            r"\p{N}{1,3}|\p{L}+",
            r"\++",
            r"(?:a|b)+",
            r"[^\p{L}++]",
            r"\pL+",
        ];
        for pattern in fine {
            assert!(!is_possessive(pattern), "{pattern}");
        }
    }
}
