//! Checks what a policy says about itself. Names become labels of metrics, receipts and log lines, and a text
//! of a guest can be as long as its memory.

use pointsman_routing::facts::Wants;

use crate::refusal::Refusal;

/// Bytes kept of an error or a reason.
const MAX_TEXT_BYTES: usize = 512;
/// Longest name and longest version, bytes.
const MAX_LABEL_BYTES: usize = 64;
/// Longest name of a fact, bytes.
const MAX_FACT_BYTES: usize = 256;
/// Maximum number of facts of a policy, request and worker facts together.
const MAX_FACTS: usize = 256;

/// Results of `describe` and `configure`.
pub(crate) struct GuestInfo {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) request_facts: Vec<String>,
    pub(crate) worker_facts: Vec<String>,
}

impl GuestInfo {
    /// Resolves the facts that the policy wants, once its name, version and fact names are valid.
    pub(crate) fn check(&self) -> Result<Wants, Refusal> {
        let label = |text: &str| {
            text.len() <= MAX_LABEL_BYTES
                && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.+".contains(&b))
        };
        if self.name.is_empty() || !label(&self.name) {
            return Err(Refusal::BadName { what: "name", text: truncate(self.name.clone()) });
        }
        if !label(&self.version) {
            return Err(Refusal::BadName { what: "version", text: truncate(self.version.clone()) });
        }
        let asked = self.request_facts.len() + self.worker_facts.len();
        if asked > MAX_FACTS {
            return Err(Refusal::TooManyFacts { asked, limit: MAX_FACTS });
        }
        if let Some(fact) =
            self.request_facts.iter().chain(&self.worker_facts).find(|f| f.len() > MAX_FACT_BYTES)
        {
            return Err(Refusal::UnknownFact(truncate(format!(
                "fact name of {} bytes, the limit is {MAX_FACT_BYTES}: {fact}",
                fact.len()
            ))));
        }
        Wants::resolve(&self.request_facts, &self.worker_facts)
            .map_err(|unknown| Refusal::UnknownFact(unknown.to_string()))
    }
}

/// Shortens a text of a guest to [`MAX_TEXT_BYTES`], at a character boundary.
pub(crate) fn truncate(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        text.shrink_to_fit();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(name: &str, facts: Vec<String>) -> GuestInfo {
        GuestInfo { name: name.into(), version: "0.1.0".into(), request_facts: vec![], worker_facts: facts }
    }

    fn kind(about: &GuestInfo) -> &'static str {
        about.check().err().map_or("fine", |refusal| refusal.kind())
    }

    #[test]
    fn invalid_names_and_too_many_facts_are_refused() {
        assert_eq!(kind(&about("kv-aware", vec!["active-requests".into()])), "fine");
        for name in ["", "two\nlines", "a \"quoted\" name", &"n".repeat(65)] {
            assert_eq!(kind(&about(name, vec![])), "bad_name", "{name:?}");
        }
        assert_eq!(kind(&about("n", vec!["active-requests".into(); 257])), "too_many_facts");
        assert_eq!(kind(&about("n", vec![format!("label-is/{}=1", "z".repeat(300))])), "unknown_fact");
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(truncate("short".into()), "short");
        let long = truncate("\u{20ac}".repeat(1_000));
        assert!(long.len() <= MAX_TEXT_BYTES && long.chars().all(|letter| letter == '\u{20ac}'));
    }
}
