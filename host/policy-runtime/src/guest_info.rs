//! What a policy says of itself, and whether a host can live with it: names are labels of metrics, receipts and log lines, and any
//! text of a guest may be as long as its memory.

use pointsman_routing::facts::Wants;

use crate::refusal::Refusal;

/// Bytes kept of a text that a guest answers: an error, a reason.
const TEXT: usize = 512;
/// Bytes of a policy's name, and of its version.
const NAME: usize = 64;
/// Bytes of a fact's name.
const FACT: usize = 256;
/// Facts of a policy, those of the request and of candidates together.
const FACTS: usize = 256;

/// What a policy says of itself at load.
pub(crate) struct GuestInfo {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) request_facts: Vec<String>,
    pub(crate) worker_facts: Vec<String>,
}

impl GuestInfo {
    /// The facts it wants, once everything it says can be shown.
    pub(crate) fn check(&self) -> Result<Wants, Refusal> {
        let label = |text: &str| {
            text.len() <= NAME && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.+".contains(&b))
        };
        if self.name.is_empty() || !label(&self.name) {
            return Err(Refusal::BadName { what: "name", text: truncate(self.name.clone()) });
        }
        if !label(&self.version) {
            return Err(Refusal::BadName { what: "version", text: truncate(self.version.clone()) });
        }
        let asked = self.request_facts.len() + self.worker_facts.len();
        if asked > FACTS {
            return Err(Refusal::TooManyFacts { asked, limit: FACTS });
        }
        if let Some(fact) = self.request_facts.iter().chain(&self.worker_facts).find(|f| f.len() > FACT) {
            return Err(Refusal::UnknownFact(truncate(format!(
                "a fact's name of {} bytes: {fact}",
                fact.len()
            ))));
        }
        Wants::resolve(&self.request_facts, &self.worker_facts)
            .map_err(|unknown| Refusal::UnknownFact(unknown.to_string()))
    }
}

/// A guest's text, short enough to keep.
pub(crate) fn truncate(mut text: String) -> String {
    if text.len() > TEXT {
        text.truncate(text.floor_char_boundary(TEXT));
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
    fn a_name_that_is_no_label_is_refused_as_are_too_many_facts() {
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
        assert!(long.len() <= TEXT && long.chars().all(|letter| letter == '\u{20ac}'));
    }
}
